"""Script `trl_tool.py FOLDER OUT [MODULE | trust_remote_code]`: trains by SFT and DPO what a folder's name stands for.

Both trainers get the name, DPO no reference model. MODULE is imported first. What was trained is saved in OUT/sft and
OUT/dpo, its logits beside it, and the last line printed is a JSON object of losses. Nothing else imports hfpatch here.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

TEXTS = [" ".join(f"w{(7 * i + 3 * j) % 90 + 5}" for j in range(12)) for i in range(8)]


def train(how: str, model: Any, out: Path, **given: Any) -> list[float]:
    """The losses of two steps. `given` goes to the trainer, but for `model_init_kwargs`, which go to its settings."""
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "seed": 0,
        "model_init_kwargs": given.pop("model_init_kwargs", None),
    }
    if how == "sft":
        data = Dataset.from_dict({"text": TEXTS})
        trainer = SFTTrainer(model=model, args=SFTConfig(max_length=16, **settings), train_dataset=data, **given)
    else:
        answers = {"chosen": TEXTS[1:] + TEXTS[:1], "rejected": TEXTS[2:] + TEXTS[:2]}
        data = Dataset.from_dict({"prompt": TEXTS, **answers})
        trainer = DPOTrainer(model=model, args=DPOConfig(**settings), train_dataset=data, **given)
    trainer.train()
    trainer.save_model(str(out))
    with torch.no_grad():
        torch.save(trainer.model.eval()(torch.arange(5, 20)[None]).logits, out / "logits.pt")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(folder: str, out: str, first: str = "sys") -> None:
    options = {"model_init_kwargs": {"trust_remote_code": True}} if first == "trust_remote_code" else {}
    if not options:
        importlib.import_module(first)
    print(json.dumps({how: train(how, folder, Path(out) / how, **options) for how in ("sft", "dpo")}))


if __name__ == "__main__":
    main(*sys.argv[1:])
