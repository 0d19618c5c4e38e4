"""Patching as a transaction: all or nothing, once, composable, and back."""

from __future__ import annotations

import copy
import cProfile
import pstats
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import zoo
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
)
from torch import nn
from transformers import EncoderDecoderModel, GPT2LMHeadModel, GPT2Model
from transformers.models.opt.modeling_opt import OPTDecoder
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from hfpatch.core.transaction import UNDO_STATE, Transaction
from hfpatch.errors import NotPreservedWarning, NotReversibleError, OptionError, WrappedModelError
from hfpatch.exact.search import find_centring
from hfpatch.patch import patch_model, unpatch_model
from hfpatch.repairs.repair import repair
from hfpatch.runtime.norms import AffineNorm
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.runtime.rotary import RotaryEmbedding
from hfpatch.schemes.norm_schemes import DyT
from hfpatch.schemes.rope import RoPE

BOTH = {"norm": "dyt", "pos": "rope"}
EXACT = {"norm": "rms", "pos": "rope"}
LM = "AutoModelForCausalLM"
every_family = pytest.mark.parametrize("family", RECORDED)


# What it does


@pytest.mark.sample(3)
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
    patch(one, **BOTH, reversible=True).config.resid_pdrop = 0.77
    unpatch_model(one)
    assert one.config.resid_pdrop == 0.77
    assert not changes(before, fingerprint(other))


@pytest.mark.sample(4)
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


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(tiny_config("gpt2"))
    patch(model, **BOTH)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    filled = patch(tiny("gpt2", LM), **BOTH)
    for way in ("to_empty", "assign"):
        empty = copy.deepcopy(model)
        if way == "to_empty":
            empty.to_empty(device="cpu").load_state_dict(filled.state_dict())
        else:
            empty.load_state_dict(filled.state_dict(), assign=True)
        empty.tie_weights()
        assert difference(empty.eval(), filled) == 0, way


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "request_"),
    [("gpt2", BOTH), ("cohere", {"norm": "dyt"}), ("vit", BOTH), ("gpt2", {"mlp": "swiglu", "init": "reset"})],
)
def test_patching_while_the_default_device_is_meta(family: str, request_: dict[str, str]) -> None:
    """Libraries load models in such a context; a model on the CPU stays on the CPU."""
    model, other = tiny(family), patch(tiny(family), **request_)
    with torch.device("meta"):
        patch(model, **request_)
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert request_.get("init") == "reset" or difference(model, other) == 0


def test_tied_and_frozen_weights_stay_so() -> None:
    model = tiny("gpt2", LM).requires_grad_(False)
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


@pytest.mark.parametrize("made_under", [torch.enable_grad, torch.inference_mode])
def test_patching_under_inference_mode(made_under: Any) -> None:
    """New Parameters are ordinary ones, and the others stay of the kind that they were."""
    with made_under():
        model, other = tiny("gpt2"), patch(tiny("gpt2"), **BOTH)
    old = set(model.parameters())
    with torch.inference_mode():
        patch(model, **BOTH, reversible=True)
    present = set(model.parameters())
    assert {parameter.is_inference() for parameter in present & old} == {made_under is torch.inference_mode}
    assert made_under is torch.inference_mode or {parameter.is_inference() for parameter in present - old} == {False}
    assert difference(model, other) == 0
    with torch.inference_mode():
        unpatch_model(model)
    assert difference(model, tiny("gpt2")) == 0


def test_what_was_made_under_inference_mode_is_centred_and_averaged() -> None:
    with torch.inference_mode():
        model = tiny("gpt2")
    assert difference(patch(model, **EXACT), patch(tiny("gpt2"), **EXACT)) == 0


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["bart", "gpt2", "vit"])
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
    assert "norm='dyt' is approximate: outputs differ by" in str(warning.message)
    assert "absolute positions" in str(warning.message)
    assert warning.filename == __file__  # it points at the caller's line


@pytest.mark.parametrize(
    "request_", [{"norm": "layer"}, {"norm": "dyt", "init": "reset"}, {"norm": "layer", "init": "exact"}]
)
def test_there_is_no_warning_where_nothing_was_lost_or_all_starts_afresh(request_: dict[str, str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patch_model(tiny("gpt2"), **request_)


@pytest.mark.parametrize(("family", "head", "writes"), [("gpt2", LM, True), ("bert", "AutoModel", False)])
def test_the_warning_offers_a_models_own_text_where_it_writes_some(family: str, head: str, writes: bool) -> None:
    with pytest.warns(NotPreservedWarning, match="repairs it without training") as caught:
        patch_model(tiny(family, head), norm="dyt")
    assert ("'self'" in str(caught[0].message)) == writes


def test_the_warning_as_an_error_leaves_the_model_as_it_was() -> None:
    """`-W error` turns the warning into an exception when the work is done: it is taken back, as after any other."""
    model = tiny("gpt2")
    before = fingerprint(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotPreservedWarning)
        with pytest.raises(NotPreservedWarning):
            patch_model(model, **BOTH)
    assert not changes(before, fingerprint(model))


# Once


@pytest.mark.sample(2)
@every_family
def test_the_same_request_twice_changes_nothing(family: str) -> None:
    model = patch(tiny(family), **BOTH, reversible=True)
    before = fingerprint(model)
    for request in (BOTH, {"norm": "dyt"}, {"pos": "rope"}, {"norm": DyT(0.5), "pos": RoPE(10_000.0)}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert patch_model(model, **request) is model
        assert not changes(before, fingerprint(model))


@pytest.mark.parametrize("options", [{"calibration": "self"}, {"init": "reset"}, {"init": "exact"}], ids=str)
def test_a_request_that_is_carried_out_takes_no_other_start(options: dict[str, Any]) -> None:
    """It would change nothing, so it says what to call."""
    model = patch(tiny("gpt2", LM), norm="dyt")
    before = fingerprint(model)
    with pytest.raises(OptionError, match=r"repair\(model, original, batches\)"):
        patch_model(model, norm="dyt", **options)
    assert not changes(before, fingerprint(model))
    patch_model(model, norm="dyt")  # the same request is no error


# Composition


@pytest.mark.sample(1)
@every_family
def test_norm_and_position_one_after_the_other_equal_both_at_once(family: str) -> None:
    """tests/contracts/test_table.py has other schemes, and MLPs."""
    both = patch(tiny(family), **BOTH)
    for order in (("norm", "pos"), ("pos", "norm")):
        model = tiny(family)
        for kind in order:
            patch(model, **{kind: BOTH[kind]})
        assert sorted(model.config.hfpatch["edits"]) == sorted(both.config.hfpatch["edits"])
        assert difference(model, both) == 0


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CHAINS: list[tuple[str, list[dict[str, Any]]]] = [
    ("bert", [{"norm": norm, "init": "copy"} for norm in ("rms", "dyt", "rms")]),
    ("cohere", [{"norm": norm, "init": "copy"} for norm in ("derf", "layer")]),
    ("gpt2", [{"pos": "rope"}, {"pos": "nope"}, {"pos": RoPE(partial=0.5, pairing="interleaved")}]),
    ("bart", [{"pos": "nope"}, {"pos": RoPE(scaling=LLAMA3)}]),
    ("gpt2", [{"pos": "rope", "only": ["h.0.*"]}, {"pos": "rope"}]),
    ("gpt2", [{"pos": "rope", "keep": ["wpe"]}, {"pos": "rope"}]),
]


@pytest.mark.sample(2)
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
    assert difference(model, patch(tiny(family), **chain[-2])) > 1e-3  # control


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


# All or nothing


def give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)


@contextmanager
def failing_at(call: int | None, error: type[BaseException], moment: str) -> Iterator[list[int]]:
    """The transaction fails before or after it logs a change, at the given of its calls; yields their number so far."""
    original, count = Transaction._record, [0]

    def counted(self: Transaction, *change: Any) -> None:
        count[0] += 1
        if count[0] == call and moment == "before":
            raise error
        original(self, *change)
        if count[0] == call:
            raise error

    with mock.patch.object(Transaction, "_record", counted):
        yield count


@pytest.mark.sample(1)
@pytest.mark.parametrize("request_", [EXACT, {"mlp": "swiglu", "init": "reset"}], ids=str)
@pytest.mark.parametrize(("moment", "error"), [("before", KeyboardInterrupt), ("after", ZeroDivisionError)])
def test_a_failure_at_any_step_restores_everything(
    moment: str, error: type[BaseException], request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change is logged by one call; the model is the same objects and bits whichever of them fails."""
    model = tiny("gpt2")
    found = find_centring(model)
    monkeypatch.setattr("hfpatch.exact.conversion.find_centring", lambda *a: found)
    give_gradients(model)
    model.train()
    before = fingerprint(model)
    rehearsal = copy.deepcopy(model)
    with failing_at(None, error, moment) as count:
        patch(rehearsal, **request_, reversible=True)
    assert count[0] > 10
    for step in range(1, count[0] + 1):
        with failing_at(step, error, moment), pytest.raises(error):
            patch(model, **request_, reversible=True)
        assert not changes(before, fingerprint(model)), f"step {step} of {count[0]}"
    patch(model, **request_)  # and the next try succeeds
    assert changes(before, fingerprint(model))


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", ["patch", "unpatch", "repair"])
def test_a_model_is_changed_by_one_thread_at_a_time(change: str) -> None:
    """Two patches at once gave models that were called exact and weren't."""
    model, other = (patch(tiny("gpt2", LM), pos="nope", reversible=True) for _ in range(2))
    tokens = [inputs(model)["input_ids"] for _ in range(2)]
    changed: Callable[[Any], Any] = {
        "patch": lambda one: patch(one, norm="rms"),
        "unpatch": unpatch_model,
        "repair": lambda one: repair(one, tiny("gpt2", LM), tokens),
    }[change]
    changed(patch(other, norm="dyt", reversible=True))
    record, waits, goes_on, ended = Transaction._record, threading.Event(), threading.Event(), []

    def wait_midway(*args: Any) -> Any:
        waits.set()
        goes_on.wait(60)
        return record(*args)

    with mock.patch.object(Transaction, "_record", wait_midway):
        first = threading.Thread(target=lambda: ended.append(patch(model, norm="dyt", reversible=True)))
        first.start()
        assert waits.wait(60)
    second = threading.Thread(target=lambda: ended.append(changed(model)))
    second.start()
    second.join(0.2)
    assert not ended
    goes_on.set()
    for thread in (first, second):
        thread.join(60)
    assert ended[0] is model
    assert len(ended) == 2
    assert type(model) is type(other)
    assert difference(model, other) == 0


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("target", "error", "raised"),
    [
        ("hfpatch.measure.snapshot.Snapshot.verdict", RuntimeError, RuntimeError),
        ("hfpatch.measure.snapshot.Snapshot.__init__", MemoryError, MemoryError),
        ("hfpatch.exact.conversion.find_centring", RuntimeError, RuntimeError),
        ("hfpatch.measure.snapshot.run", torch.OutOfMemoryError, torch.OutOfMemoryError),
        ("hfpatch.measure.snapshot.run", RuntimeError, OptionError),  # the first forward: the inputs' fault
        ("transformers.models.gpt2.modeling_gpt2.GPT2MLP.forward", torch.OutOfMemoryError, torch.OutOfMemoryError),
    ],
)
def test_a_check_that_cant_run_is_no_failed_check(
    target: str, error: type, raised: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing lossy is put in place of what might have been exact."""
    model = tiny("gpt2", LM)
    before = fingerprint(model)

    def fail(*args: Any) -> None:
        raise error("on purpose")

    monkeypatch.setattr(target, fail)
    with pytest.raises(raised, match="on purpose"):
        patch_model(model, norm="rms")
    assert not changes(before, fingerprint(model))


def test_a_setting_that_a_forward_changed_is_saved(tmp_path: Path) -> None:
    """BigBird gives up sparse attention at the first short input, and its config doesn't say so."""
    model, given = zoo.tiny("big_bird")
    with torch.no_grad():
        model(**given)
    original = model.config
    assert original.attention_type == "block_sparse"  # control
    patch(model, pos="rope", reversible=True)
    again = reload(model, tmp_path)
    assert again.attention_type == again.config.attention_type == "original_full"
    assert difference(model, again) == 0
    assert unpatch_model(model).config.attention_type == original.attention_type == "block_sparse"


# And back


TAKEN_BACK: list[tuple[str, list[dict[str, Any]]]] = [
    *((family, [BOTH]) for family in RECORDED),
    ("bart", [EXACT, {"norm": "layer", "pos": RoPE(theta=9.0)}]),
    ("bert", [{"mlp": "swiglu"}]),
    ("gpt2", [{"mlp": "swiglu", "init": "reset"}]),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("family", "requests"), TAKEN_BACK)
def test_unpatch_restores_every_object_and_bit(family: str, requests: list[dict[str, Any]]) -> None:
    model = tiny(family)
    give_gradients(model)
    before = fingerprint(model)
    for request in requests:
        patch(model, **request, reversible=True)
    assert changes(before, fingerprint(model))
    assert unpatch_model(model) is model
    assert not changes(before, fingerprint(model))


@pytest.mark.sample(3)
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("family", ["gpt2", "whisper"])
def test_a_copy_of_a_patched_model_goes_back_by_itself(family: str, copied: Callable[[Any], Any]) -> None:
    plain = tiny(family)
    model = patch(tiny(family), **BOTH, reversible=True)
    patch(model, norm="rms", pos="nope", reversible=True)
    answer = outputs(model)
    other = unpatch_model(copied(model))
    assert type(other) is type(plain)
    assert other.config.to_dict() == plain.config.to_dict()
    assert list(other.state_dict()) == list(plain.state_dict())
    assert difference(other, plain) == 0
    assert difference(outputs(model), answer) == 0  # the original is still patched


@pytest.mark.sample(2)
@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize(
    "requests",
    [[{"pos": "nope"}, {"norm": "rms"}], [{"pos": "nope"}, {"norm": "rms"}, {"mlp": "geglu"}, {"norm": "dyt"}]],
    ids=["two", "four"],
)
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_a_copy_of_a_base_model_whose_class_two_patches_changed(
    family: str, requests: list[dict[str, str]], copied: Callable[[Any], Any]
) -> None:
    """An exact rms centres what stands in for a base model's tokens, in a forward of its own class."""
    plain, given = zoo.tiny(family)
    model = copy.deepcopy(plain)
    for request in requests:
        patch(model, **request, reversible=True)
    twin = copied(model)
    assert type(twin) is type(model)
    assert difference(twin, model, **given) == 0
    for one in (twin, model):
        unpatch_model(one)
        assert type(one) is type(plain)
        assert difference(one, plain, **given) == 0


@pytest.mark.parametrize(("family", "request_"), [("gpt2", BOTH), ("xglm", {"pos": "rope"})])
def test_unpatch_after_a_change_of_dtype(family: str, request_: dict[str, str]) -> None:
    """What is put back has the dtype that the model has by then: Parameters, and the table of XGLM, a buffer."""
    plain, given = zoo.tiny(family)
    model = patch(copy.deepcopy(plain), **request_, reversible=True)
    for one in (plain, model):
        one.bfloat16().eval()
    unpatch_model(model)
    assert {tensor.dtype for tensor in (*model.parameters(), *model.buffers())} == {torch.bfloat16}
    assert difference(model, plain, **given) == 0


def test_unpatch_keeps_what_was_trained_resized_and_set_since(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", LM), **BOTH, reversible=True)
    model.resize_token_embeddings(101)
    model.config.pad_token_id = 7
    with torch.no_grad():
        norm = model.transformer.ln_f
        getattr(norm, norm.facts.gain).fill_(3.0)
    unpatch_model(model)
    assert bool((model.transformer.ln_f.weight == 3.0).all())
    assert torch.equal(model.transformer.wpe.weight, tiny("gpt2").wpe.weight)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert (model.config.vocab_size, model.config.pad_token_id) == (101, 7)
    assert not hasattr(model.config, "hfpatch")
    again = reload(model, tmp_path, LM)
    assert type(again) is GPT2LMHeadModel
    assert difference(model, again) == 0


def test_only_reversible_patches_can_be_undone(tmp_path: Path) -> None:
    model = tiny("gpt2")
    with pytest.raises(NotReversibleError, match="isn't patched"):
        unpatch_model(model)
    patch(model, **BOTH)
    before = fingerprint(model)
    with pytest.raises(NotReversibleError, match=r"GPT2Model.*reversible=True"):
        unpatch_model(model)
    with pytest.raises(NotReversibleError, match="earlier patch"):
        patch(model, norm="rms", reversible=True)
    assert not changes(before, fingerprint(model))
    with pytest.raises(NotReversibleError, match="loaded"):
        unpatch_model(reload(model, tmp_path))
    reversible = patch(tiny("gpt2"), norm="rms", reversible=True)
    with pytest.raises(WrappedModelError, match="DataParallel"):
        unpatch_model(nn.DataParallel(reversible))
    patch(reversible, pos="rope")  # this one can't be taken back, so neither can the first
    with pytest.raises(NotReversibleError):
        unpatch_model(reversible)


def test_unpatch_refuses_a_module_with_changed_values_that_was_replaced_since() -> None:
    model = patch(tiny("gpt2", LM), norm="rms", init="exact", reversible=True)
    model.transformer.h[0].mlp.c_proj = copy.deepcopy(model.transformer.h[0].mlp.c_proj)  # it was centred
    before = fingerprint(model)
    with pytest.raises(NotReversibleError, match="Conv1D"):
        unpatch_model(model)
    assert not changes(before, fingerprint(model))


def test_an_interrupted_unpatch_is_ended_by_another() -> None:
    model = tiny("gpt2")
    before = fingerprint(model)
    log = vars(patch(model, **EXACT, reversible=True))[UNDO_STATE].transaction._log
    middle = len(log) // 2
    undo, arguments = log[middle]

    def interrupt(*_: Any) -> None:
        log[middle] = (undo, arguments)
        raise KeyboardInterrupt

    log[middle] = (interrupt, arguments)
    with pytest.raises(KeyboardInterrupt):
        unpatch_model(model)
    assert changes(before, fingerprint(model))
    unpatch_model(model)
    assert not changes(before, fingerprint(model))


def test_unpatch_on_meta() -> None:
    """No part of the model gets values back while the others have none."""
    plain, model = tiny("gpt2", LM), patch(tiny("gpt2", LM), **EXACT, reversible=True)
    unpatch_model(model.to("meta"))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}
    assert type(model) is type(plain)
    assert list(model.state_dict()) == list(plain.state_dict())


# Models of several parts


@pytest.mark.slow
def test_an_encoder_decoder_of_two_models_is_patched_saved_and_restored(tmp_path: Path) -> None:
    decoder = tiny("bert", LM, is_decoder=True, add_cross_attention=True)
    model = EncoderDecoderModel(encoder=tiny("bert"), decoder=decoder).eval()
    tokens = torch.randint(5, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": tokens, "decoder_input_ids": tokens[:, :7]}
    plain, before = outputs(model, **given), fingerprint(model)
    patch(model, **EXACT, reversible=True)
    assert difference(plain, outputs(model, **given)) > 0.01
    assert norms_of(model, nn.LayerNorm) == ["decoder.cls.predictions.transform.LayerNorm"]  # of a head
    assert len(norms_of(model, RotaryEmbedding)) == 4
    assert difference(model, reload(model, tmp_path, "AutoModelForSeq2SeqLM"), **given) == 0
    unpatch_model(model)
    assert not [path for path in changes(before, fingerprint(model)) if "config" not in path]


@pytest.mark.parametrize(("owner", "name"), [(OPTDecoder, "input_ids"), (WhisperEncoder, "input_features")])
def test_a_stack_by_itself(owner: Any, name: str) -> None:
    """Inner classes are models too, and own the table themselves."""
    model = tiny(owner.__name__.removesuffix("Encoder").removesuffix("Decoder").lower(), owner)
    given = inputs(model)
    before = fingerprint(model)
    patch(model, **BOTH, reversible=True)
    longer = {**given, name: given[name].repeat(*[1] * (given[name].dim() - 1), 8)}
    assert all(tensor.isfinite().all() for tensor in outputs(model, **longer))
    unpatch_model(model)
    assert not changes(before, fingerprint(model))


# After the patch, in daily use


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "norm", "init"), [("pegasus", "rms", "exact"), ("t5", "dyt:alpha=llm", "reset")])
def test_a_resized_embedding_that_encoder_and_decoder_share(family: str, norm: str, init: str, tmp_path: Path) -> None:
    """The host puts the shared one into both, where the patch centres or scales what each returns."""
    original, given = zoo.tiny(family, auto_class="AutoModelForSeq2SeqLM")
    model = patch(original.eval(), norm=norm, init=init)
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


@pytest.mark.parametrize(
    ("family", "request_"),
    [("gpt2", {"norm": "dyt"}), ("nemotron", {"norm": "dyt"}), ("gpt2", {"mlp": "geglu", "init": "reset"})],
)
def test_init_weights_doesnt_start_kept_parameters_afresh(family: str, request_: dict[str, str]) -> None:
    model = patch(tiny(family), **request_)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.init_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.usefixtures("process_group")
def test_patched_models_can_be_wrapped_and_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = patch(tiny("gpt2", LM), **BOTH)
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
    model, other = tiny("gpt2", LM), patch(tiny("gpt2", LM), pos="rope")
    config = adapter.LoraConfig(target_modules=["c_attn"], init_lora_weights=False)
    for one in (model, other):
        torch.manual_seed(0)
        one.add_adapter(config)
    patch(model, pos="rope")
    assert difference(model.eval(), other.eval()) == 0


@pytest.mark.slow
@pytest.mark.parametrize("request_", [{"norm": "rms", "init": "copy", "pos": "rope"}, {"norm": "rms"}], ids=str)
def test_cost_grows_with_the_layers_and_no_faster(request_: dict[str, str]) -> None:
    """Counted in calls: eight layers more cost what the eight before them did."""

    def calls(layers: int) -> int:
        profile = cProfile.Profile()
        profile.runcall(patch, tiny("gpt2", n_layer=layers), **request_)
        return pstats.Stats(profile).total_calls  # type: ignore[attr-defined]

    calls(2)  # what is imported and cached once
    first, second, third = (calls(layers) for layers in (8, 16, 24))
    assert third - second <= 1.1 * (second - first)
