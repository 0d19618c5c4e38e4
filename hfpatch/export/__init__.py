"""Export to hfpatch checkpoints, remote code (trust_remote_code=True) and stock transformers architectures."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoTokenizer

from ..core.holders import model_inside, tokenizer_owner
from ..core.staging import stage_folder
from ..errors import OptionError, WrappedModelError
from ..measure.batches import tokenizer_of
from ..runtime.lens import host_class
from ..runtime.patch_errors import PatchError, UnsupportedError
from .native import Exported, find_native, native_model, write_stock
from .remote import write_remote

FORMS = ("plugin", "remote", "native")
_SAMPLE = "The quick (brown) fox: 12.5 jumps; c1ccccc1O naïve\n"
_OF_CLASSES = ("padding_side", "model_input_names")  # settings that a class doesn't save if they are its defaults

__all__ = ["FORMS", "Exported", "export_model", "native_model"]


def export_model(
    model: Any,
    folder: str | Path,
    to: str = "plugin",
    *,
    tokenizer: Any = None,
    architecture: str | None = None,
    serve: str | None = None,
    verify: bool = True,
    example_inputs: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    max_shard_size: str | int | None = None,
) -> Exported:
    """Write a patched model to a folder, in one of three forms.

        to        opens with                   contains
        plugin    `import hfpatch`             what `save_pretrained` writes
        remote    `trust_remote_code=True`     the same, the files of hfpatch/runtime and a modeling file
        native    transformers alone           a stock architecture of equal outputs

    A SentenceTransformer (CrossEncoder, SparseEncoder) is saved as a whole, and its own class opens it in the same
    three ways. The outputs of the model inside it are compared.

    A native export is equal if random texts of several lengths, with and without padding, give every output within 1e-5
    of its spread, in float32 or, if rounding alone is more, in float64. Weights of half-precision models are converted
    in float32 and rounded once, at the end. Training may differ: a stock class may have one dropout setting for two of
    the patched model (GPT-NeoX's, for embeddings and branches).

    Args:
        model: a patched transformers model, or a sentence-transformers object that holds one.
        folder: the folder.
        to: "plugin", "remote" or "native".
        tokenizer: a tokenizer or processor to save along; a SentenceTransformer brings its own.
        architecture: for a native export, transformers' name of the only architecture to try.
        serve: for a native export, the runtime that must load it: "llama.cpp" or "onnx".
        verify: for a remote export: open it in another process, where hfpatch can't be imported; outputs of a fixed
            forward must equal the model's bit for bit. Native exports are always compared.
        example_inputs: keyword arguments of that forward; None makes them from the model's signature and config.
        overwrite: replace a folder that isn't empty, once the export has succeeded.
        max_shard_size: largest file of weights, as in `save_pretrained`.

    Returns:
        The result; `str(result)` is a summary of what was written.

    Raises:
        OptionError: the form or runtime is unknown; `architecture` or `serve` is passed without to="native", or
            `verify=False` or `example_inputs` without to="remote".
        UnknownNameError: hfpatch knows no equality with that architecture.
        WrappedModelError: the model contains PEFT adapters.
        UnsupportedError, VerificationError: no stock architecture equals the model; the message gives the reason for
            each. Or torch and transformers alone can't build it, or what was written doesn't open as the same function.
        PatchError: the folder isn't empty or can't be written, or the tokenizer doesn't open again from it.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import export_model, patch_model
        >>> print(export_model(patch_model(model, norm="rms"), "out"))
        Saved to out as GPT2LMHeadModel (plugin).
    """
    if to not in FORMS:
        raise OptionError(f"to must be one of {', '.join(FORMS)}, not {to!r:.40}.")
    for name, value in {"architecture": architecture, "serve": serve}.items():
        if value is not None and to != "native":
            raise OptionError(f"{name}= chooses what a native export becomes; pass to='native' with it.")
    if to != "remote" and (not verify or example_inputs is not None):
        raise OptionError("verify= and example_inputs= are for a remote export's check. Pass to='remote' with them.")
    save_options = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    inner = model_inside(model)
    if to == "plugin" and _has_adapters(inner):  # the other forms are compared with the model
        raise WrappedModelError(
            f"{type(inner).__name__} has adapters inside, whose layers would be saved under names that it doesn't open "
            "with. Merge them first (merge_and_unload), or save the adapter by itself."
        )

    def write(place: Path) -> Exported:
        if to == "native":
            found = find_native(inner, architecture, serve)
            write_stock(found.model, place, **save_options)
            return Exported(place, to, type(found.model).__name__, found.measured, found.longest)
        if to == "remote":
            write_remote(inner, place, verify, example_inputs, **save_options)
        else:
            inner.save_pretrained(place, remote_code=False, **save_options)
        return Exported(place, to, host_class(type(inner)).__name__)

    with stage_folder(Path(folder), overwrite) as written:
        exported = write(written) if inner is model else _write_holder(model, inner, written, write)
        if tokenizer is not None:
            save_tokenizer(tokenizer, written)
    return replace(exported, folder=Path(folder))


def _has_adapters(model: nn.Module) -> bool:
    """Whether a model has PEFT's layers inside; its weights are then saved under other names."""
    return getattr(model, "_hf_peft_config_loaded", False) or any(
        type(module).__module__.startswith("peft.") for module in model.modules()
    )


def _write_holder(holder: Any, model: Any, folder: Path, write: Callable[[Path], Exported]) -> Exported:
    """Save a holder, with `write` for the model inside it, so that all other files lie where its library wants them.

    Raises:
        UnsupportedError: it doesn't save its model by `save_pretrained`, or not where transformers looks for code.
    """
    found: list[Exported] = []

    def save_inside(place: Any, **_: Any) -> None:
        vars(model).pop("save_pretrained", None)  # `write` calls the model's own method
        found.append(write(Path(place)))

    vars(model)["save_pretrained"] = save_inside
    try:
        holder.save_pretrained(str(folder))
    finally:
        vars(model).pop("save_pretrained", None)
    if not found:
        raise UnsupportedError(f"{type(holder).__name__} doesn't save the model inside it by save_pretrained.")
    if found[0].to == "remote" and found[0].folder.resolve() != folder.resolve():
        raise UnsupportedError(
            f"{type(holder).__name__} saves its model in the subfolder {found[0].folder.name}, and transformers looks "
            "for a checkpoint's code in the folder itself. Use to='plugin' or to='native'."
        )
    exported, tokenizer = found[0], tokenizer_of(tokenizer_owner(holder))
    if tokenizer is not None:  # beside a model of another type, another tokenizer class may open it
        save_tokenizer(tokenizer, exported.folder)
    return exported


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save a tokenizer or processor with a model, and check that the Auto class opens the same one.

    An Auto class goes by the model's type as well as by the tokenizer's config, so another class may open it beside a
    model of another type. Files of transformers' own classes name no code of the original's repository afterwards.

    Raises:
        PatchError: the Auto class opens another tokenizer.
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
            "another way. Export without tokenizer=, and save the tokenizer in a folder of its own."
        )


def _without_code(stored: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in stored.items() if name != "auto_map"}


def _settings_and_sample(tokenizer: Any, text: str) -> list[Any]:
    names = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "padding_side")
    facts = [len(tokenizer), *(getattr(tokenizer, name, None) for name in names)]
    try:
        return [*facts, dict(tokenizer(text)), tokenizer.decode(tokenizer(text)["input_ids"])]
    except Exception as error:  # a tokenizer that can't encode the sample must fail in the same way
        return [*facts, type(error).__name__]
