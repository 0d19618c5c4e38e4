"""What the site has besides docs/: two pages and figures from elsewhere, links to the repository, tables that wrap.

Pages link as their files lie, so that they read on a code host, too. mkdocs calls `on_files` before it reads the pages,
then `on_page_markdown` and `on_page_content` for each of them.
"""

from __future__ import annotations

import os
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
BLOB = "https://github.com/hfpatch/hfpatch/blob/main"
TEXTS = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}  # pages of the site that lie elsewhere
_LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")
_PRINTED = re.compile(r'(?s)<div class="language-text highlight"><pre><span></span><code>(.*?)</code></pre></div>')
_RULE = re.compile(r"-+(  -+)+")  # between the headings and the rows of a table that hfpatch prints
_CELL = re.compile(r"(?<=<td)((?: style=\"[^\"]*\")?)>((?:[^<]|<(?!/td>))*)(?=</td>)")
_MAY_BREAK = re.compile(r"(?<=_)(?=\w{3})(?![^<]*>)|(?<=[=,./:(])(?=[a-zA-Z{\"'][^<]{4})(?![^<]*>)(?=[^<]*</code>)")
_LONG_NAME = re.compile(r"\b[A-Za-z\d]{20,}\b(?![^<]*>)")
_CODE = re.compile(r"(?<!<span></span>)<code>([^<]*-[^<]*)</code>")
_FIGURE = re.compile(r"<img [^>]*src=\"([^\"]*\.png)\"[^>]*>")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and figures that lie elsewhere in the repository."""
    for source, page in TEXTS.items():
        files.append(File.generated(config, page, content=site_links((ROOT / source).read_text(), ROOT, page)))
    for figure in sorted((ROOT / "tools/results/figures").glob("*/*.png")):
        files.append(File.generated(config, place_of(figure), abs_src_path=str(figure)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files outside of docs/ into the site's; a page of wide tables goes without contents at the side."""
    uri = page.file.src_uri
    if uri.startswith("support/"):
        page.meta["hide"] = ["toc"]
    return markdown if uri in TEXTS.values() else site_links(markdown, (DOCS / uri).parent, uri)


def place_of(path: Path) -> str:
    """Where the site has a file of the repository: a path inside docs/, or an address if it isn't part of the site.

    Raises:
        PluginError: there is no such file.
    """
    name = os.path.relpath(path, ROOT)
    if not path.exists():
        raise PluginError(f"there is no {name}, to which a page links.")
    if path.is_relative_to(DOCS):
        return os.path.relpath(path, DOCS)
    if path.suffix == ".png":
        return f"results/{path.parent.name}.png"
    return TEXTS.get(name, f"{BLOB}/{name}")


def site_links(text: str, folder: Path, page: str) -> str:
    """A text's relative links, from the folder where it lies, as links of the site's page that has it."""

    def link(match: re.Match[str]) -> str:
        place = place_of(Path(os.path.normpath(folder / match[1])))
        return place if place.startswith("https:") else os.path.relpath(place, os.path.dirname(page) or ".")

    return _LINK.sub(link, text)


def on_page_content(html: str, **_: Any) -> str:
    """Say where cells and code may wrap, make tables of what hfpatch prints as such, and link figures to their files.

    On a phone a figure is a quarter of its size: its link opens it whole.
    """
    html = _CODE.sub(_with_whole_flags, _CELL.sub(_wrapping, html))
    return _FIGURE.sub(r'<a href="\1">\g<0></a>', _PRINTED.sub(_with_tables, html))


def _with_whole_flags(match: re.Match[str]) -> str:
    """Code in a line of text, whose flags (--patch) don't wrap behind their hyphens."""
    flags = re.sub(r"(?<!\S)-[\w-]*", r'<span class="whole">\g<0></span>', match[1])
    return f"<code>{flags}</code>"


def _wrapping(match: re.Match[str]) -> str:
    """A cell whose names wrap between their words, and steps (1 → 2 → 3) before a figure; most have a class."""
    style, text = match.groups()
    kinds = {"steps": ".* → ", "sentence long": ".{200}", "sentence": ".{60}", "phrase": ".{20}"}
    kinds["figure"] = r"[-+.\de]+$"
    kind = next((f' class="{name}"' for name, pattern in kinds.items() if re.match(pattern, text)), "")
    wrapped = _LONG_NAME.sub(lambda name: re.sub(r"(?<=[a-z\d])(?=[A-Z])", "<wbr>", name[0]), text)
    return f"{kind}{style}>{_MAY_BREAK.sub('<wbr>', wrapped.replace(' → ', '&nbsp;→ '))}"


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
    return "".join(f"<p>{_names(escape(line))}</p>" for line in lines if line)


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
