"""`position_ids` given to a model whose queries and keys are rotated: they reach every attention, in every family."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from position_checks import changed_positions, difference, patched, zoo
from sampled import slow_but
from torch import Tensor

from hfpatch.runtime.attention import POSITION_IDS
from hfpatch.runtime.handing_down import HandedDown
from hfpatch.runtime.lens import LENS
from hfpatch.sites.architectures import decoders, encoders
from hfpatch.sites.architectures.biases import BIASES
from hfpatch.sites.stacks import FoundStack, find_stacks

# one of each way to the attentions: the host's own; layers in lists of layers; the owner's own list; tokens before or
# behind those that have position_ids; windows; a decoder; biases for a table
OF_EACH_WAY = ["bert", "gpt2", "gpt_neo", "distilbert", "openai-gpt", "ctrl", "xlm", "mpnet", "gpt_bigcode", "xglm"]
OF_EACH_WAY += ["longformer", "git", "visual_bert", "whisper", "squeezebert", "deberta-v2", "clip_text_model"]
REFUSED = ("big_bird",)  # built with other attentions
ANCHORED = ("git",)  # to an image before the text, which position_ids don't move
LENGTHS_DIFFER = ("canine",)  # attentions of molecules of characters


def _takes_ids(model: Any) -> str | None:
    names = inspect.signature(model.forward).parameters
    return next((name for name in (POSITION_IDS, "decoder_position_ids") if name in names), None)


def _stack(model: Any) -> FoundStack:
    """The stack whose owner takes position_ids."""
    found = [*find_stacks(model), *find_stacks(model, BIASES)]
    return next(item for item in found if POSITION_IDS in inspect.signature(item.owner.forward).parameters)


class Case:
    """A family with rotated queries and keys: hidden states of the stack that takes `position_ids`."""

    def __init__(self, model_type: str, **request: Any):
        self.model, self.given = zoo.tiny(model_type)
        name = _takes_ids(self.model)
        assert name is not None
        self.name: str = name
        self.tokens: Tensor = self.given[name.replace("position", "input")]
        patched(self.model, pos="rope", **request)
        self.stack = _stack(self.model)

    def states(self, positions: Tensor | None = None, model: Any = None) -> Tensor:
        """Hidden states (B, T, d); positions are (T,)."""
        seen: list[Any] = []
        hook = self.stack.owner.register_forward_hook(lambda _, args, output: seen.append(output))
        given = dict(self.given)
        if positions is not None:
            given[self.name] = positions.expand(len(self.tokens), -1).contiguous()
        try:
            with torch.no_grad():
                (self.model if model is None else model)(**given)
        finally:
            hook.remove()
        return seen[-1][0] if isinstance(seen[-1], tuple) else seen[-1].last_hidden_state

    @property
    def counted(self) -> Tensor:
        return torch.arange(self.tokens.shape[1])

    @contextmanager
    def rotated_by(self, positions: Tensor) -> Iterator[None]:
        """Meanwhile every rotation of the stack sees these positions (T,), and in front or behind them those of tokens
        that have none."""

        def instead(seen: Tensor) -> Tensor:
            others = seen.shape[1] - len(positions)
            before, after = torch.arange(-others, 0), positions[-1] + 1 + torch.arange(others)
            first = self.stack.stack.other_tokens == "before"
            return torch.cat((before, positions) if first else (positions, after))[None]

        with ExitStack() as changed:
            for attention in self.stack.attentions.values():  # not those of another stack, as of GIT's image encoder
                changed.enter_context(changed_positions(attention, instead))
            yield


def _check(model_type: str) -> None:
    case = Case(model_type)
    counted, plain = case.counted, case.states()
    exact = difference(case.states(counted), plain)
    assert exact <= 1e-4 if model_type in ANCHORED else exact == 0
    if model_type not in ANCHORED:
        assert difference(case.states(counted + 7), plain) <= 1e-3
    half = len(counted) // 2
    for positions in (counted * 2, torch.cat((counted[:half], counted[: len(counted) - half]))):
        moved = case.states(positions)
        assert difference(moved, plain) > 1e-3, "position_ids have no effect"
        with case.rotated_by(positions):
            assert difference(moved, case.states()) <= 1e-5


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", slow_but(OF_EACH_WAY, 8))
def test_they_are_the_positions_of_every_attention(model_type: str) -> None:
    _check(model_type)


TEXT = sorted(record.model_type for file in (decoders, encoders) for record in file.FAMILIES)
OTHERS = [name for name in TEXT if name in zoo.model_types() and name not in {*OF_EACH_WAY, *LENGTHS_DIFFER, *REFUSED}]


@pytest.mark.sweep
@pytest.mark.parametrize("model_type", OTHERS)
def test_in_every_family(model_type: str) -> None:
    try:
        model, _ = zoo.tiny(model_type)
    except zoo.Unbuildable as error:
        pytest.skip(error.reason)
    if _takes_ids(model) is None:
        pytest.skip("takes no position_ids")
    _check(model_type)


@pytest.mark.parametrize("model_type", ["gpt_neo", "distilbert"])
def test_control_without_the_lens_they_have_no_effect(model_type: str) -> None:
    case = Case(model_type)
    assert isinstance(case.stack.owner.__dict__.pop(LENS), HandedDown)
    assert difference(case.states(case.counted * 2), case.states()) <= 1e-3


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model_type", "request_"),
    [
        *product(("gpt_neo", "distilbert", "ctrl"), ({"norm": "deepnorm"}, {"placement": "olmo2"})),
        *(("distilbert", {"norm": "batch"}), ("mpnet", {"norm": "batch"})),  # which decoders can't have
    ],
)
def test_beside_norms_that_stand_elsewhere(model_type: str, request_: dict[str, str]) -> None:
    """Lenses of norms and of positions are on the same layers, and each replaces what is in the same attention."""
    case = Case(model_type, **request_)
    positions = case.counted * 2
    moved = case.states(positions)
    assert difference(moved, case.states()) > 1e-3
    with case.rotated_by(positions):
        assert difference(moved, case.states()) <= 1e-5
