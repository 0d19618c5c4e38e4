"""What the tests of position schemes share: tiny models of every known family, patched, run and compared."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
import zoo
from rope_proof import GREEDY
from tiny_models import patch as patched
from torch import Tensor, nn

from hfpatch.core.registry import ARCHITECTURES
from hfpatch.measure.quiet_forward import cast
from hfpatch.runtime.attention import ROTARY

# families of every build whose tables are known; what is proved here on each, test_schemes.py measures on all others
FAMILIES = (
    "bart bert biogpt blenderbot blenderbot-small camembert data2vec-text distilbert electra gpt2 gpt_neo marian mbart "
    "megatron-bert mpnet mvp opt pegasus plbart rembert roberta roberta-prelayernorm roc_bert splinter vit whisper "
    "xlm-roberta xlm-roberta-xl xmod"
)
RECORDED = sorted({*FAMILIES.split()} & set(ARCHITECTURES) & set(zoo.model_types()))
TEXT = {"input_ids", "attention_mask", "decoder_input_ids", "decoder_attention_mask", "token_type_ids"}
LM_HEADS = ("AutoModelForSpeechSeq2Seq", "AutoModelForSeq2SeqLM", "AutoModelForCausalLM")


def base(model_type: str, pos: Any = None) -> tuple[Any, dict[str, Any]]:
    """A tiny base model, patched if asked, in float64 (positions stay float32), and inputs."""
    model, inputs = zoo.tiny(model_type)
    if pos is not None:
        patched(model, pos=pos)
    return model.double(), cast(inputs, torch.device("cpu"), torch.float64)


def generator(model_type: str, pos: Any = None, **config: Any) -> tuple[Any, dict[str, Any]]:
    """A tiny model that generates, patched if asked, and its prompt."""
    kind = type(zoo.tiny_config(model_type))
    head = next(name for name in LM_HEADS if kind in getattr(transformers, name)._model_mapping)
    model, inputs = zoo.tiny(model_type, auto_class=head)
    if pos is not None:
        patched(model, pos=pos)
    return model, {name: value for name, value in inputs.items() if not name.startswith("decoder") and name != "labels"}


def states(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return model(**inputs).last_hidden_state


@contextmanager
def changed_positions(
    model: nn.Module, change: Callable[[Tensor], Tensor], part: str = ROTARY, below: str = ""
) -> Iterator[None]:
    """Meanwhile every rotation (or bias) of the model, or of those of its modules, sees changed positions."""
    hooks = [
        module.register_forward_pre_hook(lambda _, args: tuple(map(change, args)))
        for name, module in model.named_modules()
        if name.endswith(part) and below in name
    ]
    assert hooks, f"no {part} below {below!r}"
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gradients(
    model: Any, inputs: list[dict[str, Any]], checkpointing: bool, reentrant: bool = False
) -> dict[str, Tensor]:
    """Gradients of one backward behind a forward for each of the inputs, with the same dropout in every call."""
    model = copy.deepcopy(model).train()
    if checkpointing:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sum(model(**given)[0].square().mean() for given in inputs).backward()  # type: ignore[union-attr]
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def require_the_same_with_checkpointing(model: Any, inputs: list[dict[str, Any]], reentrant: bool = False) -> None:
    """Gradient checkpointing changes no bit of the gradients; a mechanism that kept state between calls would."""
    plain, checkpointed = gradients(model, inputs, False), gradients(model, inputs, True, reentrant)
    assert plain.keys() == checkpointed.keys()
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference in units of the spread."""
    return float((a - b).abs().max() / b.std())


def owners(model: Any, model_type: str) -> list[str]:
    """Names of the stacks that own a table."""
    names = {stack.owner for stack in ARCHITECTURES[model_type].stacks}
    return [name for name, module in model.named_modules() if type(module).__name__ in names]


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(5, 60, (batch, length), generator=torch.Generator().manual_seed(seed))


def generated(model: Any, given: dict[str, Any], **options: Any) -> Tensor:
    """Logits (steps, B, V) of a greedy generation; what is forbidden is zero."""
    settings: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, **GREEDY}
    with torch.no_grad():
        logits = torch.stack(model.generate(**given, **{**settings, **options}).logits)
    return logits.masked_fill(~logits.isfinite(), 0.0)


def require_the_same_with_a_cache(model: Any, given: dict[str, Any], plain: Tensor) -> None:
    """A dynamic cache and a static one give the logits that came without."""
    assert difference(generated(model, given), plain) <= 1e-4
    assert difference(generated(model, given, cache_implementation="static", disable_compile=True), plain) <= 1e-4
