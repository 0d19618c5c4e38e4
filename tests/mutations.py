"""Whether the default tests notice deliberate faults: each is put into a copy of hfpatch, and tests are run on it.

    python tests/mutations.py              # all of them; writes mutations.md beside itself
    python tests/mutations.py --only 3 17  # these; prints what came of them

A fault is a text of one file that is replaced by another. It is *caught* if one of the tests that are named with it
fails; slow tests and sweeps don't count. First the same tests run on an unchanged copy, and must pass. The working tree
isn't touched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path(__file__).with_suffix(".md")


@dataclass(frozen=True)
class Fault:
    """A deliberate fault.

    Attributes:
        broken: what goes wrong, in words.
        file: in hfpatch/.
        old, new: the text that is replaced, which occurs once, and the replacement.
        tests: arguments of pytest: files or single tests in tests/.
    """

    broken: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


FAULTS = [
    Fault(
        "a second lens on a module throws the first one away",
        "runtime/lens.py",
        "return Lenses((*others, lens)) if others else lens",
        "return lens",
        ("runtime/test_position_ids.py::test_beside_norms_that_stand_elsewhere",),
    ),
    Fault(
        "forward hooks on a module inside a view don't run",
        "runtime/lens.py",
        "if self._forward_hooks or self._forward_pre_hooks:",
        "if False:",
        ("runtime/test_view.py",),
    ),
    Fault(
        "the output of a module that returns a tuple isn't centred",
        "runtime/lens.py",
        "return (subtract_mean(output[0], axis), *output[1:])",
        "return output",
        ("runtime/test_view.py",),
    ),
    Fault(
        "a gain that is stored as an offset from one is taken as the gain",
        "runtime/norms.py",
        "gain = gain.to(x.dtype) + facts.offset",
        "gain = gain.to(x.dtype)",
        ("schemes/test_norms.py",),
    ),
    Fault(
        "half precision isn't widened inside a norm",
        "runtime/norms.py",
        "        if x.dtype in HALF:\n            x = x.float()\n",
        "",
        ("schemes/test_norms.py",),
    ),
    Fault(
        "the gate of a fused MLP is taken for its other half",
        "export/read.py",
        'parts["gate"], parts["up"] =',
        'parts["up"], parts["gate"] =',
        ("export/test_export_native.py",),
    ),
    Fault(
        "interleaved pairs are mirrored instead of turned",
        "runtime/rotary.py",
        "torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)",
        "torch.stack((x1 * cos - x2 * sin, x2 * cos - x1 * sin), dim=-1)",
        ("contracts/test_table.py::test_holds",),
    ),
    Fault(
        "model.half() rounds the frequencies",
        "runtime/constants.py",
        "        self.reset()\n        return self\n",
        "        return self\n",
        ("test_patch.py::test_the_dtype_is_kept",),
    ),
    Fault(
        "longrope changes its frequencies one token late",
        "runtime/rotary.py",
        "length > self.original",
        "length > self.original + 1",
        ("planners/test_lengths.py",),
    ),
    Fault(
        "a layer-scale goes into the writers of all layers",
        "core/globs.py",
        "return others[: len(own)] == own",
        "return True",
        ("exact/test_find.py::TestOthers",),
    ),
    Fault(
        "a weight's mean is taken over the wrong axis in pieces",
        "core/weight_change.py",
        "other_axes = [i for i in range(values.dim()) if i != axis]",
        "other_axes = list(range(values.dim()))",
        ("core/test_weight_change.py",),
    ),
    Fault(
        "what compensates a post-norm model's shift has the wrong sign",
        "exact/compensate.py",
        "-sum(means) / len(means), transaction)",
        "1.5 * sum(means) / len(means), transaction)",
        ("exact/test_compensate.py",),
    ),
    Fault(
        "the rows that judge a fit are fitted as well",
        "repairs/least_squares.py",
        "            x, r, w = (one[~held_out] for one in (x, r, w))\n",
        "",
        ("repairs/test_least_squares.py",),
    ),
    Fault(
        "a repair that makes the outputs worse is kept",
        "repairs/repair.py",
        "        if not self.report.kept:\n            self.transaction.undo(mark)\n",
        "",
        ("repairs/test_repair.py::test_a_whole_that_doesnt_help_is_taken_back_bit_for_bit",),
    ),
    Fault(
        "a fit that doesn't help on held-out rows is written",
        "repairs/fits.py",
        "kept = after < (math.inf if math.isnan(before) else before)",
        "kept = True",
        ("repairs/test_repair.py::test_a_fit_that_doesnt_help_isnt_written",),
    ),
    Fault(
        "a step is judged by the fit's own error, not by that of the written model",
        "repairs/fits.py",
        "        after = error()\n",
        "        after = fit.after\n",
        ("repairs/test_written.py",),
    ),
    Fault(
        "readers are fitted with a constant that isn't written",
        "repairs/fits.py",
        "            if shift is not None and not biases:\n",
        "            if False:\n",
        ("repairs/test_written.py",),
    ),
    Fault(
        "sequences nearly equal to one that judges are fitted",
        "repairs/near_duplicates.py",
        "[i for i in others if i not in near], held_out",
        "others, held_out",
        ("repairs/test_distinct.py",),
    ),
    Fault(
        "an edit may assign a module's forward",
        "runtime/edits.py",
        "if leaves & _RESERVED or (",
        "if (",
        ("checkpoint/test_security.py",),
    ),
    Fault(
        "a record of a newer version is read",
        "runtime/record.py",
        "if version > VERSION:",
        "if False:",
        ("checkpoint/test_security.py",),
    ),
    Fault(
        "a list comes back as a tuple",
        "runtime/edits.py",
        "return list(map(_parse_value, items))",
        "return tuple(map(_parse_value, items))",
        ("runtime/test_edit_text.py",),
    ),
    Fault(
        "an eps that was changed in config.json counts as harmless",
        "checkpoint/stored_config.py",
        "_HARMLESS |= {FILE}",
        '_HARMLESS |= {FILE, "layer_norm_epsilon", "layer_norm_eps"}',
        ("checkpoint/test_fingerprint.py",),
    ),
    Fault(
        "weights that go by other names are taken",
        "checkpoint/files.py",
        "    if unexpected:\n",
        "    if False:\n",
        ("checkpoint/test_fingerprint.py",),
    ),
    Fault(
        "a weight that a file lost is started afresh",
        "checkpoint/files.py",
        "for name in missing if any(",
        "for name in () if any(",
        ("checkpoint/test_fingerprint.py",),
    ),
    Fault(
        "a gain that is an offset from one is exported as it is stored",
        "export/weights.py",
        'gain = values["gain"] + facts.offset if',
        'gain = values["gain"] if',
        ("export/test_export_native.py",),
    ),
    Fault(
        "a native export that computes another function passes its check",
        "export/equality.py",
        "return self.error <= self.tolerance",
        "return True",
        ("export/test_export_native.py",),
    ),
    Fault(
        "a factor on a branch is lost",
        "export/weights.py",
        "return layer.times(self.gains[id(module)]) if id(module) in self.gains else layer",
        "return layer",
        ("export/test_export_native.py",),
    ),
    Fault(
        "a commit overwrites what somebody else committed meanwhile",
        "hub/push.py",
        "parent_commit=push.commit, ",
        "",
        ("hub/test_push.py::test_what_somebody_else_pushed_meanwhile_stays",),
    ),
    Fault(
        "weights of an earlier push stay beside the new ones",
        "hub/push.py",
        "deleted = sorted(stale - contents.keys())",
        "deleted = sorted(stale & contents.keys())",
        ("hub/test_push.py",),
    ),
    Fault(
        "with a cache each token is at position 0",
        "runtime/attention.py",
        "return counted if start is None else counted + start",
        "return counted",
        ("contracts/test_table.py::test_holds",),
    ),
    Fault(
        "generate() stops at the removed table's length",
        "runtime/classes.py",
        "generation_config.max_length = total",
        "pass",
        ("planners/test_lengths.py::test_the_old_length_cuts_nothing_and_warns_of_nothing",),
    ),
    Fault(
        "texts fill a table that begins behind the padding's row",
        "measure/inputs.py",
        "rows - padding - 1",
        "rows",
        ("measure/test_batches.py::test_texts_are_as_long_as_tables_that_begin_behind_the_padding",),
    ),
    Fault(
        "a place inside a module that was replaced still counts as one of the model's",
        "runtime/apply.py",
        "self._drop_children(old)  # last",
        "pass  # last",
        ("runtime/test_edit_text.py::test_the_places_that_hold_a_module_follow_what_is_replaced",),
    ),
    Fault(
        "what is replaced is searched for again in the whole model",
        "runtime/apply.py",
        "        places = self._holders.pop(old)\n",
        "        places = self._holders.pop(old)\n        self._holders = {}\n",
        ("runtime/test_edit_text.py::test_replacing_modules_with_children_takes_steps_in_proportion_to_the_blocks",),
    ),
    Fault(
        "two threads change the random generators at once",
        "measure/randomness.py",
        "with process_state, torch.random.fork_rng(devices=[])",
        "with torch.random.fork_rng(devices=[])",
        ("measure/test_randomness.py",),
    ),
    Fault(
        "the gain of a norm that was replaced decays",
        "runtime/norms.py",
        "        new.leave_out_of_decay(replaced=old)\n",
        "",
        ("contracts/test_table.py::test_holds",),
    ),
    Fault(
        "an outcome doesn't say that a tower of images didn't run",
        "outcome.py",
        'return f"on inputs without {missing}" if missing else ""',
        'return ""',
        ("test_outcome.py::test_the_users_text_is_said_to_be_without_images",),
    ),
    Fault(
        "a fold after a repair isn't checked",
        "outcome.py",
        "    verdict = check_folded(",
        "    verdict = None and check_folded(",
        ("planners/test_folded.py::test_control_a_wrong_fold_is_refused",),
    ),
    Fault(
        "a folded norm's gain is lost",
        "planners/norm_folds.py",
        'yield WeightChange(place, "multiply", f"{norm}.{facts.gain}", axis)',
        "pass",
        ("planners/test_folded.py::test_exact_in_float64",),
    ),
    Fault(
        "a folded norm's shift is lost where its reader has a bias",
        "planners/norm_folds.py",
        'biases.append(WeightChange(f"{name}.bias", "add", constant))',
        "pass",
        ("planners/test_folded.py::test_exact_in_float64",),
    ),
    Fault(
        "the mean that a fixed norm took away goes with it",
        "planners/norm_folds.py",
        "if centres:",
        "if False:",
        ("planners/test_folded.py::test_fixed_norms_go_altogether",),
    ),
    Fault(
        "a fold that isn't exact is accepted",
        "outcome.py",
        "    if not verdict.holds:\n        raise",
        "    if False:\n        raise",
        ("planners/test_folded.py::test_control_a_wrong_fold_is_refused",),
    ),
]


def changed_copy(fault: Fault | None, folder: Path) -> None:
    """hfpatch in a folder, with the fault.

    Raises:
        ValueError: the text that it replaces isn't there exactly once.
    """
    shutil.copytree(ROOT / "hfpatch", folder / "hfpatch", ignore=shutil.ignore_patterns("__pycache__"))
    if fault is None:
        return
    path = folder / "hfpatch" / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise ValueError(f"hfpatch/{fault.file} has {fault.old!r} {text.count(fault.old)} times, not once.")
    path.write_text(text.replace(fault.old, fault.new))


def run(fault: Fault | None, tests: Iterable[str]) -> tuple[str, float]:
    """The first test that fails ("" if all pass) on a copy of hfpatch, and seconds.

    Raises:
        RuntimeError: no test ran, or tests ran on another copy.
    """
    with tempfile.TemporaryDirectory() as name:
        changed_copy(fault, Path(name))
        environment = {**os.environ, "PYTHONPATH": name, "PYTHONDONTWRITEBYTECODE": "1"}
        python = [sys.executable, "-P"]  # without the working directory, whose hfpatch would be found first
        found = _output([*python, "-c", "import hfpatch; print(hfpatch.__file__)"], environment)[0]
        if not found.startswith(str(Path(name).resolve())):
            raise RuntimeError(f"tests would run on {found}")
        options = ["-x", "-q", "-n", "0", "--tb=no", "--no-header", "-p", "no:cacheprovider"]
        start = time.perf_counter()
        lines = _output([*python, "-m", "pytest", *options, *(f"tests/{one}" for one in tests)], environment)
        seconds = time.perf_counter() - start
    broken = [line.partition(" ")[2].partition(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if not broken and " passed" not in lines[-1]:
        raise RuntimeError("\n".join(lines[-20:]))
    return broken[0] if broken else "", seconds


def _output(command: list[str], environment: dict[str, str]) -> list[str]:
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return (result.stdout or result.stderr).strip().splitlines()


def to_markdown(results: list[tuple[int, Fault, str, float]]) -> str:
    caught = sum(bool(test) for _, _, test, _ in results)
    lines = [
        "# Deliberate faults",
        "",
        f"{caught} of {len(results)} were caught by a default test (`python tests/mutations.py`).",
        "",
        "| | what is broken | file | caught by |",
        "|---:|---|---|---|",
    ]
    for number, fault, test, _ in results:
        by = f"`{test.removeprefix('tests/')}`" if test else "**survived**"
        lines.append(f"| {number} | {fault.broken} | {fault.file} | {by} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="numbers of faults, from 1 on")
    parser.add_argument("--without-control", action="store_true", help="don't run the tests on an unchanged copy first")
    options = parser.parse_args()
    numbers = options.only or range(1, len(FAULTS) + 1)
    if not options.without_control:
        tests = {test: None for number in numbers for test in FAULTS[number - 1].tests}
        broken, _ = run(None, tests)
        if broken:
            print(f"{broken} fails on the unchanged hfpatch")
            return 1
    results = []
    for number in numbers:
        fault = FAULTS[number - 1]
        test, seconds = run(fault, fault.tests)
        results.append((number, fault, test, seconds))
        print(f"{number:2d} {seconds:5.1f} s  {fault.broken}: {test or 'SURVIVED'}", flush=True)
    if not options.only:
        TABLE.write_text(to_markdown(results))
    return int(not all(test for _, _, test, _ in results))


if __name__ == "__main__":
    sys.exit(main())
