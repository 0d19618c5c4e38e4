"""Figures of a grid against its control: paired by seed and budget, with an interval and a verdict."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from scipy import stats

from .settings import CONTROL

LEVEL = 0.95  # of every interval
ALIKE = 0.1  # share by which times may differ that are called equal
BETTER, SAME, WORSE, UNDECIDED, ONE_SEED = "better", "same", "worse", "undecided", "one seed"

Record = dict[str, Any]


class Kind(NamedTuple):
    """What is compared: everything about a cell but its seed."""

    variant: str
    start: str
    method: str
    steps: int

    @property
    def is_control(self) -> bool:
        return self.variant == CONTROL


class Cell(NamedTuple):
    """One model of the grid. The control has no start: it is the unpatched copy, trained on."""

    kind: Kind
    seed: int

    @property
    def name(self) -> str:
        """Of the cell's stage in its run."""
        return "-".join(map(str, [*filter(None, self.kind), "seed", self.seed]))


@dataclass(frozen=True)
class Interval:
    """Mean of n figures, their standard deviation, and the t-interval of the mean; None where n is 1."""

    mean: float
    sd: float | None
    low: float | None
    high: float | None
    n: int


def t_interval(figures: Sequence[float]) -> Interval:
    """mean ± t(n - 1) sd / sqrt(n), two-sided at 95 % (Student 1908), sd with n - 1 in the denominator."""
    mean, n = fmean(figures), len(figures)
    if n == 1:
        return Interval(mean, None, None, None, 1)
    sd = stdev(figures)
    half = t_quantile(n - 1) * sd / math.sqrt(n)
    return Interval(mean, sd, mean - half, mean + half, n)


def t_quantile(freedom: int) -> float:
    """Student's t below which all but (1 - LEVEL) / 2 lie."""
    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))


def verdict(difference: Interval, margin: float, higher_is_better: bool) -> str:
    """What the interval of (cell - control) says, where a difference below `margin` doesn't matter.

    same: the whole interval lies within the margin. better, worse: it lies on one side of zero, and reaches beyond the
    margin. undecided: it holds zero and reaches beyond the margin, so more seeds are needed.
    """
    if difference.low is None or difference.high is None:
        return ONE_SEED
    if -margin <= difference.low and difference.high <= margin:
        return SAME
    if difference.low <= 0 <= difference.high:
        return UNDECIDED
    return BETTER if (difference.mean > 0) == higher_is_better else WORSE


def seeds_needed(difference: Interval, margin: float) -> int | None:
    """About how many seeds would bring the interval's half width down to the margin, at the spread seen so far."""
    if not difference.sd or not margin:
        return None
    for n in range(2, 1000):
        if t_quantile(n - 1) * difference.sd / math.sqrt(n) <= margin:
            return n
    return None


@dataclass(frozen=True)
class Summary:
    """One kind of cell over its seeds.

    Attributes:
        figure: the main figure at the end; difference: from the control of the same seed and budget.
        cost: the same difference right after the swap, before training.
        recovered: share of that cost that is gone at the end, 1 - difference / cost; None where the swap cost less
            than the margin.
        time: time of a training step over the control's, one ratio a seed; empty where it wasn't measured.
        others: further figures at the end, and their differences from the control.
        failed: why models of this kind have no figure (a loss that isn't finite), by seed.
        missing: seeds that aren't finished.
    """

    kind: Kind
    figure: Interval
    difference: Interval
    cost: Interval
    margin: float
    verdict: str
    recovered: float | None
    time: tuple[float, ...]
    others: dict[str, tuple[Interval, Interval]]
    failed: dict[int, str]
    missing: tuple[int, ...]


def grid_of(results: Record) -> list[Cell]:
    """Every cell that is asked for."""
    return [Cell(Kind(*(record[name] for name in Kind._fields)), record["seed"]) for record in results["grid"]]


def read_cells(results: Record) -> dict[Cell, Record]:
    """The stages of the cells that are done; those of cells that failed say why."""
    stages = results["stages"]
    return {cell: stages[cell.name] for cell in grid_of(results) if cell.name in stages}


def summarise(results: Record) -> list[Summary]:
    """A summary for each kind of which one seed and its control are finished, in the grid's order, controls first.

    Raises:
        ValueError: a cell and its control were not trained for the same number of steps on the same batches.
    """
    cells, config = read_cells(results), results["config"]
    planned = grid_of(results)
    kinds = sorted(dict.fromkeys(cell.kind for cell in planned), key=lambda kind: not kind.is_control)
    found = []
    for kind in kinds:
        pairs, failed, missing = {}, {}, []
        for cell in (cell for cell in planned if cell.kind == kind):
            record, control = cells.get(cell), cells.get(control_of(cell, results))
            if record and record.get("failed"):
                failed[cell.seed] = record["failed"]
            elif record is None or control is None or control.get("failed"):
                missing.append(cell.seed)
            else:
                check_budgets(cell, record, control)
                pairs[cell.seed] = (record, control)
        if pairs or failed:
            found.append(summary(kind, pairs, failed, tuple(missing), results, config["margin"]))
    return found


def control_of(cell: Cell, results: Record) -> Cell:
    return Cell(control_kind(results, cell.kind.steps), cell.seed)


def control_kind(results: Record, steps: int) -> Kind:
    return Kind(CONTROL, "", results["control_method"], steps)


def check_budgets(cell: Cell, record: Record, control: Record) -> None:
    for what, value in {"steps": lambda r: r["step"], "losses": lambda r: len(r["train_loss"])}.items():
        if not value(record) == value(control) == cell.kind.steps:
            raise ValueError(
                f"unequal budgets: {cell.name} has {value(record)} {what}, its control "
                f"{value(control)}, and both should have {cell.kind.steps}"
            )


def summary(
    kind: Kind,
    pairs: dict[int, tuple[Record, Record]],
    failed: dict[int, str],
    missing: tuple[int, ...],
    results: Record,
    margin: float,
) -> Summary:
    main = results["main"]
    nothing = Interval(math.nan, None, None, None, 0)
    if not pairs:
        return Summary(kind, nothing, nothing, nothing, 0.0, "failed", None, (), {}, failed, missing)

    def at(moment: str, name: str) -> tuple[Interval, Interval]:
        figures = [(record[moment][name], control[moment][name]) for record, control in pairs.values()]
        return t_interval([a for a, _ in figures]), t_interval([a - b for a, b in figures])

    figure, difference = at("end", main)
    _, cost = at("start", main)
    lost = -cost.mean if results["higher_is_better"] else cost.mean
    margin *= abs(fmean(control["end"][main] for _, control in pairs.values()))
    first = next(iter(pairs.values()))
    shared = [n for n, v in first[0]["end"].items() if n != main and v is not None]
    shared = [n for n in shared if all(p["end"].get(n) is not None for pair in pairs.values() for p in pair)]
    return Summary(
        kind,
        figure,
        difference,
        cost,
        margin,
        "" if kind.is_control else verdict(difference, margin, results["higher_is_better"]),
        1 - difference.mean / cost.mean if lost > margin else None,
        tuple(time_ratios(pairs.values())),
        {name: at("end", name) for name in shared},
        failed,
        missing,
    )


def time_ratios(pairs: Iterable[tuple[Record, Record]]) -> list[float]:
    """The median time of a step over that of the control's, which has seen the same batches."""
    times = [(record.get("step_seconds"), control.get("step_seconds")) for record, control in pairs]
    return [own / control for own, control in times if own and control]


@dataclass(frozen=True)
class Rank:
    """How one value of an axis fares against the others.

    Attributes:
        mean: of its ranks, 1 for the best; best: how often it was the best or as good; count: comparisons.
        behind: the main figure's difference from that of the value which ranks first; None for that one itself.
        chance: two-sided p of the sign test against the value which ranks first; None for that one itself.
    """

    value: str
    mean: float
    best: int
    count: int
    behind: Interval | None
    chance: float | None


@dataclass(frozen=True)
class Ranking:
    """The values of one axis of the grid ("method", "start") against each other, best first.

    Attributes:
        budgets: steps of each value, where they are compared at equal time; empty: at equal steps.
    """

    axis: str
    ranks: list[Rank]
    budgets: dict[str, int]

    def named(self, value: str) -> str:
        return f"{value} ({self.budgets[value]} steps)" if self.budgets else value


def rankings(results: Record) -> list[Ranking]:
    """Methods at equal steps and, where the grid has budgets for it, at equal time; starts."""
    asked: list[tuple[str, dict[str, int]]] = [("method", {}), ("start", {})]
    if budgets := equal_times(results):
        asked.insert(1, ("method", budgets))
    found = [Ranking(axis, ranks(results, axis, steps), steps) for axis, steps in asked]
    return [ranking for ranking in found if ranking.ranks]


def equal_times(results: Record) -> dict[str, int]:
    """For each method the budget that takes as long as the slowest method's smallest one, to within ALIKE.

    Time is that of a step, the median over all variants, starts and seeds, against the control's of the same seed and
    budget. Empty where a method has no such budget or no time, and where all have the same.
    """
    ratios: dict[str, list[float]] = {cell.kind.method: [] for cell in grid_of(results) if not cell.kind.is_control}
    for found in summarise(results):
        if found.kind.method in ratios and not found.kind.is_control:
            ratios[found.kind.method].extend(found.time)
    if not ratios or not all(ratios.values()):
        return {}
    a_step = {method: median(times) for method, times in ratios.items()}
    steps = sorted({cell.kind.steps for cell in grid_of(results)})
    target = steps[0] * max(a_step.values())
    budgets = {method: min(steps, key=lambda n: abs(n * time - target)) for method, time in a_step.items()}
    alike = all(abs(budgets[method] * time / target - 1) <= ALIKE for method, time in a_step.items())
    return budgets if alike and len(set(budgets.values())) > 1 else {}


def ranks(results: Record, axis: str, budgets: Mapping[str, int] | None = None) -> list[Rank]:
    """The values of one axis of the grid ("method", "start") against each other, best first; none where there is one.

    Cells that agree in everything else and in the seed are ranked by the main figure at the end, equal ones sharing
    the mean of their ranks; a failed one comes last. Only comparisons in which all values are finished count.

    Args:
        budgets: steps of each value, for a comparison at other than equal steps.
    """
    place, budget = Kind._fields.index(axis), Kind._fields.index("steps")
    values = list(dict.fromkeys(cell.kind[place] for cell in grid_of(results) if not cell.kind.is_control))
    sign = -1 if results["higher_is_better"] else 1
    apart = {place, budget} if budgets else {place}  # in which the cells of a comparison differ
    blocks: dict[Any, dict[str, float]] = {}
    for cell, record in read_cells(results).items():
        value = cell.kind[place]
        if not cell.kind.is_control and (not budgets or budgets.get(value) == cell.kind.steps):
            rest = (*(field for i, field in enumerate(cell.kind) if i not in apart), cell.seed)
            end = math.inf if record.get("failed") else sign * record["end"][results["main"]]
            blocks.setdefault(rest, {})[value] = end
    complete = [block for block in blocks.values() if len(block) == len(values)]
    if len(values) < 2 or not complete:
        return []
    ranked = stats.rankdata([[block[value] for value in values] for block in complete], axis=1)  # 1 for the least
    mean = dict(zip(values, ranked.mean(0).tolist(), strict=True))
    values.sort(key=lambda value: mean[value])
    found = []
    for value in values:
        best = sum(block[value] == min(block.values()) for block in complete)
        gaps = [sign * (b[value] - b[values[0]]) for b in complete if math.isfinite(b[value] + b[values[0]])]
        behind = t_interval(gaps) if gaps and value != values[0] else None
        chance = sign_test([b[value] for b in complete], [b[values[0]] for b in complete])
        found.append(Rank(value, mean[value], best, len(complete), behind, None if value == values[0] else chance))
    return found


def sign_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p that as many of the pairs lie to one side by chance; equal pairs don't count."""
    above = [x > y for x, y in zip(a, b, strict=True) if x != y]
    return float(stats.binomtest(sum(above), len(above)).pvalue) if above else 1.0
