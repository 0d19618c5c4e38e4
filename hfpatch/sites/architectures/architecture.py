"""Architectures: where a family keeps its positions, and the edits that remove them. Data only.

A family is one row in the table `FAMILIES` of the file for its kind (decoders.py, encoders.py, vision.py, ...):

    family("bert", "google-bert/bert-base-uncased", BertModel=BERT),

Its columns are transformers' `model_type`, a checkpoint on the Hub, and each class that owns positions with its build.
A build is a `Stack` that has no owner yet, and stands above the table. Most families are built as another one is; where
one differs, its row says in what: `LukeModel=replace(ROBERTA, states="word_hidden_states")`.
tests/sites/architectures/test_architectures.py proves each row.

Classes are named by their names, so that a row imports nothing of transformers and serves every head of the family
and every composite model that contains one of its stacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...runtime.attention import Window
from ...runtime.edits import LENS_SLOT, Call
from ...runtime.grid import Grid
from ...runtime.length_lenses import LengthLimit
from ...runtime.patch_errors import PatchError
from ...runtime.qk_layouts import Projections

Q_K_PROJ = Projections("q_proj", "k_proj")
QUERY_KEY = Projections("query", "key")

MEAN_ROW = Call.of("ConstantPositions")  # in the place of a table
MEAN_BY_TOKEN = Call.of("ConstantPositions", by_token=True)  # where the host needs (B, T, d), and not one row for all
# modules that compute positions, or rows of a table of biases, and what they return instead
ZEROS, INPUT, NOTHING, ZERO_ROWS = (Call.of("NoPositions", kind) for kind in ("zeros", "input", "nothing", "rows"))


@dataclass(frozen=True)
class Stack:
    """One class that owns positions, the self-attentions that they reach, and the edits that take them out.

    Positions are a table that is added to the stream; in the stacks of biases.py they are biases on attention scores,
    or rotations by the attentions' own tables. Paths are relative to the owner. Globs are those of edits: `*` stands
    for one number, and several are joined by " | ".

    Attributes:
        owner: class name of the owner, "" in a build; for a class that isn't transformers' own, with its file:
            "modeling_my.MyModel".
        table: path of the table: a module, a Parameter or a plain tensor, or a module that computes positions. For
            biases, their name in plans.
        attention: glob of the self-attention modules. Cross-attention must not match.
        projections: how q and k leave the attention's input; None if the host turns them itself once the biases are
            gone.
        removal: (place, value) of the edits that take the positions out. A place is a glob of modules with a child,
            Parameter, attribute or lens; the value is what an `Edit` assigns there. Places that an instance doesn't
            have are left out, and a table that isn't named here leaves its mean row.
        in_attention: the same for edits of each attention that changes, at places relative to it.
        present: glob of places: an instance has these positions if one of the places is set. By default the table; ""
            if all instances have them.
        requires: (place, value, why): what must be so; "why" ends the error's sentence, None if it is a setting of the
            model.
        reserved_rows: rows at the table's start that hold no position (BART's and OPT's offset of 2).
        head_dim: attribute of the attention that holds the channels per head, or two attributes as in "embed_dim /
            num_heads", or as in "/ num_heads" the number of heads alone.
        cache: None for stacks that never decode. A key-value cache is found by its type, under any name.
        layer_index: attribute of the attention that holds its index in the cache.
        hands_on: whether the host hands its `position_ids` on to the attentions by itself; for a grid, keyword
            arguments that it doesn't know. Otherwise hfpatch hands positions on.
        other_tokens: where the tokens are that `position_ids` leave out, "before" or "after" the others; None if all
            count.
        position_ids: whether `position_ids` of the shape (1,) are the position of one token, as others are.
        window: the attention's square causal mask buffer of the old maximum length, None if it has none.
        lengths: attributes of the owner, or of modules around it, that hold the old maximum length as a limit.
        causal: whether a token attends to earlier tokens alone, so that order shows without positions.
        config_length: attribute of the owner's config that holds the table's length, or that scaling starts from.
        as_long_as_tables: attribute of the config with the number of distances; below 1 it is the number of positions.
        states: name of the attention's argument with the hidden states, (T, d), (B, T, d) or (B, rows, columns, d).
        time: axis of the tokens in them: 0 for (T, B, d), 2 for (B, d, T).
        rotary_dim: attribute of the attention with the channels that it turns by itself; None for whole heads.
        grid: where the patches of an image or video stand among the tokens; None for text and sound.
        older: (field, value) of this stack that differ if an older version of transformers built the class.

    Raises:
        PatchError: a `*` in a glob stands for part of a name.

    Examples:
        >>> from hfpatch.extend import Projections, Stack
        >>> stack = Stack("modeling_mini.MiniModel", "positions", "layers.*.attention", Projections("query", "key"))
        >>> stack.table, stack.reserved_rows
        ('positions', 0)
    """

    owner: str
    table: str
    attention: str
    projections: Any  # Projections | Fused | None
    removal: tuple[tuple[str, Any], ...] = ()
    in_attention: tuple[tuple[str, Any], ...] = ()
    present: str | None = None
    requires: tuple[tuple[str, Any, str | None], ...] = ()
    reserved_rows: int = 0
    head_dim: str = "head_dim"
    cache: str | None = "past_key_values"
    layer_index: str = "layer_idx"
    hands_on: bool = False
    other_tokens: str | None = None
    position_ids: bool = True
    window: Window | None = None
    lengths: tuple[str, ...] = ()
    causal: bool = False
    config_length: str = "max_position_embeddings"
    as_long_as_tables: str | None = None
    states: str = "hidden_states"
    time: int = 1
    rotary_dim: str | None = None
    grid: Grid | None = None
    older: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for glob in (self.attention, self.present or "", *(place for place, _ in self.removal)):
            if any("*" in piece and piece != "*" for piece in re.split(r"\.| \| ", glob)):
                raise PatchError(
                    f"{self.owner or 'a stack'} has the glob {glob!r}: `*` stands for one number, not "
                    "for part of a name. Write each name, joined by ' | '."
                )

    @property
    def others(self) -> tuple[str, ...]:
        """Further tables (of time, say) that go with the first."""
        return tuple(place for place, value in self.removal if isinstance(value, Call) and place != self.table)

    @property
    def computes(self) -> bool:
        """Whether the table is a module that computes positions from hidden states, of any length."""
        answer = dict(self.removal).get(self.table)
        return isinstance(answer, Call) and answer.name == "NoPositions"

    @property
    def limits(self) -> tuple[tuple[str, LengthLimit], ...]:
        """(path, lens) of modules that refuse or cut inputs beyond the old maximum length; "" is the owner."""
        found = [(place, lens) for place, lens in self.removal if isinstance(lens, LengthLimit)]
        return tuple((place.removesuffix(LENS_SLOT).rstrip("."), lens) for place, lens in found)


build = partial(Stack, "")  # which has no owner yet


@dataclass(frozen=True)
class Architecture:
    """A model family whose positions can be changed by position schemes.

    Attributes:
        model_type: transformers' name of the family.
        stacks: its position-owning classes.
        example: a checkpoint on the Hub, for documentation.

    Examples:
        >>> from hfpatch.extend import ARCHITECTURES, Architecture
        >>> mini = Architecture("mini", ARCHITECTURES["gpt2"].stacks, example="me/mini")
        >>> mini.stacks[0].attention
        'h.*.attn'
    """

    model_type: str
    stacks: tuple[Stack, ...]
    example: str


def family(model_type: str, example: str, **builds: Stack) -> Architecture:
    """A row of a table: the stacks of a family are those builds, each owned by the class that it is listed under."""
    return Architecture(model_type, tuple(with_owners(builds).values()), example)


def with_owners(builds: Mapping[str, Stack]) -> dict[str, Stack]:
    """Each build with the class that it is listed under as its owner."""
    return {owner: replace(build, owner=owner) for owner, build in builds.items()}
