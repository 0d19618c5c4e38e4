"""The depth sweep, at a size of seconds: its figures, its stops and its refusals."""

import json
import math
import os
import signal

import numpy as np
import pytest
import stability
import torch
import yaml
from hfrecipes import corpus as data
from hfrecipes import depth_report
from run_files import ROOT, read_results
from torch import nn
from transformers import PreTrainedTokenizerFast

TINY = "--width 8 --heads 2 --block_size 8 --batch_size 2 --steps 3 --depths 1 3 --seeds 0 --characters 3000"


def tiny(out, *more):
    return [*TINY.split(), "--output_dir", str(out), *map(str, more)]


def settings(*flags):
    return stability.parse([*TINY.split(), *flags])


def figures(out):
    """What must not depend on how often a run was stopped."""
    return {
        name: {k: v for k, v in cell.items() if k != "seconds"} for name, cell in read_results(out)["cells"].items()
    }


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    path.write_text("".join(f"verse {i}: {i % 7} sheep went uphill, {i % 5} came back.\n" for i in range(400)))
    return path


@pytest.fixture
def undrawn(monkeypatch):
    """Drawing takes longer than all the rest."""
    monkeypatch.setattr(stability, "draw_depths", lambda results, path: None)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("finished")
    assert stability.main(tiny(out, "--text", text)) == 0
    return out


class TestModels:
    """The variants differ in the norm alone."""

    @pytest.fixture
    def models(self):
        return {v: stability.build(settings(), v, depth=3, seed=5) for v in ("post", "pre", "deepnorm")}

    def test_they_start_from_the_same_weights(self, models):
        post, pre, deepnorm = (dict(m.named_parameters()) for m in models.values())
        assert set(pre) - set(post) == {f"model.decoder.final_layer_norm.{name}" for name in ("weight", "bias")}
        assert set(deepnorm) == set(post)
        assert all(torch.equal(pre[name], post[name]) for name in post)
        beta = (8 * 3) ** -0.25
        for name, weight in post.items():
            scaled = name.endswith("weight") and any(part in name for part in ("v_proj", "out_proj", "fc1", "fc2"))
            torch.testing.assert_close(deepnorm[name], weight * beta if scaled else weight)

    def test_layers_start_by_xavier_s_rule(self, models):
        wide = stability.build(settings("--width", "64"), "post", depth=1, seed=0)
        layer = stability.layers_of(wide)[0]
        assert layer.fc1.weight.std().item() == pytest.approx((2 / (64 + 256)) ** 0.5, rel=0.03)
        assert layer.self_attn.q_proj.weight.std().item() == pytest.approx((2 / 128) ** 0.5, rel=0.03)

    def test_each_is_its_formula(self, models):
        """Of the first layer's first branch, on the layer's own norm and attention."""
        alpha = 6**0.25
        meet = {
            "post": lambda x, f, norm: norm(x + f(x)),
            "pre": lambda x, f, norm: x + f(norm(x)),
            "deepnorm": lambda x, f, norm: nn.functional.layer_norm(alpha * x + f(x), (8,), norm.weight, norm.bias),
        }
        x = torch.randn(1, 1, 8)
        for variant, model in models.items():
            layer = stability.layers_of(model)[0].eval()
            plain = stability.layers_of(models["post"])[0]

            def attention(h, at=layer.self_attn):
                return at.out_proj(at.v_proj(h))  # a token alone attends to itself

            def rest(h, layer=layer):
                return layer.fc2(layer.fc1(h).relu())

            h = meet[variant](x, attention, plain.self_attn_layer_norm)
            expected = meet[variant](h, rest, plain.final_layer_norm)
            with torch.no_grad():
                torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-4, msg=variant)

    def test_other_seeds_and_other_norms(self):
        config = settings()
        weights = [stability.build(config, "post", 1, seed).lm_head.weight for seed in (0, 0, 1)]
        assert torch.equal(weights[0], weights[1])
        assert not torch.equal(weights[0], weights[2])
        assert "RMSNorm" in repr(stability.build(config, "rms", 1, 0))


class TestFigures:
    def test_every_cell_is_there(self, finished):
        cells = figures(finished)
        assert list(cells) == [f"{v}, {d} layers, seed 0" for d in (1, 3) for v in ("post", "pre", "deepnorm")]
        for cell in cells.values():
            assert len(cell["loss"]) == len(cell["grad_norm"]) == 3
            assert len(cell["layer_grad_norm"]) == cell["depth"]
            assert cell["not_finite_at"] is None

    def test_first_step_by_hand(self, finished, text):
        config = settings()
        documents = data.first_characters(data.read_text_files([str(text)]), 3000)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(finished / "tokenizer")
        tokens, _ = data.encode(documents, tokenizer)
        assert len(tokens) == 3001, "bytes, and the end of the text"
        blocks = data.TrainBlocks(tokens, data.Causal(8), 0, 0, 2)
        ids = torch.stack([blocks[i]["input_ids"] for i in range(2)])
        for variant in ("post", "pre", "deepnorm"):
            model = stability.build(config, variant, 3, 0)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            cell = figures(finished)[f"{variant}, 3 layers, seed 0"]
            assert cell["loss"][0] == pytest.approx(loss.item(), abs=1e-4)
            total = sum(p.grad.square().sum().item() for p in model.parameters()) ** 0.5
            assert cell["grad_norm"][0] == pytest.approx(total, rel=1e-3)
            layer = model.model.decoder.layers[1]
            norm = sum(p.grad.square().sum().item() for p in layer.parameters()) ** 0.5
            assert cell["layer_grad_norm"][1] == pytest.approx(norm, rel=1e-3)

    def test_unigram_model_by_hand(self, finished, text):
        results, stream = read_results(finished), [*text.read_bytes()[:3000], 256]
        counts = {byte: stream.count(byte) for byte in stream}
        entropy = -sum(n / 3001 * math.log(n / 3001) for n in counts.values())
        assert results["data"]["unigram_entropy"] == pytest.approx(entropy)
        blocks = data.TrainBlocks(np.array(stream), data.Causal(8), 0, 4, 2)  # of the third step
        predicted = [b for i in range(2) for b in blocks[i]["labels"][1:].tolist()]
        loss = -sum(math.log(counts[byte] / 3001) for byte in predicted) / 14
        assert results["unigram_loss"]["0"][2] == pytest.approx(loss, abs=1e-4)

    def test_files_and_record(self, finished):
        results, table = read_results(finished), (finished / "results.md").read_text("utf-8")
        rows = [line for line in table.splitlines() if line.startswith("|")]
        assert len(rows) == 2 + 6
        assert len({len(row) for row in rows}) == 1, "the table is aligned"
        assert [row.split("|")[2].strip() for row in rows[2:5]] == ["post-norm", "pre-norm", "DeepNorm"]
        assert f"{results['cells']['post, 1 layers, seed 0']['loss'][-1]:.3f}" in rows[2]
        assert "`python recipes/stability.py --width 8" in table
        assert "seeds 0" in table
        assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert {"python", "hfpatch", "torch", "transformers", "accelerate"} <= set(results["versions"])
        assert results["hardware"]["cores"] >= 1

    def test_clipping_is_of_the_update_not_of_the_record(self, finished, undrawn, text, tmp_path):
        flags = ["--text", text, "--max_grad_norm", "1e-9", "--depths", 1, "--variants", "post"]
        assert stability.main(tiny(tmp_path, *flags)) == 0
        (clipped,) = figures(tmp_path).values()
        free = figures(finished)["post, 1 layers, seed 0"]
        assert clipped["grad_norm"][0] == free["grad_norm"][0]
        assert clipped["loss"][0] == free["loss"][0]
        assert clipped["loss"][1:] != free["loss"][1:]

    def test_warmup_starts_from_nothing(self, finished, undrawn, text, tmp_path):
        flags = ["--text", text, "--warmup_steps", "2", "--depths", 1, "--variants", "post"]
        assert stability.main(tiny(tmp_path, *flags)) == 0
        (warm,) = figures(tmp_path).values()
        still = stability.build(settings(), "post", 1, 0)
        tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
        tokens, _ = data.encode(data.first_characters(data.read_text_files([str(text)]), 3000), tokenizer)
        ids = torch.stack([data.TrainBlocks(tokens, data.Causal(8), 0, 2, 2)[i]["input_ids"] for i in range(2)])
        assert warm["loss"][1] == pytest.approx(still(input_ids=ids, labels=ids).loss.item(), abs=1e-4)
        assert warm["loss"][1] != figures(finished)["post, 1 layers, seed 0"]["loss"][1]


class TestVerdict:
    @staticmethod
    def cell(*losses, not_finite_at=None):
        return {"loss": list(losses), "not_finite_at": not_finite_at}

    def test_against_the_unigram_model(self):
        start, unigram = [6.0] * 18, [0.0] * 18 + [2.5, 3.5]
        assert depth_report.verdict(self.cell(*start, 2.8, 3.0), unigram) == "trains"
        assert depth_report.verdict(self.cell(*start, 2.9, 3.0), unigram) == "stalled"
        assert depth_report.verdict(self.cell(*start, 4.0, 2.0), unigram) == "stalled", "a tenth, not a step"
        assert depth_report.verdict(self.cell(2.0, not_finite_at=2), unigram) == "diverged"

    def test_smoothing(self):
        assert depth_report.smooth([1.0, 3.0, 5.0, 7.0], 2).tolist() == [1.0, 2.0, 4.0, 6.0]
        assert depth_report.smooth([], 2).tolist() == []

    def test_mean_over_seeds(self):
        assert depth_report.mean_curve([[1.0, 3.0, 5.0], [3.0]]).tolist() == [2.0, 3.0, 5.0]
        assert depth_report.mean_curve([[]]).tolist() == []


@pytest.mark.slow
class TestStopping:
    def test_ctrl_c_keeps_finished_cells_and_resuming_gives_the_same(
        self, finished, undrawn, text, tmp_path, capsys, monkeypatch
    ):
        backward = stability.Sweep.backward

        def interrupted(self, name, step, *args):
            if (name, step) == ("deepnorm, 1 layers, seed 0", 2):
                os.kill(os.getpid(), signal.SIGINT)
            return backward(self, name, step, *args)

        with monkeypatch.context() as patch:
            patch.setattr(stability.Sweep, "backward", interrupted)
            assert stability.main(tiny(tmp_path, "--text", text)) == 130
        error = capsys.readouterr().err
        assert "stopped in step 2 of deepnorm, 1 layers, seed 0" in error
        assert "--resume" in error
        assert list(figures(tmp_path)) == ["post, 1 layers, seed 0", "pre, 1 layers, seed 0"]
        assert "pre-norm" in (tmp_path / "results.md").read_text()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert stability.main(tiny(tmp_path, "--text", text, "--resume")) == 0
        assert "pre, 1 layers, seed 0: done before" in capsys.readouterr().out
        assert figures(tmp_path) == figures(finished)

    def test_time_limit(self, text, tmp_path, capsys):
        assert stability.main(tiny(tmp_path, "--text", text, "--max_minutes", "0")) == 130
        assert "--max_minutes 0 are over in step 1 of post, 1 layers, seed 0" in capsys.readouterr().err
        assert figures(tmp_path) == {}
        assert not (tmp_path / "results.md").exists()

    def test_more_seeds_join_a_finished_run(self, finished, undrawn, text, tmp_path):
        flags = ["--text", text, "--depths", 1, "--variants", "post"]
        assert stability.main(tiny(tmp_path, *flags)) == 0
        assert stability.main(tiny(tmp_path, *flags, "--seeds", 0, 1, "--resume")) == 0
        first, second = figures(tmp_path).values()
        assert first == figures(finished)["post, 1 layers, seed 0"]
        assert second["loss"] != first["loss"]
        row = (tmp_path / "results.md").read_text().splitlines()[4]
        assert "2 of 2" in row
        assert " to " in row

    def test_other_settings_can_not_resume(self, finished, text, tmp_path, capsys):
        before = (finished / "results.json").read_text()
        assert stability.main(tiny(finished, "--text", text, "--resume", "--learning_rate", "1e-3")) == 2
        assert "other settings: learning_rate changed" in capsys.readouterr().err
        other = tmp_path / text.name
        other.write_text("more\n" + text.read_text())
        assert stability.main(tiny(finished, "--text", other, "--resume")) == 2
        assert "text (its content)" in capsys.readouterr().err
        assert (finished / "results.json").read_text() == before


@pytest.mark.parametrize("step", [1, 3])
def test_a_model_that_diverges_is_recorded_and_the_rest_goes_on(step, finished, text, tmp_path, monkeypatch):
    token_nats, calls = stability.token_nats, []

    def broken(*args, **options):
        nats, counts = token_nats(*args, **options)
        calls.append(1)
        return (nats * math.nan if len(calls) == step else nats), counts

    monkeypatch.setattr(stability, "token_nats", broken)
    assert stability.main(tiny(tmp_path, "--text", text, "--depths", 1)) == 0
    first, *others = figures(tmp_path).values()
    expected = figures(finished)
    assert first["not_finite_at"] == step
    assert first["loss"] == expected["post, 1 layers, seed 0"]["loss"][: step - 1]
    assert others == [expected["pre, 1 layers, seed 0"], expected["deepnorm, 1 layers, seed 0"]]
    if step == 1:
        assert first["layer_grad_norm"] == [None]
    assert json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert "diverged" in (tmp_path / "results.md").read_text().splitlines()[4]
    assert (tmp_path / "curves.png").exists()


class TestSettings:
    def test_yaml_spells_out_the_defaults(self):
        path = ROOT / "recipes" / "configs" / "stability.yaml"
        assert stability.parse([str(path)]) == stability.parse([]) == stability.StabilityConfig()
        assert set(yaml.safe_load(path.read_text("utf-8"))) == set(stability.StabilityConfig.__dataclass_fields__)

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--variants", "pots"], "UnknownNameError: no norm called 'pots'"),
            (["--variants", "deepnrm"], "Did you mean 'deepnorm'?"),
            (["--variants", "deepnorm:alpha=0"], "OptionError"),
            (["--variants", "post", "post"], "named twice in --variants post post"),
            (["--depths", "6", "0"], "--depths must be at least 1, not 0"),
            (["--depths", "6", "6"], "named twice in --depths 6 6"),
            (["--seeds", "-1"], "--seeds must be at least 0, not -1"),
            (["--steps", "0"], "--steps must be at least 1, not 0"),
            (["--learning_rate", "nan"], "--learning_rate must be positive"),
            (["--max_minutes", "nan"], "--max_minutes must be at least 0, not nan"),
            (["--heads", "3"], "--width must be a multiple of --heads 3, not 8"),
            (["--text", "missing.txt"], "can't read the text file missing.txt"),
            (["--characters", "5"], "less than one block of 8"),
        ],
    )
    def test_refused_at_once(self, text, tmp_path, capsys, monkeypatch, flags, message):
        monkeypatch.setattr(stability.Sweep, "train", lambda *a: pytest.fail("training began"))
        assert stability.main([*tiny(tmp_path, "--text", text), *flags]) == 2
        error = capsys.readouterr().err.strip()
        assert message in error
        assert "\n" not in error


def test_first_characters_are_whole_files_but_the_last():
    documents = [data.Document(f"{i}.txt", f"{i}" * 10) for i in range(9)]
    kept = data.first_characters(documents[::-1], 25)
    assert [len(d.text) for d in kept] == [10, 10, 5]
    assert [d.name for d in kept] == [d.name for d in sorted(documents, key=lambda d: d.hash)[:3]]
