"""The contract of every scheme on every recorded family. Each check has a control: the same check on a mechanism that
was broken on purpose must fail.

Of the tests that take every request through every family the default run has a few cases, `-m slow` more, and
`-m sweep` the rest. Default and slow together have every family and every request in each of these tests.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from position_checks import changed_positions, difference, require_the_same_with_checkpointing
from position_families import FAMILIES, inputs, logits, make
from proof import opened
from sampled import SEED, divided
from tiny_models import COPIES, patch, require_a_model_of_its_own

from hfpatch.core.registry import MLPS, NORMS, POSITIONS
from hfpatch.measure.quiet_forward import cast
from hfpatch.runtime import qk_layouts
from hfpatch.runtime.attention import ROTARY
from hfpatch.runtime.qk_layouts import Fused, turn_output
from hfpatch.runtime.rotary import RotaryEmbedding
from hfpatch.schemes.position_schemes import Position

ALL = sorted(FAMILIES)
EVERYWHERE = [name for name in NORMS if name != "batch"]  # test_batch.py has the others
SPELLED = {"learned": "learned:max_positions=128"}  # four times the families' own
SCHEMES = [SPELLED.get(name, name) for name in POSITIONS]
REQUESTS = (
    [{"norm": name} for name in EVERYWHERE] + [{"pos": name} for name in SCHEMES] + [{"norm": "rms", "pos": "rope"}]
)
REQUESTS += [{"mlp": name} for name in MLPS] + [{"mlp": "geglu", "init": "reset"}]
POST_NORM = ("bert", "roberta", "distilbert", "bart")  # whose norms are read by residual connections, and aren't folded


def patched(name: str, seed: int = 0, **request: Any) -> Any:
    scheme = Position.resolve(request.get("pos"))
    if name == "vit" and scheme is not None and scheme.keeps_table:
        pytest.skip("its table is a grid of patches, see test_sinusoidal.py and test_image_size.py")
    model = make(name, seed)
    if "norm" in request and NORMS[request["norm"]].needs_calibration:
        return patch(model, **request, calibration=inputs(name, batch=64 if name == "vit" else 16))
    return patch(model, **request)


def request_id(request: dict[str, str]) -> str:
    return "+".join(request.values())


def case_id(value: str | dict[str, str]) -> str:
    return value if isinstance(value, str) else request_id(value)


every_family = pytest.mark.parametrize("name", ALL)
WAYS = [*COPIES, "saved"]
# in an order of which an even sample has all families, requests and ways
TURNS = [(ALL[(i + turn) % len(ALL)], request) for turn in range(len(ALL)) for i, request in enumerate(REQUESTS)]
EVERY = [(name, request) for name, request in TURNS if request != {"norm": "folded"} or name not in POST_NORM]
EVERY_WAY = [(*case, WAYS[(i + turn) % len(WAYS)]) for turn in range(len(WAYS)) for i, case in enumerate(EVERY)]
HALVED = [(name, one) for name, one in EVERY if "init" not in one]
LENGTHENED = list(product(ALL, SCHEMES))
# so many of each that default and slow run together have every family and request
of_copied = pytest.mark.sample(2, slow=100)
of_compiled = pytest.mark.sample(0, slow=35)
of_halved = pytest.mark.sample(0, slow=44)
of_lengthened = pytest.mark.sample(5, slow=10)


@pytest.mark.skipif(SEED is not None, reason="of the fixed sample")
@pytest.mark.parametrize(
    ("cases", "sample"),
    [(EVERY_WAY, of_copied), (EVERY, of_compiled), (HALVED, of_halved), (LENGTHENED, of_lengthened)],
    ids=["copied", "compiled", "halved", "lengthened"],
)
def test_every_family_and_request_is_in_the_default_or_the_slow_run(cases: list[Any], sample: Any) -> None:
    def named(some: list[Any]) -> set[str]:
        return {case_id(value) for case in some for value in case}

    default, slow = divided(cases, *sample.args, **sample.kwargs)
    assert named([*default, *slow]) == named(cases)
    assert named(default) != named(cases)  # control


def changed_logits(model: Any, given: dict, change: Any, stack: str = "") -> torch.Tensor:
    """Logits when every rotation (of one stack) sees changed positions."""
    with changed_positions(model, change, below=stack):
        return logits(model, given)


# --- shift and active -------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@every_family
@pytest.mark.parametrize(
    ("options", "offset"),
    # angles are float32, so their rounding grows with offset and frequency: a small theta gets a smaller offset
    [("rope", 1000), ("rope:partial=0.5", 1000), ("rope:pairing=interleaved,theta=500", 100)],
)
def test_shift_leaves_logits_alone(name: str, options: str, offset: int) -> None:
    model, given = patched(name, pos=options), inputs(name)
    assert difference(changed_logits(model, given, lambda p: p + offset), logits(model, given)) <= 1e-4


@pytest.mark.sample(6)
@every_family
def test_control_shift(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RotaryEmbedding.rotate  # here without the sine, which makes queries and keys depend on their own positions
    monkeypatch.setattr(RotaryEmbedding, "rotate", lambda self, x, phases: real(self, x, (phases[0], 0 * phases[1])))
    model, given = patched(name, pos="rope"), inputs(name)
    assert difference(changed_logits(model, given, lambda p: p + 1000), logits(model, given)) > 1e-2


@pytest.mark.sample(5)
@every_family
def test_every_stack_is_rotated_in_each_attention_and_nothing_else(name: str) -> None:
    model, given = patched(name, pos="rope"), inputs(name)
    stacks = ("encoder.layers", "decoder.layers") if FAMILIES[name].kind in ("seq2seq", "audio") else ("",)
    rotated = [module_name for module_name, _ in model.named_modules() if module_name.endswith(ROTARY)]
    assert len(rotated) == 2 * len(stacks)
    assert not any("encoder_attn" in module_name or "cross" in module_name for module_name in rotated)
    expected = logits(model, given)
    for attention in ("sdpa", "eager"):
        if name != "gpt_neo":  # which has eager attention alone
            model.set_attn_implementation(attention)
        assert difference(logits(model, given), expected) <= 1e-4
        for stack in stacks:
            assert difference(changed_logits(model, given, torch.zeros_like, stack), expected) >= 1e-2


@pytest.mark.sample(5)
@every_family
def test_control_active(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotaryEmbedding, "rotate", lambda self, x, phases: x)
    model, given = patched(name, pos="rope"), inputs(name)
    assert difference(changed_logits(model, given, torch.zeros_like), logits(model, given)) < 1e-2


# --- training ---------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@every_family
@pytest.mark.parametrize("request_", [{"pos": "rope"}, {"norm": "dyt", "pos": "nope"}], ids=request_id)
def test_gradient_checkpointing_changes_nothing(name: str, request_: dict) -> None:
    lengths = {"image": (16, 32), "audio": (16, 8)}.get(FAMILIES[name].kind, (12, 7))
    cache = {"use_cache": False} if FAMILIES[name].decodes else {}
    given = [inputs(name, length, seed=length) | cache for length in lengths]
    require_the_same_with_checkpointing(patched(name, **request_), given)


def test_control_gradient_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RotaryEmbedding.rotate

    def keeps_state(self: RotaryEmbedding, x: torch.Tensor, phases: Any) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1  # like a mechanism that stores positions on the module
        return real(self, x * self.calls, phases)

    monkeypatch.setattr(RotaryEmbedding, "rotate", keeps_state)
    with pytest.raises(AssertionError):
        require_the_same_with_checkpointing(patched("gpt2", pos="rope"), [inputs("gpt2") | {"use_cache": False}])


def forward_and_backward(model: Any, run: Any, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    cache = {"use_cache": False} if FAMILIES[name].decodes else {}
    given = cast(inputs(name), torch.device("cpu"), model.dtype)
    out = run(**given, **cache).logits
    out.square().mean().backward()
    return out.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@of_compiled
@pytest.mark.parametrize(("name", "request_"), EVERY, ids=case_id)
def test_compiles_without_graph_breaks(name: str, request_: dict) -> None:
    """One graph, of which outputs and gradients are the eager model's. In float64, where rounding hides nothing."""
    torch._dynamo.reset()
    model = patched(name, **request_).double()
    out, grads = forward_and_backward(model, model, name)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled_out, compiled_grads = forward_and_backward(model, compiled, name)
    assert difference(compiled_out, out) <= 1e-12
    largest = {key: float(grad.abs().max()) for key, grad in grads.items()}
    rounding = 1e-13 * max(largest.values())  # all that a key's bias has, which adds the same to all scores of a query
    assert all((compiled_grads[key] - grads[key]).abs().max() <= 1e-11 * largest[key] + rounding for key in grads)


@pytest.mark.slow
def test_control_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RotaryEmbedding.forward

    def breaks(self: RotaryEmbedding, positions: torch.Tensor) -> Any:
        torch._dynamo.graph_break()
        return real(self, positions)

    torch._dynamo.reset()
    monkeypatch.setattr(RotaryEmbedding, "forward", breaks)
    model = patched("gpt2", pos="rope")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        forward_and_backward(model, torch.compile(model, fullgraph=True, backend="aot_eager"), "gpt2")


def lora_targets(model: Any) -> list[str]:
    lens = next(m.__dict__["_hfpatch_lens"] for m in model.modules() if ROTARY in m._modules)
    projections = lens.projections
    return [projections.name] if isinstance(projections, Fused) else [projections.query, projections.key]


def merged_difference(name: str) -> float:
    model = patched(name, pos="rope")
    torch.manual_seed(5)
    tuned = get_peft_model(model, LoraConfig(target_modules=lora_targets(model), init_lora_weights=False, r=4)).eval()
    unmerged = logits(tuned, inputs(name))
    with tuned.disable_adapter():
        assert difference(logits(tuned, inputs(name)), unmerged) > 1e-2, "the adapter does nothing"
    return difference(logits(tuned.merge_and_unload(), inputs(name)), unmerged)


@pytest.mark.sample(3)
@every_family
def test_lora_on_queries_and_keys_merges_exactly(name: str) -> None:
    assert merged_difference(name) <= 1e-4


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_control_lora(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class BelowTheAdapter:
        """A rotation that sits on the Linear itself, as a forward hook would, so that LoRA's part isn't rotated."""

        def __init__(self, layer: Any, turn: Any):
            self.layer, self.turn = layer, turn

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self.layer, "base_layer"):
                return self.turn(self.layer(x))
            base = self.layer.base_layer(x)
            return self.turn(base) + (self.layer(x) - base)

    def below(projection: Any, turn: Any) -> Any:
        return turn_output(BelowTheAdapter(projection, turn), lambda y: y)  # type: ignore[arg-type]

    monkeypatch.setattr(qk_layouts, "turn_output", below)
    assert merged_difference(name) > 1e-2


# --- length and dtype -------------------------------------------------------------------------------------------


def long_inputs(name: str) -> dict[str, torch.Tensor]:
    return inputs(name, 4 * FAMILIES[name].old_length, batch=1)


@of_lengthened
@pytest.mark.parametrize(("name", "pos"), LENGTHENED)
def test_four_times_the_old_length(name: str, pos: str) -> None:
    out = logits(patched(name, pos=pos), long_inputs(name))
    assert out.isfinite().all()
    if out.dim() == 3:
        assert out.shape[1] == 4 * FAMILIES[name].old_length


@every_family
def test_control_length(name: str) -> None:
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        logits(make(name), long_inputs(name))


def test_whisper_labels_beyond_the_old_length() -> None:
    given = long_inputs("whisper")
    labels = given.pop("decoder_input_ids")
    with torch.no_grad():
        assert patched("whisper", pos="rope")(**given, labels=labels).loss.isfinite()
    with pytest.raises(ValueError, match="length"), torch.no_grad():
        make("whisper")(**{**inputs("whisper"), "decoder_input_ids": None}, labels=labels)


@of_halved
@pytest.mark.parametrize(("name", "request_"), HALVED, ids=case_id)
def test_bfloat16_runs(name: str, request_: dict) -> None:
    model, given = patched(name, **request_), inputs(name)
    expected = logits(model, given)
    out = logits(model.bfloat16(), cast(given, torch.device("cpu"), torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(out.float().flatten(), expected.flatten(), dim=0) > 0.98


# --- copies and checkpoints -------------------------------------------------------------------------------------


@of_copied
@pytest.mark.parametrize(("name", "request_", "how"), EVERY_WAY, ids=case_id)
def test_copies(name: str, request_: dict, how: str, tmp_path: Path) -> None:
    """Also opened from its checkpoint, by the class that its record leads to (test_checkpoint.py has all heads)."""
    model, given = patched(name, **request_), inputs(name)
    twin = opened(model, tmp_path) if how == "saved" else COPIES[how](model)
    assert twin.state_dict().keys() == model.state_dict().keys()
    require_a_model_of_its_own(twin, model, lambda one: logits(one, given))
