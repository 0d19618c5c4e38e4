"""The main job, at a size of seconds: its figures, its stops and its refusals."""

import errno
import importlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import finetune
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from hfrecipes import command, files, lm, options, progress, settings
from hfrecipes import corpus as data
from hfrecipes import training as run
from run_files import ROOT, figures, read_results
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


def tiny(out, text, *more, variants="dyt rms+rope control"):
    named = ["--text", str(text), "--variants", *variants.split(), "--output_dir", str(out)]
    return [*TINY.split(), *named, *map(str, more)]


def parse(argv):
    return settings.read_run(argv, "finetune.py")


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
    assert finetune.main(tiny(out, text)) == 0
    return out


class TestFigures:
    def test_stages(self, finished):
        stages = read_results(finished)["stages"]
        assert list(stages) == ["baseline", "dyt", "rms+rope", "control"]
        assert len(stages["baseline"]["train_loss"]) == 5
        assert all(stage["end"]["loss"] < stage["start"]["loss"] for stage in stages.values())
        for name in ("dyt", "rms+rope", "control"):
            assert len(stages[name]["train_loss"]) == 4
            assert [point["step"] for point in stages[name]["curve"]] == [0, 1, 2, 4]
            assert (stages[name]["start"] == stages["baseline"]["end"]) is (name == "control")

    def test_perplexity_and_bits_per_byte_follow_from_the_loss(self, finished, text):
        tokenizer = AutoTokenizer.from_pretrained(finished / "tokenizer")
        _, heldout = data.split_documents(data.read_text_files([str(text)]))
        tokens, _ = data.encode(heldout, tokenizer)
        starts = np.linspace(0, len(tokens) - 16, 20).astype(int)
        # Decoding is an independent way to the bytes; a character cut by a block's edge decodes to U+FFFD, 3 bytes.
        predicted = [tokenizer.decode(tokens[s + 1 : s + 16]).removesuffix(data.END_OF_TEXT) for s in starts]
        size = sum(len(p.encode()) for p in predicted)
        for stage in read_results(finished)["stages"].values():
            point = stage["end"]
            assert point["perplexity"] == pytest.approx(math.exp(point["loss"]))
            assert point["bits_per_byte"] == pytest.approx(point["loss"] * 20 * 15 / math.log(2) / size, rel=0.01)

    @pytest.mark.parametrize("variant", ["dyt", "rms+rope", "control"])
    def test_saved_model_has_the_reported_loss(self, finished, text, variant):
        loss = heldout_loss(finished / variant, text)
        assert loss == pytest.approx(read_results(finished)["stages"][variant]["end"]["loss"], abs=1e-5)

    def test_files_and_record(self, finished):
        found = read_results(finished)
        assert f"{found['stages']['dyt']['end']['loss']:.3f}" in (finished / "results.md").read_text("utf-8")
        assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
        assert {"python", "hfpatch", "torch", "transformers", "accelerate"} <= set(found["versions"])
        assert found["config"]["seed"] == 0
        assert found["wall_seconds"] > 0
        assert not (finished / "state").exists(), "nothing is left to resume"


def heldout_loss(folder, text):
    """The table's figure for the tiny settings, computed anew."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    tokens, sizes = data.encode(data.split_documents(data.read_text_files([str(text)]))[1], tokenizer)
    blocks = data.HeldOutBlocks(tokens, sizes, data.Causal(16), 20)
    ids = torch.stack([blocks[i]["input_ids"] for i in range(20)])
    with torch.no_grad():
        logits = model(ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


def at_step(monkeypatch, where, act):
    """Have `act` done when a step begins."""
    train_step = run.Run.train_step

    def acting(self, step, *args):
        if step == where:
            act()
        return train_step(self, step, *args)

    monkeypatch.setattr(run.Run, "train_step", acting)


class TestStopping:
    def test_resumed_run_equals_an_uninterrupted_one(self, finished, text, tmp_path, capsys):
        for steps in (3, 4):  # in the baseline, then in the first variant; neither is a multiple of save_every
            assert finetune.main(tiny(tmp_path, text, "--stop_after", steps, *["--resume"][: steps == 4])) == 130
            assert "--resume" in capsys.readouterr().err
        stopped = next(tmp_path.glob("state/*/stage.json"))
        assert json.loads(stopped.read_text())["name"] == "dyt"
        assert finetune.main(tiny(tmp_path, text, "--resume")) == 0
        assert "baseline: done before" in capsys.readouterr().out
        assert figures(tmp_path) == figures(finished)

    @pytest.mark.slow
    def test_with_dropout_accumulation_and_at_the_last_step(self, text, tmp_path, finished):
        tokenizer = AutoTokenizer.from_pretrained(finished / "tokenizer")
        sizes = {"vocab_size": 300, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
        GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(tmp_path / "gpt2")
        tokenizer.save_pretrained(tmp_path / "gpt2")
        given = ["--model", tmp_path / "gpt2", "--gradient_accumulation_steps", 2, "--keep_dropout"]
        assert finetune.main(tiny(tmp_path / "once", text, *given, variants="dyt")) == 0
        for steps in (5, 3):
            stop = ["--stop_after", steps, "--resume"]
            assert finetune.main(tiny(tmp_path / "often", text, *given, *stop, variants="dyt")) == 130
        assert finetune.main(tiny(tmp_path / "often", text, *given, "--resume", variants="dyt")) == 0
        assert figures(tmp_path / "often") == figures(tmp_path / "once")

    def test_other_settings_can_not_resume(self, text, tmp_path, capsys):
        assert finetune.main(tiny(tmp_path, text, "--stop_after", 1)) == 130
        assert finetune.main(tiny(tmp_path, text, "--resume", "--seed", 1)) == 2
        assert "seed changed" in capsys.readouterr().err
        other = tmp_path / text.name
        other.write_text(text.read_text("utf-8") + "more\n", "utf-8")
        assert finetune.main(tiny(tmp_path, other, "--resume")) == 2
        assert "data (its content)" in capsys.readouterr().err

    @pytest.mark.slow
    def test_ctrl_c_finishes_the_step_and_saves(self, finished, text, tmp_path, capsys, monkeypatch):
        with monkeypatch.context() as patch:
            at_step(patch, "step 3 of baseline", lambda: os.kill(os.getpid(), signal.SIGINT))
            assert finetune.main(tiny(tmp_path, text)) == 130
        assert "stopped after step 3 of 5 of 'baseline'" in capsys.readouterr().err
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert finetune.main(tiny(tmp_path, text, "--resume")) == 0
        assert figures(tmp_path) == figures(finished)

    def test_second_ctrl_c_interrupts_at_once(self, monkeypatch):
        now = iter([0.0, 1.0, 3.0])
        monkeypatch.setattr(command.time, "monotonic", lambda: next(now))
        with command.stop_requests() as requests:
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
        assert in_process("-c", script).returncode == -signal.SIGKILL
        (state,) = (tmp_path / "state").iterdir()
        assert state.name.endswith("2-dyt")
        more = tiny(tmp_path, text, "--resume")
        assert in_process(ROOT / "recipes" / "finetune.py", *more).returncode == 0
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
        assert "step 4 of baseline" in error
        assert "No space left" in error
        assert "--resume" in error
        (state,) = (tmp_path / "state").iterdir()
        assert json.loads((state / "stage.json").read_text())["step"] == 2
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
        assert "loss nan" in error
        assert "step 4 of baseline" in error
        assert "--learning_rate" in error
        (state,) = (tmp_path / "state").iterdir()
        assert json.loads((state / "stage.json").read_text())["step"] == 2
        assert all(t.isfinite().all() for t in load_file(state / "model.safetensors").values())


def in_process(*argv):
    """Python in a process of its own, on the CPU and on this repository's hfpatch."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "recipes"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run([sys.executable, *map(str, argv)], env=env, capture_output=True, timeout=120, text=True)


class TestOptions:
    @pytest.mark.slow
    def test_gradient_checkpointing_changes_no_figure(self, finished, text, tmp_path):
        assert finetune.main(tiny(tmp_path, text, "--gradient_checkpointing", variants="dyt control")) == 0
        ours = figures(tmp_path)
        for name in ours:
            assert ours[name]["train_loss"] == pytest.approx(figures(finished)[name]["train_loss"], abs=1e-5)
        assert "gradient_checkpointing" not in (tmp_path / "dyt" / "config.json").read_text()

    @pytest.mark.slow
    def test_from_scratch(self, text, tmp_path):
        argv = tiny(tmp_path, text, "--start", "reset", "--baseline_steps", 0, variants="layer dyt control")
        assert finetune.main(argv) == 0
        stages = figures(tmp_path)
        assert stages["layer"]["start"]["loss"] == pytest.approx(stages["control"]["start"]["loss"], abs=1e-6)
        assert stages["layer"]["train_loss"] == pytest.approx(stages["control"]["train_loss"], abs=1e-5)
        assert stages["dyt"]["end"] != stages["control"]["end"]

    @pytest.mark.slow
    def test_starts_differ(self, text, tmp_path):
        starts = {}
        for start in ("repaired", "self", "copied"):
            out = tmp_path / start
            assert finetune.main(tiny(out, text, "--start", start, variants="dyt control")) == 0
            starts[start] = figures(out)["dyt"]["start"]["loss"]
            assert figures(out)["control"] == figures(tmp_path / "repaired")["control"]
        assert len(set(starts.values())) == 3

    def test_tensorboard(self, text, tmp_path):
        assert finetune.main(tiny(tmp_path, text, "--tracker", "tensorboard", variants="control")) == 0
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "logs")).Reload()
        logged = [event.value for event in events.Scalars("control/loss")]
        assert logged == pytest.approx(figures(tmp_path)["control"]["train_loss"])
        assert "control/heldout_loss" in events.Tags()["scalars"]


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

    @pytest.mark.parametrize("content", ["steps: many", "mixed_precision: fp7", "stepz: 3", "- a\n- b", "a: [", None])
    def test_bad_yaml(self, tmp_path, content, capsys):
        path = tmp_path / "own.yaml"
        if content:
            path.write_text(content)
        assert finetune.main([str(path), "--output_dir", str(tmp_path / "out")]) == 2
        assert "RecipeError" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("choices", "taken", "refused"),
        [
            (options.COUNT, [1, 9], [0, math.inf]),
            (options.NOT_NEGATIVE, [0], [-1e-9, math.nan]),
            (options.POSITIVE, [1e-9], [0, math.inf, math.nan]),
            (options.SHARE, [1e-9, 1], [0, 1.1]),
        ],
    )
    def test_ranges(self, choices, taken, refused):
        assert [number in choices for number in [*taken, *refused]] == [True] * len(taken) + [False] * len(refused)

    def test_variants_are_registered_names(self):
        assert settings.parse_variant("rms+rope") == {"norm": "rms", "pos": "rope"}
        assert settings.parse_variant("rope+dyt:alpha=1e+0") == {"norm": "dyt:alpha=1e+0", "pos": "rope"}
        assert settings.parse_variant("control") == {}


class TestBadInput:
    """One line, exit status 2, and nothing trained."""

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            ("--variants rmss", "UnknownNameError: no norm called 'rmss'. Did you mean 'rms'?"),
            ("--variants dyt+rpoe", "UnknownNameError: no position called 'rpoe'. Did you mean 'rope'?"),
            ("--variants rms+dyt", "two schemes of one kind: 'rms' and 'dyt'"),
            ("--variants dyt dyt", "named twice"),
            ("--text missing.txt", "missing.txt"),
            ("--steps 0", "--steps"),
            ("--baseline_steps -1", "--baseline_steps"),
            ("--baseline_steps 0", "untrained"),
            ("--learning_rate nan", "--learning_rate"),
            ("--width 33", "--width"),
            ("--model ./no/such/model", "./no/such/model"),
            ("--learning-rte 1", "--learning-rte"),
            ("--label_column x", "--label_column"),
            ("own.yml.txt", "own.yml.txt"),
            ("--task nothing", "nothing"),
            ("--task embed --batch_size 0", "--batch_size"),  # of which it has a default of its own
        ],
    )
    def test_refused_at_once(self, text, tmp_path, refused, flags, named):
        assert named in refused(finetune, [*tiny(tmp_path, text), *flags.split()])
        assert list(tmp_path.iterdir()) in ([], [tmp_path / "tokenizer"])

    def test_what_accelerate_refuses(self, text, tmp_path, refused):
        # Here: a second precision in one process. Elsewhere: one that the device lacks.
        Accelerator(mixed_precision="no")
        assert "RecipeError: accelerate refuses" in refused(finetune, tiny(tmp_path, text, "--mixed_precision", "bf16"))

    @pytest.mark.parametrize("content", [b"", b"a b c", b"\xff\xfe\x00"])
    def test_no_text_to_speak_of(self, tmp_path, refused, content):
        (tmp_path / "short.txt").write_bytes(content)
        assert "RecipeError" in refused(finetune, tiny(tmp_path, tmp_path / "short.txt"))

    def test_output_folder_that_can_not_be_made(self, text, refused):
        assert "RecipeError: can't write" in refused(finetune, tiny(text / "out", text))

    def test_models_that_do_not_fit(self, finished, text, tmp_path, refused):
        shutil.copytree(finished / "baseline", tmp_path / "torn")
        weights = tmp_path / "torn" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:2000])
        AutoModelForCausalLM.from_pretrained(finished / "baseline").save_pretrained(tmp_path / "bare")
        refusals = {
            "--block_size 17": finished / "baseline",  # beyond its positions
            "there is no tokenizer": tmp_path / "bare",
            "AutoModelForCausalLM can't load": tmp_path / "torn",
        }
        for named, folder in refusals.items():
            more = named.split() if named.startswith("--") else []
            assert named in refused(finetune, tiny(tmp_path / "out", text, "--model", folder, *more))


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
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=16, **sizes)).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_masked_model(bert, text, tmp_path):
    argv = tiny(tmp_path, text, "--model", bert, "--learning_rate", "1e-2", "--baseline_steps", 0)
    assert finetune.main(argv) == 0
    found = read_results(tmp_path)
    stages = found["stages"]
    assert found["data"]["objective"] == "masked"
    assert stages["control"]["start"] == stages["baseline"]["end"] == stages["baseline"]["start"]
    assert stages["control"]["end"]["loss"] < stages["control"]["start"]["loss"]
    assert stages["dyt"]["start"] != stages["control"]["start"]
    assert stages["dyt"]["end"]["bits_per_byte"] is None
    assert not (tmp_path / "baseline").exists(), "an untouched model isn't copied"


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_a_bar_or_ten_lines(monkeypatch, terminal):
    stream = io.StringIO()
    stream.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.Progress("work", 3000, done=1000) as bar:
        for step in range(1001, 3001):
            bar.step(step, f"part {step}")
    written = stream.getvalue()
    if terminal:
        assert "\r" in written
        assert written.count("\n") == 1
    else:
        assert written.splitlines() == [f"work: {10 * i} %, part {300 * i}" for i in range(4, 11)]


class TestOwnFolder:
    """Results of one recipe aren't replaced by another one's."""

    @pytest.mark.parametrize("recipe", ["heal", "compare", "stability", "evaluate", "benchmark", "finetune"])
    def test_another_recipes_results_stay(self, tmp_path, capsys, monkeypatch, recipe):
        monkeypatch.setattr(run.Run, "__init__", lambda *a: pytest.fail("a run began"))
        path, other = tmp_path / "results.json", "heal" if recipe != "heal" else "finetune"
        path.write_text(json.dumps({"command": f"python recipes/{other}.py --seed 3", "config": {}, "stages": {}}))
        before = path.read_bytes()
        more = ["--models", "gpt2"] if recipe == "evaluate" else []
        assert importlib.import_module(recipe).main(["--output_dir", str(tmp_path), *more]) == 2
        error = capsys.readouterr().err.strip()
        assert error.startswith("RecipeError")
        assert f"python recipes/{other}.py --seed 3" in error
        assert path.read_bytes() == before

    def test_ones_own_are_taken(self, finished, tmp_path):
        files.require_own_folder("finetune.py", str(finished))
        files.require_own_folder("finetune.py", str(tmp_path / "none"))

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"command": null}', '{"command": ""}', "\xff"])
    def test_what_no_recipe_wrote(self, content, text, tmp_path, capsys):
        (tmp_path / "results.json").write_text(content, "latin-1")
        assert finetune.main(tiny(tmp_path, text, "--resume")) == 2
        assert "RecipeError" in capsys.readouterr().err
        assert (tmp_path / "results.json").read_text("latin-1") == content
