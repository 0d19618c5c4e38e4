"""What a reader sees of gpu_check: the goals with their verdicts, the device, the tests, and tables of the figures."""

from collections.abc import Iterator
from typing import Any

import pandas as pd
from methods import CONTROL
from paired import spread

from hfpatch.schemes.verdicts import EXACT

from .bench_micro import COPY
from .bench_models import FORWARD, TOKEN, TRAINING
from .bench_report import MICRO, Timing, against_basis, colours_of, failures, part_table, show_time
from .device import KEPT, KERNELS, LAUNCHES, PEAK
from .report import machine, table
from .timing import BREAKS, GRAPHS, REGIONS

PASS, MISS, OPEN = "pass", "**miss**", "not measured"
AT_MOST, OF_COPY, FASTER = 1.0, 0.9, 1.1
OURS = ("RMSNorm", "RMSNorm, no shift", "RoPE")
CONVERSIONS = ("rms", "rms then folded")  # of a pre-norm model, which keep its function
CLAIM = "arXiv:2605.14521 says 2 to 12 % end to end"
NOTES = (
    "*control*: an unpatched copy: that its ratio isn't 1 is chance. Compiled are the blocks, for *token* the whole "
    "model, in a CUDA graph. *token*: the forward of one token at batch 1 behind a prompt in a static cache, without "
    "what `generate` does around it. *rms then folded*: an RMSNorm whose gain and shift are in the layers behind it.",
    f"*{KERNELS}*: that one run has the GPU do; *{LAUNCHES}*: calls for them. *{PEAK}*: above what was held before. "
    f"*{KEPT}*: for the backward, without the parameters.",
    "*of copy*: bytes that the work has to read and write at the least, per second, over those of a copy of the same "
    "tensor, timed in the same rounds. *basis*: LayerNorm, for rotations transformers' own.",
)
TINY_NOTE = "**A try of the script with tiny sizes, without code generation: no figure here says anything.**"

Race = dict[str, Any]


def gpu_report(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    done, config = results["done"], results["config"]
    races = [race for race in done.values() if "timings" in race]
    models, micro = ([race for race in races if race["part"] == part] for part in ("models", MICRO))
    lines = [TINY_NOTE, ""] if config["tiny"] else []
    for about in (one["environment"] for one in done.values() if "environment" in one):
        lines += ["; ".join(f"{name} {told}" for name, told in about.items()) + ".", ""]
    for tests in (one for one in done.values() if "summary" in one):
        stopped = ", stopped when its time was over" if tests["stopped"] else ""
        failed = [f"* failed: {name}" for name in tests["failed"]]
        lines += [f"`pytest -m gpu`: {tests['summary']}{stopped}.", "", *failed, *[""] * bool(failed)]
    lines += [*table(goals(models, micro)), ""]
    if models:
        lines += [*part_table(models), "", NOTES[0], ""]
    if counted := counts(models):
        lines += [*table(counted), "", NOTES[1], ""]
    if micro:
        lines += [*table(fractions(micro)), "", NOTES[2], ""]
    missing = [f"left out: no time: {name}" for name in results["left_out"]]
    missing += [f"broke: {name}: {reason}" for name, reason in results["broken"].items()]
    missing += failures(races)
    if missing:
        lines += ["Not measured:", "", *(f"* {line}" for line in missing), ""]
    lines.append(f"Medians of {config['repeats']} samples taken in turn; in brackets their 95 % interval.")
    return "\n".join([*lines, machine(results), f"`{results['command']}`", ""])


# -- goals


def ratios(models: list[Race], *subjects: str, **told: str) -> Iterator[tuple[Timing, str, tuple[float, float, float]]]:
    """Of the races that are so, and of these subjects (none: all patches): what, and its time over the unpatched."""
    for race in models:
        for timing in race["timings"]:
            named = timing["subject"] in subjects if subjects else timing["subject"] != CONTROL
            ratio = against_basis(timing, race["timings"][0])
            if ratio and named and all(race[name] == value for name, value in told.items()):
                yield timing, f"{race['case']}, {race['work']}", ratio


def goals(models: list[Race], micro: list[Race]) -> list[dict[str, str]]:
    """A row for each goal: what was measured, and whether it is reached."""
    rows = []

    def add(goal: str, measured: str, reached: bool | None) -> None:
        verdict = OPEN if reached is None else PASS if reached else MISS
        rows.append({"goal": goal, "measured": measured, "verdict": verdict})

    found = list(ratios(models, mode="compiled"))
    slower = sorted((one for one in found if one[2][1] > AT_MOST), key=lambda one: -one[2][1])
    worst = f"; most: {slower[0][1]}, {slower[0][0]['subject']} {show_ratio(slower[0][2])}" if slower else ""
    measured, goal = f"{len(found) - len(slower)} of {len(found)}{worst}", f"patched at most {AT_MOST:.2f} of unpatched"
    add(f"compiled, {goal}, within its interval", measured, known(found, not slower))
    shares = [(share, what) for what, mode, share in copy_shares(micro, OURS) if mode == "compiled"]
    least = f"{sum(share >= OF_COPY for share, _ in shares)} of {len(shares)}"
    least += "; least: {:.2f}, {}".format(*min(shares)) if shares else ""
    reached = known(shares, all(share >= OF_COPY for share, _ in shares))
    add(f"compiled, RMSNorm and the rotation at least {OF_COPY:.2f} of a copy's bandwidth", least, reached)
    compiled = [t["counts"] for race in models for t in race["timings"] if t["seconds"] and t["counts"].get(REGIONS)]
    breaks = sum(one[BREAKS] for one in compiled)
    again = sum(max(0, one[GRAPHS] - one[REGIONS]) for one in compiled)
    add("no graph breaks", f"{breaks} in {len(compiled)} compiled models", known(compiled, not breaks))
    add("no recompilation by layer", f"{again} in {len(compiled)} compiled models", known(compiled, not again))
    for _, what, (middle_, low, high) in ratios(models, "none", work=TOKEN, mode="compiled"):
        speed = f"{1 / middle_:.3f} ({1 / high:.3f}-{1 / low:.3f}) times as fast"
        add(f"{what}: without norms at least {FASTER:.2f} times as fast", speed, 1 / middle_ >= FASTER)
    for work in (TRAINING, FORWARD, TOKEN):
        saved = [
            f"{timing['subject']}{'' if timing['outcome'].startswith(EXACT) else ' (not exact)'} saves "
            f"{100 * (1 - at):.1f} % ({100 * (1 - high):.1f} to {100 * (1 - low):.1f})"
            for timing, _, (at, low, high) in ratios(models, *CONVERSIONS, case="gpt2", work=work, mode="compiled")
        ]
        if saved:
            goal = f"what an exact LayerNorm to RMSNorm conversion gains, gpt2, {work}"
            rows.append({"goal": goal, "measured": "; ".join(saved), "verdict": CLAIM})
    return rows


def known(measured: list[Any], reached: bool) -> bool | None:
    return reached if measured else None


def show_ratio(ratio: tuple[float, float, float]) -> str:
    return "{:.3f} ({:.3f}-{:.3f})".format(*ratio)


# -- tables


def counts(models: list[Race]) -> list[dict[str, str]]:
    """A row for each subject: what was counted of one run, eager and compiled."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for race in models:
        for timing in race["timings"]:
            named = {"case": race["case"], "work": race["work"], "subject": timing["subject"]}
            for name in (KERNELS, LAUNCHES, PEAK, KEPT):
                if name in timing["counts"]:
                    row = rows.setdefault(tuple(named.values()), named)
                    number = timing["counts"][name]
                    told = f"{number:,}" if name in (KERNELS, LAUNCHES) else f"{number / 2**20:,.1f} MiB"
                    row[f"{name}, {race['mode']}"] = told
    return list(rows.values())


def of_copy(race: Race, timing: Timing) -> float | None:
    """Bytes that it moves per second, over a copy's."""
    copied = next((one for one in race["timings"] if one["subject"] == COPY), None)
    if copied is None or not copied["seconds"] or not timing["seconds"] or timing is copied:
        return None
    times = [b / a for a, b in zip(timing["seconds"], copied["seconds"], strict=True)]
    return spread(times)[0] * timing["traffic"] / copied["traffic"]


def copy_shares(micro: list[Race], subjects: tuple[str, ...] = ()) -> Iterator[tuple[str, str, float]]:
    """What was timed, in which mode, and its share of a copy's bandwidth."""
    for race in micro:
        for timing in race["timings"]:
            share = of_copy(race, timing)
            if share is not None and (not subjects or timing["subject"] in subjects):
                yield f"{timing['subject']}, {race['case']}, {race['work']}", race["mode"], share


def fractions(micro: list[Race]) -> list[dict[str, str]]:
    """A row for each module by itself: its time and its share of a copy's bandwidth, eager and compiled."""
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for race in micro:
        for timing in (timing for timing in race["timings"] if timing["seconds"]):
            named = {"case": race["case"], "work": race["work"], "subject": timing["subject"]}
            row, mode = rows.setdefault(tuple(named.values()), named), race["mode"]
            row[mode] = show_time(timing["seconds"])
            if (share := of_copy(race, timing)) is not None:
                row[f"{mode}, of copy"] = f"{share:.2f}"
    order = ["case", "work", "subject", "eager", "eager, of copy", "compiled", "compiled, of copy"]
    present = [name for name in order if any(name in row for row in rows.values())]
    return [{name: row.get(name, "-") for name in present} for row in rows.values()]


def draw_fractions(figure: Any, micro: list[Race]) -> None:
    """Each module's share of a copy's bandwidth over the width: a panel for each kind and work; dashed: eager."""
    points = [
        (*race["case"].split(", "), race["work"], race["mode"], timing["subject"], share)
        for race in micro
        for timing in race["timings"]
        if (share := of_copy(race, timing)) is not None
    ]
    frame = pd.DataFrame(points, columns=["kind", "width", "work", "mode", "subject", "share"])
    panels = list(frame.groupby(["kind", "work"], sort=False))
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    colours = colours_of(frame["subject"])
    for ((kind, work), shown), axis in zip(panels, axes, strict=True):
        for (subject, mode), line in shown.groupby(["subject", "mode"], sort=False):
            compiled = mode == "compiled"
            style = {"ls": "-" if compiled else ":", "marker": "o" if compiled else "x", "color": colours[subject]}
            axis.plot(line["width"], line["share"], label=subject if compiled else None, **style)
        axis.axhline(OF_COPY, color="0.2", lw=1, ls="--")
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize="small")
        axis.set(xlabel="channels", title=f"{kind}, {work}")
    axes[0].set(ylabel="share of a copy's bandwidth", ylim=(0, None))
    figure.suptitle("norms and rotations by themselves; dotted: eager", fontsize="medium")
