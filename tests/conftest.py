"""One thread, no network, no progress bars."""

import contextlib
import gc
import os
import random
import signal
from collections import defaultdict
from collections.abc import Iterator

# before torch reads it, whatever the shell says; also of the processes that tests start
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

with contextlib.suppress(ImportError):  # torch's benchmarks import it, which fails once a test loaded distutils
    import setuptools  # noqa: F401

import hypothesis
import numpy
import pytest
import torch
from sampled import SEED, sampled
from transformers.utils import logging

SLOW = 6  # cases of a test that are slow, if its mark `sample` doesn't say how many; the rest is for `-m sweep`

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background jobs
    signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()
hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
hypothesis.settings.register_profile("by seed", database=None, deadline=None, print_blob=True)
hypothesis.settings.load_profile("by seed" if SEED else "fixed")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if SEED and config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = SEED


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each case of a test to the default run, the slow one or the sweeps: `sample` in pyproject.toml."""
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for of_a_test in cases.values():
        mark = of_a_test[0].get_closest_marker("sample")
        quick = [item for item in of_a_test if item.get_closest_marker("slow") is None]
        chosen = quick if mark is None else sampled(quick, mark.args[0])
        others = [item for item in of_a_test if item not in chosen]
        slow = sampled(others, SLOW if mark is None else mark.kwargs.get("slow", SLOW))
        for item in others:
            item.add_marker("slow" if item in slow else "sweep")


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [
        f"-m {config.option.markexpr!r}; slow tests: -m slow, whole sweeps: -m sweep, those of a GPU: -m gpu",
        f"sample: HFPATCH_SAMPLE={SEED}" if SEED else "sample: the fixed one; HFPATCH_SAMPLE=<seed> chooses another",
    ]


def pytest_collection_finish() -> None:
    """What has been imported stays: accelerate collects garbage after every stage, and needn't look through it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers for a test, whichever ones ran before it."""
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


@pytest.fixture
def process_group() -> Iterator[None]:
    """torch.distributed with one process."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("torch without gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
