"""RMS(fold_bias=True): the shift of a norm moves into the linear layers that read it, c + W b in place of their bias c.

Which layers read a norm is found by following its output through one forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..core.plan_table import Change
from ..core.transaction import Transaction
from ..errors import OptionError
from ..exact.request import Conversion
from ..measure.float64 import host_errors
from ..measure.outputs import outputs_of
from ..measure.quiet_forward import fitting, quiet
from ..runtime.edits import Edit
from ..runtime.errors import UnsupportedError
from ..runtime.norms import NormFacts
from ..schemes.norms import Norm
from ..schemes.request import Part
from ..sites.norms import describe
from ..swap.norms import plan_norm_request
from ..swap.planners import Planned

# ways in which a tensor is handed on as the same channels
_KEEPS_CHANNELS = (
    "view", "reshape", "contiguous", "to", "float", "clone", "detach", "expand", "dropout", "flatten", "unsqueeze",
    "squeeze", "type_as", "__getitem__",
)  # fmt: skip
_READS_METADATA = (
    "__get__", "size", "dim", "stride", "is_contiguous", "is_floating_point", "numel", "data_ptr", "type", "__len__",
    "requires_grad_", "get_device", "element_size", "__set__",
)  # fmt: skip


Readers = list[tuple[nn.Module, int]]  # linear layers, with the axis of the weight that reads: 1, of Conv1D 0


def plan_moved_shifts(model: nn.Module, part: Part, example_inputs: Mapping[str, Any] | None) -> Planned:
    """The planner of `RMS(fold_bias=True)`: that of norms, and shifts that move wherever they can.

    Raises:
        OptionError: the request says that nothing but the norms may be touched.
        UnsupportedError: no shift can move; or the weights are on the meta device, where most models don't run.
    """
    planned = plan_norm_request(model, part, example_inputs)
    conversion = planned.conversion
    if conversion is None:
        raise OptionError(
            f"fold_bias writes to the layers that read a norm, which init={part.init!r} doesn't touch. Use init='auto'."
        )
    norms = [change for change in planned.changes if change.row.kind == "norm" and change.changes]
    described = [(change, describe(model.get_submodule(change.row.module))) for change in norms]
    shifted = [(change, facts) for change, facts in described if facts is not None and facts.shift]
    names = [change.row.module for change, _ in shifted]
    readers: Mapping[str, Readers | str] = dict.fromkeys(names, "the conversion failed its check")
    if names:
        readers = _readers_of(model, names, conversion)
    for change, facts in shifted:
        found = readers[change.row.module]
        if isinstance(found, str):
            note = f"keeps its shift: {found}"
        else:
            note = f"its shift moves into {len(found)} linear layer{'s' if len(found) > 1 else ''}"
            conversion.moved_shifts.append(change.row.module)
            _move(model, part, change, facts, found)
        change.row.reason = "; ".join(filter(None, (change.row.reason, note)))
    return planned


def _move(model: nn.Module, part: Part, change: Change, facts: NormFacts, readers: Readers) -> None:
    """Let a change put in a norm without a shift b, and add W b to the biases of the layers that read the norm."""
    norm = model.get_submodule(change.row.module)
    _, shift = facts.parameters_of(norm)
    assert isinstance(part.scheme, Norm)
    assert shift is not None
    change.edits = (Edit.of(change.row.module, part.scheme.call(replace(facts, shift=None), norm)),)

    def values(edits: Transaction) -> None:
        b = shift.detach().double()
        for reader, axis in readers:
            weight = reader.weight
            assert isinstance(weight, Tensor)
            rows = weight.detach() if axis == 1 else weight.detach().T
            product = torch.cat([piece.double() @ b for piece in rows.split(max(1, 2**18 // b.numel()))])
            edits.rewrite(reader, "bias", "add", product)

    change.values = values


def _readers_of(model: nn.Module, norms: list[str], conversion: Conversion) -> Mapping[str, Readers | str]:
    """Norm -> what reads it, or why its shift can't move there."""
    if conversion.on_meta:
        raise UnsupportedError(
            "fold_bias=True: which layers read a norm is found by running the model, whose weights are on the meta "
            "device. Load them first."
        )
    found: Mapping[str, Readers | str]
    try:
        found = find_readers(model, fitting(model, conversion.forward_inputs()), norms)
    except UnsupportedError as error:
        found = dict.fromkeys(norms, f"{type(model).__name__} can't be traced: {error}")
    if all(isinstance(readers, str) for readers in found.values()):
        reasons = "; ".join(dict.fromkeys(map(str, found.values())))
        raise UnsupportedError(
            f"fold_bias=True: no norm's shift can move into the layers that read it ({reasons}). Leave fold_bias out."
        )
    return found


def find_readers(model: nn.Module, inputs: Mapping[str, Any], norms: list[str]) -> dict[str, Readers | str]:
    """For each norm the linear layers that take its output; or why they aren't all that take it.

    Every reader must be a linear layer with a bias that reads nothing else.

    Args:
        model, inputs: the model and inputs of it.
        norms: names of the norms.
    """
    owners = {id(module._parameters["weight"]): module for module in model.modules() if _is_linear(module)}
    tracer = _Tracer(owners)
    with quiet(model):
        for name in norms:
            model.get_submodule(name).register_forward_hook(partial(tracer.mark, name))
        with tracer, host_errors():
            returned = outputs_of(model, inputs)
        for path, value in returned.items():
            if id(value) in tracer.marked:
                tracer.reasons.setdefault(tracer.marked[id(value)][0], f"the model returns it as {path}")
    return {name: tracer.verdict(name) for name in norms}


def _is_linear(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)


class _Tracer(TorchFunctionMode):
    """Sees every torch function of a forward, and which of them take a marked tensor."""

    def __init__(self, owners: dict[int, nn.Module]):
        super().__init__()
        self.owners = owners
        self.marked: dict[int, tuple[str, Tensor]] = {}  # the tensor is held, so that no other takes its id
        self.readers: dict[str, dict[int, tuple[nn.Module, int]]] = {}
        self.reasons: dict[str, str] = {}
        self.reads: dict[int, set[str | None]] = {}

    def mark(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        """Follow the output of a norm; a forward hook of it."""
        self.readers.setdefault(name, {})
        if isinstance(output, Tensor):
            self.marked[id(output)] = (name, output)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        called = getattr(func, "__name__", str(func))
        if called in _READS_METADATA and not isinstance(output, Tensor):
            return output
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        axis = {"linear": 1, "addmm": 0}.get(called)  # of the weight that reads
        reader = next((self.owners[id(value)] for value in tensors if id(value) in self.owners), None)
        for value in tensors:
            name = self.marked[id(value)][0] if id(value) in self.marked else None
            if axis is not None and reader is not None:
                if all(value is not own for own in reader._parameters.values()):
                    self.reads.setdefault(id(reader), set()).add(name)
                    if name is not None:
                        self.readers[name][id(reader)] = reader, axis
            elif name is not None:
                self._follow(name, called, output)
        return output

    def _follow(self, name: str, called: str, output: Any) -> None:
        norm_output = next(tensor for owner, tensor in self.marked.values() if owner == name)
        same = isinstance(output, Tensor) and output.shape[-1:] == norm_output.shape[-1:]
        if called in _KEEPS_CHANNELS and same:
            self.marked[id(output)] = (name, output)
        elif called not in _READS_METADATA:
            self.reasons.setdefault(name, f"{called} reads its output too")

    def verdict(self, name: str) -> Readers | str:
        """What reads a norm, or why its shift can't move there."""
        if name not in self.readers:
            return "it didn't run on the example inputs"
        readers = list(self.readers[name].values())
        if name in self.reasons:
            return self.reasons[name]
        if not readers:
            return "nothing reads it"
        for reader, _ in readers:
            if reader._parameters.get("bias") is None:
                return f"a {reader._get_name()} that reads it has no bias"
            if self.reads[id(reader)] != {name}:
                return f"a {reader._get_name()} that reads it reads something else too"
        return readers
