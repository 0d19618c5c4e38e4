"""Damaged weight files of patched checkpoints, in one file and in shards, and what opening may come to.

Opening is refused, or gives the model that was saved, or another one, since it compares no tensors by itself;
`check_fingerprint="full"` must refuse those.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from fuzz_configs import Forbidden, TooLong, guarded, leaves, mutated, mutations
from fuzz_models import DTYPES, PLACE, Finding, Saved, opened, run, same_bits
from hypothesis import strategies as st
from tiny_models import inputs, patch, tiny

from hfpatch.measure.outputs import max_error
from hfpatch.runtime.patch_errors import PatchError, describe_error

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt2": ({"n_embd": 96, "n_layer": 3}, {"norm": "dyt", "pos": "rope"}),
    "bert": ({"hidden_size": 96, "intermediate_size": 128}, {"norm": "rms", "init": "copy"}),
    "llama": ({"hidden_size": 96, "intermediate_size": 128, "head_dim": 24}, {"norm": "layer", "pos": "nope"}),
}
REFUSALS = (PatchError, OSError)  # ours, and transformers' own of a folder without weights
SHARD = "200KB"
FULL = {"check_fingerprint": "full"}


@cache
def saved(family: str, dtype: str, shards: bool) -> Saved:
    settings, request = MODELS[family]
    model = patch(tiny(family, **settings), **request).to(DTYPES[dtype])
    return Saved.of(model, inputs(model), max_shard_size=SHARD if shards else "1GB")


# --- damages, by their names ------------------------------------------------------------------------------------------


def _flip(data: bytearray, draw: Random, end: int | None = None) -> None:
    data[draw.randrange(end or len(data))] ^= 1 << draw.randrange(8)


def _bits(data: bytearray, draw: Random) -> None:
    for _ in range(3):
        _flip(data, draw)


def _zeros(data: bytearray, draw: Random) -> None:
    begin = draw.randrange(len(data))
    end = min(begin + draw.randint(1, 512), len(data))
    data[begin:end] = bytes(end - begin)


def _exchanged(data: bytearray, draw: Random) -> None:
    """Two runs of numbers in each other's place."""
    size = 4 * draw.randint(1, 64)
    one, other = sorted(4 * draw.randrange((len(data) - size) // 4) for _ in range(2))
    if other - one >= size:
        data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]


def _header_bit(path: Path, draw: Random) -> None:
    content = bytearray(path.read_bytes())
    _flip(content, draw, _start(content))
    path.write_bytes(content)


def _header_setting(path: Path, draw: Random) -> None:
    content = path.read_bytes()
    start = _start(content)
    text = json.dumps(_changed(json.loads(content[8:start]), draw)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[start:])


def _index_setting(path: Path, draw: Random) -> None:
    index = _index(path)
    stored = json.loads(index.read_text()) if index.exists() else {"metadata": {}, "weight_map": {"x": path.name}}
    index.write_text(json.dumps(_changed(stored, draw)))


def _cut(path: Path, draw: Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def _swapped(path: Path, draw: Random) -> None:
    other, aside = _other(path, draw), path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def _replaced(path: Path, by: Callable[[], Any]) -> None:
    path.unlink()
    by()


def _moved_behind_a_link(path: Path, draw: Random) -> None:
    """As in the Hub's cache: it is the same model."""
    outside = path.parent.with_name(f"{path.parent.name}-{path.name[:11]}")
    path.rename(outside)
    path.symlink_to(outside)


def _start(content: bytes | bytearray) -> int:
    """Where a file's tensors begin."""
    return 8 + struct.unpack("<Q", content[:8])[0]


def _index(path: Path) -> Path:
    return path.parent / "model.safetensors.index.json"


def _other(path: Path, draw: Random) -> Path:
    return draw.choice([one for one in sorted(path.parent.iterdir()) if one != path])


def _changed(stored: Any, draw: Random) -> Any:
    """A JSON object with one setting changed or deleted."""
    found = list(leaves(stored))
    place, value = draw.choice(found)
    other = draw.choice(mutations(value, [other for _, other in found]))
    return mutated(stored, place, None if draw.random() > 0.8 else json.dumps(other))


NAMES = ("x.safetensors", "pytorch_model.bin", "model.bin", "odel.safetensors")
# of the bytes of a file's tensors: its form stays
NUMBERS: dict[str, Callable[[bytearray, Random], None]] = {
    "bit": _flip,
    "bits": _bits,
    "zeros": _zeros,
    "exchanged": _exchanged,
}
# of a file
FORMS: dict[str, Callable[[Path, Random], Any]] = {
    "header bit": _header_bit,
    "header setting": _header_setting,
    "cut": _cut,
    "longer": lambda path, draw: path.write_bytes(path.read_bytes() + bytes(draw.randint(1, 100))),
    "gone": lambda path, draw: path.unlink(),
    "empty": lambda path, draw: path.write_bytes(b""),
    "a folder": lambda path, draw: _replaced(path, path.mkdir),
    "copy of another": lambda path, draw: shutil.copy(_other(path, draw), path),
    "swapped": _swapped,
    "renamed": lambda path, draw: path.rename(path.with_name(draw.choice(NAMES))),
    "link to nothing": lambda path, draw: _replaced(path, lambda: path.symlink_to("nowhere")),
    "link to itself": lambda path, draw: _replaced(path, lambda: path.symlink_to(path)),
    "link to another": lambda path, draw: _replaced(path, lambda: path.symlink_to(_other(path, draw))),
    "link to a folder": lambda path, draw: _replaced(path, lambda: path.symlink_to(path.parent)),
    "moved behind a link": _moved_behind_a_link,
    "index setting": _index_setting,
    "index cut": lambda path, draw: _cut(_index(path) if _index(path).exists() else path, draw),
}


# --- cases and checks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One damage to one file of a checkpoint, drawn by a seed."""

    family: str
    dtype: str
    shards: bool
    damage: str
    seed: int


def cases(families: tuple[str, ...] = ()) -> st.SearchStrategy[Case]:
    dtypes, damages = st.sampled_from(["float32", "bfloat16"]), st.sampled_from(sorted({**NUMBERS, **FORMS}))
    return st.builds(Case, st.sampled_from(sorted(MODELS)), dtypes, st.booleans(), damages, st.integers(0, 2**32))


def damage(case: Case, folder: Path) -> None:
    draw = Random(case.seed)
    path = draw.choice(sorted(folder.glob("*.safetensors")))
    if case.damage in FORMS:
        FORMS[case.damage](path, draw)
        return
    content = path.read_bytes()
    data = bytearray(content[_start(content) :])
    NUMBERS[case.damage](data, draw)
    path.write_bytes(content[: _start(content)] + data)


def check(case: Case) -> list[str]:
    """Open a damaged checkpoint; what came of it.

    Raises:
        Finding: another function that the full check passes; an untyped error.
    """
    one = saved(case.family, case.dtype, case.shards)
    with tempfile.TemporaryDirectory(dir=PLACE) as place:
        to = Path(shutil.copytree(one.folder, Path(place) / "copy"))
        damage(case, to)
        error = _error(one, to)
        if isinstance(error, str):
            return [f"{case.damage}: {error}"]
        full = _error(one, to, **FULL)
        if not isinstance(full, str):
            raise Finding("silent", f"the full check passes outputs that are off by {full:.1e}")
        return [f"{case.damage}: opened, changed; the full check: {full}"]


def _error(one: Saved, folder: Path, **options: Any) -> str | float:
    """What became of opening it, or how far the outputs are off where the tensors aren't those that were saved."""
    try:
        with guarded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = opened(folder, one.opener, **options)
    except REFUSALS as error:
        return f"refused ({type(error).__name__})"
    except (Exception, TooLong, Forbidden) as error:
        raise Finding("untyped", describe_error(error)) from error
    if same_bits(one.tensors, dict(model.state_dict())):
        if not same_bits(one.outputs, run(model, one.inputs)):
            raise Finding("silent", "the same tensors and other outputs")
        return "opened, equal to the bit"
    return max_error(one.outputs, run(model, one.inputs))
