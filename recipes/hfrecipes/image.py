"""Image classification: scikit-learn's bundled digits, folders of images by class, or a `datasets` id."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import Dataset
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedModel, ViTConfig
from transformers import ViTForImageClassification as ViT

from hfpatch.runtime.errors import first_line

from .corpus import RecipeError
from .tasks import Batch, Figures, Task, load, load_whole

HELD_OUT = 0.2  # share of images where the data has no split of its own
HELD_OUT_NAMES = ("test", "val", "validation", "valid", "dev")
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}


@dataclass
class ImageClassificationConfig:
    """Flags of `--task image`."""

    data: str | None = field(
        default=None,
        metadata={"help": "a folder with a folder of images for each class (below train/ and test/ where they are "
                  "split), or a datasets id; none: the 1,797 handwritten digits of 8 x 8 that scikit-learn brings"},
    )  # fmt: skip
    model: str | None = field(
        default=None, metadata={"help": "a folder or Hub id of an image model; none: a small ViT from scratch"}
    )
    image_size: int | None = field(
        default=None, metadata={"help": "side that images are scaled to; none: the model's, from scratch 8 or 32"}
    )
    patch_size: int | None = field(
        default=None,
        metadata={"help": "side of a patch of the ViT made from scratch; none: 2, of large images an eighth"},
    )
    layers: int = field(default=4, metadata={"help": "of the ViT made from scratch"})
    width: int = field(default=64, metadata={"help": "of the ViT made from scratch; a head takes 16 of it"})
    shift: int = field(default=1, metadata={"help": "training images are moved by up to so many pixels, either way"})
    heldout_images: int = field(default=2000, metadata={"help": "at most so many behind the table"})
    curve_images: int = field(default=500, metadata={"help": "at most so many behind the curves"})


class ImageClassification(Task):
    """One label for each image."""

    name = "image"
    Config = ImageClassificationConfig
    at_least = dict.fromkeys(("image_size", "patch_size", "layers", "heldout_images", "curve_images"), 1) | {"shift": 0}
    main = "accuracy"
    higher_is_better = True
    unit = "images"

    @classmethod
    def check(cls, config: Any) -> None:
        if config.model is None and (config.width < 16 or config.width % 16):
            raise RecipeError(f"--width must be a multiple of 16, not {config.width}")
        size = config.image_size or (32 if config.data else 8)
        if config.model is None and size % (config.patch_size or default_patch(size)):
            patch = config.patch_size or default_patch(size)
            raise RecipeError(f"--image_size {size} is no multiple of --patch_size {patch}")

    def __init__(self, config: Any, accelerator: Accelerator, out: Path) -> None:
        self.config = c = config
        images = read_digits() if c.data is None else read_images(c.data)
        given = load(AutoConfig, c.model) if c.model else None
        self.channels = getattr(given, "num_channels", 3) if given else 1 if c.data is None else 3
        self.processing = preprocessing(c.model, given, c.image_size or (32 if c.data else 8), self.channels)
        self.labels, self.keep_head = label_ids(images.names, given)
        views = View(self.processing, self.labels)
        self.train_images = images.train, views
        self.heldout = Images(images.heldout[: c.heldout_images], views)
        self.curve = Images(images.heldout[: c.curve_images], views)
        self.data = {
            "source": images.source,
            "sha256": images.sha256,
            "images": {"train": len(images.train), "heldout": len(self.heldout)},
            "classes": len(images.names),
            "size": self.processing["size"]["height"],
            "baselines": {"majority": {"accuracy": majority(images.train, images.heldout[: c.heldout_images])}},
        }

    def baseline(self) -> PreTrainedModel:
        c = self.config
        if c.model:
            names = {i: name for name, i in self.labels.items()}
            options = {"id2label": names, "label2id": self.labels, "ignore_mismatched_sizes": True}
            options = {"output_loading_info": True, **(options if not self.keep_head else {})}
            model, found = load(AutoModelForImageClassification, c.model, dtype=torch.float32, **options)
            self.keep_head = self.keep_head and not found["missing_keys"]
            return model
        size = self.processing["size"]["height"]
        return ViT(
            ViTConfig(
                image_size=size,
                patch_size=c.patch_size or default_patch(size),
                num_channels=self.channels,
                hidden_size=c.width,
                num_hidden_layers=c.layers,
                num_attention_heads=c.width // 16,
                intermediate_size=4 * c.width,
                initializer_range=c.width**-0.5,  # 0.02 suits a width of 768
                id2label={i: name for name, i in self.labels.items()},
                label2id=self.labels,
            )
        )

    def load(self, source: str) -> PreTrainedModel:
        if self.config.model and source == self.config.model:
            return self.baseline()
        return load_whole(AutoModelForImageClassification, source)

    def save_extras(self, folder: Path) -> None:
        (folder / "preprocessor_config.json").write_text(json.dumps(self.processing, indent=1), "utf-8")

    def train_set(self, seed: int, first: int, count: int) -> Dataset:
        images, views = self.train_images
        return Drawn(images, views, seed, first, count, self.config.shift)

    def inputs(self, batch: Batch) -> Batch:
        return {"pixel_values": batch["pixel_values"]}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(pixel_values=batch["pixel_values"]).logits.float()
        return F.cross_entropy(logits, batch["labels"], reduction="none"), torch.ones_like(batch["labels"])

    def figures(self, model: nn.Module, loader: Any, gather: Callable[[Any], Any]) -> Figures:
        """Cross-entropy in nats, and accuracy."""
        seen: list[torch.Tensor] = []
        for batch in loader:
            logits, labels = model(pixel_values=batch["pixel_values"]).logits.float(), batch["labels"]
            terms = F.cross_entropy(logits, labels, reduction="none")
            seen.append(gather(torch.stack([terms, (logits.argmax(-1) == labels).float()], 1)))
        return dict(zip(("loss", "accuracy"), torch.cat(seen).double().mean(0).tolist(), strict=True))

    def size(self, batch: Batch) -> int:
        return len(batch["labels"])


def default_patch(size: int) -> int:
    return 2 if size < 32 else size // 8


# -- images and labels

Image = tuple[Any, str]  # a path, an array (H, W) or a picture, and the name of its class


@dataclass(frozen=True)
class ImageSet:
    """Images in a fixed order, those held out spread over the classes as they come."""

    source: str
    train: Sequence[Image]
    heldout: Sequence[Image]
    names: list[str]
    sha256: str


def read_digits() -> ImageSet:
    """The test set of "Optical Recognition of Handwritten Digits" (Alpaydin and Kaynak 1998), 17 levels of grey."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = [
        (np.uint8(np.minimum(image * 16, 255)), str(label))
        for image, label in zip(found.images, found.target, strict=True)
    ]
    train, heldout = split(images)
    digest = hashlib.sha256(found.images.tobytes() + found.target.tobytes()).hexdigest()
    return ImageSet("scikit-learn's handwritten digits", train, heldout, [str(i) for i in range(10)], digest)


def read_images(source: str) -> ImageSet:
    """A folder of class folders, or else a `datasets` id."""
    folder = Path(source)
    if folder.is_dir():
        return read_folder(folder)
    if folder.exists() or source[0] in "./~\\" or source.count("/") > 1:
        raise RecipeError(f"--data {source} is no folder of images, with a folder for each class")
    return read_dataset(source)


def read_folder(folder: Path) -> ImageSet:
    """Its images by class; the digest is of their paths and sizes in bytes.

    Raises:
        RecipeError: there are no images in class folders, or a single class.
    """
    parts = {part.name.lower(): part for part in folder.iterdir() if part.is_dir()}
    held = next((parts[name] for name in HELD_OUT_NAMES if name in parts), None)
    if "train" in parts and held is not None:
        train, heldout = shuffled(in_class_folders(parts["train"])), shuffled(in_class_folders(held))
    else:
        train, heldout = split(in_class_folders(folder))
    names = sorted({name for _, name in train})
    if unknown := sorted({name for _, name in heldout} - set(names)):
        raise RecipeError(f"{held or folder} holds images of {unknown[0]!r}, a class without training images")
    if len(names) < 2 or not heldout:
        raise RecipeError(f"{folder} must hold a folder of images for each of two classes or more; found {len(names)}")
    digest = hashlib.sha256()
    for path, _ in sorted([*train, *heldout]):
        digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
    return ImageSet(folder.name, train, heldout, names, digest.hexdigest())


def in_class_folders(folder: Path) -> list[Image]:
    files = sorted(path for path in folder.glob("*/**/*") if path.suffix.lower() in SUFFIXES and path.is_file())
    return [(path, path.relative_to(folder).parts[0]) for path in files]


def read_dataset(name: str) -> ImageSet:
    """A dataset with one column of images and one of labels.

    Raises:
        RecipeError: it can't be had, or has no such columns.
    """
    import datasets

    try:
        found = datasets.load_dataset(name)
    except Exception as error:  # of many kinds: no such id, no network, a script
        reason = first_line(error)
        raise RecipeError(f"--data {name} is no folder, and datasets can't load it: {reason}") from None
    features = found["train"].features if "train" in found else {}
    image = next((key for key, kind in features.items() if isinstance(kind, datasets.Image)), None)
    label = next((key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)), None)
    if image is None or label is None:
        raise RecipeError(f"--data {name} must have a train split with a column of images and one of class labels")
    held = next((part for part in HELD_OUT_NAMES if part in found), None)
    names = features[label].names
    train = Column(found["train"], image, label, names)
    if held:
        heldout: Sequence[Image] = Column(found[held], image, label, names)
    else:
        train, heldout = split(train)
    digest = hashlib.sha256("".join(part._fingerprint for part in found.values()).encode()).hexdigest()
    return ImageSet(name, train, heldout, names, digest)


class Column(Sequence[Image]):
    """The images of a split of a dataset, decoded one by one, in an order of their own."""

    def __init__(self, part: Any, image: str, label: str, names: list[str], order: Sequence[int] | None = None) -> None:
        self.part, self.image, self.label, self.names = part, image, label, names
        self.order = order if order is not None else np.random.default_rng(0).permutation(len(part))

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.at(index)
        row = self.part[int(self.order[index])]
        return row[self.image], self.names[row[self.label]]

    def at(self, places: Any) -> "Column":
        """The images at some places: a slice, or their numbers."""
        return Column(self.part, self.image, self.label, self.names, np.asarray(self.order)[places])

    def classes(self) -> list[str]:
        """Of all images, which aren't decoded for it."""
        labels = self.part[self.label]
        return [self.names[labels[int(i)]] for i in self.order]


def split(images: Any) -> tuple[Any, Any]:
    """(train, held-out), the same for every seed: about a fifth of each class is held out, never all of it."""
    images = images if isinstance(images, Column) else shuffled(images)
    classes = classes_of(images)
    left = {name: min(max(1, round(HELD_OUT * classes.count(name))), classes.count(name) - 1) for name in set(classes)}
    held = np.zeros(len(classes), bool)
    for i, name in enumerate(classes):
        held[i] = left[name] > 0
        left[name] -= 1
    parts = [np.flatnonzero(~held), np.flatnonzero(held)]
    train, heldout = (images.at(p) if isinstance(images, Column) else [images[i] for i in p] for p in parts)
    return train, heldout


def shuffled(images: list[Image]) -> list[Image]:
    return [images[i] for i in np.random.default_rng(0).permutation(len(images))]


def classes_of(images: Sequence[Image]) -> list[str]:
    return images.classes() if isinstance(images, Column) else [name for _, name in images]


def majority(train: Sequence[Image], heldout: Sequence[Image]) -> float:
    """Accuracy of always answering the commonest class of the training images."""
    names, counts = np.unique(classes_of(train), return_counts=True)
    return float(np.mean(np.array(classes_of(heldout)) == names[counts.argmax()]))


def label_ids(names: list[str], given: Any) -> tuple[dict[str, int], bool]:
    """Class -> its place in the output, and whether a given model's head already is for these classes."""
    known = getattr(given, "label2id", None) or {}
    if set(known) == set(names):
        return {name: int(i) for name, i in known.items()}, True
    return {name: i for i, name in enumerate(names)}, False


# -- pixels


def preprocessing(model: str | None, given: Any, size: int, channels: int) -> dict[str, Any]:
    """An image processor's settings: those that came with the model, else levels from -1 to 1 at the model's size."""
    from transformers.image_processing_base import ImageProcessingMixin

    settings: dict[str, Any] = {}
    if model:
        try:
            settings, _ = ImageProcessingMixin.get_image_processor_dict(model)
        except OSError:  # a model without one
            settings = {}
        own = getattr(given, "image_size", None) or settings.get("size") or 224
        own = own.get("height") or own.get("shortest_edge") if isinstance(own, dict) else own
        size = own[0] if isinstance(own, list | tuple) else own
    half = [0.5] * channels
    return {
        "image_processor_type": settings.get("image_processor_type", "ViTImageProcessor"),
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "rescale_factor": 1 / 255,
        "resample": 2,
        "size": {"height": size, "width": size},
        "image_mean": settings.get("image_mean") or half,
        "image_std": settings.get("image_std") or half,
    }


class View:
    """An image and its class as the model sees them."""

    def __init__(self, processing: dict[str, Any], labels: dict[str, int]) -> None:
        self.labels, self.size = labels, processing["size"]["height"]
        self.mean = torch.tensor(processing["image_mean"])[:, None, None]
        self.std = torch.tensor(processing["image_std"])[:, None, None]

    def __call__(self, image: Any, name: str) -> dict[str, torch.Tensor]:
        """Pixels (channels, size, size) and the label."""
        levels = torch.from_numpy(self.pixels(image)).float() / 255
        return {"pixel_values": (levels - self.mean) / self.std, "labels": torch.tensor(self.labels[name])}

    def pixels(self, image: Any) -> np.ndarray:
        """Levels 0 ... 255, (channels, size, size)."""
        if isinstance(image, np.ndarray) and image.shape == (self.size, self.size) and len(self.mean) == 1:
            return image[None].copy()
        from PIL import Image as Pillow

        try:
            picture = Pillow.fromarray(image) if isinstance(image, np.ndarray) else image
            picture = Pillow.open(image) if isinstance(image, Path) else picture
            picture = picture.convert("L" if len(self.mean) == 1 else "RGB").resize((self.size, self.size), 2)
        except OSError as error:
            raise RecipeError(f"can't read the image {image}: {error}") from None
        levels = np.array(picture)
        return levels[None] if levels.ndim == 2 else levels.transpose(2, 0, 1).copy()


class Images(Dataset):
    """Images in their order, untouched."""

    def __init__(self, images: Sequence[Image], view: View) -> None:
        self.images, self.view = images, view

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.view(*self.images[index])


class Drawn(Dataset):
    """Training images: each once an epoch, moved a little. Item i is a function of (seed, first + i)."""

    def __init__(self, images: Sequence[Image], view: View, seed: int, first: int, count: int, shift: int) -> None:
        self.images, self.view, self.seed, self.first, self.count, self.shift = images, view, seed, first, count, shift
        self.order: tuple[int, np.ndarray] = (-1, np.empty(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        epoch, place = divmod(self.first + index, len(self.images))
        if self.order[0] != epoch:
            self.order = (epoch, np.random.default_rng((self.seed, 0, epoch)).permutation(len(self.images)))
        item = self.view(*self.images[int(self.order[1][place])])
        down, right = np.random.default_rng((self.seed, 1, self.first + index)).integers(-self.shift, self.shift + 1, 2)
        return item | {"pixel_values": moved(item["pixel_values"], int(down), int(right))}


def moved(image: torch.Tensor, down: int, right: int) -> torch.Tensor:
    """The image moved by so many pixels; what comes in is its own edge."""
    rows = torch.arange(image.shape[1]).sub(down).clamp(0, image.shape[1] - 1)
    columns = torch.arange(image.shape[2]).sub(right).clamp(0, image.shape[2] - 1)
    return image[:, rows][:, :, columns]
