"""A mapping of globs to schemes: one request, in which the first glob that matches a module counts."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from sampled import slow_but
from tiny_models import changes, difference, fingerprint, norms_of, patch, reload, same_bits, tiny, without_outcomes
from torch import nn
from transformers import PreTrainedModel

from hfpatch.errors import NoMatchError, NothingToPatchError, OptionError, UnknownNameError
from hfpatch.patch import outcomes, repair_report
from hfpatch.plan import plan_patch
from hfpatch.runtime.norms import DynamicTanh, RMSNorm
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.runtime.rotary import RotaryEmbedding
from hfpatch.schemes.norm_schemes import DyT
from hfpatch.schemes.request import Record

HALVES = {"*.h.0.*": "dyt:alpha=0.4", "*": "rms"}
LM = "AutoModelForCausalLM"
LONGER = "learned:max_positions=128"

MAPPINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "rms beside dyt": ("gpt2", {"norm": HALVES}),
    "two that centre": ("gpt2", {"norm": {"*.h.0.*": "rms", "*.ln_f": None, "*": "rms"}}),
    "an object, and keep": ("opt", {"norm": {"*.layers.0.*": DyT(0.7), "*.final_*": "keep", "*": "derf"}}),
    "post-norm": ("bert", {"norm": {"*.layer.0.*": "dyt", "*": "derf"}}),
    "folded first": ("gpt2", {"norm": {"*.h.0.*": "dyt", "*": "folded"}}),
    "with only= and keep=": ("gpt2", {"norm": HALVES, "only": "*ln_[12f]", "keep": "*.h.1.ln_1"}),
    "stacks": ("bart", {"pos": {"encoder.*": "rope", "decoder.*": "alibi"}}),
    "lengths of two stacks": (
        "whisper",
        {"pos": {"*decoder.*": "learned:max_positions=128", "*encoder.*": "nope"}},
    ),
    "attentions of one stack": ("gpt2", {"pos": {"*.h.0.*": "rope", "*": "alibi"}}),
    "positions beside none": ("gpt2", {"pos": {"*.h.0.*": "rope", "*": "nope"}}),
    "one norm by two globs": ("bert", {"norm": {"*.layer.0.*": "rms", "*": "rms"}}),
    "MLPs": ("gpt2", {"mlp": {"*.h.0.*": "geglu", "*": None}}),
    "MLPs anew": ("gpt2", {"mlp": {"*.h.0.*": "swiglu", "*": "geglu:d_ff=24"}, "init": "reset"}),
    "all kinds": ("gpt2", {"norm": HALVES, "pos": {"*.h.0.*": "rope", "*": "alibi"}, "mlp": {"*.h.1.*": "geglu"}}),
}


def one_after_another(model: PreTrainedModel, record: Record) -> PreTrainedModel:
    """The model patched by each request of a record in its turn."""
    for kind, part in record.requests:
        choice = {"only": part.only or None, "keep": part.keep, "init": part.init}
        torch.manual_seed(1)
        model = patch(model, **{kind: part.as_requested.scheme}, **choice)
    return model


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MAPPINGS)
def test_a_mapping_is_its_patches_one_after_another(name: str, tmp_path: Path) -> None:
    """Bit for bit: the same weights, config and record. Saved and opened it is the same, and twice changes nothing."""
    family, request = MAPPINGS[name]
    together, plain = tiny(family, seed=3), tiny(family, seed=3)
    torch.manual_seed(1)
    patch(together, **request)
    record = Record.of(together.config)
    apart = one_after_another(tiny(family, seed=3), record)
    assert without_outcomes(together.config.hfpatch) == without_outcomes(apart.config.hfpatch)
    assert {**together.config.to_dict(), "hfpatch": 0} == {**apart.config.to_dict(), "hfpatch": 0}
    states = together.state_dict(), apart.state_dict()
    assert states[0].keys() == states[1].keys()
    if request.get("init") != "reset":  # fresh weights are drawn at random, in another order
        assert all(same_bits(states[0][name], states[1][name]) for name in states[0])
        assert difference(together, apart) == 0
    assert [*map(type, together.modules())] != [
        *map(type, plain.modules())
    ]  # a control: there is a patch to be equal in
    before = fingerprint(together)
    patch(together, **request)
    assert changes(before, fingerprint(together)) == []
    assert difference(reload(together, tmp_path), together) == 0


# by glob, each with what may stand beside it
REMOVING = ("rope", "rope:theta=500", "alibi", "nope")
POSITION_PAIRS = [*itertools.product(REMOVING, repeat=2), *((one, one) for one in ("sinusoidal", LONGER))]
NORMS = ("rms", "dyt", "derf", "layer", "folded")
NORM_PAIRS = [*itertools.product(NORMS, repeat=2), ("deepnorm", "deepnorm"), ("layer:bias=false", "rms")]
QUICK = [("rope", "nope"), ("nope", "alibi"), ("nope", "nope"), (LONGER, LONGER), ("rms", "rms"), ("deepnorm",) * 2]
PAIRS = [("pos", pair) for pair in POSITION_PAIRS] + [("norm", pair) for pair in NORM_PAIRS]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("kind", "pair"), slow_but(PAIRS, [one for one in PAIRS if one[1] in QUICK]), ids=str)
def test_a_change_that_serves_two_schemes_counts_for_both(kind: str, pair: tuple[str, str]) -> None:
    """Each loses what it would lose alone, and the record's requests one after another are the same model."""
    model = patch(tiny("gpt2"), **{kind: dict(zip(("*.h.0.*", "*"), pair, strict=True))})
    record = Record.of(model.config)
    for _, part in record.requests:
        request = {kind: part.as_requested.scheme, "only": part.only or None, "keep": part.keep, "init": part.init}
        assert part.outcome is not None
        assert part.outcome.lost == "; ".join(plan_patch(tiny("gpt2"), **request).losses())
        assert part.outcome.verdict == ("approximate" if part.outcome.lost else "exact")
    again = one_after_another(tiny("gpt2"), record)
    assert {**model.config.to_dict(), "hfpatch": 0} == {**again.config.to_dict(), "hfpatch": 0}
    states = model.state_dict(), again.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(same_bits(states[0][name], states[1][name]) for name in states[0])
    assert difference(model, again) == 0


def test_what_two_schemes_share_loses_what_both_lose() -> None:
    """Without positions a BERT can't tell the order of its tokens; with rotations in one layer it can."""
    for scheme, order in (("rope", False), ("nope", True)):
        model = patch(tiny("bert"), pos={"*.layer.0.*": scheme, "*": "nope"})
        lost = [part.outcome.lost for part in Record.of(model.config).pos]
        assert ["absolute positions are removed" in one for one in lost] == [True, True]
        assert ["can't tell the order" in one for one in lost] == [order, order]


def test_the_order_of_globs_counts() -> None:
    """A control of the test above: another order of the globs is another model."""
    request = {"*.ln_1": "dyt", "*.h.0.*": "rms"}
    one, other = (patch(tiny("gpt2"), norm=by) for by in (request, dict(reversed(request.items()))))
    assert norms_of(one, DynamicTanh) == ["h.0.ln_1", "h.1.ln_1"]
    assert norms_of(other, DynamicTanh) == ["h.1.ln_1"]
    assert norms_of(one, RMSNorm) == ["h.0.ln_2"]
    assert norms_of(one, nn.LayerNorm) == ["h.1.ln_2", "ln_f"]


def test_every_module_has_one_row() -> None:
    """What no glob matches is kept, with the reason; the exact swap is exact beside one that isn't."""
    plan = plan_patch(tiny("gpt2"), norm={"*.h.0.*": "dyt", "*.ln_f": None, "*.h.1.ln_1": "rms"})
    rows = {row.module: row for row in plan.rows if row.kind == "norm"}
    assert len(rows) == sum(row.kind == "norm" for row in plan.rows) == 5
    assert rows["h.0.ln_1"].becomes == rows["h.0.ln_2"].becomes == "DynamicTanh(32)"
    assert (rows["h.1.ln_1"].becomes, rows["h.1.ln_1"].expected) == ("RMSNorm(32)", "exact")
    assert (rows["h.1.ln_2"].becomes, rows["h.1.ln_2"].reason) == (None, "no glob matches it")
    assert (rows["ln_f"].becomes, rows["ln_f"].reason) == (None, "keep")


def test_each_scheme_has_its_outcome() -> None:
    model = patch(tiny("gpt2", LM), norm=HALVES, mlp={"*.h.0.*": "swiglu"})
    found = outcomes(model)
    assert list(found) == ["norm='rms', keep=['*.h.0.*']", "norm='dyt:alpha=0.4', only=['*.h.0.*']", *list(found)[2:]]
    assert [text.split(":")[0].split()[0] for text in found.values()] == ["exact", "approximate", "approximate"]


def test_one_repair_of_all(tmp_path: Path) -> None:
    """The last norm stays with "fixed", as "*" doesn't name it; norms are folded where the mapping says so."""
    model = tiny("gpt2", LM, seed=1)
    request = {"*.h.0.ln_1": "none", "*.h.0.*": "dyt", "*": "fixed"}
    patch(model, norm=request, calibration=[{"input_ids": torch.randint(3, 90, (6, 12))}])
    report = repair_report(model)
    assert report is not None
    assert report.after < report.before
    kinds = {name: type(module).__name__ for name, module in model.transformer.named_modules() if "ln_" in name}
    assert kinds == {
        "h.0.ln_1": "NoNorm",
        "h.0.ln_2": "DynamicTanh",
        "h.1.ln_1": "FixedNorm",
        "h.1.ln_2": "FixedNorm",
        "ln_f": "LayerNorm",
    }
    judged = [part.outcome for part in Record.of(model.config).norm]
    assert len(judged) == 3
    assert all(outcome is not None and outcome.by_repair for outcome in judged)
    assert difference(reload(model, tmp_path, LM), model) == 0
    named = plan_patch(tiny("gpt2"), norm={"ln_f": "fixed", "*": "fixed"}, init="reset")
    assert next(row for row in named.rows if row.module == "ln_f").becomes == "FixedNorm(32)"


def test_folds_are_checked_beside_what_isnt_exact() -> None:
    """A control: a fold that changes the function is seen although another scheme changes it too."""
    model = patch(tiny("gpt2", LM), norm={"*.h.0.*": "folded", "*": "dyt"})
    assert next(iter(outcomes(model).values())).startswith("exact: outputs differ by")
    assert same_bits(model.transformer.h[0].ln_1.weight, None)


POSITIONS = {"*.wpe": "alibi", "*": "rope"}


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        ({"norm": {"*.hh.*": "dyt", "*": "rms"}}, NoMatchError, r"norm=\{'\*.hh.\*': 'dyt'\} matches none of the 5"),
        ({"norm": {"*.l_1": None, "*": "rms"}}, NoMatchError, r"l_1': None\} matches none.*ln_1"),
        ({"norm": {"ln_1": "dyt", "*": "rms"}}, NoMatchError, r"Did you mean '\*.ln_1'"),
        ({"norm": {"*": "rms", "ln_f": "dyt"}}, NoMatchError, "ln_f.*only modules that earlier globs match"),
        ({"norm": {"*": None}}, OptionError, "no change was requested"),
        ({"norm": {}}, OptionError, "no change was requested"),
        ({"norm": {"": "rms"}}, OptionError, "globs over module names"),
        ({"norm": {3: "rms"}}, OptionError, "globs over module names"),
        ({"norm": {"*": "rmsnorm!"}}, UnknownNameError, "rms"),
        ({"norm": {"ln_f": "rms", "*": "rms:mode=parametrize"}}, UnsupportedError, "centre it in different ways"),
        ({"norm": HALVES, "only": "*.ln_9"}, NoMatchError, "only="),
        ({"placement": {"*": "post"}}, OptionError, "a placement is a registered name"),
        ({"pos": {"*.h.0.*": "rope", "*": "learned:max_positions=128"}}, UnsupportedError, "wpe.*in different ways"),
        ({"pos": {"*.h.0.*": "rope", "*.wpe": None}}, UnsupportedError, "goes with modules of an earlier glob"),
        ({"pos": {"*wpe": "alibi", "*": "rope"}}, NothingToPatchError, "alibi.*has nothing to change"),
        ({"norm": {"*.h.*": "dyt", "*": "fixed"}, "init": "reset"}, NothingToPatchError, "fixed"),
    ],
)
def test_globs_without_effect_are_refused(request_: Mapping[str, Any], error: type[Exception], words: str) -> None:
    model = tiny("gpt2")
    before = fingerprint(model)
    with pytest.raises(error, match=words):
        patch(model, **request_)
    with pytest.raises(error, match=words):
        plan_patch(model, **request_)
    assert changes(before, fingerprint(model)) == []


def test_one_setting_for_two_stacks_is_refused() -> None:
    request = {"encoder.*": "learned:max_positions=128", "decoder.*": "learned:max_positions=96"}
    with pytest.raises(UnsupportedError, match=r"config.max_position_embeddings: .* set it to 128 and to 96"):
        plan_patch(tiny("bart"), pos=request)
    request["decoder.*"] = "learned:max_positions=128,method=linear"
    model = patch(tiny("bart"), pos=request)  # a control, which only one request can do: they share the config's length
    assert model.encoder.embed_positions.num_embeddings == model.decoder.embed_positions.num_embeddings == 130


def test_rows_of_two_tables() -> None:
    """Each stack repeats its own rows, also the second time."""
    request = {"encoder.*": "learned:max_positions=128,rows=8", "decoder.*": "learned:max_positions=128,rows=16"}
    model = patch(tiny("bart"), pos=request)
    tables = [
        part.embed_positions.weight.clone() for part in (model.encoder, model.decoder)
    ]  # rows 0 and 1 are padding's
    for table, rows in zip(tables, (8, 16), strict=True):
        assert torch.equal(table[66:], table[2 : 2 + rows].repeat(64 // rows, 1))
    patch(model, pos=request)
    patch(model, pos=dict.fromkeys(request, "learned:max_positions=256"))
    for part, rows in ((model.encoder, 8), (model.decoder, 16)):
        assert torch.equal(
            part.embed_positions.weight[130:], part.embed_positions.weight[2 : 2 + rows].repeat(128 // rows, 1)
        )
    assert [part.scheme.rows for part in Record.of(model.config).pos] == [8, 16, 8, 16]


def test_a_table_stays_where_its_glob_comes_first() -> None:
    model = patch(tiny("gpt2"), pos={"*wpe": None, "*": "rope"})
    assert isinstance(model.wpe, nn.Embedding)
    assert norms_of(model, RotaryEmbedding)


def test_globs_that_must_both_match() -> None:
    """What the record writes for a mapping with only=, a user may write as well."""
    model = patch(tiny("gpt2"), norm="dyt", only="*.h.0.* & *.ln_1")
    assert norms_of(model, DynamicTanh) == ["h.0.ln_1"]
    assert norms_of(patch(tiny("gpt2"), norm={"*.h.0.*": "dyt"}, only="*.ln_1"), DynamicTanh) == ["h.0.ln_1"]
