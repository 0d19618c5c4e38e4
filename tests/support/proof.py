"""What every architecture has to pass, for each class that owns a table, on the tiny models of zoo.py.

    model, inputs = patched("clip")  # in float64; angles stay in float32
    prove_stack(model, inputs, stack_of(model, "CLIPTextTransformer"))  # shift and active

Figures are changes of outputs in units of their spread: at most SAME, or at least DIFFERENT.
"""

from __future__ import annotations

import copy
import functools
import importlib
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
import zoo
from rope_proof import (
    DIFFERENT,
    SAME,
    Outputs,
    decodes_alike,
    difference,
    floating_tensors,
    outputs,
    prove_stack,
    reached,
    run,
    steps_alike,
)
from tiny_models import patch
from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from hfpatch.checkpoint.patched_classes import patched_model_class
from hfpatch.core.registry import ARCHITECTURES
from hfpatch.measure.inputs import make_inputs
from hfpatch.measure.quiet_forward import cast
from hfpatch.measure.randomness import randomise, seed_deterministically
from hfpatch.measure.shrink import shrink
from hfpatch.runtime.lens import host_class
from hfpatch.sites.architectures.architecture import Stack
from hfpatch.sites.stacks import FoundStack, find_stacks, max_positions

__all__ = ["DIFFERENT", "EXACT", "SAME", "prove_stack", "reached", "run"]

EXACT = 1e-5  # change where no rotation is left; some hosts take their softmax in float32
HEADS = (
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
)


@functools.cache
def here() -> tuple[str, ...]:
    """Recorded owners whose model type, with a class for it, this transformers has, sorted."""
    types = {name for name in zoo.model_types() if name in modeling_auto.MODEL_MAPPING_NAMES or _has_class(name)}
    return tuple(sorted(owner for owner, home in HOMES.items() if home in {*types, *PARTS, *VARIANTS}))


@functools.cache
def _has_class(model_type: str) -> bool:
    try:
        return model_type in HOMES.values() and bool(zoo._class_of(model_type, zoo.tiny_config(model_type), None))
    except zoo.Unbuildable:
        return False


# what a row asks of a configuration, and models whose configuration is no type of its own
SETTINGS: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "canine": {"max_position_embeddings": 64},
    "fsmt": {"use_cache": False},  # transformers 5.17 then takes the last token alone
    "led": {"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": [32, 32]},
    "longformer": {"attention_window": [32, 32]},
    "BarkSemanticModel": {"block_size": 32},
    "BarkCoarseModel": {"block_size": 32},
    "SeamlessM4Tv2TextToUnitDecoder": {"t2u_variance_predictor_embed_dim": 64},
    "speecht5": {"max_speech_positions": 64, "max_text_positions": 64},
}
STABLE = {"do_stable_layer_norm": True}
VARIANTS: dict[str, tuple[str, Any, dict[str, Any]]] = {  # owner: (model type, class, settings) that has it
    "Dinov2Backbone": ("dinov2", "AutoBackbone", {}),
    "Dinov2WithRegistersBackbone": ("dinov2_with_registers", "AutoBackbone", {}),
    "HubertEncoderStableLayerNorm": ("hubert", None, STABLE),
    "SpeechT5DecoderWithSpeechPrenet": ("speecht5", "AutoModelForTextToSpectrogram", {}),
    "SpeechT5EncoderWithTextPrenet": ("speecht5", "AutoModelForTextToSpectrogram", {}),
    "Tipsv2VisionBackbone": ("tipsv2_vision_model", "AutoBackbone", {}),
    "UniSpeechEncoderStableLayerNorm": ("unispeech", None, STABLE),
    "UniSpeechSatEncoderStableLayerNorm": ("unispeech-sat", None, STABLE),
    "VitDetBackbone": ("vitdet", "AutoBackbone", {}),
    "ViTMAEDecoder": ("vit_mae", "AutoModelForPreTraining", {}),
    "Wav2Vec2EncoderStableLayerNorm": ("wav2vec2", None, STABLE),
}
INPUTS: dict[Any, Any] = {
    "AutoModelForTextToSpectrogram": {"decoder_input_values": torch.linspace(-1, 1, 1920).sin().view(2, 12, 80)}
}
PARTS = {
    "BarkSemanticModel": "BarkSemanticConfig",
    "BarkCoarseModel": "BarkCoarseConfig",
    "BarkFineModel": "BarkFineConfig",
    "SeamlessM4Tv2TextToUnitDecoder": "SeamlessM4Tv2Config",
}

# Which stack is proved on which model type: its family's, else none.
HOMES = {
    stack.owner: stack.owner if stack.owner in PARTS or stack.owner in VARIANTS else name
    for name, family in ARCHITECTURES.items()
    for stack in family.stacks
}
STACKS: dict[str, Stack] = {stack.owner: stack for family in ARCHITECTURES.values() for stack in family.stacks}

HALVES = ("ProphetNetEncoder",)  # of models whose decoder keeps its table
# whose generate() differs with and without a cache unpatched too (pad tokens), or takes more than tokens
STEPWISE = ("fsmt", "musicgen_decoder", "musicgen_melody_decoder", "BarkSemanticModel", "BarkCoarseModel")


def tiny(model_type: str, auto_class: Any = None, **settings: Any) -> tuple[Any, dict[str, Any]]:
    """`zoo.tiny`, with what rows ask for and with attentions that matter: some hosts start them at 0.02."""
    if model_type in PARTS:
        model, inputs = _part(model_type)
    else:
        if model_type in VARIANTS:
            model_type, auto_class, given = VARIANTS[model_type]
            settings = given | settings
        settings = SETTINGS.get(model_type, {}) | settings
        model, inputs = zoo.tiny(model_type, auto_class=auto_class, **settings)
        inputs |= INPUTS.get(auto_class, {})
    with torch.no_grad():
        for found in find_stacks(model):
            for attention in found.attentions.values():
                for name in found.stack.projections.names:
                    weight: Any = attention.get_submodule(name).weight
                    weight.mul_(max(1.0, 0.4 / float(weight.std())))
    return model, inputs


def _part(class_name: str) -> tuple[Any, dict[str, Any]]:
    given: dict[str, Any] = {}
    with seed_deterministically(0):
        kind = getattr(transformers, PARTS[class_name])
        code = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
        config = shrink(kind(), SETTINGS.get(class_name))
        for name, value in list(vars(config).items()):
            if name.startswith("t2u_"):  # as the model that contains it does
                setattr(config, name.removeprefix("t2u_"), value)
        model = getattr(code, class_name)(config).float().eval()
        randomise(model, torch.Generator().manual_seed(0))
        if class_name == "BarkFineModel":
            given = {"codebook_idx": 2, "input_ids": torch.randint(5, 60, (2, 12, 8))}
        if class_name == "SeamlessM4Tv2TextToUnitDecoder":
            given = {"char_input_ids": torch.randint(5, 60, (2, 12)), "encoder_hidden_states": torch.randn(2, 6, 64)}
            given["char_count_per_id"] = torch.full((2, 6), 2)
            model.duration_predictor.proj.weight.detach().zero_()  # two units for each character
            model.duration_predictor.proj.bias.detach().fill_(1.0)
        return model, given or make_inputs(model, {})


@functools.lru_cache(maxsize=4)
def patched(model_type: str, pos: str = "rope", auto_class: str | None = None) -> tuple[Any, dict[str, Any]]:
    """A tiny patched model in float64 and its inputs, for callers that change neither."""
    model, inputs = tiny(model_type, auto_class)
    patch(model, pos=pos)
    double = cast(inputs, torch.device("cpu"), torch.float64)
    try:
        plain = run(model.double(), double)
    except RuntimeError:  # some hosts name float32 in their forwards
        plain = None
    if plain is None or any(value.isnan().any() for _, value in floating_tensors(plain)):
        model, double = model.float(), inputs
    return model, double


def stack_of(model: nn.Module, owner: str) -> FoundStack:
    """The (first) stack of this class in the model."""
    return next(found for found in find_stacks(model) if found.stack.owner == owner)


# --- blind to order ---------------------------------------------------------------------------------------------------


def text_inputs(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Inputs with one entry per token of the text, (B, T, ...)."""
    for name in ("input_ids", "decoder_input_ids"):
        if name in inputs:
            length = inputs[name].shape[-1]
            return {
                key: value
                for key, value in inputs.items()
                if isinstance(value, Tensor) and value.dim() in (2, 3) and value.shape[1] == length
            }
    return {}


ORDERED = {  # encoders that tell order by other things than positions
    "CanineModel": "strided convolutions, and attention in windows",
    "MobileBertModel": "each token's embedding has its neighbours' in it",
    "NystromformerModel": "means of segments, and a convolution",
    "SpeechT5EncoderWithSpeechPrenet": "takes sound",
}


def blind(owner: str, pos: str = "nope") -> float | None:
    """How much more than its rows change places when the text's tokens do; None where the stack has no text.

    Without positions nothing else may tell where a token stands: no second table, no relative bias was left in.
    """
    model, inputs = patched(HOMES[owner], pos)
    found, text = stack_of(model, owner), text_inputs(inputs)
    if not text or getattr(getattr(found.owner, "config", None), "is_decoder", False):
        return None
    length = next(iter(text.values())).shape[1]
    order = torch.randperm(length, generator=torch.Generator().manual_seed(1))
    shuffled = {**inputs, **{name: value[:, order] for name, value in text.items()}}
    before, after = (_of_tokens(outputs(model, given, found), found, length) for given in (inputs, shuffled))
    return difference(after, {name: value[:, order] for name, value in before.items()}) if before else None


def _of_tokens(seen: Outputs, found: FoundStack, length: int) -> Outputs:
    """The owner's own outputs (B, T, d)."""
    own = {name: value for name, value in seen.items() if name.startswith(f"{found.name}: ")}
    return {name: value for name, value in own.items() if value.dim() == 3 and value.shape[1] == length}


# --- longer inputs than the table had ---------------------------------------------------------------------------------


def longer(owner: str) -> int | None:
    """Run text of four times the old length; the length, or None where the stack has no text.

    Raises whatever the model raises; AssertionError where the outputs aren't that long, or not finite.
    """
    model, inputs = patched(HOMES[owner])
    given = lengthened(inputs, old_length(owner), owner)
    if given is None:
        return None
    length = next(iter(text_inputs(given).values())).shape[1]
    found = outputs(model, given, stack_of(model, owner))
    assert all(value.isfinite().all() for value in found.values())
    assert max(max(value.shape) for value in found.values()) >= length
    return length


def lengthened(inputs: dict[str, Any], old: int, owner: str = "") -> dict[str, Any] | None:
    """Inputs with text of four times the old length."""
    text, length = text_inputs(inputs), 4 * old
    if owner in HALVES:
        text = {name: value for name, value in text.items() if not name.startswith("decoder")}
    if not text:
        return None
    generator = torch.Generator().manual_seed(0)
    given = dict(inputs)
    for name, value in text.items():
        repeats = -(-length // value.shape[1])
        given[name] = value.repeat(1, repeats, *[1] * (value.dim() - 2))[:, :length]
        if name.endswith("input_ids"):
            tokens = value.flatten()  # of its vocabulary
            given[name] = tokens[torch.randint(len(tokens), given[name].shape, generator=generator)]
    return given


def old_length(owner: str) -> int:
    """Positions that the removed table had."""
    model, _ = tiny(HOMES[owner])
    found = stack_of(model, owner)
    rows = max_positions(found)
    stated = getattr(getattr(found.owner, "config", None), "max_position_embeddings", None)
    return min(filter(None, (rows, stated)), default=64)


# --- decoding, saving -------------------------------------------------------------------------------------------------


def head_that_generates(model_type: str) -> str | type | None:
    """The Auto class under which this type generates, or the class of the zoo's own model if that does."""
    if model_type in PARTS or model_type in VARIANTS:
        return None
    kind = type(zoo.tiny_config(model_type))
    for name in HEADS:
        mapped = getattr(transformers, name)._model_mapping.get(kind, None)
        if mapped is not None and mapped.can_generate():
            return name
    return next((made for made in zoo._classes_for(kind).values() if made.can_generate()), None)


def decodes(model_type: str) -> bool:
    """Whether this type generates with positions that were changed."""
    halves = [HOMES[owner] for owner in HALVES]
    return model_type in STEPWISE or (model_type not in halves and head_that_generates(model_type) is not None)


def cached(model_type: str) -> float | None:
    """Change of the outputs when decoding uses a cache; None where the type doesn't generate.

    Also None where the unpatched model itself decodes otherwise with one (XLM in transformers 5.24).
    """
    if model_type in STEPWISE:
        model, inputs = tiny(model_type)
        return steps_alike(patch(model, pos="rope"), inputs)
    head = head_that_generates(model_type)
    if not decodes(model_type):
        return None
    config = zoo.tiny_config(model_type)
    encoder = getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder
    decoder = {"is_decoder": True} if encoder else {}
    model, inputs = tiny(model_type, head, **decoder)
    unpatched = copy.deepcopy(model)
    patch(model, pos="rope")
    given = {name: value for name, value in inputs.items() if not name.startswith("decoder") and name != "labels"}
    try:
        change = decodes_alike(model.double(), cast(given, torch.device("cpu"), torch.float64))
    except RuntimeError:  # some hosts name float32 in their forwards
        change = decodes_alike(model.float(), given)
    return None if change > SAME and decodes_alike(unpatched, given) > SAME else change


def opened(model: Any, folder: Path, **options: Any) -> Any:
    """The model that a patched model's class makes of what it saves."""
    model.save_pretrained(folder)
    loaded = patched_model_class(host_class(type(model))).from_pretrained(folder, **options).eval()
    for parameter in loaded.parameters():  # the last bit of a product depends on how memory is aligned
        parameter.data = parameter.data.clone()
    return loaded


def saved(model_type: str) -> float:
    """Change of the outputs when the patched model is saved and loaded, in float32: 0."""
    model, inputs = tiny(model_type)
    with tempfile.TemporaryDirectory() as folder:
        loaded = opened(patch(model, pos="rope"), Path(folder))
        found, again = find_stacks(model)[0], find_stacks(loaded)[0]
        return difference(outputs(loaded, inputs, again), outputs(model, inputs, found))
