"""Function-preserving LayerNorm -> RMSNorm over every model type of transformers that has a LayerNorm.

    python tests/sweeps/exact.py                   # all types; writes exact.json and docs/support/exact.md
    python tests/sweeps/exact.py gpt2 bert         # these types; prints what it found

The sweep finds what to centre on a model of one seed, and `patch_model` converts a model of another seed. The whole
converted model is compared with the original on inputs that the patch hasn't seen. *error* is in float64 throughout and
may reach 1e-9; *as written* keeps the float32 that the family computes in, and may reach 1e-5. More is *wrong*. If a
type takes `inputs_embeds`, *embeddings* is the error with random embeddings. *control* is the error without centring.

Other classes open a converted checkpoint as well. So models with heads (untied) are converted, saved, and opened by
AutoModel. Its outputs are compared with those of the original's checkpoint, except hidden states, which lose their
mean. If AutoModel returns something else (a stream that only the head norms), it has to warn of that: *warned of*.
"""

from __future__ import annotations

import copy
import inspect
import site
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import norm_swap
import torch
import workers
import zoo
from opened_as_base import Head, everything_returned, heads_as_bases, in_float64, opened
from tiny_models import norms_of, patch
from torch import Tensor, nn

from hfpatch.exact.centring import EMBEDDINGS, Centring
from hfpatch.exact.search import find_centring
from hfpatch.measure.float64_forward import Float64, outputs_in_float64
from hfpatch.measure.outputs import Outputs, max_error
from hfpatch.measure.quiet_forward import cast
from hfpatch.measure.randomness import seed_deterministically
from hfpatch.runtime.edits import pattern_of
from hfpatch.runtime.norms import RMSNorm
from hfpatch.runtime.patch_errors import PatchError
from hfpatch.sites.norm_facts import describe

EXACT, AS_WRITTEN = 1e-9, 1e-5


@dataclass
class Result(workers.Result):
    """One model type.

    `status` is "exact" (every LayerNorm that the inputs reach), "in part", "refused", "wrong", or why nothing is known.
    """

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
    heads: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


def examine(model_type: str) -> Result:
    """Find on one model, convert another; see the module's docstring."""
    model, inputs = zoo.tiny(model_type)
    other, fresh = zoo.tiny(model_type, seed=11)
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
    for head in heads_as_bases(model_type, type(model)):
        open_as_base(head, result)
    result.parametrized = bool(parametrized.exact_patterns)
    if not centring.exact_patterns:
        return result
    forms = {"rms": centring, "rms:mode=parametrize": parametrized}
    swaps: list[dict[str, Any]] = [
        {
            "norm": scheme,
            "only": [name for name in norms if pattern_of(name) in form.exact_patterns],
            "example_inputs": inputs,
        }
        for scheme, form in forms.items()
        if form.exact_patterns
    ]
    other, fresh = in_float64(other), cast(fresh, torch.device("cpu"), torch.float64)
    try:
        converted = [patched(other, **swap, init="exact") for swap in swaps]
        result.error = largest_error(other, converted, fresh)
        result.control = largest_error(other, [patched(other, **swaps[0], init="copy")], fresh)
        if (embeddings := with_embeddings(other, fresh)) is not None:
            result.embedded = largest_error(other, converted, embeddings)
        with suppress(RuntimeError, TypeError):  # some families don't run in float64
            as_written(other, fresh)
            result.as_written = largest_error(other, converted, fresh, as_written)
    except Exception as error:
        result.status = f"failed: {zoo.last_line(error)}"
        return result
    if not (max(result.error, result.embedded or 0.0) <= EXACT and (result.as_written or 0.0) <= AS_WRITTEN):
        result.status = "wrong"
    return result


def open_as_base(head: Head, result: Result) -> None:
    """Fill in whether AutoModel opens a class with a head once it is converted, and whether it tells a difference."""
    try:
        with Float64():
            converted = patch(copy.deepcopy(head.model), norm="rms", init="exact", example_inputs=head.inputs)
    except PatchError:  # no norm is exact
        return
    found, told = opened(converted, head.folder)
    before, after = (everything_returned(in_float64(one), head.given, states=False) for one in (head.base, found))
    name = type(head.model).__name__
    result.heads.append(name)
    result.told += [name] if told else []
    if not told and max_error(before, after) > EXACT:
        result.status = "wrong"


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
        outputs_in_float64(model, embedded)
    except PatchError:  # whatever a family says to embeddings in place of its tokens
        return None
    return embedded


def layer_norms(model: nn.Module) -> list[str]:
    found = [(name, describe(module)) for name, module in model.named_modules()]
    return [name for name, facts in found if facts is not None and facts.kind == "layer"]


def fill_in(result: Result, centring: Centring, norms: list[str]) -> None:
    """Counts and reasons, norm by norm."""
    result.exact = sum(pattern_of(name) in centring.exact_patterns for name in norms)
    approximate = (centring.why_approximate.get(pattern_of(name)) for name in norms)
    reasons = Counter(reason for reason in approximate if reason is not None)
    result.reasons = dict(reasons.most_common())
    result.unreached = sum(count for reason, count in reasons.items() if "don't reach it" in reason)
    result.post_norm = sum(pattern_of(name) in centring.compensated for name in norms)
    result.runtime = sum(one.argument != EMBEDDINGS for one in centring.signals)
    if centring.refused:
        result.status = "refused"
    else:
        result.status = "exact" if result.exact + result.unreached == len(norms) else "in part"


def patched(model: nn.Module, **request: Any) -> nn.Module:
    """A patched copy. In float64 throughout, or patch_model's own check would ask for more than float32 can give."""
    with Float64():
        found = patch(copy.deepcopy(model), **request)
    assert norms_of(found, RMSNorm) == request["only"]
    return found


def as_written(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The outputs of one forward, in whatever the family computes in."""
    with torch.no_grad(), seed_deterministically(0):
        return Outputs.of(model(**copy.deepcopy(inputs))).tensors


def largest_error(original: nn.Module, models: list[nn.Module], inputs: Any, run: Any = outputs_in_float64) -> float:
    """Largest difference of an output from the original's, by the output's root mean square."""
    before = run(original, inputs)
    return max(max_error(before, run(model, inputs)) for model in models)


# --- all model types --------------------------------------------------------------------------------------------------


def with_layer_norms() -> list[str]:
    """Types that the sweep of norm swaps found a LayerNorm in."""
    types = norm_swap.SWEEP.results()
    return [one.model_type for one in types if one.counted and one.model_type in zoo.model_types()]


def page(results: list[Result], of: str) -> list[str]:
    count = workers.kinds(results)
    errors = [result.error for result in results if result.error is not None]
    as_written = [result.as_written for result in results if result.as_written is not None]
    embedded = [result.embedded for result in results if result.embedded is not None]
    norms, exact = sum(r.layer_norms for r in results), sum(r.exact for r in results)
    return [
        f"{of}, {len(results)} of {norm_swap.SWEEP.report()['of']} model types with a LayerNorm: "
        f"**{count['exact']} exact** (every LayerNorm that the inputs reach), **{count['in part']} in part**, "
        f"{count['refused']} refused with the reason, "
        f"**{count['wrong']} wrong**; {exact} of {norms} LayerNorms are exact.",
        f"The largest error is {max(errors, default=0.0):.1e} in float64 throughout, "
        f"{max(as_written, default=0.0):.1e} as written, and {max(embedded, default=0.0):.1e} with embeddings in place "
        f"of tokens, which {len(embedded)} types take.",
        "",
        *workers.table(
            "model type | status | >LayerNorms | >exact | why the others aren't | >error | >as written | >embeddings "
            "| >control | class",
            map(_cells, results),
        ),
        *workers.section("Opened by AutoModel", []),
        f"{sum(len(r.heads) for r in results)} classes with heads; for {sum(len(r.told) for r in results)} of them "
        "AutoModel warns that it returns something else.",
        "",
        *workers.table(
            "model type | classes | warned of",
            ((r.model_type, ", ".join(r.heads), ", ".join(r.told)) for r in results if r.heads),
        ),
    ]


def _cells(result: Result) -> tuple[object, ...]:
    errors = map(workers.number, (result.error, result.as_written, result.embedded, result.control))
    counts = result.layer_norms, result.exact, workers.counted(result.reasons)
    return result.model_type, result.status, *counts, *errors, result.class_name


SWEEP = workers.Sweep(
    title="Function-preserving LayerNorm to RMSNorm over every model type of transformers",
    says="Look up here which LayerNorms of a model type become an exact RMSNorm. The models are tiny and random.",
    every=with_layer_norms,
    examine=examine,
    totals=workers.kinds,
    seconds=600,
)
if __name__ == "__main__":
    SWEEP.main()
