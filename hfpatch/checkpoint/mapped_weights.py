"""Memory-mapped loading of checkpoints, and saving tensor by tensor.

`hfpatch patch` opens models in this way. Of their weights, only those are in memory that one module's forward or one
weight change reads. transformers' own loading puts them in place, so names are as ever. Weights that it computes from
the files' weights (experts that are merged, another dtype) are in memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict, str_to_torch_dtype

from ..core.mapped import MAPPED, Mappings, map_tensor
from ..runtime.patch_errors import CheckpointError
from ..runtime.record import KEY
from .file_digests import DISTRIBUTED, as_bytes, variant_of
from .files import STREAMED, finder, weight_files, weight_names

_DTYPES = {torch.complex64: "C64"} | {dtype: name for name, dtype in str_to_torch_dtype.items()}


def files_of(model: str, config: PreTrainedConfig) -> list[Path] | None:
    """Return the safetensors files that can be memory-mapped; None if opening the checkpoint needs more than that.

    It returns None for patched checkpoints, which are checked, for quantized weights, adapters, pickles, distributed
    checkpoints, code of the repository, and files that config.json names.

    Raises:
        CheckpointError: a file that the index names is missing.
    """
    find = finder(model, {})
    special = ("quantization_config", "transformers_weights", "auto_map", KEY)
    if (
        any(getattr(config, name, None) for name in special)
        or getattr(type(config), "extra_files", None)
        or find("adapter_config.json")
    ):
        return None
    found = weight_files(find, "")
    usual = bool(found) and all(variant_of(path.name) == "" for path in found)
    return found if usual and not any(found[0].parent.glob(DISTRIBUTED)) else None


def open_mapped(files: list[Path], cls: Any, name: str, config: PreTrainedConfig) -> tuple[Any, dict[str, Any]]:
    """Load a model with its large weights memory-mapped, and the loading info.

    Args:
        files: the files that `files_of` found.
        cls: the model's class.
        name: the checkpoint's Hub id or folder.
        config: the model's config.

    Raises:
        CheckpointError: a file can't be read.
    """
    mappings, weights = Mappings(), dict[str, Tensor]()
    for path in files:
        try:
            weights |= _tensors(path, mappings)
        except SafetensorError as error:
            raise CheckpointError(f"{path} can't be read: {error}. Download or save it again.") from error
    model, info = cls.from_pretrained(None, config=config, state_dict=weights, dtype="auto", output_loading_info=True)
    model.config.name_or_path = name
    if model.can_generate() and hasattr(model, "adjust_generation_fn"):
        where = dict.fromkeys(("cache_dir", "proxies", "token", "revision"))
        options: dict[str, Any] = {**where, "force_download": False, "local_files_only": False, "subfolder": ""}
        model.adjust_generation_fn(None, True, [None], name, trust_remote_code=False, **options)
    vars(model)[MAPPED], vars(model)[STREAMED] = mappings, True
    return model, info


def _tensors(path: Path, mappings: Mappings) -> dict[str, Tensor]:
    """The tensors of a safetensors file, mapped."""
    with safe_open(path, "pt") as reader, path.open("rb") as file:  # the first reads and checks the header
        length = int.from_bytes(file.read(8), "little")
        header, memory, found = json.loads(file.read(length)), mappings.map(file), dict[str, Tensor]()
        for name in reader.keys():  # noqa: SIM118 (`reader` is no dictionary)
            dtype = str_to_torch_dtype.get(header[name]["dtype"])
            start = 8 + length + header[name]["data_offsets"][0]
            fits = dtype is not None and start % dtype.itemsize == 0
            found[name] = map_tensor(memory, dtype, header[name]["shape"], start) if fits else reader.get_tensor(name)
    return found


def write_weights(model: Any, folder: Path, max_shard_size: int | str = "50GB") -> None:
    """Write the weights of a model that was opened by `open_mapped`, one tensor in memory at a time.

    Args:
        model: the model that `save_pretrained` saves.
        folder: the folder with all else of the checkpoint.
        max_shard_size: as in `save_pretrained`.
    """
    state = _saved_tensors(model)
    single, index = weight_names("")
    places = split_torch_state_dict_into_shards(state, max_shard_size=max_shard_size).tensor_to_filename
    (folder / single).unlink(missing_ok=True)
    for file in dict.fromkeys(places.values()):
        _write(
            folder / file,
            {name: state[name] for name, place in places.items() if place == file},
            vars(model).get(MAPPED),
        )
    if set(places.values()) != {single}:
        total = {"total_parameters": model.num_parameters(), "total_size": sum(one.nbytes for one in state.values())}
        content = {"metadata": total, "weight_map": dict(sorted(places.items()))}
        (folder / index).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _saved_tensors(model: Any) -> dict[str, Tensor]:
    """The tensors that transformers' `save_pretrained` saves, by the names that it gives them."""
    ignored = model._keys_to_ignore_on_save or ()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    return revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))


def _write(path: Path, tensors: dict[str, Tensor], mappings: Mappings | None) -> None:
    """Write a safetensors file as the library does, without holding all of its tensors."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that each tensor is aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": _DTYPES[tensors[name].dtype], "shape": list(tensors[name].shape)}
        header[name]["data_offsets"] = [start, end]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(as_bytes(tensors[name].detach().contiguous().reshape(-1)))
            if mappings is not None:
                mappings.release()
