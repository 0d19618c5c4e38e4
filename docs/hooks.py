"""What the site has besides the pages in docs/: tables of sweeps, figures of recipes and notebooks, the command line.

mkdocs calls `on_files` before it reads the pages, and `on_page_markdown` for each of them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
BLOB = "https://github.com/hfpatch/hfpatch/blob/main"
SWEEPS = ("norm_swap", "exact", "positions", "native_rope", "native_export", "backends", "patching_cost")
TEXTS = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
TEXTS |= {"support/ecosystem.md": "tests/ecosystem/results.md"}
TEXTS |= {f"support/{name}.md": f"tests/sweeps/{name}.md" for name in SWEEPS}
_INCLUDE = re.compile(r"(?m)^<!-- include: (.+) -->$")
_LINE_OF_PROSE = re.compile(r"(?m)^(?!\||\* |#).+(?=\n[^\n])")  # two spaces behind it are Markdown's line break
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


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each line `<!-- include: PATH -->` or `<!-- include: PATH#HEADING -->` with a file, or a section of it.

    Its own heading stays behind; those below it go two levels down. A line of prose stays a line.
    """

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
