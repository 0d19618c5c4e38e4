"""What TRL's trainers save of a patched model opens again, to the bit: in train and in eval mode, model and checkpoint.

Without dropout: it would hide what a trainer put into the model, since outputs of another forward differ anyway.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from forms import forms_tokenizer, sentences, unpatched
from tiny_models import patch
from transformers import AutoModelForCausalLM

from hfpatch.errors import FingerprintWarning

trl = pytest.importorskip("trl", reason="trl isn't installed")
pytestmark = pytest.mark.slow

MODELS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: patch(unpatched("gpt2"), norm="dyt", pos="rope"),
    "llama": lambda: patch(unpatched("llama"), norm="dyt"),
}
PROMPTS = sentences(8)
ANSWERS = {"chosen": PROMPTS[1:] + PROMPTS[:1], "rejected": PROMPTS[2:] + PROMPTS[:2]}
SAMPLED = {"num_generations": 2, "max_completion_length": 4}


def length(completions: list[str], **_: Any) -> list[float]:
    """A reward."""
    return [float(len(one) + i) for i, one in enumerate(completions)]


def rewarded() -> dict[str, Any]:
    return {"reward_funcs": length}


# by a trainer's name: columns of its data, settings, and what else it takes
TRAINERS: dict[str, tuple[dict[str, Any], dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "SFT": ({"text": PROMPTS}, {"max_length": 16}, dict),
    "DPO": ({"prompt": PROMPTS, **ANSWERS}, {}, dict),
    "KTO": (
        {"prompt": PROMPTS, "completion": ANSWERS["chosen"], "label": [True, False] * 4},
        {},
        dict,
    ),
    "GRPO": ({"prompt": PROMPTS}, SAMPLED, rewarded),
    "RLOO": ({"prompt": PROMPTS}, SAMPLED, rewarded),
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return type(model).forward(model.eval(), torch.arange(5, 20)[None]).logits  # a trainer's own may lie on top


def trained_by(name: str, start: Any, folder: Path, **options: Any) -> Any:
    """A trainer that has trained a patched model, opened from a folder, and saved a checkpoint in `folder / "run"`."""
    from datasets import Dataset

    columns, settings, more = TRAINERS[name]
    start.save_pretrained(folder / "start")  # where some trainers open a reference model
    arguments = getattr(trl, f"{name}Config")(
        output_dir=str(folder / "run"),
        max_steps=1,
        save_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        seed=0,
        **settings,
    )
    trainer = getattr(trl, f"{name}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(folder / "start"),
        args=arguments,
        train_dataset=Dataset.from_dict(columns),
        processing_class=forms_tokenizer(),
        **more(),
        **options,
    )
    trainer.train()
    return trainer


def require_same(folder: Path, expected: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FingerprintWarning)
        for check in (True, "full"):
            opened = AutoModelForCausalLM.from_pretrained(folder, check_fingerprint=check)
            assert torch.equal(logits(opened), expected)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("name", TRAINERS)
def test_it_opens_to_the_bit(name: str, family: str, tmp_path: Path) -> None:
    start = MODELS[family]()
    trainer = trained_by(name, start, tmp_path)
    for mode in (True, False):
        trainer.model.train(mode)
        trainer.save_model(str(tmp_path / f"saved {mode}"))
    trained = logits(trainer.model)
    assert (trained - logits(start)).abs().max() > 1e-3, "the control: it was trained"
    for folder in ("run/checkpoint-1", "saved True", "saved False"):
        require_same(tmp_path / folder, trained)


@pytest.mark.parametrize("family", MODELS)
def test_an_adapter_that_was_trained_and_merged(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    start = MODELS[family]()
    trainer = trained_by("SFT", start, tmp_path, peft_config=peft.LoraConfig(target_modules="all-linear"))
    merged = trainer.model.merge_and_unload()
    trained = logits(merged)
    assert (trained - logits(start)).abs().max() > 1e-4
    merged.save_pretrained(tmp_path / "merged")
    require_same(tmp_path / "merged", trained)
