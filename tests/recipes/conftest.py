"""Recipes are imported as the scripts that they are, and run on the CPU."""

from pathlib import Path

import finetune
import pytest
import recipe_runs
from tiny_encoder import write_bert, write_sources
from transformers import BertForMaskedLM, BertModel

on_cpu, text = recipe_runs.on_cpu, recipe_runs.text


@pytest.fixture(scope="session")
def finished(text, tmp_path_factory) -> Path:
    """The folder of a run of finetune.py, which tests only read."""
    out = tmp_path_factory.mktemp("finished")
    flags = ["--text", str(text), "--output_dir", str(out), "--variants", "dyt", "rms+rope", "control"]
    finetune.main([*recipe_runs.SMALL.split(), *flags])
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
