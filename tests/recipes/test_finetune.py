"""The main job, at a size of seconds: its figures, its stops and its refusals."""

import contextlib
import errno
import io
import json
import math
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from dataclasses import asdict
from pathlib import Path

import finetune
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from hfrecipes import corpus as data
from hfrecipes import lm, progress, settings
from hfrecipes import training as run
from run_files import ROOT, read_results
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

TINY = "--layers 1 --width 32 --vocab_size 300 --block_size 16 --batch_size 4 --baseline_steps 5 --steps 4"
TINY += " --tracker none --eval_every 2 --save_every 2 --heldout_blocks 20 --curve_blocks 6 --warmup_steps 2"


def tiny(out, *more, variants="dyt rms+rope control"):
    return [*TINY.split(), "--variants", *variants.split(), "--output_dir", str(out), *map(str, more)]


def parse(argv):
    return settings.read_run(argv, "finetune.py")


def figures(out):
    """What must not depend on how often a run was stopped."""
    kept = ("step", "start", "end", "curve", "train_loss", "parameters")
    return {name: {k: stage[k] for k in kept} for name, stage in read_results(out)["stages"].items()}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A text with structure to learn, and a few characters of more than one byte."""
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    lines = [f"verse {i}: {i % 7} sheep went uphill, {i % 5} came back — naïve, said the dög.\n" for i in range(400)]
    path.write_text("".join(lines), "utf-8")
    return path


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("finished")
    assert finetune.main(tiny(out, "--text", text)) == 0
    return out


class TestFigures:
    def test_every_stage_is_there(self, finished):
        stages = read_results(finished)["stages"]
        assert list(stages) == ["baseline", "dyt", "rms+rope", "control"]
        assert len(stages["baseline"]["train_loss"]) == 5
        for name in ("dyt", "rms+rope", "control"):
            assert len(stages[name]["train_loss"]) == 4
            assert [point["step"] for point in stages[name]["curve"]] == [0, 1, 2, 4]

    def test_control_starts_at_the_baseline_and_patches_do_not(self, finished):
        stages = read_results(finished)["stages"]
        assert stages["control"]["start"] == stages["baseline"]["end"]
        assert stages["control"]["curve"][0]["loss"] == stages["baseline"]["curve"][-1]["loss"]
        assert stages["dyt"]["start"] != stages["baseline"]["end"]
        assert stages["rms+rope"]["start"] != stages["baseline"]["end"]

    def test_training_lowers_the_loss(self, finished):
        stages = read_results(finished)["stages"]
        assert all(stage["end"]["loss"] < stage["start"]["loss"] for stage in stages.values())

    def test_perplexity_and_bits_per_byte_follow_from_the_loss(self, finished, text):
        tokenizer = AutoTokenizer.from_pretrained(finished / "tokenizer")
        _, heldout = data.split_documents(data.read_text_files([str(text)]))
        tokens, _ = data.encode(heldout, tokenizer)
        starts = np.linspace(0, len(tokens) - 16, 20).astype(int)
        # Decoding is an independent way to the bytes; a character cut by a block's edge decodes to U+FFFD, 3 bytes.
        predicted = [tokenizer.decode(tokens[s + 1 : s + 16]).removesuffix(data.END_OF_TEXT) for s in starts]
        size = sum(len(p.encode()) for p in predicted)
        for stage in read_results(finished)["stages"].values():
            for point in [stage["start"], stage["end"]]:
                assert point["perplexity"] == pytest.approx(math.exp(point["loss"]))
                assert point["bits_per_byte"] == pytest.approx(point["loss"] * 20 * 15 / math.log(2) / size, rel=0.01)

    @pytest.mark.parametrize("variant", ["dyt", "rms+rope", "control"])
    def test_saved_model_has_the_reported_loss(self, finished, text, variant):
        model = AutoModelForCausalLM.from_pretrained(finished / variant).eval()
        tokenizer = AutoTokenizer.from_pretrained(finished / variant)
        loss = heldout_loss(model, tokenizer, text)
        assert loss == pytest.approx(read_results(finished)["stages"][variant]["end"]["loss"], abs=1e-5)

    def test_files_and_record(self, finished):
        results = read_results(finished)
        table = (finished / "results.md").read_text("utf-8")
        rows = [line for line in table.splitlines() if line.startswith("|")]
        assert [row.split("|")[1].strip() for row in rows[2:]] == ["dyt", "rms+rope", "control"]
        assert len({len(row) for row in rows}) == 1, "the table is aligned"
        assert f"{results['stages']['dyt']['end']['loss']:.3f}" in rows[2]
        assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert {"python", "hfpatch", "torch", "transformers", "accelerate"} <= set(results["versions"])
        assert results["hardware"]["cores"] >= 1
        assert len(results["data"]["sha256"]) == 64
        assert results["config"]["seed"] == 0
        assert results["wall_seconds"] > 0
        assert not (finished / "state").exists(), "nothing is left to resume"


class TestStopping:
    def test_resumed_run_equals_an_uninterrupted_one(self, finished, text, tmp_path, capsys):
        for steps in (3, 4):  # in the baseline, then in the first variant; neither is a multiple of save_every
            more = ["--text", text, "--stop_after", steps, *["--resume"][: steps == 4]]
            assert finetune.main(tiny(tmp_path, *more)) == 130
            assert "--resume" in capsys.readouterr().err
        stopped = next(tmp_path.glob("state/*/stage.json"))
        assert json.loads(stopped.read_text())["name"] == "dyt"
        assert finetune.main(tiny(tmp_path, "--text", text, "--resume")) == 0
        assert "baseline: done before" in capsys.readouterr().out
        assert figures(tmp_path) == figures(finished)

    @pytest.mark.slow
    def test_stopping_with_the_last_step_of_a_stage(self, finished, text, tmp_path):
        assert finetune.main(tiny(tmp_path, "--text", text, "--stop_after", 5)) == 130
        assert read_results(tmp_path)["stages"] == {}
        assert finetune.main(tiny(tmp_path, "--text", text, "--resume")) == 0
        assert figures(tmp_path) == figures(finished)

    @pytest.mark.slow
    def test_resuming_with_dropout(self, text, tmp_path, finished):
        tokenizer = AutoTokenizer.from_pretrained(finished / "tokenizer")
        torch.manual_seed(0)
        GPT2LMHeadModel(
            GPT2Config(vocab_size=300, n_positions=16, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
        ).save_pretrained(tmp_path / "gpt2")
        tokenizer.save_pretrained(tmp_path / "gpt2")
        model = ["--text", text, "--model", tmp_path / "gpt2", "--gradient_accumulation_steps", 2]
        assert finetune.main(tiny(tmp_path / "once", *model, variants="dyt")) == 0
        for steps in (3, 4):
            stop = ["--stop_after", steps, "--resume"]
            assert finetune.main(tiny(tmp_path / "often", *model, *stop, variants="dyt")) == 130
        assert finetune.main(tiny(tmp_path / "often", *model, "--resume", variants="dyt")) == 0
        assert figures(tmp_path / "often") == figures(tmp_path / "once")
        losses = figures(tmp_path / "once")["dyt"]["train_loss"]
        assert losses != figures(finished)["dyt"]["train_loss"]

    @pytest.mark.slow
    def test_more_variants_reuse_the_baseline(self, finished, text, tmp_path):
        assert finetune.main(tiny(tmp_path, "--text", text, variants="control")) == 0
        assert finetune.main(tiny(tmp_path, "--text", text, "--resume", variants="dyt control")) == 0
        expected = figures(finished)
        expected.pop("rms+rope")
        assert figures(tmp_path) == expected

    def test_other_settings_can_not_resume(self, text, tmp_path, capsys):
        assert finetune.main(tiny(tmp_path, "--text", text, "--stop_after", 1)) == 130
        assert finetune.main(tiny(tmp_path, "--text", text, "--resume", "--seed", 1)) == 2
        assert "other settings: seed changed" in capsys.readouterr().err
        text_2 = tmp_path / text.name
        text_2.write_text(text.read_text("utf-8") + "more\n", "utf-8")
        assert finetune.main(tiny(tmp_path, "--text", text_2, "--resume")) == 2
        assert "data (its content)" in capsys.readouterr().err

    @pytest.mark.slow
    def test_settings_that_came_later_had_their_defaults(self, text, tmp_path, capsys):
        assert finetune.main(tiny(tmp_path, "--text", text, "--stop_after", 1, variants="control")) == 130
        results = read_results(tmp_path)
        del results["config"]["compile"]
        (tmp_path / "results.json").write_text(json.dumps(results))
        assert finetune.main(tiny(tmp_path, "--text", text, "--resume", "--compile", "--layers", 2)) == 2
        assert "other settings: compile, layers changed" in capsys.readouterr().err
        assert finetune.main(tiny(tmp_path, "--text", text, "--resume", variants="control")) == 0

    @pytest.mark.slow
    def test_ctrl_c_finishes_the_step_and_saves(self, finished, text, tmp_path, capsys, monkeypatch):
        train_step = run.Run.train_step

        def interrupted(self, where, *args):
            if where.startswith("step 3 "):
                os.kill(os.getpid(), signal.SIGINT)
            return train_step(self, where, *args)

        with monkeypatch.context() as patch:
            patch.setattr(run.Run, "train_step", interrupted)
            assert finetune.main(tiny(tmp_path, "--text", text)) == 130
        assert "stopped after step 4 of 5 of 'baseline'" in capsys.readouterr().err
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert finetune.main(tiny(tmp_path, "--text", text, "--resume")) == 0
        assert figures(tmp_path) == figures(finished)

    def test_second_ctrl_c_interrupts_at_once(self, monkeypatch):
        now = iter([0.0, 1.0, 3.0])
        monkeypatch.setattr(run.time, "monotonic", lambda: next(now))
        with run.stop_requests() as requests:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)  # a launcher passing the same one on
            assert requests == [0.0, 1.0]
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)

    @pytest.mark.slow
    def test_killed_run_goes_on(self, finished, text, tmp_path):
        """kill -9 leaves no time to save: the run goes on from the last state that it had saved by itself."""
        argv = tiny(tmp_path, "--text", text, variants="dyt control")
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
        assert in_process("-c", script).returncode == -signal.SIGKILL
        (state,) = (tmp_path / "state").iterdir()
        assert state.name.endswith("2-dyt")
        assert in_process(ROOT / "recipes" / "finetune.py", *argv, "--resume").returncode == 0
        expected = figures(finished)
        expected.pop("rms+rope")
        assert figures(tmp_path) == expected

    @pytest.mark.slow
    def test_full_disk_keeps_the_last_good_state(self, finished, text, tmp_path, capsys, monkeypatch):
        save_state, calls = run.Accelerator.save_state, []

        def full(self, folder):
            calls.append(folder)
            if len(calls) == 2:
                Path(folder).mkdir(parents=True)
                (Path(folder) / "model.safetensors").write_bytes(b"half")
                raise OSError(errno.ENOSPC, "No space left on device")
            return save_state(self, folder)

        with monkeypatch.context() as patch:
            patch.setattr(run.Accelerator, "save_state", full)
            assert finetune.main(tiny(tmp_path, "--text", text)) == 1
        error = capsys.readouterr().err
        assert "can't save after step 4 of baseline: [Errno 28] No space left on device" in error
        assert "--resume" in error
        (state,) = (tmp_path / "state").iterdir()
        assert json.loads((state / "stage.json").read_text())["step"] == 2
        assert finetune.main(tiny(tmp_path, "--text", text, "--resume")) == 0
        assert figures(tmp_path) == figures(finished)

    def test_nan_stops_and_keeps_the_last_good_state(self, text, tmp_path, capsys, monkeypatch):
        token_nats, calls = lm.token_nats, []

        def broken(model, batch, masked):
            nats, counts = token_nats(model, batch, masked)
            calls.append(model.training)
            return (nats * math.nan if sum(calls) == 4 else nats), counts

        monkeypatch.setattr(lm, "token_nats", broken)
        assert finetune.main(tiny(tmp_path, "--text", text)) == 1
        error = capsys.readouterr().err
        assert "loss nan" in error
        assert "step 4 of baseline" in error
        assert "--learning_rate" in error
        (state,) = (tmp_path / "state").iterdir()
        assert json.loads((state / "stage.json").read_text())["step"] == 2
        assert all(t.isfinite().all() for t in load_file(state / "model.safetensors").values())


def in_process(*argv, stderr=subprocess.PIPE):
    """Python in a process of its own, on the CPU and on this repository's hfpatch."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")])
    settings = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, *map(str, argv)]
    streams = {"stdout": subprocess.PIPE, "stderr": stderr}
    return subprocess.run(command, env={**os.environ, **settings}, **streams, timeout=120, text=True)


@pytest.mark.slow
class TestEarlyStop:
    def test_goes_back_to_the_best_point(self, text, tmp_path):
        """A learning rate that spoils the model: the best point is the first one."""
        argv = tiny(tmp_path, "--text", text, "--patience", 2, variants="dyt control")
        argv[argv.index("--steps") + 1] = "12"
        assert finetune.main([*argv, "--learning_rate", "0.3", "--max_grad_norm", "0"]) == 0
        stages = read_results(tmp_path)["stages"]
        stopped = [stage for stage in stages.values() if stage["stopped_early"]]
        assert stopped
        for stage in stages.values():
            points = {point["step"]: point["loss"] for point in stage["curve"][1:]}
            assert points[stage["best"]] == min(points.values())
        for stage in stopped:
            assert stage["step"] < 12
            assert stage["curve"][-1]["loss"] > points_of(stage)[stage["best"]], "or going back shows nothing"
        control = stages["control"]
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "control").eval()
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / "control")
        assert heldout_loss(model, tokenizer, text) == pytest.approx(control["end"]["loss"], rel=1e-5)
        assert not (tmp_path / "best" / "control").exists()

    def test_resumes(self, text, tmp_path):
        settings = ["--text", text, "--patience", 2, "--learning_rate", "0.3", "--max_grad_norm", "0"]
        for name, stops in {"once": [], "often": [4, 3]}.items():
            argv = tiny(tmp_path / name, *settings, variants="dyt control")
            argv[argv.index("--steps") + 1] = "12"
            for stop in stops:
                assert finetune.main([*argv, "--resume", "--stop_after", str(stop)]) == 130
            assert finetune.main([*argv, "--resume"]) == 0
        assert figures(tmp_path / "often") == figures(tmp_path / "once")


class TestOptions:
    @pytest.mark.slow
    def test_gradient_checkpointing_changes_no_figure(self, finished, text, tmp_path):
        assert finetune.main(tiny(tmp_path, "--text", text, "--gradient_checkpointing", variants="dyt control")) == 0
        ours = figures(tmp_path)
        for name in ours:
            assert ours[name]["train_loss"] == pytest.approx(figures(finished)[name]["train_loss"], abs=1e-5)
        assert "gradient_checkpointing" not in (tmp_path / "dyt" / "config.json").read_text()

    @pytest.mark.slow
    def test_from_scratch(self, text, tmp_path):
        argv = tiny(tmp_path, "--text", text, "--start", "reset", variants="layer dyt control")
        argv[argv.index("--baseline_steps") + 1] = "0"
        assert finetune.main(argv) == 0
        stages = figures(tmp_path)
        assert stages["layer"]["start"]["loss"] == pytest.approx(stages["control"]["start"]["loss"], abs=1e-6)
        assert stages["layer"]["train_loss"] == pytest.approx(stages["control"]["train_loss"], abs=1e-5)
        assert stages["dyt"]["end"] != stages["control"]["end"]
        assert "every model starts from scratch" in (tmp_path / "results.md").read_text("utf-8")

    @pytest.mark.slow
    def test_starts_differ(self, text, tmp_path):
        starts = {}
        for start in ("repaired", "self", "copied"):
            out = tmp_path / start
            assert finetune.main(tiny(out, "--text", text, "--start", start, variants="dyt control")) == 0
            starts[start] = figures(out)["dyt"]["start"]["loss"]
            assert figures(out)["control"] == figures(tmp_path / "repaired")["control"]
        assert len(set(starts.values())) == 3

    def test_tensorboard_is_the_default(self, text, tmp_path):
        argv = tiny(tmp_path, "--text", text, variants="control")
        del argv[argv.index("--tracker") : argv.index("--tracker") + 2]
        assert finetune.main(argv) == 0
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "logs")).Reload()
        logged = [event.value for event in events.Scalars("control/loss")]
        assert logged == pytest.approx(figures(tmp_path)["control"]["train_loss"])
        assert "control/heldout_loss" in events.Tags()["scalars"]


def points_of(stage):
    return {point["step"]: point["loss"] for point in stage["curve"]}


def heldout_loss(model, tokenizer, text):
    """The table's figure for the tiny settings, computed anew."""
    tokens, sizes = data.encode(data.split_documents(data.read_text_files([str(text)]))[1], tokenizer)
    blocks = data.HeldOutBlocks(tokens, sizes, data.Causal(16), 20)
    ids = torch.stack([blocks[i]["input_ids"] for i in range(20)])
    with torch.no_grad():
        logits = model(ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


@pytest.mark.slow
def test_two_processes_follow_one(finished, text, tmp_path):
    recipe = [ROOT / "recipes" / "finetune.py", *tiny(tmp_path, "--text", text, variants="dyt control")]
    done = in_process("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, *recipe)
    assert done.returncode == 0, done.stderr
    assert read_results(tmp_path)["hardware"]["processes"] == 2
    one, two = figures(finished), figures(tmp_path)
    for name, stage in two.items():
        assert stage["train_loss"] == pytest.approx(one[name]["train_loss"], abs=1e-5)
        assert stage["end"]["loss"] == pytest.approx(one[name]["end"]["loss"], abs=1e-5)
        assert stage["end"]["bits_per_byte"] == pytest.approx(one[name]["end"]["bits_per_byte"], abs=1e-5)


class TestSettings:
    def test_yaml_spells_out_the_defaults(self):
        assert asdict(parse([str(ROOT / "recipes" / "configs" / "lm.yaml")])) == asdict(parse([]))
        assert type(parse([])).__bases__ == (lm.LanguageModellingConfig, settings.RunConfig)

    def test_yaml_names_every_setting(self):
        import yaml

        written = yaml.safe_load((ROOT / "recipes" / "configs" / "lm.yaml").read_text("utf-8"))
        assert set(written) == set(parse([]).__dataclass_fields__)

    def test_flags_win_over_yaml(self, tmp_path):
        path = tmp_path / "own.yaml"
        path.write_text("steps: 7\nlearning_rate: 3e-4\nvariants: [dyt, control]\nresume: true\n")
        config = parse([str(path), "--steps", "50"])
        assert (config.steps, config.learning_rate, config.variants) == (50, 3e-4, ["dyt", "control"])
        assert config.resume is True

    @pytest.mark.parametrize("content", ["steps: many", "mixed_precision: fp7"])
    def test_bad_yaml_values_are_usage_errors(self, tmp_path, content, capsys):
        path = tmp_path / "own.yaml"
        path.write_text(content)
        with pytest.raises(SystemExit) as exit:
            parse([str(path)])
        assert exit.value.code == 2
        assert content.split(": ")[1 if content.startswith("steps") else 0] in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ("own.yaml", "has no setting --stepz here. Did you mean --steps?"),
            ("--learning-rte 1", "has no setting --learning_rte here. Did you mean --learning_rate?"),
            ("--label_column x", "has no setting --label_column here. It is one of --task classify. See --help"),
            ("--qqq", "finetune.py has no setting --qqq here. See --help"),
            ("own.yml.txt", "can't make sense of 'own.yml.txt': a YAML file comes first"),
        ],
    )
    def test_unknown_settings_are_refused_in_one_line(self, tmp_path, flags, message, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("own.yaml").write_text("stepz: 3")
        assert finetune.main(flags.split()) == 2
        assert message in capsys.readouterr().err.strip()
        assert not Path("runs").exists()

    @pytest.mark.parametrize("content", ["- a\n- b", "a: [", None])
    def test_what_is_no_yaml_is_refused(self, tmp_path, content, capsys):
        path = tmp_path / "own.yaml"
        if content:
            path.write_text(content)
        assert finetune.main([str(path)]) == 2
        assert "own.yaml" in capsys.readouterr().err

    def test_variants_are_registered_names(self):
        assert settings.parse_variant("rms+rope") == {"norm": "rms", "pos": "rope"}
        assert settings.parse_variant("rope+dyt:alpha=1e+0") == {"norm": "dyt:alpha=1e+0", "pos": "rope"}
        assert settings.parse_variant("control") == {}


class TestBadInput:
    """One line, exit status 2, and nothing trained."""

    @pytest.fixture(autouse=True)
    def nothing_is_trained(self, monkeypatch):
        monkeypatch.setattr(run.Run, "stage", lambda *a, **k: pytest.fail("training began"))

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--variants", "rmss"], "UnknownNameError: no norm called 'rmss'. Did you mean 'rms'?"),
            (["--variants", "dyt+rpoe"], "UnknownNameError: no position called 'rpoe'. Did you mean 'rope'?"),
            (["--variants", "rms+dyt"], "two schemes of one kind: 'rms' and 'dyt'"),
            (["--variants", "dyt", "dyt"], "named twice"),
            (["--text", "missing.txt"], "can't read the text file missing.txt: No such file"),
            (["--steps", "0"], "--steps must be at least 1, not 0"),
            (["--baseline_steps", "-1"], "--baseline_steps must be at least 0, not -1"),
            (["--baseline_steps", "0"], "untrained"),
            (["--batch_size", "0"], "--batch_size must be at least 1"),
            (["--learning_rate", "0"], "--learning_rate must be positive"),
            (["--learning_rate", "nan"], "--learning_rate must be positive"),
            (["--width", "33"], "--width must be a multiple of 32"),
            (["--model", "./no/such/model"], "there is no model folder ./no/such/model"),
        ],
    )
    def test_refused_at_once(self, text, tmp_path, capsys, flags, message):
        argv = tiny(tmp_path, "--text", text)
        assert finetune.main([*argv, *flags]) == 2
        error = capsys.readouterr().err.strip()
        assert message in error
        assert "\n" not in error

    def test_what_accelerate_refuses(self, text, tmp_path, capsys):
        # Here: a second precision in one process. Elsewhere: one that the device lacks.
        Accelerator(mixed_precision="no")
        assert finetune.main(tiny(tmp_path, "--text", text, "--mixed_precision", "bf16")) == 2
        assert "RecipeError: accelerate refuses: AcceleratorState has already" in capsys.readouterr().err

    @pytest.mark.parametrize(("content", "message"), [("", "is empty"), ("a b c", "less than one block of 16")])
    def test_too_little_text(self, tmp_path, capsys, content, message):
        (tmp_path / "short.txt").write_text(content)
        assert finetune.main(tiny(tmp_path, "--text", tmp_path / "short.txt")) == 2
        assert message in capsys.readouterr().err

    def test_text_that_is_no_text(self, tmp_path, capsys):
        (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
        assert finetune.main(tiny(tmp_path, "--text", tmp_path / "bytes.txt")) == 2
        assert "can't read the text file" in capsys.readouterr().err

    def test_text_that_the_tokenizer_can_not_read(self, finished, text, tmp_path, capsys):
        words = Tokenizer(models.WordLevel({"sheep": 0}))  # and no token for the unknown
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
        AutoModelForCausalLM.from_pretrained(finished / "baseline").save_pretrained(tmp_path)
        assert finetune.main(tiny(tmp_path / "out", "--text", text, "--model", tmp_path)) == 2
        assert "the tokenizer can't read the text: WordLevel error" in capsys.readouterr().err

    def test_output_folder_that_can_not_be_made(self, text, capsys):
        assert finetune.main(tiny(text / "out", "--text", text)) == 2
        assert "can't write to the output folder" in capsys.readouterr().err

    def test_blocks_longer_than_the_model(self, finished, text, tmp_path, capsys):
        argv = tiny(tmp_path, "--text", text, "--model", finished / "baseline", "--block_size", 17)
        assert finetune.main(argv) == 2
        assert "--block_size 17 is beyond the 16 positions of the model" in capsys.readouterr().err

    def test_model_folder_without_a_model(self, text, tmp_path, capsys):
        assert finetune.main(tiny(tmp_path, "--text", text, "--model", tmp_path)) == 2
        error = capsys.readouterr().err.strip()
        assert error == f"RecipeError: there is no model in the folder {tmp_path}: it has no config.json"

    @pytest.mark.parametrize("content", ["{", "[]", "{}", "\xff"])
    def test_results_that_can_not_be_taken_up(self, text, tmp_path, content, capsys):
        (tmp_path / "results.json").write_text(content, "latin-1")
        assert finetune.main(tiny(tmp_path, "--text", text, "--resume")) == 2
        assert f"can't read {tmp_path / 'results.json'}" in capsys.readouterr().err
        assert (tmp_path / "results.json").read_text("latin-1") == content

    def test_torn_weights(self, finished, text, tmp_path, capsys):
        shutil.copytree(finished / "baseline", tmp_path / "torn")
        weights = tmp_path / "torn" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:2000])
        assert finetune.main(tiny(tmp_path, "--text", text, "--model", tmp_path / "torn")) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith(f"RecipeError: AutoModelForCausalLM can't load {tmp_path / 'torn'}: ")
        assert "\n" not in error

    @pytest.mark.parametrize("rate", ["inf", "nan", "0"])
    def test_rates_that_are_none(self, text, tmp_path, rate, capsys):
        assert finetune.main(tiny(tmp_path, "--text", text, "--learning_rate", rate)) == 2
        assert "--learning_rate must be positive, not" in capsys.readouterr().err


def test_a_model_that_is_not_finite(finished, text, tmp_path, capsys):
    model = GPT2LMHeadModel.from_pretrained(finished / "baseline")
    model.transformer.wte.weight.data[0, 0] = math.nan
    model.save_pretrained(tmp_path / "nan")
    AutoTokenizer.from_pretrained(finished / "baseline").save_pretrained(tmp_path / "nan")
    out = tmp_path / "out"
    assert finetune.main(tiny(out, "--text", text, "--model", tmp_path / "nan", "--baseline_steps", 0)) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "in the first step it is the model or the data" in error
    assert "--resume" not in error, "it would meet the same batch"


@pytest.fixture(scope="module")
def bert(text, tmp_path_factory):
    """A tiny BERT with its tokenizer, on disk."""
    folder = tmp_path_factory.mktemp("bert")
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")}
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=list(names.values()), show_progress=False)
    tokenizer.train([str(text)], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=16, **sizes)).save_pretrained(folder)
    return folder


class TestMaskedModel:
    @pytest.mark.slow
    def test_end_to_end(self, bert, text, tmp_path, capsys):
        argv = tiny(tmp_path, "--text", text, "--model", bert, "--learning_rate", "1e-2")
        argv[argv.index("--baseline_steps") + 1] = "0"
        assert finetune.main(argv) == 0
        results = read_results(tmp_path)
        stages = results["stages"]
        assert results["data"]["objective"] == "masked"
        assert stages["control"]["start"] == stages["baseline"]["end"] == stages["baseline"]["start"]
        assert stages["control"]["end"]["loss"] < stages["control"]["start"]["loss"]
        assert stages["dyt"]["start"] != stages["control"]["start"]
        assert stages["dyt"]["end"]["bits_per_byte"] is None
        assert "bits per byte" not in (tmp_path / "results.md").read_text("utf-8")
        assert (tmp_path / "rms+rope" / "model.safetensors").exists()
        assert not (tmp_path / "baseline").exists(), "an untouched model isn't copied"

    def test_masks(self, bert):
        tokenizer = AutoTokenizer.from_pretrained(bert)
        task = data.Masked(tokenizer, 16)
        tokens = torch.arange(10, 24)
        batches = [task(tokens, seed=i) for i in range(400)]
        assert all(torch.equal(task(tokens, seed=7)[k], batches[7][k]) for k in ("input_ids", "labels"))
        labels = torch.stack([b["labels"] for b in batches])
        inputs = torch.stack([b["input_ids"] for b in batches])
        chosen = labels != -100
        assert not chosen[:, [0, -1]].any(), "[CLS] and [SEP] aren't asked for"
        assert chosen[:, 1:-1].float().mean() == pytest.approx(0.15, abs=0.02)
        assert (inputs[chosen] == tokenizer.mask_token_id).float().mean() == pytest.approx(0.8, abs=0.05)
        assert (inputs[chosen] == labels[chosen]).float().mean() == pytest.approx(0.1, abs=0.04)

    def test_a_mask_token_is_needed(self, finished, bert, text, tmp_path, capsys):
        BertForMaskedLM.from_pretrained(bert).save_pretrained(tmp_path / "bert")
        AutoTokenizer.from_pretrained(finished / "tokenizer").save_pretrained(tmp_path / "bert")
        assert finetune.main(tiny(tmp_path, "--text", text, "--model", tmp_path / "bert")) == 2
        assert "mask token" in capsys.readouterr().err


class TestData:
    def test_split_is_by_name_and_by_file(self):
        documents = [data.Document(f"{i}.py", str(i)) for i in range(200)]
        train, heldout = data.split_documents(documents)
        assert {d.name for d in train} | {d.name for d in heldout} == {d.name for d in documents}
        assert 10 <= len(heldout) <= 30
        assert len(train) + len(heldout) == 200
        assert data.split_documents(documents[::-1]) == (train, heldout)

    @pytest.mark.parametrize("count", [1, 2, 3])
    def test_few_files_leave_both_sides_with_text(self, count):
        train, heldout = data.split_documents([data.Document(f"{i}.txt", "word\n" * 100) for i in range(count)])
        assert all(d.text for d in train)
        assert all(d.text for d in heldout)
        assert sum(len(d.text) for d in train + heldout) == 500 * count

    def test_standard_library(self):
        names = {d.name for d in data.read_standard_library()}
        assert {"argparse.py", "json/decoder.py"} <= names
        assert not any(set(Path(n).parts) & {"/", "test", "tests", "site-packages"} for n in names)

    def test_blocks_depend_on_seed_and_place_only(self):
        tokens = np.arange(1000, dtype=np.int32)
        whole = data.TrainBlocks(tokens, data.Causal(8), seed=3, first=0, length=40)
        later = data.TrainBlocks(tokens, data.Causal(8), seed=3, first=25, length=15)
        other = data.TrainBlocks(tokens, data.Causal(8), seed=4, first=0, length=40)
        assert all(torch.equal(whole[25 + i]["input_ids"], later[i]["input_ids"]) for i in range(15))
        assert sum(torch.equal(whole[i]["input_ids"], other[i]["input_ids"]) for i in range(40)) < 5

    def test_held_out_blocks_do_not_overlap(self):
        blocks = data.HeldOutBlocks(np.arange(100, dtype=np.int32), np.ones(100), data.Causal(8), count=99)
        seen = torch.cat([blocks[i]["input_ids"] for i in range(len(blocks))])
        assert len(blocks) == 12
        assert len(seen.unique()) == len(seen)
        assert blocks.sizes.tolist() == [7] * 12

    def test_bytes_of_the_tokens_add_up(self, finished):
        tokenizer = AutoTokenizer.from_pretrained(finished / "tokenizer")
        documents = [data.Document("a", "naïve — 𝒳 ok"), data.Document("b", "plain")]
        tokens, sizes = data.encode(documents, tokenizer)
        assert len(tokens) == len(sizes)
        assert sizes.sum() == len("naïve — 𝒳 okplain".encode())
        assert (tokens == tokenizer.eos_token_id).sum() == 2
        assert (sizes[tokens == tokenizer.eos_token_id] == 0).all()


class TestProgress:
    @staticmethod
    def of_two_processes(text, tmp_path, **options):
        argv = tiny(tmp_path, "--text", text, "--calibration", 4, "--start", "self", variants="dyt")
        recipe = ["--", ROOT / "recipes" / "finetune.py", *argv]
        done = in_process("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2, *recipe, **options)
        assert done.returncode == 0, done.stderr
        return done.stderr

    @pytest.mark.slow
    def test_a_log_has_lines_of_the_main_process(self, text, tmp_path):
        log = self.of_two_processes(text, tmp_path)
        assert "\r" not in log
        assert "repair" not in log
        lines = [line.partition(" %")[0] for line in log.splitlines() if " tokens/s" in line]
        steps = {"baseline": 5, "dyt": 4}
        assert lines == [f"{name}: {100 * i // n}" for name, n in steps.items() for i in range(1, n + 1)]

    @pytest.mark.slow
    def test_a_terminal_has_bars_of_the_main_process(self, text, tmp_path):
        controller, terminal = pty.openpty()
        termios.tcsetwinsize(terminal, (24, 120))
        chunks = []

        def read():
            with contextlib.suppress(OSError):  # at its end
                while chunk := os.read(controller, 2**16):
                    chunks.append(chunk)

        reader = threading.Thread(target=read)
        reader.start()
        self.of_two_processes(text, tmp_path, stderr=terminal)
        os.close(terminal)
        reader.join()
        shown = b"".join(chunks).decode()
        lines = [line.rpartition("\r")[2] for line in shown.strip().split("\r\n")]
        names = ["baseline", "own sequences", "repair", "dyt"]
        assert [line.partition("|")[0] for line in lines] == [f"{name}: 100%" for name in names], "a line each"
        assert "| 2/2 [" in lines[2], "the block, and the norm behind it"
        assert "tokens/s" in lines[3]

    def test_at_most_ten_lines_or_ten_updates_a_second(self, monkeypatch):
        for terminal in (True, False):
            stream = io.StringIO()
            stream.isatty = lambda terminal=terminal: terminal
            monkeypatch.setattr(sys, "stderr", stream)
            begun = time.monotonic()
            with progress.Progress("work", 3000, done=1000) as bar:
                for step in range(1001, 3001):
                    bar.step(step, f"part {step}")
            seconds = time.monotonic() - begun
            written = stream.getvalue()
            if terminal:
                assert written.count("\r") <= 10 * seconds + 3, "the first, the last, and one begun"
                assert written.count("\n") == 1
            else:
                assert written.splitlines() == [f"work: {10 * i} %, part {300 * i}" for i in range(4, 11)]
