"""What replaying a patch record changes of a freshly built model, as statements of a modeling file.

The host is built on the meta device, remembered, patched as when a checkpoint is opened, and compared with itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..checkpoint import MISCOUNTED, OPENED, replay
from ..errors import UnsupportedError
from ..limits import mean_rows
from ..mlps import GatedActivation, GatedLinear
from ..native_rope import SETTINGS_AT
from ..norms import AffineNorm, describe
from ..positions import Learned
from ..record import KEY, Record
from ..relative import REMOVED
from ..select import pattern_of
from ..stacks import REMOVED_ROWS
from ..tables import ComputedPositions, computed, resized
from ..view import CENTRED, LENS, SCALE, SCALED, host_class
from .runtime import name_inside
from .spelling import Call, Named, Speller

_OF_TORCH = set(vars(nn.Module())) | {"_is_hf_initialized"}
# what tells hfpatch of earlier patches, and no forward
_TOLD = {REMOVED_ROWS, REMOVED, SETTINGS_AT, MISCOUNTED, OPENED, "hfpatch_note"}
_CLASSES = (nn.Linear, nn.SiLU, nn.GELU, nn.ReLU, nn.Identity)


@dataclass
class State:
    """A module as it was: its class, attributes, Parameters, children and buffers."""

    module: nn.Module
    kind: type
    attributes: dict[str, Any]
    parameters: dict[str, Any]
    children: dict[str, Any]
    buffers: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> State:
        own = {name: value for name, value in vars(module).items() if name not in _OF_TORCH}
        return cls(module, type(module), own, {**module._parameters}, {**module._modules}, {**module._buffers})


@dataclass
class Statement:
    """One change of a module, which is `at.module` before it."""

    before: str
    expression: Any

    def __str__(self) -> str:
        return f"{self.before}{self.expression}"


@dataclass
class Changed:
    """All changes of one module.

    Attributes:
        names: what it is called inside the base model.
        statements: the changes, in order.
    """

    names: list[str]
    statements: list[Statement] = field(default_factory=list)


def build(host: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    """A model on the meta device; the random stream is left as it is."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return host(config)


def replayed(host: type[PreTrainedModel], config: Any) -> tuple[PreTrainedModel, dict[str, State]]:
    """A host's model patched as its config's record says, and what its modules were before.

    Raises:
        PatchError: the record doesn't apply to it.
    """
    family: Any = host_class(type(config))
    plain = family.from_dict(config.to_dict())
    model = build(host, plain)  # from the host's config, lest some part of it be built patched
    before = {name: State.of(module) for name, module in model.named_modules(remove_duplicate=False)}
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        replay(model)
    miscounted = model.__dict__.pop(MISCOUNTED, None)
    if miscounted:
        raise UnsupportedError(f"{host.__name__}: {miscounted} when it is built afresh.")
    return model, before


@dataclass
class Differences:
    """What a patch changes of one class.

    Args:
        model: patched.
        before: its modules' states, by name.
    """

    model: PreTrainedModel
    before: dict[str, State]
    speller: Speller = field(default_factory=Speller)
    changed: list[Changed] = field(default_factory=list)
    lensed: bool = False  # whether the model's own forward sees something else

    def __post_init__(self) -> None:
        self.record = Record.from_json(getattr(self.model.config, KEY), type(self.model).__name__)
        base = self.model.base_model_prefix
        self.base = base if base in self.model._modules else ""
        found: dict[int, Changed] = {}
        new: list[str] = []
        for name, module in self.model.named_modules(remove_duplicate=False):
            if any(name.startswith(f"{above}.") for above in new):
                continue
            inside = name_inside(name, self.base)
            old = self.before.get(name)
            if old is None or old.module is not module:
                new.append(name)
            if old is None:
                continue  # its parent's statement adds it
            if id(module) in found:
                found[id(module)].names.append(inside)
                continue
            statements = list(self._statements(name, old, module))
            if statements:
                found[id(module)] = Changed([inside], statements)
        self.changed = list(found.values())

    # one module

    def _statements(self, name: str, old: State, module: nn.Module) -> Iterator[Statement]:
        where = name or type(module).__name__
        rebuilt = SETTINGS_AT in vars(module)
        if rebuilt:
            self._require_told(where, module)
        elif old.module is not module:
            yield Statement("", Call("at.put(", (self._module(module, old.module, where),)))
        else:
            yield from self._own(name, where, old, module)
        yield from self._seen(name, module)

    def _seen(self, name: str, module: nn.Module) -> Iterator[Statement]:
        """Lenses; the module's class looks through them."""
        own = vars(module)
        if own.get(LENS) is not None:
            yield Statement("", Call("at.see(", (self.speller.value(own[LENS]),)))
        if own.get(CENTRED) is not None:
            yield Statement("", Call("at.centre(", (self.speller.value(own[CENTRED]),)))
        if own.get(SCALED) is not None:
            yield Statement("", Call("at.scale(", (self.speller.value(own[SCALED]),)))
        if not name:
            self.lensed = any(own.get(attribute) is not None for attribute in (LENS, CENTRED, SCALED))

    def _own(self, module_name: str, where: str, old: State, module: nn.Module) -> Iterator[Statement]:
        """Changes of a module that stayed."""
        if host_class(type(module)) is not host_class(old.kind):
            raise UnsupportedError(f"{where}: its class changed in a way that a modeling file can't tell of.")
        if list(module._buffers) != list(old.buffers):
            raise UnsupportedError(f"{where}: a buffer was added or removed, which a modeling file can't tell of.")
        for name, value in module._parameters.items():
            changed = name not in old.parameters or value is not old.parameters[name]
            if changed and name != SCALE:
                yield self._parameter(where, name, value, old, module)
        gone = set()
        for name, child in module._modules.items():
            if name not in old.children and child is not None:
                made = self._module(child, None, f"{where}.{name}")
                yield Statement("", Call("at.add(", (f'"{name}"', made)))
        for name in old.children:
            if name not in module._modules and old.children[name] is not None:
                gone.add(name)
                yield Statement("", Call("at.drop(", (f'"{name}"',)))
        for name, value in vars(module).items():
            if name in _OF_TORCH or name in _TOLD or name in gone or name in (LENS, CENTRED, SCALED):
                continue
            present = old.attributes.get(name, self)
            if value is not present and not (isinstance(value, bool | int | float | str) and value == present):
                yield self._attribute(module_name, where, name, value, present)

    def _attribute(self, module: str, where: str, name: str, value: Any, old: Any) -> Statement:
        before = f"at.module.{name} = "
        if not name.isidentifier() or name.startswith("_hfpatch"):
            before = f'vars(at.module)["{name}"] = '
        if isinstance(value, GatedActivation):  # in the place of a function
            return Statement(before, self._module(value, old, f"{where}.{name}", f"at.module.{name}"))
        if isinstance(value, Tensor):
            if not isinstance(old, Tensor) or value.shape != mean_rows(old).shape or self._reset():
                raise UnsupportedError(f"{where}.{name} is a tensor that is in no checkpoint.")
            return Statement(before, Call(f"{self.speller.name(mean_rows)}(", (f"at.module.{name}",)))
        if not module and self.base and old is not self:
            return Statement("", Call("at.change(", (f'"{name}"', self.speller.value(value))))
        return Statement(before, self.speller.value(value))

    def _reset(self) -> bool:
        return any(part.init == "reset" for part in self.record.pos)

    def _parameter(self, where: str, name: str, value: Any, old: State, module: nn.Module) -> Statement:
        before = f"at.module.{name} = "
        was = old.parameters.get(name)
        if value is None:
            return Statement(before, "None")
        scheme = self.record.pos[-1].scheme if self.record.pos else None
        if isinstance(module, nn.Embedding) and name == "weight" and isinstance(scheme, Learned):
            first = len(value) - (scheme.max_positions or 0)
            arguments = ("at.module", self.speller.call(type(scheme), vars(scheme)), str(first))
            return Statement(before, Call(f"{self.speller.name(resized)}(", arguments))
        if was is not None and value.shape == mean_rows(was).shape:
            rows = Call(f"{self.speller.name(mean_rows)}(", (f"at.module.{name}",))
            return Statement(before, Call("nn.Parameter(", (rows,)))
        raise UnsupportedError(f"{where}.{name} was exchanged in a way that a modeling file can't tell of.")

    def _require_told(self, where: str, module: nn.Module) -> None:
        """A rotation made again from other settings is what the host builds, where the config says them."""
        if vars(module)[SETTINGS_AT] is None:
            raise UnsupportedError(
                f"{where} rotates by settings that stand in no part of the model's config, so the host alone doesn't "
                "build it so. Publish the checkpoint for hfpatch."
            )

    # new modules

    def _module(self, new: nn.Module, old: Any, where: str, at: str = "at.old") -> Any:
        """Source of what makes a module; `at` is what stands there before."""
        kind: Any = type(new)
        if isinstance(new, ComputedPositions):
            arguments = (at, self.speller.value(new.scheme), str(new.first))
            return Call(f"{self.speller.name(computed)}(", arguments)
        kind = host_class(kind) if LENS in vars(new) or CENTRED in vars(new) else kind
        if isinstance(new, AffineNorm):
            spelled = self._of_norm(new, old, at)
            return self.speller.call(kind, {**vars(new), "kind": new.facts.kind}, spelled)
        if isinstance(new, GatedLinear):
            spelled = {name: self._projection(child, old, at) for name, child in new._modules.items()}
            if spelled["up"] == at:
                spelled["up"] = Call(f"{self.speller.name(copy.deepcopy)}(", (at,))
            return self.speller.call(kind, vars(new), spelled)
        if isinstance(new, GatedActivation):
            act = at if _alike(new.act, old) else self._plain(new.act, where)
            return self.speller.call(kind, {}, {"act": act, "replaced": at})
        if isinstance(new, nn.Linear | Conv1D):
            return self._projection(new, old, at)
        if new._modules:
            raise UnsupportedError(f"{where}: a modeling file can't tell of {kind.__qualname__}, which has children.")
        takes_table = {"table": self._table(old, at)} if old is not None else {}
        own = {**vars(new), **({"padding_idx": None} if "padding_idx" not in vars(new) else {})}
        return self.speller.call(kind, {**own, "first": 0}, {**takes_table, "like": self._like(old, at)})

    def _of_norm(self, new: AffineNorm, old: Any, at: str) -> dict[str, Any]:
        """Arguments of a norm's class that are the replaced one's Parameters."""
        facts = describe(old) if old is not None else None
        spelled: dict[str, Any] = {"like": self._like(old, at)}
        for argument, name in zip(("gain", "shift"), new.names, strict=True):
            value = new._parameters.get(name)
            same = getattr(facts, argument, None)  # one that starts afresh is another of the same shape
            if value is None:
                spelled[argument] = "None"
            elif same is not None:
                spelled[argument] = f"{at}.{same}"
            else:
                start = new.initial_values()[name]
                spelled[argument] = f"nn.Parameter(torch.full({tuple(value.shape)}, {start}))"
        return spelled

    def _like(self, old: Any, at: str) -> str:
        name = next((n for n, p in (old._parameters.items() if old is not None else ()) if p is not None), None)
        return f"{at}.{name}" if name else "next(self.parameters())"

    def _table(self, old: Any, at: str) -> str:
        """The rows of a table of positions."""
        for kind in (old._parameters, old._buffers):
            for name, value in kind.items():
                if value is not None and value.dim() >= 2:
                    return f"{at}.{name}"
        width = getattr(old, "embed_dim", None)
        return f"torch.zeros(1, {width})"

    def _projection(self, new: Any, old: Any, at: str) -> Any:
        shapes = [{n: p.shape for n, p in m._parameters.items() if p is not None} for m in (new, old) if m is not None]
        if old is not None and type(new) is type(old) and shapes[0] == shapes[1]:
            return at
        if isinstance(new, Conv1D):
            return Call(f"{self.speller.name(Conv1D)}(", (str(new.nf), str(new.weight.shape[0])))
        if not isinstance(new, nn.Linear):
            raise UnsupportedError(f"a modeling file can't tell of {type(new).__qualname__} in the place of an MLP's.")
        bias = () if new.bias is not None else (Named("bias=", "False"),)
        return Call("nn.Linear(", (str(new.in_features), str(new.out_features), *bias))

    def _plain(self, module: nn.Module, where: str) -> Any:
        """A module that its class makes without arguments."""
        if not _alike(module, type(module)()):
            raise UnsupportedError(f"{where}: a modeling file can't tell of {module!r}.")
        return Call(f"{self.speller.name(type(module))}(", ())


def _alike(a: Any, b: Any) -> bool:
    """Whether two modules without Parameters are the same function, as far as can be seen."""
    if type(a) is not type(b) or not isinstance(a, nn.Module) or list(a.parameters()):
        return a is b
    own = [{name: value for name, value in vars(m).items() if name not in _OF_TORCH} for m in (a, b)]
    return own[0] == own[1]


def grouped(differences: Differences) -> list[tuple[list[str], list[Statement]]]:
    """Modules that change alike, under patterns where these name no other module: (names, statements)."""
    every: dict[str, set[str]] = {}
    for name in differences.before:
        inside = name_inside(name, differences.base)
        every.setdefault(pattern_of(inside), set()).add(inside)
    groups: dict[tuple[str, ...], list[Changed]] = {}
    for changed in differences.changed:
        groups.setdefault(tuple(map(str, changed.statements)), []).append(changed)
    found = []
    for members in groups.values():
        names = {name: None for changed in members for name in changed.names}
        patterns: dict[str, None] = {}
        for name in names:
            pattern = pattern_of(name)
            patterns[pattern if every[pattern] <= names.keys() and len(every[pattern]) > 1 else name] = None
        found.append((list(patterns), members[0].statements))
    return found


def sketch(model: nn.Module) -> dict[str, Any]:
    """What a model is made of, to be compared with another one: classes, shapes, attributes by what they say."""
    found: dict[str, Any] = {}
    first: dict[int, str] = {}  # where a Parameter or module that stands in several places stands first
    for name, module in model.named_modules(remove_duplicate=False):
        kind = host_class(type(module))
        own = {key: _said(value) for key, value in vars(module).items() if key not in _OF_TORCH and key not in _TOLD}
        held = {**module._parameters, **module._buffers}
        shapes = {key: None if value is None else (tuple(value.shape), value.dtype) for key, value in held.items()}
        lensed = type(module) is not kind and not isinstance(module, PreTrainedModel)
        said = {"class": kind.__name__, "lensed": lensed, "children": list(module._modules)}
        same = {f"{key}, first": first.setdefault(id(p), f"{name}.{key}") for key, p in held.items() if p is not None}
        found[name] = {**own, **shapes, **said, **same, "first": first.setdefault(id(module), name)}
    return found


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if value is None or isinstance(value, bool | int | float | str | tuple | list | dict | set):
        return repr(value) if not callable(value) else "a function"
    if hasattr(type(value), "__dataclass_fields__") and not hasattr(value, "model_type"):
        return repr(value)
    return type(value).__name__
