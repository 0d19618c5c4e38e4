"""What can't work is refused at once: one line that names it, exit status 2, and nothing trained."""

import importlib

import pytest
import stability
from accelerate import PartialState
from hfrecipes.training import Run


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


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("recipe", "flags", "named"),
    [
        ("finetune", "--variants rmss", "is called 'rmss'. Did you mean 'rms'?"),
        ("finetune", "--variants rms+dyt", "two schemes of one kind: 'rms' and 'dyt'"),
        ("finetune", "--variants dyt dyt", "named twice"),
        ("finetune", "--text missing.txt", "missing.txt"),
        ("finetune", "--output_dir table.csv/out", "can't write"),
        ("finetune", "--text table.csv", "less than one block"),
        ("finetune", "--baseline_steps 0", "untrained"),
        ("finetune", "--model ./no/such/model", "./no/such/model"),
        ("finetune", "--learning-rte 1", "--learning-rte"),
        ("finetune", "own.yml.txt", "own.yml.txt"),
        ("finetune", "--task nothing", "nothing"),
        ("finetune", "--task retrieval", "invalid choice: 'retrieval'"),
        ("finetune", "--task image --data ./nowhere", "--data ./nowhere"),
        ("finetune", "--task image --variants rope:axes=3", "UnsupportedError"),
        ("heal", "--variants rms", "--variants"),
        ("heal", "--variants=rms", "--variants"),
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
        # numbers out of range, also where another dataclass has the field's range
        ("finetune", "--task classify --batch_size 0", "--batch_size"),
        ("finetune", "--task embed --learning_rate 0", "--learning_rate"),
        ("finetune", "--calibration 1", "--calibration"),
        ("heal", "--task embed --calibration 1", "--calibration"),
        ("heal", "--lora_rank -1", "--lora_rank"),
        ("compare", "--steps 5 0", "--steps"),
        ("compare", "--task image --warmup_steps -1", "--warmup_steps"),
        ("evaluate", "--models x --lengths 64 4", "--lengths"),
        ("evaluate", "--models x --task image --lengths 64", "--task retrieval"),
        ("stability", "--width 17", "a multiple of 16"),
        ("benchmark", "--widths 64 65", "--widths"),
        ("benchmark", "--parts nothing", "--parts"),
    ],
)
def test_refused_at_once(refused, tmp_path, monkeypatch, recipe, flags, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text("text,label\na,1\nb,2\n")
    small = "--layers 1 --width 32" if recipe in ("finetune", "heal", "compare") else ""
    assert named in refused(recipe, ["--output_dir", "out", *flags.split(), *small.split()])


LAUNCHED = {
    "finetune": "--layers 1 --width 32",
    "heal": "--layers 1 --width 32",
    "compare": "--layers 1 --width 32",
    "stability": "",
    "benchmark": "",
    "evaluate": "--models ./it",
    "gpu_check": "--device cpu --tiny",
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("recipe", LAUNCHED)
@pytest.mark.parametrize("launcher", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"])
def test_processes_that_accelerate_does_not_join(refused, tmp_path, monkeypatch, recipe, launcher):
    """torchrun on CPUs without ACCELERATE_USE_CPU: two processes of one each would write the same folder."""
    assert PartialState().num_processes == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(launcher, "2")
    (tmp_path / "it").mkdir()
    said = refused(recipe, ["--output_dir", "out", *LAUNCHED[recipe].split()])
    assert said.startswith("RecipeError: 2 processes were started, and accelerate joins 1 of them")
    assert "ACCELERATE_USE_CPU=true" in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
