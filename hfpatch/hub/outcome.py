"""What came of a push: every file, what stayed behind, what there is to know."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.plan_table import table


@dataclass(frozen=True)
class PushedFile:
    """One file of a push: its path in the repository, its size in bytes, and "new", "changed", "same" or "deleted"."""

    path: str
    size: int
    state: str


@dataclass
class Push:
    """What a push did, or with `dry_run` would do; `str(push)` is the table.

    Attributes:
        repo_id, revision: where to; None is the main branch.
        url: of the repository, its branch, or the pull request.
        commit: the commit that holds the checkpoint; of a dry run the branch's newest one.
        files: what the repository gets, keeps and loses.
        left_out: (path, reason) of what stayed behind.
        notes: what there is to know besides.
        dry_run: whether nothing was sent.
    """

    repo_id: str
    revision: str | None
    url: str
    commit: str | None
    files: list[PushedFile]
    left_out: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False

    @property
    def changed(self) -> list[PushedFile]:
        """The files that the repository didn't have like this."""
        return [file for file in self.files if file.state != "same"]

    def __str__(self) -> str:
        lines = [("file", "bytes", "upload")]
        words = {"new": "new", "changed": "changed", "same": "no: is there", "deleted": "no: deleted there"}
        lines += [(file.path, f"{file.size:,}", words[file.state]) for file in self.files]
        sent = [file.size for file in self.changed if file.state != "deleted"]
        if not self.changed:
            did = f"{self.url} holds exactly this; no commit is {'needed' if self.dry_run else 'made'}"
        else:
            did = f"{'Would push' if self.dry_run else 'Pushed'} {len(sent)} files ({sum(sent):,} bytes) to {self.url}"
        did += f" ({self.commit})." if self.commit and not self.dry_run else "."
        left = [f"Left out: {path} ({reason})." for path, reason in self.left_out]
        return "\n".join([table(lines, "<><"), did, *left, *(f"Note: {note}." for note in self.notes)])
