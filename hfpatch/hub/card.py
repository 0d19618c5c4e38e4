"""The model card of a pushed checkpoint: metadata that the Hub reads, and a section that each push renews.

All of it comes from the checkpoint, the caller or the base model's own card; facts that none of them gives are left
out. The section stands between two comments; the rest of a card stays as its author wrote it. Text from a file goes
into that section only in a form that shows it as it is: plain names and versions, and blocks of code.

The code that opens a checkpoint or makes it again is for report pages, too.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import transformers
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import RemoteEntryNotFoundError

from ..checkpoint.auto_classes import USUAL, auto_classes_of
from ..checkpoint.files import PAGE
from ..errors import OptionError
from ..measure.inputs import main_input
from ..runtime.lens import host_class
from ..runtime.record import KEY
from ..schemes.request import KINDS, Record, SchemeRequest
from ..schemes.verdicts import MEASUREMENT_NOTE, outcome_table
from ..verification.verify_report import Report
from .folder import CARD, Checkpoint

BEGIN, END = "<!-- hfpatch: this section is written anew by every push -->", "<!-- hfpatch: end -->"
_LIBRARIES = ("transformers", "hfpatch")  # libraries that a push names
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")  # an id of the Hub; other text in metadata is no link
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]{0,30}")
_NOUNS = {"norm": "norms", "pos": "positions", "mlp": "MLPs", "placement": "places of the norms"}
_BODY_TASKS = {"input_ids": "feature-extraction", "pixel_values": "image-feature-extraction"}  # by the main input


def card(
    found: Checkpoint,
    repo_id: str,
    written: str | None = None,
    *,
    base_model: str | None = None,
    base_data: ModelCardData | None = None,
    license: str | None = None,
    report: Report | None = None,
) -> tuple[str, list[str]]:
    """Return the text of README.md, and notes for the caller.

    Args:
        found: the checkpoint that is pushed.
        repo_id: the repository that it goes to.
        written: the present card; its text stays, except for the section of an earlier push. Its metadata stays, except
            for what the caller sets.
        base_model: the id of the model that was patched; None if it isn't known or isn't on the Hub.
        base_data: metadata of that model's card, which has the licence; None if it can't be read.
        license: the licence that the caller gives.
        report: what `verify` measured.

    Raises:
        OptionError: the present card's metadata can't be read.
    """
    title = repo_id.split("/")[-1]
    try:
        present = ModelCard(f"---\n{{}}\n---\n\n# {title}\n\n{BEGIN}{END}\n" if written is None else written)
    except Exception as error:  # errors of the client and of its YAML package
        reason = " ".join(str(error).split())
        raise OptionError(f"the metadata of {CARD} can't be read: {reason:.200}. Mend or remove it.") from error
    before, _, rest = present.text.partition(BEGIN)
    _, end, after = rest.partition(END)
    cls = getattr(transformers, (found.config.get("architectures") or [""])[0], None)
    auto, task = auto_class_and_task(cls, host_class(type(found.opened))) if cls is not None else ("AutoModel", None)
    data: Any = present.data
    if data.library_name in (None, *_LIBRARIES):  # the Hub shows code by this name, and the code has to work
        data.library_name = "hfpatch" if found.form == "plugin" else "transformers"
    data.pipeline_tag = data.pipeline_tag or task
    data.base_model = base_model or data.base_model
    if base_data is not None and not (license or data.license):
        data.license, data.license_name, link = base_data.license, base_data.license_name, base_data.license_link
        files = f"https://huggingface.co/{base_model}/blob/main/" if base_model else ""
        data.license_link = link and urljoin(files, link)  # a licence file stays in the base repository
    data.license = license or data.license
    tags = data.tags or []
    if end:  # schemes of an earlier push may be another patch's
        tags = [tag for tag in tags if not any(tag in registry for registry in KINDS.values())]
    requests = [] if found.record is None else found.record.requests
    data.tags = list(dict.fromkeys([*tags, KEY, *(part.scheme.name for _, part in requests)]))
    notes = []
    if end:
        paragraphs = _section(found, repo_id, auto, data.base_model, report)
        present.text = before + "\n\n".join([BEGIN, *paragraphs, END]) + after
    else:
        notes.append(f"{CARD} keeps its text; its metadata is completed")
    if not data.license:
        notes.append("the licence isn't known: pass license= (--license)")
    if not data.base_model:
        notes.append(
            "the card doesn't name the model that was patched: pass its id on the Hub as base_model= (--base); a "
            "folder has none, and only its card is read"
        )
    return str(present), notes


def _section(
    found: Checkpoint, repo_id: str, auto: str, base: str | list[str] | None, report: Report | None
) -> Iterator[str]:
    """The paragraphs that a push writes: what was patched, how to open it, what was measured."""
    record = found.record
    yield _summary(found, base)
    if record is not None:
        yield "## What was patched"
        yield _fence(how_to_make(record, auto, base), "python")
        outcomes = record.outcomes()
        measured = "\n".join([f"{outcome_table(outcomes)}\n", *(f"{one}: {outcomes[one]}" for one in outcomes)])
        yield f"What was measured right after each of them, before any training:\n\n{_fence(measured, 'text')}"
        yield MEASUREMENT_NOTE
        edits = "\n".join(map(str, record.edits))
        yield f"Its config.json holds that as edits of the host's modules:\n\n{_fence(edits, 'text')}"
        if PAGE in found.files:
            yield f"[{PAGE}]({PAGE}) draws the block before and after; download it to look at it."
    yield "## How to open it"
    form = "plugin" if found.form == "remote" and auto not in found.config["auto_map"] else found.form
    for words, language, code in ways_to_open(repo_id, auto, form):
        yield f"{words}\n\n{_fence(code, language)}"
    if report is not None:
        yield "## What the patch changed, measured"
        yield "By `hfpatch verify`; the truth is the original (`reference`) in float64."
        yield _fence(str(report))


def _summary(found: Checkpoint, base: str | list[str] | None) -> str:
    bases = filter(_ID.fullmatch, [base] if isinstance(base, str) else base or [])
    of = " and ".join(f"[{one}](https://huggingface.co/{one})" for one in bases) or "A pretrained model"
    if found.record is None:
        kind = found.config.get("model_type")
        return f"{of}, patched by hfpatch and exported as a stock `{kind}` model, which transformers opens by itself."
    schemes: dict[str, list[str]] = {}
    for kind, part in found.record.requests:
        schemes.setdefault(_NOUNS[kind], []).append(f"`{part.scheme.name}`")
    changes = ", ".join(f"its {noun} are {' and '.join(dict.fromkeys(names))}" for noun, names in schemes.items())
    version = str(found.config.get("transformers_version"))
    saved = f" Saved with transformers {version}." if _VERSION.fullmatch(version) else ""
    return f"{of} (`{found.title}`) with its architecture patched by hfpatch: {changes}.{saved}"


def _fence(text: str, language: str = "") -> str:
    """A block of code, whose fence is longer than any in the text."""
    fence = "`" * (1 + max([2, *map(len, re.findall("`+", text))]))
    return f"{fence}{language}\n{text}\n{fence}"


# What opens a checkpoint, or makes it again


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

    tasks = {"AutoModelForQuestionAnswering": "question-answering"}  # it has no pipeline any more
    # several tasks share a head; the usual task comes first
    tasks |= {auto.__name__: task for task, one in reversed(SUPPORTED_TASKS.items()) for auto in one["pt"]}
    return (found[0], tasks.get(found[0])) if found else ("AutoModel", None)


def how_to_make(record: Record, auto: str, base: Any) -> str:
    """Return code that makes a checkpoint again by the requests in its record.

    Requests of different kinds with the same globs and start are one call.

    Args:
        record: the patch record.
        auto: the Auto class.
        base: the Hub id or folder of the patched model's original; if it isn't a text, the code doesn't open it.
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


def ways_to_open(name: str, auto: str, form: str) -> Iterator[tuple[str, str, str]]:
    """Yield each way to open a checkpoint: requirements, language and code.

    Args:
        name: the Hub id or folder of the checkpoint.
        auto: the Auto class.
        form: of the checkpoint, as in `export_model`.
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
        if other != form:
            command = ["hfpatch", "export", name, f"{name.split('/')[-1]}-{other}", "--to", other]
            yield words, "bash", shlex.join(command)
