"""Registers every class of this folder that an edit may name."""

# transformers copies the files that remote code imports, and doesn't see "from . import x"
from .alibi import LinearBias
from .attention import AttentionLens, Window
from .batch_norm import MaskedBatchNorm, Padded
from .constants import ConstantPositions, FixedArguments, MeanRow, NoPositions, Rows, ZeroBiases
from .edits import register_component
from .fixed import BiasedLinear, FixedNorm, NoNorm
from .gated import GatedActivation, GatedLinear, Projection
from .grid import Grid
from .handing_down import HandedDown
from .host_rotary import HostRotary, Unrotated
from .joins import Gains, Join, Joins
from .length_lenses import (
    AnyImageSize,
    CountedLength,
    ExpandedRows,
    FilledArguments,
    MeanOfBuffer,
    RefusedArguments,
)
from .lens import CentredArgument
from .norms import DynamicErf, DynamicTanh, LayerNorm, RMSNorm
from .qk_layouts import Fused, Projections, WindowProjections
from .rotary import AdaptiveRotaryEmbedding, RotaryEmbedding
from .tables import ComputedPositions, Sinusoids

_MODULES = (
    *(LayerNorm, RMSNorm, DynamicTanh, DynamicErf, MaskedBatchNorm),
    *(FixedNorm, NoNorm, BiasedLinear),
    *(RotaryEmbedding, AdaptiveRotaryEmbedding, LinearBias, ConstantPositions, NoPositions, HostRotary),
    *(ComputedPositions, GatedLinear, GatedActivation, Projection),
)
_LENSES = (
    *(AttentionLens, FixedArguments, ZeroBiases, Unrotated, HandedDown, Gains, Joins, Padded),
    *(CentredArgument, FilledArguments, RefusedArguments, ExpandedRows, MeanOfBuffer, CountedLength, AnyImageSize),
)
_PARTS = (
    *(Projections, WindowProjections, Fused, Window, Join, Sinusoids),
    *(Grid, MeanRow, Rows),
)
OWN = (*_MODULES, *_LENSES, *_PARTS)
for _component in OWN:
    register_component(_component)
