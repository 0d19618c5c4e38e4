"""Patched models in the hands of other libraries: adapters, trainers, exporters; tests/ecosystem has other packages."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import difference, inputs, load, outputs, patch, tiny
from torch import Tensor
from transformers import AutoModelForCausalLM

from hfpatch.errors import WrappedModelError
from hfpatch.export import export_model
from hfpatch.patch import patch_model
from hfpatch.runtime.patch_errors import CheckpointError
from hfpatch.schemes.norm_schemes import DyT
from hfpatch.schemes.rope import RoPE

BOTH = {"norm": DyT(0.4), "pos": RoPE(theta=300.0)}


def causal(family: str = "opt", **options: Any) -> Any:
    return patch(tiny(family, "AutoModelForCausalLM", **options), **BOTH)


# Adapters


def tuned(base: Any, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, fan_in_fan_out=False, **options)
    return peft.get_peft_model(base, config).eval()


def test_an_adapter_and_its_base_saved_apart(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = causal()
    model.save_pretrained(tmp_path / "base")
    adapted = tuned(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    adapted.save_pretrained(tmp_path / "adapter")
    given = inputs(model)
    expected = outputs(adapted, **given)
    assert difference(expected, outputs(model, **given)) > 1e-3
    again = {
        "by its own Auto class": peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"),
        "on a base that is there": peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
        ),
        "by transformers": AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"),
    }
    for how, one in again.items():
        assert difference(outputs(one.eval(), **given), expected) < 1e-5, how


def test_an_adapter_of_a_base_that_was_never_saved(tmp_path: Path) -> None:
    """It would remember the name of the unpatched base and come back on that one, so PEFT's saving is refused."""
    pytest.importorskip("peft")
    tiny("opt", "AutoModelForCausalLM").save_pretrained(tmp_path / "plain")
    base = patch(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), **BOTH)
    with pytest.raises(CheckpointError, match="opt"):
        tuned(base).save_pretrained(tmp_path / "adapter")
    assert not list(tmp_path.glob("adapter/*.safetensors"))
    tuned(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")).save_pretrained(tmp_path / "adapter")  # control


TRAINED_BEFORE = {"opt": ["out_proj", "fc2"], "gpt2": ["c_proj"]}  # what an exact swap centres


@pytest.mark.parametrize("family", TRAINED_BEFORE)
def test_an_adapter_of_the_unpatched_model_is_merged_before_the_patch(family: str, tmp_path: Path) -> None:
    """It adds to rows that an exact swap centres. Merged first, it is centred with them; put on the patched base it
    is part of another function, which is the control."""
    peft = pytest.importorskip("peft")
    base = tiny(family, "AutoModelForCausalLM")
    torch.manual_seed(0)
    options = {"target_modules": TRAINED_BEFORE[family], "fan_in_fan_out": family == "gpt2"}
    adapted = peft.get_peft_model(base, peft.LoraConfig(init_lora_weights=False, **options)).eval()
    adapted.save_pretrained(tmp_path)
    given = inputs(base)
    expected = outputs(adapted, **given)
    size = max(float(one.abs().max()) for one in expected)

    def opened(model: Any) -> Any:
        return peft.PeftModel.from_pretrained(model, tmp_path).eval()

    merged = opened(tiny(family, "AutoModelForCausalLM")).merge_and_unload()
    patched = patch_model(merged, norm="rms")  # a swap that isn't exact would warn, which is an error here
    assert difference(outputs(patched, **given), expected) <= 1e-6 * size
    wrong = opened(patch_model(tiny(family, "AutoModelForCausalLM"), norm="rms"))
    assert difference(outputs(wrong, **given), expected) > 1e-3 * size


# Training


class Sequences(torch.utils.data.Dataset):
    """Random tokens that are their own labels."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.randint(5, 97, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def trainer(model: Any, folder: Path, **options: Any) -> transformers.Trainer:
    defaults: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **(defaults | options))
    return transformers.Trainer(model=model, args=arguments, train_dataset=Sequences())


def losses(one: transformers.Trainer) -> list[float]:
    return [entry["loss"] for entry in one.state.log_history if "loss" in entry]


def without_dropout() -> Any:
    return causal("gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)


def test_a_trainer_saves_and_resumes(tmp_path: Path) -> None:
    """Half a run, resumed from its checkpoint, ends as the whole one; its checkpoints open by themselves."""
    whole = trainer(without_dropout(), tmp_path / "run")
    whole.train()
    resumed = trainer(without_dropout(), tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert len(losses(whole)) == 4
    silent = trainer(without_dropout(), tmp_path / "silent", save_strategy="no")
    silent.train()
    assert losses(silent) == losses(whole)  # saving in the middle of training changes nothing of it
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
    assert losses(whole)[-1] != pytest.approx(losses(whole)[0], rel=1e-3)  # control: it learns
    for name in ("2", "4"):
        assert (tmp_path / f"run/checkpoint-{name}/hfpatch_weights.json").exists()
    given = inputs(whole.model)
    trained = outputs(whole.model.eval(), **given)[-1]
    whole.save_model(str(tmp_path / "final"))
    for folder in ("run/checkpoint-4", "final"):
        again = load(tmp_path / folder, "AutoModelForCausalLM")
        assert difference(outputs(again, **given)[-1:], [trained]) == 0


# Offloading, exporting


@pytest.mark.parametrize("how", ["cpu_offload", "disk_offload"])
def test_accelerate_offloads(how: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = causal("gpt2")
    expected = outputs(model)
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    where = {"offload_dir": tmp_path / "disk"} if how == "disk_offload" else {}
    getattr(accelerate, how)(again, execution_device=torch.device("cpu"), **where)
    assert any(parameter.is_meta for parameter in again.parameters())
    assert difference(outputs(again), expected) < 1e-5


class Logits(torch.nn.Module):
    """What exporters like: tensors in, one tensor out."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


@pytest.mark.slow
@pytest.mark.parametrize(("family", "request_"), [("gpt2", BOTH), ("opt", {"norm": "rms", "pos": "alibi"})])
def test_torch_export(family: str, request_: dict[str, Any], tmp_path: Path) -> None:
    """The exported program, saved and opened again, gives the model's output for another length too."""
    model = patch(tiny(family, "AutoModelForCausalLM", attn_implementation="eager"), **request_, init="copy")
    model.save_pretrained(tmp_path / "model")
    whole = Logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")).eval()
    ids = inputs(model)["input_ids"]
    length = torch.export.Dim("length", min=2, max=60)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(whole, (ids,), dynamic_shapes=({1: length},), strict=False)
        torch.export.save(program, tmp_path / "program.pt2")
        again = torch.export.load(tmp_path / "program.pt2").module()
        for given in (ids, ids[:, :5], torch.cat([ids, ids], dim=1)):
            torch.testing.assert_close(again(given), whole(given), rtol=0, atol=1e-5)
    assert difference(whole.model, tiny(family, "AutoModelForCausalLM")) > 1e-3


def test_adapters_inside_a_model_arent_exported(tmp_path: Path) -> None:
    """PEFT puts its layers into the model that it wraps, which then saves its weights under other names."""
    model = patch(causal(), norm="rms")
    adapted = tuned(model)
    with pytest.raises(WrappedModelError, match="merge_and_unload"):
        export_model(model, tmp_path / "out", "plugin")
    assert not (tmp_path / "out").exists()
    export_model(adapted.merge_and_unload(), tmp_path / "out", "plugin")
