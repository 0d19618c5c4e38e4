"""Every model type that rotates queries and keys by itself: what position schemes make of its rotation.

    python tests/sweeps/native_rope.py [model_type ...] [--json FILE]

One tiny random model each. `same`: pos=RoPE() leaves every bit of the outputs. `theta`, `linear`, `partial`: the
patched model against one that transformers builds from a config with those settings, bit for bit. `nope`: dropping the
rotation changes the outputs. A refusal is shown with its first words.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

sys.path.insert(0, str(Path(__file__).parents[1]))
from zoo import Unbuildable, last_line, model_types, tiny

from hfpatch import NoPE, PatchError, Position, RoPE, patch_model
from hfpatch.convert.randomness import own_randomness
from hfpatch.convert.run import outputs_of
from hfpatch.native_rope import find_rotations

CHECKS: dict[str, tuple[Position, dict[str, Any] | None]] = {
    "same": (RoPE(), {}),
    "theta": (RoPE(theta=777.0), {"rope_theta": 777.0}),
    "linear": (RoPE(scaling={"rope_type": "linear", "factor": 3.0}), {"rope_type": "linear", "factor": 3.0}),
    "partial": (RoPE(partial=0.25), {"partial_rotary_factor": 0.25}),
    "nope": (NoPE(), None),
}


def run(model: Any, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    with own_randomness(0), torch.no_grad():
        return outputs_of(model, given)


def by_config(config: PretrainedConfig, settings: dict[str, Any]) -> PretrainedConfig:
    """A copy of a config with these settings in each of its parts that says how to rotate."""
    config = copy.deepcopy(config)

    def change(part: Any) -> None:
        parameters = getattr(part, "rope_parameters", None)
        if isinstance(parameters, dict):
            nested = [value for value in parameters.values() if isinstance(value, dict)]
            for one in nested or [parameters]:
                if one.get("rope_type") != "axial" or "rope_type" not in settings:
                    if "rope_type" in settings:  # options of another type would count for some attentions
                        for option in RoPE.scaling_options() - {"original_max_position_embeddings"}:
                            one.pop(option, None)
                    one.update(settings)
        elif "rope_theta" in settings and isinstance(getattr(part, "rope_theta", None), float):
            part.rope_theta = settings["rope_theta"]
        for value in vars(part).values():
            if isinstance(value, PretrainedConfig):
                change(value)

    change(config)
    return config


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def checked(model_type: str, name: str) -> str:
    """One check of one model type, in a word."""
    model, given = tiny(model_type)
    rotations = find_rotations(model)
    scheme, settings = CHECKS[name]
    before = run(model, given)
    if settings:
        try:
            with own_randomness(0):
                built = type(model)(by_config(model.config, settings)).float().eval()
            built.load_state_dict(model.state_dict())
            expected = run(built, given)
        except Exception as error:
            expected = {"": torch.tensor(float("nan"))}
            unbuilt = f"transformers: {last_line(error)}"
        else:
            unbuilt = ""
    try:
        patch_model(model, pos=scheme, only=[rotation.name for rotation in rotations])
    except PatchError as error:
        return f"refused: {error!s:.150}"
    after = run(model, given)
    if settings is None:
        return "unchanged" if equal(before, after) else "yes"
    if not settings:
        return "yes" if equal(before, after) else "DIFFERS"
    if unbuilt:
        return unbuilt
    return "DIFFERS" if not equal(expected, after) else "unchanged" if equal(before, after) else "yes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    counts: dict[str, Counter] = {name: Counter() for name in CHECKS}
    rows = {}
    for model_type in options.types or model_types():
        try:
            model, given = tiny(model_type)
            if not find_rotations(model):
                continue
            run(model, given)
        except Unbuildable:
            continue
        except Exception as error:
            print(f"{model_type}: doesn't run: {last_line(error)}")
            continue
        row = {}
        for name in CHECKS:
            try:
                row[name] = checked(model_type, name)
            except Exception as error:
                row[name] = f"ERROR: {last_line(error)}"
            counts[name][row[name].partition(":")[0]] += 1
        rows[model_type] = row
        print(model_type, row if set(row.values()) != {"yes"} else "yes", flush=True)
    for name, count in counts.items():
        print(name, dict(count))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
