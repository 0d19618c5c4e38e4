"""Mutations of single settings in the config.json of patched checkpoints, and what opening may come to.

A setting inside the patch record: one of hfpatch's errors, or the saved model to the bit. Any other setting: that,
another function with a warning, or an error that transformers raises in its own code, as a rule for the same mutation
of the unpatched model's config too. What the file holds comes back to the bit in any case.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fuzz_models import FAMILIES, PLACE, Finding, Saved, fresh, opened, run, same_bits
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


@cache
def saved(family: str, first: int) -> Saved | None:
    """A family's checkpoint; None where it can't be opened, which is a finding of fuzz_requests.py."""
    model, inputs = fresh(family)
    for request in REQUESTS[first:] + REQUESTS[:first]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                patch_model(model, **request)
        except PatchError:
            continue
        break
    try:
        return Saved.of(model, inputs)
    except PatchError:
        return None


@cache
def stock(family: str) -> Saved:
    """The same of the unpatched model."""
    return Saved.of(*fresh(family))


def stored_config(one: Saved) -> Any:
    return json.loads((one.folder / "config.json").read_text())


# --- strategies -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One mutation: the setting at a path gets this value (JSON), or is deleted."""

    family: str
    request: int
    path: tuple[str | int, ...]
    value: str | None


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


def mutations(value: Any, others: list[Any]) -> list[Any]:
    """Other values for a setting: of other types, huge, nested, near it, cut, and those of other settings."""
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
def cases(draw: st.DrawFn, families: tuple[str, ...] = FAMILIES) -> Case:
    family, request = draw(st.sampled_from(families)), draw(st.integers(0, len(REQUESTS) - 1))
    one = saved(family, request)
    assume(one is not None)
    assert one is not None
    inside = draw(st.booleans())
    found = [(path, value) for path, value in leaves(stored_config(one)) if (path[0] == KEY) == inside]
    path, value = draw(st.sampled_from(found))
    how = draw(st.sampled_from(["deleted", "added", *["changed"] * 12]))
    if how == "deleted":
        return Case(family, request, path[: draw(st.integers(1, len(path)))], None)
    if how == "added":
        name, added = draw(st.sampled_from(ADDED))
        return Case(family, request, (KEY, name) if inside else (name,), json.dumps(added))
    others = draw(st.lists(st.sampled_from([other for _, other in found]), min_size=1, max_size=3))
    return Case(family, request, path, json.dumps(draw(st.sampled_from(mutations(value, others)))))


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


def mutated(config: Any, path: tuple[str | int, ...], value: str | None) -> Any:
    """The config with this mutation; None where it has no such place."""
    *parents, last = path
    inner = config
    try:
        for key in parents:
            inner = inner[key]
        if value is None:
            del inner[last]
        else:
            inner[last] = json.loads(value)
    except (LookupError, TypeError):
        return None
    return config


def copied(folder: Path, to: Path, config: Any) -> Path:
    """The checkpoint with another config.json; its weights are the same files."""
    to.mkdir()
    for path in folder.iterdir():
        if path.name != "config.json":
            os.link(path, to / path.name)
    (to / "config.json").write_text(json.dumps(config))
    return to


def attempt(folder: Path, opener: Any, inputs: Any) -> tuple[str, Any]:
    """("opened", (tensors, outputs)), ("runs not", error), both also "with a warning" of ours; ("refused", error)."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with guarded():
                model = opened(folder, opener)
        except (Exception, TooLong) as error:
            return "refused", error
        warned = " with a warning" if any(issubclass(one.category, FingerprintWarning) for one in caught) else ""
        try:
            with guarded():
                return f"opened{warned}", (dict(model.state_dict()), run(model, inputs))
        except (Exception, TooLong) as error:
            return f"runs not{warned}", error


def check(case: Case) -> list[str]:
    """Open a mutated checkpoint; what came of it.

    Raises:
        Finding: another function without a word, an error of another kind, a hang, or code that was run.
    """
    one = saved(case.family, case.request)
    assert one is not None
    config = mutated(stored_config(one), case.path, case.value)
    if config is None:
        return ["no such setting"]
    place = Path(tempfile.mkdtemp(dir=PLACE))
    try:
        try:
            status, result = attempt(copied(one.folder, place / "patched", config), one.opener, one.inputs)
        except Forbidden as error:
            raise Finding("ran code", error) from error
        if status.startswith("opened"):
            return [_judged(one, status, *result)]
        if status == "runs not with a warning" and not isinstance(result, TooLong):
            return ["opened with a warning, doesn't run"]
        if isinstance(result, PatchError) and status == "refused":
            return [f"refused: {type(result).__name__}"]
        return [_as_stock(case, place, status, result)]
    finally:
        shutil.rmtree(place)


def _judged(one: Saved, status: str, tensors: dict[str, Tensor], outputs: dict[str, Tensor]) -> str:
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


def _as_stock(case: Case, place: Path, status: str, error: BaseException) -> str:
    """An error that isn't ours: of a setting outside the patch record, where transformers itself refuses it."""
    path = case.path
    if path[0] == KEY:
        raise Finding("untyped", f"{status}, {describe_error(error)}")
    other = stock(case.family)
    config = mutated(stored_config(other), path, case.value)
    stock_status, stock_error = "opened", None
    if config is not None:
        stock_status, stock_error = attempt(copied(other.folder, place / "stock", config), other.opener, other.inputs)
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
