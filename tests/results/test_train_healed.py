"""train_healed.py, at a size of seconds: its figures, its stops and its refusals."""

import json
import os
import re
import signal

import pytest
import train_healed
from harness import report, start
from run_files import figures, read_results, tiny
from transformers import AutoModelForCausalLM


def small(out, text, *more):
    flags = "--layers 2 --baseline_steps 4 --steps 6 --eval_every 3 --calibration 4 --start copied --patch dyt+rope"
    return tiny(out, text, flags, *more)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("finished")
    assert train_healed.main(small(out, text, "--method", "distil")) == 0
    return out


class TestFigures:
    @pytest.mark.slow
    def test_every_stage_is_there(self, finished):
        stages = read_results(finished)["stages"]
        assert list(stages) == ["baseline", "swapped", "control", "healed"]
        assert [stage["step"] for stage in stages.values()] == [4, 0, 6, 6]
        assert stages["swapped"]["start"] == stages["swapped"]["end"] != stages["baseline"]["end"]
        assert stages["control"]["start"] == stages["baseline"]["end"]
        assert stages["healed"]["start"] == stages["swapped"]["start"]
        assert stages["healed"]["end"]["loss"] < stages["swapped"]["end"]["loss"]

    def test_agreement_and_report(self, finished):
        agreement = read_results(finished)["agreement"]
        assert list(agreement) == ["swapped", "healed", "control"]
        assert all(0 <= found["same_answer"] <= 1 < 1 + found["divergence"] for found in agreement.values())
        assert "Recovered: " in (finished / "results.md").read_text("utf-8")

    @pytest.mark.parametrize(
        ("before", "after", "healed", "control", "higher", "share"),
        [
            (2.0, 4.0, 2.5, 2.0, False, "75.0%"),
            (2.0, 4.0, 2.5, 1.5, False, "50.0%"),
            (2.0, 1.9, 1.8, 1.7, False, None),
            (0.9, 0.5, 0.8, 0.9, True, "75.0%"),
        ],
    )
    def test_share_recovered(self, before, after, healed, control, higher, share):
        moments = {"baseline": before, "healed": healed, "control": control}
        stages = {name: {"end": {"main": value}} for name, value in moments.items()}
        stages["swapped"] = {"start": {"main": after}}
        assert report.recovered({"stages": stages, "main": "main", "higher_is_better": higher}) == share


class TestKeep:
    FLAGS = "--layers 2 --baseline_steps 4 --steps 1 --calibration 16 --patch none --no_control --keep"

    def test_what_stays(self, text, tmp_path):
        """With a budget as many norms go as it allows; a name stays in any case."""
        assert train_healed.main(tiny(tmp_path, text, self.FLAGS, "auto:0.004 *.1.ln_2", "--start repaired")) == 0
        blocks = AutoModelForCausalLM.from_pretrained(tmp_path / "healed").transformer.h
        kept = [type(norm).__name__ == "LayerNorm" for block in blocks for norm in (block.ln_1, block.ln_2)]
        assert kept[-1]
        assert 1 < sum(kept) < 4

    @pytest.mark.parametrize(
        ("flags", "told"),
        [
            ("auto:0.1 --start copied", "--keep auto:0.1 measures on a repair's data: --start repaired"),
            ("auto:0.1 --start repaired --schedule 0", "leave out --keep"),
            ("auto:x", "give one number above 0"),
        ],
    )
    def test_refusals(self, flags, told, text, tmp_path, capsys):
        assert train_healed.main(tiny(tmp_path, text, self.FLAGS, flags)) == 2
        assert told in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_repair_and_resuming_gives_the_same(finished, text, tmp_path, capsys, monkeypatch):
    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("went on")

    with monkeypatch.context() as patch:
        patch.setattr(start.Baseline, "patched", interrupted)
        assert train_healed.main(small(tmp_path, text, "--method distil")) == 130
    assert "to go on: python tools/results/train_healed.py" in capsys.readouterr().err
    assert train_healed.main(small(tmp_path, text, "--method distil --resume --no_control")) == 2, "another setting"
    assert train_healed.main(small(tmp_path, text, "--method distil --resume --stop_after 9")) == 130
    (state,) = tmp_path.glob("state/*/stage.json")
    assert json.loads(state.read_text())["name"] == "healed"
    assert train_healed.main(small(tmp_path, text, "--method distil --resume")) == 0
    assert "swapped: done before" in capsys.readouterr().out
    assert figures(tmp_path) == figures(finished)


@pytest.mark.slow
class TestSchedule:
    FLAGS = "--layers 1 --baseline_steps 4 --steps 5 --eval_every 3 --calibration 8 --patch none --schedule 0"

    def test_norm_after_norm(self, text, tmp_path):
        flags = tiny(tmp_path / "run", text, self.FLAGS, "--no_control")
        assert train_healed.main(flags) == 0
        stages = read_results(tmp_path / "run")["stages"]
        assert list(stages) == ["baseline", "swapped", "healed"]
        assert [stage["step"] for stage in stages.values()] == [4, 0, 5]
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "healed")
        block = model.transformer.h[0]
        assert [type(one).__name__ for one in (block.ln_1, block.ln_2)] == ["NoNorm"] * 2
        whole = figures(tmp_path / "run")

        flags = tiny(tmp_path / "again", text, self.FLAGS, "--no_control")
        for stop in ("--stop_after 6", "--resume --stop_after 1"):  # before and after the second norm changes
            assert train_healed.main([*flags, *stop.split()]) == 130
        assert train_healed.main([*flags, "--resume"]) == 0
        assert figures(tmp_path / "again") == whole

    @pytest.mark.parametrize(
        ("flags", "told"),
        [
            ("--patch fixed+rope", "takes a norm alone, not fixed\\+rope"),
            ("--patch fixed --lora_rank 2", "leave out --lora_rank"),
        ],
    )
    def test_what_cannot_be_changed_while_it_is_trained(self, flags, told, text, tmp_path, capsys):
        assert train_healed.main(tiny(tmp_path / "run", text, flags, "--schedule 0")) == 2
        assert re.search(told, capsys.readouterr().err)
