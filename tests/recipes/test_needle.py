"""The needle test: what is asked for, the figures of models that are known, and models that are trained."""

from types import SimpleNamespace

import evaluate
import finetune
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hfrecipes import needle
from hfrecipes.corpus import RecipeError
from run_files import read_results, words
from torch import nn

PARTS = [(0, 32), (32, 64), (64, 128)]


class LookUp(nn.Module):
    """Answers with what stood behind the same token before, if that was at most so many tokens ago."""

    def __init__(self, reach):
        super().__init__()
        self.reach = reach

    def forward(self, input_ids, use_cache):
        logits = torch.zeros(*input_ids.shape, 300)
        for row, ids in enumerate(input_ids.tolist()):
            for place, token in enumerate(ids):
                near = range(max(0, place - self.reach), place)
                if before := [i for i in near if ids[i] == token]:
                    logits[row, place, ids[before[-1] + 1]] = 100
        return SimpleNamespace(logits=logits)

    device = torch.device("cpu")


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    config = SimpleNamespace(**vars(needle.NeedleConfig(heldout_blocks=6, curve_blocks=2)))
    return needle.Needle(config, Accelerator(), tmp_path_factory.mktemp("needle"))


@pytest.mark.parametrize("soon", [True, False])
@pytest.mark.parametrize("length", [64, 67])
def test_inputs(task, length, soon):
    batch, distances = task.draw(length, np.random.default_rng(0), soon)
    ids, labels = batch["input_ids"].tolist(), batch["labels"].tolist()
    begin = length % 4
    keys, values = ids[begin::2], ids[begin + 1 :: 2]
    assert len(ids) == length
    assert len({*ids}) == 2 * (length // 4) + begin, "no two tokens are alike"
    assert not {*ids} & {*task.tokenizer.all_special_ids}
    stated = {}
    for place, (key, value) in enumerate(zip(keys, values, strict=True)):
        at = begin + 2 * place
        assert labels[at] == -100
        if key in stated:
            assert labels[at + 1] == value == values[stated[key]]
            assert distances[at + 1] == 2 * (place - stated[key])
        else:
            assert labels[at + 1] == -100
            stated[key] = place
    assert len(stated) == length // 4
    assert labels[:begin] == [-100] * begin
    far = distances[distances > 0].double().mean()
    assert far < length / 4 if soon else far > length / 4


def test_an_item_is_a_function_of_seed_and_number(task):
    one, other = task.item(1, 2), task.item(1, 3)
    assert torch.equal(one["input_ids"], task.item(1, 2)["input_ids"])
    assert not torch.equal(one["input_ids"], other["input_ids"])


def test_figures_of_models_that_are_known(task):
    loader = torch.utils.data.DataLoader(task.heldout, batch_size=4, collate_fn=task.collate)
    found = task.figures(LookUp(64), loader, lambda tensors: tensors)
    assert found == pytest.approx({"loss": 0, "accuracy": 1}, abs=1e-4)
    found = task.figures(LookUp(0), loader, lambda tensors: tensors)
    assert found["accuracy"] == 0
    assert found["loss"] == pytest.approx(np.log(300), abs=1e-4)


def test_accuracy_by_distance(task, monkeypatch):
    monkeypatch.setattr(needle, "TOKENS", 512)
    found = task.at_length(LookUp(64), 128, PARTS)
    assert found["by"] == {"1-32": 1, "33-64": 1, "65-128": 0}
    assert 0.5 < found["accuracy"] < 1
    assert task.at_length(LookUp(64), 1024, PARTS) == {
        "reason": "512 different tokens are needed, and the tokenizer has 256"
    }


FLAGS = "--task needle --block_size 32 --tracker none --calibration 4 --eval_every 20"


def run(out, flags):
    assert finetune.main([*f"{FLAGS} {flags}".split(), "--output_dir", str(out)]) == 0
    models = [str(out / name) for name in read_results(out)["stages"] if (out / name / "config.json").exists()]
    flags = words("--task needle --block_size 32 --lengths 32 64 1024 --output_dir", out / "lengths", "--models")
    assert evaluate.main([*flags, *models]) == 0
    return read_results(out / "lengths")["models"]


@pytest.mark.slow
def test_as_a_recipe(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(needle, "TOKENS", 128)
    few = "--width 32 --batch_size 4 --baseline_steps 3 --steps 2 --heldout_blocks 4 --curve_blocks 2"
    models = run(tmp_path, f"--variants nope control {few}")
    for found in models.values():
        assert list(found["lengths"][1]["by"]) == ["1-32", "33-64"]
        assert found["lengths"][2]["reason"].startswith("512 different tokens")
    assert "Accuracy by distance in the longest input that a model takes:" in capsys.readouterr().out
    assert (tmp_path / "lengths" / "lengths.png").exists()


def test_refused(task, bert, tmp_path):
    config = SimpleNamespace(**vars(task.config) | {"block_size": 516})
    with pytest.raises(RecipeError, match="--block_size 516: 258 different tokens are needed"):
        needle.Needle(config, Accelerator(), tmp_path)
    config = SimpleNamespace(**vars(task.config) | {"model": bert})
    with pytest.raises(RecipeError, match="is a masked language model"):
        needle.Needle(config, Accelerator(), None)


@pytest.mark.sweep
def test_training(tmp_path, monkeypatch):
    """A model learns to look keys up, at any distance that it was trained on, and goes on when it is patched."""
    monkeypatch.setattr(needle, "TOKENS", 4096)
    flags = "--task needle --tracker none --steps 20 --variants rms control --eval_every 500 --output_dir"
    assert finetune.main([*flags.split(), str(tmp_path)]) == 0
    end = read_results(tmp_path)["stages"]["control"]["end"]
    flags = words("--task needle --lengths 32 64 --output_dir", tmp_path / "lengths", "--models")
    assert evaluate.main([*flags, *(str(tmp_path / name) for name in ("control", "rms"))]) == 0
    for found in read_results(tmp_path / "lengths")["models"].values():
        assert found["figures"]["accuracy"] == pytest.approx(end["accuracy"], abs=0.02)
        assert min(found["lengths"][1]["by"].values()) > 0.9
