"""The path that a GPU takes, without one: patched models run with weights and inputs on torch's meta device.

Operations there know shapes and devices, and no values. So they raise where a tensor is made on the CPU though the
model is elsewhere, and where code reads a value: on a GPU the first is an error, and the second waits for the device.
The unpatched model is the control: what it can't do there itself isn't asked of the patched one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exported_models import HEADS, REQUESTS
from rope_proof import CACHE
from tiny_models import CONFIGS, difference, inputs, norm_request, patch, tiny, tiny_config
from torch import Tensor

from hfpatch.errors import PatchError
from hfpatch.patch import outcomes
from hfpatch.runtime.rotary import RotaryEmbedding

# those whose forward is another one's are left out
SAME_FORWARD = ("rms parametrized", "dyt llm", "swiglu fresh", "only some", "all", "fresh")
FORWARDS = {name: request for name, request in REQUESTS.items() if name not in SAME_FORWARD}


def evaluated(model: Any, given: dict[str, Tensor]) -> None:
    with torch.no_grad():
        model.eval()(**given)


def trained(model: Any, given: dict[str, Tensor]) -> None:
    returned = model.train()(**given)
    sum(value.sum() for value in returned.values() if isinstance(value, Tensor) and value.requires_grad).backward()
    assert all(parameter.grad is None or parameter.grad.is_meta for parameter in model.parameters())


def decoded(model: Any, given: dict[str, Tensor]) -> None:
    """Two steps with a cache."""
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    with torch.no_grad():
        first = model.eval()(**given, use_cache=True)
        second = {**given, name: given[name][:, :1]}
        model(**second, **{CACHE: first[CACHE]}, use_cache=True)


WAYS: tuple[Callable[[Any, dict[str, Tensor]], None], ...] = (evaluated, trained, decoded)


# without these settings a host reads values of its inputs: whether a token is one of padding, whether a mask is needed
CONFIG = {"gpt2": {"pad_token_id": None}, "deberta": {"pad_token_id": None}, "bart": {"attn_implementation": "eager"}}
HEAD = HEADS | {"bart": "AutoModel"}
FEW = ("gpt2", "bert", "llama", "whisper")  # the others take minutes


def built(family: str, **options: Any) -> Any:
    return tiny(family, HEAD.get(family, "AutoModel"), **CONFIG.get(family, {}), **options)


def obstacles(model: Any) -> dict[str, str]:
    """What a model can't do on the meta device, with what it raises."""
    found = {}
    for way in WAYS:
        one = copy.deepcopy(model).to("meta")
        try:
            way(one, {name: value.to("meta") for name, value in inputs(one).items()})
        except Exception as error:  # whatever a host raises
            found[way.__name__] = f"{error!r:.300}"
    return found


def control(family: str, request: str) -> dict[str, str]:
    """What the unpatched model can't do; with dynamic scaling, where it rotates by itself, that with such scaling."""
    config = tiny_config(family)
    options = {}
    if request == "dynamic" and getattr(config, "rope_parameters", None):
        options["rope_parameters"] = {**config.rope_parameters, "rope_type": "dynamic", "factor": 4.0}
    return obstacles(built(family, **options))


@pytest.mark.sample(0, slow=1)
@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=pytest.mark.slow if one in FEW else pytest.mark.sweep) for one in CONFIGS],
)
def test_patched_models_run_where_no_value_is_known(family: str) -> None:
    assert "evaluated" not in control(family, "rms copy")
    wrong, tried = {}, 0
    for request, arguments in FORWARDS.items():
        model = built(family)
        try:
            patch(model, **arguments)
        except PatchError:
            continue
        tried += 1
        found = obstacles(model)
        if found and found.keys() - control(family, request).keys():
            wrong[request] = found
    assert not wrong
    assert tried >= 3


def test_control_a_tensor_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch(built("gpt2"), pos="rope")
    assert not obstacles(model)
    real = RotaryEmbedding.forward
    monkeypatch.setattr(RotaryEmbedding, "forward", lambda self, x: real(self, torch.ones(x.shape)))
    assert obstacles(model).keys() == {"evaluated", "trained", "decoded"}


WITH_WEIGHTS = [{"norm": "rms"}, {"norm": "deepnorm"}, {"placement": "sandwich"}, {"pos": "alibi"}]
WITH_WEIGHTS += [{"pos": "learned:max_positions=128"}, *map(norm_request, ("fixed", "folded", "none"))]


@pytest.mark.sample(2)
@pytest.mark.parametrize("request_", WITH_WEIGHTS, ids=lambda one: next(iter(one.values())))
def test_a_model_with_weights_where_new_ones_are_made_on_meta(request_: dict[str, str]) -> None:
    """It is patched on its own device, as it would be elsewhere, and the default stays what it was."""
    for family in ("gpt2", "bert") if "pos" in request_ else ("gpt2",):
        expected, model = patch(tiny(family), **request_), tiny(family)
        with torch.device("meta"):
            patch(model, **request_)
            assert torch.empty(1).is_meta
        assert not any(one.is_meta for one in (*model.parameters(), *model.buffers()))
        assert difference(model, expected) == 0
        assert outcomes(model) == outcomes(expected)
