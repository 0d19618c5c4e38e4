"""measure_saved.py, at a size of seconds: what it measures, what it compares, and its refusals."""

import math
import warnings
from pathlib import Path

import measure_saved
import pytest
import texts as data
import torch
import torch.nn.functional as F
import train_healed
from harness import lm
from run_files import read_results, words
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    RobertaConfig,
    RobertaForMaskedLM,
)

from hfpatch.errors import NotPreservedWarning
from hfpatch.patch import patch_model


def run(out, *flags):
    return measure_saved.main([*words(*flags), "--output_dir", str(out)])


@pytest.fixture(scope="module")
def evaluated(finished, text, tmp_path_factory):
    out, control = tmp_path_factory.mktemp("evaluated"), finished / "control"
    flags = ["--text", text, "--block_size 16 --heldout_blocks 20 --lengths 16 64"]
    assert run(out, "--models", control, finished / "healed", "--against", control, *flags) == 0
    return out


class TestLanguageModels:
    @pytest.mark.slow
    def test_figures_are_those_of_the_run_that_trained_them(self, finished, evaluated):
        stages, models = read_results(finished)["stages"], read_results(evaluated)["models"]
        for source, found in models.items():
            assert found["figures"] == pytest.approx(stages[Path(source).name]["end"], rel=1e-6)

    def test_against_another_model(self, finished, evaluated):
        models = read_results(evaluated)["models"]
        own, other = models[str(finished / "healed")], models[str(finished / "control")]
        assert other["against"]["divergence"] == pytest.approx(0, abs=1e-6)
        assert [other["against"][k] for k in ("same_answer", "difference", "interval")] == [1, 0, [0, 0]]
        assert own["against"]["divergence"] > 1e-3
        assert own["against"]["same_answer"] < 1
        expected = own["figures"]["loss"] - other["figures"]["loss"]
        assert own["against"]["difference"] == pytest.approx(expected, rel=1e-4)
        low, high = own["against"]["interval"]
        assert low < expected < high

    def test_longer_inputs(self, finished, evaluated, text):
        control, rope = (found["lengths"] for found in read_results(evaluated)["models"].values())
        assert control[0]["loss"] > 0
        assert control[1] == {"tokens": 64, "reason": "takes no 64 tokens (IndexError)"}
        tokenizer = AutoTokenizer.from_pretrained(finished / "tokenizer")
        tokens, _ = data.encode(data.split_documents(data.read_texts([str(text)]))[1], tokenizer)
        ids = torch.from_numpy(tokens[: len(tokens) // 64 * 64]).long().view(-1, 64)
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(finished / "healed").eval()(ids).logits[:, :-1]
        nats = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), 63)
        near, far = (part.mean().exp().item() for part in (nats[:, :15], nats[:, 15:]))
        assert rope[1].pop("by") == pytest.approx({"1-16": near, "17-64": far}, rel=1e-4)
        loss = nats.mean().item()
        assert rope[1] == pytest.approx({"tokens": 64, "loss": loss, "perplexity": math.exp(loss)}, rel=1e-4)

    def test_masked(self, bert, files, tmp_path):
        assert run(tmp_path, "--models", bert, "--text", *files, "--block_size 16 --lengths 16 48") == 0
        (found,) = read_results(tmp_path)["models"].values()
        short, long = found["lengths"]
        assert found["figures"]["bits_per_byte"] is None
        assert short["loss"] == pytest.approx(found["figures"]["loss"], rel=0.3)
        assert long["reason"].startswith("takes no 48 tokens")

    @pytest.mark.parametrize("longest", [32, 1])
    def test_what_overflows_is_no_figure(self, finished, text, tmp_path, capsys, monkeypatch, longest):
        """Beyond the trained length it is the row's reason; on the held-out data it is refused."""
        nats = lm.LanguageModelling.nats

        def overflowing(self, model, batch):
            terms, counted = nats(self, model, batch)
            return terms + (math.inf if batch["input_ids"].shape[1] > longest else 0), counted

        monkeypatch.setattr(lm.LanguageModelling, "nats", overflowing)
        flags = ["--models", finished / "healed", "--text", text, "--block_size", 16, "--lengths", 16, 64]
        assert run(tmp_path, *flags) == (0 if longest == 32 else 2)
        if longest == 32:
            (found,) = read_results(tmp_path)["models"].values()
            assert found["lengths"][0]["loss"] > 0
            assert found["lengths"][1] == {"tokens": 64, "reason": "loss is inf"}
        else:
            assert "healed: loss is inf" in capsys.readouterr().err


def test_embeddings(folder, files, tmp_path):
    model = AutoModel.from_pretrained(folder).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPreservedWarning)
        patch_model(model, pos="rope", init="copy").save_pretrained(tmp_path / "rope")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "rope")
    flags = ["--task", "embed", "--text", *files, "--max_length", 16, "--heldout_passages", 12, "--heldout_pairs", 10]
    assert run(tmp_path, *flags, "--models", folder, tmp_path / "rope", "--against", folder) == 0
    own, other = read_results(tmp_path)["models"].values()
    assert own["figures"]["similarity"] == pytest.approx(1, abs=1e-5)
    assert own["against"]["difference"] == 0
    assert other["figures"]["similarity"] < 0.99
    expected = other["figures"]["mrr"] - own["figures"]["mrr"]
    assert other["against"]["difference"] == pytest.approx(expected)
    assert run(tmp_path, *flags, "--models", folder) == 0
    (found,) = read_results(tmp_path)["models"].values()
    assert set(found["figures"]) == {"recall_at_1", "mrr", "loss"}, "similarity to itself says nothing"


def test_rows_for_padding_are_no_positions(bert, text, tmp_path, capsys):
    """RoBERTa's table has rows up to the padding index, and that one, that no token can have."""
    tokenizer = AutoTokenizer.from_pretrained(bert)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config = RobertaConfig(vocab_size=len(tokenizer), max_position_embeddings=26, pad_token_id=1, **sizes)
    for saved in (tokenizer, RobertaForMaskedLM(config)):
        saved.save_pretrained(tmp_path / "roberta")
    flags = ["--text", text, "--block_size", 24, "--heldout_blocks 2", "--lengths 24 25"]
    assert run(tmp_path, *flags, "--models", tmp_path / "roberta") == 0
    (found,) = read_results(tmp_path)["models"].values()
    assert ["reason" in row for row in found["lengths"]] == [False, True]
    capsys.readouterr()
    flags = ["--model", tmp_path / "roberta", "--text", text, "--output_dir", tmp_path / "out", "--block_size"]
    assert train_healed.main([*map(str, flags), "25"]) == 2
    assert "beyond the 24 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--models MODEL --task embed --lengths 64", "--task lm"),
        ("--models MODEL --block_size 32", "doesn't take the held-out data"),
        ("--models broken", "broken: its weight transformer.wte.weight isn't finite"),
    ],
)
def test_refused_in_one_line(finished, text, tmp_path, capsys, monkeypatch, flags, named):
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(finished / "control")
    model.save_pretrained("bare")
    model.transformer.wte.weight.data[0, 0] = math.nan
    model.save_pretrained("broken")
    AutoTokenizer.from_pretrained(finished / "control").save_pretrained("broken")
    few = [] if "embed" in flags else ["--block_size", "16"]
    flags = [*few, *(word.replace("MODEL", str(finished / "control")) for word in flags.split())]
    assert measure_saved.main(["--text", str(text), "--output_dir", "out", *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("RecipeError: ")
    assert named in error
    assert not Path("out/results.json").exists()
