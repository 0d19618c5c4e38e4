"""TRL's trainers get the name of a patched checkpoint, in processes that are told of hfpatch in one way or in none."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forms import RUN, called, forms_tokenizer, require_refused, save_forms, sentences, unpatched
from tiny_models import difference
from transformers import AutoModelForCausalLM

pytest.importorskip("trl", reason="trl isn't installed")
pytestmark = pytest.mark.slow

TOOL = Path(__file__).with_name("trl_tool.py")
WAYS = ["import hfpatch", "hfpatch run", "trust_remote_code"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_forms(folder)
    return folder


def losses_of(model: Any, out: Path) -> dict[str, list[float]]:
    """Those of training a model that is handed over, as an object."""
    from trl_tool import train

    opened = {how: [model() for _ in range(count)] for how, count in (("sft", 1), ("dpo", 2))}
    options = {"processing_class": forms_tokenizer()}
    return {
        "sft": train("sft", opened["sft"][0], out / "sft", **options),
        "dpo": train("dpo", opened["dpo"][0], out / "dpo", ref_model=opened["dpo"][1], **options),
    }


@pytest.fixture(scope="module")
def expected(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    return losses_of(lambda: AutoModelForCausalLM.from_pretrained(saved / "plugin"), tmp_path_factory.mktemp("object"))


def trained(way: str, saved: Path, out: Path) -> Any:
    if way == "trust_remote_code":
        return called(sys.executable, TOOL, saved / "remote", out, "trust_remote_code", home=out, hide_hfpatch=True)
    if way == "import hfpatch":
        return called(sys.executable, TOOL, saved / "plugin", out, "hfpatch", home=out)
    return called(*(RUN if way == "hfpatch run" else [sys.executable]), TOOL, saved / "plugin", out, home=out)


@pytest.mark.parametrize("way", WAYS)
def test_sft_and_dpo_by_name_train_the_patched_model(
    way: str, saved: Path, expected: dict[str, list[float]], tmp_path: Path, record: Any
) -> None:
    done = trained(way, saved, tmp_path)
    assert done.returncode == 0, done.stderr
    losses = json.loads(done.stdout.splitlines()[-1])
    assert losses["dpo"][0] == pytest.approx(math.log(2))  # the model that it starts from is the reference
    start = AutoModelForCausalLM.from_pretrained(saved / "plugin")
    for how in ("sft", "dpo"):
        assert losses[how] == pytest.approx(expected[how], rel=1e-4)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / how)
        assert type(again.transformer.ln_f).__name__ == "DynamicTanh"
        with torch.no_grad():
            logits = again.eval()(torch.arange(5, 20)[None]).logits
        torch.testing.assert_close(logits, torch.load(tmp_path / how / "logits.pt"), rtol=0, atol=1e-5)
        assert difference(again, start) > 1e-2
        assert (again.transformer.ln_f.alpha != start.transformer.ln_f.alpha).all()
    off = max(abs(a - b) for how in losses for a, b in zip(losses[how], expected[how], strict=True))
    figures = f"losses off by {off:.1e} of the object's", "a process that nobody told refuses"
    record("trl", f"SFT and DPO by name, no ref_model: {way}", "trains and saves the patched model", *figures)


def test_the_unpatched_model_has_other_losses(expected: dict[str, list[float]], tmp_path: Path) -> None:
    """Control."""
    plain = losses_of(unpatched, tmp_path)
    assert abs(plain["sft"][0] - expected["sft"][0]) > 0.05
    assert abs(plain["dpo"][1] - expected["dpo"][1]) > 0.05


def test_a_process_that_nobody_told_refuses(saved: Path, tmp_path: Path) -> None:
    require_refused(trained("nothing", saved, tmp_path))


def test_the_command_line(saved: Path, tmp_path: Path, record: Any) -> None:
    """`trl sft` starts its script through accelerate, in a process of its own."""
    (tmp_path / "data").mkdir()
    lines = [json.dumps({"text": text}) for text in sentences(8)]
    (tmp_path / "data/train.jsonl").write_text("\n".join(lines))
    places = ("--model_name_or_path", saved / "plugin", "--dataset_name", "data", "--output_dir", "out")
    settings = "--max_steps 2 --max_length 16 --per_device_train_batch_size 2 --use_cpu --bf16 False --report_to none"
    done = called(*RUN, "trl", "sft", *places, *settings.split(), home=tmp_path)
    assert done.returncode == 0, done.stderr
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again.transformer.ln_f).__name__ == "DynamicTanh"
    assert difference(again, AutoModelForCausalLM.from_pretrained(saved / "plugin")) > 1e-4
    record("trl", "`hfpatch run -- trl sft --model_name_or_path`", "trains and saves the patched model")
