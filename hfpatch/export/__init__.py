"""Exports: the plugin's own checkpoints, remote code (trust_remote_code) and stock architectures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..runtime.lens import host_class
from .files import require_plain_options, staged
from .native import Exported, export_native, native_model

FORMS = ("plugin", "remote", "native")

__all__ = ["FORMS", "Exported", "export_model", "export_native", "native_model"]


def export_model(
    model: Any,
    folder: str | Path,
    to: str = "plugin",
    *,
    tokenizer: Any = None,
    architecture: str | None = None,
    serve: str | None = None,
    overwrite: bool = False,
    **save_options: Any,
) -> Exported:
    """Write a patched model to a folder, in one of three forms.

        to        opens with                   contains
        plugin    `import hfpatch`             what `save_pretrained` writes
        remote    `trust_remote_code=True`     the same, the files of hfpatch/runtime and a modeling file
        native    transformers alone           a stock architecture of equal outputs

    Args:
        model: a patched transformers model.
        folder: the folder.
        to: "plugin", "remote" or "native".
        tokenizer: a tokenizer or processor to save along.
        architecture: of a native export, transformers' name of the only architecture to try.
        serve: of a native export, the runtime that has to take it: "llama.cpp", "vllm", "sglang", "tei", "onnx".
        overwrite: replace a folder that isn't empty, once the export has succeeded.
        save_options: for `save_pretrained`, such as `max_shard_size`.

    Returns:
        What was written; `str` of it is a summary.

    Raises:
        OptionError: no such form or runtime; an architecture or runtime for another form than "native"; an option that
            would save something else.
        UnsupportedError, VerificationError: no stock architecture equals the model; the message says for each why.
        PatchError: the folder isn't empty or can't be written, or the tokenizer doesn't open again from it.
    """
    if to not in FORMS:
        raise OptionError(f"to must be one of {', '.join(FORMS)}, not {to!r:.40}.")
    if architecture is not None and to != "native":
        raise OptionError("architecture= chooses what a native export becomes; pass to='native' with it.")
    if serve is not None and to != "native":
        raise OptionError("serve= chooses what a native export becomes; pass to='native' with it.")
    folder = Path(folder)
    if to == "native":
        chosen = {"architecture": architecture, "serve": serve}
        return export_native(model, folder, tokenizer=tokenizer, overwrite=overwrite, **chosen, **save_options)
    if to == "remote":
        from .remote import export_remote

        export_remote(model, folder, tokenizer, overwrite=overwrite, **save_options)
    else:
        require_plain_options(save_options)
        with staged(folder, overwrite, tokenizer) as written:
            model.save_pretrained(written, **save_options)
    return Exported(folder, to, host_class(type(model)).__name__)
