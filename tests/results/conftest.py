"""Recipes are imported as the scripts that they are, and run on the CPU."""

from contextlib import contextmanager

import pytest
import train_healed
from accelerate.state import AcceleratorState
from run_files import tiny
from tiny_encoder import write_bert, write_sources
from transformers import BertForMaskedLM, BertModel


@contextmanager
def accelerate_on_cpu():
    """Bit for bit is promised on the CPU; accelerate remembers its settings for the life of a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    with accelerate_on_cpu():
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A text with structure to learn, and a few characters of more than one byte."""
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    lines = [f"verse {i}: {i % 7} sheep went uphill, {i % 5} came back — naïve, said the dög.\n" for i in range(400)]
    path.write_text("".join(lines), "utf-8")
    return path


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory):
    """An uninterrupted run of train_healed.py, which tests only read."""
    out = tmp_path_factory.mktemp("finished")
    with accelerate_on_cpu():
        assert train_healed.main(tiny(out, text, "--patch rms+rope")) == 0
    return out


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Python source for an encoder to read."""
    return write_sources(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="session")
def folder(files, tmp_path_factory):
    """A tiny encoder with a tokenizer of that source."""
    return write_bert(BertModel, tmp_path_factory.mktemp("encoder"), files)


@pytest.fixture(scope="session")
def bert(files, tmp_path_factory):
    """A tiny masked language model with a tokenizer of that source."""
    return write_bert(BertForMaskedLM, tmp_path_factory.mktemp("bert"), files)
