"""What a generated modeling file has besides the modules of a patch: ways to put them in, and the classes' bases.

hfpatch runs none of this by itself. It stands in a file of its own so that it is read, checked and tested like the
rest; `sources.Extract` takes from it what a modeling file needs.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn

from ..checkpoint.fingerprint import ENTRY as FINGERPRINT
from ..core.scheme import KEY
from ..runtime.generation import without_old_length
from ..runtime.lens import CENTRED, LENS, SCALE, SCALED, Lens, host_class, lensed_class, lensed_forward
from ..runtime.norms import AffineNorm
from ..runtime.refuse_host import ENTRY as GUARDED
from ..runtime.refuse_host import SENTENCE

AROUND = "<model>"  # what a model with a head is called itself


class Place:
    """One module of a freshly built model, and every place where it stands.

    Attributes:
        old: the module as the host built it.
        module: what stands there now.
    """

    def __init__(self, old: nn.Module):
        self.old: Any = old
        self.module: Any = old
        self.places: list[tuple[nn.Module, str]] = []

    def put(self, new: nn.Module) -> None:
        """Put another module there."""
        new.train(self.module.training)
        for parent, name in self.places:
            parent._modules[name] = new
        self.module = new

    def add(self, name: str, new: nn.Module) -> None:
        """Give the module one more child."""
        parameter = next(self.module.parameters(), None)
        if parameter is not None and not parameter.is_meta:  # a buffer on meta would miss its values later
            new.to(parameter.device, parameter.dtype)
        self.module._modules[name] = new.train(self.module.training)

    def change(self, name: str, value: Any) -> None:
        """Give an attribute another value, if the module has it: heads differ."""
        if name in vars(self.module):
            setattr(self.module, name, value)

    def drop(self, child: str) -> None:
        """Leave a child's name without a module."""
        self.module._modules.pop(child)
        vars(self.module)[child] = None

    def see(self, lens: Lens) -> None:
        """Let the module's forward see what the lens shows it."""
        vars(self.module)[LENS] = lens
        self._look()

    def centre(self, axis: int) -> None:
        """Subtract the mean over an axis from the module's output."""
        vars(self.module)[CENTRED] = axis
        self._look()

    def scale(self, start: float) -> None:
        """Multiply the module's output by a learned scalar."""
        weight = self.module.weight
        self.module.register_parameter(SCALE, nn.Parameter(weight.new_full((1,), start)))
        vars(self.module)[SCALED] = start
        self._look()

    def _look(self) -> None:
        if not isinstance(self.module, Patched):  # whose class looks through lenses by itself
            self.module.__class__ = lensed_class(host_class(type(self.module)))


def places(model: nn.Module, *patterns: str) -> Iterator[Place]:
    """The modules that have one of these names inside the base model; `*` stands for a number, "" for the base itself.

    Raises:
        ValueError: the class that this file was written for has no such module.
    """
    base = getattr(model, "base_model_prefix", "")
    headed = bool(base) and base in model._modules
    found: dict[int, Place] = {}
    parents: dict[str, nn.Module] = {}
    missing = set(patterns)
    done = tuple(f"{name}." for name, module in model.named_modules() if name and isinstance(module, Patched))
    for name, module in model.named_modules(remove_duplicate=False):
        parents[name] = module
        inside = name_inside(name, base if headed else "")
        hit = next((pattern for pattern in patterns if _matches(pattern, inside)), None)
        if hit is None:
            continue
        missing.discard(hit)
        if f"{name}.".startswith(done):  # a part that was built as one of the classes here
            continue
        place = found.setdefault(id(module), Place(module))
        if name:
            parent, _, child = name.rpartition(".")
            place.places.append((parents[parent], child))
    if missing and type(model).__name__ in (model.config.architectures or []):  # type: ignore[union-attr,operator]
        raise ValueError(
            f"{type(model).__name__} of transformers {transformers.__version__} has no {', '.join(sorted(missing))}: "
            "this file was written for another version. Install the one that it names."
        )
    yield from found.values()


def name_inside(name: str, base: str) -> str:
    """A module's name inside the base model; heads, and the model around it, keep theirs."""
    if not base:
        return name
    if not name:
        return AROUND
    return "" if name == base else name.removeprefix(f"{base}.")


def _matches(pattern: str, name: str) -> bool:
    pieces, names = pattern.split("."), name.split(".")
    return len(pieces) == len(names) and all(
        piece == one or (piece == "*" and one.isdigit()) for piece, one in zip(pieces, names, strict=True)
    )


@torch.no_grad()
def start_norms(model: nn.Module) -> None:
    """Starting values of norms' Parameters that no checkpoint filled."""
    for module in model.modules():
        if isinstance(module, AffineNorm):
            for name, value in module.initial_values().items():
                _start(getattr(module, name, None), value)


@torch.no_grad()
def start_scales(model: nn.Module) -> None:
    """Starting values of learned scalars on outputs that no checkpoint filled."""
    for module in model.modules():
        if SCALED in vars(module):
            _start(getattr(module, SCALE), vars(module)[SCALED])


def _start(parameter: Any, value: float) -> None:
    if parameter is not None and not parameter.is_meta and not getattr(parameter, "_is_hf_initialized", False):
        parameter.fill_(value)


def recompute(model: nn.Module, kinds: tuple[type, ...]) -> None:
    """Fill the buffers that are in no checkpoint; loading leaves them empty."""
    for module in model.modules():
        if isinstance(module, kinds):
            module.reset()  # type: ignore[operator]


class PatchedConfig:
    """A host's config; on disk its model_type says that the host's code alone isn't the model."""

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> Any:
        stored, unused = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        return {**stored, "model_type": cls.model_type}, unused  # type: ignore[attr-defined]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        stored: Any = copy.deepcopy({**config_dict, "model_type": cls.model_type})  # type: ignore[attr-defined]
        record = stored.get(KEY) or {}
        record.pop(FINGERPRINT, None)  # that of the weights, which may be trained here
        for path, value in record.get(GUARDED, {}).items():
            *parents, name = path.split(".")
            part = functools.reduce(lambda settings, parent: settings[parent], parents, stored)
            part[name] = value if isinstance(part[name], str) else part[name]
        return super().from_dict(stored, **kwargs)  # type: ignore[misc]

    def to_json_string(self, use_diff: bool = True) -> str:
        stored = {**json.loads(super().to_json_string(use_diff=use_diff)), "model_type": KEY}  # type: ignore[misc]
        record = stored.get(KEY) or {}
        for path in record.get(GUARDED, {}):  # settings that the host needs, so that its own class opens nothing
            *parents, name = path.split(".")
            part = functools.reduce(lambda settings, parent: settings.get(parent, {}), parents, stored)
            record[GUARDED][path] = functools.reduce(getattr, path.split("."), self)
            part[name] = SENTENCE
        for auto, reference in stored.get("auto_map", {}).items():  # a pair, where a class has "Tokenizer" in its name
            stored["auto_map"][auto] = reference if isinstance(reference, str) else reference[0]
        return json.dumps(stored, indent=2, sort_keys=True) + "\n"


class Patched:
    """First base of every model class here: the host's model, changed when it is built.

    transformers treats it as it treats the host, whose code does all that loading and saving go by.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        self.patch_host()  # type: ignore[attr-defined]

    def initialize_weights(self) -> None:
        super().initialize_weights()  # type: ignore[misc]
        self.start_values()  # type: ignore[attr-defined]

    @classmethod
    def is_custom_code(cls) -> bool:
        return False

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return built_on(cls)._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return built_on(cls)._can_set_experts_implementation()


class Lensed:
    """Of a model class that itself sees its own forward otherwise."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.forward = lensed_forward(built_on(cls), cls)  # type: ignore[attr-defined]


class AnyLength:
    """Of a model class whose inputs end nowhere: `generate()` neither cuts nor warns at the config's old length."""

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        for name, method in without_old_length(built_on(cls), lambda model: True).items():
            setattr(cls, name, method)


def built_on(cls: type) -> Any:
    """The transformers class behind one of this file."""
    return next(base for base in cls.__mro__ if base.__module__.startswith("transformers."))
