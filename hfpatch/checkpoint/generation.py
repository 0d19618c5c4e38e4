"""`generate()` goes by the config's length; where nothing ends there any more, it neither cuts nor warns."""

from __future__ import annotations

from typing import Any

from ..core.scheme import KEY
from ..swap.config_lengths import takes_any_length


def is_unlimited(model: Any) -> bool:
    """Whether the config's length is a number that positions of an earlier time left behind."""
    parts = (getattr(model.config, KEY, None) or {}).get("pos", [])
    told = parts and parts[-1]["scheme"].get("max_positions") is not None
    return bool(parts) and not told and takes_any_length(model)
