"""Refuses settings that are overridden at opening and that the modules of the patch don't read.

`from_pretrained(folder, layer_norm_eps=1e-3)` changes the config. Norms and rotations that edits put in have their
values in the edits, so the config would say what isn't so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .errors import CheckpointError
from .host_rotary import ROPE_SETTINGS_PATH, Unrotated
from .lens import lens_of
from .norms import AffineNorm, DynamicErf, DynamicTanh
from .refuse_host import parts, settings_at
from .rotary import RotaryEmbedding


def require_effect(saved: dict[str, Any], model: Any, where: Any) -> None:
    """Refuse a setting overridden at opening that modules of the patch don't read, since their edits fix it.

    Args:
        saved: the settings on disk; the model's config has those that it was opened with.
        model: the opened one.
        where: what the checkpoint is called in an error.

    Raises:
        CheckpointError: there is one.
    """
    modules, now = list(_by_part(model)), model.config.to_dict()
    for path, _ in parts(model.config):
        before, after = settings_at(saved, path) or {}, settings_at(now, path) or {}
        inside = [module for module, own in modules if own == path]
        for names, ignores in _FIXED_BY_EDITS.items():
            changed = [name for name in names if name in after and before.get(name, after[name]) != after[name]]
            for name in changed:
                if not ignores(inside, name, before[name], after[name]):
                    continue
                raise CheckpointError(
                    f"{where} was opened with {'.'.join((*path, name))}={after[name]!r:.200}, which has no effect: the "
                    f"patch put modules in that don't read it ({before[name]!r:.200} on disk). {_INSTEAD[names]} Or "
                    "open it without that."
                )


def _by_part(model: Any) -> Iterator[tuple[nn.Module, tuple[str, ...]]]:
    """All modules, with the path in the model's config of the part that is theirs, or that of a module around them."""
    paths = {id(part): path for path, part in parts(model.config)}
    found: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        around = found.get(name.rpartition(".")[0], ())
        found[name] = paths.get(id(vars(module).get("config")), around)
        read = vars(module).get(ROPE_SETTINGS_PATH)
        yield module, found[name] if read is None else read


def _ignore_rotation(modules: list[nn.Module], name: str, before: Any, after: Any) -> bool:
    """Whether a rotation isn't by that setting: made again with another, hfpatch's own, or dropped."""
    for module in modules:
        config = module.__dict__.get("config")
        if ROPE_SETTINGS_PATH in vars(module) and getattr(config, name, after) != after:
            return True
        lens = lens_of(module, Unrotated)
        dropped = () if lens is None else lens.layer_types
        by_layer_type = None not in dropped and isinstance(before, dict) and isinstance(after, dict)
        if by_layer_type and any(before.get(kind) != after.get(kind) for kind in dropped):
            return True
        if isinstance(module, RotaryEmbedding) or (dropped and not by_layer_type):
            return True
    return False


def _ignore_eps(modules: list[nn.Module], name: str, before: Any, after: Any) -> bool:
    """Whether norms of the patch have the eps on disk, other than those without any while the host's own follow."""
    ours = [module for module in modules if isinstance(module, AffineNorm) and module.eps == before]
    follow = any(vars(one).get(own) == after for one in modules for own in ("eps", "variance_epsilon", "epsilon"))
    return bool(ours) and not (follow and all(isinstance(one, DynamicTanh | DynamicErf) for one in ours))


_ROTATION = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "partial_rotary_factor")
_EPS = ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "rms_norm_eps", "norm_eps", "norm_epsilon", "eps")
_FIXED_BY_EDITS: dict[tuple[str, ...], Callable[[list[nn.Module], str, Any, Any], bool]] = {
    _ROTATION: _ignore_rotation,
    _EPS: _ignore_eps,
}
_INSTEAD = {
    _ROTATION: "For another rotation: patch_model(original, ..., pos=RoPE(theta=..., scaling={...})).",
    _EPS: "For another eps: set it in the original's config, open the original with that, and patch it again.",
}
