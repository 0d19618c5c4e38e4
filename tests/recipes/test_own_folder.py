"""Results of one recipe aren't replaced by another one's."""

import json
from pathlib import Path

import benchmark
import compare
import evaluate
import finetune
import heal
import pytest
import stability
from hfrecipes import training as run
from hfrecipes.corpus import RecipeError
from run_files import read_results

RECIPES = {module.__name__: module for module in (finetune, heal, compare, stability, evaluate, benchmark)}
TRAIN = [name for name in RECIPES if name not in ("evaluate", "benchmark")]  # which have no --resume
TINY = "--layers 1 --width 32 --vocab_size 300 --block_size 16 --batch_size 4 --baseline_steps 2 --tracker none"
TINY += " --heldout_blocks 8 --curve_blocks 4 --warmup_steps 1 --variants control"


def write_results(folder, name, **more):
    results = {"command": f"python recipes/{name}.py --seed 3", "config": {}, "data": {}, **more}
    (folder / "results.json").write_text(json.dumps(results))
    (folder / "state").mkdir()
    return (folder / "results.json").read_bytes()


@pytest.mark.parametrize(("name", "resume"), [*((n, False) for n in RECIPES), *((n, True) for n in TRAIN)])
def test_another_recipes_results_stay(name, resume, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run.Run, "__init__", lambda *a: pytest.fail("a run began"))
    other = "heal" if name != "heal" else "finetune"
    before = write_results(tmp_path, other, stages={})
    flags = ["--output_dir", str(tmp_path), *["--resume"][:resume]]
    flags += ["--text", str(text)] if name != "benchmark" else []
    flags += ["--models", "gpt2"] if name == "evaluate" else []
    assert RECIPES[name].main(flags) == 2
    error = capsys.readouterr().err.strip()
    told = f"RecipeError: {tmp_path} holds results of {other}.py: take another --output_dir, or remove"
    assert error.startswith(told)
    assert error.endswith(f", or go on with {other}.py there: python recipes/{other}.py --seed 3 --resume")
    assert "\n" not in error
    assert (tmp_path / "results.json").read_bytes() == before
    assert (tmp_path / "state").exists()


@pytest.mark.slow
def test_ones_own_are_replaced_as_ever(text, tmp_path, capsys):
    argv = [*TINY.split(), "--text", str(text), "--output_dir", str(tmp_path)]
    for steps in ("2", "1"):
        assert finetune.main([*argv, "--steps", steps]) == 0
        assert read_results(tmp_path)["stages"]["control"]["step"] == int(steps)
        told = f"in {tmp_path}: results.md, results.json, curves.png, and a folder per trained model\n"
        assert capsys.readouterr().out.endswith(told)


@pytest.mark.parametrize("name", RECIPES)
def test_whose_they_are(name, tmp_path):
    for theirs in RECIPES:
        folder = tmp_path / theirs
        folder.mkdir()
        write_results(folder, theirs)
        if theirs == name:
            run.require_own_folder(f"{name}.py", str(folder))
        else:
            with pytest.raises(RecipeError, match=rf"holds results of {theirs}\.py: .*results\.json$"):
                run.require_own_folder(f"{name}.py", str(folder))
    run.require_own_folder(f"{name}.py", str(tmp_path / "none"))


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"command": null}', '{"command": ""}', '{"command": "python"}', "\xff"]
)
def test_what_no_recipe_wrote(content, tmp_path):
    (tmp_path / "results.json").write_text(content, "latin-1")
    with pytest.raises(
        RecipeError, match=r"can't read .*results\.json: it isn't a recipe's .*; take another --output_dir"
    ):
        run.require_own_folder("finetune.py", str(tmp_path))
    assert Path(tmp_path / "results.json").read_text("latin-1") == content
