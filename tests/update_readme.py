"""The README's generated blocks: `python tests/update_readme.py` writes them, tests/test_readme.py compares them."""

from __future__ import annotations

import argparse
import json
import re
import site
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
PARTS = RESULTS / "parts/results.md"
REPAIR = ROOT / "tests/sweeps/repair.md"

site.addsitedir(str(ROOT / "tests/sweeps"))
site.addsitedir(str(ROOT / "recipes"))


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


def compared(folder: str, caption: str) -> str:
    """A report of compare.py without sentences that repeat rows, and its definitions, which that of `classify` has."""
    report = re.sub(r"(?m)^\* \*\*.*\n", "", (RESULTS / folder / "results.md").read_text())
    blocks = report.strip().split("\n\n")
    told = [block for block in blocks if not re.match(r"# |\*\w", block)]
    figure = f"![{caption}](recipes/results/{folder}/curves.png)"
    return "\n\n".join([*told, f"[What the columns mean](recipes/results/{folder}/results.md)", figure])


def methods() -> str:
    *_, timed = (RESULTS / "methods_time/results.md").read_text().strip().split("\n\n")
    timed = timed.replace("](../", "](recipes/results/")
    more = "([recipes/results/methods_time](recipes/results/methods_time/results.md))"
    return "\n\n".join([compared("methods", "Held-out loss by start and method"), f"{timed} {more}"])


def scratch() -> str:
    return compared("scratch", "Held-out loss from scratch")


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
    *_, command = PARTS.read_text().strip().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PARTS.read_text().splitlines() if "|" in line]
    against: dict[str, list[float]] = {"RMSNorm": [], "LlamaRMSNorm": []}
    case = work = ""
    for part, named, subject, _, _, eager, *_ in rows:
        case, work = (part, named) if part else (case, work)  # named on the first row of each group
        if case.startswith("norm,") and work == "forward and backward" and subject in against:
            against[subject].append(float(eager.partition(" ")[0]))
    rms, llama = (f"{min(found):.2f} to {max(found):.2f}" for found in against.values())
    return (
        f"Norms and rotations by themselves: [recipes/results/parts](recipes/results/parts/results.md) ({command}). "
        f"Eager on a CPU the forward and backward of RMSNorm took {rms} times LayerNorm's time in hfpatch 0.1.0, which "
        f"had a gradient of its own there; those of transformers' LlamaRMSNorm, {llama} times."
    )


def repair() -> str:
    text = REPAIR.read_text().strip()
    return text[text.index("## ") :].replace("## ", "### ")


BLOCKS = {
    "plan": plan,
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "blocks", nargs="*", choices=[*BLOCKS], default=[], metavar="BLOCK", help=f"{', '.join(BLOCKS)}; none: all"
    )
    main(parser.parse_args().blocks)
