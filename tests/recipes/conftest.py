"""Recipes are imported as the scripts that they are, and run on the CPU."""

from pathlib import Path

import finetune
import pytest
from accelerate.state import AcceleratorState
from small_run import SMALL
from tiny_encoder import write_bert, write_sources
from transformers import BertForMaskedLM, BertModel


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    """accelerate remembers its settings for the life of a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A text with structure to learn, and a few characters of more than one byte."""
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    lines = [f"verse {i}: {i % 7} sheep went uphill, {i % 5} came back — naïve, said the dög.\n" for i in range(400)]
    path.write_text("".join(lines), "utf-8")
    return path


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory) -> Path:
    """The folder of a run of finetune.py, which tests only read."""
    out = tmp_path_factory.mktemp("finished")
    flags = ["--text", str(text), "--output_dir", str(out), "--variants", "dyt", "rms+rope", "control"]
    finetune.main([*SMALL.split(), *flags])
    return out


@pytest.fixture(scope="session")
def encoder(tmp_path_factory) -> str:
    """A tiny encoder without a head, with its tokenizer."""
    files = write_sources(tmp_path_factory.mktemp("source"))
    return write_bert(BertModel, tmp_path_factory.mktemp("encoder"), files)


@pytest.fixture(scope="session")
def bert(tmp_path_factory) -> str:
    """A tiny masked language model with its tokenizer."""
    files = write_sources(tmp_path_factory.mktemp("source"))
    return write_bert(BertForMaskedLM, tmp_path_factory.mktemp("bert"), files)
