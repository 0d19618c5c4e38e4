"""A patched checkpoint opens patched or not at all: its host's own classes refuse it, all else goes on working."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from sampled import slow_but
from tiny_models import CONFIGS, RECORDED, difference, load, patch, randomise, tiny, tiny_config
from torch import nn
from transformers import CONFIG_MAPPING, AutoConfig, GPT2LMHeadModel, PreTrainedConfig, PreTrainedModel

from hfpatch.checkpoint.patched_classes import patched_config_class
from hfpatch.runtime.refuse_host import SENTENCE, parts, remove_guard
from hfpatch.schemes.request import Record

refused = pytest.raises(ValueError, match=r"patched by hfpatch.*import hfpatch.*Auto class")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    patch(tiny("gpt2", GPT2LMHeadModel), norm="rms", pos="rope").save_pretrained(folder)
    return folder


@pytest.fixture
def stored(saved: Path) -> dict[str, Any]:
    """What config.json holds."""
    return json.loads((saved / "config.json").read_text())


@pytest.mark.parametrize("family", slow_but(RECORDED, 3))
def test_every_class_of_a_family(family: str, tmp_path: Path) -> None:
    """Each head's own class refuses it, by whatever config; each Auto class opens it patched."""
    from transformers.models.auto import modeling_auto

    model = patch(tiny(family), norm="rms", pos="rope", init="copy")
    model.save_pretrained(tmp_path)
    config = getattr(transformers, CONFIGS[family][0])
    configs = [config.from_pretrained(tmp_path), config.from_json_file(tmp_path / "config.json"), model.config]
    heads: dict[type, str] = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None) if name.startswith("Auto") else None
        found = mapping.get(config, ()) if mapping is not None else ()
        heads |= dict.fromkeys(found if isinstance(found, tuple | list) else (found,), name)
    assert len(heads) >= 2
    for head, auto in heads.items():
        for options in ({}, *({"config": one} for one in configs)):
            with refused:
                head.from_pretrained(tmp_path, **options)
        assert type(getattr(transformers, auto).from_pretrained(tmp_path)).hfpatch_host is head
    assert difference(model, load(tmp_path)) == 0
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(model.config)
    plain = tiny(family)  # control: the same folder, unpatched, is what those classes are for
    plain.save_pretrained(tmp_path)
    assert difference(plain, type(plain).from_pretrained(tmp_path)) == 0


def test_parts_of_a_composite_model_refuse_too(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 97, "eos_token_id": 2}, vision_config={**sizes, "image_size": 32}
    )
    config.save_pretrained(tmp_path)
    parts = (transformers.CLIPConfig, transformers.CLIPTextConfig, transformers.CLIPVisionConfig)
    for part in parts:
        part.from_pretrained(tmp_path)  # control
    patch(transformers.CLIPModel(config), norm="rms", init="copy").save_pretrained(tmp_path)
    for model in (transformers.CLIPModel, transformers.CLIPTextModel, transformers.CLIPVisionModel):
        with refused:
            model.from_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.text_config.to_dict() == config.text_config.to_dict()
    assert again.vision_config.to_dict() == config.vision_config.to_dict()


def test_what_is_on_disk_and_in_memory(saved: Path, stored: dict[str, Any]) -> None:
    assert stored["transformers_weights"] == SENTENCE
    config = AutoConfig.from_pretrained(saved)
    assert SENTENCE not in str(config.to_dict())
    assert config.transformers_weights == SENTENCE
    assert stored == json.loads(config.to_json_string())  # and again


def test_nothing_but_the_sentences_is_taken_away() -> None:
    """Those of parts too, and what stands under other names or says something else stays."""
    inner = {"transformers_weights": SENTENCE, "width": 3}
    settings = {"transformers_weights": SENTENCE, "text_config": inner, "note": SENTENCE, "depth": 2}
    assert remove_guard(settings) == {"text_config": {"width": 3}, "note": SENTENCE, "depth": 2}
    assert inner.keys() == {"transformers_weights", "width"}
    own = {"transformers_weights": "other.safetensors"}
    assert remove_guard(own) == own


class CheckedNowhere(PreTrainedConfig):
    """A family of one's own whose class checks none of its settings."""

    model_type = "checked_nowhere"

    def __init__(self, width: Any = 3, **kwargs: Any) -> None:
        self.width = width
        super().__init__(**kwargs)


class Unchecked(PreTrainedModel):
    config_class = CheckedNowhere

    def __init__(self, config: CheckedNowhere):
        super().__init__(config)
        self.layer, self.norm = nn.Linear(config.width, config.width), nn.LayerNorm(config.width)
        self.post_init()

    def forward(self, inputs_embeds: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"x": self.layer(self.norm(inputs_embeds))}


def test_a_class_that_checks_nothing_refuses_too(tmp_path: Path) -> None:
    model = randomise(Unchecked(CheckedNowhere()))
    model.save_pretrained(tmp_path)
    Unchecked.from_pretrained(tmp_path)  # control
    patch(model, norm="dyt").save_pretrained(tmp_path)
    with refused:
        Unchecked.from_pretrained(tmp_path)
    assert type(type(model).from_pretrained(tmp_path)) is type(model)


@pytest.mark.parametrize("family", [*CONFIGS, "gpt_neox", "mamba", "phi", "qwen2", "rwkv", "xlnet", "llava", "clip"])
def test_config_classes_without_their_models(family: str) -> None:
    """The host's class and those of its parts are told of no file of weights, ours reads the settings as they were."""
    host = CONFIG_MAPPING[family]
    config = tiny_config(family) if family in CONFIGS else host()
    before = config.to_dict()
    object.__setattr__(config, "__class__", patched_config_class(host))
    config.hfpatch = Record(family).to_json()
    stored = host._decode_special_floats(json.loads(config.to_json_string()))
    assert all(part.transformers_weights == SENTENCE for _, part in parts(host.from_dict(dict(stored))))
    after = type(config).from_dict(stored).to_dict()
    assert {name: value for name, value in after.items() if name != "hfpatch"} == before
