"""Every kind of norm that transformers has and, written down by hand, what it computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from hfpatch.sites.norm_facts import describe

D_ = 16


@dataclass
class Kind:
    """A class of norms and, written down by hand, what it computes."""

    make: Callable[[], nn.Module]
    kind: str = "layer"
    shape: tuple[int, ...] = (D_,)
    eps: float | None = 1e-5
    offset: float = 0.0
    gain: str | None = "weight"
    shift: str | None = "bias"
    channels_first: bool = False


KINDS = {
    "LayerNorm": Kind(lambda: nn.LayerNorm(D_)),
    "LayerNorm, eps 0.3": Kind(lambda: nn.LayerNorm(D_, eps=0.3), eps=0.3),
    "LayerNorm, eps 1e-12": Kind(lambda: nn.LayerNorm(D_, eps=1e-12), eps=1e-12),
    "LayerNorm without bias": Kind(lambda: nn.LayerNorm(D_, bias=False), shift=None),
    "LayerNorm without affine": Kind(lambda: nn.LayerNorm(D_, elementwise_affine=False), gain=None, shift=None),
    "nn.RMSNorm": Kind(lambda: nn.RMSNorm(D_, eps=1e-4), kind="rms", eps=1e-4, shift=None),
    "nn.RMSNorm, machine eps": Kind(lambda: nn.RMSNorm(D_), kind="rms", eps=None, shift=None),
    "Nemotron": Kind(lambda: NemotronLayerNorm1P(D_), offset=1.0),
    "OLMo": Kind(lambda: OlmoLayerNorm(D_), gain=None, shift=None),
    "Cohere": Kind(lambda: CohereLayerNorm(D_, eps=1e-3), eps=1e-3, shift=None),
    "Cohere, per head": Kind(lambda: CohereLayerNorm((4, 8), eps=1e-3), shape=(8,), eps=1e-3, shift=None),
    "DeBERTa": Kind(lambda: DebertaLayerNorm(D_, 1e-7), eps=1e-7),
    "ConvNeXt": Kind(lambda: ConvNextLayerNorm(D_, eps=1e-6), eps=1e-6),
    "ConvNeXt, channels first": Kind(
        lambda: ConvNextLayerNorm(D_, eps=1e-6, data_format="channels_first"), eps=1e-6, channels_first=True
    ),
    "Llama": Kind(lambda: LlamaRMSNorm(D_, eps=1e-6), kind="rms", eps=1e-6, shift=None),
    "Gemma": Kind(lambda: GemmaRMSNorm(D_, eps=1e-6), kind="rms", eps=1e-6, offset=1.0, shift=None),
    "T5": Kind(lambda: T5LayerNorm(D_, eps=1e-6), kind="rms", eps=1e-6, shift=None),
}


def swapped(scheme: Any, norm: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    """What a scheme puts in a norm's place, in a module of this dtype."""
    facts = describe(norm)
    assert facts is not None
    return scheme.call(facts, norm).make_module(norm, nn.Linear(1, 1, dtype=dtype))


every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
