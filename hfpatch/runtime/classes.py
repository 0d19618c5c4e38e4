"""Base classes of patched configs and models: a record in the config, applied when the model is built.

In memory they have the host's class names and `model_type`, since PEFT, pipelines and tokenizers look these up. On disk
the model type is a sentence that starts with "hfpatch" (just "hfpatch" in an export with code of its own), and the
architecture is "Hfpatch..." in front of the host's name. So a process without hfpatch, a converter or a server's
registry finds no name that it knows, rather than half a model. A config that was read keeps this architecture: vLLM and
SGLang look it up in their registries, and their own classes for the host's name would run the weights unpatched.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .apply import Tree, apply
from .attention import require_bias_kept
from .constants import ConstantPositions, Recomputed
from .float64 import in_float64
from .lens import CENTRED, LENS, SCALE, SCALED, lensed_forward
from .norms import AffineNorm
from .patch_errors import CheckpointError, PositionError, UnsupportedError
from .record import (
    ARCHITECTURE,
    KEY,
    MODEL_TYPE,
    edits_of,
    names_on_disk,
    warn_of_ineffective_overrides,
    warn_of_other_outputs,
)
from .refuse_host import WeightFileGuard, add_guard, loading_patched, parts, remove_guard
from .rotary import LENGTH

_ROUNDING = 0.05  # share of a random row's mean that may be left by rounding; bfloat16 leaves .003
SERVERS = ("vllm", "vllm_mla", "sglang")  # attention implementations of servers that replace a model's linear layers
_ATTENTION = "_attn_implementation_internal"  # attribute of a config
AS_SAVED = "_hfpatch_as_saved"  # attribute of a config read from disk: its settings without overrides by the caller
FRESH = "_hfpatch_fresh"  # marks a new projection whose values are torch's
TIMES = "_hfpatch_times"  # attribute of a gate: factor by which the old projection's values are still to be multiplied
CODE = "modeling_hfpatch"  # module of an export's code, which opens the checkpoint without hfpatch installed


class PatchedConfig:
    """Mixin of patched config classes: how they are written and read."""

    _auto_class = None  # the host's own code isn't saved along: it would open the checkpoint unpatched
    transformers_weights = WeightFileGuard()

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return the host's answer: transformers 5.17 renames the types of layers in configs of custom code."""
        return next(base for base in cls.__mro__ if not issubclass(base, PatchedConfig)).is_custom_code()  # type: ignore[attr-defined]

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> Any:
        stored, unused = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        return {**stored, "model_type": cls.model_type}, unused  # type: ignore[attr-defined]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the config in memory, which has the host's model type."""
        where = str(config_dict.get("_name_or_path") or "this checkpoint's config.json")
        settings: Any = copy.deepcopy(remove_guard(config_dict))
        record = settings.get(KEY)
        # the checkpoint's, not the class's: EXAONE's model is Llama's class, but its weights have other names
        base = record.get("base_model_type") if isinstance(record, dict) else None
        settings = {**settings, "model_type": base or cls.model_type}  # type: ignore[attr-defined]
        if architectures := settings.get("architectures"):  # a config without a saved model has none
            if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
                raise CheckpointError(f"{where}: architectures is {architectures!r:.80}, not a list of names.")
            settings["architectures"] = names_on_disk(architectures)
        found = super().from_dict(copy.deepcopy(settings), **kwargs)  # type: ignore[misc]  # some hosts empty it
        config = found[0] if isinstance(found, tuple) else found
        overridden = any(hasattr(config, name) for name in kwargs)
        as_saved = super().from_dict(settings) if overridden else config  # type: ignore[misc]
        config.__dict__[AS_SAVED] = as_saved.to_dict()
        return found

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in super().to_dict().items() if name != AS_SAVED}  # type: ignore[misc]

    def to_json_string(self, use_diff: bool = True) -> str:
        return json.dumps(self.settings_on_disk(use_diff), indent=2, sort_keys=True) + "\n"

    def settings_on_disk(self, use_diff: bool) -> dict[str, Any]:
        """Return the content of config.json."""
        stored = json.loads(super().to_json_string(use_diff=use_diff))  # type: ignore[misc]
        if stored.get("architectures"):
            stored["architectures"] = names_on_disk(stored["architectures"])
        if auto_map := _without_host_code(stored.pop("auto_map", {})):
            stored["auto_map"] = auto_map
        stored["model_type"] = KEY if "AutoConfig" in auto_map else MODEL_TYPE
        return add_guard(self, stored)


def is_unlimited(model: Any) -> bool:
    """Return whether the config's length is left over from a removed position table."""
    return bool((getattr(model.config, KEY, None) or {}).get("any_length"))


class UnlimitedGeneration:
    """Mixin of patched models: no length limit or warning in generate() if no position table is left."""

    def _prepare_generated_length(self, *args: Any, **kwargs: Any) -> Any:
        method = super()._prepare_generated_length  # type: ignore[misc]
        arguments = inspect.signature(method).bind(*args, **kwargs).arguments
        before = arguments["generation_config"].max_length
        generation_config = method(*args, **kwargs)
        old = getattr(self.config, LENGTH, None)  # type: ignore[attr-defined]
        if old is not None and generation_config.max_length == old and arguments.get("has_default_max_length"):
            total = (before or 0) + arguments["input_ids_length"]
            if total > old and generation_config.max_new_tokens is None and is_unlimited(self):
                generation_config.max_length = total
        return generation_config

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]
        for one in found if is_unlimited(self) else ():
            if hasattr(one, LENGTH):
                setattr(one, LENGTH, None)
        return found


class PatchedModel(UnlimitedGeneration):
    """Mixin of patched model classes: builds the host, then applies the edits in its config.

    `lensed=True` makes a class whose own forward runs through a lens: a lens on the model itself.
    """

    hfpatch_model = True
    hfpatch_host: type
    _auto_class = None  # see PatchedConfig

    def __init_subclass__(cls, lensed: bool = False, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if "hfpatch_host" not in vars(cls):
            cls.hfpatch_host = next(base for base in cls.__mro__[1:] if issubclass(base, nn.Module))
        if lensed:
            cls.forward = lensed_forward(cls.hfpatch_host, cls)  # type: ignore[attr-defined]

    @property
    def _keys_to_ignore_on_save(self) -> Any:
        """As the host's, without names that the patch assigned: they are saved, though the host computes them anew."""
        ignored = vars(self).get("_keys_to_ignore_on_save", getattr(self.hfpatch_host, "_keys_to_ignore_on_save", None))
        return {*ignored} - assigned_names(self) if ignored else ignored

    @_keys_to_ignore_on_save.setter
    def _keys_to_ignore_on_save(self, names: Any) -> None:
        vars(self)["_keys_to_ignore_on_save"] = names

    def __init__(self, config: Any, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        patch_built(self)
        require_plain_linears(self)

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, **kwargs: Any) -> Any:
        """Open it as the host does; warn of an overridden setting that modules of the patch don't read."""
        with loading_patched():
            opened = super().from_pretrained(name, *args, **kwargs)  # type: ignore[misc]
        model = opened[0] if isinstance(opened, tuple) else opened  # the loading info is beside it
        saved = vars(model.config).pop(AS_SAVED, None)
        if saved is not None:
            warn_of_ineffective_overrides(saved, model.config, str(name))
        warn_of_other_outputs(model, str(name), lambda: bool(assigned_names(model)))
        return opened

    def set_attn_implementation(self, *args: Any, **kwargs: Any) -> Any:
        """Set it as the host does, but refuse an implementation under which ALiBi's bias would be lost.

        Raises:
            PositionError: the bias would be lost.
        """
        before = [(part, vars(part).get(_ATTENTION)) for _, part in parts(self.config)]  # type: ignore[attr-defined]
        found = super().set_attn_implementation(*args, **kwargs)  # type: ignore[misc]
        try:
            require_bias_kept(self)  # type: ignore[arg-type]
        except PositionError:
            for part, implementation in before:
                vars(part)[_ATTENTION] = implementation
            raise
        return found

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Set the embeddings as the host does, but keep centred or scaled embedding modules, with the new weights.

        `resize_token_embeddings` calls it; hosts with an encoder and a decoder put one shared embedding into both.

        Raises:
            UnsupportedError: the new module isn't an `nn.Embedding`, and there are centred or scaled embeddings.
        """
        changed = {name: one for name, one in self.named_modules() if isinstance(one, nn.Embedding) and _is_marked(one)}  # type: ignore[attr-defined]
        if changed and not isinstance(value, nn.Embedding):
            raise UnsupportedError(
                f"{type(self).__name__}: {next(iter(changed))} is centred or scaled in every forward, and "
                f"{type(value).__name__} in its place wouldn't be. Set it on the original model, then patch that model."
            )
        super().set_input_embeddings(value)  # type: ignore[misc]
        for name, module in changed.items():
            parent, _, child = name.rpartition(".")
            owner = self.get_submodule(parent)  # type: ignore[attr-defined]
            weight: Any = getattr(owner, child).weight
            module.weight, module.num_embeddings = weight, len(weight)
            setattr(owner, child, module)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Resize as the host does; new rows are zero-mean if the patch centred the embeddings.

        An exact swap to RMSNorm centres them; with `mean_resizing=False` the host's initial values have a mean.
        """
        tables = {name: one for name, one in self.named_modules() if isinstance(one, nn.Embedding)}  # type: ignore[attr-defined]
        centred = {name: len(one.weight) for name, one in tables.items() if _is_centred(one.weight)}
        resized = super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]
        for name, rows in centred.items():
            new = self.get_parameter(f"{name}.weight").data[rows:]  # type: ignore[attr-defined]
            new.sub_(in_float64(new).mean(-1, keepdim=True).to(new.dtype).to(new.device))
        return resized

    def resize_position_embeddings(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to resize the position table.

        Raises:
            UnsupportedError: always. The host would put a new table in place of the removed or centred table.
        """
        raise UnsupportedError(
            f"{type(self).__name__} is patched: its table of positions can't be resized. Resize the original's table, "
            "then patch the original; or patch it with pos='rope' or 'learned:max_positions=...'."
        )

    def initialize_weights(self) -> None:
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, AffineNorm):  # some hosts fill attributes of nn.LayerNorm that it may not have
                vars(module)["_is_hf_initialized"] = True
        super().initialize_weights()  # type: ignore[misc]
        start_values(self)  # type: ignore[arg-type]

    @classmethod
    def is_custom_code(cls) -> bool:
        return cls.hfpatch_host.is_custom_code()  # type: ignore[attr-defined]

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return cls.hfpatch_host._can_set_attn_implementation()  # type: ignore[attr-defined]

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.hfpatch_host._can_set_experts_implementation()  # type: ignore[attr-defined]


def _without_host_code(auto_map: dict[str, Any]) -> dict[str, str]:
    """An `auto_map` without the host's own classes, which would open the checkpoint unpatched."""
    kept = {}
    for auto, reference in auto_map.items():
        own = own_code(reference)
        if own is not None:
            kept[auto] = own
        elif auto != "AutoConfig" and not auto.startswith("AutoModel"):
            kept[auto] = reference
    return kept


def own_code(reference: str | Sequence[str | None]) -> str | None:
    """Return the class in an export's code that an `auto_map` entry names; None for other code.

    The entry is a pair if the class has "Tokenizer" in its name.
    """
    named = [reference] if isinstance(reference, str) else reference
    return next((one for one in named if one and one.rpartition("--")[2].startswith(f"{CODE}.")), None)


def patch_built(model: Any) -> None:
    """Patch a freshly built model of a host's class as its config's record says.

    Raises:
        CheckpointError: the config has no usable record, or its edits name places that the class doesn't have.
    """
    apply(edits_of(model.config, type(model).__name__), model, fresh=True)
    _initialise_fresh(model)
    if model.all_tied_weights_keys.keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        # tied Parameters of the host have other names now (zamba2's norms)
        model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _initialise_fresh(model: Any) -> None:
    """Initialise new projections of a newly built model by its host's rule, and gates."""
    for module in model.modules():
        if vars(module).pop(FRESH, False) and not module.weight.is_meta:
            model._init_weights(module)
        times = vars(module).pop(TIMES, 1.0)
        for parameter in module.parameters(recurse=False) if times != 1.0 else ():
            parameter.data.mul_(times)


def assigned_names(model: Any) -> set[str]:
    """Return the full names that a patched model's edits assign."""
    tree, names = Tree(model), {id(module): name for name, module in model.named_modules()}
    edits = edits_of(model.config, type(model).__name__)
    places = [(owner, leaf) for edit in edits for _, owner, leaf in tree.places(edit.at)]
    return {f"{names[id(owner)]}.{leaf}".lstrip(".") for owner, leaf in places if owner is not None}


def require_plain_linears(model: Any) -> None:
    """Refuse a server or quantizer whose own linear layers would take the places of patched ones.

    Raises:
        CheckpointError: a linear layer that the server or quantizer replaces does more than multiply.
    """
    by, replaced = _replacing_linears(model.config)
    for name, module in model.named_modules() if replaced else ():
        if isinstance(module, replaced) and _is_marked(module):
            raise CheckpointError(
                f"{type(model).__name__}: {name} is centred in every forward, and {by} replaces all linear layers "
                "by its own. Patch the original with norm='rms', which centres the weights instead."
            )


def _is_marked(module: Any) -> bool:
    """Whether a module's forward does more than its host's."""
    return any(vars(module).get(slot) is not None for slot in (LENS, CENTRED, SCALED))


def _is_centred(weight: Tensor) -> bool:
    """Whether the rows' means are nothing but rounding, also of weights that were saved in half precision.

    Rows of random numbers have far larger means: about their spread divided by the square root of their length.
    """
    if weight.is_meta or weight.numel() == 0:
        return False
    rows = weight.detach()[:: -(-len(weight) // 1024)].float()
    expected = rows.std(-1) / math.sqrt(rows.shape[-1])
    return bool(rows.mean(-1).norm() < _ROUNDING * expected.norm())


def _replacing_linears(config: Any) -> tuple[Any, tuple[type, ...]]:
    """The server or quantizer that replaces linear layers in a model of this config, and the classes it replaces."""
    attentions = [getattr(part, "_attn_implementation", None) for _, part in parts(config)]
    if by := next((name for name in SERVERS if name in attentions), None):
        return by, (nn.Linear,)
    quantization = getattr(config, "quantization_config", None) or {}
    settings = quantization if isinstance(quantization, dict) else vars(quantization)
    method = settings.get("quant_method")
    if method in (None, "torchao"):  # torchao replaces only the weights
        return None, ()
    # bitsandbytes leaves subclasses of nn.Linear as they are
    return getattr(method, "value", method), (Conv1D,) if method == "bitsandbytes" else (nn.Linear, Conv1D)


@torch.no_grad()
def start_values(model: nn.Module) -> None:
    """Initialise modules that a patch added and no checkpoint filled; transformers calls this after loading."""
    for module in model.modules():
        if isinstance(module, Recomputed):
            module.reset()
        values = module.initial_values() if isinstance(module, AffineNorm) else {}
        if SCALED in vars(module):
            values[SCALE] = vars(module)[SCALED]
        if isinstance(module, ConstantPositions):
            values["constant"] = 0.0
        for name, tensor in module.state_dict(keep_vars=True).items() if values else ():
            if name in values and not getattr(tensor, "_is_hf_initialized", False) and not tensor.is_meta:
                tensor.fill_(values[name])


def register(config: type, models: dict[str, type]) -> None:
    """Register a config with the Auto classes, which would otherwise build the host's model from its name.

    Each class is also an attribute of transformers, under its name on disk: TRL looks it up there.

    Args:
        config: a patched config's class.
        models: name of an Auto class -> the class that it builds.
    """
    import transformers

    for name, model in models.items():
        auto = getattr(transformers, name, None)
        if auto is not None and name != "AutoConfig":
            auto.register(config, model, exist_ok=True)
        setattr(transformers, ARCHITECTURE + model.__name__, model)
