"""Fixtures of the tests of recipes and of tools/results: accelerate on the CPU, and a text to learn."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState

# flags of a run of finetune.py that takes seconds
SMALL = "--block_size 16 --heldout_blocks 20 --batch_size 4 --baseline_steps 6 --steps 4 --eval_every 2 --calibration 8"


@contextmanager
def accelerate_on_cpu() -> Iterator[None]:
    """Bit for bit is promised on the CPU; accelerate remembers its settings for the life of a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with accelerate_on_cpu():
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text with structure to learn, and a few characters of more than one byte."""
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    lines = [f"verse {i}: {i % 7} sheep went uphill, {i % 5} came back — naïve, said the dög.\n" for i in range(400)]
    path.write_text("".join(lines), "utf-8")
    return path
