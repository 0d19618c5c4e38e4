"""What a run of a recipe left in its output folder."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]  # of the repository


def read_results(out: Path) -> dict[str, Any]:
    return json.loads((Path(out) / "results.json").read_text())
