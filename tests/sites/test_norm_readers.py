"""Which linear maps read a norm's output, whether anything else does, and by which Parameters: on small models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from tiny_models import tiny
from torch import nn
from transformers import GPT2Config, GPT2Model

from hfpatch.measure.twin import twin
from hfpatch.sites.norm_readers import NO_READER, OTHER_LAYERS, READ_OTHERWISE, UNREACHED, Reader, find_readers

LM = "AutoModelForCausalLM"


def readers(model: Any) -> dict[str, Any]:
    """By pattern of a norm: the readers as "name.parameter:axis", or the reason."""
    found = find_readers(*twin(model))
    return {
        norm: one if isinstance(one, str) else [f"{r.pattern}.{p}:{axis}" for r in one for p, axis in r.axes]
        for norm, one in found.items()
    }


def test_maps_of_a_conv1d_and_of_a_tied_head() -> None:
    assert readers(tiny("gpt2", LM)) == {
        "transformer.h.*.ln_1": ["transformer.h.*.attn.c_attn.weight:0"],  # Conv1D: (in, out)
        "transformer.h.*.ln_2": ["transformer.h.*.mlp.c_fc.weight:0"],
        "transformer.ln_f": ["lm_head.weight:1"],
    }


def test_several_maps_read_one_norm() -> None:
    found = readers(tiny("llama", LM, tie_word_embeddings=False))
    assert found["model.layers.*.input_layernorm"] == [
        f"model.layers.*.self_attn.{one}_proj.weight:1" for one in ("k", "q", "v")
    ]
    assert found["model.layers.*.post_attention_layernorm"] == [
        f"model.layers.*.mlp.{one}_proj.weight:1" for one in ("gate", "up")
    ]
    assert found["model.norm"] == ["lm_head.weight:1"]


def test_one_norm_of_two_parallel_branches() -> None:
    found = readers(tiny("cohere", LM, use_qk_norm=False))["model.layers.*.input_layernorm"]
    assert {one.removeprefix("model.layers.*.") for one in found} == {
        *(f"self_attn.{one}_proj.weight:1" for one in "qkv"),
        *(f"mlp.{one}_proj.weight:1" for one in ("gate", "up")),
    }


def test_experts_and_their_router() -> None:
    found = readers(zoo.tiny("mixtral")[0])
    assert found["layers.*.post_attention_layernorm"] == [
        "layers.*.mlp.experts.gate_up_proj:-1",
        "layers.*.mlp.gate.weight:-1",
    ]


def test_layers_with_numbers_inside_of_blocks() -> None:
    """T5's norms of a block have one pattern; which reads which is said by the numbers."""
    found = readers(tiny("t5", "AutoModelForSeq2SeqLM"))
    assert [one.rpartition("layer.*.")[2] for one in found["encoder.block.*.layer.*.layer_norm"]] == [
        *("DenseReluDense.wi.weight:1", "SelfAttention.k.weight:1"),
        *("SelfAttention.q.weight:1", "SelfAttention.v.weight:1"),
    ]
    assert "decoder.block.*.layer.*.EncDecAttention.q.weight:1" in found["decoder.block.*.layer.*.layer_norm"]


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("family", "norm", "reason"),
    [
        ("bert", "encoder.layer.*.output.LayerNorm", READ_OTHERWISE),  # by the residual connection
        ("bert", "embeddings.LayerNorm", READ_OTHERWISE),
        ("t5", "encoder.final_layer_norm", READ_OTHERWISE),  # an output as well
        ("t5", "decoder.final_layer_norm", NO_READER),  # an output alone
        ("gpt2", "ln_f", NO_READER),
        ("cohere", "layers.*.self_attn.q_norm", NO_READER),  # rotated, then multiplied with keys
        ("convnext", "stages.*.downsampling_layer.*", NO_READER),  # convolutions aren't linear maps of the last axis
    ],
)
def test_reasons(family: str, norm: str, reason: str) -> None:
    found = readers(tiny(family))
    assert next(value for name, value in found.items() if name.endswith(norm)) == reason


def hosted(**children: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """A GPT-2 in float64 whose second block is given other modules, and its inputs."""
    model = GPT2Model(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=16, n_positions=8)).double().eval()
    for name, child in children.items():
        setattr(model.h[1].mlp, name, child.double())
    return model, {"input_ids": torch.arange(6)[None]}


class Squared(nn.Module):
    """Reads a norm's output with a map, and multiplies it by itself: no linear function."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x) * x.square().mean(-1, keepdim=True)


class Doubled(nn.Linear):
    """A subclass of `nn.Linear` that isn't x W + b."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) ** 2


class Router(nn.Module):
    """Holds a matrix, but reads the norm's output not linearly."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() @ self.matrix


def test_a_router_behind_the_experts_that_are_held_is_seen() -> None:
    """With a matrix in a module inside it is taken for no map; its choice reaches the experts. Ernie's has a vector."""
    model, _ = zoo.tiny("ernie4_5_moe")
    gate = "layers.*.mlp.gate.weight:-1"
    assert gate in readers(model)["layers.*.post_attention_layernorm"]  # control
    for module in model.modules():
        if type(module).__name__ == "Ernie4_5_MoeTopKRouter":
            module.moe_statics.matrix = nn.Parameter(torch.zeros(3, 3))
    found = readers(model)
    assert found["layers.*.post_attention_layernorm"] == READ_OTHERWISE
    assert found["layers.*.input_layernorm"] == [f"layers.*.self_attn.{one}_proj.weight:1" for one in ("k", "q", "v")]


def test_a_function_that_is_not_linear_reads_it() -> None:
    assert find_readers(*hosted(c_fc=Squared()))["h.*.ln_2"] == READ_OTHERWISE
    assert find_readers(*hosted(c_fc=Doubled(8, 32)))["h.*.ln_2"] == "h.*.mlp.c_fc reads it, which isn't a linear map"
    assert find_readers(*hosted(c_fc=Router()))["h.*.ln_2"] == "h.*.mlp.c_fc reads it, which isn't a linear map"
    plain = find_readers(*hosted(c_fc=nn.Linear(8, 32)))["h.*.ln_2"]  # control
    assert {axes for reader in plain for axes in reader.axes} == {("weight", 0), ("weight", 1)}


def test_one_reader_that_is_not_linear_keeps_the_norm_of_all_layers() -> None:
    """A pattern stands for all layers, and the small model has few."""
    assert isinstance(find_readers(*hosted(c_fc=Squared()))["h.*.ln_2"], str)
    assert find_readers(*hosted(c_fc=Squared()))["h.*.ln_1"] == (Reader("h.*.attn.c_attn", (("weight", 0),)),)


def test_a_map_of_another_number_than_the_norm() -> None:
    """Which maps a norm of the user's model has is known by the numbers in their names."""

    class Crossed(nn.Module):
        """Hands what it is given to the other block's map."""

        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.__dict__["other"] = other

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(x)

    model, inputs = hosted()
    maps = [block.mlp.c_fc for block in model.h]
    model.maps = nn.ModuleList([maps[1], maps[0]])
    for i, block in enumerate(model.h):
        block.mlp.c_fc = Crossed(maps[i])
    assert find_readers(model, inputs)["h.*.ln_2"] == OTHER_LAYERS
    model.maps = nn.ModuleList(maps)
    assert find_readers(model, inputs)["h.*.ln_2"] == (Reader("maps.*", (("weight", 0),)),)  # control


def test_a_map_that_several_norms_share_is_nobodys() -> None:
    model, inputs = hosted()
    model.h[1].mlp.c_fc = model.h[0].mlp.c_fc
    assert find_readers(model, inputs)["h.*.ln_2"] == NO_READER


def test_a_shared_norm_has_the_maps_of_all_its_places() -> None:
    model, inputs = hosted()
    model.h[1].ln_2 = model.h[0].ln_2
    assert find_readers(model, inputs)["h.*.ln_2"] == (Reader("h.*.mlp.c_fc", (("weight", 0),)),)


def test_what_the_inputs_do_not_reach() -> None:
    model, inputs = hosted()
    model.spare = nn.LayerNorm(8).double()
    assert find_readers(model, inputs)["spare"] == UNREACHED
