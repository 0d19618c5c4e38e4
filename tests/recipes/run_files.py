"""What a run of a recipe left in its output folder."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # of the repository


def read_results(out: Path) -> dict[str, Any]:
    return json.loads((Path(out) / "results.json").read_text())


def figures(out: Path) -> dict[str, Any]:
    """What must not depend on how often a run was stopped."""
    kept = ("step", "start", "end", "curve", "train_loss", "parameters")
    results = read_results(out)
    stages = {name: {k: stage.get(k) for k in kept} for name, stage in results["stages"].items()}
    return stages | ({"agreement": results["agreement"]} if "agreement" in results else {})


def write_table(path, rows):
    """Rows as a csv, tsv, json, jsonl or parquet file, by its suffix. Returns its path as a flag takes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix in (".csv", ".tsv"):
        import csv

        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = [json.dumps(row, ensure_ascii=False) for row in rows]
        path.write_text("\n".join(lines) if path.suffix == ".jsonl" else f"[{','.join(lines)}]", "utf-8")
    return str(path)
