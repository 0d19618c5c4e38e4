"""evaluate.py, at a size of seconds: what it measures, what it compares, and its refusals."""

import importlib.util
import json
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
from hfrecipes import sweep
from run_files import read_results
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hfpatch.errors import NotPreservedWarning
from hfpatch.patch import patch_model

SHORT = "--variants rope control --baseline_steps 12 --steps 3 --eval_every 3 --batch_size 4 --tracker none --layers 1"


def run(out, *flags):
    return evaluate.main([*(word for flag in flags for word in str(flag).split()), "--output_dir", str(out)])


@pytest.fixture(scope="module")
def evaluated(finished, text, tmp_path_factory):
    out, control = tmp_path_factory.mktemp("evaluated"), finished / "control"
    sizes = "--block_size 16 --heldout_blocks 20 --sweep_tokens 450"
    assert run(out, "--models", control, finished / "rms+rope", "--against", control, "--text", text, sizes) == 0
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
    flags = "--task classify --width 32 --vocab_size 300 --max_length 12 --calibration 64"
    assert (
        finetune.main([*SHORT.split(), *flags.split(), "--data", str(tables / "ab.csv"), "--output_dir", str(out)]) == 0
    )
    return out


class TestLanguageModels:
    def test_figures_are_those_of_the_run_that_trained_them(self, finished, evaluated):
        stages, models = read_results(finished)["stages"], read_results(evaluated)["models"]
        for source, found in models.items():
            assert found["figures"] == pytest.approx(stages[Path(source).name]["end"], rel=1e-6)
            assert found["figures"]["bits_per_byte"] > 0

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

    def test_length_sweep(self, finished, evaluated, text):
        rows = {(row["model"], row["tokens"]): row for row in read_results(evaluated)["lengths"]}
        assert list(rows) == [(name, length) for name in ("control", "rms+rope") for length in (16, 32, 64, 128)]
        assert rows["control", 16]["loss"] > 0
        for length in (32, 64, 128):
            assert rows["control", length].keys() == {"model", "tokens", "read", "reason"}
            assert rows["control", length]["reason"] == f"takes no {length} tokens (IndexError)"
        tokenizer = AutoTokenizer.from_pretrained(finished / "tokenizer")
        tokens, _ = data.encode(data.split_documents(data.read_text_files([str(text)]))[1], tokenizer)
        ids = torch.from_numpy(tokens[:448]).long().view(7, 64)
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(finished / "rms+rope").eval()(ids).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
        assert rows["rms+rope", 64]["loss"] == pytest.approx(loss, abs=1e-5)
        assert rows["rms+rope", 64]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)

    def test_files(self, evaluated):
        text = (evaluated / "results.md").read_text()
        assert len([part for part in text.split("\n\n") if part.startswith("|")]) == 3
        assert "takes no 128 tokens" in text
        assert "python recipes/evaluate.py --models" in text
        assert (evaluated / "lengths.png").read_bytes().startswith(b"\x89PNG")

    def test_masked(self, bert, files, tmp_path):
        assert run(tmp_path, "--models", bert, "--text", *files, "--block_size 16 --lengths 16 48") == 0
        results = read_results(tmp_path)
        (found,), (short, long) = results["models"].values(), results["lengths"]
        assert found["figures"]["bits_per_byte"] is None
        assert short["loss"] == pytest.approx(found["figures"]["loss"], rel=0.3)
        assert long["reason"].startswith("takes no 48 tokens")

    def test_other_tokenizers_are_measured_but_not_compared(self, finished, text, tmp_path):
        AutoModelForCausalLM.from_pretrained(finished / "control").save_pretrained(tmp_path / "other")
        tokenizer = json.loads((finished / "control/tokenizer.json").read_text())
        tokenizer["model"]["merges"] = []
        AutoTokenizer.from_pretrained(finished / "control").save_pretrained(tmp_path / "other")
        (tmp_path / "other/tokenizer.json").write_text(json.dumps(tokenizer))
        models = ["--models", tmp_path / "other", "--against", finished / "control", "--text", text, "--no_sweep"]
        assert run(tmp_path, *models, "--block_size", 16) == 0
        (found,) = read_results(tmp_path)["models"].values()
        assert found["against"].keys() == {"not compared"}
        assert found["figures"]["bits_per_byte"] > 0


def test_embeddings(folder, files, tmp_path, monkeypatch):
    """Against another model, on long documents, and as sentence-transformers measures them."""
    model = AutoModel.from_pretrained(folder).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPreservedWarning)
        patch_model(model, pos="rope", init="copy").save_pretrained(tmp_path / "rope")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "rope")
    monkeypatch.setattr(sweep, "FEWEST", 2)
    flags = ["--task", "embed", "--text", *files, "--max_length", 16, "--heldout_passages", 12, "--heldout_pairs", 10]
    more = ["--against", folder, "--lengths", 20, 60, 4000, "--sentence_transformers"]
    assert run(tmp_path, *flags, "--models", folder, tmp_path / "rope", *more) == 0
    results = read_results(tmp_path)
    own, other = results["models"].values()
    assert own["figures"]["similarity"] == pytest.approx(1, abs=1e-5)
    assert own["against"]["difference"] == 0
    assert other["figures"]["similarity"] < 0.99
    expected = other["figures"]["mrr"] - own["figures"]["mrr"]
    assert other["against"]["difference"] == pytest.approx(expected)
    for found in (own, other):
        assert found["sentence_transformers"]["cosine_accuracy@1"] == pytest.approx(found["figures"]["recall_at_1"])
        assert found["sentence_transformers"]["cosine_mrr@10"] == pytest.approx(found["figures"]["mrr"])
    assert own["sentence_transformers"]["spearman_cosine"] == pytest.approx(1)
    rows = {(row["model"], row["tokens"], row["read"]): row for row in results["lengths"]}
    name = Path(folder).name
    ways = [(20, "whole"), (60, "cut off"), (60, "in windows"), (4000, "")]
    assert [key for key in rows if key[0] == name] == [(name, *way) for way in ways]
    assert [key[1:] for key in rows if key[0] == "rope"] == [(20, "whole"), (60, "whole"), (4000, "")]
    assert rows[name, 60, "in windows"]["similarity"] == pytest.approx(1, abs=1e-5), "it is compared with itself"
    assert rows[name, 60, "cut off"]["similarity"] < 0.999
    assert "too few" in rows[name, 4000, ""]["reason"]
    assert run(tmp_path, *flags, "--models", folder, "--no_sweep") == 0
    (found,) = read_results(tmp_path)["models"].values()
    assert set(found["figures"]) == {"recall_at_1", "mrr", "loss"}, "similarity to itself says nothing"


def test_long_documents_by_hand():
    class Words:
        texts = ("a " * 40, "b " * 30, "c " * 20, "d " * 90, "e " * 95, "f " * 5)

    class Task:
        heldout_corpus = Words

        def tokenizer(self, texts, **options):
            return {"input_ids": [text.split() for text in texts]}

    documents, late, own = sweep.long_documents(Task(), 90)  # texts begin at 0, 40, 70; 90; 180; 275
    assert [" ".join(dict.fromkeys(d.split())) for d in documents] == ["a b c", "d", "e"]
    assert [text[0] for text in late] == ["c"], "b begins in the first half, f in a run that isn't full"
    assert own.tolist() == [0]


class TestBootstrap:
    def test_interval_covers(self, monkeypatch):
        """Of 100 experiments with no difference about 95 have zero inside."""
        monkeypatch.setattr(evaluate, "RESAMPLES", 300)
        random, inside = np.random.default_rng(0), 0
        for _ in range(100):
            common, ones = random.normal(size=60), np.ones(60)
            pair = [(common + random.normal(size=60), ones) for _ in range(2)]
            _, low, high = evaluate.paired_bootstrap(*pair)
            inside += low <= 0 <= high
        assert 88 <= inside <= 99

    def test_pairing_counts(self):
        random, ones = np.random.default_rng(0), np.ones(100)
        common = 10 * random.normal(size=100)
        one, other = (common + 0.1 * random.normal(size=100) + shift for shift in (0.2, 0.0))
        difference, low, high = evaluate.paired_bootstrap((one, ones), (other, ones))
        assert difference == pytest.approx((one - other).mean())
        assert 0 < low < difference < high < 0.4
        _, low, high = evaluate.paired_bootstrap((one, ones), (random.permutation(other), ones))
        assert low < 0 < high, "the control loses who belongs to whom"

    def test_unequal_items(self):
        sums, counts = np.array([2.0, 9.0]), np.array([1.0, 3.0])
        assert evaluate.paired_bootstrap((sums, counts), (sums * 2, counts))[0] == -11 / 4


class TestClassifiers:
    @pytest.mark.slow
    def test_texts_and_images_have_the_figures_of_their_run(self, classifiers, tables, tmp_path):
        flags = "--task image --width 16 --heldout_images 40 --curve_images 20 --calibration 64"
        viewers = tmp_path / "viewers"
        assert finetune.main([*SHORT.split(), *flags.split(), "--output_dir", str(viewers)]) == 0
        for out, data_flags in {
            classifiers: ["--task", "classify", "--data", tables / "ab.csv"],
            viewers: ["--task", "image", "--heldout_images", 40],
        }.items():
            models = [out / "rope", out / "control"]
            assert run(tmp_path / "e", *data_flags, "--against", out / "control", "--models", *models) == 0
            found, stages = read_results(tmp_path / "e")["models"], read_results(out)["stages"]
            for model in models:
                assert found[str(model)]["figures"] == pytest.approx(stages[model.name]["end"], abs=1e-6)
            assert found[str(models[1])]["against"]["same_answer"] == 1
            assert found[str(models[0])]["against"]["difference"] != 0

    def test_another_order_of_labels_is_no_other_answer(self, classifiers, tables, tmp_path):
        """The same function with its outputs exchanged has the same figures."""
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
        assert one["figures"] == pytest.approx(other["figures"], abs=1e-6)
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


@pytest.fixture(scope="module")
def broken(finished, classifiers, folder, tmp_path_factory):
    """Models of each kind with a NaN among the weights of their last layer, and which weight it is."""
    out, weights = tmp_path_factory.mktemp("broken"), {}
    for task, (auto, source) in {
        "lm": (AutoModelForCausalLM, finished / "control"),
        "classify": (AutoModelForSequenceClassification, classifiers / "control"),
        "embed": (AutoModel, folder),
    }.items():
        model = auto.from_pretrained(source)
        name, weight = [(name, p) for name, p in model.named_parameters() if p.ndim == 2 and "pooler" not in name][-1]
        weight.data[0, 0] = math.nan
        model.save_pretrained(out / task)
        AutoTokenizer.from_pretrained(source).save_pretrained(out / task)
        weights[task] = name
    return out, weights


@pytest.mark.parametrize("task", ["lm", "classify", "embed"])
@pytest.mark.parametrize("as_reference", [False, True])
def test_what_is_no_number_is_named(broken, finished, classifiers, folder, tables, text, files, tmp_path, capsys, task,
                                    as_reference):  # fmt: skip
    """Status 1, the model and its weight named, and the others' figures written."""
    out, weights = broken
    sound, flags = {
        "lm": (finished / "control", ["--text", text, "--block_size", 16, "--sweep_tokens", 256]),
        "classify": (classifiers / "control", ["--data", tables / "ab.csv", "--baselines", "false"]),
        "embed": (folder, ["--text", *files, "--max_length", 16, "--heldout_passages", 4, "--no_sweep"]),
    }[task]
    models = [sound, "--against", out / task] if as_reference else [out / task, sound, "--against", sound]
    assert run(tmp_path, "--task", task, *flags, "--models", *models) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"NotFiniteError: {out / task}: its weight {weights[task]} isn't finite")
    results = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert results["failed"].keys() == {str(out / task)}
    assert results["models"][str(sound)]["figures"]["loss"] > 0
    assert results["models"].get(str(out / task), {"figures": {}})["figures"] == {}
    assert f"**{task}** failed: its weight" in (tmp_path / "results.md").read_text("utf-8")


def test_what_overflows_beyond_the_trained_length_is_named(finished, text, tmp_path, capsys, monkeypatch):
    loss = sweep.LanguageModelling.loss

    def overflowing(self, model, batch):
        sums, counts = loss(self, model, batch)
        return sums + (math.inf if batch["input_ids"].shape[1] > 32 else 0), counts

    monkeypatch.setattr(sweep.LanguageModelling, "loss", overflowing)
    flags = ["--models", finished / "rms+rope", "--text", text, "--block_size", 16, "--lengths", 16, 64]
    assert run(tmp_path, *flags, "--sweep_tokens", 256) == 1
    assert "rms+rope: at 64 tokens loss is inf." in capsys.readouterr().err
    short, long = read_results(tmp_path)["lengths"]
    assert short["loss"] > 0
    assert "loss" not in long
    assert long["reason"]


def test_help_leaves_out_what_is_of_training(capsys):
    with pytest.raises(SystemExit):
        evaluate.main(["--help"])
    shown = capsys.readouterr().out
    assert "--models " in shown
    assert not any(f"--{name} " in shown for name in evaluate.UNUSED)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--models MODEL --against /a/missing", "/a/missing"),
        ("--models MODEL --lengths 4", "--lengths"),
        ("--models MODEL --sentence_transformers", "--task embed"),
        ("--models MODEL --task embed --lm_eval piqa", "--task lm"),
        ("--models MODEL --lm_eval piqa", "pip install lm-eval"),
        ("--models MODEL --block_size 99999", "99999"),
        ("--models MODEL --block_size 32", "doesn't take the held-out data"),
        ("--models bare", "bare"),
        ("--models MODEL --text missing.txt", "missing.txt"),
        ("--models MODEL --output_dir MODEL/config.json", "output folder"),
    ],
)
def test_refused_in_one_line(finished, text, tmp_path, capsys, monkeypatch, flags, named):
    monkeypatch.chdir(tmp_path)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else find(name, *a))
    AutoModelForCausalLM.from_pretrained(finished / "control").save_pretrained("bare")
    few = [] if "embed" in flags else ["--block_size", "16"]
    flags = [*few, *flags.replace("MODEL", str(finished / "control")).split()]
    assert evaluate.main(["--text", str(text), "--output_dir", "out", *flags]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("RecipeError: ")
    assert named in error
    assert not Path("out/results.json").exists()
