"""The report of recipes/compare.py as one HTML file: nothing in it is loaded from elsewhere, no script, printable."""

import math
import re
from html import escape
from typing import Any

from .compare_figure import MOST_BANDS, svg_curves
from .compare_report import (
    budget,
    columns,
    definitions,
    label,
    main_name,
    mean_sd,
    rank_columns,
    reading,
    signed,
    span,
    title,
)
from .paired import BETTER, SAME, WORSE, Interval, Summary, rankings, read_cells, summarise
from .report import data_line, machine, show

SIGNS = {BETTER: "▲", SAME: "●", WORSE: "▼"}  # beside the word: a verdict isn't told by colour alone
WIDE, HIGH = 130, 22  # of an interval's drawing, in pixels

Results = dict[str, Any]

STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1f; --dim: #5a5a63; --paper: #fff; --soft: #f3f3f6; --rule: #d5d5dc;
  --good: #00694a; --bad: #a83c00; --line0: #0072B2; --line1: #D55E00; --line2: #009E73; --line3: #CC79A7;
  --line4: #E69F00; --line5: #56B4E9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8ec; --dim: #a9a9b4; --paper: #17171b; --soft: #222228;
  --rule: #3d3d46; --good: #4fd0a5; --bad: #ff9a5c; --line0: #4aa8e0; --line1: #f0813a; --line2: #2fc79b;
  --line3: #e29cc4; --line4: #f0b840; --line5: #8fd0f7; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 84rem; padding: 1.5rem clamp(1rem, 4vw, 2.5rem) 4rem; background: var(--paper);
  color: var(--ink); font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: .5rem 0 .3rem; text-wrap: balance; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
p, ul, dl { max-width: 60rem; margin: .5rem 0; }
li { margin: .45rem 0; }
.dim, figcaption, dd { color: var(--dim); }
.warn { border-left: 4px solid var(--bad); padding: .4rem .8rem; background: var(--soft); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--dim); padding-bottom: .4rem; }
th, td { padding: .38rem .5rem; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
thead th { white-space: normal; vertical-align: bottom; border-bottom: 2px solid var(--ink); }
th[scope=row], .left { text-align: left; }
tbody tr.control { background: var(--soft); }
.better { color: var(--good); font-weight: 600; } .worse { color: var(--bad); font-weight: 600; }
.same { font-weight: 600; }
figure { margin: .5rem 0; } figure svg { display: block; width: 100%; height: auto; }
td svg { display: block; }
code, pre { font: .88rem/1.5 ui-monospace, monospace; }
pre { background: var(--soft); padding: .7rem .9rem; white-space: pre-wrap; overflow-wrap: anywhere; }
dt { font-weight: 600; margin-top: .5rem; } dd { margin: 0; }
summary { cursor: pointer; }
@media print { body { max-width: none; padding: 0; font-size: 10.5pt; } h2 { break-after: avoid; }
  figure, tr { break-inside: avoid; } .wide { overflow: visible; } table { font-size: 7.5pt; }
  th, td { padding: .15rem .25rem; } td svg { width: 80px; } }
"""


def html_report(results: Results) -> str:
    summaries = summarise(results)
    lines = reading(results, summaries)
    unfinished = [line for line in lines if line.startswith("Not finished")]
    said = "".join(f"<li>{emphasised(line)}</li>" for line in lines if line not in unfinished)
    parts = [
        f"<h1>{escape(title(results))}</h1>",
        f'<p class="dim">{escape(budget(results))}<br>{escape(data_line(results["data"]))}</p>',
        *(f'<p class="warn" role="status">{escape(line)}</p>' for line in unfinished),
        f"<h2>What it says</h2><ul>{said}</ul>",
        f"<h2>The figures</h2>{main_table(results, summaries)}",
        curves(results),
        rank_tables(results),
        other_figures(results, summaries),
        every_cell(results),
        how_to_read(results, summaries),
        provenance(results),
    ]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title(results))}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(part for part in parts if part)
        + "\n</main>\n</body>\n</html>\n"
    )


def emphasised(text: str) -> str:
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text))


def tag_table(headings: list[str], rows: list[list[str]], caption: str, classes: list[str] | None = None) -> str:
    """A table whose first column names the rows; cells are HTML already."""
    head = "".join(f'<th scope="col"{" class=left" * (i == 0)}>{cell}</th>' for i, cell in enumerate(headings))
    body = ""
    for i, (first, *rest) in enumerate(rows):
        kind = f' class="{classes[i]}"' if classes and classes[i] else ""
        body += f'<tr{kind}><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>\n'
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}"><table><caption>{escape(caption)}'
        f"</caption>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody></table></div>"
    )


def main_table(results: Results, summaries: list[Summary]) -> str:
    if not summaries:
        return "<p>No model is finished yet together with its control.</p>"
    shown = columns(results, summaries)
    headings = [escape(column[0]) for column in shown]
    rows = [[escape(cell) for cell in cells] for cells in zip(*(column[1:] for column in shown), strict=True)]
    place, verdict = headings.index("95 % interval") + 1, headings.index("verdict")
    headings.insert(place, "interval, drawn")
    widest = max((reach(s) for s in summaries), default=0.0)
    for cells, s in zip(rows, summaries, strict=True):
        cells.insert(place, forest(s, widest))
        if s.verdict in SIGNS and not s.failed:
            cells[verdict] = (
                f'<span class="{s.verdict}"><span aria-hidden="true">{SIGNS[s.verdict]}</span> {s.verdict}</span>'
            )
    better = "higher" if results["higher_is_better"] else "lower"
    caption = f"Held-out {main_name(results)} ({better} is better), and the difference from the control of equal budget"
    return tag_table(headings, rows, caption, ["control" if s.kind.is_control else "" for s in summaries])


def reach(s: Summary) -> float:
    """The farthest point of an interval from zero, in margins."""
    ends = [abs(end) for end in (s.difference.low, s.difference.high, s.difference.mean) if end is not None]
    return max(ends) / s.margin if s.margin and not s.kind.is_control and s.figure.n else 0.0


def forest(s: Summary, widest: float) -> str:
    """The interval around its mean, on a line with zero in the middle; grey is what counts as none.

    Places are asinh(difference / margin): near zero as it is, far away by orders of magnitude, so that one swap that
    costs much doesn't hide the others.
    """
    if s.kind.is_control or not s.figure.n or not s.margin:
        return ""
    edge = math.asinh(max(widest, 1.5)) * 1.08

    def x(value: float) -> float:
        return round(WIDE / 2 * (1 + math.asinh(value / s.margin) / edge), 1)

    low, high = (s.difference.mean if end is None else end for end in (s.difference.low, s.difference.high))
    colour = {BETTER: "var(--good)", WORSE: "var(--bad)"}.get(s.verdict, "var(--ink)")
    middle = HIGH / 2
    text = f"difference {signed(s.difference.mean)}" + (
        f", 95 % interval {span(s.difference)}" if span(s.difference) else ""
    )
    return (
        f'<svg width="{WIDE}" height="{HIGH}" viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="{escape(text)}">'
        f'<rect x="{x(-s.margin)}" y="0" width="{round(x(s.margin) - x(-s.margin), 1)}" height="{HIGH}" '
        'fill="var(--rule)" opacity=".6"/>'
        f'<line x1="{WIDE / 2}" x2="{WIDE / 2}" y1="0" y2="{HIGH}" stroke="var(--dim)"/>'
        f'<line x1="{x(low)}" x2="{x(high)}" y1="{middle}" y2="{middle}" stroke="{colour}" stroke-width="2.5"/>'
        f'<circle cx="{x(s.difference.mean)}" cy="{middle}" r="4" fill="{colour}"/></svg>'
    )


def curves(results: Results) -> str:
    if all(stage.get("failed") for stage in read_cells(results).values()):
        return ""
    about = f"Curves of held-out {main_name(results)} by step, and differences from the control; the table has the ends"
    caption = (
        "Left: means over seeds, bands of one standard deviation. Right: mean difference from the control of the same "
        "seed at the same step, bands of 95 % intervals; grey is what counts as no difference. Where a panel has more "
        f"than {MOST_BANDS} lines, bands are left out. The table's figures are of all held-out data, the curves' may "
        "be of a part."
    )
    drawing = svg_curves(results, escape(about))
    return f"<h2>Curves</h2><figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def rank_tables(results: Results) -> str:
    text = ""
    for ranking in rankings(results):
        shown = rank_columns(ranking)
        rows = [[escape(cell) for cell in cells] for cells in zip(*(column[1:] for column in shown), strict=True)]
        heading = {"method": "Methods", "start": "Starts"}[ranking.axis]
        equal = "the time that training takes" if ranking.budgets else "all else"
        heading += " at equal time" * bool(ranking.budgets)
        caption = (
            f"{heading.partition(' ')[0]} against each other, {equal} and the seed being equal; rank 1 is the best"
        )
        text += f"<h2>{heading}</h2>" + tag_table([column[0] for column in shown], rows, caption)
    return text


def other_figures(results: Results, summaries: list[Summary]) -> str:
    """Further figures of the task at the end, with their differences from the control."""
    shown = [s for s in summaries if s.figure.n]
    names = list(dict.fromkeys(name for s in shown for name in s.others))
    if not names:
        return ""
    headings = ["", *(escape(name.replace("_", " ")) for name in names)]
    rows = []
    for s in shown:
        cells = [escape(label(s.kind, results))]
        for name in names:
            figure, difference = s.others.get(name, (None, None))
            cells.append("-" if figure is None else other(s, figure, difference))
        rows.append(cells)
    text = (
        "Mean ± standard deviation over seeds; below it the difference from the control with its 95 % interval, and a "
        "star where that leaves out zero."
    )
    classes = ["control" if s.kind.is_control else "" for s in shown]
    return f"<h2>Other figures</h2><p>{text}</p>{tag_table(headings, rows, 'At the end', classes)}"


def other(s: Summary, figure: Interval, difference: Interval) -> str:
    text = escape(mean_sd(figure))
    if s.kind.is_control:
        return text
    told = difference.low is not None and difference.high is not None and not difference.low <= 0 <= difference.high
    between = f" ({escape(span(difference))})" if span(difference) else ""
    return f'{text}<br><span class="dim">{escape(signed(difference.mean))}{"*" * told}{between}</span>'


def every_cell(results: Results) -> str:
    """Each model of the grid."""
    main, rows = results["main"], []
    for cell, record in read_cells(results).items():
        kind = escape(label(cell.kind, results))
        if record.get("failed"):
            rows.append([kind, str(cell.seed), "-", "-", escape(record["failed"]), "-", "-"])
            continue
        speed = record.get(f"{results['unit']}_per_second")
        rows.append([
            kind, str(cell.seed), show(record["start"][main]), show(record["end"][main]), str(record["step"]),
            f"{speed:,}" if speed else "-", f"{record['parameters']:,}" if record.get("parameters") else "-",
        ])  # fmt: skip
    headings = ["model", "seed", "after the swap", "end", "steps", f"{escape(results['unit'])}/s", "parameters"]
    table = tag_table(headings, rows, f"Held-out {main_name(results)} of every model")
    return f"<h2>Every model</h2><details><summary>{len(rows)} models, one by one</summary>{table}</details>"


def how_to_read(results: Results, summaries: list[Summary]) -> str:
    words = definitions(results, summaries)
    words["interval, drawn"] = (
        "the interval around the mean difference; grey is what counts as none. Far from zero the line is drawn "
        "shorter, by orders of magnitude."
    )
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in words.items())
    return f"<h2>How to read it</h2><dl>{items}</dl>"


def provenance(results: Results) -> str:
    """What is needed to run it again."""
    lines = {"Machine": machine(results), "Data": data_line(results["data"])}
    baselines = results["data"].get("baselines")
    if isinstance(baselines, dict):
        lines["Simple methods on this data"] = "; ".join(f"{name}: {described(b)}" for name, b in baselines.items())
    items = "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in lines.items())
    settings = [[f"<code>{escape(k)}</code>", escape(described(v))] for k, v in results["config"].items()]
    table = tag_table(["setting", "value"], settings, "All settings")
    return (
        f"<h2>How it was made</h2><pre>{escape(results['command'])}</pre><dl>{items}</dl>"
        f"<details><summary>All settings</summary>{table}</details>"
    )


def described(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {described(v)}" for name, v in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    return "none" if value is None else show(value) if isinstance(value, float) and value >= 0.01 else str(value)
