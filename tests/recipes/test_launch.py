"""The accelerate configs that ship with the recipes: two processes on one CPU, as a user would launch them."""

import json
import os
import subprocess
import sys

import finetune
import heal
import pytest
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from hfrecipes.settings import read_run
from hfrecipes.training import Run
from run_files import ROOT, read_results, tiny

pytestmark = pytest.mark.slow

CONFIGS = ROOT / "recipes" / "configs" / "accelerate"


def small(out, text):
    flags = (
        "--layers 2 --baseline_steps 3 --steps 3 --heldout_blocks 8 --curve_blocks 4 --warmup_steps 1 --calibration 4"
    )
    return tiny(out, text, flags, variants="rms+rope")


@pytest.fixture(scope="module")
def alone(text, tmp_path_factory):
    """The same run in one process."""
    out = tmp_path_factory.mktemp("alone")
    assert finetune.main(small(out, text)) == 0
    return out


# accelerate gives DeepSpeed no backend on a CPU; DeepSpeed itself runs there
DEEPSPEED_ON_A_CPU = """
from accelerate import PartialState
from accelerate.utils import DistributedType
def gloo(*args):
    import deepspeed
    deepspeed.comm.comm.cdb = None  # the group of the run before
    return "gloo", DistributedType.NO
PartialState._prepare_backend = gloo
"""
# Stopped in the middle of the patched model, then taken up again: in one launch, for its time.
SCRIPT = """
from pathlib import Path
import finetune
assert finetune.main([*{argv!r}, "--stop_after", "5"]) == 130
(state,) = Path({out!r}).glob("state/*")
print("STATE", *sorted(path.name for path in state.iterdir()))
assert finetune.main([*{argv!r}, "--resume"]) == 0
"""


def launch(config, source, tmp_path):
    """A script in two processes, which must end well: what was printed."""
    script, deepspeed = tmp_path / "script.py", config == "deepspeed.yaml"
    script.write_text((DEEPSPEED_ON_A_CPU if deepspeed else "") + source, "utf-8")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / config)]
    command += ["--mixed_precision", "no", str(script)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")])
    settings = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "ACCELERATE_USE_CPU": str(not deepspeed)}
    if deepspeed:
        settings |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_TORCH_DEVICE": "cpu"}
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.sample(0, slow=2)
@pytest.mark.parametrize(
    ("config", "kind", "state"),
    [
        ("ddp.yaml", "MULTI_CPU", "model.safetensors"),
        ("fsdp2.yaml", "FSDP", "pytorch_model_fsdp_0"),
        ("deepspeed.yaml", "DEEPSPEED", "pytorch_model"),
    ],
)
def test_two_processes_train_stop_go_on_save_and_load(alone, text, tmp_path, config, kind, state):
    if kind == "DEEPSPEED":
        pytest.importorskip("deepspeed")
    out = tmp_path / "out"
    printed = launch(config, SCRIPT.format(argv=small(out, text), out=str(out)), tmp_path)
    assert state in next(line for line in printed.splitlines() if line.startswith("STATE")), "in pieces, or not"
    results, expected = read_results(out), read_results(alone)
    assert (results["hardware"]["processes"], results["hardware"]["distributed"]) == (2, kind)
    for name, stage in expected["stages"].items():
        assert results["stages"][name]["train_loss"] == pytest.approx(stage["train_loss"], abs=1e-4)
        assert results["stages"][name]["end"]["loss"] == pytest.approx(stage["end"]["loss"], abs=1e-4)
    folder = out / "rms+rope"
    saved, alike = (json.loads((where / "rms+rope" / "config.json").read_text()) for where in (out, alone))
    assert saved["model_type"] == alike["model_type"]
    assert (folder / "hfpatch_weights.json").exists()
    assert saved["architectures"] == alike["architectures"]
    assert saved["hfpatch"].keys() == alike["hfpatch"].keys()
    of_run = Run(read_run(small(tmp_path, text), "finetune.py"), "")
    loss = of_run.measure(of_run.task.load(str(folder)), of_run.loader(of_run.task.heldout))["loss"]
    assert loss == pytest.approx(results["stages"]["rms+rope"]["end"]["loss"], abs=1e-5)


def test_a_distilled_token_weighs_the_same_in_every_process(bert, text, tmp_path):
    """However many tokens are hidden in the process's share of a batch."""

    def flags(out):
        rest = "--method distil --patch dyt --start copied --no_control"
        return tiny(tmp_path / out, text, "--model", bert, rest, variants="")

    assert heal.main(flags("alone")) == 0
    launch("ddp.yaml", f"import heal\nassert heal.main({flags('two')!r}) == 0\n", tmp_path)
    alone, two = (read_results(tmp_path / out)["stages"]["healed"]["train_loss"] for out in ("alone", "two"))
    assert two == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize(
    ("config", "kind"), [("ddp.yaml", "multi_gpu"), ("fsdp2.yaml", "use_fsdp"), ("deepspeed.yaml", "use_deepspeed")]
)
def test_launch_understands_a_config(config, kind):
    """As accelerate's own parser reads it; flags win."""
    flags = ["--config_file", str(CONFIGS / config), "--num_processes", "8", "recipe.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(flags))
    assert [k for k in ("multi_gpu", "use_fsdp", "use_deepspeed") if getattr(args, k)] == [kind]
    assert (args.num_processes, defaults.num_processes) == (8, 2)
    if kind == "use_fsdp":
        assert (args.fsdp_version, args.fsdp_auto_wrap_policy) == (2, "TRANSFORMER_BASED_WRAP")
    if kind == "use_deepspeed":
        assert (args.zero_stage, args.mixed_precision) == (2, "bf16")
        # what the recipe sets: as a word from here, accelerate would take it for a number
        assert args.gradient_accumulation_steps is args.gradient_clipping is None
