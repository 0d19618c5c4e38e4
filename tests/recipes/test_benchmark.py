"""benchmark.py: every kind of work is timed of the same function, and what is refused is a row."""

import benchmark
import pytest
import torch
from texts import RecipeError

SMALL = "--repeats 2 --batch_size 1 --block_size 8 --new_tokens 2"


def test_every_kind_of_work(finished, tmp_path):
    flags = ["--model", str(finished / "baseline"), "--output_dir", str(tmp_path), "--modes", "eager"]
    rows = benchmark.main([*SMALL.split(), *flags, "--patches", "control", "rms then folded", "rope:axes=2"])
    assert len(rows) == 3 * 4
    refused = rows[rows.model == "rope:axes=2"]
    assert refused.refused.str.len().min() > 10
    assert rows.drop(refused.index).ms.min() > 0
    assert (rows[rows.model == "unpatched"].ratio == 1).all()
    assert (tmp_path / "benchmark.png").exists()
    assert "rms then folded" in (tmp_path / "results.md").read_text()


@pytest.mark.slow
def test_compiled_code_is_called(finished, tmp_path, monkeypatch):
    from hfpatch.compile import compile_model, compiled_calls

    models = []
    monkeypatch.setattr(
        benchmark, "compile_model", lambda m, **o: models.append(compile_model(m, backend="eager", **o))
    )
    flags = ["--model", str(finished / "baseline"), "--output_dir", str(tmp_path), "--modes", "compiled"]
    benchmark.main([*SMALL.split(), *flags, "--patches", "rope"])
    assert len(models) == 6
    assert all(all(compiled_calls(model).values()) for model in models)


def test_a_training_step_trains(finished):
    model = benchmark.open_model(str(finished / "baseline")).model
    before = model.transformer.wte.weight.clone()
    once = benchmark.training(model, torch.arange(8)[None], None)
    once()
    assert not torch.equal(model.transformer.wte.weight, before)


@pytest.mark.parametrize(("flags", "told"), [("--repeats 0", "at least 1"), ("--patches rmss", "Did you mean 'rms'")])
def test_refused(flags, told, tmp_path):
    with pytest.raises(RecipeError, match=told):
        benchmark.main([*flags.split(), "--output_dir", str(tmp_path)])
