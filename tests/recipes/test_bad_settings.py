"""What can't work is refused at once: one line that names it, exit status 2, and nothing trained."""

import importlib
import shutil
from dataclasses import fields
from functools import partial

import benchmark
import compare
import evaluate
import heal
import pytest
import stability
from accelerate import Accelerator
from hfrecipes import settings
from hfrecipes.corpus import RecipeError
from hfrecipes.settings import Range
from hfrecipes.tasks import TASKS, find_task
from hfrecipes.training import Run
from run_files import tiny
from stand_ins import save_stand_in
from transformers import AutoModelForCausalLM


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """Runs a recipe that refuses its flags before anything is trained; the line that it says."""

    def run(recipe, flags):
        for trains in (Run, stability):
            monkeypatch.setattr(trains, "train", lambda *a, **k: pytest.fail("training began"))
        assert importlib.import_module(recipe).main([*map(str, flags)]) == 2
        error = capsys.readouterr().err.strip()
        assert "\n" not in error
        assert not (tmp_path / "out" / "results.json").exists()
        return error

    return run


@pytest.mark.parametrize(
    ("recipe", "flags", "named"),
    [
        ("finetune", "--variants rmss", "is called 'rmss'. Did you mean 'rms'?"),
        ("finetune", "--variants rms+dyt", "two schemes of one kind: 'rms' and 'dyt'"),
        ("finetune", "--variants dyt dyt", "named twice"),
        ("finetune", "--text missing.txt", "missing.txt"),
        ("finetune", "--text table.csv", "less than one block"),
        ("finetune", "--baseline_steps 0", "untrained"),
        ("finetune", "--model ./no/such/model", "./no/such/model"),
        ("finetune", "--learning-rte 1", "--learning-rte"),
        ("finetune", "own.yml.txt", "own.yml.txt"),
        ("finetune", "--task nothing", "nothing"),
        ("finetune", "--task image --data ./nowhere", "--data ./nowhere"),
        ("finetune", "--task image --variants rope:axes=3", "UnsupportedError"),
        ("heal", "--variants rms", "--variants"),
        ("heal", "--patch control", "--patch control"),
        ("heal", "--start reset --baseline_steps 0", "--baseline_steps 0"),
        ("compare", "--variants control", "--variants"),
        ("compare", "--baseline_steps 0 --starts reset copied", "--baseline_steps"),
        ("stability", "--variants pots", "pots"),
        ("stability", "--variants deepnorm:alpha=0", "alpha"),
        ("stability", "--block_size 3000000", "--block_size"),
        ("benchmark", "--new_tokens 9 --block_size 8", "--new_tokens"),
        ("benchmark", "--parts places --modes compiled", "--parts places"),
        ("evaluate", "", "give --models"),
        ("evaluate", "--models ./missing", "./missing"),
    ],
)
def test_refused_at_once(refused, tmp_path, monkeypatch, recipe, flags, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text("text,label\na,1\nb,2\n")
    small = "--layers 1 --width 32" if recipe in ("finetune", "heal", "compare") else ""
    assert named in refused(recipe, [*flags.split(), *small.split(), "--output_dir", "out"])


READERS = {
    **{f"finetune --task {task}": (find_task(task).Config, settings.RunConfig) for task in TASKS},
    "heal": (heal.HealConfig,),
    "compare": (compare.CompareConfig,),
    "evaluate": (evaluate.EvaluateConfig,),
    "stability": (stability.StabilityConfig,),
    "benchmark": (benchmark.BenchmarkConfig,),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_range_and_choice_is_checked(reader):
    recipe, *task = reader.split()
    read = {
        "evaluate": partial(evaluate.read, recipe="evaluate.py", about=""),
        "stability": partial(settings.read_settings, stability.StabilityConfig, recipe="stability.py"),
        "benchmark": partial(settings.read_settings, benchmark.BenchmarkConfig, recipe="benchmark.py"),
    }.get(recipe, partial(settings.read_run, recipe=f"{recipe}.py", more=READERS[reader] if not task else ()))
    limited = {
        f.name: f.metadata["choices"] for kind in READERS[reader] for f in fields(kind) if "choices" in f.metadata
    }
    assert limited
    for name, choices in limited.items():
        with pytest.raises(RecipeError, match=f"--{name}"):
            read([*task, f"--{name}", "-7" if isinstance(choices, Range) else "nothing"])


def test_models_that_do_not_fit(text, tmp_path, refused):
    save_stand_in("openai-community/gpt2", tmp_path)
    model = tmp_path / "openai-community" / "gpt2"
    shutil.copytree(model, tmp_path / "torn")
    weights = tmp_path / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "bare")
    refusals = {
        "--block_size 1025": model,  # beyond its positions
        "there is no tokenizer": tmp_path / "bare",
        "AutoModelForCausalLM can't load": tmp_path / "torn",
    }
    for named, folder in refusals.items():
        more = [named] if named.startswith("--") else []
        assert named in refused("finetune", tiny(tmp_path / "out", text, "--model", folder, *more))


def test_output_folder_that_can_not_be_made(text, refused):
    assert "RecipeError: can't write" in refused("finetune", tiny(text / "out", text))


def test_what_accelerate_refuses(text, tmp_path, refused):
    # Here: a second precision in one process. Elsewhere: one that the device lacks.
    Accelerator(mixed_precision="no")
    assert "RecipeError: accelerate refuses" in refused("finetune", tiny(tmp_path, text, "--mixed_precision bf16"))
