"""Flags for the text that tasks learn from."""

import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from texts import Document, read_texts

from .settings import option

LIBRARY = "library"  # in place of a file's name
PLAYS = "plays of Shakespeare"
# Tests are data more than prose; `encodings` is 120 near-identical tables, which would leak across the split.
NOT_TEXT = {"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"}


@dataclass
class TextConfig:
    """Flags of tasks that learn from plain text."""

    text: list[str] | None = option(
        None,
        "UTF-8 text files, tables with a --text_column, or ids of the Hub; "
        f"'{LIBRARY}': source of Python's standard library; none: Shakespeare's plays",
    )
    text_column: str = option("text", "column of the texts, in tables and data sets")


def is_path(source: str) -> bool:
    """Whether a source is written as a path; else it may be a Hub id, too."""
    return source[:1] in "./~\\" or source.count("/") > 1


def read_sources(config: TextConfig) -> tuple[str, list[Document]]:
    """A description of the source, and its documents: a file, a row of a table, or a run of speeches."""
    if config.text == [LIBRARY]:
        return f"standard library of Python {platform.python_version()}", read_standard_library()
    documents = read_texts(config.text, config.text_column)
    return ", ".join(Path(source).name for source in config.text or ()) or PLAYS, documents


def read_standard_library() -> list[Document]:
    """Source files of the running interpreter's standard library, without tests and build settings."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    files = [f for f in files if not NOT_TEXT & set(f.parts) and not f.name.startswith("_sysconfigdata")]
    files = [f for f in files if not f.parts[0].startswith("config-")]  # how this interpreter was built
    return [Document(f.as_posix(), (root / f).read_text("utf-8", errors="ignore")) for f in sorted(files)]


def fingerprint(documents: list[Document]) -> str:
    """sha256 of names and texts: two runs are comparable when it agrees."""
    digest = hashlib.sha256()
    for document in sorted(documents, key=lambda d: (d.name, d.text)):
        digest.update(f"{document.name}\0{document.text}\0".encode())
    return digest.hexdigest()
