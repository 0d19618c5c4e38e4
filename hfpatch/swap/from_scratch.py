"""What a norm scheme for language models from scratch must know of the model: attentions' norms, token embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.globs import Names
from ..core.plan_table import Change, Row, refuse_private_forward
from ..errors import OptionError
from ..measure.twin import twin
from ..runtime.edits import SCALE_SLOT, Edit, pattern_of
from ..runtime.errors import PatchError, UnsupportedError
from ..runtime.lens import SCALE, SCALED
from ..schemes.request import Part
from ..sites.anatomy import Branch, find_branches
from ..sites.blocks import stream_blocks
from ..sites.junctions import require_untouched
from ..sites.norms import describe

_SAME = 1e-6  # relative, in float64; some hosts compute a part in float32


def settle_start(model: nn.Module, part: Part, example_inputs: Mapping[str, Any] | None = None) -> Part:
    """The part with the patterns of attentions' norms, and of the token embeddings that get a scale.

    A branch is taken for an attention where it mixes positions or reads another stack. An embedding whose output the
    model multiplies itself before its first block, as Gemma does, gets no second scale.

    Raises:
        OptionError: `init` isn't "reset".
        UnsupportedError: it is no language model, or its branches can't be found.
    """
    asked = f"norm={part.scheme.name!r} with alpha='llm'"
    if part.init != "reset":
        raise OptionError(
            f"{asked} is how training from scratch starts, so it takes init='reset'. For trained weights pass a number "
            "as alpha, and calibration=, which fits alpha to the weights."
        )
    _require_language_model(model, asked)
    require_untouched(model)
    small, inputs = twin(model, example_inputs)
    try:
        branches = find_branches(small, inputs)
        called = _called_embeddings(small, inputs)
        fresh = {name for name, module in called.items() if _factor(small, module, inputs) == 1.0}
    except PatchError:
        raise
    except Exception as error:  # a block that can't run by itself, with the arguments of a call in the model
        raise UnsupportedError(
            f"{type(model).__name__}: its blocks can't be measured one by one ({type(error).__name__}: {error}), so "
            f"{asked} can't tell the norms of attentions from others. Pass a number as alpha."
        ) from error
    attention = _attention_patterns(branches, small)
    if not attention:
        raise UnsupportedError(
            f"{type(model).__name__}: no attention with a norm of its own was found, so {asked} doesn't say how its "
            "norms start. Pass a number as alpha."
        )
    scaled = {name for name, module in model.named_modules() if SCALED in module.__dict__}  # by an earlier patch
    return replace(part, attention=attention, embeddings=tuple(map(pattern_of, sorted(fresh - scaled))))


def _attention_patterns(branches: list[Branch], model: nn.Module) -> tuple[str, ...]:
    """`*` for every number, or for the first alone where the others tell attentions from feed-forwards, as in T5."""
    read = [name for branch in branches if branch.mixes or branch.cross for name in (branch.norm, branch.outer) if name]
    norms = dict.fromkeys(name for name, module in model.named_modules() if describe(module) is not None)
    others = {form(name) for name in norms if name not in read for form in (pattern_of, _of_layer)}
    patterns = []
    for name in read:
        known = [form(name) for form in (pattern_of, _of_layer) if form(name) not in others]
        if not known:
            raise UnsupportedError(
                f"{name} is the norm of an attention here and of something else in other layers, so alpha='llm' can't "
                "tell which is which in the model. Pass a number as alpha."
            )
        patterns.append(known[0])
    return tuple(dict.fromkeys(patterns))


def _of_layer(name: str) -> str:
    """A module's name with `*` for the first number between dots."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join("*" if i == first else part for i, part in enumerate(parts))


def of_attention(part: Part, names: Iterable[str]) -> bool:
    """Whether a norm, by any of its names, is that of an attention's branch."""
    return any(form(name) in part.attention for name in names for form in (pattern_of, _of_layer))


def _require_language_model(model: nn.Module, asked: str) -> None:
    config: Any = model.config
    text = config.get_text_config()
    embedding = _input_embedding(model)
    if text is not config or embedding is None or not isinstance(getattr(text, "hidden_size", None), int):
        raise UnsupportedError(
            f"{type(model).__name__} isn't a language model alone (token embedding, width), which {asked} is for. "
            "Pass a number as alpha; the paper's is 0.5."
        )
    if not embedding.weight.is_floating_point():
        raise UnsupportedError(f"{type(model).__name__}: its token embedding is quantized, so it can't be scaled.")


def _input_embedding(model: Any) -> nn.Embedding | None:
    try:
        embedding = model.get_input_embeddings()
    except (NotImplementedError, AttributeError):  # how models without one say so
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None


def _called_embeddings(model: nn.Module, inputs: dict[str, Any]) -> dict[str, nn.Embedding]:
    """The modules with the input embedding's matrix that a forward runs; an encoder-decoder may have two."""
    source = _input_embedding(model)
    assert source is not None
    found: dict[str, nn.Embedding] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight is source.weight:

            def hook(module: Any, args: tuple, output: Tensor, name: str = name) -> None:
                found[name] = module

            handles.append(module.register_forward_hook(hook))
    try:
        with torch.no_grad():
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _factor(model: nn.Module, embedding: nn.Embedding, inputs: dict[str, Any]) -> float:
    """By what the model itself multiplies a token's row before its first block; 1.0 where that can't be told.

    In the embedding, as Gemma 3 does, or behind it, as Gemma.

    Rows are moved by a constant delta; behind a norm or a projection the stream moves by no multiple of it.
    """
    with torch.no_grad():
        factors = embedding(torch.arange(2)) / embedding.weight[:2]
    if (factors[1] - 1.0).abs().max() > _SAME:  # row 0 may be padding, which some embeddings mask
        return float(factors[1].median())
    before = _streams(model, inputs)
    delta = torch.linspace(1.0, 2.0, embedding.weight.shape[-1], dtype=embedding.weight.dtype)
    rows = embedding.weight.data
    embedding.weight.data = rows + delta
    try:
        after = _streams(model, inputs)
    finally:
        embedding.weight.data = rows
    for one, other in zip(before, after, strict=True):
        moved = other - one
        if moved.shape[-1] == len(delta) and moved.abs().max() > 0:
            factors = (moved / delta).flatten()
            factor = factors.median()
            if (factors - factor).abs().max() <= _SAME * factor.abs():
                return 1.0 if abs(float(factor) - 1.0) <= _SAME else float(factor)
            return 1.0
    return 1.0


def _streams(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """What each stack's first block reads, in the order of their first calls."""
    first: dict[str, Tensor] = {}
    for block in stream_blocks(model, inputs):
        first.setdefault(pattern_of(block.name), block.x.detach().clone())
    return list(first.values())


def stream_width(model: nn.Module) -> int:
    """The width of a language model's residual stream."""
    config: Any = model.config
    return config.get_text_config().hidden_size


def plan_scales(model: nn.Module, part: Part, names: Names) -> Iterator[Change]:
    """A learned scalar, from the root of the width, on the output of each embedding that the part names.

    Where it names none, a line says why.

    Raises:
        WrappedModelError: an embedding carries a forward of its own, put there by another library.
    """
    source = None if part.embeddings else _input_embedding(model)
    for name, module in model.named_modules():
        if source is not None and source is module:
            scaled = f"has its {SCALE} already" if SCALED in vars(module) else "the model multiplies its output itself"
            yield Change(Row("stream", "keep", name, module._get_name(), reason=scaled))
        if isinstance(module, nn.Embedding) and any(pattern_of(form) in part.embeddings for form in names.forms(name)):
            refuse_private_forward(name, module)
            width = stream_width(model)
            row = Row("stream", "replace", name, module._get_name(), f"{module._get_name()} x {SCALE}")
            row.reason = f"{SCALE} is learned and starts at sqrt({width}) = {width**0.5:.4g}"
            row.loss = "parameters start afresh"
            yield Change(row, (Edit.of(f"{name}.{SCALE_SLOT}", width**0.5),))
