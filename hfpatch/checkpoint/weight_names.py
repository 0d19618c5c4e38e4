"""Names of weights: those that a class has against those that are saved, or stand in a checkpoint's files."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from transformers import PreTrainedModel

from ..errors import FingerprintWarning
from ..runtime.errors import CheckpointError
from ..runtime.record import saved_from

# a tensor that checkpoints of hfpatch 0.2 hold beside the model's own
MARKER = "this_checkpoint_is_patched_by_hfpatch.import_hfpatch_and_open_it_with_an_Auto_class"


def require_known_names(model: PreTrainedModel, where: Any, info: Mapping[str, Collection[str]]) -> None:
    """Refuse weights that go by other names than this version of transformers has for the class that saved them.

    Weights that the file lacks alone are told: it was saved without them (a pooling layer, say).

    Args:
        info: what transformers says of loading the model.

    Raises:
        CheckpointError: it started weights afresh while the file has others that it left out.
    """
    missing, unexpected = (sorted(info.get(f"{what}_keys", ())) for what in ("missing", "unexpected"))
    if not missing or type(model).__name__ not in saved_from(model.config):
        return
    lost = f"{where} lacks {len(missing)} weights of {type(model).__name__}, which were started afresh ({missing[0]})"
    if unexpected:
        raise CheckpointError(
            f"{lost}, and has {len(unexpected)} that it doesn't have ({unexpected[0]}): this version of transformers "
            "opens it in another way than the one that it was made with. Install that one. If it is as it should be: "
            "from_pretrained(..., check_fingerprint=False), and save_pretrained."
        )
    warnings.warn(f"{lost}: it was saved without them.", FingerprintWarning, stacklevel=3)


def warn_of_lost_weights(model: PreTrainedModel, state_dict: Mapping[str, Any]) -> None:
    """Warn of a `state_dict=` without all of a model's weights; tied ones are saved once."""
    ignored = {*(model._keys_to_ignore_on_save or ())}
    for names in (model.all_tied_weights_keys or {}).items():
        ignored |= {*names} if state_dict.keys() & {*names} else set()
    lost = sorted(model.state_dict().keys() - state_dict.keys() - ignored)
    if lost:
        message = f"state_dict= lacks {len(lost)} weights of {type(model).__name__} ({lost[0]}), and is saved so."
        warnings.warn(message, FingerprintWarning, stacklevel=3)
