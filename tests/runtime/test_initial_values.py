"""Values of what a patch adds: never uninitialised memory, and what a patch makes a model's own is saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import zoo
from initial_values import memory_is_nan, require_values
from safetensors.torch import load_file
from sampled import slow_but
from tiny_models import difference, patch, reload
from torch import nn

from hfpatch.measure.copies import unpatched_config
from hfpatch.patch import unpatch_model
from hfpatch.runtime.constants import Rows
from hfpatch.runtime.lens import host_class
from hfpatch.schemes.learned import Learned

LONGER, LARGER = Learned(max_positions=300), Learned(image_size=96)  # the zoo's hold 128 and 64
TEXT = ["albert", "bart", "bert", "bert-generation", "blenderbot", "clip_text_model", "deberta", "electra", "gpt2"]
TEXT += ["gpt_bigcode", "gpt_neo", "longformer", "markuplm", "mbart", "mobilebert", "openai-gpt", "opt", "pegasus"]
TEXT += ["roberta", "siglip_text_model", "xlm", "marian", "encoder-decoder", "florence2", "flaubert", "led", "biogpt"]
IMAGE = ["aimv2_vision_model", "blip", "clip", "deit", "dinov2", "idefics2", "internvl", "ijepa", "llava", "owlvit"]
IMAGE += ["pixio", "siglip_vision_model", "vit", "vit_mae", "vivit", "mgp-str", "dpt", "depth_anything"]
WHOLE_WINDOWS = {"led": Learned(max_positions=512)}  # of its attention; another length doesn't run
TABLES = [*((name, WHOLE_WINDOWS.get(name, LONGER)) for name in TEXT), *((name, LARGER) for name in IMAGE)]


def host(family: str) -> Any:
    try:
        return zoo.tiny(family)[0]
    except zoo.Unbuildable as error:  # in transformers 5.17 the config of an encoder-decoder has no defaults
        pytest.skip(str(error))


def built(config: Any, kind: Any) -> Any:
    torch.manual_seed(0)
    with memory_is_nan():
        return kind._from_config(copy.deepcopy(config))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("family", "scheme"), slow_but(TABLES, 12))
def test_a_table_has_its_hosts_initial_values(family: str, scheme: Learned) -> None:
    """Bit for bit: with the config's new length the host makes it in the new size itself."""
    model = patch(host(family), pos=scheme)
    fresh = built(model.config, type(model))
    require_values(fresh)
    original = built(unpatched_config(model.config), host_class(type(model)))
    expected = dict(original.named_parameters())
    assert dict(fresh.named_parameters()).keys() == expected.keys()
    for name, value in fresh.named_parameters():
        assert torch.equal(value, expected[name]), name


def test_a_table_whose_size_the_config_doesnt_set() -> None:
    """Control of the other way: rows that are spread as the host's."""
    table = nn.Parameter(torch.randn(64, 32) * 0.3 + 0.1)
    with memory_is_nan():
        rows = Rows(table, 500, 32)
    assert rows.shape == (500, 32)
    assert abs(float(rows.detach().mean()) - 0.1) < 0.02
    assert abs(float(rows.detach().std()) - 0.3) < 0.02


# Rows that were trained


@pytest.mark.parametrize(("family", "scheme"), slow_but(TABLES, [TABLES[0], TABLES[-1]]))
def test_trained_rows_come_back(family: str, scheme: Learned, tmp_path: Path) -> None:
    model = patch(host(family), pos=scheme)
    changed = train(model)
    assert changed
    model.save_pretrained(tmp_path)
    opened = type(model).from_pretrained(tmp_path, check_fingerprint="full").state_dict()
    for name in changed:
        assert torch.equal(opened[name], model.state_dict()[name]), name


def train(model: nn.Module) -> list[str]:
    """Change the tables of positions; their names."""
    generator, changed = torch.Generator().manual_seed(0), []
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "pos" in name or "wpe" in name:
                value.add_(torch.randn(value.shape, generator=generator))
                changed.append(name)
    return changed


@pytest.mark.parametrize("method", ["tile", "linear"])
def test_a_table_that_its_host_never_saves(method: str, tmp_path: Path) -> None:
    """Marian computes its own anew, and lists it as nothing to save."""
    model, _ = zoo.tiny("marian", auto_class="AutoModelForSeq2SeqLM")
    listed = {*model._keys_to_ignore_on_save}
    model.save_pretrained(tmp_path)
    assert not listed & load_file(tmp_path / "model.safetensors").keys()  # control
    patch(model, pos=f"learned:max_positions=300,method={method}", reversible=True)
    train(model)
    tokens = torch.randint(5, 97, (2, 200), generator=torch.Generator().manual_seed(0))
    given = {"input_ids": tokens, "decoder_input_ids": tokens}
    opened = reload(model, tmp_path, "AutoModelForSeq2SeqLM", check_fingerprint="full")
    assert difference(model, opened, **given) == 0
    assert difference(model, reload(opened, tmp_path / "again", "AutoModelForSeq2SeqLM"), **given) == 0
    assert listed <= load_file(tmp_path / "model.safetensors").keys()
    unpatch_model(model)
    assert {*model._keys_to_ignore_on_save} == listed
    patch(model, norm="dyt").save_pretrained(tmp_path)
    assert not listed & load_file(tmp_path / "model.safetensors").keys(), "its host makes these as they are"


@pytest.mark.slow
def test_every_host_that_leaves_out_weights_is_known() -> None:
    """Others than Marian, in a newer transformers, belong into the test above."""
    models = Path(transformers.__file__).parent / "models"
    found = {path.parent.name for path in models.glob("*/modeling_*.py") if "_to_ignore_on_save =" in path.read_text()}
    assert found == {"marian"}
