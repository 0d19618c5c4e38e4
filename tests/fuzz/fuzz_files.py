"""Saved patched models with one thing changed in their files, and what opening them may come to.

In any case: one of hfpatch's errors, or the saved model to the bit; no code runs, and nothing hangs.

- A setting in the patch record: nothing else.
- Another setting of config.json: also another function with a warning, or an error that transformers raises in its own
  code, as a rule for the same change in the unpatched model's config too; what the weights hold comes back to the bit.
- A file of weights: also transformers' own error of a folder without weights, or other tensors, since opening compares
  none by itself; `check_fingerprint="full"` must refuse those.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from checkpoint_edits import stored_in
from fuzz_models import FAMILIES, PLACE, Finding, Saved, fresh, opened, run, same_bits, works
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from hfpatch.errors import FingerprintWarning
from hfpatch.measure.outputs import max_error
from hfpatch.patch import patch_model
from hfpatch.runtime.patch_errors import PatchError, describe_error
from hfpatch.runtime.record import KEY

# the first that a family takes, from the drawn one on
REQUESTS: list[dict[str, Any]] = [
    {"norm": "dyt"},
    {"pos": "rope"},
    {"norm": "rms", "pos": "nope", "init": "copy"},
    {"norm": "layer", "mlp": "swiglu"},
    {"norm": "derf", "init": "reset"},
    {"mlp": "geglu"},
]
ROUNDING = 1e-3  # by the output's size, in float32; what attention in another implementation makes of some models
SECONDS = 8.0  # of CPU time to open a tiny model; more is a hang
SHARD = "60KB"  # of which each of the models has several
FULL = {"check_fingerprint": "full"}


@cache
def saved(family: str, request: int, dtype: str = "float32", shards: bool = False) -> Saved | None:
    """A family's checkpoint; None where it can't be opened, which is a finding of fuzz_requests.py, or doesn't run."""
    model, inputs = fresh(family, dtype=dtype)
    for one in REQUESTS[request:] + REQUESTS[:request]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                patch_model(model, **one)
        except PatchError:
            continue
        break
    try:
        return Saved.of(model, inputs, max_shard_size=SHARD if shards else "1GB")
    except PatchError:
        return None


@cache
def stock(family: str) -> Saved:
    """The same of the unpatched model."""
    return Saved.of(*fresh(family))


# --- settings of config.json ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The setting at a path gets this value (JSON), or is deleted."""

    path: tuple[str | int, ...]
    value: str | None

    def changed(self, stored: Any) -> Any:
        """A JSON value with it; None where there is no such place."""
        *parents, last = self.path
        inner = stored
        try:
            for key in parents:
                inner = inner[key]
            if self.value is None:
                del inner[last]
            else:
                inner[last] = json.loads(self.value)
        except (LookupError, TypeError):
            return None
        return stored

    def change(self, folder: Path) -> bool:
        """Write it into a folder's config.json; whether there is such a place."""
        config = self.changed(stored_in(folder))
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        return config is not None


def leaves(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """All settings, inner ones and empty containers included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if path and not (isinstance(value, dict | list) and value):
        yield path, value
    for key, inner in items:
        yield from leaves(inner, (*path, key))


ADDED: list[tuple[str, Any]] = [
    ("auto_map", {"AutoModel": "evil.Evil", "AutoConfig": "evil.EvilConfig"}),
    ("transformers_weights", "pytorch_model.bin"),
    ("transformers_weights", "../model.safetensors"),
    ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ("attn_implementation", "eager"),
    ("_attn_implementation", "kernels/evil"),
    ("pruned_heads", {"0": [0]}),
    ("torch_dtype", "float16"),
    ("tie_word_embeddings", True),
    ("is_decoder", True),
    ("output_hidden_states", True),
    ("return_dict", False),
    ("chunk_size_feed_forward", 5),
    ("hfpatch_extra", {"a": 1}),
]


def other_values(value: Any, others: list[Any]) -> list[Any]:
    """For a setting: of other types, huge, nested, near it, cut, and those of other settings."""
    found = [*others, None, True, 0, 1.5, "x", "", [], {}, [value], {"a": value}, json.loads("[" * 200 + "]" * 200)]
    found += [10**30, 2**31, 10**6, 1e300, -(10**30), "9" * 5000, float("nan"), float("inf"), float("-inf")]
    found += ["\u202e\0\ud83d\ude00", "\N{FULLWIDTH DIGIT ONE}"]
    if isinstance(value, bool):
        found += [not value] * 9
    elif isinstance(value, int | float):
        found += [value + 1, value - 1, value * 2, value / 2, value // 2, -value, 0, float(value), str(value)]
    elif isinstance(value, str):
        found += [value[: len(value) // 2], value[1:], value[:-1], value[len(value) // 2 :], value.swapcase()]
        found += [value + " ", value + value, value.replace("1", "2"), value.replace("0", "1")]
    return found


@st.composite
def settings_of(draw: st.DrawFn, stored: Any, within: tuple[str, ...] = ()) -> Setting:
    """A change of one setting, of those that stand under a key."""
    found = [(path, value) for path, value in leaves(stored) if path[: len(within)] == within]
    path, value = draw(st.sampled_from(found))
    how = draw(st.sampled_from(["deleted", "added", *["changed"] * 12]))
    if how == "deleted":
        return Setting(path[: draw(st.integers(1, len(path)))], None)
    if how == "added":
        name, added = draw(st.sampled_from(ADDED))
        return Setting((*within, name), json.dumps(added))
    others = draw(st.lists(st.sampled_from([other for _, other in found]), min_size=1, max_size=3))
    return Setting(path, json.dumps(draw(st.sampled_from(other_values(value, others)))))


# --- damages of weights -----------------------------------------------------------------------------------------------


def _in_json(text: str | bytes, draw: Random) -> str:
    """A JSON object as text, with one setting changed or deleted."""
    found = list(leaves(stored := json.loads(text)))
    path, value = draw.choice(found)
    other = json.dumps(draw.choice(other_values(value, [other for _, other in found])))
    return json.dumps(Setting(path, None if draw.random() > 0.8 else other).changed(stored))


def _in_content(name: str, content: bytearray, draw: Random) -> bytes:
    """The content of a file of weights, whose tensors begin behind a header that is JSON."""
    start = 8 + struct.unpack("<Q", content[:8])[0]
    begin, count = draw.randrange(start, len(content)), draw.randint(1, 512)
    if name in ("bit", "header bit"):
        content[begin if name == "bit" else draw.randrange(start)] ^= 1 << draw.randrange(8)
    elif name == "header setting":
        header = _in_json(content[8:start], draw).encode()
        return struct.pack("<Q", len(header)) + header + content[start:]
    elif name == "zeros":
        content[begin : begin + count] = bytes(len(content[begin : begin + count]))
    return {"cut": content[: draw.randrange(len(content))], "longer": content + bytes(count)}.get(name, content)


def _of_files(name: str, path: Path, draw: Random) -> None:
    """A file of weights, beside others and an index; where there is only one, beside an index that says nothing."""
    other = draw.choice([one for one in sorted(path.parent.iterdir()) if one != path])
    if name.startswith("index"):
        index = path.parent / "model.safetensors.index.json"
        text = index.read_text() if index.exists() else json.dumps({"metadata": {}, "weight_map": {"x": path.name}})
        index.write_text(text[: draw.randrange(len(text))] if name == "index cut" else _in_json(text, draw))
    elif name == "behind a link":  # as in the Hub's cache: it is the same model
        path.symlink_to(path.rename(path.parent.with_name(f"{path.parent.name}-{path.name[:11]}")))
    elif name == "renamed":
        path.rename(path.with_name(draw.choice(("x.safetensors", "pytorch_model.bin", "odel.safetensors"))))
    elif name == "swapped":
        content = path.read_bytes()
        shutil.copy(other, path)
        other.write_bytes(content)
    else:
        path.unlink()
        if name == "a folder":
            path.mkdir()
        elif name == "a link":
            path.symlink_to(draw.choice(("nowhere", path, other, path.parent)))


IN_CONTENT = ("bit", "header bit", "header setting", "zeros", "cut", "longer")
OF_FILES = ("index setting", "index cut", "behind a link", "renamed", "swapped", "gone", "a folder", "a link")


@dataclass(frozen=True)
class Damage:
    """Done to one of the files of weights, both drawn by a seed."""

    name: str
    seed: int

    def change(self, folder: Path) -> bool:
        """Do it in a folder."""
        draw = Random(self.seed)
        path = draw.choice(sorted(folder.glob("*.safetensors")))
        if self.name in IN_CONTENT:
            path.write_bytes(_in_content(self.name, bytearray(path.read_bytes()), draw))
        else:
            _of_files(self.name, path, draw)
        return True


# --- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One change in the files of a saved model."""

    family: str
    request: int
    change: Setting | Damage
    dtype: str = "float32"
    shards: bool = False


_DAMAGES = st.builds(Damage, st.sampled_from(IN_CONTENT + OF_FILES), st.integers(0, 2**32))


@st.composite
def cases(draw: st.DrawFn, families: tuple[str, ...] = FAMILIES) -> Case:
    """As often a setting of the record, another one, and a damage of weights."""
    family, request = draw(st.sampled_from(families)), draw(st.integers(0, len(REQUESTS) - 1))
    kind = draw(st.sampled_from(["record", "config", "weights"]))
    dtype, shards = draw(st.sampled_from(["float32", "bfloat16"])), draw(st.booleans())
    if kind != "weights" or not works(run, family, False, dtype):
        dtype, shards = "float32", shards and kind == "weights"
    one = saved(family, request, dtype, shards)
    assume(one is not None)
    assert one is not None
    if kind == "weights":
        return Case(family, request, draw(_DAMAGES), dtype, shards)
    stored = stored_in(one.folder)
    record = stored if kind == "record" else stored.pop(KEY)
    return Case(family, request, draw(settings_of(stored, (KEY,) if record is stored else ())))


# --- checks -----------------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """Opening took too long."""


class Forbidden(BaseException):
    """Code was run."""


_guarding = False


def _audit(event: str, args: Any) -> None:
    if _guarding and event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "socket.connect"):
        raise Forbidden(f"{event} {args!r:.100}")


sys.addaudithook(_audit)


@contextmanager
def guarded(seconds: float = SECONDS) -> Iterator[None]:
    """No process is started and no address connected, and it ends in time."""
    global _guarding

    def stop(*_: Any) -> None:
        raise TooLong

    old = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)  # again and again: in a destructor an error is only printed
    _guarding = True
    try:
        yield
    finally:
        _guarding = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def attempt(folder: Path, one: Saved, **options: Any) -> tuple[str, Any]:
    """("opened", (tensors, outputs)), ("runs not", error), both also "with a warning" of ours; ("refused", error)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with guarded():
                model = opened(folder, one.opener, **options)
        except (Exception, TooLong) as error:
            return "refused", error
        except Forbidden as error:
            raise Finding("ran code", error) from error
        warned = " with a warning" if any(issubclass(one.category, FingerprintWarning) for one in caught) else ""
        try:
            with guarded():
                return f"opened{warned}", (dict(model.state_dict()), run(model, one.inputs))
        except (Exception, TooLong) as error:
            return f"runs not{warned}", error


def check(case: Case) -> list[str]:
    """Open the changed files; what came of it.

    Raises:
        Finding: another function without a word, an error of another kind, a hang, or code that was run.
    """
    one, in_weights = saved(case.family, case.request, case.dtype, case.shards), isinstance(case.change, Damage)
    assert one is not None
    with tempfile.TemporaryDirectory(dir=PLACE) as place:
        folder = Path(shutil.copytree(one.folder, Path(place) / "patched"))
        if not case.change.change(folder):
            return ["no such setting"]
        status, result = attempt(folder, one)
        if status == "refused" and isinstance(result, PatchError | OSError if in_weights else PatchError):
            return [f"refused: {type(result).__name__}"]
        if not status.startswith("opened"):
            return [_error(case, Path(place), status, result)]
        if not in_weights or same_bits(one.tensors, result[0]):
            return [_compared(one, status, *result)]
        full, error = attempt(folder, one, **FULL)
        if not (full == "refused" and isinstance(error, PatchError | OSError)):
            raise Finding("silent", f"other tensors; the full check: {full}, {error!r:.200}")
        return ["opened, changed; the full check refuses it"]


def _compared(one: Saved, status: str, tensors: dict[str, Tensor], outputs: dict[str, Tensor]) -> str:
    """Of a model whose tensors have to be those that were saved."""
    common = one.tensors.keys() & tensors.keys()
    if not same_bits({name: one.tensors[name] for name in common}, {name: tensors[name] for name in common}):
        raise Finding("silent", "other values in its tensors")
    if differing := one.tensors.keys() ^ tensors.keys():  # biases that it was saved without, say
        if status == "opened":
            raise Finding("silent", f"other tensors: {sorted(differing)}")
        return f"{status}, with other tensors"
    if not one.outputs.keys() <= outputs.keys():  # tuples where names were
        outputs = dict(zip(one.outputs, outputs.values(), strict=False))
    outputs = {name: outputs[name] for name in one.outputs.keys() & outputs.keys()}
    if same_bits(one.outputs, outputs):
        return f"{status}, equal to the bit"
    error = max_error(one.outputs, outputs)
    if error <= ROUNDING:
        return f"{status}, equal but for rounding"
    if status == "opened":
        raise Finding("silent", f"the outputs are off by {error:.1e}")
    return f"{status}, other outputs"


def _error(case: Case, place: Path, status: str, error: BaseException) -> str:
    """Of an error that isn't ours: it may be of a setting outside the patch record, where transformers refuses it."""
    if status == "runs not with a warning" and not isinstance(error, TooLong):
        return "opened with a warning, doesn't run"
    if isinstance(case.change, Damage) or case.change.path[0] == KEY:
        raise Finding("untyped", f"{status}, {describe_error(error)}")
    other, stock_status, stock_error = stock(case.family), "opened", None
    folder = Path(shutil.copytree(other.folder, place / "stock"))
    if case.change.change(folder):
        stock_status, stock_error = attempt(folder, other)
    if stock_status == status and isinstance(error, TooLong) == isinstance(stock_error, TooLong):
        return f"{status}, as the unpatched model is: {type(error).__name__}"
    if isinstance(error, TooLong):
        raise Finding("hang", f"{status}; the unpatched model: {stock_status}")
    if status == "refused" and _raised_by_others(error):  # values that only initialise, say
        return f"refused by transformers, though it opens the unpatched model: {type(error).__name__}"
    raise Finding("untyped", f"{status}, {describe_error(error)}; the unpatched model: {stock_status}")


def _raised_by_others(error: BaseException) -> bool:
    """Whether the function that raised it is none of hfpatch's."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and f"{os.sep}hfpatch{os.sep}" not in frame.tb_frame.f_code.co_filename
