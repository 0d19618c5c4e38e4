"""Centring: which Parameters and outputs are made zero-mean so that a model's LayerNorms may become RMSNorms.

LN(x) = RMS(C x) * gain + shift with C = I - 11'/d the centring of the channels: if everything that writes to the
residual stream is zero-mean over the channels, then C x = x and the two norms are the same function.
"""

from __future__ import annotations

from dataclasses import dataclass, field

EMBEDDINGS = "inputs_embeds"  # argument of transformers' models in place of their tokens


@dataclass(frozen=True)
class Axis:
    """Parameters that may write to the residual stream, the axis of its channels, and a layer-scale after them.

    Attributes:
        pattern: a parameter's name with `*` for every number between dots, such as "transformer.h.*.mlp.c_proj.weight".
        axis: index of that axis, not negative.
        scale: pattern of the layer-scale Parameters that multiply what they write; None for none.
    """

    pattern: str
    axis: int
    scale: str | None = None


@dataclass(frozen=True)
class Centring:
    """Result of the search on a small model of the same class (search.py), applied to the user's model by fold.py.

    Names have `*` for every number between dots, so that they hold for any number of layers.

    Attributes:
        folds: Parameters from which their mean over the axis is subtracted. A layer-scale goes into all of them that
            name it first: scale * (W x + b) becomes 1 * (scale W x + scale b).
        outputs: (module, axis): its output is centred in every forward, because its weight is also used elsewhere (an
            embedding tied to the output head). `mode="parametrize"` folds nothing: the last module of each branch (its
            dropout, if that is a module) is centred in every forward, W - mean(W) as it were, so that training follows
            the LayerNorm model's own trajectory.
        embeddings: modules whose `inputs_embeds` are centred, since nothing that is centred above sees them.
        exact: norms whose input is zero-mean after the centring.
        approximate: norm -> why its input isn't, as text for the plan.
        compensated: norms that follow a norm in the stream (post-norm): the mean of their input is mostly that of the
            earlier norm's shift, which is subtracted from the bias of the writer between them (compensate.py).
        refused: why no norm is exact; None if some are.
    """

    folds: tuple[Axis, ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()
    embeddings: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    approximate: dict[str, str] = field(default_factory=dict)
    compensated: tuple[str, ...] = ()
    refused: str | None = None
