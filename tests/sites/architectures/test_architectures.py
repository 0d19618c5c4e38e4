"""Every architecture on a tiny model of its family: what a new one has to pass, without a test of its own.

tests/contracts/test_table.py goes deeper, on nine families; tests/support/proof.py says what is measured here. Shift
and active are measured on every class that owns a table; the rest on a fixed sample of them (tests/sweeps/positions.py
does all).
"""

from __future__ import annotations

import re

import proof
import pytest
from proof import DIFFERENT, EXACT, HOMES, SAME, STACKS
from sampled import sampled
from torch import nn

from hfpatch.runtime.patch_errors import PatchError
from hfpatch.runtime.qk_layouts import Projections
from hfpatch.sites import stacks
from hfpatch.sites.architectures.architecture import Stack
from hfpatch.sites.stacks import find_stacks

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


@pytest.mark.sample(3)
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


@pytest.mark.sample(3)
@pytest.mark.parametrize("owner", sampled(TEXTS, SAMPLE))
def test_text_of_four_times_the_old_length(owner: str) -> None:
    if proof.longer(owner) is None:
        pytest.skip("the stack has no text")


@pytest.mark.sample(2)
@pytest.mark.parametrize("model_type", sampled(TYPES, SAMPLE))
def test_saved_and_loaded(model_type: str) -> None:
    assert proof.saved(model_type) == 0


GENERATING = [name for name in sampled(TYPES, 5 * SAMPLE) if proof.decodes(name)]  # asking all takes seconds


@pytest.mark.sample(3)
@pytest.mark.parametrize("model_type", sampled(GENERATING, SAMPLE))
def test_decoding_with_a_cache_equals_decoding_without(model_type: str) -> None:
    change = proof.cached(model_type)
    if change is None:
        pytest.skip("unpatched, it decodes otherwise with a cache itself")
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


# --- no second table is left in ---------------------------------------------------------------------------------------

POSITIONS = re.compile(
    r"(^|[._])(pos|position|positional|time|temporal|row|col|column)[a-z]*_?(pos\w*)?_?(emb|enc|table)"
)
KNOWN = re.compile(
    r"(pre|post)_tile_positional_embedding"  # tells an image's tiles apart, not patches (Mllama)
    r"|[xyhw]_position_embeddings"  # boxes on a page, which are inputs (LayoutLM)
    r"|(entity|visual)_embeddings\.position_embeddings"  # of entities (LUKE); unused (TVP)
    r"|visual_position_embeddings"  # of arguments that are refused (VisualBERT)
)
NEVER_DECODING = sorted({HOMES[owner] for owner in OWNERS if not STACKS[owner].causal and STACKS[owner].cache is None})


def left_in(model_type: str, claimed: bool = True) -> list[str]:
    """Parameters below the stacks' owners that look like tables and aren't the row's."""
    model, _ = proof.tiny(model_type)
    found = find_stacks(model)
    tables = [f"{item.name}.{table}".strip(".") for item in found for table in (item.stack.table, *item.stack.others)]
    inside = [name for name, _ in model.named_parameters() if any(_within(name, item.name) for item in found)]
    return [
        name
        for name in inside
        if POSITIONS.search(name)
        and not KNOWN.search(name)
        and not (claimed and any(_within(name, table) for table in tables))
    ]


def _within(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")


@pytest.mark.sample(12)
@pytest.mark.parametrize("model_type", NEVER_DECODING)
def test_no_table_is_left_in(model_type: str) -> None:
    assert left_in(model_type) == []


def test_control_of_tables_left_in() -> None:
    assert left_in("timesformer", claimed=False) == ["embeddings.position_embeddings", "embeddings.time_embeddings"]
    assert len(left_in("yolos", claimed=False)) == 2
