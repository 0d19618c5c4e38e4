"""No second table is left in: Parameters whose names speak of positions are removed, or known to be something else."""

from __future__ import annotations

import re

import proof
import pytest
from proof import HOMES

from hfpatch.sites.stacks import find_stacks

POSITIONS = re.compile(
    r"(^|[._])(pos|position|positional|time|temporal|row|col|column)[a-z]*_?(pos\w*)?_?(emb|enc|table)"
)
KNOWN = re.compile(
    r"(pre|post)_tile_positional_embedding"  # tells an image's tiles apart, not patches (Mllama)
    r"|[xyhw]_position_embeddings"  # boxes on a page, which are inputs (LayoutLM)
    r"|(entity|visual)_embeddings\.position_embeddings"  # of entities (LUKE); unused (TVP)
    r"|visual_position_embeddings"  # of arguments that are refused (VisualBERT)
)
OURS = sorted(
    {HOMES[owner] for owner in proof.here() if not proof.STACKS[owner].causal and proof.STACKS[owner].cache is None}
)


def left_in(model_type: str, claimed: bool = True) -> list[str]:
    """Parameters below the stacks' owners that look like tables and aren't the record's."""
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


@pytest.mark.parametrize("model_type", OURS)
def test_no_table_is_left_in(model_type: str) -> None:
    assert left_in(model_type) == []


def test_control() -> None:
    assert left_in("timesformer", claimed=False) == ["embeddings.position_embeddings", "embeddings.time_embeddings"]
    assert len(left_in("yolos", claimed=False)) == 2
