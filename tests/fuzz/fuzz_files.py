"""Damaged weight files of patched checkpoints, in one file and in shards, and what opening may come to.

Opening is refused, or gives the model that was saved. With one exception, which the documentation tells: the quick
check reads samples of large tensors, so changed numbers between them may pass; `check_fingerprint="full"` must refuse
those.
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
from typing import Any

from fuzz_configs import Forbidden, TooLong, guarded, leaves, mutated, mutations
from fuzz_models import DTYPES, PLACE, Finding, Saved, opened, relative, run, same_bits
from hypothesis import strategies as st
from tiny_models import inputs, patch, tiny

from hfpatch.runtime.errors import PatchError, described

# wide enough for tensors of which the quick check reads samples
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


# --- damages: by their names, functions of three numbers in [0, 1) ----------------------------------------------------


def _flip(data: bytearray, a: float, b: float) -> None:
    data[int(a * len(data))] ^= 1 << int(8 * b)


def _bits(data: bytearray, *places: float) -> None:
    for place in places:
        _flip(data, place, (place * 7) % 1)


def _zeros(data: bytearray, a: float, b: float, c: float) -> None:
    begin = int(a * len(data))
    end = min(begin + 1 + int(b * 512), len(data))
    data[begin:end] = bytes(end - begin)


def _exchanged(data: bytearray, a: float, b: float, c: float) -> None:
    """Two runs of numbers in each other's place."""
    size = 4 * (1 + int(c * 64))
    one, other = (
        slice(x, x + size) for x in (int(a * (len(data) - size)) // 4 * 4, int(b * (len(data) - size)) // 4 * 4)
    )
    if abs(one.start - other.start) >= size:
        data[one], data[other] = data[other], data[one]


def _header_bit(path: Path, a: float, b: float, c: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(a * _start(content))] ^= 1 << int(8 * b)
    path.write_bytes(content)


def _header_setting(path: Path, *numbers: float) -> None:
    content = path.read_bytes()
    start = _start(content)
    text = json.dumps(_changed(json.loads(content[8:start]), *numbers)).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[start:])


def _index_setting(path: Path, *numbers: float) -> None:
    index = _index(path)
    stored = json.loads(index.read_text()) if index.exists() else {"metadata": {}, "weight_map": {"x": path.name}}
    index.write_text(json.dumps(_changed(stored, *numbers)))


def _swapped(path: Path, a: float, b: float, c: float) -> None:
    other, aside = _other(path, a), path.with_name("aside")
    path.rename(aside)
    other.rename(path)
    aside.rename(other)


def _replaced(path: Path, by: Callable[[], Any]) -> None:
    path.unlink()
    by()


def _moved_behind_a_link(path: Path, *_: float) -> None:
    """As in the Hub's cache: it is the same model."""
    outside = path.parent.with_name(f"{path.parent.name}-{path.name[:11]}")
    path.rename(outside)
    path.symlink_to(outside)


def _start(content: bytes | bytearray) -> int:
    """Where a file's tensors begin."""
    return 8 + struct.unpack("<Q", content[:8])[0]


def _index(path: Path) -> Path:
    return path.parent / "model.safetensors.index.json"


def _other(path: Path, a: float) -> Path:
    files = [one for one in sorted(path.parent.iterdir()) if one != path]
    return files[int(a * len(files))]


def _changed(stored: Any, a: float, b: float, c: float) -> Any:
    """A JSON object with one setting changed or deleted."""
    found = list(leaves(stored))
    place, value = found[int(a * len(found))]
    several = [one for many in mutations(value, [other for _, other in found]).values() for one in many]
    return mutated(stored, place, None if c > 0.8 else json.dumps(several[int(b * len(several))]))


NAMES = ("x.safetensors", "pytorch_model.bin", "model.bin", "odel.safetensors")
# of the bytes of a file's tensors: its form stays
NUMBERS: dict[str, Callable[..., Any]] = {
    "bit": lambda data, a, b, c: _flip(data, a, b),
    "bits": _bits,
    "zeros": _zeros,
    "exchanged": _exchanged,
}
# of a file
FORMS: dict[str, Callable[..., Any]] = {
    "header bit": _header_bit,
    "header setting": _header_setting,
    "cut": lambda path, a, b, c: path.write_bytes(path.read_bytes()[: int(a * path.stat().st_size)]),
    "longer": lambda path, a, b, c: path.write_bytes(path.read_bytes() + bytes(1 + int(100 * a))),
    "doubled": lambda path, a, b, c: path.write_bytes(2 * path.read_bytes()),
    "gone": lambda path, a, b, c: path.unlink(),
    "empty": lambda path, a, b, c: path.write_bytes(b""),
    "a folder": lambda path, a, b, c: _replaced(path, path.mkdir),
    "copy of another": lambda path, a, b, c: shutil.copy(_other(path, a), path),
    "swapped": _swapped,
    "renamed": lambda path, a, b, c: path.rename(path.with_name(NAMES[int(4 * a)])),
    "link to nothing": lambda path, a, b, c: _replaced(path, lambda: path.symlink_to("nowhere")),
    "link to itself": lambda path, a, b, c: _replaced(path, lambda: path.symlink_to(path)),
    "link to another": lambda path, a, b, c: _replaced(path, lambda: path.symlink_to(_other(path, a))),
    "link to a folder": lambda path, a, b, c: _replaced(path, lambda: path.symlink_to(path.parent)),
    "moved behind a link": _moved_behind_a_link,
    "index setting": _index_setting,
    "index cut": lambda path, a, b, c: FORMS["cut"](_index(path) if _index(path).exists() else path, a, b, c),
}


def damage(path: Path, how: str, numbers: tuple[float, float, float]) -> None:
    if how in FORMS:
        FORMS[how](path, *numbers)
        return
    content = path.read_bytes()
    data = bytearray(content[_start(content) :])
    NUMBERS[how](data, *numbers)
    path.write_bytes(content[: _start(content)] + data)


# --- cases and checks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One damage to one file of a checkpoint."""

    family: str
    dtype: str
    shards: bool
    damage: str
    file: float
    numbers: tuple[float, float, float]


@st.composite
def cases(draw: st.DrawFn, families: tuple[str, ...] = ()) -> Case:
    part = st.floats(0, 1, exclude_max=True, width=32)
    family, dtype = draw(st.sampled_from(sorted(MODELS))), draw(st.sampled_from(["float32", "bfloat16"]))
    how = draw(st.sampled_from(sorted({**NUMBERS, **FORMS})))
    return Case(family, dtype, draw(st.booleans()), how, draw(part), (draw(part), draw(part), draw(part)))


def check(case: Case) -> list[str]:
    """Open a damaged checkpoint; what came of it.

    Raises:
        Finding: another function where the quick check, or the full one, should have seen it; an untyped error.
    """
    one = saved(case.family, case.dtype, case.shards)
    with tempfile.TemporaryDirectory(dir=PLACE) as place:
        to = Path(shutil.copytree(one.folder, Path(place) / "copy"))
        files = sorted(to.glob("*.safetensors"))
        damage(files[int(case.file * len(files))], case.damage, case.numbers)
        error = _error(one, to)
        if isinstance(error, str):
            return [f"{case.damage}: {error}"]
        if case.damage not in NUMBERS:
            raise Finding("silent", f"the outputs are off by {error:.1e}")
        full = _error(one, to, **FULL)
        if not isinstance(full, str):
            raise Finding("silent", f"the full check passes outputs that are off by {full:.1e}")
        return [f"{case.damage}: passes the quick check, changed; the full check: {full}"]


def _error(one: Saved, folder: Path, **options: Any) -> str | float:
    """What became of opening it, or how far the outputs are off where the tensors aren't those that were saved."""
    try:
        with guarded(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = opened(folder, one.opener, **options)
    except REFUSALS as error:
        return f"refused ({type(error).__name__})"
    except (Exception, TooLong, Forbidden) as error:
        raise Finding("untyped", described(error)) from error
    if same_bits(one.tensors, dict(model.state_dict())):
        if not same_bits(one.outputs, run(model, one.inputs)):
            raise Finding("silent", "the same tensors and other outputs")
        return "opened, equal to the bit"
    return relative(one.outputs, run(model, one.inputs))
