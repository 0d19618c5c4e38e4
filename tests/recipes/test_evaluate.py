"""evaluate.py, at a size of seconds: what it measures, what it compares, and its refusals."""

import math
import warnings
from pathlib import Path

import evaluate
import finetune
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hfrecipes import corpus as data
from hfrecipes import lm, texts
from run_files import read_results, words
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    RobertaConfig,
    RobertaForMaskedLM,
)

from hfpatch.errors import NotPreservedWarning
from hfpatch.patch import patch_model


def run(out, *flags):
    return evaluate.main([*words(*flags), "--output_dir", str(out)])


@pytest.fixture(scope="module")
def evaluated(finished, text, tmp_path_factory):
    out, control = tmp_path_factory.mktemp("evaluated"), finished / "control"
    flags = ["--text", text, "--block_size 16 --heldout_blocks 20 --lengths 16 64"]
    assert run(out, "--models", control, finished / "rms+rope", "--against", control, *flags) == 0
    return out


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Texts of two classes, and of three."""
    folder = tmp_path_factory.mktemp("texts")
    for name in ("ab", "abc"):
        rows = [f"text {i} is {name[i % len(name)]} like,{name[i % len(name)]}" for i in range(150)]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
    return folder


@pytest.fixture(scope="module")
def classifiers(tables, tmp_path_factory):
    out = tmp_path_factory.mktemp("classifiers")
    flags = "--task classify --width 32 --vocab_size 300 --max_length 12 --calibration 64 --variants rope control"
    flags += " --baseline_steps 12 --steps 3 --eval_every 3 --batch_size 4 --tracker none --layers 1"
    assert finetune.main([*flags.split(), "--data", str(tables / "ab.csv"), "--output_dir", str(out)]) == 0
    return out


class TestLanguageModels:
    @pytest.mark.slow
    def test_figures_are_those_of_the_run_that_trained_them(self, finished, evaluated):
        stages, models = read_results(finished)["stages"], read_results(evaluated)["models"]
        for source, found in models.items():
            assert found["figures"] == pytest.approx(stages[Path(source).name]["end"], rel=1e-6)

    def test_against_another_model(self, finished, evaluated):
        models = read_results(evaluated)["models"]
        own, other = models[str(finished / "rms+rope")], models[str(finished / "control")]
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
        tokens, _ = data.encode(data.split_documents(texts.read_texts(texts.TextConfig([str(text)]))[1])[1], tokenizer)
        ids = torch.from_numpy(tokens[: len(tokens) // 64 * 64]).long().view(-1, 64)
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(finished / "rms+rope").eval()(ids).logits[:, :-1]
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
        flags = ["--models", finished / "rms+rope", "--text", text, "--block_size", 16, "--lengths", 16, 64]
        assert run(tmp_path, *flags) == (0 if longest == 32 else 2)
        if longest == 32:
            (found,) = read_results(tmp_path)["models"].values()
            assert found["lengths"][0]["loss"] > 0
            assert found["lengths"][1] == {"tokens": 64, "reason": "loss is inf"}
        else:
            assert "rms+rope: loss is inf" in capsys.readouterr().err


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
    assert finetune.main([*map(str, flags), "25"]) == 2
    assert "beyond the 24 positions" in capsys.readouterr().err


class TestBootstrap:
    def test_pairing_counts(self):
        random, ones = np.random.default_rng(0), np.ones(100)
        common = 10 * random.normal(size=100)
        one, other = (common + 0.1 * random.normal(size=100) + shift for shift in (0.2, 0.0))
        difference, low, high = evaluate.paired_bootstrap((one, ones), (other, ones))
        assert difference == pytest.approx((one - other).mean())
        assert 0 < low < difference < high < 0.4
        _, low, high = evaluate.paired_bootstrap((one, ones), (random.permutation(other), ones))
        assert low < 0 < high, "the control loses who belongs to whom"

    def test_one_item_has_no_interval(self):
        with pytest.raises(data.RecipeError, match="--against needs two held-out items"):
            evaluate.paired_bootstrap(([1.0], [2.0]), ([3.0], [2.0]))

    def test_unequal_items(self):
        sums, counts = np.array([2.0, 9.0]), np.array([1.0, 3.0])
        assert evaluate.paired_bootstrap((sums, counts), (sums * 2, counts))[0] == -11 / 4


class TestClassifiers:
    @pytest.mark.slow
    def test_another_order_of_labels_is_no_other_answer(self, classifiers, tables, tmp_path):
        """The same function with its outputs exchanged has the same figures, and can't be compared item by item."""
        model = AutoModelForSequenceClassification.from_pretrained(classifiers / "control")
        for parameter in model.classifier.parameters():
            parameter.data = parameter.data.flip(0)
        model.config.id2label, model.config.label2id = {0: "b", 1: "a"}, {"b": 0, "a": 1}
        model.save_pretrained(tmp_path / "turned")
        AutoTokenizer.from_pretrained(classifiers / "control").save_pretrained(tmp_path / "turned")
        models = [classifiers / "control", tmp_path / "turned"]
        flags = ["--task", "classify", "--data", tables / "ab.csv", "--against", models[0]]
        assert run(tmp_path, *flags, "--models", *models) == 0
        one, other = read_results(tmp_path)["models"].values()
        end = read_results(classifiers)["stages"]["control"]["end"]
        assert one["figures"] == pytest.approx(end, abs=1e-6)
        assert other["figures"] == pytest.approx(end, abs=1e-6)
        assert one["against"]["same_answer"] == 1
        assert other["against"].keys() == {"not compared"}

    def test_what_has_no_head_for_the_labels_is_refused(self, classifiers, tables, text, tmp_path, capsys):
        bare = tmp_path / "bare"
        AutoModelForSequenceClassification.from_pretrained(classifiers / "control").bert.save_pretrained(bare)
        AutoTokenizer.from_pretrained(classifiers / "control", mask_token="[PAD]").save_pretrained(bare)
        for model, table in ((classifiers / "rope", "abc.csv"), (bare, "ab.csv")):
            assert run(tmp_path, "--task", "classify", "--data", tables / table, "--models", model) == 2
            assert "has no head for this data's labels" in capsys.readouterr().err
        assert run(tmp_path, "--models", bare, "--text", text, "--block_size", 12) == 2
        assert "was saved without cls.predictions" in capsys.readouterr().err


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
    assert evaluate.main(["--text", str(text), "--output_dir", "out", *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("RecipeError: ")
    assert named in error
    assert not Path("out/results.json").exists()
