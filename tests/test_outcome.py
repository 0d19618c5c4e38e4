"""Outcomes: what is said of a patch was measured on it, and the model, its checkpoint and its card say the same."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from tiny_models import changes, difference, fingerprint, inputs, patch, reload, tiny, tiny_config
from torch import Tensor, nn
from transformers import GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaAttention

from hfpatch.checkpoint.patched_config import give_patched_config
from hfpatch.errors import NotPreservedWarning, OptionError, VerificationError
from hfpatch.export import native_model
from hfpatch.hub.card import card
from hfpatch.hub.folder import read_checkpoint
from hfpatch.measure.inputs import example_inputs
from hfpatch.measure.snapshot import Forward, Snapshot, run
from hfpatch.patch import outcomes, patch_model, repair_report, unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.planners.full_length import makers_of_short_inputs, require_runs_in_full
from hfpatch.repairs.repair import repair
from hfpatch.repairs.repair_report import Fresh
from hfpatch.runtime.patch_errors import PatchError, UnsupportedError
from hfpatch.schemes.request import Record
from hfpatch.schemes.verdicts import Outcome

LM = "AutoModelForCausalLM"
NUMBER = r"(\d\S*\d)"


def calibration(model: nn.Module, count: int = 8) -> list[dict[str, Tensor]]:
    return [inputs(model, seed) for seed in range(count)]


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(**example_inputs(model)).logits.double()


@pytest.mark.parametrize("request_", [{"norm": "rms"}, {"mlp": "geglu"}], ids=str)
def test_exact_comes_with_the_largest_difference(request_: dict[str, str]) -> None:
    original = tiny("gpt2", LM)
    model = patch_model(copy.deepcopy(original), **request_)
    (outcome,) = outcomes(model).values()
    found = re.fullmatch(f"exact: outputs differ by {NUMBER}, rounding explains {NUMBER}", outcome)
    assert found, outcome
    truth = logits(original)
    largest = (logits(model) - truth).abs().max() / truth.square().mean().sqrt()
    assert float(found[1]) == pytest.approx(float(largest), rel=0.1, abs=1e-12)
    assert float(found[1]) <= float(found[2]) < 1e-3


def test_approximate_comes_with_the_error_and_what_is_lost() -> None:
    original = tiny("gpt2", LM)
    model = patch(copy.deepcopy(original), norm="rms", pos="rope")
    norm, positions = outcomes(model).values()
    assert norm.startswith("exact: outputs differ by ")
    lossy = re.fullmatch(f"approximate: outputs differ by {NUMBER}; not preserved: (.+)", positions)
    assert lossy, positions
    truth = logits(original)
    error = (logits(model) - truth).square().mean().sqrt() / truth.square().mean().sqrt()
    assert float(lossy[1]) == pytest.approx(float(error), rel=0.1)
    assert "absolute positions are removed" in lossy[2]


def test_what_is_exact_by_chance_is_said_without_a_warning() -> None:
    """LayerNorm removes a mean that isn't there. A difference of 0 tells nothing: what changed may not have run."""
    model = patch(tiny("gpt2", LM), norm="rms")  # centred
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotPreservedWarning)
        patch_model(model, norm="layer")
    outcome = outcomes(model)["norm='layer'"]
    assert re.match(f"exact on the inputs measured: outputs differ by {NUMBER}; not preserved: LayerNorm: ", outcome)
    with pytest.warns(NotPreservedWarning, match="is approximate: outputs differ by 0; not preserved: inputs beyond 8"):
        patch_model(tiny("gpt2", LM), pos="learned:max_positions=8")


def test_what_is_exact_beside_what_isnt_is_not_called_measured() -> None:
    """And what is kept is told with the reason; without the patch there is nothing to tell."""
    model = patch(tiny("gpt2", LM), mlp="swiglu", norm="layer", keep=["*.ln_f"], reversible=True)
    assert list(outcomes(model)) == ["norm='layer', keep=['*.ln_f']", "mlp='swiglu', keep=['*.ln_f']"]
    assert model.config.hfpatch["request"][-1]["mlp"] == "swiglu:ratio=1.0,bias=true"  # in full
    norm, mlp = outcomes(model).values()
    assert norm == "exact as planned, not measured apart from mlp; kept: 1 of 5 modules (keep)"
    assert mlp.startswith("approximate: outputs differ by ")
    assert outcomes(unpatch_model(model)) == {}


def test_each_request_has_its_own() -> None:
    model = patch(patch(tiny("gpt2", LM), norm="rms"), pos="rope")
    before = outcomes(model)
    assert [outcome.split(":")[0] for outcome in before.values()] == ["exact", "approximate"]
    patch(model, mlp="geglu")
    assert list(outcomes(model).items())[:2] == list(before.items())
    assert list(outcomes(model).values())[-1].startswith("exact: outputs differ by ")
    assert outcomes(tiny("gpt2", LM)) == {}


def row_of(text: str, request: str) -> list[str]:
    """The cells of a request's row in a printed table."""
    return re.split(r" {2,}", next(line for line in text.splitlines() if line.startswith(f"{request}  ")))[1:]


@pytest.mark.slow
def test_they_print_as_a_table_of_how_much_is_kept(tmp_path: Path) -> None:
    """Of a difference 1 - d^2, of a KL divergence exp(-KL); a difference of 0 tells nothing."""
    original = tiny("gpt2", LM)
    swapped = patch(copy.deepcopy(original), norm="rms", pos="rope")
    truth = logits(original)
    lost = float((logits(swapped) - truth).square().mean() / truth.square().mean())
    assert row_of(str(outcomes(swapped)), "norm='rms'")[-3:] == ["100.0%", "no", "difference"]
    found = row_of(str(outcomes(swapped)), "pos='rope'")
    assert float(found[1]) == pytest.approx(lost**0.5, rel=0.01)
    assert float(found[3].rstrip("%")) == pytest.approx(100 * (1 - lost), abs=0.5)
    assert found[0] == "approximate"
    assert found[-2:] == ["yes", "difference"]
    repaired = patch(copy.deepcopy(original), norm="dyt", calibration=calibration(original))
    report = repair_report(repaired)
    assert report is not None
    shown = ["repaired", f"{report.before:.3g}", f"{report.after:.3g}", f"{math.exp(-report.after):.1%}"]
    assert row_of(str(outcomes(repaired)), "norm='dyt'")[:4] == shown
    assert row_of(str(outcomes(reload(repaired, tmp_path, LM))), "norm='dyt'")[:4] == shown
    shorter = patch(tiny("gpt2", LM), pos="learned:max_positions=8")
    request = "pos='learned:max_positions=8,original_max_positions=64'"
    assert row_of(str(outcomes(shorter)), request)[:5] == ["approximate", "-", "-", "-", "-"]
    assert str(outcomes(original)) == "Nothing is patched."


@pytest.mark.parametrize(
    "stored", [{"copied": -1}, {"repaired": math.inf}, {"samples": True}, {"metric": 3}, {"by": 1}]
)
def test_numbers_of_a_checkpoint_are_checked(stored: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="its outcome"):
        Outcome.from_json({"verdict": "repaired", **stored})


@pytest.mark.slow
def test_a_later_repair_is_told_too() -> None:
    original = tiny("gpt2", LM)
    model = patch(patch(copy.deepcopy(original), mlp="geglu"), norm="dyt")
    lossy, exact = outcomes(model).values()
    repair(model, original, calibration(original))
    repaired = outcomes(model)["norm='dyt'"]
    assert list(outcomes(model).values()) == [repaired, exact]
    assert repaired.startswith("repaired: KL divergence ")
    assert repaired.partition("; not preserved: ")[1:] == lossy.partition("; not preserved: ")[1:]
    patch(model, norm="derf", calibration=calibration(original))
    assert outcomes(model)["norm='dyt'"] == repaired, "the second repair brought back the model with DyT"
    assert outcomes(model)["norm='derf'"].startswith("repaired: ")


@pytest.mark.slow
def test_an_undone_repair_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfpatch.repairs.repair.helps", lambda before, after: False)
    model = tiny("gpt2", LM)
    with pytest.warns(NotPreservedWarning, match="norm='dyt'.*repair"):
        patch_model(model, norm="dyt", calibration=calibration(model))
    assert "repaired" not in outcomes(model)["norm='dyt'"]


# Not measured: the reason


def test_without_inputs_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any, **options: Any) -> None:
        raise UnsupportedError("no inputs could be made for this one")

    monkeypatch.setattr("hfpatch.measure.inputs.make_inputs", fail)
    unmeasured = "as planned, not measured: UnsupportedError: no inputs could be made for this one"
    for request, kind in (({"pos": "rope"}, "approximate"), ({"norm": "layer"}, "exact")):
        (outcome,) = outcomes(patch(tiny("gpt2", LM), **request)).values()
        assert outcome.startswith(f"{kind} {unmeasured}")
    model = tiny("gpt2", LM)
    before = fingerprint(model)
    with pytest.raises(VerificationError, match="example_inputs="):
        patch_model(model, norm="layer", init="exact")
    assert not changes(before, fingerprint(model))
    patch_model(model, norm="layer", init="exact", example_inputs=inputs(model))
    assert next(iter(outcomes(model).values())).startswith("exact: outputs differ by ")


@pytest.mark.parametrize(
    ("family", "request_", "lost"),
    [
        ("gpt2", {"placement": "olmo2"}, "norms are placed as x + LN(f(x)) in place of x + f(LN(x))"),
        (
            "t5",  # an encoder, which can't tell the order without its biases, and a decoder, which can
            {"pos": "nope"},
            "relative biases are removed; without a causal mask the stack can't tell the order of its tokens",
        ),
        ("gpt2", {"norm": "dyt", "init": "reset"}, "DynamicTanh: parameters are reinitialised"),
    ],
)
def test_what_was_lost_is_said_once(family: str, request_: dict[str, str], lost: str) -> None:
    (outcome,) = outcomes(patch(tiny(family), **request_)).values()
    assert outcome.partition("; not preserved: ")[2].partition("; kept: ")[0] == lost


def test_without_weights_it_says_so() -> None:
    with torch.device("meta"):
        model = GPT2LMHeadModel(tiny_config("gpt2"))
    norm, positions = outcomes(patch(model, norm="rms", pos="rope")).values()
    assert norm.startswith("exact as planned, not measured")
    assert positions.startswith("approximate as planned, not measured: weights aren't in memory; not preserved")


def raising(error: Exception, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a forward of GPT-2 raise from its `at`-th call on."""
    calls, host_forward = [], GPT2LMHeadModel.forward

    @functools.wraps(host_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) >= at:
            raise error
        return host_forward(self, *args, **kwargs)

    monkeypatch.setattr(GPT2LMHeadModel, "forward", forward)


@pytest.mark.sample(4)
@pytest.mark.parametrize("error", [MemoryError("no more"), torch.OutOfMemoryError("CUDA out of memory")], ids=repr)
@pytest.mark.parametrize("request_", [{"pos": "rope"}, {"norm": "dyt"}, {"norm": "layer", "init": "exact"}], ids=str)
@pytest.mark.parametrize("at", [1, 2])  # before the patch, and after it
def test_out_of_memory_is_no_outcome(
    error: Exception, request_: dict[str, str], at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2", LM)
    before = fingerprint(model)
    raising(error, at, monkeypatch)
    with pytest.raises(type(error), match=str(error)):
        patch_model(model, **request_)
    assert not changes(before, fingerprint(model))


def test_other_errors_of_a_forward_are_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    raising(RuntimeError("bad input"), 1, monkeypatch)
    (outcome,) = outcomes(patch(tiny("gpt2", LM), pos="rope")).values()
    assert outcome.startswith("approximate as planned, not measured: RuntimeError: bad input")


def test_a_comparison_that_fails_isnt_blamed_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(truth: Any, outputs: Any) -> None:
        raise TypeError("can't be compared")

    monkeypatch.setattr("hfpatch.measure.snapshot.deviations", fail)
    model = tiny("gpt2", LM)
    before = fingerprint(model)
    with pytest.raises(TypeError, match="can't be compared"):
        patch_model(model, pos="rope")
    assert not changes(before, fingerprint(model))


# A new length or size is run


ENCODER = "with max_encoder_position_embeddings"
NOTHING_RUNS = [
    ("dinov2", "learned:image_size=[32, 64]", r"with image_size=\(32, 64\)", "RuntimeError"),  # its host wants a square
    ("dinov2_with_registers", "learned:image_size=[32, 64]", r"with image_size=\(32, 64\)", "RuntimeError"),
    ("led", "learned:max_positions=8", f"{ENCODER}=8", "IndexError"),  # it pads inputs to whole windows of 512
    ("led", "learned:max_positions=600", f"{ENCODER}=600", "IndexError"),
    ("yoso", "sinusoidal", "on longer inputs than before", "RuntimeError"),  # it cuts positions from a buffer
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("model_type", "pos", "size", "said"), NOTHING_RUNS)
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_size_at_which_nothing_runs_is_refused(
    model_type: str, pos: str, size: str, said: str, calibrated: bool
) -> None:
    model, given = zoo.tiny(model_type)
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match=f"doesn't run {size}.*{said}.*left unchanged"):
        patch_model(model, pos=pos, **({"calibration": [given] * 2} if calibrated else {}))
    assert not changes(before, fingerprint(model))


@pytest.mark.parametrize("pos", ["learned:max_positions=512", "learned:max_positions=1024"])
def test_a_size_at_which_it_runs_isnt(pos: str) -> None:
    """Control: as many rows as the window that LED pads to, or two of them."""
    model, _ = zoo.tiny("led")
    assert "not measured" not in next(iter(outcomes(patch(model, pos=pos)).values()))


def test_the_inputs_are_those_that_fit_before_and_after() -> None:
    (outcome,) = outcomes(patch(tiny("gpt2", LM), pos="learned:max_positions=8")).values()
    assert outcome.startswith("approximate: outputs differ by 0; not preserved: inputs beyond 8 tokens")
    model, _ = zoo.tiny("vit")  # no image is of both sizes
    (outcome,) = outcomes(patch(model, pos="learned:image_size=96")).values()
    assert outcome.startswith("approximate: it runs at its new size, and not on the inputs of before (ValueError: ")


def test_users_inputs_are_cut_and_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none can be made."""

    def fail(*given: Any, **options: Any) -> None:
        raise UnsupportedError("no inputs could be made for this one")

    monkeypatch.setattr("hfpatch.measure.inputs.make_inputs", fail)
    for model_type, pos in (("vit", "learned:image_size=96"), ("gpt2", "learned:max_positions=8")):
        model, given = zoo.tiny(model_type)
        (outcome,) = outcomes(patch(model, pos=pos, example_inputs=given)).values()
        assert outcome.startswith("approximate: it runs at its new size"), outcome
    model, given = zoo.tiny("dinov2")
    with pytest.raises(UnsupportedError, match="doesn't run after this patch: RuntimeError"):
        patch(model, pos="learned:image_size=[32, 64]", example_inputs=given)


@pytest.mark.parametrize("pos", ["rope:max_positions=131072", "alibi", "learned:max_positions=131072"])
def test_a_long_one_is_run_in_part(pos: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a second's worth of tokens, and a few at the last positions."""
    model, seen = tiny("gpt2", LM), []
    kind, host_forward = type(model), type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        positions = kwargs.get("position_ids")
        seen.append((kwargs["input_ids"].shape[1], 0 if positions is None else int(positions.max()) + 1))
        return host_forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(host_forward)  # type: ignore[attr-defined]
    monkeypatch.setattr(kind, "forward", forward)
    patch(model, pos=pos)
    length = 131072 if "131072" in pos else 2 * model.config.n_positions  # of any length
    assert max(tokens for tokens, _ in seen) == min(2048, length)
    assert max(position for _, position in seen) == length


# A change that moves nothing is said


class OwnRotation(LlamaAttention):
    """As in a model file of a user: it rotates by frequencies of its own, whatever it is passed."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        frequencies = 100 ** -torch.linspace(0, 1, self.head_dim // 2)
        angles = (torch.arange(hidden_states.shape[1])[:, None] * frequencies).repeat(1, 2)[None]
        return super().forward(hidden_states, (angles.cos(), angles.sin()), **kwargs)


class PassedRotation(LlamaAttention):
    """The control: another class, which rotates by what it is passed."""

    def forward(self, hidden_states: Tensor, position_embeddings: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(hidden_states, position_embeddings, **kwargs)


@pytest.mark.parametrize("pos", ["rope:theta=77", 'rope:scaling={"rope_type":"linear","factor":4.0}', "nope"])
def test_attentions_that_ignore_the_rotation_that_they_are_passed(pos: str) -> None:
    model, other = tiny("llama", LM), tiny("llama", LM)
    for layer, of_other in zip(model.model.layers, other.model.layers, strict=True):
        layer.self_attn.__class__, of_other.self_attn.__class__ = OwnRotation, PassedRotation
    assert outcome(patch(model, pos=pos)).startswith("approximate: outputs differ by 0; not preserved:")
    assert re.match(r"approximate: outputs differ by (?!0;)", outcome(patch(other, pos=pos)))


def test_frequencies_are_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ones than the config will say: a checkpoint would be another model."""
    model = tiny("llama", LM)
    before = fingerprint(model)
    forget = lambda model, record, edits, lengths=(): give_patched_config(model, record, edits)  # noqa: E731
    monkeypatch.setattr("hfpatch.patch.give_patched_config", forget)
    with pytest.raises(UnsupportedError, match=r"model\.rotary_emb: LlamaRotaryEmbedding keeps other frequencies"):
        patch_model(model, pos="rope:theta=77")
    assert not changes(before, fingerprint(model))


def test_a_model_that_doesnt_run_any_more_is_left_as_it_was() -> None:
    """Batch norm needs the padding, which LongT5's local attention has in a mask of five axes."""
    model, _ = zoo.tiny("longt5")
    before = fingerprint(model)
    with pytest.raises(PatchError, match="padding"):
        patch_model(model, norm="batch")
    assert not changes(before, fingerprint(model))


# Planned as exact, and measured otherwise


@pytest.fixture
def off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured outputs are off by a tenth after a patch."""
    measured = Snapshot.outputs_after

    def outputs_after(*given: Any) -> dict[str, torch.Tensor]:
        return {name: 1.1 * value for name, value in measured(*given).items()}

    monkeypatch.setattr(Snapshot, "outputs_after", outputs_after)


def test_what_isnt_exact_as_planned_is_said_or_refused(off: None) -> None:
    model = tiny("gpt2", LM)
    before = fingerprint(model)
    with pytest.raises(VerificationError, match="exact"):
        patch_model(model, norm="layer", init="exact")
    assert not changes(before, fingerprint(model))
    with pytest.warns(NotPreservedWarning, match="norm='layer'"):
        patch_model(model, norm="layer")
    assert outcomes(model)["norm='layer'"].startswith("approximate: planned as exact, but outputs differ by ")


# Nothing else changes


def test_measuring_leaves_settings_that_a_forward_changes() -> None:
    """BigBird gives up its sparse attention at the first short input."""
    model, given = zoo.tiny("big_bird")
    patch(model, norm="dyt")
    assert model.attention_type == "block_sparse"
    assert outcomes(model)["norm='dyt'"].startswith("approximate: outputs differ by ")
    model(**given)
    assert model.attention_type == "original_full"  # control


@pytest.mark.slow
def test_a_repair_is_told_with_what_it_left_and_a_checkpoint_and_its_card_say_the_same(tmp_path: Path) -> None:
    model = tiny("gpt2", LM)
    patch(model, norm="dyt", mlp="geglu", calibration=calibration(model))
    report = repair_report(model)
    norm, mlp = outcomes(model).values()
    figures = f"KL divergence {report.before:.3g} -> {report.after:.3g} on 2 held-out sequences"
    figures += f" (worst token {report.worst_before:.3g} -> {report.worst_after:.3g})"
    figures += "".join(f", and {one}" for one in report.fresh if one.kind == Fresh.LONGER or one in report.farther)
    assert norm.startswith(f"repaired: {figures}; not preserved: DynamicTanh: the scale of its input isn't removed")
    assert mlp == "exact as planned, not measured apart from norm"
    again = reload(model, tmp_path / "first", LM)
    assert outcomes(again) == outcomes(model)
    assert len(outcomes(model)) == 2
    again.save_pretrained(tmp_path / "second")
    cards = []
    for name in ("first", "second"):
        found = read_checkpoint(tmp_path / name)
        cards.append(card(found, "me/it")[0])
    assert cards[0] == cards[1]
    for request, outcome in outcomes(model).items():
        assert f"\n{request}: {outcome}\n" in cards[0]
        assert "outcome=" not in cards[0]
    assert difference(again, model) == 0


@pytest.mark.parametrize("first", ["rope", "alibi"])
def test_dropping_what_an_earlier_patch_put_in_is_a_loss(first: str) -> None:
    model = patch(patch(tiny("gpt2", LM), pos=first), pos="nope")
    assert outcomes(model)["pos='nope'"].startswith("approximate: ")


def test_norms_that_an_earlier_patch_moved_arent_exact() -> None:
    model = patch(tiny("gpt2", LM), placement="olmo2")
    assert "placement=" in str(plan_patch(model, norm="rms").losses())
    with pytest.raises(PatchError, match="placement="):
        patch_model(model, norm="rms", init="exact")


@pytest.mark.slow
def test_nan_is_no_evidence() -> None:
    """NaN equals NaN, so every change to such a model would be measured as exact."""
    model = tiny("gpt2", LM)
    model.transformer.h[0].ln_1.bias.data[0] = torch.nan
    before = fingerprint(model)
    with pytest.raises(OptionError, match="NaN"):
        patch_model(model, norm="rms")
    assert not changes(before, fingerprint(model))
    with pytest.warns(NotPreservedWarning, match="NaN"):
        patch_model(model, pos="rope", norm="rms", init="copy")
    with pytest.raises(PatchError, match="inf"):
        native_model(model)


# --- padding ----------------------------------------------------------------------------------------------------------


def padded(model: nn.Module, side: str = "right") -> dict[str, Tensor]:
    """Two texts, the shorter one padded."""
    ids = torch.randint(5, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    mask = mask if side == "right" else mask.flip(1)
    given = {"input_ids": ids * mask, "attention_mask": mask}
    decodes = model.config.is_encoder_decoder
    return given | ({"decoder_input_ids": ids, "decoder_attention_mask": mask} if decodes else {})


@pytest.mark.sample(3)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("bert", "AutoModel"),  # its pooled output counts as it is
        ("bert", "AutoModelForMaskedLM"),
        ("gpt2", LM),
        ("t5", "AutoModelForSeq2SeqLM"),
        ("bert", "AutoModelForQuestionAnswering"),
    ],
)
def test_padding_counts_for_nothing(family: str, head: str, side: str) -> None:
    original = tiny(family, head)
    given = padded(original, side)
    model = patch(copy.deepcopy(original), norm="dyt", example_inputs=given)
    with torch.no_grad():
        old, new = (one.eval()(**given) for one in (original, model))
    mask = given["attention_mask"].bool()
    errors = []
    for name, truth in old.items():
        if isinstance(truth, Tensor):
            t, y = (x[mask] if x.shape[:2] == mask.shape else x for x in (truth.double(), new[name].double()))
            errors.append(float((y - t).square().mean().sqrt() / t.square().mean().sqrt()))
    (outcome,) = Record.of(model.config).outcomes().values()
    assert outcome.copied == pytest.approx(max(errors), rel=1e-3)


def garbage(monkeypatch: pytest.MonkeyPatch, where: Any) -> None:
    """GPT-2's logits are NaN at some positions, and after a patch only there."""
    forward = GPT2LMHeadModel.forward

    def spoiled(self: Any, *args: Any, attention_mask: Tensor, **kwargs: Any) -> Any:
        output = forward(self, *args, attention_mask=attention_mask, **kwargs)
        output.logits[where(attention_mask)] = math.nan if isinstance(self.transformer.ln_f, nn.LayerNorm) else 1e9
        return output

    monkeypatch.setattr(GPT2LMHeadModel, "forward", spoiled)


def test_what_is_exact_may_differ_at_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    garbage(monkeypatch, lambda mask: mask == 0)
    model = tiny("gpt2", LM)
    given = padded(model)
    patch_model(model, norm="rms", init="exact", example_inputs=given)
    (outcome,) = outcomes(model).values()
    assert outcome.startswith("exact: ")


def test_norms_may_read_nan_at_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2", LM)
    given, forward = padded(model), GPT2Block.forward

    def spoiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        if self.attn.layer_idx == model.config.n_layer - 1:  # before, other tokens would read it
            output[given["attention_mask"] == 0] = math.nan
        return output

    monkeypatch.setattr(GPT2Block, "forward", spoiled)
    patch_model(model, norm="rms", init="exact", example_inputs=given)
    (outcome,) = outcomes(model).values()
    assert outcome.startswith("exact: ")
    with pytest.raises(PatchError):  # control: RoPE isn't
        patch_model(tiny("gpt2", LM), pos="rope", init="exact", example_inputs=given)


def test_control_what_is_exact_may_differ_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    garbage(monkeypatch, lambda mask: mask == 1)
    model = tiny("gpt2", LM)
    with pytest.raises(PatchError):
        patch_model(model, norm="rms", init="exact", example_inputs=padded(model))


# --- models that read images beside text ------------------------------------------------------------------------------


@pytest.mark.parametrize(("model_type", "tower"), [("llava", "vision_tower.*"), ("qwen2_vl", "visual.*")])
def test_a_tower_of_images_is_measured_with_images(
    model_type: str, tower: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = zoo.tiny(model_type)
    alone = copy.deepcopy(model)
    patch(model, norm="rms", init="copy", only=tower)
    assert re.match(r"approximate: outputs differ by (?!0;)", outcome(model))
    monkeypatch.setattr("hfpatch.planners.full_length.with_media", lambda *args, **options: None)
    patch(alone, norm="rms", init="copy", only=tower)
    differ = "approximate on inputs without images: outputs differ by 0;"
    assert outcome(alone).startswith(differ)  # control: on text alone it doesn't run


def test_a_stretched_tower_runs_with_images_of_its_new_size() -> None:
    model, _ = zoo.tiny("llava")
    original = copy.deepcopy(model)
    patch(model, pos="learned:image_size=96")
    assert outcome(model).startswith("approximate: it runs at its new size, and not on the inputs of before")
    assert require_runs_in_full(model, original, [], None)
    model.vision_tower.embeddings.position_embedding = nn.Embedding(3, 64)
    with pytest.raises(UnsupportedError, match="doesn't run"):
        require_runs_in_full(model, original, [], None)


def test_before_a_patch_a_model_runs_once_with_images_and_again_only_where_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs: list[bool] = []

    def counted(model: nn.Module, inputs: Mapping[str, Any], *more: Any) -> Forward:
        runs.append("pixel_values" in inputs)
        return run(model, inputs, *more)

    monkeypatch.setattr("hfpatch.measure.snapshot.run", counted)
    model, _ = zoo.tiny("llava")
    assert Snapshot(model, makers_of_short_inputs(model, None)).forward is not None
    assert runs == [True]
    runs.clear()
    monkeypatch.setattr(type(model), "get_placeholder_mask", None)  # its forward with images fails
    assert Snapshot(model, makers_of_short_inputs(model, None)).forward is not None
    assert runs == [True, False]


def test_where_no_images_can_be_made_text_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = zoo.tiny("llava")
    monkeypatch.setattr(type(model), "get_placeholder_mask", None)  # its forward with images fails
    patch(model, norm="layer")
    assert re.match(r"approximate on inputs without images: outputs differ by (?!0;)", outcome(model))


def test_the_users_text_is_said_to_be_without_images() -> None:
    model, _ = zoo.tiny("llava")
    patch(model, norm="layer", example_inputs=example_inputs(model))
    assert re.match(r"approximate on inputs without images: outputs differ by (?!0;)", outcome(model))


def outcome(model: Any) -> str:
    (found,) = outcomes(model).values()
    return str(found)


def test_outputs_that_were_finite_stay_finite_or_the_model_is_as_it_was() -> None:
    """Half precision, and a norm that keeps a large mean, which the head adds up."""
    model = tiny("gpt2", LM)
    with torch.no_grad():
        model.transformer.wpe.weight.add_(50.0)
        model.transformer.wte.weight.add_(1.5)  # tied to the head
        model.transformer.ln_f.weight.fill_(2e3)
    model, request = model.half(), {"norm": "rms", "init": "copy", "only": "*.ln_f"}
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match=r"logits is NaN or infinite, and wasn't before.*left unchanged"):
        patch_model(model, **request)
    assert not changes(before, fingerprint(model))
    (line,) = outcomes(patch(model.float(), **request)).values()
    assert line.startswith("approximate")  # control
