"""gpu_check runs to its end without a GPU, goes on where it stopped, and its verdicts are those of its figures."""

import json

import gpu_check
import pytest
import torch
from harness import device, gpu_report
from harness.bench_models import FORWARD, TOKEN
from harness.bench_report import MICRO

TRY = ["--device", "cpu", "--tiny", "--repeats", "2"]


def run(out, *flags):
    assert gpu_check.main([*TRY, "--output_dir", str(out), *flags]) == 0
    return json.loads((out / "results.json").read_text()), (out / "results.md").read_text()


@pytest.mark.sweep
def test_whole(tmp_path):
    found, text = run(tmp_path, "--minutes", "30")
    config = gpu_check.GpuCheckConfig(device="cpu", tiny=True)
    folder = gpu_check.OutputFolder(config, "", gpu_check.Accelerator(cpu=True))
    assert [*found["done"]] == [step.name for step in gpu_check.plan_steps(config, folder)]
    assert found["left_out"] == []
    assert found["broken"] == {}
    assert [t for one in found["done"].values() for t in one.get("timings", []) if t["failed"]] == []
    trained = found["done"]["gpt2, training step, compiled"]["timings"]
    assert all(t["counts"][device.KEPT] > 0 and t["counts"]["graphs"] == t["counts"]["regions"] for t in trained)
    assert "| no graph breaks" in text
    assert "skipped" in found["done"]["tests, pytest -m gpu, both"]["summary"]
    assert (tmp_path / "gpu_check.png").stat().st_size > 10_000
    again, _ = run(tmp_path, "--minutes", "0")
    assert again["done"] == found["done"], "nothing is measured twice"


def test_a_run_goes_on(tmp_path, monkeypatch):
    found, text = run(tmp_path, "--minutes", "0")
    assert found["done"] == {}
    assert "* left out: no time: gpt2, training step, compiled" in text
    monkeypatch.setattr(gpu_check, "describe_device", lambda *_: {"GPU": "none"})
    found, text = run(tmp_path, "--parts", "environment")
    assert [one["environment"] for one in found["done"].values()] == [{"GPU": "none"}]
    monkeypatch.setattr(gpu_check, "describe_device", lambda *_: pytest.fail("measured twice"))
    monkeypatch.setattr(gpu_check, "run_gpu_tests", lambda *_: 1 / 0)
    found, text = run(tmp_path, "--parts", "environment", "tests")
    assert "GPU none." in text
    assert found["broken"] == {"tests, pytest -m gpu, both": "ZeroDivisionError: division by zero"}
    done = {"summary": "3 passed", "failed": [], "stopped": False}
    monkeypatch.setattr(gpu_check, "run_gpu_tests", lambda *_: done)
    found, text = run(tmp_path, "--parts", "environment", "tests")
    assert "`pytest -m gpu`: 3 passed." in text
    assert found["broken"] == {}


def test_what_time_ran_out_for_is_done_again():
    done = {"timings": [{"failed": None}, {"failed": "RuntimeError: no kernel"}]}
    assert gpu_check.is_finished(done)
    assert not gpu_check.is_finished({"timings": [{"failed": gpu_check.NO_TIME}]})
    assert not gpu_check.is_finished({"stopped": True})


def test_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--output_dir", str(tmp_path)]) == 2
    assert "no CUDA device here" in (said := capsys.readouterr().err)
    assert "--device cpu --tiny" in said
    assert gpu_check.main(["--output_dir", str(tmp_path), "--device", "cpu"]) == 2
    assert "takes --tiny" in capsys.readouterr().err
    run(tmp_path, "--minutes", "0")
    results = json.loads((tmp_path / "results.json").read_text())
    results["hardware"]["device"] = "another GPU"
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert gpu_check.main([*TRY, "--output_dir", str(tmp_path)]) == 2
    assert "has figures of another GPU, and this is cpu" in capsys.readouterr().err


LOG = """\
tests/a.py::test_b[PASSED-x] PASSED      [ 25%]
tests/a.py::test_c FAILED                [ 50%]
[gw1] [ 75%] PASSED tests/a.py::test_d[FAILED]
[gw0] [100%] SKIPPED tests/a.py::test_e
"""


def test_log_of_the_tests():
    stopped = device.read_test_log(LOG)
    assert stopped == {"summary": "1 failed, 2 passed, 1 skipped", "failed": ["tests/a.py::test_c"]}
    ended = device.read_test_log(f"{LOG}FAILED tests/a.py::test_c - assert 0\n=== 1 failed, 2 passed in 3.10s ===\n")
    assert ended == stopped | {"summary": "1 failed, 2 passed in 3.10s"}
    assert device.read_test_log("Killed")["summary"] == "none ended"


def test_tests_are_stopped_when_their_time_is_over(tmp_path):
    found = device.run_gpu_tests(tmp_path / "log", 0.1, 1)
    assert found == {"summary": "none ended", "failed": [], "stopped": True}


def test_kept_for_the_backward():
    """x of the product, and tanh's output: not the weight."""
    weight = torch.nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    assert device.kept_for_backward(lambda: weight(x).tanh().sum().backward(), weight) == 2 * x.nbytes


def race(part, case, work, **seconds):
    timings = [
        {
            "subject": name.replace("_", " "),
            "seconds": [at] * 6,
            "first_seconds": 1.0,
            "inside_seconds": {},
            "modules": None,
            "failed": None,
            "outcome": "exact: measured",
            "traffic": 2,
            "counts": {"graphs": 1, "regions": 1, "graph breaks": 0},
        }
        for name, at in seconds.items()
    ]
    return {"part": part, "case": case, "work": work, "mode": "compiled", "timings": timings}


def verdicts(models, micro):
    return {row["goal"]: (row["measured"], row["verdict"]) for row in gpu_report.goals(models, micro)}


def test_goals():
    fast = race("models", "gpt2", TOKEN, unpatched=1.2, control=2.0, none=1.0, rms=1.2)
    near = race(MICRO, "norm, 768", "forward", LayerNorm=1.0, RMSNorm=1.05, copy=1.0)
    found = verdicts([fast], [near])
    assert {verdict for _, verdict in found.values()} == {gpu_report.PASS, gpu_report.CLAIM}
    assert (
        found["what an exact LayerNorm to RMSNorm conversion gains, gpt2, token"][0] == "rms saves 0.0 % (0.0 to 0.0)"
    )
    slow = race("models", "gpt2", TOKEN, unpatched=1.0, none=1.0, rms=1.1)
    slow["timings"][0]["counts"] = {"graphs": 3, "regions": 1, "graph breaks": 1}
    far = race(MICRO, "norm, 768", "forward", LayerNorm=1.0, RMSNorm=1.25, copy=1.0)
    found = verdicts([slow], [far])
    assert {verdict for _, verdict in found.values()} == {gpu_report.MISS, gpu_report.CLAIM}
    measured = [measured for measured, _ in found.values()]
    assert measured[:2] == [
        "1 of 2; most: gpt2, token, rms 1.100 (1.100-1.100)",
        "0 of 1; least: 0.80, RMSNorm, norm, 768, forward",
    ]
    assert measured[3] == "2 in 3 compiled models"
    assert {verdict for _, verdict in verdicts([], []).values()} == {gpu_report.OPEN}
    slow["timings"][2]["outcome"] = "approximate: measured"
    slow["work"] = FORWARD
    assert "rms (not exact) saves -10.0 %" in str(verdicts([slow], []))
