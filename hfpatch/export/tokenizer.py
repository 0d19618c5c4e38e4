"""Saves a tokenizer with an exported model, and checks that the same one is opened again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from ..runtime.patch_errors import PatchError

_SAMPLE = "The quick (brown) fox: 12.5 jumps; c1ccccc1O naïve\n"
_OF_CLASSES = ("padding_side", "model_input_names")  # settings that a class has by default, and doesn't save then


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer or processor with a model, and check that the Auto class opens the same one.

    An Auto class goes by the model's type as well as by the tokenizer's config, so beside a model of another type
    another class may open it. Files of transformers' own classes name no code of the original's repository afterwards.

    Raises:
        PatchError: it opens as another tokenizer.
    """
    tokenizer.save_pretrained(folder)
    saved = [tokenizer, *(one for one in vars(tokenizer).values() if hasattr(one, "save_pretrained"))]
    if all(type(one).__module__.startswith("transformers.") for one in saved):
        for path in folder.glob("*_config.json"):
            stored = json.loads(path.read_text(encoding="utf-8"), object_hook=_without_code)
            path.write_text(json.dumps(stored, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if not hasattr(tokenizer, "get_vocab"):  # processors have no vocabulary
        return
    path = folder / "tokenizer_config.json"
    if path.is_file():
        own = {name: getattr(tokenizer, name) for name in _OF_CLASSES if hasattr(tokenizer, name)}
        stored = {**json.loads(path.read_text(encoding="utf-8")), **own}
        path.write_text(json.dumps(stored, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    sample = _SAMPLE + " ".join(sorted(tokenizer.get_vocab())[:50])
    try:
        opened = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception:  # tokenizers fail in many ways
        opened = None
    if opened is None or _settings_and_sample(tokenizer, sample) != _settings_and_sample(opened, sample):
        raise PatchError(
            f"{type(tokenizer).__name__} would open as another class beside a model of this type, and split text in "
            "another way. Export without tokenizer=, and save it in a folder of its own."
        )


def _without_code(stored: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in stored.items() if name != "auto_map"}


def _settings_and_sample(tokenizer: Any, text: str) -> list[Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "padding_side")
    facts = [len(tokenizer), *(getattr(tokenizer, name, None) for name in names)]
    try:
        return [*facts, dict(tokenizer(text)), tokenizer.decode(tokenizer(text)["input_ids"])]
    except Exception as error:  # one that can't encode the sample must fail in the same way
        return [*facts, type(error).__name__]
