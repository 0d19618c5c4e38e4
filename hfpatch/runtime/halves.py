"""Refuses to save a model with a patched part as an unpatched one, since the patch would be lost.

A part doesn't know what it is inside, and a checkpoint has one patch record, the outermost model's. So what is asked
is the model that is being saved: `save_pretrained` of every transformers model looks for such parts first. Nothing
else is touched: `state_dict`, `torch.save`, copies and wrappers see the model as it is.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel

from .errors import UnsupportedError
from .record import KEY

_CHECKS = "hfpatch_checks_parts"  # marks the method: each remote checkpoint has a copy of this file


def check_every_save() -> None:
    """Let `save_pretrained` of all transformers models call `require_whole`, once in a process."""
    save = PreTrainedModel.save_pretrained
    if hasattr(save, _CHECKS):
        return

    @functools.wraps(save)
    def save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        require_whole(self)
        save(self, *args, **kwargs)

    vars(save_pretrained)[_CHECKS] = True
    PreTrainedModel.save_pretrained = save_pretrained


def require_whole(model: Any) -> None:
    """Refuse a model whose checkpoint would open without the patch of one of its parts.

    A class that builds the part patched from its own config is fine, and so is what saves adapters alone.

    Raises:
        UnsupportedError: it would; names the part, and the call that patches it through the whole.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        return
    own = _record_of(model)
    lost = {name: record for name, record in _patched_parts(model) if record != own}
    if not lost or _is_built_by_its_caller(type(model)):
        return
    built = _built_parts(model)
    lost = {name: record for name, record in lost.items() if built.get(name) != record}
    for name, record in lost.items():
        kind = type(model).__name__
        raise UnsupportedError(
            f"{kind}: {name} in it was patched by itself, and the checkpoint of the whole has no record of that: it "
            f"would open unpatched. Build the {kind} of unpatched parts and patch the whole: "
            f"{'; '.join(_calls(name, record))}. Values that were trained since go over by "
            "load_state_dict(trained.state_dict()). The part by itself can be saved: "
            f"model.{name}.save_pretrained(...)."
        )


def _patched_parts(model: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, patch record) of the patched models inside a model."""
    for name, part in model.named_modules():
        if name and isinstance(part, PreTrainedModel) and hasattr(type(part), "hfpatch_model"):
            yield name, _record_of(part)


def _record_of(model: Any) -> dict[str, Any]:
    """A model's patch record; an empty one where it isn't patched."""
    return getattr(model.config, KEY, None) or {}


def _is_built_by_its_caller(kind: type) -> bool:
    """Whether a class takes more than a config to be built, so that whoever opens its checkpoint brings the parts."""
    try:
        inspect.signature(kind).bind(None)
    except TypeError:
        return True
    return False


def _built_parts(model: Any) -> dict[str, dict[str, Any]]:
    """The patched parts, by name, that a model's class builds from its config as that is read from a file."""
    config = type(model.config)
    try:
        stored = json.loads(model.config.to_json_string())
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return dict(_patched_parts(type(model)(config.from_dict(stored))))
    except Exception:  # of the host's own code: what can't be built can't be opened either
        return {}


def _calls(name: str, record: dict[str, Any]) -> Iterator[str]:
    """The calls of `patch_model` on the whole that patch a part as its record says."""
    for request in record.get("request", ()):
        options = {key: value for key, value in request.items() if key != "outcome"}
        options["only"] = [f"{name}.{glob}" for glob in request.get("only", ())] or f"{name}.*"
        if keep := request.get("keep"):
            options["keep"] = [f"{name}.{glob}" for glob in keep]
        yield f"patch_model(model, {', '.join(f'{key}={value!r}' for key, value in options.items())})"
