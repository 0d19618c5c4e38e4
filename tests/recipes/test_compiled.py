"""--compile: the same figures, by code that is really called, and plain models on disk."""

import functools
import json

import finetune
import heal
import pytest
from hfrecipes import training
from run_files import read_results, tiny

from hfpatch.compile import compile_model

pytestmark = pytest.mark.slow


def small(out, text, *more):
    flags = "--layers 2 --baseline_steps 4 --steps 3 --heldout_blocks 9 --warmup_steps 1 --start copied"
    return tiny(out, text, flags, *more, variants="")


def losses(out):
    stages = read_results(out)["stages"]
    return {name: [*s["train_loss"], s["start"]["loss"], s["end"]["loss"]] for name, s in stages.items()}


def assert_close(ours, theirs, tolerance=1e-4):
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        assert ours[name] == pytest.approx(values, abs=tolerance), name


class Graphs(list):
    """A quick backend that keeps what it was given."""

    def __call__(self, graph, inputs):
        self.append(graph)
        return graph.forward


@pytest.fixture
def graphs(monkeypatch):
    found = Graphs()
    monkeypatch.setattr(training, "compile_model", functools.partial(compile_model, backend=found))
    return found


@pytest.fixture(scope="module")
def eager(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("eager")
    assert finetune.main(small(out, text, "--variants", "rms+rope", "control")) == 0
    return out


class TestTogetherWith:
    def test_a_patch(self, eager, text, tmp_path, graphs):
        assert finetune.main(small(tmp_path, text, "--variants", "rms+rope", "--compile")) == 0
        ours, theirs = losses(tmp_path), losses(eager)
        assert_close(ours, {name: theirs[name] for name in ours})
        # Two models; each has a graph for training and, of batches of 4, of any size and of 1, for measuring.
        assert 2 * 2 <= len(graphs) <= 2 * 4
        configs = [json.loads((out / "rms+rope" / "config.json").read_text()) for out in (tmp_path, eager)]
        assert configs[0].pop("hfpatch").keys() == configs[1].pop("hfpatch").keys()
        assert configs[0] == configs[1], "use_cache too"

    def test_gradient_checkpointing_stopped_and_gone_on_with(self, eager, text, tmp_path, graphs):
        flags = ["--variants", "rms+rope", "--compile", "--gradient_checkpointing"]
        assert finetune.main(small(tmp_path, text, *flags, "--stop_after", 6)) == 130
        assert finetune.main(small(tmp_path, text, *flags, "--resume")) == 0
        ours, theirs = losses(tmp_path), losses(eager)
        assert_close(ours, {name: theirs[name] for name in ours})

    def test_adapters_and_a_teacher_without_labels(self, eager, text, tmp_path, graphs):
        """Without the task's loss, which asks for no cache; adapters are merged before the last figures."""
        flags = ["--patch", "rope", "--method", "distil", "--distil_weight", 1, "--lora_rank", 2]
        flags += ["--model", eager / "baseline", "--baseline_steps", 0, "--heldout_blocks", 4, "--curve_blocks", 4]
        assert heal.main(small(tmp_path / "eager", text, *flags)) == 0
        assert not graphs
        assert heal.main(small(tmp_path / "compiled", text, *flags, "--compile")) == 0
        assert graphs
        assert_close(losses(tmp_path / "compiled"), losses(tmp_path / "eager"))


class TestRefused:
    def test_code_that_is_not_called(self, text, tmp_path, capsys, monkeypatch):
        """As by a wrapper that goes past a module's own call."""

        @functools.cache
        def hasty(kind):
            return type(kind.__name__, (kind,), {"__call__": kind.forward})

        def passed_by(model):
            for module in compile_model(model, backend="eager").modules():
                if module._compiled_call_impl is not None and type(module).__call__ is not type(module).forward:
                    module.__class__ = hasty(type(module))
            return model

        monkeypatch.setattr(training, "compile_model", passed_by)
        assert finetune.main(small(tmp_path, text, "--variants", "control", "--compile")) == 2
        assert "RecipeError: --compile: 2 of 2 blocks" in capsys.readouterr().err
        assert read_results(tmp_path)["stages"] == {}
