"""Images: what is read, drawn and measured, and a run of seconds."""

from pathlib import Path
from types import SimpleNamespace

import finetune
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from hfrecipes import image, settings
from hfrecipes import training as run
from hfrecipes.corpus import RecipeError
from PIL import Image
from run_files import ROOT, read_results
from torch.utils.data import DataLoader
from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from hfpatch.runtime.errors import first_line

TINY = "--task image --layers 1 --width 32 --batch_size 32 --baseline_steps 80 --steps 6 --learning_rate 3e-3"
TINY += " --tracker none --eval_every 3 --save_every 50 --heldout_images 60 --curve_images 20 --warmup_steps 2"


def tiny(out, *more, variants="rope:axes=2 control"):
    return [*TINY.split(), "--variants", *variants.split(), "--output_dir", str(out), *map(str, more)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    assert finetune.main(tiny(out)) == 0
    return out


def task_of(*flags, out="."):
    config = settings.read_run(["--task", "image", *map(str, flags)], "finetune.py")
    return image.ImageClassification(config, Accelerator(), Path(out))


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


class TestRun:
    def test_it_learns_and_control_goes_on_from_the_baseline(self, finished):
        results = read_results(finished)
        stages = results["stages"]
        assert results["main"] == "accuracy"
        assert results["higher_is_better"] is True
        majority = results["data"]["baselines"]["majority"]["accuracy"]
        assert stages["baseline"]["end"]["accuracy"] > 2 * majority
        assert stages["control"]["start"] == stages["baseline"]["end"]
        assert (
            stages["rope-axes=2" if "rope-axes=2" in stages else "rope:axes=2"]["start"] != stages["control"]["start"]
        )
        assert stages["control"]["images_per_second"] > 0

    @pytest.mark.parametrize("variant", ["rope:axes=2", "control"])
    def test_saved_model_has_the_reported_figures(self, finished, variant):
        end = read_results(finished)["stages"][variant]["end"]
        source = finished / run.folder_name(variant)
        model = AutoModelForImageClassification.from_pretrained(source).eval()
        batch = next(iter(DataLoader(task_of("--heldout_images", 60).heldout, 60)))
        pixels, labels = batch["pixel_values"], batch["labels"]
        with torch.no_grad():
            logits = model(pixel_values=pixels).logits
            assert F.cross_entropy(logits, labels).item() == pytest.approx(end["loss"], abs=1e-5)
            assert (logits.argmax(-1) == labels).float().mean().item() == pytest.approx(end["accuracy"], abs=1e-6)

    def test_saved_folder_has_a_processor(self, finished):
        try:
            processor = AutoImageProcessor.from_pretrained(finished / "control")
        except ImportError as error:  # older transformers need torchvision for it
            pytest.skip(first_line(error))
        digits = image.read_digits()
        expected = task_of().heldout[0]["pixel_values"]
        found = processor(digits.heldout[0][0][None], return_tensors="pt", input_data_format="channels_first")
        assert torch.allclose(found["pixel_values"][0], expected, atol=1e-6)

    @pytest.mark.slow
    def test_goes_on_from_a_saved_model(self, finished, tmp_path):
        argv = tiny(tmp_path, "--model", finished / "control", variants="rms control")
        argv[argv.index("--baseline_steps") + 1] = "0"
        assert finetune.main(argv) == 0
        stages = read_results(tmp_path)["stages"]
        before = read_results(finished)["stages"]["control"]["end"]
        assert stages["baseline"]["end"]["loss"] == pytest.approx(before["loss"], abs=1e-6)
        assert stages["rms"]["start"]["loss"] == pytest.approx(before["loss"], abs=1e-4), "exact on a ViT"


class TestData:
    def test_digits(self):
        digits = image.read_digits()
        assert (len(digits.train), len(digits.heldout)) == (1438, 359)
        assert {sum(name == digit for _, name in digits.heldout) for digit in digits.names} <= {35, 36, 37}
        assert len({name for _, name in digits.heldout}) == 10
        assert digits.train[0][0].shape == (8, 8)
        assert image.read_digits().sha256 == digits.sha256

    def test_items_depend_on_seed_and_place_only(self):
        task = task_of()
        whole, later, other = task.train_set(3, 0, 40), task.train_set(3, 25, 15), task.train_set(4, 0, 40)
        assert all(torch.equal(whole[25 + i]["pixel_values"], later[i]["pixel_values"]) for i in range(15))
        assert sum(torch.equal(whole[i]["pixel_values"], other[i]["pixel_values"]) for i in range(40)) < 5

    def test_each_image_comes_once_an_epoch(self):
        task = task_of("--shift", 0)
        count = task.data["images"]["train"]
        for first in (0, count):
            items = task.train_set(0, first, count)
            seen = sum(items[i]["pixel_values"].double() for i in range(count))
            every = sum(task.train_images[1](*one)["pixel_values"].double() for one in task.train_images[0])
            assert torch.allclose(seen, every)
        firsts = [task.train_set(0, first, 1)[0]["pixel_values"] for first in (0, count)]
        assert not torch.equal(*firsts), "in another order"

    def test_moved(self):
        picture = torch.arange(9.0).view(1, 3, 3)
        assert image.moved(picture, 1, 0)[0].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
        assert image.moved(picture, 0, -1)[0].tolist() == [[1, 2, 2], [4, 5, 5], [7, 8, 8]]
        assert torch.equal(image.moved(picture, 0, 0), picture)

    def test_folder(self, folder):
        task = task_of("--data", folder, "--image_size", 16)
        assert task.data["images"] == {"train": 16, "heldout": 4}
        assert task.labels == {"day": 0, "night": 1}
        items = [task.heldout[i] for i in range(4)]
        assert all(item["pixel_values"].shape == (3, 16, 16) for item in items)
        for item in items:
            assert (item["pixel_values"].mean() > 0) == (item["labels"] == 0), "levels from -1 to 1, the right class"

    def test_folder_with_a_split_of_its_own(self, folder, tmp_path):
        (tmp_path / "train").symlink_to(folder, target_is_directory=True)
        (tmp_path / "test").symlink_to(folder, target_is_directory=True)
        task = task_of("--data", tmp_path)
        assert task.data["images"] == {"train": 20, "heldout": 20}

    def test_dataset(self, folder, monkeypatch):
        import datasets

        files = sorted(folder.glob("*/*.png"))
        features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=["day", "night"])})
        rows = {"picture": [str(f) for f in files], "kind": [f.parent.name for f in files]}
        found = datasets.DatasetDict(train=datasets.Dataset.from_dict(rows, features))
        monkeypatch.setattr(datasets, "load_dataset", lambda name: found)
        task = task_of("--data", "someone/photos", "--image_size", 16)
        assert task.data["images"] == {"train": 16, "heldout": 4}
        assert task.data["source"] == "someone/photos"
        for i in range(4):
            assert (task.heldout[i]["pixel_values"].mean() > 0) == (task.heldout[i]["labels"] == 0)

    def test_labels_are_in_the_given_models_order(self, folder, tmp_path):
        sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = ViTConfig(
            **sizes, intermediate_size=16, id2label={0: "night", 1: "day"}, label2id={"night": 0, "day": 1}
        )
        torch.manual_seed(0)
        model = ViTForImageClassification(config)
        model.save_pretrained(tmp_path / "two")
        task = task_of("--data", folder, "--model", tmp_path / "two")
        assert task.labels == {"night": 0, "day": 1}
        assert torch.equal(task.baseline().classifier.weight, model.classifier.weight), "its head is kept"
        assert task.heldout[0]["pixel_values"].shape == (3, 8, 8), "at its size"
        digits = task_of("--model", tmp_path / "two")
        assert digits.baseline().classifier.out_features == 10, "other classes need another head"

    def test_majority(self):
        train = [(None, name) for name in "aabbb"]
        assert image.majority(train, [(None, name) for name in "abba"]) == 0.5


class TestBadInput:
    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--width", "33"], "--width must be a multiple of 16"),
            (["--patch_size", "3"], "--image_size 8 is no multiple of --patch_size 3"),
            (["--data", "./nowhere"], "--data ./nowhere is no folder of images"),
            (["--start", "self"], "draws no sequences"),
            (["--variants", "rope:axes=3"], "UnsupportedError"),
        ],
    )
    def test_refused_before_training(self, tmp_path, capsys, monkeypatch, flags, message):
        monkeypatch.setattr(run.Run, "train", lambda *a, **k: pytest.fail("training began"))
        assert finetune.main(tiny(tmp_path, *flags)) == 2
        error = capsys.readouterr().err.strip()
        assert message in error
        assert "\n" not in error

    def test_folders_without_images(self, tmp_path):
        with pytest.raises(RecipeError, match="a folder of images for each of two classes or more; found 0"):
            task_of("--data", tmp_path)

    def test_class_without_training_images(self, folder, tmp_path):
        (tmp_path / "train").symlink_to(folder, target_is_directory=True)
        (tmp_path / "test" / "dusk").mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "test" / "dusk" / "a.png")
        with pytest.raises(RecipeError, match="'dusk', a class without training images"):
            task_of("--data", tmp_path)

    def test_broken_image(self, folder, tmp_path):
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            for i in range(3):
                (tmp_path / name / f"{i}.png").write_bytes(b"no image")
        task = task_of("--data", tmp_path)
        with pytest.raises(RecipeError, match=r"can't read the image .*\d\.png"):
            task.heldout[0]


def test_yaml_spells_out_the_task(tmp_path):
    config = settings.read_run([str(ROOT / "recipes" / "configs" / "vision.yaml")], "finetune.py")
    defaults = image.ImageClassificationConfig()
    assert SimpleNamespace(**vars(config)).task == "image"
    assert {k: getattr(config, k) for k in vars(defaults)} == vars(defaults)
