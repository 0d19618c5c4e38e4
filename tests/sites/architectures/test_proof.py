"""Controls of the proof: an architecture with a fault, or a mechanism with one, must not pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import proof
import pytest
import torch
from proof import DIFFERENT, EXACT, SAME, Stack
from rope_proof import Proof, difference, outputs

from hfpatch.core.registry import ARCHITECTURES
from hfpatch.planners import position_swaps as swap_positions
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.runtime.qk_layouts import Fused, Projections, WindowProjections
from hfpatch.sites.architectures.architecture import Architecture


@contextmanager
def changed(owner: str, **fields: Any) -> Iterator[None]:
    """The architecture of a class with other fields; models patched before don't count."""
    name = "~changed"  # behind all names, so that it comes before the one that it stands for
    stack = dataclasses.replace(proof.STACKS[owner], **fields)
    ARCHITECTURES.register(name)(Architecture(name, (stack,), ""))
    proof.patched.cache_clear()
    try:
        yield
    finally:
        ARCHITECTURES.unregister(name)
        proof.patched.cache_clear()


def measured(owner: str, **fields: Any) -> Proof:
    with changed(owner, **fields):
        model, inputs = proof.patched(proof.HOMES[owner])
        return proof.prove_stack(model, inputs, proof.stack_of(model, owner), each=True)


def stack(owner: str) -> Stack:
    return proof.STACKS[owner]


class TestFaultsAreSeen:
    @pytest.mark.sample(3)
    @pytest.mark.parametrize(
        ("owner", "wrong"),
        [
            ("BertModel", Projections("query", "value")),  # values in the place of keys
            ("BertModel", Projections("query", "query")),  # queries alone
            ("BrosModel", Projections("query", "key")),  # keys beside the keys that don't turn
            ("DebertaModel", Fused("in_proj", query_bias="q_bias")),  # another order of the channels
            ("DebertaModel", Fused("in_proj", by_head=True)),  # a bias on queries that is added after the rotation
            ("GPTBigCodeModel", Fused("c_attn", by_head=True)),  # heads that share no keys
        ],
    )
    def test_wrong_projections(self, owner: str, wrong: Any) -> None:
        assert measured(owner, projections=stack(owner).projections).holds
        assert measured(owner, projections=wrong).shift > DIFFERENT

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("owner", ["FSMTEncoder", "LEDEncoder", "LongformerModel"])
    def test_rotation_over_the_batch(self, owner: str) -> None:
        """Each text would be at one position: nothing distinguishes its tokens."""
        wrong = dataclasses.replace(stack(owner).projections, time=1)
        with pytest.raises(UnsupportedError, match=r"(doesn't|must) match the (broadcast shape|size) .*left unchanged"):
            measured(owner, projections=wrong)
        if not isinstance(wrong, WindowProjections):
            assert measured(owner, projections=stack(owner).projections).holds
            assert not measured(owner, projections=wrong, time=1).holds

    def test_an_attention_is_left_out(self) -> None:
        """The layer that no position reaches: others hide it from shift and active."""
        assert measured("BertModel", attention="encoder.layer.0.attention.self").holds
        model, inputs = proof.patched("bert")
        found = proof.stack_of(model, "BertModel")
        found.attentions["encoder.layer.1.attention.self"]._modules.pop("rotary_emb")
        try:
            assert proof.prove_stack(model, inputs, found, each=True).idle == ("encoder.layer.1.attention.self",)
        finally:
            proof.patched.cache_clear()

    @pytest.mark.parametrize("owner", ["MPNetModel", "DebertaModel", "DebertaV2Model"])
    def test_a_relative_bias_that_stays(self, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("deberta", "deberta-v2"):
            monkeypatch.setitem(proof.SETTINGS, name, {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]})
        with changed(owner):
            assert proof.blind(owner) <= EXACT
        monkeypatch.setattr(swap_positions, "removal", lambda model, item: ((), []))
        with changed(owner):
            assert proof.blind(owner) >= DIFFERENT

    def test_a_table_that_stays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another one, of token types, is removed in its place. It ends, which the patch sees by itself."""
        wrong: dict[str, Any] = {"table": "embeddings.token_type_embeddings", "removal": ()}
        with changed("BertModel", **wrong), pytest.raises(UnsupportedError, match="on longer inputs than before"):
            proof.blind("BertModel")
        monkeypatch.setattr("hfpatch.outcome.require_runs_in_full", lambda *args: True)
        with changed("BertModel"):
            assert proof.blind("BertModel") <= EXACT
        with changed("BertModel", **wrong):
            assert proof.blind("BertModel") >= DIFFERENT

    @pytest.mark.parametrize("owner", ["GPTBigCodeModel", "XGLMModel"])
    def test_positions_that_start_anew_at_each_step(self, owner: str) -> None:
        with changed(owner, cache=None, hands_on=True):  # nor are the owner's positions handed down
            assert proof.cached(proof.HOMES[owner]) >= DIFFERENT


@pytest.mark.parametrize("owner", ["LongformerModel", "LEDEncoder"])
def test_tokens_that_attend_to_all_are_rotated_where_they_stand(owner: str) -> None:
    """They have projections of their own, in a line of their own. With the same weights, and all of them marked, that
    is what a window that is wider than the text gives.
    """

    def change_by_marks(marks: torch.Tensor) -> float:
        model, inputs = proof.patched(proof.HOMES[owner])
        found = proof.stack_of(model, owner)
        with torch.no_grad():
            for attention in found.attentions.values():
                for name in ("query", "key", "value"):
                    getattr(attention, f"{name}_global").load_state_dict(getattr(attention, name).state_dict())
        given = {**inputs, "global_attention_mask": marks}
        rows = marks.bool()  # of others, scores are in another order and share of the softmax
        after, before = (proof._of_tokens(outputs(model, one, found), found, 12) for one in (given, inputs))
        return difference({n: v[rows] for n, v in after.items()}, {n: v[rows] for n, v in before.items()})

    everywhere = torch.ones(2, 12, dtype=torch.long)
    with changed(owner):
        assert change_by_marks(everywhere) <= SAME
    plain = Projections("query", "key", time=0)
    with changed(owner, projections=plain):
        assert change_by_marks(everywhere) >= DIFFERENT
    some = torch.zeros_like(everywhere)
    some[0, [0, 5]], some[1, 3] = 1, 1  # not as many in each text
    model, inputs = proof.patched(proof.HOMES[owner])
    found = proof.stack_of(model, owner)
    assert proof.prove_stack(model, {**inputs, "global_attention_mask": some}, found).holds


def test_a_change_that_is_not_a_number_is_no_small_one() -> None:
    a = {"x": torch.tensor([1.0, float("nan")])}
    assert difference(a, a) == float("inf")
    assert difference({"x": torch.ones(2)}, {"y": torch.ones(2)}) == float("inf")
    assert difference({"x": torch.ones(2)}, {"x": torch.ones(3)}) == float("inf")
    assert difference({"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([1.0, float("-inf")])}) == float("inf")
