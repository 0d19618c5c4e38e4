"""Pushes a patched model or its folder to a model repository on the Hub, as one commit.

By `HfApi.create_commit`, not `upload_folder`: if hf_xet is installed, this commits a folder in several parts, and a
push that breaks off would leave half a checkpoint behind.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub import errors as hub_errors
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedModel

from ..checkpoint.file_digests import DIGEST_FILES
from ..checkpoint.files import PAGE
from ..core.holders import model_inside
from ..core.results import Table
from ..errors import HubError, OptionError
from ..export import FORMS
from ..runtime.patch_errors import PatchError
from ..verification.verify_report import Report
from .card import card, metadata_of
from .folder import CARD, Checkpoint, checkpoint_of

HTTPError: type[Exception] = hub_errors.HTTPError  # httpx's or httpx2's, whichever the client uses
# Files in the repository about other weights, which transformers would open, or people would read
STALE_WEIGHTS = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    DIGEST_FILES,  # digests of weights that were pushed before
    PAGE,
)
_VOCABULARIES = ("tokenizer", "vocab", "spiece")


@dataclass
class Push:
    """Result of `push_patched` (with `dry_run`, the expected result); `str(push)` is a table of the files.

    Attributes:
        repo_id, revision: the repository and its branch; None is the main branch.
        url: URL of the repository, its branch, or the pull request.
        commit: the commit that holds the checkpoint; after a dry run the branch's newest commit.
        files: sizes in bytes by the paths that the repository gets; files that it has already aren't sent again.
        deleted: older weights in the repository, which the same commit deletes.
        left_out: paths in the folder that aren't uploaded: hidden files, secrets, logs, caches, pickles, links.
        notes: what else there is to know.
        dry_run: whether nothing was sent.
    """

    repo_id: str
    revision: str | None
    url: str
    commit: str | None
    files: dict[str, int]
    deleted: list[str]
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False

    def __str__(self) -> str:
        rows = [("file", "bytes"), *((path, f"{size:,}") for path, size in self.files.items())]
        rows += [(path, "deleted") for path in self.deleted]
        size = f"{len(self.files)} files ({sum(self.files.values()):,} bytes)"
        done = f"{'Would push' if self.dry_run else 'Pushed'} {size} to {self.url}"
        done += f" ({self.commit})." if self.commit and not self.dry_run else "."
        left = [f"Left out: {', '.join(self.left_out)}."] if self.left_out else []
        return "\n".join([str(Table(rows, "<>")), done, *left, *(f"Note: {note}." for note in self.notes)])


def push_patched(
    model: PreTrainedModel | str | PathLike[str],
    repo_id: str,
    *,
    form: str | None = None,
    tokenizer: Any = None,
    base_model: str | PathLike[str] | None = None,
    license: str | None = None,
    report: Report | None = None,
    private: bool = True,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    max_shard_size: str | int | None = None,
    trust_remote_code: bool = False,
    token: str | bool | None = None,
    dry_run: bool = False,
) -> Push:
    """Push a patched model to a model repository of the Hub, with a model card, as one commit.

    The commit is made once every file has arrived, and only if the branch hasn't moved since the push began. Until then
    nobody sees any of the files. The same call again finishes a push that broke off. Weights are uploaded as
    safetensors only; the same commit deletes weights in the repository that transformers might open instead.

    A folder's weights and its config.json are compared, byte by byte, with the digests that were saved beside them; a
    FingerprintWarning says if there are no digests.

    The card says what was patched, how to open it, and what is known of quality and licence. It links to the page that
    `hfpatch report` wrote into the folder (hfpatch_report.html). A README.md of the folder (or of the repository, if
    the folder has none) keeps its text: only the section of an earlier push is renewed, and its metadata is completed.

    Args:
        model: the model (or SentenceTransformer) in memory, or the folder that `save_pretrained` or an export wrote; it
            stays as it is.
        repo_id: user/name, or name alone for your own. The repository is created if it doesn't exist.
        form: "plugin", "remote" or "native" as in `export_model`, for a model in memory. A folder has its form already;
            "native" says that it is a native export: otherwise a folder without a patch record is refused.
        tokenizer: a tokenizer or processor to upload with the model, or its name; a folder brings its own.
        base_model: the model that was patched: its Hub id, or its folder, of which only the card is read. A model in
            memory that came from the Hub knows it.
        license: the licence's id on the Hub. By default the base model's, if its card can be read; it is never guessed.
        report: what `verify` measured, for the card.
        private: whether a new repository is private; an existing repository stays as it is.
        revision: the branch; it is created from the main branch if it doesn't exist. None is the main branch.
        create_pr: open a pull request instead.
        commit_message, token: as in huggingface_hub.
        max_shard_size: largest file of weights that is written, as in `save_pretrained`.
        trust_remote_code: run the code in the tokenizer's repository.
        dry_run: send nothing; return what would be sent.

    Raises:
        CheckpointError: the folder isn't a checkpoint that hfpatch wrote, its weights are broken, its weights or
            config.json differ from what was saved, or the model isn't patched.
        WrappedModelError: the model is wrapped.
        OptionError: an argument is outside its domain, the report is of another model, or the metadata of README.md
            can't be read.
        UnsupportedError, VerificationError: the model can't be written in this form; the message says why.
        PatchError: the tokenizer doesn't open again with the model.
        HubError: the Hub refused the push, somebody else committed meanwhile, or the connection was lost. The message
            is the Hub client's, whose own error is the cause.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16))
        >>> from hfpatch import patch_model, push_patched
        >>> print(push_patched(patch_model(model, norm="rms"), "me/gpt2-rms", license="mit", dry_run=True))
        file                     bytes
        ...
        Would push 5 files (...) to https://huggingface.co/me/gpt2-rms.
        ...
    """
    if form is not None and form not in FORMS:
        raise OptionError(f"form must be one of {', '.join(FORMS)}, not {form!r:.40}.")
    if not isinstance(report, Report | None):
        raise OptionError(f"report must be of Report, not {type(report).__name__}.")
    if base_model is not None and not Path(base_model).is_dir():
        with _typed_errors(f"base_model={str(base_model)!r:.80} is neither a folder nor a model's id", OptionError):
            validate_repo_id(str(base_model))
    # with True the client says how to log in if nobody is
    api = HfApi(token=True if token is None and not dry_run else token, library_name="hfpatch")
    origin = str(base_model or getattr(model_inside(model), "name_or_path", ""))
    said: dict[str, Any] = {"license": license, "report": report}
    if origin not in ("", repo_id):
        said["base_data"] = metadata_of(origin, api.token)
        if not Path(origin).is_dir() and (base_model is not None or said["base_data"] is not None):
            said["base_model"] = origin
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        found = checkpoint_of(model, form, tokenizer, scratch, max_shard_size, trust_remote_code)
        if report is not None and found.patched is not None:
            report.require_of(found.patched)
        with _typed_errors(repo_id):
            if not dry_run:
                repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
                if revision and not create_pr and not api.revision_exists(repo_id, revision):
                    api.create_branch(repo_id, branch=revision, exist_ok=True)
            url = f"{api.endpoint}/{repo_id}" + (f"/tree/{revision}" if revision else "")
            push = Push(repo_id, revision, url, None, {}, [], found.left_out, dry_run=dry_run)
            contents = _prepare(push, api, found, said, private, scratch)
            if not dry_run:
                operations: list[Any] = [CommitOperationAdd(path, content) for path, content in contents.items()]
                where: dict[str, Any] = {"revision": revision, "create_pr": create_pr}
                # by itself the client leaves out what the repository's .gitignore names, and commits the rest
                api.preupload_lfs_files(repo_id, operations, gitignore_content="# nothing is ignored\n", **where)
                where |= {"commit_message": commit_message or f"Upload {found.title}, patched by hfpatch"}
                operations += map(CommitOperationDelete, push.deleted)
                done = api.create_commit(repo_id, operations, parent_commit=push.commit, **where)
                push.commit, push.url = done.oid, done.pr_url or push.url
        return push


def _prepare(
    push: Push, api: HfApi, found: Checkpoint, said: dict[str, Any], private: bool, scratch: Path
) -> dict[str, Path | bytes]:
    """What the branch's newest commit would become: the files with their card; the rest is written into `push`."""
    there: set[str] = set()
    try:
        info = api.model_info(push.repo_id, revision=push.revision)
        push.commit, there = info.sha, {one.rfilename for one in info.siblings or ()}
        if private and not info.private:
            push.notes.append("the repository is public already, so anyone can read this")
    except (HTTPError, OSError, ValueError) as error:
        if not push.dry_run:
            raise
        reason = " ".join(str(error).split())
        push.notes.append(f"the repository or branch doesn't exist or can't be seen: a push would create it ({reason})")
    written = found.files[CARD].read_text("utf-8-sig") if CARD in found.files else None
    if written is None and CARD in there:  # into a temporary folder: the cache would outlive the push
        path = api.hf_hub_download(push.repo_id, CARD, revision=push.commit, local_dir=scratch)
        written = Path(path).read_text("utf-8-sig")
    text, notes = card(found, push.repo_id, written, **said)
    push.notes += notes
    contents: dict[str, Path | bytes] = {**found.files, CARD: text.encode()}
    if "vocab_size" in found.config and not any(name.startswith(_VOCABULARIES) for name in contents):
        push.notes.append("no tokenizer is uploaded: pass one with tokenizer= (--tokenizer)")
    stale = {name for name in there if "/" not in name and any(fnmatchcase(name, glob) for glob in STALE_WEIGHTS)}
    push.deleted = sorted(stale - contents.keys())
    for name, one in sorted(contents.items()):
        push.files[name] = len(one) if isinstance(one, bytes) else one.stat().st_size
    return contents


@contextmanager
def _typed_errors(start: str, typed: type[PatchError] = HubError) -> Iterator[None]:
    """Context in which an error of the client becomes an error of hfpatch, in its words."""
    try:
        yield
    except PatchError:
        raise
    except (HTTPError, RuntimeError, OSError, ValueError) as error:
        # the client wraps the cause of a broken upload or download
        wrapped = isinstance(error, RuntimeError | LocalEntryNotFoundError)
        cause = error.__cause__ if wrapped and error.__cause__ else error
        raise typed(f"{start}: {' '.join(str(cause).split())}") from cause
