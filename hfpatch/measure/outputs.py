"""Output tensors of a forward by name, their deviation from another forward's, and the rounding noise in it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..runtime.float64 import in_float64
from .quiet_forward import inference_state, observe_calls

# Collections for other forwards or readers; their coordinates may change while the function stays the same
_CACHES = re.compile(r"(.*_)?(past_key_values|cache(_params)?|mems|attentions|hidden_states)|state")
_SPANS = ("start_logits", "end_logits")  # (B, T): one value per token
_OF_MEDIA = re.compile(r".*(vision|image|video|audio|qformer).*")  # outputs that a text's mask doesn't fit
_SOUNDS = ("input_values", "input_features")
_PIECE = 2**18  # numbers that are compared at once: float64 copies of all logits would be large
_INFINITE = 1e30  # masked logits are -inf in some models and the dtype's lowest number in others
DRAWS = 2  # draws of noise; the larger effect is the noise floor
FACTOR = 10.0  # rounding may explain a difference of so many noise floors


@dataclass
class Outputs:
    """Output tensors of one forward by name: "logits", "text_model_output.last_hidden_state", "parts[0]".

    Attributes:
        tensors: outputs, without tensors of no numbers, and collections of caches, attentions and hidden states.
        streams: the residual stream after the embedding and after each layer, by name ("hidden_states", ...).
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    streams: dict[str, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, returned: Any) -> Outputs:
        """Collect the tensors of a forward's result: nested mappings, tuples and lists."""
        outputs = cls()
        outputs._collect("", returned)
        return outputs

    def _collect(self, name: str, value: Any) -> None:
        last = name.rpartition(".")[2]
        if isinstance(value, Tensor):
            if value.numel():
                self.tensors[name or "output"] = value
        elif _CACHES.fullmatch(last):
            if isinstance(value, tuple | list) and last.endswith("hidden_states"):
                self.streams[name] = [layer for layer in value if isinstance(layer, Tensor)]
        elif isinstance(value, Mapping):
            for key, item in value.items():
                self._collect(f"{name}.{key}" if name else str(key), item)
        elif isinstance(value, tuple | list):
            for i, item in enumerate(value):
                self._collect(f"{name}[{i}]", item)

    @property
    def floats(self) -> dict[str, Tensor]:
        """The floating-point outputs."""
        return {name: value for name, value in self.tensors.items() if value.is_floating_point()}


def outputs_of(model: Callable[..., Any], inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all floating-point outputs of one forward, by name, without positions of padding."""
    return without_padding(Outputs.of(model(**inputs)).floats, model, inputs)


def without_padding(outputs: Mapping[str, Tensor], model: Any, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a model's outputs (B, T, ...), with positions of padding removed as (N, ...), since nobody reads these.

    So exact models may differ there, also by NaN, and numbers there don't count for the size of an output.
    """
    encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    found = dict[str, Tensor]()
    for name, x in outputs.items():
        mask = mask_of(name, x.shape, inputs, encoder_decoder)
        found[name] = x if mask is None else x[mask.to(x.device)]
    return found


def mask_of(name: str, shape: torch.Size, inputs: Mapping[str, Any], encoder_decoder: bool) -> Tensor | None:
    """Return which positions (B, T) of an output aren't padding; None if all count.

    All count if the output has no axis of tokens, or no mask has that length (a mask (B, 1, T, T) says which position
    reads which). An encoder of sounds has fewer steps: a step counts if nothing that it is made of is padding.

    Args:
        name, shape: the output's name and shape.
        inputs: keyword arguments of the forward.
        encoder_decoder: whether the model is an encoder-decoder.
    """
    mask, last = padding_mask(name, inputs, encoder_decoder), name.rpartition(".")[2]
    if mask is None or mask.dim() not in (2, 3) or not (len(shape) > 2 or last in _SPANS):
        return None
    mask = mask.flatten(0, -2) != 0  # (B, choices, T) are run as (B * choices, T)
    if "input_ids" not in inputs and any(one in inputs for one in _SOUNDS) and shape[1] < mask.shape[1]:
        mask = F.adaptive_max_pool1d((~mask).float(), shape[1]) == 0
    return mask if shape[:2] == mask.shape and bool(mask.any()) and not bool(mask.all()) else None


def padding_mask(name: str, inputs: Mapping[str, Any], encoder_decoder: bool) -> Tensor | None:
    """Return the attention mask for an output of encoder or decoder; None for images and sounds next to text.

    A decoder's default mask is where there are labels; BART's decoder reads the encoder's text if it gets none itself.
    """
    mask = None if _OF_MEDIA.match(name) else inputs.get("attention_mask")
    if encoder_decoder and re.findall("encoder|decoder", name)[:1] != ["encoder"]:
        labels, own = inputs.get("labels"), any(one.startswith("decoder_input") for one in inputs)
        mask = labels != -100 if isinstance(labels, Tensor) else None if own else mask
        mask = given if (given := inputs.get("decoder_attention_mask")) is not None else mask
    return mask if isinstance(mask, Tensor) else None


@contextmanager
def outputs_inside(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[dict[str, list[Tensor]]]:
    """Context that collects outputs of models inside in each call: "LlamaModel's last_hidden_state"; outer models last.

    Other classes that open the checkpoint return these as their own outputs.
    """
    found: dict[str, list[Tensor]] = {}
    inside = {name: one for name, one in model.named_modules() if name and isinstance(one, PreTrainedModel)}

    def note(name: str, result: Any) -> None:
        outputs = {f"{name}.{output}": x for output, x in Outputs.of(result).floats.items()}
        for output, value in without_padding(outputs, model, inputs).items():
            title = f"{type(inside[name]).__name__}'s {output.removeprefix(f'{name}.')}"
            found.setdefault(title, []).append(value.detach().clone())

    with observe_calls(inside, on_result=note):
        yield found


def deviating(truth: Mapping[str, list[Tensor]], outputs: Mapping[str, list[Tensor]], tolerance: float) -> list[str]:
    """Return which outputs of models inside deviate by more than a tolerance in the root mean square."""
    numbered = {name: [dict(enumerate(one.get(name, []))) for one in (truth, outputs)] for name in truth}
    return [name for name, pair in numbered.items() if max(one.rms_error for one in deviations(*pair)) > tolerance]


@dataclass
class Deviation:
    """Accumulated deviation of outputs y from their reference t, computed in float64.

    Infinities that both have in the same places (masked logits) don't count, and numbers beyond 1e30 are infinities.

    Attributes:
        equal_nan: NaN in both counts as equal.
        incomparable: how many numbers are NaN or infinite in one tensor and not the same in the other, or are integers
            that differ; if there are any, all errors are infinite.
        largest: max|y - t|.
        squares: sum of (y - t)^2.
        count, mean, scatter: of the finite numbers of the truth; scatter is the sum of (t - mean)^2.
    """

    equal_nan: bool = False
    incomparable: int = 0
    largest: float = 0.0
    squares: float = 0.0
    count: int = 0
    mean: float = 0.0
    scatter: float = 0.0

    def add(self, truth: Tensor, output: Tensor, mask: Tensor | None = None) -> None:
        """Add one pair of tensors. `mask` (over the leading axes) is True for values that count."""
        if truth.shape != output.shape:
            self.incomparable += max(truth.numel(), output.numel(), 1)
            return
        if not truth.is_floating_point():
            self.incomparable += int((truth != output.to(truth.device)).sum())
            return
        for t, y in pieces(mask, truth, output):
            self._add(t, y)

    def _add(self, t: Tensor, y: Tensor) -> None:
        finite = t.isfinite() & y.isfinite()
        if not bool(finite.all()):
            differs = ~finite & (t != y)
            self.incomparable += int((differs & ~(t.isnan() & y.isnan()) if self.equal_nan else differs).sum())
            t, y = t[finite], y[finite]
        if not t.numel():
            return
        difference = (y - t).abs()
        self.largest = max(self.largest, float(difference.max()))
        self.squares += float(difference.square().sum())
        count, mean = t.numel(), float(t.mean())
        shift, total = mean - self.mean, self.count + count  # two means and scatters become one (Chan et al. 1979)
        self.scatter += float((t - mean).square().sum()) + shift**2 * self.count * count / total
        self.mean += shift * count / total
        self.count = total

    @property
    def max_error(self) -> float:
        """max|y - t| / rms(t), with rms(t) = sqrt(mean(t^2))."""
        return self._by(self.largest, self._rms)

    @property
    def rms_error(self) -> float:
        """rms(y - t) / rms(t)."""
        return self._by(math.sqrt(self.squares / max(self.count, 1)), self._rms)

    @property
    def spread_error(self) -> float:
        """max|y - t| / std(t); divided by rms(t) if all numbers are equal."""
        return self._by(self.largest, math.sqrt(self.scatter / max(self.count, 1)) or self._rms)

    @property
    def _rms(self) -> float:
        return math.sqrt(self.mean**2 + self.scatter / max(self.count, 1))

    def _by(self, error: float, scale: float) -> float:
        if self.incomparable:
            return math.inf
        return error / scale if scale else math.inf if error else 0.0


def deviations(truth: Mapping[Any, Tensor], outputs: Mapping[Any, Tensor]) -> list[Deviation]:
    """Return the deviation of every output; one incomparable deviation if names differ or there are none.

    NaN in both counts as equal.
    """
    if truth.keys() != outputs.keys() or not truth:
        return [Deviation(incomparable=1)]
    found = [Deviation(equal_nan=True) for _ in truth]
    for deviation, name in zip(found, truth, strict=True):
        deviation.add(truth[name], outputs[name])
    return found


def not_a_number(outputs: Mapping[str, Tensor]) -> str | None:
    """Return the first output with NaN and no finite number, which can't be compared; None if no output is so."""
    broken = (name for name, x in outputs.items() if bool(x.isnan().any()) and not bool(x.isfinite().any()))
    return next(broken, None)


def max_error(truth: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> float:
    """Return the largest `Deviation.max_error` of all outputs; infinite if they can't be compared."""
    return max(deviation.max_error for deviation in deviations(truth, outputs))


def pieces(mask: Tensor | None, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield rows (N, d) of tensors where mask is True, in chunks, the first two by `to_comparable`."""
    if mask is not None:
        tensors = tuple(x[mask.to(x.device)] for x in tensors)
    rows = [x.detach().reshape(-1, x.shape[-1] if x.dim() > 1 else 1) for x in tensors]
    size = max(1, _PIECE // max(rows[0].shape[-1], 1))
    for piece in zip(*(x.split(size) for x in rows), strict=True):
        if piece[0].numel():
            truth, output, *others = piece
            wide = to_comparable(truth, output)
            yield *wide, *(x.to(wide[0].device) for x in others)


def to_comparable(truth: Tensor, output: Tensor) -> tuple[Tensor, Tensor]:
    """Return both tensors in float64 on the first tensor's device; numbers beyond 1e30 become infinite."""
    pair = (in_float64(x.detach().to(truth.device)) for x in (truth, output))
    t, y = (torch.where(x.abs() > _INFINITE, x.sign() * math.inf, x) for x in pair)
    return t, y


def last_bit(model: nn.Module) -> float:
    """Return the relative spacing (eps) of a model's coarsest dtype, or float32's if that is coarser.

    Some families compute in float32 inside, whatever their weights are.
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1}
    return max(torch.finfo(dtype).eps for dtype in {torch.float32, *dtypes})


def noise_floor(model: nn.Module, inputs: Mapping[str, Any]) -> float:
    """Return the largest `max_error` of two draws of `add_rounding_noise` in the `last_bit`."""

    def outputs(noise: float = 0.0, seed: int = 0) -> dict[str, Tensor]:
        with add_rounding_noise(model, noise, seed):
            return outputs_of(model, inputs)

    original, eps = outputs(), last_bit(model)
    return max(max_error(original, outputs(eps, seed)) for seed in range(DRAWS))


@contextmanager
def add_rounding_noise(model: nn.Module, noise: float, seed: int) -> Iterator[None]:
    """Context that multiplies outputs of modules with Parameters by 1 + noise * u, u uniform in (-1, 1)."""

    def shake(module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        wide = in_float64(output)
        return (wide * (1 + noise * (2 * torch.rand_like(wide) - 1))).to(output.dtype).to(output.device)

    with inference_state(model):  # removes the hooks at its end
        if noise:
            torch.manual_seed(seed)
            for module in model.modules():
                if module._parameters:
                    module.register_forward_hook(shake)
        yield
