"""DyT's start for language models from scratch (`dyt:alpha=llm`): alpha0 by width, and learned embedding scales."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..core.plan_table import Change, Row, refuse_private_forward
from ..errors import OptionError
from ..measure.inputs import input_embedding, text_config
from ..measure.quiet_forward import inference_state, observe_calls
from ..runtime.edits import SCALE_SLOT, Edit, pattern_of
from ..runtime.lens import SCALE, SCALED
from ..runtime.patch_errors import UnsupportedError
from ..schemes.norm_schemes import DyT
from ..schemes.request import SchemeRequest
from ..sites.block_runs import OUTPUT, Block, measuring
from ..sites.branch_sites import require_untouched
from ..sites.norm_facts import describe
from ..sites.residual_branches import Branch, find_branches
from ..sites.sites import Sites
from .interface import PlannerResult
from .norm_swaps import plan_norms

_TOLERANCE = 1e-6  # relative, in float64; some hosts compute a part in float32

# (width of the stream, alpha0 of attentions' norms, of the others): LLaMA of the paper, up to 70B
_ALPHA_BY_WIDTH = ((1024, 1.0, 1.0), (2048, 1.0, 0.5), (4096, 0.8, 0.2), (5120, 0.6, 0.15), (8192, 0.2, 0.05))


def llm_alpha(width: int, attention: bool) -> float:
    """Return the paper's alpha0 of a language model (Zhu et al. 2025, arXiv:2503.10622, table of widths).

    At the paper's widths it is the table's value. Between two widths it is interpolated in log(width) and log(alpha0);
    beyond them it is the nearest width's.

    Args:
        width: width of the residual stream.
        attention: whether the norm belongs to an attention's branch; feed-forward and last norms don't.
    """
    known = [(row[0], row[1] if attention else row[2]) for row in _ALPHA_BY_WIDTH]
    width = min(max(width, known[0][0]), known[-1][0])
    (low, start), (high, end) = next(pair for pair in pairwise(known) if width <= pair[1][0])
    if width in (low, high):
        return start if width == low else end
    return start * (end / start) ** (math.log(width / low) / math.log(high / low))


def plan_dyt_llm(sites: Sites, part: SchemeRequest) -> PlannerResult:
    """Plan DyT for language models: an alpha for each norm by its site, and learned embedding scales.

    alpha0 is `llm_alpha`'s. The output of the token embedding is multiplied by a learned scalar, its `stream_scale`,
    that starts at the root of the width (for the whole model, whatever `only` and `keep` choose). There is none if the
    model multiplies the output itself before its first block, as Gemma does. A branch counts as an attention if it
    mixes positions, as Mamba's does too, or reads another stack. The paper has pre-norm decoders. In post-norm models
    LN(x + f(x)) is the norm of f; an encoder-decoder has two scales.

    Raises:
        OptionError: `init` isn't "reset".
        UnsupportedError: the model is no language model, or its branches can't be found.
        WrappedModelError: an embedding carries a forward of its own, put there by another library.
    """
    request, model = "norm='dyt' with alpha='llm'", sites.model
    if part.init != "reset":
        raise OptionError(
            f"{request} is a start for training from scratch: pass init='reset'. For trained weights pass a number as "
            "alpha, and calibration=, which fits alpha to the weights."
        )
    _require_language_model(model, request)
    require_untouched(model)
    small, inputs = sites.twin
    with measuring(model, f"{request} can't tell the norms of attentions from others. Pass a number as alpha"):
        attentions = _attention_patterns(find_branches(small, inputs), small)
        called = _called_embeddings(small, inputs)
        unscaled = {pattern_of(name) for name, one in called.items() if not _is_multiplied(small, name, one, inputs)}
    if not attentions:
        raise UnsupportedError(
            f"{type(model).__name__}: no attention with a norm of its own was found, so {request} doesn't say how its "
            "norms start. Pass a number as alpha."
        )
    changes = _norms(sites, part, attentions)
    scales = _scales(sites, unscaled) if any(change.replaces for change in changes) else ()
    return PlannerResult(part, [*changes, *scales])


def _norms(sites: Sites, part: SchemeRequest, attentions: tuple[str, ...]) -> list[Change]:
    """The norms' changes: planned with the alpha0 of attentions and with that of the others; each norm has one."""
    names, width = sites.names, text_config(sites.model.config).hidden_size
    by_place = []
    for of_attention in (False, True):
        scheme = DyT(llm_alpha(width, of_attention))
        note = f"alpha0 = {scheme.alpha:.4g}" + (", norm of an attention" if of_attention else "")
        changes = plan_norms(sites, replace(part, scheme=scheme))
        by_place.append([replace(one, row=one.row.with_note(note)) if one.replaces else one for one in changes])

    def is_of_attention(row: Row) -> bool:
        forms = [form for name in (row.module, *row.aliases) for form in names.forms(name)]
        return any(pattern in attentions for form in forms for pattern in _patterns(form))

    return [changes[is_of_attention(changes[0].row)] for changes in zip(*by_place, strict=True)]


def _attention_patterns(branches: list[Branch], model: nn.Module) -> tuple[str, ...]:
    """Patterns of the norms of attentions' branches that no other norm has."""
    of_attentions = [branch for branch in branches if branch.mixes or branch.cross]
    read = [f"{branch.block}.{name}" for branch in of_attentions for name in (branch.norm, branch.outer) if name]
    norms = dict.fromkeys(name for name, module in model.named_modules() if describe(module) is not None)
    others = {pattern for name in norms if name not in read for pattern in _patterns(name)}
    found = []
    for name in read:
        known = [pattern for pattern in _patterns(name) if pattern not in others]
        if not known:
            raise UnsupportedError(
                f"{name} is the norm of an attention here and of something else in other layers, so alpha='llm' can't "
                "tell which is which in the model. Pass a number as alpha."
            )
        found.append(known[0])
    return tuple(dict.fromkeys(found))


def _patterns(name: str) -> tuple[str, str]:
    """A name with `*` for every number, and for the first alone: T5's sublayers differ in their second number."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return pattern_of(name), ".".join("*" if i == first else part for i, part in enumerate(parts))


def _require_language_model(model: nn.Module, request: str) -> None:
    config: Any = model.config
    text = text_config(config)
    embedding = input_embedding(model)
    if text is not config or embedding is None or not isinstance(getattr(text, "hidden_size", None), int):
        raise UnsupportedError(
            f"{type(model).__name__} isn't a plain language model (token embedding, hidden_size), as {request} "
            "requires. Pass a number as alpha; the paper's is 0.5."
        )


def _called_embeddings(model: nn.Module, inputs: dict[str, Any]) -> dict[str, nn.Embedding]:
    """The modules with the input embedding's matrix that a forward runs; an encoder-decoder may have two."""
    source = input_embedding(model)
    assert source is not None
    found = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and module.weight is source.weight
    }
    called: dict[str, nn.Embedding] = {}
    with inference_state(model), observe_calls(found, on_call=lambda name, _: called.update({name: found[name]})):
        model(**inputs)
    return called


def _is_multiplied(model: nn.Module, name: str, embedding: nn.Embedding, inputs: dict[str, Any]) -> bool:
    """Whether the model multiplies token embeddings before its first norm.

    Gemma 3 does so in the embedding, Gemma behind it: a constant added to the embedding's output then arrives at the
    first norm as a multiple of itself. Behind a projection, which is held fixed, it doesn't arrive.
    """
    with torch.no_grad():
        factors = embedding(torch.arange(2)) / embedding.weight[:2]
    if (factors[1] - 1.0).abs().max() > _TOLERANCE:  # row 0 may be padding, which some embeddings mask
        return bool(factors[1].median() != 1.0)
    whole, source = Block("", model, (), inputs), (name, 0)
    delta = torch.linspace(1.0, 2.0, embedding.weight.shape[-1], dtype=embedding.weight.dtype)
    moved = whole.run({source: delta}, whole.matrices_around(source)).points
    changes = (moved[norm] - before for norm, before in whole.base.points.items() if norm != OUTPUT)
    change = next((one for one in changes if one.shape[-1] == len(delta) and one.any()), delta)
    factors = (change / delta).flatten()
    factor = factors.median()
    is_multiple = (factors - factor).abs().max() <= _TOLERANCE * factor.abs()
    return bool(is_multiple and (factor - 1.0).abs() > _TOLERANCE)


def _scales(sites: Sites, unscaled: set[str]) -> Iterator[Change]:
    """Put a learned scalar, which starts at the root of the width, on the output of each embedding in `unscaled`.

    If no embedding is left to scale, a row says why.
    """
    model, names = sites.model, sites.names
    width = text_config(model.config).hidden_size
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and any(pattern_of(form) in unscaled for form in names.forms(name))
    ]
    fresh = [(name, module) for name, module in found if SCALED not in vars(module)]
    source = None if fresh else input_embedding(model)
    for name, module in model.named_modules():
        if source is not None and module is source:
            scaled = f"has its {SCALE} already" if SCALED in vars(module) else "the model multiplies its output itself"
            yield Change(Row("stream", name, module._get_name(), reason=scaled))
    for name, module in fresh:
        refuse_private_forward(name, module)
        note = f"{SCALE} is learned and starts at sqrt({width}) = {width**0.5:.4g}"
        row, loss = Row("stream", name, module._get_name()), "parameters are reinitialised"
        row = row.replace_by(f"{module._get_name()} x {SCALE}", loss, note=note)
        yield Change(row, (Edit.of(f"{name}.{SCALE_SLOT}", width**0.5),))
