"""The model card of a pushed checkpoint: metadata that the Hub reads, and a section that each push renews.

All of it comes from the checkpoint, the caller or the base model's own card; what none of them says is left out. The
section stands between two comments; the rest of a card stays as its author wrote it. What a file says goes into that
section only in a form that shows it as it is: names and versions that are such, and texts without markup.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from transformers import CONFIG_MAPPING

from ..checkpoint.auto_classes import auto_classes_of
from ..checkpoint.files import PAGE
from ..errors import OptionError
from ..measure.inputs import main_input
from ..runtime.errors import first_line
from ..runtime.record import KEY, MODEL_TYPES
from ..schemes.request import KINDS, SchemeRequest
from ..schemes.verdicts import MEASUREMENT_NOTE, outcome_table
from ..verification.report import Report
from .folder import CARD, Checkpoint
from .opening import ways_to_open

BEGIN, END = "<!-- hfpatch: this section is written anew by every push -->", "<!-- hfpatch: end -->"
# Auto class -> the Hub's task; of an encoder-decoder's text it could be several, and of an AutoModel see below
TASKS = {
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForSeq2SeqLM": None,
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForObjectDetection": "object-detection",
    "AutoModelForSemanticSegmentation": "image-segmentation",
    "AutoModelForVideoClassification": "video-classification",
    "AutoModelForAudioClassification": "audio-classification",
}
_BODY_TASKS = {"input_ids": "feature-extraction", "pixel_values": "image-feature-extraction"}  # by the main input
_LIBRARIES = ("transformers", "hfpatch")  # that a push names
# Of the Hub's four relations (adapter, finetune, merge, quantized) the one for a whole model whose weights were made
# from those of one other: a patch is no adapter, merges nothing and quantizes nothing.
_RELATION = "finetune"
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]{0,30}")
_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_NOUNS = {"norm": "norms", "pos": "positions", "mlp": "MLPs", "placement": "places of the norms"}


@dataclass(frozen=True)
class CardFacts:
    """Data of a model card.

    Attributes:
        checkpoint: what is pushed.
        repo_id: where it goes.
        base_model: the id of the model that was patched; None where it isn't known or isn't on the Hub.
        base_card: metadata of that model's card; None where the card can't be read.
        license: as the caller says; None takes the base model's.
        report: what `verify` measured.
        eval_results: results for the metadata.
    """

    checkpoint: Checkpoint
    repo_id: str
    base_model: str | None = None
    base_card: ModelCardData | None = None
    license: str | None = None
    report: Report | None = None
    eval_results: tuple[EvalResult, ...] = ()

    @property
    def requests(self) -> list[tuple[str, SchemeRequest]]:
        """Every part of the patch record with its kind."""
        return [] if self.checkpoint.record is None else self.checkpoint.record.requests

    def licence(self) -> dict[str, Any]:
        """Return the metadata about the licence: the caller's, or else the base model's."""
        if self.license or self.base_card is None:
            return {"license": self.license}
        found = {name: self.base_card.get(name) for name in ("license", "license_name", "license_link")}
        if found["license_link"] and self.base_model and "://" not in found["license_link"]:  # a file over there
            found["license_link"] = f"https://huggingface.co/{self.base_model}/blob/main/{found['license_link']}"
        return found


def base_of(name: str, required: bool, api: HfApi) -> tuple[str | None, ModelCardData | None]:
    """Return the base model's id on the Hub, and the metadata of its card, each None if it isn't known.

    Args:
        name: an id or a folder; of a folder only the card is read, since its path means nothing to others.
        required: the caller says that this is the base, so it is believed even if the Hub doesn't show it.

    Raises:
        OptionError: the base is required, and the name is neither an id nor a folder.
    """
    base = None if Path(name).is_dir() else name
    try:
        path = Path(name) / CARD if base is None else Path(api.hf_hub_download(name, CARD))
        return base, ModelCard.load(path, ignore_metadata_errors=True).data
    except HFValidationError as error:
        if required:
            reason = first_line(error)
            raise OptionError(f"base_model={name!r:.80} is neither a folder nor a model's id: {reason}") from None
        return None, None
    except Exception as error:  # no such repository, no access, no connection, broken YAML
        return base if required or isinstance(error, RemoteEntryNotFoundError) else None, None


def card(facts: CardFacts, written: str | None) -> tuple[str, list[str]]:
    """Return the text of README.md, and notes for the caller.

    Args:
        written: the card that is there already; its text stays, but for the section of an earlier push.

    Raises:
        OptionError: the metadata of the card that is there can't be read.
    """
    title = facts.repo_id.split("/")[-1]
    try:
        present = ModelCard(f"---\n{{}}\n---\n\n# {title}\n\n{BEGIN}{END}\n" if written is None else written)
    except Exception as error:  # the client's, and those of the YAML package that it uses
        reason = " ".join(str(error).split())
        raise OptionError(f"the metadata of {CARD} can't be read: {reason:.200}. Mend or remove it.") from error
    before, _, rest = present.text.partition(BEGIN)
    _, end, after = rest.partition(END)
    auto, task = auto_class_and_task(facts.checkpoint.config)
    data: Any = present.data
    _complete(data, facts, task, bool(end))
    notes = []
    if end:
        present.text = before + "\n\n".join([BEGIN, *_section(facts, auto, data), END]) + after
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


def auto_class_and_task(config: dict[str, Any]) -> tuple[str, str | None]:
    """Return the Auto class that opens a checkpoint as what it was saved from, and the Hub's task for it."""
    model_type = config.get("model_type")
    if model_type in MODEL_TYPES:
        model_type = config[KEY]["base_model_type"]
    cls = getattr(transformers, (config.get("architectures") or [""])[0], None)
    found = auto_classes_of(cls, CONFIG_MAPPING[model_type], TASKS) if cls and model_type in CONFIG_MAPPING else []
    if found == ["AutoModel"]:
        return "AutoModel", _BODY_TASKS.get(main_input(cls))
    auto = next(iter(found), "AutoModel")
    return auto, TASKS.get(auto)


def _complete(data: Any, facts: CardFacts, task: str | None, has_section: bool) -> None:
    """Fill gaps in the author's metadata; the caller's arguments take precedence, equal results are replaced."""
    # by it the Hub chooses the code that it shows, which has to work
    library = "hfpatch" if facts.checkpoint.form == "plugin" else "transformers"
    found = {"library_name": library, "pipeline_tag": task, **facts.licence()}
    if has_section and data.get("library_name") in _LIBRARIES:  # an earlier push may have had another form
        data["library_name"] = library
    for name, value in {**found, "base_model": facts.base_model}.items():
        by_caller = name == "base_model" or (name == "license" and facts.license)
        if value and (by_caller or not data.get(name)):
            data[name] = value
    if isinstance(data.get("base_model"), str):
        data["base_model_relation"] = data.get("base_model_relation") or _RELATION
    tags = data.get("tags") or []
    tags = [tags] if isinstance(tags, str) else tags
    if has_section:  # schemes of an earlier push, which may have been of another patch
        tags = [tag for tag in tags if not any(tag in kind.registry for kind in KINDS.values())]
    data["tags"] = list(dict.fromkeys([*tags, KEY, *(part.scheme.name for _, part in facts.requests)]))
    if results := facts.eval_results:
        kept = [old for old in data.get("eval_results") or [] if not any(map(old.is_equal_except_value, results))]
        data["eval_results"] = [*kept, *results]
        data["model_name"] = data.get("model_name") or facts.repo_id.split("/")[-1]


def _section(facts: CardFacts, auto: str, data: Any) -> Iterator[str]:
    """The paragraphs that a push writes: what was patched, how to open it, what was measured, the licence."""
    found, record = facts.checkpoint, facts.checkpoint.record
    yield _summary(facts, data.base_model)
    if record is not None:
        yield "## What was patched"
        calls = [f"hfpatch.patch_model(model, {part.to_text(kind)})" for kind, part in facts.requests]
        if isinstance(data.base_model, str):
            opened = f"model = {auto}.from_pretrained({json.dumps(data.base_model)})"
            calls = ["import hfpatch", f"from transformers import {auto}", "", opened, *calls]
        yield _fence("\n".join(calls), "python")
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
    for words, language, code in ways_to_open(facts.repo_id, auto, form):
        yield f"{words}\n\n{_fence(code, language)}"
    if facts.report is not None:
        yield "## What the patch changed, measured"
        yield "By `hfpatch verify`; the truth is the original (`reference`) in float64."
        yield _fence(str(facts.report))
    yield "## Licence"
    yield _licence(facts, data)


def _summary(facts: CardFacts, base: str | list[str] | None) -> str:
    bases = [base] if isinstance(base, str) else base or []
    of = " and ".join(map(_link, bases)) or "A pretrained model"
    config, record = facts.checkpoint.config, facts.checkpoint.record
    if record is None:
        kind = config.get("model_type")
        return f"{of}, patched by hfpatch and exported as a stock `{kind}` model, which transformers opens by itself."
    schemes: dict[str, list[str]] = {}
    for kind, part in facts.requests:
        schemes.setdefault(_NOUNS[kind], []).append(f"`{part.scheme.name}`")
    changes = ", ".join(f"its {noun} are {' and '.join(dict.fromkeys(names))}" for noun, names in schemes.items())
    version = str(config.get("transformers_version"))
    saved = f" Saved with transformers {version}." if _VERSION.fullmatch(version) else ""
    return f"{of} (`{facts.checkpoint.title}`) with its architecture patched by hfpatch: {changes}.{saved}"


def _licence(facts: CardFacts, data: Any) -> str:
    if not data.license:
        return "Not known. Whatever licence the base model has holds here; look it up before use."
    name = f"`{_plain(data.license)}`" + (f" ({_plain(data.license_name)})" if data.license_name else "")
    carried = facts.license is None and facts.licence()["license"] == data.license
    return f"{name}, carried over from the base model's card." if carried else f"{name}, as the metadata above says."


def _fence(text: str, language: str = "") -> str:
    """A block of code, whose fence is longer than any in the text."""
    fence = "`" * (1 + max([2, *map(len, re.findall("`+", text))]))
    return f"{fence}{language}\n{text}\n{fence}"


def _link(base: str) -> str:
    """A link to a model of the Hub; of what isn't an id the text."""
    return f"[{base}](https://huggingface.co/{base})" if _ID.fullmatch(base) else _plain(base)


def _plain(text: Any) -> str:
    """A line of text without what Markdown or HTML is made of."""
    return " ".join(re.sub(r"[`*_\[\]()<>#!|&\\]", "", str(text)).split())
