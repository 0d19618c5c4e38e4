"""heal.py, at a size of seconds: its figures, its stops and its refusals."""

import json
import os
import signal

import heal
import pytest
import torch
from hfrecipes import report, settings, start
from hfrecipes import training as run
from hfrecipes.training import Run
from run_files import ROOT, read_results
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

TINY = "--layers 2 --width 32 --vocab_size 300 --block_size 16 --batch_size 4 --baseline_steps 4 --steps 6"
TINY += " --tracker none --eval_every 3 --save_every 2 --heldout_blocks 12 --curve_blocks 6 --warmup_steps 2"
TINY += " --calibration 4 --start copied --patch dyt+rope"


def tiny(out, text, *more):
    return [*TINY.split(), "--text", str(text), "--output_dir", str(out), *map(str, more)]


def figures(out):
    """What must not depend on how often a run was stopped."""
    kept = ("step", "start", "end", "curve", "train_loss", "parameters")
    results = read_results(out)
    stages = {name: {k: stage[k] for k in kept} for name, stage in results["stages"].items()}
    return {**stages, "agreement": results["agreement"]}


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("finished")
    assert heal.main(tiny(out, text, "--method", "distil")) == 0
    return out


class TestFigures:
    def test_every_stage_is_there(self, finished):
        stages = read_results(finished)["stages"]
        assert list(stages) == ["baseline", "swapped", "control", "healed"]
        assert [stage["step"] for stage in stages.values()] == [4, 0, 6, 6]
        assert stages["swapped"]["start"] == stages["swapped"]["end"] != stages["baseline"]["end"]
        assert stages["control"]["start"] == stages["baseline"]["end"]
        assert stages["healed"]["start"] == stages["swapped"]["start"]
        assert stages["healed"]["curve"][0] == stages["swapped"]["curve"][0]
        assert stages["healed"]["end"]["loss"] < stages["swapped"]["end"]["loss"]

    @pytest.mark.parametrize("name", ["swapped", "healed", "control"])
    def test_saved_models_have_the_reported_loss(self, finished, text, name):
        config = settings.read_run(tiny(finished, text), "heal.py", "", heal.HealConfig)
        run = Run(config, "")
        model = run.task.load(str(finished / name))
        loss = run.measure(model, run.loader(run.task.heldout))["loss"]
        assert loss == pytest.approx(read_results(finished)["stages"][name]["end"]["loss"], abs=1e-5)

    def test_the_healed_model_is_a_plain_patched_one(self, finished):
        healed, swapped = (load_file(finished / name / "model.safetensors") for name in ("healed", "swapped"))
        assert {k: v.shape for k, v in healed.items()} == {k: v.shape for k, v in swapped.items()}
        configs = [json.loads((finished / name / "config.json").read_text()) for name in ("healed", "swapped")]
        records = [{k: v for k, v in config["hfpatch"].items() if k != "fingerprint"} for config in configs]
        assert records[0] == records[1]
        model = AutoModelForCausalLM.from_pretrained(finished / "healed")
        assert model.transformer.h[0].ln_1.alpha != 0.5, "it was trained"

    def test_agreement(self, finished):
        agreement = read_results(finished)["agreement"]
        assert list(agreement) == ["swapped", "healed", "control"]
        assert all(0 <= figures["same_answer"] <= 1 < 1 + figures["divergence"] for figures in agreement.values())

    def test_report(self, finished):
        stages = read_results(finished)["stages"]
        lines = (finished / "results.md").read_text("utf-8").splitlines()
        assert lines[0] == "Patch dyt+rope, method distil."
        assert [row.split("|")[1].strip() for row in lines[4:7]] == ["loss", "perplexity", "bits per byte"]
        shown = [
            stages["baseline"]["end"],
            stages["swapped"]["start"],
            stages["healed"]["end"],
            stages["control"]["end"],
        ]
        assert [cell.strip() for cell in lines[4].split("|")[2:6]] == [f"{f['loss']:.3f}" for f in shown]
        assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.parametrize(
        ("before", "after", "healed", "control", "higher", "share"),
        [
            (2.0, 4.0, 2.5, 2.0, False, "75.0%"),
            (2.0, 4.0, 2.5, 1.5, False, "50.0%"),
            (2.0, 1.9, 1.8, 1.7, False, "-"),
            (0.9, 0.5, 0.8, 0.9, True, "75.0%"),
            (0.9, 0.9, 0.9, 0.9, True, "-"),
        ],
    )
    def test_share_recovered(self, before, after, healed, control, higher, share):
        main = "micro_f1" if higher else "loss"
        moments = {"baseline": before, "healed": healed, "control": control}
        stages = {name: {"end": {main: value}} for name, value in moments.items()}
        stages["swapped"] = {"start": {main: after}}
        results = {"stages": stages, "main": main, "higher_is_better": higher}
        assert report.recovered(results, main, control) == share


class TestStopping:
    @pytest.mark.slow
    def test_resumed_run_equals_an_uninterrupted_one(self, finished, text, tmp_path, capsys):
        for steps in (3, 10):  # in the baseline; in the healing
            stop = ["--method", "distil", "--stop_after", steps, *["--resume"][: steps == 10]]
            assert heal.main(tiny(tmp_path, text, *stop)) == 130
        (state,) = tmp_path.glob("state/*/stage.json")
        assert json.loads(state.read_text())["name"] == "healed"
        assert json.loads(state.read_text())["step"] == 3
        assert heal.main(tiny(tmp_path, text, "--method", "distil", "--resume")) == 0
        assert "swapped: done before" in capsys.readouterr().out
        assert figures(tmp_path) == figures(finished)

    @pytest.mark.slow
    def test_ctrl_c_does_not_wait_for_a_repair(self, text, tmp_path, capsys, monkeypatch):
        def interrupted(*args):
            os.kill(os.getpid(), signal.SIGINT)
            pytest.fail("went on")

        with monkeypatch.context() as patch:
            patch.setattr(start, "patched", interrupted)
            assert heal.main(tiny(tmp_path, text)) == 130
        assert "to go on: python recipes/heal.py" in capsys.readouterr().err
        assert heal.main(tiny(tmp_path, text, "--resume")) == 0
        assert "baseline: done before" in capsys.readouterr().out

    @pytest.mark.slow
    def test_stopping_with_the_last_step(self, text, tmp_path, capsys):
        flags = ["--method", "distil", "--no_control"]
        assert heal.main(tiny(tmp_path / "once", text, *flags)) == 0
        assert heal.main(tiny(tmp_path / "twice", text, *flags, "--stop_after", 10)) == 130
        assert "after step 6 of 6 of 'healed'" in capsys.readouterr().err
        assert heal.main(tiny(tmp_path / "twice", text, *flags, "--resume")) == 0
        assert figures(tmp_path / "twice") == figures(tmp_path / "once")
        assert "control" not in read_results(tmp_path / "once")["stages"]
        assert "healed vs before" in (tmp_path / "once" / "results.md").read_text("utf-8")

    def test_another_method_can_not_resume(self, finished, text, capsys):
        assert heal.main(tiny(finished, text, "--method", "finetune", "--resume")) == 2
        assert "other settings: method changed" in capsys.readouterr().err


class TestLora:
    def test_merged_in_the_end(self, finished, text, tmp_path):
        given = ["--model", finished / "baseline", "--baseline_steps", 0, "--lora_rank", 2]
        given += ["--method", "distil", "--distil_weight", 1]
        assert heal.main(tiny(tmp_path, text, *given)) == 0
        healed, swapped = (load_file(tmp_path / name / "model.safetensors") for name in ("healed", "swapped"))
        assert {k: v.shape for k, v in healed.items()} == {k: v.shape for k, v in swapped.items()}
        moved = {name for name in healed if not torch.equal(healed[name], swapped[name])}
        assert {"transformer.h.0.attn.c_attn.weight", "transformer.h.1.ln_2.alpha"} <= moved
        assert "transformer.wte.weight" not in moved
        stages = read_results(tmp_path)["stages"]
        assert stages["healed"]["end"]["loss"] == pytest.approx(stages["healed"]["curve"][-1]["loss"], abs=0.5)
        assert "control" not in stages, "it was distilled without labels"


class TestSettings:
    def test_lm_yaml_with_own_flags(self):
        argv = [str(ROOT / "recipes" / "configs" / "lm.yaml"), "--patch", "dyt", "--method", "distil"]
        config = settings.read_run(argv, "heal.py", "", heal.HealConfig)
        plain = settings.read_run(["--patch", "dyt", "--method", "distil"], "heal.py", "", heal.HealConfig)
        assert (config.patch, config.method, config.steps) == ("dyt", "distil", plain.steps)
        assert plain.output_dir == "runs/heal"

    def test_yaml_holds_own_settings(self, tmp_path):
        path = tmp_path / "own.yaml"
        path.write_text("patch: rms\nmethod: distil\ndistil_weight: 0.3\nlora_targets: [c_attn]\nlora_rank: 4\n")
        config = settings.read_run([str(path), "--distil_weight", "0.4"], "heal.py", "", heal.HealConfig)
        assert (config.patch, config.method, config.distil_weight) == ("rms", "distil", 0.4)
        assert config.lora_targets == ["c_attn"]

    def test_help_explains_every_flag(self, capsys):
        with pytest.raises(SystemExit) as exit:
            heal.main(["--help"])
        assert exit.value.code == 0
        shown = capsys.readouterr().out
        assert all(f"--{name} " in shown for name in ("patch", "method", "distil_weight", "lora_rank", "start", "text"))
        assert "--variants" not in shown


class TestBadInput:
    """One line, exit status 2, and nothing trained."""

    @pytest.fixture(autouse=True)
    def nothing_is_trained(self, monkeypatch):
        monkeypatch.setattr(run.Run, "stage", lambda *a, **k: pytest.fail("training began"))

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--method", "distill"], "no method is called 'distill'. Did you mean 'distil'?"),
            (["--lora_rank", "2", "--lora_targets", "nothing"], "--lora_targets nothing: "),
            (["--variants", "rms"], "heal.py brings one patch back: --patch; compare.py takes several --variants"),
            (["--patch", "control"], "--patch control patches nothing"),
            (["--patch", "rmss"], "UnknownNameError: no norm called 'rmss'. Did you mean 'rms'?"),
            (["--baseline_steps", "0"], "nothing to heal back to"),
            (["--start", "reset", "--baseline_steps", "0"], "nothing to heal back to"),
        ],
    )
    def test_refused_at_once(self, text, tmp_path, capsys, flags, message):
        assert heal.main(tiny(tmp_path, text, *flags)) == 2
        error = capsys.readouterr().err.strip()
        assert message in error
        assert "\n" not in error
