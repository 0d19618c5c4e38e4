"""The model card of a pushed checkpoint: metadata that the Hub reads, and a section that each push writes anew.

All of it comes from the checkpoint, the caller or the base model's own card; what none of them says is left out or
called unknown. The section stands between two comments; the rest of a card stays as its author wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub import EvalResult, HfApi, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError
from transformers import CONFIG_MAPPING

from ..checkpoint.auto_classes import opened_classes
from ..errors import OptionError
from ..runtime.errors import first_line
from ..runtime.record import KEY
from ..schemes.request import KINDS, Part, Record
from ..verification.report import Report, output_lines

CARD = "README.md"
BEGIN, END = "<!-- hfpatch: this section is written anew by every push -->", "<!-- hfpatch: end -->"
# Auto class -> the Hub's task, where the class alone tells it (an encoder-decoder may summarise or translate)
TASKS: dict[str, str | None] = {
    "AutoModelForSpeechSeq2Seq": "automatic-speech-recognition",
    "AutoModelForCTC": "automatic-speech-recognition",
    "AutoModelForSeq2SeqLM": None,
    "AutoModelForImageTextToText": "image-text-to-text",
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForMultipleChoice": None,
    "AutoModelForImageClassification": "image-classification",
    "AutoModelForObjectDetection": "object-detection",
    "AutoModelForSemanticSegmentation": "image-segmentation",
    "AutoModelForVideoClassification": "video-classification",
    "AutoModelForAudioClassification": "audio-classification",
    "AutoModel": None,
}
_BODY_TASKS = {"input_ids": "feature-extraction", "pixel_values": "image-feature-extraction"}  # of an AutoModel
_KINDS = {"norm": "norms", "pos": "positions", "mlp": "MLPs", "placement": "places of the norms"}


@dataclass(frozen=True)
class CardFacts:
    """What a card is written from.

    Attributes:
        config: the checkpoint's config.json.
        record: its patch record; None of a native export.
        repo_id, subfolder: where the checkpoint goes.
        base_model: the id of the model that was patched; None where it isn't known or isn't on the Hub.
        base_card: metadata of that model's card; None where the card can't be read.
        license: as the caller says; None takes the base model's.
        report: what `verify` measured.
        eval_results: results for the metadata.
    """

    config: Mapping[str, Any]
    record: Record | None
    repo_id: str
    subfolder: str = ""
    base_model: str | None = None
    base_card: ModelCardData | None = None
    license: str | None = None
    report: Report | None = None
    eval_results: tuple[EvalResult, ...] = ()

    def parts(self) -> list[tuple[str, Part]]:
        """Every part of the patch record with its kind."""
        return [] if self.record is None else [(kind, part) for kind in KINDS for part in getattr(self.record, kind)]

    def inherited(self) -> dict[str, Any]:
        """The base model's licence and languages, which hold for the patched model too."""
        if self.base_card is None:
            return {}
        names = ("license", "license_name", "license_link", "language")
        found = {name: self.base_card.get(name) for name in names if self.base_card.get(name)}
        link = found.get("license_link")
        if link and self.base_model and "://" not in str(link):  # a file of the base model's repository
            found["license_link"] = f"https://huggingface.co/{self.base_model}/blob/main/{link}"
        return found


def base_of(name: str, required: bool, api: HfApi) -> tuple[str | None, ModelCardData | None]:
    """The base model's id on the Hub, and the metadata of its card, each None where it isn't known.

    Args:
        name: an id or a folder; of a folder only the card is read, since its path means nothing to others.
        required: the caller says that this is the base, so it is believed even if the Hub doesn't show it.

    Raises:
        OptionError: the base is required, and the name is neither an id nor a folder.
    """
    is_folder = Path(name).is_dir()
    try:
        path = Path(name) / CARD if is_folder else Path(api.hf_hub_download(name, CARD))
        return None if is_folder else name, ModelCard.load(path, ignore_metadata_errors=True).data
    except RemoteEntryNotFoundError:  # the repository is there, without a card
        return name, None
    except HFValidationError as error:
        if required:
            reason = first_line(error)
            raise OptionError(f"base_model={name!r:.80} is neither a folder nor a model's id: {reason}") from None
        return None, None
    except Exception:  # no such repository, no access, no connection; or the YAML package's errors about a broken card
        return name if required and not is_folder else None, None


def card(facts: CardFacts, written: str | None) -> tuple[str, list[str]]:
    """The text of README.md, and notes for the caller.

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
    before, begin, rest = present.text.partition(BEGIN)
    _, end, after = rest.partition(END)
    auto, task = opened_by(facts.config)
    data: Any = present.data
    _complete(data, facts, task, bool(end))
    notes = []
    if begin and end:
        present.text = before + "\n\n".join([BEGIN, *_section(facts, auto, data), END]) + after
    else:
        notes.append(f"{CARD} stays as its author wrote it; its metadata is completed")
    if not data.license:
        notes.append("the licence isn't known: say it with license= (--license)")
    if not data.base_model:
        notes.append("the model that was patched isn't known: say it with base_model= (--base)")
    return str(present), notes


def opened_by(config: Mapping[str, Any]) -> tuple[str, str | None]:
    """The Auto class that opens a checkpoint as what it was saved from, and the Hub's task for it."""
    model_type = config[KEY]["base_model_type"] if config.get("model_type") == KEY else config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        return "AutoModel", None
    for auto, task in TASKS.items():
        for cls in opened_classes(getattr(transformers, auto), CONFIG_MAPPING[model_type]):
            if cls.__name__ in (config.get("architectures") or []):
                return auto, _BODY_TASKS.get(cls.main_input_name) if auto == "AutoModel" else task
    return "AutoModel", None


def _complete(data: Any, facts: CardFacts, task: str | None, has_section: bool) -> None:
    """Fill in what an author's metadata lack; what the caller says wins, and equal results are replaced."""
    found = {"library_name": "transformers", "pipeline_tag": task, **facts.inherited()}
    said = {"base_model": facts.base_model}
    if facts.license:
        found = {name: value for name, value in found.items() if not name.startswith("license")}
        said["license"] = facts.license
    for name, value in {**found, **said}.items():
        if value and (name in said or not data.get(name)):
            data[name] = value
    tags = data.get("tags") or []
    tags = [tags] if isinstance(tags, str) else tags
    if has_section:  # schemes of an earlier push, which may have been of another patch
        tags = [tag for tag in tags if not any(tag in kind.registry for kind in KINDS.values())]
    data["tags"] = list(dict.fromkeys([*tags, KEY, *(part.scheme.name for _, part in facts.parts())]))
    if new := facts.eval_results:
        kept = [old for old in data.get("eval_results") or [] if not any(map(old.is_equal_except_value, new))]
        data["eval_results"] = [*kept, *new]
        data["model_name"] = data.get("model_name") or facts.repo_id.split("/")[-1]


def _section(facts: CardFacts, auto: str, data: Any) -> Iterable[str]:
    """The paragraphs that a push writes: what was patched, how to open it, what was measured, the licence."""
    yield _summary(facts, data.base_model)
    if facts.record is not None:
        yield "## What was patched\n\n" + _parts_table(facts)
    yield "## How to open it\n\n" + "\n\n".join(_ways(facts, auto))
    if facts.report is not None:
        yield "## What the patch changed, measured\n\n" + _measured(facts.report)
    yield "## Licence\n\n" + _licence(facts, data)


def _summary(facts: CardFacts, base: str | list[str] | None) -> str:
    bases = [base] if isinstance(base, str) else base or []
    of = " and ".join(f"[{one}](https://huggingface.co/{one})" for one in bases) or "A pretrained model"
    if facts.record is None:
        kind = facts.config.get("model_type")
        return f"{of}, patched by hfpatch and exported as a stock `{kind}` model, which transformers opens by itself."
    host = (facts.config.get("architectures") or [facts.record.base_model_type])[0]
    schemes: dict[str, dict[str, None]] = {}
    for kind, part in facts.parts():
        schemes.setdefault(_KINDS[kind], {})[f"`{part.scheme.name}`"] = None
    changes = ", ".join(f"its {what} are {' and '.join(names)}" for what, names in schemes.items())
    version = facts.config.get("transformers_version")
    saved = f" Saved with transformers {version}." if version else ""
    return f"{of} (`{host}`) with its architecture patched by hfpatch: {changes}.{saved}"


def _parts_table(facts: CardFacts) -> str:
    assert facts.record is not None
    lines = [("what", "scheme", "where", "started")]
    for kind, part in facts.parts():
        where = [f"only {_code(part.only)}" if part.only else "everywhere"]
        where += [f"not {_code(part.keep)}"] if part.keep else []
        lines.append((kind, f"`{part.scheme}`", ", ".join(where), f"`{part.init}`"))
    edits = "\n".join(map(str, facts.record.edits))
    return f"{_markdown(lines)}\n\nWhich comes to these changes of the host's modules:\n\n```\n{edits}\n```"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _ways(facts: CardFacts, auto: str) -> Iterable[str]:
    """How to open it, with and without hfpatch."""
    where = f'"{facts.repo_id}"' + (f', subfolder="{facts.subfolder}"' if facts.subfolder else "")

    def code(first: str = "", option: str = "") -> str:
        opened = f"model = {auto}.from_pretrained({where}{option})"
        return f"```python\n{first}from transformers import {auto}\n\n{opened}\n```"

    if facts.record is None:
        yield "With transformers alone:\n\n" + code()
        return
    yield "With hfpatch installed; without it transformers refuses the checkpoint, rather than open half of it:"
    yield code(first="import hfpatch\n")
    if auto in (facts.config.get("auto_map") or {}):
        yield "Without hfpatch, by the code that the repository carries; read it, and give a commit as `revision=`:"
        yield code(option=", trust_remote_code=True")


def _measured(report: Report) -> str:
    size = f"{report.examples} examples" + (f", {report.tokens:,} tokens" if report.tokens else "")
    head = f"By `hfpatch verify`; the truth is the original (`reference`) in float64. Inputs: {report.inputs} ({size})."
    outputs = dict.fromkeys(row.output for row in report.outputs)
    tables = [_markdown(output_lines([row for row in report.outputs if row.output == name])) for name in outputs]
    return "\n\n".join([head, *tables, *(f"Note: {note}" for note in report.notes)])


def _licence(facts: CardFacts, data: Any) -> str:
    if not data.license:
        reason = "wasn't at hand" if facts.base_card is None else "names none"
        return (
            f"Not known: the base model's card {reason}. Whatever licence the base model has holds here; look it up "
            "before use."
        )
    name = f"`{data.license}`" + (f" ({data.license_name})" if data.license_name else "")
    carried = facts.license is None and facts.inherited().get("license") == data.license
    return f"{name}, carried over from the base model's card." if carried else f"{name}, as the metadata above says."


def _markdown(lines: Iterable[tuple[str, ...]]) -> str:
    escaped = [tuple(cell.replace("|", "\\|") for cell in line) for line in lines]
    escaped.insert(1, ("---",) * len(escaped[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
