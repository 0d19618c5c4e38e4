"""Text classification: figures, thresholds, the head's start, the order of items, and whole runs."""

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from harness import classify
from harness.tasks import Drawn
from sklearn.metrics import f1_score
from torch.utils.data import DataLoader


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """The task, of every tenth passage."""
    sizes = {"layers": 1, "width": 32, "vocab_size": 320, "batch_size": 8, "baselines": True}
    with pytest.MonkeyPatch.context() as patch:
        read = classify.read_labelled
        patch.setattr(classify, "read_labelled", lambda: (read()[0], read()[1][::10]))
        config = classify.ClassificationConfig(**sizes)
        return classify.Classification(config, Accelerator(), tmp_path_factory.mktemp("many"))


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
    def test_by_hand(self, many):
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

    def test_loss_is_the_models_own(self, many):
        batch = next(iter(DataLoader(many.heldout, len(many.heldout), collate_fn=many.collate)))
        model = many.baseline().eval()
        sums, counts = many.loss(model, batch)
        with torch.no_grad():
            outputs = model(**batch)
        assert measure(many, model)["loss"] == pytest.approx(outputs.loss.item(), abs=1e-5)
        assert (sums.sum() / counts.sum()).item() == pytest.approx(outputs.loss.item(), abs=1e-6)
        assert torch.allclose(model.classifier.bias.sigmoid(), targets(many.train_texts).mean(0).clamp(1e-4))


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

    def test_simple_methods_are_measured(self, many):
        assert many.data["baselines"]["commonest labels"]["micro_f1"] > 0
        assert many.data["baselines"].keys() == {"commonest labels", "tf-idf and logistic regression"}
