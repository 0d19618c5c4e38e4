"""Code snippets that open a checkpoint or make it again, and its metadata, for model cards and report pages."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import RemoteEntryNotFoundError

from ..checkpoint.auto_classes import USUAL, auto_classes_of
from ..measure.inputs import main_input
from ..schemes.request import Record, SchemeRequest
from .folder import CARD

_BODY_TASKS = {"input_ids": "feature-extraction", "pixel_values": "image-feature-extraction"}  # by the main input


def metadata_of(name: str, token: str | bool | None = None) -> Any:
    """Return the metadata of the model card in a folder, or of a model of the Hub; None if neither can be read."""
    card = Path(name) / CARD if Path(name).is_dir() else name
    try:
        return ModelCard.load(card, token=token, ignore_metadata_errors=True).data  # type: ignore[arg-type]
    except RemoteEntryNotFoundError:
        return ModelCardData()  # the repository is there, without a card
    except Exception:  # no such repository, no access, no connection, no card, broken YAML
        return None


def auto_class_and_task(model_class: Any, config_class: type) -> tuple[str, str | None]:
    """Return the Auto class that opens a model as this class, and the Hub's task for it."""
    found = auto_classes_of(model_class, config_class, ("AutoModelForImageTextToText", *USUAL))
    if found == ["AutoModel"]:
        return "AutoModel", _BODY_TASKS.get(main_input(model_class))
    from transformers.pipelines import SUPPORTED_TASKS  # imports every pipeline

    tasks = {"AutoModelForQuestionAnswering": "question-answering"}  # which has no pipeline any more
    # several tasks share a head; the usual one comes first
    tasks |= {auto.__name__: task for task, one in reversed(SUPPORTED_TASKS.items()) for auto in one["pt"]}
    return (found[0], tasks.get(found[0])) if found else ("AutoModel", None)


def how_to_make(record: Record, auto: str, base: Any) -> str:
    """Return code that makes a checkpoint again by the requests in its record.

    Requests of different kinds with the same globs and start are one call.

    Args:
        record: the patch record.
        auto: the Auto class.
        base: the Hub id or folder of the model that was patched; of anything but a text, opening it is left out.
    """
    steps: list[dict[str, SchemeRequest]] = []
    for kind, part in sorted(record.requests, key=lambda item: item[0] != "placement"):
        if not steps or kind in steps[-1] or _settings(part) != _settings(next(iter(steps[-1].values()))):
            steps.append({})
        steps[-1][kind] = part
    lines = ["import hfpatch", f"from transformers import {auto}", ""] if isinstance(base, str) else []
    lines += [f"model = {auto}.from_pretrained({json.dumps(base, ensure_ascii=False)})"] if lines else []
    for step in steps:
        call: dict[str, Any] = {}
        for kind, part in step.items():
            call |= part.as_requested.to_json(kind)
        words = [f"{name}={value!r}" for name, value in call.items()]
        if any(part.outcome and part.outcome.by_repair for part in step.values()):
            lines.append("# texts: what the repair was calibrated on, which isn't in the record")
            words.append("calibration=texts")
        lines.append(f"hfpatch.patch_model(model, {', '.join(words)})")
    return "\n".join(lines)


def _settings(part: SchemeRequest) -> tuple[Any, ...]:
    return part.only, part.keep, part.init


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
