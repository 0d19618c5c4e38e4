"""Kernels of the Hub (`use_kernels=True`) reach an RMSNorm without a shift, and nothing else; the outputs stay."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from norm_kinds import swapped
from tiny_models import difference, inputs, load, outputs, patch, tiny
from torch import nn
from transformers import KernelConfig
from transformers.utils.import_utils import is_kernels_available

from hfpatch import export_model
from hfpatch.errors import WrappedModelError
from hfpatch.runtime.norms import RMSNorm, UnscaledRMSNorm
from hfpatch.schemes.norm_schemes import RMS, DyT

# as those of kernels-community: stateless, and they read what a LlamaRMSNorm has
LAYERS = """
from torch import nn
calls = []
class LlamaLike(nn.Module):
    has_backward = True
    can_torch_compile = True
    def forward(self, hidden_states):
        calls.append(type(self).__name__)
        scale = (hidden_states.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()
        return self.weight * (hidden_states * scale)
"""
METADATA = {"id": "_tiny_rms", "name": "tiny-rms", "version": 1, "license": "Apache-2.0", "python-depends": []}


def kernel_folder(folder: Path) -> Path:
    """A kernel as a folder: what `use_local_kernel=True` reads."""
    folder.mkdir()
    (folder / "__init__.py").write_text("from . import layers\n")
    (folder / "layers.py").write_text(LAYERS)
    (folder / "metadata.json").write_text(json.dumps(METADATA | {"backend": {"type": "cpu"}}))
    return folder


@pytest.fixture(params=["rules of kernels", "kernels", "use_kernels"])
def kernelize(request: Any, tmp_path: Path) -> Callable[[nn.Module], list[str]]:
    """Puts kernels into a model, by transformers, the package or its rules, and returns a list of their calls."""
    if request.param != "rules of kernels":
        if request.param == "use_kernels" and not is_kernels_available():
            pytest.skip("needs the package kernels in a version that transformers takes")
        kernels = pytest.importorskip("kernels")
        repository = kernels.LocalLayerRepository(kernel_folder(tmp_path / "kernel"), layer_name="LlamaLike")

        def by_package(model: nn.Module) -> list[str]:
            with kernels.use_kernel_mapping({"RMSNorm": {"cpu": repository}}, inherit_mapping=False):
                if request.param == "use_kernels":
                    model.set_use_kernels(True)  # a KernelConfig takes no kernels of a CPU
                else:
                    kernels.kernelize(model, mode=kernels.Mode.TRAINING, device="cpu")
            calls = repository.load().forward.__globals__["calls"]
            calls.clear()
            return calls

        return by_package
    names: dict[str, Any] = {}
    exec(LAYERS, names)

    def by_rules(model: nn.Module) -> list[str]:
        for module in model.modules():
            if getattr(type(module), "kernel_layer_name", None) == "RMSNorm":  # what `kernelize` looks for, and does
                module.forward = MethodType(names["LlamaLike"].forward, module)
        return names["calls"]

    return by_rules


def patched_gpt2() -> Any:
    """A GPT-2 whose 5 norms are RMSNorms without a shift."""
    model = tiny("gpt2", "AutoModelForCausalLM")
    return patch(patch(model, norm="layer:bias=false", init="copy"), norm="rms", init="copy")


@pytest.mark.parametrize("form", ["patched", "plugin", "remote"])
def test_outputs_stay(form: str, kernelize: Callable[[nn.Module], list[str]], tmp_path: Path) -> None:
    model = patched_gpt2()
    if form != "patched":
        export_model(model, tmp_path / form, form, **({"verify": False} if form == "remote" else {}))
        model = load(tmp_path / form, "AutoModelForCausalLM")
    given = inputs(model)
    expected = outputs(model, **given)
    norms = [name for name, module in model.named_modules() if type(module).__name__ == "RMSNorm"]
    config = KernelConfig()
    config.store_registered_layer_names(model)  # for which a KernelConfig may name a kernel
    assert [name for name, layer in config.registered_layer_names.items() if layer == "RMSNorm"] == norms
    calls = kernelize(model)
    assert difference(outputs(model, **given), expected) < 1e-6 * float(expected[0].std())
    assert calls == ["RMSNorm"] * len(norms) == ["RMSNorm"] * 5
    assert model.train()(**given, labels=given["input_ids"]).loss.requires_grad


def declares(module: nn.Module) -> bool:
    return hasattr(type(module), "kernel_layer_name") and hasattr(module, "kernel_layer_name")


def test_what_no_kernel_computes_declares_none() -> None:
    plain = swapped(RMS(), nn.LayerNorm(8, bias=False))
    assert declares(plain)
    assert declares(copy.deepcopy(plain))
    assert plain.variance_epsilon == plain.eps
    unscaled = swapped(RMS(), nn.LayerNorm(8, elementwise_affine=False))
    assert isinstance(unscaled, UnscaledRMSNorm)
    assert repr(unscaled).startswith("RMSNorm(")

    class Other(RMSNorm):
        pass

    others = [swapped(scheme, nn.LayerNorm(8)) for scheme in (RMS(), DyT())]
    others += [unscaled, Other.replacing(nn.LayerNorm(8, bias=False), nn.Module(), eps=1e-6)]
    others += [RMSNorm.replacing(nn.LayerNorm(8, bias=False), nn.Module(), eps=1e-6, offset=1.0)]
    assert [declares(other) for other in others] == [False] * 5
    with pytest.raises(AttributeError, match="RMSNorm itself has one"):
        _ = type(unscaled).kernel_layer_name


def test_a_model_with_kernels_is_refused(kernelize: Callable[[nn.Module], list[str]]) -> None:
    """They can't be taken off: what replaces such a module's class or weights would go on behind its back."""
    model = patched_gpt2()
    kernelize(model)
    given = inputs(model)
    expected = outputs(model, **given)
    with pytest.raises(WrappedModelError, match="carries a forward of its own"):
        patch(model, norm="dyt", init="copy")
    assert torch.equal(outputs(model, **given)[0], expected[0])
    patch(patched_gpt2(), norm="dyt", init="copy")
