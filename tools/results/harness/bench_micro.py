"""Norms and rotations by themselves: against torch's, transformers' and Liger's own, and a copy of the tensor."""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hfpatch.extend import NORMS
from hfpatch.patch import patch_model
from hfpatch.runtime.norms import RMSNorm

from .timing import Case, Entrant

HEAD_DIM, TOKENS = 64, 512
FORWARD, BACKWARD = "forward", "forward and backward"
COPY = "copy"
PASSES = {FORWARD: 2, BACKWARD: 5}  # over a tensor: of x and y; also of x, dy and dx
TURNING_PASSES = {FORWARD: 2, BACKWARD: 4}  # whose backward doesn't read x


class Rotation(nn.Module):
    """Queries and keys turned by a function of (queries, keys, cosines, sines)."""

    def __init__(self, turn: Callable[..., tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.turn = turn

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        return self.turn(*given)


class Copy(nn.Module):
    """A copy into memory that is there already: what moving a tensor costs at the least."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.into = torch.empty_like(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.into.copy_(x)


def liger(path: str) -> Any:
    """Something of the package liger-kernel, which runs on a GPU; None where it isn't installed."""
    if importlib.util.find_spec("liger_kernel") is None or not torch.cuda.is_available():
        return None
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"liger_kernel.transformers.{module}"), name)


def patched_part(path: str, width: int, **request: Any) -> Any:
    """A module of a GPT-2 that was patched: the same code that a patched model runs."""
    config = GPT2Config(n_layer=1, n_embd=width, n_head=width // HEAD_DIM, vocab_size=8, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        model = GPT2Model(config)
    scheme = NORMS.get(request.get("norm", ""))
    start = "reset" if getattr(scheme, "needs_calibration", False) else "copy"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it doesn't compute the same: there is nothing to keep
        patch_model(model, init=start, **request)
    return model.get_submodule(path).to_empty(device="cpu")


def norms(x: Tensor) -> Iterator[tuple[str, nn.Module, list[Tensor]]]:
    """Names, modules and what they are given, which is like `x`, (rows, width)."""
    width = x.shape[1]
    made = {"LayerNorm": nn.LayerNorm(width)}
    for name, scheme in {"RMSNorm": "rms", "DyT": "dyt", "Derf": "derf", "fixed": "fixed"}.items():
        made[name] = patched_part("ln_f", width, norm=scheme)
    made["RMSNorm, no shift"] = RMSNorm.replacing(nn.LayerNorm(width, bias=False), nn.Module(), eps=1e-5)
    made["torch RMSNorm"] = nn.RMSNorm(width, eps=1e-6)
    made["LlamaRMSNorm"] = LlamaRMSNorm(width)
    if (theirs := liger("rms_norm.LigerRMSNorm")) is not None:
        made["Liger RMSNorm"] = theirs(width)
    for name, module in made.items():
        for parameter in module.parameters():
            nn.init.normal_(parameter, mean=1.0, std=0.1)
        yield name, module, [torch.randn_like(x)]


def rotations(x: Tensor) -> Iterator[tuple[str, nn.Module, list[Tensor]]]:
    """As `norms`; queries and keys are (B, H, T, head_dim) for transformers', (B, T, H, head_dim) for ours."""
    q, k = (torch.randn_like(x).view(-1, TOKENS, x.shape[1] // HEAD_DIM, HEAD_DIM) for _ in range(2))
    angles = torch.randn(1, TOKENS, HEAD_DIM // 2, device=x.device)
    both, signed = torch.cat((angles, angles), -1), torch.cat((-angles, angles), -1)
    given = [
        q.transpose(1, 2).contiguous(),
        k.transpose(1, 2).contiguous(),
        both.cos().to(x.dtype),
        both.sin().to(x.dtype),
    ]
    yield "transformers", Rotation(apply_rotary_pos_emb), given
    if (theirs := liger("rope.liger_rotary_pos_emb")) is not None:
        yield "Liger", Rotation(theirs), [x.clone() for x in given]  # in place
    rotate = patched_part("h.0.attn.rotary_emb", x.shape[1], pos="rope").rotate
    ours = Rotation(lambda q, k, cos, sin: (rotate(q, (cos, sin)), rotate(k, (cos, sin))))
    yield "RoPE", ours, [q, k, both[:, :, None].cos(), signed[:, :, None].sin()]


def forward_and_backward(module: nn.Module, given: list[Tensor]) -> Callable[[], Any]:
    needed = [x.requires_grad_() for x in given[:2]] + list(module.parameters())  # not the angles
    out = module(*given)
    grads = [torch.randn_like(y) for y in (out if isinstance(out, tuple) else (out,))]
    return lambda: torch.autograd.grad(module(*given), needed, grads)


def entrants(kind: str, work: str, width: int, config: Any, device: torch.device, mode: str) -> Iterator[Entrant]:
    dtype = getattr(torch, config.precision)
    rows = config.mebibytes * 2**20 // (width * dtype.itemsize)
    rows = max(1, rows // TOKENS) * TOKENS
    x = torch.empty(rows, width, dtype=dtype, device=device)
    passes = PASSES[work] if kind == "norm" else 2 * TURNING_PASSES[work]  # of queries and keys
    for name, module, given in (norms if kind == "norm" else rotations)(x):
        module.to(device, dtype)
        once = torch.no_grad()(partial(module, *given)) if work == FORWARD else forward_and_backward(module, given)
        yield Entrant(name, once, module, {"regions": "model"}, traffic=passes * x.nbytes)
    moved = Copy(x)
    yield Entrant(COPY, torch.no_grad()(partial(moved, torch.randn_like(x))), moved, None, traffic=2 * x.nbytes)


def micro_cases(config: Any, device: torch.device) -> Iterator[Case]:
    for width, kind, work in product(config.widths, ("norm", "rotary"), (FORWARD, BACKWARD)):
        yield f"{kind}, {width} {config.precision}", work, partial(entrants, kind, work, width, config, device)
