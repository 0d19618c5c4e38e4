"""Recipes are imported as the scripts that they are, and run on the CPU."""

import pytest
from accelerate.state import AcceleratorState


@pytest.fixture(scope="module", autouse=True)
def on_cpu():
    """Bit for bit is promised on the CPU; accelerate remembers its settings for the life of a process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text with some structure to learn."""
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    path.write_text("".join(f"verse {i}: {i % 7} sheep went uphill, {i % 5} came back.\n" for i in range(300)), "utf-8")
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Python source for an encoder to read."""
    from tiny_encoder import write_sources

    return write_sources(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def folder(files, tmp_path_factory):
    """A tiny encoder with a tokenizer of that source."""
    from tiny_encoder import write_encoder

    return write_encoder(tmp_path_factory.mktemp("encoder"), files)


@pytest.fixture
def refused(capsys, monkeypatch):
    """Runs a recipe that refuses its flags before anything is trained; the line that it says."""
    from hfrecipes.training import Run

    monkeypatch.setattr(Run, "train", lambda *a, **k: pytest.fail("training began"))

    def run(recipe, flags):
        assert recipe.main([*map(str, flags)]) == 2
        error = capsys.readouterr().err.strip()
        assert "\n" not in error
        return error

    return run
