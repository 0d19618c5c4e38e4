"""What the sweeps find, in some model types in every run, in all on request: nothing wrong, and what is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import acceptance
import exact
import fold
import native_export
import native_rope
import norm_swap
import positions
import pytest
import repaired_types
import tables
import transformers
import weight_decay
import zoo
from sampled import divided, sampled

pytestmark = pytest.mark.filterwarnings("ignore::hfpatch.errors.NotPreservedWarning")


@dataclass(frozen=True)
class Sample:
    """Some of a sweep's model types.

    Attributes:
        script: the sweep.
        default, slow: types of the default run, and of the slow one.
        good: whether a result is right, whatever the report says.
        told: what of it has to be as the report's rows have it, where that is of this transformers.
        all_good: whether the totals of all types are right.
        examine: where it is less than all that the sweep asks of a type.
    """

    script: ModuleType
    default: Iterable[str]
    slow: Iterable[str]
    good: Callable[[Any], bool]
    told: Callable[[Any], Any]
    all_good: Callable[[dict[str, Any]], bool] | None = None
    examine: Callable[[str], Any] | None = None


def here(script: ModuleType, *statuses: str, but: Iterable[str] = ()) -> list[str]:
    """Types of this transformers of which the report says one of these."""
    rows = (row.model_type for row in script.SWEEP.results() if row.kind in statuses)
    return [name for name in rows if name in zoo.model_types() and name not in but]


def words(verdicts: dict[str, str]) -> dict[str, str]:
    return {name: text.partition(":")[0] for name, text in verdicts.items()}


def told_from_its_control(result: Any) -> bool:
    """Not wrong; gains and shifts that nobody takes over, or a swap without the centring, are seen."""
    return result.kind != "wrong" and (result.control is None or result.control > 1e-3)


def centred(result: Any) -> bool:
    return told_from_its_control(result) and (result.kind == "exact" or result.model_type not in EXACT)


def kept_and_converted(result: Any) -> bool:
    every = result.converted + sum(result.kept.values()) == result.layer_norms
    return result.status == "ok" and result.converted > 0 and result.missed == result.wrong == [] and every


def equal_but_for_rounding(row: dict[str, Any]) -> bool:
    return all(entry["float64"] <= 1e-11 and entry["float32"] <= 1e-4 for entry in row["equal"].values())


ACCEPTED = {  # of many builds: what was accepted once and didn't run, or open, among them
    "dinov2": ("wide", "square"),
    "vit": ("tall", "axes"),
    "blip_2_vision_model": ("small",),
    "BarkSemanticModel": ("longer",),
    "led": ("shorter",),
    "gpt2": ("dynamic", "sinusoidal"),
    "phi3": ("yarn", "longrope"),
    "qwen2_vl_text": ("linear",),
    "t5": ("alibi",),
    "whisper": ("longer",),
}
EXACT = ["gpt2", "olmo", "cohere", "nemotron", "bloom", "dinov2", "opt", "gpt_neox"]  # all of their norms are exact
QUICK = {row.model_type for row in exact.SWEEP.results() if row.seconds < 3}
FOLDED = ["llama", "mixtral", "t5", "gemma", "falcon", "bert"]
FEW = {row.model_type for row in fold.SWEEP.results() if row.norms < 30}
ROTATING = ["llama", "phi", "gpt_neox"]
TURNED = [row.model_type for row in native_rope.SWEEP.results() if row.answers and row.model_type in zoo.model_types()]
CONVERTED = ["albert", "bloom", "cohere", "convnext", "deberta", "mpt", "nemotron", "olmo"]
CONVERTED += ["moonshine_streaming", "squeezebert"]  # a norm without a name, (B, C, T) norms
GOOD = sorted(here(norm_swap, "ok"))
# shared layers, a cache that no argument turns off, positions in a list of convolutions, features of many depths, an
# empty slot in a list, no biases, patches of several images in one tensor, an image as patches, and masks that are
# drawn in the forward
REPAIRED = ["blip-2", "data2vec-audio", "dpt", "informer", "llama"]
REPAIRED += ["qwen2_vl_vision", "siglip2_vision_model", "vit_mae"]
# in two gains decay; the third's table of positions isn't trained
DECAYING = ["glm4v", "imagegpt", "canary_decoder"]

SAMPLES = (
    Sample(
        acceptance,
        *divided([*ACCEPTED], 3, 6),
        good=lambda found: "wrong" not in words(found.verdicts).values(),
        told=lambda found: words({name: found.verdicts.get(name, "") for name in ACCEPTED[found.model_type]}),
        all_good=lambda count: count["wrong"] == 0 and count["ok"] >= 2_000,
        examine=lambda name: acceptance.Result(
            name, verdicts={request: acceptance.verdict(name, request) for request in ACCEPTED[name]}
        ),
    ),
    Sample(
        exact,
        (),
        sampled([*EXACT, *sampled([one for one in here(exact, "exact", "in part", but=EXACT) if one in QUICK], 3)], 6),
        good=centred,
        told=lambda found: (found.status, found.exact),
        all_good=lambda count: "wrong" not in count and count["exact"] >= 60,
    ),
    Sample(
        fold,
        ["gpt2"],
        sampled([*FOLDED, *sampled([one for one in here(fold, "folded", "in part", but=FOLDED) if one in FEW], 3)], 6),
        good=told_from_its_control,
        told=lambda found: (found.status, found.folded, found.gone),
        all_good=lambda count: "wrong" not in count,
    ),
    Sample(
        native_export,
        ["gpt2 (CausalLM): norm='rms'", "llama (CausalLM): pos='nope'"],
        (),
        good=equal_but_for_rounding,
        told=lambda found: (list(found["equal"]), found["reasons"]),
    ),
    Sample(
        native_rope,
        *divided([*ROTATING, *sampled(TURNED, 3)], 2, 4),
        good=lambda found: found.answers["same"] == "yes" and "DIFFERS" not in found.answers.values(),
        told=lambda found: words(found.answers),
        all_good=lambda count: not any("DIFFERS" in count[name] for name in ("same", "theta", "linear", "partial")),
    ),
    Sample(
        norm_swap,
        *divided([*CONVERTED, *sampled([one for one in GOOD if one not in CONVERTED], 8)], 3, 6),
        good=kept_and_converted,
        told=lambda found: found.status,
        all_good=lambda count: count["missed"] == 0 and count["converted"] >= 0.95 * count["of"],
    ),
    Sample(
        positions,
        ["convbert", "fsmt"],
        ["siglip"],
        good=lambda found: not any(seen.wrong for seen in found.seen),
        told=lambda found: [(seen.owner, seen.wrong, seen.refused, seen.reached) for seen in found.seen],
        all_good=lambda count: count["wrong anywhere"] == 0 and count["supported"] >= 185,
    ),
    Sample(
        repaired_types,
        ["albert"],
        sampled(REPAIRED, 3),
        good=lambda found: not any(one.verdict.startswith(("wrong", "harmed")) for one in found.outcomes.values()),
        told=lambda found: words({name: one.verdict for name, one in found.outcomes.items()}),
        all_good=lambda count: (
            count["norm"]["repaired"] >= 500 and not {"wrong", "harmed"} & {*count["norm"], *count["pos"]}
        ),
    ),
    Sample(
        tables,
        ["opt", "roberta"],
        (),
        good=lambda found: all(seen.equal == [True, True] and seen.beyond for seen in found.seen),
        told=lambda found: found,
        all_good=lambda count: {**tables.totals(tables.SWEEP.results()), "wrong": 0}.items() <= count.items(),
    ),
    Sample(
        weight_decay,
        (),
        sampled([*DECAYING, *sampled([one for one in GOOD if one not in DECAYING], 8)], 6),
        good=lambda found: found.status == "ok" and found.differ == [] and sum(found.patched.values()) > 0,
        told=lambda found: found.differ,
        all_good=lambda count: count["differ"] == 0 and count["types"] >= len(GOOD),
    ),
)


COUNTED = [sample for sample in SAMPLES if sample.all_good]
every_sweep = pytest.mark.parametrize("sample", COUNTED, ids=lambda sample: sample.script.__name__)


def cases() -> Iterator[Any]:
    for sample in SAMPLES:
        for names, marks in ((sample.default, ()), (sample.slow, pytest.mark.slow)):
            yield from (
                pytest.param(sample, name, marks=marks, id=f"{sample.script.__name__}-{name}") for name in names
            )


@pytest.mark.sample(99, slow=99)  # how many of each sweep are of a run stands in SAMPLES
@pytest.mark.parametrize(("sample", "name"), [*cases()])
def test_a_type_is_right_and_as_reported(sample: Sample, name: str) -> None:
    found, sweep = (sample.examine or sample.script.examine)(name), sample.script.SWEEP
    if transformers.__version__ == sweep.report()["transformers"]:
        place = list(sweep.every()).index(name)
        assert sample.told(found) == sample.told(sweep.results()[place])
    elif getattr(found, "status", "").startswith("not run"):
        pytest.skip(f"the report is of another transformers; here {name} is {found.status}")
    assert sample.good(found), found


@pytest.mark.sweep
@every_sweep
def test_all_types_are_right(sample: Sample) -> None:
    """A report says that they were; others are counted anew."""
    sweep = sample.script.SWEEP
    assert sample.all_good(sweep.totals(sweep.sweep(list(sweep.every()))))


@every_sweep
def test_a_report_says_that_all_types_are_right(sample: Sample) -> None:
    assert sample.all_good(sample.script.SWEEP.report())
