"""The main job, at a size of seconds: its figures, its stops and its settings."""

import errno
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import finetune
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from hfrecipes import command, lm, report, settings, texts, training
from hfrecipes import corpus as data
from run_files import ROOT, at_step, figures, read_results, tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from hfpatch.patch import patch_model


def parse(argv):
    return settings.read_run(argv, "finetune.py")


def heldout_ids(out, text):
    """The held-out blocks of a run, 20 of 16 tokens, and its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(out / "tokenizer")
    tokens, _ = data.encode(data.split_documents(texts.read_texts(texts.TextConfig([str(text)]))[1])[1], tokenizer)
    starts = np.linspace(0, len(tokens) - 16, 20).astype(int)
    return torch.stack([torch.from_numpy(tokens[start : start + 16]) for start in starts]).long(), tokenizer


class TestFigures:
    def test_stages_and_files(self, finished):
        found = read_results(finished)
        stages = found["stages"]
        assert list(stages) == ["baseline", "dyt", "rms+rope", "control"]
        assert len(stages["baseline"]["train_loss"]) == 5
        assert all(stage["end"]["loss"] < stage["start"]["loss"] for stage in stages.values())
        for name in ("dyt", "rms+rope", "control"):
            assert len(stages[name]["train_loss"]) == 4
            assert [point["step"] for point in stages[name]["curve"]] == [0, 1, 2, 4]
            assert (stages[name]["start"] == stages["baseline"]["end"]) is (name == "control")
        assert not (finished / "state").exists(), "nothing is left to resume"

    def test_saved_models_have_the_reported_figures(self, finished, text):
        ids, tokenizer = heldout_ids(finished, text)
        # Decoding is an independent way to the bytes; a character cut by a block's edge decodes to U+FFFD, 3 bytes.
        predicted = [tokenizer.decode(block[1:]).removesuffix(data.END_OF_TEXT) for block in ids]
        size = sum(len(p.encode()) for p in predicted)
        for variant in ("dyt", "rms+rope", "control"):
            with torch.no_grad():
                logits = AutoModelForCausalLM.from_pretrained(finished / variant).eval()(ids).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
            end = read_results(finished)["stages"][variant]["end"]
            assert end["loss"] == pytest.approx(loss, abs=1e-5)
            assert end["perplexity"] == pytest.approx(math.exp(end["loss"]))
            assert end["bits_per_byte"] == pytest.approx(loss * 20 * 15 / math.log(2) / size, rel=0.01)

    def test_quality_before_any_training(self, finished, text):
        """Copied weights are measured on the same held-out data; what is left is a share of the original's."""
        found = read_results(finished)
        assert list(found["copied"]) == ["dyt", "rms+rope"]
        model = AutoModelForCausalLM.from_pretrained(finished / "baseline").eval()
        original, stages = found["stages"]["baseline"]["end"]["perplexity"], found["stages"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch_model(model, norm="dyt", init="copy")
        ids = heldout_ids(finished, text)[0]
        with torch.no_grad():
            loss = model(ids, labels=ids).loss.item()
        assert found["copied"]["dyt"]["loss"] == pytest.approx(loss, abs=1e-5)
        told = report.quality(found)
        columns = [cell.strip() for cell in told[2].split("|")[1:-1]]
        assert columns[:4] == ["patch", "original", "copied", "repaired"]
        cells = dict(zip(columns, (cell.strip() for cell in told[4].split("|")[1:-1]), strict=True))
        repaired, trained = stages["dyt"]["start"]["perplexity"], stages["dyt"]["end"]["perplexity"]
        assert cells["patch"] == "dyt"
        assert cells["kept"] == f"{original / repaired:.1%}"
        assert cells["of the control"] == f"{stages['control']['end']['perplexity'] / trained:.1%}"
        assert not report.quality(found | {"config": found["config"] | {"start": "reset"}}), "there is no original"

    @pytest.mark.parametrize(("value", "needed"), [(50.6, "no"), (49.4, "1 step"), (48.0, "more than 4 steps")])
    def test_whether_training_is_required(self, value, needed):
        """Of a figure that is better if higher: it starts at `value` of 50, and passes 50 after one step, or never."""
        points = [{"step": step, "f1": value + step * (value > 49)} for step in (0, 1, 2, 4)]
        stage = {"start": {"f1": value}, "end": {"f1": points[-1]["f1"]}, "curve": points, "made_in_seconds": 1.0}
        before = {"end": {"f1": 50.0}, "curve": [{"step": 0, "f1": 50.0}]}
        config = {"variants": ["rms"], "start": "auto", "steps": 4}
        results = {
            "stages": {"baseline": before, "rms": stage},
            "config": config,
            "main": "f1",
            "higher_is_better": True,
        }
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.quality(results)[2:5]]
        assert dict(zip(rows[0], rows[2], strict=True))["training required?"] == needed


def saved_step(out):
    """Of the state that a stopped run goes on from, of which there is one."""
    (path,) = out.glob("state/*/stage.json")
    record = json.loads(path.read_text())
    assert all(t.isfinite().all() for t in load_file(path.parent / "model.safetensors").values())
    return record["name"], record["step"]


class TestStopping:
    @pytest.mark.slow
    def test_resumed_run_equals_an_uninterrupted_one(self, finished, text, tmp_path, capsys, monkeypatch):
        with monkeypatch.context() as patch:
            at_step(patch, "step 3 of baseline", lambda: os.kill(os.getpid(), signal.SIGINT))
            assert finetune.main(tiny(tmp_path, text)) == 130
        told = capsys.readouterr().err
        assert "stopped after step 3 of 5 of 'baseline'" in told, "the step is finished"
        assert "--resume" in told
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        begun = read_results(tmp_path)
        begun["hardware"]["cpu"] = "a cpu elsewhere"
        (tmp_path / "results.json").write_text(json.dumps(begun))
        assert finetune.main(tiny(tmp_path, text, "--stop_after 3 --resume")) == 130
        assert saved_step(tmp_path) == ("dyt", 1), "neither is a multiple of save_every"
        assert finetune.main(tiny(tmp_path, text, "--resume")) == 0
        assert "baseline: done before" in capsys.readouterr().out
        assert figures(tmp_path) == figures(finished)
        found, told = read_results(tmp_path), (tmp_path / "results.md").read_text("utf-8")
        assert found["hardware"] == read_results(finished)["hardware"]
        assert [where["hardware"]["cpu"] for where in found["earlier"]] == ["a cpu elsewhere"]
        assert told.index("a cpu elsewhere, ") < told.index(f"; then {found['hardware']['cpu']}, ")

    @pytest.mark.slow
    def test_with_dropout_accumulation_and_at_the_last_step(self, text, tmp_path, finished):
        sizes = {"vocab_size": 300, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
        GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "gpt2")
        AutoTokenizer.from_pretrained(finished / "tokenizer").save_pretrained(tmp_path / "gpt2")

        def go(name, *more):
            given = ["--model", tmp_path / "gpt2", "--gradient_accumulation_steps 2 --keep_dropout"]
            return finetune.main(tiny(tmp_path / name, text, *given, *more, variants="dyt"))

        assert go("once") == 0
        assert [go("often", "--resume --stop_after", steps) for steps in (5, 3)] == [130, 130]
        assert go("often", "--resume") == 0
        assert figures(tmp_path / "often") == figures(tmp_path / "once")

    def test_other_settings_can_not_resume(self, text, tmp_path, capsys):
        assert finetune.main(tiny(tmp_path, text, "--stop_after 1")) == 130
        assert finetune.main(tiny(tmp_path, text, "--resume --seed 1")) == 2
        assert "seed changed" in capsys.readouterr().err
        other = tmp_path / text.name
        other.write_text(text.read_text("utf-8") + "more\n", "utf-8")
        assert finetune.main(tiny(tmp_path, other, "--resume")) == 2
        assert "data (its content)" in capsys.readouterr().err

    def test_second_ctrl_c_interrupts_at_once(self, monkeypatch):
        now = iter([0.0, 1.0, 3.0])
        monkeypatch.setattr(command.time, "monotonic", lambda: next(now))
        requests = []
        with command.stop_requests(requests):
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)  # a launcher passing the same one on
            assert requests == [0.0, 1.0]
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)

    @pytest.mark.slow
    def test_killed_run_goes_on(self, finished, text, tmp_path):
        """kill -9 leaves no time to save: the run goes on from the last state that it had saved by itself.

        Another variant may come on top; it begins with the same baseline.
        """
        argv = tiny(tmp_path, text, variants="dyt control")
        script = f"""
import os
import finetune
from hfrecipes import training as run
train_step = run.Run.train_step
def killed(self, where, *args):
    if where == "step 4 of dyt":
        os.kill(os.getpid(), 9)
    return train_step(self, where, *args)
run.Run.train_step = killed
finetune.main({argv!r})
"""
        assert in_process("-c", script) == -signal.SIGKILL
        assert saved_step(tmp_path) == ("dyt", 2)
        assert in_process(ROOT / "recipes" / "finetune.py", *tiny(tmp_path, text, "--resume")) == 0
        assert figures(tmp_path) == figures(finished)

    @pytest.mark.slow
    def test_full_disk_keeps_the_last_good_state(self, finished, text, tmp_path, capsys, monkeypatch):
        save_state, calls = Accelerator.save_state, []

        def full(self, folder):
            calls.append(folder)
            if len(calls) == 2:
                Path(folder).mkdir(parents=True)
                (Path(folder) / "model.safetensors").write_bytes(b"half")
                raise OSError(errno.ENOSPC, "No space left on device")
            return save_state(self, folder)

        with monkeypatch.context() as patch:
            patch.setattr(Accelerator, "save_state", full)
            assert finetune.main(tiny(tmp_path, text)) == 1
        error = capsys.readouterr().err
        assert all(told in error for told in ("step 4 of baseline", "No space left", "--resume"))
        assert saved_step(tmp_path) == ("baseline", 2)
        assert finetune.main(tiny(tmp_path, text, "--resume")) == 0
        assert figures(tmp_path) == figures(finished)

    def test_nan_stops_and_keeps_the_last_good_state(self, text, tmp_path, capsys, monkeypatch):
        loss, calls = lm.LanguageModelling.loss, []

        def broken(self, model, batch):
            sums, counts = loss(self, model, batch)
            calls.append(model.training)
            return (sums * math.nan if sum(calls) == 4 else sums), counts

        monkeypatch.setattr(lm.LanguageModelling, "loss", broken)
        assert finetune.main(tiny(tmp_path, text)) == 1
        error = capsys.readouterr().err
        assert all(told in error for told in ("loss nan", "step 4 of baseline", "--learning_rate"))
        assert saved_step(tmp_path) == ("baseline", 2)


def in_process(*argv):
    """Python in a process of its own, on the CPU and on this repository's hfpatch. Returns its exit status."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run([sys.executable, *map(str, argv)], env=env, capture_output=True, timeout=900).returncode


class TestOptions:
    @pytest.mark.slow
    def test_from_scratch(self, text, tmp_path):
        argv = tiny(tmp_path, text, "--start reset --baseline_steps 0", variants="layer dyt control")
        assert finetune.main(argv) == 0
        stages = figures(tmp_path)
        assert stages["layer"]["start"]["loss"] == pytest.approx(stages["control"]["start"]["loss"], abs=1e-6)
        assert stages["layer"]["train_loss"] == pytest.approx(stages["control"]["train_loss"], abs=1e-5)
        assert stages["dyt"]["end"] != stages["control"]["end"]

    @pytest.mark.slow
    def test_masked_model(self, bert, text, tmp_path):
        argv = tiny(tmp_path, text, "--model", bert, "--learning_rate 1e-2 --baseline_steps 0")
        assert finetune.main(argv) == 0
        found = read_results(tmp_path)
        stages = found["stages"]
        assert found["data"]["objective"] == "masked"
        assert stages["control"]["start"] == stages["baseline"]["end"] == stages["baseline"]["start"]
        assert stages["control"]["end"]["loss"] < stages["control"]["start"]["loss"]
        assert not (tmp_path / "baseline").exists(), "an untouched model isn't copied"


@pytest.mark.slow
def test_freed_memory_goes_back_now_and_then(text, tmp_path, monkeypatch):
    returned = []
    monkeypatch.setattr(training, "free_unused_memory", lambda: returned.append(True))
    flags = tiny(tmp_path, text, "--baseline_steps 0 --steps 25 --start reset --eval_every 25", variants="control")
    assert finetune.main(flags) == 0
    assert len(returned) == 2


class TestSettings:
    def test_yaml_spells_out_every_default(self):
        path = ROOT / "recipes" / "configs" / "lm.yaml"
        assert asdict(parse([str(path)])) == asdict(parse([]))
        assert set(yaml.safe_load(path.read_text("utf-8"))) == set(parse([]).__dataclass_fields__)

    def test_flags_win_over_yaml(self, tmp_path):
        path = tmp_path / "own.yaml"
        path.write_text("steps: 7\nlearning_rate: 3e-4\nvariants: [dyt, control]\nresume: true\n")
        config = parse([str(path), "--steps", "50"])
        assert (config.steps, config.learning_rate, config.variants) == (50, 3e-4, ["dyt", "control"])
        assert config.resume is True

    @pytest.mark.parametrize(
        ("choices", "taken", "refused"),
        [
            (settings.COUNT, [1, 9], [0, math.inf]),
            (settings.NOT_NEGATIVE, [0], [-1e-9, math.nan]),
            (settings.POSITIVE, [1e-9], [0, math.inf, math.nan]),
            (settings.SHARE, [1e-9, 1], [0, 1.1]),
            (settings.RATE, [0, 0.9], [1, -0.1]),
            (settings.multiple_of(32), [32, 64], [0, 33, -32]),
        ],
    )
    def test_ranges(self, choices, taken, refused):
        assert [number in choices for number in [*taken, *refused]] == [True] * len(taken) + [False] * len(refused)


class TestOwnFolder:
    """Results of one recipe aren't replaced by another one's; `finished` runs that go on are the control."""

    def test_another_recipes_results_stay(self, text, tmp_path, capsys):
        path, command = tmp_path / "results.json", "python recipes/heal.py --seed 3"
        path.write_text(json.dumps({"command": command, "config": {}, "stages": {}}))
        before = path.read_bytes()
        assert finetune.main(tiny(tmp_path, text)) == 2
        assert command in capsys.readouterr().err
        assert path.read_bytes() == before

    @pytest.mark.parametrize("content", ["{", "[]", '{"command": null}', "\xff"])
    def test_what_no_recipe_wrote(self, content, text, tmp_path, capsys):
        (tmp_path / "results.json").write_text(content, "latin-1")
        assert finetune.main(tiny(tmp_path, text, "--resume")) == 2
        assert "RecipeError" in capsys.readouterr().err
        assert (tmp_path / "results.json").read_text("latin-1") == content
