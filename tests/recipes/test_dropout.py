"""One meaning of --keep_dropout: the control and all copies are trained alike, in every recipe."""

import json

import compare
import finetune
import pytest
from hfrecipes import corpus as data
from hfrecipes import training as run
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

pytestmark = pytest.mark.slow

TINY = "--batch_size 4 --steps 1 --eval_every 1 --warmup_steps 1 --calibration 64 --tracker none --layers 1 --width 32"


@pytest.fixture
def rates(monkeypatch):
    """Dropout of every model that is trained: its stage, and its modules' rates."""
    found = {}
    train = run.Run.train

    def noted(self, name, model, *rest):
        found[name] = {m.p for m in model.modules() if isinstance(m, nn.Dropout)}
        return train(self, name, model, *rest)

    monkeypatch.setattr(run.Run, "train", noted)
    return found


@pytest.fixture(scope="module")
def given(text, tmp_path_factory):
    """A GPT-2 of rate 0.1, with its tokenizer."""
    folder = tmp_path_factory.mktemp("gpt2")
    data.train_tokenizer([data.Document("", text.read_text())], 300, folder)
    sizes = {"vocab_size": 300, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("asked", "rate"), [("false", 0.0), ("true", 0.1)])
def test_a_given_model_is_trained_without_unless_it_is_asked_for(rates, text, given, tmp_path, asked, rate):
    flags = f"{TINY} --block_size 16 --heldout_blocks 4 --curve_blocks 4 --variants rope --methods finetune distil"
    flags += f" --starts copied --seeds 0 --baseline_steps 1 --keep_models --keep_dropout {asked}"
    paths = ["--model", given, "--text", str(text), "--output_dir", str(tmp_path)]
    assert compare.main([*flags.split(), *paths]) == 0
    assert rates == {name: {rate} for name in rates}
    assert len(rates) == 4, "the baseline, the control and two copies"
    saved = [json.loads(path.read_text()) for path in tmp_path.glob("*/config.json")]
    assert {config["attn_pdrop"] for config in saved} == {0.1}, "it stays on record"


def test_what_is_made_from_scratch_keeps_the_tasks(rates, tmp_path):
    path = tmp_path / "fruit.csv"
    rows = [f"{'sour' if i % 2 else 'sweet'} thing number {i},{'lemon' if i % 2 else 'plum'}" for i in range(120)]
    path.write_text("\n".join(["text,label", *rows]))
    flags = "--task classify --vocab_size 300 --max_length 8 --dropout 0.3 --variants rms control"
    argv = [*TINY.split(), *flags.split(), "--data", str(path), "--output_dir", str(tmp_path / "out")]
    assert finetune.main([*argv, "--baseline_steps", "0", "--start", "reset"]) == 0
    assert rates == {"rms": {0.3}, "control": {0.3}}, "all from scratch"
    assert finetune.main([*argv, "--baseline_steps", "1"]) == 0
    assert rates == {"baseline": {0.3}, "rms": {0.0}, "control": {0.0}}, "copies"
