"""That the sweeps would see what is wrong: each has to say so of a fault that is put into what it examines."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import acceptance
import exact
import fold
import native_rope
import norm_swap
import positions
import pytest
import repaired_types
import tables
import torch
from torch import nn

import hfpatch.exact.conversion
import hfpatch.outcome
import hfpatch.repairs.repair
from hfpatch.core.weight_change import WeightChange
from hfpatch.errors import PatchError
from hfpatch.measure.snapshot import Verdict
from hfpatch.runtime.rotary import RotaryEmbedding
from hfpatch.schemes.learned import Learned

pytestmark = pytest.mark.filterwarnings("ignore::hfpatch.errors.NotPreservedWarning")


@dataclass(frozen=True)
class Control:
    """Faults, each in an attribute of an owner and made of what is there, and how what a sweep finds begins."""

    faults: dict[tuple[Any, str], Callable[[Any], Any]]
    found: Callable[[], Any]
    expected: str
    slow: bool = False


def always(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def wrapped(fault: Callable[..., Any]) -> Callable[[Any], Any]:
    """A fault that calls what is there, its first argument."""
    return lambda original: functools.partial(fault, original)


def opened_otherwise(opened: Any, *given: Any) -> Any:
    loaded = opened(*given)
    with torch.no_grad():
        loaded.wte.weight[0] += 1e-3
        loaded.ln_f.bias += 1e-3
    return loaded


def a_wrong_third_run(run: Any) -> Any:
    """The runs are of the model before, of that of transformers' own settings, and of the patched one."""
    factors = iter([1, 1, 1 + 1e-6])

    def off(*given: Any) -> dict[str, torch.Tensor]:
        factor = next(factors)
        return {name: value * factor for name, value in run(*given).items()}

    return off


def with_wider_gains(patch_model: Any, model: nn.Module, **how: Any) -> nn.Module:
    for module in patch_model(model, **how).modules():
        if "RMSNorm" in type(module).__name__:
            module.weight.data *= 1.01
    return model


def without_a_norm(plan_patch: Any, *given: Any, **how: Any) -> Any:
    plan = plan_patch(*given, **how)
    plan.planned[0].changes.pop()
    return plan


def multiplied_by_nothing(apply: Any) -> Any:
    return lambda self, *given, **more: given[0].clone() if self.op == "multiply" else apply(self, *given, **more)


def of_repaired(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """patch_model, and a change of what it repaired."""

    def patch(patch_model: Any, model: Any, **request: Any) -> Any:
        patched = patch_model(model, **request)
        if "calibration" in request:
            with torch.no_grad():
                change(patched)
        return patched

    return wrapped(patch)


def fail(model: Any) -> None:
    raise KeyError("layer")


def refused_but_changed(model: Any, **_: Any) -> None:
    model.pooler.dense.bias.data += 1
    raise PatchError("no")


def rows_moved(table: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.cat((table[1:], new[len(table) - 1 :]))


def a_row_left_out(table: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return torch.cat((new[:60], new[61:], new[:1]))


def resized(fault: Any) -> Callable[[Any], Any]:
    return lambda resize: lambda self, table: fault(table, resize(self, table))


def centred(change: Callable[[Any], Any]) -> Control:
    """A wrong centring, which patch_model itself would refuse."""
    faults = {
        (hfpatch.exact.conversion, "find_centring"): wrapped(lambda find, *given: change(find(*given))),
        (Verdict, "holds"): always(True),
    }
    return Control(faults, lambda: exact.examine("gpt2").status, "wrong$", slow=True)


def swapped(step: str, fault: Callable[..., Any], expected: str) -> Control:
    return Control({(norm_swap, step): wrapped(fault)}, lambda: norm_swap.examine("gpt2").status, expected)


def repaired(family: str, expected: str, *faults: tuple[Any, str, Any], slow: bool = True) -> Control:
    request = repaired_types.REQUESTS["norm"]
    found = lambda: repaired_types.outcome(family, request).verdict  # noqa: E731
    return Control({(owner, name): fault for owner, name, fault in faults}, found, expected, slow)


def moved(fault: Any, expected: str) -> Control:
    return Control({(Learned, "resize"): resized(fault)}, lambda: tables.examine("gpt2").seen[0].wrong, expected)


CONTROLS = {
    "accepted, it doesn't run": Control(
        {(hfpatch.outcome, "require_runs_in_full"): always(lambda *args: True)},
        lambda: acceptance.verdict("dinov2", "wide"),
        "wrong: at the new size it says RuntimeError",
    ),
    "accepted, it opens otherwise": Control(
        {(acceptance.proof, "opened"): wrapped(opened_otherwise)},
        lambda: acceptance.verdict("gpt2", "rope"),
        "wrong: opened, it differs by ",
    ),
    "exact: a writer left out": centred(lambda found: replace(found, folds=found.folds[:-1])),
    "exact: inputs left out": centred(
        lambda found: replace(found, signals=tuple(one for one in found.signals if not one.argument))
    ),
    "exact: a module left out of the parametrized form": centred(
        lambda found: found if found.folds else replace(found, signals=found.signals[1:])
    ),
    "folded: a wrong fold": Control(
        {(WeightChange, "apply"): multiplied_by_nothing}, lambda: fold.examine("llama").status, "wrong$", slow=True
    ),
    "a wrong angle": Control(
        {(native_rope, "run"): a_wrong_third_run}, lambda: native_rope.checked("llama", "theta"), "DIFFERS$"
    ),
    "norms left in place": swapped("patch_model", lambda call, model, **how: model, ".* is still a"),
    "norms of another formula": swapped("patch_model", with_wider_gains, ".* doesn't compute RMSNorm"),
    "a norm that the plan leaves out": swapped("plan_patch", without_a_norm, "missed 1: ln_f"),
    "rotations that do nothing": Control(  # tests/sites/architectures/test_proof.py has the proof's other controls
        {
            (RotaryEmbedding, "rotate"): always(lambda self, x, phases: x),
            (positions.proof, "patched"): lambda cached: cached.__wrapped__,  # or later tests would get such a model
        },
        lambda: positions.examine("gpt2").seen[0].wrong,
        "2 attentions aren't rotated: h.0.attn",
    ),
    "repaired: farther than before": repaired(
        "bert",
        "harmed",
        (
            repaired_types,
            "patch_model",
            of_repaired(lambda model: model.encoder.layer[-1].output.LayerNorm.weight.neg_()),
        ),
    ),
    "repaired: an error of no type": repaired(
        "bert", "wrong: KeyError", (repaired_types, "patch_model", of_repaired(fail))
    ),
    "repaired: undone, and something is left": repaired(
        "gpt2",
        "wrong: undone, but h.0.ln_1",
        (repaired_types, "patch_model", of_repaired(lambda model: model.h[0].ln_1.weight[0].add_(1))),
        (hfpatch.repairs.repair, "helps", always(lambda *_: False)),
    ),
    "repaired: refused, and the model changed": repaired(
        "bert",
        "wrong: refused, but pooler.dense",
        (repaired_types, "patch_model", always(refused_but_changed)),
        slow=False,
    ),
    "extended tables: rows moved": moved(rows_moved, "keep=table: inputs of 128 tokens differ"),
    "extended tables: a row left out": moved(a_row_left_out, ".* tokens differ"),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow if one.slow else ()) for name, one in CONTROLS.items()]


@pytest.mark.sample(99, slow=99)
@pytest.mark.parametrize("control", SLOW)
def test_what_is_wrong_is_seen(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = CONTROLS[control]
    for (owner, name), fault in chosen.faults.items():
        monkeypatch.setattr(owner, name, fault(getattr(owner, name)))
    assert re.match(chosen.expected, chosen.found())


@pytest.mark.parametrize(
    ("module", "shape", "is_layer_norm"),
    [
        (nn.LayerNorm(8), (2, 5, 8), True),
        (nn.LayerNorm(8, bias=False), (2, 5, 8), True),
        (nn.LayerNorm((4, 6)), (3, 5, 4, 6), True),
        (nn.LayerNorm(8, elementwise_affine=False), (1, 1, 8), True),
        (nn.RMSNorm(8), (2, 5, 8), False),
        (nn.BatchNorm1d(8).eval(), (4, 8, 5), False),
        (nn.GroupNorm(2, 8), (2, 8, 5), False),
        (nn.GroupNorm(8, 8), (2, 8, 5), False),
        (nn.Identity(), (2, 5, 8), False),
        (nn.Linear(8, 8), (2, 5, 8), False),
        (nn.Softmax(-1), (2, 5, 8), False),
    ],
)
def test_a_layer_norm_is_told_from_what_resembles_it(
    module: nn.Module, shape: tuple[int, ...], is_layer_norm: bool
) -> None:
    """By the sweep of norm swaps, without hfpatch."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        seen = norm_swap.Seen((x,), module(x))
    assert (norm_swap.fit_layer_norm(module, seen) is not None) == is_layer_norm
