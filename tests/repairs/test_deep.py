"""Repairs of models with many layers, of which a patch replaces the norms of some, or that overflow before a repair."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from hfpatch import patch_model, repair, repair_report
from hfpatch.measure.copies import copy_of
from hfpatch.repairs.linear_roles import Roles


def made(layers: int, scale: float = 1.0) -> Any:
    """A narrow Llama; with a large scale a constant in place of a norm lets its stream grow from layer to layer."""
    set_seed(0)
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=32, intermediate_size=64, num_attention_heads=4, vocab_size=64
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale if parameter.dim() > 1 else 1)
    return model


def data(count: int = 8, length: int = 8) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(64, (1, length), generator=generator)} for _ in range(count)]


def kinds_by_layer(model: Any) -> dict[str, set[tuple[str, str]]]:
    """Of each layer, what was fitted there: (module's last name, kind of step)."""
    report, found = repair_report(model), dict[str, set[tuple[str, str]]]()
    assert report is not None
    for step in report.steps:
        layer = step.module.split("layers.")[1].split(".")[0]
        found.setdefault(layer, set()).add((step.module.rpartition(".")[2], step.kind))
    return found


def grows() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A model whose stream, with a constant in place of 1 / rms, overflows before a repair; and its calibration."""
    model, inputs = made(12, 12.0), data(12, 12)
    inputs[0]["input_ids"][:] = 3  # the token whose embedding is large
    with torch.no_grad():
        model.model.embed_tokens.weight[3].mul_(300)
    return model, inputs


def test_roles_are_those_of_the_original_if_the_patched_stream_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What writes to the stream and what reads the same tensor is found in each block by itself, on a stream as it was.

    The control gives every block what the patched blocks before it return, without bounds.
    """
    found: list[set[str]] = []
    for original in (False, True):
        model, inputs = grows()
        with monkeypatch.context() as patched:
            if not original:
                patched.setattr(Roles, "__init__", _on_its_own_stream(Roles.__init__))
            try:
                patch_model(model, norm="fixed", only="*.layers.*", calibration=inputs)
                kinds = kinds_by_layer(model)
            except Exception as error:  # it gives NaN, and is refused
                found.append({type(error).__name__})
                continue
        found.append({layer for layer, steps in kinds.items() if ("o_proj", "projection") in steps})
    assert found[1] == {str(i) for i in range(12)}
    assert found[0] != found[1]


def _on_its_own_stream(init: Any) -> Any:
    def of(self: Any, replay: Any, original: Any, segments: Any) -> None:
        init(self, replay, replay, segments)

    return of


def test_blocks_before_the_first_change_are_left_alone() -> None:
    model = patch_model(made(4, 4.0), norm="dyt", only="*.layers.[23].*", calibration=data())
    assert set(kinds_by_layer(model)) == {"2", "3"}


def test_blocks_that_differ_otherwise_are_repaired() -> None:
    """`repair` takes a model that was trained since."""
    original = made(3, 4.0)
    model = patch_model(copy_of(original), norm="dyt", only="*.layers.2.*")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.add_(0.1 * torch.randn(32, 64))
    repair(model, original, data())
    assert set(kinds_by_layer(model)) == {"1", "2"}


@pytest.mark.slow
def test_norms_of_some_layers_of_many_are_folded() -> None:
    """No small model has layers of such numbers, and a random one of that depth without norms gives NaN."""
    model = patch_model(made(24), norm="none", only=["*.layers.1?.*", "*.layers.2?.*"], calibration=data())
    assert type(model.model.layers[20].input_layernorm).__name__ == "NoNorm"
    assert type(model.model.layers[0].input_layernorm).__name__ == "LlamaRMSNorm"
