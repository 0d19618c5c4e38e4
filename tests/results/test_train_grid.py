"""The grid against its control: equal budgets, honest verdicts, reports, stops and refusals."""

import math
import os
import re
import signal

import numpy as np
import paired
import pytest
import train_grid
from harness import compare_report, grid, settings
from harness import training as run
from harness.grid import Cell
from run_files import at_step, figures, read_results, tiny
from scipy import stats

GRID = "--variants dyt control --starts copied repaired --seeds 0 3 --steps 2 3"
PART = "--variants dyt --starts copied --seeds 0 --steps 3"


def small(out, text, *more):
    return tiny(out, text, "--baseline_steps 3 --save_every 1 --calibration 4", *more)


def part_of(finished, out):
    """The figures that an uninterrupted grid has for the models of a smaller one."""
    expected = figures(finished)
    return {name: expected[name] for name in figures(out)}


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """An uninterrupted grid: two seeds, two budgets, two starts."""
    out = tmp_path_factory.mktemp("finished")
    assert train_grid.main(small(out, text, GRID)) == 0
    return out


def planted(offsets, *, seeds=5, noise=0.004, higher=False, starts=("auto",), methods=("finetune",), steps=(20,)):
    """Results of a made-up grid in which each variant ends `offset` above the control, but for noise of each seed."""
    rng = np.random.default_rng(1)
    asked, stages = [], {}
    for seed in range(seeds):
        level = 3 + rng.normal(0, 0.2)  # what a seed does to all: pairing must take it out
        stages[f"baseline-{seed}"] = {"step": 9}
        kinds = [("control", "", "", n) for n in steps]
        kinds += [(v, s, m, n) for n in steps for v in offsets for s in starts for m in methods]
        for cell in (Cell(*kind, seed) for kind in kinds):
            end = level + offsets.get(cell.variant, 0.0) + rng.normal(0, noise)
            begin = level + 1 + 4 * offsets.get(cell.variant, 0.0)
            points = [{"step": n, "loss": begin + (end - begin) * n / cell.steps} for n in (0, 1, 10, cell.steps)]
            asked.append(cell._asdict())
            stages[cell.name] = {
                "step": cell.steps, "train_loss": [0.0] * cell.steps, "start": {"loss": begin},
                "end": {"loss": end}, "curve": points,
                "step_seconds": 0.2 if cell.variant == "control" else 0.25,
            }  # fmt: skip
    config = vars(settings.read_run(["--margin", "0.01"], "train_grid.py", "", (train_grid.CompareConfig,)))
    config |= {"steps": list(steps), "seeds": list(range(seeds)), "starts": list(starts)}
    return {
        "command": "python tools/results/train_grid.py", "config": config, "task": "lm",
        "data": {"source": "made up", "sha256": "0" * 64},
        "main": "loss", "higher_is_better": higher, "from_scratch": False, "control_method": "",
        "wall_seconds": 1.0,
        "hardware": {"cpu": "x", "cores": 2, "processes": 1, "device": "cpu"}, "versions": {"python": "3"},
        "grid": asked, "stages": stages,
    }  # fmt: skip


def by_variant(results):
    return {s.variant: s for s in grid.summarise(results).itertuples()}


class TestStatistics:
    def test_summary_is_of_pairs(self):
        results = planted({"dyt": 0.1})
        ends = {name: stage["end"]["loss"] for name, stage in results["stages"].items() if "end" in stage}
        own = [ends[f"dyt-auto-finetune-20-seed-{seed}"] for seed in range(5)]
        control = [ends[f"control-20-seed-{seed}"] for seed in range(5)]
        found, expected = by_variant(results)["dyt"], stats.ttest_rel(own, control).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
        assert found.sd == pytest.approx(np.std(own, ddof=1))
        assert found.sd > 0.1 > found.high - found.low, "seeds differ by more than the swap: pairing takes that out"
        assert math.isnan(paired.half_width(math.nan, 1)), "one figure has no interval"

    def test_planted_differences_are_found(self):
        offsets = {"dyt": 0.1, "rope": -0.1, "rms": 0.0}
        for higher, told in ((False, ["worse", "better", "same"]), (True, ["better", "worse", "same"])):
            found = by_variant(planted(offsets, higher=higher))
            assert [found[variant].verdict for variant in offsets] == told
        assert by_variant(planted({"dyt": 0.0}, noise=0.5))["dyt"].verdict == "undecided"
        assert by_variant(planted({"dyt": 9.0}, seeds=1))["dyt"].verdict == "one seed"

    def test_cost_recovered_and_time(self):
        found = by_variant(planted({"dyt": 0.1, "rms": 0.0, "rope": -0.1}, noise=0))
        assert (found["dyt"].cost, found["dyt"].recovered) == pytest.approx((0.4, 0.75))
        assert (found["dyt"].time, found["dyt"].time_low) == pytest.approx((1.25, 1.25))
        assert math.isnan(found["rms"].recovered), "nothing was lost"
        assert math.isnan(found["rope"].recovered), "nor of a gain"
        assert by_variant(planted({"dyt": -0.1}, noise=0, higher=True))["dyt"].recovered == pytest.approx(0.75)
        assert math.isnan(found["control"].difference)

    @pytest.mark.parametrize("change", [{"step": 19}, {"train_loss": [0.0] * 19}])
    def test_unequal_budgets_are_refused(self, change):
        results = planted({"dyt": 0.1})
        results["stages"]["dyt-auto-finetune-20-seed-2"] |= change
        with pytest.raises(ValueError, match="dyt-auto-finetune-20-seed-2"):
            grid.summarise(results)

    def test_only_the_control_of_the_same_seed_and_budget_counts(self):
        results = planted({"dyt": 0.1}, seeds=2, steps=(20, 40))
        for seed in range(2):
            results["stages"][f"control-40-seed-{seed}"]["end"]["loss"] += 1
        found = {s.steps: s.difference for s in grid.summarise(results).itertuples() if s.variant == "dyt"}
        assert found == pytest.approx({20: 0.1, 40: -0.9}, abs=0.02)
        del results["stages"]["control-20-seed-1"]
        seeds = {s.steps: (s.seeds, s.asked) for s in grid.summarise(results).itertuples() if s.variant == "dyt"}
        assert seeds == {20: (1, 2), 40: (2, 2)}

    def test_failures(self, tmp_path):
        results = planted({"dyt": 0.0}, seeds=3)
        results["stages"]["dyt-auto-finetune-20-seed-1"] = {"failed": "loss nan in step 3"}
        found = by_variant(results)["dyt"]
        assert (found.failed, found.seeds) == (1, 2)
        assert "1 of 3 failed: loss nan in step 3" in compare_report.compare_report(results)
        for kind in ("dyt-auto-finetune-20", "control-20"):
            results["stages"] |= {f"{kind}-seed-{seed}": {"failed": "loss nan in step 3"} for seed in range(3)}
            assert by_variant(results)["dyt"].verdict == "failed"
            compare_report.draw_reports(results, tmp_path / "curves.png")
            assert "3 of 3 failed: loss nan in step 3" in (tmp_path / "report.html").read_text("utf-8")

    def test_ranking(self):
        results = planted({"dyt": 0.1, "rope": 0.2}, methods=("finetune", "distil"), noise=0, seeds=3)
        for name, stage in results["stages"].items():
            if "distil" in name:
                stage["end"]["loss"] -= 0.05
        first, second = grid.ranking(results, "method").itertuples()
        assert (first.Index, first.rank, first.best, first.count) == ("distil", 1.0, 6, 6)
        assert (second.Index, second.rank, second.best) == ("finetune", 2.0, 0)
        assert second.difference == pytest.approx(0.05)
        assert second.chance == pytest.approx(2 / 2**6)
        assert grid.ranking(results, "start").empty, "there is one start"
        del results["stages"]["dyt-auto-distil-20-seed-0"]
        results["stages"]["rope-auto-distil-20-seed-0"] = {"failed": "loss nan"}
        ranks = grid.ranking(results, "method")
        assert list(ranks["count"]) == [5, 5], "whole comparisons only"
        assert list(ranks["best"]) == [4, 1], "what failed is last"
        assert list(grid.ranking(results | {"higher_is_better": True}, "method").index) == ["finetune", "distil"]


@pytest.fixture
def results():
    return planted({"rms": 0.0, "dyt": 0.1}, starts=("auto", "copied"), seeds=3)


class TestReport:
    def test_markdown(self, results):
        text, found = compare_report.compare_report(results), by_variant(results)["dyt"]
        rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
        assert [row[1] for row in rows][2:8] == ["control", "rms", "rms", "dyt", "dyt", "start"]
        assert {"worse", f"{found.low:+.4f} to {found.high:+.4f}", "1.25 x (1.25 to 1.25)"} < set(rows[6])
        assert "method" not in rows[0], "there is one"
        results["stages"].popitem()
        assert "Not finished: 14 of 15 models are there" in compare_report.compare_report(results)

    def test_page_is_one_file_with_names_escaped(self, tmp_path):
        results = planted({"<script>alert(1)</script>": 0.1, 'a"b&c': 0.0}, seeds=2)
        results["data"]["source"] = results["command"] = results["config"]["model"] = "<img src=x onerror='y'>"
        compare_report.draw_reports(results, tmp_path / "curves.png")
        page = (tmp_path / "report.html").read_text("utf-8")
        found = by_variant(results)['a"b&c']
        assert re.findall(r"<[^>]* (?:src|href|data|action)=.([^;>]*)", page) == ["data:image/png"], (
            "nothing from elsewhere"
        )
        assert not re.search(r"https?:|@import|<script|url\(", page)
        assert page.count("<img") == 1
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
        assert f"{found.difference:+.4f}" in page


class TestGrid:
    @pytest.mark.slow
    def test_models_of_a_seed_share_baseline_and_batches_with_a_control_of_each_budget(self, finished):
        stages = read_results(finished)["stages"]
        assert len(stages) == 2 * (1 + 2 * (1 + 2)), (
            "of each seed a baseline, and of each budget a control and two starts"
        )
        for seed in (0, 3):
            end = stages[f"baseline-{seed}"]["end"]
            assert stages[f"control-2-seed-{seed}"]["start"] == stages[f"control-3-seed-{seed}"]["start"] == end
            copied, repaired = (stages[f"dyt-{start}-finetune-2-seed-{seed}"] for start in ("copied", "repaired"))
            assert copied["start"] != end
            assert copied["start"] != repaired["start"]
            first = {stages[f"control-{steps}-seed-{seed}"]["train_loss"][0] for steps in (2, 3)}
            assert len(first) == 1, "the same first batch, whatever the budget"
        assert stages["control-2-seed-0"]["start"] != stages["control-2-seed-3"]["start"]
        assert not [*finished.glob("dyt*"), *finished.glob("control*")], "only figures are kept"

    @pytest.mark.slow
    def test_more_seeds_come_on_top_and_models_are_kept_if_asked(self, finished, text, tmp_path):
        argv = small(tmp_path, text, "--variants dyt --starts copied --steps 2")
        assert train_grid.main([*argv, "--seeds", "3"]) == 0
        assert train_grid.main([*argv, "--seeds", "3", "0", "--keep_models", "--resume"]) == 0
        assert figures(tmp_path) == part_of(finished, tmp_path)
        assert len(figures(tmp_path)) == 6
        assert "--seeds 3 0" in (tmp_path / "results.md").read_text("utf-8"), "what computes all of them"
        assert (tmp_path / "dyt-copied-finetune-2-seed-0" / "model.safetensors").exists()
        assert not (tmp_path / "dyt-copied-finetune-2-seed-3").exists()

    @pytest.mark.slow
    def test_ctrl_c_reports_what_is_finished(self, finished, text, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            at_step(patch, "step 2 of dyt-copied-finetune-3-seed-0", lambda: os.kill(os.getpid(), signal.SIGINT))
            assert train_grid.main(small(tmp_path, text, PART)) == 130
        assert "Not finished: 1 of 2 models are there" in (tmp_path / "report.html").read_text("utf-8")
        assert train_grid.main(small(tmp_path, text, PART, "--resume")) == 0
        assert figures(tmp_path) == part_of(finished, tmp_path)

    @pytest.mark.slow
    def test_diverged_model_is_a_result(self, text, tmp_path, monkeypatch):
        def diverge():
            raise run.DivergedError("loss nan, gradient norm 1 in step 2: start again")

        at_step(monkeypatch, "step 2 of dyt-auto-finetune-2-seed-0", diverge)
        argv = small(tmp_path, text, "--variants dyt --starts auto --steps 2 --seeds 0")
        assert train_grid.main([*argv, "--methods", "finetune", "distil", "--distil_weight", "1"]) == 0
        assert read_results(tmp_path)["control_method"] == "", "one of the methods looks at labels"
        stages = read_results(tmp_path)["stages"]
        assert stages["dyt-auto-finetune-2-seed-0"]["failed"].startswith("loss nan, gradient norm 1 in step 2")
        distilled, control = stages["dyt-auto-distil-2-seed-0"], stages["control-2-seed-0"]
        assert distilled["train_loss"][0] < 1 < control["train_loss"][0], "a distance from the teacher, not a text's"
        assert "1 of 1 failed" in (tmp_path / "results.md").read_text("utf-8")

    @pytest.mark.slow
    def test_from_scratch_and_without_labels(self, text, tmp_path):
        """Then the control has none either, and there was nothing that a swap could cost."""
        flags = (
            "--variants dyt --starts reset --steps 2 --seeds 0 --methods distil --distil_weight 1 --baseline_steps 0"
        )
        assert train_grid.main(small(tmp_path, text, flags)) == 0
        stages, told = read_results(tmp_path)["stages"], (tmp_path / "results.md").read_text("utf-8")
        control = stages["control-distil-2-seed-0"]
        assert control["train_loss"] == pytest.approx([0, 0], abs=1e-4), "its own teacher"
        assert control["start"] == stages["baseline-0"]["start"]
        assert not (tmp_path / "baseline-0").exists(), "nothing was trained there"
        assert "distilled from itself" in told
        assert "after the swap" not in told

    @pytest.mark.slow
    def test_norms_at_once_and_one_after_another(self, text, tmp_path):
        flags = "--variants fixed --schedules 1 0 --steps 4 --seeds 0 --layers 1 --baseline_steps 2 --calibration 8"
        assert train_grid.main(tiny(tmp_path, text, flags)) == 0
        stages, told = read_results(tmp_path)["stages"], (tmp_path / "results.md").read_text("utf-8")
        at_once, in_turn = (stages[f"fixed-repaired-finetune-{way}4-seed-0"] for way in ("", "norm_after_norm-"))
        assert at_once["step"] == in_turn["step"] == 4
        assert at_once["start"] != in_turn["start"] != stages["baseline-0"]["end"], "one of two norms has changed"
        assert at_once["parameters"] == in_turn["parameters"], "in the end all have"
        assert re.search(r"\| fixed +\| +norm after norm \|", told)
        (row,) = (s for s in grid.summarise(read_results(tmp_path)).itertuples() if s.schedule == "norm after norm")
        assert math.isnan(row.cost), "of one norm alone"
