"""The runs behind docs/results: what is left of them, in pieces that go on, and what each leaves."""

import importlib
import json
import shlex
import time
from pathlib import Path

import all_results
import pytest
from harness import command

import hfpatch

TINY = "--width 16 --block_size 8 --batch_size 2 --steps 3 --depths 1 3 --seeds 0 --text {text}"


@pytest.fixture
def folders(tmp_path, text):
    """--results and --output_dir of a table with a run of seconds, and one that needs it."""
    runs = f"""
first:
  minutes: 1
  shows: a first one
  command: train_depths.py {TINY.format(text=shlex.quote(str(text)))}
second:
  minutes: 120
  shows: what follows
  needs: first/models
  command: train_depths.py --text {{needs}}
"""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "runs.yaml").write_text(runs)
    return ["--results", str(tmp_path / "results"), "--output_dir", str(tmp_path / "runs")]


def leave_results(folder, version):
    folder.mkdir(parents=True)
    (folder / "results.md").write_text(f"a CPU, 2 cores; python 3.11.7, hfpatch {version}, torch 2.13; 5 s.\n")


class TestTable:
    @pytest.mark.parametrize("name", all_results.read_runs("tools/results/figures"))
    def test_each_command_is_one_that_its_recipe_takes(self, name, monkeypatch):
        run = all_results.read_runs("tools/results/figures")[name]
        recipe, *flags = run.arguments("runs")
        module = importlib.import_module(Path(recipe).stem)
        read = {}

        def check(config):
            read["config"] = config
            raise command.RecipeError("read")

        monkeypatch.chdir(all_results.ROOT)
        monkeypatch.setattr(command, "check", check)
        assert module.main(flags) == 2
        assert read["config"].output_dir == f"runs/{name}"

    def test_each_folder_of_figures_has_its_run(self):
        runs = all_results.read_runs("tools/results/figures")
        folders = {path.parent.name for path in (all_results.ROOT / "tools/results/figures").glob("*/results.md")}
        assert folders - {"gpu"} <= {name for name, run in runs.items() if run.keeps_figures}

    def test_what_is_left_is_of_another_version(self, folders, tmp_path, capsys):
        leave_results(tmp_path / "results" / "first", hfpatch.__version__)
        leave_results(tmp_path / "results" / "second", "0.1.0")
        assert all_results.main([*folders, "--list", "true"]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        assert [line.split("|")[2].strip() for line in lines[1:]] == ["done", "to do"]
        assert not (tmp_path / "runs" / "first").exists()

    def test_what_only_others_need_is_left_while_they_are(self, folders, tmp_path):
        runs = [
            all_results.Run("alone", 1, "", "", keeps_figures=False),
            all_results.Run("first", 1, "", "", keeps_figures=False),
            all_results.Run("second", 1, "", "", needs="first/models", keeps_figures=False),
            all_results.Run("third", 1, "", "measure_saved.py --models {needs}", needs="first/models second/swapped"),
        ]
        places = [str(tmp_path / "results"), str(tmp_path / "runs")]
        assert [run.name for run in all_results.runs_left(runs, *places)] == ["first", "second", "third"]
        leave_results(tmp_path / "results" / "third", hfpatch.__version__)
        assert all_results.runs_left(runs, *places) == []

    def test_folders_that_a_command_names(self):
        run = all_results.Run("last", 1, "", "measure_saved.py --models {needs}", needs="first/models second/swapped")
        assert run.arguments("runs")[1:4] == ["--models", "runs/first/models", "runs/second/swapped"]

    def test_a_folder_of_another_version_is_begun_anew(self, folders, tmp_path):
        run = all_results.read_runs(folders[1])["first"]
        place = tmp_path / "runs" / "first"
        place.mkdir(parents=True)
        for version, goes_on in ((hfpatch.__version__, True), ("0.1.0", False)):
            (place / "results.json").write_text(json.dumps({"command": "", "versions": {"hfpatch": version}}))
            assert ("--resume" in run.arguments(folders[3])) == goes_on


class TestRefused:
    def test_a_name_that_isnt_there(self, folders, capsys):
        assert all_results.main([*folders, "--runs", "third"]) == 2
        assert "There are first, second" in capsys.readouterr().err

    def test_what_a_run_needs(self, folders, capsys):
        assert all_results.main([*folders, "--runs", "second"]) == 2
        assert "--runs first first" in capsys.readouterr().err

    def test_no_table(self, tmp_path, capsys):
        assert all_results.main(["--results", str(tmp_path), "--output_dir", str(tmp_path / "runs")]) == 2
        assert "runs.yaml" in capsys.readouterr().err


@pytest.mark.slow
class TestRuns:
    def test_stopped_and_taken_up_again(self, folders, tmp_path, monkeypatch):
        began = time.monotonic()
        assert all_results.main([*folders, "--runs", "first", "--minutes", "0.01"]) == 130
        assert time.monotonic() - began < 900  # not until its end
        assert not (tmp_path / "results" / "first").exists()
        assert all_results.main([*folders, "--runs", "first"]) == 0
        names = {path.name for path in (tmp_path / "results" / "first").iterdir()}
        assert names == {"results.md", "curves.png"}
        assert all_results.read_runs(folders[1])["first"].is_made(folders[1], folders[3])

    def test_a_run_that_fails(self, folders, tmp_path, capsys):
        table = tmp_path / "results" / "runs.yaml"
        table.write_text(table.read_text().replace("--steps 3", "--steps 0"))
        assert all_results.main([*folders, "--runs", "first"]) == 2
        assert "first failed with status 2" in capsys.readouterr().err
