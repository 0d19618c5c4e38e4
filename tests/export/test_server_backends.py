"""vLLM's and SGLang's Transformers backends, emulated (support/server_backends.py): refuse, or the same function."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from norm_kinds import swapped
from scheme_forms import patched
from server_backends import (
    BACKEND,
    SERVERS,
    interface_calls,
    is_rms_norm,
    largest_difference,
    packed,
    resolved,
    sequences,
    served,
)
from tiny_models import load, patch, tiny
from torch import fx, nn
from torch.fx.proxy import TraceError

from hfpatch.export import export_model
from hfpatch.runtime.norms import RMSNorm, RMSNormExtended
from hfpatch.runtime.partial_rms import PartialRMSNorm
from hfpatch.schemes.norms import RMS

CAUSAL = "AutoModelForCausalLM"


@pytest.mark.parametrize("server", SERVERS)
def test_gains_that_are_offsets_from_one(server: str, tmp_path: Path) -> None:
    """As Nemotron's, whose norms servers replace; test_served_forms.py has every scheme, and other families."""
    model = patch(tiny("nemotron", CAUSAL), norm="rms")
    model.save_pretrained(tmp_path)
    assert resolved(tmp_path, [type(model).__name__], server) == BACKEND
    assert largest_difference(model, tmp_path, server) < 1e-5


def test_controls(tmp_path: Path) -> None:
    """The comparison sees an unpatched model, sequences that aren't told apart, and positions that don't restart."""
    model = patched(("gpt2", "rms+rope"))
    model.save_pretrained(tmp_path)
    assert largest_difference(tiny("gpt2", CAUSAL), tmp_path, "vllm") > 1e-2
    one, other = served(tmp_path, "vllm"), sequences(97)
    apart, together = packed(one, other), packed(one, [torch.cat(other)])
    assert float((torch.cat(apart) - torch.cat(together)).abs().max()) > 1e-2


# Plans


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_plans_of_parallel_servers_stay(family: str, tmp_path: Path) -> None:
    plain = tiny(family, CAUSAL)
    patch(model := tiny(family, CAUSAL), norm="dyt")
    model.save_pretrained(tmp_path / "plugin")
    export_model(model, tmp_path / "remote", "remote", verify=False)
    for form in ("plugin", "remote"):
        opened = load(tmp_path / form, CAUSAL)
        assert plain.tp_plan
        assert opened.tp_plan == plain.tp_plan
        assert opened.pp_plan == plain.pp_plan
        assert opened.config.base_model_tp_plan == plain.config.base_model_tp_plan
        assert opened.config.base_model_pp_plan == plain.config.base_model_pp_plan


# Norms that servers know


def norm(shift: bool, **options: Any) -> Any:
    return swapped(RMS(**options), nn.LayerNorm(8, bias=shift))


def test_an_rms_norm_without_a_shift_is_known() -> None:
    """As one call of F.rms_norm with eps in an attribute: vllm/.../fusers/rms_norm.py of 0.33.0, `match`."""
    plain = norm(shift=False)
    assert isinstance(plain, RMSNorm)
    assert not isinstance(plain, RMSNormExtended)
    assert type(plain).__name__ == "RMSNorm"
    assert is_rms_norm(plain)
    (call,) = (node for node in fx.symbolic_trace(plain).graph.nodes if node.op == "call_function")
    assert call.kwargs["eps"] == plain.eps
    vars(plain)["fused_eps"] = -1.0  # what vLLM does to find the attribute that it reads eps from
    (call,) = (node for node in fx.symbolic_trace(plain).graph.nodes if node.op == "call_function")
    assert call.kwargs["eps"] == -1.0


@pytest.mark.parametrize("options", [{}, {"fraction": 0.25}], ids=["shift", "some channels"])
def test_another_one_is_not(options: dict[str, Any]) -> None:
    """Nor is it of the same class, or a class whose name ends in RMSNorm, by which servers would replace it."""
    other = norm(shift=True, **options)
    assert not is_rms_norm(other)
    assert type(other) is not RMSNorm
    assert not type(other).__name__.endswith("RMSNorm")
    assert isinstance(other, RMSNormExtended if not options else PartialRMSNorm)
    assert repr(other).startswith("PartialRMSNorm(" if options else "RMSNorm(")


def test_a_patched_attention_isnt_traced_but_its_source_is_found() -> None:
    """vLLM finds the call of the attention interface in the source; a rewritten copy of it would lose the rotation."""
    attention = patched(("bert", "rope")).encoder.layer[0].attention.self
    assert interface_calls(type(attention).forward) == 1
    states = fx.Proxy(fx.Graph().placeholder("hidden_states"), fx.Tracer())
    with pytest.raises(TraceError, match=r"torch\.export"):
        attention(states)
    with pytest.raises(TraceError):
        fx.symbolic_trace(attention)


# Entry point


@pytest.mark.slow
def test_vllm_imports_hfpatch_in_its_processes() -> None:
    """By the group that vllm/plugins/__init__.py loads and calls in every process."""
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    ((name, value),) = settings["project"]["entry-points"]["vllm.general_plugins"].items()
    code = (
        "import importlib.metadata as m, transformers\n"
        f"f = m.EntryPoint({name!r}, {value!r}, 'vllm.general_plugins').load()\n"
        "assert f() is None and f() is None\n"
        "assert transformers.HfpatchLlamaForCausalLM.__name__ == 'LlamaForCausalLM'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
