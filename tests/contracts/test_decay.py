"""Weight decay under transformers' Trainer, and what else goes by nn.LayerNorm.

That what decays after a patch is what did is in the table of test_table.py.
"""

from __future__ import annotations

import json
import sys
import types
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers
from decay import Decay, decayed
from forms import called
from test_ecosystem import losses, trainer
from tiny_models import COPIES, difference, norm_request, outputs, patch, tiny
from torch import nn
from transformers import AutoModel

from hfpatch.export import export_model
from hfpatch.runtime.norm_interface import NormInterface


def test_control_a_norm_that_decayed() -> None:
    """imagegpt's norms are no nn.LayerNorm, and called ln_1 and ln_f: their gains decay, with every scheme that can."""
    config = transformers.ImageGPTConfig(n_embd=32, n_layer=1, n_head=4, n_positions=16, vocab_size=17)
    with torch.device("meta"):
        plain, layer, dyt = (AutoModel.from_config(config) for _ in range(3))
    before = Decay.of(plain)
    assert before.parameters["ln_f.weight"]
    assert decayed(patch(layer, norm="layer", init="copy")) >= {"h.0.ln_1.weight", "h.0.ln_2.weight", "ln_f.weight"}
    patch(dyt, norm="dyt", init="copy")
    assert before.differing(dyt) == []
    assert before.left_out(dyt) == ["h.0.ln_1.gain", "h.0.ln_2.gain", "ln_f.gain"]


FORMS = [("gpt2", "layer"), ("gpt2", "rms"), ("vit", "derf"), ("bart", "dyt")]
FORMS += [("gpt2", "fixed"), ("llama", "folded"), ("llama", "none")]
OPENED_ELSEWHERE = """
import json, sys
sys.modules["hfpatch"] = None
from transformers import AutoModel, Trainer
print(json.dumps([Trainer.get_decay_parameter_names(None, AutoModel.from_pretrained(folder, trust_remote_code=True))
    for folder in sys.argv[1:]]))
"""


def test_norms_that_are_centred_as_well() -> None:
    """A norm behind a sum that an exact swap centres: two generated classes on one module."""
    model = patch(tiny("bert"), norm="rms")
    model = patch(model, norm="layer")
    assert Decay.of(tiny("bert")).differing(model) == []
    for copied in COPIES.values():
        assert difference(copied(model), model) == 0


@pytest.mark.slow
def test_remote_code(tmp_path: Path) -> None:
    models = [patch(tiny(family), **norm_request(norm)) for family, norm in FORMS]
    for index, model in enumerate(models):
        export_model(model, tmp_path / str(index), "remote", verify=False)
    folders = [tmp_path / str(index) for index in range(len(models))]
    done = called(sys.executable, "-c", OPENED_ELSEWHERE, *folders, home=tmp_path, hide_hfpatch=True)
    found = json.loads(done.stdout.splitlines()[-1]) if done.stdout else done.stderr
    for names, model in zip(found, models, strict=True):
        assert set(names) & dict(model.named_parameters()).keys() == decayed(model)


# --- training ---------------------------------------------------------------------------------------------------------


def trained(norm: str | None, folder: Path) -> list[float]:
    """The losses of 100 steps of a GPT-2 under a strong decay, patched or not."""
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    model = tiny("gpt2", "AutoModelForCausalLM", **dropout)
    if norm is not None:
        patch(model, norm=norm)
    one = trainer(model, folder, max_steps=100, weight_decay=1.0, learning_rate=1e-3, save_strategy="no")
    one.train()
    return losses(one)


@pytest.mark.slow
def test_a_control_trains_as_the_original_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, control = (trained(norm, tmp_path) for norm in (None, "layer"))
    assert len(original) == 100
    assert control == pytest.approx(original, abs=1e-5)
    monkeypatch.setattr(NormInterface, "leave_out_of_decay", lambda self, replaced: None)
    without = trained("layer", tmp_path)
    assert max(abs(one - other) for one, other in zip(original, without, strict=True)) > 1e-3


# --- what else goes by nn.LayerNorm -----------------------------------------------------------------------------------


class Converted(nn.LayerNorm):
    """Transformer Engine's LayerNorm."""

    def __init__(self, width: int, eps: float, params_dtype: torch.dtype):
        super().__init__(width, eps, dtype=params_dtype)


@pytest.fixture
def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of Transformer Engine that accelerate's conversion to fp8 names."""
    from accelerate import Accelerator
    from accelerate.utils import transformer_engine as conversion

    Accelerator()  # the conversion asks for its state, which TrainingArguments resets
    package, kernels = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    package.pytorch, kernels.LayerNorm, kernels.Linear = kernels, Converted, nn.Linear  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", kernels)
    monkeypatch.setattr(conversion, "is_transformer_engine_available", lambda: True)


@pytest.mark.parametrize("norm", ["layer", "rms", "dyt", "derf"])
@pytest.mark.usefixtures("transformer_engine")
def test_a_kernel_for_layer_norms_takes_no_other_norm(norm: str) -> None:
    """Only what computes what an nn.LayerNorm does is replaced; another norm stops the conversion."""
    from accelerate.utils.transformer_engine import convert_model

    model = patch(tiny("gpt2"), norm=norm)
    before = outputs(model)
    stops = norm != "layer"
    with torch.no_grad(), pytest.raises(AttributeError, match="normalized_shape") if stops else nullcontext():
        convert_model(model, _convert_linear=False)
    assert any(isinstance(module, Converted) for module in model.modules()) == (not stops)
    assert difference(before, outputs(model)) <= 1e-5


def test_hosts_that_initialise_their_layer_norms_by_class(tmp_path: Path) -> None:
    """Hiera's `_init_weights` fills the shift of each nn.LayerNorm: also where a patch dropped it."""
    settings = {"embed_dim": 8, "image_size": [32, 32], "depths": [1, 1], "num_heads": [1, 2], "num_query_pool": 1}
    config = transformers.HieraConfig(**settings, query_stride=[2, 2], masked_unit_size=[2, 2])
    for norm in ("layer:bias=false", "dyt", "rms"):
        model = patch(transformers.HieraModel(config).eval(), norm=norm, init="copy")
        model.save_pretrained(tmp_path / norm.partition(":")[0])
        headed = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / norm.partition(":")[0])
        assert difference(list(headed.hiera.parameters()), list(model.parameters())) == 0
