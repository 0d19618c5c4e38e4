"""The form of architecture records: where a family keeps what a position patch touches. Data, no behaviour.

A family is one row in the table `FAMILIES` of the file for its kind (decoders.py, encoders.py, vision.py, ...):

    family("bert", {"BertModel": BERT}, "google-bert/bert-base-uncased"),

Its columns are transformers' `model_type`, each class that owns a table of positions with its build, and a checkpoint
on the Hub. A build is a `Stack` that has no owner yet, and stands above the table. Most families are built as another
one is; where one differs, its row says in what: `{"LukeModel": replace(ROBERTA, states="word_hidden_states")}`.
`tools/infer_record.py` finds a record for a model by running it, and tests/positions/test_records.py proves each row.

Classes are named by their names, so that a record imports nothing of transformers and serves every head of the family
and every composite model that contains one of its stacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...runtime.attention import Window
from ...runtime.grid import Grid
from ...runtime.length_lenses import LengthLimit
from ...runtime.qk_layouts import Fused, Projections

Q_K_PROJ = Projections("q_proj", "k_proj")
QUERY_KEY = Projections("query", "key")


@dataclass(frozen=True)
class Stack:
    """One class that owns a table of absolute positions, and the self-attentions that it feeds.

    Paths are relative to the owner; `attention` is a glob over them.

    Attributes:
        owner: class name of the owner, "" in a build; of a class that isn't transformers' own with its file:
            "modeling_my.MyModel".
        table: path of the table: a module, a Parameter or a plain tensor, or a module that computes positions.
        attention: glob of the self-attention modules, or several joined by " | ". Cross-attention must not match.
        projections: how q and k leave the attention's input.
        reserved_rows: rows at the table's start that hold no position (BART's and OPT's offset of 2).
        head_dim: attribute of the attention that holds the channels per head, or two as in "embed_dim / num_heads", or
            as in "/ num_heads" the number of heads alone.
        cache: name of the forward's cache argument, None for stacks that never decode.
        layer_index: attribute of the attention that holds its index in the cache.
        position_ids: name of the argument with the tokens' positions, None where it isn't to be relied on.
        window: the attention's square causal mask buffer of the old maximum length, None where it has none.
        limits: (path, limit) of modules that refuse or cut inputs beyond the old maximum length; "" is the owner.
        lengths: attributes of the owner, or of modules around it, that hold the old maximum length as a limit.
        causal: whether a token attends to earlier ones alone, so that order shows without positions.
        config_length: attribute of the owner's config that holds the table's length.
        others: paths of further tables (of time, say) that are removed with the first.
        answers: (path, answer) of tables that compute positions from hidden states: "zeros", "input" or "nothing" comes
            in place of their output, see `constants.NoPositions`.
        states: name of the attention's argument with the hidden states, (T, d), (B, T, d) or (B, rows, columns, d).
        time: axis of the tokens in them: 0 for (T, B, d), 2 for (B, d, T).
        biases: arguments or attributes of the attention that bring it a relative bias; it sees 0 in their place.
        by_token: whether the host needs a row for each token (B, T, d) from its table, and not one for all.
        switched_off: attributes of the attention that make it add relative biases; they become False.
        unused: Parameters of the attention that are removed, since nothing reads them after that.
        switches: (path, attribute) of other modules, the attribute makes them add relative biases; it becomes False.
        unread: paths of modules that are removed with the table, since nothing reads them after that.
        returns_more: how many values the table's module returns besides the rows; None stands for each after the patch.
        requires: (attribute of the owner, value) without which the stack is refused.
        grid: where the patches of an image or video stand among the tokens; None for text and sound.
        relayed: whether hosts between owner and attentions drop keyword arguments that they don't know, so that
            positions on a grid are handed on by hfpatch.
        older: (field, value) of this record that differ where an older version of transformers built the class.
    """

    owner: str
    table: str
    attention: str
    projections: Projections | Fused
    reserved_rows: int = 0
    head_dim: str = "head_dim"
    cache: str | None = "past_key_values"
    layer_index: str = "layer_idx"
    position_ids: str | None = "position_ids"
    window: Window | None = None
    limits: tuple[tuple[str, LengthLimit], ...] = ()
    lengths: tuple[str, ...] = ()
    causal: bool = False
    config_length: str = "max_position_embeddings"
    others: tuple[str, ...] = ()
    answers: tuple[tuple[str, str], ...] = ()
    states: str = "hidden_states"
    time: int = 1
    biases: tuple[str, ...] = ()
    by_token: bool = False
    switched_off: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    switches: tuple[tuple[str, str], ...] = ()
    returns_more: int = 0
    requires: tuple[tuple[str, object], ...] = ()
    grid: Grid | None = None
    relayed: bool = False
    older: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Architecture:
    """A family that position schemes serve.

    Attributes:
        model_type: transformers' name of the family.
        stacks: its position-owning classes.
        example: a checkpoint on the Hub, for documentation.
    """

    model_type: str
    stacks: tuple[Stack, ...]
    example: str


def family(model_type: str, builds: Mapping[str, Stack], example: str) -> Architecture:
    """A row of a table: the stacks of a family are those builds, each owned by the class that it is listed under."""
    return Architecture(model_type, tuple(replace(build, owner=owner) for owner, build in builds.items()), example)
