"""Which Parameters decay under transformers' Trainer, before and after every patch of every model type.

    python tests/sweeps/weight_decay.py         # all types; writes weight_decay.json and docs/support/weight_decay.md
    python tests/sweeps/weight_decay.py gpt2 bert         # these types; prints what it found

A control of an ablation has to train as the original does. So nothing that a patch adds may decay only because of its
class or its name; `Decay.differing` in tests/support/decay.py says what each Parameter has to do. Models have no
weights (meta device). *decay*: how many Parameters decay before the patch. A scheme's column: how many of its
patches the type takes. *left out*: schemes after which a gain that decayed before doesn't. *differ*: what is wrong.
"""

from __future__ import annotations

import copy
import site
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import torch
import workers
import zoo
from decay import Decay

from hfpatch.core.registry import MLPS, NORMS, POSITIONS
from hfpatch.patch import patch_model
from hfpatch.runtime.patch_errors import PatchError

NORM_SCHEMES = [name for name in NORMS if name not in ("folded", "none")]  # these two need weights
OTHERS: dict[str, list[dict[str, Any]]] = {
    "pos": [{"pos": name} for name in POSITIONS if name != "learned"]
    + [{"pos": f"learned:{length}"} for length in ("max_positions=300", "image_size=96")],
    "mlp": [{"mlp": name} for name in MLPS],
    "sandwich": [{"placement": "sandwich"}],  # the placement that brings new norms
}


@dataclass
class Result(workers.Result):
    """One model type.

    Attributes:
        decays, all: how many Parameters decay before, of how many.
        patched: how many requests of each norm scheme (1 or 0) and of each other kind it takes.
        differ: "request: Parameter" wherever it does other than it should.
        left_out: requests after which gains that decayed don't, since their norm has further Parameters -> how many.
    """

    class_name: str = ""
    decays: int = 0
    all: int = 0
    patched: dict[str, int] = field(default_factory=dict)
    differ: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)


def examine(model_type: str) -> Result:
    """Build, patch by each request, compare; see the module's docstring."""
    with torch.device("meta"):
        model = zoo.untrained(model_type)
    before = Decay.of(model)
    result = Result(model_type, "ok", type(model).__name__, sum(before.parameters.values()), len(before.parameters))
    requests = [(name, {"norm": name, "init": "copy"}) for name in NORM_SCHEMES]
    requests += [(kind, one) for kind, some in OTHERS.items() for one in some]
    for kind, request in requests:
        patched = copy.deepcopy(model)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                patch_model(patched, **request)
        except PatchError:
            continue
        result.patched[kind] = result.patched.get(kind, 0) + 1
        named = "+".join(value for name, value in request.items() if name != "init")
        result.differ += [f"{named}: {name}" for name in before.differing(patched)]
        if gains := before.left_out(patched):
            result.left_out[named] = len(gains)
    return result


def totals(results: list[Result]) -> dict[str, int]:
    """Model types that were patched, patches, and Parameters that differ."""
    found = [result for result in results if result.patched]
    return {
        "types": len(found),
        "patches": sum(sum(result.patched.values()) for result in found),
        "differ": sum(len(result.differ) for result in found),
    }


def page(results: list[Result], of: str) -> list[str]:
    types, patches, differ = totals(results).values()
    gains = [result for result in results if result.left_out]
    return [
        f"{of}: **{differ} Parameters differ** in {patches} patches of {types} model types.",
        f"In {len(gains)} types gains decay in the original, because a norm is no nn.LayerNorm and has an unusual name "
        "(ln_1, norm1). They decay with every scheme that has only weight and bias. They don't if the new norm has "
        "further parameters, which mustn't begin to decay (*left out*).",
        "",
        *workers.table(
            f"model type | >decay | {' | '.join(f'>{one}' for one in (*NORM_SCHEMES, *OTHERS))} | left out | differ",
            (_cells(result) for result in results if result.patched),
        ),
        *workers.section("Not patched", [", ".join(one.model_type for one in results if not one.patched)]),
    ]


def _cells(result: Result) -> tuple[object, ...]:
    counts = [result.patched.get(kind, "") for kind in (*NORM_SCHEMES, *OTHERS)]
    found = ", ".join(result.left_out), "; ".join(result.differ) or 0
    return result.model_type, f"{result.decays} of {result.all}", *counts, *found


SWEEP = workers.Sweep(
    title="Weight decay before and after a patch",
    says="Look up here whether a patch changes which Parameters decay under transformers' Trainer.",
    every=zoo.model_types,
    examine=examine,
    totals=totals,
    batch=100,
    seconds=300,
)
if __name__ == "__main__":
    SWEEP.main()
