"""Whole models: a training step, a forward, a cached decoding, each unpatched, patched, and as its stock sibling.

And the modules that a patch replaces, where they stand in them. A few per cent of a model's time are less than what one
run of it differs from the next; the same difference, of these modules alone, stands out. What a patch does to the rest
of the model isn't in it.
"""

import copy
import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from methods import CONTROL, switch_off_dropout
from torch import nn
from transformers import AutoConfig, PreTrainedModel, StaticCache

from hfpatch.errors import NotPreservedWarning
from hfpatch.export.native import native_model
from hfpatch.extend import NORMS
from hfpatch.patch import outcomes, patch_model
from hfpatch.runtime.patch_errors import PatchError, describe_error, first_line

from .settings import parse_variants
from .timing import Case, Entrant

UNPATCHED, NATIVE = "unpatched", "rope, native"
TRAINING, FORWARD, DECODING = "training step", "forward", "decoding"
TOKEN = "token"  # one step of decoding, without what `generate` does around it


@dataclass(frozen=True)
class Architecture:
    """A kind of model, made from its config alone; layers and width are those of the published one."""

    kind: str  # transformers' model type
    head: str  # the rest of the name of transformers' AutoModel class
    widths: dict[str, float] = field(default_factory=dict)  # further settings of the config, as multiples of the width
    layers: int = 12
    width: int = 768

    @property
    def decodes(self) -> bool:
        return self.head == "ForCausalLM"

    def model(self, config: Any, device: torch.device) -> PreTrainedModel:
        """With random weights, of which norms' gains and shifts are random too."""
        width = config.width or self.width
        settings = {
            "num_hidden_layers": config.layers or self.layers,
            "hidden_size": width,
            "num_attention_heads": width // 64,
            "vocab_size": config.vocab_size,
            "max_position_embeddings": max(1024, 2 * config.block_size),
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
            **{name: max(1, int(times * width)) for name, times in self.widths.items()},
        }
        torch.manual_seed(0)
        with device:
            made = AutoConfig.for_model(self.kind, **settings)
            model = getattr(transformers, f"AutoModel{self.head}").from_config(made)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=float(name.endswith("weight")), std=0.1)
        return model.eval()


MODELS = {
    "gpt2": Architecture("gpt2", "ForCausalLM"),
    "bert": Architecture("bert", "ForMaskedLM", {"intermediate_size": 4}),
    "vit": Architecture("vit", "ForImageClassification", {"intermediate_size": 4}),
    "llama-1b": Architecture(
        "llama", "ForCausalLM", {"intermediate_size": 4, "num_key_value_heads": 1 / 256}, layers=16, width=2048
    ),
}


def subjects(name: str, config: Any, device: torch.device) -> dict[str, PreTrainedModel | Exception]:
    """Models of one set of weights, in eval mode; in place of one that can't be made, why."""
    plain = MODELS[name].model(config, device)
    found: dict[str, PreTrainedModel | Exception] = {UNPATCHED: plain}
    for patch in config.patches:
        model = copy.deepcopy(plain)
        try:
            for request in parse_variants(patch):
                if getattr(NORMS.get(request.get("norm", "").partition(":")[0]), "needs_calibration", False):
                    request["init"] = "reset"  # another function, too, and no data to repair it on
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", NotPreservedWarning)  # another function, as fast as a repaired one
                    patch_model(model, **request)
            found[patch] = model
            if patch == "rope" and MODELS[name].decodes:
                found[NATIVE] = native_model(found[patch])
        except Exception as error:  # of a device, too: the others are measured all the same
            found[NATIVE if patch in found else patch] = error
    return found


def training_step(model: Any, given: dict[str, Any], config: Any) -> Callable[[], Any]:
    """Loss, gradients and AdamW, without dropout, which would be another random stream in each model."""
    switch_off_dropout(model.train())
    device = model.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    labels = given.get("input_ids", torch.zeros(config.batch_size, dtype=torch.long, device=device))

    def once() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=config.precision == "bfloat16"):
            loss = model(**given, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return once


def decoding(model: Any, prompt: torch.Tensor, new_tokens: int, static: bool) -> Callable[[], Any]:
    """Greedy decoding behind a prompt; with a static cache for what is compiled."""
    settings = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    if static:
        settings |= {"cache_implementation": "static", "disable_compile": True}  # disables generate's own way
    return partial(model.generate, prompt, attention_mask=torch.ones_like(prompt), **settings)


def token_step(model: Any, prompt: torch.Tensor) -> Callable[[], Any]:
    """The forward of one token behind a prompt that is in a static cache, which is set back once it is full."""
    length = prompt.shape[1]
    cache = StaticCache(config=model.config, max_cache_len=2 * length)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"  # until 5.23
    given = {name: cache, "use_cache": True}
    with torch.no_grad():
        model(prompt, **given)
    token, done = prompt[:, -1:].contiguous(), 0

    @torch.no_grad()
    def once() -> Any:
        nonlocal done
        if done == length:
            for layer in cache.layers:
                layer.cumulative_length.fill_(length)
            done = 0
        done += 1
        return model(token, **given)

    return once


def entrants(name: str, work: str, config: Any, device: torch.device, mode: str) -> Iterator[Entrant]:
    """Every subject; compiled are its blocks or, for decoding, the whole model."""
    precision = getattr(torch, config.precision)
    if name == "vit":
        pixels = torch.randn(config.batch_size, 3, 224, 224, device=device)
        given: dict[str, Any] = {"pixel_values": pixels if work == TRAINING else pixels.to(precision)}
    else:
        ids = torch.randint(config.vocab_size, (config.batch_size, config.block_size), device=device)
        given = {"input_ids": ids} | ({"use_cache": False} if MODELS[name].decodes else {})
    graphs = "reduce-overhead" if device.type == "cuda" else None
    for subject, model in subjects(name, config, device).items():
        how: dict[str, Any] = {}
        try:
            if isinstance(model, Exception):
                raise model
            if work == TRAINING:
                once = training_step(model, given, config)
            elif work == FORWARD:
                once = torch.no_grad()(partial(model.to(precision), **given))
            elif work == DECODING:
                once = decoding(model.to(precision), ids[:, : config.new_tokens], config.new_tokens, mode == "compiled")
                how = {"regions": "model", "mode": graphs}
            else:
                once = token_step(model.to(precision), ids[:1, : config.new_tokens])
                how = {"regions": "model", "mode": graphs, "dynamic": False}
        except Exception as error:
            yield Entrant(subject, failed=first_line(error) if isinstance(error, PatchError) else describe_error(error))
            continue
        outcome = "; ".join(outcomes(model).values()) if subject not in (UNPATCHED, NATIVE, CONTROL) else None
        yield Entrant(subject, once, model, how, outcome=outcome)


def cases(config: Any, device: torch.device, made: Callable[..., Iterable[Entrant]] = entrants) -> Iterator[Case]:
    """Of every model each kind of work, and what makes its entrants."""
    for name in config.models:
        for work in (TRAINING, FORWARD, DECODING):
            if work != DECODING or MODELS[name].decodes:
                yield name, work, partial(made, name, work, config, device)


# -- the replaced modules


def replaced(plain: nn.Module, patched: nn.Module) -> set[str]:
    """Paths of the modules whose class differs, without those that hold others of them."""
    old = dict(plain.named_modules())
    found = {path for path, module in patched.named_modules() if path in old and type(module) is not type(old[path])}
    return {path for path in found if path and not any(other.startswith(f"{path}.") for other in found)}


def put_clocks(model: nn.Module, places: dict[str, set[str]]) -> dict[str, float]:
    """From now on the seconds that some modules take are added up in what this returns, by the names of `places`.

    A backward lasts from the gradients of what a module returned to those of what it was given by position. That of an
    embedding of whole numbers, which have none, isn't counted.
    """
    spent = dict.fromkeys(places, 0.0)
    began: dict[nn.Module, float] = {}

    def begin(module: nn.Module, *_: Any) -> None:
        began[module] = time.perf_counter()

    def end(names: list[str], module: nn.Module, *_: Any) -> None:
        seconds = time.perf_counter() - began[module]
        for name in names:
            spent[name] += seconds

    for path in set().union(*places.values()):
        module, ended = model.get_submodule(path), partial(end, [name for name in places if path in places[name]])
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(ended)
        module.register_full_backward_pre_hook(begin)
        module.register_full_backward_hook(ended)
    return spent


def clocked(name: str, work: str, config: Any, device: torch.device, mode: str) -> list[Entrant]:
    """The unpatched model is timed in the places of every patch, a patched one in its own, the control in all."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # of the embedding
    found = [entrant for entrant in entrants(name, work, config, device, mode) if entrant.subject != NATIVE]
    made = [entrant for entrant in found if not entrant.failed]
    places = {entrant.subject: replaced(made[0].model, entrant.model) for entrant in made[1:]}
    if CONTROL in places:
        places[CONTROL] = set().union(*places.values())  # which differ by chance alone
    for entrant in made[1:]:
        own = places[entrant.subject]
        entrant.inside, entrant.modules = put_clocks(entrant.model, {entrant.subject: own}), len(own)
        entrant.failed = None if own else "it replaces no module"
    made[0].inside = put_clocks(made[0].model, places)
    return found


def place_cases(config: Any, device: torch.device) -> Iterator[Case]:
    """None on a GPU, which works behind the calls' backs."""
    return cases(config, device, clocked) if device.type == "cpu" else iter(())
