"""Text report of recipes/compare.py: a summary, the table, and how to read it."""

from collections.abc import Callable
from statistics import median
from typing import Any

from .paired import (
    BETTER,
    ONE_SEED,
    SAME,
    UNDECIDED,
    WORSE,
    Interval,
    Kind,
    Ranking,
    Summary,
    grid_of,
    rankings,
    read_cells,
    seeds_needed,
    summarise,
    t_quantile,
)
from .report import data_line, machine, show, table
from .settings import CONTROL

STEADY = 0.02  # share of a step's time: what lies within it is called the same
BUSY = 1.3  # timings of the same thing that differ by more than this factor say little
MANY = 12  # kinds: of more, the reading tells of the best of each variant only

Results = dict[str, Any]


def compare_report(results: Results) -> str:
    """The results as Markdown that is also aligned in a terminal."""
    summaries = summarise(results)
    lines = [f"# {title(results)}", "", *(f"* {line}" for line in reading(results, summaries)), ""]
    lines += [*table(columns(results, summaries)), ""]
    for ranking in rankings(results):
        lines += [*table(rank_columns(ranking)), ""]
    lines += [f"*{name}*: {text}" for name, text in definitions(results, summaries).items()]
    lines += ["", budget(results), data_line(results["data"]), f"`{results['command']}`", machine(results)]
    return "\n".join(lines) + "\n"


def title(results: Results) -> str:
    variants = [v for v in dict.fromkeys(cell.kind.variant for cell in grid_of(results)) if v != CONTROL]
    return f"{', '.join(variants) or 'no variant'} against the unpatched control"


# -- names and numbers


def label(kind: Kind, results: Results) -> str:
    """A kind by what tells it from the others of the grid: "rms", "rms (copied, distil)", "rms (300 steps)"."""
    kinds = {cell.kind for cell in grid_of(results)}
    told = [n for n in ("start", "method") if len({getattr(k, n) for k in kinds if not k.is_control}) > 1]
    how = [getattr(kind, name) for name in told if not kind.is_control]
    how += [f"{kind.steps} steps"] * (len({k.steps for k in kinds}) > 1)
    return kind.variant + (f" ({', '.join(how)})" if how else "")


def main_name(results: Results) -> str:
    return results["main"].replace("_", " ")


def signed(figure: float) -> str:
    """A difference: four decimals, fewer for large ones."""
    if abs(figure) < 0.00005:
        return "0.0000"
    return f"{figure:+.4f}" if abs(figure) < 10 else f"{figure:+.2f}" if abs(figure) < 1000 else f"{figure:+,.0f}"


def unsigned(figure: float) -> str:
    return signed(abs(figure)).lstrip("+")


def mean_sd(interval: Interval, form: Callable[[float], str] = show) -> str:
    if not interval.n:
        return "-"
    return form(interval.mean) + (f" ± {form(interval.sd)}" if interval.sd is not None else "")


def span(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return ""
    return f"{signed(interval.low)} to {signed(interval.high)}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


# -- the table


def columns(results: Results, summaries: list[Summary]) -> list[list[str]]:
    """Columns of the table with their headings; those in which all rows agree are left out."""
    rows = [row(results, s) for s in summaries]
    names = list(rows[0]) if rows else []
    kept = [n for n in names if n not in ("start", "method", "steps") or len({r[n] for r in rows} - {"-"}) > 1]
    kept = [n for n in kept if n not in ("after the swap", "recovered") or not results["from_scratch"]]
    return [[name, *(row[name] for row in rows)] for name in kept]


def row(results: Results, s: Summary) -> dict[str, str]:
    kind, control = s.kind, s.kind.is_control
    seeds = (
        f"{s.figure.n} of {s.figure.n + len(s.failed) + len(s.missing)}" if s.failed or s.missing else f"{s.figure.n}"
    )
    compared = not control and s.figure.n > 0
    return {
        "variant": kind.variant,
        "start": "-" if control else kind.start,
        "method": "-" if control else kind.method,
        "steps": str(kind.steps),
        "verdict": (failure(s) if s.failed else s.verdict) if not control or s.failed else "-",
        main_name(results): mean_sd(s.figure),
        "difference": signed(s.difference.mean) if compared else "-",
        "95 % interval": (span(s.difference) or "-") if compared else "-",
        "after the swap": signed(s.cost.mean) if compared else "-",
        "recovered": percent(s.recovered) if s.recovered is not None else "-",
        "time a step": f"{median(s.time):.2f} x" if s.time and compared else "-",
        "seeds": seeds,
    }


def failure(s: Summary) -> str:
    failed = f"failed {len(s.failed)} of {s.figure.n + len(s.failed)}"
    return failed if s.verdict in ("failed", "") else f"{failed}, else {s.verdict}"


def rank_columns(ranking: Ranking) -> list[list[str]]:
    found = ranking.ranks
    return [
        [ranking.axis + " at equal time" * bool(ranking.budgets), *(ranking.named(rank.value) for rank in found)],
        ["mean rank", *(f"{rank.mean:.2f} of {len(found)}" for rank in found)],
        ["best", *(f"{rank.best} of {rank.count}" for rank in found)],
        [f"against {found[0].value}", *(signed(rank.behind.mean) if rank.behind else "-" for rank in found)],
        ["95 % interval", *((rank.behind and span(rank.behind)) or "-" for rank in found)],
        ["sign test p", *("-" if rank.chance is None else f"{rank.chance:.2g}" for rank in found)],
    ]


# -- words


def reading(results: Results, summaries: list[Summary]) -> list[str]:
    """What the figures say, one sentence or a few for each kind; the first ones for the grid as a whole."""
    lines = [line for line in (progress(results), overview(results, summaries)) if line]
    compared = [s for s in summaries if not s.kind.is_control]
    told = compared if len(compared) <= MANY else best_of_each(results, compared)
    if len(told) < len(compared):
        lines.append(
            "Told here is, of each variant, the way with the best mean at the largest budget, which is partly luck."
        )
    lines += [sentence(results, s) for s in told]
    lines += [rank_sentence(ranking, main_name(results)) for ranking in rankings(results)]
    decided = sum(s.difference.low is not None for s in compared)
    if decided >= 5:
        lines.append(
            f"There are {decided} intervals at 95 %: by chance alone about {decided / 20:.1g} of them would miss the "
            "true difference."
        )
    return lines


def progress(results: Results) -> str:
    done, asked = len(read_cells(results)), len(results["grid"])
    return f"Not finished: {done} of {asked} models are there, and what follows is about these." if done < asked else ""


def overview(results: Results, summaries: list[Summary]) -> str:
    found = {v: [label(s.kind, results) for s in summaries if s.verdict == v] for v in (BETTER, SAME, WORSE, UNDECIDED)}
    parts = [
        f"{v}: {', '.join(names) if len(names) <= MANY // 2 else len(names)}" for v, names in found.items() if names
    ]
    return f"Against a control of equal budget: {'; '.join(parts)}." if parts else ""


def best_of_each(results: Results, compared: list[Summary]) -> list[Summary]:
    largest = max(s.kind.steps for s in compared)
    sign = -1 if results["higher_is_better"] else 1
    best: dict[str, Summary] = {}
    for s in compared:
        if s.kind.steps == largest and s.figure.n:
            rival = best.get(s.kind.variant)
            if rival is None or sign * s.difference.mean < sign * rival.difference.mean:
                best[s.kind.variant] = s
    return list(best.values())


def sentence(results: Results, s: Summary) -> str:
    name, main = label(s.kind, results), main_name(results)
    if not s.figure.n:
        return f"**{name}** can't be trained like this: {failures(s)}."
    limit = f"±{unsigned(s.margin)} ({100 * results['config']['margin']:g} % of the control's)"
    away = f"{'higher' if s.difference.mean > 0 else 'lower'} by {unsigned(s.difference.mean)}, " + (
        f"95 % interval {span(s.difference)}"
    )
    said = {
        SAME: f"is **as good as the control**: the difference in {main} is {signed(s.difference.mean)}, and its 95 % "
        f"interval, {span(s.difference)}, lies within the {limit} that count as none",
        BETTER: f"is **better than the control**: {main} is {away}",
        WORSE: f"is **worse than the control**: {main} is {away}",
        UNDECIDED: f"is **undecided**: {main} differs by {signed(s.difference.mean)}, which may be chance (95 % "
        f"interval {span(s.difference)}), and the interval reaches beyond the {limit} that count as none"
        f"{more_seeds(s)}",
        ONE_SEED: f"has **one seed**: {main} differs by {signed(s.difference.mean)}, and nothing says how much of "
        "that is chance; take five seeds",
    }[s.verdict]
    parts = [f"**{name}** {said}."]
    parts += [f"{failures(s)}.".capitalize()] if s.failed else []
    parts += [] if results["from_scratch"] else [cost_sentence(s)]
    return " ".join([*parts, time_sentence(s), worth(s)]).replace("  ", " ").strip()


def failures(s: Summary) -> str:
    reasons = "; ".join(dict.fromkeys(s.failed.values()))
    return f"{len(s.failed)} of {s.figure.n + len(s.failed)} seeds failed ({reasons})"


def more_seeds(s: Summary) -> str:
    needed = seeds_needed(s.difference, s.margin)
    return f"; about {needed} seeds would bring it down to that" if needed and needed > s.difference.n else ""


def cost_sentence(s: Summary) -> str:
    if abs(s.cost.mean) <= s.margin:
        return f"The swap itself cost nothing that matters ({signed(s.cost.mean)})."
    if s.recovered is None:
        chance = ", which may be chance" if s.cost.low is None or s.cost.low <= 0 <= s.cost.high else ""
        return f"Right after the swap it was better already ({signed(s.cost.mean)}{chance})."
    back = "more than all" if s.recovered > 1 else percent(s.recovered) if s.recovered > 0 else "nothing"
    return f"Right after the swap it was {signed(s.cost.mean)}; training gave back {back} of that."


def time_sentence(s: Summary) -> str:
    if not s.time:
        return ""
    low, high = min(s.time), max(s.time)
    between = f" ({low:.2f} to {high:.2f} over seeds)" if len(s.time) > 1 else ""
    busy = "; timings that far apart say little (was the machine busy?)" if speed(s) == "unclear" else ""
    return f"A training step took {median(s.time):.2f} times the control's{between}{busy}."


def speed(s: Summary) -> str:
    """faster or slower where all seeds agree and the difference is more than a few percent."""
    if not s.time or max(s.time) > BUSY * min(s.time):
        return "unclear"
    if min(s.time) > 1 + STEADY:
        return "slower"
    return "faster" if max(s.time) < 1 - STEADY else "steady"


def worth(s: Summary) -> str:
    """Whether the swap is worth it, on these figures."""
    told = {
        (BETTER, "slower"): "Worth it, where the slower step is.",
        (BETTER, "steady"): "Worth it on these figures.",
        (BETTER, "faster"): "Worth it twice: better, and faster.",
        (BETTER, "unclear"): "Worth it, if its speed turns out to be right.",
        (SAME, "slower"): "Nothing gained here and a slower step: it needs a reason that this table doesn't show.",
        (SAME, "steady"): "Neither gained nor lost here: free to choose.",
        (SAME, "faster"): "Worth it: as good, and faster.",
        (SAME, "unclear"): "Neither gained nor lost here, as far as its speed is right.",
        (WORSE, "slower"): "Not worth it at this budget: worse, and slower.",
        (WORSE, "steady"): "Not worth it at this budget, unless for a reason that this table doesn't show.",
        (WORSE, "faster"): "A trade of quality for speed.",
        (WORSE, "unclear"): "Not worth it at this budget, unless for a reason that this table doesn't show.",
    }
    return told.get((s.verdict, speed(s)), "")


def rank_sentence(ranking: Ranking, main: str) -> str:
    first, second = ranking.ranks[:2]
    among = {"method": "the methods", "start": "the starts"}[ranking.axis]
    if ranking.budgets:
        among = f"{', '.join(map(ranking.named, ranking.budgets))}, which take about the same time"
    order = ", ".join(f"{rank.value} {rank.mean:.2f}" for rank in ranking.ranks)
    if first.mean == second.mean:
        best = f"{first.best} and {second.best} of {first.count}"
        return f"Of {among}, {first.value} and {second.value} rank alike: best in {best} comparisons ({order})."
    text = f"Of {among}, {first.value} ranks first: best in {first.best} of {first.count} comparisons ({order})."
    told = "could be chance" if second.chance > 0.05 else "is more than chance"
    gap = ""
    if second.behind:  # which rank and mean need not agree about
        way = "higher" if second.behind.mean > 0 else "lower"
        gap = f", whose mean {main} is {way} by {unsigned(second.behind.mean)}"
    return f"{text} Its lead over {second.value}{gap}, {told} (sign test, p = {second.chance:.2g})."


def definitions(results: Results, summaries: list[Summary]) -> dict[str, str]:
    """What the columns mean."""
    better = "higher" if results["higher_is_better"] else "lower"
    margin = f"{100 * results['config']['margin']:g} %"
    largest = max((s.difference.n for s in summaries), default=0)
    quantile = f" (t = {t_quantile(largest - 1):.3f} for {largest} seeds)" if largest > 1 else ""
    found = {
        main_name(results): f"on held-out data, mean ± standard deviation over seeds; {better} is better.",
        "difference": "from the unpatched control of the same seed, baseline, data and number of steps"
        + (", distilled from itself since no method here looks at labels" if results["control_method"] else "")
        + "; the mean over seeds. Pairs are compared, so what a seed does to both isn't in it.",
        "95 % interval": f"of the mean difference, by Student's t over seeds{quantile}.",
        "verdict": f"same: the interval lies within ±{margin} of the control's figure; better, worse: it lies on one "
        "side of zero and reaches beyond that; undecided: it holds zero and reaches beyond.",
    }
    if not results["from_scratch"]:
        found["after the swap"] = "the difference before any training."
        found["recovered"] = "how much of that is gone at the end; - where the swap cost less than the margin."
    found["time a step"] = (
        "of training (the median step), against the control's on the same machine; median over seeds."
    )
    return found


# -- what it was measured on


def budget(results: Results) -> str:
    c = results["config"]
    steps = " and ".join(map(str, c["steps"])) + " steps"
    begin = "from scratch" if results["from_scratch"] else baseline(results)
    seeds = ", ".join(map(str, c["seeds"]))
    accumulation = c.get("gradient_accumulation_steps", 1)
    batch = f"{c['batch_size']} x {accumulation}" if accumulation > 1 else f"{c['batch_size']}"
    rate = f"learning rate {c['learning_rate']:g}"
    items = f"{batch} x {c['block_size']} tokens" if "block_size" in c else f"{batch} items"
    return f"Task {results['task']}, {begin}; {steps} of {items}; {rate}; seeds {seeds}."


def baseline(results: Results) -> str:
    trained = [stage["step"] for name, stage in results["stages"].items() if name.startswith("baseline-")]
    source = results["config"].get("model") or "a model made from scratch"
    return f"starting from {source}" + (f", trained for {max(trained)} steps first" if any(trained) else "")
