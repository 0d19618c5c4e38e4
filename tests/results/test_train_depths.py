"""The depth sweep, at a size of seconds: its figures, its stops and its refusals."""

import json
import math
import os
import signal

import numpy as np
import pytest
import torch
import train_depths
from run_files import read_results
from torch import nn

TINY = "--width 16 --block_size 8 --batch_size 2 --steps 3 --depths 1 3 --seeds 0"
VARIANTS = ("post", "pre", "deepnorm")


def tiny(out, text, *more):
    return [*TINY.split(), "--text", str(text), "--output_dir", str(out), *map(str, more)]


def parse(*flags):
    return train_depths.read_settings(train_depths.StabilityConfig, list(flags), "train_depths.py")


def figures(out):
    """What must not depend on how often a run was stopped."""
    stages = read_results(out)["stages"]
    return {name: {k: v for k, v in stage.items() if k != "seconds"} for name, stage in stages.items()}


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("finished")
    assert train_depths.main(tiny(out, text)) == 0
    return out


def test_models_start_from_the_same_weights():
    """They differ in the norm alone."""
    models = [train_depths.build(parse(*TINY.split()), variant, depth=3, seed=5) for variant in VARIANTS]
    post, pre, deepnorm = (dict(model.named_parameters()) for model in models)
    assert set(pre) - set(post) == {f"model.decoder.final_layer_norm.{name}" for name in ("weight", "bias")}
    assert set(deepnorm) == set(post)
    assert all(torch.equal(pre[name], post[name]) for name in post)
    beta = (8 * 3) ** -0.25
    for name, weight in post.items():
        scaled = name.endswith("weight") and any(part in name for part in ("v_proj", "out_proj", "fc1", "fc2"))
        torch.testing.assert_close(deepnorm[name], weight * beta if scaled else weight)
    assert post["model.decoder.layers.0.fc1.weight"].std().item() == pytest.approx((2 / 80) ** 0.5, rel=0.1)


class TestFigures:
    @pytest.mark.slow
    def test_first_step_by_hand(self, finished, text):
        config, stream = parse(*TINY.split()), np.frombuffer(text.read_bytes(), np.uint8)
        ids = train_depths.draw_batches(stream, config, 0)[0]
        assert all(bytes(row.tolist()) in text.read_bytes() for row in ids)
        assert list(figures(finished)) == [f"{v}, {d} layers, seed 0" for d in (1, 3) for v in VARIANTS]
        for variant in VARIANTS:
            model = train_depths.build(config, variant, 3, 0)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            stage = figures(finished)[f"{variant}, 3 layers, seed 0"]
            assert stage["loss"][0] == pytest.approx(loss.item(), abs=1e-4)
            total = sum(p.grad.square().sum().item() for p in model.parameters()) ** 0.5
            assert stage["grad_norm"][0] == pytest.approx(total, rel=1e-3)
            assert len(stage["loss"]) == len(stage["grad_norm"]) == 3

    def test_verdict_is_against_the_unigram_model(self):
        start, unigram = [6.0] * 18, [0.0] * 18 + [2.5, 3.5]

        def verdict(*losses, not_finite_at=None):
            return train_depths.verdict({"loss": [*losses], "not_finite_at": not_finite_at}, unigram)

        assert verdict(*start, 2.8, 3.0) == "trains"
        assert verdict(*start, 2.9, 3.0) == "stalled"
        assert verdict(*start, 4.0, 2.0) == "stalled", "a tenth, not a step"
        assert verdict(2.0, not_finite_at=2) == "diverged"

    def test_a_model_that_diverges_is_recorded_and_the_rest_goes_on(self, finished, text, tmp_path, monkeypatch):
        clip, calls = nn.utils.clip_grad_norm_, []

        def broken(*args):
            calls.append(1)
            return clip(*args) * (math.nan if len(calls) == 1 else 1)

        monkeypatch.setattr(nn.utils, "clip_grad_norm_", broken)
        assert train_depths.main(tiny(tmp_path, text, "--depths", 1)) == 0
        first, *others = figures(tmp_path).values()
        expected = figures(finished)
        assert (first["not_finite_at"], first["loss"]) == (1, [])
        assert others == [expected["pre, 1 layers, seed 0"], expected["deepnorm, 1 layers, seed 0"]]
        assert json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
        assert "diverged" in (tmp_path / "results.md").read_text().splitlines()[4]
        assert (tmp_path / "curves.png").exists()


@pytest.mark.slow
def test_ctrl_c_keeps_finished_models_and_resuming_gives_the_same(finished, text, tmp_path, monkeypatch):
    train = train_depths.train

    def interrupted(name, *args):
        if name == "deepnorm, 1 layers, seed 0":
            os.kill(os.getpid(), signal.SIGINT)
        return train(name, *args)

    with monkeypatch.context() as patch:
        patch.setattr(train_depths, "train", interrupted)
        assert train_depths.main(tiny(tmp_path, text)) == 130
    assert list(figures(tmp_path)) == ["post, 1 layers, seed 0", "pre, 1 layers, seed 0"]
    assert "pre-norm" in (tmp_path / "results.md").read_text()
    assert train_depths.main(tiny(tmp_path, text, "--resume", "--learning_rate", 1)) == 2, "other settings"
    assert train_depths.main(tiny(tmp_path, text, "--resume")) == 0
    assert figures(tmp_path) == figures(finished)
