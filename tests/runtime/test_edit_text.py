"""Edits: their text, patterns that stand for several places, and what applies them.

Texts that are no edits are refused in checkpoint/test_security.py and test_checkpoint.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import changes, difference, fingerprint, patch, randomise, registered, tiny
from torch import nn
from transformers import AutoConfig, GPT2Model

from hfpatch.core.registry import NORMS
from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.apply import Tree, apply, condense
from hfpatch.runtime.edits import Call, Edit, as_data, register_component
from hfpatch.runtime.norms import RMSNorm
from hfpatch.runtime.patch_errors import CheckpointError, UnsupportedError
from hfpatch.schemes.norm_schemes import Derf, DyT, Norm
from hfpatch.schemes.request import Record


@pytest.mark.parametrize(
    "value",
    [None, True, -3, 1e-12, 'it\'s "quoted" | = \\', (1, (2,)), [], {"a": [1.5, None]}, Call.of("RMSNorm", eps=1e-5)],
    ids=str,
)
def test_values(value: Any) -> None:
    edit = Edit.of("h.0.attn.x", value)
    assert Edit.parse(str(edit)) == edit


def test_a_pattern_stands_for_all_its_places_or_isnt_used() -> None:
    model = tiny("gpt2", n_layer=3)
    every = [Edit.of(f"h.{i}.ln_1", Call.of(RMSNorm, eps=1e-5)) for i in range(3)]
    assert [str(edit) for edit in condense(every, model)] == ["h.*.ln_1 = RMSNorm(eps=1e-05)"]
    assert [edit.at for edit in condense(every[:2], model)] == [("h.0.ln_1", "h.1.ln_1")]
    other = Edit.of("ln_f", Call.of(RMSNorm, eps=1e-5))
    assert [edit.at for edit in condense([*every, other], model)] == [("h.*.ln_1", "ln_f")]


def test_names_are_those_inside_the_base_model() -> None:
    model = tiny("bert", "AutoModelForMaskedLM")
    names = ["bert.embeddings.LayerNorm", "cls.predictions.transform.LayerNorm"]
    (edit,) = condense([Edit.of(name, Call.of(RMSNorm, eps=1e-12)) for name in names], model)
    assert edit.at == ("embeddings.LayerNorm", "<head>.cls.predictions.transform.LayerNorm")
    assert apply([edit], model) == 2
    assert all(isinstance(model.get_submodule(name), RMSNorm) for name in names)
    assert apply([edit], tiny("bert")) == 1  # the head isn't there


def test_a_name_that_the_class_lacks_is_an_error_where_it_was_saved_from() -> None:
    model = tiny("gpt2")
    model.config.architectures = ["GPT2Model"]
    edits = [Edit.of(name, Call.of(RMSNorm, eps=1e-5)) for name in ("h.*.no_such_module.ln", "h.*.no_such_norm")]
    for edit in edits:
        with pytest.raises(CheckpointError, match=rf"has no {re.escape(edit.at[0])}"):
            apply([edit], model, fresh=True)
    with pytest.raises(CheckpointError, match=r"h\.\*\.attn\.no_such_switch"):
        apply([Edit.of("h.*.attn.no_such_switch", False)], model, fresh=True)
    assert apply([Edit.of("h.*.attn.no_such_switch", None)], model, fresh=True) == 0  # dropped by a later patch
    model.config.architectures = ["GPT2LMHeadModel"]
    assert apply(edits, model, fresh=True) == 0


@pytest.mark.parametrize("arguments", ["0", "8, theta=-1.0", "8, pairing='x'", "8, axes=5"])
def test_arguments_that_a_component_refuses(arguments: str) -> None:
    edit = Edit.parse(f"h.*.attn.rotary_emb = RotaryEmbedding({arguments})")
    with pytest.raises(CheckpointError, match=r"RotaryEmbedding\("):
        apply([edit], tiny("gpt2"), fresh=True)


def test_a_later_edit_of_the_same_places_takes_the_place() -> None:
    model = tiny("gpt2")
    for theta in (10.0, 20.0, 30.0):
        patch(model, pos=f"rope:theta={theta}")
    rotations = [str(edit) for edit in Record.of(model.config).edits if "rotary_emb" in edit.at[0]]
    assert rotations == ["h.*.attn.rotary_emb = RotaryEmbedding(8, theta=30.0)"]


def test_components_have_names_of_their_own() -> None:
    class RMSNorm(nn.Module):  # another class of that name
        pass

    with pytest.raises(UnsupportedError, match="RMSNorm"):
        register_component(RMSNorm)
    with pytest.raises(UnsupportedError):
        as_data(torch.zeros(1))


def test_the_places_that_hold_a_module_follow_what_is_replaced() -> None:
    """A child that moves into its successor or is shared, a module that is wrapped, one that goes."""
    shared = nn.GELU()
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Sequential(shared, nn.Linear(2, 2))) for _ in "123"))
    model.append(model[0])  # a block that is used twice
    model.append(nn.Sequential(shared))
    tree = Tree(model)

    def replace(owner: Any, name: str, new: nn.Module | None) -> None:
        old, places = owner._modules[name], tree.holders(owner, name)
        for parent, child in places:
            if new is None:
                del parent._modules[child]
            else:
                parent._modules[child] = new
        tree.update_holders(old, new)
        for parent in model.modules():
            for child in parent._modules:
                assert set(tree.holders(parent, child)) == set(Tree(model).holders(parent, child))

    replace(model[0], "1", nn.Sequential(model[0][1][1]))  # its last child moved, the shared one isn't in it any more
    replace(model, "0", nn.Sequential(model[0], shared))  # wrapped, at both places
    replace(model[1], "1", None)
    replace(model[2][1], "0", nn.ReLU())  # the shared one, everywhere


def test_replacing_modules_with_children_takes_steps_in_proportion_to_the_blocks() -> None:
    steps = 0

    class Children(dict):
        def items(self) -> Any:
            nonlocal steps
            steps += 1
            return super().items()

    counts = []
    for blocks in (4, 8, 16):
        model = tiny("gpt2", n_layer=blocks)
        edits = plan_patch(model, mlp="swiglu").edits  # a projection becomes a pair of them
        for module in model.modules():
            vars(module)["_modules"] = Children(module._modules)
        steps = 0
        assert apply(edits, model) == 2 * blocks
        counts.append(steps)
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0]) > 0, counts


# What is written is bounded as what is read is


class Named(GPT2Model):
    """One more norm, whose name is any that torch takes."""

    name = "a-b"

    def __init__(self, config: Any):
        super().__init__(config)
        self.more = nn.ModuleDict({self.name: nn.LayerNorm(config.n_embd)})
        self.post_init()

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, **kwargs)
        output.last_hidden_state = self.more[self.name](output.last_hidden_state)
        return output


def named(name: str) -> Any:
    kind = type("Named", (Named,), {"name": name})
    return randomise(kind(tiny("gpt2").config))


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", ["a-b", "a->b", "a/b:c", "1st", "straße", "+", "x,y", "a<b>", "%#~&;!?"])
def test_names_that_torch_allows_are_read(name: str, tmp_path: Path) -> None:
    model = patch(named(name), norm="dyt")
    assert any(name in edit for edit in model.config.hfpatch["edits"])
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, check_fingerprint="full")
    assert type(again.more[name]).__name__ == "DynamicTanh"
    assert difference(model, again) == 0


UNREADABLE = ["a b", "a = b", "a | b", "x()", "x[0]", "a\nb", "\x1b[31m", "__x", "@lens2", "é" * 20_000]


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", UNREADABLE)
def test_names_that_cant_be_read_are_refused_before_anything_changes(name: str) -> None:
    model = named(name)
    before = fingerprint(model)
    for call in (plan_patch, patch_model):
        with pytest.raises(UnsupportedError, match="couldn't be opened again") as caught:
            call(model, norm="dyt")
        assert len(str(caught.value)) < 1_000
    assert not changes(before, fingerprint(model))
    patch_model(model, norm="dyt", keep=["more.*"], init="reset")  # control: the rest of it can


def test_too_many_edits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2")
    monkeypatch.setattr("hfpatch.runtime.edits._MAX_EDITS", 3)
    with pytest.raises(UnsupportedError, match="aren't a list of at most 3 strings"):
        patch_model(model, norm="dyt", pos="rope")
    assert not hasattr(model.config, "hfpatch")
    patch(model, norm="dyt")  # control


@dataclass(frozen=True)
class Worded(DyT):
    """A norm with an option that is any text."""

    words: str = ""


@pytest.mark.parametrize("words", ["a,alpha=2", 'say "x", alpha=3', "a\\", ",alpha=", "plain", '"', ""])
def test_an_option_of_any_text_is_read(words: str, tmp_path: Path) -> None:
    with registered(NORMS, "worded", Worded):
        scheme = Worded(0.25, words=words)
        assert Norm.resolve(str(scheme)) == scheme
        model = patch(tiny("gpt2"), norm=scheme)
        model.save_pretrained(tmp_path)
        assert Record.of(AutoConfig.from_pretrained(tmp_path)).norm[-1].scheme == scheme
    assert Norm.resolve("derf:alpha=0.5, s=0.25") == Derf(0.5, 0.25)  # control: text that a user writes
