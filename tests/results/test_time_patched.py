"""The benchmark runs end to end; what it times is the same function, and its figures are those of its runs."""

import itertools
import json
from functools import partial
from types import SimpleNamespace

import pytest
import time_patched
import torch
from harness import bench_micro, bench_models, timing
from harness.bench_report import against_basis, panels_of
from harness.timing import Entrant
from torch import nn

from hfpatch.compile import compile_model
from hfpatch.errors import OptionError

SMALL = ["--layers", "1", "--width", "64", "--vocab_size", "50", "--new_tokens", "2", "--block_size", "8"]
QUICK = [*SMALL, "--repeats", "2", "--widths", "64", "--modes", "eager"]


def run(out, *flags):
    assert time_patched.main([*QUICK, "--output_dir", str(out), *flags]) == 0
    return json.loads((out / "results.json").read_text()), (out / "results.md").read_text()


def raced(works, mode="eager", repeats=2, **more):
    """Measurements of some functions, or of entrants."""
    entrants = [Entrant(*work) if isinstance(work, tuple) else work for work in works]
    for entrant in entrants:
        entrant.model = entrant.model or nn.Identity()
    return timing.time_in_turn(entrants, mode, repeats, **more)


class TestRun:
    @pytest.mark.slow
    def test_every_part_in_both_modes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(timing, "compile_model", partial(compile_model, backend="eager"))  # seconds, not minutes
        flags = ["--models", "gpt2", "vit", "--patches", "rope", "rope:axes=2", "--layers", "2"]
        found, text = run(tmp_path, *flags, "--modes", "compiled", "eager")
        seen = {}
        for race in found["races"]:
            measured = [t["subject"] for t in race["timings"] if len(t["seconds"]) == 2 and not t["failed"]]
            if race["part"] == "models":
                assert measured == ["unpatched", "rope", "rope, native" if race["case"] == "gpt2" else "rope:axes=2"]
            seen.setdefault((race["part"], race["case"], race["mode"]), []).append(race["work"])
        works = ["training step", "forward", "decoding"]
        assert seen["models", "gpt2", "compiled"] == seen["places", "gpt2", "eager"] == works
        assert seen["models", "vit", "eager"] == works[:2]
        assert seen["micro", "rotary, 64 float32", "compiled"] == ["forward", "forward and backward"]
        assert "* gpt2, forward, eager, rope:axes=2: " in text, "what couldn't be patched is said, with its reason"
        assert (tmp_path / "benchmark.png").stat().st_size > 10_000

    @pytest.mark.slow
    def test_places(self, tmp_path):
        flags = ["--parts", "places", "--models", "gpt2", "bert", "--patches", "control", "rms", "rope", "rms+rope"]
        for race in run(tmp_path, *flags)[0]["races"]:
            plain, *patched = race["timings"]
            modules = {one["subject"]: one["modules"] for one in patched}
            assert modules["control"] == modules["rms+rope"] == modules["rms"] + modules["rope"]
            assert set(plain["inside_seconds"]) == set(modules), "the unpatched model is timed in every patch's places"
            for one in patched:
                assert list(one["inside_seconds"]) == [one["subject"]], "and a patched one in its own"
                parts = zip(one["inside_seconds"][one["subject"]], one["seconds"], strict=True)
                assert all(0 < part < whole for part, whole in parts)

    @pytest.mark.slow
    def test_norms_without_a_scale_need_no_data(self, tmp_path):
        """How fast they are is measured, which doesn't take constants that fit."""
        flags = ["--parts", "models", "--models", "gpt2", "--patches", "fixed", "none"]
        for race in run(tmp_path, *flags)[0]["races"]:
            found = {one["subject"]: (len(one["seconds"]), one["failed"]) for one in race["timings"]}
            assert found == dict.fromkeys(("unpatched", "fixed", "none"), (2, None))


def test_a_subject_that_cant_be_made_spoils_no_other(monkeypatch):
    """Whatever the reason: on a device where nothing has run yet it may be any."""

    def refuse(model, **request):
        raise RuntimeError("no kernel") if request["norm"] == "rms" else OptionError("no such norm")

    config = time_patched.BenchmarkConfig(layers=1, width=64, vocab_size=50, patches=["control", "rms", "dyt"])
    monkeypatch.setattr(bench_models, "patch_model", refuse)
    found = bench_models.entrants("gpt2", bench_models.FORWARD, config, torch.device("cpu"), "eager")
    told = {one.subject: one.failed for one in found}
    assert told == {"unpatched": None, "control": None, "rms": "RuntimeError: no kernel", "dyt": "no such norm"}


def test_modules_are_those_of_patched_models_and_agree_with_their_references():
    x = torch.randn(1024, 128)
    made = {
        name: (module, given) for name, module, given in itertools.chain(bench_micro.norms(x), bench_micro.rotations(x))
    }
    ours, theirs = made["RMSNorm"][0], made["LlamaRMSNorm"][0]
    ours.bias.data.zero_()
    theirs.weight.data.copy_(ours.weight)
    theirs.variance_epsilon = ours.eps
    torch.testing.assert_close(ours(x), theirs(x))
    dyt = made["DyT"][0]
    torch.testing.assert_close(dyt(x), dyt.gain * torch.tanh(dyt.alpha * x) + dyt.shift)
    (ours, given), (theirs, others) = made["RoPE"], made["transformers"]
    for a, b in zip(ours(*given), theirs(*others), strict=True):
        torch.testing.assert_close(a, b.transpose(1, 2))


class TestRace:
    def test_compiled_is_compiled(self):
        """Code that is compiled and not called is no figure."""
        called = []

        def timed(mode, past=False):
            model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
            run = model.forward if past else model
            backend = lambda graph, example: lambda *args: called.append("compiled") or graph(*args)  # noqa: E731
            how = {"regions": "model", "backend": backend}
            return raced([Entrant("a", lambda: run(torch.ones(1, 2)), model, how)], mode)[0]

        assert timed("eager")["failed"] is None
        assert not called
        assert timed("compiled")["failed"] is None
        assert called
        past = timed("compiled", past=True)
        assert "isn't called" in past["failed"]
        assert past["seconds"] == []

    def test_samples_are_taken_in_turn(self, monkeypatch):
        monkeypatch.setattr(timing, "AT_LEAST", 0.0)
        order: list[str] = []
        raced([(name, lambda name=name: order.append(name)) for name in "ab"], repeats=8)
        assert "".join(order[:6]) == "aaabbb"
        rounds = ["".join(order[i : i + 2]) for i in range(6, 22, 2)]
        assert set(rounds) == {"ab", "ba"}, "who comes first changes"

    def test_time_that_is_over(self, monkeypatch):
        """Nothing begins then; what has begun has a few samples."""
        late, *_ = raced([("a", lambda: None)], until=0.0)
        assert (late["failed"], late["seconds"]) == (timing.NO_TIME, [])
        passed = [0.0]  # seconds, by a clock that no other process slows down
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: sum(passed)))
        slow, late = raced([("a", lambda: passed.append(0.3)), ("b", lambda: None)], repeats=9, until=0.5)
        assert (len(slow["seconds"]), late["failed"]) == (timing.FEWEST, timing.NO_TIME)

    def test_what_is_counted(self):
        """Graphs by subject; what a caller counts; that it can't be counted, with the times."""
        model = nn.Linear(2, 2)
        sizes = iter([3, *range(4, 20)])  # a second size is compiled again

        def once():
            return model(torch.ones(next(sizes), 2))

        how = {"regions": "model", "dynamic": False}
        settings = {"backend": "eager", "count": lambda entrant: {"runs": 7}}
        found, _ = raced(
            [Entrant("a", once, model, how), Entrant("b", lambda: None, compile=None)], "compiled", **settings
        )
        assert found["counts"]["graphs"] > found["counts"]["regions"] == 1
        assert (found["counts"]["runs"], found["failed"]) == (7, None)
        (broken,) = raced([("a", lambda: None)], count=lambda entrant: 1 / 0)
        assert broken["failed"] == "not counted: ZeroDivisionError: division by zero"
        assert len(broken["seconds"]) == 2


class TestFigures:
    def test_a_ratio_is_that_of_runs_of_the_same_round(self):
        base = {"subject": "rms", "inside_seconds": {}}
        one, other = base | {"seconds": [2.0, 20.0, 3.0]}, base | {"seconds": [1.0, 10.0, 3.0]}  # slower in between
        assert against_basis(one, other) == (2.0, 1.0, 2.0)
        assert against_basis(other, other) is None


def test_norms_and_rotations_are_drawn_apart_and_copies_are_not():
    def race(case, *subjects):
        timings = [{"subject": name, "seconds": [1.0, 2.0, 3.0], "inside_seconds": {}} for name in subjects]
        return {"part": "micro", "case": case, "work": "forward", "mode": "eager", "timings": timings}

    races = [race("norm, 8 float32", "LayerNorm", "RMSNorm", "copy"), race("rotary, 8 float32", "transformers", "RoPE")]
    drawn = {part: (set(points["basis"]), list(points["subject"])) for (part, _), points in panels_of(races)}
    assert drawn == {"norm": ({"LayerNorm"}, ["RMSNorm"]), "rotary": ({"transformers"}, ["RoPE"])}
