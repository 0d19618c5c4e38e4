"""Table of the modules that a patch changed, compared with the unpatched class on the meta device.

No weights are compared, so what a patch wrote into them alone (centred projections) isn't seen; `verify` sees it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..checkpoint.by_name import random_weights
from ..measure.copies import copy_of, unpatched_config
from ..verification.module_diff import compare_modules
from ..verification.report import ModuleRow, module_lines

HEADINGS = ("module", "original", "patched", "state", "note")  # of the cells of `module_lines`


def unpatched_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model of the same class and settings without the patch, on the meta device."""
    return copy_of(model, config=unpatched_config(model.config), device="meta")


def changed_modules(model: PreTrainedModel) -> list[ModuleRow]:
    """Return rows for the changed modules, then for the norms that were kept.

    `model` may be on the meta device.
    """
    return sorted(compare_modules(model, unpatched_model(model)), key=lambda row: row.state == "kept")


def changes_by_config(config: Any) -> list[tuple[str, ...]]:
    """Return these rows as a table with headings, from a patched checkpoint's config.

    [] where nothing changed in the structure, or the model can't be built from its config alone.
    """
    try:
        with torch.device("meta"):
            model = random_weights(config, None, trust=False)
        lines = list(module_lines(changed_modules(model)))
    except Exception:  # whatever a model's constructor may raise; a card does without the table
        return []
    return [HEADINGS, *lines] if lines else []
