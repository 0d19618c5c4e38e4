"""What servers' loaders ask of a checkpoint that isn't a stock one: their rules, emulated; no server runs.

After vLLM 0.33.0 (registry.py, utils.py and default_loader.py of its model_executor, transformers/fusers/rms_norm.py)
and SGLang 0.5.23, which has the same loader:

* A class is chosen by the name in `architectures`; one that a server knows is the server's own.
* `AutoWeightsLoader` raises on a tensor that is neither a parameter of the model nor a running statistic of one of
  torch's batch norms, and vLLM on parameters that no tensor fills.
* Norms without a shift give way to kernels: vLLM goes by a trace that is one call of F.rms_norm, SGLang by a class's
  name that ends in RMSNorm.

What a server computes with what it has loaded isn't emulated, and not known.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from checkpoint_edits import weights_of
from norm_kinds import swapped
from scheme_forms import CASES, SCHEMES, named, patched, written
from tiny_models import load, patch, tiny
from torch import fx, nn
from torch.fx.proxy import TraceError
from transformers import AutoConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hfpatch.core.registry import MLPS, NORMS, PLACEMENTS, POSITIONS
from hfpatch.export import export_model
from hfpatch.runtime.norms import RMSNorm, RMSNormExtended
from hfpatch.runtime.patch_errors import CheckpointError
from hfpatch.schemes.norm_schemes import RMS

STOCK = set(dir(transformers))  # as if a server had a class of its own for each of transformers'
NEVER_READ = ("rotary_pos_emb.inv_freq", "rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def built(folder: Path, attention: str | None = None) -> Any:
    """The class that config.json names, without weights."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    config._attn_implementation = attention
    (name,) = config.architectures
    code = [one for one in getattr(config, "auto_map", {}).values() if one.endswith(f".{name.removeprefix('Hfpatch')}")]
    cls: Any = (
        get_class_from_dynamic_module(code[0], str(folder)) if code else getattr(sys.modules["transformers"], name)
    )
    with torch.device("meta"):
        model = cls._from_config(config)
    model.tie_weights()
    return model


def refused_tensors(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Tensors of the files that the model has no place for, and parameters that none fills."""
    parameters = {name for name, _ in model.named_parameters()}
    batch_norms = [name for name, one in model.named_modules() if isinstance(one, nn.modules.batchnorm._BatchNorm)]
    statistics = {f"{name}.{statistic}" for name in batch_norms for statistic in STATISTICS}
    read = {name for name in names if not any(part in name for part in NEVER_READ)}
    return sorted((read - parameters - statistics) | (parameters - read))


def test_every_scheme_is_tried() -> None:
    options = (one for request in SCHEMES.values() for kind, one in request.items() if kind != "init")
    names = {option.partition(":")[0] for option in options}
    assert names == {*NORMS, *POSITIONS, *MLPS, *PLACEMENTS}
    assert {scheme for _, scheme in CASES} == set(SCHEMES)


SAVED = [*((one, "plugin") for one in CASES), (("gpt2", "rms+rope"), "remote")]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("case", "form"), SAVED, ids=[f"{named(one)}-{form}" for one, form in SAVED])
def test_a_strict_loader_takes_every_tensor(case: tuple[str, str], form: str, tmp_path: Path) -> None:
    """Of BatchNorm's running statistics alone it says that no module has them: our batch norm isn't one of torch's."""
    written(patched(case), form, tmp_path)
    (name,) = AutoConfig.from_pretrained(tmp_path, trust_remote_code=True).architectures
    assert name not in STOCK, "a server would build the unpatched model"
    refused = refused_tensors(built(tmp_path), weights_of(tmp_path))
    assert {one.rpartition(".")[2] for one in refused} == (set(STATISTICS) if case[1] == "batch" else set())


def test_a_strict_loader_refuses_others(tmp_path: Path) -> None:
    """Controls: names that no module has, whatever they begin with; what isn't there; the host's tensors."""
    patched(("gpt2", "rope")).save_pretrained(tmp_path)
    model, names = built(tmp_path), set(weights_of(tmp_path))
    for other in ("marker", "transformer.h.0.marker", "lm_head.bias"):
        assert refused_tensors(model, names | {other}) == [other]
    norm = "transformer.ln_f.weight"
    assert refused_tensors(model, names - {norm}) == [norm]
    host = {name for name, _ in tiny("gpt2", "AutoModelForCausalLM").named_parameters()}
    assert refused_tensors(model, host) == ["transformer.wpe.constant", "transformer.wpe.weight"]


@pytest.mark.parametrize("server", ["vllm", "sglang"])  # also what their attention functions are called
@pytest.mark.parametrize(("case", "refused"), [(("opt", "rms, parametrized"), True), (("gpt2", "rms"), False)])
def test_layers_that_a_server_replaces(
    server: str, case: tuple[str, str], refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers that are centred in every forward would be centred no more."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, server, None)
    patched(case).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=f"{server} replaces all linear layers") if refused else nullcontext():
        built(tmp_path, server)


@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_plans_of_parallel_servers_are_the_hosts(family: str, tmp_path: Path) -> None:
    plain = tiny(family, "AutoModelForCausalLM")
    patch(model := tiny(family, "AutoModelForCausalLM"), norm="dyt")
    model.save_pretrained(tmp_path / "plugin")
    export_model(model, tmp_path / "remote", "remote", verify=False)
    for form in ("plugin", "remote"):
        opened = load(tmp_path / form, "AutoModelForCausalLM")
        assert plain.tp_plan
        assert opened.tp_plan == plain.tp_plan
        assert opened.pp_plan == plain.pp_plan
        assert opened.config.base_model_tp_plan == plain.config.base_model_tp_plan
        assert opened.config.base_model_pp_plan == plain.config.base_model_pp_plan


# Norms that give way to kernels


def norm(shift: bool, **options: Any) -> Any:
    return swapped(RMS(**options), nn.LayerNorm(8, bias=shift))


def calls(module: nn.Module) -> list[fx.Node]:
    try:
        return [node for node in fx.symbolic_trace(module).graph.nodes if node.op.startswith("call")]
    except TraceError:  # it isn't looked at further
        return []


def test_an_rms_norm_without_a_shift_gives_way() -> None:
    plain = norm(shift=False)
    assert isinstance(plain, RMSNorm)
    assert not isinstance(plain, RMSNormExtended)
    assert type(plain).__name__ == "RMSNorm"
    (call,) = calls(plain)
    assert call.target is F.rms_norm
    assert call.kwargs["eps"] == plain.eps
    vars(plain)["fused_eps"] = -1.0  # what vLLM does to find the attribute that it reads eps from
    (call,) = calls(plain)
    assert call.kwargs["eps"] == -1.0


def test_another_one_stays() -> None:
    other = norm(shift=True)
    assert [node.target for node in calls(other)] != [F.rms_norm]
    assert not type(other).__name__.endswith("RMSNorm")
    assert isinstance(other, RMSNormExtended)
    assert repr(other).startswith("RMSNorm(")


def test_a_patched_attention_isnt_traced() -> None:
    """A trace of the host's forward would be without the rotation."""
    attention = patched(("bert", "rope")).encoder.layer[0].attention.self
    states = fx.Proxy(fx.Graph().placeholder("hidden_states"), fx.Tracer())
    with pytest.raises(TraceError, match=r"torch\.export"):
        attention(states)
    with pytest.raises(TraceError):
        fx.symbolic_trace(attention)


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
