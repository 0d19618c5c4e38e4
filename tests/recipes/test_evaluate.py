"""evaluate.py, at a size of seconds: what it measures, what it compares, and its refusals."""

import importlib.util
import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace

import evaluate
import finetune
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hfrecipes import corpus as data
from hfrecipes import sweep
from tiny_encoder import make_tokenizer
from tiny_models import randomise
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
)

from hfpatch.errors import NotPreservedWarning
from hfpatch.patch import patch_model


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    path.write_text(
        "".join(f"verse {i}: {i % 7} sheep went uphill, {i % 5} came back — dög.\n" for i in range(400)), "utf-8"
    )
    return path


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A run of finetune.py: a control and a rotary copy."""
    out = tmp_path_factory.mktemp("trained")
    flags = "--layers 1 --width 32 --vocab_size 300 --block_size 16 --batch_size 4 --baseline_steps 20 --steps 5"
    flags += " --variants rope control --start copied --tracker none --heldout_blocks 20 --curve_blocks 4"
    assert finetune.main([*flags.split(), "--text", str(text), "--output_dir", str(out)]) == 0
    return out


def run(out, *flags):
    return evaluate.main([*map(str, flags), "--output_dir", str(out)])


def read_results(out):
    return json.loads((out / "results.json").read_text())


@pytest.fixture(scope="module")
def evaluated(trained, text, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluated")
    flags = ["--models", trained / "control", trained / "rope", "--against", trained / "control", "--text", text]
    assert run(out, *flags, "--block_size", 16, "--heldout_blocks", 20, "--sweep_tokens", 512) == 0
    return out


class TestLanguageModels:
    def test_figures_are_those_of_the_run_that_trained_them(self, trained, evaluated):
        stages, models = read_results(trained)["stages"], read_results(evaluated)["models"]
        for source, found in models.items():
            end = stages[Path(source).name]["end"]
            assert found["figures"] == {name: pytest.approx(value, rel=1e-6) for name, value in end.items()}
            assert found["figures"]["bits_per_byte"] > 0

    def test_a_model_against_itself(self, trained, evaluated):
        found = read_results(evaluated)["models"][str(trained / "control")]["against"]
        assert found["divergence"] == pytest.approx(0, abs=1e-6)
        assert found["same_answer"] == 1
        assert found["difference"] == 0
        assert found["interval"] == [0, 0]

    def test_another_one(self, trained, evaluated):
        models = read_results(evaluated)["models"]
        own, other = models[str(trained / "rope")], models[str(trained / "control")]
        assert own["against"]["divergence"] > 1e-3
        assert own["against"]["same_answer"] < 1
        expected = own["figures"]["loss"] - other["figures"]["loss"]
        assert own["against"]["difference"] == pytest.approx(expected, rel=1e-4)
        low, high = own["against"]["interval"]
        assert low < expected < high

    def test_length_sweep(self, evaluated):
        rows = {(row["model"], row["length"]): row for row in read_results(evaluated)["lengths"]}
        assert list(rows) == [(name, length) for name in ("control", "rope") for length in (16, 32, 64, 128)]
        assert rows["control", 16]["figures"]
        for length in (32, 64, 128):
            assert rows["control", length]["figures"] is None
            assert rows["control", length]["reason"] == f"takes no {length} tokens (IndexError)"
            assert rows["rope", length]["figures"]["loss"] > 0

    def test_length_sweep_by_hand(self, trained, evaluated, text):
        tokenizer = AutoTokenizer.from_pretrained(trained / "rope")
        tokens, _ = data.encode(data.split_documents(data.read_text_files([str(text)]))[1], tokenizer)
        ids = torch.from_numpy(tokens[:512]).long().view(8, 64)
        model = AutoModelForCausalLM.from_pretrained(trained / "rope").eval()
        with torch.no_grad():
            logits = model(ids).logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(8, 63)
        (row,) = [r for r in read_results(evaluated)["lengths"] if (r["model"], r["length"]) == ("rope", 64)]
        assert row["figures"]["loss"] == pytest.approx(losses.mean().item(), abs=1e-5)
        assert row["figures"]["perplexity"] == pytest.approx(math.exp(losses.mean().item()), rel=1e-4)
        place, loss = row["by_position"][1]  # the second sixteenth: positions 4 ... 7
        assert place == 5.5
        assert loss == pytest.approx(losses[:, 3:7].mean().item(), abs=1e-5)

    def test_files(self, evaluated):
        text = (evaluated / "results.md").read_text()
        tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
        assert len(tables) == 3
        for lines in tables:
            assert len({len(line) for line in lines}) == 1, "aligned"
        assert "takes no 128 tokens" in text
        assert "python recipes/evaluate.py --models" in text
        assert (evaluated / "lengths.png").read_bytes().startswith(b"\x89PNG")

    def test_masked(self, folder, files, tmp_path, capsys):
        tokenizer = make_tokenizer([Path(f).read_text() for f in files], mask_token="[MASK]")
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
        config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=24, **sizes)
        randomise(BertForMaskedLM(config)).save_pretrained(tmp_path / "bert")
        tokenizer.save_pretrained(tmp_path / "bert")
        flags = ["--models", tmp_path / "bert", "--text", *files, "--block_size", 16, "--lengths", 16, 48]
        assert run(tmp_path, *flags) == 0
        results = read_results(tmp_path)
        (found,), (short, long) = results["models"].values(), results["lengths"]
        assert found["figures"]["bits_per_byte"] is None
        assert short["figures"]["loss"] == pytest.approx(found["figures"]["loss"], rel=0.3)
        assert long["reason"].startswith("takes no 48 tokens")

    def test_other_tokenizers_are_measured_but_not_compared(self, trained, text, tmp_path):
        other = tmp_path / "other"
        flags = "--layers 1 --width 32 --vocab_size 280 --block_size 16 --batch_size 4 --baseline_steps 2 --steps 1"
        flags += f" --variants control --tracker none --output_dir {other}"
        assert finetune.main([*flags.split(), "--text", str(text)]) == 0
        models = ["--models", other / "control", "--against", trained / "control", "--text", text, "--no_sweep"]
        assert run(tmp_path, *models, "--block_size", 16) == 0
        (found,) = read_results(tmp_path)["models"].values()
        assert found["against"] == {"reason": "other items: another tokenizer, image size or order of labels"}
        assert found["figures"]["bits_per_byte"] > 0


@pytest.fixture(scope="module")
def compared(folder, files, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared")
    model = AutoModel.from_pretrained(folder).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPreservedWarning)
        patch_model(model, pos="rope", init="copy").save_pretrained(out / "rope")
    AutoTokenizer.from_pretrained(folder).save_pretrained(out / "rope")
    flags = ["--task", "embed", "--models", folder, out / "rope", "--against", folder, "--text", *files]
    few = [
        "--max_length",
        "16",
        "--heldout_passages",
        "12",
        "--heldout_pairs",
        "10",
        "--lengths",
        "20",
        "40",
        "4000",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "FEWEST", 2)
        assert run(out, *flags, *few) == 0
    return read_results(out)


class TestEmbeddings:
    def test_a_model_against_itself(self, compared):
        own, other = compared["models"].values()
        assert own["figures"]["similarity"] == pytest.approx(1, abs=1e-5)
        assert own["against"] == {"of": "reciprocal rank", "difference": 0, "interval": [0, 0]}
        assert other["figures"]["similarity"] < 0.99
        expected = other["figures"]["mrr"] - own["figures"]["mrr"]
        assert other["against"]["difference"] == pytest.approx(expected)

    def test_long_documents(self, compared):
        rows = [(row["model"].startswith("encoder"), row["length"], row["how"]) for row in compared["lengths"]]
        first = [(True, 20, "whole"), (True, 40, "first 24 tokens"), (True, 40, "windows of 24"), (True, 4000, "whole")]
        assert rows == [*first, *((False, length, "whole") for length in (20, 40, 4000))]
        by = {(row["length"], row["how"]): row["figures"] for row in compared["lengths"][:4]}
        assert by[40, "windows of 24"]["similarity"] == pytest.approx(1, abs=1e-5), "that is what it is compared with"
        assert by[40, "first 24 tokens"]["similarity"] < 0.999
        assert by[4000, "whole"] is None
        assert "documents of this length: 0" in compared["lengths"][3]["reason"]

    def test_without_another_model_similarity_says_nothing(self, folder, files, tmp_path):
        flags = ["--task", "embed", "--models", folder, "--text", *files, "--max_length", 16, "--heldout_passages", 4]
        assert run(tmp_path, *flags, "--no_sweep") == 0
        (found,) = read_results(tmp_path)["models"].values()
        assert set(found["figures"]) == {"recall_at_1", "mrr", "loss"}

    def test_sentence_transformers_finds_the_same(self, folder, files, tmp_path):
        pytest.importorskip("sentence_transformers")
        flags = ["--task", "embed", "--models", folder, "--against", folder, "--text", *files, "--max_length", 16]
        assert run(tmp_path, *flags, "--no_sweep", "--sentence_transformers", "--heldout_passages", 4) == 0
        (found,) = read_results(tmp_path)["models"].values()
        theirs = found["sentence_transformers"]
        assert theirs["cosine_accuracy@1"] == pytest.approx(found["figures"]["recall_at_1"])
        assert theirs["spearman_cosine"] == pytest.approx(1)
        assert "sentence-transformers" in (tmp_path / "results.md").read_text()


def test_long_documents_by_hand():
    def pair(number, length):
        return SimpleNamespace(query=np.array([number]), target=np.full(length, number))

    first, second = [pair(1, 4), pair(2, 3), pair(3, 2), pair(4, 9)], [pair(5, 9), pair(6, 1)]
    documents, queries, own = sweep.long_documents([first, second], 9)
    assert [d.tolist() for d in documents] == [[1] * 4 + [2] * 3 + [3] * 2, [4] * 9, [5] * 9]
    assert [q.tolist() for q in queries] == [[3]]
    assert own == [0]


class TestBootstrap:
    def test_interval_covers(self):
        """Of 200 experiments with no difference about 95 % have zero inside."""
        random, inside = np.random.default_rng(0), 0
        for seed in range(200):
            common, ones = random.normal(size=60), np.ones(60)
            pair = [(common + random.normal(size=60), ones) for _ in range(2)]
            _, low, high = evaluate.paired_bootstrap(*pair, 300, seed)
            inside += low <= 0 <= high
        assert 180 <= inside <= 198

    def test_pairing_counts(self):
        random, ones = np.random.default_rng(0), np.ones(100)
        common = 10 * random.normal(size=100)
        one, other = (common + 0.1 * random.normal(size=100) + shift for shift in (0.2, 0.0))
        difference, low, high = evaluate.paired_bootstrap((one, ones), (other, ones), 500, 0)
        assert difference == pytest.approx((one - other).mean())
        assert 0 < low < difference < high < 0.4
        _, low, high = evaluate.paired_bootstrap((one, ones), (random.permutation(other), ones), 500, 0)
        assert low < 0 < high, "the control loses who belongs to whom"

    def test_unequal_items(self):
        sums, counts = np.array([2.0, 9.0]), np.array([1.0, 3.0])
        difference, *_ = evaluate.paired_bootstrap((sums, counts), (sums * 2, counts), 100, 0)
        assert difference == -11 / 4


# -- classifiers of texts and images


def finetuned(out, *flags):
    tiny = "--baseline_steps 3 --steps 2 --eval_every 2 --batch_size 8 --calibration 64 --tracker none --layers 1"
    assert finetune.main([*tiny.split(), *map(str, flags), "--output_dir", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts of two classes, the same of three, and the same with the classes named the other way round."""
    folder = tmp_path_factory.mktemp("texts")
    for name, labels in {"two": ("a", "b"), "three": ("a", "b", "c")}.items():
        rows = [f"text {i} is {labels[i % len(labels)]} like,{labels[i % len(labels)]}" for i in range(150)]
        (folder / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
    return folder


@pytest.fixture(scope="module")
def classifiers(texts, tmp_path_factory):
    flags = "--task classify --width 32 --vocab_size 150 --max_length 12 --variants rope control --data"
    return finetuned(tmp_path_factory.mktemp("classifiers"), *flags.split(), texts / "two.csv")


@pytest.fixture(scope="module")
def viewers(tmp_path_factory):
    pytest.importorskip("sklearn")
    flags = "--task image --width 16 --heldout_images 40 --curve_images 20 --variants rope control"
    return finetuned(tmp_path_factory.mktemp("viewers"), *flags.split())


@pytest.mark.slow
def test_classifiers_have_the_figures_of_their_run(classifiers, texts, tmp_path):
    models = [classifiers / "rope", classifiers / "control"]
    flags = ["--task", "classify", "--data", texts / "two.csv", "--against", classifiers / "control"]
    assert run(tmp_path, *flags, "--models", *models) == 0
    found, stages = read_results(tmp_path)["models"], read_results(classifiers)["stages"]
    for model in models:
        assert found[str(model)]["figures"] == pytest.approx(stages[model.name]["end"], abs=1e-6)
    assert found[str(models[1])]["against"]["same_answer"] == 1
    assert found[str(models[1])]["against"]["difference"] == 0
    assert found[str(models[0])]["against"]["difference"] != 0
    assert "| rope " in (tmp_path / "results.md").read_text("utf-8")


@pytest.mark.slow
def test_image_models_have_the_figures_of_their_run(viewers, tmp_path):
    models = [viewers / "rope", viewers / "control"]
    flags = ["--task", "image", "--heldout_images", 40, "--against", viewers / "baseline"]
    assert run(tmp_path, *flags, "--models", *models) == 0
    found, stages = read_results(tmp_path)["models"], read_results(viewers)["stages"]
    for model in models:
        assert found[str(model)]["figures"] == pytest.approx(stages[model.name]["end"], abs=1e-6)
        assert found[str(model)]["against"]["difference"] != 0
    assert "| model   |   loss | accuracy | parameters |" in (tmp_path / "results.md").read_text("utf-8")


def test_a_classifier_of_other_labels_is_refused(classifiers, texts, tmp_path, capsys):
    assert run(tmp_path, "--task", "classify", "--data", texts / "three.csv", "--models", classifiers / "rope") == 2
    assert "has no head for this data's labels (a, b, c, ...)" in capsys.readouterr().err


def test_another_order_of_labels_is_no_other_answer(classifiers, texts, tmp_path):
    """The same function with its outputs exchanged has the same figures."""
    model = AutoModelForSequenceClassification.from_pretrained(classifiers / "control")
    for parameter in model.classifier.parameters():
        parameter.data = parameter.data.flip(0)
    model.config.id2label, model.config.label2id = {0: "b", 1: "a"}, {"b": 0, "a": 1}
    model.save_pretrained(tmp_path / "turned")
    AutoTokenizer.from_pretrained(classifiers / "control").save_pretrained(tmp_path / "turned")
    models = [classifiers / "control", tmp_path / "turned"]
    assert run(tmp_path, "--task", "classify", "--data", texts / "two.csv", "--models", *models) == 0
    one, other = (found["figures"] for found in read_results(tmp_path)["models"].values())
    assert one == pytest.approx(other, abs=1e-6)


def test_what_has_no_head_is_refused(classifiers, texts, text, tmp_path, capsys):
    bare = AutoModelForSequenceClassification.from_pretrained(classifiers / "control").bert
    bare.save_pretrained(tmp_path / "bare")
    tokenizer = AutoTokenizer.from_pretrained(classifiers / "control")
    tokenizer.save_pretrained(tmp_path / "bare")
    assert run(tmp_path, "--task", "classify", "--data", texts / "two.csv", "--models", tmp_path / "bare") == 2
    assert "has no head for this data's labels" in capsys.readouterr().err
    assert run(tmp_path, "--models", tmp_path / "bare", "--text", text, "--block_size", 12) == 2
    assert "isn't a whole MegatronBertForMaskedLM: it was saved without cls.predictions" in capsys.readouterr().err


def test_help_leaves_out_what_is_of_training(capsys):
    with pytest.raises(SystemExit):
        evaluate.main(["--help"])
    shown = capsys.readouterr().out
    assert "--models " in shown
    assert not any(f"--{name} " in shown for name in evaluate.UNUSED)


@pytest.fixture(scope="module")
def broken(trained, classifiers, folder, tmp_path_factory):
    """Models of each kind with a NaN among the weights of their last layer, and what says so."""
    out, weights = tmp_path_factory.mktemp("broken"), {}
    for task, (auto, source) in {
        "lm": (AutoModelForCausalLM, trained / "control"),
        "classify": (AutoModelForSequenceClassification, classifiers / "control"),
        "embed": (AutoModel, folder),
    }.items():
        model = auto.from_pretrained(source)
        matrices = [(name, p) for name, p in model.named_parameters() if p.ndim == 2 and "pooler" not in name]
        name, weight = matrices[-1]
        weight.data[0, 0] = math.nan
        model.save_pretrained(out / task)
        AutoTokenizer.from_pretrained(source).save_pretrained(out / task)
        weights[task] = name
    return out, weights


class TestNotFinite:
    """Figures that are no numbers: status 1, the model and the figure named, and the others' figures written."""

    def results(self, out):
        return json.loads((out / "results.json").read_text(), parse_constant=pytest.fail)

    def error(self, capsys):
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("NotFiniteError: ")
        return error

    @pytest.mark.parametrize("against", [False, True])
    def test_language_model(self, broken, trained, text, tmp_path, capsys, against):
        folder, weights = broken
        flags = ["--models", folder / "lm", trained / "control", "--text", text, "--block_size", 16]
        flags += ["--against", trained / "control"] if against else []
        assert run(tmp_path, *flags, "--sweep_tokens", 256) == 1
        assert f"{folder / 'lm'}: loss is nan; its weight {weights['lm']} isn't finite." in self.error(capsys)
        results = self.results(tmp_path)
        assert results["models"][str(folder / "lm")]["figures"] == {}
        assert results["models"][str(trained / "control")]["figures"]["loss"] > 0
        assert {row["model"] for row in results["lengths"]} == {"control"}
        text = (tmp_path / "results.md").read_text("utf-8")
        assert "**lm** failed: loss is nan; its weight" in text
        assert ("not compared" in text) is against

    def test_what_is_compared_with(self, broken, trained, text, tmp_path, capsys):
        folder, weights = broken
        flags = ["--models", trained / "control", "--text", text, "--block_size", 16, "--no_sweep"]
        assert run(tmp_path, *flags, "--against", folder / "lm") == 1
        assert f"{folder / 'lm'}: loss is nan; its weight {weights['lm']} isn't" in self.error(capsys)
        (found,) = self.results(tmp_path)["models"].values()
        assert found["figures"]["loss"] > 0
        assert found["against"] == {"reason": "lm: loss is nan"}

    def test_classifier(self, broken, texts, tmp_path, capsys):
        """An answer can be counted as right without being a number."""
        folder, weights = broken
        flags = ["--task", "classify", "--data", texts / "two.csv", "--baselines", "false"]
        assert run(tmp_path, *flags, "--models", folder / "classify") == 1
        assert f"classify: loss is nan; its weight {weights['classify']}" in self.error(capsys)
        (found,) = self.results(tmp_path)["models"].values()
        assert found["figures"] == {}

    @pytest.mark.parametrize("reference", [False, True])
    def test_embeddings(self, broken, folder, files, tmp_path, capsys, reference):
        out, _ = broken
        flags = ["--task", "embed", "--text", *files, "--max_length", 16, "--heldout_passages", 4, "--no_sweep"]
        pair = ["--models", folder, "--against", out / "embed"] if reference else ["--models", out / "embed"]
        assert run(tmp_path, *flags, *pair) == 1
        assert f"NotFiniteError: {out / 'embed'}: " in self.error(capsys)
        (found,) = self.results(tmp_path)["models"].values()
        assert (found["figures"].get("mrr", 0) > 0) is reference, "what is no figure of the reference stays"

    def test_beyond_the_trained_length(self, trained, text, tmp_path, capsys, monkeypatch):
        by_position = sweep.by_position

        def overflowing(model, blocks, masked):
            nats, counts = by_position(model, blocks, masked)
            return nats + (math.inf if len(nats) > 32 else 0), counts

        monkeypatch.setattr(sweep, "by_position", overflowing)
        flags = ["--models", trained / "rope", "--text", text, "--block_size", 16, "--lengths", 16, 64]
        assert run(tmp_path, *flags, "--sweep_tokens", 256) == 1
        assert "rope: at 64 tokens loss is inf." in self.error(capsys)
        short, long = self.results(tmp_path)["lengths"]
        assert short["figures"]["loss"] > 0
        assert (long["figures"], long["reason"]) == (None, "loss is inf")


def test_short_names():
    names = evaluate.short_names(["a/b/rope", "a/c/rope", "x/dyt", "gpt2"])
    assert list(names.values()) == ["b/rope", "c/rope", "dyt", "gpt2"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "nothing to evaluate: give --models"),
        ("--models ./missing", "there is no model folder ./missing"),
        ("--models MODEL MODEL", "a model is named twice"),
        ("--models MODEL --against /a/missing", "there is no model folder /a/missing"),
        ("--models MODEL --lengths 4", "--lengths must be at least 8, not 4"),
        ("--models MODEL --sentence_transformers", "--sentence_transformers evaluates embeddings: --task embed"),
        ("--models MODEL --block_size 99999", "less than one block of 99999"),
        ("--models MODEL --block_size 32", "doesn't take the held-out data (index out of range in self)"),
        ("--models bare", "there is no tokenizer in"),
        ("--models MODEL --text missing.txt", "can't read the text file missing.txt"),
        ("--models MODEL --output_dir MODEL/config.json", "can't write to the output folder"),
    ],
)
def test_refused_in_one_line(trained, text, tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    AutoModelForCausalLM.from_pretrained(trained / "control").save_pretrained("bare")
    flags = flags.replace("MODEL", str(trained / "control")).split()
    assert evaluate.main(["--text", str(text), "--output_dir", "out", "--block_size", "16", *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert not Path("out/results.json").exists()


def test_lm_eval_is_for_language_models(folder, files, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: name)
    assert run(tmp_path, "--task", "embed", "--models", folder, "--lm_eval", "piqa") == 2
    assert "--lm_eval evaluates language models: --task lm" in capsys.readouterr().err


def test_missing_packages_are_named(trained, text, tmp_path, capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a))
    assert run(tmp_path, "--models", trained / "control", "--lm_eval", "piqa") == 2
    assert capsys.readouterr().err.strip() == "RecipeError: --lm_eval needs the package: pip install lm-eval"
