"""The latest repair's report in a small file beside the weights, `hfpatch_repair.json`; config.json has its digest.

Opening a checkpoint reads the file's bytes, and `repair_report` parses them: a model runs without what repairs, and
when it is saved elsewhere the report goes with it, even if the folder that it came from is gone by then.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..runtime.errors import CheckpointError
from ..runtime.record import REPAIR
from .file_digests import finder

if TYPE_CHECKING:
    from ..repairs.report import RepairReport

REPAIR_FILE = "hfpatch_repair.json"


@dataclass(frozen=True)
class SavedReport:
    """A report as it was read with its model.

    Attributes:
        where: the checkpoint, for error texts.
        content: the file's; None if it is missing, can't be read, or isn't the one that was saved.
    """

    where: str
    content: bytes | None

    @classmethod
    def read(cls, name: Any, options: Mapping[str, Any], config: Any, digest: Any) -> SavedReport:
        """The report of a checkpoint whose config.json has this digest of it.

        Args:
            name, options: as in `from_pretrained`.
            config: the opened config, whose commit of a repository the file is of.
            digest: what `digest_of` gave.
        """
        commit = getattr(config, "_commit_hash", None) or options.get("revision")
        try:
            path = finder(name, {**options, "revision": commit})(REPAIR_FILE)
            content = b"" if path is None else path.read_bytes()
        except OSError:
            content = b""
        return cls(str(name), content if digest_of(content) == digest else None)

    def report(self) -> RepairReport:
        """The report.

        Raises:
            CheckpointError: there is none, it is malformed, or of a later version.
        """
        from ..repairs.report import RepairReport

        if self.content is None:
            raise CheckpointError(
                f"{self.where}: {REPAIR_FILE}, the report of its repair, was missing when the model was opened, or "
                "wasn't the one that was saved with it. Download the checkpoint again; saving it without that file "
                "makes it one without a report."
            )
        try:
            found = RepairReport.from_json(json.loads(self.content))
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{self.where}: {REPAIR_FILE} can't be read: {error}") from error
        if not str(found).replace("\n", "").isprintable():
            raise CheckpointError(f"{self.where}: {REPAIR_FILE} has characters that can't be printed.")
        return found


def report_of(model: nn.Module) -> RepairReport | None:
    """Report of a model's latest repair, made in this process or saved with it.

    Raises:
        CheckpointError: as in `SavedReport.report`.
    """
    kept = vars(model).get(REPAIR)
    return kept.report() if isinstance(kept, SavedReport) else kept


def content_of(model: nn.Module) -> bytes | None:
    """What the file of a model's report holds; None without one."""
    kept = vars(model).get(REPAIR)
    if kept is None or isinstance(kept, SavedReport):
        return None if kept is None else kept.content
    return (json.dumps(kept.to_json(), indent=1, allow_nan=False) + "\n").encode()


def write_report(model: nn.Module, folder: Path) -> None:
    """Write the file of a model's report, if it has one, beside its config.json; an adapter is saved without either."""
    content = content_of(model)
    if content is not None and (folder / "config.json").is_file():
        (folder / REPAIR_FILE).write_bytes(content)


def digest_of(content: bytes) -> str:
    """The first half of the sha256 of a file's bytes."""
    return hashlib.sha256(content).hexdigest()[:32]
