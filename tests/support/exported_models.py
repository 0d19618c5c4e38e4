"""What the tests of exports patch models with."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from tiny_models import patch, randomise, tiny

from hfpatch.schemes.mlp_schemes import SwiGLU
from hfpatch.schemes.norm_schemes import RMS, DyT
from hfpatch.schemes.rope import RoPE

HEADS = {
    "gpt2": "AutoModelForCausalLM",
    "bert": "AutoModelForMaskedLM",
    "roberta": "AutoModelForSequenceClassification",
    "distilbert": "AutoModelForMaskedLM",
    "bart": "AutoModelForSeq2SeqLM",
    "opt": "AutoModelForCausalLM",
    "gpt_neo": "AutoModelForCausalLM",
    "vit": "AutoModelForImageClassification",
    "whisper": "AutoModelForSpeechSeq2Seq",
    "llama": "AutoModelForSequenceClassification",
}
FRESH = {"norm": DyT(0.4), "pos": RoPE(theta=300.0), "mlp": SwiGLU(), "init": "reset"}
REQUESTS: dict[str, dict[str, Any]] = {
    "rms exact": {"norm": "rms"},
    "rms copy": {"norm": "rms", "init": "copy"},
    "rms parametrized": {"norm": RMS(mode="parametrize")},
    "dyt": {"norm": DyT(0.4)},
    "dyt llm": {"norm": DyT("llm"), "init": "reset"},
    "derf": {"norm": "derf"},
    "layer": {"norm": "layer:bias=false"},
    "batch": {"norm": "batch"},
    "fixed": {"norm": "fixed", "init": "reset"},
    "folded": {"norm": "folded"},
    "none": {"norm": "none", "init": "reset"},
    "deepnorm": {"norm": "deepnorm"},
    "post": {"placement": "post"},
    "sandwich": {"placement": "sandwich"},
    "swiglu": {"mlp": SwiGLU()},
    "swiglu fresh": {"mlp": SwiGLU(), "init": "reset"},
    "geglu": {"mlp": "geglu"},
    "rope": {"pos": RoPE(theta=300.0)},
    "interleaved": {"pos": RoPE(theta=300.0, pairing="interleaved")},
    "partial": {"pos": RoPE(theta=300.0, partial=0.5)},
    "yarn": {"pos": RoPE(scaling={"rope_type": "yarn", "factor": 4.0})},
    "dynamic": {"pos": RoPE(scaling={"rope_type": "dynamic", "factor": 4.0})},
    "axial": {"pos": RoPE(axes=2)},
    "nope": {"pos": "nope"},
    "alibi": {"pos": "alibi"},
    "sinusoidal": {"pos": "sinusoidal"},
    "learned": {"pos": "learned:max_positions=128"},
    "only some": {"norm": "dyt", "pos": "rope", "only": ["*.0.*"]},
    "all": {"norm": DyT(0.4), "pos": RoPE(theta=300.0)},
    "fresh": FRESH,
}


def build(family: str, request: str) -> Any:
    model = patch(tiny(family, HEADS.get(family, "AutoModel")), **REQUESTS[request])
    return randomise(model, seed=5) if not request.startswith("rms exact") else model


OWN = '''
"""A norm of one's own."""

import torch

from hfpatch.runtime.norms import AffineNorm

FACTOR = 2.0


def half(h):
    return h / FACTOR


class {cls}(AffineNorm):
    """half(x / max |x|)."""

    kind = "own"

    def __init__(self, facts, gain, shift, power, like=None):
        super().__init__(facts, gain, shift)
        self.power = power

    def normalise(self, h):
        return half(h / h.abs().amax(-1, keepdim=True).clamp_min(1e-6)).sign().mul(h.abs() ** self.power)
'''
SCHEME = '''
"""Its scheme."""

from dataclasses import dataclass
from {name} import {cls}
from hfpatch.schemes.norm_schemes import Norm


@dataclass(frozen=True)
class Own(Norm):
    component = {cls}
    power: float = 0.5
'''


def own_class(name: str) -> str:
    """Its name: components are known by theirs as long as the process lives."""
    return "".join(name.title().split("_"))


def own_scheme(folder: Path, name: str, more: str = "") -> Any:
    """A third party's norm, in a file `name`, and its scheme in another; `more` stands at the end of the first."""
    cls = own_class(name)
    (folder / f"{name}.py").write_text(OWN.format(cls=cls) + more)
    (folder / f"{name}_scheme.py").write_text(SCHEME.format(name=name, cls=cls))
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(folder)
        return importlib.import_module(f"{name}_scheme").Own
