"""The main job, at a size of seconds: its figures are its models', and it runs on several processes."""

import json
import math
import os
import subprocess
import sys

import finetune
import pytest
import torch
from methods import patched
from recipe_runs import SMALL
from test_budget import ROOT
from texts import HeldOutBlocks, Objective, RecipeError, encode, one_line_errors, read_texts, split_documents
from torch.utils.data import default_collate
from transformers import AutoModelForCausalLM, AutoTokenizer


def loss_of(model, blocks):
    """The mean over held-out blocks, by the model's own loss."""
    batch = default_collate([blocks[i] for i in range(len(blocks))])
    with torch.no_grad():
        return model.eval()(**batch).loss.item()


@pytest.fixture(scope="module")
def blocks(finished, text):
    tokenizer = AutoTokenizer.from_pretrained(finished / "control")
    tokens, sizes = encode(split_documents(read_texts([str(text)]))[1], tokenizer)
    return HeldOutBlocks(tokens, sizes, Objective(16), 20)


def test_figures_are_those_of_the_saved_models(finished, blocks):
    found = json.loads((finished / "results.json").read_text())
    assert list(found["variants"]) == ["dyt", "rms+rope", "control"]
    original = AutoModelForCausalLM.from_pretrained(finished / "baseline")
    assert found["original"]["loss"] == pytest.approx(loss_of(original, blocks), abs=1e-5)
    for name, row in found["variants"].items():
        model = AutoModelForCausalLM.from_pretrained(finished / name)
        assert row["end"]["loss"] == pytest.approx(loss_of(model, blocks), abs=1e-5)
        assert row["end"]["perplexity"] == pytest.approx(math.exp(row["end"]["loss"]))
        assert [point["step"] for point in row["curve"]] == [0, 1, 2, 4]
        assert row["end"]["loss"] < row["start"]["loss"]
    assert found["variants"]["control"]["start"] == found["original"]
    copied = patched(original, "dyt", "copied", [])
    assert found["variants"]["dyt"]["copied"]["loss"] == pytest.approx(loss_of(copied, blocks), abs=1e-5)


def test_the_table_says_what_each_patch_cost(finished):
    told, found = (finished / "results.md").read_text("utf-8"), json.loads((finished / "results.json").read_text())
    rows = {line.split("|")[1].strip(): line for line in told.splitlines() if line.startswith("|")}
    assert f"{found['variants']['dyt']['copied']['perplexity']:.1f}" in rows["dyt"]
    assert "no" in rows["control"]
    assert (finished / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--variants rmss", "is called 'rmss'. Did you mean 'rms'?"),
        ("--variants rms+dyt", "two schemes of one kind: 'rms' and 'dyt'"),
        ("--text missing.txt", "can't read text from missing.txt"),
        ("--model ./no/such/model", "can't open ./no/such/model"),
        ("--block_size 100000", "less than two blocks"),
        ("--baseline_steps 0", "untrained"),
    ],
)
def test_refused_before_anything_is_trained(flags, told, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finetune, "train", lambda *a, **k: pytest.fail("training began"))
    given = [] if "--text" in flags else ["--text", str(text)]
    with pytest.raises(SystemExit) as ended, one_line_errors():
        finetune.main([*given, *flags.split()])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.strip().splitlines()) == 1


def test_a_loss_that_is_no_number_stops(text, tmp_path):
    flags = [*SMALL.split(), "--learning_rate", "1e38", "--text", str(text), "--output_dir", str(tmp_path)]
    with pytest.raises(RecipeError, match=r"in step . of baseline: take a lower --learning_rate"):
        finetune.main(flags)


# accelerate 1.15 trains whole copies on CPUs if FSDP is asked for; as of GPUs it reads FSDP's settings
SHARDED_ON_CPUS = """
from accelerate import PartialState
from accelerate.utils import DistributedType
PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU
"""


@pytest.mark.slow
@pytest.mark.parametrize(("config", "kind"), [("ddp.yaml", "MULTI_CPU"), ("fsdp2.yaml", "FSDP")])
def test_two_processes_give_the_figures_of_one(config, kind, finished, text, tmp_path):
    flags = [*SMALL.split(), "--text", str(text), "--output_dir", str(tmp_path), "--variants", "rms+rope", "control"]
    script = tmp_path / "script.py"
    script.write_text(SHARDED_ON_CPUS * (kind == "FSDP") + f"import finetune\nfinetune.main({flags!r})\n", "utf-8")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--mixed_precision", "no"]
    command += ["--config_file", str(ROOT / "recipes/accelerate" / config), str(script)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found, alone = (json.loads((out / "results.json").read_text()) for out in (tmp_path, finished))
    assert found["processes"] == f"2, {kind}"
    for name, ours in found["variants"].items():  # a repair's descent on maps enlarges the baselines' rounding
        start, end = (abs(ours[at]["loss"] - alone["variants"][name][at]["loss"]) for at in ("start", "end"))
        assert end <= 1e-4 + 2 * start <= 1e-3
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "rms+rope").config.hfpatch
    assert (tmp_path / "rms+rope" / "hfpatch_weights.json").exists()
