"""What is accepted runs: position schemes, scalings, lengths and image sizes on every class that has positions.

    python tests/sweeps/acceptance.py                # all types; writes acceptance.json and docs/support/acceptance.md
    python tests/sweeps/acceptance.py gpt2 dinov2    # these types; prints what it found

The sweep makes a tiny random model for each request. A request is *ok* if the patched model runs on inputs of the old
and of the new length or size, if its outputs are finite wherever the unpatched model's are, and if the saved model
opens to the same bits. It is *refused* if it raises a typed error and leaves every bit as it was. Anything else is
*wrong*. `longer`, `shorter`: a table of twice, half the length. `square`, `small`, `wide`, `tall`: images of another
size. `axes`: RoPE by row and column. The new length is twice the old if no table ends. It isn't run (*short*) if the
unpatched model doesn't run at its own full length.
"""

from __future__ import annotations

import copy
import site
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

site.addsitedir(str(Path(__file__).resolve().parents[1] / "support"))

import proof
import torch
import workers
import zoo
from host_rotations import equal
from rope_proof import difference
from tiny_models import changes, fingerprint, patch
from torch import Tensor
from zoo import run
from zoo_overrides import OVERRIDES, Override

from hfpatch.measure.copies import unpatched_config
from hfpatch.measure.inputs import make_inputs
from hfpatch.measure.randomness import seed_deterministically
from hfpatch.runtime.lens import host_class
from hfpatch.runtime.patch_errors import PatchError
from hfpatch.schemes.learned import Learned
from hfpatch.schemes.position_schemes import Position
from hfpatch.schemes.rope import RoPE
from hfpatch.sites.architectures.biases import BIASES, OWN_ROTATIONS
from hfpatch.sites.rotations import find_rotations
from hfpatch.sites.stacks import find_stacks, max_positions

MOST = 1_024  # tokens of one input
OLD, NEW = 64, 96  # pixels of the zoo's images, 4 x 4 patches of 16, and of larger ones
SIZES = {"square": (NEW, NEW), "small": (32, 32), "wide": (32, 64), "tall": (NEW, 48)}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0},
    "longrope": {"factor": 2.0},  # and factors for each pair
    "llama3": {"factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "proportional": {},
}
BY_LENGTH = ("dynamic", "yarn", "longrope")
SIMPLE = ("rope", "rope:theta=777", "alibi", "sinusoidal", "nope")


# model types that rotate by themselves, or add biases to scores, in many ways
OTHERS = Path(__file__).with_name("acceptance_types.txt").read_text().split()


@dataclass
class Result(workers.Answers):
    """The verdict on each request of one model type, none where it has no positions."""

    verdicts: dict[str, str] = field(default_factory=dict)


def requests(model: Any) -> dict[str, str | Position]:
    """The requests for a model by name."""
    stacks, rotations = find_stacks(model), find_rotations(model)
    if not (stacks or rotations or find_stacks(model, BIASES) or find_stacks(model, OWN_ROTATIONS)):
        return {}
    found: dict[str, str | Position] = {name: name for name in SIMPLE}
    for kind, options in SCALINGS.items():
        if not rotations and kind not in BY_LENGTH:  # hfpatch's own rotation: the others are settings of one rule
            continue
        factors = {}
        if kind == "longrope":
            pairs = next((one.frequencies(one.module).numel() for one in rotations), 8)
            factors = {"short_factor": [1.5] * pairs, "long_factor": [2.0] * pairs}
        found[kind] = RoPE(scaling={"rope_type": kind, **options, **factors})
    lengths = [length for item in stacks if item.stack.grid is None and (length := max_positions(item))]
    if lengths:
        found["longer"], found["shorter"] = (Learned(max_positions=n) for n in (2 * min(lengths), min(lengths) // 2))
    if any(item.stack.grid is not None for item in stacks):
        found["axes"] = RoPE(axes=2)
        found |= {name: Learned(image_size=size if len(set(size)) > 1 else size[0]) for name, size in SIZES.items()}
    return found


# --- one request ------------------------------------------------------------------------------------------------------


def verdict(model_type: str, name: str) -> str:
    """Whether a request of one model type is refused, ok or wrong, in a word and a reason."""
    model, given = proof.tiny(model_type)
    scheme, before, original = requests(model)[name], fingerprint(model), copy.deepcopy(model)
    try:
        patch(model, pos=scheme)
    except PatchError as error:
        moved = changes(before, fingerprint(model))
        return (
            f"wrong: refused, but {moved[0]} changed" if moved else f"refused: {type(error).__name__}: {error!s:.160}"
        )
    except Exception as error:
        return f"wrong: {zoo.last_line(error)}"
    inputs, short = _inputs(model_type, name, scheme, original, model, given)
    for what, one in inputs.items():
        try:
            found = run(model, one)
        except Exception as error:
            return f"wrong: at the {what} it says {zoo.last_line(error)}"
        if not _finite(found) and _finite(run(original, given)):
            return f"wrong: at the {what} its outputs aren't finite"
    try:
        with tempfile.TemporaryDirectory() as folder:
            loaded = proof.opened(model, Path(folder))
        last = inputs[next(reversed(inputs))]
        first, second = run(model, last), run(loaded, last)
    except Exception as error:
        return f"wrong: saved and opened, it says {zoo.last_line(error).replace(folder, 'DIR')}"
    if not equal(first, second):
        return f"wrong: opened, it differs by {difference(second, first):.1e} of the outputs' spread"
    return "ok, short" if short else "ok"


def _inputs(
    model_type: str, name: str, scheme: str | Position, original: Any, model: Any, given: dict[str, Any]
) -> tuple[dict[str, dict[str, Any]], bool]:
    """Inputs of the old and of the new length or size by name, and whether there are none of the new length."""
    if name in SIZES:
        new = sized(given, *SIZES[name])
        return {**({"old size": given} if _takes(_unpatched(model), given) else {}), "new size": new}, False
    length = _old_length(original)
    if length is None:
        return {"old length": given}, False
    ends = bool(find_stacks(original, OWN_ROTATIONS))  # GPT-J's table of sines
    new_length = scheme.max_positions if isinstance(scheme, Learned) else length if ends else 2 * length
    assert new_length is not None
    host, inputs = _unpatched(model) if isinstance(scheme, Learned) else original, {}
    if host is original or _takes(host, given):
        inputs["old length"] = given
    if short := not _takes(original, lambda: _of_length(model_type, original, min(length, MOST))):
        return inputs or {"few tokens": _of_length(model_type, host, 12)}, short  # what else they depend on isn't known
    return {**inputs, "new length": _of_length(model_type, host, min(new_length, MOST))}, False


def _takes(model: Any, inputs: dict[str, Any] | Callable[[], dict[str, Any]]) -> bool:
    """Whether a model runs on inputs, and these can be made."""
    try:
        run(model, inputs() if callable(inputs) else inputs)
    except Exception:
        return False
    return True


def _unpatched(model: Any) -> Any:
    """What transformers builds of a patched model's config, with random weights."""
    with seed_deterministically(0):
        return host_class(type(model))(unpatched_config(model.config)).float().eval()


def _old_length(model: Any) -> int | None:
    """Tokens of the longest text that an unpatched model takes, as far as its tables and its config say."""
    stacks = [item for item in find_stacks(model) if item.stack.grid is None]
    configs = [getattr(item.owner, "config", None) for item in stacks] + [model.config.get_text_config()]
    said = [getattr(config, "max_position_embeddings", None) for config in configs]
    found = [*map(max_positions, stacks), *(number for number in said if isinstance(number, int))]
    return min((number for number in found if number > 1), default=None)


def _of_length(model_type: str, model: Any, tokens: int) -> dict[str, Any]:
    with seed_deterministically(1):
        return make_inputs(model, OVERRIDES.get(model_type, Override()).inputs, tokens, 1)


def sized(inputs: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    """The same inputs with other images."""
    generator = torch.Generator().manual_seed(5)

    def resized(value: Any) -> Any:
        pixels = isinstance(value, Tensor) and value.dim() >= 4 and value.is_floating_point()
        return torch.randn(*value.shape[:-2], height, width, generator=generator) if pixels else value

    return {name: resized(value) for name, value in inputs.items()}


def _finite(outputs: dict[str, Tensor]) -> bool:
    return all(bool(value.isfinite().all()) for value in outputs.values())


# --- one model type, and all ------------------------------------------------------------------------------------------


def examine(model_type: str) -> Result:
    model, given = proof.tiny(model_type)
    names = requests(model)
    if names:
        run(model, given)
    return Result(model_type, verdicts={name: verdict(model_type, name) for name in names})


def every_type() -> list[str]:
    """Where each class that owns positions is proved, and models that rotate, or add biases, in many ways."""
    types = {*map(proof.HOMES.get, proof.here()), *OTHERS}
    return sorted(name for name in types if name is not None)


def totals(results: list[Result]) -> dict[str, Any]:
    """How many types have positions, and for each request how many gave each verdict."""
    verdicts = [result.verdicts for result in results if result.verdicts]
    names = dict.fromkeys(name for one in verdicts for name in one)
    counts = {name: dict(Counter(_word(one[name]) for one in verdicts if name in one)) for name in names}
    everything = sum(map(Counter, counts.values()), Counter())
    return {"types": len(verdicts), **{word: everything[word] for word in ("ok", "refused", "wrong")}, "by": counts}


def _word(text: str) -> str:
    return text.partition(":")[0].partition(",")[0]


def page(results: list[Result], of: str) -> list[str]:
    """The totals, whatever is wrong, and what was refused, with the reasons."""
    count = totals(results)
    lines = [
        f"{of}: {len(results)} model types, {count['types']} of which have positions; "
        f"{count['ok'] + count['refused'] + count['wrong']} requests: **{count['ok']} accepted and ok, "
        f"{count['refused']} refused, {count['wrong']} wrong**.",
        "",
    ]
    cells = ((name, *(one.get(word, 0) for word in ("ok", "refused", "wrong"))) for name, one in count["by"].items())
    lines += workers.table("request | >ok | >refused | >wrong", cells)
    for word in ("wrong", "refused"):
        reasons: dict[str, list[str]] = {}
        for result in results:
            for name, text in result.verdicts.items():
                if _word(text) == word:
                    reasons.setdefault(text.partition(": ")[2], []).append(f"{result.model_type} ({name})")
        shown = ((why.replace("|", "/"), ", ".join(where[:4]), len(where)) for why, where in sorted(reasons.items()))
        listed = workers.table("reason | where | >requests", shown) if reasons else ["None."]
        lines += workers.section(word.capitalize(), listed)
    short = [result.model_type for result in results if any("short" in text for text in result.verdicts.values())]
    lines += ["", f"The new length wasn't run in {', '.join(short)}."]
    return lines + workers.by_reason("Not run", ((one.model_type, one.not_run) for one in results if one.not_run))


SWEEP = workers.Sweep(
    title="What is accepted runs",
    says="Look up here whether a model that takes another position scheme, length or image size then runs.",
    every=every_type,
    examine=examine,
    totals=totals,
    batch=30,
    seconds=180,
)
if __name__ == "__main__":
    SWEEP.main()
