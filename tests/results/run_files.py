"""Flags of a run that takes seconds, and what a run of a recipe left in its output folder."""

import json
import os
from pathlib import Path
from typing import Any

from harness.training import Run

ROOT = Path(__file__).resolve().parents[2]  # of the repository
TINY = "--layers 1 --width 32 --vocab_size 300 --block_size 16 --batch_size 4 --baseline_steps 5 --steps 4"
TINY += " --eval_every 2 --save_every 2 --heldout_blocks 20 --curve_blocks 6 --warmup_steps 2"


def words(*flags):
    """Those of flags, of which one may have several; a path is a word, whatever its folders are called."""
    split = [[flag] if isinstance(flag, Path) or os.path.exists(flag) else str(flag).split() for flag in flags]
    return [str(word) for flag in split for word in flag]


def tiny(out, text, *more):
    """Flags of a run that trains; `more` are words or several of them."""
    return words(TINY, "--text", text, "--output_dir", out, *more)


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
