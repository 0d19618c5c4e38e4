"""How people open a checkpoint: code for readers with and without hfpatch, for model cards and report pages."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator


def ways_to_open(name: str, auto: str, form: str, subfolder: str = "") -> Iterator[tuple[str, str, str]]:
    """Each way: what it takes, the language of the code, and the code.

    Args:
        name: the Hub id or folder of the checkpoint, and `subfolder` in it.
        auto: the Auto class.
        form: of the checkpoint, as in `export_model`.
    """
    where = json.dumps(name, ensure_ascii=False) + (f', subfolder="{subfolder}"' if subfolder else "")

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
    whole = name if not subfolder else "FOLDER"  # what the command line opens
    others = [other for other in ("remote", "native") if other != form]
    exports = (["hfpatch", "export", whole, f"{name.split('/')[-1]}-{other}", "--to", other] for other in others)
    yield (
        "For those without hfpatch, export it: by remote code, or where one computes the same as a stock architecture. "
        "The export measures that, and says for each why not.",
        "bash",
        "\n".join(map(shlex.join, exports)),
    )
