"""Images: what is read, drawn and measured, and a run of seconds."""

from pathlib import Path

import datasets
import evaluate
import finetune
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from hfrecipes import image, settings
from hfrecipes.corpus import RecipeError
from PIL import Image
from run_files import read_results
from torch.utils.data import DataLoader
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification, pipeline

TINY = "--task image --layers 1 --width 32 --batch_size 32 --baseline_steps 80 --steps 6 --learning_rate 3e-3"
TINY += " --tracker none --eval_every 3 --save_every 50 --heldout_images 60 --curve_images 20 --warmup_steps 2"


def task_of(*flags):
    config = settings.read_run(["--task", "image", *map(str, flags)], "finetune.py")
    return image.ImageClassification(config, Accelerator(), Path("."))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    assert finetune.main([*TINY.split(), "--variants", "rope:axes=2", "control", "--output_dir", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Bright and dark images of two classes, in colour and in several sizes."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for name, level in {"day": 200, "night": 40}.items():
        (root / name).mkdir()
        for i in range(10):
            pixels = np.clip(rng.normal(level, 20, (20 + i, 24, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    (root / "README.txt").write_text("not an image")
    return root


@pytest.mark.slow
class TestRun:
    def test_saved_model_has_the_reported_figures_in_evaluate_and_in_a_pipeline(self, finished, tmp_path):
        end = read_results(finished)["stages"]["rope:axes=2"]["end"]
        source = finished / "rope-axes=2"
        model = AutoModelForImageClassification.from_pretrained(source).eval()
        task = task_of("--heldout_images", 60)
        heldout = task.heldout
        batch = next(iter(DataLoader(heldout, 60, collate_fn=task.collate)))
        with torch.no_grad():
            logits, labels = model(pixel_values=batch["pixel_values"]).logits, batch["labels"]
        assert F.cross_entropy(logits, labels).item() == pytest.approx(end["loss"], abs=1e-5)
        assert (logits.argmax(-1) == labels).float().mean().item() == pytest.approx(end["accuracy"], abs=1e-6)
        flags = ["--task", "image", "--models", str(source), "--heldout_images", "60"]
        assert evaluate.main([*flags, "--output_dir", str(tmp_path)]) == 0
        figures = read_results(tmp_path)["models"][str(source)]["figures"]
        assert figures["loss"] == pytest.approx(end["loss"], abs=1e-5)
        pictures = heldout.cast_column("image", datasets.Image())["image"][:5]
        told = pipeline("image-classification", str(source))(pictures, top_k=1)
        assert [one[0]["label"] for one in told] == [str(int(i)) for i in logits[:5].argmax(-1)]
        assert [one[0]["score"] for one in told] == pytest.approx(logits[:5].softmax(-1).amax(-1).tolist(), abs=1e-5)


class TestData:
    def test_dataset(self, folder, monkeypatch):
        files = sorted(folder.glob("*/*.png"))
        features = datasets.Features({"kind": datasets.ClassLabel(names=["day", "night"]), "picture": datasets.Image()})
        rows = {"picture": [str(f) for f in files], "kind": [f.parent.name for f in files]}
        found = datasets.DatasetDict(train=datasets.Dataset.from_dict(rows, features))
        monkeypatch.setattr(datasets, "load_dataset", lambda name: found)
        task = task_of("--data", "someone/photos")
        assert task.data["images"] == {"train": 16, "heldout": 4}
        assert set(task.heldout.column_names) == {"image", "label"}

    def test_labels_are_in_the_given_models_order(self, folder, tmp_path):
        sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        names = {"id2label": {0: "night", 1: "day"}, "label2id": {"night": 0, "day": 1}}
        model = ViTForImageClassification(ViTConfig(**sizes, intermediate_size=16, **names))
        model.save_pretrained(tmp_path)
        image.scaling_to(8).save_pretrained(tmp_path)
        task = task_of("--data", folder, "--model", tmp_path)
        assert task.labels == ["night", "day"]
        assert torch.equal(task.baseline().classifier.weight, model.classifier.weight), "its head is kept"
        pixels, labels = task.collate([task.heldout[i] for i in range(4)]).values()
        assert pixels.shape == (4, 3, 8, 8), "at its size"
        assert torch.equal(pixels.mean((1, 2, 3)) > 0, labels == 1)
        with torch.no_grad():
            answers = model.eval()(pixels).logits.argmax(1)
            found = task.figures(model, [{"pixel_values": pixels, "labels": answers}], lambda tensors: tensors)
        assert found["accuracy"] == 1
        digits = task_of("--model", tmp_path)
        assert digits.baseline().classifier.out_features == 10, "other classes need another head"


class TestBadInput:
    @pytest.mark.parametrize(
        ("files", "told"),
        [
            (["a/1.png", "a/2.png", "a/3.png"], "--data"),
            (["a/1.png", "a/2.png", "b/1.png"], "least populated class"),
            (["train/a/1.png", "train/b/1.png", "test/c/1.png"], "each that is held out"),
        ],
    )
    def test_folders_that_are_no_classes(self, tmp_path, files, told):
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 4)).save(tmp_path / file)
        with pytest.raises(RecipeError, match=told):
            image.read_images(str(tmp_path))
