"""What `verify` found: a table to read, JSON to keep, a plot of the error layer by layer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import MissingPackageError, OptionError
from ..rows import grouped, table

VERSION = 1
STATES = ("converted", "runtime", "kept", "weights")
_MOST_LAYERS = 14  # lines of the table; the JSON has all
_HUES = ("#9ecae1", "#e6550d", "#31377d", "#31a354")


@dataclass
class ModuleRow:
    """One module in both models.

    Attributes:
        module: its name.
        reference, model: what it is in each.
        state: "converted" (another module, or none), "runtime" (the same one, which does something more in every
            forward), "kept" (a norm or position that stayed), "weights" (the same, with other Parameters).
        reason: why it was kept, or a note.
        runtime: what is done in every forward that wasn't before.
        change: rms of the difference of its Parameters, relative to the reference's; infinite where they don't match.
    """

    module: str
    reference: str
    model: str
    state: str
    reason: str | None = None
    runtime: str | None = None
    change: float = 0.0


@dataclass
class OutputRow:
    """One output of one run against the truth, which is the reference in float64.

    Attributes:
        output: its name ("logits", "last_hidden_state", ...).
        role, dtype: who ran ("reference" or "model"), in which dtype.
        max_error, rms_error: max|y - t| / rms(t) and rms(y - t) / rms(t).
        nonfinite: how many values are NaN or infinite where the truth isn't; with any, both errors are infinite.
        top1: share of tokens (or examples) whose likeliest class is the truth's; logits only, like the next two.
        kl: mean KL(truth || output) in nats per token (or example).
        perplexity: of the run itself, where targets could be had.
        cosine_mean, cosine_min: between vectors over the channels, per token (or example); not for logits.
        pooled_mean, pooled_min: the same between mean-pooled sequences.
    """

    output: str
    role: str
    dtype: str
    max_error: float
    rms_error: float
    nonfinite: int = 0
    top1: float | None = None
    kl: float | None = None
    perplexity: float | None = None
    cosine_mean: float | None = None
    cosine_min: float | None = None
    pooled_mean: float | None = None
    pooled_min: float | None = None


@dataclass
class LayerRow:
    """The stream after one layer (0 is what enters the first) of one run, against the truth's.

    Attributes:
        stream: name of the output that holds it ("hidden_states", "encoder_hidden_states", ...).
        layer: index in it.
        role, dtype: as in OutputRow.
        error: rms of the difference relative to the truth's rms.
        centred: the same after the mean over channels is taken out of both: an exact change to RMSNorm moves that mean
            and nothing else.
    """

    stream: str
    layer: int
    role: str
    dtype: str
    error: float
    centred: float


@dataclass
class Report:
    """What a change of a model did, measured by `verify`; `str(report)` is the table.

    Attributes:
        model, reference: what was compared.
        inputs: the inputs, in words.
        examples, tokens: how many of them; tokens is 0 where inputs aren't token ids. Padding doesn't count.
        modules, outputs, layers: the measurements.
        notes: what a reader of the numbers must know.
    """

    model: str
    reference: str
    inputs: str
    examples: int = 0
    tokens: int = 0
    modules: list[ModuleRow] = field(default_factory=list)
    outputs: list[OutputRow] = field(default_factory=list)
    layers: list[LayerRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON values; infinite numbers and NaN, which JSON lacks, are "inf", "-inf" and "nan"."""
        return {"version": VERSION, **_spelled(asdict(self))}

    @classmethod
    def from_json(cls, stored: Any) -> Report:
        """The report that `to_json` wrote.

        Raises:
            OptionError: it is none, or of a later version.
        """
        if not isinstance(stored, Mapping) or not isinstance(stored.get("version"), int):
            raise OptionError("this is no report that hfpatch.verify wrote: it has no version.")
        if stored["version"] > VERSION:
            raise OptionError(f"the report has version {stored['version']}, this hfpatch reads up to {VERSION}.")
        plain = {name: value for name, value in stored.items() if name != "version"}
        kinds: dict[str, type] = {"modules": ModuleRow, "outputs": OutputRow, "layers": LayerRow}
        try:
            for name, kind in kinds.items():
                plain[name] = [kind(**_read(kind, row)) for row in plain[name]]
            return cls(**plain)
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise OptionError(f"the report is malformed: {error}") from error

    def save(self, path: str | PathLike[str]) -> None:
        """Write the JSON.

        Raises:
            OptionError: the name doesn't end in .json.
        """
        if Path(path).suffix != ".json":
            raise OptionError(f"a report is saved as JSON; call the file {Path(path).stem}.json, not {path}.")
        Path(path).write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Report:
        """The report that `save` wrote.

        Raises:
            OptionError: the file holds none, or one of a later version.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise OptionError(f"{path} is no JSON: {error}. Give the file that a report was saved to.") from error

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw the error of the stream layer by layer, one line a run, as an image file (.png, .svg, .pdf).

        Raises:
            OptionError: the models return no hidden states that could be compared, or the suffix is no image's.
            MissingPackageError: matplotlib isn't installed.
        """
        if not self.layers:
            raise OptionError("there is nothing to plot: the models returned no hidden states that match.")
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise MissingPackageError("report.plot needs matplotlib: pip install 'hfpatch[recipes]'") from error
        streams = list(dict.fromkeys(row.stream for row in self.layers))
        figure = Figure(figsize=(7.2 * len(streams), 5.0), layout="constrained")
        for axes, stream in zip(figure.subplots(1, len(streams), squeeze=False)[0], streams, strict=True):
            _draw(axes, [row for row in self.layers if row.stream == stream])
            axes.set_title(stream.replace("_", " "), fontsize=10)
        figure.suptitle(f"{self.model}\nagainst {self.reference} in float64", fontsize=9)
        try:
            figure.savefig(path, dpi=150)
        except ValueError as error:  # an unknown suffix
            raise OptionError(f"{path} can't be drawn: {error}") from error

    def __str__(self) -> str:
        size = f"{self.examples} examples" + (f", {self.tokens:,} tokens" if self.tokens else "")
        head = [f"{self.model} against {self.reference}. Inputs: {self.inputs} ({size})."]
        head += [
            f"NOT FINITE: {row.output} of the {row.role} in {row.dtype} has {row.nonfinite:,} NaN or infinite values."
            for row in self.outputs
            if row.nonfinite
        ]
        parts = ["\n".join(head), self._modules_table()]
        for output in dict.fromkeys(row.output for row in self.outputs):
            parts.append(_output_table([row for row in self.outputs if row.output == output]))
        for stream in dict.fromkeys(row.stream for row in self.layers):
            parts.append(_layer_table([row for row in self.layers if row.stream == stream]))
        if self.notes:
            parts.append("\n".join(f"Note: {note}" for note in self.notes))
        return "\n\n".join(parts)

    def _modules_table(self) -> str:
        if not self.modules:
            return "No module differs."
        lines: list[tuple[str, ...]] = [("module", "reference", "model", "state", "note")]
        for members, names in grouped(self.modules, _alike):
            row, count = members[0], len(members)
            change = max(one.change for one in members)
            changed = f"weights differ by {change:.1%}" if 0 < change < math.inf else None
            note = "; ".join(filter(None, (row.runtime, row.reason, changed)))
            now = "(same)" if row.model == row.reference and row.state != "converted" else row.model
            lines.append((names + (f"  x{count}" if count > 1 else ""), row.reference, now, row.state, note))
        counts = (sum(row.state == state for row in self.modules) for state in STATES)
        words = ("converted", "with a runtime operation added", "kept", "with other weights")
        told = [f"{count} {word}" for count, word in zip(counts, words, strict=True) if count]
        return f"{table(lines)}\n{', '.join(told)}."


def _alike(row: ModuleRow) -> tuple[object, ...]:
    return row.reference, row.model, row.state, row.reason, row.runtime, row.change == 0.0


def output_lines(rows: list[OutputRow]) -> list[tuple[str, ...]]:
    """One output's rows as cells, the headings first; the first two columns are words, the others numbers."""
    columns = {
        "max error": [_error(row.max_error) for row in rows],
        "rms error": [_error(row.rms_error) for row in rows],
        "top-1": [_share(row.top1) for row in rows],
        "KL (nats)": [_error(row.kl) for row in rows],
        "perplexity": [_number(row.perplexity) for row in rows],
        "cosine": [_cosine(row.cosine_mean) for row in rows],
        "its min": [_cosine(row.cosine_min) for row in rows],
        "pooled cosine": [_cosine(row.pooled_mean) for row in rows],
        "min pooled": [_cosine(row.pooled_min) for row in rows],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    lines = [(rows[0].output, "dtype", *shown)]
    for i, row in enumerate(rows):
        cells = [cells[i] for cells in shown.values()]
        if _is_truth(row):
            cells[:2] = "truth", "truth"
        lines.append((row.role, row.dtype, *cells))
    return lines


def _output_table(rows: list[OutputRow]) -> str:
    lines = output_lines(rows)
    return table(lines, "<<" + ">" * (len(lines[0]) - 2))


def _layer_table(rows: list[LayerRow]) -> str:
    runs = _runs(rows)
    found = {(row.layer, row.role, row.dtype): row for row in rows}
    layers = sorted({row.layer for row in rows})
    step = math.ceil(len(layers) / _MOST_LAYERS)
    shown = [layer for layer in layers if layer % step == 0 or layer == layers[-1]]
    lines = [(rows[0].stream, *(f"{role} {dtype}" for role, dtype in runs))]
    for layer in shown:
        cells = [found[layer, *run] for run in runs]
        lines.append((str(layer), *(f"{_error(c.error)} ({_error(c.centred)})" for c in cells)))
    head = "rms error layer by layer (in brackets without the mean over channels)"
    skipped = f"; {len(shown)} of {len(layers)} layers" if step > 1 else ""
    return f"{head}{skipped}:\n{table(lines, '<' + '>' * len(runs))}"


def _runs(rows: Iterable[LayerRow]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row.role, row.dtype) for row in rows))


def _is_truth(row: OutputRow | LayerRow) -> bool:
    return row.role == "reference" and row.dtype == "float64"


def _error(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.2g}" if 0.01 <= value < 1000 else f"{value:.1e}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if value < 1e5 else f"{value:.2e}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{math.floor(value * 1e4) / 100:.2f} %"  # never 100 % where it isn't


def _cosine(value: float | None) -> str:
    if value is None:
        return ""
    return "1" if value > 1 - 1e-12 else f"1 - {1 - value:.0e}" if value > 0.9999 else f"{value:.4f}"


def _draw(axes: Any, rows: list[LayerRow]) -> None:
    """Hue says the dtype, a dotted line the reference; lines that lie on one another get thinner towards the top."""
    runs = _runs(rows)
    dtypes = list(dict.fromkeys(dtype for _, dtype in runs))
    for role, dtype in runs:
        mine = sorted((row for row in rows if (row.role, row.dtype) == (role, dtype)), key=lambda row: row.layer)
        layers, place = [row.layer for row in mine], dtypes.index(dtype)
        style = {"color": _HUES[place % len(_HUES)], "linewidth": max(4.5 - 1.6 * place, 1.2)}
        if role == "reference":
            style |= {"linewidth": 1.4, "zorder": 5}
            axes.plot(layers, [_drawable(row.error) for row in mine], ":", label=f"reference {dtype}", **style)
            continue
        axes.plot(layers, [_drawable(row.error) for row in mine], "o-", markersize=3, label=f"model {dtype}", **style)
        if any(row.centred < 0.5 * row.error for row in mine):
            label = f"model {dtype}, without the mean"
            axes.plot(layers, [_drawable(row.centred) for row in mine], "x--", markersize=4, label=label, **style)
    axes.set_yscale("log")
    axes.set_xlabel("layer")
    axes.set_ylabel("rms error / rms of the truth")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)


def _drawable(error: float) -> float:
    """A log axis has no zero, and a line with an infinite point is cut there."""
    return max(error, 1e-17) if math.isfinite(error) else math.nan


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _spelled(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read(kind: type, row: Mapping[str, Any]) -> dict[str, Any]:
    numbers = {one.name for one in fields(kind) if "float" in str(one.type)}
    return {name: float(v) if name in numbers and isinstance(v, str) else v for name, v in row.items()}
