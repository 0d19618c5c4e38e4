"""A modeling file beside the weights opens a patched checkpoint where hfpatch isn't installed, as the same model."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import CONFIGS, difference, inputs, outputs, patch, randomise, registered, tiny
from torch import nn

import hfpatch
from hfpatch import (
    NORMS,
    POSITIONS,
    RMS,
    DyT,
    Norm,
    OptionError,
    PatchError,
    RoPE,
    SwiGLU,
    UnsupportedError,
    VerificationError,
)
from hfpatch.export import remote
from hfpatch.export.modeling import FILE, modeling_file
from hfpatch.export.remote import export_remote

HEADS = {
    "gpt2": "AutoModelForCausalLM",
    "bert": "AutoModelForMaskedLM",
    "roberta": "AutoModelForSequenceClassification",
    "distilbert": "AutoModelForMaskedLM",
    "bart": "AutoModelForSeq2SeqLM",
    "opt": "AutoModelForCausalLM",
    "gpt_neo": "AutoModelForCausalLM",
    "vit": "AutoModelForImageClassification",
    "whisper": "AutoModelForSpeechSeq2Seq",
    "llama": "AutoModelForSequenceClassification",
}
FRESH = {"norm": DyT(0.4), "pos": RoPE(theta=300.0), "mlp": SwiGLU(), "init": "reset"}
REQUESTS: dict[str, dict[str, Any]] = {
    "rms exact": {"norm": "rms"},
    "rms copy": {"norm": "rms", "init": "copy"},
    "rms parametrized": {"norm": RMS(mode="parametrize")},
    "rms without shifts": {"norm": RMS(fold_bias=True)},
    "prms": {"norm": RMS(fraction=0.25)},
    "dyt": {"norm": DyT(0.4)},
    "dyt llm": {"norm": DyT("llm"), "init": "reset"},
    "derf": {"norm": "derf"},
    "layer": {"norm": "layer:bias=false"},
    "batch": {"norm": "batch"},
    "deepnorm": {"norm": "deepnorm"},
    "post": {"placement": "post"},
    "sandwich": {"placement": "sandwich"},
    "swiglu": {"mlp": SwiGLU()},
    "swiglu fresh": {"mlp": SwiGLU(), "init": "reset"},
    "geglu": {"mlp": "geglu"},
    "rope": {"pos": RoPE(theta=300.0)},
    "interleaved": {"pos": RoPE(theta=300.0, pairing="interleaved", partial=0.5)},
    "yarn": {"pos": RoPE(scaling={"rope_type": "yarn", "factor": 4.0})},
    "dynamic": {"pos": RoPE(scaling={"rope_type": "dynamic", "factor": 4.0})},
    "axial": {"pos": RoPE(axes=2)},
    "nope": {"pos": "nope"},
    "alibi": {"pos": "alibi"},
    "sinusoidal": {"pos": "sinusoidal"},
    "learned": {"pos": "learned:max_positions=128"},
    "only some": {"norm": "dyt", "pos": "rope", "only": ["*.0.*"]},
    "all": {"norm": DyT(0.4), "pos": RoPE(theta=300.0)},
    "fresh": FRESH,
}
NINE = ("gpt2", "bert", "roberta", "distilbert", "bart", "opt", "gpt_neo", "vit", "whisper")
CASES = [
    *(("gpt2", request) for request in REQUESTS if request not in ("batch", "axial", "sandwich")),
    *((family, "all") for family in NINE),
    *((family, "rms exact") for family in ("vit", "nemotron")),
    *(("bert", request) for request in ("batch", "deepnorm", "sandwich", "rms without shifts", "swiglu")),
    *(("vit", request) for request in ("axial", "deepnorm")),
    *((family, "dyt") for family in ("llama", "t5", "cohere", "convnext", "deberta")),
    *(("llama", request) for request in ("rope", "interleaved", "nope")),
    *(("t5", request) for request in ("rope", "nope")),
    ("bloom", "rope"),
]
CASES = list(dict.fromkeys(CASES))
# minutes: every family of tiny_models with every request that it takes
SWEPT = [(family, request) for family in CONFIGS for request in REQUESTS if (family, request) not in CASES]


def build(family: str, request: str) -> Any:
    model = patch(tiny(family, HEADS.get(family, "AutoModel")), **REQUESTS[request])
    return randomise(model, seed=5) if not request.startswith("rms exact") else model


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without hfpatch says of all checkpoints."""
    folder = tmp_path_factory.mktemp("remote")
    cases = [_exported(build(*case), "-".join(case), folder, heads=case[1] == "all") for case in CASES]
    own = _own_scheme(folder, "own_norm_of_a_test")
    with registered(NORMS, "own", own):  # and isn't any more when the checkpoint is opened
        model = patch(tiny("gpt2", "AutoModelForCausalLM"), norm=own(power=0.7))
        cases.append(_exported(model, "third party", folder))
    probed = _exported(build("gpt2", "fresh"), "probed", folder, tokenizer=_tokenizer())
    controls = [_spoilt(cases[0], name, folder, *lines) for name, lines in SPOILT.items()]
    return {**_asked(folder, cases, probed, controls), "probed": probed}


SPOILT = {
    "another norm": ("return F.rms_norm(", "return 1.01 * F.rms_norm("),
    "an import": ("\nimport torch\n", "\nimport hfpatch\nimport torch\n"),
    "nothing": ("self.patch_host()", "pass"),
}


def _asked(folder: Path, cases: list[Any], probed: Any = None, controls: Any = ()) -> dict[str, Any]:
    torch.save({"cases": cases, "probed": probed, "controls": list(controls)}, folder / "cases.pt")
    env = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), "TRANSFORMERS_VERBOSITY": "error"}
    script = str(Path(__file__).with_name("opener.py"))
    command = [sys.executable, "-P", script, str(folder)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    assert (folder / "answers.json").exists(), done.stderr.decode()
    return json.loads((folder / "answers.json").read_text())


def _exported(model: Any, name: str, folder: Path, heads: bool = False, tokenizer: Any = None) -> dict[str, Any]:
    export_remote(model, folder / name, tokenizer, verify=False)
    given = inputs(model)
    return {
        "name": name,
        "folder": str(folder / name),
        "auto": HEADS.get(model.config.model_type, "AutoModel"),
        "inputs": given,
        "outputs": outputs(model, **given),
        "hidden": outputs(model, **given, output_hidden_states=True),
        "keys": list(model.state_dict()),
        "heads": heads,
    }


def _spoilt(case: dict[str, Any], name: str, folder: Path, old: str, new: str) -> dict[str, Any]:
    """The same checkpoint with another line in its file."""
    path = Path(shutil.copytree(case["folder"], folder / name)) / FILE
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    return {**case, "name": name, "folder": str(folder / name)}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w1")


# In a process without hfpatch


@pytest.mark.parametrize(("family", "request_"), CASES, ids=["-".join(case) for case in CASES])
def test_it_is_the_same_model(family: str, request_: str, opened: dict[str, Any]) -> None:
    found = opened["cases"][f"{family}-{request_}"]
    assert isinstance(found, dict), found
    assert found["difference"] == 0
    assert found["again"] == 0
    assert found["keys"]
    assert found["code"]
    assert found["module"].startswith("transformers_modules.")
    assert found["model_type"] == family
    assert found["stored"] == "hfpatch"


def test_the_scheme_of_a_third_party(opened: dict[str, Any]) -> None:
    """It isn't there when the checkpoint is opened."""
    found = opened["cases"]["third party"]
    assert (found["difference"], found["again"]) == (0, 0)
    text = (Path(opened["probed"]["folder"]).parent / "third party" / FILE).read_text()
    assert "def half(h)" in text
    assert "FACTOR = 2.0" in text
    assert "own_norm_of_a_test" not in re.sub(r"^# .*$", "", text, flags=re.MULTILINE)


def test_other_heads_open(opened: dict[str, Any]) -> None:
    assert all(found["hidden"] == 0 for found in opened["cases"].values() if found["heads"])
    heads = {name: found["heads"] for name, found in opened["cases"].items() if found["heads"]}
    assert len(heads) == len(NINE)
    assert heads["gpt2-all"]["AutoModel"] == "GPT2Model"
    assert heads["bert-all"]["AutoModelForTokenClassification"] == "BertForTokenClassification"
    assert all("AutoModel" in found for found in heads.values())


def test_hfpatch_was_never_imported(opened: dict[str, Any]) -> None:
    assert opened["imported"] == []


def test_a_changed_line_is_seen(opened: dict[str, Any]) -> None:
    """Controls: what is compared goes through the file, and nothing there can import hfpatch."""
    assert opened["controls"]["another norm"] > 1e-3
    assert "hfpatch must not be needed here" in opened["controls"]["an import"]
    assert opened["controls"]["nothing"] > 1e-3


@pytest.fixture(scope="module")
def here(opened: dict[str, Any]) -> Any:
    """The probed model as hfpatch opens it."""
    return transformers.AutoModelForCausalLM.from_pretrained(opened["probed"]["folder"])


def test_generation(opened: dict[str, Any], here: Any) -> None:
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = here.generate(opened["probed"]["inputs"]["input_ids"], **options).tolist()
    assert opened["probes"]["generation"] == [expected] * 3


def test_inputs_beyond_the_old_length(opened: dict[str, Any], here: Any) -> None:
    ids = torch.arange(80)[None] % 90 + 5
    assert opened["probes"]["beyond_the_old_length"] == outputs(here, input_ids=ids)[0].sum().item()


def test_training_with_gradient_checkpointing(opened: dict[str, Any]) -> None:
    found = opened["probes"]["gradient_checkpointing"]
    assert found is not False
    assert found == 0


EXPECTED: dict[str, Any] = {
    "dtypes": [True, 0.0, "torch.float32"],
    "device_map": 0.0,
    "shards": [True, 0.0],
    "tied": True,
    "copies": [0.0, 0.0],
    "from_config": [pytest.approx(0.4), 0.0, 9],
    "missing_values": [pytest.approx(0.4)],
    "tokenizer": [3, 9],
    "loading_info": True,
    "without_trust": [True] * 6,
}


@pytest.mark.parametrize("probe", EXPECTED)
def test_one_model_in_many_ways(probe: str, opened: dict[str, Any]) -> None:
    assert opened["probes"][probe] == EXPECTED[probe]


def test_attention_can_be_chosen(opened: dict[str, Any]) -> None:
    chosen, moved = opened["probes"]["attention_implementation"]
    assert chosen == "eager"
    assert moved < 1e-4


def test_pipelines(opened: dict[str, Any], here: Any) -> None:
    generate = transformers.pipeline("text-generation", model=here, tokenizer=_tokenizer())
    expected = generate("w3 w4 w5", max_new_tokens=5, do_sample=False)[0]["generated_text"]
    assert opened["probes"]["pipeline"] == expected


def test_adapters(opened: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    assert opened["probes"]["adapters"] is True


def test_a_host_with_other_names_is_refused(opened: dict[str, Any]) -> None:
    assert re.search(r"GPT2LMHeadModel of transformers .* has no h\.\*\.ln_1", opened["probes"]["another_version"])


@pytest.mark.sweep
def test_every_family_with_every_request(tmp_path: Path) -> None:
    cases, refused = [], []
    for case in SWEPT:
        try:
            model = build(*case)
        except PatchError:  # the family doesn't take this patch
            continue
        try:
            cases.append(_exported(model, "-".join(case), tmp_path))
        except PatchError as error:
            refused.append((case, str(error)))
    answers = _asked(tmp_path, cases)["cases"]
    wrong = {name: found for name, found in answers.items() if not isinstance(found, dict) or found["difference"]}
    assert not wrong
    assert not refused
    assert len(answers) > 200


# Where hfpatch is imported


@pytest.mark.parametrize("trust", [None, False, True])
def test_hfpatch_opens_it_by_itself(trust: bool | None, tmp_path: Path) -> None:
    """Whatever is trusted: nothing of the file is run."""
    model = build("gpt2", "all")
    export_remote(model, tmp_path / "out", verify=False)
    (tmp_path / "out" / FILE).write_text("raise SystemError('this file was run')\n")
    for auto in ("AutoModelForCausalLM", "AutoModel"):
        again = getattr(transformers, auto).from_pretrained(tmp_path / "out", trust_remote_code=trust)
        assert type(again).__module__.startswith("transformers.models")
        assert (
            type(again) is type(model if auto == "AutoModelForCausalLM" else model.transformer) or auto == "AutoModel"
        )
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=trust)
    assert difference(model, again) == 0
    assert not hasattr(again.config, "auto_map")
    again.save_pretrained(tmp_path / "again")
    assert "auto_map" not in json.loads((tmp_path / "again/config.json").read_text())


def test_another_files_classes_stay_in_a_config() -> None:
    from hfpatch.checkpoint import without_remote_code

    stored = {"auto_map": {"AutoModel": "me/it--modeling_hfpatch.A", "AutoConfig": "other.B"}, "x": 1}
    assert without_remote_code(stored) == {"auto_map": {"AutoConfig": "other.B"}, "x": 1}
    assert without_remote_code({"auto_map": {"AutoModel": "modeling_hfpatch.A"}}) == {}


# The file


@pytest.mark.parametrize(("family", "request_"), [("gpt2", "all"), ("bert", "fresh"), ("vit", "axial"), ("t5", "rope")])
def test_the_file_stands_alone(family: str, request_: str) -> None:
    text = modeling_file(build(family, request_)).text
    roots = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            roots.add(str(node.module).partition(".")[0])
    assert roots - {"torch", "transformers"} <= set(sys.stdlib_module_names)
    for path in (str(Path(hfpatch.__file__).parents[1]), str(Path.home()), sys.prefix):
        assert path not in text
    assert max(map(len, text.splitlines())) <= 120
    assert "Apache" in text.splitlines()[0]


@pytest.mark.parametrize(
    ("family", "request_"), [("gpt2", "all"), ("bert", "fresh"), ("vit", "axial"), ("gpt2", "only some")]
)
def test_the_file_is_tidy(family: str, request_: str, tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    (tmp_path / FILE).write_text(modeling_file(build(family, request_)).text)
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "--isolated", str(tmp_path)], check=True)
    subprocess.run([*ruff, "format", "--isolated", "--line-length", "120", "--check", str(tmp_path)], check=True)


def test_the_table_names_layers_once() -> None:
    text = modeling_file(build("gpt2", "rms exact")).text
    assert 'places(self, "h.*.ln_1", "h.*.ln_2", "ln_f")' in text
    some = modeling_file(build("gpt2", "only some")).text
    assert "h.0.ln_1" in some
    assert "h.*" not in some.partition("def patch_host")[2]


def test_a_small_patch_is_a_small_file() -> None:
    assert "class RoPE" not in modeling_file(build("bert", "dyt")).text
    assert len(modeling_file(build("bert", "dyt")).text.splitlines()) < 400


# What is refused, and what a failure leaves behind


def test_the_check_passes_and_cleans_up(tmp_path: Path) -> None:
    model = build("gpt2", "all")
    folder = export_remote(model, tmp_path / "deep" / "out", max_shard_size="20KB")
    assert folder == tmp_path / "deep" / "out"
    assert (folder / "model.safetensors.index.json").exists()
    assert os.listdir(tmp_path / "deep") == ["out"]
    assert not hasattr(model.config, "auto_map")
    assert type(model).__module__ == "transformers.models.gpt2.modeling_gpt2"


def test_a_file_that_computes_something_else_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = remote.modeling_file

    def other(model: Any) -> Any:
        file = made(model)
        file.text = file.text.replace("torch.tanh(self.alpha * h)", "torch.tanh(self.alpha * h * 1.001)")
        return file

    monkeypatch.setattr(remote, "modeling_file", other)
    with pytest.raises(VerificationError, match="opened without hfpatch its outputs differ by") as caught:
        export_remote(build("gpt2", "dyt"), tmp_path / "out")
    assert 0 < float(caught.value.measured) < 10
    assert os.listdir(tmp_path) == []


def test_an_unpatched_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="isn't patched: save_pretrained is all"):
        export_remote(tiny("gpt2"), tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_folder_with_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(OptionError, match="isn't an empty folder"):
        export_remote(build("gpt2", "dyt"), tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]


@pytest.mark.parametrize("option", ["push_to_hub", "state_dict"])
def test_options_that_would_save_something_else(option: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=option):
        export_remote(build("gpt2", "dyt"), tmp_path / "out", **{option: {}})


def test_a_model_without_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = transformers.GPT2Model(transformers.GPT2Config(n_layer=1))
    with pytest.raises(UnsupportedError, match="no weights"):
        export_remote(patch(model, norm="dyt"), tmp_path / "out")


def test_a_head_that_no_auto_class_opens(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", transformers.GPT2DoubleHeadsModel), norm="dyt")
    with pytest.raises(UnsupportedError, match="no Auto class"):
        export_remote(model, tmp_path / "out")
    assert os.listdir(tmp_path) == []


# Schemes of third parties

OWN = '''
"""A norm of one's own."""

from dataclasses import dataclass

import torch
{more}
from hfpatch.norms import AffineNorm, Norm

FACTOR = 2.0


def half(h):
    return {half}


class OwnNorm(AffineNorm):
    """half(x / max |x|)."""

    def __init__(self, facts, kind, gain, shift, power):
        super().__init__(facts, kind, gain, shift)
        self.power = power

    def normalise(self, h):
        return half(h / h.abs().amax(-1, keepdim=True).clamp_min(1e-6)).sign().mul(h.abs() ** self.power)


@dataclass(frozen=True)
class Own(Norm):
    """Its scheme."""

    power: float = 0.5

    def build(self, facts, gain, shift, like):
        return OwnNorm(facts, self.name, gain, shift, self.power)
'''


def _own_scheme(folder: Path, name: str, more: str = "", half: str = "h / FACTOR") -> Any:
    (folder / f"{name}.py").write_text(OWN.format(more=more, half=half))
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name).Own
    finally:
        sys.path.pop(0)


def test_a_scheme_that_needs_another_package(tmp_path: Path) -> None:
    own = _own_scheme(tmp_path, "greedy_norm_of_a_test", "import numpy", "h / float(numpy.float64(FACTOR))")
    with registered(NORMS, "own", own):
        model = patch(tiny("gpt2"), norm=own())
        with pytest.raises(UnsupportedError, match=r"half of greedy_norm_of_a_test .*: it needs numpy"):
            modeling_file(model)


def test_a_scheme_from_inside_a_function() -> None:
    from hfpatch.norms import AffineNorm

    class Inner(AffineNorm):
        def normalise(self, h: Any) -> Any:
            return h / 2

    class Local(Norm):
        def build(self, facts: Any, gain: Any, shift: Any, like: Any) -> Any:
            return Inner(facts, self.name, gain, shift)

    with registered(NORMS, "local", Local):
        model = patch(tiny("gpt2"), norm=Local())
        with pytest.raises(UnsupportedError, match="isn't defined at the top of a file"):
            modeling_file(model)


def test_every_scheme_is_tried() -> None:
    """A scheme that joins hfpatch joins these tests."""
    tried = [scheme for request in REQUESTS.values() for scheme in request.values()]
    names = {
        str(scheme).partition(":")[0] if isinstance(scheme, str) else getattr(scheme, "name", None) for scheme in tried
    }
    assert set(NORMS) | set(POSITIONS) <= names


def test_nothing_stays_registered() -> None:
    modeling_file(build("llama", "dyt"))
    known = transformers.AutoModel._model_mapping._extra_content
    assert not [config for config in known if "generated" in config.__module__]
    assert not [name for name in sys.modules if name.endswith("modeling.generated")]
    assert isinstance(transformers.AutoModel.from_config(tiny("llama").config).layers, nn.ModuleList)
