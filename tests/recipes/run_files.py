"""Flags of a run that takes seconds, and what a run of a recipe left in its output folder."""

import json
import os
from pathlib import Path
from typing import Any

from hfrecipes.training import Run

ROOT = Path(__file__).resolve().parents[2]  # of the repository
TINY = "--layers 1 --width 32 --vocab_size 300 --block_size 16 --batch_size 4 --baseline_steps 5 --steps 4"
TINY += " --tracker none --eval_every 2 --save_every 2 --heldout_blocks 20 --curve_blocks 6 --warmup_steps 2"


def words(*flags):
    """Those of flags, of which one may have several; a path is a word, whatever its folders are called."""
    split = [[flag] if isinstance(flag, Path) or os.path.exists(flag) else str(flag).split() for flag in flags]
    return [str(word) for flag in split for word in flag]


def tiny(out, text, *more, variants="dyt rms+rope control"):
    """Flags of finetune.py; `more` are words or several of them. Of heal.py and compare.py with `variants=""`."""
    named = ["--text", text, "--output_dir", out, *([f"--variants {variants}"] if variants else []), *more]
    return words(TINY, *named)


def read_results(out: Path) -> dict[str, Any]:
    return json.loads((Path(out) / "results.json").read_text())


def figures(out: Path) -> dict[str, Any]:
    """What must not depend on how often a run was stopped."""
    kept = ("step", "start", "end", "curve", "train_loss", "parameters")
    results = read_results(out)
    stages = {name: {k: stage.get(k) for k in kept} for name, stage in results["stages"].items()}
    return stages | ({"agreement": results["agreement"]} if "agreement" in results else {})


def at_step(monkeypatch, where, act):
    """Have `act` done when a step begins."""
    train_step = Run.train_step

    def acting(self, step, *args):
        if step == where:
            act()
        return train_step(self, step, *args)

    monkeypatch.setattr(Run, "train_step", acting)


def write_table(path, rows):
    """Rows as a csv, tsv, json, jsonl or parquet file, by its suffix. Returns its path as a flag takes it."""
    import pandas as pd

    frame = pd.DataFrame(rows)
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        frame.to_parquet(path)
    elif suffix in (".csv", ".tsv"):
        frame.to_csv(path, sep="\t" if suffix == ".tsv" else ",", index=False)
    else:
        frame.to_json(path, orient="records", lines=suffix == ".jsonl")
    return str(path)
