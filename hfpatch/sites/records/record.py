"""The form of an architecture record: where a family keeps what a position patch touches. Data, no behaviour.

Classes are named by their names, so that a record imports nothing of transformers and serves every head of the family
and every composite model that contains one of its stacks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.attention import Fused, Projections, Window
from ...runtime.grid import Grid
from ...runtime.length_lenses import LengthLimit


@dataclass(frozen=True)
class Stack:
    """One class that owns a table of absolute positions, and the self-attentions that it feeds.

    Paths are relative to the owner; `attention` is a glob over them.

    Attributes:
        owner: class name of the owner; of a class that isn't transformers' own with its file: "modeling_my.MyModel".
        table: path of the table: a module, a Parameter or a plain tensor, or a module that computes positions.
        attention: glob of the self-attention modules, or several joined by " | ". Cross-attention must not match.
        projections: how q and k leave the attention's input.
        reserved_rows: rows at the table's start that hold no position (BART's and OPT's offset of 2).
        head_dim: attribute of the attention that holds the channels per head, or two as in "embed_dim / num_heads", or
            as in "/ num_heads" the number of heads alone.
        cache: name of the forward's cache argument, None for stacks that never decode.
        position_ids: name of the argument with the tokens' positions, None where it isn't to be relied on.
        layer_index: attribute of the attention that holds its index in the cache.
        window: set where the attention masks by a square buffer of the old maximum length.
        limits: (path, limit) of modules that refuse or cut inputs beyond the old maximum length; "" is the owner.
        lengths: attributes of the owner, or of modules around it, that hold the old maximum length as a limit.
        causal: whether a mask still shows order when positions are dropped.
        mask: argument of the attention's forward that is added to its scores, (B, 1, T, S); None where none is.
        config_length: attribute of the owner's config that holds the table's length.
        others: paths of further tables (of time, say) that go with the first.
        answers: (path, answer) of tables that compute positions from hidden states, as in `limits.NoPositions`.
        states: name of the attention's argument with the hidden states, (T, d), (B, T, d) or (B, rows, columns, d).
        time: axis of the tokens in them: 0 for (T, B, d), 2 for (B, d, T).
        biases: arguments or attributes of the attention that bring it a relative bias; it sees 0 in their place.
        by_token: whether the host wants rows (B, T, d) from its table, and not one for all tokens.
        switched_off: attributes that tell an attention to add relative biases; they become False.
        unused: Parameters of the attention that are removed, since nothing uses them then.
        unread: paths of modules that are removed with the table, since nothing reads them then.
        switches: (path, attribute) of modules that are told not to read them: False then.
        returns_more: how many values besides the rows its table's module returns; None stands for each then.
        requires: (attribute of the owner, value) without which the stack is refused.
        grid: where the tokens are patches of a grid.
        older: the same stack as older versions of transformers build it.
        relayed: whether the hosts between owner and attentions don't hand on keyword arguments that they don't know.
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
    mask: str | None = "attention_mask"
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
    older: Stack | None = None


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
