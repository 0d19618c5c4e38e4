"""What is of the whole process comes out as it went in, whatever several threads patch at once."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
from tiny_models import norms_of, patch, tiny

from hfpatch.measure.quiet_forward import inference_state
from hfpatch.measure.randomness import seed_deterministically
from hfpatch.patch import outcomes
from hfpatch.plan import plan_patch
from hfpatch.runtime.norms import RMSNorm

FAMILIES = ("gpt2", "opt", "gpt_neo")


def process_state() -> list[Any]:
    name, words, *rest = numpy.random.get_state()
    return [
        torch.get_rng_state().tolist(),
        (name, words.tolist(), rest),
        random.getstate(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_default_dtype(),
    ]


@pytest.mark.slow
def test_threads_that_patch_different_models() -> None:
    models = {name: [tiny(name)] for name in FAMILIES}
    alone = {name: outcomes(patch(tiny(name), norm="rms")) for name in FAMILIES}
    before, errors = process_state(), list[BaseException]()

    def work(name: str) -> None:
        try:
            for model in models[name]:
                plan_patch(model, norm="rms")
                patch(model, norm="rms")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in FAMILIES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert process_state() == before
    for name, expected in alone.items():
        for model in models[name]:
            assert norms_of(model, RMSNorm)
            assert outcomes(model) == expected


def test_two_threads_by_turns() -> None:
    """The second starts inside of the first and ends after it: without a lock it would put back what that one set."""
    before, inside, entered = process_state(), threading.Event(), threading.Event()

    def second() -> None:
        inside.wait()
        with seed_deterministically(1):
            entered.set()

    thread = threading.Thread(target=second)
    thread.start()
    with seed_deterministically(0):
        inside.set()
        assert not entered.wait(0.1), "it waits"
        with seed_deterministically(2):  # as often as it likes on one thread
            pass
    thread.join()
    assert entered.is_set()
    assert process_state() == before


@pytest.mark.parametrize("kind", ["cuda", "xpu", "npu"])
def test_the_generators_of_a_models_device(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    @contextmanager
    def fork_rng(devices: Any = None, device_type: str | None = None) -> Any:
        kept.append((devices, device_type))
        yield

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    monkeypatch.setattr("hfpatch.measure.quiet_forward.device_of", lambda model: torch.device("cpu"))
    with inference_state(tiny("gpt2")):
        pass
    assert all(not devices for devices, _ in kept)
    device: Any = type("Device", (), {"type": kind, "index": 0})()  # torch knows the name of no NPU without its package
    monkeypatch.setattr("hfpatch.measure.quiet_forward.device_of", lambda model: device)
    monkeypatch.setattr("hfpatch.measure.quiet_forward.default_device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: False)
    with inference_state(tiny("gpt2")):
        pass
    assert ([device], kind) in kept
