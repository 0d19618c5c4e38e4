"""The benchmark runs end to end; what it times is the same function, and its figures are those of its runs."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import benchmark
import numpy as np
import pytest
import torch
from hfrecipes import bench_micro, bench_models, bench_places, timing
from hfrecipes.bench_report import benchmark_report, in_place, of_copy
from hfrecipes.timing import Entrant, race
from torch import nn

from hfpatch.compile import compile_model
from hfpatch.export.native import native_model
from hfpatch.patch import patch_model

SMALL = ["--layers", "1", "--width", "64", "--vocab_size", "50", "--new_tokens", "2", "--block_size", "8"]
MODELS = ["--parts", "models", *SMALL]
MICRO = ["--parts", "micro", "--widths", "64", "--megabytes", "0.1"]
QUICK = ["--repeats", "2", "--modes", "eager"]
CPU = torch.device("cpu")


def run(out: Path, *flags: str) -> dict[str, Any]:
    assert benchmark.main([*flags, *QUICK, "--output_dir", str(out)]) == 0
    assert (out / "benchmark.png").stat().st_size > 10_000
    return json.loads((out / "results.json").read_text())


@pytest.mark.slow
def test_whole_models(tmp_path: Path) -> None:
    found = run(tmp_path, *MODELS, *["--models", "gpt2", "vit", "llama-1b", "--patches", "control", "rms", "rope"])
    groups = {(g["case"], g["work"]): g for g in found["groups"]}
    works = ["training step", "forward", "decoding"]
    assert [*groups] == [("gpt2", w) for w in works] + [("vit", w) for w in works[:2]] + [
        ("llama-1b", w) for w in works
    ]
    native = ["rope", "rope, native"]
    both = ["unpatched", "control"]
    subjects = {"gpt2": [*both, "rms", *native], "vit": [*both, "rms", "rope"]}
    subjects["llama-1b"] = [*both, *native]  # whose norms are RMSNorm already
    for (case, _), group in groups.items():
        assert [t["subject"] for t in group["timings"]] == subjects[case]
        assert all(len(t["seconds"]) == 2 and t["failed"] is None for t in group["timings"])
    table = (tmp_path / "results.md").read_text()
    assert "gpt2: 1 layers of 64" in table
    assert "peak MiB" in table
    assert "compiled" not in table.splitlines()[0], "no column for what wasn't measured"
    assert "* llama-1b with rms: " in table, "what couldn't be patched is said, with its reason"


def test_places(tmp_path: Path) -> None:
    flags = ["--parts", "places", *SMALL, "--models", "gpt2", "bert", "--patches", "control", "rms", "rope", "rms+rope"]
    assert benchmark.main([*flags, *QUICK, "--output_dir", str(tmp_path)]) == 0
    groups = json.loads((tmp_path / "results.json").read_text())["groups"]
    works = {"gpt2": ["training step", "forward", "decoding"], "bert": ["training step", "forward"]}
    assert [(group["case"], group["work"]) for group in groups] == [(m, work) for m in works for work in works[m]]
    for group in groups:
        modules = group["modules"]
        assert modules["control"] == modules["rms+rope"] == modules["rms"] + modules["rope"]
        plain, *patched = group["timings"]
        assert set(plain["inside"]) == set(modules), "the unpatched model is timed in every patch's places"
        for found in patched:
            assert list(found["inside"]) == [found["subject"]], "and a patched one in its own"
        for found in group["timings"]:
            for spent in found["inside"].values():
                assert all(0 < part < whole for part, whole in zip(spent, found["seconds"], strict=True))
    assert "| model, patched / unpatched |" in (tmp_path / "results.md").read_text()


def test_what_a_patch_replaced() -> None:
    plain = bench_models.MODELS["gpt2"].model(2, 64, 50, 8)
    patched = patch_model(copy.deepcopy(plain), pos="rope")
    expected = ["transformer.wpe", "transformer.h.0.attn", "transformer.h.1.attn"]
    assert bench_places.replaced(plain, patched) == expected, "not what holds them, whose class differs too"
    assert bench_places.replaced(plain, copy.deepcopy(plain)) == []


def test_the_time_of_a_replaced_module(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(bench_places.time, "perf_counter", lambda: float(next(clock)))  # one second a call
    model = nn.Sequential(nn.Identity(), nn.Identity())
    places = {"rms": ["0"], "rope": ["1"], "control": ["0", "1"]}
    with bench_places.clocked(model, places) as spent:
        for _ in range(3):
            model(torch.ones(1))
        assert spent == {"rms": 3, "rope": 3, "control": 6}
    model(torch.ones(1))
    assert spent["rms"] == 3, "the modules are as they were"
    assert "forward" not in vars(model[0])


def test_the_time_of_a_replaced_module_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the gradient of what it returns to that of what it's given, all of what it's given."""

    class Attention(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor, mask: None = None) -> tuple[torch.Tensor, None]:
            return wait(wait(x) * scale), None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.norm, self.table = Attention(), nn.Linear(1, 1), nn.Embedding(2, 1)

        def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            x = wait(self.table(ids))
            return wait(self.norm(x + self.attention(x, scale=wait(scale), mask=None)[0])).sum()

    class Wait(torch.autograd.Function):
        """Takes a second forward and a hundred backward."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            now[0] += 1
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            now[0] += 100
            return grad

    now, wait = [0.0], Wait.apply
    monkeypatch.setattr(bench_places.time, "perf_counter", lambda: now[0])
    model, scale = Model(), torch.ones(1, requires_grad=True)
    model(torch.tensor([1]), scale).backward()
    expected = [p.grad.clone() for p in (*model.parameters(), scale)]
    for parameter in (*model.parameters(), scale):
        parameter.grad = None
    with bench_places.clocked(model, {"rope": ["attention"], "rms": ["norm"], "nope": ["table"]}) as spent:
        model(torch.tensor([1]), scale).backward()
    assert spent == {"rope": 202, "rms": 0, "nope": 0}
    assert all(torch.equal(p.grad, g) for p, g in zip((*model.parameters(), scale), expected, strict=True))


def test_a_model_of_which_only_the_replaced_modules_changed() -> None:
    plain = {"seconds": [10.0, 11.0, 9.0], "inside": {"rms": [1.0, 2.0, 1.0], "rope": [3.0, 3.0, 3.0]}}
    patched = {"seconds": [20.0, 10.0, 10.0], "inside": {"rms": [1.5, 2.5, 1.4]}}
    assert in_place(plain, patched, "rms") == pytest.approx([1.05, 1.05, 1.04]), "of their rounds, and the median whole"


def test_parts(tmp_path: Path) -> None:
    found = run(tmp_path, *MICRO)
    assert len(found["groups"]) == 6
    for group in found["groups"]:
        assert group["timings"][0]["subject"] == "copy"
        assert group["timings"][1]["subject"] == bench_micro.BASIS[group["case"]]
        assert all(len(t["seconds"]) == 2 and t["failed"] is None for t in group["timings"])


def test_out_of_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark.main([*MICRO, *QUICK, "--minutes", "0", "--output_dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith(": results.md, results.json\n")  # there is nothing to draw
    assert "* norm, forward, 64 float32: out of time" in (tmp_path / "results.md").read_text()
    assert not (tmp_path / "benchmark.png").exists()


def test_ctrl_c_reports_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def interrupted(config: Any, device: torch.device) -> Any:
        (group, measure), (second, _), *_ = bench_micro.micro_groups(config, device)
        yield group, measure
        yield second, lambda: (_ for _ in ()).throw(KeyboardInterrupt)

    monkeypatch.setitem(benchmark.PARTS, "micro", interrupted)
    assert benchmark.main([*MICRO, *QUICK, "--output_dir", str(tmp_path)]) == 130
    assert capsys.readouterr().err.endswith("interrupted\n"), "nothing of --resume, which there isn't"
    assert "LayerNorm" in (tmp_path / "results.md").read_text()
    assert len(json.loads((tmp_path / "results.json").read_text())["groups"]) == 1
    assert (tmp_path / "benchmark.png").exists()


def test_modules_are_those_of_patched_models_and_agree_with_their_references() -> None:
    x = torch.randn(4, 16, 128)
    made = {name: make() for name, make in bench_micro.norms(128, CPU).items()}
    made["RMSNorm"].weight.data.uniform_(0.5, 2.0)
    made["RMSNorm"].bias.data.zero_()
    made["LlamaRMSNorm"].weight.data.copy_(made["RMSNorm"].weight)
    made["LlamaRMSNorm"].variance_epsilon = made["RMSNorm"].eps
    torch.testing.assert_close(made["RMSNorm"](x), made["LlamaRMSNorm"](x))
    dyt, reference = made["DyT"], made["DyT, reference"]
    for ours, theirs in zip((dyt.alpha, dyt.gain, dyt.shift), reference.parameters(), strict=True):
        ours.data.uniform_(0.5, 2.0)
        theirs.data.copy_(ours)
    torch.testing.assert_close(dyt(x), reference(x))

    rotate = bench_micro.subjects("rotary", 128, CPU)
    angles = torch.randn(1, 16, 32)
    q, k = (torch.randn(2, 16, 2, 64) for _ in range(2))
    both, signed = torch.cat((angles, angles), -1), torch.cat((-angles, angles), -1)
    ours = rotate["RoPE"]()(q, k, both[:, :, None].cos(), signed[:, :, None].sin())
    theirs = rotate["transformers"]()(q.transpose(1, 2), k.transpose(1, 2), both.cos(), both.sin())
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b.transpose(1, 2))


def test_eager_is_eager_and_compiled_is_compiled() -> None:
    called = []
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def backend(graph: Any, example: Any) -> Any:
        return lambda *args: called.append("compiled") or graph(*args)

    compile_model(model, "model", backend=backend)
    x = torch.ones(1, 2)
    found = race([Entrant("a", mode, lambda: model(x), model) for mode in ("eager", "compiled")], 2, CPU)
    assert [(t["graphs"], t["breaks"], t["failed"]) for t in found] == [(0, 0, None), (1, 0, None)]
    before = len(called)
    race([Entrant("a", "eager", lambda: model(x), model)], 2, CPU)
    assert len(called) == before > 0


def test_compiled_code_that_isnt_called_is_no_figure() -> None:
    model = compile_model(nn.Sequential(nn.Linear(2, 2)), "model", backend="eager")
    found = race([Entrant("past it", "compiled", lambda: model.forward(torch.ones(1, 2)), model)], 2, CPU)
    assert "isn't called" in found[0]["failed"]
    assert found[0]["seconds"] == []


def test_one_that_fails_doesnt_stop_the_others() -> None:
    def fail() -> None:
        raise ValueError("no such kernel\nand more")

    found = race([Entrant("a", "eager", fail), Entrant("b", "eager", lambda: None)], 3, CPU)
    assert found[0]["failed"] == "ValueError: no such kernel"
    assert len(found[1]["seconds"]) == 3


def test_peak_memory_is_what_is_held_at_once() -> None:
    x = torch.ones(250_000)  # 1 MB
    works = {"one after another": lambda: [x + 1 for _ in range(3)][-1], "freed": lambda: [(x + 1).sum() for _ in "ab"]}
    works["in place"] = lambda: (x + 1).add_(1)
    found = race([Entrant(name, "eager", work) for name, work in works.items()], 1, CPU)
    assert [round(t["peak_bytes"] / 1e6, 2) for t in found] == [3, 1, 1]


def test_samples_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "AT_LEAST", 0.0)
    order: list[str] = []
    race([Entrant(name, "eager", lambda name=name: order.append(name)) for name in "ab"], 3, CPU)
    assert "".join(order[:8]) == "aaaabbbb"
    rounds = ["".join(order[i : i + 2]) for i in range(8, 14, 2)]
    assert all(sorted(names) == ["a", "b"] for names in rounds)
    assert len(set(rounds)) == 2  # who comes first changes


def test_weights_lie_in_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "AT_LEAST", 0.0)
    models = {"plain": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "patched": nn.Sequential(nn.Linear(2, 2))}
    values = {name: [p.detach().clone() for p in model.parameters()] for name, model in models.items()}
    own = {name: [p.data_ptr() for p in model.parameters()] for name, model in models.items()}
    turns: dict[str, list[tuple[list[int], bool]]] = {name: [] for name in models}

    def work(name: str) -> None:
        parameters = list(models[name].parameters())
        as_given = all(map(torch.equal, parameters, values[name]))
        turns[name].append(([p.data_ptr() for p in parameters], as_given))
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(1)  # as training does

    race([Entrant(name, "eager", lambda name=name: work(name), model) for name, model in models.items()], 3, CPU)
    for name in models:
        assert [as_given for _, as_given in turns[name]] == [True, False, False, False, True, True, True]
    assert turns["plain"][-1][0][:2] == turns["patched"][-1][0]
    assert len(set(turns["plain"][-1][0])) == 4
    for name, model in models.items():  # and then each has its own again
        assert [p.data_ptr() for p in model.parameters()] == own[name]
        assert all(map(torch.equal, model.parameters(), values[name]))


def test_equal_weights_stay_where_they_lie() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    patched = copy.deepcopy(plain)
    nn.init.zeros_(patched[1].bias)
    entrants = [Entrant(name, "eager", lambda: None, model) for name, model in (("a", plain), ("b", patched))]
    with timing._in_one_place(entrants) as weights:
        for entrant in entrants:
            with timing._having_its_turn(entrant, weights):
                laid = dict(weights.laid)
        weights.lay(plain)
        changed = [address for address, values in weights.laid.items() if laid[address] is not values]
        assert changed == [plain[1].bias.data_ptr()]


def test_a_ratio_is_that_of_runs_of_the_same_round() -> None:
    one, other = {"seconds": [2.0, 20.0, 3.0]}, {"seconds": [1.0, 10.0, 3.0]}  # the machine was slower in between
    assert timing.middle(timing.ratios(one, other)) == (2.0, 1.0, 2.0)


def test_an_interval_holds_the_median_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).lognormal(size=(400, 21))
    held = [low <= 1 <= high for _, low, high in map(timing.middle, draws.tolist())]
    assert 0.94 < np.mean(held) < 0.99, "whose true value is .973 for 21"
    assert timing.middle([float(x) for x in range(21)]) == (10.0, 5.0, 15.0)


def test_rate_against_a_copy() -> None:
    copied = {"seconds": [1.0, 1.0], "moved": 200}
    assert of_copy({"seconds": [5.0, 5.0], "moved": 500}, copied) == 0.5, "2.5 times the bytes in 5 times the time"


def test_bytes_that_have_to_be_moved() -> None:
    moved = {(kind, work): bench_micro.least_bytes(kind, work, 10, 2) for kind in bench_micro.KINDS
             for work in (bench_micro.FORWARD, bench_micro.BACKWARD)}  # fmt: skip
    assert list(moved.values()) == [40, 100, 80, 160, 80, 160]


def test_models_that_dont_agree_arent_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def wrong(model: Any) -> Any:
        native = native_model(model)
        next(m for m in native.modules() if hasattr(m, "inv_freq")).inv_freq *= 2
        return native

    monkeypatch.setattr(bench_models, "native_model", wrong)
    flags = [*MODELS, *QUICK, "--models", "gpt2", "--patches", "rope"]
    assert benchmark.main([*flags, "--output_dir", str(tmp_path)]) == 2
    assert "don't agree" in capsys.readouterr().err


def test_what_wasnt_measured_is_said() -> None:
    failed = {"subject": "DyT, Liger", "mode": "eager", "failed": "RuntimeError: no", "seconds": [], "peak_bytes": None}
    fine = {**failed, "subject": "copy", "failed": None, "seconds": [1.0], "moved": 10, "graphs": 0, "breaks": 0}
    group = {"part": "micro", "case": "norm", "work": "forward", "width": 64, "dtype": "float32"}
    hardware = {"cpu": "c", "cores": 1, "processes": 1, "device": "cpu"}
    results = {"command": "x", "versions": {}, "hardware": hardware, "wall_seconds": 1.0}
    results |= {"config": {"repeats": 1, "megabytes": 1}, "groups": [{**group, "timings": [fine, failed]}]}
    assert "* norm, forward, 64 float32, DyT, Liger eager: RuntimeError: no" in benchmark_report(results)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--width", "65"], "a width must be a multiple of 64, not 65"),
        (["--widths", "64", "100"], "a width must be a multiple of 64, not 100"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--modes", "fast"], "--modes knows eager, compiled, not fast"),
        (["--models", "t5"], "--models knows gpt2, bert, opt, vit, llama-1b, not t5"),
        (["--dtypes", "int8"], "--dtypes knows float32, bfloat16, float16, not int8"),
        (["--precision", "int8"], "--precision must be float32 or bfloat16, not int8"),
        (["--regions", "all"], "--regions must be blocks or model, not all"),
        (["--patches", "rmss"], "rms"),
        (["--megabytes", "0"], "--megabytes must be positive"),
        (["--minutes", "-1"], "--minutes must be at least 0"),
        (["--new_tokens", "9", "--block_size", "8"], "can't be more than --block_size, 8"),
    ],
)
def test_bad_settings(flags: list[str], told: str, capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert benchmark.main([*MODELS, *QUICK, "--output_dir", str(tmp_path), *flags]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "results.json").exists()
