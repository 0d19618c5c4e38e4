"""norm="fixed" and norm="none": formulas, which norms they take, where the constants come from, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import zoo
from norm_kinds import D_, KINDS, Kind, every_kind, swapped
from tiny_models import changes, difference, fingerprint, norms_of, outputs, patch, randomise, reload, tiny
from torch import Tensor, nn
from typer.testing import CliRunner

from hfpatch.cli import app
from hfpatch.errors import NothingToPatchError, NotPreservedWarning, OptionError
from hfpatch.patch import outcomes, patch_model, repair_report, unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.repairs import repair
from hfpatch.repairs.sample import sample_batches
from hfpatch.runtime.fixed import BiasedLinear, FixedNorm, NoNorm
from hfpatch.runtime.patch_errors import PatchError, UnsupportedError
from hfpatch.schemes.constant_norms import Fixed, Folded, WithoutNorms
from hfpatch.schemes.norm_schemes import DyT, Norm
from hfpatch.sites.norm_facts import describe

LM = "AutoModelForCausalLM"
few = partial(sample_batches, sequences=8, length=12)
LAST = "norm of the stack's output, whose scale it sets: only=['*', its name] changes it too"


# Formulas


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_formula(kind: Kind, dtype: torch.dtype) -> None:
    """(x - mean(x)) * gain + shift, without the mean where an RMSNorm was; a missing gain is 1, a missing shift 0."""
    module = randomise(kind.make()).to(dtype)
    new = swapped(Fixed(), module, dtype)
    generator = torch.Generator().manual_seed(3)
    shape = (2, D_, 3, 5) if kind.channels_first else (3, 5, 4, 8) if kind.shape == (8,) else (3, 5, D_)
    x = torch.randn(shape, generator=generator).add(0.6).to(dtype)
    y = x.double().movedim(1, -1) if kind.channels_first else x.double()
    y = y - y.mean(-1, keepdim=True) if kind.kind == "layer" else y
    y = y * (kind.offset + getattr(module, kind.gain).double()) if kind.gain else y
    y = y + getattr(module, kind.shift).double() if kind.shift else y
    y = y.movedim(-1, 1) if kind.channels_first else y
    rtol = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2**-8}[dtype]
    assert new(x).dtype == dtype
    torch.testing.assert_close(new(x).double(), y, rtol=rtol, atol=1e-12 if dtype == torch.float64 else 1e-5)
    assert (new(3 * x) - new(x)).abs().max() > 1, "control: its scale is that of the input"


def test_gain_and_shift_have_names_that_an_unpatched_model_does_not_load() -> None:
    for kind in KINDS.values():
        new = swapped(Fixed(), kind.make())
        assert {*dict(new.named_parameters())} == ({"gain", "shift"} if describe(kind.make()).shape else set())
    assert {*dict(swapped(Fixed(shift=False), KINDS["Llama"].make()).named_parameters())} == {"gain"}
    assert {*dict(swapped(Fixed(shift=False), KINDS["LayerNorm"].make()).named_parameters())} == {"gain", "shift"}


def test_what_is_left_of_a_norm_and_of_a_map() -> None:
    x = torch.randn(2, 3, 4)
    assert NoNorm()(x) is x
    old = nn.Linear(4, 5, bias=False)
    new = BiasedLinear.replacing(old, nn.Module())
    assert type(new) is nn.Linear
    assert new.weight is old.weight
    assert torch.equal(new(x), old(x))
    assert not new.bias.any()
    with pytest.raises(TypeError, match=r"nn\.Linear, not to Embedding"):
        BiasedLinear.replacing(nn.Embedding(2, 2), nn.Module())


def test_hosts_read_the_dtype_of_their_norms_weight(tmp_path: Any) -> None:
    """As Mamba's blocks, which cast to it what goes into their norms: it is that of the norm that is gone."""
    model, given = zoo.tiny("mamba")
    patch(model.bfloat16(), norm="none", init="reset")
    norms = norms_of(model, NoNorm)
    assert len(norms) == 2
    again = reload(model, tmp_path)
    for one, dtype in ((model, torch.bfloat16), (again, torch.bfloat16), (model, torch.float32)):
        one.to(dtype)
        assert {one.get_submodule(name).weight.dtype for name in norms} == {dtype}
        assert {str(one.get_submodule(name).weight.device) for name in norms} == {"cpu"}
        assert not any(name.startswith(f"{norm}.") for norm in norms for name in one.state_dict())
        assert one(**given).last_hidden_state.isfinite().all()


def test_norms_of_any_size_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no shape that a gain, which holds the constant, could take."""
    monkeypatch.setattr(
        "hfpatch.repairs.repair._Repairer._require_usable", lambda *_: None
    )  # two sequences repair little
    model, given = zoo.tiny("muse_spark_text")
    kept = {row.module: row.reason for row in plan_patch(model, norm="fixed").rows if row.action == "keep"}
    assert any("inputs of any size" in reason for reason in kept.values())
    patch(model, norm="fixed", calibration=[given] * 2)
    assert norms_of(model, FixedNorm)
    assert not kept.keys() & {*norms_of(model, FixedNorm)}


def test_options_and_names() -> None:
    assert Norm.resolve("none:shift=false") == WithoutNorms(shift=False)
    assert Norm.resolve("fixed") == Fixed() != WithoutNorms()
    for other, scheme in {"static": Fixed(), "identity": WithoutNorms(), "flashnorm": Folded()}.items():
        with pytest.raises(PatchError, match=f"Did you mean '{scheme.name}'"):
            Norm.resolve(other)
    for make in (Fixed, WithoutNorms):
        with pytest.raises(OptionError, match="shift must be bool, not 'yes'"):
            Norm.resolve(make("yes"))


# Which norms


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "head", "last"),
    [
        ("gpt2", LM, ["transformer.ln_f"]),
        ("llama", LM, ["model.norm"]),
        ("olmo", "AutoModel", ["norm"]),
        ("vit", "AutoModel", ["layernorm"]),
        ("bert", "AutoModel", ["encoder.layer.1.output.LayerNorm"]),
        ("bart", "AutoModel", ["encoder.layers.1.final_layer_norm", "decoder.layers.1.final_layer_norm"]),
        ("t5", "AutoModelForSeq2SeqLM", ["encoder.final_layer_norm", "decoder.final_layer_norm"]),
    ],
)
def test_a_stacks_last_norm_is_kept_unless_it_is_named(family: str, head: str, last: list[str]) -> None:
    model = tiny(family, head)
    rows = plan_patch(model, norm="fixed").rows
    assert [row.module for row in rows if row.becomes is None] == last
    assert {row.reason for row in rows if row.becomes is None} == {LAST}
    changed = [row for row in plan_patch(model, norm="fixed", only=["*", *last]).rows if row.becomes is not None]
    assert len(changed) == len(rows)
    alone = plan_patch(model, norm="fixed", only=last).rows
    assert [row.module for row in alone if row.becomes is not None] == last
    patch(model, norm="fixed", init="reset")
    assert f"kept: {len(last)} of {len(rows)} modules ({LAST})" in outcomes(model)["norm='fixed', init='reset'"]


def test_norms_without_a_variance_are_kept() -> None:
    model = patch(tiny("llama", LM), norm="dyt", only=["*.0.*"], init="copy")
    rows = {row.module: row for row in plan_patch(model, norm="fixed").rows}
    assert (
        rows["model.layers.0.input_layernorm"].reason
        == "has no variance to fix: it is neither LayerNorm nor RMSNorm (dyt)"
    )
    assert rows["model.layers.1.input_layernorm"].becomes == "FixedNorm(32)"
    for norm in ("fixed", "none"):
        whole = patch(tiny("llama", LM), norm="dyt", init="copy")
        with pytest.raises(NothingToPatchError, match="has no variance to fix"):
            patch(whole, norm=norm, calibration="self")


# Starting constants


def constants(model: Any, norm: str, batch: dict[str, Tensor], fitted: list[int]) -> tuple[float, Tensor]:
    """The median of 1/sigma at a norm's input over valid tokens of the fitted sequences, and all of it."""
    module, found = model.get_submodule(norm), []
    facts = describe(module)
    handle = module.register_forward_pre_hook(lambda _, args: found.append(args[0].double()))
    with torch.no_grad():
        model(**batch)
    handle.remove()
    valid = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()[fitted]
    x = found[0][fitted][valid]
    x = x - x.mean(-1, keepdim=True) if facts.kind == "layer" else x
    each = (x.square().mean(-1) + facts.eps).rsqrt()
    return float(each.median()), each


@pytest.mark.sample(2)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    ("family", "head", "norm", "offset"),
    [
        ("gpt2", LM, "transformer.h.1.ln_2", 0.0),
        ("llama", LM, "model.layers.0.post_attention_layernorm", 0.0),
        ("gemma", LM, "model.layers.1.input_layernorm", 1.0),  # its gain is 1 + weight
        ("olmo", LM, "model.layers.1.input_layernorm", 0.0),  # no gain at all
    ],
)
def test_the_constant_is_the_median(
    family: str, head: str, norm: str, offset: float, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hfpatch.repairs.repair._Repairer._repair", lambda *_: None)  # what they start from
    monkeypatch.setattr("hfpatch.repairs.repair._Repairer._require_usable", lambda *_: None)
    model = tiny(family, head)
    ids = torch.randint(5, 97, (24, 12), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids}
    if padded:
        mask = torch.arange(12)[None] < torch.randint(3, 12, (24, 1), generator=torch.Generator().manual_seed(2))
        batch |= {"attention_mask": mask.long()}
        batch["input_ids"][~mask] = 0
    fitted = [i for i in range(24) if i not in (7, 15, 23)]  # the others judge
    constant, each = constants(model, norm, batch, fitted)
    old = model.get_submodule(norm)
    weight = getattr(old, "weight", None)
    gain = (torch.ones(32) if weight is None else weight.detach() + offset).double() * constant
    rows = [
        {name: value[i][: int(mask[i].sum()) if padded else 12] for name, value in batch.items()} for i in range(24)
    ]
    patch(model, norm="fixed", calibration=rows)
    new = model.get_submodule(norm)
    assert new.facts.offset == offset
    torch.testing.assert_close(new.gain.detach().double() + offset, gain, rtol=1e-5, atol=1e-6)
    assert (each / constant).max() > 1.02, "control: it isn't the same for all tokens"
    assert [step for step in repair_report(model).steps if step.kept] == []


def test_the_report_says_how_the_size_of_the_input_varies() -> None:
    model = patch(tiny("gpt2", LM), norm="fixed", calibration=few)
    notes = {step.module: step.note for step in repair_report(model).steps if step.kind == "norm"}
    assert {*notes} == {f"transformer.h.{i}.ln_{j}" for i in (0, 1) for j in (1, 2)}
    for note in notes.values():
        assert note.startswith("input size of 90% of tokens 0.")
        assert " times the median, largest " in note
    assert "times the median" in str(repair_report(model))


# None: fixed, then folded


def largest(model: Any) -> float:
    return max(float(one.abs().max()) for one in outputs(model))


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_without_norms_is_fixed_and_then_folded(family: str, tmp_path: Any) -> None:
    fixed, none = tiny(family, LM), tiny(family, LM)
    patch(fixed, norm="fixed", calibration=few)
    patch(none, norm="none", calibration=few, reversible=True)
    assert len(norms_of(none, NoNorm)) == len(norms_of(fixed, FixedNorm)) == 4
    assert norms_of(none, FixedNorm) == []
    assert difference(none, fixed) <= 2e-5 * largest(fixed)
    (said,), (other,) = outcomes(none).values(), outcomes(fixed).values()
    assert said == other, "folding changes nothing of what was measured"
    again = reload(none, tmp_path, LM)
    assert difference(again, none) == 0
    before = fingerprint(none)
    patch(none, norm="none")
    assert changes(before, fingerprint(none)) == []
    assert difference(unpatch_model(none), tiny(family, LM)) == 0


def test_the_plan_says_what_will_be_folded() -> None:
    notes = {row.module: row.reason for row in plan_patch(tiny("gpt2", LM), norm="none").rows}
    assert notes["transformer.h.0.ln_1"] == "then folded"
    tied = plan_patch(tiny("gpt2", LM), norm="none", only="*.ln_f").rows[-1]
    assert tied.reason == "not folded: lm_head, which reads it, shares its weights with another module"


def test_norms_that_cannot_be_folded_stay_fixed_and_the_outcome_says_so() -> None:
    data = [{"input_ids": torch.randint(5, 97, (8, 12), generator=torch.Generator().manual_seed(i))} for i in range(3)]
    model = patch(tiny("bert"), norm="none", calibration=data)
    assert len(norms_of(model, FixedNorm)) == 4
    assert norms_of(model, NoNorm) == []
    assert "; 4 fixed norms, not folded (its output is read otherwise, too: by a" in outcomes(model)["norm='none'"]


def test_experts_take_norms_over_that_get_no_shift() -> None:
    model, _ = zoo.tiny("mixtral", auto_class=LM)
    reasons = {
        scheme: plan_patch(model, norm=scheme, only="*.0.post_attention_layernorm").rows[1].reason
        for scheme in ("none", "none:shift=false")
    }
    assert "would need a bias in mlp." in reasons["none"]
    assert reasons["none"].endswith("norm='none:shift=false' adds no shift")
    assert reasons["none:shift=false"] == "then folded"


# Refused, and the model as it was


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[PatchError], str]] = {
    "no calibration": (partial(tiny, "gpt2", LM), {}, OptionError, r"\('self' \(sequences .*\), texts or inputs; --c"),
    "no calibration, no text": (partial(tiny, "vit"), {}, OptionError, r"calibration= \(texts or inputs; --calibr"),
    "copied": (partial(tiny, "gpt2", LM), {"init": "copy"}, OptionError, "measured on data"),
    "exact": (
        partial(tiny, "gpt2", LM),
        {"init": "exact", "calibration": few},
        UnsupportedError,
        "isn't exact here: the scale of its input is taken to be a constant",
    ),
    "both": (partial(tiny, "gpt2", LM), {"init": "reset", "calibration": few}, OptionError, "choose one"),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("norm", ["fixed", "none"])
@pytest.mark.parametrize(("make", "request_", "kind", "match"), REFUSED.values(), ids=REFUSED)
def test_refused(make: Any, request_: dict, kind: type[PatchError], match: str, norm: str) -> None:
    model = make()
    before = fingerprint(model)
    with pytest.raises(kind, match=match):
        patch(model, norm=norm, **request_)
    assert changes(before, fingerprint(model)) == []


def test_the_command_line_says_what_is_missing(tmp_path: Any) -> None:
    tiny("gpt2", LM).save_pretrained(tmp_path / "model")
    for norm in ("fixed", "none"):
        result = CliRunner().invoke(app, ["patch", str(tmp_path / "model"), str(tmp_path / "out"), "--norm", norm])
        assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
        assert f"norm='{norm}' puts a constant in place of 1/sigma" in result.stderr
        assert "--calibration" in result.stderr
        assert not (tmp_path / "out").exists()


def test_a_norm_that_calibration_does_not_reach_is_refused() -> None:
    model = tiny("gpt2", LM)
    model.transformer.spare = nn.LayerNorm(32)
    before = fingerprint(model)
    with pytest.raises(OptionError, match=r"doesn't reach 1 of the 5 norms .* such as transformer\.spare.* keep="):
        patch(model, norm="fixed", calibration=few)
    assert changes(before, fingerprint(model)) == []
    patch(model, norm="fixed", keep="*.spare", calibration=few)


def test_to_train_from_scratch_no_data_is_needed() -> None:
    model = patch(tiny("gpt2", LM), norm="fixed", init="reset")
    for name in norms_of(model, FixedNorm):
        norm = model.get_submodule(name)
        assert bool((norm.gain == 1).all() and (norm.shift == 0).all())
    meta = patch(tiny("gpt2").to("meta"), norm="fixed")  # weights are loaded afterwards
    assert len(norms_of(meta, FixedNorm)) == 4


@pytest.mark.sample(1)
@pytest.mark.parametrize("norm", ["fixed", "none", "dyt"])
def test_a_norm_that_blocks_share_is_repaired_in_one_place(norm: str) -> None:
    """The original's finished blocks are freed while it runs on: a shared norm must stay, and can run without them."""
    model = tiny("gpt2", LM, n_layer=4)
    model.transformer.h[3].ln_1 = model.transformer.h[2].ln_1
    patch(model, norm=norm, calibration=few)
    assert model.transformer.h[3].ln_1 is model.transformer.h[2].ln_1
    (step,) = [s for s in repair_report(model).steps if s.module == "transformer.h.2.ln_1" and s.kind == "norm"]
    assert step.before is not None, "it was fitted, at both of its calls"


# A request on top of another


def test_what_other_schemes_say_of_fixed_norms() -> None:
    """A fixed norm doesn't divide by the size of its input, and removes the mean where a LayerNorm did."""
    model = patch(tiny("gpt2", LM), norm="fixed", init="reset")
    other, erf = "another function than fixed's", "; on trained weights Derf needs repair (calibration=) or training"
    layer, scale = (
        "the mean of the norm's input is removed, which the replaced norm keeps",
        "the scale of its input isn't",
    )
    for norm, text in {
        "layer": f"LayerNorm: {other}",
        "dyt": f"DynamicTanh: {other}",
        "derf": f"DynamicErf: {other}{erf}",
        "rms": f"RMSNorm: {other}",
    }.items():
        plan = plan_patch(model, norm=norm)
        assert text in plan.losses()
        assert {row.loss for row in plan.rows if ".ln_1" in row.module} == {text.partition(": ")[2]}
    assert layer in plan_patch(tiny("llama"), norm="layer").losses()[0]  # controls
    assert scale in plan_patch(tiny("llama"), norm="dyt").losses()[0]
    assert DyT().loss(describe(KINDS["Llama"].make())) == f"{scale} removed"


@pytest.mark.sample(1)
@pytest.mark.parametrize("norm", ["fixed", "none"])
def test_the_last_norm_of_such_a_model_becomes_rms_norm_exactly(norm: str) -> None:
    """Fixed norms, folded or not, remove the mean of their input as the LayerNorms did."""
    model = patch(tiny("gpt2", LM), norm=norm, calibration=few)
    before = copy.deepcopy(model)
    patch(model, norm="rms", only="*.ln_f", init="exact")
    assert difference(model, before) < 1e-3 * largest(before)
    assert outcomes(model)["norm='rms', only=['*.ln_f'], init='exact'"].startswith("exact: ")


def test_what_such_requests_make_of_each_other() -> None:
    model = patch(tiny("llama", LM), norm="fixed", init="reset")
    with pytest.raises(NothingToPatchError, match="is fixed already; norm='folded' folds it"):
        patch(model, norm="none", calibration=few)
    patch(model, norm="folded")
    assert len(norms_of(model, NoNorm)) == 4
    with pytest.raises(NothingToPatchError, match="is rms already"):  # of what is left
        patch(model, norm="rms")
    for norm, kind in (("fixed", FixedNorm), ("none", NoNorm)):
        model = patch(tiny("llama", LM), norm="folded")
        patch(model, norm=norm, init="reset")
        assert len(norms_of(model, kind)) == 4
        assert [*outcomes(model)] == ["norm='folded'", f"norm={norm!r}, init='reset'"]


def test_what_isnt_preserved_is_said() -> None:
    with pytest.warns(NotPreservedWarning, match="FixedNorm: the scale of its input is taken to be a constant"):
        patch_model(tiny("gpt2", LM), norm="fixed", calibration=few)


def test_a_later_repair_fits_what_is_left() -> None:
    original = tiny("llama", LM)
    model = patch(copy.deepcopy(original), norm="none", init="reset")
    assert difference(model, original) > 1
    with pytest.warns(NotPreservedWarning, match="calibrate on sequences as long as"):
        report = repair.repair(model, original, few)
    assert report.after < report.before
    assert {step.kind for step in report.steps} >= {"readers", "projection"}
