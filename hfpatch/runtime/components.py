"""Every class of this folder that an edit may name; importing it makes them known to the text of edits."""

from . import (
    alibi,
    attention,
    batch_norm,
    constants,
    gated,
    grid,
    joins,
    length_lenses,
    norms,
    padding,
    qk_layouts,
    rotary,
    tables,
)
from .edits import register_component

_MODULES = (
    *(norms.LayerNorm, norms.RMSNorm, norms.PartialRMSNorm, norms.DynamicTanh, norms.DynamicErf),
    *(batch_norm.MaskedBatchNorm, rotary.RotaryEmbedding, rotary.AdaptiveRotaryEmbedding, alibi.LinearBias),
    *(constants.ConstantPositions, constants.NoPositions, constants.NoBias, constants.HostRotary),
    *(tables.ComputedPositions, gated.GatedLinear, gated.GatedActivation, gated.Projection),
)
_LENSES = (
    *(attention.AttentionLens, attention.HostOrder, constants.Given, constants.Unrotated),
    *(grid.GridLens, grid.Relay, joins.Gains, joins.Joins, padding.Padded),
    *(length_lenses.ZeroArguments, length_lenses.AnyTextLength, length_lenses.AnyBufferLength, length_lenses.AnyRow),
    *(length_lenses.RefusedArguments, length_lenses.AnyImageSize, length_lenses.AnyInputLength),
    *(length_lenses.ReadRows, length_lenses.AnyVideoSize, length_lenses.AnySeriesLength, length_lenses.AnyTileSize),
)
_PARTS = (
    *(qk_layouts.Projections, qk_layouts.WindowProjections, qk_layouts.Fused, attention.Window),
    *(joins.Join, tables.Sinusoids),
    *(grid.Grid, grid.MaskedGrid, grid.KeptGrid, grid.PackedGrid, grid.PlacedGrid, grid.SeenGrid),
)
for _component in (*_MODULES, *_LENSES, *_PARTS, constants.MeanRow, constants.ZeroRow, constants.Rows):
    register_component(_component)
