"""Patched models on a GPU: compiled and eager against float64 on the CPU, CUDA graphs, caches, precision, no waiting.

pytest -m gpu: what is quick comes first, for runs that are stopped.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from tiny_models import difference, inputs, norm_request, outputs, patch, tiny

from hfpatch.compile import compile_model, compiled_calls
from hfpatch.core.registry import MLPS, NORMS, POSITIONS
from hfpatch.measure.quiet_forward import cast
from hfpatch.runtime.patch_errors import PatchError

DEVICE = os.environ.get("HFPATCH_GPU_TESTS_ON", "cuda")  # "cpu" tries the tests themselves out
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu
OPTIONS = {"learned": "learned:max_positions=80"}
SCHEMES = [{}, *map(norm_request, NORMS), *({"pos": OPTIONS.get(name, name)} for name in POSITIONS)]
SCHEMES += [{"mlp": name} for name in MLPS] + [{"norm": "rms", "pos": "rope"}, {"norm": "dyt", "pos": "rope"}]
DECODERS = [{}, {"norm": "rms"}, {"norm": "dyt"}, {"pos": "rope"}, {"pos": "alibi"}, {"norm": "rms", "pos": "rope"}]
FAMILIES = {"gpt2": "AutoModelForCausalLM", "bert": "AutoModelForMaskedLM", "vit": "AutoModelForImageClassification"}
HALF = {torch.bfloat16: 2**-8, torch.float16: 2**-11}  # unit roundoff


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def case_name(value: Any) -> str | None:
    return ("+".join(value.values()) or "unpatched") if isinstance(value, dict) else None


def made(family: str, request: dict[str, str], **options: Any) -> tuple[Any, dict[str, Any]]:
    """A patched model on the GPU with inputs, which have no cache."""
    model = tiny(family, FAMILIES[family], **options)
    if request:
        try:
            model = patch(model, **({"init": "copy"} | request))
        except PatchError as error:
            pytest.skip(f"refused for this family: {error}")
    given = {name: x.to(DEVICE) for name, x in inputs(model).items()}
    return model.to(DEVICE), given | ({"use_cache": False} if family == "gpt2" else {})


def truth(model: Any, given: dict[str, Any]) -> list[torch.Tensor]:
    """What it computes in float64 on the CPU, as float32 on the GPU."""
    wide = cast(given, torch.device("cpu"), torch.float64)
    return [x.to(DEVICE) for x in outputs(copy.deepcopy(model).cpu().double(), **wide)]


def spread(found: list[torch.Tensor]) -> float:
    return max(float(x.std()) for x in found)


@pytest.mark.skipif(DEVICE == "cpu", reason="a CPU has nothing to wait for")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("request_", SCHEMES, ids=case_name)
def test_a_forward_never_waits_for_the_gpu(family: str, request_: dict[str, str]) -> None:
    """Where the unpatched model doesn't, that is: no .item(), no copy to or from the host."""
    plain, given = made(family, {})
    model, _ = made(family, request_)
    for one in (plain, model):
        outputs(one, **given)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.no_grad():
                one(**given)
        except RuntimeError as error:
            if one is plain:
                pytest.skip(f"the unpatched model waits: {error}")
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(DEVICE == "cpu", reason="captures a CUDA graph")
@pytest.mark.parametrize("request_", DECODERS, ids=case_name)
def test_a_captured_graph_follows_positions_that_are_written_into_it(request_: dict[str, str]) -> None:
    model, given = made("gpt2", request_)
    length = given["input_ids"].shape[1]
    positions = torch.arange(length, device=DEVICE)[None]
    static = {**given, "position_ids": positions.clone()}
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            model(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        logits = model(**static).logits
    for other in (positions, positions * 2, positions + 3):
        static["position_ids"].copy_(other)
        graph.replay()
        assert difference([logits], [outputs(model, **{**given, "position_ids": other})[0]]) < 1e-4


@pytest.mark.parametrize("request_", DECODERS, ids=case_name)
def test_compiled_decoding_with_a_static_cache(request_: dict[str, str]) -> None:
    model, given = made("gpt2", request_)
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    prompt = {"input_ids": given["input_ids"], "attention_mask": torch.ones_like(given["input_ids"])}
    expected = model.generate(**prompt, **settings)
    graphs = "reduce-overhead" if DEVICE == "cuda" else None
    compile_model(model, "model", mode=graphs)
    found = model.generate(**prompt, **settings, cache_implementation="static", disable_compile=True)
    assert compiled_calls(model)[""] == 12
    assert torch.equal(found, expected)


@pytest.mark.parametrize("request_", SCHEMES, ids=case_name)
def test_cuda_graphs(request_: dict[str, str]) -> None:
    """With mode="reduce-overhead" every replay reads its own inputs: none answers with an earlier one's positions."""
    model, given = made("gpt2", request_)
    batches = [{**given, "input_ids": torch.roll(given["input_ids"], i, 1)} for i in range(4)]
    expected = [outputs(model, **batch) for batch in batches]
    compile_model(model, "model", mode="reduce-overhead", dynamic=False)
    for batch, wanted in [*zip(batches, expected, strict=True)] * 2:
        torch.compiler.cudagraph_mark_step_begin()
        assert difference(outputs(model, **batch), wanted) < 1e-4 * spread(wanted)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("request_", SCHEMES, ids=case_name)
def test_eager_and_compiled_against_float64(family: str, request_: dict[str, str]) -> None:
    model, given = made(family, request_)
    expected = truth(model, given)
    eager = outputs(model, **given)
    compiled = outputs(compile_model(model), **given)
    assert min(compiled_calls(model).values()) >= 1
    assert difference(eager, expected) < 1e-4 * spread(expected)
    assert difference(compiled, expected) < 1e-4 * spread(expected)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("request_", SCHEMES, ids=case_name)
def test_gradients_of_compiled_code(family: str, request_: dict[str, str]) -> None:
    model, given = made(family, request_)
    labels = given["input_ids"] if "input_ids" in given else torch.zeros(2, dtype=torch.long, device=DEVICE)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**given, labels=labels).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    eager = gradients()
    compile_model(model)
    for name, gradient in gradients().items():
        assert float((gradient - eager[name]).abs().max()) <= 1e-3 * float(eager[name].abs().max()) + 1e-6, name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("request_", SCHEMES, ids=case_name)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_autocast(family: str, request_: dict[str, str], dtype: torch.dtype) -> None:
    """Eager and compiled alike are as near to float32 as the dtype allows; the unpatched model is the measure."""
    plain, given = made(family, {}, initializer_range=0.05)
    model, _ = made(family, request_, initializer_range=0.05)

    def off(one: Any) -> float:
        expected = outputs(one, **given)
        with torch.autocast(DEVICE, dtype):
            return difference(outputs(one, **given), expected) / spread(expected)

    allowed = max(4 * off(plain), 16 * HALF[dtype])
    assert off(model) < allowed
    expected = outputs(model, **given)
    compile_model(model)
    with torch.autocast(DEVICE, dtype):
        found = outputs(model, **given)
    assert difference(found, expected) / spread(expected) < allowed
