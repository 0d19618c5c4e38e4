"""Quantises checkpoints and reopens them, in a process of its own; test_quantisation.py runs it.

    python quantisation_tool.py JOBS ANSWER

JOBS: a file of `{"hfpatch": bool, "step": "quantise" or "reopen", "jobs": {name: job}}`; hfpatch is imported only if
the first is true. ANSWER: the file that gets, by name, what came of each job by step: a relative difference or, as
text, what failed.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers

TOKENS = torch.randint(5, 90, (2, 12), generator=torch.Generator().manual_seed(0))


def config_of(quantiser: str, scheme: str) -> Any:
    """What `from_pretrained(quantization_config=...)` takes."""
    if quantiser == "torchao":
        return transformers.TorchAoConfig(torchao_config(scheme))
    if quantiser == "optimum-quanto":
        return transformers.QuantoConfig(weights=scheme)
    if scheme == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=scheme)


def torchao_config(scheme: str) -> Any:
    from torchao import quantization

    if scheme == "int8":
        return quantization.Int8WeightOnlyConfig()
    # runs everywhere; no packing of Int4WeightOnlyConfig runs on a CPU
    return quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(32))


def quanto_class(auto: str) -> Any:
    from optimum.quanto import QuantizedTransformersModel

    return type("Quantized", (QuantizedTransformersModel,), {"auto_class": getattr(transformers, auto)})


def opened(job: dict[str, Any], folder: str, **options: Any) -> Any:
    auto = getattr(transformers, job["auto"])
    return auto.from_pretrained(folder, trust_remote_code=job["form"] == "remote", **options).eval()


def quantised(job: dict[str, Any]) -> Any:
    """The checkpoint's model, quantised in the job's way."""
    quantiser, scheme = job["quantiser"], job["scheme"]
    if job["way"] == "transformers":
        return opened(job, job["folder"], quantization_config=config_of(quantiser, scheme), device_map="cpu")
    model = opened(job, job["folder"])
    if quantiser == "torchao":
        from torchao.quantization import quantize_

        quantize_(model, torchao_config(scheme))
        return model
    from optimum import quanto

    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    return quanto_class(job["auto"]).quantize(model, weights=getattr(quanto, f"q{scheme}"), exclude=head)


def save(model: Any, job: dict[str, Any]) -> None:
    if job["way"] == "own" and job["quantiser"] == "torchao":  # its tensors have no memory that safetensors could read
        Path(job["saved"]).mkdir(parents=True)
        torch.save(model.state_dict(), Path(job["saved"]) / "weights.pt")
    else:
        model.save_pretrained(job["saved"])


def reopened(job: dict[str, Any]) -> Any:
    if job["way"] == "transformers":
        return opened(job, job["saved"], device_map="cpu")
    if job["quantiser"] == "torchao":
        model = opened(job, job["folder"])
        model.load_state_dict(torch.load(Path(job["saved"]) / "weights.pt", weights_only=False), assign=True)
        return model
    options = {"trust_remote_code": True} if job["form"] == "remote" else {}
    return quanto_class(job["auto"]).from_pretrained(job["saved"], **options)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits.double()


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


def quantise(job: dict[str, Any]) -> dict[str, Any]:
    """How far the quantised model is from the one in the folder; it is saved, with what it computes."""
    truth, model, unsaved = logits(opened(job, job["folder"])), quantised(job), {}
    try:
        save(model, job)  # first: on a CPU a forward changes what bitsandbytes writes of 4 bits
    except Exception as error:
        unsaved = {"reopen": described(error)}
    found = logits(model)
    if not unsaved:
        torch.save(found, Path(job["saved"]) / "logits.pt")
    return {"quantise": relative(found, truth), **unsaved}


def reopen(job: dict[str, Any]) -> dict[str, Any]:
    """How far the reopened model is from the one that was saved."""
    return {"reopen": relative(logits(reopened(job)), torch.load(Path(job["saved"]) / "logits.pt"))}


def described(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.400}"


def main(jobs: str, answer: str) -> None:
    work = json.loads(Path(jobs).read_text())
    if work["hfpatch"]:
        importlib.import_module("hfpatch")
    step, found = {"quantise": quantise, "reopen": reopen}[work["step"]], {}
    for name, job in work["jobs"].items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[name] = step(job)
            except Exception as error:
                found[name] = {"reopen": "not quantised", work["step"]: described(error)}
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
