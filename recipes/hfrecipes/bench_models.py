"""Whole models: a training step, a forward, a cached decoding, each unpatched, patched, and as its stock sibling."""

import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from hfpatch.compile import compile_model
from hfpatch.export.native import native_model
from hfpatch.patch import patch_model
from hfpatch.runtime.errors import PatchError, first_line

from .corpus import RecipeError
from .settings import parse_variant
from .start import switch_off_dropout
from .timing import MODES, Entrant, race

UNPATCHED, NATIVE = "unpatched", "native"
TRAINING, FORWARD, DECODING = "training step", "forward", "decoding"


@dataclass(frozen=True)
class Shape:
    """A model that is measured, from its config alone.

    Attributes:
        kind: prefix of transformers' config class and of `head`.
        head: the rest of the model class's name.
        sizes: config attributes for (layers, width, heads, vocabulary), as far as there are some.
        fixed: other settings of the config; a callable takes the width.
        layers, width: of the published model.
        decodes: whether it generates.
    """

    kind: str
    head: str
    sizes: tuple[str, ...]
    fixed: dict[str, Any]
    layers: int = 12
    width: int = 768
    decodes: bool = True

    def model(self, layers: int, width: int, vocab_size: int, length: int) -> PreTrainedModel:
        """With random weights, of which norms' gains and shifts are random too."""
        values = dict(zip(self.sizes, (layers, width, max(1, width // 64), vocab_size), strict=False))
        fixed = {k: v(width) if callable(v) else v for k, v in self.fixed.items()}
        config = getattr(transformers, f"{self.kind}Config")(**values, **fixed)
        if getattr(config, "max_position_embeddings", length) < length:
            raise RecipeError(f"--block_size {length} is more than {self.kind} takes, {config.max_position_embeddings}")
        model = getattr(transformers, f"{self.kind}{self.head}")(config)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.1)
        return model


NO_SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
USUAL = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
MODELS = {
    "gpt2": Shape("GPT2", "LMHeadModel", ("n_layer", "n_embd", "n_head", "vocab_size"), NO_SPECIAL),
    "bert": Shape("Bert", "ForMaskedLM", USUAL, {"intermediate_size": lambda d: 4 * d}, decodes=False),
    "opt": Shape(
        "OPT",
        "ForCausalLM",
        USUAL,
        {"ffn_dim": lambda d: 4 * d, "word_embed_proj_dim": lambda d: d, **NO_SPECIAL},
    ),
    "vit": Shape("ViT", "ForImageClassification", USUAL[:3], {"intermediate_size": lambda d: 4 * d}, decodes=False),
    "llama-1b": Shape(
        "Llama",
        "ForCausalLM",
        USUAL,
        {"intermediate_size": lambda d: 4 * d, "num_key_value_heads": lambda d: max(1, d // 256), **NO_SPECIAL},
        layers=16,
        width=2048,
    ),
}


def require_same_outputs(models: dict[str, PreTrainedModel], given: dict[str, torch.Tensor]) -> None:
    """Check that the stock sibling computes the same as the patched model.

    Raises:
        RecipeError: it doesn't.
    """
    outputs = {}
    with torch.no_grad():
        for name in (name for name in models if NATIVE in name or name == "rope"):
            outputs[name] = models[name](**given).logits
    if len(outputs) == 2:
        a, b = outputs.values()
        if float((a - b).abs().max()) > 1e-4 * float(b.abs().max()):
            raise RecipeError("the patched model and its stock sibling don't agree, so their times can't be compared")


def subjects(shape: Shape, config: Any, device: torch.device) -> tuple[dict[str, PreTrainedModel], dict[str, str]]:
    """Models of one set of weights, in eval mode; and why a patch that was asked for isn't among them."""
    torch.manual_seed(config.seed)
    plain = shape.model(
        config.layers or shape.layers, config.width or shape.width, config.vocab_size, config.block_size
    ).eval()
    models, missing = {UNPATCHED: plain}, {}
    for patch in config.patches:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what isn't kept is another function as fast as the repaired one
                request, model = parse_variant(patch), copy.deepcopy(plain)
                models[patch] = patch_model(model, **request) if request else model
            if patch == "rope" and shape.decodes:
                models[f"rope, {NATIVE}"] = native_model(models[patch])
        except PatchError as error:
            missing[patch] = first_line(error)
    return {name: model.to(device) for name, model in models.items()}, missing


def inputs(shape: Shape, config: Any, device: torch.device) -> dict[str, Any]:
    if shape.kind == "ViT":
        return {"pixel_values": torch.randn(config.batch_size, 3, 224, 224, device=device)}
    ids = torch.randint(config.vocab_size, (config.batch_size, config.block_size), device=device)
    return {"input_ids": ids} | ({"use_cache": False} if shape.decodes else {})


def training_step(model: Any, given: dict[str, Any], config: Any, device: torch.device) -> Callable[[], Any]:
    model.train()
    switch_off_dropout(model)  # it would be another random stream in each
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    labels = given.get("input_ids", torch.zeros(config.batch_size, dtype=torch.long, device=device))

    def once() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            loss = model(**given, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return once


def forward(model: Any, given: dict[str, Any], config: Any) -> Callable[[], Any]:
    precision = getattr(torch, config.precision)
    model.eval().to(precision)
    given = {k: x.to(precision) if k == "pixel_values" else x for k, x in given.items()}

    @torch.no_grad()
    def once() -> None:
        model(**given)

    return once


def decoding(model: Any, given: dict[str, Any], config: Any, static: bool) -> Callable[[], Any]:
    model.eval().to(getattr(torch, config.precision))
    prompt = given["input_ids"][:, : config.new_tokens]
    settings: dict[str, Any] = {"max_new_tokens": config.new_tokens, "min_new_tokens": config.new_tokens}
    settings |= {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    if static:
        settings |= {"cache_implementation": "static", "disable_compile": True}  # disables generate's own way

    def once() -> None:
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)

    return once


def entrants(
    work: str, models: dict[str, PreTrainedModel], given: dict[str, Any], config: Any, device: torch.device
) -> Iterator[Entrant]:
    """Every subject eager, and with its regions compiled; compiled decoding has a static cache."""
    modes = [mode for mode in MODES if mode in config.modes]
    for name, model in models.items():
        if work == DECODING:
            runs = {mode: decoding(model, given, config, static=mode == "compiled") for mode in modes}
        else:
            once = training_step(model, given, config, device) if work == TRAINING else forward(model, given, config)
            runs = dict.fromkeys(modes, once)
        if "compiled" in modes:
            whole = work == DECODING or config.regions == "model"
            graphs = "reduce-overhead" if work == DECODING and device.type == "cuda" else None
            compile_model(model, "model" if whole else "blocks", mode=graphs)
        yield from (Entrant(name, mode, once, model) for mode, once in runs.items())


Groups = Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]


def model_groups(config: Any, device: torch.device) -> Groups:
    return groups_of("models", (TRAINING, FORWARD, DECODING), measured, config, device)


def groups_of(
    part: str, works: tuple[str, ...], measure: Callable[..., dict[str, Any]], config: Any, device: torch.device
) -> Groups:
    """What each model and work is, and what measures it; the first of a model makes its subjects."""
    for name in config.models:
        shape = MODELS[name]
        group: dict[str, Any] = {"part": part, "case": name}
        group |= {"layers": config.layers or shape.layers, "width": config.width or shape.width}
        made = cache(partial(made_and_compared, shape, config, device))
        for work in works:
            if work != DECODING or shape.decodes:
                yield group | {"work": work}, partial(measure, work, made, config, device)
        made.cache_clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def made_and_compared(shape: Shape, config: Any, device: torch.device) -> tuple[Any, dict[str, str], dict[str, Any]]:
    models, missing = subjects(shape, config, device)
    given = inputs(shape, config, device)
    require_same_outputs(models, given)
    return models, missing, given


def measured(work: str, made: Callable[[], Any], config: Any, device: torch.device) -> dict[str, Any]:
    models, missing, given = made()
    torch.compiler.reset()
    timings = race(list(entrants(work, models, given, config, device)), config.repeats, device)
    return {"missing": missing, "timings": timings}
