"""Malicious and broken checkpoints: each is refused with a typed error that says why, and none of them runs anything.

Guards and fingerprints that are malformed have tables of their own (test_guard.py, test_fingerprint.py); what an edit
may hold is tested in runtime/test_edit_text.py.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_edits import stored_in, with_config, with_record
from safetensors.torch import load_file
from tiny_models import difference, inputs, outputs, patch, tiny
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hfpatch.runtime.patch_errors import CheckpointError, PatchError
from hfpatch.schemes.rope import RoPE

Damage = Callable[[Path], Any]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in one file and, in a folder beside it, in shards."""
    folder = tmp_path_factory.mktemp("saved")
    model = patch(tiny("gpt2"), norm="dyt", pos=RoPE(theta=300.0, scaling={"rope_type": "linear", "factor": 2.0}))
    model.save_pretrained(folder / "one")
    model.save_pretrained(folder / "shards", max_shard_size="20KB")
    assert len(list((folder / "shards").glob("*.safetensors"))) > 3
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint in one file."""
    return shutil.copytree(saved / "one", tmp_path / "copy")


@pytest.fixture(autouse=True)
def nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the malicious ones would call."""
    monkeypatch.setattr(os, "system", pytest.fail)


def files(folder: Path) -> dict[str, bytes]:
    """All there is under a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# config.json


def text(change: Callable[[str], str]) -> Damage:
    def damage(folder: Path) -> None:
        config = folder / "config.json"
        config.write_text(change(config.read_text()))

    return damage


def setting(**changes: Any) -> Damage:
    return lambda folder: with_config(folder, **changes)


def entry(**changes: Any) -> Damage:
    """Another entry in the patch record."""
    return lambda folder: with_record(folder, **changes)


def edit(value: Any) -> Damage:
    """One more edit in the patch record."""
    return lambda folder: with_config(folder, lambda config: config["hfpatch"]["edits"].append(value))


def rope(value: str, option: str = "theta") -> Damage:
    """The edit that puts the rotary embeddings in, with another option."""

    def damage(folder: Path) -> None:
        edits = stored_in(folder)["hfpatch"]["edits"]
        (place,) = [i for i, edit in enumerate(edits) if " = RotaryEmbedding(" in edit]
        edits[place] = f"{edits[place].partition(' = ')[0]} = RotaryEmbedding(8, {option}={value})"
        with_record(folder, edits=edits)

    return damage


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


def twice(stored: str) -> str:
    """A second record after the first, which JSON lets win."""
    return stored.rstrip().removesuffix("}") + ', "hfpatch": {"version": 99}}'


UNREAD, GOOD = "can't be read", "h.*.ln_1 | h.*.ln_2 | ln_f = RMSNorm(eps=1e-05)"
OF_MODELS = EDITED, MISSING = "was edited after it was saved, and doesn't open", r"x\.safetensors is missing"
RUN = "__import__('os').system('true')"
NUMBERS = ("1e400", "Infinity", "NaN", "9" * 5000, nested(400), nested(9_000))
CODE = (
    *(RUN, f"RMSNorm(eps={RUN})", "os.system('true')", "().__class__.__base__", "(lambda: 1)()", "f'{1}'", "RMSNorm"),
    *("[1 for _ in ()]", "9 ** 9 ** 9", "RMSNorm(*[1])", "RMSNorm(**{'eps': 1})", "'\0'"),
    *("-" * 19_000 + "1", "x" + ".x" * 9_000),
)
PLACES = (
    *("_modules", "_parameters", "_buffers", "_forward_hooks", "forward", "training", "train", "config", "__class__"),
    *("__dict__", "__call__", "state_dict", "_load_from_state_dict", "ln_1()", "ln_1[0]", "../x", ""),
)
ENTRIES: list[dict[str, Any]] = [  # other entries in the record; `...` takes one out
    *({"version": value} for value in (..., 0, "3", True, 3.0, 4)),
    *({"base_model_type": value} for value in (..., None, ["gpt2"], "", "no_such_family", "hfpatch")),
    *({"activation": []}, {"norm": [], "pos": [], "mlp": []}),
    *({"any_length": value} for value in (1, None)),
    *({name: {}} for name in ("guarded", "fingerprint", "repair_report")),  # which 0.2 had
    *({"request": value} for value in (..., {"norm": "rms"}, None, [{"norm": "rms"}] * 1001)),
    *({"edits": value} for value in (..., None, GOOD, {"ln_f": "RMSNorm()"}, [GOOD] * 10_001)),
]
MALFORMED: list[Any] = [  # one more edit
    *(None, [GOOD], "", "ln_f.eps = 1e999", "ln_f.eps = b'1'", "ln_f.eps = {1}"),
    *(f"{place}.@centre = {value}" for place, value in (("drop", "'-1'"), ("drop", True), ("drop", 9))),
    *(".@centre = -1", "drop.@centre = None", "wte.@scale = '5'", "wte.@scale = 0", "wte.@scale = -1.5"),
    *(f"h.*.attn.@lens = {value}" for value in ("1", "RMSNorm()", "MeanRow()", "Fused('c_attn')")),
    *("h.*.attn.@lens | ln_f = None", "wte.@hook = 1"),
]
UNFIT = [  # one more edit, of modules that were renamed since, or of another file's record: not half a patch
    *("nowhere = RMSNorm()", "h.7.ln_1 = RMSNorm()", "nowhere.@centre = -1", "h.*.nowhere.@lens = None"),
    *("ln_f = DynamicTanh(nonsense=1)", "ln_f = DynamicTanh(eps=1e-05, alpha='llm')"),
    *("ln_f = DynamicTanh('a', 'b', 'c', 'd')", "ln_f = RMSNorm(eps=1e-05, gain=None, shift=None)"),
    *("ln_f = Fused('c_attn')", "ln_f = 7", "wte.weight = 7", "ln_f.weight = RMSNorm()", "wte.weight = Rows('a')"),
    *("h.*.attn.rotary_emb = RotaryEmbedding('8', theta=[])", "h.*.attn.@lens = AttentionLens()"),
    "ln_f.@scale = 1.0 = 1",
    *(f"h.*.mlp.c_fc = GatedLinear({arguments})" for arguments in ("5", "None", "'no such'", "'geglu', True")),
    *(f"h.*.mlp.c_fc = GatedLinear('geglu', {more})" for more in ("-4, True, True", "40, True", "40, 'a', True")),
    *(f"h.*.mlp.c_fc = GatedLinear('geglu', scale={scale})" for scale in ("0.0", "'a'", "True")),
    *(f"h.*.mlp.act = GatedActivation(act={act})" for act in ("5", "'NoSuch'", "'Fused'", "'MultiheadAttention'")),
]
CONFIGS: dict[str, tuple[Damage, type[Exception], str]] = {
    **{f"a record {value!r}": (setting(hfpatch=value), CheckpointError, "") for value in (None, [], "rms", 3, {})},
    **{f"entries {repr(value)[-40:]}": (entry(**value), CheckpointError, "") for value in ENTRIES},
    **{f"one more edit {value!r}": (edit(value), CheckpointError, "") for value in MALFORMED},
    **{f"unfit {value}": (edit(value), PatchError, re.escape(value.partition(" = ")[0])) for value in UNFIT},
    **{f"theta {value:.20}": (rope(value), CheckpointError, UNREAD) for value in NUMBERS},
    **{f"an edit {value:.30}": (edit(f"ln_f = {value}"), CheckpointError, UNREAD) for value in CODE},
    **{
        f"an edit {value}": (edit(f"ln_f = {value}"), CheckpointError, "no component called")
        for value in ("NoSuchNorm()", "eval('1')", "__import__('os')")
    },
    **{f"an edit of {name}": (edit(f"h.0.{name} = {{}}"), CheckpointError, "isn't an edit") for name in PLACES},
    "an edit too long": (rope(nested(100_000)), CheckpointError, "at most 20000 characters"),
    "scaling as code": (rope(RUN, "scaling"), CheckpointError, UNREAD),
    "edits nested too deeply for JSON": (
        text(lambda s: s.replace('"edits": [', '"edits": [' + "[" * 100_000 + "]" * 100_000 + ",")),
        RecursionError,
        "recursion",
    ),
    "a file as a base": (entry(base_model_type="../../etc/passwd"), CheckpointError, "transformers .* doesn't know"),
    "a version of 4,000 digits": (
        text(lambda s: ('"version": ' + "9" * 4000).join(s.rsplit('"version": 3', 1))),
        CheckpointError,
        r"has version 9+.*this hfpatch reads version 3\. .*pip install -U",
    ),
    "a hundred thousand entries": (
        entry(**{f"x{i}": 0 for i in range(100_000)}),
        CheckpointError,
        "unknown or missing",
    ),
    "a record twice": (text(twice), CheckpointError, "has version 99"),
    **{
        f"architectures {value!r}": (setting(architectures=value), CheckpointError, "architectures")
        for value in ("x", [5], {"x": 1}, [None])
    },
    **{  # refused before a model of that family is built, of whatever size
        f"a record of {base}": (entry(base_model_type=base), CheckpointError, rf"'{base}'.*'gpt2'")
        for base in ("gpt_neo", "bert", "openai-gpt")
    },
    **{
        f"auto_map {value!r}": (setting(auto_map=value), CheckpointError, "auto_map")
        for value in ("x", ["x"], {"AutoModel": 5}, {"AutoModel": {}}, {"AutoModel": [5]})
    },
    **{
        f"an edit of {place} to None": (edit(f"{place} = None"), CheckpointError, EDITED)
        for place in ("wte.weight", "h.0.attn.c_attn.weight")
    },
    **{
        f"a scale of {value}": (edit(f"wte.@scale = {value}"), CheckpointError, "@scale takes no such value")
        for value in ("1e308", "1e30", "0.0", "-1.0", "True")
    },
    "weights that aren't there": (setting(transformers_weights="x.safetensors"), CheckpointError, MISSING),
    "weights that are pickled": (setting(transformers_weights="adapter_model.bin"), CheckpointError, "names 'adapter"),
    "weights elsewhere": (setting(transformers_weights="../x.safetensors"), CheckpointError, "names '../x.safe"),
    "weights at the root": (setting(transformers_weights="/x.safetensors"), CheckpointError, "names '/x.safe"),
    "weights as a list": (setting(transformers_weights=["a"]), CheckpointError, r"names \['a'\] as its weights"),
}


@pytest.mark.sample(75, slow=200)
@pytest.mark.parametrize(("damage", "kind", "says"), CONFIGS.values(), ids=CONFIGS)
def test_configs(damage: Damage, kind: Any, says: str, folder: Path, tmp_path: Path) -> None:
    damage(folder)
    before = files(tmp_path)
    openers = [AutoModel.from_pretrained, partial(AutoModel.from_pretrained, check_fingerprint=False)]
    if says not in OF_MODELS and kind is not PatchError:
        openers.append(AutoConfig.from_pretrained)
    for opener in openers:
        with pytest.raises(kind, match=says) as caught:
            opener(folder)
        assert len(str(caught.value)) < 1000
    assert files(tmp_path) == before


def test_an_edit_that_takes_away_what_transformers_ties(tmp_path: Path) -> None:
    model = patch(tiny("gpt2", "AutoModelForCausalLM"), norm="dyt")
    for place in ("wte", "<head>.lm_head", "<head>.lm_head.weight"):
        model.save_pretrained(tmp_path)
        edit(f"{place} = None")(tmp_path)
        for opener in (AutoModelForCausalLM, type(model)):
            for check in (True, False):
                with pytest.raises(CheckpointError, match=EDITED):
                    opener.from_pretrained(tmp_path, check_fingerprint=check)


def test_the_control_of_configs(folder: Path) -> None:
    original = AutoModel.from_pretrained(folder)
    same = rope("300.0, scaling={'rope_type': 'linear', 'factor': 2.0}")
    no_more = entry(request=[{"norm": "rms", "only": ["*"], "keep": []}], any_length=True)
    for damage in (text(lambda s: s.replace("{", "{ ", 1)), setting(unheard_of=[1]), same, no_more):
        damage(folder)
        assert difference(AutoModel.from_pretrained(folder), original) < 1e-5
    for value in (
        "h.*.mlp.c_fc = GatedLinear('geglu')",
        "h.*.mlp.act = GatedActivation(act='GELU')",
        "ln_f.@scale = 2.0",
    ):
        edit(value)(other := Path(shutil.copytree(folder, folder.parent / value.partition(" ")[0].replace("*", "0"))))
        assert AutoModel.from_config(AutoConfig.from_pretrained(other))
    rope("310.0")(folder)
    assert difference(AutoModel.from_pretrained(folder, check_fingerprint=False), original) > 1e-3


# The index of shards, and headers of safetensors files


def index(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        stored = json.loads(path.read_text())
        path.write_text(json.dumps(change(stored) or stored))

    return damage


def first_in(file: Any) -> Damage:
    return index(lambda stored: stored["weight_map"].update({min(stored["weight_map"]): file}))


def raw(content: bytes) -> Damage:
    return lambda folder: (folder / "model.safetensors.index.json").write_bytes(content)


ELSEWHERE = "not a .safetensors file beside it"
OUTSIDE: tuple[Any, ...] = (
    *("../one/model.safetensors", "a/../../one/model.safetensors", "/etc/passwd.safetensors", "C:model.safetensors"),
    *("..\\one\\model.safetensors", "https://example.org/model.safetensors", "model\0.safetensors"),
    *("pytorch_model.bin", 7, ["model.safetensors"], ""),
)


def content(change: Callable[[bytes], bytes], of: str = "h.0.ln_1.alpha") -> Damage:
    """Another content of the file of weights that has a tensor, whose name it returns."""

    def damage(folder: Path) -> str:
        file = next(path for path in sorted(folder.glob("*.safetensors")) if of in load_file(path))
        file.write_bytes(change(file.read_bytes()))
        return file.name

    return damage


def second(change: Callable[[Path], Any]) -> Damage:
    return lambda folder: change(folder / SHARD)


SHARD = "model-00002-of-00007.safetensors"
HEADER = "can't be read: .*Download or save it again"  # what safetensors makes of other headers is its own matter
INDEXES: dict[str, tuple[Damage, str]] = {
    **{f"names {name!r}": (first_in(name), ELSEWHERE) for name in OUTSIDE},
    "with an empty weight_map": (index(lambda s: s["weight_map"].clear()), "names '' as weights"),
    "without weight_map": (index(lambda stored: {"metadata": {}}), r"index\.json can't be read \(KeyError\)"),
    "without metadata": (index(lambda s: {"weight_map": s["weight_map"]}), r"index\.json can't be read \(KeyError\)"),
    "a list": (raw(b"[]"), r"can't be read \(TypeError\)"),
    "no JSON": (raw(b"<html>404</html>"), r"can't be read \(JSONDecodeError\)"),
    "nested deeply": (raw(nested(100_000).encode()), r"can't be read \(RecursionError\)"),
    "a shard is gone": (second(Path.unlink), f"{SHARD} is missing"),
    "a shard is a folder": (second(lambda path: (path.unlink(), path.mkdir())), f"{SHARD} is missing"),
}
HEADERS: dict[str, tuple[Damage, str]] = {
    "a shape that doesn't fit": (content(lambda data: data.replace(b'"shape":[1]', b'"shape":[9]')), HEADER),
    "a huge length": (content(lambda data: bytes(7) + b"@" + data[8:]), HEADER),
    "empty": (content(lambda data: b""), HEADER),
    "cut by one byte": (content(lambda data: data[:-1]), HEADER),
    "longer than it says": (content(lambda data: data + b"more"), HEADER),
}
WEIGHTS = [("shards", name) for name in INDEXES | HEADERS] + [("one", name) for name in HEADERS]


@pytest.mark.parametrize(("kind", "name"), WEIGHTS)
def test_weights(kind: str, name: str, saved: Path, tmp_path: Path) -> None:
    damage, says = (INDEXES | HEADERS)[name]
    shutil.copytree(saved / "one", tmp_path / "one")  # what a lead out of the shards would find
    folder = shutil.copytree(saved / kind, tmp_path / "copy")
    victim = damage(folder)
    before = files(tmp_path)
    for check in (True, "full"):  # which names the file
        named = victim if check == "full" and isinstance(victim, str) else says
        with pytest.raises(CheckpointError, match=named) as caught:
            AutoModel.from_pretrained(folder, check_fingerprint=check)
        assert len(str(caught.value)) < 500
    assert files(tmp_path) == before


@pytest.mark.parametrize("to", ["../../../outside.safetensors", "pytorch_model.bin"])
def test_an_index_in_the_cache_of_the_hub(to: str, saved: Path, tmp_path: Path) -> None:
    revision = "0123456789abcdef0123456789abcdef01234567"
    snapshot = Path(shutil.copytree(saved / "shards", tmp_path / f"models--me--patched/snapshots/{revision}"))
    (tmp_path / "models--me--patched/refs").mkdir()
    (tmp_path / "models--me--patched/refs/main").write_text(revision)
    options = {"cache_dir": tmp_path, "local_files_only": True}
    original = AutoModel.from_pretrained("me/patched", **options)
    assert difference(original, AutoModel.from_pretrained(saved / "one")) < 1e-5
    shutil.copy(saved / "one/model.safetensors", (snapshot / to).resolve())
    index(lambda stored: stored["weight_map"].update(dict.fromkeys(stored["weight_map"], to)))(snapshot)
    for more in ({}, {"revision": revision}, {"revision": "main"}):
        with pytest.raises(CheckpointError, match=ELSEWHERE):
            AutoModel.from_pretrained("me/patched", **options, **more)


# Pickles


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return Path.touch, (self.marker,)


PICKLES = ("pytorch_model.bin", "pytorch_model-00001-of-00001.bin", "model.safetensors", "adapter_model.bin")


@pytest.mark.parametrize("file", PICKLES)
def test_pickles_are_never_opened(file: str, folder: Path, tmp_path: Path) -> None:
    marker = tmp_path / "exploded"
    (folder / "model.safetensors").unlink()
    (folder / file).write_bytes(pickle.dumps(Bomb(marker)))
    if "-of-" in file:
        listed = {"metadata": {}, "weight_map": {"ln_f.alpha": file}}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(listed))
    with pytest.raises((CheckpointError, OSError), match=r"pickle|read|model"):
        AutoModel.from_pretrained(folder)
    assert not marker.exists()
    pickle.loads((folder / file).read_bytes())  # control
    assert marker.exists()


def test_what_is_pickled_opens_when_it_is_asked_for(folder: Path) -> None:
    original = AutoModel.from_pretrained(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    assert difference(AutoModel.from_pretrained(folder), original) == 0  # beside the others it is not even looked at
    (folder / "model.safetensors").unlink()
    for options in ({}, {"use_safetensors": None}):
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*use_safetensors=False"):
            AutoModel.from_pretrained(folder, **options)
    again = AutoModel.from_pretrained(folder, use_safetensors=False)
    assert difference(outputs(again), outputs(original, **inputs(again))) < 1e-5


def test_code_in_the_folder_isnt_run(folder: Path, saved: Path, tmp_path: Path) -> None:
    """Neither named by auto_map nor lying there; and what a patched model is saved as asks for none."""
    marker = tmp_path / "exploded"
    for name in ("modeling_gpt2", "configuration_gpt2", "custom_generate/generate", "hfpatch"):
        path = folder / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"import pathlib; pathlib.Path({str(marker)!r}).touch()\nclass GPT2Model: pass\n")
    assert "auto_map" not in (folder / "config.json").read_text()
    setting(auto_map={"AutoConfig": "configuration_gpt2.GPT2Config", "AutoModel": "modeling_gpt2.GPT2Model"})(folder)
    assert difference(AutoModel.from_pretrained(folder), AutoModel.from_pretrained(saved / "one")) < 1e-5
    assert not marker.exists()
