"""What the site has besides the pages in docs/: tables of sweeps, figures of recipes and notebooks, the command line.

mkdocs calls `on_files` before it reads the pages, then `on_page_markdown` and `on_page_content` for each of them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from html import escape, unescape
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
BLOB = "https://github.com/hfpatch/hfpatch/blob/main"
SWEEPS = (
    "norm_swap",
    "exact",
    "positions",
    "native_rope",
    "native_export",
    "patching_cost",
    "operations",
    "acceptance",
    "weight_decay",
    "fold",
    "repaired_types",
)
TEXTS = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
TEXTS |= {"support/ecosystem.md": "tests/ecosystem/results.md", "support/real-models.md": "tests/sweeps/real_models.md"}
TEXTS |= {f"support/{name}.md": f"tests/sweeps/{name}.md" for name in SWEEPS}
_INCLUDE = re.compile(r"(?m)^<!-- include: (.+) -->$")
_LINE_OF_PROSE = re.compile(r"(?m)^(?!\||\* |#).+(?=\n[^\n])")  # two spaces behind it are Markdown's line break
_PRINTED = re.compile(r'(?s)<div class="language-text highlight"><pre><span></span><code>(.*?)</code></pre></div>')
_RULE = re.compile(r"-+(  -+)+")  # between the headings and the rows of a table that hfpatch prints
_CELL = re.compile(r"(?<=<td)((?: style=\"[^\"]*\")?)>((?:[^<]|<(?!/td>))*)(?=</td>)")
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and figures that lie elsewhere in the repository, and the reference of the command line."""
    for page, source in TEXTS.items():
        files.append(File.generated(config, page, content=_with_links_to_source((ROOT / source).read_text(), source)))
    for figure in sorted((ROOT / "recipes/results").glob("*/*.png")):
        files.append(File.generated(config, f"results/{figure.parent.name}.png", abs_src_path=str(figure)))
    for name, content in _figures_of_notebooks():
        files.append(File.generated(config, f"examples/{name}", content=content))
    files.append(File.generated(config, "reference/cli.md", content=_command_line()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace each line `<!-- include: PATH -->` or `<!-- include: PATH#HEADING -->` with a file, or a section of it.

    Its own heading stays behind; those below it go two levels down. A line of prose stays a line. A page of wide tables
    goes without its contents at the side.
    """
    if page.file.src_uri.startswith("support/"):
        page.meta["hide"] = ["toc"]

    def text_of(match: re.Match[str]) -> str:
        name, _, heading = match[1].partition("#")
        path = ROOT / name
        if not path.is_file():
            raise PluginError(f"{match[0]}: there is no {name}.")
        sections = {part.partition("\n")[0].strip(): part for part in re.split(r"(?m)^#+ ", path.read_text())}
        if heading and heading not in sections:
            raise PluginError(f"{match[0]}: {name} has no heading {heading!r}.")
        text = sections[heading].partition("\n")[2] if heading else re.sub(r"\A#[^\n]*\n", "", path.read_text())
        text = _LINE_OF_PROSE.sub(r"\g<0>  ", re.sub(r"(?m)^(#+ )", r"##\1", text.strip()))
        return _with_links_to_source(text, name)

    return _INCLUDE.sub(text_of, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Say where the cells of tables may wrap, and make tables of what hfpatch prints as such."""
    return _PRINTED.sub(_with_tables, _CELL.sub(_wrapping, html))


def _wrapping(match: re.Match[str]) -> str:
    """A cell whose names wrap behind underscores, and steps (1 → 2 → 3) before a figure; most have a class."""
    style, text = match.groups()
    kinds = {"steps": ".* → ", "sentence": r".{60}", "phrase": r".{20}", "figure": r"[-+.\de]+$"}
    kind = next((f' class="{name}"' for name, pattern in kinds.items() if re.match(pattern, text)), "")
    wrapped = text if "<" in text else text.replace(" → ", "&nbsp;→ ").replace("_", "_<wbr>")
    return f"{kind}{style}>{wrapped}"


def _with_tables(match: re.Match[str]) -> str:
    """A printed text as HTML if it holds tables, else as it is."""
    lines, pieces, last = unescape(match[1]).splitlines(), [], 0
    for number, line in enumerate(lines):
        if not _RULE.fullmatch(line):
            continue
        starts = [found.start() for found in re.finditer(r"-+", line)]
        end = number + 1
        while end < len(lines) and _is_row(lines[end], starts):
            end += 1
        pieces += [_lines(lines[last : number - 1]), _table([lines[number - 1], *lines[number + 1 : end]], starts)]
        last = end
    if not pieces:
        return match[0]
    return "\n".join(['<div class="printed">', *filter(None, [*pieces, _lines(lines[last:])]), "</div>"])


def _is_row(line: str, starts: list[int]) -> bool:
    """Whether a line has a second cell, and nothing between the columns: a short sentence would fit into the first."""
    return (len(line) > starts[1] or line == "...") and not any(line[at - 2 : at].strip() for at in starts[1:])


def _lines(lines: list[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines if line)


def _table(lines: list[str], starts: list[int]) -> str:
    """Lines of text in columns as a table; a column is of numbers if it is aligned to the right.

    Every cell knows its heading, which stands before it where the screen is too narrow for columns.
    """
    cut = [[line[a:b] for a, b in zip(starts, [*starts[1:], None], strict=True)] for line in lines]
    sides = ["right" if any(cell.startswith(" ") for cell in column) else "left" for column in zip(*cut, strict=True)]
    heads, *rows = [[cell.strip() for cell in row] for row in cut]
    top = "".join(f'<th class="{side}">{escape(head)}</th>' for head, side in zip(heads, sides, strict=True))
    body = ""
    for row in rows:
        cells = (
            f'<td class="{side}" data-head="{escape(head)}">{_names(escape(cell))}</td>'
            for cell, head, side in zip(row, heads, sides, strict=True)
        )
        body += f"<tr>{''.join(cells)}</tr>"
    return f'<table class="printed"><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>'


def _names(text: str) -> str:
    """Names that wrap behind their number of layers, and nowhere inside braces or figures."""
    text = text.replace("}.", "}.<wbr>")
    return re.sub(r"\{.*?\}|[\d.]+e-\d+", r'<span class="whole">\g<0></span>', text)


def _figures_of_notebooks() -> Iterator[tuple[str, str | bytes]]:
    """The pictures that each notebook shows, called NAME-1.png, NAME-2.png, ... in their order."""
    for path in sorted((ROOT / "docs/examples").glob("*.ipynb")):
        outputs = [one for cell in json.loads(path.read_text())["cells"] for one in cell.get("outputs", [])]
        shown = [one["data"] for one in outputs if {"image/png", "image/svg+xml"} & one.get("data", {}).keys()]
        for number, data in enumerate(shown, start=1):
            if "image/png" in data:
                yield f"{path.stem}-{number}.png", base64.b64decode("".join(data["image/png"]))
            else:
                yield f"{path.stem}-{number}.svg", "".join(data["image/svg+xml"])


def _with_links_to_source(text: str, source: str) -> str:
    """A file's relative links as links into the repository; those into docs/ as links between pages."""

    def link(match: re.Match[str]) -> str:
        target = (ROOT / source).parent.joinpath(match[1]).resolve().relative_to(ROOT)
        return str(target.relative_to("docs")) if target.is_relative_to("docs") else f"{BLOB}/{target}"

    return _LINK.sub(link, text)


_COMMAND_LINE = """\
Here you look up each command of `hfpatch` and its options. `MODEL` is a Hub id, a folder, or `config:FAMILY` for random
weights of a family's default config. Errors are one line on stderr and exit status 1; those that newcomers meet are in
[Troubleshooting](../guides/troubleshooting.md#command-line)."""


def _command_line() -> str:
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
    return text.replace("Architecture surgery for Hugging Face models.", _COMMAND_LINE, 1)
