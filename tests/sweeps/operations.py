"""Count the operations that patched models dispatch, in every model type with a table of positions that can decode.

    python tests/sweeps/operations.py              # all types; writes operations.json and docs/support/operations.md
    python tests/sweeps/operations.py gpt2 bert    # these types; prints what it found

An operation is a call to PyTorch's dispatcher, views included. On a GPU most operations start a kernel, and eager
decoding of a small model spends its time on starting kernels. The number doesn't depend on the machine. Counted is one
step that decodes one token with a cache, or one forward if the model keeps no cache. Most models have two layers.
`fixed` and `none` keep the last norm. *computed* says how often rotations are computed, of how often they are used. If
the first number is less, the layers of a stack share the rotation of the first layer. If it isn't, the host hands its
layers no arguments that it doesn't know.
"""

from __future__ import annotations

import site
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import proof
import workers
import zoo
from operations_of import of_a_step
from tiny_models import patch

from hfpatch.runtime.alibi import LinearBias
from hfpatch.runtime.attention import BIAS, ROTARY, AttentionLens
from hfpatch.runtime.patch_errors import PatchError
from hfpatch.runtime.rotary import RotaryEmbedding

SCHEMES: dict[str, dict[str, str]] = {
    "layer": {"norm": "layer"},
    "rms": {"norm": "rms"},
    "dyt": {"norm": "dyt"},
    "fixed": {"norm": "fixed", "init": "reset"},
    "none": {"norm": "none", "init": "reset"},
    "nope": {"pos": "nope"},
    "alibi": {"pos": "alibi"},
    "rope": {"pos": "rope"},
    "rms+rope": {"norm": "rms", "pos": "rope"},
}
# biases by distance, rotations of their own, and encoders of text and images
MORE = ("bloom", "gpt_neox", "llama", "mpt", "mt5", "t5", "umt5", "albert", "clip", "deberta", "distilbert", "vit")


@dataclass
class Result(workers.Result):
    """What the sweep found in one model type.

    Attributes:
        unpatched: operations of a step.
        patched: the same by scheme; None where it is refused.
        computed: by scheme, how often rotations or biases are computed, and how often they are used.
    """

    unpatched: int = 0
    patched: dict[str, int | None] = field(default_factory=dict)
    computed: dict[str, list[int]] = field(default_factory=dict)


def examine(model_type: str) -> Result:
    result = Result(model_type)
    model, given = proof.tiny(model_type)
    result.unpatched = of_a_step(model, given).total()
    for name, request in SCHEMES.items():
        model, given = proof.tiny(model_type)
        try:
            patch(model, **request)
        except PatchError:
            result.patched[name] = None
            continue
        with _counted() as calls:
            result.patched[name] = of_a_step(model, given).total()
        if "pos" in request:
            result.computed[name] = [calls["computed"], calls["used"]]
    return result


@contextmanager
def _counted() -> Any:
    """How often rotations and biases are computed, and used, inside; both forwards of a step count."""
    calls = {"computed": 0, "used": 0}
    kinds: tuple[Any, ...] = (RotaryEmbedding, LinearBias)
    forwards, lens = {kind: kind.forward for kind in kinds}, AttentionLens.__call__

    def counting(kind: Any) -> Any:
        def forward(module: Any, *args: Any) -> Any:
            calls["computed"] += 1
            return forwards[kind](module, *args)

        return forward

    def used(self: Any, module: Any, arguments: Any) -> Any:
        calls["used"] += any(name in module._modules for name in (ROTARY, BIAS))
        return lens(self, module, arguments)

    with ExitStack() as changed:
        for kind in kinds:
            changed.enter_context(mock.patch.object(kind, "forward", counting(kind)))
        changed.enter_context(mock.patch.object(AttentionLens, "__call__", used))
        yield calls


def every_type() -> list[str]:
    decoding = {home for owner, home in proof.HOMES.items() if proof.STACKS[owner].cache is not None}
    return sorted({*decoding, *MORE} & {*zoo.model_types(), *proof.PARTS, *proof.VARIANTS})


def totals(results: list[Result]) -> dict[str, int]:
    """How many types compute rotations less often than they use them, and how many don't."""
    rope = [one.computed["rope"] for one in results if one.computed.get("rope", [0, 0])[1]]
    once = sum(computed < used for computed, used in rope)
    return {"types": len(results), "rotated": len(rope), "shared": once, "in each layer": len(rope) - once}


def page(results: list[Result], of: str) -> list[str]:
    count = totals(results)
    return [
        f"{of}: {count['rotated']} of {count['types']} model types rotate with `rope`. In {count['shared']} of them "
        f"layers share the rotation, in {count['in each layer']} each layer computes its own. A dash means that "
        "hfpatch refuses the patch.",
        "",
        *workers.table(
            f"model type | >unpatched | {' | '.join(f'>{name}' for name in SCHEMES)} | rope: computed",
            (_cells(one) for one in results if one.status == "ok"),
        ),
        *workers.not_run(one for one in results if one.status != "ok"),
    ]


def _cells(result: Result) -> tuple[object, ...]:
    patched = [result.patched.get(name) for name in SCHEMES]
    computed, used = result.computed.get("rope", (0, 0))
    how = f"{computed} of {used}" if used else ""
    return result.model_type, result.unpatched, *("-" if one is None else one for one in patched), how


SWEEP = workers.Sweep(
    title="Operations of a step, by model type and scheme",
    says="Look up here how many operations a patch adds to a decoding step. The models are tiny and random.",
    every=every_type,
    examine=examine,
    totals=totals,
    batch=40,
    seconds=180,
)
if __name__ == "__main__":
    SWEEP.main()
