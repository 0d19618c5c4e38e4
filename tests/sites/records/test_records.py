"""Every architecture record on a tiny model of its family: what a new record has to pass, without a test of its own.

tests/contracts/test_contract.py goes deeper, on nine families; tests/support/proof.py says what is measured here. Shift
and active are measured on every class that owns a table; the rest on a fixed sample of them (tests/sweeps/positions.py
does all).
"""

from __future__ import annotations

import proof
import pytest
from proof import DIFFERENT, EXACT, HOMES, SAME, STACKS
from sampled import sampled
from torch import nn

from hfpatch.runtime.errors import PatchError
from hfpatch.runtime.qk_layouts import Projections
from hfpatch.sites import stacks
from hfpatch.sites.records.record import Stack

OWNERS = proof.here()
TYPES = sorted({HOMES[owner] for owner in OWNERS})
TEXTS = [owner for owner in OWNERS if STACKS[owner].grid is None]  # and a few of sound
SAMPLE = 6


@pytest.mark.slow
@pytest.mark.parametrize("owner", sorted(OWNERS, key=lambda owner: HOMES[owner]))
def test_only_differences_of_positions_count(owner: str) -> None:
    model, inputs = proof.patched(HOMES[owner])
    found = proof.stack_of(model, owner)
    assert proof.reached(model, inputs, found)
    measured = proof.prove_stack(model, inputs, found, each=True)
    assert measured.shift <= SAME
    assert measured.active >= DIFFERENT
    assert not measured.idle


@pytest.mark.parametrize(
    "owner", sampled([owner for owner in TEXTS if not STACKS[owner].causal and owner not in proof.ORDERED], SAMPLE)
)
def test_without_positions_an_encoder_is_blind_to_order(owner: str) -> None:
    """Nothing else tells it where a token stands: no second table, no relative bias was left in."""
    change = proof.blind(owner)
    if change is None:
        pytest.skip("the stack has no text")
    assert change <= EXACT
    assert proof.blind(owner, "rope") >= DIFFERENT


@pytest.mark.parametrize("owner", sampled(TEXTS, SAMPLE))
def test_text_of_four_times_the_old_length(owner: str) -> None:
    if proof.longer(owner) is None:
        pytest.skip("the stack has no text")


@pytest.mark.parametrize("model_type", sampled(TYPES, SAMPLE))
def test_saved_and_loaded(model_type: str) -> None:
    assert proof.saved(model_type) == 0


GENERATING = [name for name in sampled(TYPES, 5 * SAMPLE) if proof.decodes(name)]  # asking all takes seconds


@pytest.mark.parametrize("model_type", sampled(GENERATING, SAMPLE))
def test_decoding_with_a_cache_equals_decoding_without(model_type: str) -> None:
    change = proof.cached(model_type)
    assert change is not None
    assert change <= SAME


@pytest.mark.parametrize(("path", "names"), [("", ("q_proj", "k_proj")), (".attention", ("query", "key"))])
def test_a_class_as_older_versions_of_transformers_built_it(path: str, names: tuple[str, str]) -> None:
    """DINOv2's attention was one level deeper in 5.17, under other names."""
    owner, place = nn.Module(), f"encoder.layer.0.attention{path}"
    here = owner
    for name in place.split("."):
        here.add_module(name, nn.Module())
        here = here.get_submodule(name)
    for name in names:
        here.add_module(name, nn.Linear(4, 4))
    stack, attentions = stacks._as_built(owner, STACKS["Dinov2Model"])
    assert list(attentions) == [place]
    assert stack.projections == Projections(*names)
    assert stack.owner == "Dinov2Model"
    assert stack.grid == STACKS["Dinov2Model"].grid


def test_a_star_is_one_number() -> None:
    with pytest.raises(PatchError, match="one number"):
        Stack("MyModel", "positions", "layers.*.*attention", None)
    Stack("MyModel", "positions", "layers.*.attention | layers.*.temporal_attention", None)
