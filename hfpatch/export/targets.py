"""Table of the stock architectures that a patched model may equal, and which norms, positions and heads each has."""

from __future__ import annotations

from dataclasses import dataclass

from . import layouts
from .layouts import FamilyLayout


@dataclass(frozen=True)
class Target:
    """An architecture to write; its config must have a name in `SETTINGS` for each fact that it varies in.

    Attributes:
        model_type: transformers' name of it.
        variant: which of the family's layouts.
        positions: what it does with them: "rope", "part of it" (rotate a part of a head), "scaling" (as its
            `rope_parameters` say), "theta" (other than 10,000), "alibi", "none".
        norm: its kind of norm; shift, gain: whether it has one.
        groups: whether it may have fewer heads of keys and values than of queries.
        optional: roles of parts that it can do without.
        bounded: whether it takes no texts longer than its config's length.
        activation: the one that servers (vLLM, llama.cpp) compute of it whatever the config says; a model with another
            is written as this one last.
    """

    model_type: str
    variant: int = 0
    positions: tuple[str, ...] = ("rope", "scaling")
    norm: str = "layer"
    shift: bool = True
    gain: bool = True
    groups: bool = False
    optional: tuple[str, ...] = ()
    bounded: bool = False
    activation: str | None = None

    @property
    def layout(self) -> FamilyLayout:
        return layouts.LAYOUTS[self.model_type][self.variant]


_PARTIAL = ("rope", "part of it", "scaling")
TARGETS = (  # in the order in which they are tried
    # decoders with LayerNorm, MLPs without a gate
    Target("gpt_neox", positions=_PARTIAL),
    Target("starcoder2", groups=True),
    Target("nemotron", positions=_PARTIAL, groups=True),
    Target("persimmon", positions=_PARTIAL),
    Target("falcon"),
    Target("falcon", variant=1, groups=True),
    Target("jais2", groups=True, activation="relu2"),
    Target("mpt", positions=("alibi",), shift=False, bounded=True),
    # decoders with RMSNorm; without a gate, with one, without positions
    Target("arcee", norm="rms", shift=False, groups=True, activation="relu2"),
    Target("llama", norm="rms", shift=False, groups=True),
    Target("smollm3", positions=("none",), norm="rms", shift=False, groups=True),
    # decoders with LayerNorm and gates
    Target("stablelm", positions=_PARTIAL, groups=True),
    Target("olmo", shift=False, gain=False, groups=True),
    # encoders
    Target("jina_embeddings_v3"),
    Target("gte"),
    Target("roformer", positions=("rope",), bounded=True),
    Target("esm", positions=("rope", "theta"), optional=("embedding_norm",)),
)
