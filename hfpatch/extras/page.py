"""HTML report about a patched checkpoint: its changes, the measured outcomes, how to open and reproduce it.

The file holds its styles and figures and loads nothing; it has no scripts.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import jinja2
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint.files import PAGE
from ..core.bare import require_bare
from ..core.results import Table
from ..core.staging import stage
from ..errors import OptionError
from ..hub.card import auto_class_and_task, how_to_make, metadata_of, ways_to_open
from ..measure.copies import copy_of, unpatched_config
from ..repairs.repair_report import RepairReport
from ..runtime.lens import host_class
from ..runtime.patch_errors import CheckpointError
from ..runtime.record import KEY
from ..schemes.request import Record
from ..schemes.verdicts import MEASUREMENT_NOTE, outcome_table
from ..verification.module_diff import compare_modules
from ..verification.verify_report import LayerRow, ModuleRow, Report, module_lines, title_of
from .sketch import sketches

_PATCHED = "PATCHED"  # in place of a checkpoint's name that isn't known
HEADINGS = ("module", "original", "patched", "state", "note")  # headings of the cells of `module_lines`
WIDTH, HEIGHT = 640, 300  # of a figure, in pixels at full size
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, WIDTH - 10, 12, HEIGHT - 38
_TICKS = 6  # labels of an axis, at most
_Line = tuple[str, str, str]  # of a figure: its name in the legend, its colour and dashes
_DASHES = {"reference": "2 4", "model": "none", "centred": "7 4"}
_COLOURS = ("#0b6bcb", "#c2410c", "#2a9d55", "#8b2fc9", "#0e7490", "#857000")


def write_page(
    model: PreTrainedModel,
    path: str | PathLike[str],
    *,
    checkpoint: str | PathLike[str] | None = None,
    reference: str | PathLike[str] | None = None,
    report: Report | None = None,
    repair: RepairReport | None = None,
) -> None:
    """Write one self-contained HTML file about a patched model, as `hfpatch report` does.

    It shows the repeated block before and after, the modules that changed, each request's measured outcome, with a
    report of `verify` the error layer by layer and the outputs by dtype, and the code that opens the checkpoint and
    makes it again. What isn't known is left out. Of folders only the names are written, no paths.

    Args:
        model: a patched model.
        path: the file, whose name ends in .html.
        checkpoint: the Hub id or folder that it was saved to; without it the page says PATCHED instead.
        reference: the original's Hub id or folder, likewise; without it what the checkpoint's model card names.
        report: what `verify(model, original)` measured.
        repair: `repair_report(model)`.

    Raises:
        WrappedModelError, CheckpointError: the model is wrapped, or isn't patched.
        OptionError: the name doesn't end in .html, or the report is of another model.
        PatchError: the file can't be written.
        OSError: `checkpoint` has no config.json.
    """
    path = Path(path)
    if path.suffix != ".html":
        raise OptionError(f"a report page is HTML; call the file {path.stem}.html, not {path.name}.")
    require_bare(model)
    if not getattr(model.config, KEY, None):
        raise CheckpointError(f"this {type(model).__name__} isn't patched, so there is nothing to report on.")
    if report is not None:
        report.require_of(title_of(type(model).__name__, Record.of(model.config)))
    text = _template().render(_facts(model, checkpoint, reference, report, repair))
    with stage(path) as file:
        file.write_text(text, encoding="utf-8")


def default_place(checkpoint: str) -> Path:
    """Return the default path of a checkpoint's page: in its folder, so that a push uploads it.

    That of a Hub id goes into the working directory.
    """
    return Path(checkpoint) / PAGE if Path(checkpoint).is_dir() else Path(f"{checkpoint.split('/')[-1]}-{PAGE}")


def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("hfpatch", "extras")
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("report.html.j2")


def _facts(
    model: PreTrainedModel,
    checkpoint: str | PathLike[str] | None,
    reference: str | PathLike[str] | None,
    report: Report | None,
    repair: RepairReport | None,
) -> dict[str, Any]:
    """The facts that the template shows."""
    host, record = unpatched_model(model), Record.of(model.config)
    rows = changed_modules(model) if report is None else report.modules
    if not (record.norm or record.placement):
        rows = [row for row in rows if row.state != "kept"]  # norms that nobody asked to change
    stored = {} if checkpoint is None else PreTrainedConfig.get_config_dict(str(checkpoint))[0]
    card = None if checkpoint is None else metadata_of(str(checkpoint))
    base = card and card.base_model if reference is None else _public_name(reference)
    base = base if isinstance(base, str) else None
    name = _PATCHED if checkpoint is None else _public_name(checkpoint)
    form = "remote" if stored.get("auto_map") and stored.get("model_type") == KEY else "plugin"
    cls = host_class(type(model))
    auto, _ = auto_class_and_task(cls, host_class(type(model.config)))
    parameters = sum(p.numel() for p in model.parameters())
    version = sys.modules["hfpatch"].__version__
    outcomes = record.outcomes()
    return {
        "title": name if checkpoint is not None else cls.__name__,
        "facts": {
            "model": cls.__name__,
            "original": base or "not known",
            "size": f"{parameters:,} parameters, {str(model.dtype).removeprefix('torch.')}",
            "form": "not saved yet" if checkpoint is None else _FORMS[form],
            "saved with": f"transformers {stored.get('transformers_version') or transformers.__version__}",
            "page written with": f"hfpatch {version}, transformers {transformers.__version__}",
        },
        "base_url": f"https://huggingface.co/{base}" if base and "/" in base else None,
        "outcomes": outcomes,
        "quality": outcome_table(outcomes),
        "how": MEASUREMENT_NOTE,
        "sketch": sketches(model, host, rows),
        "changes": Table([HEADINGS, *module_lines(rows)]),
        "lengths": any(part.scheme.max_positions is not None for part in record.pos),
        "edits": record.edits,
        "report": report,
        "outputs": {} if report is None else report.output_tables(),
        "figures": [] if report is None else layer_figures(report.layers),
        "repair": repair,
        "ways": list(ways_to_open(name, auto, form)),
        "made_by": how_to_make(record, auto, base),
    }


_FORMS = {"plugin": "plugin: opens where hfpatch is imported", "remote": "remote code, and with hfpatch as well"}


def _public_name(name: str | PathLike[str]) -> str:
    """A Hub id, or a folder's name without its path."""
    return Path(name).resolve().name if Path(name).exists() else str(name)


def unpatched_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same class and settings without the patch and its weights, on the meta device."""
    return copy_of(model, config=unpatched_config(model.config), device="meta")


def changed_modules(model: PreTrainedModel) -> list[ModuleRow]:
    """Return rows for the changed modules, then for the norms that were kept.

    `model` may be on the meta device.
    """
    return sorted(compare_modules(model, unpatched_model(model)), key=lambda row: row.state == "kept")


# Figures: the error layer by layer as SVG path data


@dataclass(frozen=True)
class Curve:
    """One line of a figure: its name in the legend, its colour and dashes, and its SVG path data."""

    name: str
    colour: str
    dashes: str
    data: str


@dataclass(frozen=True)
class Figure:
    """Plot of the error layer by layer: curves, and positions of the axis labels."""

    stream: str
    curves: list[Curve]
    powers: list[tuple[float, str]]
    layers: list[tuple[float, str]]


def layer_figures(rows: list[LayerRow]) -> list[Figure]:
    """Return plots of each stream's error by layer, on a log axis; colours are dtypes, dashes are kinds of lines."""
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    colours = {dtype: _COLOURS[i % len(_COLOURS)] for i, dtype in enumerate(dtypes)}
    figures = (_figure(stream, lines) for stream, lines in _lines(rows, colours).items())
    return [figure for figure in figures if figure is not None]


def _lines(rows: list[LayerRow], colours: dict[str, str]) -> dict[str, dict[_Line, dict[int, float]]]:
    """Return, by stream and line, the error after each layer; NaN, a gap, if it is 0 or infinite."""
    found: dict[str, dict[_Line, dict[int, float]]] = {}
    for row in rows:
        label, colour = f"{row.role} {row.dtype}", colours[row.dtype]
        errors = {(label, colour, _DASHES[row.role]): row.error}
        if row.role == "model":
            errors[f"{label}, without the mean over channels", colour, _DASHES["centred"]] = row.centred
        for line, error in errors.items():
            points = found.setdefault(row.stream, {}).setdefault(line, {})
            points[row.layer] = error if 0 < error < math.inf else math.nan
    return found


def _figure(stream: str, lines: dict[_Line, dict[int, float]]) -> Figure | None:
    """None if no error has a logarithm."""
    powers = [math.log10(error) for line in lines.values() for error in line.values() if not math.isnan(error)]
    if not powers:
        return None
    low = math.floor(min(powers))
    high = max(math.ceil(max(powers)), low + 1)
    layers = sorted({layer for line in lines.values() for layer in line})

    def x(layer: int) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * layer / max(layers[-1], 1), 1)

    def y(power: float) -> float:
        return round(_BOTTOM - (_BOTTOM - _TOP) * (power - low) / (high - low), 1)

    curves = []
    for line, errors in lines.items():
        data, move = "", "M"
        for layer, error in sorted(errors.items()):
            if not math.isnan(error):
                data += f"{move}{x(layer)},{y(math.log10(error))}"
            move = "M" if math.isnan(error) else "L"
        curves.append(Curve(*line, data))
    shown = range(low, high + 1, math.ceil((high - low + 1) / _TICKS))
    marked = layers[:: math.ceil(len(layers) / (2 * _TICKS))]
    return Figure(stream, curves, [(y(one), f"1e{one}") for one in shown], [(x(one), str(one)) for one in marked])
