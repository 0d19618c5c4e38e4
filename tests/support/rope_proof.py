"""Proves a rotary swap on a model by its outputs: shifting all positions changes none, shifting some changes them.

Each figure is the largest change of any floating output, of the model or of the stack's owner, in units of that
output's spread. Positions are changed where the rotations read them, one stack at a time, everything else running as
always.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tiny_models import tensors
from torch import Tensor, nn
from transformers import GPT2Model

from hfpatch.runtime.attention import ROTARY
from hfpatch.sites.stacks import FoundStack

SHIFT = 10  # positions by which a whole stack is moved
SAME, DIFFERENT = 1e-4, 1e-2  # at most, and at least, what outputs change by; angles are in float32
# what this version of transformers calls the cache in a model's arguments and outputs
CACHE = "cache" if "cache" in inspect.signature(GPT2Model.forward).parameters else "past_key_values"

Outputs = dict[str, Tensor]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Proof:
    """What was measured on one stack.

    Attributes:
        owner: the class that owned the table.
        name: where it stands in the model ("" for the model itself).
        shift: change of the outputs when all positions of the stack move by a constant; rotation is relative, so none.
        active: change when all positions of the stack are zero; none would mean that nothing is rotated.
        idle: attentions of the stack whose own rotation no output depends on.
    """

    owner: str
    name: str
    shift: float
    active: float
    idle: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        return self.shift <= SAME and self.active >= DIFFERENT and not self.idle


def prove_stack(
    model: nn.Module, inputs: Mapping[str, Any], found: FoundStack, each: bool = False, own: bool = False
) -> Proof:
    """The proof of one stack; `find_stacks` finds it.

    Args:
        model: patched with pos="rope"; best in float64, where only the rotations' own rounding is left.
        inputs: keyword arguments of its forward.
        each: also zero the positions of each attention by itself.
        own: compare the outputs of the stack's owner alone: what is around it may sharpen differences without bound, as
            detectors do that choose among candidates.
    """

    def seen(change: Change | None = None) -> Outputs:
        every = outputs(model, inputs, found, change)
        return {name: value for name, value in every.items() if not own or name.startswith(f"{found.name}: ")}

    expected = seen()
    shift = difference(seen(lambda p: p + SHIFT), expected)
    active = difference(seen(torch.zeros_like), expected)
    idle = []
    for name, attention in found.attentions.items() if each else ():
        with _unrotated(attention):
            if difference(seen(), expected) == 0:
                idle.append(name)
    return Proof(type(found.owner).__name__, found.name, shift, active, tuple(idle))


@contextmanager
def _unrotated(attention: nn.Module) -> Iterator[None]:
    """An attention whose queries and keys stay as they are, inside."""
    rotary: Any = attention._modules.get(ROTARY)
    if rotary is None:
        yield
        return
    key = rotary.__dict__.pop("key", None)  # without it the rotation is shared with no other layer
    rotary.__dict__["rotate"] = lambda x, phases: x
    try:
        yield
    finally:
        del rotary.__dict__["rotate"]
        if key is not None:
            rotary.__dict__["key"] = key


def reached(model: nn.Module, inputs: Mapping[str, Any], found: FoundStack) -> bool:
    """Whether a forward on these inputs rotates anything in the stack."""
    calls: list[Tensor] = []

    def seen(positions: Tensor) -> Tensor:
        calls.append(positions)
        return positions

    outputs(model, inputs, found, seen)
    return bool(calls)


def outputs(
    model: nn.Module,
    inputs: Mapping[str, Any],
    found: FoundStack,
    change: Change | None = None,
    part: str = ROTARY,
) -> Outputs:
    """All floating outputs of the model and of the stack's owner, with positions changed in the stack.

    `part` is the module of each attention that reads positions.
    """
    collected: Outputs = {}

    def keep(_: nn.Module, args: Any, output: Any) -> None:
        collected.update((f"{found.name}: {name}", value.clone()) for name, value in floating_tensors(output))

    readers = [module._modules.get(part) for module in found.attentions.values()]
    hooks = [found.owner.register_forward_hook(keep)]
    hooks += [
        reader.register_forward_pre_hook(lambda _, args: tuple(map(change, args)))
        for reader in readers
        if reader is not None and change is not None
    ]
    try:
        result = run(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return collected | dict(floating_tensors(result))


def run(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """What one forward returns, the same each time: some draw masks."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return model(**copy.deepcopy(dict(inputs)))


def floating_tensors(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors inside an output with their names, caches aside."""
    for path, tensor in tensors(value, name):
        if CACHE not in path and tensor.is_floating_point() and tensor.numel():
            yield path, tensor


def difference(a: Outputs, b: Outputs) -> float:
    """Largest change from b to a in units of b's spread; infinite where names, shapes or finite places differ."""
    if a.keys() != b.keys():
        return float("inf")
    return max((_difference(a[name], b[name]) for name in b), default=0.0)


def _difference(a: Tensor, b: Tensor) -> float:
    finite = b.isfinite()
    if a.isnan().any() or b.isnan().any():
        return float("inf")
    if a.shape != b.shape or not torch.equal(a.isfinite(), finite):
        return float("inf")
    if not finite.any():
        return 0.0
    a, b = a[finite].double(), b[finite].double()
    spread = b.std() if b.numel() > 1 else b.abs().max()
    return float((a - b).abs().max() / spread.clamp_min(1e-12))


GREEDY = {
    "do_sample": False,
    "num_beams": 1,
    "output_logits": True,
    "return_dict_in_generate": True,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
}


def decodes_alike(model: Any, inputs: Mapping[str, Any], tokens: int = 8) -> float:
    """Change of the logits of greedy decoding when a cache is used, against decoding without one."""
    settings: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens, **GREEDY}
    with torch.no_grad():
        cached, plain = (
            torch.stack(model.generate(**copy.deepcopy(dict(inputs)), **settings, use_cache=use).logits)
            for use in (True, False)
        )
    return _difference(cached, plain)


def steps_alike(model: nn.Module, inputs: Mapping[str, Any]) -> float:
    """Change of the outputs at the last token when tokens come one by one, with a cache, against one forward of all."""
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    tokens, cache = inputs[name], None
    with torch.no_grad():
        whole = model(**copy.deepcopy(dict(inputs)), use_cache=False)
        for i in range(tokens.shape[1]):
            step = {**inputs, name: tokens[:, i : i + 1]}
            if name == "input_ids" and "attention_mask" in inputs:
                step["attention_mask"] = inputs["attention_mask"][:, : i + 1]
            last = model(**step, **{CACHE: cache}, use_cache=True)
            cache = last[CACHE]
    expected = {
        n: value[:, -1:]
        for n, value in floating_tensors(whole)
        if value.dim() == 3 and value.shape[1] == tokens.shape[1] and "encoder_" not in n
    }
    shown = dict(floating_tensors(last))
    return difference({n: shown[n] for n in expected}, expected)
