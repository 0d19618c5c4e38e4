"""Norms, norms behind a residual sum, and rotations by themselves: against torch's, transformers' and other kernels."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hfpatch.compile import compile_model
from hfpatch.patch import patch_model

from .timing import MODES, Entrant, race

HEAD_DIM, TOKENS = 64, 512
KINDS = ("norm", "norm of a sum", "rotary")
FORWARD, BACKWARD = "forward", "forward and backward"
KERNELS = ("Liger", "Hub")  # of which each is a kernel already
COPY, BASIS = "copy", {"norm": "LayerNorm", "norm of a sum": "LayerNorm", "rotary": "transformers"}


class ReferenceDyT(nn.Module):
    """gamma * tanh(alpha x) + beta as its paper writes it (Zhu et al. 2025, arXiv:2503.10622, algorithm 1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((1,), 0.5))
        self.gamma = nn.Parameter(torch.ones(width))
        self.beta = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma * torch.tanh(self.alpha * x) + self.beta


class OfASum(nn.Module):
    """x + y and its norm, as a pre-norm block needs both."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        stream = x + y
        return stream, self.norm(stream)


class Rotation(nn.Module):
    """Queries and keys (B, T, H, head_dim) turned as a patched attention does, the angles being given."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotate: Any = self.rotary.rotate
        return rotate(q, (cos, sin)), rotate(k, (cos, sin))


class TransformersRotation(nn.Module):
    """Queries and keys (B, H, T, head_dim) turned as transformers' Llama does."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb(q, k, cos, sin)


def patched_part(path: str, width: int, **request: Any) -> nn.Module:
    """A module of a GPT-2 that was patched: the same code that a patched model runs."""
    heads = max(1, width // HEAD_DIM)
    config = GPT2Config(n_layer=1, n_embd=width, n_head=heads, vocab_size=8, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        model = GPT2Model(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it doesn't compute the same: there is nothing to keep
        patch_model(model, init="copy", **request)
    return model.get_submodule(path).to_empty(device="cpu")


def norms(width: int, device: torch.device) -> dict[str, Callable[[], nn.Module]]:
    """Makers of what is compared, by name; on a GPU also of Liger's and the Hub's kernels, where they are installed."""
    found: dict[str, Callable[[], nn.Module]] = {
        "LayerNorm": lambda: nn.LayerNorm(width),
        "RMSNorm": lambda: patched_part("ln_f", width, norm="rms"),
        "DyT": lambda: patched_part("ln_f", width, norm="dyt"),
        "Derf": lambda: patched_part("ln_f", width, norm="derf"),
        "LlamaRMSNorm": lambda: LlamaRMSNorm(width),
        "DyT, reference": lambda: ReferenceDyT(width),
    }
    if device.type == "cuda" and importlib.util.find_spec("liger_kernel"):
        found["RMSNorm, Liger"] = lambda: _liger("LigerRMSNorm", width)
        found["DyT, Liger"] = lambda: _liger("LigerDyT", width)
    if device.type == "cuda" and importlib.util.find_spec("kernels"):
        found["RMSNorm, Hub"] = lambda: _from_hub(LlamaRMSNorm(width))
    return found


def _liger(name: str, width: int) -> nn.Module:
    import liger_kernel.transformers

    return getattr(liger_kernel.transformers, name)(width)


def _from_hub(norm: nn.Module) -> nn.Module:
    from kernels import Mode, kernelize

    return kernelize(norm.cuda(), mode=Mode.TRAINING, device="cuda")


def subjects(kind: str, width: int, device: torch.device) -> dict[str, Callable[[], nn.Module]]:
    if kind == "rotary":
        return {
            "transformers": TransformersRotation,
            "RoPE": lambda: Rotation(patched_part("h.0.attn.rotary_emb", width, pos="rope")),
        }
    found = norms(width, device)
    if kind == "norm":
        return found
    return {name: lambda make=make: OfASum(make()) for name, make in found.items() if "reference" not in name}


def inputs(kind: str, subject: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """What a subject takes: `shape` is (rows, width). The tensors that need a gradient come first."""
    rows, width = shape
    make = {"dtype": dtype, "device": device}
    if kind == "norm":
        return [torch.randn(rows, width, **make)]
    if kind == "norm of a sum":
        return [torch.randn(rows, width, **make) for _ in range(2)]
    tokens = min(TOKENS, rows)
    heads = (rows // tokens, tokens, width // HEAD_DIM, HEAD_DIM)
    angles = torch.randn(1, tokens, HEAD_DIM // 2, device=device)
    both = [torch.randn(heads, **make) for _ in range(2)]
    both_halves = torch.cat((angles, angles), -1)
    if subject == "transformers":
        phases = both_halves.to(dtype)
        return [*(x.transpose(1, 2).contiguous() for x in both), phases.cos(), phases.sin()]
    return [*both, both_halves[:, :, None].cos(), torch.cat((-angles, angles), -1)[:, :, None].sin()]


def least_bytes(kind: str, work: str, elements: int, size: int) -> int:
    """Bytes that have to be moved, with everything else fused away; `elements` of one of the large tensors.

    A norm reads x and writes y; backward reads x and dy and writes dx. A sum reads one tensor more and writes one more,
    each way. A rotation moves queries and keys, and its backward doesn't need them.
    """
    moved = {"norm": (2, 5), "norm of a sum": (4, 8), "rotary": (4, 8)}[kind][work == BACKWARD]
    return moved * elements * size


def entrants(
    kind: str, work: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, modes: list[str]
) -> Iterator[Entrant]:
    """Everything that is timed against one another, a plain copy included."""
    elements, size = shape[0] * shape[1], dtype.itemsize
    source = torch.randn(shape, device=device).to(dtype)
    target = torch.empty_like(source)
    yield Entrant(COPY, "eager", lambda: target.copy_(source), None, 2 * elements * size)
    moved = least_bytes(kind, work, elements, size)
    for name, make in subjects(kind, shape[1], device).items():
        module = make().to(device, dtype)
        for parameter in module.parameters():
            nn.init.normal_(parameter, mean=1.0, std=0.1)
        given = inputs(kind, name, shape, dtype, device)
        once = runner(module, given, work)
        taking = [mode for mode in MODES if mode in modes and not (mode == "compiled" and name.endswith(KERNELS))]
        if "compiled" in taking:
            compile_model(module, "model", dynamic=False)
        yield from (Entrant(name, mode, once, module, moved) for mode in taking)


def runner(module: nn.Module, given: list[Tensor], work: str) -> Callable[[], Any]:
    if work == FORWARD:

        @torch.no_grad()
        def forward() -> None:
            module(*given)

        return forward
    needed = [x.requires_grad_() for x in given[:2] if x.numel() == given[0].numel()]
    needed += [parameter for parameter in module.parameters() if parameter.requires_grad]
    with torch.no_grad():
        out = module(*given)
    grads = [torch.randn_like(y) for y in (out if isinstance(out, tuple) else (out,))]

    def both() -> None:
        torch.autograd.grad(module(*given), needed, grads)

    return both


def micro_groups(config: Any, device: torch.device) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """What each kind, width, dtype and work is, and what measures it."""

    def measured(kind: str, work: str, shape: tuple[int, int], dtype: torch.dtype) -> dict[str, Any]:
        torch.compiler.reset()
        taking = list(entrants(kind, work, shape, dtype, device, config.modes))
        return {"timings": race(taking, config.repeats, device)}

    for width in config.widths:
        for dtype_name in config.dtypes:
            dtype = getattr(torch, dtype_name)
            rows = max(TOKENS, int(config.megabytes * 2**20) // (width * dtype.itemsize) // TOKENS * TOKENS)
            for kind in KINDS:
                for work in (FORWARD, BACKWARD):
                    group = {"part": "micro", "case": kind, "work": work, "width": width, "dtype": dtype_name}
                    yield group | {"rows": rows}, partial(measured, kind, work, (rows, width), dtype)
