"""Which Parameters transformers' Trainer lets decay, before a patch and after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import Trainer

from hfpatch.runtime.norms import AffineNorm


def decayed(model: nn.Module) -> set[str]:
    """Names of the Parameters that decay: of those that are trained."""
    names = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]  # it uses nothing of the Trainer
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad} & set(names)


@dataclass
class Decay:
    """What decays in a model, to be compared with the same model after a patch.

    Attributes:
        parameters: whether each Parameter decays, by its name.
        modules: the names of all modules.
    """

    parameters: dict[str, bool]
    modules: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, model: nn.Module) -> Decay:
        names = decayed(model)
        modules = {name for name, _ in model.named_modules() if name}
        return cls({name: name in names for name, _ in model.named_parameters()}, modules)

    def differing(self, patched: Any) -> list[str]:
        """Parameters of the patched model that decay and shouldn't, or don't and should.

        A Parameter of an old name has to do as before. A new one of a norm mustn't decay; nor must a vector that a
        module got beside what it has. Any other replaces what was at its place (a gated MLP's matrices, the constant in
        the place of a table), and has to do as that did; a bias never decays.
        """
        names, present = decayed(patched), dict(patched.named_parameters())
        return [name for name in present if (name in names) != self._should(name, patched, present)]

    def left_out(self, patched: Any) -> list[str]:
        """Gains that decayed under another name, and whose norm decays no more because it has further Parameters."""
        after, found = decayed(patched), []
        for name in dict(patched.named_parameters()).keys() - self.parameters.keys() - after:
            norm, _, leaf = name.rpartition(".")
            is_gain = isinstance(module := _owner(patched, name), AffineNorm) and leaf == module.names[0]
            if is_gain and any(decays for _, decays in self._at(norm)):
                found.append(name)
        return sorted(found)

    def _should(self, name: str, patched: Any, present: dict[str, Any]) -> bool:
        if name in self.parameters:
            return self.parameters[name]
        if isinstance(_owner(patched, name), AffineNorm) or "bias" in name.rpartition(".")[2]:
            return False
        before = self._at(self._place(name))
        if present[name].dim() < 2 and any(old in present for old, _ in before):
            return False
        return any(decays for _, decays in before)

    def _place(self, name: str) -> str:
        """The longest part of a name that was a module's."""
        while name not in self.modules and name:
            name = name.rpartition(".")[0]
        return name

    def _at(self, place: str) -> list[tuple[str, bool]]:
        return [(name, decays) for name, decays in self.parameters.items() if name.startswith(f"{place}.")]


def _owner(model: Any, name: str) -> Any:
    return model.get_submodule(name.rpartition(".")[0])
