"""Other people's command lines, started by `hfpatch run`, open checkpoints that need hfpatch in every process.

MERGEKIT_PYTHON: a Python that has mergekit (`pip install mergekit`).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forms import RUN, called, forms_tokenizer, require_refused, save_forms, sentences, unpatched
from tiny_models import difference
from transformers import AutoModelForCausalLM

import hfpatch

pytestmark = pytest.mark.slow

IDS = torch.arange(5, 20)[None]


@pytest.fixture(scope="module")
def model(saved: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(saved / "plugin")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    save_forms(folder)
    return folder


# Several processes

EACH = """
import os, sys, torch, transformers
opened = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
with torch.no_grad():
    torch.save(opened(torch.arange(5, 20)[None]).logits, f"rank{os.environ.get('RANK', '0')}.pt")
"""
SPAWN = """
import multiprocessing, os, runpy, sys

def work(rank, folder):
    os.environ["RANK"], sys.argv = str(rank), ["each.py", folder]
    runpy.run_path("each.py")

if __name__ == "__main__":
    workers = [multiprocessing.get_context("spawn").Process(target=work, args=(i, sys.argv[1])) for i in range(2)]
    [worker.start() for worker in workers]
    [worker.join() for worker in workers]
    sys.exit(sum(worker.exitcode for worker in workers))
"""
STARTERS = {
    "each.py": 1,
    "python spawn.py": 2,
    "torchrun --standalone --nproc-per-node 2 each.py": 2,
    "accelerate launch --cpu --num_processes 2 each.py": 1,  # that is what it starts without MPI
    "accelerate launch --multi_gpu --num_processes 2 --main_process_port 0 each.py": 2,
}


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "each.py").write_text(EACH)
    (tmp_path / "spawn.py").write_text(SPAWN)
    return tmp_path


@pytest.mark.sample(0, slow=2)
@pytest.mark.parametrize("command", STARTERS)
def test_every_process_opens_the_checkpoint(command: str, saved: Path, model: Any, scripts: Path, record: Any) -> None:
    done = called(*RUN, *command.split(), saved / "plugin", home=scripts)
    assert done.returncode == 0, done.stderr
    found = sorted(scripts.glob("rank*.pt"))
    assert len(found) == STARTERS[command]
    with torch.no_grad():
        expected = model(IDS).logits
        assert (unpatched()(IDS).logits - expected).abs().max() > 0.1  # control
    errors = [float((torch.load(file) - expected).abs().max()) for file in found]
    assert max(errors) <= 1e-5
    package = "accelerate" if command.startswith("accelerate") else "torch"
    record(package, f"`hfpatch run -- {command}`: {len(found)} opened", "patched", f"{max(errors):.1e}", "refused")


@pytest.mark.parametrize("script", ["each.py", "spawn.py"])
def test_without_it_they_refuse(script: str, saved: Path, scripts: Path) -> None:
    require_refused(called(sys.executable, script, saved / "plugin", home=scripts))


# lm-eval

TASK = """
task: local_texts
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/rows.jsonl}, cache_dir: FOLDER/cache}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a task whose data lie beside it."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in sentences(16)))
    (folder / "local_texts.yaml").write_text(TASK.replace("FOLDER", str(folder)))
    return folder


def scores(results: dict[str, Any]) -> dict[str, float]:
    return {name: results["local_texts"][f"{name},none"] for name in ("word_perplexity", "bits_per_byte")}


def evaluated(model: Any, tasks: Path) -> dict[str, float]:
    """Its scores as an object."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    harness = HFLM(pretrained=model, tokenizer=forms_tokenizer(), device="cpu", batch_size=1)
    manager = TaskManager(include_path=str(tasks))
    return scores(simple_evaluate(harness, tasks=["local_texts"], task_manager=manager)["results"])


def lm_eval(form: str, saved: Path, tasks: Path) -> list[str]:
    arguments = f"pretrained={saved / form},dtype=float32" + ",trust_remote_code=True" * (form == "remote")
    options = "--model hf --tasks local_texts --device cpu --batch_size 1 --output_path out"
    return [*options.split(), "--include_path", str(tasks), "--model_args", arguments]


@pytest.mark.parametrize("form", ["plugin", "remote"])
def test_lm_evals_scores_are_those_of_the_object(
    form: str, saved: Path, model: Any, tasks: Path, tmp_path: Path, record: Any
) -> None:
    """The plugin form by `hfpatch run`; the remote form where hfpatch can't be imported."""
    pytest.importorskip("lm_eval", reason="lm-eval isn't installed")
    start = [*RUN, "lm_eval"] if form == "plugin" else [sys.executable, "-m", "lm_eval"]
    done = called(*start, *lm_eval(form, saved, tasks), home=tmp_path, hide_hfpatch=form == "remote")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("out/*/results_*.json")
    found, expected = scores(json.loads(file.read_text())["results"]), evaluated(model, tasks)
    assert found == pytest.approx(expected, rel=1e-6)
    plain = evaluated(unpatched(), tasks)
    off = {name: abs(score - expected[name]) for name, score in found.items()}
    control = abs(plain["bits_per_byte"] - expected["bits_per_byte"])
    assert control > 0.01
    how = "`hfpatch run -- lm_eval`" if form == "plugin" else "trust_remote_code=True, no hfpatch"
    figures = f"scores off by {max(off.values()):.1e} of the object's", f"the unpatched model's by {control:.2g}"
    record("lm-eval", f"{form} form: {how}", "equal", *figures)


def test_lm_eval_without_it_refuses(saved: Path, tasks: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval isn't installed")
    require_refused(called(sys.executable, "-m", "lm_eval", *lm_eval("plugin", saved, tasks), home=tmp_path))


# mergekit


@pytest.mark.skipif("MERGEKIT_PYTHON" not in os.environ, reason="MERGEKIT_PYTHON names a Python with mergekit")
def test_mergekit_merges_what_needs_hfpatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: Any) -> None:
    model = save_forms(tmp_path / "a", "llama")
    save_forms(tmp_path / "b", "llama")
    (tmp_path / "merge.yml").write_text(
        f"models: [{{model: {tmp_path}/a/plugin}}, {{model: {tmp_path}/b/plugin}}]\n"
        "merge_method: linear\nparameters: {weight: 0.5}\ndtype: float32\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(hfpatch.__file__).parents[1]))  # in that environment, too
    python = os.environ["MERGEKIT_PYTHON"]
    command = (python, "-m", "mergekit.scripts.run_yaml", "merge.yml", "out")
    require_refused(called(*command, home=tmp_path))
    done = called(*RUN, *command, home=tmp_path)
    assert done.returncode == 0, done.stderr
    with pytest.warns(UserWarning, match="saved without a fingerprint"):
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(merged.model.norm).__name__ == "DynamicTanh"
    error = difference(merged, model)
    assert error < 1e-5
    what = "plugin form, merged with itself: `hfpatch run -- python -m mergekit...`"
    record("mergekit", what, "patched", f"{error:.1e}", "refused without `hfpatch run`", python)
