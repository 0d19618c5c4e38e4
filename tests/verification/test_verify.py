"""The measured report: right numbers, the right modules, errors that show and models that stay as they are."""

from __future__ import annotations

import copy
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tiny_models import PAD, VOCABULARY, B, D, T, changes, fingerprint, inputs, patch, randomise, tiny
from torch import Tensor, nn

from hfpatch.errors import OptionError, WrappedModelError
from hfpatch.runtime.patch_errors import CheckpointError, UnsupportedError
from hfpatch.verification.comparison import Comparison, Subject
from hfpatch.verification.sums import Sums
from hfpatch.verification.verify import verify
from hfpatch.verification.verify_report import Report

MASKED = "AutoModelForMaskedLM"


def pair(family: str = "gpt2", head: str = "AutoModelForCausalLM", request: dict | None = None, **options: Any) -> Any:
    """A patched model and its original."""
    model = tiny(family, head, **options)
    reference = copy.deepcopy(model)
    return patch(model, **request) if request else model, reference


def padded(model: nn.Module, seed: int = 0, real: int = T - 4) -> dict[str, Tensor]:
    batch = inputs(model, seed)
    batch["attention_mask"] = torch.ones(B, T, dtype=torch.long)
    batch["attention_mask"][0, real:] = 0
    batch["input_ids"][0, real:] = PAD
    return batch


def row(report: Report, output: str, role: str = "model", dtype: str = "float64") -> Any:
    found = [one for one in report.outputs if (one.output, one.role, one.dtype) == (output, role, dtype)]
    assert len(found) == 1
    return found[0]


def module(report: Report, name: str) -> Any:
    return next(one for one in report.modules if one.module == name)


# What the numbers say


def test_a_dtype_costs_the_same_function_what_it_costs_the_reference() -> None:
    """bfloat16 costs the reference itself thousands of times what float32 does, and a model that is equal the same."""
    model, reference = pair(request={"norm": "layer"})
    report = verify(model, reference, inputs(model))
    exact = row(report, "logits")
    assert exact.max_error < 1e-12
    assert (exact.top1, exact.kl < 1e-9, exact.nonfinite) == (1.0, True, 0)
    assert all(one.error < 1e-5 for one in report.layers if one.dtype == "float64")
    assert {one.state for one in report.modules} == {"converted"}
    single, half = (row(report, "logits", "reference", dtype) for dtype in ("float32", "bfloat16"))
    assert 1e-9 < single.rms_error < 1e-5 < 1e-3 < half.rms_error < 0.1
    assert row(report, "logits", dtype="bfloat16").rms_error == pytest.approx(half.rms_error, rel=0.5)
    dtypes = ("float64", "float32", "bfloat16")
    runs = [(one.role, one.dtype) for one in report.outputs]
    assert runs == [(role, dtype) for dtype in dtypes for role in ("reference", "model")]


def test_numbers_agree_with_the_textbook() -> None:
    """Two batches of different shape, summed as if they were one set of tokens."""
    model, reference = pair(request={"norm": "rms", "init": "copy"})
    batches = [padded(model), {name: value[:, :7] for name, value in inputs(model, 1).items()}]
    report = verify(model, reference, batches, dtypes=())
    model, reference = (copy.deepcopy(one).double() for one in (model, reference))
    truths, outputs, lost, lost_in_truth = [], [], [], []
    for batch in batches:
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        with torch.no_grad():
            truth, output = reference(**batch).logits, model(**batch).logits
        truths.append(truth[mask]), outputs.append(output[mask])
        counted = mask[:, 1:] & mask[:, :-1]
        for logits, where in ((output, lost), (truth, lost_in_truth)):
            loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), batch["input_ids"][:, 1:], reduction="none")
            where.append(loss[counted])
    t, y = torch.cat(truths), torch.cat(outputs)
    rms = t.square().mean().sqrt()
    found = row(report, "logits")
    assert found.max_error == pytest.approx(float((y - t).abs().max() / rms), rel=1e-9)
    assert found.rms_error == pytest.approx(float((y - t).square().mean().sqrt() / rms), rel=1e-9)
    assert found.top1 == pytest.approx(float((y.argmax(-1) == t.argmax(-1)).double().mean()))
    kl = F.kl_div(y.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
    assert found.kl == pytest.approx(float(kl), rel=1e-9)
    assert found.perplexity == pytest.approx(math.exp(torch.cat(lost).mean()), rel=1e-9)
    truth_row = row(report, "logits", "reference")
    assert truth_row.perplexity == pytest.approx(math.exp(torch.cat(lost_in_truth).mean()), rel=1e-9)
    assert truth_row.perplexity != pytest.approx(found.perplexity, rel=1e-3)
    assert (report.inputs, report.examples, report.tokens) == ("2 batches given", 2 * B, 2 * T - 4 + 2 * 7)


def test_an_encoder_is_compared_by_cosines() -> None:
    model, reference = pair("bert", "AutoModel", {"norm": "rms", "init": "copy"})
    batch = padded(model)
    report = verify(model, reference, batch, dtypes=())
    model, reference = (copy.deepcopy(one).double() for one in (model, reference))
    with torch.no_grad():
        truth, output = reference(**batch).last_hidden_state, model(**batch).last_hidden_state
    mask = batch["attention_mask"].bool()
    tokens = F.cosine_similarity(truth, output, dim=-1)[mask]
    means = [[x[i][mask[i]].mean(0) for i in range(B)] for x in (truth, output)]
    sentences = torch.stack([F.cosine_similarity(t, y, dim=0) for t, y in zip(*means, strict=True)])
    found = row(report, "last_hidden_state")
    assert found.cosine_mean == pytest.approx(float(tokens.mean()), abs=1e-12)
    assert found.cosine_min == pytest.approx(float(tokens.min()), abs=1e-12)
    assert found.pooled_mean == pytest.approx(float(sentences.mean()), abs=1e-12)
    assert found.pooled_min == pytest.approx(float(sentences.min()), abs=1e-12)
    assert 0 < found.cosine_min < found.cosine_mean < 0.999
    assert (found.top1, found.kl, found.perplexity) == (None, None, None)
    assert row(report, "pooler_output").pooled_mean is None
    assert row(report, "last_hidden_state", "reference").cosine_min == pytest.approx(1.0)


def test_a_shifted_stream_is_an_error_that_centring_takes_away() -> None:
    """What an exact change to RMSNorm does to a stream: its mean over channels moves, nothing else."""
    model, reference = (one.double() for one in pair())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("wpe.weight", "c_proj.bias")):
                parameter += 0.5
    report = verify(model, reference, inputs(model), dtypes=())
    assert row(report, "logits").max_error < 1e-12
    inner = [one for one in report.layers if one.layer < 2]
    assert len(inner) == 2
    assert all(one.error > 0.1 and one.centred < 1e-12 for one in inner)
    assert module(report, "transformer.wpe").state == "weights"
    assert module(report, "transformer.wpe").change > 0.5


# Which positions count


def test_padding_counts_for_nothing() -> None:
    model, reference = pair(request={"norm": "rms", "init": "copy"})
    batch = padded(model)
    other = {name: value.clone() for name, value in batch.items()}
    other["input_ids"][0, T - 4 :] = 77
    first, second = (verify(model, reference, one, dtypes=()) for one in (batch, other))
    for a, b in zip([*first.outputs, *first.layers], [*second.outputs, *second.layers], strict=True):
        assert _close(a, b)
    whole = verify(model, reference, {"input_ids": batch["input_ids"]}, dtypes=())
    seen = verify(model, reference, {"input_ids": other["input_ids"]}, dtypes=())
    assert not _close(whole.outputs[1], seen.outputs[1]), "control: without a mask those tokens count"


def _close(a: Any, b: Any) -> bool:
    return all(
        math.isclose(value, vars(b)[name], rel_tol=1e-6, abs_tol=1e-12) if isinstance(value, float) else True
        for name, value in vars(a).items()
    )


def test_the_decoders_padding_is_its_own() -> None:
    model, reference = pair("bart", "AutoModelForSeq2SeqLM", {"norm": "rms", "init": "copy"})
    report = verify(model, reference, padded(model) | {"decoder_input_ids": inputs(model)["decoder_input_ids"]})
    assert not [note for note in report.notes if "padding" in note and "fits" in note]
    batch = {name: value for name, value in padded(model).items() if name != "decoder_input_ids"}
    alone = verify(model, reference, batch)
    assert any("decoder_input_ids at t + 1" in note for note in alone.notes)
    assert {one.stream for one in alone.layers} == {"encoder_hidden_states", "decoder_hidden_states"}
    assert row(alone, "encoder_last_hidden_state").cosine_mean < 0.999
    labeled = verify(model, reference, batch | {"labels": batch["input_ids"].masked_fill(batch["input_ids"] < 9, -100)})
    assert any("labels at t," in note for note in labeled.notes)
    assert row(labeled, "logits").perplexity > 1
    assert row(labeled, "loss").max_error > 0


def test_a_mask_that_fits_nothing_is_told() -> None:
    """A mask over samples can't be laid over frames: say so, unless nothing is padded."""
    model, reference = pair("bert", "AutoModel", {"norm": "rms", "init": "copy"})
    comparison = Comparison(Subject("model", model), Subject("reference", reference), [])
    mask = torch.ones(B, T)
    for last, notes in ((1, []), (0, ["no attention mask fits frames, so its padding counts too."])):
        mask[0, -1] = last
        for _ in range(2):
            comparison._note_unused_mask("frames", torch.zeros(B, 5, 3), None, {"attention_mask": mask})
        assert comparison.notes == notes


def test_only_causal_models_have_a_perplexity_without_labels() -> None:
    model, reference = pair("bert", MASKED, {"norm": "layer"})
    batch = inputs(model)
    report = verify(model, reference, batch, dtypes=())
    assert row(report, "logits").perplexity is None
    assert any("isn't causal" in note for note in report.notes)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, 3] = batch["input_ids"][:, 3]
    labeled = verify(model, reference, batch | {"labels": labels}, dtypes=())
    with torch.no_grad():
        loss = copy.deepcopy(reference).double()(**batch, labels=labels).loss
    assert row(labeled, "logits", "reference").perplexity == pytest.approx(float(loss.exp()), rel=1e-9)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("family", "head", "output"),
    [
        ("vit", "AutoModelForImageClassification", "logits"),
        ("bert", "AutoModelForMultipleChoice", "logits"),
        ("bert", "AutoModelForQuestionAnswering", "start_logits"),
        ("whisper", "AutoModelForSpeechSeq2Seq", "logits"),
        ("convnext", "AutoModel", "last_hidden_state"),
    ],
)
def test_every_kind_of_output(family: str, head: str, output: str) -> None:
    """Measured by agreement or by cosines, as the output asks for."""
    model, reference = pair(family, head, {"norm": "rms", "init": "copy"})
    report = verify(model, reference, inputs(model))
    found = row(report, output)
    assert found.max_error > 0.01
    assert (found.kl is None) == (output == "last_hidden_state") == (found.cosine_mean is not None)
    assert report.layers
    assert Report.from_json(json.loads(json.dumps(report.to_json(), allow_nan=False))) == report


# Modules


def test_modules_of_a_patched_model() -> None:
    model, reference = pair(request={"norm": "rms", "pos": "rope", "init": "copy", "keep": ["*.ln_f"]})
    report = verify(model, reference, inputs(model), dtypes=())
    norm, kept, table, attention = (
        module(report, f"transformer.{name}") for name in ("h.0.ln_1", "ln_f", "wpe", "h.1.attn")
    )
    assert (norm.state, norm.reference, norm.model) == ("converted", "LayerNorm(32)", "RMSNorm(32)")
    assert (kept.state, kept.reason, kept.change) == ("kept", "keep", 0.0)
    assert (table.state, table.model) == ("converted", "its mean row")
    assert (attention.state, attention.model) == ("runtime", "GPT2Attention")
    assert attention.runtime == "queries and keys rotated: RoPE(theta=10000, half)"
    assert len(report.modules) == 4 + 2 + 1 + 1 + 1  # norms, attentions, table, last norm, and the stack's owner
    text = str(report)
    assert "transformer.h.{0-1}.ln_{1-2}  x4" in text
    assert "5 converted, 3 with a runtime operation added, 1 kept." in text


def test_modules_and_counts_of_a_model_of_images() -> None:
    """Its table of positions is a Parameter, and images have no tokens; unpatched, its norms are kept."""
    model, reference = pair("vit", "AutoModel")
    images = {"pixel_values": inputs(model)["pixel_values"]}
    same = verify(model, reference, images)
    assert {one.state for one in same.modules} == {"kept"}
    assert all(one.max_error == 0 for one in same.outputs if one.dtype == "float64")
    assert (same.notes, same.examples, same.tokens) == ([], B, 0)
    report = verify(patch(model, pos="rope"), reference, images, dtypes=())
    assert module(report, "embeddings.position_embeddings").model == "its mean row"
    assert module(report, "embeddings").runtime == "inputs of any length"
    assert module(report, "layernorm").state == "kept"


def test_what_an_edit_adds_to_a_forward_is_a_row() -> None:
    model, reference = pair(request={"norm": "layer:bias=false", "only": ["*.ln_f"]})
    before = copy.deepcopy(model)
    model.config.hfpatch["edits"] += ["wte.@centre = -1", "h.0.mlp.@scale = 2.0", "h.*.attn.@lens = Unrotated()"]
    report = verify(model, reference, inputs(model), dtypes=())
    found = module(report, "transformer.wte")
    assert (found.state, found.runtime) == ("runtime", "centred in every forward")
    assert "centred in every forward" in str(report)
    assert module(report, "transformer.h.0.mlp").runtime == "multiplied by a learned scalar in every forward"
    assert module(report, "transformer.h.1.attn").runtime == "queries and keys aren't rotated"
    assert module(report, "transformer.h.0.ln_1").reason == "not in only"
    (norm,) = (one for one in verify(before, reference, inputs(model), dtypes=()).modules if one.state != "kept")
    assert (norm.reference, norm.model) == ("LayerNorm(32)", "LayerNorm(32, bias=False)")  # control: nothing else


def test_other_parameters_are_seen() -> None:
    model, reference = pair()
    model.transformer.h[0].ln_1.bias = None
    model.lm_head.bias = nn.Parameter(torch.ones(VOCABULARY))
    report = verify(model, reference, inputs(model), dtypes=())
    assert module(report, "lm_head").reason == "bias added"
    assert module(report, "transformer.h.0.ln_1").state == "converted"
    assert row(report, "logits").max_error > 0


# Nothing of the models changes


def test_models_stay_as_they_are() -> None:
    model, reference = pair()
    patch(model, norm="rms", pos="rope", init="copy", reversible=True)
    calls: list[str] = []
    model.transformer.h[0].register_forward_hook(lambda *args: calls.append("model"))
    model.train()
    reference.transformer.h[1].train()
    next(model.parameters()).grad = torch.ones_like(next(model.parameters()))
    model.lm_head.weight.requires_grad_(False)
    before = fingerprint(model), fingerprint(reference)
    first = verify(model, reference, [inputs(model), padded(model)])
    after = fingerprint(model), fingerprint(reference)
    assert [changes(a, b) for a, b in zip(before, after, strict=True)] == [[], []]
    assert calls, "hooks run"
    torch.rand(1)
    assert verify(model, reference, [inputs(model), padded(model)]) == first, "dropout off, same random numbers"
    before = fingerprint(model), fingerprint(reference)
    with pytest.raises(UnsupportedError, match=r"float64.*batch 1 \(input_ids \(2, 65\)\)"):
        verify(model, reference, [inputs(model), torch.ones(2, 65, dtype=torch.long)])
    after = fingerprint(model), fingerprint(reference)
    assert [changes(a, b) for a, b in zip(before, after, strict=True)] == [[], []]


@pytest.mark.parametrize(("method", "times", "at_once"), [("copy", 8, 2), ("run", 29, 3)])
def test_memory(method: str, times: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies at a time, and never the outputs of two batches: those are gone by the time of the next forward."""
    alive: list[weakref.ref] = []
    most = 0
    make = getattr(Subject, method)

    def watched(*args: Any) -> Any:
        nonlocal most
        found = make(*args)
        alive.append(weakref.ref(found if method == "copy" else found.tensors["logits"]))
        most = max(most, sum(one() is not None for one in alive))
        return found

    monkeypatch.setattr(Subject, method, watched)
    model, reference = pair(request={"norm": "rms", "pos": "rope", "init": "copy"})
    dtypes = ["float32", "bfloat16", "float16"] if method == "copy" else ["float32"]
    verify(model, reference, (inputs(model, seed) for seed in range(4)), dtypes=dtypes)
    assert len(alive) == times
    assert most <= at_once
    assert not any(one() for one in alive)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_and_across_devices() -> None:
    model, reference = pair(request={"norm": "rms", "pos": "rope", "init": "copy"})
    on_cpu = verify(model, reference, padded(model))
    model, reference = model.cuda(), reference.cuda()
    before, stream = (fingerprint(model), fingerprint(reference)), torch.cuda.get_rng_state()
    batch = padded(model)
    with torch.autocast("cuda", torch.bfloat16):
        found = verify(model, reference, batch)
    assert not changes(before[0], fingerprint(model))
    assert not changes(before[1], fingerprint(reference))
    assert torch.equal(stream, torch.cuda.get_rng_state())
    across = verify(model, reference.cpu(), {name: value.cuda() for name, value in batch.items()})
    for report in (found, across):
        exact, expected = row(report, "logits"), row(on_cpu, "logits")
        assert exact.rms_error == pytest.approx(expected.rms_error, rel=1e-9)
        assert exact.kl == pytest.approx(expected.kl, rel=1e-9)
        assert 1e-9 < row(report, "logits", "reference", "float32").rms_error < 1e-4


# The reference by name, inputs of all forms


def test_reference_from_a_folder(tmp_path: Path) -> None:
    model, reference = pair()
    reference.save_pretrained(tmp_path / "original")
    patch(model, norm="rms", init="copy").save_pretrained(tmp_path / "patched")
    batch = inputs(model)
    loaded = verify(model, tmp_path / "original", batch)
    assert loaded == verify(model, reference, batch)
    same = verify(copy.deepcopy(model), str(tmp_path / "patched"), batch)
    assert row(same, "logits").max_error == 0
    assert same.reference == "GPT2LMHeadModel (norm=rms)"
    before = torch.get_rng_state()
    verify(model, tmp_path / "original", batch, dtypes=())
    assert torch.equal(before, torch.get_rng_state())


def test_a_folder_without_the_head(tmp_path: Path) -> None:
    model, _ = pair("bert", "BertForSequenceClassification")
    tiny("bert", "BertModel").save_pretrained(tmp_path / "headless")
    with pytest.raises(CheckpointError, match="2 weights of BertForSequenceClassification"):
        verify(model, tmp_path / "headless", inputs(model))
    tiny("gpt2").save_pretrained(tmp_path / "gpt2")
    with pytest.raises(CheckpointError, match="gpt2"):
        verify(model, tmp_path / "gpt2", inputs(model))


# Errors, before any work


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda m, r: verify(m, m, inputs(m)), OptionError, "works in place"),
        (lambda m, r: verify(m, r, [{}]), OptionError, "batch 0 holds no tensor"),
        (lambda m, r: verify(m, r, inputs(m) | {"attention_mask": torch.zeros(B, T)}), OptionError, "zero everywhere"),
        (lambda m, r: verify(m, r, inputs(m), dtypes=["int8"]), OptionError, "dtypes must be among"),
        (lambda m, r: verify(nn.Linear(2, 2), r, inputs(m)), WrappedModelError, "the model is Linear"),
        (lambda m, r: verify(m, nn.DataParallel(r), inputs(m)), WrappedModelError, "the reference is DataParallel"),
        (lambda m, r: verify(m, copy.deepcopy(r).to("meta"), inputs(m)), UnsupportedError, "meta device"),
        (lambda m, r: verify(tiny("bert", MASKED), tiny("bert"), inputs(m)), UnsupportedError, "nothing to compare"),
        (
            lambda m, r: verify(m, tiny("gpt2", "AutoModelForCausalLM", vocab_size=98), inputs(m)),
            UnsupportedError,
            "the model's vocabulary has 97 tokens and the reference's 98",
        ),
        (
            lambda m, r: verify(tiny("bert", vocab_size=99), tiny("bert"), torch.tensor([[5, 98, 7]])),
            UnsupportedError,
            "the model's vocabulary has 99 tokens and the reference's 97",
        ),
        (
            lambda m, r: verify(*(tiny("bert", "BertForSequenceClassification", num_labels=n) for n in (2, 3))),
            UnsupportedError,
            r"logits has shape \(\d, 2\) in the model .* and \(\d, 3\) in the reference",
        ),
    ],
)
def test_typed_errors(make: Callable, error: Any, message: str) -> None:
    model, reference = pair()
    with pytest.raises(error, match=message):
        make(model, reference)


def test_vectors_of_other_vocabularies_are_compared() -> None:
    """Where both have the tokens: a table that was padded changes nothing."""
    model = tiny("bert", vocab_size=99)
    assert row(verify(model, tiny("bert"), torch.tensor([[5, 96, 7]])), "last_hidden_state").rms_error > 0


def test_a_dtype_that_the_reference_lacks_is_left_out() -> None:
    """FNet's Fourier transform has no bfloat16, which is no fault of the change."""
    config = transformers.FNetConfig(hidden_size=16, num_hidden_layers=1, intermediate_size=16, vocab_size=VOCABULARY)
    reference = randomise(transformers.FNetModel(config))
    report = verify(patch(copy.deepcopy(reference), norm="rms", init="copy"), reference, inputs(reference))
    assert {one.dtype for one in report.outputs} == {"float64", "float32"}
    assert "bfloat16 is left out: the reference (FNetModel) doesn't run in bfloat16" in str(report)


def test_experts_have_a_truth() -> None:
    """Grouped matrix products have no float64."""
    config = transformers.MixtralConfig(
        hidden_size=D, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        num_local_experts=4, vocab_size=VOCABULARY, pad_token_id=PAD,
    )  # fmt: skip
    model = randomise(transformers.MixtralModel(config))
    report = verify(copy.deepcopy(model), model, inputs(model))
    assert row(report, "last_hidden_state").max_error == 0
    assert row(report, "last_hidden_state", dtype="float32").max_error < 1e-4


# The report


def test_non_finite_outputs_are_loud() -> None:
    model, reference = pair()
    with torch.no_grad():
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
        model.lm_head.weight[3] = math.nan
    report = verify(model, reference, inputs(model))
    bad = row(report, "logits")
    assert (bad.nonfinite, bad.max_error) == (B * T, math.inf)
    assert math.isnan(bad.kl)
    assert str(report).count("NOT FINITE: logits of the model in") == 3
    stored = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert stored["outputs"][1]["max_error"] == "inf"
    assert str(Report.from_json(stored)) == str(report)


def test_every_layer_has_a_line_and_random_inputs_say_so() -> None:
    model, reference = pair(request={"norm": "rms", "init": "copy"}, n_layer=20)
    report = verify(model, reference, dtypes=())
    assert len(report.layers) == 21
    table = str(report).partition("layer by layer")[2]
    assert [line.split()[0] for line in table.splitlines() if line[:1].isdigit()] == [*map(str, range(21))]
    assert "Inputs: random, from the config" in str(report)
    assert any("say nothing of real data" in note for note in report.notes)


# The sums


def test_divergence_with_classes_that_are_shut_out() -> None:
    sums = Sums()
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    sums.add_output("logits", logits, logits + 3, None, None)
    row = sums.output_row("logits", "model", "float64")
    assert (row.kl, row.top1, row.perplexity) == (pytest.approx(0, abs=1e-15), 1, None)
