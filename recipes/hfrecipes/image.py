"""Image classification: scikit-learn's bundled digits, folders of images by class, or a `datasets` id."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers
from accelerate import Accelerator
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedModel

from .corpus import RecipeError, refusing
from .settings import COUNT, multiple_of, option
from .tasks import Batch, LabelTask, load, place_of

HELD_OUT = 0.2  # share of images where the data has no split of its own


@dataclass
class ImageClassificationConfig:
    """Flags of `--task image`."""

    data: str | None = option(
        None,
        "a folder with a folder of images for each class (below train/ and test/ where they are "
        "split), or a datasets id; none: the 1,797 handwritten digits of 8 x 8 that scikit-learn brings",
    )
    model: str | None = option(None, "a folder or Hub id of an image model; none: a small ViT from scratch")
    layers: int = option(4, "of the ViT made from scratch", COUNT)
    width: int = option(64, "of the ViT made from scratch; a head takes 16 of it", multiple_of(16))
    heldout_images: int = option(2000, "at most so many behind the table", COUNT)
    curve_images: int = option(500, "at most so many behind the curves", COUNT)


class ImageClassification(LabelTask):
    """One label for each image."""

    name = "image"
    Config = ImageClassificationConfig
    auto = AutoModelForImageClassification
    unit = "images"

    def __init__(self, config: Any, accelerator: Accelerator, out: Path) -> None:
        self.config = c = config
        self.side, self.patch = (32, 4) if c.data else (8, 2)  # of images and patches, from scratch
        self.tokenizer = load(AutoImageProcessor, c.model) if c.model else scaling_to(self.side)
        train, heldout = read_images(c.data)
        digest = hashlib.sha256(f"{train._fingerprint} {heldout._fingerprint}".encode()).hexdigest()
        names = train.features["label"].names
        self.choose_labels(names)
        self.places = [self.labels.index(name) for name in names]  # of the data's labels in the model's output
        heldout, curve = (heldout.select(range(min(n, len(heldout)))) for n in (c.heldout_images, c.curve_images))
        self.train, self.heldout, self.curve = train, heldout, curve
        commonest = np.bincount(train["label"][:]).argmax()
        self.data = {
            "source": c.data or "scikit-learn's handwritten digits",
            "sha256": digest,
            "images": {"train": len(train), "heldout": len(heldout)},
            "classes": len(names),
            "baselines": {"majority": {"accuracy": float(np.mean(np.array(heldout["label"][:]) == commonest))}},
        }

    def small_model(self) -> PreTrainedModel:
        width = self.config.width
        vit = transformers.ViTConfig(
            image_size=self.side,
            patch_size=self.patch,
            hidden_size=width,
            num_hidden_layers=self.config.layers,
            num_attention_heads=width // 16,
            intermediate_size=4 * width,
            initializer_range=width**-0.5,  # 0.02 suits a width of 768
            **self.head,
        )
        return transformers.ViTForImageClassification(vit)

    def item(self, seed: int, number: int) -> dict[str, Any]:
        """Each image once an epoch."""
        return self.train[place_of(seed, number, len(self.train))]

    def collate(self, items: list[dict[str, Any]]) -> Batch:
        """Images as the model takes them, and their classes' places in its output."""
        with refusing("an image of --data can't be read"):
            images = [datasets.Image().decode_example(item["image"]).convert("RGB") for item in items]
        labels = torch.tensor([self.places[item["label"]] for item in items])
        return {"pixel_values": self.tokenizer(images, return_tensors="pt")["pixel_values"], "labels": labels}

    def size(self, batch: Batch) -> int:
        return len(batch["labels"])


def scaling_to(size: int) -> Any:
    """An image processor that scales images to that size and their levels to -1 ... 1."""
    return transformers.ViTImageProcessorPil(size={"height": size, "width": size})


def read_images(source: str | None) -> tuple[datasets.Dataset, datasets.Dataset]:
    """(train, held-out), with the columns image (not decoded) and label; the split is the same for every seed."""
    datasets.disable_progress_bars()
    with refusing(f"--data {source}"):  # no such id, no network, a folder without images, a class of one image
        if source is None:
            parts = datasets.DatasetDict(train=read_digits())
        elif Path(source).is_dir():
            parts = datasets.load_dataset("imagefolder", data_dir=source)
        else:
            parts = datasets.load_dataset(source)
        train, heldout = split(parts)
    if len(set(train["label"][:])) < 2 or not set(heldout["label"][:]) <= set(train["label"][:]):
        raise RecipeError(f"--data {source} needs training images of two classes or more, and of each that is held out")
    return tuple(part.cast_column("image", datasets.Image(decode=False)) for part in (train, heldout))


def read_digits() -> datasets.Dataset:
    """The test set of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998), 17 levels of grey."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = [Image.fromarray(np.uint8(np.minimum(image * 16, 255))) for image in found.images]
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=[str(i) for i in range(10)])}
    return datasets.Dataset.from_dict({"image": images, "label": found.target}, datasets.Features(features))


def split(parts: datasets.DatasetDict) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The data's own split, or a fifth of each class held out."""
    features = parts["train"].features if "train" in parts else {}
    names = {type(kind): name for name, kind in features.items()}
    if not {datasets.Image, datasets.ClassLabel} <= names.keys():
        raise ValueError("there must be a folder of images for each class, or a column of images and one of labels")
    columns = {names[datasets.Image]: "image", names[datasets.ClassLabel]: "label"}
    parts = parts.select_columns(list(columns)).rename_columns(columns)
    train, heldout = parts["train"], parts.get("test", parts.get("validation"))
    if heldout is not None:
        return train, heldout.shuffle(seed=0)
    both = train.train_test_split(HELD_OUT, stratify_by_column="label", seed=0)
    return both["train"], both["test"]
