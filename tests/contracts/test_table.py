"""What every scheme promises on every family: CASES (what is asked of which model, what comes of it) times PROPERTIES.

Of each property the default run proves a few cases, `-m slow` as many as it takes to have every family and request, and
`-m sweep` all others. Its controls are the same property on a mechanism that was broken on purpose, which must fail.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import position_families as short
import pytest
import tiny_models
import torch
import zoo
from decay import Decay, decayed
from initial_values import memory_is_nan, require_values
from own_norm import slopes
from position_checks import (
    difference,
    generated,
    generator,
    require_the_same_with_a_cache,
    require_the_same_with_checkpointing,
)
from rope_proof import CACHE, prove_stack
from safetensors.torch import load_file, save_file
from sampled import SEED, sampled
from tiny_models import COPIES, changes, fingerprint, load, norm_request, patch, require_a_model_of_its_own, steady
from torch import Tensor, nn

from hfpatch.core.registry import MLPS, NORMS, PLACEMENTS, POSITIONS
from hfpatch.measure.copies import unpatched_config
from hfpatch.measure.quiet_forward import cast
from hfpatch.patch import outcomes, unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime import attention, batch_norm, gated, lens, qk_layouts
from hfpatch.runtime.attention import ROTARY, AttentionLens
from hfpatch.runtime.handing_down import HandedDown
from hfpatch.runtime.norm_interface import NormInterface
from hfpatch.runtime.norms import AffineNorm, RMSNorm
from hfpatch.runtime.patch_errors import PatchError
from hfpatch.runtime.qk_layouts import Fused, turn_output
from hfpatch.runtime.rotary import RotaryEmbedding
from hfpatch.sites.norm_facts import describe
from hfpatch.sites.stacks import find_stacks

# --- cases ------------------------------------------------------------------------------------------------------------

SPELLED = {"learned": "learned:max_positions=128"}  # four times the families' own
OPTIONS = [{"norm": f"{name}"} for name in ("layer:bias=false", "rms:mode=parametrize")]
OPTIONS += [{"pos": f"rope:{options}"} for options in ("partial=0.5", "pairing=interleaved,theta=500")]
OPTIONS += [{"mlp": "geglu", "init": "reset"}, {"mlp": "swiglu", "init": "reset"}]
JOINT = [{"norm": "rms", "pos": "rope"}, {"norm": "dyt", "pos": "nope"}]
JOINT += [{"norm": norm, "pos": pos, "mlp": "swiglu"} for norm, pos in (("derf", "alibi"), ("deepnorm", "nope"))]
JOINT += [{"norm": "batch", "placement": name} for name in ("pre", "olmo2")]
REQUESTS: list[dict[str, str]] = [
    *map(norm_request, NORMS),
    *({"pos": SPELLED.get(name, name)} for name in POSITIONS),
    *({"mlp": name} for name in MLPS),
    *({"placement": name} for name in PLACEMENTS),
    *OPTIONS,
    *JOINT,
]


@dataclass(frozen=True)
class Host:
    """A family, and what comes of a request in it.

    Attributes:
        exact: values of requests after which it computes what it did.
        refused: values that it refuses, with a word of the reason. All others are approximate.
        takes: kinds of requests that are tried on it, by "norm", "pos" and so on.
        model: makes a model and inputs for it, from `made` by default.
    """

    exact: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    takes: str = "norm pos mlp placement"
    model: Callable[[], tuple[Any, dict[str, Any]]] | None = None


PRE_NORM = "layer rms rms:mode=parametrize folded"  # of LayerNorms that no residual connection reads
TABLE = SPELLED["learned"]
CAUSAL = {"batch": "seems to be causal"}
ROTATES = dict.fromkeys(("alibi", "sinusoidal", TABLE), "the model rotates by itself")
ROTATES["rope:pairing=interleaved,theta=500"] = "pairing= can't change that"
WHOLE = {"rope:partial=0.5": "turns whole heads"}
BIASED = dict.fromkeys(("sinusoidal", TABLE), "its positions are relative biases")
IS_PRE, IS_POST = {"pre": "is pre already"}, {"post": "is post already"}
READ_BY_RESIDUALS = {"folded": "by a residual connection"}
IS_RMS = dict.fromkeys(("rms", "rms:mode=parametrize"), "is rms already")
IS_GATED = dict.fromkeys(("geglu", "reglu", "swiglu"), "is gated already")
GRID = {"sinusoidal": "holds a grid of patches", TABLE: "Give image_size instead"}
DECODER = CAUSAL | IS_PRE
POST_NORM = Host(f"layer {TABLE} geglu", READ_BY_RESIDUALS | IS_POST)
LLAMA = CAUSAL | ROTATES | WHOLE | IS_PRE | IS_RMS | IS_GATED
HOSTS = {
    "gpt2": Host(f"{PRE_NORM} {TABLE} geglu", DECODER),
    "opt": Host(f"{PRE_NORM} {TABLE} reglu", DECODER),
    "gpt_neo": Host(f"{PRE_NORM} {TABLE} geglu", DECODER),
    **dict.fromkeys(("bert", "roberta", "distilbert", "bart", "ernie"), POST_NORM),
    "vit": Host(f"{PRE_NORM} geglu", GRID | IS_PRE),
    "whisper": Host(f"{PRE_NORM} {TABLE} geglu", IS_PRE),
    # without a table of positions, or with norms of other kinds
    "albert": Host(f"layer folded {TABLE} geglu", IS_POST),
    "bloom": Host(f"{PRE_NORM} geglu", CAUSAL | BIASED | IS_PRE | {"alibi": "has relative biases of its own"}),
    "cohere": Host(
        f"{PRE_NORM} layer:bias=false rope",
        CAUSAL | ROTATES | WHOLE | IS_GATED | {"deepnorm": "parallel residual"},
        "norm pos mlp",
    ),
    "convnext": Host("layer folded geglu", {"deepnorm": "its norms are placed as 'other'"}, "norm mlp"),
    "deberta": Host(POST_NORM.exact, POST_NORM.refused | {"alibi": "doesn't add its mask to its scores"}),
    "gemma": Host("folded rope", LLAMA),
    "llama": Host("folded rope", LLAMA),
    "nemotron": Host(f"{PRE_NORM} rope rope:partial=0.5", CAUSAL | ROTATES | IS_PRE, "norm pos placement"),
    "olmo": Host(
        "layer rms rms:mode=parametrize layer:bias=false rope",
        CAUSAL | ROTATES | WHOLE | IS_PRE | IS_GATED | {"folded": "has no gain and no shift"},
    ),
    "t5": Host("folded reglu", BIASED | IS_PRE | IS_RMS | {"alibi": "takes no mask of the shape"}),
    # decoders of other builds: tables in buffers, one key for all heads
    **{
        name: Host(TABLE, takes="decoding", model=partial(generator, name))
        for name in ("biogpt", "blenderbot", "blenderbot-small", "marian", "mbart", "pegasus", "plbart")
    },
    **{name: Host(takes="rope", model=partial(generator, name)) for name in ("ctrl", "gpt_bigcode", "trocr", "mvp")},
    # MLPs of other builds and activations
    **{
        name: Host("geglu", takes="mlp", model=partial(zoo.tiny, name))
        for name in ("gptj", "timesformer", "wav2vec2", "falcon")
    },
    "clip": Host("swiglu", takes="mlp", model=partial(zoo.tiny, "clip")),
    # masks of other builds
    **{name: Host("layer", takes="masks", model=partial(zoo.tiny, name)) for name in ("deberta-v2", "funnel", "yoso")},
}
DECODING = [{"pos": name} for name in ("rope", "alibi", "sinusoidal", "nope")]
FEW = {"decoding": DECODING, "rope": DECODING[:1], "masks": [{"norm": "batch"}, {"norm": "batch", "placement": "pre"}]}


@dataclass(frozen=True)
class Case:
    """A request to a family.

    Attributes:
        outcome: "exact", "approximate", or a word of the reason why it is refused.
    """

    family: str
    request: dict[str, str]
    outcome: str

    def __str__(self) -> str:
        return "-".join((self.family, *self.request.values()))

    @property
    def served(self) -> bool:
        return self.outcome in ("exact", "approximate")

    def asks(self, kind: str, *names: str) -> bool:
        """Whether a scheme of this kind is asked for; of these names, if some are given."""
        return kind in self.request and (not names or self.request[kind].partition(":")[0] in names)

    def made(self) -> tuple[Any, dict[str, Any]]:
        """The unpatched model and inputs; those of a norm that counts positions have some that are padding."""
        if (own := HOSTS[self.family].model) is not None:
            model, given = own()
        elif self.family in short.FAMILIES:
            model, given = short.make(self.family), short.inputs(self.family)
        else:
            model = tiny_models.tiny(self.family)
            given = tiny_models.inputs(model)
        if "position_ids" in inspect.signature(model.forward).parameters and "input_ids" in given:
            given["position_ids"] = 2 * torch.arange(given["input_ids"].shape[1])[None]
        if self.asks("norm", "batch") and "input_ids" in given:
            given["attention_mask"] = torch.ones_like(given["input_ids"])
            given["attention_mask"][1, -5:] = 0
        return model, given

    def patched(self, **options: Any) -> tuple[Any, dict[str, Any]]:
        model, given = self.made()
        patch(model, **self.request, **options)
        if self.asks("norm", "batch"):  # with statistics of its own
            steady(model)(**given)
        return model.eval(), given


def cases_of(family: str) -> list[Case]:
    """Every request that is tried on a family, with what comes of it."""
    host = HOSTS[family]
    if host.takes in FEW:
        return [Case(family, request, "approximate") for request in FEW[host.takes]]
    found = []
    for request in REQUESTS:
        if request.keys() - {*host.takes.split(), "init"}:
            continue
        values = [value for kind, value in request.items() if kind != "init"]
        refused = "|".join(host.refused[value] for value in values if value in host.refused)
        exact = {*values} <= {*host.exact.split()} and "init" not in request
        found.append(Case(family, request, refused or ("exact" if exact else "approximate")))
    return found


def turned(by_family: list[list[Case]]) -> list[Case]:
    """In an order of which an even sample has all families and requests."""
    rows = [cases[turn % len(cases) :] + cases[: turn % len(cases)] for turn, cases in enumerate(by_family)]
    return [row[place] for place in range(max(map(len, rows))) for row in rows if place < len(row)]


CASES = turned([cases_of(family) for family in HOSTS])


# --- what the properties share ----------------------------------------------------------------------------------------


def answer(model: Any, given: dict[str, Any], **more: Any) -> Tensor:
    """The first tensor of numbers that a model returns."""
    with torch.no_grad():
        result = model(**given, **more)
    return next(one for one in result.values() if isinstance(one, Tensor) and one.is_floating_point())


def as_dtype(model: Any, given: dict[str, Any], dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    return model.to(dtype), cast(given, torch.device("cpu"), dtype)


def uncached(model: Any) -> dict[str, bool]:
    return {"use_cache": False} if getattr(model.config, "use_cache", False) else {}


@dataclass(frozen=True)
class Property:
    """What holds of every case, or of those that it is `of`.

    Attributes:
        check: takes a case and an empty folder.
        default: how many cases the default run has besides those of the controls.
        controls: cases with what breaks them, so that the check must fail.
    """

    check: Callable[[Case, Path], None]
    of: Callable[[Case], bool]
    default: int
    controls: list[tuple[Case, Callable[[pytest.MonkeyPatch], None]]]

    @property
    def cases(self) -> list[Case]:
        return [case for case in CASES if self.of(case)]


PROPERTIES: dict[str, Property] = {}


def property_of(
    of: Callable[[Case], bool],
    default: int,
    *controls: tuple[str, dict[str, str], Callable[[pytest.MonkeyPatch], None]],
) -> Callable[[Any], Any]:
    """Decorator: the function becomes a property."""

    def add(check: Any) -> Any:
        broken = [(Case(family, request, "exact"), breaks) for family, request, breaks in controls]
        PROPERTIES[check.__name__] = Property(check, of, default, broken)
        return check

    return add


def of_tiny(case: Case) -> bool:
    """Those of tiny_models; the others are there for one property."""
    return case.served and HOSTS[case.family].model is None


def of_short(case: Case) -> bool:
    """Those whose tables of positions are short."""
    return case.served and case.family in short.FAMILIES


def of_positions(case: Case) -> bool:
    return of_short(case) and case.request.keys() == {"pos"}


def of_rotations(case: Case) -> bool:
    return of_positions(case) and case.asks("pos", "rope")


def of_decoders(case: Case) -> bool:
    """What generates; Whisper cuts sound by the length of a table that stays."""
    decodes = of_short(case) and short.FAMILIES[case.family].decodes
    if case.family == "whisper" and case.asks("pos", "learned"):
        return False
    return (decodes and case.asks("pos")) or (case.served and HOSTS[case.family].takes in ("decoding", "rope"))


ROPE = {"pos": "rope"}
GATE = {"mlp": "geglu"}


def nothing_is_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "patch", lambda model, **_: model)


# --- plan, patch and back ---------------------------------------------------------------------------------------------


def up_biases_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    ones = torch.ones
    monkeypatch.setattr(gated.torch, "ones", lambda *size, **options: ones(*size, **options) * 0.9)


IN_FLOAT32 = ("cohere", "deberta", "gemma", "llama", "olmo", "t5")  # whatever the dtype is, in their norms


def nothing_is_refused(case: Case) -> bool:
    return HOSTS[case.family].model is None or case.asks("mlp")


@property_of(nothing_is_refused, 16, ("gpt2", GATE, up_biases_are_wrong), ("gpt2", ROPE, nothing_is_patched))
def the_plan_says_what_comes(case: Case, folder: Path) -> None:
    """What is refused changes nothing; what is exact computes the same, and what isn't says what it loses."""
    model, given = as_dtype(*case.made(), torch.float64)
    before, untouched = answer(model, given), fingerprint(model)  # transformers 5.17's wav2vec2 draws as it answers
    if not case.served:
        for call in (plan_patch, patch):
            with pytest.raises(PatchError, match=case.outcome):
                call(model, **case.request)
        assert not changes(untouched, fingerprint(model))
        return
    plan = plan_patch(model, **case.request)
    assert not changes(untouched, fingerprint(model))
    assert any(row.becomes is not None for row in plan.rows)
    patch(model, **case.request)
    off = float((answer(model, given) - before).abs().max() / before.abs().max())
    exact = 1e-5 if case.family in IN_FLOAT32 else 1e-12
    assert (off <= exact) if case.outcome == "exact" else (off > 1e-6)
    if case.request.get("init") != "reset":
        assert bool(plan.losses()) == (case.outcome != "exact")
        assert case.outcome in {one.verdict for one in outcomes(model).found.values()}
    carried_out = fingerprint(model)
    patch(model, **{kind: value for kind, value in case.request.items() if kind != "init" or case.asks("mlp")})
    assert not changes(carried_out, fingerprint(model))


@property_of(of_tiny, 2, ("gpt2", ROPE, lambda broken: broken.setattr(sys.modules[__name__], "unpatch_model", id)))
def it_is_taken_back_to_the_bit(case: Case, folder: Path) -> None:
    model, _ = case.made()
    before = fingerprint(model)
    patch(model, **case.request, reversible=True)
    assert changes(before, fingerprint(model))
    unpatch_model(model)
    assert not changes(before, fingerprint(model))


def weights_double(monkeypatch: pytest.MonkeyPatch) -> None:
    def doubling(model: Any, **request: Any) -> Any:
        next(model.parameters()).data.mul_(2)  # once for each call
        return patch(model, **request)

    monkeypatch.setattr(sys.modules[__name__], "patch", doubling)


def of_order(case: Case) -> bool:
    return of_tiny(case) and len(case.request.keys() & {"norm", "pos", "mlp"}) > 1


@property_of(of_order, 1, ("gpt2", JOINT[0], weights_double))
def the_order_of_patches_is_irrelevant(case: Case, folder: Path) -> None:
    at_once, given = as_dtype(*case.made(), torch.float64)
    patch(at_once, **case.request)
    for order in (("mlp", "norm", "pos"), ("norm", "mlp", "pos"), ("pos", "norm", "mlp")):
        model, _ = as_dtype(*case.made(), torch.float64)
        for kind in filter(case.asks, order):
            patch(model, **{kind: case.request[kind]})
        # a table's mean row is centred before it is taken, or after: equal but for rounding
        torch.testing.assert_close(answer(model, given), answer(at_once, given), rtol=1e-12, atol=1e-12)
        records = [tiny_models.without_outcomes(one.config.hfpatch) for one in (model, at_once)]
        assert sorted(records[0].pop("edits")) == sorted(records[1].pop("edits"))
        assert records[0] == records[1]


# --- copies and checkpoints -------------------------------------------------------------------------------------------


def host_without_lens(_: Any, host: type) -> Any:
    return host.__new__(host)


def lenses_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_without_lens, "__module__", __name__)
    monkeypatch.setattr(lens, "_empty", host_without_lens)


def rotations_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new one turns faster than the last."""
    real, made = RotaryEmbedding._scaled_frequencies, []

    def faster(self: Any, *length: Any) -> Any:
        made.append(self)
        frequencies, scaling = real(self, *length)
        return frequencies * (1 + 0.1 * len(made)), scaling

    monkeypatch.setattr(RotaryEmbedding, "_scaled_frequencies", faster)


def comes_back(how: str, case: Case, folder: Path) -> None:
    model, given = case.patched()
    twin = COPIES[how](model) if how in COPIES else tiny_models.reload(model, folder, type(model)).eval()
    assert twin.state_dict().keys() == model.state_dict().keys()
    assert [type(module) for module in twin.modules()] == [type(module) for module in model.modules()]
    assert decayed(twin.requires_grad_()) == decayed(copy.deepcopy(model).requires_grad_())  # frozen or not
    if case.asks("norm", "batch"):  # which reads the mask while it trains
        again = [answer(steady(copy.deepcopy(one)), given) for one in (model, twin)]
        assert torch.equal(*again)
    require_a_model_of_its_own(twin, model, lambda one: answer(one, given))


for way in (*COPIES, "saved"):
    PROPERTIES[f"it_comes_back_{way}"] = Property(
        partial(comes_back, way),
        of_tiny,
        1,
        [(Case("gpt2", ROPE, "exact"), rotations_differ if way == "saved" else lenses_are_lost)],
    )


def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AffineNorm, "reset_parameters", lambda self: None)
    monkeypatch.setattr(AffineNorm, "_new", staticmethod(lambda shape, *_: nn.Parameter(torch.empty(shape))))


@property_of(of_tiny, 3, ("gpt2", {"norm": "dyt"}, nothing_is_started), ("gpt2", ROPE, rotations_differ))
def its_config_builds_it(case: Case, folder: Path) -> None:
    """With values everywhere, and the same model once it has the weights; so where a file lacks what was added."""
    model, given = case.patched()
    with memory_is_nan():
        fresh = type(model)._from_config(copy.deepcopy(model.config)).eval()
    require_values(fresh)
    assert decayed(fresh) == decayed(model)
    fresh.load_state_dict(model.state_dict())
    assert difference(answer(fresh, given), answer(model, given)) <= 1e-6
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    plain = lens.host_class(type(model))(unpatched_config(model.config)).state_dict()
    kept = {name: value for name, value in stored.items() if name in plain and value.shape == plain[name].shape}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    with memory_is_nan():
        opened = load(folder, type(model), check_fingerprint=False)
    require_values(opened)
    assert all(torch.equal(opened.state_dict()[name], value) for name, value in kept.items())


# --- precision and devices --------------------------------------------------------------------------------------------


def norms_widen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RMSNorm.forward
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: real(self, x).float())


def of_halves(case: Case) -> bool:
    """DeBERTa itself can't."""
    return (of_tiny(case) and case.family != "deberta") or HOSTS[case.family].takes == "masks"


@property_of(of_halves, 2, ("gpt2", {"norm": "rms"}, norms_widen))
def it_runs_in_half_precision(case: Case, folder: Path) -> None:
    """All of it, and in autocast."""
    model, given = case.patched()
    expected = answer(model, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [answer(model, given)]
    found.append(answer(*as_dtype(model, given, torch.bfloat16)))
    assert {parameter.dtype for parameter in model.parameters()} == {found[1].dtype} == {torch.bfloat16}
    for out in found:
        assert nn.functional.cosine_similarity(out.float().flatten(), expected.flatten(), dim=0) > 0.98


def evaluated(model: Any, given: dict[str, Tensor]) -> None:
    answer(model.eval(), given)


def trained(model: Any, given: dict[str, Tensor]) -> None:
    returned = model.train()(**given)
    sum(one.sum() for one in returned.values() if isinstance(one, Tensor) and one.requires_grad).backward()
    assert all(parameter.grad is None or parameter.grad.is_meta for parameter in model.parameters())


def decoded(model: Any, given: dict[str, Tensor]) -> None:
    """Two steps with a cache."""
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    with torch.no_grad():
        first = model.eval()(**given, use_cache=True)
        second = {key: value for key, value in given.items() if key not in ("attention_mask", "position_ids")}
        model(**{**second, name: given[name][:, :1]}, **{CACHE: first[CACHE]}, use_cache=True)


def obstacles(model: Any, given: dict[str, Tensor]) -> dict[str, str]:
    """What a model can't do on the meta device, with what it raises.

    Operations there know shapes and devices, and no values. So they raise where a tensor is made on the CPU though the
    model is elsewhere, and where code reads a value: on a GPU the first is an error, and the second waits for it.
    """
    found = {}
    for way in (evaluated, trained, decoded):
        one = copy.deepcopy(model).to("meta")
        # without these settings a host reads values of its inputs: whether one is padding, whether a mask is needed
        one.config.pad_token_id = None
        if one.config.model_type == "bart":
            one.set_attn_implementation("eager")
        try:
            way(one, {name: value.to("meta") for name, value in given.items()})
        except Exception as error:  # whatever a host raises
            found[way.__name__] = f"{error!r:.300}"
    return found


def a_tensor_stays_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RotaryEmbedding.forward
    monkeypatch.setattr(RotaryEmbedding, "forward", lambda self, x: real(self, torch.ones(x.shape)))


@property_of(of_tiny, 2, ("gpt2", ROPE, a_tensor_stays_on_the_cpu))
def it_runs_where_no_value_is_known(case: Case, folder: Path) -> None:
    """The path that a GPU takes, without one. What the unpatched model can't do isn't asked of the patched one."""
    original, given = case.made()
    model, _ = case.patched()
    found = obstacles(model, given)
    assert not found.keys() - obstacles(original, given).keys(), found


def rotations_are_made_on_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RotaryEmbedding._frequencies
    monkeypatch.setattr(RotaryEmbedding, "_frequencies", lambda self: real(self) + torch.zeros(1, device="meta"))


@property_of(of_tiny, 2, ("gpt2", ROPE, rotations_are_made_on_the_default_device))
def it_is_patched_where_new_modules_are_made_on_meta(case: Case, folder: Path) -> None:
    """It is patched on its own device, as it would be elsewhere, and the default stays what it was."""
    (expected, given), (model, _) = case.made(), case.made()
    with torch.random.fork_rng(devices=[]):
        patch(expected, **case.request)
    with torch.device("meta"):
        patch(model, **case.request)
        assert torch.empty(1).is_meta
    assert not any(one.is_meta for one in (*model.parameters(), *model.buffers()))
    if not case.asks("mlp") or "init" not in case.request:  # drawn weights
        assert torch.equal(answer(model, given), answer(expected, given))
        assert outcomes(model) == outcomes(expected)


# --- training ---------------------------------------------------------------------------------------------------------


def gains_decay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NormInterface, "leave_out_of_decay", lambda self, replaced: None)


@property_of(of_tiny, 8, *((name, {"norm": "layer"}, gains_decay) for name in ("gpt2", "gpt_neo", "bloom", "convnext")))
def what_decays_is_what_did(case: Case, folder: Path) -> None:
    """tests/sweeps/weight_decay.py asks the same of every model type."""
    original, _ = case.made()
    before, (model, _) = Decay.of(original), case.patched()
    assert before.differing(model) == []
    if case.request.keys() - {"init"} == {"norm"}:  # of which other lists go by names and numbers of axes
        added = dict(model.named_parameters()).keys() - before.parameters.keys()
        assert {model.get_parameter(name).dim() for name in added} <= {1}
        if case.request["norm"] in ("layer", "rms", "deepnorm", "batch"):
            assert original.state_dict().keys() <= model.state_dict().keys()
    norm = {"norm": "derf", "init": "copy"}
    if case.asks("norm") and plan_takes(model, norm):  # one patch after another
        assert before.differing(patch(model, **norm)) == []


def plan_takes(model: Any, request: dict[str, str]) -> bool:
    try:
        return bool(plan_patch(model, **request).edits)
    except PatchError:
        return False


def state_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RotaryEmbedding.rotate

    def keeps_state(self: RotaryEmbedding, x: Tensor, phases: Any) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1  # like a mechanism that stores positions on the module
        return real(self, x * self.calls, phases)

    monkeypatch.setattr(RotaryEmbedding, "rotate", keeps_state)


def of_any_length(case: Case) -> bool:
    return of_short(case) and case.asks("pos", *(name for name in POSITIONS if name != "learned"))


@property_of(of_any_length, 2, ("gpt2", ROPE, state_is_kept))
def gradient_checkpointing_changes_nothing(case: Case, folder: Path) -> None:
    """Layers are computed again outside of their owner's forward, and after another one of other lengths."""
    lengths = {"image": (16, 32), "audio": (16, 8)}.get(short.FAMILIES[case.family].kind, (12, 7))
    model, _ = case.patched()
    given = [short.inputs(case.family, length, seed=length) | uncached(model) for length in lengths]
    decoder = case.family in ("gpt2", "opt", "gpt_neo")  # of others the sums of gradients differ by rounding
    for reentrant in (False, True) if decoder else (False,):
        require_the_same_with_checkpointing(model, given, reentrant)


def forward_and_backward(model: Any, run: Any, given: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    out = next(one for one in run(**given).values() if isinstance(one, Tensor) and one.requires_grad)
    out.square().mean().backward()
    return out.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


def graphs_break(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RotaryEmbedding.forward

    def breaks(self: RotaryEmbedding, positions: Tensor) -> Any:
        torch._dynamo.graph_break()
        return real(self, positions)

    monkeypatch.setattr(RotaryEmbedding, "forward", breaks)


def compiles(case: Case) -> bool:
    """Before torch 2.12 dynamo can't follow a functools.partial, as BERT's chunks need with a mask for their norm."""
    return of_tiny(case) and (case.family == "vit" or not case.asks("norm", "batch") or torch.__version__ >= "2.12")


@property_of(compiles, 0, ("gpt2", ROPE, graphs_break))
def it_compiles_without_graph_breaks(case: Case, folder: Path) -> None:
    """One graph, of which outputs and gradients are the eager model's. In float64, where rounding hides nothing."""
    torch._dynamo.reset()
    model, given = as_dtype(*case.patched(), torch.float64)
    twin, given = steady(copy.deepcopy(model)), given | uncached(model)
    out, grads = forward_and_backward(twin, twin, given)
    compiled = torch.compile(steady(model), fullgraph=True, backend="aot_eager")
    compiled_out, compiled_grads = forward_and_backward(model, compiled, given)
    assert difference(compiled_out, out) <= 1e-12
    largest = {key: float(grad.abs().max()) for key, grad in grads.items()}
    rounding = 1e-13 * max(largest.values())  # all that a key's bias has, which adds the same to all scores of a query
    assert all((compiled_grads[key] - grads[key]).abs().max() <= 1e-11 * largest[key] + rounding for key in grads)
    for mine, other in zip(model.buffers(), twin.buffers(), strict=True):  # statistics of batches
        torch.testing.assert_close(mine, other)


def rotations_lie_below_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    class BelowTheAdapter:
        """A rotation that sits on the Linear itself, as a forward hook would, so that LoRA's part isn't rotated."""

        def __init__(self, layer: Any, turn: Any):
            self.layer, self.turn = layer, turn

        def __call__(self, x: Tensor) -> Tensor:
            if not hasattr(self.layer, "base_layer"):
                return self.turn(self.layer(x))
            base = self.layer.base_layer(x)
            return self.turn(base) + (self.layer(x) - base)

    def below(projection: Any, turn: Any) -> Any:
        return turn_output(BelowTheAdapter(projection, turn), lambda y: y)  # type: ignore[arg-type]

    monkeypatch.setattr(qk_layouts, "turn_output", below)


def adapter_of(model: Any, case: Case) -> Any:
    """LoRA of what rotates or is gated; else trained copies of the norms."""
    peft = pytest.importorskip("peft")
    options: dict[str, Any] = {"init_lora_weights": False, "r": 4}
    if case.asks("mlp"):
        fused = type(next(one for one in model.modules() if isinstance(one, gated.GatedLinear)).gate).__name__
        return peft.LoraConfig(target_modules=["gate", "up"], fan_in_fan_out=fused == "Conv1D", **options)
    if case.asks("pos"):
        found = next(one.__dict__[lens.LENS].projections for one in model.modules() if ROTARY in one._modules)
        names = [found.name] if isinstance(found, Fused) else [found.query, found.key]
        return peft.LoraConfig(target_modules=names, **options)
    names = {name.rpartition(".")[2] for name, one in model.named_modules() if describe(one) is not None}
    return peft.LNTuningConfig(target_modules=sorted(names))


def of_adapters(case: Case) -> bool:
    """Of norms those that have parameters; PEFT finds ConvNeXt's by names that other modules have, too."""
    kept = case.asks("norm", "folded", "none") or case.family in ("convnext", "olmo")
    return of_rotations(case) or (of_tiny(case) and not kept and case.request.keys() - {"init"} in ({"mlp"}, {"norm"}))


@property_of(of_adapters, 4, *((name, ROPE, rotations_lie_below_adapters) for name in ("bert", "gpt2")))
def an_adapter_comes_back_and_merges(case: Case, folder: Path) -> None:
    """On queries and keys, on gates, on norms: saved, opened on a base that was opened, merged, and that saved."""
    peft = pytest.importorskip("peft")
    model, given = as_dtype(*case.patched(), torch.float64)
    exact = 1e-6 if case.asks("pos") or case.family in IN_FLOAT32 else 1e-9
    before, keys, kind = answer(model, given), model.state_dict().keys(), type(model)
    model.save_pretrained(folder / "base")
    torch.manual_seed(5)
    adapted = peft.get_peft_model(model, adapter_of(model, case)).double().eval()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    expected = answer(adapted, given)
    assert difference(expected, before) > 1e-3, "the adapter does nothing"
    adapted.save_pretrained(folder / "adapter")
    again = peft.PeftModel.from_pretrained(load(folder / "base", kind), folder / "adapter").double().eval()
    assert difference(answer(again, given), expected) <= 1e-6  # PEFT opens it in float32
    for one in (adapted, again):
        unmerged = answer(one, given)
        merged = one.merge_and_unload()
        assert difference(answer(merged, given), unmerged) <= exact
        assert merged.state_dict().keys() == keys
    merged.save_pretrained(folder / "merged")
    assert difference(answer(load(folder / "merged", kind), given), unmerged) <= exact


# --- positions --------------------------------------------------------------------------------------------------------


def sines_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys then depend on their own positions."""
    real = RotaryEmbedding.rotate
    monkeypatch.setattr(RotaryEmbedding, "rotate", lambda self, x, phases: real(self, x, (phases[0], 0 * phases[1])))


def nothing_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotaryEmbedding, "rotate", lambda self, x, phases: x)


BROKEN = [(name, ROPE, nothing_turns) for name in ("gpt2", "bert", "vit", "bart")]
BROKEN += [("gpt2", {"pos": "rope:pairing=interleaved,theta=500"}, nothing_turns)]


@property_of(of_rotations, 3, *BROKEN, ("gpt2", ROPE, sines_are_lost))
def distances_alone_count(case: Case, folder: Path) -> None:
    """In each attention of every stack, whatever computes it; rope_proof.py says how that is seen."""
    model, given = as_dtype(*case.patched(), torch.float64)
    given = {name: value for name, value in given.items() if name != "position_ids"}
    expected = answer(model, given)
    for implementation in ("sdpa", "eager"):
        if case.family != "gpt_neo":  # which has eager attention alone
            model.set_attn_implementation(implementation)
        assert difference(answer(model, given), expected) <= 1e-4
        for stack in find_stacks(model):
            found = prove_stack(model, given, stack, each=True)
            assert found.holds, found


@property_of(of_positions, 2, *((name, ROPE, nothing_is_patched) for name in short.FAMILIES))
def it_takes_four_times_the_old_length(case: Case, folder: Path) -> None:
    model, _ = case.patched()
    length = 4 * short.FAMILIES[case.family].old_length
    given = short.inputs(case.family, length, batch=1)
    out = answer(model, given)
    assert out.isfinite().all()
    assert out.dim() != 3 or out.shape[1] == length
    if "decoder_input_ids" in given:
        labels = given.pop("decoder_input_ids")
        with torch.no_grad():
            assert model(**given, labels=labels).loss.isfinite()


def positions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever position_ids and caches say."""
    real = AttentionLens.__call__
    monkeypatch.setattr(AttentionLens, "__call__", lambda self, m, a: real(self, m, {**a, "position_ids": None}))
    monkeypatch.setattr(AttentionLens, "_cache", lambda *_: None)
    monkeypatch.setattr(HandedDown, "__call__", lambda *_: ({}, {}))


def keys_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = AttentionLens._slots
    monkeypatch.setattr(AttentionLens, "_slots", lambda self, m, tokens, _, values: slots(self, m, tokens, {}, values))


ALIBI = {"pos": "alibi"}
LOST = [(name, ROPE, positions_are_counted) for name in ("gpt2", "bart", "biogpt", "ctrl")]
LOST += [(name, ALIBI, keys_are_counted) for name in ("gpt2", "bart")]


def writer(case: Case, old: bool = False) -> tuple[Any, dict[str, Any], bool]:
    """A model in float64 that generates, a prompt that repeats itself, and whether it reads tokens alone."""
    model, given = case.made() if old else case.patched()
    model, given = as_dtype(model, given, torch.float64)
    model.generation_config.eos_token_id = None
    given = {name: value for name, value in given.items() if not name.startswith("decoder") and name != "labels"}
    if "input_ids" in given:  # so that looking up what followed finds something
        prompt = given["input_ids"][:1, :3].repeat(1, 3)
        return (
            model,
            {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)},
            not model.config.is_encoder_decoder,
        )
    return model, given, False


@property_of(of_decoders, 1, *LOST)
def it_decodes_with_a_cache_as_without(case: Case, folder: Path) -> None:
    """Greedily with a dynamic and with a static cache, in beams, by chance, in eager attention, and padded."""
    model, given, alone = writer(case)
    plain = generated(model, given, use_cache=False)
    require_the_same_with_a_cache(model, given, plain)
    beams = generated(model, given, num_beams=3, use_cache=False)
    assert difference(generated(model, given, num_beams=3), beams) <= 1e-4
    samples = []
    for use_cache in (True, False):
        torch.manual_seed(11)
        samples.append(chosen(model, given, do_sample=True, top_k=50, use_cache=use_cache))
    assert torch.equal(*samples)
    if alone and "learned" not in case.request["pos"]:
        pad = torch.full((1, 4), model.config.pad_token_id or 0)
        padded = {
            "input_ids": torch.cat((pad, given["input_ids"]), 1),
            "attention_mask": torch.cat((torch.zeros_like(pad), given["attention_mask"]), 1),
        }
        for use_cache in (True, False):
            assert difference(generated(model, padded, use_cache=use_cache), plain) <= 1e-4
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
        require_the_same_with_a_cache(model, given, plain)


def chosen(model: Any, given: dict[str, Any], **options: Any) -> Tensor:
    steps = {"max_new_tokens": 7, "min_new_tokens": 7, "forced_eos_token_id": None, "do_sample": False, "num_beams": 1}
    with torch.no_grad():
        return model.generate(**given, **{**steps, **options})


@property_of(lambda case: of_decoders(case) and case.family != "whisper", 0, ("gpt_neo", ALIBI, keys_are_counted))
def drafted_tokens_are_checked_as_they_would_be_chosen(case: Case, folder: Path) -> None:
    """Prompt lookup and an assistant: several tokens at once, and a cache that is cut back where they were wrong."""
    model, given, _ = writer(case)
    greedy = chosen(model, given, use_cache=False)
    assert torch.equal(chosen(model, given, prompt_lookup_num_tokens=3), greedy)
    assistant, drafted = copy.deepcopy(model), []
    with torch.no_grad():
        for parameter in assistant.parameters():  # which is often wrong
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    assistant.register_forward_hook(lambda *_: drafted.append(1))
    assert torch.equal(chosen(model, given, assistant_model=assistant), greedy)
    assert drafted


def masks_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_norm, "kept_positions", lambda mask: None)


def biases_hide_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_merge_bias_and_mask", lambda scores, mask, dtype: scores.to(dtype))


def of_encoders(case: Case) -> bool:
    kinds = {"albert", "ernie", "deberta", "t5"} | {name for name, one in short.FAMILIES.items() if one.kind != "image"}
    return of_tiny(case) and case.family in kinds - {"gpt2", "opt", "gpt_neo", "whisper"}


@property_of(of_encoders, 4, ("bert", {"norm": "batch"}, masks_are_lost), ("bert", ALIBI, biases_hide_masks))
def padding_counts_for_nothing(case: Case, folder: Path) -> None:
    """With whatever kind of mask an attention takes: in no norm of the model, wherever it stands, while it trains."""
    model, given = as_dtype(*case.patched(), torch.float64)
    if case.family == "bart":
        model.set_attn_implementation("eager")
    keep = torch.ones_like(given["input_ids"], dtype=torch.bool)
    keep[1, -5:] = False
    others = given["input_ids"].masked_fill(~keep, 7)

    def encoded(ids: Tensor, mask: Tensor | None) -> Tensor:
        with torch.no_grad():
            found = steady(model)(**{**given, "input_ids": ids, "attention_mask": mask})
        named = ("encoder_last_hidden_state", "last_hidden_state", "logits")
        return next(found[name] for name in named if name in found)[keep]

    mask = keep.long()
    same = 1e-6 if case.asks("pos") else 1e-12  # angles and distances are in float32
    assert difference(encoded(others, mask), encoded(given["input_ids"], mask)) <= same
    assert difference(encoded(others, None), encoded(given["input_ids"], None)) > 1e-3, "control"


# --- the table --------------------------------------------------------------------------------------------------------


def in_order(cases: list[Case]) -> list[Case]:
    return random.Random(SEED).sample(cases, len(cases)) if SEED else cases


@cache
def divided(name: str) -> tuple[list[Case], list[Case], list[Case]]:
    """A property's cases of the default run, of the slow one and of the sweeps.

    The default ones are those of its controls and a sample. The slow ones are those, in the table's order, that have a
    family or a scheme of which none came before.
    """
    one = PROPERTIES[name]
    controls = [case for case, _ in one.controls] if one.default else []  # which hold where nothing is broken
    unbroken = [
        case for case in one.cases if any((case.family, case.request) == (c.family, c.request) for c in controls)
    ]
    default = [*unbroken, *sampled([case for case in one.cases if case not in unbroken], one.default)]
    slow, sweeps = [], []
    seen = {part for case in default for part in (case.family, *case.request.values())}
    for case in in_order([case for case in one.cases if case not in default]):
        new = {case.family, *case.request.values()} - seen
        (slow if new else sweeps).append(case)
        seen |= new
    return default, slow, sweeps


def every() -> Iterable[Any]:
    for name in PROPERTIES:
        for cases, marks in zip(divided(name), ((), pytest.mark.slow, pytest.mark.sweep), strict=True):
            yield from (pytest.param(name, case, marks=marks, id=f"{name}-{case}") for case in cases)


@pytest.mark.sample(sys.maxsize, slow=sys.maxsize)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "case"), [*every()])
def test_holds(name: str, case: Case, tmp_path: Path) -> None:
    PROPERTIES[name].check(case, tmp_path)


CONTROLS = [
    pytest.param(name, case, breaks, id=f"{name}-{case}", marks=() if one.default else pytest.mark.slow)
    for name, one in PROPERTIES.items()
    for case, breaks in one.controls
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sample(sys.maxsize, slow=sys.maxsize)
@pytest.mark.parametrize(("name", "case", "breaks"), CONTROLS)
def test_control(name: str, case: Case, breaks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    breaks(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, PatchError, IndexError, ValueError)):
        PROPERTIES[name].check(case, tmp_path)


@pytest.mark.parametrize("name", ["it_comes_back_saved", "what_decays_is_what_did", "an_adapter_comes_back_and_merges"])
def test_a_registered_norm(name: str, tmp_path: Path) -> None:
    """Whatever its gain and shift are called."""
    with slopes() as request:
        PROPERTIES[name].check(Case("gpt2", request, "approximate"), tmp_path)
