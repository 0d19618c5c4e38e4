"""The grid against its control: equal budgets, honest verdicts, reports, stops and refusals."""

import copy
import html.parser
import math
import os
import re
import signal
import subprocess
import sys

import compare
import numpy as np
import pytest
from hfrecipes import compare_figure, compare_report, html_report, paired, settings, start
from hfrecipes import training as run
from hfrecipes.paired import Cell, Kind
from run_files import ROOT, read_results

TINY = "--layers 1 --width 32 --vocab_size 300 --block_size 16 --batch_size 4 --baseline_steps 3 --tracker none"
TINY += " --eval_every 2 --save_every 1 --heldout_blocks 8 --curve_blocks 4 --warmup_steps 1 --calibration 4"


def tiny(out, text, *more):
    return [*TINY.split(), "--text", str(text), "--output_dir", str(out), *map(str, more)]


def figures(out):
    """What must not depend on how often a grid was stopped."""
    kept = ("step", "start", "end", "curve", "train_loss", "parameters")
    return {name: {k: stage.get(k) for k in kept} for name, stage in read_results(out)["stages"].items()}


def part_of(finished, out):
    """The figures that an uninterrupted grid has for the models of a smaller one."""
    expected = figures(finished)
    return {name: expected[name] for name in figures(out)}


GRID = ["--variants", "dyt", "control", "--starts", "copied", "repaired", "--seeds", "0", "3", "--steps", "2", "3"]
PART = ["--variants", "dyt", "--starts", "copied", "--seeds", "0", "--steps", "3"]


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """An uninterrupted grid: two seeds, two budgets, two starts."""
    out = tmp_path_factory.mktemp("finished")
    assert compare.main(tiny(out, text, *GRID)) == 0
    return out


@pytest.mark.slow
def test_a_repair_is_done_once_for_all_methods(text, tmp_path, monkeypatch):
    """And no figure depends on that."""
    repairs = []
    real = start.patched

    def counted(*args):
        repairs.append(args[2])
        return real(*args)

    monkeypatch.setattr(start, "patched", counted)
    grid = ["--variants", "dyt", "rms", "--starts", "repaired", "--seeds", "0", "--steps", "2"]
    grid += ["--keep_dropout", "true"]
    assert compare.main(tiny(tmp_path / "all", text, *grid, "--methods", "finetune", "distil")) == 0
    assert repairs == ["control", "dyt", "rms"]
    repairs.clear()
    assert compare.main(tiny(tmp_path / "budgets", text, *grid, "--steps", "2", "3")) == 0
    assert repairs == ["control", "control", "dyt", "rms"]
    for method in ("finetune", "distil"):
        assert compare.main(tiny(tmp_path / method, text, *grid, "--methods", method)) == 0
        assert part_of(tmp_path / "all", tmp_path / method) == figures(tmp_path / method)


def planted(offsets, *, seeds=5, noise=0.004, higher=False, starts=("auto",), methods=("finetune",), steps=(20,)):
    """Results of a made-up grid in which each variant ends `offset` above the control, but for noise of each seed."""
    rng = np.random.default_rng(1)
    grid, stages = [], {}
    for seed in range(seeds):
        level = 3 + rng.normal(0, 0.2)  # what a seed does to all: pairing must take it out
        stages[f"baseline-{seed}"] = {"step": 9}
        kinds = [Kind("control", "", "", n) for n in steps]
        kinds += [Kind(v, s, m, n) for n in steps for v in offsets for s in starts for m in methods]
        for kind in kinds:
            cell = Cell(kind, seed)
            end = level + offsets.get(kind.variant, 0.0) + rng.normal(0, noise)
            begin = level + 1 + 4 * offsets.get(kind.variant, 0.0)
            points = [{"step": n, "loss": begin + (end - begin) * n / kind.steps} for n in (0, 1, 10, kind.steps)]
            grid.append({**kind._asdict(), "seed": seed})
            stages[cell.name] = {
                "step": kind.steps, "train_loss": [0.0] * kind.steps, "start": {"loss": begin, "extra": 7.0},
                "end": {"loss": end, "extra": 7 + end, "none": None}, "curve": points, "seconds": 1.0,
                "tokens_per_second": 1000, "step_seconds": 0.2 if kind.is_control else 0.25, "parameters": 12_345,
            }  # fmt: skip
    config = {"margin": 0.01, "steps": list(steps), "seeds": list(range(seeds)), "batch_size": 4, "learning_rate": 1e-3}
    return {
        "command": "python recipes/compare.py", "config": config, "task": "lm",
        "data": {"source": "made up", "sha256": "0" * 64},
        "main": "loss", "higher_is_better": higher, "unit": "tokens", "from_scratch": False, "control_method": "",
        "wall_seconds": 1.0,
        "hardware": {"cpu": "x", "cores": 2, "processes": 1, "device": "cpu"}, "versions": {"python": "3"},
        "grid": grid, "stages": stages,
    }  # fmt: skip


def by_variant(results):
    return {s.kind.variant: s for s in paired.summarise(results)}


class TestInterval:
    def test_by_hand(self):
        # sd = sqrt((1 + 0 + 1) / 2) = 1, t for 2 degrees of freedom 4.302653 (any table), half = t / sqrt(3)
        found = paired.t_interval([1.0, 2.0, 3.0])
        assert (found.mean, found.sd, found.n) == (2.0, 1.0, 3)
        assert found.high - found.mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
        assert found.mean - found.low == pytest.approx(found.high - found.mean)

    def test_as_scipy_has_it(self):
        from scipy import stats

        a, b = np.random.default_rng(0).normal(size=(2, 7))
        found, expected = paired.t_interval(a - b), stats.ttest_rel(a, b).confidence_interval(0.95)
        assert (found.low, found.high) == pytest.approx((expected.low, expected.high))

    @pytest.mark.parametrize(("freedom", "t"), [(1, 12.7062), (4, 2.7764), (9, 2.2622), (1000, 1.9623)])
    def test_quantiles_of_the_tables(self, freedom, t):
        assert paired.t_quantile(freedom) == pytest.approx(t, abs=1e-4)

    def test_covers_the_truth_as_often_as_it_says(self):
        rng = np.random.default_rng(0)
        found = [paired.t_interval(rng.normal(0.3, 1, 5).tolist()) for _ in range(2000)]
        assert sum(i.low <= 0.3 <= i.high for i in found) / 2000 == pytest.approx(0.95, abs=0.015)

    def test_one_figure_has_no_interval(self):
        found = paired.t_interval([1.5])
        assert (found.mean, found.sd, found.low, found.high) == (1.5, None, None, None)


class TestVerdict:
    def test_planted_difference_is_found(self):
        found = by_variant(planted({"dyt": 0.1, "rope": -0.1, "rms": 0.0}))
        assert {v: s.verdict for v, s in found.items()} == {
            "control": "", "dyt": "worse", "rope": "better", "rms": "same"
        }  # fmt: skip

    def test_higher_may_be_better(self):
        found = by_variant(planted({"dyt": 0.1, "rope": -0.1, "rms": 0.0}, higher=True))
        assert [found[v].verdict for v in ("dyt", "rope", "rms")] == ["better", "worse", "same"]

    def test_noise_is_the_same_only_if_it_is_small(self):
        assert by_variant(planted({"dyt": 0.0}, noise=0.002))["dyt"].verdict == "same"
        assert by_variant(planted({"dyt": 0.0}, noise=0.5))["dyt"].verdict == "undecided"

    def test_noise_is_rarely_called_a_difference(self):
        interval = [paired.t_interval(np.random.default_rng(i).normal(0, 1, 5).tolist()) for i in range(1000)]
        wrong = sum(paired.verdict(i, 0.01, False) in ("better", "worse") for i in interval)
        assert wrong / 1000 == pytest.approx(0.05, abs=0.02)

    def test_what_a_seed_does_to_all_is_taken_out(self):
        results = planted({"dyt": 0.1}, noise=0.004)
        (found,) = [s for s in paired.summarise(results) if s.kind.variant == "dyt"]
        assert found.figure.sd > 0.1, "seeds differ by more than the swap"
        assert found.difference.sd < 0.02
        assert found.verdict == "worse"

    def test_sure_and_tiny_is_the_same(self):
        assert paired.verdict(paired.t_interval([0.001, 0.0011, 0.0009]), 0.01, False) == "same"
        assert paired.verdict(paired.t_interval([0.001, 0.0011, 0.0009]), 0.0005, False) == "worse"

    def test_one_seed_decides_nothing(self):
        assert by_variant(planted({"dyt": 9.0}, seeds=1))["dyt"].verdict == "one seed"

    def test_seeds_needed(self):
        interval = paired.t_interval([-1.0, 0.0, 1.0])
        needed = paired.seeds_needed(interval, 0.5)
        assert (
            paired.t_quantile(needed - 1) / math.sqrt(needed)
            <= 0.5
            < paired.t_quantile(needed - 2) / math.sqrt(needed - 1)
        )


class TestSummary:
    def test_cost_and_what_is_recovered(self):
        found = by_variant(planted({"dyt": 0.1, "rms": 0.0}, noise=0))
        assert found["dyt"].cost.mean == pytest.approx(0.4)
        assert found["dyt"].recovered == pytest.approx(0.75)
        assert found["rms"].recovered is None, "nothing was lost"

    def test_nothing_is_recovered_of_a_gain(self):
        assert by_variant(planted({"dyt": -0.1}, noise=0))["dyt"].recovered is None
        assert by_variant(planted({"dyt": -0.1}, noise=0, higher=True))["dyt"].recovered == pytest.approx(0.75)

    def test_time_is_told_by_the_median_step(self):
        assert by_variant(planted({"dyt": 0.1}, seeds=3))["dyt"].time == pytest.approx((1.25,) * 3)

    @pytest.mark.parametrize("change", [{"step": 19}, {"train_loss": [0.0] * 19}])
    def test_unequal_budgets_are_refused(self, change):
        results = planted({"dyt": 0.1})
        results["stages"]["dyt-auto-finetune-20-seed-2"] |= change
        with pytest.raises(ValueError, match="unequal budgets: dyt-auto-finetune-20-seed-2 has 19"):
            paired.summarise(results)

    def test_without_its_control_nothing_is_compared(self):
        results = planted({"dyt": 0.1}, seeds=3)
        del results["stages"]["control-20-seed-1"]
        assert by_variant(results)["dyt"].difference.n == 2
        assert by_variant(results)["dyt"].missing == (1,)

    def test_controls_of_another_budget_do_not_count(self):
        results = planted({"dyt": 0.1}, seeds=2, steps=(20, 40))
        for seed in range(2):
            results["stages"][f"control-40-seed-{seed}"]["end"]["loss"] += 1
        found = {s.kind.steps: s.difference.mean for s in paired.summarise(results) if s.kind.variant == "dyt"}
        assert found[20] == pytest.approx(0.1, abs=0.02)
        assert found[40] == pytest.approx(-0.9, abs=0.02)

    def test_failures_are_told(self):
        results = planted({"dyt": 0.0}, seeds=3)
        results["stages"]["dyt-auto-finetune-20-seed-1"] = {"failed": "loss nan in step 3"}
        found = by_variant(results)["dyt"]
        assert (found.failed, found.difference.n) == ({1: "loss nan in step 3"}, 2)
        text = compare_report.compare_report(results)
        assert "failed 1 of 3" in text
        assert "1 of 3 seeds failed (loss nan in step 3)" in text
        for seed in range(3):
            results["stages"][f"dyt-auto-finetune-20-seed-{seed}"] = {"failed": "loss nan in step 3"}
        assert by_variant(results)["dyt"].verdict == "failed"
        assert "can't be trained like this" in compare_report.compare_report(results)
        assert "<svg" in html_report.html_report(results)

    def test_ranks(self):
        results = planted({"dyt": 0.1, "rope": 0.2}, methods=("finetune", "distil"), noise=0, seeds=3)
        for name, stage in results["stages"].items():
            if "distil" in name:
                stage["end"]["loss"] -= 0.05
        first, second = paired.ranks(results, "method")
        assert (first.value, first.mean, first.best, first.count) == ("distil", 1.0, 6, 6)
        assert (second.value, second.mean, second.best) == ("finetune", 2.0, 0)
        assert second.behind.mean == pytest.approx(0.05)
        assert (first.chance, second.chance) == (None, 2 / 2**6)
        assert paired.ranks(results, "start") == [], "there is one start"
        results["higher_is_better"] = True
        assert [rank.value for rank in paired.ranks(results, "method")] == ["finetune", "distil"]

    def test_ranks_at_equal_time(self):
        """Twice the time a step: distil at 20 steps against finetune at 40, where it leads at equal steps only."""
        methods, steps = ("finetune", "distil"), (20, 40)
        results = planted({"dyt": 0.1, "rope": 0.2}, methods=methods, steps=steps, noise=0, seeds=3)
        for name, stage in results["stages"].items():
            if "distil" in name:
                stage["end"]["loss"] -= 0.05
                stage["step_seconds"] *= 2.05
            if "-40-" in name:
                stage["end"]["loss"] -= 0.08
        equal_steps, equal_time = paired.rankings(results)
        assert (equal_steps.budgets, equal_steps.ranks[0].value, equal_steps.ranks[0].count) == ({}, "distil", 12)
        assert equal_time.budgets == {"finetune": 40, "distil": 20}
        first, second = equal_time.ranks
        assert (first.value, first.best, first.count, second.value) == ("finetune", 6, 6, "distil")
        assert second.behind.mean == pytest.approx(0.03)
        untimed = copy.deepcopy(results)
        for stage in untimed["stages"].values():
            stage.pop("step_seconds", None)
        assert paired.equal_times(untimed) == {}
        told = "Of finetune (40 steps), distil (20 steps), which take about the same time, finetune ranks first"
        for report in (compare_report.compare_report(results), html_report.html_report(results)):
            assert told in report
            assert "method at equal time" in report
            assert "distil (20 steps)" in report

    @pytest.mark.parametrize(("times", "steps"), [(1.0, (20, 40)), (1.5, (20, 40)), (2.0, (20, 30)), (0.0, (20, 40))])
    def test_no_budgets_of_equal_time(self, times, steps):
        """Steps that take the same time, budgets that don't fit, and times that weren't measured."""
        results = planted({"dyt": 0.1}, methods=("finetune", "distil"), steps=steps, seeds=3)
        for name, stage in results["stages"].items():
            if "distil" in name:
                stage["step_seconds"] *= times
        assert [(ranking.axis, ranking.budgets) for ranking in paired.rankings(results)] == [("method", {})]

    @pytest.mark.parametrize(
        ("distil", "told"),
        [
            ((-1, -1, -1), "distil ranks first: best in 3 of 3 comparisons (distil 1.00, finetune 2.00). Its lead over "
             "finetune, whose mean loss is higher by 1.0000, could be chance (sign test, p = 0.25)."),
            ((-1, -1, 4), "distil ranks first: best in 2 of 3 comparisons (distil 1.33, finetune 1.67). Its lead over "
             "finetune, whose mean loss is lower by 0.6667, could be chance (sign test, p = 1)."),
            ((-1, 0, 1), "finetune and distil rank alike: best in 2 and 2 of 3 comparisons (finetune 1.50, distil "
             "1.50)."),
        ],
    )  # fmt: skip
    def test_ranks_in_words(self, distil, told):
        """Ranks and means may disagree."""
        results = planted({"dyt": 0.1}, methods=("finetune", "distil"), seeds=3)
        for seed, by in enumerate(distil):
            plain, other = (results["stages"][f"dyt-auto-{m}-20-seed-{seed}"] for m in ("finetune", "distil"))
            other["end"]["loss"] = plain["end"]["loss"] + by
        (ranking,) = paired.rankings(results)
        assert compare_report.rank_sentence(ranking, "loss") == f"Of the methods, {told}"

    def test_sign_test_by_hand(self):
        """Three of four, or one, or none, or all of them by chance: 2 (4 + 1) / 16; equal pairs don't count."""
        assert paired.sign_test([1, 1, 1, 0, 5.0], [0, 0, 0, 2, 5.0]) == pytest.approx(10 / 16)
        assert paired.sign_test([1.0], [1.0]) == 1

    def test_timings_far_apart_are_not_believed(self):
        results = planted({"dyt": 0.0}, seeds=3)
        results["stages"]["dyt-auto-finetune-20-seed-1"]["step_seconds"] = 2.0
        assert by_variant(results)["dyt"].time == pytest.approx((1.25, 10, 1.25))
        text = compare_report.compare_report(results)
        assert "took 1.25 times the control's (1.25 to 10.00 over seeds); timings that far apart say little" in text
        assert "as far as its speed is right" in text


class Tags(html.parser.HTMLParser):
    """What a page refers to, and whether its tags are closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.references, self.images, self.problems = [], [], [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.references += [(tag, k, v) for k, v in found.items() if k in ("src", "href", "srcset", "data", "action")]
        if tag == "svg":
            self.images.append(found)
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)


@pytest.fixture
def results():
    return planted({"rms": 0.0, "dyt": 0.1}, starts=("auto", "copied"), seeds=3)


class TestReport:
    def test_table(self, results):
        text = compare_report.compare_report(results)
        rows = [line for line in text.splitlines() if line.startswith("|")]
        blocks = [[rows[0]]]
        for row in rows[1:]:
            blocks[-1].append(row) if len(row) == len(blocks[-1][-1]) else blocks.append([row])
        assert [block[0].split("|")[1].strip() for block in blocks] == ["variant", "start"], "each table is aligned"
        assert [row.split("|")[1].strip() for row in rows[2:7]] == ["control", "rms", "rms", "dyt", "dyt"]
        found = by_variant(results)["dyt"]
        assert f"{found.difference.mean:+.4f}" in text
        assert f"{found.difference.low:+.4f} to {found.difference.high:+.4f}" in text
        assert "t = 4.303 for 3 seeds" in text

    def test_words_follow_the_figures(self, results):
        text = compare_report.compare_report(results)
        assert "better" not in re.search("Against a control of equal budget: .*", text)[0]
        assert "same: rms (auto), rms (copied); worse: dyt (auto), dyt (copied)." in text
        assert "**dyt (auto)** is **worse than the control**: loss is higher by 0." in text
        assert "training gave back 7" in text
        assert "A training step took 1.25 times the control's (1.25 to 1.25 over seeds)." in text
        assert "Not worth it at this budget: worse, and slower." in text
        better = compare_report.compare_report(planted({"rms": -0.1}))
        assert "**rms** is **better than the control**: loss is lower by 0." in better
        assert "Worth it, where the slower step is." in better

    def test_unfinished_grids_say_so(self, results):
        part = copy.deepcopy(results)
        part["stages"].popitem()
        assert "Not finished: 14 of 15 models are there" in compare_report.compare_report(part)
        assert "Not finished" not in compare_report.compare_report(results)

    def test_html_is_one_file(self, results):
        page = html_report.html_report(results)
        tags = Tags()
        tags.feed(page)
        assert tags.problems == []
        assert tags.open == []
        assert all(value.startswith("#") for _, _, value in tags.references), "nothing but places in the page"
        assert not re.search(r"https?:|@import|<script|<link|url\((?!#)", page)
        assert all(image["role"] == "img" and image["aria-label"] for image in tags.images)
        assert len(tags.images) == 5, "the curves, and an interval for each row but the control's"
        assert '<html lang="en">' in page
        assert "prefers-color-scheme: dark" in page
        assert "@media print" in page

    def test_what_the_parser_would_find(self):
        tags = Tags()
        tags.feed('<p><b></p><img src="https://x">')
        assert tags.problems
        assert tags.references == [("img", "src", "https://x")]

    def test_html_has_the_figures(self, results):
        page, found = html_report.html_report(results), by_variant(results)["dyt"]
        assert f"{found.difference.mean:+.4f}" in page
        assert "python recipes/compare.py" in page
        assert "made up" in page
        assert page.count("<tr") > 20

    def test_names_are_escaped(self):
        results = planted({"<script>alert(1)</script>": 0.1, 'a"b&c': 0.0}, seeds=2)
        results["data"]["source"] = results["command"] = results["config"]["model"] = "<img src=x onerror='y'>"
        page = html_report.html_report(results)
        assert "<script" not in page
        assert "<img" not in page
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
        tags = Tags()
        tags.feed(page)
        assert tags.problems == []

    def test_curves_are_means_and_differences(self, results):
        kind = Kind("dyt", "auto", "finetune", 20)
        own, gaps = compare_figure.points(results, kind)
        ends = [results["stages"][Cell(kind, seed).name]["end"]["loss"] for seed in range(3)]
        controls = [results["stages"][f"control-20-seed-{seed}"]["end"]["loss"] for seed in range(3)]
        assert own[20] == ends
        assert gaps[20] == [a - b for a, b in zip(ends, controls, strict=True)]
        figure = compare_figure.make_figure(results, "black")
        assert len(figure.axes) == 4, "a panel for each variant, since there are two starts"
        line = next(line for line in figure.axes[2].lines if line.get_label() == "auto")
        assert line.get_ydata()[-1] == pytest.approx(np.mean(ends))

    @pytest.mark.parametrize("ways", [1, 4, 9])
    def test_the_legend_fits(self, ways):
        methods = tuple(f"a method of name {i}" for i in range(ways))
        figure = compare_figure.make_figure(planted({"dyt": 0.1}, seeds=2, methods=methods), "black")
        box = figure.legends[0].get_window_extent()
        assert len(figure.legends) == 1
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
        assert figure.legends[0]._ncols > 1


class TestGrid:
    def test_a_control_for_each_seed_and_budget(self, finished):
        results = read_results(finished)
        cells = paired.grid_of(results)
        assert [c for c in cells if c.kind.is_control] == [
            Cell(Kind("control", "", "", steps), seed) for seed in (0, 3) for steps in (2, 3)
        ]
        assert len(cells) == 2 * 2 * (1 + 2)
        assert all(cell.name in results["stages"] for cell in cells)
        assert [name for name in results["stages"] if name.startswith("baseline")] == ["baseline-0", "baseline-3"]

    def test_cells_of_a_seed_share_baseline_and_batches(self, finished):
        stages = read_results(finished)["stages"]
        for seed in (0, 3):
            end = stages[f"baseline-{seed}"]["end"]
            assert stages[f"control-2-seed-{seed}"]["start"] == stages[f"control-3-seed-{seed}"]["start"] == end
            assert stages[f"dyt-copied-finetune-2-seed-{seed}"]["start"] != end
            first = [
                s["train_loss"][0] for name, s in stages.items() if name.endswith(f"seed-{seed}") and "control" in name
            ]
            assert len(set(first)) == 1, "the same first batch, whatever the budget"
        assert stages["control-2-seed-0"]["start"] != stages["control-2-seed-3"]["start"]

    def test_budgets_are_equal(self, finished):
        for cell, stage in paired.read_cells(read_results(finished)).items():
            assert stage["step"] == len(stage["train_loss"]) == cell.kind.steps

    def test_starts_differ(self, finished):
        stages = read_results(finished)["stages"]
        assert stages["dyt-copied-finetune-2-seed-0"]["start"] != stages["dyt-repaired-finetune-2-seed-0"]["start"]

    def test_files(self, finished):
        found = {path.name for path in finished.iterdir()}
        assert {"report.html", "results.md", "results.json", "curves.png", "baseline-0", "baseline-3"} <= found
        assert not [name for name in found if name.startswith(("dyt", "control", "state"))], "only figures are kept"
        assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.slow
    def test_more_seeds_come_on_top_and_models_are_kept_if_asked(self, finished, text, tmp_path):
        argv = tiny(tmp_path, text, "--variants", "dyt", "--starts", "copied", "--steps", 2)
        assert compare.main([*argv, "--seeds", "3"]) == 0
        assert compare.main([*argv, "--seeds", "3", "0", "--keep_models", "--resume"]) == 0
        assert figures(tmp_path) == part_of(finished, tmp_path)
        assert len(figures(tmp_path)) == 6
        assert (tmp_path / "dyt-copied-finetune-2-seed-0" / "model.safetensors").exists()
        assert not (tmp_path / "dyt-copied-finetune-2-seed-3").exists()

    @pytest.mark.slow
    def test_killed_grid_goes_on(self, finished, text, tmp_path):
        """kill -9 in the middle of a model: the rest is as if nothing had happened."""
        script = f"""
import os
import compare
from hfrecipes import training as run
train_step = run.Run.train_step
def killed(self, where, *args):
    if where == "step 3 of dyt-copied-finetune-3-seed-0":
        os.kill(os.getpid(), 9)
    return train_step(self, where, *args)
run.Run.train_step = killed
compare.main({tiny(tmp_path, text, *PART)!r})
"""
        path = os.pathsep.join([str(ROOT), str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")])
        settings = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        killed = subprocess.run([sys.executable, "-c", script], env={**os.environ, **settings}, timeout=120)
        assert killed.returncode == -signal.SIGKILL
        assert "dyt-copied-finetune-3-seed-0" not in read_results(tmp_path)["stages"]
        assert (tmp_path / "state").exists()
        assert compare.main([*tiny(tmp_path, text, *PART), "--resume"]) == 0
        assert figures(tmp_path) == part_of(finished, tmp_path)

    @pytest.mark.slow
    def test_time_limit_stops_and_reports(self, finished, text, tmp_path, capsys, monkeypatch):
        # As if the minutes were over when the second model is built.
        stage = run.Run.stage

        def late(self, name, *args, **options):
            if name.startswith("dyt"):
                self.requests.append(0.0)
            return stage(self, name, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(run.Run, "stage", late)
            assert compare.main([*tiny(tmp_path, text, *PART), "--max_minutes", "60"]) == 130
        printed = capsys.readouterr()
        assert "--resume" in printed.err
        assert "Not finished: 1 of 2 models are there" in printed.out
        assert "Not finished" in (tmp_path / "report.html").read_text("utf-8")
        assert compare.main([*tiny(tmp_path, text, *PART), "--resume"]) == 0
        assert figures(tmp_path) == part_of(finished, tmp_path)

    def test_time_limit_is_kept(self):
        requests = []
        with compare.stop_requested_after(1e-9, requests):
            for _ in range(200):
                if requests:
                    break
                signal.sigtimedwait([], 0.01)
        assert requests
        with compare.stop_requested_after(None, never := []):
            pass
        assert never == []

    @pytest.mark.slow
    def test_diverged_model_is_a_result(self, text, tmp_path, monkeypatch):
        train_step = run.Run.train_step

        def diverging(self, where, *args):
            if where == "step 2 of dyt-auto-finetune-2-seed-0":
                raise run.DivergedError(f"loss nan, gradient norm 1 in {where}: start again")
            return train_step(self, where, *args)

        monkeypatch.setattr(run.Run, "train_step", diverging)
        argv = tiny(tmp_path, text, "--variants", "dyt", "--starts", "auto", "--steps", 2, "--seeds", 0)
        assert compare.main([*argv, "--methods", "finetune", "distil", "--distil_weight", "1"]) == 0
        assert read_results(tmp_path)["control_method"] == "", "one of the methods looks at labels"
        stages = read_results(tmp_path)["stages"]
        assert stages["dyt-auto-finetune-2-seed-0"]["failed"].startswith("loss nan, gradient norm 1 in step 2")
        distilled, control = stages["dyt-auto-distil-2-seed-0"], stages["control-2-seed-0"]
        assert distilled["step"] == 2
        assert distilled["train_loss"][0] < 1 < control["train_loss"][0], (
            "a distance from the teacher, not the text's loss"
        )
        assert "failed 1 of 1" in (tmp_path / "results.md").read_text("utf-8")

    @pytest.mark.slow
    def test_without_labels_the_control_has_none_either(self, text, tmp_path):
        argv = tiny(tmp_path, text, "--variants", "dyt", "--starts", "auto", "--steps", 2, "--seeds", 0)
        assert compare.main([*argv, "--methods", "distil", "--distil_weight", "1"]) == 0
        control = read_results(tmp_path)["stages"]["control-distil-2-seed-0"]
        assert control["train_loss"] == pytest.approx([0, 0], abs=1e-4), "its own teacher"
        assert "distilled from itself since no method here looks at labels" in (tmp_path / "results.md").read_text(
            "utf-8"
        )

    @pytest.mark.slow
    def test_from_scratch(self, text, tmp_path):
        argv = tiny(tmp_path, text, "--variants", "dyt", "--starts", "reset", "--steps", 2, "--seeds", 0)
        argv[argv.index("--baseline_steps") + 1] = "0"
        assert compare.main(argv) == 0
        stages = read_results(tmp_path)["stages"]
        assert stages["control-2-seed-0"]["start"] == stages["baseline-0"]["start"]
        assert not (tmp_path / "baseline-0").exists(), "nothing was trained there"
        text = (tmp_path / "results.md").read_text("utf-8")
        assert "from scratch" in text
        assert "after the swap" not in text

    def test_list_trains_nothing(self, finished, text, tmp_path, capsys, monkeypatch):
        monkeypatch.setattr(run.Run, "__init__", lambda *a: pytest.fail("a run began"))
        assert compare.main([*tiny(tmp_path, text, *GRID), "--list"]) == 0
        printed = capsys.readouterr().out
        assert "12 of 12 models to train; no estimate before one is done" in printed
        assert re.search(r"dyt-copied-finetune-3-seed-3 +\| to train \| +- \|", printed)
        assert compare.main([*tiny(finished, text, *GRID, "--seeds", "0", "3", "4"), "--list"]) == 0
        printed = capsys.readouterr().out
        assert "6 of 18 models to train: about" in printed
        assert re.search(r"control-2-seed-0 +\| +done \| +\d", printed)
        assert re.search(r"control-2-seed-4 +\| to train \| +\d", printed), "by the other seeds' times"


class TestSettings:
    def test_other_recipes_files_do(self):
        def read(*argv):
            return settings.read_run([str(a) for a in argv], "compare.py", "", compare.CompareConfig)

        for name in ("lm.yaml", "vision.yaml", "gpu.yaml"):
            config = read(ROOT / "recipes" / "configs" / name)
            settings.check(config)
            assert config.seeds == [0, 1, 2, 3, 4]
            assert config.starts == ["repaired"]
            assert "control" not in config.variants
        config = read("--seed", 7, "--start", "copied", "--steps", 5, 10)
        assert (config.seeds, config.starts, config.steps) == ([7, 8, 9, 10, 11], ["copied"], [5, 10])
        assert read("--seeds", 3, "--starts", "auto", "self", "--start", "copied").starts == ["auto", "self"]


class TestBadInput:
    """One line, exit status 2, and nothing trained."""

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--variants", "control"], "--variants names nothing to compare with the control"),
            (["--variants", "dyt", "dyt"], "named twice in --variants dyt dyt"),
            (["--variants", "dyyt"], "UnknownNameError"),
            (["--seeds", "1", "1"], "named twice in --seeds 1 1"),
            (["--seeds", "-1"], "--seeds must be at least 0, not -1"),
            (["--steps", "0"], "--steps must be at least 1, not 0"),
            (["--starts", "cold"], "--starts cold is not known; there are repaired, self"),
            (["--methods", "magic"], "no method is called 'magic'"),
            (["--methods", "finetune", "--distil_weight", "2"], "--distil_weight must be above 0 and at most 1"),
            (["--patience", "3"], "budgets must be equal"),
            (["--margin", "1.5"], "--margin is a share"),
            (["--max_minutes", "0"], "--max_minutes must be positive, not 0"),
            (["--baseline_steps", "0"], "--baseline_steps 0 leaves nothing for --starts repaired"),
            (["--variants", "placement"], "UnknownNameError"),
        ],
    )
    def test_refused_at_once(self, text, tmp_path, capsys, monkeypatch, flags, message):
        monkeypatch.setattr(run.Run, "stage", lambda *a, **k: pytest.fail("training began"))
        assert compare.main(tiny(tmp_path, text, *flags)) == 2
        error = capsys.readouterr().err.strip()
        assert message in error
        assert "\n" not in error

    def test_other_settings_can_not_go_on(self, finished, text, capsys):
        before = (finished / "results.json").read_bytes()
        assert compare.main([*tiny(finished, text, *GRID), "--resume", "--learning_rate", "1"]) == 2
        assert "can't resume" in capsys.readouterr().err
        assert (finished / "results.json").read_bytes() == before
