"""The code blocks of README.md and of the pages in docs/, and how each is tested.

`python tests/docs/blocks.py` prints the list.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
RECIPES = {path.name for path in (ROOT / "recipes").glob("*.py")}
SHOWN = {"text", "json", "yaml", "toml", "diff", "html"}  # languages of what is only to be read
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

    @property
    def tested(self) -> str:
        """How the block is tested, in words."""
        if self.mark.startswith("not run"):
            return self.mark
        if self.language == "python":
            return "run by tests/docs/test_pages.py" + " (slow)" * (self.mark == "slow")
        if self.mark == "output":
            return "compared with what the block before it prints"
        kinds = {kind for kind, _ in self.commands()} if self.language == "bash" else {"shown"}
        return "; ".join(sorted(kinds))

    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """How each command of a bash block is tested, and its words."""
        for line in self.code.replace("\\\n", " ").splitlines():
            for part in re.split(r" && ", line):
                words = shlex.split(part, comments=True)
                while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                    del words[0]
                if words:
                    yield kind_of(words), words


def kind_of(words: list[str]) -> str:
    """How a command is tested.

    Raises:
        ValueError: it is of no kind that a page may hold.
    """
    recipe = next((word for word in words if Path(word).name in RECIPES), None)
    if words[0] == "hfpatch":
        return "run by tests/docs/test_pages.py"
    if recipe is not None:
        return "settings checked by tests/docs/test_pages.py"
    if words[0] in ("pip", "pytest", "git", "cd", "ruff", "mypy", "mkdocs", "pre-commit", "python", "source"):
        return "a command of .ci/run or of the shell"
    raise ValueError(f"no test for {shlex.join(words)}; mark the block `<!-- not run: REASON -->`")


def blocks(page: Path) -> list[Block]:
    """The blocks of one page, in order."""
    text, found = page.read_text(), []
    for match in _BLOCK.finditer(text):
        indent = len(match["indent"])
        code = "".join(line[indent:] if line.strip() else line for line in match["code"].splitlines(keepends=True))
        line = text[: match.start()].count("\n") + 1 + bool(match["mark"])
        found.append(Block(page, line, match["language"], code, match["mark"] or ""))
    return found


if __name__ == "__main__":
    for page in PAGES:
        for one in blocks(page):
            print(f"| {one.name} | {one.language} | {one.tested} |")
