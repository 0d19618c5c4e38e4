"""MLP schemes. Importing this package registers those that ship with hfpatch."""

from .detect import MLPSite, find_mlps, mixtures
from .gated import GeGLU, ReGLU, SwiGLU
from .layers import GatedActivation, GatedLinear
from .scheme import MLP, Start

__all__ = [
    "MLP",
    "GatedActivation",
    "GatedLinear",
    "GeGLU",
    "MLPSite",
    "ReGLU",
    "Start",
    "SwiGLU",
    "find_mlps",
    "mixtures",
]
