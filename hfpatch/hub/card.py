"""The model card: metadata that the Hub reads, and a section that says what was patched and how to open it.

Everything in it comes from the checkpoint, from what the caller gives, or from the base model's own card; what none of
them tells is left out or said to be unknown. The section stands between two comments, so that a later push renews it
and leaves the rest of a card as its author wrote it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import CONFIG_MAPPING

from ..convert.report import OutputRow, Report
from ..errors import OptionError
from ..record import KEY, KINDS, Part, Record
from .folder import Folder

BEGIN, END = "<!-- hfpatch: this section is written anew by every push -->", "<!-- hfpatch: end -->"
KIND_WORDS = {"norm": "norms", "pos": "positions", "mlp": "MLPs", "placement": "places of the norms"}
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


@dataclass(frozen=True)
class Base:
    """The model that was patched, as far as it is known.

    Attributes:
        repo_id: its id on the Hub; None where it came from a folder or nobody said.
        data: metadata of its card; None where the card wasn't at hand.
    """

    repo_id: str | None = None
    data: ModelCardData | None = None

    def inherited(self) -> dict[str, Any]:
        """What holds for the patched model too: its licence and its languages."""
        if self.data is None:
            return {}
        names = ("license", "license_name", "license_link", "language")
        return {name: self.data.get(name) for name in names if self.data.get(name)}


@dataclass(frozen=True)
class Facts:
    """What a card tells besides the checkpoint itself.

    Attributes:
        repo_id: where the checkpoint goes.
        subfolder: in which folder there; empty at its root.
        base: the model that was patched.
        license: as the caller says; None takes the base's.
        report: what `verify` measured.
        eval_results: results for the metadata.
    """

    repo_id: str
    subfolder: str = ""
    base: Base = field(default_factory=Base)
    license: str | None = None
    report: Report | None = None
    eval_results: tuple[EvalResult, ...] = ()


def card(folder: Folder, facts: Facts, written: str | None) -> tuple[str, list[str]]:
    """The text of README.md, and what there is to say about it.

    Args:
        written: the card that is there already; its text stays, but for the section of an earlier push.

    Raises:
        OptionError: the metadata of the card that is there can't be read.
    """
    opened = opened_by(folder.config)
    data = _metadata(folder, facts, opened)
    try:
        present = ModelCard(f"# {facts.repo_id.split('/')[-1]}\n\n{BEGIN}{END}\n" if written is None else written)
    except Exception as error:  # the client's, and those of the YAML package that it uses
        reason = " ".join(str(error).split())
        raise OptionError(f"the metadata of README.md can't be read: {reason:.200}. Mend or remove it.") from error
    before, begin, rest = present.text.partition(BEGIN)
    _, end, after = rest.partition(END)
    renewed = bool(begin and end)
    present.data = _merged(present.data, data, facts, renewed)
    if renewed:
        section = _section(folder, facts, opened[0] if opened else "AutoModel", present.data)
        present.text = before + "\n\n".join([BEGIN, *section, END]) + after
    notes = [] if renewed else ["README.md stays as its author wrote it; its metadata is completed"]
    if not present.data.license:
        notes.append("the licence isn't known: say it with license= (--license)")
    if not present.data.base_model:
        notes.append("the model that was patched isn't known: say it with base_model= (--base)")
    return str(present), notes


def opened_by(config: Mapping[str, Any]) -> tuple[str, Any] | None:
    """The Auto class that opens the checkpoint as what it was saved from, and that class; None where none does."""
    stored = config[KEY]["base_model_type"] if config.get("model_type") == KEY else config.get("model_type")
    if stored not in CONFIG_MAPPING:
        return None
    host = CONFIG_MAPPING[stored]
    for auto in TASKS:
        try:
            found = getattr(transformers, auto)._model_mapping.get(host, ())
        except ValueError:  # transformers names a class there that it doesn't have
            continue
        for cls in found if isinstance(found, tuple | list) else (found,):
            if cls.__name__ in (config.get("architectures") or []):
                return auto, cls
    return None


def _metadata(folder: Folder, facts: Facts, opened: tuple[str, Any] | None) -> ModelCardData:
    inherited = facts.base.inherited()
    if facts.license is not None:
        inherited = {name: value for name, value in inherited.items() if not name.startswith("license")}
        inherited["license"] = facts.license
    return ModelCardData(
        base_model=facts.base.repo_id,
        library_name="transformers",
        pipeline_tag=_task(*opened) if opened else None,
        tags=[KEY, *(part.scheme.name for _, part in _parts(folder.record))],
        eval_results=list(facts.eval_results) or None,
        model_name=facts.repo_id.split("/")[-1] if facts.eval_results else None,
        **inherited,
    )


def _task(auto: str, cls: Any) -> str | None:
    if auto != "AutoModel":
        return TASKS[auto]
    return {"input_ids": "feature-extraction", "pixel_values": "image-feature-extraction"}.get(cls.main_input_name)


def _merged(present: Any, ours: ModelCardData, facts: Facts, renewed: bool) -> ModelCardData:
    """The author's metadata, completed; what the caller says wins, and results of the same name are renewed."""
    said = {"license": facts.license, "base_model": facts.base.repo_id}
    for name, value in ours.to_dict().items():
        if name not in ("tags", "model-index") and (not present.get(name) or said.get(name)):
            present[name] = value
    theirs = present.get("tags") or []
    theirs = [theirs] if isinstance(theirs, str) else theirs
    if renewed:  # an earlier push's, which may have been of another patch
        theirs = [tag for tag in theirs if not any(tag in kind.registry for kind in KINDS.values())]
    present["tags"] = list(dict.fromkeys([*theirs, *ours["tags"]]))
    if facts.eval_results:
        mine = {_measured(result) for result in facts.eval_results}
        others = [result for result in present.get("eval_results") or [] if _measured(result) not in mine]
        present["eval_results"] = [*others, *facts.eval_results]
        present["model_name"] = present.get("model_name") or ours["model_name"]
    return present


def _measured(result: EvalResult) -> tuple[Any, ...]:
    return (*result.unique_identifier, result.metric_type, result.metric_name)


def _section(folder: Folder, facts: Facts, auto: str, data: ModelCardData) -> Iterable[str]:
    yield _summary(folder, data.base_model)
    if folder.record is not None:
        yield "## What was patched\n\n" + _parts_table(folder.record)
    yield "## How to open it\n\n" + "\n\n".join(_ways(folder, facts, auto))
    if facts.report is not None:
        yield "## What the patch changed, measured\n\n" + _report(facts.report)
    yield "## Licence\n\n" + _licence(facts, data)


def _summary(folder: Folder, base: str | list[str] | None) -> str:
    bases = [base] if isinstance(base, str) else base or []
    of = " and ".join(f"[{one}](https://huggingface.co/{one})" for one in bases) or "a pretrained model"
    if folder.record is None:
        return (
            f"{of[0].upper()}{of[1:]}, patched by hfpatch and exported as a stock `{folder.config.get('model_type')}` "
            "model, which transformers opens by itself."
        )
    host = (folder.config.get("architectures") or [folder.record.base_model_type])[0]
    changes = dict.fromkeys(f"its {KIND_WORDS[kind]} are `{part.scheme.name}`" for kind, part in _parts(folder.record))
    version = folder.config.get("transformers_version")
    made = f" Saved with transformers {version}." if version else ""
    return f"{of[0].upper()}{of[1:]} (`{host}`) with its architecture patched by hfpatch: {', '.join(changes)}.{made}"


def _parts(record: Record | None) -> list[tuple[str, Part]]:
    return [] if record is None else [(kind, part) for kind in KINDS for part in getattr(record, kind)]


def _parts_table(record: Record) -> str:
    lines = [("what", "scheme", "options", "modules", "where", "started")]
    for kind, part in _parts(record):
        options = {name: value for name, value in part.scheme.to_json().items() if name != "name" and value is not None}
        where = [f"only {_code(part.only)}"] if part.only else ["everywhere"]
        where += [f"not {_code(part.keep)}"] if part.keep else []
        where += [f"not {_code(part.left)} (would not be exact)"] if part.left else []
        told = ", ".join(f"`{name}={value}`" for name, value in options.items())
        lines.append((kind, f"`{part.scheme.name}`", told, str(part.modules), ", ".join(where), f"`{part.init}`"))
    return _markdown(lines)


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _ways(folder: Folder, facts: Facts, auto: str) -> Iterable[str]:
    where = f'"{facts.repo_id}"' + (f', subfolder="{facts.subfolder}"' if facts.subfolder else "")
    head = f"from transformers import {auto}\n"
    if folder.record is None:
        yield f"With transformers alone:\n\n```python\n{head}\nmodel = {auto}.from_pretrained({where})\n```"
        return
    yield (
        "With hfpatch installed; without it transformers refuses the checkpoint, rather than open half of it:\n\n"
        f"```python\nimport hfpatch\n{head}\nmodel = {auto}.from_pretrained({where})\n```"
    )
    if auto in (folder.config.get("auto_map") or {}):
        yield (
            "Without hfpatch, by the code that the repository carries; read it, and give a commit as `revision=`:\n\n"
            f"```python\n{head}\nmodel = {auto}.from_pretrained({where}, trust_remote_code=True)\n```"
        )


def _report(report: Report) -> str:
    size = f"{report.examples} examples" + (f", {report.tokens:,} tokens" if report.tokens else "")
    columns = {
        "max error": lambda row: f"{row.max_error:.2g}",
        "rms error": lambda row: f"{row.rms_error:.2g}",
        "top-1": lambda row: _or_none(row.top1, ".4f"),
        "KL (nats)": lambda row: _or_none(row.kl, ".2g"),
        "perplexity": lambda row: _or_none(row.perplexity, ".4g"),
        "cosine": lambda row: _or_none(row.cosine_mean, ".6f"),
    }
    rows: list[OutputRow] = report.outputs
    shown = {name: cell for name, cell in columns.items() if any(cell(row) for row in rows)}
    lines = [("output", "run", "dtype", *shown)]
    lines += [(row.output, row.role, row.dtype, *(cell(row) for cell in shown.values())) for row in rows]
    notes = "".join(f"\n\nNote: {note}" for note in report.notes)
    return (
        f"By `hfpatch verify`, against the original in float64. Inputs: {report.inputs} ({size}); `reference` is the "
        f"original itself.\n\n{_markdown(lines)}{notes}"
    )


def _or_none(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _licence(facts: Facts, data: ModelCardData) -> str:
    if not data.license:
        at_hand = facts.base.data is not None
        reason = "the base model's card names none" if at_hand else "the base model's card wasn't at hand"
        return f"Not known: {reason}. Whatever licence the base model has holds here; look it up before use."
    name = f"`{data.license}`" + (f" ({data.license_name})" if data.license_name else "")
    carried = facts.license is None and facts.base.inherited().get("license") == data.license
    return f"{name}, carried over from the base model's card." if carried else f"{name}, as the metadata above says."


def _markdown(lines: Iterable[tuple[str, ...]]) -> str:
    escaped = [tuple(cell.replace("|", "\\|") for cell in line) for line in lines]
    escaped.insert(1, ("---",) * len(escaped[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
