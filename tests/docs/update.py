"""Writes what is generated in README.md and docs/: `python tests/docs/update.py [BLOCK ...]`.

A block stands between `<!-- NAME: COMMAND -->` and `<!-- /NAME -->`, where COMMAND makes what it is made of. A table of
a recipe or sweep stands between `<!-- include: FILE -->` (or `FILE#HEADING`, for one section) and `<!-- /include -->`.
Pictures of notebooks to which a page links lie beside the notebooks. test_generated.py and test_links.py compare.
"""

from __future__ import annotations

import argparse
import base64
import copy
import difflib
import json
import os
import re
import site
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from blocks import LINK, PAGES, ROOT
from transformers import AutoConfig, AutoModelForCausalLM

from hfpatch import patch_model

SWEEPS = ROOT / "tests/sweeps"
NOTEBOOKS = ROOT / "docs/examples"
_INCLUDE = re.compile(r"(?ms)^<!-- include: (\S[^\n]*?) -->\n(.*?)^<!-- /include -->$")
_LINE_OF_PROSE = re.compile(r"(?m)^(?!\||\* |#).+(?=\n[^\n])")  # two spaces behind it are Markdown's line break

site.addsitedir(str(SWEEPS))


def totals(sweep: str) -> dict[str, Any]:
    return json.loads((SWEEPS / f"{sweep}.json").read_text())


def exact_counts() -> dict[str, int]:
    """How many model types there are of each kind; those that ran out of time or memory are "not finished"."""
    found = totals("exact")
    counts = {kind: found.get(kind, 0) for kind in ("exact", "in part", "refused", "wrong")}
    return counts | {"not finished": sum(found.get(kind, 0) for kind in ("killed", "failed", "not searched"))}


def stock_architectures() -> set[str]:
    """Those that some patched model of another family equals."""
    return {name for row in totals("native_export")["rows"] for name in row["equal"] if name != row["family"]}


def settings_that_differ() -> int:
    """How many model types compute something else than transformers with the same settings of RoPE."""
    found = totals("native_rope")
    return sum(found[name].get("DIFFERS", 0) for name in ("same", "theta", "linear", "partial"))


def support() -> str:
    """A row for each sweep, for the README."""
    repaired = Counter(totals("repaired_types")["norm"])
    norms, places, turned, counts = totals("norm_swap"), totals("positions"), totals("native_rope"), exact_counts()
    rows = [
        ("any norm replaced", f"{norms['converted']} of {norms['of']} model types with a LayerNorm", "norm_swap"),
        (
            "LayerNorm to RMSNorm, exact",
            f"{counts['exact']} model types in full, {counts['in part']} in part, {counts['refused']} refused, "
            f"{counts['not finished']} not finished, {counts['wrong']} wrong",
            "exact",
        ),
        (
            "RoPE in place of a position table",
            f"{places['supported']} of {places['of']} classes, {places['wrong anywhere']} wrong",
            "positions",
        ),
        (
            "other RoPE settings",
            f"of {turned['rotating']} rotary model types {turned['theta']['yes']} take another theta, "
            f"{turned['linear']['yes']} linear scaling; {settings_that_differ()} differ from transformers' own",
            "native_rope",
        ),
        (
            "repair of DyT on noise, no training",
            f"{repaired['repaired']} model types nearer on fresh inputs, {repaired['harmed']} farther, "
            f"{repaired['undone']} undone, {repaired['refused']} refused",
            "repaired_types",
        ),
        ("native export, no code needed", f"{len(stock_architectures())} stock architectures", "native_export"),
    ]
    lines = [f"| {what} | {count} | [table](docs/support/{page}.md) |" for what, count, page in rows]
    return "\n".join([f"| what | measured with transformers {norms['transformers']} | |", "|---|---|---|", *lines])


def sweep() -> str:
    found = totals("norm_swap")
    return (
        f"**{found['converted']} of {found['of']} model types** are converted (transformers {found['transformers']}). "
        "[Norms by model type](norm_swap.md) lists what was kept and why, and the types that can't be built."
    )


def exact() -> str:
    count, found = exact_counts(), totals("exact")
    terms = count.values()
    return (
        f"Of {totals('norm_swap')['of']} model types with a LayerNorm {len(found['rows'])} were examined "
        f"(transformers {found['transformers']}): **{count['exact']} are exact in full**, {count['in part']} in part, "
        f"{count['refused']} refused, **{count['wrong']} wrong**, {count['not finished']} not finished (out of time or "
        f"memory): {sum(terms)} = {' + '.join(map(str, terms))}. "
        "[Exact conversion](exact.md) has the error of each type, and the reasons."
    )


def positions() -> str:
    found = totals("positions")
    return (
        f"**{found['supported']} of {found['of']} classes** that own a table (transformers {found['transformers']}) "
        f"take RoPE, {found['refused']} are refused with a reason, **{found['wrong anywhere']} are wrong**. "
        f"{found['beyond']} classes that aren't on this list take RoPE, too. "
        "[Positions by class](positions.md) has the figures of each class, or the reason."
    )


def native_rope() -> str:
    found = totals("native_rope")
    yes = {name: found[name].get("yes", 0) for name in ("same", "theta", "linear", "partial")}
    return (
        f"Of {found['rotating']} model types that rotate (transformers {found['transformers']}) {yes['same']} stay "
        f"the same bit for bit. Another theta ({yes['theta']} types), linear scaling ({yes['linear']}) and partial "
        f"rotation ({yes['partial']}) equal transformers' own model with these settings bit for bit. Other requests "
        f"are refused with a reason, or have no effect in so small a model. **{settings_that_differ()} differ**. "
        "[Other RoPE settings](native_rope.md) has each type."
    )


def acceptance() -> str:
    found = totals("acceptance")
    return (
        f"Of {found['ok'] + found['refused'] + found['wrong']} requests of {found['types']} model types (transformers "
        f"{found['transformers']}) {found['ok']} are accepted and ok, {found['refused']} refused, **{found['wrong']} "
        "wrong**. [What is accepted runs](acceptance.md) gives the reasons of refusals."
    )


def weight_decay() -> str:
    found = totals("weight_decay")
    return (
        f"The Parameters that decay under transformers' Trainer were compared before and after {found['patches']} "
        f"patches of {found['types']} model types (transformers {found['transformers']}): **{found['differ']} differ**."
        " [Weight decay](weight_decay.md) has each type."
    )


def repaired_types() -> str:
    found = totals("repaired_types")
    lines = []
    for name, asked in (("norm", 'norm="dyt"'), ("pos", 'pos="rope"')):
        count = Counter(found[name])
        ran = count["repaired"] + count["undone"] + count["harmed"]
        lines.append(
            f"* `{asked}` ran on {ran} types: {count['repaired']} are nearer to the original afterwards on inputs that "
            f"the repair has never seen, **{count['harmed']} farther**, and {count['undone']} repairs were undone. "
            f"{count['refused']} were refused with a reason, **{count['wrong']} are wrong**."
        )
    head = f"Of {found['of']} model types (transformers {found['transformers']}) a repair with"
    return "\n".join([head, "", *lines, "", "[Repair by model type](repaired_types.md) has each type."])


def native_export() -> str:
    import native_export as sweep

    return sweep.compact(totals("native_export")["rows"])


def versions() -> str:
    import versions as sweep

    return sweep.table(totals("versions"))


_COMMAND_LINE = """\
Here you look up each command of `hfpatch` and its options. `MODEL` is a Hub id, a folder, or `config:FAMILY` for random
weights of a family's default config. Errors are one line on stderr and exit status 1; those that newcomers meet are in
[Troubleshooting](../guides/troubleshooting.md#command-line)."""


def cli() -> str:
    """The help of every command as Markdown, by typer's own generator; the list of commands, which it cuts, in full."""
    import typer
    from typer.cli import get_docs_for_click

    from hfpatch.cli import app

    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="hfpatch")
    text = get_docs_for_click(obj=command, ctx=context, name="hfpatch", title="Command line")
    firsts = {name: one.help.split("\n\n")[0].replace("\n", " ") for name, one in command.commands.items()}
    listed = "\n".join(f"* [`hfpatch {name}`](#hfpatch-{name}): {first}" for name, first in firsts.items())
    text = re.sub(r"(?s)(?<=\*\*Commands\*\*:\n\n).*?(?=\n\n)", lambda _: listed, text, count=1)
    text = re.sub(r"\bx>=(\d+)", r"at least \1", text)
    text = text.replace("Architecture surgery for Hugging Face models.", _COMMAND_LINE, 1).strip()
    return f"{text}\n\nWritten by typer {version('typer')}."


def model() -> str:
    """The lines of GPT-2's printed model that a patch changes, with one around each."""
    with torch.device("meta"):
        gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        printed = [repr(one).splitlines() for one in (gpt2, patch_model(copy.deepcopy(gpt2), norm="rms", pos="rope"))]
    lines = [line for line in difflib.unified_diff(*printed, n=1) if not line.startswith(("---", "+++", "@@"))]
    text = re.sub(r"(LayerNorm\(\(768,\), eps=1e-05).*\)", r"\1, ...)", "\n".join(lines))  # the rest is torch's
    return f"```diff\n{text}\n```"


# rows of README's table: the title, the model and patch in the register with the norms replaced, the patch in words
SHOWN = [  # healed: docs/results/real-weights.md has the commands
    ("Whisper tiny.en", "whisper", "rms", 22, "`rms`"),
    ("SmolLM2-135M", "smollm2", "folded", 60, "`folded`: gains go into the readers"),
    ("", "smollm2", "rope:theta=1000000", None, "`rope:theta=1000000`"),
    ("", "smollm2", "none:bound=1.2", 36, "`none:bound=1.2`, {} of 60 norms gone"),
    "| | `none:bound=1.2`, 45 of 60 norms gone; all | loss on other text | 4.16 | | 4.30; 4.37 | 3.37; 3.42 |",
    ("", "smollm2", "dyt", 39, "`dyt`, {} of 61 norms; BOS begins each text"),
    "| | `dyt`, three seeds | loss on other text | 4.16 | 18.3 | 8.8 to 9.0 | 5.9, 6.1; 9.8 |",
    ("Qwen2.5-Coder 0.5B", "qwen", "dyt", 49, "`dyt`"),
    ("", "qwen", "none:bound=1.2", 48, "`none:bound=1.2`, all {} norms of its blocks gone"),
    ("all-mpnet-base-v2", "mpnet", "rms", 25, "`rms`"),
    ("", "mpnet", "learned:max_positions=1024", None, "`learned:max_positions=1024`"),
    ("Whisper tiny.en", "whisper", "dyt", 13, "`dyt` in the decoder"),
]
FIGURES = {"word error": "{:.3f}", "perplexity": "{:,.1f}", "cosine mean": "{:.4g}"}


def real_weights() -> str:
    """README's table of real models: of each row of the register the newest with that figure."""
    register = [json.loads(line) for line in (SWEEPS / "real_models.jsonl").read_text().splitlines()]
    lines = ["| model | patch | figure | original | copied | repaired | healed |", "|---|---|---|---:|---:|---:|---:|"]
    for shown in SHOWN:
        if isinstance(shown, str):
            lines.append(shown)
            continue
        title, model, patch, norms, words = shown
        figure = {"whisper": "word error", "mpnet": "cosine mean"}.get(model, "perplexity")
        row = [
            row
            for row in register
            if (row["model"], row["patch"]) == (model, patch)
            and norms in (None, (row.get("norms") or {}).get("replaced"))
            and any(figure in row.get(start, {}) for start in ("copied", "repaired"))
        ][-1]
        found = {start: row[start] for start in ("copied", "repaired") if start in row}
        before = {one.get(f"{figure} of the original", 1) for one in found.values()}
        cells = {start: FIGURES[figure].format(one[figure]) for start, one in found.items()}
        if all(one.startswith("exact") for one in row["said"].values()):
            cells["copied"] += ", exact"
        told = {"cosine mean": "cosine to the original"}.get(figure, figure)
        values = [FIGURES[figure].format(max(before)), cells.get("copied", ""), cells.get("repaired", ""), ""]
        lines.append(re.sub(" +", " ", f"| {' | '.join([title, words.format(norms), told, *values])} |"))
    return "\n".join(lines)


_ALL = (
    *(model, support, sweep, exact, positions, native_rope, acceptance),
    *(weight_decay, repaired_types, native_export, versions, cli, real_weights),
)
BLOCKS = {block.__name__: block for block in _ALL}


def block_pattern(name: str) -> re.Pattern[str]:
    """A block: the line that begins it, what is written, the line that ends it."""
    return re.compile(rf"(?ms)^(<!-- {name}: [^\n]* -->\n)(.*?)(^<!-- /{name} -->$)")


def pages_with(name: str) -> list[Path]:
    return [page for page in PAGES if block_pattern(name).search(page.read_text())]


def included(name: str, page: Path) -> str:
    """The text of a file, or of a section of it, for a page.

    Its own heading stays behind; those below it go two levels down. A line of prose stays a line.
    """
    path, _, heading = name.partition("#")
    text = (ROOT / path).read_text()
    sections = {part.partition("\n")[0].strip(): part for part in re.split(r"(?m)^#+ ", text)}
    text = sections[heading].partition("\n")[2] if heading else re.sub(r"\A#[^\n]*\n", "", text)
    text = _LINE_OF_PROSE.sub(r"\g<0>  ", re.sub(r"(?m)^(#+ )", r"##\1", text.strip()))
    return LINK.sub(lambda link: os.path.relpath((ROOT / path).parent / link[1], page.parent), text)


def with_includes(page: Path) -> str:
    """A page's text with its tables as their files have them."""

    def written(match: re.Match[str]) -> str:
        return f"<!-- include: {match[1]} -->\n\n{included(match[1], page)}\n\n<!-- /include -->"

    return _INCLUDE.sub(written, page.read_text())


def pictures() -> Iterator[tuple[Path, bytes]]:
    """The pictures of notebooks to which a page links: NAME-1.png, NAME-2.svg, ... in their order."""
    links = {NOTEBOOKS / name for name in LINK.findall((NOTEBOOKS / "index.md").read_text())}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        outputs = [one for cell in json.loads(path.read_text())["cells"] for one in cell.get("outputs", [])]
        shown = [one["data"] for one in outputs if {"image/png", "image/svg+xml"} & one.get("data", {}).keys()]
        for number, data in enumerate(shown, start=1):
            png = data.get("image/png")
            picture = path.with_name(f"{path.stem}-{number}.{'png' if png else 'svg'}")
            if picture in links:
                yield picture, base64.b64decode("".join(png)) if png else "".join(data["image/svg+xml"]).encode()


def main(names: Iterable[str] = ()) -> None:
    """Writes the named blocks, or all that is generated."""
    for name in names or BLOCKS:
        written = BLOCKS[name]()
        for page in pages_with(name):
            text = block_pattern(name).sub(lambda match, new=written: f"{match[1]}{new}\n{match[3]}", page.read_text())
            page.write_text(text)
    if not names:
        for page in PAGES:
            page.write_text(with_includes(page))
        for picture, content in pictures():
            picture.write_bytes(content)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blocks", nargs="*", metavar="BLOCK", help=f"{', '.join(BLOCKS)}; none: all")
    args = parser.parse_args()
    if unknown := set(args.blocks) - set(BLOCKS):
        parser.error(f"no block {', '.join(sorted(unknown))}; there are {', '.join(BLOCKS)}")
    main(args.blocks)
