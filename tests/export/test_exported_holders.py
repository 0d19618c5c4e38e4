"""A SentenceTransformer is exported as a whole: what its folder holds, and what refuses to be written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sentence_encoders import (
    TEXTS,
    cross_encoder,
    module,
    outputs_of_texts,
    sentence_encoder,
    sparse_encoder,
    transformer,
)
from tiny_models import patch
from transformers import AutoConfig

from hfpatch import export_model
from hfpatch.errors import VerificationError
from hfpatch.export import remote
from hfpatch.measure.outputs import max_error
from hfpatch.runtime.patch_errors import UnsupportedError

FORMS = ("plugin", "remote", "native")
OF_ALL = {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors", "modules.json", "README.md"}
OF_ALL |= {"config_sentence_transformers.json", "sentence_bert_config.json", "tokenizer.json", "model.safetensors"}


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the other process would be asked; it answers that all is equal."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(remote, "run_job", lambda model, folder, job: asked.append(job) or {"outputs": {}})
    monkeypatch.setattr(remote, "max_error", lambda *pair: 0.0)
    return asked


@pytest.mark.sample(2)
@pytest.mark.parametrize("to", FORMS)
def test_what_lies_in_the_folder(to: str, tmp_path: Path, jobs: list[dict[str, Any]]) -> None:
    encoder = sentence_encoder(truncate_dim=8)
    encoder.save_pretrained(str(tmp_path / "plain"))
    patch(encoder, pos="rope:max_positions=96")
    exported = export_model(encoder, tmp_path / "out", to)
    assert exported.folder == tmp_path / "out"
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
    assert [job["class"] for job in jobs] == ([exported.architecture] if to == "remote" else [])
    assert "save_pretrained" not in vars(encoder[0].auto_model)


def test_an_export_that_is_refused_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the model inside, opened by itself in another process; or of an object that doesn't save it."""
    encoder = patch(sentence_encoder(), norm="dyt")
    monkeypatch.setattr(remote, "run_job", lambda *_: {"error": "OSError: no such file.\n"})
    with pytest.raises(VerificationError, match=r"another process: OSError: no such file\. It was deleted"):
        export_model(encoder, tmp_path / "out", "remote")
    assert "save_pretrained" not in vars(encoder[0].auto_model)
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
def test_it_opens_as_the_same_function(make: Any, to: str, tmp_path: Path) -> None:
    encoder = patch(make(), pos="rope")
    export_model(encoder, tmp_path / "out", to)
    assert (tmp_path / "out/modules.json").exists()
    again = type(encoder)(str(tmp_path / "out"), device="cpu", trust_remote_code=to == "remote")
    assert max_error(outputs_of_texts(encoder, TEXTS), outputs_of_texts(again, TEXTS)) < 1e-5
