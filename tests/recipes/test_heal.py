"""heal.py at a size of seconds: causal, masked and headless models, both losses, adapters, a budget, and resuming."""

import json

import heal
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

SMALL = "--block_size 16 --heldout_blocks 20 --per_device_train_batch_size 4 --max_steps 4 --eval_steps 2"
SMALL += " --calibration 16 --use_cpu"


def run(out, text, *flags):
    """The figures of a run."""
    words = [word for flag in flags for word in ([flag] if "/" in flag else flag.split())]
    return heal.main([*SMALL.split(), "--text", str(text), "--output_dir", str(out), *words])


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(heal, "FIRST_STEPS", 8)


def test_from_scratch(text, tmp_path):
    found = run(tmp_path, text, "--patch dyt --loss distil")
    figures = found["figures"]
    assert list(figures) == ["original", "swapped", "healed", "control"]
    assert figures["original"]["divergence"] == pytest.approx(0, abs=1e-6)
    assert figures["healed"]["loss"] < figures["swapped"]["loss"]
    assert [step for step, _ in found["curves"]["healed"]] == [0, 2, 4]
    healed = AutoModelForCausalLM.from_pretrained(tmp_path / "healed")
    assert "norm" in healed.config.hfpatch["request"][0]
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["patch"] == "dyt"
    assert "| healed" in (tmp_path / "results.md").read_text()


def test_what_stays(text, finished, tmp_path):
    """With a budget as many norms go as it allows; a name stays in any case."""
    model = str(finished / "baseline")
    run(tmp_path, text, "--model", model, "--patch none --no_control --max_steps 1 --keep auto:0.004 *.1.ln_2")
    blocks = AutoModelForCausalLM.from_pretrained(tmp_path / "healed").transformer.h
    kept = [type(norm).__name__ == "LayerNorm" for block in blocks for norm in (block.ln_1, block.ln_2)]
    assert kept[3]
    assert 1 < sum(kept) < 8


def test_adapters_are_merged_and_the_rest_stays(text, finished, tmp_path):
    pytest.importorskip("peft")
    model = str(finished / "baseline")
    run(tmp_path, text, "--model", model, "--patch dyt --start copied --lora_rank 2 --no_control --learning_rate 1e-2")
    plain, healed = (AutoModelForCausalLM.from_pretrained(one) for one in (model, tmp_path / "healed"))
    first, own = plain.transformer.h[0].attn.c_attn.weight, healed.transformer.h[0].attn.c_attn.weight
    assert torch.linalg.matrix_rank((own - first).detach(), atol=1e-5) <= 2
    assert not torch.equal(own, first)
    assert torch.equal(healed.transformer.wte.weight, plain.transformer.wte.weight)


def test_masked(text, bert, tmp_path):
    found = run(tmp_path, text, "--model", bert, "--patch dyt --learning_rate 1e-3")
    assert found["figures"]["healed"].keys() == {"loss", "perplexity", "divergence", "same answer"}
    AutoModelForMaskedLM.from_pretrained(tmp_path / "healed")


def test_an_encoder_without_a_head(text, encoder, tmp_path):
    with pytest.raises(heal.RecipeError, match="--loss distil --share 1"):
        run(tmp_path, text, "--model", encoder, "--patch dyt")
    found = run(tmp_path, text, "--model", encoder, "--patch dyt --start copied --loss distil --share 1 --max_steps 12")
    figures = found["figures"]
    assert list(figures) == ["original", "swapped", "healed"], "a control would learn nothing from itself"
    assert figures["swapped"]["cosine"] < figures["healed"]["cosine"] < 1
    assert [step for step, _ in found["curves"]["healed"]] == [0, 2, 4, 6, 8, 10, 12]
    AutoModel.from_pretrained(tmp_path / "healed")


@pytest.mark.slow
def test_a_stopped_run_goes_on(text, finished, tmp_path):
    """As the Trainer does: from the last checkpoint of each model, to the same weights."""
    model, more = str(finished / "baseline"), "--patch dyt --no_control --save_strategy steps --save_steps 2"
    whole = run(tmp_path / "whole", text, "--model", model, more)
    run(tmp_path / "parts", text, "--model", model, more)
    (last,) = (tmp_path / "parts" / "healed").glob("checkpoint-4")
    for path in [*last.iterdir()]:
        path.unlink()
    last.rmdir()
    again = run(tmp_path / "parts", text, "--model", model, more, "--resume_from_checkpoint true")
    assert again["figures"]["healed"] == pytest.approx(whole["figures"]["healed"], abs=1e-6)


def test_a_loss_of_ones_own(text, finished, tmp_path, monkeypatch):
    """One method is another loss, as the docs say."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).logits.square().mean()
        return (loss, {}) if return_outputs else loss

    monkeypatch.setattr(heal.Healer, "compute_loss", compute_loss)
    found = run(tmp_path, text, "--model", str(finished / "baseline"), "--patch rms --no_control")
    points = [loss for _, loss in found["curves"]["healed"]]
    assert points[-1] < points[0]
