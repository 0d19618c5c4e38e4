"""Patching a checkpoint whose weights are mapped from its files: as in memory, to the bit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import measure_large
import pytest
import torch
import zoo
from checkpoint_edits import weights_of, with_config, with_weights
from safetensors import safe_open
from sampled import sampled
from tiny_models import patch, tiny
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from typer.testing import CliRunner

import hfpatch
from hfpatch.checkpoint import by_name, mapped_weights
from hfpatch.cli import app
from hfpatch.core import transaction
from hfpatch.core.mapped import MAPPED, unload_after_forward
from hfpatch.errors import FingerprintWarning, FreshHeadWarning
from hfpatch.measure.outputs import outputs_of
from hfpatch.runtime.patch_errors import CheckpointError

CAUSAL, MASKED, SEQ2SEQ = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
CASES = {
    "an exact norm under a tied head": ("gpt2", CAUSAL, "--norm rms"),
    "gates with fresh weights": ("gpt2", CAUSAL, "--mlp swiglu --init reset"),
    "scaled branches": ("gpt2", CAUSAL, "--norm deepnorm"),
    "a repair": ("gpt2", CAUSAL, "--norm dyt --calibration self --sequences 4 --length 8"),
    "the base alone": ("llama", CAUSAL, "--norm dyt --head AutoModel"),
    "norms after norms": ("bert", MASKED, "--norm rms --pos rope"),
    "relative positions": ("t5", SEQ2SEQ, "--norm dyt --pos rope"),
    "a longer table": ("opt", CAUSAL, "--norm rms --pos learned:max_positions=128"),
    "merged experts": ("mixtral", CAUSAL, "--norm dyt"),
}


@pytest.fixture(autouse=True)
def matrices_go_to_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction, "_LARGE", 4096)  # all but gains, shifts and biases


def sharded(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def called(*args: Any) -> str:
    result = CliRunner().invoke(app, [str(one) for one in args], terminal_width=200)
    assert result.exit_code == 0, result.output
    return result.output


def places(folder: Path) -> dict[str, str]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= dict.fromkeys(file.keys(), path.name)
    return found


def stored(folder: Path, head: str | None = None) -> Any:
    return by_name.open_model(str(folder), head, False, stored=True)


def in_files(model: PreTrainedModel) -> list[str]:
    """The Parameters that lie in a file that is mapped into memory."""
    ranges = [(torch.frombuffer(one, dtype=torch.uint8).data_ptr(), len(one)) for one in vars(model)[MAPPED]._maps]
    within = lambda address: any(0 <= address - start < length for start, length in ranges)  # noqa: E731
    return [name for name, parameter in model.named_parameters() if within(parameter.data_ptr())]


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES)
def test_the_command_gives_what_it_gives_in_memory(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, head, options = CASES[case]
    model = zoo.tiny(family, auto_class=head)[0] if family == "mixtral" else tiny(family, head)
    folder = sharded(model, tmp_path / "model")
    words = [*options.split(), "--max-shard-size", "20KB"]
    said = called("patch", folder, tmp_path / "streamed", *words)
    monkeypatch.setattr(by_name, "files_of", lambda *names: None)
    assert said == called("patch", folder, tmp_path / "memory", *words).replace("memory", "streamed")
    streamed, memory = weights_of(tmp_path / "streamed"), weights_of(tmp_path / "memory")
    assert streamed.keys() == memory.keys()
    for name, value in memory.items():
        assert streamed[name].dtype == value.dtype, name
        assert torch.equal(streamed[name], value), name
    for file in [path.name for path in (tmp_path / "memory").glob("*.json") if "weights" not in path.name]:
        if "index" not in file:
            assert (tmp_path / "streamed" / file).read_text() == (tmp_path / "memory" / file).read_text()
    after = places(tmp_path / "streamed")
    assert after == places(tmp_path / "memory")
    index = json.loads((tmp_path / "streamed" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == after
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in streamed.values())
    assert "config.json is the one that was saved" in called("verify", tmp_path / "streamed")


def test_other_shards_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte the files that safetensors writes: header, order and padding."""
    folder = sharded(tiny("gpt2", CAUSAL).to(torch.bfloat16), tmp_path / "model")
    for name in ("streamed", "memory"):
        for size in ("", "30KB"):
            more = ("--max-shard-size", size) if size else ()
            called("patch", folder, tmp_path / f"{name} {size}", "--norm", "rms", *more)
        monkeypatch.setattr(by_name, "files_of", lambda *names: None)
    for size in ("", "30KB"):
        files, others = (sorted((tmp_path / f"{one} {size}").glob("*.safetensors")) for one in ("streamed", "memory"))
        assert [path.name for path in files] == [path.name for path in others]
        assert (len(files) > 1) == (size == "30KB")
        assert [path.read_bytes() for path in files] == [path.read_bytes() for path in others]


def test_a_patch_reads_no_weight_for_good(tmp_path: Path) -> None:
    """Everything is in files before; afterwards the large weights are, folded ones and a tied embedding included."""
    folder = sharded(tiny("gpt2", CAUSAL), tmp_path / "model")
    contents = {path: path.read_bytes() for path in folder.iterdir()}
    model, expected = stored(folder), by_name.open_model(str(folder), None, False)
    assert in_files(model) == [name for name, _ in model.named_parameters()]
    with unload_after_forward(model):
        for one in (model, expected):
            hfpatch.patch_model(one, norm="rms")
        vars(model)[MAPPED].release()
    large = [name for name, parameter in model.named_parameters() if parameter.nbytes >= transaction._LARGE]
    assert "transformer.h.0.mlp.c_proj.weight" in large
    assert set(large) <= set(in_files(model))
    assert not torch.equal(model.get_parameter(large[-1]), stored(folder).get_parameter(large[-1]))  # control
    assert all(torch.equal(value, expected.get_parameter(name)) for name, value in model.named_parameters())
    assert model.lm_head.weight is model.transformer.wte.weight
    assert contents == {path: path.read_bytes() for path in folder.iterdir()}


def test_a_failed_patch_gives_back_what_the_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sharded(tiny("gpt2", CAUSAL), tmp_path / "model")
    model, before = stored(folder), by_name.open_model(str(folder), None, False).state_dict()
    monkeypatch.setattr("hfpatch.patch.write_outcomes", lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hfpatch.patch_model(model, norm="rms")
    vars(model)[MAPPED].release()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert in_files(model) == [name for name, _ in model.named_parameters()]


def setting(**changes: Any) -> Callable[[Path], Any]:
    return lambda folder: with_config(folder, **changes)


def without(folder: Path, glob: str) -> Path:
    """The checkpoint without the tensors of these names."""
    lost = [name for name in weights_of(folder) if fnmatch(name, glob)]
    assert lost
    with_weights(folder, lambda weights: [weights.pop(name) for name in lost])
    return folder


def pickled(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    torch.save({}, folder / "pytorch_model.bin")


def of_odd_names(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    for path in folder.glob("model-*"):
        path.rename(folder / path.name.replace("model-", "part-"))
    index.write_text(index.read_text().replace("model-", "part-"))


MORE: dict[str, Callable[[Path], Any]] = {
    "a patch": lambda folder: sharded(patch(tiny("gpt2", CAUSAL), norm="dyt"), folder),
    "quantized weights": setting(quantization_config={"quant_method": "fp8"}),
    "an adapter": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "pickles": pickled,
    "a file that config.json names": setting(transformers_weights="other.safetensors"),
    "files of odd names": of_odd_names,
    "a distributed save": lambda folder: (folder / "shard-00001-model-00001-of-00001.safetensors").touch(),
    "code of the repository": setting(auto_map={"AutoModel": "modeling.My"}),
}


@pytest.mark.parametrize("change", MORE.values(), ids=MORE)
def test_whatever_needs_more_is_opened_by_transformers(change: Any, tmp_path: Path) -> None:
    folder = sharded(tiny("gpt2", CAUSAL), tmp_path / "model")
    config = AutoConfig.from_pretrained(folder)
    assert mapped_weights.files_of(str(folder), config)  # control
    change(folder)
    assert mapped_weights.files_of(str(folder), AutoConfig.from_pretrained(folder)) is None


LACKING: dict[str, tuple[str, str, str, dict[str, Any], str]] = {
    "of the body, under another head": ("gpt2", CAUSAL, "transformer.h.0.mlp.*", {}, "AutoModelForTokenClassification"),
    "of a body that nothing says the class of": ("gpt2", "AutoModel", "h.0.mlp.*", {"architectures": None}, ""),
    "a table that a head is tied to": ("gpt2", CAUSAL, "transformer.wte.weight", {}, ""),
    "the head that it was saved with": ("llama", CAUSAL, "lm_head.weight", {}, ""),
    "of a head beside no base": ("t5", SEQ2SEQ, "decoder.block.0.layer.0.*", {}, ""),
}


either_way = pytest.mark.parametrize("streamed", [True, False], ids=["streamed", "in memory"])


@pytest.mark.sample(9)
@either_way
@pytest.mark.parametrize("case", LACKING)
def test_a_weight_that_the_file_lacks_is_named(case: str, streamed: bool, tmp_path: Path) -> None:
    family, head, glob, settings, asked = LACKING[case]
    tiny(family, head).save_pretrained(tmp_path)
    with_config(without(tmp_path, glob), **settings)
    with pytest.raises(CheckpointError, match=r"lacks \d+ weights .* which would be random") as caught:
        by_name.open_model(str(tmp_path), asked or None, False, stored=streamed)
    assert glob.strip("*") in str(caught.value)


@either_way
def test_a_sentence_encoder_whose_config_names_another_class(streamed: bool, tmp_path: Path) -> None:
    """all-mpnet-base-v2 says MPNetForMaskedLM and has no such head: its encoder is opened, if it is whole."""
    tiny("bert").save_pretrained(tmp_path)
    with_config(tmp_path, architectures=["BertForMaskedLM"])
    with pytest.raises(CheckpointError, match=r"lacks \d+ weights of BertForMaskedLM .*--head AutoModel"):
        by_name.open_model(str(tmp_path), None, False, stored=streamed)
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert type(by_name.open_model(str(tmp_path), None, False, stored=streamed)).__name__ == "BertModel"
    without(tmp_path, "encoder.layer.0.*")
    with pytest.raises(CheckpointError, match=r"lacks \d+ weights"):
        by_name.open_model(str(tmp_path), None, False, stored=streamed)


def test_a_patched_checkpoint_under_another_head(tmp_path: Path) -> None:
    """What is fresh is told there, too; what it lacks of its base is refused."""
    patch(tiny("llama", CAUSAL), norm="dyt").save_pretrained(tmp_path)
    with pytest.warns(FreshHeadWarning, match="has no weights for score of LlamaForSequenceClassification"):
        stored(tmp_path, "AutoModelForSequenceClassification")
    with pytest.raises(CheckpointError, match=r"lacks 3 weights that were saved.*model\.layers\.0\.mlp"):
        stored(without(tmp_path, "model.layers.0.mlp.*"))
    (tmp_path / "hfpatch_weights.json").unlink()
    lacks = r"lacks 3 weights of LlamaForCausalLM \(model\.layers\.0\.mlp\."
    with pytest.warns(FingerprintWarning), pytest.raises(CheckpointError, match=lacks):
        stored(tmp_path)


def seeded_outputs(model: PreTrainedModel, given: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    with torch.no_grad():
        return outputs_of(model.eval(), given)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "model_type",
    [*sampled(zoo.model_types(), 8), *(pytest.param(one, marks=pytest.mark.sweep) for one in zoo.model_types())],
)
def test_a_model_in_files_is_the_model(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, buffers, settings and outputs of every model type, to the bit."""
    try:
        model, given = zoo.tiny(model_type)
    except zoo.Unbuildable as error:
        pytest.skip(str(error))
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    try:
        torch.manual_seed(0)
        memory = type(model).from_pretrained(tmp_path, config=AutoConfig.from_pretrained(tmp_path), dtype="auto")
        expected = seeded_outputs(copy.deepcopy(memory), given)  # some forwards change settings and buffers
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"transformers itself doesn't open or run this tiny one: {zoo.last_line(error)}")
    files = mapped_weights.files_of(str(tmp_path), AutoConfig.from_pretrained(tmp_path))
    assert (files is None) == bool(getattr(type(memory.config), "extra_files", None))
    if files is None:
        pytest.skip("its weights lie in further files too, so they are read into memory")
    torch.manual_seed(0)
    lazy, _ = mapped_weights.open_mapped(files, type(model), str(tmp_path), AutoConfig.from_pretrained(tmp_path))
    assert lazy.config.to_dict() == memory.config.to_dict()
    ours, theirs = lazy.state_dict(), memory.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    buffers = dict(memory.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in lazy.named_buffers())
    with unload_after_forward(lazy):
        found = seeded_outputs(lazy, given)
    for name, value in expected.items():
        assert torch.equal(found[name].nan_to_num(), value.nan_to_num()), name


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.4 GB in shards of at most 0.3 GB."""
    folder = tmp_path_factory.mktemp("large") / "model"
    measure_large.make_checkpoint(folder, layers=12, width=2048, vocabulary=50272, shard=300_000_000)
    return folder


@pytest.mark.sweep
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="a process's peak is read from /proc")
@pytest.mark.parametrize("options", ["--norm rms", "--pos rope"])
def test_peak_memory_is_that_of_a_shard(options: str, large: Path, tmp_path: Path) -> None:
    """At most 1.2 times the largest shard and 1 GB, which the same command takes more than with the model in memory."""
    most = 1.2 * max(path.stat().st_size for path in large.glob("*.safetensors")) + 1e9
    words = options.split()
    assert measure_large.patch(large, tmp_path / "streamed", *words)[0] <= most
    in_memory = "import hfpatch.checkpoint.by_name as by_name; by_name.files_of = lambda *names: None"
    assert measure_large.patch(large, tmp_path / "memory", *words, before=in_memory)[0] > most
