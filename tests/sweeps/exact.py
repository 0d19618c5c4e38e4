"""Function-preserving LayerNorm -> RMSNorm over every model type of transformers that has a LayerNorm.

    python tests/sweeps/exact.py                   # all types; writes exact.json and exact.md beside itself
    python tests/sweeps/exact.py gpt2 bert         # these types; prints what it found

What to centre is found on a model of one seed and carried out on a model of another seed, with other inputs, by the
code of this file. The whole model is then compared with itself before: in float64 throughout, where it may differ by
1e-9, and in float64 with whatever float32 the family computes in inside, where it may differ by 1e-5. More is *wrong*.
Where a type takes `inputs_embeds`, random ones in place of its tokens are compared as well.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import site
import time
from collections import Counter
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import torch
import transformers
import workers
import zoo
from tiny_models import tensors
from torch import Tensor, nn

from hfpatch.exact.fold import Axis, Centring
from hfpatch.exact.search import find_centring
from hfpatch.measure.float64 import Float64
from hfpatch.runtime.errors import PatchError
from hfpatch.sites.norms import describe

HERE = Path(__file__).resolve().parent
EXACT, AS_WRITTEN = 1e-9, 1e-5
# collections, tensor by tensor
INTERNAL = re.compile(r"(^|_|\.)(hidden_states|attentions|past_key_values|cache|mems)\[")


@dataclass
class Result:
    """One model type.

    `status` is "exact" (every LayerNorm that the inputs reach), "in part", "refused", "wrong", or why nothing is known.
    """

    model_type: str
    status: str
    class_name: str = ""
    layer_norms: int = 0
    exact: int = 0
    unreached: int = 0
    post_norm: int = 0
    error: float | None = None
    as_written: float | None = None
    embedded: float | None = None
    control: float | None = None
    runtime: int = 0
    parametrized: bool = False
    reasons: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def examine(model_type: str) -> Result:
    """Find on one model, carry out on another; see the module's docstring."""
    try:
        model, inputs = zoo.tiny(model_type)
        other, fresh = zoo.tiny(model_type, seed=11)
    except zoo.Unbuildable as error:
        return Result(model_type, f"not built: {error.reason}")
    norms = layer_norms(model)
    if not norms:
        return Result(model_type, "no LayerNorm")
    result = Result(model_type, "", type(model).__name__, len(norms))
    start = time.perf_counter()
    try:
        centring, parametrized = (find_centring(model, inputs, mode) for mode in ("fold", "parametrize"))
    except PatchError as error:
        result.status = f"not searched: {error}"
        return result
    result.seconds = round(time.perf_counter() - start, 1)
    fill_in(result, centring, norms)
    result.parametrized = bool(parametrized.exact)
    if not centring.exact:
        return result
    other, fresh = in_eager_double(other), doubled(fresh)
    forms = [form for form in (centring, parametrized) if form.exact]
    converted = [carried_out(copy.deepcopy(other), form) for form in forms]
    try:
        before = run(other, fresh, throughout=True)
        result.error = max(relative(before, run(one, fresh, throughout=True)) for one in converted)
        untouched = carried_out(copy.deepcopy(other), Centring(exact=centring.exact))
        result.control = relative(before, run(untouched, fresh, throughout=True))
        result.embedded = embedded_error(other, fresh, forms)
        if runs(other, fresh):
            before = run(other, fresh)
            result.as_written = max(relative(before, run(one, fresh)) for one in converted)
    except Exception as error:
        result.status = f"failed: {zoo.last_line(error)}"
        return result
    if not (max(result.error, result.embedded or 0.0) <= EXACT and (result.as_written or 0.0) <= AS_WRITTEN):
        result.status = "wrong"
    return result


def embedded_error(other: nn.Module, fresh: dict[str, Any], forms: list[Centring]) -> float | None:
    """Error with random embeddings in place of tokens, of all forms; None where a type takes none."""
    if (embeddings := with_embeddings(other, fresh)) is None:
        return None
    before = run(other, embeddings, throughout=True)
    converted = [carried_out(copy.deepcopy(other), form) for form in forms]
    return max(relative(before, run(one, embeddings, throughout=True)) for one in converted)


def with_embeddings(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Any] | None:
    """The inputs with random `inputs_embeds`, off-centre, in place of tokens; None if the model takes none."""
    places = {name: name.replace("input_ids", "inputs_embeds") for name in ("input_ids", "decoder_input_ids")}
    takes = inspect.signature(model.forward).parameters
    taken = {name: place for name, place in places.items() if name in inputs and place in takes}
    table: Any = None
    with suppress(NotImplementedError, AttributeError):
        table = model.get_input_embeddings()
    if not taken or not isinstance(table, nn.Embedding):
        return None
    random = torch.Generator().manual_seed(5)
    embeddings = {
        place: torch.randn(*inputs[name].shape, table.embedding_dim, generator=random, dtype=torch.float64) + 1
        for name, place in taken.items()
    }
    embedded = {name: value for name, value in inputs.items() if name not in taken} | embeddings
    try:
        run(model, embedded, throughout=True)
    except Exception:  # whatever a family says to embeddings in place of its tokens
        return None
    return embedded


def layer_norms(model: nn.Module) -> list[str]:
    found = [(name, describe(module)) for name, module in model.named_modules()]
    return [name for name, facts in found if facts is not None and facts.kind == "layer"]


def fill_in(result: Result, centring: Centring, norms: list[str]) -> None:
    """Counts and reasons, norm by norm."""
    result.exact = sum(starred(name) in centring.exact for name in norms)
    reasons = Counter(centring.approximate[starred(name)] for name in norms if starred(name) in centring.approximate)
    result.reasons = dict(reasons.most_common())
    result.unreached = sum(count for reason, count in reasons.items() if "don't reach it" in reason)
    result.post_norm = sum(starred(name) in centring.compensated for name in norms)
    result.runtime = len(centring.outputs)
    if centring.refused:
        result.status = "refused"
    else:
        result.status = "exact" if result.exact + result.unreached == len(norms) else "in part"


def starred(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


# --- carrying out -----------------------------------------------------------------------------------------------------


class RootMeanSquare(nn.Module):
    """x / sqrt(mean(x^2) + eps) * gain + shift, written out."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        facts: Any = describe(old)
        self.gain = getattr(old, facts.gain) + facts.offset if facts.gain else 1.0
        self.shift = getattr(old, facts.shift) if facts.shift else 0.0
        self.weight = getattr(old, facts.gain) if facts.gain else None  # some models look at its dtype
        self.eps, self.channels_first = facts.eps, facts.channels_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, -1) if self.channels_first else x
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.gain + self.shift
        return y.movedim(-1, 1) if self.channels_first else y


@torch.no_grad()
def carried_out(model: nn.Module, centring: Centring) -> nn.Module:
    """The model with all of the centring done to it, in place."""
    parameters = list(model.named_parameters())
    for pattern in dict.fromkeys(axis.scale for axis in centring.folds if axis.scale):
        for name, scale in parameters:
            if starred(name) == pattern:
                absorb(name, scale, [axis for axis in centring.folds if axis.scale == pattern], parameters)
    for axis in centring.folds:
        for name, parameter in parameters:
            if starred(name) == axis.pattern:
                parameter -= parameter.mean(axis.axis, keepdim=True)
    for name, module in list(model.named_modules()):
        for pattern, axis in centring.outputs:
            if starred(name) == pattern:
                module.register_forward_hook(lambda _, __, y, axis=axis: y - y.mean(axis, keepdim=True))
        if starred(name) in centring.embeddings:
            module.register_forward_pre_hook(centre_embeddings, with_kwargs=True)
    norms = layer_norms(model)  # a pattern may name other modules too, those beside a norm in a Sequential
    for module in [model.get_submodule(name) for name in norms if starred(name) in centring.exact]:
        new = RootMeanSquare(module)
        new._forward_hooks = module._forward_hooks
        for parent in list(model.modules()):
            for key, child in parent._modules.items():
                if child is module:
                    parent._modules[key] = new
    return model


def centre_embeddings(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    embeddings = kwargs.get("inputs_embeds")
    centred = {} if embeddings is None else {"inputs_embeds": embeddings - embeddings.mean(-1, keepdim=True)}
    return args, kwargs | centred


def absorb(name: str, scale: Tensor, axes: list[Axis], parameters: list[tuple[str, nn.Parameter]]) -> None:
    layer = re.findall(r"(?<![^.])\d+(?![^.])", name)
    for axis in axes:
        for other, parameter in parameters:
            same_layer = re.findall(r"(?<![^.])\d+(?![^.])", other)[: len(layer)] == layer
            if starred(other) == axis.pattern and same_layer:
                parameter *= scale.view([-1 if place == axis.axis else 1 for place in range(parameter.dim())])
    scale.fill_(1.0)


# --- comparing --------------------------------------------------------------------------------------------------------


def in_eager_double(model: nn.Module) -> nn.Module:
    model = model.double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped product takes no float64
    return model


def doubled(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: doubled(one) for key, one in value.items()}
    return type(value)(map(doubled, value)) if isinstance(value, list | tuple) else value


def run(model: nn.Module, inputs: dict[str, Any], throughout: bool = False) -> dict[str, Tensor]:
    """All that a forward returns but hidden states, attention maps and caches."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]), Float64() if throughout else nullcontext():
        torch.manual_seed(0)
        return {name: value for name, value in tensors(model(**copy.deepcopy(inputs))) if not INTERNAL.search(name)}


def runs(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Whether the family runs in float64 at all."""
    try:
        run(model, inputs)
    except (RuntimeError, TypeError):
        return False
    return True


def relative(before: dict[str, Tensor], after: dict[str, Tensor]) -> float:
    """Largest difference relative to each output's largest value; infinite where something else differs."""
    if before.keys() != after.keys() or not before:
        return float("inf")
    return max(_relative(old, after[name]) for name, old in before.items())


def _relative(old: Tensor, new: Tensor) -> float:
    if old.shape != new.shape or not torch.equal(torch.isfinite(old), torch.isfinite(new)):
        return float("inf")
    if not old.is_floating_point():
        return 0.0 if torch.equal(old, new) else float("inf")
    finite = torch.isfinite(old)
    return float((old - new)[finite].abs().max() / old[finite].abs().max().clamp_min(1e-30)) if finite.any() else 0.0


# --- all model types --------------------------------------------------------------------------------------------------


def with_layer_norms() -> list[str]:
    """Types that the sweep of norm swaps found a LayerNorm in."""
    types = json.loads((HERE / "norm_swap.json").read_text())["types"]
    return [one["model_type"] for one in types if one["layer_norms"] and one["model_type"] in zoo.model_types()]


SWEEP = workers.Sweep(__file__, __doc__, examine, Result, batch=50, seconds=600)


def sweep(model_types: list[str]) -> list[Result]:
    """Examine the types in processes of their own, each with a limit on time and memory."""
    results: list[Result] = []
    for _, found in SWEEP.examined(model_types):
        results.append(result := Result(**found))
        print(f"{result.model_type}: {result.status} {result.error} {result.seconds} s", flush=True)
    return results


# --- report -----------------------------------------------------------------------------------------------------------


def to_json(results: list[Result]) -> str:
    head = {"transformers": transformers.__version__, **Counter(kind(result) for result in results)}
    return json.dumps({**head, "types": [asdict(result) for result in results]}, indent=1) + "\n"


def kind(result: Result) -> str:
    return result.status.partition(":")[0]


def to_markdown(results: list[Result]) -> str:
    count = Counter(kind(result) for result in results)
    errors = [result.error for result in results if result.error is not None]
    as_written = [result.as_written for result in results if result.as_written is not None]
    embedded = [result.embedded for result in results if result.embedded is not None]
    norms, exact = sum(r.layer_norms for r in results), sum(r.exact for r in results)
    lines = [
        "# Function-preserving LayerNorm to RMSNorm over every model type of transformers",
        "",
        "Written by `python tests/sweeps/exact.py`; its docstring says what is checked. Tiny random models.",
        "",
        f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}, "
        f"{len(results)} of {len(with_layer_norms())} model types with a LayerNorm: "
        f"**{count['exact']} exact** (every LayerNorm that the inputs reach), **{count['in part']} in part**, "
        f"{count['refused']} refused with the reason, "
        f"**{count['wrong']} wrong**; {exact} of {norms} LayerNorms are exact.",
        f"Largest error {max(errors, default=0.0):.1e} in float64 throughout, {max(as_written, default=0.0):.1e} with "
        f"what the families compute in float32 inside, {max(embedded, default=0.0):.1e} with embeddings in place of "
        f"tokens ({len(embedded)} types take them).",
        "The control is the error of the same swap without any centring.",
        "",
        *workers.table(
            "model type | class | >LayerNorms | >exact | >error | >as written | >embeddings | >control | status "
            "| why the others aren't",
            map(_cells, results),
        ),
    ]
    return "\n".join(lines) + "\n"


def _cells(result: Result) -> tuple[object, ...]:
    measured = (result.error, result.as_written, result.embedded, result.control)
    errors = [f"{one:.1e}" if one is not None else "" for one in measured]
    reasons = "; ".join(f"{count}: {reason}" for reason, count in result.reasons.items())
    return result.model_type, result.class_name, result.layer_norms, result.exact, *errors, result.status, reasons


if __name__ == "__main__":
    SWEEP.run(with_layer_norms, sweep, to_json, to_markdown)
