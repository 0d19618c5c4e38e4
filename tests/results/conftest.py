"""Recipes are imported as the scripts that they are, and run on the CPU."""

import pytest
import recipe_runs
import train_healed
from run_files import tiny
from tiny_encoder import write_bert, write_sources
from transformers import BertForMaskedLM, BertModel

on_cpu, text = recipe_runs.on_cpu, recipe_runs.text


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory):
    """An uninterrupted run of train_healed.py, which tests only read."""
    out = tmp_path_factory.mktemp("finished")
    with recipe_runs.accelerate_on_cpu():
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
