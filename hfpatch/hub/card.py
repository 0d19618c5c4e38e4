"""The model card: metadata that the Hub reads, and a section that says what was patched and how to open it.

Everything in them comes from the checkpoint, from what the caller gives, or from the base model's own card; what none
of them tells is left out or said to be unknown. The section stands between two comments, so that a later push renews it
and leaves the rest of a card as its author wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import CONFIG_MAPPING

from ..errors import OptionError
from ..runtime.record import KEY
from ..schemes.request import KINDS
from .folder import Folder
from .section import Facts, parts_of, section

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
        present = ModelCard(_new(facts.repo_id.split("/")[-1]) if written is None else written)
    except Exception as error:  # the client's, and those of the YAML package that it uses
        reason = " ".join(str(error).split())
        raise OptionError(f"the metadata of README.md can't be read: {reason:.200}. Mend or remove it.") from error
    before, begin, rest = present.text.partition(BEGIN)
    _, end, after = rest.partition(END)
    renewed = bool(begin and end)
    present.data = _merged(present.data, data, facts, renewed)
    if renewed:
        written_anew = section(folder, facts, opened[0] if opened else "AutoModel", present.data)
        present.text = before + "\n\n".join([BEGIN, *written_anew, END]) + after
    notes = [] if renewed else ["README.md stays as its author wrote it; its metadata is completed"]
    if not present.data.license:
        notes.append("the licence isn't known: say it with license= (--license)")
    if not present.data.base_model:
        notes.append("the model that was patched isn't known: say it with base_model= (--base)")
    return str(present), notes


def _new(title: str) -> str:
    """A card of which nothing is said yet, with metadata that are empty rather than missing."""
    return f"---\n{{}}\n---\n\n# {title}\n\n{BEGIN}{END}\n"


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
        tags=[KEY, *(part.scheme.name for _, part in parts_of(folder.record))],
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
