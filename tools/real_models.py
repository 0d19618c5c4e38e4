"""The register: patches of real checkpoints, measured as their users would measure them.

    python tools/real_models.py FOLDER --text WIKITEXT2 --models smollm2 whisper mpnet --patches rms dyt none rope

FOLDER has the models that real_weights.py makes; those that are missing are made. A patch is what `patch_model` takes
as norm, pos or mlp, several joined by +. Each row is measured in a process of its own, by one thread: the patch without
data (*copied*), and, where that isn't exact, with a repair on text (*repaired*), each beside the original on other text
(real_judges.py says how). A refusal is a row as well, with its reason.

Rows are only added, to tests/sweeps/real_models.jsonl, one JSON object a line; docs/support/real-models.md is their
table. A row of the same weights, patch, settings and version of hfpatch is there already and isn't measured again, so
that the same command goes on where it was stopped. `--version` names the hfpatch that runs, before a release.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import json
import math
import os
import platform
import resource
import shlex
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from real_judges import JUDGES
from real_weights import SOURCES, make

import hfpatch
from hfpatch.errors import PatchError
from hfpatch.schemes.mlp_schemes import MLP
from hfpatch.schemes.norm_schemes import Norm
from hfpatch.schemes.position_schemes import Position
from hfpatch.schemes.request import budget_in

ROOT = Path(__file__).resolve().parents[1]
OUT, PAGE = ROOT / "tests/sweeps/real_models.jsonl", ROOT / "docs/support/real-models.md"
KINDS: dict[str, Any] = {"norm": Norm, "pos": Position, "mlp": MLP}
Row = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What one row measures.

    Attributes:
        folder, text: of the models, and of WikiText-2 (None: from the Hub).
        model, patch: their names.
        only, keep, init: as `patch_model` takes them.
        sequences, tokens: of the calibration.
        judged: how many windows, clips or passages judge; None: the judge's own number.
        bos: whether each window of text begins with BOS, whatever the tokenizer does.
        version: of hfpatch.
    """

    folder: Path
    text: Path | None
    model: str
    patch: str
    only: tuple[str, ...]
    keep: tuple[str, ...]
    init: str
    sequences: int
    tokens: int
    judged: int | None
    version: str
    bos: bool = False

    def judge(self) -> Any:
        more = {"bos": True} if self.bos else {}
        return JUDGES[SOURCES[self.model].kind](self.folder / self.model, self.text, self.judged, **more)

    @property
    def options(self) -> dict[str, Any]:
        globs = {"only": list(self.only), "keep": list(self.keep)}
        return {**asked(self.patch), "init": self.init, **{name: value for name, value in globs.items() if value}}

    @property
    def command(self) -> str:
        """The command that measures this row alone."""
        words = ["python", "tools/real_models.py", "FOLDER", "--models", self.model, "--patches", self.patch]
        words += ["--sequences", str(self.sequences), "--tokens", str(self.tokens)]
        words += ["--text", "WIKITEXT2"] if self.text else []
        words += ["--only", *self.only] if self.only else []
        words += ["--keep", *self.keep] if self.keep else []
        words += ["--init", self.init] if self.init != "auto" else []
        words += ["--judged", str(self.judged)] if self.judged else []
        words += ["--bos"] if self.bos else []
        return shlex.join(words)

    def key(self) -> Row:
        """What tells its row from others."""
        settings: Row = {"init": self.init, "keep": list(self.keep)}
        settings |= ({"only": list(self.only)} if self.only else {}) | ({"bos": True} if self.bos else {})
        weights = digest(self.folder / self.model / "model.safetensors")
        calibration = f"{self.sequences} x {self.tokens}"
        told = {"calibration": calibration, "judged": self.judge().judged, "hfpatch": self.version}
        return {"model": self.model, "sha256": weights, "patch": self.patch, "settings": settings, **told}


def asked(patch: str) -> dict[str, str]:
    """What `patch_model` is asked for: "dyt+rope:theta=500000" -> {"norm": "dyt", "pos": "rope:theta=500000"}.

    Raises:
        SystemExit: nothing of that name is registered.
    """
    found = {}
    for one in patch.split("+"):
        name = one.partition(":")[0]
        kind = next((kind for kind, schemes in KINDS.items() if name in schemes.registry), None)
        if kind is None:
            known = (", ".join(sorted(schemes.registry)) for schemes in KINDS.values())
            raise SystemExit(f"{patch}: no norm, position or MLP is called {name!r}; there are {'; '.join(known)}")
        found[kind] = one
    return found


@functools.lru_cache
def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def source_digest() -> str:
    """The first digits of a SHA-256 of hfpatch's own files: one version may name several states of a clone."""
    root = Path(hfpatch.__file__).parent
    files = sorted(path for path in root.rglob("*.py"))
    found = hashlib.sha256(b"".join(str(path.relative_to(root)).encode() + path.read_bytes() for path in files))
    return found.hexdigest()[:12]


# --- a row ------------------------------------------------------------------------------------------------------------


class Cost:
    """CPU seconds and peak memory of what runs inside `with`; the peak of the whole process where none can be reset."""

    def __enter__(self) -> Cost:
        if Path("/proc/self/clear_refs").exists():
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
        self._start = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.process_time() - self._start
        status = Path("/proc/self/status")
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if status.exists():
            kilobytes = int(status.read_text().partition("VmHWM:")[2].split()[0])
        self.gigabytes = round(kilobytes * 1024 / 1e9, 2)


def measure(request: Request) -> Row:
    """The measured part of a row."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    judge, exact = request.judge(), False
    row: Row = {}
    model = judge.open()
    try:
        norms = norm_modules(model, request)
        with Cost() as cost:
            hfpatch.patch_model(model, **request.options)
    except PatchError as error:  # of some norms only without data
        row["not copied"] = f"{type(error).__name__}: {error}"
    else:
        row["copied"] = rounded(judge.figures(judge.open(), model))
        exact = all(outcome.verdict == "exact" for outcome in hfpatch.outcomes(model).found.values())
    if not exact:
        inputs = judge.calibration(request.sequences, request.tokens)
        model = judge.open()
        try:
            with Cost() as cost:
                hfpatch.patch_model(model, **request.options, calibration=inputs)
        except PatchError as error:
            return {**row, "refused": f"{type(error).__name__}: {error}", "cpu_seconds": round(cost.seconds, 1)}
        original = judge.open()
        with Cost() as forward, torch.no_grad():
            for batch in inputs:
                original(**batch)
        row["passes"] = round(cost.seconds / forward.seconds, 1)
        row["repaired"] = rounded(judge.figures(original, model))
        if (report := hfpatch.repair_report(model)) is not None:
            row["reported"] = rounded({"before": report.before, "after": report.after, "worst": report.worst_after})
    if norms:
        now = dict(model.named_modules())
        replaced = sum(name not in now or repr(now[name]) != was for name, was in norms.items())
        row["norms"] = {"replaced": replaced, "kept": len(norms) - replaced}
    row["said"] = dict(hfpatch.outcomes(model))
    return {**row, "cpu_seconds": round(cost.seconds, 1), "peak_gb": cost.gigabytes}


def norm_modules(model: Any, request: Request) -> dict[str, str]:
    """The norms that a request names, changed or kept, as they are printed."""
    keep, _ = budget_in(request.keep)  # which is settled by measuring
    kinds = {row.module: row.kind for row in hfpatch.plan_patch(model, **request.options | {"keep": keep}).rows}
    return {name: repr(module) for name, module in model.named_modules() if kinds.get(name) == "norm"}


def rounded(figures: dict[str, float | None]) -> dict[str, float | None]:
    """Five digits of each, counts whole; None for what isn't finite, which JSON can't say."""

    def short(value: float | None) -> float | None:
        if value is None or isinstance(value, int):
            return value
        return float(f"{value:.5g}") if math.isfinite(value) else None

    return {name: short(value) for name, value in figures.items()}


def hardware() -> str:
    """The processor, in words."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    names = (line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.machine())}, one thread of {os.cpu_count()} cores"


# --- the register -----------------------------------------------------------------------------------------------------


def read(out: Path) -> list[Row]:
    """The rows so far."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def add(request: Request, out: Path) -> Row | None:
    """Measure a row in a new process and append it, unless it is there already."""
    key = request.key()
    if any(key.items() <= row.items() for row in read(out)):
        return None
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "source": source_digest()}
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        row = {**key, **pool.submit(measure, request).result(), "packages": list(SOURCES[request.model].packages)}
    row |= {"command": request.command, **versions, "python": platform.python_version(), "hardware": hardware()}
    row["date"] = str(datetime.date.today())
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, allow_nan=False) + "\n")
    page = PAGE if out == OUT else out.with_suffix(".md")
    page.write_text(to_markdown(read(out)))
    return row


# heading -> whose figure, and which one, by kind of model
COLUMNS: dict[str, dict[str, tuple[str, str]]] = {
    "language": {
        "perplexity: original": ("original", "perplexity of the original"),
        "copied": ("copied", "perplexity"),
        "repaired": ("repaired", "perplexity"),
        "KL: copied": ("copied", "KL mean"),
        "repaired, mean": ("repaired", "KL mean"),
        "median": ("repaired", "KL median"),
        "99 %": ("repaired", "KL 99 %"),
        "worst": ("repaired", "KL worst"),
        "tokens not finite": ("repaired", "not finite"),
    },
    "sentence": {
        "cosine: copied": ("copied", "cosine mean"),
        "lowest": ("copied", "cosine lowest"),
        "cosine: repaired": ("repaired", "cosine mean"),
        "its lowest": ("repaired", "cosine lowest"),
        "found: original": ("original", "found by the original"),
        "copied": ("copied", "found"),
        "repaired": ("repaired", "found"),
    },
}
_WORDS = {
    "word error: original": ("original", "word error of the original"),
    "copied": ("copied", "word error"),
    "repaired": ("repaired", "word error"),
}
COLUMNS["speech"] = _WORDS | {head: one for head, one in COLUMNS["language"].items() if "perplexity" not in one[1]}
LEGEND = """Look up here what a patch costs a public checkpoint, on one thread of the processor named below. Written by
`python tools/real_models.py FOLDER --text WIKITEXT2 --models NAME ... --patches PATCH ...`, which makes the models in
FOLDER from packages. For each row `real_models.jsonl` has the command, the weights, the versions and every figure.

* *copied* is the model after `patch_model` without data. *repaired* is the model after `patch_model` with
  `calibration=`: so many sequences and tokens of WikiText-2's validation text. An exact row needs no repair.
* All figures are on test text that no calibration used. *KL* is the divergence of the next token, original to patched,
  in nats. *cosine* is between embeddings, patched and original. *found* is the share of passages whose first half is
  nearest to its own second half. Sequences are as long as *judged on* says, even if a patch makes room for more.
* *said* is what hfpatch itself measured and recorded, on the sequences that it holds out of the calibration.
* *CPU s*, *passes* (multiples of the original's forward over the calibration) and *GB* (largest memory of the process)
  are of the repair. If the patch is exact, they are of the patch."""


def to_markdown(rows: list[Row]) -> str:
    """The register as a page."""
    lines = ["# Real models", "", LEGEND]
    for name in dict.fromkeys([*SOURCES, *(row["model"] for row in rows)]):
        own, source = [row for row in rows if row["model"] == name], SOURCES.get(name)
        about = f"{source.about}. {source.licence}; from {source.origin}." if source else "By `hfpatch verify-model`."
        lines += ["", f"## {name}", "", about] if own else []
        if measured := [row for row in own if "refused" not in row]:
            columns = COLUMNS[source.kind] if source else COLUMNS["language"] | COLUMNS["sentence"]
            heads = [*START, *columns, *END]
            aligned = ["---"] * len(START) + ["---:"] * (len(columns) + 3) + ["---"] * 3
            table = [heads, aligned, *(_cells(row, columns) for row in measured)]
            lines += ["", *(f"| {' | '.join(cells)} |" for cells in table)]
        refused = [f"* `{_asked(row)}`, hfpatch {row['hfpatch']}: {row['refused']}" for row in own if "refused" in row]
        lines += ["", "Refused:", "", *refused] if refused else []
    machines = (f"{row['hardware']}; torch {row['torch']}, transformers {row['transformers']}." for row in rows)
    return "\n".join([*lines, "", *dict.fromkeys(machines), ""])


START = ("patch", "calibration", "judged on", "norms replaced")
END = ("CPU s", "passes", "GB", "said", "hfpatch", "date")


def _cells(row: Row, columns: dict[str, tuple[str, str]]) -> list[str]:
    """A line under START, the columns and END."""
    norms, is_repaired = row.get("norms"), "repaired" in row
    counted = f"{norms['replaced']} of {norms['replaced'] + norms['kept']}" if norms else "-"
    start = [f"`{_asked(row)}`", row["calibration"] if is_repaired else "none", row["judged"], counted]
    figures = {"copied": row.get("copied", {}), "repaired": row.get("repaired", {})}
    figures["original"] = figures["repaired"] or figures["copied"]
    measured = [shown(figures[whose][name]) if name in figures[whose] else "-" for whose, name in columns.values()]
    more = (f"{row[name]:.1f}" if name in row else "-" for name in ("passes", "peak_gb"))
    said = "; ".join(row["said"].values()).replace("|", "\\|")
    return [*start, *measured, f"{row['cpu_seconds']:.0f}", *more, said, row["hfpatch"], row["date"]]


def _asked(row: Row) -> str:
    """The patch and its settings, where they aren't the usual ones."""
    settings = row["settings"]
    globs = [f"{name}={' '.join(settings[name])}" for name in ("only", "keep") if settings.get(name)]
    others = [f"init={settings['init']}"] if settings["init"] != "auto" else []
    return " ".join([row["patch"], *globs, *others, *(["with BOS"] if settings.get("bos") else [])])


def shown(value: float | None) -> str:
    """Four digits; NaN for what wasn't finite."""
    return "NaN" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the models are, or will be")
    parser.add_argument("--models", nargs="+", choices=SOURCES, default=list(SOURCES))
    parser.add_argument("--patches", nargs="+", default=["rms", "dyt", "none", "rope"])
    parser.add_argument("--text", type=Path, help="folder with WikiText-2's valid.txt and test.txt; none: from the Hub")
    parser.add_argument("--only", nargs="+", default=[], help="patterns of the modules that change")
    parser.add_argument("--keep", nargs="+", default=[], help="patterns of modules that stay, or auto:0.25")
    parser.add_argument("--init", default="auto")
    parser.add_argument("--sequences", type=int, help="of the calibration; the default goes by the model")
    parser.add_argument("--tokens", type=int, help="of each of them, at most; likewise")
    parser.add_argument("--judged", type=int, help="windows, clips or passages that judge; likewise")
    parser.add_argument("--bos", action="store_true", help="language models: each window of text begins with BOS")
    parser.add_argument("--version", default=hfpatch.__version__, help="name of the hfpatch that runs")
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON lines that rows are added to")
    given = parser.parse_args(arguments)
    for patch in given.patches:
        asked(patch)
    for name in given.models:
        make(name, given.folder)
        judge = JUDGES[SOURCES[name].kind]
        sizes = (given.sequences or judge.SEQUENCES, given.tokens or judge.TOKENS)
        for patch in given.patches:
            places = {"folder": given.folder, "text": given.text, "model": name, "patch": patch}
            settings = {
                "only": tuple(given.only),
                "keep": tuple(given.keep),
                "init": given.init,
                "judged": given.judged,
                "version": given.version,
                "bos": given.bos and SOURCES[name].kind == "language",
            }
            row = add(Request(**places, **settings, sequences=sizes[0], tokens=sizes[1]), given.out)
            print(name, patch, "is there already" if row is None else json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
