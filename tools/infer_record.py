"""Proposes an architecture record for a family without one, by probing a small model of it.

* A table's output differs from position to position and doesn't depend on what stands there.
* Keys moved by a constant leave an attention's output alone, since softmax takes no notice; values moved by a constant
  move it alike at every position; what is left of the projections of the same input makes queries.
* A stack is causal if its outputs don't depend on later tokens.

A proposal is then proved on that small model, by rope_proof.py, before anybody relies on it.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import groupby
from typing import Any

import torch
from rope_proof import CACHE, DIFFERENT, SAME, Proof, decodes_alike, floating_tensors, outputs, prove
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

from hfpatch.checkpoint.auto_classes import class_to_build
from hfpatch.core.registry import ARCHITECTURES, name_in_records
from hfpatch.measure.twin import twin
from hfpatch.runtime.apply import apply, condensed
from hfpatch.runtime.attention import NUMBER_OF_HEADS, Window
from hfpatch.runtime.constants import FixedArguments
from hfpatch.runtime.errors import UnsupportedError
from hfpatch.runtime.length_lenses import AnyImageSize, ExpandedRows, FilledArguments, MeanOfBuffer
from hfpatch.runtime.lens import host_class
from hfpatch.runtime.qk_layouts import Fused, Projections
from hfpatch.schemes.request import Part
from hfpatch.schemes.rope import RoPE
from hfpatch.sites.records.record import MEAN_ROW, Architecture, Stack
from hfpatch.sites.stacks import find_stacks
from hfpatch.swap.positions import plan_positions

_HEAD_DIMS = ("head_dim", "attention_head_size", "dim_per_head", "d_kv", "head_size")
_HEADS = (*NUMBER_OF_HEADS, "heads")
_NAMES = (("query", "key"), ("q_proj", "k_proj"), ("q_lin", "k_lin"), ("q", "k"))
_CACHES = ("past_key_values", "past_key_value", "layer_past", "layer_state", "cache")
_LAYERS = ("layer_idx", "layer_id", "layer_index")
_BIASES = re.compile(r"position_bias|rel_pos|relative_position.*|relative_attention")
_NONE = 1e-5  # no change, relative: some hosts take their softmax in float32
_TEMPORARY = "~proposed"  # sorts behind all names, so that its stacks come before recorded ones of the same class


@dataclass
class Proposal:
    """A record that was found, and what its proof showed.

    Attributes:
        record: ready for `ARCHITECTURES.register(record.model_type)(record)`.
        proofs: shift and active of each stack.
        cached: change of the logits when decoding uses a cache; None where the model doesn't generate.
        longest: tokens of a text, four times the table's length, that ran; None where there is no text.
        doubts: what wasn't found, doesn't hold, or has to be looked at.
    """

    record: Architecture
    proofs: list[Proof] = field(default_factory=list)
    cached: float | None = None
    longest: int | None = None
    doubts: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return bool(self.proofs) and not self.doubts

    def code(self) -> str:
        """Python for a file of one's own; importing it registers the record."""
        modules: dict[str, set[str]] = {}
        for kind in _classes(self.record.stacks):
            modules.setdefault(kind.__module__, set()).add(kind.__name__)
        modules["hfpatch"] = {"ARCHITECTURES", "Architecture"}
        imports = "".join(f"from {module} import {', '.join(sorted(modules[module]))}\n" for module in sorted(modules))
        stacks = "".join(f"            {_text(stack, 12)},\n" for stack in self.record.stacks)
        return (
            f"{imports}\nARCHITECTURES.register({self.record.model_type!r})(\n    Architecture(\n"
            f"        {self.record.model_type!r},\n        (\n{stacks}        ),\n"
            f"        example={self.record.example!r},\n    )\n)\n"
        )

    def __str__(self) -> str:
        lines = [
            f"# {proof.owner}: shift {proof.shift:.0e} (at most {SAME:.0e}), active {proof.active:.1e} "
            f"(at least {DIFFERENT:.0e})" + (f", not rotated: {', '.join(proof.idle)}" if proof.idle else "")
            for proof in self.proofs
        ]
        if self.cached is not None:
            lines.append(f"# decoding with a cache differs from decoding without by {self.cached:.0e}")
        if self.longest is not None:
            lines.append(f"# text of {self.longest} tokens runs, four times the table's length")
        lines += [f"# look at this: {doubt}" for doubt in self.doubts]
        return "\n".join([self.code(), *lines])


def propose_record(model: nn.Module, example_inputs: Mapping[str, Any] | None = None) -> Proposal:
    """Find and prove a record for a model's family, on a small model of its class.

    Args:
        model: isn't changed or run; may be on the meta device.
        example_inputs: keyword arguments of one forward, for models that none can be made for.

    Raises:
        UnsupportedError: no small model can be made, or it has no table of positions in front of attentions.
    """
    small, inputs = _running(*twin(model, example_inputs))
    for module in small.modules():
        if getattr(getattr(module, "config", None), "use_cache", None):
            module.config.use_cache = False  # type: ignore[union-attr]
    stacks = tuple(_stacks(small, inputs))
    if not stacks:
        raise UnsupportedError(
            f"{type(model).__name__}: no table of positions in front of attentions was found in it. Its positions may "
            "be relative, rotary already, or made in a forward; a record has to be written by hand then."
        )
    config: Any = getattr(model, "config", None)
    name = getattr(config, "model_type", type(model).__name__.lower())
    record = Architecture(name, stacks, getattr(config, "_name_or_path", "") or f"a checkpoint of {name}")
    return _proved(Proposal(record), small, inputs)


def _running(small: nn.Module, inputs: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """In float64 where the host takes that; some name float32 in their forwards."""
    try:
        _run(small, inputs)
    except RuntimeError:
        inputs = {name: value.float() if _floating(value) else value for name, value in inputs.items()}
        return small.float(), inputs
    return small, inputs


# --- what is in the model ---------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """What a module was given and what it returned, on its first call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    def states(self) -> Tensor | None:
        return next((v for v in (*self.args, *self.kwargs.values()) if _floating(v)), None)


@dataclass
class _Attention:
    """An attention and where its queries and keys come from; of a fused projection also each channel's kind."""

    name: str
    query: str
    key: str
    kinds: str = ""


_Calls = dict[str, _Call]


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    if "use_cache" in _parameters(model):  # an attention called twice would find its own tokens there
        inputs = {**inputs, "use_cache": False}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(**copy.deepcopy(dict(inputs)))


def _calls(model: nn.Module, inputs: Mapping[str, Any]) -> _Calls:
    """The first call of each module in one forward."""
    calls: _Calls = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            calls.setdefault(name, _Call(args, kwargs, output))

        return hook

    hooks = [m.register_forward_hook(watch(name), with_kwargs=True) for name, m in model.named_modules() if name]
    try:
        _run(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _first(output: Any) -> Tensor | None:
    return next((value for _, value in floating_tensors(output)), None)


def _other(inputs: Mapping[str, Any], last_only: bool = False) -> dict[str, Any]:
    """Inputs of the same shapes with other content, at the last token of each text alone if asked."""
    generator = torch.Generator().manual_seed(7)
    other = dict(inputs)
    for name, value in inputs.items():
        if _floating(value) and not last_only:
            other[name] = value + torch.randn(value.shape, generator=generator, dtype=value.dtype)
        elif isinstance(value, Tensor) and name.endswith("input_ids"):
            other[name] = value.clone()
            if last_only:
                other[name][:, -1] = value[:, 0]
            else:
                other[name] = value.flatten()[torch.randperm(value.numel(), generator=generator)].view(value.shape)
    return other


def _tables(model: nn.Module, calls: _Calls, others: _Calls) -> Iterator[str]:
    """Modules whose output is one row for each position; Parameters and buffers that are named after positions."""
    for name, call in calls.items():
        module = model.get_submodule(name)
        stored = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        stored = [value for value in stored if value.dim() >= 2]
        if module._modules or not stored or isinstance(call.output, tuple) or name not in others:
            continue
        a, b = _first(call.output), _first(others[name].output)
        if a is None or b is None or a.dim() < 2 or a.shape[-1] != stored[0].shape[-1] or not torch.equal(a, b):
            continue
        if a.dim() >= 3 and a.shape[-3] == a.shape[-2]:  # a row for each two positions
            continue
        rows = a if a.dim() == 2 else a[0].flatten(0, -2)
        several = len(rows) > 1 and len(rows.unique(dim=0)) >= min(len(rows), 8)  # padding shares a row
        if not isinstance(module, nn.Linear) and several and (_row_in(stored, rows[0]) is not None or "pos" in name):
            yield name
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        holder = model.get_submodule(name.rpartition(".")[0])
        if "pos" in name.rpartition(".")[2] and holder._modules and value.dim() >= 2 and _floating(value):
            yield name


def _row_in(stored: list[Tensor], row: Tensor) -> int | None:
    """The number of the stored row that equals `row`."""
    for table in stored:
        if table.dim() == 2 and table.shape[-1] == len(row):
            equal = (table == row).all(-1).nonzero()
            if len(equal):
                return int(equal[0])
    return None


def _attentions(model: nn.Module, calls: _Calls) -> Iterator[_Attention]:
    """Self-attentions that a forward reaches, innermost modules first."""
    inside: set[str] = set()
    for name in sorted(calls, key=lambda name: -name.count(".")):
        module = model.get_submodule(name)
        if any(found.startswith(f"{name}.") for found in inside):
            continue
        projections = [child for child, made in module.named_modules() if _projects(made) and child.count(".") <= 1]
        if not 0 < len(projections) <= 8 or any(isinstance(m, nn.ModuleList) for m in module.modules()):
            continue
        found = _attention(module, name, calls, projections)
        if found is not None:
            inside.add(name)
            if found.query:  # else it is cross-attention, which isn't rotated
                yield found


def _projects(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _attention(module: nn.Module, name: str, calls: _Calls, projections: list[str]) -> _Attention | None:
    plain = _again(module, calls[name])
    if plain is None or plain.dim() != 3:
        return None
    by_input: dict[int, dict[str, str]] = {}  # projection -> kind, for each input
    for child in projections:
        made = calls.get(f"{name}.{child}")
        states = made.states() if made else None
        if states is not None:
            kind = _kind(module, calls[name], child, slice(None), plain)
            by_input.setdefault(states.data_ptr(), {})[child] = kind
    for kinds in by_input.values():
        keys = [child for child, kind in kinds.items() if kind == "k"]
        if keys:
            queries = [child for child, kind in kinds.items() if kind == "q"]
            queries.sort(key=lambda child: "q" not in child)  # values that a norm follows look like queries
            return _Attention(name, queries[0] if queries else "", keys[0])
    for kinds in by_input.values():
        for query, key in _NAMES:  # scores that don't go through a softmax
            if query in kinds and key in kinds:
                return _Attention(name, query, key)
    for kinds in by_input.values():
        for child in kinds:
            output, states = _first(calls[f"{name}.{child}"].output), calls[f"{name}.{child}"].states()
            if output is None or states is None or not states.shape[-1] < output.shape[-1] <= 4 * states.shape[-1]:
                continue
            channels = range(output.shape[-1])
            if "k" not in (_kind(module, calls[name], child, slice(i, i + 1), plain) for i in channels[::4]):
                continue
            each = "".join(_kind(module, calls[name], child, slice(i, i + 1), plain) for i in channels)
            if _is_layout(each):
                return _Attention(name, child, child, each)
    return None


def _is_layout(kinds: str) -> bool:
    """Whether channels of three kinds lie in three blocks, or alike in each head; an MLP's look otherwise."""
    runs = [(kind, len(list(group))) for kind, group in groupby(kinds)]
    lengths = {length for _, length in runs}
    blocks = len(runs) == 3 and runs[1][1] == runs[2][1] and runs[0][1] % runs[1][1] == 0
    heads = len(runs) % 3 == 0 and len(lengths) == 1
    return {*kinds} == {"q", "k", "v"} and min(lengths) > 1 and (blocks or heads)


def _kind(module: nn.Module, call: _Call, projection: str, channels: slice, plain: Tensor) -> str:
    """What an attention makes of a projection whose output is moved by a constant: "k", "v", "q", or " " for else."""

    def move(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        moved = output.clone()
        constant = torch.randn(moved.shape[-1], generator=torch.Generator().manual_seed(0), dtype=moved.dtype)
        moved[..., channels] += constant[channels]
        return moved

    handle = module.get_submodule(projection).register_forward_hook(move)
    try:
        new = _again(module, call)
    finally:
        handle.remove()
    if new is None:
        return " "
    change, size = new - plain, plain.abs().max()
    none = _NONE if new.dtype == torch.float64 else 30 * _NONE
    if change.abs().max() <= none * size:
        return "k"
    alike = (change - change[:1, :1]).abs().max()
    return "v" if alike <= none * torch.maximum(size, change.abs().max()) else "q"


def _again(module: nn.Module, call: _Call) -> Tensor | None:
    kwargs = {name: None if name in _CACHES else value for name, value in call.kwargs.items()}  # it holds these tokens
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _first(module(*call.args, **kwargs))
    except Exception:  # what was handed over can't be used twice
        return None


# --- from there to stacks ---------------------------------------------------------------------------------------------


def _stacks(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[Stack]:
    calls, others = _calls(model, inputs), _calls(model, _other(inputs))
    attentions = list(_attentions(model, calls))
    by_owner: dict[str, list[str]] = {}
    for table in _tables(model, calls, others):
        owner = _owner(table, attentions)
        if owner is not None:
            by_owner.setdefault(owner, []).append(table)
    later = _calls(model, _other(inputs, last_only=True))
    claimed: set[str] = set()
    batch = next((value.shape[0] for value in inputs.values() if isinstance(value, Tensor)), 1)
    for owner in sorted(by_owner, key=lambda name: -len(name)):  # inner owners first
        prefix = f"{owner}." if owner else ""
        own = [one for one in attentions if one.name.startswith(prefix) and one.name not in claimed]
        claimed |= {one.name for one in own}
        if own:
            paths = [table.removeprefix(prefix) for table in by_owner[owner]]
            yield _stack(model, owner, paths, own, (calls, later), batch)


def _owner(table: str, attentions: list[_Attention]) -> str | None:
    """The innermost module that holds the table and an attention."""
    path = table.split(".")
    for length in range(len(path) - 1, -1, -1):
        prefix = ".".join(path[:length])
        if any(one.name.startswith(f"{prefix}." if prefix else "") for one in attentions):
            return prefix
    return None


def _stack(
    model: nn.Module,
    owner_name: str,
    tables: list[str],
    own: list[_Attention],
    calls: tuple[_Calls, _Calls],
    batch: int,
) -> Stack:
    owner, prefix = model.get_submodule(owner_name), f"{owner_name}." if owner_name else ""
    globs = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", one.name.removeprefix(prefix)) for one in own)
    first, seen = own[0], calls[0]
    module = model.get_submodule(first.name)
    takes = _parameters(module)
    made = _first(seen[f"{first.name}.{first.query}"].output)
    assert made is not None
    states = seen[first.name].states()
    assert states is not None
    time, states_time = (0 if x.dim() == 3 and x.shape[1] == batch != x.shape[0] else 1 for x in (made, states))
    head_dim, channels = _head_dim(module, first, made.shape[-1])
    cache = next((name for name in _CACHES if name in takes), None)
    layer = next((name for name in _LAYERS if isinstance(getattr(module, name, None), int)), "layer_idx")
    call = seen[first.name]
    handed = [*zip(takes, call.args, strict=False), *call.kwargs.items()]
    name_of_states = next((name for name, value in handed if _floating(value)), "hidden_states")
    table = tables[0]
    holder = owner.get_submodule(table.rpartition(".")[0])
    biases = tuple((name, 0) for name, value in handed if _BIASES.fullmatch(name) and value is not None)
    return Stack(
        name_in_records(host_class(type(owner))),
        table,
        " | ".join(globs),
        _projections(module, first, channels, time),
        reserved_rows=_reserved(owner, prefix, table, seen),
        head_dim=head_dim,
        cache="past_key_values" if cache == CACHE else cache,  # its name in records, which versions before 5.24 read
        layer_index=layer if cache else "layer_idx",
        window=_window(module),
        removal=(*((other, MEAN_ROW) for other in tables[1:]), *_limits(holder, table)),
        in_attention=(
            *([("@lens", FixedArguments(biases))] if biases else []),
            *((name, False) for name, value in vars(module).items() if _BIASES.fullmatch(name) and value is True),
        ),
        causal=_causal(calls, first, states_time),
        states=name_of_states,
        time=states_time,
    )


def _parameters(module: nn.Module) -> list[str]:
    host: Any = host_class(type(module))
    return list(inspect.signature(host.forward).parameters)[1:]


def _head_dim(module: nn.Module, attention: _Attention, width: int) -> tuple[str, int]:
    """How a record names the channels per head, and how many they are."""
    query_width = attention.kinds.count("q") or width
    heads = next((name for name in _HEADS if isinstance(getattr(module, name, None), int)), None)
    for name in _HEAD_DIMS:
        value = getattr(module, name, None)
        if isinstance(value, int) and (heads is None or value * getattr(module, heads) == query_width):
            return name, value
    if heads is None:
        return "head_dim", query_width
    return f"/ {heads}", query_width // getattr(module, heads)


def _projections(module: nn.Module, attention: _Attention, head_dim: int, time: int) -> Projections | Fused:
    if not attention.kinds:
        return Projections(attention.query, attention.key, time)
    runs = [(kind, len(list(group))) for kind, group in groupby(attention.kinds)]
    if len(runs) == 3 and runs[1][1] == head_dim < runs[0][1]:
        shared = next((name for name, value in vars(module).items() if value is True and "multi" in name), None)
        return Fused(attention.query, by_head=True, shared=shared)
    width = attention.kinds.count("q")
    added = [name for name, value in module.named_parameters(recurse=False) if value.shape == (width,) and "q" in name]
    return Fused(attention.query, by_head=len(runs) > 3, query_bias=added[0] if added else None)


def _reserved(owner: nn.Module, prefix: str, table: str, calls: _Calls) -> int:
    """The row that the first position gets."""
    call = calls.get(prefix + table)
    module = dict(owner.named_modules()).get(table)
    if call is None or module is None:
        return 0
    output = _first(call.output)
    assert output is not None
    return _row_in([*module.parameters(), *module.buffers()], output.reshape(-1, output.shape[-1])[0]) or 0


def _window(module: nn.Module) -> Window | None:
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.dim() == 4 and buffer.shape[-1] == buffer.shape[-2] > 1:
            if getattr(module, "attention_type", None) in ("global", "local"):
                return Window(name, "attention_type", "window_size")
            return Window(name)
    return None


def _limits(holder: nn.Module, table: str) -> tuple[tuple[str, Any], ...]:
    """A table in a buffer is hidden; index arguments that its holder would cut from such buffers are filled."""
    buffers = dict(holder.named_buffers(recurse=False))
    path, _, attribute = table.rpartition(".")
    place = f"{path}.@lens".strip(".")
    if attribute in buffers:
        return ((place, MeanOfBuffer(attribute)),)
    if hasattr(holder, "interpolate_pos_encoding") and "pixel_values" in _parameters(holder):
        flag = "interpolate_pos_encoding" in _parameters(holder)
        return ((place, AnyImageSize(attribute, flag=flag)),)
    names = [name for name in ("position_ids", "token_type_ids") if name in buffers and name in _parameters(holder)]
    return ((place, FilledArguments(*names)),) if names and path else ()


def _causal(calls: tuple[_Calls, _Calls], attention: _Attention, time: int) -> bool:
    """Whether the first attention's outputs before the last token don't depend on that token, though the last does."""
    a, b = (_first(seen[attention.name].output) for seen in calls)
    if a is None or b is None or a.dim() != 3 or a.shape != b.shape:
        return False
    before = a.shape[time] - 1
    moved = (a - b).abs()
    return bool(moved.narrow(time, before, 1).max() > 0) and bool(moved.narrow(time, 0, before).max() == 0)


# --- the proof --------------------------------------------------------------------------------------------------------


def _proved(proposal: Proposal, small: nn.Module, inputs: Mapping[str, Any]) -> Proposal:
    """Patch a copy of the small model by the proposal, measure, and mend what can be mended."""
    with _registered(proposal.record):
        patched = _patched(small)
        try:
            proposal.proofs = prove(patched, inputs, each=True)
        except Exception as error:
            proposal.doubts.append(f"patched, it fails: {type(error).__name__}: {error}"[:300])
            return proposal
    proposal.doubts += [f"the proof of {one.owner} doesn't hold" for one in proposal.proofs if not one.holds]
    _prove_length(proposal, small, inputs)
    if isinstance(patched, PreTrainedModel) and patched.can_generate():
        given = {name: value for name, value in inputs.items() if not name.startswith("decoder")}
        try:
            proposal.cached = decodes_alike(patched, given)
        except Exception as error:  # generate() has wishes of its own
            proposal.doubts.append(f"generate() didn't run: {type(error).__name__}: {error}"[:200])
        if proposal.cached is not None and not proposal.cached <= SAME:
            proposal.doubts.append("decoding with a cache isn't decoding without: look at cache= and layer_index=")
    return proposal


def _prove_length(proposal: Proposal, small: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Run text of four times the tables' length; where that fails, try the limits that other families have."""
    longest: int | str | None = None
    for change in (_as_found, _types_outside, _of_any_length):
        candidate = replace(proposal.record, stacks=tuple(change(stack) for stack in proposal.record.stacks))
        with _registered(candidate):
            longest = _longest(small, inputs)
        if not isinstance(longest, str):
            proposal.record, proposal.longest = candidate, longest
            return
    proposal.doubts.append(f"text of four times the old length fails ({longest}): removal= misses a lens")


def _as_found(stack: Stack) -> Stack:
    return stack


def _types_outside(stack: Stack) -> Stack:
    return replace(stack, removal=(("@lens", FilledArguments("token_type_ids")), *stack.removal))


def _of_any_length(stack: Stack) -> Stack:
    path, _, attribute = stack.table.rpartition(".")
    place = f"{path}.@lens".strip(".")
    rows = ExpandedRows(((f"{attribute}.weight", None), ("position_ids", None)))
    limits = rows, FilledArguments("position_ids")
    return replace(stack, removal=tuple((place, limit) for limit in limits))


def _longest(small: nn.Module, inputs: Mapping[str, Any]) -> int | str | None:
    text = {name: value for name, value in inputs.items() if name.endswith("input_ids") and value.dim() == 2}
    if not text:
        return None
    tokens = next(iter(text.values())).shape[1]
    patched = _patched(small)
    found = find_stacks(patched)
    rows = [(item.removed_rows() or 0) - item.stack.reserved_rows for item in found]
    length = 4 * max(rows)
    given = {
        name: value.repeat(1, -(-length // tokens), *[1] * (value.dim() - 2))[:, :length]
        if isinstance(value, Tensor) and value.dim() in (2, 3) and value.shape[1] == tokens
        else value
        for name, value in inputs.items()
    }
    try:
        outputs(patched, given, found[0])
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.120}"
    return length


def _patched(small: nn.Module) -> Any:
    """A copy with RoPE, patched below a parent: the model itself then also is a module that a lens can be put on."""
    parent = nn.ModuleDict({"model": copy.deepcopy(small)})
    changes = plan_positions(parent, Part(RoPE(), (), (), "auto"))
    apply(condensed((edit for change in changes for edit in change.edits), parent), parent)
    return parent["model"]


@contextmanager
def _registered(record: Architecture) -> Iterator[None]:
    ARCHITECTURES.register(_TEMPORARY)(record)
    try:
        yield
    finally:
        ARCHITECTURES.unregister(_TEMPORARY)


# --- as text ----------------------------------------------------------------------------------------------------------


def _classes(value: Any) -> Iterator[type]:
    """The dataclasses in a value."""
    if isinstance(value, tuple):
        for one in value:
            yield from _classes(one)
    elif is_dataclass(value):
        yield type(value)
        yield from _classes(tuple(getattr(value, one.name) for one in fields(value)))


def _text(value: Any, indent: int = 0) -> str:
    """A dataclass as the call that makes it, fields with their defaults left out."""
    if not hasattr(value, "__dataclass_fields__"):
        if isinstance(value, tuple):
            return f"({', '.join(_text(one) for one in value)}{',' if len(value) == 1 else ''})"
        return repr(value)
    if isinstance(value, FilledArguments):
        return f"FilledArguments({', '.join(map(repr, value.names))})"
    arguments = []
    for one in fields(value):
        held = getattr(value, one.name)
        if one.default is not held and not (one.default == held and type(one.default) is type(held)):
            required = one.default.__class__.__name__ == "_MISSING_TYPE"
            arguments.append(_text(held) if required else f"{one.name}={_text(held)}")
    separator = f",\n{' ' * (indent + 4)}" if indent else ", "
    inner = separator.join(arguments)
    return (
        f"{type(value).__name__}(\n{' ' * (indent + 4)}{inner},\n{' ' * indent})"
        if indent
        else f"{type(value).__name__}({inner})"
    )


def main() -> None:
    """Print the proposal for a model: its config is read, its weights aren't."""
    parser = argparse.ArgumentParser(description="Proposes an architecture record, as Python to paste, with its proof.")
    parser.add_argument("model", help="a Hub id, a folder, or a model type of transformers (gpt2)")
    parser.add_argument("--head", help="the Auto class to build, such as AutoModel")
    parser.add_argument(
        "--import",
        dest="modules",
        action="append",
        default=[],
        metavar="MODULE",
        help="a module of your own to import first, which registers config and model with the Auto classes",
    )
    options = parser.parse_args()
    sys.path.append("")  # modules of one's own lie where the tool is called
    for module in options.modules:
        importlib.import_module(module)
    if options.model in CONFIG_MAPPING:
        config = AutoConfig.for_model(options.model)
    else:
        config = AutoConfig.from_pretrained(options.model)
    cls = class_to_build(config, options.head)
    build = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    try:
        with torch.device("meta"):
            model = build(config)
    except NotImplementedError:  # some can't be built there
        model = build(config)
    print(propose_record(model))


if __name__ == "__main__":
    main()
