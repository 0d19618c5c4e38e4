"""Dropouts of native exports: a stock class drops what the patched model does, as far as it has settings for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
import zoo
from native_cases import LM, MASKED
from tiny_models import patch, tiny
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hfpatch.export import native_model
from hfpatch.export.layouts import LAYOUTS
from hfpatch.export.read import dropouts_in
from hfpatch.measure.copies import copy_of
from hfpatch.measure.quiet_forward import cast_for_model, inference_state

EMBEDDINGS, ATTENTION, BRANCHES = "embeddings", "attention scores", "branches"  # that a dropout is of
GPT2 = {"embd_pdrop": 0.3, "resid_pdrop": 0.1, "attn_pdrop": 0.2}
IDS = {"input_ids": torch.randint(5, 90, (2, 9), generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_dropouts_are_read_off_a_forward(kind: str) -> None:
    model = tiny("gpt2", LM, **GPT2)
    model.set_attn_implementation(kind)
    random, training = torch.get_rng_state(), model.training
    assert dropouts_of(model, IDS) == Counter({(EMBEDDINGS, 0.3): 1, (ATTENTION, 0.2): 2, (BRANCHES, 0.1): 4})
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training == training
    assert dropouts_of(tiny("llama", LM), IDS) == Counter()


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", [name for name in LAYOUTS if name != "xglm"])  # whose scores have three axes
def test_the_setting_of_the_embeddings(family: str) -> None:
    """What a training forward drops of them, if each setting has a value of its own."""
    auto = next((head for head in LAYOUTS[family][0].heads if head in (LM, MASKED)), "AutoModel")
    model, given = zoo.tiny(family, auto_class=auto)
    config = model.config
    names = [name for name, value in vars(config).items() if "drop" in name and type(value) in (int, float)]
    for number, name in enumerate(names, 1):
        setattr(config, name, number / 100)
    model = getattr(transformers, auto).from_config(config)
    dropped = {share for what, share in dropouts_of(model, given) if what == EMBEDDINGS}
    assert dropped - {0.0} == {dropouts_in(config)["embedding_dropout"]} - {0.0}


CARRIED: list[tuple[str, str, dict[str, Any], dict[str, Any], str]] = [
    ("gpt2", LM, GPT2, {"pos": "rope"}, "starcoder2"),
    ("opt", LM, {"dropout": 0.2, "attention_dropout": 0.1}, {"pos": "rope"}, "starcoder2"),
    ("bert", MASKED, {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.1}, {"pos": "rope"}, "roformer"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "head", "settings", "request_", "architecture"), CARRIED)
def test_dropouts_are_carried_over(
    family: str, head: str, settings: dict, request_: dict, architecture: str, monkeypatch: Any
) -> None:
    """Also in numbers: with the same draws both models' training forwards are equal."""
    model = patch(tiny(family, head, **settings), **request_)
    stock = native_model(model, architecture)
    assert dropouts_of(model, IDS) == dropouts_of(stock, IDS) != Counter()
    monkeypatch.setattr(torch.nn.functional, "dropout", scaled)
    for one in (model, stock):
        one.set_attn_implementation("eager")
    trained, evaluated = ([one.train(mode)(**IDS)[0] for one in (model, stock)] for mode in (True, False))
    assert float((trained[0] - trained[1]).abs().max() / trained[0].std()) < 1e-4
    assert float((trained[0] - evaluated[0]).abs().max() / evaluated[0].std()) > 1e-2  # the control


def scaled(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """A dropout without chance, that shows its share."""
    return input * (1 - p) if training else input


class Recorder(TorchFunctionMode):
    """Notes the share that each dropout of a forward drops, and lets nothing be dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, float]] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == F.scaled_dot_product_attention.__name__:
            self.found.append((ATTENTION, float(kwargs.pop("dropout_p", 0.0))))
        elif name in ("dropout", "dropout_"):
            p, training = (*args[1:], *([None] * 2))[:2]
            share = float(kwargs.get("p", 0.5) if p is None else p)
            in_training = kwargs.get("training", kwargs.get("train", True)) if training is None else training
            self.found.append((ATTENTION if args[0].dim() == 4 else BRANCHES, share if in_training else 0.0))
            return args[0]
        return func(*args, **kwargs)


def dropouts_of(model: Any, inputs: Mapping[str, Any]) -> Counter[tuple[str, float]]:
    """Return how often a training forward drops which share of what; dropouts of nothing aside.

    What it drops before its first attention are embeddings.
    """
    copied, recorder = copy_of(model, share=True), Recorder()
    with inference_state(copied):
        copied.train()
        with recorder:
            copied(**cast_for_model(copied, inputs))
    attention = next((i for i, (what, _) in enumerate(recorder.found) if what == ATTENTION), 0)
    found = ((EMBEDDINGS if i < attention else what, p) for i, (what, p) in enumerate(recorder.found))
    return Counter((what, p) for what, p in found if p > 0)
