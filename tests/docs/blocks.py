"""The code blocks of README.md and of the pages in docs/."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
SHOWN = {"text", "console", "json", "yaml", "toml", "diff", "html"}  # languages of what is only to be read
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)#\s]+)")  # a relative one, without its anchor
_BLOCK = re.compile(
    r"(?m)^(?P<indent> *)(?:<!-- (?P<mark>not run: [^\n]+|slow|output) -->\n\1)?```(?P<language>\w+)[^\n]*\n"
    r"(?P<code>.*?)^\1```$",
    re.S,
)


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        page: its file.
        line: where it starts, counted from 1.
        language: as the fence says.
        code: its text, without the page's indentation.
        mark: what the comment in the line above says: "not run: REASON"; "slow"; "output", of a text that is what the
            block before it prints; or nothing.
    """

    page: Path
    line: int
    language: str
    code: str
    mark: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """The words of each command of a bash block."""
        for line in self.code.replace("\\\n", " ").splitlines():
            for part in re.split(r" && ", line):
                words = shlex.split(part, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                    del words[0]
                if words:
                    yield words


def blocks(page: Path) -> list[Block]:
    """The blocks of one page, in order."""
    text, found = page.read_text(), []
    for match in _BLOCK.finditer(text):
        indent = len(match["indent"])
        code = "".join(line[indent:] if line.strip() else line for line in match["code"].splitlines(keepends=True))
        line = text[: match.start()].count("\n") + 1 + bool(match["mark"])
        found.append(Block(page, line, match["language"], code, match["mark"] or ""))
    return found
