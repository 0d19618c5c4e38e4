"""Which linear layers read a norm's output, found by following it through one forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..measure.outputs import outputs_of
from ..measure.quiet_forward import quiet

# ways in which a tensor is handed on as the same channels
_HANDED_ON = (
    "view", "reshape", "contiguous", "to", "float", "clone", "detach", "expand", "dropout", "flatten", "unsqueeze",
    "squeeze", "type_as", "__getitem__",
)  # fmt: skip
_LOOKED_AT = (
    "__get__", "size", "dim", "stride", "is_contiguous", "is_floating_point", "numel", "data_ptr", "type", "__len__",
    "requires_grad_", "get_device", "element_size", "__set__",
)  # fmt: skip


def find_readers(
    model: nn.Module, given: Mapping[str, Any], norms: list[str]
) -> dict[str, list[tuple[nn.Module, int]] | str]:
    """For each norm the linear layers that take its output, with the weight's input axis; or why it isn't theirs alone.

    Every reader must be a linear layer with a bias that reads nothing else.

    Args:
        model, given: the model and inputs of it.
        norms: names of the norms.
    """
    owners = {id(module._parameters["weight"]): module for module in model.modules() if _is_linear(module)}
    tracer = _Tracer(owners)
    with quiet(model):
        for name in norms:
            model.get_submodule(name).register_forward_hook(tracer.marker(name))
        with tracer:
            returned = outputs_of(model, given)
        for path, value in returned.items():
            tracer.returned(path, value)
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

    def marker(self, name: str) -> Any:
        def mark(module: nn.Module, args: Any, output: Any) -> None:
            self.readers.setdefault(name, {})
            if isinstance(output, Tensor):
                self.marked[id(output)] = (name, output)

        return mark

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        called = getattr(func, "__name__", str(func))
        if called in _LOOKED_AT and not isinstance(output, Tensor):
            return output
        taken = [value for value in _flat((*args, *kwargs.values())) if isinstance(value, Tensor)]
        linear = self._linear(called, taken)
        inputs = taken if linear is None else [value for value in taken if id(value) not in linear[2]]
        for value in inputs:
            name = self.marked[id(value)][0] if id(value) in self.marked else None
            if linear is not None:
                self.reads.setdefault(id(linear[0]), set()).add(name)
                if name is not None:
                    self.readers[name][id(linear[0])] = linear[:2]
            elif name is not None:
                self._hand_on(name, called, output)
        return output

    def _linear(self, called: str, taken: list[Tensor]) -> tuple[nn.Module, int, set[int]] | None:
        """The layer whose weight is among the arguments, the weight's input axis, and ids of its own Parameters."""
        axis = {"linear": 1, "addmm": 0}.get(called)
        owner = next((self.owners[id(value)] for value in taken if id(value) in self.owners), None)
        if axis is None or owner is None:
            return None
        return owner, axis, {id(value) for value in owner._parameters.values()}

    def _hand_on(self, name: str, called: str, output: Any) -> None:
        given = next(tensor for owner, tensor in self.marked.values() if owner == name)
        same = isinstance(output, Tensor) and output.shape[-1:] == given.shape[-1:]
        if called in _HANDED_ON and same:
            self.marked[id(output)] = (name, output)
        elif called not in _LOOKED_AT:
            self.reasons.setdefault(name, f"{called} reads its output too")

    def returned(self, path: str, value: Tensor) -> None:
        if id(value) in self.marked:
            self.reasons.setdefault(self.marked[id(value)][0], f"the model returns it as {path}")

    def verdict(self, name: str) -> list[tuple[nn.Module, int]] | str:
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


def _flat(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        found += _flat(value) if isinstance(value, tuple | list) else [value]
    return found
