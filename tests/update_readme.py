"""The README's generated blocks: `python tests/update_readme.py` writes them, tests/test_readme.py compares them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "recipes/results"
SWEEP = ROOT / "tests/sweeps/norm_swap.json"
EXACT = ROOT / "tests/sweeps/exact.json"
POSITIONS = ROOT / "tests/sweeps/positions.json"
NATIVE_ROPE = ROOT / "tests/sweeps/native_rope.json"
NATIVE_EXPORT = ROOT / "tests/sweeps/native_export.json"
SPEED = RESULTS / "benchmark/results.md"
PLACES = RESULTS / "places/results.md"
PARTS = RESULTS / "parts/results.json"
REPAIR = ROOT / "tests/sweeps/repair.md"

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/sweeps"), str(ROOT / "recipes")]


def _cli(*args: str) -> str:
    from typer.testing import CliRunner

    from hfpatch.cli import app

    return CliRunner().invoke(app, list(args)).output.rstrip()


def plan() -> str:
    return f"```text\n{_cli('plan', 'config:gpt2', '--norm', 'rms', '--pos', 'rope')}\n```"


def positions() -> str:
    totals = json.loads(POSITIONS.read_text())
    return (
        f"**{totals['supported']} of {totals['of']} classes** that own a table (transformers {totals['transformers']}) "
        f"take RoPE, {totals['refused']} are refused with a reason, **{totals['wrong anywhere']} are wrong**; "
        f"{totals['beyond']} classes beyond that list do as well. Each with its figures, or the reason, in "
        "[tests/sweeps/positions.md](tests/sweeps/positions.md)."
    )


def with_curves(folder: str, caption: str) -> str:
    text = re.sub(r"\A# .*\n", "", (RESULTS / folder / "results.md").read_text()).strip()
    return f"{text}\n\n![{caption}](recipes/results/{folder}/curves.png)"


def results() -> str:
    return with_curves("lm", "Held-out perplexity after the patch")


def encoder() -> str:
    dyt = json.loads((RESULTS / "encoder_dyt/results.json").read_text())
    swapped, healed = (dyt["stages"][name] for name in ("swapped", "healed"))
    rms = json.loads((RESULTS / "encoder_rms/results.json").read_text())["stages"]
    short = json.loads((RESULTS / "encoder_short/results.json").read_text())
    minutes, quick = short["wall_seconds"] / 60, short["stages"]["healed"]
    more = (
        f"The file's own {quick['step']} steps (`--mixed_precision bf16`) give {quick['end']['similarity']:.3f} "
        f"in {minutes:.0f} minutes ([recipes/results/encoder_short](recipes/results/encoder_short/results.md)). "
        f"With `--patch dyt` similarity is {swapped['start']['similarity']:.3f} after the repair and "
        f"{healed['end']['similarity']:.3f} after {healed['step']:,} steps "
        "([recipes/results/encoder_dyt](recipes/results/encoder_dyt/results.md)). With `--patch rms` the repair alone "
        f"gives {rms['swapped']['start']['similarity']:.4f}, and {rms['healed']['step']} steps lead away from it, "
        f"{rms['healed']['end']['similarity']:.4f}: there is nothing to heal "
        "([recipes/results/encoder_rms](recipes/results/encoder_rms/results.md))."
    )
    return f"{with_curves('encoder', 'Held-out similarity to the unpatched MiniLM')}\n\n{more}"


def compared(folder: str, caption: str) -> str:
    """A report of compare.py without its definitions, which the one of `classify` has."""
    blocks = (RESULTS / folder / "results.md").read_text().strip().split("\n\n")
    told = [block for block in blocks if not re.match(r"# |\*\w", block)]
    figure = f"![{caption}](recipes/results/{folder}/curves.png)"
    return "\n\n".join([*told, f"[The full report](recipes/results/{folder}/report.html)", figure])


def methods() -> str:
    import paired
    from compare_report import rank_sentence

    large = json.loads((RESULTS / "methods_100m/results.json").read_text())
    parameters, steps = large["stages"]["baseline-0"]["parameters"], large["stages"]["baseline-0"]["step"]
    seeds = len(large["config"]["seeds"])
    told = (
        f"Starts and methods for another swap at {parameters / 1e6:.0f}M parameters, trained for {steps} steps, "
        f"{seeds} {'seeds' if seeds > 1 else 'seed'}:"
    )
    grid, longer = (json.loads((RESULTS / name / "results.json").read_text()) for name in ("methods", "methods_time"))
    budgets = paired.equal_times(longer, timed=grid)
    ranking = paired.Ranking("method", paired.ranks(longer, "method", budgets), budgets)
    timed = rank_sentence(ranking, longer["main"])
    timed = f"By the times of these steps: {timed[0].lower()}{timed[1:]} `{longer['command']}` gives "
    timed += "[the full report](recipes/results/methods_time/report.html)."
    caption = "Held-out perplexity by start and method"
    return "\n\n".join([compared("methods", caption), timed, told, compared("methods_100m", caption)])


def scratch() -> str:
    lengths = (RESULTS / "scratch_lengths/results.md").read_text().strip()
    beyond = "![Perplexity by length](recipes/results/scratch_lengths/lengths.png)"
    return "\n\n".join([compared("scratch", "Held-out perplexity from scratch"), lengths, beyond])


def classify() -> str:
    return with_curves("classify", "Held-out F1 of both norms, mean and spread over seeds")


def sweep() -> str:
    totals = json.loads(SWEEP.read_text())
    return (
        f"**{totals['converted']} of {totals['of']} model types** "
        f"(transformers {totals['transformers']}); what was kept and why, and the types that don't instantiate, are in "
        "[tests/sweeps/norm_swap.md](tests/sweeps/norm_swap.md)."
    )


def exact() -> str:
    totals, all_types = json.loads(EXACT.read_text()), json.loads(SWEEP.read_text())["of"]
    count = {kind: totals.get(kind, 0) for kind in ("exact", "in part", "refused", "wrong", "killed", "failed")}
    return (
        f"Of {all_types} model types with a LayerNorm {len(totals['types'])} were examined (transformers "
        f"{totals['transformers']}): **{count['exact']} are exact in full**, {count['in part']} in part, "
        f"{count['refused']} refused, {count['killed'] + count['failed']} ran out of time or memory, "
        f"**{count['wrong']} wrong**; each with its error and the reasons in "
        "[tests/sweeps/exact.md](tests/sweeps/exact.md)."
    )


def native_rope() -> str:
    totals = json.loads(NATIVE_ROPE.read_text())
    yes = {name: totals[name].get("yes", 0) for name in ("same", "theta", "linear", "partial")}
    wrong = sum(count for name in yes for answer, count in totals[name].items() if answer == "DIFFERS")
    return (
        f"Of {totals['rotating']} model types that rotate (transformers {totals['transformers']}) {yes['same']} stay "
        f"the same bit for bit; another theta ({yes['theta']}), linear scaling ({yes['linear']}) and partial rotation "
        f"({yes['partial']}) equal transformers' own model with these settings, likewise; the rest is refused with its "
        f"reason, or moves nothing in so small a model; **{wrong} differ** "
        "([tests/sweeps/native_rope.md](tests/sweeps/native_rope.md))."
    )


def native_export() -> str:
    import native_export as sweep

    return sweep.compact(json.loads(NATIVE_EXPORT.read_text()))


def versions() -> str:
    import versions as sweep

    return sweep.table(json.loads(sweep.RESULTS.read_text()))


def speed() -> str:
    """The tables of whole models and of replaced modules; that of norms and rotations by themselves is long."""
    figure = "![Compiled, patched against unpatched](recipes/results/benchmark/benchmark.png)"
    places = (
        "Eager, what the replaced modules take where they stand in the model, which isn't lost in the noise of the "
        "whole (in a compiled one nothing stands by itself):"
    )
    whole, replaced = (path.read_text().strip() for path in (SPEED, PLACES))
    return "\n\n".join([whole, figure, places, replaced, parts()])


def parts() -> str:
    """Where the table of norms and rotations is, and what it says of RMSNorm where nothing fuses it."""
    from bench_micro import BACKWARD, BASIS
    from bench_report import find
    from timing import middle, ratios

    measured = json.loads(PARTS.read_text())
    groups = [group for group in measured["groups"] if (group["case"], group["work"]) == ("norm", BACKWARD)]

    def against_layernorm(subject: str) -> str:
        found = [middle(ratios(*(find(group, name, "eager") for name in (subject, BASIS["norm"])))) for group in groups]
        return "{:.2f} to {:.2f}".format(*(choose(found)[0] for choose in (min, max)))

    return (
        "Norms and rotations by themselves: [recipes/results/parts](recipes/results/parts/results.md) "
        f"(`{measured['command']}`). Eager on a CPU the forward and backward of RMSNorm took "
        f"{against_layernorm('RMSNorm')} times LayerNorm's time in hfpatch 0.1.0, which had a gradient of its own "
        f"there; those of transformers' LlamaRMSNorm, {against_layernorm('LlamaRMSNorm')} times."
    )


def repair() -> str:
    text = REPAIR.read_text().strip()
    return text[text.index("## ") :].replace("## ", "### ")


BLOCKS = {
    "plan": plan,
    "results": results,
    "encoder": encoder,
    "classify": classify,
    "methods": methods,
    "scratch": scratch,
    "repair": repair,
    "sweep": sweep,
    "exact": exact,
    "positions": positions,
    "native_rope": native_rope,
    "speed": speed,
    "native_export": native_export,
    "versions": versions,
}


def block(name: str, text: str) -> tuple[int, int]:
    """Where the text of a block starts and ends."""
    match = re.search(rf"<!-- {name}: [^\n]* -->\n(.*?)<!-- /{name} -->", text, re.S)
    assert match, f"README.md has no block {name!r}"
    return match.span(1)


def main(names: Iterable[str] = ()) -> None:
    """Writes the named blocks, or all."""
    text = README.read_text()
    for name in names or BLOCKS:
        start, end = block(name, text)
        text = f"{text[:start]}{BLOCKS[name]()}\n{text[end:]}"
    README.write_text(text)


if __name__ == "__main__":
    main(sys.argv[1:])
