"""compare.py: planted differences are found, and a grid goes on and grows."""

import json
import math

import compare
import numpy as np
import paired
import pandas as pd
import pytest
from scipy import stats
from texts import RecipeError

SMALL = "--block_size 16 --heldout_blocks 8 --batch_size 4 --baseline_steps 3 --steps 2 --calibration 8"


def planted(offsets, seeds=5, noise=0.004):
    """Rows of a made-up grid in which each patch ends `offset` above the control, but for noise of each seed."""
    rng, rows = np.random.default_rng(1), []
    for seed in range(seeds):
        level = 3 + rng.normal(0, 0.2)  # what a seed does to all: pairing must take it out
        for name, offset in {"control": 0.0, **offsets}.items():
            end = level + offset + rng.normal(0, noise)
            rows.append({"variant": name, "start": "", "seed": seed, "swapped": level + 1 + 4 * offset, "loss": end})
    return pd.DataFrame(rows)


def summary(rows, margin=0.01):
    return compare.summarise(rows, margin).set_index("patch")


def test_planted_differences_are_found():
    found = summary(planted({"dyt": 0.1, "rope": -0.1, "rms": 0.0}))
    assert list(found.verdict)[1:] == ["worse", "better", "same"]
    assert found["after the swap"]["dyt"] == pytest.approx(0.4)
    assert summary(planted({"dyt": 0.0}, noise=0.5)).verdict["dyt"] == "undecided"
    assert summary(planted({"dyt": 0.0}, noise=0.5))["seeds needed"]["dyt"] > 5
    assert summary(planted({"dyt": 9.0}, seeds=1)).verdict["dyt"] == "one seed"


def test_intervals_are_of_pairs():
    rows = planted({"dyt": 0.1})
    own, control = (rows[rows.variant == name].loss.to_numpy() for name in ("dyt", "control"))
    found, expected = summary(rows).loc["dyt"], stats.ttest_rel(own, control).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert own.std() > 0.1 > found.high - found.low, "seeds differ by more than the swap: pairing takes that out"


def test_a_copy_that_diverged_is_counted():
    rows = planted({"dyt": 0.1})
    rows.loc[(rows.variant == "dyt") & (rows.seed == 1), "loss"] = math.nan
    found = summary(rows).loc["dyt"]
    assert (found.seeds, found.failed) == (4, 1)


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (0.005, 0.05, "worse"),
        (-0.05, -0.005, "better"),
        (-0.01, 0.01, "same"),
        (-0.01, 0.02, "undecided"),
        (0.0, 0.02, "undecided"),
        (math.nan, math.nan, "one seed"),
    ],
)
def test_verdict(low, high, told):
    assert paired.verdict(low, high, 0.01, False) == told
    mirrored = {"worse": "better", "better": "worse"}
    assert paired.verdict(low, high, 0.01, True) == mirrored.get(told, told)


def test_statistics_by_hand():
    needed = paired.seeds_needed(1.0, 0.5)
    assert paired.half_width(1.0, needed) <= 0.5 < paired.half_width(1.0, needed - 1)
    assert math.isnan(paired.half_width(math.nan, 1)), "one figure has no interval"
    assert paired.sign_test(pd.Series([1, 1, 1, -2, 0])) == pytest.approx(10 / 16)  # 2 (4 + 1) / 16, zeros don't count
    sums, counts = np.array([2.0, 9.0]), np.array([1.0, 3.0])
    assert paired.paired_bootstrap((sums, counts), (sums * 2, counts))[0] == -11 / 4
    random, ones = np.random.default_rng(0), np.ones(50)
    one = random.normal(0, 1, 50)
    other = one - 0.2 + random.normal(0, 0.05, 50)
    difference, low, high = paired.paired_bootstrap((one, ones), (other, ones))
    assert 0.1 < low < difference < high < 0.3
    _, low, high = paired.paired_bootstrap((one, ones), (random.permutation(other), ones))
    assert low < 0 < high, "the control loses who belongs to whom"
    with pytest.raises(ValueError, match="two or more"):
        paired.paired_bootstrap(([1.0], [2.0]), ([3.0], [2.0]))
    assert paired.spread([1.0, 3.0, 2.0]) == (2.0, 1.0, 3.0)
    table = paired.markdown(pd.DataFrame({"a": ["x", "y"], "b": [0.5, None], "c": [1, 2]}), b=".1f")
    assert table.splitlines()[2:] == ["| x   | 0.5 |   1 |", "| y   |   - |   2 |"]


@pytest.mark.slow
def test_a_grid_goes_on_and_grows(text, tmp_path):
    def run(out, *flags):
        compare.main([*SMALL.split(), "--text", str(text), "--output_dir", str(tmp_path / out), *flags])
        return json.loads((tmp_path / out / "results.json").read_text())["rows"]

    whole = run("whole", "--variants", "dyt", "rms", "--seeds", "0", "1", "--starts", "copied")
    assert len(whole) == 6
    part = run("part", "--variants", "dyt", "--seeds", "1", "--starts", "copied")
    assert len(part) == 2
    grown = run("part", "--variants", "dyt", "rms", "--seeds", "0", "1", "--starts", "copied")
    assert grown[:2] == part, "what is finished isn't trained again"
    key = lambda row: (row["seed"], row["variant"])  # noqa: E731
    assert sorted(grown, key=key) == sorted(whole, key=key), "whatever the order"
    control = {row["seed"]: row["swapped"] for row in whole if row["variant"] == "control"}
    assert control[0] != control[1]
    with pytest.raises(RecipeError, match="untrained"):
        run("new", "--baseline_steps", "0")
    with pytest.raises(RecipeError, match="is of other settings"):
        run("part", "--variants", "dyt", "--steps", "3")
