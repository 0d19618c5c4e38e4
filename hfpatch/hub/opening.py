"""Code snippets that open a checkpoint, with and without hfpatch, for model cards and report pages."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator


def ways_to_open(name: str, auto: str, form: str, no_native: str | None = None) -> Iterator[tuple[str, str, str]]:
    """Yield each way to open a checkpoint: requirements, language and code.

    Args:
        name: the Hub id or folder of the checkpoint.
        auto: the Auto class.
        form: of the checkpoint, as in `export_model`.
        no_native: why no stock architecture computes the same, where that is known.
    """
    where = json.dumps(name, ensure_ascii=False)

    def code(first: str = "", option: str = "") -> str:
        return f"{first}from transformers import {auto}\n\nmodel = {auto}.from_pretrained({where}{option})"

    if form == "native":
        yield "With transformers alone:", "python", code()
        return
    yield (
        "With hfpatch installed; without it transformers refuses the checkpoint, rather than open half of it:",
        "python",
        code(first="import hfpatch\n"),
    )
    if form == "remote":
        yield (
            "Without hfpatch, by the code that lies beside the weights; read it, and give a commit as revision=:",
            "python",
            code(option=", trust_remote_code=True"),
        )
    others = {"remote": "For those without hfpatch, export it to remote code:"}
    others["native"] = (
        "Or to a stock architecture, for transformers alone, where one computes the same; that is measured, and "
        "says for each why not:"
    )
    for other, words in others.items():
        if other == "native" and no_native:
            yield f"No stock architecture computes the same: {no_native}.", "", ""
        elif other != form:
            command = ["hfpatch", "export", name, f"{name.split('/')[-1]}-{other}", "--to", other]
            yield words, "bash", shlex.join(command)
