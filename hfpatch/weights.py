"""What is wrong with weights that can't be read: safetensors' own message names neither the file nor a remedy."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any


def broken_file(name: Any, subfolder: str) -> str | None:
    """The first safetensors file of a local folder whose size isn't what its header says."""
    if not isinstance(name, str | os.PathLike):
        return None
    for path in sorted((Path(name) / subfolder).glob("*.safetensors")):
        size = path.stat().st_size
        try:
            with path.open("rb") as file:
                length = struct.unpack("<Q", file.read(8))[0]
                if 8 + length > size:
                    return f"{path.name} is cut off inside its header ({size} bytes). Download or save it again."
                header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
            expected = 8 + length + max(ends, default=0)
        except (struct.error, ValueError, TypeError, AttributeError, LookupError):
            return f"{path.name} has no readable header. Download or save it again."
        if expected != size:
            return f"{path.name} has {size} bytes where its header promises {expected}. Download or save it again."
    return None
