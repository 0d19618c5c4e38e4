"""llama.cpp's own converter and a build of it: they do what the table of runtimes says, and never run a host unpatched.

LLAMA_CPP: a folder with convert_hf_to_gguf.py, such as vendor/llama.cpp in the source distribution of llama-cpp-python
(`pip download --no-binary llama-cpp-python --no-deps llama-cpp-python`). LLAMA_CPP_PYTHON: a Python that has
xllamacpp, and what requirements/requirements-convert_hf_to_gguf.txt there asks for.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from native_cases import LLAMA3, LM, MASKED, NO_SHIFT, NOPE, PLAIN_OPT, RMS_, ROPE, YARN, case
from scheme_forms import patched, written
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hfpatch.export.native import native_model, write_stock
from hfpatch.export.runtimes import RUNTIMES, runtime_obstacle

TOOL = Path(__file__).with_name("gguf_tool.py")
SOURCE, PYTHON = os.environ.get("LLAMA_CPP"), os.environ.get("LLAMA_CPP_PYTHON")
NEEDED = "LLAMA_CPP and LLAMA_CPP_PYTHON name llama.cpp's sources and a Python with xllamacpp; see the file's docstring"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not (SOURCE and PYTHON), reason=NEEDED)]

PROMPTS = [torch.randint(5, 90, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (7, 40)]
MOST = 0.002  # of log-probabilities, by their spread; where an activation is GELU, ggml tabulates it in half precision
WRONG = 0.1  # at least, where another function is computed


@dataclass(frozen=True)
class Row:
    """A model, the architecture that it is written as (None: it is unpatched), and what its name is in the report."""

    name: str
    family: str
    patches: tuple[dict[str, Any], ...]
    target: str | None
    options: dict[str, Any]

    def model(self) -> Any:
        made = case(self.family, MASKED if self.family == "bert" else LM, (), *self.patches, **self.options).model()
        return made if self.target is None else native_model(made, self.target)


def row(family: str, target: str | None, *patches: dict[str, Any], **options: Any) -> Row:
    asked = "; ".join(f"{name}={value}" for one in (*patches, options) for name, value in one.items())
    return Row(f"{family} -> {target}: {asked}", family, patches, target, options)


THETA = {"pos": "rope:theta=500"}
RMS_ROPE, SWIGLU = RMS_ | ROPE, {"norm": "layer:bias=false", "pos": "rope", "mlp": "swiglu", "init": "reset"}
SPIECE = {"vocab_size": 128}  # the converter names tokens up to 107
LINEAR = {"pos": 'rope:scaling={"rope_type":"linear","factor":4.0}'}
CONTROLS = [row(family, None) for family in ("gpt2", "llama", "qwen2", "mistral")]
CONTROLS += [row(family, None, **SPIECE) for family in ("gemma", "nemotron")]
TAKEN = [
    row("gpt2", "gpt2", RMS_),
    row("gpt2", "gpt2", NOPE),
    row("gpt2", "gpt_neox", RMS_ROPE),
    row("gpt2", "gpt_neox", {"pos": "rope:partial=0.5"}),
    row("gpt2", "gpt_neox", ROPE, activation_function="gelu"),
    row("gpt2", "starcoder2", RMS_ROPE),
    row("gpt2", "starcoder2", THETA),
    row("gpt2", "starcoder2", YARN),
    row("gpt2", "jais2", ROPE, activation_function="relu2"),
    row("gpt2", "llama", SWIGLU, RMS_),
    row("nemotron", "arcee", *NO_SHIFT, {"pos": "rope:partial=1.0"}),
    row("llama", "llama", THETA),
    row("llama", "llama", YARN),
    row("llama", "llama", LLAMA3),
    row("llama", "llama", NOPE),
    row("llama", "stablelm", {"norm": "layer"}, rms_norm_eps=1e-5),
    row("llama", "olmo", {"norm": "layer"}, rms_norm_eps=1e-5),
    row("qwen2", "qwen2", THETA),
    row("qwen2", "llama", NOPE),
    row("mistral", "mistral", NOPE),
    row("nemotron", "nemotron", RMS_, **SPIECE),
    row("nemotron", "nemotron", THETA, **SPIECE),
    row("nemotron", "nemotron", LINEAR, **SPIECE),
    row("gpt2", "nemotron", RMS_ROPE, activation_function="relu2", **SPIECE),
]
REFUSED = [
    row("gpt2", "gpt_neox", THETA),  # converts, and rotates by another base
    row("gpt2", "gpt_neox", NOPE),
    row("gpt2", "jais2", ROPE),  # another activation
    row("gpt2", "starcoder2", LLAMA3),
    row("gpt2", "starcoder2", NOPE),
    row("gpt2", "falcon", ROPE),  # a second norm
    row("gpt2", "arcee", *NO_SHIFT, ROPE, activation_function="relu2"),  # biases
    row("gpt2", "llama", *NO_SHIFT, ROPE, {"mlp": "geglu"}),
    row("opt", "mpt", {"pos": "alibi"}, **PLAIN_OPT),
    row("llama", "smollm3", NOPE),
    row("llama", "stablelm", {"norm": "layer"} | THETA, rms_norm_eps=1e-5),
    row("qwen2", "qwen2", NOPE),
    row("bert", "jina_embeddings_v3", ROPE),
    row("gemma", "gemma", THETA, **SPIECE),
    row("gemma", "gemma", NOPE, **SPIECE),
    row("nemotron", "nemotron", YARN, **SPIECE),
    row("gpt2", "nemotron", ROPE, **SPIECE),
]


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, fewer than the models' 97 tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:88]
    merges = [(letter, letter) for letter in letters[:3]]
    words = ["<p>", "<s>", "</s>", "<u>", *letters, *("".join(pair) for pair in merges)]
    inner = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges, unk_token="<u>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    names = {"pad_token": "<p>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<u>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def run(*arguments: Any) -> Any:
    """What the tool prints, or the end of its error."""
    done = subprocess.run(
        [str(PYTHON), str(TOOL), *map(str, arguments)], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[-1].removeprefix("RESULT ")) if found else f"failed: {done.stderr[-300:]}"


ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[float | str, str | None]]:
    """By row: the largest difference or why there is none, and what the table says against it."""
    place, rows = tmp_path_factory.mktemp("gguf"), [*CONTROLS, *TAKEN, *REFUSED]
    made = {place / str(index): (one, one.model()) for index, one in enumerate(rows)}
    for folder, (_, model) in made.items():
        save(model, folder)
    failed = run("convert", SOURCE, *made)
    assert isinstance(failed, dict), failed
    found: dict[str, tuple[float | str, str | None]] = {}
    for folder, (one, model) in made.items():
        outcome: float | str = failed[str(folder)] or max(difference(model, folder, prompt) for prompt in PROMPTS)
        found[one.name] = (outcome, runtime_obstacle(model, "llama.cpp"))
        print(f"{one.name}: {outcome}; {found[one.name][1]}")
    return found


def save(model: Any, folder: Path) -> None:
    """As `export_model` saves it, and with a tokenizer that transformers 4 opens."""
    write_stock(model, folder)
    with_tokenizer(folder)


def with_tokenizer(folder: Path) -> None:
    tokenizer().save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))


def difference(model: Any, folder: Path, prompt: list[int]) -> float:
    """Of log-probabilities, by their spread; infinite where the file doesn't load."""
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    found = run("score", f"{folder}.gguf", model.config.vocab_size, prompt)
    return float("inf") if isinstance(found, str) else largest(torch.tensor(found), expected)


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


@pytest.mark.parametrize("one", [*CONTROLS, *TAKEN], ids=lambda one: one.name)
def test_taken_and_equal(one: Row, measured: dict[str, tuple[float | str, str | None]]) -> None:
    outcome, against = measured[one.name]
    assert against is None
    assert isinstance(outcome, float), outcome
    assert outcome <= MOST


@pytest.mark.parametrize("one", REFUSED, ids=lambda one: one.name)
def test_refused_for_a_reason(one: Row, measured: dict[str, tuple[float | str, str | None]]) -> None:
    """The converter or the build fails, or computes another function: each refusal spares somebody that."""
    outcome, against = measured[one.name]
    assert against
    assert isinstance(outcome, str) or outcome > WRONG


def test_the_figures(measured: dict[str, tuple[float | str, str | None]], record: Any) -> None:
    """What patched exports differ by is what unpatched models do, and far from what a refused one would."""
    controls = {one.target or one.family: float(measured[one.name][0]) for one in CONTROLS}
    found = {one.name: float(measured[one.name][0]) for one in TAKEN}
    outcomes = [measured[one.name][0] for one in REFUSED]
    wrong = [outcome for outcome in outcomes if isinstance(outcome, float) and outcome < float("inf")]
    assert max(found.values()) < 4 * max(controls.values())
    record(
        "xllamacpp",
        f"GGUF; native, chosen by serve=: {len(TAKEN)} exports of {len({one.target for one in TAKEN})} architectures",
        "equal",
        f"at most {max(found.values()):.0e} of the log-probabilities' spread",
        ", ".join(f"unpatched {name} {error:.0e}" for name, error in controls.items()),
        PYTHON,
    )
    record(
        "xllamacpp",
        f"GGUF; native, refused by serve=: {len(REFUSED)} exports",
        f"{len(REFUSED) - len(wrong)} fail to convert or to load, {len(wrong)} would be wrong",
        f"at least {min(wrong):.0e}",
        python=PYTHON,
    )


def test_every_class_of_the_table_is_measured() -> None:
    assert RUNTIMES["llama.cpp"].keys() == {type(one.model()).__name__ for one in (*CONTROLS, *TAKEN)}


def test_a_patched_class_is_refused_by_its_name(tmp_path: Path, record: Any) -> None:
    """Whatever the patch is. By the host's name the remote form would be taken, and what is made of it is wrong."""
    model, folders = patched(("llama", "nope")), {name: tmp_path / name for name in ("plugin", "remote", "host")}
    for name, folder in folders.items():
        written(model, "remote" if name == "host" else name, folder)
        with_tokenizer(folder)
    file = folders["host"] / "config.json"
    file.write_text(file.read_text().replace('"HfpatchLlamaForCausalLM"', '"LlamaForCausalLM"'))
    failed = run("convert", SOURCE, *folders.values())
    assert all("HfpatchLlamaForCausalLM" in failed[str(folders[name])] for name in ("plugin", "remote"))
    assert failed[str(folders["host"])] is None
    control = max(difference(model, folders["host"], prompt) for prompt in PROMPTS)
    assert WRONG < control < float("inf")
    figure = f"Llama without positions under its host's name {control:.0e}"
    record("xllamacpp", "GGUF; plugin and remote form", "refused by the class's name", "", figure, PYTHON)
