"""The model card of a pushed checkpoint: metadata that the Hub reads, and a section that each push renews.

All of it comes from the checkpoint, the caller or the base model's own card; what none of them says is left out. The
section stands between two comments; the rest of a card stays as its author wrote it. What a file says goes into that
section only in a form that shows it as it is: names and versions that are such, and blocks of code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urljoin

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import CONFIG_MAPPING

from ..checkpoint.files import PAGE
from ..errors import OptionError
from ..runtime.record import KEY, MODEL_TYPES
from ..schemes.request import KINDS
from ..schemes.verdicts import MEASUREMENT_NOTE, outcome_table
from ..verification.report import Report
from .folder import CARD, Checkpoint
from .opening import auto_class_and_task, how_to_make, ways_to_open

BEGIN, END = "<!-- hfpatch: this section is written anew by every push -->", "<!-- hfpatch: end -->"
_LIBRARIES = ("transformers", "hfpatch")  # that a push names
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")  # of the Hub; other text in metadata is no link
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]{0,30}")
_NOUNS = {"norm": "norms", "pos": "positions", "mlp": "MLPs", "placement": "places of the norms"}


def card(
    found: Checkpoint,
    repo_id: str,
    written: str | None = None,
    *,
    base_model: str | None = None,
    base_data: ModelCardData | None = None,
    license: str | None = None,
    report: Report | None = None,
    eval_results: Sequence[EvalResult] = (),
) -> tuple[str, list[str]]:
    """Return the text of README.md, and notes for the caller.

    Args:
        found: what is pushed.
        repo_id: where it goes.
        written: the card that is there already; its text stays, but for the section of an earlier push, and so does its
            metadata, but for what the caller says.
        base_model: the id of the model that was patched; None if it isn't known or isn't on the Hub.
        base_data: metadata of that model's card, of which the licence is taken; None if it can't be read.
        license: as the caller says.
        report: what `verify` measured.
        eval_results: results for the metadata; they replace equal ones.

    Raises:
        OptionError: the metadata of the card that is there can't be read.
    """
    title = repo_id.split("/")[-1]
    try:
        present = ModelCard(f"---\n{{}}\n---\n\n# {title}\n\n{BEGIN}{END}\n" if written is None else written)
    except Exception as error:  # the client's, and those of the YAML package that it uses
        reason = " ".join(str(error).split())
        raise OptionError(f"the metadata of {CARD} can't be read: {reason:.200}. Mend or remove it.") from error
    before, _, rest = present.text.partition(BEGIN)
    _, end, after = rest.partition(END)
    auto, task = _auto_class_and_task(found.config)
    data: Any = present.data
    if data.library_name in (None, *_LIBRARIES):  # by it the Hub chooses the code that it shows, which has to work
        data.library_name = "hfpatch" if found.form == "plugin" else "transformers"
    data.pipeline_tag = data.pipeline_tag or task
    data.base_model = base_model or data.base_model
    if base_data is not None and not (license or data.license):
        data.license, data.license_name, link = base_data.license, base_data.license_name, base_data.license_link
        files = f"https://huggingface.co/{base_model}/blob/main/" if base_model else ""
        data.license_link = link and urljoin(files, link)  # a file stays over there
    data.license = license or data.license
    tags = data.tags or []
    if end:  # schemes of an earlier push, which may have been of another patch
        tags = [tag for tag in tags if not any(tag in kind.registry for kind in KINDS.values())]
    requests = [] if found.record is None else found.record.requests
    data.tags = list(dict.fromkeys([*tags, KEY, *(part.scheme.name for _, part in requests)]))
    if eval_results:
        kept = [old for old in data.eval_results or [] if not any(map(old.is_equal_except_value, eval_results))]
        data.eval_results, data.model_name = [*kept, *eval_results], data.model_name or title
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


def _auto_class_and_task(config: dict[str, Any]) -> tuple[str, str | None]:
    """The Auto class that opens a checkpoint as what it was saved from, and the Hub's task for it."""
    model_type = config.get("model_type")
    if model_type in MODEL_TYPES:
        model_type = config[KEY]["base_model_type"]
    cls = getattr(transformers, (config.get("architectures") or [""])[0], None)
    known = cls is not None and model_type in CONFIG_MAPPING
    return auto_class_and_task(cls, CONFIG_MAPPING[model_type]) if known else ("AutoModel", None)


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
