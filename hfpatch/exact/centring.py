"""What makes a model's residual stream zero-mean, so that its LayerNorms may become RMSNorms.

LN(x) = RMS(C x) * gain + shift with C = I - 11'/d the centring of the channels: where everything that writes to the
stream is zero-mean over the channels, C x = x and the two norms are the same function.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Axis:
    """One axis of the Parameters that a pattern names: the one along which they write to the stream's channels.

    Attributes:
        pattern: a parameter's name with `*` for every number between dots, such as "transformer.h.*.mlp.c_proj.weight".
        axis: not negative.
    """

    pattern: str
    axis: int


@dataclass(frozen=True)
class Centring:
    """Found on a small model of the same class (search.py), carried out on the real one (fold.py).

    Names have `*` for every number between dots, so that what was found on two layers holds for forty.

    Attributes:
        folds: Parameters from which their mean over an axis is subtracted.
        absorbs: (layer-scale Parameter, a writer's axis): scale * (W x + b) becomes 1 * (scale W x + scale b) first,
            for every writer listed with the scale; scale is filled with ones.
        outputs: (module, axis): its output is centred in every forward instead, because its weight is used elsewhere
            too (an embedding tied to the output head).
        parametrized: (module, axis) of what is centred instead of all of the above by `mode="parametrize"`: the last
            module of each branch (its dropout, where that is a module).
        exact: norms whose input is zero-mean afterwards.
        approximate: norm -> why its input isn't, in words for the plan.
        compensated: norms that follow a norm in the stream (post-norm): their input's mean is, but for a small rest,
            the mean of the earlier norm's shift, which the bias of the writer between them can take up.
        error: largest relative difference of the small model's outputs, original against converted, in float64.
        refused: why nothing at all is exact, None where something is.
    """

    folds: tuple[Axis, ...] = ()
    absorbs: tuple[tuple[str, Axis], ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()
    parametrized: tuple[tuple[str, int], ...] = ()
    exact: tuple[str, ...] = ()
    approximate: dict[str, str] = field(default_factory=dict)
    compensated: tuple[str, ...] = ()
    error: float = 0.0
    refused: str | None = None
