"""The dry run: it touches nothing, its table tells what would happen, and it raises all that can be foreseen."""

from __future__ import annotations

import io
import itertools
import pickle
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import accelerate
import pytest
import torch
import zoo
from tiny_models import RECORDED, changes, fingerprint, patch, tiny
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedConfig

from hfpatch.core.globs import Names
from hfpatch.core.registry import ARCHITECTURES
from hfpatch.errors import NoMatchError, NothingToPatchError, OptionError, UnknownNameError, WrappedModelError
from hfpatch.patch import patch_model
from hfpatch.plan import Plan, plan_patch
from hfpatch.runtime.patch_errors import PatchError, UnsupportedError
from hfpatch.schemes.norm_schemes import DyT
from hfpatch.schemes.rope import RoPE
from hfpatch.sites import sites

# Purity


EVERY_FAMILY = (*RECORDED, "albert", "cohere", "deberta", "gemma", "llama", "nemotron", "olmo", "t5")


def busy(model: nn.Module) -> torch.optim.Optimizer:
    """Hooks, an optimizer with state, gradients, mixed modes: something for a careless plan to disturb."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    for module in model.modules():
        module.register_forward_hook(lambda *a: pytest.fail("a plan ran a user's hook"))
        module.register_forward_pre_hook(lambda *a: pytest.fail("a plan ran a user's hook"))
    list(model.modules())[3].train()
    list(model.parameters())[1].requires_grad_(False)
    return optimizer


@pytest.mark.sample(6)
@pytest.mark.parametrize("family", EVERY_FAMILY)
@pytest.mark.parametrize(
    "request_",
    [
        {"norm": "dyt"},
        {"pos": "rope"},
        {"norm": "rms", "pos": "nope", "init": "reset"},
        {"mlp": "swiglu"},
        {"mlp": "geglu", "init": "reset"},
    ],
)
def test_a_plan_touches_nothing(family: str, request_: dict[str, str]) -> None:
    model = tiny(family)
    optimizer = busy(model)
    before = fingerprint(model, optimizer)
    try:
        str(plan_patch(model, **request_))
    except PatchError:
        assert family not in RECORDED  # those take all three
    assert not changes(before, fingerprint(model, optimizer))


def test_a_plan_on_a_patched_model_touches_nothing() -> None:
    model = patch(tiny("gpt2"), norm="dyt", pos="rope", reversible=True)
    optimizer = busy(model)
    before = fingerprint(model, optimizer)
    for request in ({"norm": "rms"}, {"pos": "nope"}, {"pos": RoPE(theta=77.0)}, {"mlp": "swiglu"}):
        str(plan_patch(model, **request))
    met = plan_patch(model, norm="dyt", pos="rope")
    assert (met.empty, met.rows) == (True, [])
    assert str(met) == "GPT2Model: nothing to do, it is patched this way already."
    partly = plan_patch(model, norm="dyt", pos="nope")
    assert {row.kind for row in partly.rows} == {"position"}
    assert not changes(before, fingerprint(model, optimizer))


@pytest.mark.parametrize(
    "touch",
    [
        lambda m: m.wte.weight.data.add_(1),
        lambda m: setattr(m.ln_f, "weight", nn.Parameter(m.ln_f.weight.detach().clone())),
        lambda m: m.h[0].ln_1.weight.requires_grad_(True),
        lambda m: m.wte.train(),
        lambda m: m.h[1].register_forward_hook(lambda *a: None),
        lambda m: setattr(m.config, "n_head", 5),
        lambda m: setattr(m, "config", type(m.config).from_dict(m.config.to_dict())),
        lambda m: setattr(m.h[0].ln_1, "eps", 0.5),
        lambda m: setattr(m.h[0], "ln_1", m.h[0].ln_2),
        lambda m: setattr(m.ln_f, "__class__", type("LayerNorm", (nn.LayerNorm,), {})),
        lambda m: m.register_buffer("more", torch.zeros(1)),
        lambda m: m._modules.update(wte=m._modules.pop("wte")),
        lambda m: setattr(m, "anything", 1),
        lambda m: torch.rand(1),
        lambda m: m.wte.weight.grad.zero_(),
    ],
)
def test_the_fingerprint_sees(touch: Callable[[Any], Any]) -> None:
    """Control of all tests that say that nothing changed."""
    model = tiny("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    model.requires_grad_(False)
    model.wte.weight.grad = torch.ones_like(model.wte.weight)
    before = fingerprint(model, optimizer)
    assert not changes(before, fingerprint(model, optimizer))
    touch(model)
    assert changes(before, fingerprint(model, optimizer))


# The table


def table(plan: Plan) -> list[str]:
    return [re.sub(r" {2,}", " | ", line) for line in str(plan).splitlines()]


def test_the_table_says_what_is_kept_and_why() -> None:
    model = tiny("bert", "AutoModelForMaskedLM")
    plan = plan_patch(model, norm="layer:bias=false", keep="*.layer.1.output.LayerNorm", only=["bert.*"])
    why = {row.module: row.reason for row in plan.rows if row.action == "keep"}
    assert why == {
        "bert.encoder.layer.1.output.LayerNorm": "keep",
        "cls.predictions.transform.LayerNorm": "not in only",
    }
    assert "(kept)" in str(plan)
    assert {(row.now, row.becomes) for row in plan.rows if row.becomes} == {
        ("LayerNorm(32)", "LayerNorm(32, bias=False)")
    }
    assert table(plan)[-3] == "BertForMaskedLM: 4 modules change, 2 are kept."
    assert table(plan)[-1].endswith(": your data, as it writes no text.")


def test_each_module_is_counted_once() -> None:
    plan = plan_patch(tiny("gpt2", n_layer=2), norm="rms", pos="rope")
    assert [row.module for row in plan.rows].count("wpe") == 2  # centred, and then without its positions
    assert (plan.changing, plan.kept) == (len(plan.rows) - 1, 0)
    assert "GPT2Model: 14 modules change." in str(plan)


def test_parameters_of_one_module_count_as_that_module() -> None:
    plan = plan_patch(tiny("vit"), norm="rms", keep="*layernorm_before")
    names = [row.module for row in plan.rows]
    assert {"embeddings.cls_token", "embeddings.position_embeddings"} <= set(names)
    assert (plan.changing, plan.kept) == (len(names) - 3, 2)
    assert f"{len(names) - 3} modules change, 2 are kept." in str(plan)


def test_groups_show_gaps() -> None:
    plan = plan_patch(tiny("gpt2", n_layer=6), norm="rms", only=["h.[0134].ln_1"])
    assert any(line.startswith("h.{0-1,3-4}.ln_1 | x4") for line in table(plan))
    plan = plan_patch(tiny("gpt2"), norm="rms", only=["h.0.ln_1", "h.1.ln_2"])
    changed = [line for line in table(plan) if "RMSNorm" in line]
    assert not any("h.{0-1}.ln_{1-2}" in line for line in changed), "a group names no module that isn't in it"


# Where: only and keep


def replaced(plan: Plan) -> set[str]:
    return {row.module for row in plan.rows if row.action == "replace" and row.kind != "stream"}


NORM, POS, BOTH = {"norm": "rms"}, {"pos": "rope"}, {"norm": "rms", "pos": "rope"}
LN_1, LN_2 = {"h.0.ln_1", "h.1.ln_1"}, {"h.0.ln_2", "h.1.ln_2"}


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("request_", "where", "names"),
    [
        (NORM, {"only": "*.ln_1"}, LN_1),
        (NORM, {"only": ["h.0.*"]}, {"h.0.ln_1", "h.0.ln_2"}),
        (NORM, {"only": ("transformer.h.0.*",)}, {"h.0.ln_1", "h.0.ln_2"}),  # as the head calls them
        (NORM, {"only": ["*"], "keep": ["*.ln_2", "ln_f"]}, LN_1),
        (NORM, {"only": (name for name in ["*.ln_1"])}, LN_1),
        (NORM, {"keep": []}, LN_1 | LN_2 | {"ln_f"}),
        (POS, {"only": ["h.0.*"]}, {"wpe", "h.0.attn"}),
        (POS, {"keep": ["h.0.attn"]}, {"wpe", "h.1.attn"}),
        (POS, {"keep": ["wpe"]}, {"h.0.attn", "h.1.attn"}),
        (BOTH, {"keep": ["ln_f"]}, {"wpe", "h.0.attn", "h.1.attn"} | LN_1 | LN_2),
    ],
)
def test_only_and_keep_on_the_base_model(request_: dict[str, str], where: dict[str, Any], names: set[str]) -> None:
    assert replaced(plan_patch(tiny("gpt2"), **request_, **where)) == names


@pytest.mark.parametrize("glob", ["transformer.h.0.ln_1", "h.0.ln_1", "*h.0.ln_1"])
def test_globs_mean_the_same_with_a_head(glob: str) -> None:
    with_head, base = tiny("gpt2", "AutoModelForCausalLM"), tiny("gpt2")
    assert replaced(plan_patch(with_head, norm="rms", only=glob)) == {"transformer.h.0.ln_1"}
    assert replaced(plan_patch(base, norm="rms", only=glob)) == {"h.0.ln_1"}


def test_cross_attention_is_in_no_plan() -> None:
    of_decoder = replaced(plan_patch(tiny("bart"), pos="rope", only=["decoder.*"]))
    assert of_decoder == {"decoder.embed_positions", "decoder.layers.0.self_attn", "decoder.layers.1.self_attn"}
    of_gpt2 = replaced(plan_patch(tiny("gpt2", add_cross_attention=True), norm="rms", pos="rope"))
    assert not any("crossattention" in name for name in of_gpt2)
    assert "h.0.ln_cross_attn" in of_gpt2


@pytest.mark.parametrize("value", [3, [3], [""], "", [None], [["*"]], 0, object()])
@pytest.mark.parametrize("option", ["only", "keep"])
def test_what_is_no_glob(option: str, value: Any) -> None:
    with pytest.raises(OptionError, match=option):
        plan_patch(tiny("gpt2"), norm="rms", **{option: value})


# Norms that change only when they are named


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("family", "head", "glob", "norms", "reason"),
    [
        ("bert", "AutoModelForMaskedLM", "cls.*", {"cls.predictions.transform.LayerNorm"}, "norm of a head"),
        (
            "cohere",
            "AutoModel",
            "*.q_norm",
            {"layers.0.self_attn.q_norm", "layers.1.self_attn.q_norm"},
            "norm of queries or keys",
        ),
    ],
)
def test_norms_that_are_kept_unless_named(family: str, head: str, glob: str, norms: set[str], reason: str) -> None:
    model = tiny(family, head)
    rows = {row.module: row for row in plan_patch(model, norm="rms").rows}
    for name in norms:
        assert (rows[name].action, rows[name].reason) == ("keep", f"{reason}: only=['*', its name] changes it too")
    assert replaced(plan_patch(model, norm="rms", only=[glob])) == norms
    without = replaced(plan_patch(model, norm="rms", only=["*"]))
    assert without
    assert replaced(plan_patch(model, norm="rms", only=["*", *norms])) == without | norms  # as the reason says


def test_a_module_that_stands_in_two_places_is_one_row() -> None:
    model = tiny("gpt2")
    model.h[1].ln_1 = model.h[0].ln_1
    rows = {row.module: row for row in plan_patch(model, norm="dyt").rows}
    assert "h.1.ln_1" not in rows
    assert rows["h.0.ln_1"].aliases == ("h.1.ln_1",)
    assert rows["h.0.ln_1"].reason == "shared by 2 places"
    assert replaced(plan_patch(model, norm="dyt", only=["h.1.ln_1"])) == {"h.0.ln_1"}  # under either name


# Errors


REFUSED: list[tuple[dict[str, Any], type[PatchError], str]] = [
    ({}, OptionError, "norm=, pos=, mlp=, placement="),
    *(({"norm": "rms", "init": init}, OptionError, rf"init .*{init!r}") for init in ("Exact", "", None, 3, "fit")),
    ({"norm": "rmsnorm"}, UnknownNameError, r"'rmsnorm'.*'rms'"),
    ({"pos": "rotary"}, UnknownNameError, "'rotary'"),
    ({"norm": 3}, OptionError, "not 3"),
    ({"norm": "dyt:alpha=0"}, OptionError, "alpha must be"),
    ({"norm": "dyt:alpha=0.8,alpha=0.2"}, OptionError, "gives alpha twice"),
    ({"norm": "rms", "only": []}, OptionError, "only is an empty list"),
    ({"norm": "rms", "example_inputs": torch.ones(1, 4)}, OptionError, "keyword arguments of one forward.*not Tensor"),
    ({"norm": "rms", "example_inputs": {"inputs_ids": torch.ones(1, 4)}}, OptionError, "Did you mean 'input_ids'"),
    ({"norm": "rms", "example_inputs": {"pixels": torch.ones(1, 4)}}, OptionError, "none of which GPT2Model takes"),
    ({"pos": "rope:partial=2"}, OptionError, "partial must be"),
    ({"pos": RoPE(partial=0.1)}, OptionError, r"partial=0\.1"),
    ({"norm": "rms", "pos": RoPE(partial=0.1)}, OptionError, r"partial=0\.1"),  # the norm alone would be fine
    ({"norm": "rms", "only": ["nowhere"]}, NoMatchError, "only='nowhere'"),
    ({"norm": "rms", "only": ["*.ln_1", "*.ln_3"]}, NoMatchError, r"only='\*\.ln_3' .* h\.\*\.ln_1"),
    ({"pos": "rope", "keep": ["*.ln_1"]}, NoMatchError, r"keep='\*\.ln_1' .* like: wpe, h\.\*\.attn\."),
    ({"norm": "rms", "keep": ["*"]}, NothingToPatchError, r"norm='rms'.*keep"),
    ({"norm": "rms", "only": ["ln_f"], "keep": ["*"]}, NothingToPatchError, r"norm='rms'.*keep"),
    ({"pos": "rope", "keep": ["*"]}, NothingToPatchError, "pos='rope'"),
    ({"pos": "rope", "init": "exact"}, UnsupportedError, r"pos='rope'.*init='auto'"),
    ({"pos": "nope", "init": "exact"}, UnsupportedError, r"pos='nope'.*init='auto'"),
    ({"pos": "rope", "keep": "*wpe*", "init": "exact"}, UnsupportedError, r"h\.0\.attn: pos='rope' isn't exact here"),
    ({"norm": DyT(), "init": "exact"}, UnsupportedError, r"norm='dyt' isn't exact.*init='auto'"),
    ({"mlp": "swiglu", "init": "exact"}, UnsupportedError, "swiglu"),
    ({"norm": "rms", "mlp": "swiglu:d_ff=8"}, UnsupportedError, "d_ff"),
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("request_", "error", "message"), REFUSED)
def test_an_error_comes_from_the_plan_and_leaves_the_model_alone(
    request_: dict[str, Any], error: type[PatchError], message: str
) -> None:
    model = tiny("gpt2")
    before = fingerprint(model)
    for call in (plan_patch, patch_model):
        with pytest.raises(error, match=message):
            call(model, **request_)
        assert not changes(before, fingerprint(model))


@pytest.mark.parametrize(
    ("options", "pos", "message"),
    [
        ({"n_head": 32}, "rope", r"h\.0\.attn: RoPE.*partial=1 .*head_dim=1"),
        ({"n_head": 16}, RoPE(partial=0.5), r"h\.0\.attn: RoPE.*partial=0\.5 .*head_dim=2"),
        ({"n_head": 16}, "rope", None),  # control
        ({"n_embd": 36, "n_head": 4}, "rope", r"partial=0\.888"),  # heads of 9
    ],
)
def test_heads_that_cant_be_rotated(options: dict[str, int], pos: Any, message: str | None) -> None:
    with nullcontext() if message is None else pytest.raises(OptionError, match=message):
        plan_patch(tiny("gpt2", **options), pos=pos)


def test_the_partial_that_the_message_suggests_works() -> None:
    suggested = 0
    for head_dim in range(3, 130):
        for partial in (1.0, 0.9, 0.75, 0.5, 0.4, 0.3, 0.25):
            scheme = RoPE(partial=partial)
            try:
                scheme.check(head_dim, "attn")
            except OptionError as error:
                for advice in re.findall(r"such as partial=([\d.]+\d)", str(error)):
                    RoPE(partial=float(advice)).check(head_dim, "attn")
                    suggested += 1
    assert suggested > 100


@pytest.mark.parametrize(("partial", "head_dim", "channels"), [(0.58, 100, 58), (0.28, 100, 28), (0.7, 80, 56)])
def test_a_fraction_isnt_cut_by_floating_point(partial: float, head_dim: int, channels: int) -> None:
    assert RoPE(partial=partial).rotary_dim(head_dim) == channels


def test_a_plan_finds_each_kind_of_sites_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    for name in ("find_stacks", "find_rotations"):
        find = getattr(sites, name)
        monkeypatch.setattr(
            sites, name, lambda *given, name=name, find=find: asked.append(f"{name}{len(given)}") or find(*given)
        )
    names_of = Names.of
    monkeypatch.setattr(Names, "of", lambda model: asked.append("names") or names_of(model))
    request = {"norm": "rms", "pos": "rope:max_positions=128", "mlp": "geglu"}
    plan_patch(tiny("gpt2"), **request)
    once = ["names", "find_stacks1", "find_stacks2", "find_stacks2", "find_rotations1"]  # biases, and own rotations
    assert sorted(asked) == sorted(once)
    plan_patch(tiny("gpt2"), **request)
    assert sorted(asked) == sorted(2 * once)  # control: another plan looks again


def test_families_that_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    others = {name: family for name, family in ARCHITECTURES._entries.items() if name != "ernie"}
    monkeypatch.setattr(ARCHITECTURES, "_entries", others)
    with pytest.raises(UnsupportedError, match="ernie: hfpatch doesn't know which of its classes") as caught:
        plan_patch(tiny("ernie"), pos="rope")
    assert f"`hfpatch families` lists the {len(ARCHITECTURES)} families that it knows" in str(caught.value)


def test_a_patched_config_in_an_unpatched_model() -> None:
    """LayerNorms under a config that says RMSNorm."""
    model = tiny("gpt2")
    model.config = patch(tiny("gpt2"), norm="rms").config
    with pytest.raises(UnsupportedError, match="GPT2Model"):
        plan_patch(model, norm="rms")


def test_a_patched_model_inside_another() -> None:
    model = tiny("gpt2", "AutoModelForCausalLM")
    model.transformer = patch(tiny("gpt2"), norm="rms")
    with pytest.raises(UnsupportedError, match="transformer inside GPT2LMHeadModel"):
        plan_patch(model, pos="rope")


# Wrapped models


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM"))


def with_first_block(model: Any, wrap: Callable[[Any], Any]) -> Any:
    """The model with its first block wrapped."""
    model.transformer.h[0] = wrap(model.transformer.h[0])
    return model


def compiled_in_place(module: nn.Module) -> nn.Module:
    module.compile()
    return module


FIRST = r"\. Patch the model first, then "
WRAPPED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "DataParallel": (nn.DataParallel, f"not DataParallel{FIRST}wrap it"),
    "compiled": (torch.compile, f"not OptimizedModule{FIRST}wrap it"),
    "compiled in place": (compiled_in_place, f"GPT2LMHeadModel .*compiled.*{FIRST}compile it"),
    "compiled block": (
        lambda model: with_first_block(model, torch.compile),
        rf"transformer\.h\.0 .*compiled.*{FIRST}compile it",
    ),
    "block compiled in place": (
        lambda model: with_first_block(model, compiled_in_place),
        rf"transformer\.h\.0 .*compiled.*{FIRST}compile it",
    ),
    "LoRA": (with_lora, f"not PeftModelForCausalLM{FIRST}wrap it"),
    "dispatched": (
        lambda model: accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True),
        f"accelerate.*{FIRST}dispatch.*remove_hook_from_module",
    ),
    "offloaded": (
        lambda model: accelerate.cpu_offload(model, torch.device("cpu")),
        f"accelerate.*{FIRST}dispatch.*remove_hook_from_module",
    ),
    "another module": (nn.Sequential, f"PreTrainedModel is needed, not Sequential{FIRST}wrap it"),
}


@pytest.mark.parametrize(("wrap", "message"), WRAPPED.values(), ids=WRAPPED)
def test_wrapped_models(wrap: Callable[[Any], Any], message: str) -> None:
    model = wrap(tiny("gpt2", "AutoModelForCausalLM"))
    for call, request in itertools.product((plan_patch, patch_model), (NORM, POS)):
        with pytest.raises(WrappedModelError, match=message):
            call(model, **request)


def by_fsdp1(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def by_fsdp2(module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (nn.parallel.DistributedDataParallel, f"not DistributedDataParallel{FIRST}wrap it"),
        (by_fsdp1, f"not FullyShardedDataParallel{FIRST}"),
        (lambda model: with_first_block(model, by_fsdp1), f"FSDP{FIRST}"),
        (by_fsdp2, f"FSDP{FIRST}"),
    ],
    ids=["DDP", "FSDP1", "FSDP1 inside", "FSDP2"],
)
def test_distributed_models(wrap: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(WrappedModelError, match=message):
        plan_patch(wrap(tiny("gpt2", "AutoModelForCausalLM")), norm="rms")


@pytest.mark.parametrize(
    ("not_a_model", "message"),
    [
        (GPT2LMHeadModel, "not <class .*build it first"),
        (GPT2Config(), "not GPT2Config. Open or build it first"),
        ("gpt2", "not 'gpt2'. Open or build it first, .*from_pretrained"),
        (None, "not NoneType. Open or build it first"),
    ],
)
def test_what_is_no_model(not_a_model: Any, message: str) -> None:
    for call in (plan_patch, patch_model):
        with pytest.raises(OptionError, match=f"PreTrainedModel is needed, {message}"):
            call(not_a_model, norm="rms")


def test_a_forward_of_its_own() -> None:
    """What a library put on one instance would outlive a change of its class."""
    model = tiny("gpt2")
    model.h[0].attn.forward = model.h[0].attn.forward
    with pytest.raises(WrappedModelError, match=r"h\.0\.attn"):
        plan_patch(model, pos="rope")
    model.h[1].ln_1.forward = model.h[1].ln_1.forward
    with pytest.raises(WrappedModelError, match=r"h\.1\.ln_1"):
        plan_patch(model, norm="rms")
    assert not plan_patch(model, norm="rms", keep=["h.1.ln_1"]).empty


def test_a_parametrized_norm_is_listed_as_kept() -> None:
    model = tiny("gpt2", "AutoModelForCausalLM")
    torch.nn.utils.parametrize.register_parametrization(model.transformer.ln_f, "weight", torch.nn.Softplus())
    rows = {row.module: row for row in plan_patch(model, norm="rms").rows}
    assert rows["transformer.ln_f"].action == "keep"
    assert "parametrizations" in str(rows["transformer.ln_f"].reason)
    assert rows["transformer.h.0.ln_1"].action == "replace"


# A plan is data


class DataPickler(pickle.Pickler):
    """Refuses what is no data of a plan's own: modules, configs and what was handed in."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, nn.Module | nn.Parameter | PreTrainedConfig):
            raise TypeError(f"a plan holds a {type(value).__name__}")


@pytest.mark.parametrize(
    ("model_type", "request_"),
    [
        ("gpt2", {"norm": "rms", "pos": "rope:max_positions=128", "mlp": "swiglu"}),
        ("gpt2", {"norm": "none", "pos": "learned:max_positions=128"}),
        ("gpt2", {"norm": {"*.0.*": "dyt", "*": "folded"}, "pos": "alibi"}),
        ("llama", {"norm": "dyt:alpha=llm", "init": "reset", "pos": "rope:theta=77"}),
        ("bert", {"norm": "rms", "placement": "pre"}),
        ("bert", {"norm": "deepnorm", "init": "reset", "pos": "sinusoidal"}),
        ("roformer", {"pos": "rope:max_positions=128"}),  # its class computes a table
        ("t5", {"norm": "layer", "pos": "nope"}),
        ("vit", {"norm": "batch", "pos": "learned:image_size=96"}),
    ],
    ids=str,
)
def test_a_plan_is_data(model_type: str, request_: dict[str, Any]) -> None:
    """It can be stored, and sent to another process; nothing in it is the model's."""
    model, _ = zoo.tiny(model_type)
    plan, stored = plan_patch(model, **request_), io.BytesIO()
    DataPickler(stored).dump(plan)
    again = pickle.loads(stored.getvalue())
    assert str(again) == str(plan)
    assert again.to_json() == plan.to_json()
    with pytest.raises(TypeError, match="a plan holds a"):  # control
        DataPickler(io.BytesIO()).dump(replace(plan, model_name=model))
