"""RoPE's channel pairings: finds which one a model uses, and the reordering of q and k that converts between them.

RoPE rotates channels i and i + d/2 of a head together ("half"), or 2i and 2i + 1 ("interleaved"). Reordering the rows
of the query and key projections converts one into the other. In a model that has RoPE itself, a lens instead reorders
the channels of queries and keys for the host's rotation: scores are sums over channels, whatever their order.
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.attention import HostOrder
from ..runtime.errors import UnsupportedError
from ..runtime.lens import host_class, lens_of
from ..runtime.qk_layouts import Fused, Projections
from .rotations import NativeRotation

_SEPARATE = (("q_proj", "k_proj"), ("query", "key"), ("q", "k"), ("to_q", "to_k"), ("linear_q", "linear_k"))
_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))
_NORMS_BEHIND = ("NanoChatAttention",)  # attentions that normalise after the rotation
_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size", "key_value_proj_dim")
# Attentions that rotate by themselves and whose layout their children's names don't tell.
LAYOUTS: dict[str, Any] = {
    "Qwen3NextAttention": Projections("q_proj", "k_proj", gated=True),
    "Qwen3_5Attention": Projections("q_proj", "k_proj", gated=True),
    "Qwen3_5MoeAttention": Projections("q_proj", "k_proj", gated=True),
    "GPTNeoXAttention": Fused("query_key_value", by_head=True),
    "GPTNeoXJapaneseAttention": Fused("query_key_value", by_head=True),
    "PersimmonAttention": Fused("query_key_value", by_head=True),
    "Phi3Attention": Fused("qkv_proj", key_value_heads="num_key_value_heads"),
    "Phi4MultimodalAttention": Fused("qkv_proj", key_value_heads="num_key_value_heads"),
    "ModernBertAttention": Fused("Wqkv"),
}


def reordered_rows(layout: Any, module: nn.Module, head_dim: int, places: Tensor) -> dict[str, Tensor]:
    """For each projection of an attention which output channel comes to each place, (channels,).

    Raises:
        UnsupportedError: queries meet other vectors than keys, which aren't reordered.
    """
    if getattr(layout, "beside_keys", None):
        raise UnsupportedError(
            f"{module._get_name()}: its queries are also multiplied with {layout.beside_keys}, so their "
            "channels can't be reordered."
        )
    rows = {}
    for name, turn in layout.turns(module, head_dim, lambda x: x[..., places]).items():
        channels = torch.arange(output_channels(getattr(module, name)))
        rows[name] = turn(channels[None, None])[0, 0]
    return rows


def output_channels(projection: nn.Module) -> int:
    """How many channels a projection makes.

    Raises:
        UnsupportedError: it is no linear layer.
    """
    for name in ("nf", "out_features"):
        if isinstance(getattr(projection, name, None), int):
            return getattr(projection, name)
    raise UnsupportedError(f"{projection._get_name()} isn't a linear layer, so its channels can't be reordered.")


@dataclass(frozen=True)
class Rotating:
    """An attention of a model that has RoPE itself.

    Attributes:
        module: the attention.
        layout: its projections.
        last: what of it stands right before the rotation: the projections, or the norms behind them.
        head_dim: channels of a head.
    """

    module: nn.Module
    layout: Any
    last: Any
    head_dim: int

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms between projection and rotation."""
        return () if self.last is self.layout else self.last.names

    @property
    def lens(self) -> HostOrder | None:
        return lens_of(self.module, HostOrder)


def rotating_attentions(rotary: nn.Module, holder: nn.Module) -> dict[str, Rotating | None]:
    """The attentions below `holder` that take the phases of a rotary module; None where their layout isn't known."""
    found: dict[str, Rotating | None] = {}
    source = host_class(type(rotary)).__module__
    for name, module in holder.named_modules():
        host = host_class(type(module))
        if "Attention" not in host.__name__ or host.__module__ != source:
            continue
        parameters = inspect.signature(getattr(host, "forward", host)).parameters
        inside = any(name.startswith(f"{outer}.") for outer, known in found.items() if known is not None)
        if "position_embeddings" in parameters and not inside:
            found[name] = _rotating(module)
    # a layer named "...Attention..." that hands the phases on isn't what turns
    outer = {name for name in found for other in found if other.startswith(f"{name}.")}
    return {name: known for name, known in found.items() if name not in outer}


def _rotating(module: nn.Module) -> Rotating | None:
    head_dim = next(
        (getattr(module, name) for name in _HEAD_DIMS if isinstance(getattr(module, name, None), int)), None
    )
    pairs = (Projections(*names) for names in _SEPARATE if all(name in module._modules for name in names))
    layout = LAYOUTS.get(host_class(type(module)).__name__) or next(pairs, None)
    if layout is None or head_dim is None or not all(name in module._modules for name in layout.names):
        return None
    if host_class(type(module)).__name__ in _NORMS_BEHIND:
        return Rotating(module, layout, layout, head_dim)
    norms = (names for names in _NORMS if all(module._modules.get(name) is not None for name in names))
    last = next((Projections(*names) for names in norms), layout)
    return Rotating(module, layout, last, head_dim)


@dataclass(frozen=True)
class Pairing:
    """Which channels of q and k a rotation turns together.

    Attributes:
        host: the pairing in which the host's code turns them; None where it isn't clear.
        present: that of the rows of q's and k's projections, which a patch may have changed.
        rotary_dim: how many channels of a head are turned; 0 where it isn't clear.
    """

    host: str | None
    present: str | None
    rotary_dim: int


def pairing_of(rotation: NativeRotation, settings: dict[str, Any] | None = None) -> Pairing:
    """The pairing of one of a model's own rotations, measured by rotating a vector with 1 in channel 0.

    Args:
        rotation: one of the model's own.
        settings: those that it is going to have, which may rotate another share of each head; None: its own.
    """
    host, rotary_dim = _host_pairing(rotation, rotation.settings)
    if settings is not None and settings != rotation.settings:
        rotary_dim = _host_pairing(rotation, settings)[1] or rotary_dim
    known = rotating_attentions(rotation.module, rotation.holder).values()
    lens = next((one.lens for one in known if one is not None and one.lens is not None), None)
    return Pairing(host, host if lens is None else lens.pairing, rotary_dim)


def _host_pairing(rotation: NativeRotation, settings: dict[str, Any]) -> tuple[str | None, int]:
    try:
        phases = rotation.phases(rotation.rebuilt(settings))
    except Exception:  # its module is built or called in another way
        return None, 0
    if isinstance(phases, Tensor) and phases.is_complex():
        return "interleaved", 2 * phases.shape[-1]  # which is how complex numbers lie in memory
    if not isinstance(phases, tuple):
        return None, 0
    for width in (phases[0].shape[-1], 2 * phases[0].shape[-1]):  # as wide as cos; or cos is there once for each pair
        q = torch.zeros(1, 1, 2, width)
        q[..., 0] = 1
        partners = [(y[0, 0, 1, 1:].nonzero().flatten() + 1).tolist() for y in _rotated_by_host(rotation, q, phases)]
        if partners:
            interleaved, half = ([found == [partner] for found in partners] for partner in (1, width // 2))
            return ("interleaved" if all(interleaved) else "half" if all(half) else None), width
    return None, 0


def _rotated_by_host(rotation: NativeRotation, q: Tensor, phases: Any) -> list[Tensor]:
    """q (1, 1, 2, channels) turned by each function that the host's file has for that, by transformers' names."""
    found = []
    for name, function in vars(sys.modules[host_class(type(rotation.module)).__module__]).items():
        if callable(function) and name.startswith(("apply_rotary", "apply_multimodal_rotary", "_apply_rotary")):
            try:
                turned = function(q, q, *phases)[0]
            except Exception:  # it is for phases of another form
                continue
            if isinstance(turned, Tensor) and turned.shape == q.shape:
                found.append(turned)
    return found


def reordering(rotation: NativeRotation, pairing: Pairing, to: str | None) -> list[tuple[str, HostOrder | None]]:
    """The attentions whose lens changes with the pairing, and that lens; None where the host's own order comes back.

    Args:
        rotation, pairing: one of the model's own, and its pairing with the settings that it is going to have.
        to: the pairing that its projections' rows are to be read in; None leaves it.

    Raises:
        UnsupportedError: the host's pairing, or where queries and keys come from, isn't known.
    """
    attentions = rotating_attentions(rotation.module, rotation.holder)
    to = to or pairing.present
    if to is None or (to == pairing.present and not any(one is not None and one.lens for one in attentions.values())):
        return []
    where = f"{rotation.name}: pairing={to!r}"
    if pairing.host is None:
        raise UnsupportedError(
            f"{where} isn't supported, since it isn't known which channels the model's own code rotates together."
        )
    unknown = [name for name, one in attentions.items() if one is None]
    if unknown or not attentions:
        raise UnsupportedError(
            f"{where} isn't supported, since it isn't known which projections the queries and keys of "
            f"{unknown[0] if unknown else 'its attentions'} come from. Its pairing is {pairing.host!r}."
        )
    found: list[tuple[str, HostOrder | None]] = []
    holder = rotation.module_name.rpartition(".")[0]
    for name, one in attentions.items():
        assert one is not None
        if pairing.rotary_dim > one.head_dim:
            raise UnsupportedError(
                f"{where} isn't supported: {name} has heads of {one.head_dim} channels, but {pairing.rotary_dim} are "
                "rotated."
            )
        lens = None if to == pairing.host else HostOrder(to, one.last, one.head_dim, pairing.rotary_dim)
        if lens != one.lens:
            found.append((f"{holder}.{name}".strip("."), lens))
    return found
