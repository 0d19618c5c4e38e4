"""Patching as a transaction: all or nothing, once, composable, and back."""

from __future__ import annotations

import copy
import inspect
import itertools
import json
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import zoo
from sampled import slow_but
from tiny_models import (
    COPIES,
    RECORDED,
    changes,
    difference,
    fingerprint,
    inputs,
    norms_of,
    outputs,
    patch,
    peft_of_transformers,
    randomise,
    reload,
    tiny,
    tiny_config,
    without_outcomes,
)
from torch import nn
from transformers import EncoderDecoderModel, GPT2LMHeadModel, GPT2Model, VisionTextDualEncoderModel

from hfpatch.core.transaction import Transaction
from hfpatch.errors import NotPreservedWarning, NotReversibleError, OptionError, WrappedModelError
from hfpatch.exact.search import find_centring
from hfpatch.patch import patch_model, unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.repairs.repair import repair
from hfpatch.runtime.errors import UnsupportedError
from hfpatch.runtime.norms import AffineNorm, DynamicTanh
from hfpatch.runtime.rotary import RotaryEmbedding
from hfpatch.schemes.norms import DyT
from hfpatch.schemes.rope import RoPE

BOTH = {"norm": "dyt", "pos": "rope"}
every_family = pytest.mark.parametrize("family", RECORDED)


# What it does


@every_family
def test_both_change_the_output_and_keep_the_interface(family: str) -> None:
    """An unpatched model beside a patched one, made before or after it, is what it was."""
    model, plain = tiny(family), tiny(family)
    answer, config, kind = outputs(plain), model.config, type(model)
    assert patch(model, **BOTH) is model
    assert difference(model, plain) > 0.01
    assert difference(outputs(plain), answer) == 0
    assert difference(outputs(tiny(family)), answer) == 0
    assert type(plain) is type(tiny(family)) is not type(model)
    assert {id(module.config) for module in model.modules() if hasattr(module, "config")} == {id(model.config)}
    assert isinstance(model, kind)
    assert type(model).__name__ == kind.__name__
    assert type(model).__module__ == kind.__module__
    assert isinstance(model.config, type(config))
    assert type(model.config).__name__ == type(config).__name__
    assert model.config is not config  # others may share it
    assert not hasattr(config, "hfpatch")
    assert model.config.model_type == config.model_type == model.config.to_dict()["model_type"]
    assert not norms_of(model, nn.LayerNorm)
    assert norms_of(model, RotaryEmbedding)


def test_two_models_that_share_a_config_object() -> None:
    config = tiny_config("gpt2")
    one, other = randomise(GPT2Model(config)), randomise(GPT2Model(config))
    assert one.config is other.config
    before = fingerprint(other)
    patch(one, **BOTH)
    assert not changes(before, fingerprint(other))
    patch(other, norm="rms")
    requests = [without_outcomes(model.config.hfpatch)["request"] for model in (one, other)]
    assert requests[0][0] == {"norm": "dyt"}
    assert requests[1] == [{"norm": "rms"}]
    one, other = randomise(GPT2Model(config)), randomise(GPT2Model(config))
    patch(one, **BOTH, reversible=True).config.resid_pdrop = 0.77
    unpatch_model(one)
    assert (one.config.resid_pdrop, other.config.resid_pdrop) == (0.77, 0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("family", ["gpt2", "bert", "vit", "cohere"])
def test_the_dtype_is_kept(family: str, dtype: torch.dtype) -> None:
    model = tiny(family).to(dtype)
    request = BOTH if family in RECORDED else {"norm": "dyt"}
    patch(model, **request)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs(model).items()}
    with torch.no_grad():
        assert model(**given)[0].dtype == dtype
    assert all(m.inv_freq.dtype == torch.float32 for m in model.modules() if isinstance(m, RotaryEmbedding))


def test_half_after_the_patch_is_half_before_it() -> None:
    after, before = patch(tiny("gpt2"), **BOTH).half(), patch(tiny("gpt2").half(), **BOTH)
    a, b = after.wpe.constant, before.wpe.constant  # a mean of rows, of rounded ones in the second
    assert float((a - b).detach().abs().max()) <= 2**-11 * float(tiny("gpt2").wpe.weight.abs().max())
    with torch.no_grad():
        b.copy_(a)
    assert difference(after, before) == 0


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(tiny_config("gpt2"))
    patch(model, **BOTH)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    filled = patch(tiny("gpt2", GPT2LMHeadModel), **BOTH)
    for way in ("to_empty", "assign"):
        empty = copy.deepcopy(model)
        if way == "to_empty":
            empty.to_empty(device="cpu").load_state_dict(filled.state_dict())
        else:
            empty.load_state_dict(filled.state_dict(), assign=True)
        empty.tie_weights()
        assert difference(empty.eval(), filled) == 0, way


@pytest.mark.parametrize("family", ["gpt2", "cohere", "vit", "bert"])
def test_patching_while_the_default_device_is_meta(family: str) -> None:
    """Libraries load models in such a context; a model on the CPU stays on the CPU."""
    request = BOTH if family in RECORDED else {"norm": "dyt"}
    model, other = tiny(family), patch(tiny(family), **request)
    with torch.device("meta"):
        patch(model, **request)
    assert difference(model, other) == 0


def test_tied_and_frozen_weights_stay_so() -> None:
    model = tiny("gpt2", GPT2LMHeadModel).requires_grad_(False)
    model.transformer.h[0].ln_1.requires_grad_(True)
    patch(model, **BOTH)
    assert model.lm_head.weight is model.transformer.wte.weight
    free = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    norm = model.transformer.h[0].ln_1
    assert free == {f"transformer.h.0.ln_1.{name}" for name in (norm.facts.gain, norm.facts.shift, "alpha")}


def test_shared_norms_stay_shared() -> None:
    model = tiny("gpt2")
    model.h[1].ln_1 = model.h[0].ln_1
    patch(model, norm="dyt")
    assert model.h[1].ln_1 is model.h[0].ln_1
    assert isinstance(model.h[1].ln_1, AffineNorm)
    albert = patch(tiny("albert", num_hidden_layers=3), norm="rms")
    assert len(norms_of(albert, AffineNorm)) == 3
    assert not norms_of(albert, nn.LayerNorm)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_gradient_checkpointing_that_is_on_before_the_patch() -> None:
    grads = []
    for checkpointing in (False, True):
        model = tiny("gpt2", GPT2LMHeadModel, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        patch(model, **BOTH).train()
        model(**inputs(model), labels=inputs(model)["input_ids"], use_cache=False).loss.backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_patching_in_a_gradient_context(context: Any) -> None:
    model, other = tiny("gpt2"), patch(tiny("gpt2"), **BOTH)
    with context():
        patch(model, **BOTH, reversible=True)
    assert difference(model, other) == 0
    assert not any(p.is_inference() for p in model.parameters())
    with context():
        unpatch_model(model)
    assert difference(model, tiny("gpt2")) == 0


def test_parameters_made_under_inference_mode() -> None:
    with torch.inference_mode():
        model = tiny("gpt2")
        patch(model, **BOTH, reversible=True)
        answer = outputs(model)
    assert difference(outputs(patch(tiny("gpt2"), **BOTH)), answer) == 0
    unpatch_model(model)
    assert difference(model, tiny("gpt2")) == 0


@pytest.mark.parametrize("family", slow_but(RECORDED, ["gpt2", "bert", "vit"]))
def test_hidden_states_and_attentions_are_recorded(family: str) -> None:
    """transformers finds them by the classes of modules."""
    shapes = []
    for request in ({}, {"norm": "rms", "pos": "rope"}):
        model = tiny(family, attn_implementation="eager")
        if request:
            patch(model, **request)
        given = inputs(model) | {"output_attentions": True, "output_hidden_states": True}
        shapes.append([tensor.shape for tensor in outputs(model, **given)])
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) >= 6


# Warning


def test_the_warning_says_what_was_not_preserved() -> None:
    with pytest.warns(NotPreservedWarning) as caught:
        patch_model(tiny("gpt2"), norm="dyt", pos="rope")
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("GPT2Model: the patched model computes another function. norm='dyt' is approximate: outputs")
    assert "; not preserved: DynamicTanh: the scale of its input isn't removed" in text
    assert "absolute positions" in text
    assert "plan_patch(...) lists the modules" in text
    assert warning.filename == __file__  # it points at the caller's line


@pytest.mark.parametrize(
    "request_", [{"norm": "layer"}, {"norm": "dyt", "init": "reset"}, {"norm": "layer", "init": "exact"}]
)
def test_there_is_no_warning_where_nothing_was_lost_or_all_starts_afresh(request_: dict[str, str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(tiny("gpt2"), **request_)


def test_the_warning_as_an_error_leaves_the_model_as_it_was() -> None:
    """`-W error` turns the warning into an exception when the work is done: it is taken back, as after any other."""
    model = tiny("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    before = fingerprint(model, optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotPreservedWarning)
        with pytest.raises(NotPreservedWarning):
            patch_model(model, **BOTH, optimizer=optimizer)
    assert not changes(before, fingerprint(model, optimizer))


# Once


@every_family
def test_the_same_request_twice_changes_nothing(family: str) -> None:
    model = tiny(family)
    unpatched = fingerprint(model)
    patch(model, **BOTH, reversible=True)
    before = fingerprint(model)
    for request in (BOTH, {"norm": "dyt"}, {"pos": "rope"}, {"norm": DyT(0.5), "pos": RoPE(10_000.0)}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert patch_model(model, **request) is model
        assert not changes(before, fingerprint(model))
    unpatch_model(model)
    assert not changes(unpatched, fingerprint(model))


@pytest.mark.parametrize("options", [{"calibration": "self"}, {"init": "reset"}, {"init": "exact"}], ids=str)
def test_a_request_that_is_carried_out_takes_no_other_start(options: dict[str, Any]) -> None:
    """It would change nothing, so it says what to call."""
    model = patch(tiny("gpt2", "AutoModelForCausalLM"), norm="dyt")
    before = fingerprint(model)
    with pytest.raises(OptionError, match=r"repair\(model, original, batches\)"):
        patch_model(model, norm="dyt", **options)
    assert not changes(before, fingerprint(model))
    patch_model(model, norm="dyt")  # the same request is no error


# Composition


def state(model: nn.Module) -> dict[str, Any]:
    """Everything by value that makes two models the same; edits of different places may stand in any order."""
    config = json.loads(model.config.to_json_string())
    if "hfpatch" in config:
        config["hfpatch"] = without_outcomes(config["hfpatch"])
        config["hfpatch"]["edits"].sort()
    return {
        "config": config,
        "modules": [(name, type(module).__name__) for name, module in model.named_modules()],
        "weights": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "buffers": {name: tensor.tolist() for name, tensor in model.named_buffers()},
    }


@every_family
def test_norm_and_position_one_after_the_other_equal_both_at_once(family: str) -> None:
    both = patch(tiny(family), **BOTH)
    for order in (("norm", "pos"), ("pos", "norm")):
        model = tiny(family)
        for kind in order:
            patch(model, **{kind: BOTH[kind]})
        assert state(model) == state(both)
        assert difference(model, both) == 0
    assert state(patch(tiny(family), norm="dyt")) != state(both)  # control


NORM_CHAINS = [
    [{"norm": norm, "init": "copy"} for norm in pair]
    for pair in itertools.permutations(["rms", "dyt", "derf", "layer"], 2)
]
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
POSITION_CHAINS: list[list[dict[str, Any]]] = [
    [{"pos": pos} for pos in chain]
    for chain in (
        ["rope", RoPE(theta=100.0)],
        ["rope", "nope"],
        ["nope", "rope"],
        ["rope", "nope", RoPE(partial=0.5, pairing="interleaved")],
        ["rope", RoPE(scaling={"rope_type": "yarn", "factor": 4.0})],
        ["nope", RoPE(scaling=_LLAMA3)],
    )
]
CHAINS = [*itertools.product(("gpt2", "cohere"), NORM_CHAINS), *itertools.product(RECORDED, POSITION_CHAINS)]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "chain"), CHAINS)
def test_one_scheme_after_another(family: str, chain: list[dict[str, Any]], tmp_path: Path) -> None:
    """Only the last one counts: it takes gains, shifts and eps that the first norm kept, and scaling rules still know
    the removed table's length."""
    model, direct = tiny(family), patch(tiny(family), **chain[-1])
    for request in chain:
        patch(model, **request)
    assert difference(model, direct) <= (1e-5 if "norm" in chain[0] else 0)
    assert len(model.config.hfpatch["request"]) == len(chain)
    assert difference(model, reload(model, tmp_path)) == 0
    norms = {name: module for name, module in model.named_modules() if "eps" in dir(module)}
    assert all(module.eps == direct.get_submodule(name).eps for name, module in norms.items())
    if chain[-1].get("pos", "nope") != "nope":
        assert difference(model, patch(tiny(family), pos="nope")) > 1e-3  # control


def test_parts_of_a_model_one_after_the_other(tmp_path: Path) -> None:
    model = tiny("gpt2", n_layer=4)
    patch(model, norm="rms", only=["h.[01].*"])
    patch(model, norm="dyt", only=["h.[23].*"])
    patch(model, norm="derf", only=["ln_f"])
    patch(model, pos="rope", only=["h.[02].attn"])
    patch(model, pos=RoPE(theta=50.0), keep=["h.[02].attn"])
    kinds = {name: module._get_name() for name, module in model.named_modules() if isinstance(module, AffineNorm)}
    assert {kinds[f"h.{i}.ln_1"] for i in (0, 1)} == {"RMSNorm"}
    assert {kinds[f"h.{i}.ln_2"] for i in (2, 3)} == {"DynamicTanh"}
    assert kinds["ln_f"] == "DynamicErf"
    thetas = [model.h[i].attn.rotary_emb.theta for i in range(4)]
    assert thetas == [10_000.0, 50.0, 10_000.0, 50.0]
    assert difference(model, reload(model, tmp_path)) == 0


def test_a_part_of_the_positions_first(tmp_path: Path) -> None:
    direct = patch(tiny("gpt2"), pos="rope")
    for first in ({"only": ["h.0.*"]}, {"keep": ["wpe"]}, {"keep": ["h.0.attn"]}):
        model = patch(tiny("gpt2"), pos="rope", **first)
        assert difference(model, direct) > 1e-3
        assert difference(model, reload(model, tmp_path)) == 0
        patch(model, pos="rope")
        assert difference(model, direct) == 0
        assert difference(model, reload(model, tmp_path)) == 0


def test_back_to_an_earlier_scheme_is_another_patch(tmp_path: Path) -> None:
    model = tiny("gpt2")
    for norm in ("rms", "dyt", "rms"):
        patch(model, norm=norm)
    assert not norms_of(model, lambda m: type(m).__name__ == "DynamicTanh")
    assert difference(model, patch(tiny("gpt2"), norm="rms")) == 0
    assert difference(model, reload(model, tmp_path)) == 0


# All or nothing


_ORIGINAL_RECORD = Transaction._record


class StopHereError(Exception):
    pass


def failing_at(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: Callable[[int], str | None]) -> list[int]:
    """Replace a callable by one that raises at a chosen call, before or after its work; returns the calls' count."""
    original, count = getattr(owner, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        moment = when(count[0])
        if moment == "before":
            raise StopHereError
        result = original(*args, **kwargs)
        if moment == "after":
            raise StopHereError
        return result

    monkeypatch.setattr(owner, name, wrapped)
    return count


def trained(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with two groups and state for every Parameter."""
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() != 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


EXACT = {"norm": "rms", "pos": "rope"}
MLP, FRESH_MLP = {"mlp": "swiglu"}, {"mlp": "swiglu", "init": "reset"}
STEPS = [("gpt2", EXACT), ("gpt2", FRESH_MLP)]
MORE_STEPS = [
    ("gpt2", BOTH),
    *((family, BOTH) for family in ("bert", "bart", "vit", "whisper")),
    *((family, EXACT) for family in ("vit", "bert")),
    ("bert", MLP),
    *((family, request) for family in ("opt", "vit", "roberta", "bart") for request in (MLP, FRESH_MLP)),
]


def case_id(value: Any) -> str:
    return value if isinstance(value, str) else "+".join(map(str, value.values()))


@pytest.mark.parametrize(("family", "request_"), slow_but(STEPS + MORE_STEPS, STEPS), ids=case_id)
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_failure_at_any_step_restores_everything(
    family: str, moment: str, request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change is logged by one call; the model is the same objects and bits whichever of them fails."""
    model = tiny(family)
    found = find_centring(model)
    monkeypatch.setattr("hfpatch.exact.search.find_centring", lambda *a: found)
    optimizer = trained(model)
    model.train()
    before = fingerprint(model, optimizer)
    counted = failing_at(monkeypatch, Transaction, "_record", lambda call: None)
    rehearsal = copy.deepcopy(model)
    patch(rehearsal, **request_, optimizer=trained(rehearsal))
    steps = counted[0]
    assert steps > 15
    for step in range(1, steps + 1):
        with monkeypatch.context() as context:
            context.setattr(Transaction, "_record", _ORIGINAL_RECORD)
            failing_at(context, Transaction, "_record", lambda call, step=step: moment if call == step else None)
            with pytest.raises(StopHereError):
                patch(model, **request_, optimizer=optimizer, reversible=True)
        assert not changes(before, fingerprint(model, optimizer)), f"step {step} of {steps}"


@pytest.mark.parametrize(
    ("target", "error"),
    [
        ("hfpatch.patch.patched_model_class", StopHereError),
        ("hfpatch.checkpoint.patched_config.registered_config_class", KeyboardInterrupt),
        ("hfpatch.checkpoint.patched_config.copy.deepcopy", MemoryError),
        ("hfpatch.runtime.norms.RMSNorm.__init__", ValueError),
        ("hfpatch.schemes.request.Record.to_json", StopHereError),
        ("hfpatch.runtime.constants.ConstantPositions.__init__", StopHereError),
        ("hfpatch.runtime.apply.lensed_class", SystemExit),
    ],
)
def test_a_failure_in_what_a_step_calls(target: str, error: type, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2")
    optimizer = trained(model)
    before = fingerprint(model, optimizer)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error("on purpose")

    with monkeypatch.context() as context:
        context.setattr(target, fail)
        with pytest.raises(error, match="on purpose"):
            patch(model, norm="rms", pos="rope", optimizer=optimizer)
    assert not changes(before, fingerprint(model, optimizer))
    patch(model, norm="rms", pos="rope", optimizer=optimizer)  # and the next try succeeds
    assert difference(model, patch(tiny("gpt2"), norm="rms", pos="rope")) > 0  # `trained` took a step
    assert norms_of(model, lambda m: m._get_name() == "RMSNorm")


@pytest.mark.slow
def test_an_interrupt_at_a_line_of_a_patch() -> None:
    """At every one of the last lines and some of the others, the model is as it was, or patched and able to go back."""
    own = inspect.unwrap(patch_model).__code__.co_filename

    def patched(at: int | None) -> tuple[Any, list[str], int]:
        """The model, what changed, and how many lines of patch.py were run; the interrupt comes at this one."""
        model, lines = tiny("gpt2"), 0
        optimizer = trained(model)
        before = fingerprint(model, optimizer)

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal lines
            if frame.f_code.co_filename != own:
                return None
            lines += event == "line"
            if event == "line" and lines == at:
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            patch(model, pos="nope", optimizer=optimizer, reversible=True)
            assert at is None
        except KeyboardInterrupt:
            assert lines == at
        finally:
            sys.settrace(None)
        return model, changes(before, fingerprint(model, optimizer)), lines

    *_, lines = patched(None)
    assert lines > 100
    whole = []
    for at in (*range(1, lines - 25, 7), *range(lines - 25, lines + 1)):
        model, changed, _ = patched(at)
        if changed:
            whole.append(at)
            assert isinstance(unpatch_model(model).wpe, nn.Embedding)
    assert whole == list(range(whole[0], lines + 1)), "the last lines"
    assert len(whole) < 5


@pytest.mark.parametrize("change", ["patch", "unpatch", "repair"])
def test_a_model_is_changed_by_one_thread_at_a_time(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two patches at once gave models that were called exact and weren't."""
    model = patch(tiny("gpt2", "AutoModelForCausalLM"), pos="nope", reversible=True)
    calls = {
        "patch": lambda: patch(model, norm="rms"),
        "unpatch": lambda: unpatch_model(model),
        "repair": lambda: repair(model, tiny("gpt2", "AutoModelForCausalLM"), [torch.ones(2, 5).long()]),
    }
    waits, goes_on, ended = threading.Event(), threading.Event(), []

    def wait_midway(*args: Any) -> Any:
        waits.set()
        goes_on.wait(60)
        return _ORIGINAL_RECORD(*args)

    monkeypatch.setattr(Transaction, "_record", wait_midway)
    first = threading.Thread(target=lambda: ended.append(patch(model, norm="dyt", reversible=True)))
    first.start()
    try:
        assert waits.wait(60)
        with pytest.raises(UnsupportedError, match="another thread"):
            calls[change]()
        monkeypatch.setattr(Transaction, "_record", _ORIGINAL_RECORD)
        patch(tiny("gpt2"), norm="rms")  # another model
    finally:
        goes_on.set()
        first.join(60)
    assert ended == [model]
    expected = patch(patch(tiny("gpt2", "AutoModelForCausalLM"), pos="nope"), norm="dyt")
    assert difference(model, expected) == 0
    unpatch_model(model)  # and an error leaves no lock
    with pytest.raises(NotReversibleError):
        unpatch_model(model)
    patch(model, norm="rms")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
@pytest.mark.parametrize(
    "target", ["check.Reference.check", "check.Reference.__init__", "request.find_centring", "request.run"]
)
def test_a_check_that_cant_run_is_no_failed_check(target: str, error: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing lossy is put in place of what might have been exact."""
    model = tiny("gpt2", "AutoModelForCausalLM")
    before = fingerprint(model)

    def fail(*args: Any) -> None:
        raise error("on purpose")

    monkeypatch.setattr(f"hfpatch.exact.{target}", fail)
    # what else the first forward raises is the inputs' fault
    with pytest.raises(OptionError if (target, error) == ("request.run", RuntimeError) else error, match="on purpose"):
        patch_model(model, norm="rms")
    assert not changes(before, fingerprint(model))


def test_no_memory_for_the_search_is_no_reason_to_be_lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr("transformers.models.gpt2.modeling_gpt2.GPT2MLP.forward", fail)
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        plan_patch(tiny("gpt2", "AutoModelForCausalLM"), norm="rms")


@pytest.mark.parametrize("request_", [{"pos": "rope"}, {"norm": "rms"}], ids=str)
def test_a_setting_that_a_forward_changed_is_saved(request_: dict[str, str], tmp_path: Path) -> None:
    """BigBird gives up sparse attention at the first short input, and its config doesn't say so."""
    model, given = zoo.tiny("big_bird")
    with torch.no_grad():
        model(**given)
    assert model.config.attention_type == "block_sparse"  # control
    original = model.config
    patch(model, **request_, reversible=True)
    again = reload(model, tmp_path)
    assert again.attention_type == again.config.attention_type == "original_full"
    assert difference(model, again) == 0
    assert unpatch_model(model).config.attention_type == original.attention_type == "block_sparse"


def test_a_failing_second_patch_restores_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch(tiny("gpt2"), norm="rms", reversible=True)
    before = fingerprint(model)
    failing_at(monkeypatch, Transaction, "_record", lambda call: "after" if call == 9 else None)
    with pytest.raises(StopHereError):
        patch(model, **BOTH, reversible=True)
    monkeypatch.undo()
    assert not changes(before, fingerprint(model))
    unpatch_model(model)
    assert difference(model, tiny("gpt2")) == 0


# And back


TWICE = itertools.product(
    ({"norm": "rms"}, {"pos": "nope"}, BOTH),
    ({"pos": "rope"}, {"norm": "derf"}, {"norm": "layer", "pos": RoPE(theta=9.0)}),
)
MLPS = list(itertools.product(("gpt2", "bert", "opt", "vit", "roberta", "bart"), ([MLP], [FRESH_MLP])))
TAKEN_BACK = [*((family, [BOTH]) for family in RECORDED), *(("bart", list(pair)) for pair in TWICE), *MLPS[:4]]


@pytest.mark.parametrize(("family", "requests"), slow_but([*TAKEN_BACK, *MLPS[4:]], TAKEN_BACK))
def test_unpatch_restores_every_object_and_bit(family: str, requests: list[dict[str, Any]]) -> None:
    model = tiny(family)
    trained(model)
    model.eval()
    before = fingerprint(model)
    with pytest.raises(NotReversibleError, match="isn't patched"):
        unpatch_model(model)
    for request in requests:
        patch(model, **request, reversible=True)
    assert changes(before, fingerprint(model))
    with pytest.raises(WrappedModelError, match="DataParallel"):
        unpatch_model(nn.DataParallel(model))
    assert unpatch_model(model) is model
    assert not changes(before, fingerprint(model))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("family", ["gpt2", "bert", "whisper", "vit"])
@pytest.mark.parametrize("times", [1, 2])
def test_a_copy_of_a_patched_model_is_patched_and_goes_back(
    family: str, copied: Callable[[Any], Any], times: int
) -> None:
    plain = tiny(family)
    model = patch(tiny(family), norm="dyt", pos="rope", reversible=True)
    if times == 2:
        patch(model, norm="rms", pos="nope", mlp="geglu", reversible=True)
    answer = outputs(model)
    other = copied(model)
    assert type(other) is type(model)
    assert type(other.config) is type(model.config)
    assert difference(outputs(other), answer) == 0
    unpatch_model(other)
    assert type(other) is type(plain)
    assert state(other) == state(plain)
    assert difference(other, plain) == 0
    assert difference(outputs(model), answer) == 0  # the original is still patched
    assert list(other.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_unpatch_after_a_change_of_dtype(dtype: torch.dtype) -> None:
    model = patch(tiny("gpt2"), **BOTH, reversible=True)
    model.to(dtype)
    unpatch_model(model)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert difference(model, tiny("gpt2").to(dtype)) == 0


def test_unpatch_of_a_model_with_several_dtypes() -> None:
    model = tiny("gpt2").bfloat16()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    model.wpe.float()
    before = fingerprint(model)
    patch(model, **BOTH, reversible=True)
    unpatch_model(model)
    assert not changes(before, fingerprint(model))


def test_unpatch_after_training_keeps_what_was_trained() -> None:
    model = patch(tiny("gpt2", GPT2LMHeadModel), norm="dyt", pos="rope", reversible=True)
    table = tiny("gpt2").wpe.weight
    with torch.no_grad():
        norm = model.transformer.ln_f
        getattr(norm, norm.facts.gain).fill_(3.0)
        model.lm_head.weight.add_(1.0)
    unpatch_model(model)
    assert bool((model.transformer.ln_f.weight == 3.0).all())
    assert torch.equal(model.transformer.wpe.weight, table)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_unpatch_keeps_later_changes_of_the_config(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", GPT2LMHeadModel), **BOTH, reversible=True)
    model.resize_token_embeddings(101)
    model.config.pad_token_id = 7
    unpatch_model(model)
    assert (model.config.vocab_size, model.config.pad_token_id) == (101, 7)
    assert not hasattr(model.config, "hfpatch")
    again = reload(model, tmp_path, "AutoModelForCausalLM")
    assert type(again) is GPT2LMHeadModel
    assert difference(model, again) == 0


def test_only_reversible_patches_can_be_undone(tmp_path: Path) -> None:
    model = patch(tiny("gpt2"), **BOTH)
    before = fingerprint(model)
    with pytest.raises(
        NotReversibleError,
        match=r"GPT2Model.*reversible=True",
    ):
        unpatch_model(model)
    with pytest.raises(NotReversibleError, match="earlier patch"):
        patch(model, norm="rms", reversible=True)
    assert not changes(before, fingerprint(model))
    with pytest.raises(NotReversibleError, match="loaded"):
        unpatch_model(reload(model, tmp_path))
    reversible = patch(tiny("gpt2"), norm="rms", reversible=True)
    patch(reversible, pos="rope")  # this one can't be taken back, so neither can the first
    with pytest.raises(NotReversibleError):
        unpatch_model(reversible)


# Optimizers


def held(optimizer: torch.optim.Optimizer, group: int) -> set[int]:
    return {id(parameter) for parameter in optimizer.param_groups[group]["params"]}


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(**inputs(model), labels=inputs(model)["input_ids"]).loss.backward()
        optimizer.step()
    model.eval()


def test_an_optimizer_follows_the_parameters() -> None:
    model = tiny("gpt2", GPT2LMHeadModel)
    optimizer = trained(model)
    table, gain = model.transformer.wpe.weight, model.transformer.ln_f.weight
    momentum = optimizer.state[gain]["exp_avg"]
    patch(model, **BOTH, optimizer=optimizer)
    everything = held(optimizer, 0) | held(optimizer, 1)
    assert everything == {id(parameter) for parameter in model.parameters()}
    assert table not in optimizer.state
    assert optimizer.state[gain]["exp_avg"] is momentum
    assert {id(m.alpha) for m in model.modules() if hasattr(m, "alpha")} <= held(optimizer, 1)  # no decay, like gains
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    alpha = model.transformer.h[0].ln_1.alpha
    before = alpha.detach().clone()
    train(model, optimizer)
    assert not torch.equal(alpha, before)
    assert optimizer.state[alpha]["step"] == 1


@pytest.mark.parametrize("family", ["gpt2", "olmo", "cohere"])
@pytest.mark.parametrize("init", ["auto", "reset"])
def test_every_new_parameter_is_trained(family: str, init: str) -> None:
    """Also where nothing of the old norm is left, or it had no Parameters at all."""
    model = tiny(family, "AutoModelForCausalLM")
    optimizer = trained(model)
    patch(model, norm="dyt", init=init, optimizer=optimizer)
    assert held(optimizer, 0) | held(optimizer, 1) == {id(parameter) for parameter in model.parameters()}
    if family != "olmo":
        new = {id(p) for m in model.modules() if isinstance(m, AffineNorm) for p in m.parameters()}
        assert new <= held(optimizer, 1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(model, optimizer)
    still = [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]
    assert not [name for name in still if "norm" in name or "ln_" in name]


@pytest.mark.parametrize("family", ["bert", "mpnet", "electra", "albert", "big_bird"])
@pytest.mark.parametrize("pos", ["rope", "learned", "sinusoidal"])
def test_an_optimizer_where_a_patch_replaces_a_buffer(family: str, pos: str) -> None:
    """Models that number their positions in a buffer get a longer one, which no optimizer trains."""
    model, _ = zoo.tiny(family)
    if family == "big_bird":
        model.set_attention_type("original_full")
    before = {name: len(buffer.flatten()) for name, buffer in model.named_buffers() if name.endswith("position_ids")}
    optimizer = trained(model)
    patch(model, pos=f"{pos}:max_positions=200", optimizer=optimizer, reversible=True)
    now = {name: len(buffer.flatten()) for name, buffer in model.named_buffers() if name in before}
    assert before, "control: there is such a buffer"
    assert now != before
    for step in ("patched", "unpatched"):
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert held == {id(p) for p in model.parameters()}, step
        if step == "patched":
            unpatch_model(model, optimizer=optimizer)


def test_parameters_outside_the_optimizer_stay_outside_and_other_models_inside() -> None:
    """LoRA-style: the optimizer trains a part; only newcomers beside trained ones join."""
    model, head = tiny("gpt2", GPT2LMHeadModel).requires_grad_(False), nn.Linear(3, 3)
    model.transformer.h[0].requires_grad_(True)
    optimizer = torch.optim.AdamW([*(p for p in model.parameters() if p.requires_grad), *head.parameters()])
    for parameter in head.parameters():
        optimizer.state[parameter]["step"] = torch.ones(1)
    patch(model, norm="dyt", optimizer=optimizer)
    assert {id(parameter) for parameter in head.parameters()} <= held(optimizer, 0)
    assert all(parameter in optimizer.state for parameter in head.parameters())
    names = {name for name, p in model.named_parameters() if id(p) in held(optimizer, 0) and p.requires_grad}
    assert all(name.startswith("transformer.h.0.") for name in names)
    assert {"transformer.h.0.ln_1.alpha", "transformer.h.0.ln_2.alpha"} <= names


def test_an_optimizer_of_named_parameters() -> None:
    model = tiny("gpt2", GPT2LMHeadModel)
    optimizer = torch.optim.AdamW(model.named_parameters())
    patch(model, **BOTH, optimizer=optimizer)
    group = optimizer.param_groups[0]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert [names[id(parameter)] for parameter in group["params"]] == group["param_names"]
    optimizer.load_state_dict(optimizer.state_dict())


def test_unpatch_brings_the_table_back_into_the_optimizer() -> None:
    model = tiny("gpt2", GPT2LMHeadModel)
    optimizer = trained(model)
    names = [held(optimizer, 0), held(optimizer, 1)]
    patch(model, **BOTH, optimizer=optimizer, reversible=True)
    train(model, optimizer)
    unpatch_model(model, optimizer=optimizer)
    assert [held(optimizer, 0), held(optimizer, 1)] == names
    assert {id(parameter) for parameter in optimizer.state} <= names[0] | names[1]
    before = model.transformer.wpe.weight.detach().clone()
    train(model, optimizer)
    assert not torch.equal(model.transformer.wpe.weight, before)


def test_a_scheduler_and_a_saved_state_go_on() -> None:
    model = tiny("gpt2", GPT2LMHeadModel)
    optimizer = trained(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    patch(model, **BOTH, optimizer=optimizer)
    train(model, optimizer, 2)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(5e-4)
    saved = copy.deepcopy(optimizer.state_dict())
    other = patch(tiny("gpt2", GPT2LMHeadModel), **BOTH)
    constant = other.transformer.wpe.constant  # stays in the group of the table
    flat = [p for p in other.parameters() if p.dim() == 1 and p is not constant]
    rest = [p for p in other.parameters() if p.dim() != 1 or p is constant]
    again = torch.optim.AdamW([{"params": rest}, {"params": flat}])
    assert [len(g["params"]) for g in again.param_groups] == [len(g["params"]) for g in saved["param_groups"]]


@pytest.mark.parametrize(
    "optimizer",
    [3, "adamw", {"param_groups": []}, nn.Linear(1, 1), torch.optim.AdamW(tiny("gpt2").parameters())],
    ids=["number", "name", "groups", "module", "of another model"],
)
def test_what_is_no_optimizer(optimizer: Any) -> None:
    model = tiny("gpt2")
    before = fingerprint(model)
    with pytest.raises(OptionError, match="optimizer"):
        patch(model, norm="dyt", optimizer=optimizer)
    assert not changes(before, fingerprint(model))


# Models of several parts


def composite(kind: str) -> Any:
    if kind == "encoder-decoder":
        decoder = tiny("bert", "AutoModelForCausalLM", is_decoder=True, add_cross_attention=True)
        return EncoderDecoderModel(encoder=tiny("bert"), decoder=decoder).eval()
    model = VisionTextDualEncoderModel(vision_model=tiny("vit"), text_model=tiny("bert"))
    return randomise(model)


def composite_inputs(kind: str) -> dict[str, torch.Tensor]:
    tokens = torch.randint(5, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    if kind == "encoder-decoder":
        return {"input_ids": tokens, "decoder_input_ids": tokens[:, :7]}
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens, "pixel_values": pixels}


HEAD_NORMS = {"encoder-decoder": ["decoder.cls.predictions.transform.LayerNorm"], "vision-text-dual-encoder": []}
COMPOSITES = {"encoder-decoder": "AutoModelForSeq2SeqLM", "vision-text-dual-encoder": "AutoModel"}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "auto"), COMPOSITES.items(), ids=COMPOSITES)
def test_composites_are_patched_saved_and_restored(kind: str, auto: str, tmp_path: Path) -> None:
    model, given = composite(kind), composite_inputs(kind)
    plain = outputs(model, **given)
    before = fingerprint(model)
    patch(model, norm="rms", pos="rope", reversible=True)
    assert difference(plain, outputs(model, **given)) > 0.01
    assert norms_of(model, nn.LayerNorm) == HEAD_NORMS[kind]
    assert len(norms_of(model, RotaryEmbedding)) == 4
    assert difference(model, reload(model, tmp_path, auto), **given) == 0
    unpatch_model(model)
    assert not [path for path in changes(before, fingerprint(model)) if "config" not in path]
    assert difference(plain, outputs(model, **given)) == 0


@pytest.mark.parametrize("options", [{"is_decoder": True}, {"is_decoder": True, "add_cross_attention": True}])
def test_bert_as_a_decoder(options: dict[str, bool], tmp_path: Path) -> None:
    model = patch(tiny("bert", "AutoModelForCausalLM", **options), **BOTH)
    given = inputs(model)
    if "add_cross_attention" in options:
        given["encoder_hidden_states"] = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    assert difference(model, reload(model, tmp_path, "AutoModelForCausalLM"), **given) == 0
    later = {**given, "input_ids": given["input_ids"].clone()}
    later["input_ids"][:, -1] = 5
    a, b = (model(**x).logits[:, :-1] for x in (given, later))
    assert (a - b).abs().max() < 1e-5  # still causal


def test_gpt2_with_cross_attention(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", GPT2LMHeadModel, add_cross_attention=True), **BOTH)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    assert [name for name, _ in model.named_modules() if name.endswith("crossattention.rotary_emb")] == []
    given = inputs(model) | {"encoder_hidden_states": states}
    assert difference(model, reload(model, tmp_path, "AutoModelForCausalLM"), **given) == 0
    shuffled = given | {"encoder_hidden_states": states.flip(1)}
    assert difference(outputs(model, **given), outputs(model, **shuffled)) < 1e-4  # no positions there


@pytest.mark.parametrize("owner", ["BartEncoder", "BartDecoder", "OPTDecoder", "WhisperEncoder", "WhisperDecoder"])
def test_a_stack_by_itself(owner: str) -> None:
    """Inner classes are models too, and own the table themselves."""
    family = owner.removesuffix("Encoder").removesuffix("Decoder").lower()
    make = getattr(__import__(f"transformers.models.{family}.modeling_{family}", fromlist=[owner]), owner)
    model = tiny(family, make)
    long = dict(inputs(model))
    if owner == "WhisperEncoder":
        long["input_features"] = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0))
    else:
        long["input_ids"] = torch.randint(5, 97, (2, 100), generator=torch.Generator().manual_seed(0))
    before = fingerprint(model)
    patch(model, **BOTH, reversible=True)
    answer = outputs(model, **long)
    for copied in COPIES.values():
        assert difference(outputs(copied(model), **long), answer) == 0
    unpatch_model(model)
    assert not changes(before, fingerprint(model))


# After the patch, in daily use


def test_resized_embeddings(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", GPT2LMHeadModel), **BOTH)
    model.resize_token_embeddings(103)
    assert model.lm_head.weight is model.transformer.wte.weight
    again = reload(model, tmp_path, "AutoModelForCausalLM")
    assert again.config.vocab_size == 103
    assert difference(model, again) == 0


@pytest.mark.parametrize(
    ("family", "norm"),
    slow_but([("pegasus", "rms"), ("t5", "dyt:alpha=llm"), ("m2m_100", "rms")], [("t5", "dyt:alpha=llm")]),
)
def test_a_resized_embedding_that_encoder_and_decoder_share(family: str, norm: str, tmp_path: Path) -> None:
    """The host puts the shared one into both, where the patch centres or scales what each returns."""
    original, given = zoo.tiny(family, auto_class="AutoModelForSeq2SeqLM")
    model = patch(original.eval(), norm=norm, init="reset" if "dyt" in norm else "exact")
    names, before = list(dict(model.named_parameters())), model(**given).logits
    model.resize_token_embeddings(before.shape[-1] + 3)
    assert list(dict(model.named_parameters())) == names
    assert model.get_encoder().embed_tokens.weight is model.get_input_embeddings().weight
    assert difference(model(**given).logits[..., :-3], before) < 1e-5
    again = reload(model, tmp_path, "AutoModelForSeq2SeqLM")
    assert difference(model(**given).logits, again(**given).logits) == 0
    if norm == "rms":
        with pytest.raises(UnsupportedError, match="Identity"):
            model.set_input_embeddings(nn.Identity())


def test_a_table_of_positions_isnt_resized() -> None:
    model, _ = zoo.tiny("distilbert")
    patch(model, norm="rms", init="copy")
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match="DistilBertModel"):
        model.resize_position_embeddings(64)
    assert not changes(before, fingerprint(model))


def test_unpatch_refuses_what_was_replaced_since() -> None:
    original, _ = zoo.tiny("gptj", auto_class="AutoModelForCausalLM")
    model = patch(original, norm="rms:fold_bias=true", init="exact", reversible=True)
    model.resize_token_embeddings(103)
    before = fingerprint(model)
    with pytest.raises(NotReversibleError, match="Linear"):
        unpatch_model(model)  # its shift is folded into the old head's bias
    assert not changes(before, fingerprint(model))


def test_unpatch_after_the_model_has_moved() -> None:
    original, given = zoo.tiny("xglm")
    model = patch(copy.deepcopy(original), pos="rope", reversible=True)
    for one in (original, model):
        one.bfloat16().eval()
    unpatch_model(model)
    assert model.embed_positions.weights.dtype == torch.bfloat16
    assert difference(model(**given).last_hidden_state, original(**given).last_hidden_state) == 0
    gone = patch(tiny("gpt2"), norm="dyt", reversible=True).to("meta")
    with pytest.raises(NotReversibleError, match="on meta"):
        unpatch_model(gone)
    assert isinstance(gone.ln_f, DynamicTanh)


@pytest.mark.parametrize("family", ["gpt2", "bert", "nemotron"])
def test_init_weights_doesnt_start_kept_parameters_afresh(family: str) -> None:
    model = patch(tiny(family), norm="dyt")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.init_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.usefixtures("process_group")
def test_patched_models_can_be_wrapped_and_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = patch(tiny("gpt2", GPT2LMHeadModel), **BOTH)
    given = inputs(model)
    parallel = nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    assert difference(outputs(parallel, **given), outputs(model)) == 0
    sharded, mesh = copy.deepcopy(model), init_device_mesh("cpu", (1,))
    for block in sharded.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    assert difference(outputs(sharded, **given), outputs(model)) == 0


@pytest.mark.filterwarnings("ignore")
def test_patching_a_model_with_a_loaded_adapter() -> None:
    """transformers' own add_adapter leaves a PreTrainedModel; q and k of the adapter are rotated as well."""
    adapter = peft_of_transformers()
    model, other = tiny("gpt2", GPT2LMHeadModel), patch(tiny("gpt2", GPT2LMHeadModel), pos="rope")
    config = adapter.LoraConfig(target_modules=["c_attn"], init_lora_weights=False)
    for one in (model, other):
        torch.manual_seed(0)
        one.add_adapter(config)
    patch(model, pos="rope")
    assert difference(model.eval(), other.eval()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("request_", [{"norm": "rms", "init": "copy", "pos": "rope"}, {"norm": "rms"}, {"norm": "dyt"}])
def test_cost_grows_with_the_layers_and_no_faster(request_):
    """Counted in calls: eight layers more cost what the eight before them did."""

    def calls(layers):
        model, count = tiny("gpt2", n_layer=layers), 0

        def note(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            patch(model, **request_)
        finally:
            sys.setprofile(before)
        return count

    calls(2)  # what is imported and cached once
    first, second, third = (calls(layers) for layers in (8, 16, 24))
    assert third - second <= 1.1 * (second - first)
