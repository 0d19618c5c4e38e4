"""Text classification: figures, thresholds, the head's start, the order of items, and whole runs."""

import json

import finetune
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hfrecipes import classify
from hfrecipes.corpus import RecipeError
from hfrecipes.tasks import Drawn
from run_files import read_results
from sklearn.metrics import f1_score
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel

TINY = "--task classify --layers 1 --width 32 --vocab_size 320 --batch_size 8 --baseline_steps 20 --steps 3"
TINY += " --tracker none --eval_every 10 --save_every 10 --warmup_steps 2 --learning_rate 3e-3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One set with several labels a text and one with a single one; texts name them, most of the time."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    words = np.array([f"w{i}" for i in range(40)])
    many, one = [], []
    for i in range(240):
        labels = [name for name, share in {"apple": 0.6, "pear": 0.3, "plum": 0.1}.items() if random.random() < share]
        said = [name for name in labels if random.random() < 0.9]
        said += random.choice(words, random.integers(1, 12)).tolist()
        many.append({"text": " ".join(random.permutation([*said, f"n{i}"])), "labels": labels})
        one.append({"text": many[-1]["text"], "label": labels[0] if labels else "none"})
    (folder / "many.json").write_text(json.dumps(many))
    (folder / "one.json").write_text(json.dumps(one))
    return folder


def tiny(out, data, *more):
    return [*TINY.split(), "--data", str(data), "--output_dir", str(out), "--variants", "rms", "control", *more]


def make(out, data, **settings):
    sizes = {"layers": 1, "width": 32, "vocab_size": 320, "batch_size": 8, "data": str(data), "baselines": False}
    return classify.Classification(classify.ClassificationConfig(**{**sizes, **settings}), Accelerator(), out)


@pytest.fixture(scope="module")
def many(folder, tmp_path_factory):
    return make(tmp_path_factory.mktemp("many"), folder / "many.json", baselines=True)


@pytest.fixture(scope="module")
def one(folder, tmp_path_factory):
    return make(tmp_path_factory.mktemp("one"), folder / "one.json", baselines=True)


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    assert finetune.main(tiny(out, folder / "many.json")) == 0
    return out


def loader(task, items):
    return DataLoader(items, 8, collate_fn=task.collate)


def measure(task, model, items=None):
    with torch.no_grad():
        return task.figures(model.eval(), loader(task, items or task.heldout), lambda x: x)


def logits_of(model, items):
    """Of one text at a time, unpadded."""
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([item["input_ids"]])).logits[0] for item in items])


def targets(items):
    return torch.tensor([item["labels"] for item in items])


class TestFigures:
    def test_several_labels_by_hand(self, many):
        torch.manual_seed(0)
        model = many.baseline().eval()
        dev, test = (logits_of(model, items).sigmoid().numpy() for items in (many.dev, many.heldout))
        shown = measure(many, model, many.dev)
        by_hand = [f1_score(targets(many.dev), dev >= t, average="micro", zero_division=0) for t in np.unique(dev)]
        assert shown["micro_f1"] == pytest.approx(max(by_hand), abs=1e-6)
        held, true = measure(many, model), targets(many.heldout).numpy()
        nats = -(true * np.log(test) + (1 - true) * np.log(1 - test))
        assert held["loss"] == pytest.approx(nats.mean(), abs=1e-5)
        assert held["macro_f1"] == pytest.approx(f1_score(true, test >= held["threshold"] - 1e-6, average="macro"))

    def test_threshold_comes_from_the_development_texts_alone(self, many, monkeypatch):
        torch.manual_seed(0)
        model = many.baseline()
        chosen = [measure(many, model)["threshold"]]
        for name in ("heldout", "dev"):  # what the test texts say doesn't matter; what the development texts say does
            other = [{**item, "labels": [1 - label for label in item["labels"]]} for item in getattr(many, name)]
            with monkeypatch.context() as patch:
                patch.setattr(many, name, other)
                chosen.append(measure(many, model)["threshold"])
        assert chosen[0] == chosen[1] != chosen[2]

    @pytest.mark.parametrize("kind", ["one", "many"])
    def test_loss_is_the_models_own(self, kind, request):
        task = request.getfixturevalue(kind)
        batch = next(iter(DataLoader(task.heldout, len(task.heldout), collate_fn=task.collate)))
        model = task.baseline().eval()
        sums, counts = task.loss(model, batch)
        with torch.no_grad():
            outputs = model(**batch)
        figures = measure(task, model)
        assert figures["loss"] == pytest.approx(outputs.loss.item(), abs=1e-5)
        assert (sums.sum() / counts.sum()).item() == pytest.approx(outputs.loss.item(), abs=1e-6)
        if kind == "one":
            right = (outputs.logits.argmax(1) == batch["labels"]).float()
            assert figures["accuracy"] == pytest.approx(right.mean().item())


class TestHead:
    def test_a_checkpoint_without_a_head(self, many, folder, tmp_path):
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        encoder = BertModel(BertConfig(vocab_size=len(many.tokenizer), max_position_embeddings=24, **sizes))
        encoder.save_pretrained(tmp_path / "m")
        many.tokenizer.save_pretrained(tmp_path / "m")
        task = make(tmp_path / "out", folder / "many.json", model=str(tmp_path / "m"))
        model = task.baseline()
        assert not task.keep_head
        assert task.max_length == 24
        assert torch.allclose(model.classifier.bias.sigmoid(), targets(many.train_texts).mean(0))
        assert model.config.id2label == {0: "apple", 1: "pear", 2: "plum"}
        assert {group["lr"] for group in task.parameter_groups(model, 0.1, 0.0)} == {0.1}
        with pytest.raises(RecipeError, match="--max_length 25"):
            make(tmp_path / "out", folder / "many.json", model=str(tmp_path / "m"), max_length=25)

    def test_a_classifier_keeps_its_head_for_its_own_labels_alone(self, many, folder, tmp_path, capsys):
        """In the order of its outputs; one of as many other labels loses it."""
        model = many.baseline()
        model.config.label2id = {"plum": 0, "apple": 1, "pear": 2}
        model.config.id2label = {i: label for label, i in model.config.label2id.items()}
        model.save_pretrained(tmp_path / "m")
        many.tokenizer.save_pretrained(tmp_path / "m")
        task = make(tmp_path, folder / "many.json", model=str(tmp_path / "m"))
        assert torch.equal(task.baseline().classifier.weight, model.classifier.weight)
        assert (task.labels, task.keep_head) == (["plum", "apple", "pear"], True)
        assert "starts afresh" not in capsys.readouterr().out
        (tmp_path / "figs.json").write_text((folder / "many.json").read_text().replace('"plum"', '"fig"'))
        task = make(tmp_path, tmp_path / "figs.json", model=str(tmp_path / "m"))
        assert not torch.equal(task.baseline().classifier.weight, model.classifier.weight)
        assert "its last layer starts afresh" in capsys.readouterr().out


class TestItems:
    def test_every_text_once_an_epoch_by_seed_and_place_alone(self, many):
        n = len(many.train_texts)
        drawn, later, other = Drawn(many, 3, 0, 2 * n), Drawn(many, 3, 250, 2 * n - 250), Drawn(many, 4, 0, n)
        assert all(drawn[250 + i] == later[i] for i in (0, 100, 3)), "in any order"
        epochs = [[tuple(drawn[i]["input_ids"]) for i in range(e * n, e * n + n)] for e in (0, 1)]
        every = sorted(tuple(item["input_ids"]) for item in many.train_texts)
        assert sorted(epochs[0]) == sorted(epochs[1]) == every
        assert epochs[0] != epochs[1]
        assert sum(drawn[i] == other[i] for i in range(n)) < n / 10

    def test_tokenizer_has_seen_the_training_texts_alone(self, tmp_path):
        (tmp_path / "x").mkdir()
        for name, word in {"train": "qqq", "dev": "jjj", "test": "zzz"}.items():
            rows = [{"text": f"{word.upper()} {i}", "label": i % 2} for i in range(30)]
            (tmp_path / "x" / f"{name}.json").write_text(json.dumps(rows))
        pieces = make(tmp_path, tmp_path / "x").tokenizer
        assert pieces.tokenize("QQQ") == ["Ġqqq"]
        assert len(pieces.tokenize("zzz")) == len(pieces.tokenize("jjj")) > 1
        assert pieces("qqq")["input_ids"][0] == pieces.cls_token_id


class TestRuns:
    @pytest.mark.slow
    def test_saved_model_has_the_reported_figures(self, finished, many):
        model = AutoModelForSequenceClassification.from_pretrained(finished / "rms")
        assert AutoTokenizer.from_pretrained(finished / "rms").get_vocab() == many.tokenizer.get_vocab()
        assert model.config.id2label == {0: "apple", 1: "pear", 2: "plum"}
        results = read_results(finished)
        assert measure(many, model) == pytest.approx(results["stages"]["rms"]["end"], abs=1e-5)
        simple = results["data"]["baselines"]["commonest labels"]["micro_f1"]
        assert f"commonest labels: micro f1 {simple:.3f}" in (finished / "results.md").read_text("utf-8")
