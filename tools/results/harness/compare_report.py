"""Report of train_grid.py: what the grid says, its tables and curves, as Markdown and as one HTML file."""

import base64
import math
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from methods import CONTROL
from paired import BETTER, SAME, WORSE

from .curves import ABOUT, Panel, curve_of, draw_panels
from .grid import KIND, ranking, read_grid, summarise
from .report import provenance, settings_line, show, table, words

AXES = ("method", "start", "schedule")  # whose values are ranked
SIGNS = {BETTER: "▲", SAME: "●", WORSE: "▼"}  # a verdict isn't told by colour alone

Results = dict[str, Any]


def compare_report(results: Results) -> str:
    """The results as Markdown that is also aligned in a terminal."""
    found = contents(results)
    lines = [f"# {found['title']}", "", *(f"* {line}" for line in found["told"]), ""]
    for frame in found["tables"].values():
        lines += [*table(frame), ""]
    lines += [f"*{name}*: {text}" for name, text in found["definitions"].items()]
    return "\n".join([*lines, "", *found["provenance"]]) + "\n"


def draw_reports(results: Results, path: Path) -> None:
    """The curves, and a page that holds them, which loads nothing from elsewhere and runs no script."""
    draw_grid(results, path)
    template = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    curves = base64.b64encode(path.read_bytes()).decode()
    page = template.get_template("report.html.j2").render(
        **contents(results), curves=curves, about_curves=ABOUT, signs=SIGNS
    )
    path.with_name("report.html").write_text(page, "utf-8")


def contents(results: Results) -> dict[str, Any]:
    """What both have, in this order."""
    figures, variants = main_table(results), dict.fromkeys(asked["variant"] for asked in results["grid"])
    return {
        "title": f"{', '.join(name for name in variants if name != CONTROL)} against the unpatched control",
        "told": remarks(results),
        "tables": {"At the end": figures, **ranking_tables(results)},
        "definitions": {name: text for name, text in definitions(results).items() if name in figures},
        "provenance": [settings_line(results), *provenance(results)],
    }


# -- names and numbers


def varied(results: Results) -> list[str]:
    """The columns of `KIND` in which models of the grid differ, the control aside."""
    grid = pd.DataFrame(asked for asked in results["grid"] if asked["variant"] != CONTROL)
    return [name for name in KIND if grid[name].nunique() > 1]


def text(figure: float, form: str = "{:+z.4f}") -> str:
    """A figure, by default a difference; "-" where there is none."""
    return "-" if math.isnan(figure) else form.format(figure)


def span(low: float, high: float) -> str:
    return "-" if math.isnan(low) else f"{text(low)} to {text(high)}"


# -- tables


def main_table(results: Results) -> pd.DataFrame:
    """Text of a row for each kind; columns in which all rows agree, or that no row fills, are left out."""
    frame = pd.DataFrame(row(results, s) for s in summarise(results).itertuples())
    left_out = [name for name in KIND[1:] if name not in varied(results)]
    return frame.drop(columns=left_out).loc[:, lambda rest: (rest != "-").any()]


def row(results: Results, s: Any) -> dict[str, str]:
    verdict = [s.verdict] * (s.seeds > 0 and s.variant != CONTROL)
    failed = [f"{s.failed} of {s.asked} failed: {s.reason}"] * (s.failed > 0)
    return {
        "variant": s.variant,
        "start": s.start or "-",
        "method": s.method or "-",
        "schedule": s.schedule or "-",
        "steps": str(s.steps),
        "verdict": ", ".join(verdict + failed) or "-",
        words(results["main"]): text(s.mean, show(s.mean) + f" ± {show(s.sd)}" * (s.sd == s.sd)),
        "difference": text(s.difference),
        "95 % interval": span(s.low, s.high),
        "after the swap": text(s.cost),
        "recovered": text(s.recovered, "{:.0%}"),
        "time a step": text(s.time, f"{{:.2f}} x ({s.time_low:.2f} to {s.time_high:.2f})"),
        "seeds": str(s.seeds) if s.seeds == s.asked else f"{s.seeds} of {s.asked}",
        "seeds needed": text(s.needed, "{:,.0f}"),
    }


def ranking_tables(results: Results) -> dict[str, pd.DataFrame]:
    """By heading, for each axis of the grid that has several values: text of a row for each of them."""
    found = {}
    for axis in AXES:
        ranks = ranking(results, axis)
        rows = [
            {
                axis: r.Index,
                "mean rank": f"{r.rank:.2f} of {len(ranks)}",
                "best": f"{r.best} of {r.count}",
                f"against {ranks.index[0]}": text(r.difference),
                "95 % interval": span(r.low, r.high),
                "sign test p": text(r.chance, "{:.2g}"),
            }
            for r in ranks.itertuples()
        ]
        if rows:
            found[f"{axis.capitalize()}s against each other, the rest and the seed being equal"] = pd.DataFrame(rows)
    return found


# -- words


def remarks(results: Results) -> list[str]:
    """What to know before the figures are read."""
    done, asked = int(read_grid(results).done.sum()), len(results["grid"])
    lines = [f"Not finished: {done} of {asked} models are there, and what follows is about these."] * (done < asked)
    intervals = int(summarise(results).low.notna().sum())
    if intervals >= 5:
        missed = f"by chance alone about {intervals / 20:.1g} of them would miss the true difference"
        lines.append(f"There are {intervals} intervals at 95 %: {missed}.")
    return lines


def definitions(results: Results) -> dict[str, str]:
    """What the columns mean."""
    better, main = "higher" if results["higher_is_better"] else "lower", words(results["main"])
    margin = f"±{100 * results['config']['margin']:g} % of the control's {main}"
    distilled = ", distilled from itself since no method here looks at labels" * bool(results["control_method"])
    return {
        main: f"on held-out data, mean ± standard deviation over seeds; {better} is better.",
        "difference": f"from the unpatched control of the same seed, baseline, data and number of steps{distilled}; "
        "the mean over seeds. Pairs are compared, so what a seed does to both isn't in it.",
        "95 % interval": "of the mean difference, by Student's t over seeds.",
        "verdict": f"same: the interval lies within {margin}; better, worse: it lies on one side of zero and reaches "
        "beyond that; undecided: it holds zero and reaches beyond; one seed: there is no interval.",
        "after the swap": "the difference before any training.",
        "schedule": "norms change before the training (at once), or while the model is trained, from the first "
        "layers to the last.",
        "recovered": "how much of that is gone at the end; - where the swap cost less than the margin.",
        "time a step": "of training (the median), against the control's on the same machine; median and range over "
        "seeds.",
        "seeds needed": "about as many as would bring the interval's half width down to the margin.",
    }


# -- curves


def draw_grid(results: Results, path: Path) -> None:
    """A panel for each budget, and for each variant where the ways to start or to train differ."""
    grid, told = read_grid(results), set(varied(results))
    grid = grid[grid.done & grid.failed.isna()]
    patched = grid[grid.variant != CONTROL]
    ways = [name for name in ("start", "method", "schedule") if name in told]
    by = ["steps", "variant"] if ways else ["steps"]
    panels = []
    for (steps, *variant), cells in (grid if patched.empty else patched).groupby(by, sort=False):
        heading = [*variant, *[f"{steps} steps"] * ("steps" in told)]
        lines = {
            ", ".join(name): grid_curve(results, kind) for name, kind in cells.groupby(ways or ["variant"], sort=False)
        }
        controls = grid[(grid.variant == CONTROL) & (grid.steps == steps)]
        none = results["config"]["margin"] * abs(controls.end.mean())
        control = None if controls.empty else grid_curve(results, controls)
        panels.append(Panel(", ".join(heading), f"held-out {words(results['main'])}", lines, control, margin=none))
    draw_panels(panels, path)


def grid_curve(results: Results, cells: pd.DataFrame) -> pd.DataFrame:
    stages = {cell.seed: results["stages"][cell.name] for cell in cells.itertuples()}
    return curve_of(stages, results["main"])
