"""Adapters of TransformerLens (`TransformerBridge`) for patched models: they run the model's own norms and attentions.

An adapter of TransformerLens rebuilds norms and attentions from what it knows of the host's class, which of a patched
model is another function. TransformerLens loads this module by the entry point `transformer_lens.architectures` when it
first looks for an adapter. It then registers a subclass of every adapter, which behaves like its parent until it is
handed a patched model (one of remote code too):

* Norms of hfpatch run their own forward. `hook_normalized` is what they normalise to; `hook_scale` is there only where
  a root is divided by. Norms that are gone have neither. They aren't folded into what follows, nor is the residual
  stream centred.
* Attentions with a lens run their own forward. Of a fused projection there are no `hook_q`, `hook_k` and `hook_v`.
* A table of positions that was removed has no component.
* In a block with a placement, names of the residual stream that would mean something else aren't there.

A forward before and one after show whether the bridge computes the patched model; if not, it is refused, and the model
is put back.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformer_lens.factories.architecture_adapter_factory import (
    SUPPORTED_ARCHITECTURES,
    ArchitectureAdapterFactory,
)
from transformer_lens.model_bridge.architecture_adapter import ArchitectureAdapter
from transformer_lens.model_bridge.generalized_components import (
    AttentionBridge,
    BlockBridge,
    JointQKVAttentionBridge,
    LinearBridge,
    MLPBridge,
    NormalizationBridge,
    PosEmbedBridge,
)

from ..core.bare import has_weights
from ..errors import UnsupportedError
from ..measure.copies import copy_of
from ..measure.inputs import example_inputs
from ..measure.outputs import FACTOR, last_bit, max_error, noise_floor, outputs_of
from ..measure.quiet_forward import cast_for_model
from ..runtime.fixed import NoNorm
from ..runtime.gated import GatedLinear
from ..runtime.lens import CENTRED, LENS, SCALED
from ..runtime.norms import HALF, AffineNorm, affine
from ..runtime.record import ARCHITECTURE

NATIVE = (
    "Export it to a stock architecture first, hfpatch.export_model(model, folder, to='native'), and open that; or "
    "TransformerLens can't be used for it."
)
_ROOTS = {"layer": "LN", "rms": "RMS"}  # TransformerLens' normalization_type, by the kind of a norm that has a root
_FORKS = ("hook_attn_in", "hook_q_input", "hook_k_input", "hook_v_input")
_PLACED = ("hook_resid_mid", "hook_attn_out", "hook_mlp_out")  # what a placement makes another tensor


def is_patched(model: Any) -> bool:
    """Return whether hfpatch or an export of its code built a model."""
    return bool(getattr(model, "hfpatch_model", False))


def is_own_norm(module: Any) -> bool:
    """Return whether a module is one of hfpatch's norms; exported code defines other classes for them."""
    return _is_a(module, AffineNorm)


def _is_a(module: Any, kind: type) -> bool:
    return any(base.__name__ == kind.__name__ for base in type(module).__mro__)


def has_lens(module: Any) -> bool:
    """Return whether a module's forward runs through a lens."""
    return isinstance(module, nn.Module) and vars(module).get(LENS) is not None


def is_changed(module: Any) -> bool:
    """Return whether a module isn't one of torch's or transformers', or does more than its class."""
    marked = any(vars(module).get(slot) is not None for slot in (LENS, CENTRED, SCALED))
    homes = {base.__module__.partition(".")[0] for base in type(module).__mro__}
    return marked or not homes <= {"torch", "transformers", "builtins"}


class OwnNorm:
    """Mixin for norm components: a norm of hfpatch runs its own forward."""

    def set_original_component(self: Any, norm: nn.Module) -> None:
        super().set_original_component(norm)  # type: ignore[misc]
        if is_own_norm(norm):
            facts: Any = norm.facts
            if _ROOTS.get(facts.kind) != self.config.normalization_type or facts.channels_first:
                _remove(self, "hook_scale")
            if facts.channels_first:
                _remove(self, "hook_normalized")
        elif _is_a(norm, NoNorm):
            _remove(self, "hook_scale")
            _remove(self, "hook_normalized")

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        norm = self.original_component
        if _is_a(norm, NoNorm):
            return self.hook_out(norm(self.hook_in(hidden_states)))
        if not is_own_norm(norm):
            return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
        x = self.hook_in(hidden_states)
        points = [point for name in ("hook_scale", "hook_normalized") if (point := self._modules.get(name)) is not None]
        hooked = any(point.has_hooks() for point in points)
        return self.hook_out(self._run_hooked(norm, x, *args) if hooked else norm(x, *args, **kwargs))

    def _run_hooked(self: Any, norm: Any, x: Tensor, *more: Any) -> Tensor:
        """The norm's output, made from the tensors of its hooks if one was changed or has a gradient to pass."""
        wide = x.float() if x.dtype in HALF else x
        normalised, scale_point = norm.normalise(wide, *more), self._modules.get("hook_scale")
        changed = self.hook_normalized.has_hooks(dir="bwd")
        if scale_point is not None:
            middle = wide - wide.mean(-1, keepdim=True) if norm.facts.kind == "layer" else wide
            scale = (middle.square().mean(-1, keepdim=True) + norm.eps_for(x)).sqrt()
            hooked_scale = scale_point(scale)
            if hooked_scale is not scale or scale_point.has_hooks(dir="bwd"):
                normalised, changed = middle / hooked_scale, True
        hooked = self.hook_normalized(normalised)
        if hooked is normalised and not changed:
            return norm(x, *more)
        gain, shift = norm.facts.parameters_of(norm)
        if gain is not None and norm.facts.offset:
            gain = gain + norm.facts.offset
        return affine(hooked, gain, shift).to(x.dtype)


class OwnAttention:
    """Mixin for attention components: an attention with a lens runs its own forward."""

    def set_original_component(self: Any, attention: nn.Module) -> None:
        super().set_original_component(attention)  # type: ignore[misc]
        if not has_lens(attention):
            return
        self.supports_split_qkv_fork = self.supports_attn_result = False
        absent = [*_FORKS, "hook_result"]
        if isinstance(self, JointQKVAttentionBridge):  # its copies of the three parts would never run
            absent += ["q", "k", "v"]
            self.hook_aliases = {k: v for k, v in self.hook_aliases.items() if k not in ("hook_q", "hook_k", "hook_v")}
        for name in absent:
            _remove(self, name)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if has_lens(self.original_component):
            return AttentionBridge.forward(self, *args, **kwargs)
        return super().forward(*args, **kwargs)  # type: ignore[misc]


class OwnMLP:
    """Mixin for MLP components: a patched MLP's gate and up projections are `gate` and `in`."""

    def set_original_component(self: Any, mlp: nn.Module) -> None:
        super().set_original_component(mlp)  # type: ignore[misc]
        first = self.submodules.get("in")
        if first is not None and first.name and type(_at(mlp, first.name)).__name__ == GatedLinear.__name__:
            self.submodules["gate"] = LinearBridge(name=f"{first.name}.gate")
            first.name += ".up"
            self.hook_aliases = self.hook_aliases | {"hook_pre": "gate.hook_out", "hook_pre_linear": "in.hook_out"}


class OwnBlock:
    """Mixin for block components: without the names whose meaning a patch changed."""

    def set_original_component(self: Any, block: nn.Module) -> None:
        super().set_original_component(block)  # type: ignore[misc]
        absent = set(_FORKS) if any(map(has_lens, block.modules())) else set()
        if has_lens(block):
            absent |= set(_PLACED)
        self.hook_aliases = {name: target for name, target in self.hook_aliases.items() if name not in absent}

    def _read_use_hook_mlp_in(self: Any) -> bool:
        wanted = super()._read_use_hook_mlp_in()  # type: ignore[misc]
        if wanted and has_lens(self.original_component):
            raise UnsupportedError(
                f"hook_mlp_in: {self.name} has another placement of its norms; use its modules' hooks."
            )
        return wanted


_OWN: Mapping[Any, Any] = {
    NormalizationBridge: OwnNorm,
    AttentionBridge: OwnAttention,
    MLPBridge: OwnMLP,
    BlockBridge: OwnBlock,
}


class PatchedAdapter(ArchitectureAdapter):
    """Mixin for adapters that run hfpatch's modules; unpatched models are left to the parent class."""

    hfpatch_reference: Any = None

    def prepare_model(self, hf_model: Any) -> None:
        if not is_patched(hf_model):
            return super().prepare_model(hf_model)
        self.hfpatch_reference = Reference(hf_model)
        super().prepare_model(hf_model)
        if has_lens(hf_model) or any(is_changed(module) for module in hf_model.modules() if module is not hf_model):
            self.supports_fold_ln = self.supports_center_writing_weights = False
        for name, component in list(self.components.items()):
            if isinstance(component, PosEmbedBridge) and _at(hf_model, component.name) is None:
                del self.components[name]
                self.cfg.positional_embedding_type = "rotary"  # nothing is added to the stream
        final: Any = next((one for name, one in self.components.items() if name.startswith("ln_final")), None)
        final = _at(hf_model, final.name) if final is not None else None
        if is_own_norm(final) and final.facts.kind in _ROOTS:
            self.cfg.normalization_type = _ROOTS[final.facts.kind]
            self.cfg.uses_rms_norm = self.cfg.final_rms = final.facts.kind == "rms"
        for component in _inside(self.components):
            base: Any = next((base for base in _OWN if isinstance(component, base)), None)
            if base is not None:
                parent: Any = type(component)
                component.__class__ = _with_base(parent, _OWN[base])
        return None

    def preprocess_weights(self, state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
        model = getattr(self.hfpatch_reference, "model", None)
        parts = () if model is None else model.modules()
        if any(isinstance(one, JointQKVAttentionBridge) and has_lens(one.original_component) for one in parts):
            raise UnsupportedError(
                f"{type(model).__name__}: its attention rotates, or adds to its scores, what one layer computes for q, "
                "k and v, and TransformerLens can't process such weights. Use "
                "enable_compatibility_mode(no_processing=True)."
            )
        return super().preprocess_weights(state_dict)

    def setup_hook_compatibility(self, bridge: Any) -> None:
        for name in ("setup_hook_compatibility", "setup_no_processing_hooks"):  # a parent has one of them, or none
            if (inherited := getattr(super(), name, None)) is not None:
                inherited(bridge)
                break
        if self.hfpatch_reference is not None:
            self.hfpatch_reference.require(bridge)


class Reference:
    """Outputs and structure of a patched model before TransformerLens replaces its components."""

    def __init__(self, model: Any):
        self.model, self.name = model, type(model).__name__
        self.built = [(module, dict(vars(module)), dict(module._modules)) for module in model.modules()]
        self.inputs: Any = None
        if has_weights(model):
            # without the mask of ones: TransformerLens takes GPT-1's mask, patched or not, for a causal mask
            inputs = {name: value for name, value in example_inputs(model).items() if name != "attention_mask"}
            self.inputs = cast_for_model(model, inputs)
            self.outputs = self._outputs()
            self.floor = noise_floor(copy_of(model, share=True), self.inputs)

    def _outputs(self) -> dict[str, Tensor]:
        """Outputs; logits without their mean, which TransformerLens subtracts in compatibility mode."""
        modes = [(module, module.training) for module in self.model.modules()]
        try:
            for module, _ in modes:
                module.training = False
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                found = outputs_of(self.model, self.inputs)
        finally:
            for module, training in modes:
                module.training = training
        return {name: x - x.mean(-1, keepdim=True) if name == "logits" else x for name, x in found.items()}

    def require(self, bridge: Any) -> None:
        """Refuse a bridge with other outputs; the first check also restores the model.

        Raises:
            UnsupportedError: the bridge has other outputs, or doesn't run.
        """
        if self.inputs is None:
            return
        try:
            error, why = max_error(self.outputs, self._outputs()), ""
        except Exception as failure:  # a forward may raise anything
            error, why = float("inf"), f" ({type(failure).__name__}: {failure!s:.200})"
        if error <= FACTOR * max(self.floor, last_bit(self.model)):
            return
        if bridge.compatibility_mode:
            raise UnsupportedError(
                f"{self.name}: with processed weights TransformerLens computes something else than the patched model, "
                f"off by {error:.2g}{why}. Make another bridge, and enable_compatibility_mode(no_processing=True)."
            )
        self._put_back()
        raise UnsupportedError(
            f"{self.name}: TransformerLens' {type(bridge).__name__} rebuilds it as something else than the patched "
            f"model, off by {error:.2g}{why}. {NATIVE}"
        )

    def _put_back(self) -> None:
        for module, attributes, children in self.built:
            vars(module).clear()
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(children)


def _remove(component: Any, name: str) -> None:
    """Take a hook or a part out of a component: at a hook that never fires an edit would do nothing."""
    for registry in (component._modules, component._hook_registry, component.submodules, component.real_components):
        registry.pop(name, None)


def _at(model: Any, path: str) -> Any:
    """What is at a dotted path; None if nothing is."""
    for name in path.split("."):
        model = getattr(model, name, None)
    return model


def _inside(components: Mapping[str, Any]) -> Iterator[Any]:
    """The components of a mapping, and those in them."""
    for component in components.values():
        yield component
        yield from _inside(component.submodules)


@functools.cache
def _with_base(parent: Any, own: Any) -> type:
    """A subclass of a component's or an adapter's class, under the same name, with `own` as its first base."""
    return type(parent.__name__, (own, parent), {"__module__": parent.__module__, "__doc__": parent.__doc__})


def register_adapters() -> None:
    """Register an adapter for each architecture of TransformerLens, also under its name on disk."""
    for name, parent in SUPPORTED_ARCHITECTURES.items():
        adapter: Any = _with_base(parent, PatchedAdapter)
        ArchitectureAdapterFactory.register_adapter(name, adapter)
        ArchitectureAdapterFactory.register_adapter(ARCHITECTURE + name, adapter)


register_adapters()
