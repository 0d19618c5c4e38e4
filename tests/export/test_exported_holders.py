"""A SentenceTransformer is exported as a whole: what its folder holds, and what refuses to be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_encoders import cross_encoder, module, sentence_encoder, sparse_encoder, transformer
from tiny_models import patch
from transformers import AutoConfig

from hfpatch import export_model
from hfpatch.errors import VerificationError
from hfpatch.export import holders, remote
from hfpatch.measure.outputs import outputs_of_texts
from hfpatch.runtime.errors import UnsupportedError

FORMS = ("plugin", "remote", "native")
OF_ALL = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json", "README.md"}
OF_ALL |= {"config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer.json", "model.safetensors"}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the other process would be asked; it answers what the encoder computes here, twice."""
    asked: list[dict[str, Any]] = []

    def answer(model: Any, folder: Path, job: dict[str, Any]) -> dict[str, Any]:
        asked.append(job)
        return {"outputs": [found, found]}

    found: dict[str, torch.Tensor] = {}
    measure = holders.outputs_of_texts
    monkeypatch.setattr(holders, "outputs_of_texts", lambda *args: found.update(measure(*args)) or measure(*args))
    monkeypatch.setattr(remote, "run_job", answer)
    return asked


@pytest.mark.sample(2)
@pytest.mark.parametrize("to", FORMS)
def test_what_lies_in_the_folder(to: str, tmp_path: Path, jobs: list[dict[str, Any]]) -> None:
    encoder = sentence_encoder(truncate_dim=8)
    encoder.save_pretrained(str(tmp_path / "plain"))
    patch(encoder, pos="rope:max_positions=96")
    exported = export_model(encoder, tmp_path / "out", to)
    assert exported.folder == tmp_path / "out"
    assert exported.embeddings is not None
    assert exported.embeddings.error == 0
    assert "what it makes of 4 texts" in str(exported)
    files = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert files >= OF_ALL
    assert ("modeling_hfpatch.py" in files) == (to == "remote")
    assert ("hfpatch_weights.json" in files) == (to != "native")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert ("auto_map" in config) == (to == "remote")
    assert ("hfpatch" in config) == (to != "native")
    if to == "native":
        assert exported.architecture == config["architectures"][0] == "JinaEmbeddingsV3Model"
        assert AutoConfig.from_pretrained(tmp_path / "out").model_type == "jina_embeddings_v3"
    kept = json.loads((tmp_path / "out/config_sentence_transformers.json").read_text())
    assert kept["prompts"] == {"query": "a cat ", "document": ""}
    assert kept["similarity_fn_name"] == "dot"
    plain = json.loads((tmp_path / "plain/config_sentence_transformers.json").read_text())
    assert kept.get("truncate_dim") == plain.get("truncate_dim")  # which older versions don't save
    assert json.loads((tmp_path / "out/tokenizer_config.json").read_text())["model_max_length"] == 96
    (job,) = jobs
    assert job["trust"] == (to == "remote")
    assert job["plugin"] == (to == "plugin")
    assert job["class"] == exported.architecture
    assert "save_pretrained" not in vars(encoder[0].auto_model)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"error": "OSError: no such file.\n"}, "another process: OSError: no such file. It was deleted"),
        ({"outputs": "other"}, "outputs differ by .* of their size, where 1e-05 is"),
        ({"outputs": [{}, {}]}, "differ by inf of their size"),
    ],
)
def test_an_export_that_is_another_function_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = patch(sentence_encoder(), norm="dyt")
    right = outputs_of_texts(encoder, holders.TEXTS)
    if change.get("outputs") == "other":  # the second time it is opened
        change = {"outputs": [right, {name: value * (1 + 1e-3) for name, value in right.items()}]}
    monkeypatch.setattr(remote, "run_job", lambda *_: change)
    with pytest.raises(VerificationError, match=says):
        export_model(encoder, tmp_path / "out", "remote")
    assert not list(tmp_path.iterdir())
    assert "save_pretrained" not in vars(encoder[0].auto_model)
    monkeypatch.setattr(remote, "run_job", lambda *_: {"outputs": [right, right]})
    assert export_model(encoder, tmp_path / "out", "remote").embeddings.error == 0


def test_an_object_that_takes_no_texts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = patch(sentence_encoder(), norm="dyt")
    monkeypatch.setattr(encoder, "encode_query", lambda *_, **__: 1 / 0)
    with pytest.raises(UnsupportedError, match="doesn't run on texts: ZeroDivisionError"):
        export_model(encoder, tmp_path / "out")
    monkeypatch.setattr(encoder, "save_pretrained", lambda folder: None)
    with pytest.raises(UnsupportedError, match="doesn't save the model inside it"):
        export_model(encoder, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def routed() -> Any:
    """Documents go through the BERT, queries through a table of embeddings."""
    first = transformer()
    from sentence_transformers import SentenceTransformer

    width = first.auto_model.config.hidden_size
    query = [module("StaticEmbedding")(first.tokenizer, embedding_dim=width)]
    router = module("Router").for_query_document(
        query_modules=query, document_modules=[first, module("Pooling")(width)]
    )
    return SentenceTransformer(modules=[router], device="cpu")


def test_code_in_a_subfolder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="its model in the subfolder document_0_Transformer"):
        export_model(patch(routed(), pos="rope"), tmp_path / "out", "remote")
    assert not list(tmp_path.iterdir())


@pytest.mark.sample(0, slow=2)
@pytest.mark.parametrize(
    ("make", "to"),
    [
        *((sentence_encoder, to) for to in FORMS),
        (cross_encoder, "remote"),
        (sparse_encoder, "native"),
        (routed, "plugin"),
    ],
)
def test_it_opens_in_another_process(make: Any, to: str, tmp_path: Path) -> None:
    encoder = patch(make(), pos="rope")
    exported = export_model(encoder, tmp_path / "out", to)
    assert exported.embeddings is not None
    assert exported.embeddings.error < 1e-5
    assert (tmp_path / "out/modules.json").exists()


@pytest.mark.slow
def test_the_check_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: a pooling of another kind is seen by the other process."""
    encoder = patch(sentence_encoder(), norm="dyt")
    save = encoder.save_pretrained

    def spoilt(folder: str) -> None:
        save(folder)
        path = Path(folder, "1_Pooling/config.json")
        path.write_text(path.read_text().replace('"mean"', '"max"'))

    monkeypatch.setattr(encoder, "save_pretrained", spoilt)
    with pytest.raises(VerificationError, match="outputs differ by"):
        export_model(encoder, tmp_path / "out", "remote")
