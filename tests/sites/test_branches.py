"""Residual branches found by running, against what each family's forward says, written down by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from tiny_models import inputs, tiny
from torch import Tensor, nn

from hfpatch.sites.deepnorm_weights import values_of, with_weights
from hfpatch.sites.residual_branches import Branch, find_branches

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def double(model: Any) -> tuple[Any, dict[str, Tensor]]:
    model = model.double()
    return model, {key: x.double() if x.is_floating_point() else x for key, x in inputs(model).items()}


def neox(parallel: bool) -> hf.PreTrainedModel:
    sizes = {**SIZES, "intermediate_size": 48, "vocab_size": 97, "max_position_embeddings": 64}
    return hf.GPTNeoXModel(hf.GPTNeoXConfig(**sizes, use_parallel_residual=parallel)).eval()


# block: [(norm, outlet, writer, projection, placement, dropout)], names relative to the block
PRE, POST, PARALLEL = "pre", "post", "parallel"
OPT = [
    ("self_attn_layer_norm", "self_attn", "self_attn.out_proj", "self_attn.out_proj", PRE, "dropout"),
    ("final_layer_norm", "fc2", "fc2", "fc2", PRE, "dropout"),
]


def moved(pairs: list[tuple], placement: str) -> list[tuple]:
    return [(*pair[:4], placement, pair[5]) for pair in pairs]


BERT = [
    (*["attention.output." + name for name in ("LayerNorm", "dropout", "dropout", "dense")], POST, ""),
    ("output.LayerNorm", "output.dropout", "output.dropout", "output.dense", POST, ""),
]
GPT2 = [
    ("ln_1", "attn", "attn.resid_dropout", "attn.c_proj", PRE, ""),
    ("ln_2", "mlp", "mlp.dropout", "mlp.c_proj", PRE, ""),
]
VIT = [
    ("layernorm_before", "dropout", "dropout", "attention.o_proj", PRE, ""),
    ("layernorm_after", "dropout", "dropout", "mlp.fc2", PRE, ""),
]
NEOX = [
    ("input_layernorm", *["post_attention_dropout"] * 2, "attention.dense", PARALLEL, ""),
    ("post_attention_layernorm", *["post_mlp_dropout"] * 2, "mlp.dense_4h_to_h", PARALLEL, ""),
]
BLOOM = [
    ("input_layernorm", *["self_attention.dense"] * 3, PRE, "hidden_dropout"),
    ("post_attention_layernorm", *["mlp.dense_4h_to_h"] * 3, PRE, "hidden_dropout"),
]
LLAMA = [
    ("input_layernorm", "self_attn", "self_attn.o_proj", "self_attn.o_proj", PRE, ""),
    ("post_attention_layernorm", "mlp", "mlp.down_proj", "mlp.down_proj", PRE, ""),
]
COHERE = [LLAMA[0], ("input_layernorm", *LLAMA[1][1:])]  # both read one norm
CROSS = ("encoder_attn_layer_norm", "encoder_attn", "encoder_attn.out_proj", "encoder_attn.out_proj", PRE, "dropout")
FAMILIES: dict[str, tuple[Any, dict[str, list[tuple]]]] = {
    "gpt2": (lambda: tiny("gpt2"), {"h.0": GPT2}),
    "opt, post-norm": (lambda: tiny("opt", do_layer_norm_before=False), {"decoder.layers.1": moved(OPT, POST)}),
    "bert": (lambda: tiny("bert"), {"encoder.layer.0": BERT}),
    "vit": (lambda: tiny("vit"), {"layers.0": VIT}),
    "bart": (
        lambda: tiny("bart"),
        {"encoder.layers.0": moved(OPT, POST), "decoder.layers.1": moved([OPT[0], CROSS, OPT[1]], POST)},
    ),
    "whisper": (lambda: tiny("whisper"), {"encoder.layers.0": OPT, "decoder.layers.1": [OPT[0], CROSS, OPT[1]]}),
    "gpt_neox": (lambda: neox(parallel=True), {"layers.0": NEOX}),
    "bloom": (lambda: tiny("bloom"), {"h.0": BLOOM}),
    "cohere": (lambda: tiny("cohere"), {"layers.0": moved(COHERE, PARALLEL)}),
}


def found(name: str) -> list[Branch]:
    return find_branches(*double(FAMILIES[name][0]()))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", FAMILIES)
def test_branches(name: str) -> None:
    branches = found(name)
    for block, expected in FAMILIES[name][1].items():
        names = ("norm", "outlet", "writer", "projection", "placement", "dropout")
        here = [tuple(getattr(branch, key) for key in names) for branch in branches if branch.block == block]
        assert here == expected
    assert not any(branch.altered or branch.shared for branch in branches)
    for branch in branches:  # attention mixes positions, and reads another stack where it crosses
        attention = "att" in branch.projection.rpartition(".")[0]
        crossing = "encoder_attn" in branch.norm
        assert branch.mixes == (attention and not crossing)
        assert branch.cross == crossing


def norm_as_the_stream(m: Any, x: Tensor) -> Tensor:
    """With a last branch that no norm reads."""
    x = m.norms.a(x)
    x = m.norms.b(x + m.one(x))
    return x + m.two(x)


# branch by branch: each takes the block and the stream
FORMS: dict[str, tuple[Callable[[Any, Tensor], Tensor], ...]] = {
    "sandwich": (
        lambda m, x: x + m.norms.b(m.one(m.norms.a(x))),
        lambda m, x: x + m.norms.d(m.two(m.norms.c(x))),
    ),
    "olmo2": (lambda m, x: x + m.norms.a(m.one(x)), lambda m, x: x + m.norms.b(m.two(x))),
    "scaled": (
        lambda m, x: x + m.factor * m.one(m.norms.a(x)),
        lambda m, x: x + 0.3 * m.two(m.norms.b(x)),
    ),
    "norm as the stream": (norm_as_the_stream,),
    "nothing added": (lambda m, x: m.two(m.norms.b(m.one(m.norms.a(x)))),),
    "hidden dropout": (
        lambda m, x: x + nn.functional.dropout(m.one(m.norms.a(x)), 0.3, m.training),
        lambda m, x: x + m.two(m.norms.b(x)),
    ),
}


class Block(nn.Module):
    """Branches put together by expressions, for forms that no small model of the zoo has."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.one, self.two = (nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
        self.norms = nn.ModuleDict({name: nn.LayerNorm(8) for name in ("a", "b", "c", "d")})
        self.factor = nn.Parameter(torch.rand(8) + 0.5)
        self.dropout = 0.1

    def forward(self, hidden_states: Tensor) -> Tensor:
        for branch in FORMS[self.form]:
            hidden_states = branch(self, hidden_states)
        return hidden_states


class Model(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(form) for _ in range(2))

    def forward(self, hidden_states: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


def of_form(form: str) -> list[Branch]:
    torch.manual_seed(0)
    model = Model(form).double().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.2 * torch.randn_like(parameter))
    branches = find_branches(model, {"hidden_states": torch.randn(2, 5, 8, dtype=torch.float64)})
    return [branch for branch in branches if branch.block == "layers.0"]


@pytest.mark.parametrize(
    ("form", "placements", "norms"),
    [
        ("sandwich", ["sandwich", "sandwich"], ["a", "c"]),
        ("olmo2", ["olmo2", "olmo2"], ["a", "b"]),
        ("scaled", ["pre", "pre"], ["a", "b"]),
        ("norm as the stream", ["post", "other"], ["b", ""]),
        ("nothing added", [], []),
        ("hidden dropout", ["pre", "pre"], ["a", "b"]),
    ],
)
def test_forms(form: str, placements: list[str], norms: list[str]) -> None:
    branches = of_form(form)
    assert [branch.placement for branch in branches] == placements
    assert [branch.norm.rpartition("norms.")[2] for branch in branches] == norms
    assert all(branch.altered == (form == "scaled") for branch in branches)
    unknown = "?" if form == "hidden dropout" else ""  # its rate is no attribute
    assert all(branch.dropout == unknown for branch in branches)
    if form == "sandwich":
        assert [branch.outer for branch in branches] == ["norms.b", "norms.d"]


def test_the_model_is_left_as_it_was() -> None:
    model, given = double(tiny("opt"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rates = [layer.dropout for layer in model.decoder.layers]
    state = torch.get_rng_state()
    find_branches(model, given)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [layer.dropout for layer in model.decoder.layers] == rates
    assert not any(module._forward_hooks or module._forward_pre_hooks or module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)


# --- weights that DeepNorm scales -------------------------------------------------------------------------------------


def qwen2_moe() -> hf.PreTrainedModel:
    sizes = {**SIZES, "intermediate_size": 48, "vocab_size": 97, "num_key_value_heads": 2, "moe_intermediate_size": 16}
    more = {"num_experts": 3, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 16}
    return hf.Qwen2MoeModel(hf.Qwen2MoeConfig(**sizes, **more, experts_implementation="eager")).eval()


LINEAR_ATTENTION = {"self_attn.v_proj": "all", "self_attn.o_proj": "all"}


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (
            lambda: double(tiny("gpt2")),
            {"attn.c_attn": "blocks", "attn.c_proj": "all", "mlp.c_fc": "all", "mlp.c_proj": "all"},
        ),
        (
            lambda: double(tiny("bloom")),
            {
                "self_attention.query_key_value": "heads",
                "self_attention.dense": "all",
                "mlp.dense_h_to_4h": "all",
                "mlp.dense_4h_to_h": "all",
            },
        ),
        (
            lambda: double(tiny("llama")),
            LINEAR_ATTENTION | {f"mlp.{name}_proj": "all" for name in ("gate", "up", "down")},
        ),
        (  # stacked experts and a shared one, and not their router and gate
            lambda: double(qwen2_moe()),
            LINEAR_ATTENTION
            | {"mlp.experts": "all"}
            | {f"mlp.shared_expert.{name}_proj": "all" for name in ("gate", "up", "down")},
        ),
        (lambda: mixture(), {"experts.*.*": "all"}),  # a list of them
    ],
    ids=["gpt2", "bloom", "llama", "stacked and shared experts", "a list of experts"],
)
def test_weights_that_deepnorm_scales(make: Callable[[], Any], expected: dict[str, str]) -> None:
    model, given = make()
    branches = with_weights(model, given, find_branches(model, given))
    assert {pair for branch in branches for pair in branch.weights} == set(expected.items())


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(8), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = self.norm(hidden_states)
        weights = self.router(x).softmax(-1)
        mixed = sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        return hidden_states + self.dropout(mixed)


def mixture() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model("olmo2")
    model.layers = nn.ModuleList(Mixture() for _ in range(2))
    return model.double().eval(), {"hidden_states": torch.randn(2, 5, 8, dtype=torch.float64)}


def test_where_values_lie() -> None:
    assert values_of(6, "blocks", 2).tolist() == [False, False, False, False, True, True]
    assert values_of(6, "heads", 2).tolist() == [False, False, True, False, False, True]
    assert values_of(2, "all", 2).all()
