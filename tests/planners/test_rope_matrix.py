"""RoPE's settings: a start x a request x a host x a way to open it, against transformers' own model of the result.

Every cell is equal, in float64, or refused with a typed error. All of them:
`pytest -m sweep tests/planners/test_rope_matrix.py`.
"""

from __future__ import annotations

import copy
import json
import os
import re
from itertools import product
from pathlib import Path
from typing import Any

import proof
import pytest
import torch
import transformers
import zoo
from rope_matrix import (
    HOSTS,
    LENGTH,
    LONGER,
    MAXIMUM,
    NAMED,
    START,
    STATED,
    WAYS,
    NoStartError,
    begun,
    cell,
    pairs_of,
    requests,
)
from tiny_models import tiny

from hfpatch import outcome
from hfpatch.export import export_model
from hfpatch.export.native import native_model
from hfpatch.patch import patch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.host_rotary import HostRotary
from hfpatch.runtime.patch_errors import UnsupportedError
from hfpatch.schemes import rope
from hfpatch.schemes.rope import RoPE

pytestmark = pytest.mark.filterwarnings("ignore::hfpatch.errors.NotPreservedWarning")
# of a length that dynamic scaling would start from, or of a host that doesn't take every type of scaling
REFUSALS = r"dynamic scaling starts from|can't be saved with|can't be made with|which its code can't apply"
DEFAULT = [
    *(("llama", start, way, "yarn by length") for start, way in [("yarn", "loaded"), ("linear", "native")]),
    ("llama", "yarn", "native", "linear by length"),
    ("llama", "longrope", "loaded", "longer"),
    ("deepseek_v3", "yarn", "loaded", "yarn"),
    ("gemma3_text", "llama3", "loaded", "yarn by length"),
    ("ministral3", "yarn", "plugin", "yarn by length"),
    ("qwen2_vl_text", "default", "loaded", "yarn longer"),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("host", "start", "way", "name"), DEFAULT)
def test_a_cell(host: str, start: str, way: str, name: str, tmp_path: Path) -> None:
    """What comes of it is saved and opened again, too, in plugin and native form, for those that were loaded."""
    model = begun(host, start, way, tmp_path / "start")
    assert cell(model, requests(pairs_of(model))[name], tmp_path if way == "loaded" else None) == "equal"


@pytest.mark.sample(0)
@pytest.mark.parametrize(("host", "start", "way"), list(product(HOSTS, NAMED, WAYS)))
def test_every_request(host: str, start: str, way: str, tmp_path: Path) -> None:
    """HFPATCH_ROPE_TABLE=<file> gets what came of each."""
    try:
        model = begun(host, start, way, tmp_path / "start")
    except NoStartError as error:
        found = {"": f"no start: {error}"}
    else:
        every = requests(pairs_of(model)).items()
        found = {name: cell(model, one, tmp_path / name if way == "loaded" else None) for name, one in every}
    if table := os.environ.get("HFPATCH_ROPE_TABLE"):
        with Path(table).open("a") as file:
            file.writelines(json.dumps([host, start, way, *one]) + "\n" for one in found.items())
    if (host, start) == ("phimoe", "longrope"):  # its own scales of attention stand in place of what the length gives
        found = {name: text for name, text in found.items() if "longer" not in name or "change nothing" not in text}
    other = {name: text for name, text in found.items() if text != "equal" and not text.startswith("no start")}
    assert all(re.match(f"refused: .*({REFUSALS})", text, re.DOTALL) for text in other.values()), other


def test_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor of the wrong length is seen by the settings, and a model that does something else by its outputs."""
    model = begun("llama", "yarn", "loaded", Path())
    scheme = requests(pairs_of(model))["yarn by length"]
    monkeypatch.setattr(rope, "_factor", lambda new, original: new / 2 / original)
    assert cell(model, scheme).startswith("DIFFERS: settings")
    monkeypatch.undo()
    replacing = HostRotary.replacing.__func__

    def other_scale(*args: Any, **options: Any) -> Any:
        module = replacing(*args, **options)
        module.attention_scaling *= 1.01
        return module

    monkeypatch.setattr(HostRotary, "replacing", classmethod(other_scale))
    assert "keeps other frequencies" in cell(model, scheme)  # as a checkpoint would open as another model
    monkeypatch.setattr(outcome, "require_same_frequencies", lambda *args: None)
    assert cell(model, scheme).startswith("DIFFERS: in memory")


# --- what users met ---------------------------------------------------------------------------------------------------


def small(cls: str, length: int = LENGTH, **settings: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{cls}Config")(
        **sizes, num_key_value_heads=4, vocab_size=99, max_position_embeddings=length, rope_parameters=settings
    )
    return getattr(transformers, f"{cls}Model")(config).double().eval()


def test_the_factor_is_of_the_original_length() -> None:
    """The call of docs/guides/long-inputs.md on Qwen3 with YaRN: 8, and not 2."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, STATED: 32768}
    model = small("Qwen3", 131072, **yarn)
    scheme = RoPE(max_positions=262144, scaling={"rope_type": "yarn"})
    assert "yarn, factor=8, original=32768, length=262144" in str(plan_patch(model, pos=scheme))
    linear = small("Llama", 131072, rope_type="linear", rope_theta=1e4, factor=4.0)
    for model, kind in ((linear, "linear"), (linear, "yarn"), (small("Qwen3", 131072, **yarn), "linear")):
        row = plan_patch(model, pos=RoPE(max_positions=262144, scaling={"rope_type": kind})).rows[0]
        assert f"{kind}, factor=8, original=32768, length=262144" in row.becomes
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    row = plan_patch(small("Llama", 131072, **llama3, **{STATED: 8192}), pos=scheme).rows[0]
    assert "yarn, factor=32, original=8192, length=262144" in row.becomes
    assert row.reason == "gone with llama3: low_freq_factor=1.0, high_freq_factor=4.0"


def test_what_max_positions_alone_does_is_said() -> None:
    scheme = RoPE(max_positions=LONGER)
    yarn = plan_patch(small("Qwen3", rope_type="yarn", rope_theta=1e4, factor=2.0, **{STATED: START}), pos=scheme).rows[
        0
    ]
    assert (yarn.expected, yarn.reason) == ("exact", f"its own settings, which don't go by {MAXIMUM}")
    assert f"factor=2, original={START}, length={LONGER}" in yarn.becomes
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, STATED: START}
    longrope = small("Llama", rope_type="longrope", rope_theta=1e4, **lists)
    row = plan_patch(longrope, pos=scheme).rows[0]
    assert (row.expected, row.reason) == ("approximate", f"its own settings, of which a part follows from {MAXIMUM}")
    fixed = small("Llama", rope_type="longrope", rope_theta=1e4, factor=2.0, **lists)
    assert plan_patch(fixed, pos=scheme).rows[0].expected == "exact"
    dynamic = small("Llama", rope_type="dynamic", rope_theta=1e4, factor=2.0)
    with pytest.raises(UnsupportedError, match=rf"LlamaConfig\.{MAXIMUM}.*up to {LONGER} tokens wouldn't be scaled"):
        patch_model(dynamic, pos=scheme)
    assert plan_patch(dynamic, pos=RoPE(max_positions=LENGTH)).rows[0].expected == "exact"  # no other length


@pytest.mark.parametrize(
    "model_type", [pytest.param("deepseek_v2", marks=pytest.mark.slow), "deepseek_v3", "ministral3"]
)
def test_options_of_a_scaling_stay_while_its_type_stays(model_type: str) -> None:
    model = begun(model_type, "yarn", "loaded", Path())
    before, scales = dict(model.config.rope_parameters), attention_scales(model)
    patch_model(model, pos=RoPE(scaling={"rope_type": "yarn", "factor": 80.0}))
    assert model.config.rope_parameters == {**before, "factor": 80.0}
    assert attention_scales(model) != scales or model_type == "ministral3"  # which DeepSeek's take from mscale_all_dim
    row = plan_patch(model, pos=RoPE(scaling={"rope_type": "linear", "factor": 3.0})).rows[0]
    assert row.reason == "gone with yarn: beta_fast=8.0, truncate=False, mscale=0.7, mscale_all_dim=0.9"


def attention_scales(model: Any) -> set[float]:
    return {module.scaling for module in model.modules() if isinstance(getattr(module, "scaling", None), float)}


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_no_older_name_of_the_type_contradicts_it(model_type: str, tmp_path: Path) -> None:
    model = begun(model_type, "yarn", "loaded", Path())
    assert '"type": "yarn"' in model.config.to_json_string()  # control
    patch_model(model, pos=RoPE(scaling={"rope_type": "linear", "factor": 3.0}))
    for form in ("plugin", "native"):
        export_model(model, tmp_path / form, form)
        assert '"type"' not in (tmp_path / form / "config.json").read_text().replace('"model_type"', "")
    dropped = patch_model(begun(model_type, "yarn", "loaded", Path()), pos="nope")
    assert '"type"' not in native_model(dropped).config.to_json_string().replace('"model_type"', "")


def by_length(kind: str, length: int, **options: Any) -> RoPE:
    return RoPE(max_positions=length, scaling={"rope_type": kind, **options})


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (by_length("yarn", 128, beta_fast=8.0), by_length("yarn", 256)),
        (RoPE(scaling={"rope_type": "linear", "factor": 2.0}), by_length("linear", 256)),
        pytest.param(RoPE(max_positions=128), by_length("yarn", 256), marks=pytest.mark.slow),
        pytest.param(by_length("dynamic", 128), by_length("yarn", 256), marks=pytest.mark.slow),
    ],
    ids=["yarn", "linear", "no scaling", "dynamic"],
)
def test_a_rotation_that_we_attached_keeps_and_follows_likewise(first: RoPE, then: RoPE, tmp_path: Path) -> None:
    """GPT-2 of 64 positions: in memory, opened again, and exported as another architecture, which rotates by itself."""
    model = patch_model(tiny("gpt2", "AutoModelForCausalLM").double(), pos=first)
    export_model(model, tmp_path / "native", "native", architecture="gpt_neox")
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "native", dtype=torch.float64).eval()
    opened = [model, proof.opened(model, tmp_path / "plugin", dtype=torch.float64), stock]
    assert "factor=4, original=64, length=256" in str(plan_patch(stock, pos=then))
    for length in (20, 200):
        ids = {"input_ids": torch.arange(length)[None] % 90 + 3}
        outputs = [patch_model(copy.deepcopy(one), pos=then)(**ids).logits for one in opened]
        assert torch.equal(outputs[0], outputs[1])
        assert (outputs[0] - outputs[2]).abs().max().item() <= 1e-9


def test_a_scale_of_attention_alone_isnt_exact() -> None:
    """DeepSeek's: cos and sin stay where both numbers are equal, and the softmax's scale is another."""
    model, _ = zoo.tiny("deepseek_v3")
    scaling = {"rope_type": "yarn", "factor": 4.0, STATED: START}
    ones, twos = (dict.fromkeys(("mscale", "mscale_all_dim"), value) for value in (1.0, 2.0))
    patch_model(model, pos=RoPE(scaling=scaling | ones))
    same = ones | {"truncate": True}  # control: said aloud, it is what it was
    rows = [plan_patch(model, pos=RoPE(scaling=scaling | more)).rows[0] for more in (same, twos)]
    assert [row.expected for row in rows] == ["exact", "approximate"]
