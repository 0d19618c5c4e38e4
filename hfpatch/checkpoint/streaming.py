"""Opens a checkpoint without reading its weights, and writes it tensor by tensor into the shards that it came in.

`hfpatch patch` opens models so: their weights are `StoredTensor`s, of which one operation's are in memory at a time.
transformers' own loading puts them in place, so names are mapped as ever; where it computes weights from those of the
file (experts that are merged, another dtype), they are in memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict, str_to_torch_dtype

from ..core.stored_tensor import StoredTensor
from ..runtime.errors import CheckpointError
from ..runtime.record import KEY
from .file_digests import DISTRIBUTED, as_bytes, finder, variant_of
from .files import FILES, weight_files, weight_names

_SMALL = 2**20  # bytes up to which a tensor is read at once, such as those of norms and biases
_DTYPES = {torch.complex64: "C64"} | {dtype: name for name, dtype in str_to_torch_dtype.items()}


def files_of(model: str, config: PreTrainedConfig) -> list[Path] | None:
    """The safetensors files of a checkpoint whose weights may stay in them; None where opening it is more than that.

    It is for patched checkpoints, which are checked, for quantized weights, adapters, pickles, distributed checkpoints,
    code of the repository, and files that config.json names.

    Raises:
        CheckpointError: a file is missing, which the index names.
    """
    find = finder(model, {})
    special = ("quantization_config", "transformers_weights", "auto_map", KEY)
    if any(getattr(config, name, None) for name in special) or type(config).extra_files or find("adapter_config.json"):
        return None
    found = weight_files(find, "")
    usual = bool(found) and all(variant_of(path.name) == "" for path in found)
    return found if usual and not any(found[0].parent.glob(DISTRIBUTED)) else None


def opened_from(files: list[Path], cls: Any, name: str, config: PreTrainedConfig) -> tuple[Any, dict[str, Any]]:
    """A model whose large weights stay in their files, and what transformers says of loading it.

    Args:
        files: as `files_of` found them.
        cls: its class.
        name: of the checkpoint: a Hub id or a folder.
        config: its config.

    Raises:
        CheckpointError: a file can't be read.
    """
    weights: dict[str, Tensor] = {}
    places: dict[str, str] = {}
    for path in files:
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 (it is no dictionary)
                    tensor = file.get_tensor(key)
                    weights[key] = tensor.clone() if tensor.nbytes <= _SMALL else StoredTensor.of_file(str(path), key)
                    places[key] = path.name
        except SafetensorError as error:
            raise CheckpointError(f"{path} can't be read: {error}. Download or save it again.") from error
    model, info = cls.from_pretrained(None, config=config, state_dict=weights, dtype="auto", output_loading_info=True)
    model.config.name_or_path = name
    if model.can_generate() and hasattr(model, "adjust_generation_fn"):
        where = dict.fromkeys(("cache_dir", "proxies", "token", "revision"))
        options: dict[str, Any] = {**where, "force_download": False, "local_files_only": False, "subfolder": ""}
        model.adjust_generation_fn(None, True, [None], name, trust_remote_code=False, **options)
    vars(model)[FILES] = places
    return model, info


def write_weights(model: Any, folder: Path, max_shard_size: int | str | None) -> None:
    """Write the weights of a model that was opened by `opened_from`, one tensor in memory at a time.

    Args:
        model: what `save_pretrained` saves.
        folder: where all else of the checkpoint is.
        max_shard_size: as there; None: each tensor goes into the file that it came in, a new one into that of the
            tensor before it.
    """
    state = _saved(model)
    single, index = weight_names("")
    if max_shard_size is None:
        places = _places(state, vars(model)[FILES])
    else:
        sizes = {name: _on_meta(tensor) for name, tensor in state.items()}
        places = split_torch_state_dict_into_shards(sizes, max_shard_size=max_shard_size).tensor_to_filename
    (folder / single).unlink(missing_ok=True)
    for file in dict.fromkeys(places.values()):
        _write(folder / file, {name: state[name] for name, place in places.items() if place == file})
    if set(places.values()) != {single}:
        total = {"total_parameters": model.num_parameters(), "total_size": sum(one.nbytes for one in state.values())}
        content = {"metadata": total, "weight_map": dict(sorted(places.items()))}
        (folder / index).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _saved(model: Any) -> dict[str, Tensor]:
    """What transformers' `save_pretrained` saves, by the names that it gives."""
    ignored = model._keys_to_ignore_on_save or ()
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in ignored}
    stand_ins = {name: _on_meta(one) if isinstance(one, StoredTensor) else one for name, one in state.items()}
    kept = remove_tied_weights_from_state_dict(stand_ins, model)  # on meta it goes by the Parameters
    return revert_weight_conversion(model, {name: state[name] for name in kept})


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _places(state: Mapping[str, Tensor], known: Mapping[str, str]) -> dict[str, str]:
    bare = {name.partition(".")[2]: file for name, file in known.items()}  # without the prefix that a head's base has
    places, last = {}, min(known.values())
    for name in state:
        last = known.get(name) or known.get(name.partition(".")[2]) or bare.get(name) or last
        places[name] = last
    return places


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file as the library does, without holding all of its tensors."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so each is aligned
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
            tensor = tensors[name]
            values = tensor.read() if isinstance(tensor, StoredTensor) else tensor
            file.write(as_bytes(values.detach().contiguous().reshape(-1)))
