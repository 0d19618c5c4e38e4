"""What can't work is refused at once: one line that names it, exit status 2, and nothing trained."""

import importlib

import pytest
import train_depths
from accelerate import PartialState
from harness.training import Run


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """Runs a recipe that refuses its flags before anything is trained; the line that it says."""

    def run(recipe, flags):
        for trains in (Run, train_depths):
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
        ("train_grid", "--variants rmss", "is called 'rmss'. Did you mean 'rms'?"),
        ("train_grid", "--variants rms+dyt", "two schemes of one kind: 'rms' and 'dyt'"),
        ("train_grid", "--text missing.txt", "missing.txt"),
        ("train_grid", "--output_dir table.csv/out", "can't write"),
        ("train_grid", "--text table.csv", "less than one block"),
        ("train_grid", "--learning-rte 1", "--learning-rte"),
        ("train_grid", "own.yml.txt", "own.yml.txt"),
        ("train_grid", "--task nothing", "nothing"),
        ("train_grid", "--variants control", "--variants"),
        ("train_grid", "--baseline_steps 0 --starts reset copied", "--baseline_steps"),
        ("train_healed", "--model ./no/such/model", "./no/such/model"),
        ("train_healed", "--patch control", "--patch control"),
        ("train_healed", "--start reset --baseline_steps 0", "--baseline_steps 0"),
        ("train_depths", "--variants pots", "pots"),
        ("train_depths", "--variants deepnorm:alpha=0", "alpha"),
        ("train_depths", "--block_size 3000000", "--block_size"),
        ("time_patched", "--new_tokens 9 --block_size 8", "--new_tokens"),
        ("time_patched", "--parts places --modes compiled", "--parts places"),
        ("measure_saved", "", "give --models"),
        ("measure_saved", "--models ./missing", "./missing"),
        # numbers out of range, also where another dataclass has the field's range
        ("train_grid", "--task classify --batch_size 0", "--batch_size"),
        ("train_grid", "--steps 5 0", "--steps"),
        ("train_healed", "--task embed --learning_rate 0", "--learning_rate"),
        ("train_healed", "--task embed --calibration 1", "--calibration"),
        ("train_healed", "--lora_rank -1", "--lora_rank"),
        ("measure_saved", "--models x --lengths 64 4", "--lengths"),
        ("measure_saved", "--models x --task embed --lengths 64", "--task retrieval"),
        ("train_depths", "--width 17", "a multiple of 16"),
        ("time_patched", "--widths 64 65", "--widths"),
        ("time_patched", "--parts nothing", "--parts"),
    ],
)
def test_refused_at_once(refused, tmp_path, monkeypatch, recipe, flags, named):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.csv").write_text("text,label\na,1\nb,2\n")
    small = "--layers 1 --width 32" if recipe.startswith("train_") and recipe != "train_depths" else ""
    assert named in refused(recipe, ["--output_dir", "out", *flags.split(), *small.split()])


@pytest.mark.parametrize("script", ["train_grid", "train_healed", "train_depths", "time_patched", "gpu_check"])
def test_several_processes_are_refused(refused, tmp_path, monkeypatch, script):
    monkeypatch.chdir(tmp_path)
    assert PartialState().num_processes == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = "--device cpu --tiny" if script == "gpu_check" else ""
    said = refused(script, ["--output_dir", "out", *flags.split()])
    assert "start it without a launcher" in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
