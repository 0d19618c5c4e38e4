"""Refuses wrapped models (torch.compile, FSDP, PEFT, accelerate hooks), and parts of larger models.

A patch couldn't replace the modules of a wrapped model. A checkpoint has one patch record, that of the model which is
saved. A module doesn't know its parent: the parent is found through Python's garbage collector.
"""

from __future__ import annotations

import gc
from contextlib import suppress
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..errors import OptionError, WrappedModelError
from ..runtime.lens import host_class
from ..runtime.patch_errors import UnsupportedError
from ..runtime.record import KEY


def require_bare(model: object) -> None:
    """Refuse any model but a bare transformers model.

    Raises:
        OptionError: the object isn't a model.
        WrappedModelError: the model is wrapped; the message says by what, and what to do first.
        UnsupportedError: a part of the model was patched by itself, or the model was built from a patched config
            without a patch. A checkpoint has one patch record, the outermost model's.
    """
    kind = type(model).__name__
    if not isinstance(model, nn.Module):
        shown = repr(model) if isinstance(model, str | type) else kind
        raise OptionError(
            f"a transformers PreTrainedModel is needed, not {shown:.80}. Open or build it first, such as by "
            "AutoModel.from_pretrained or from_config."
        )
    if not isinstance(model, PreTrainedModel):
        raise WrappedModelError(
            f"a transformers PreTrainedModel is needed, not {kind}. Patch the model first, then wrap it "
            "(torch.compile, PEFT, DistributedDataParallel, ...). Pass a SentenceTransformer as a whole."
        )
    record = getattr(model.config, KEY, None)
    if record and host_class(type(model)) is type(model):
        raise UnsupportedError(
            f"{kind} was built from a patched config, but not as a patched model. Build it with an Auto class's "
            "from_config, or from the original config."
        )
    for name, module in model.named_modules():
        where = name or kind
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise WrappedModelError(f"{where} is compiled. Patch the model first, then compile it (uncompile_model).")
        if type(module).__name__.startswith("FSDP") or "FullyShardedDataParallel" in type(module).__name__:
            raise WrappedModelError(f"{where} is sharded by FSDP. Patch the model first, then shard it.")
        if "_hf_hook" in module.__dict__:
            raise WrappedModelError(
                f"{where} carries an accelerate hook (device_map over several devices, or offloading). Patch the model "
                "first, then dispatch it; accelerate.hooks.remove_hook_from_module(model, recurse=True) removes hooks. "
                "If the model doesn't fit in memory: `hfpatch patch MODEL OUT` on the command line reads its weights "
                "one at a time (without --calibration); the result opens with device_map."
            )
        own = getattr(module.config, KEY, None) if name and isinstance(module, PreTrainedModel) else None
        if own and own != record:  # some hosts give their stacks copies of the config
            raise UnsupportedError(
                f"{name} inside {kind} was patched on its own, and the outer model's patch record wouldn't contain "
                "that patch. Patch the outermost model, which is saved; only= chooses the part."
            )


def is_quantized(model: nn.Module) -> bool:
    """Return whether weights are quantized by another library, or have fewer than 16 bits."""
    foreign = (type(p).__module__.partition(".")[0] != "torch" or p.dtype.itemsize < 2 for p in model.parameters())
    return getattr(model, "hf_quantizer", None) is not None or any(foreign)


def require_unquantized(model: nn.Module) -> None:
    """Refuse a quantized model, whose weights can't be changed or compared.

    Raises:
        UnsupportedError: the model is quantized.
    """
    if is_quantized(model):
        settings = getattr(getattr(model, "hf_quantizer", None), "quantization_config", None)
        how = (
            f" with quantization_config={type(settings).__name__}(dequantize=True)"
            if hasattr(settings, "dequantize")
            else ""
        )
        raise UnsupportedError(
            f"{type(model).__name__} is quantized. Open it unquantized{how}, patch, repair or export it, and quantize "
            "the result."
        )


def has_weights(model: nn.Module) -> bool:
    """Return whether all of a model's Parameters hold values: none is on the meta device."""
    return not any(parameter.is_meta for parameter in model.parameters())


def require_outermost(model: PreTrainedModel) -> None:
    """Refuse a part of a larger transformers model, whose checkpoint would have no record of its patch.

    Raises:
        UnsupportedError: it is a part; the message gives the call that patches it through the larger model.
    """
    if not _is_child(model) or _place_of(model) is None:
        return
    gc.collect()  # the larger model may be garbage that isn't collected yet
    if (place := _place_of(model)) is not None:
        whole, name = place
        raise UnsupportedError(
            f"this {type(model).__name__} is {name} of a {whole}, whose checkpoint would have no record of the patch. "
            "Patch the outer model, which is saved, and choose the part: patch_model(outer, ..., "
            f"only={f'{name}.*'!r}). To patch the part for use without the rest, take a copy: copy.deepcopy(part)."
        )


def _is_child(model: Any) -> bool:
    """Whether a dictionary like the `_modules` of a module holds it: one pass over all objects, in C."""
    held = (one for one in gc.get_referrers(model) if isinstance(one, dict))
    return any(all(isinstance(value, nn.Module | None) for value in list(one.values())) for one in held)


def _place_of(model: Any) -> tuple[str, str] | None:
    """The class of the largest transformers model that holds this one, and its name in there; None if none does."""
    found = []
    for one in gc.get_objects():
        # isinstance would run code of other packages' lazy objects, which may claim another class
        if issubclass(type(one), PreTrainedModel) and one is not model:
            with suppress(AttributeError, RuntimeError):  # another thread is building it
                names = {module: name for name, module in one.named_modules()}
                if model in names:
                    found.append((len(names), type(one).__name__, names[model]))
    return max(found)[1:] if found else None
