"""Pushes a patched model or its folder to a model repository on the Hub, as one commit.

By `HfApi.create_commit`, not `upload_folder`: where hf_xet is installed, that commits a folder in several parts, and a
push that breaks off would leave half a checkpoint behind.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, EvalResult, HfApi, get_token
from huggingface_hub import errors as hub_errors
from huggingface_hub.errors import (
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils.sha import git_hash
from transformers import PreTrainedModel

from ..checkpoint.file_digests import DIGEST_FILES, VERSION_2_REPORT
from ..checkpoint.files import PAGE
from ..core.holders import model_inside
from ..core.results import Table
from ..errors import HubError, OptionError
from ..export import FORMS
from ..verification.report import Report
from .card import CardFacts, base_of, card
from .folder import CARD, checkpoint_of

T = TypeVar("T")
HTTPError: type[Exception] = hub_errors.HTTPError  # httpx's or httpx2's, as the client has it
# Files in the repository that say something of other weights: transformers would open them, or people read them
STALE_WEIGHTS = (
    "model*.safetensors",
    "model.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    DIGEST_FILES,  # of weights that were pushed before
    VERSION_2_REPORT,
    PAGE,
)
_VOCABULARIES = ("tokenizer", "vocab", "spiece")
_TRANSIENT = (408, 429, 500, 502, 503, 504)  # the statuses that the client itself tries again, where it does
_LONGEST_WAIT, _LONGEST_RETRY_AFTER = 16, 120  # seconds


@dataclass(frozen=True, order=True)
class PushedFile:
    """One file of a push: its path in the repository, its size in bytes, and "new", "changed", "same" or "deleted"."""

    path: str
    size: int
    state: str


@dataclass
class Push:
    """Result of `push_patched` (with `dry_run`, the expected one); `str(push)` is a table of the files.

    Attributes:
        repo_id, revision: where to; None is the main branch.
        url: of the repository, its branch, or the pull request.
        commit: the commit that holds the checkpoint; of a dry run the branch's newest one.
        files: what the repository gets, keeps and loses.
        left_out: paths in the folder that aren't uploaded: hidden files, secrets, logs, caches, pickles, links.
        notes: what else there is to know.
        dry_run: whether nothing was sent.
    """

    repo_id: str
    revision: str | None
    url: str
    commit: str | None
    files: list[PushedFile]
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False

    @property
    def changed(self) -> list[PushedFile]:
        """The files that the repository didn't have like this."""
        return [file for file in self.files if file.state != "same"]

    def __str__(self) -> str:
        lines = [("file", "bytes", "state"), *((file.path, f"{file.size:,}", file.state) for file in self.files)]
        sent = [file.size for file in self.changed if file.state != "deleted"]
        if not self.changed:
            done = f"{self.url} has these files already; no commit is {'needed' if self.dry_run else 'made'}"
        else:
            done = f"{'Would push' if self.dry_run else 'Pushed'} {len(sent)} files ({sum(sent):,} bytes) to {self.url}"
        done += f" ({self.commit})." if self.commit and not self.dry_run else "."
        left = [f"Left out: {', '.join(self.left_out)}."] if self.left_out else []
        return "\n".join([str(Table(lines, "<><")), done, *left, *(f"Note: {note}." for note in self.notes)])


def push_patched(
    model: PreTrainedModel | str | PathLike[str],
    repo_id: str,
    *,
    form: str | None = None,
    native: bool = False,
    tokenizer: Any = None,
    base_model: str | PathLike[str] | None = None,
    license: str | None = None,
    report: Report | None = None,
    eval_results: EvalResult | Iterable[EvalResult] = (),
    private: bool = True,
    revision: str | None = None,
    subfolder: str = "",
    create_pr: bool = False,
    commit_message: str | None = None,
    max_shard_size: str | int | None = None,
    trust_remote_code: bool = False,
    token: str | bool | None = None,
    endpoint: str | None = None,
    retries: int = 5,
    dry_run: bool = False,
) -> Push:
    """Push a patched model to a model repository of the Hub, with a model card, as one commit.

    The commit is made once every file has arrived, and only if the branch is still where it was when the push began;
    until then nobody sees anything of it. The same call again finishes a push that broke off. Weights travel as
    safetensors only; weights in the repository that transformers might open instead are deleted by the same commit.

    A folder's weights and its config.json are compared, byte by byte, with the digests that were saved beside them; a
    FingerprintWarning says if there are none.

    The card says what was patched, how to open it, and what is known of quality and licence. It links to the page that
    `hfpatch report` wrote into the folder (hfpatch_report.html), which travels where the folder is pushed in its own
    form. A README.md of the folder (or of the repository, where the folder has none) keeps its text: only the section
    of an earlier push is renewed, and its metadata is completed.

    Args:
        model: the model (or SentenceTransformer) in memory, or the folder that `save_pretrained` or an export wrote,
            which stays as it is.
        repo_id: user/name, or name alone for one's own. It is made where it doesn't exist.
        form: "plugin", "remote" or "native" as in `export_model`. None is the form that a folder has, and "plugin" of a
            model in memory. A folder that has another form is opened and exported.
        native: the folder is a native export; without this, a folder that has no patch record is refused.
        tokenizer: a tokenizer or processor to carry along, or the name of one; a folder brings its own.
        base_model: the model that was patched: its Hub id, or its folder, of which only the card is read. Of a model in
            memory that came from the Hub it is known.
        license: the licence's id on the Hub. By default the base model's, where its card can be read; never guessed.
        report: what `verify` measured, for the card.
        eval_results: results for the card's metadata.
        private: whether a repository that is made is private; one that exists stays as it is.
        revision: the branch; it is made, from the main one, where it doesn't exist. None is the main branch.
        subfolder: the folder in the repository that gets the files.
        create_pr: open a pull request instead. It is sent once: another try could open a second one.
        commit_message, token, endpoint: as everywhere in huggingface_hub.
        max_shard_size: of what is written here, as in `save_pretrained`.
        trust_remote_code: run the code in the folder, or in the tokenizer's repository: a tokenizer's own.
        retries: how often what failed for a reason that passes (no connection, 408, 429, 5xx) is tried again.
        dry_run: send nothing; return what would be.

    Raises:
        CheckpointError: the folder is no checkpoint that hfpatch wrote, its weights are broken, they or its config.json
            aren't those that were saved, or the model isn't patched.
        WrappedModelError: the model is wrapped.
        OptionError: an argument is outside its domain, the report is of another model, or the metadata of README.md
            can't be read.
        UnsupportedError, VerificationError: the model doesn't have the form; says why.
        PatchError: the tokenizer doesn't open again with the model.
        HubError: the Hub refused the push, somebody else committed meanwhile, or no good answer came after all retries;
            in the words of the client, whose own error is the cause.
    """
    results = (eval_results,) if isinstance(eval_results, EvalResult) else tuple(eval_results)
    texts = {"base_model": base_model, "license": license, "revision": revision, "commit_message": commit_message}
    _require_types(
        ("repo_id", repo_id, str, "text such as 'me/gpt2-rms'"),
        *((name, value, str | PathLike | None, "text") for name, value in texts.items()),
        ("report", report, Report | None, "a Report, as verify returns it"),
        *(("eval_results", result, EvalResult, "EvalResults of huggingface_hub") for result in results),
    )
    if form is not None and form not in FORMS:
        raise OptionError(f"form must be one of {', '.join(FORMS)}, not {form!r:.40}.")
    if any(part.startswith(".") or "\\" in part for part in subfolder.split("/")):
        raise OptionError(
            f"subfolder={subfolder!r:.80} isn't a path inside a repository; write for example 'variants/rms'."
        )
    _require_sendable(token)
    folder = "/".join(filter(None, subfolder.split("/")))
    # with True the client says how to log in where nobody is
    api = HfApi(endpoint=endpoint, token=True if token is None and not dry_run else token, library_name="hfpatch")
    branch = _RemoteBranch(api, repo_id, revision, retries)
    name = str(base_model or getattr(model_inside(model), "name_or_path", ""))
    base = base_of(name, base_model is not None, api) if name not in ("", branch.repo_id) else (None, None)
    with tempfile.TemporaryDirectory() as scratch:
        found = checkpoint_of(model, form, native, tokenizer, Path(scratch), max_shard_size, trust_remote_code)
        if report is not None and found.patched is not None:
            report.require_of(found.patched)
        if not dry_run:
            branch.create(private, create_pr)
        notes = branch.read_head(required=not dry_run)
        if private and branch.head.private is False:
            notes.append("the repository is public already, so anyone can read this")
        facts = CardFacts(found, branch.repo_id, folder, *base, license, report, results)
        own = found.files.get(CARD)
        written = branch.text(_join(folder, CARD), scratch) if own is None else own.read_text("utf-8-sig")
        text, card_notes = card(facts, written)
        contents: dict[str, Path | bytes] = {**found.files, CARD: text.encode()}
        additions = [CommitOperationAdd(_join(folder, name), content) for name, content in contents.items()]
        notes += card_notes
        if "vocab_size" in found.config and not any(name.startswith(_VOCABULARIES) for name in contents):
            notes.append("no tokenizer is uploaded: pass one with tokenizer= (--tokenizer)")
        files = _compared(additions, branch.head, folder)
        url = f"{api.endpoint}/{branch.repo_id}" + (f"/tree/{revision}" if revision else "")
        push = Push(branch.repo_id, revision, url, branch.head.commit, files, found.left_out, notes, dry_run)
        if push.changed and not dry_run:
            message = commit_message or f"Upload {found.title}, patched by hfpatch"
            push.commit, pull_request = branch.commit(additions, folder, message, create_pr)
            push.url = pull_request or push.url
        return push


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _require_types(*arguments: tuple[str, Any, Any, str]) -> None:
    """Refuse arguments of a wrong type; each is (name, value, types, description of the types)."""
    for name, value, types, words in arguments:
        if not isinstance(value, types):
            raise OptionError(f"{name} must be {words}, not {type(value).__name__}.")


def _require_sendable(token: str | bool | None) -> None:
    """Refuse a token with characters that no header can hold: the client's error about those would show it."""
    sent = token if isinstance(token, str) else None if token is False else get_token()
    if sent is not None and not (sent.isascii() and sent.isprintable() and sent.split() == [sent]):
        raise HubError(
            "the token contains blanks, line breaks or other characters that tokens never have. Copy it again."
        )


@dataclass(frozen=True)
class _Head:
    """Newest commit of a branch: its id, whether the repository is private, and its files; empty if there is none."""

    commit: str | None = None
    private: bool | None = None
    files: dict[str, RepoFile] = field(default_factory=dict)


class _RemoteBranch:
    """A branch of a model repository; `head` is where it was when the push began."""

    def __init__(self, api: HfApi, repo_id: str, revision: str | None, retries: int):
        self.api, self.repo_id, self.revision, self.retries = api, repo_id, revision, retries
        self.head = _Head()
        self.retrying(lambda: validate_repo_id(repo_id))
        if "/" not in repo_id:
            self.repo_id = f"{self.retrying(api.whoami)['name']}/{repo_id}"

    def retrying(self, action: Callable[[], T], once: bool = False) -> T:
        """`action()`, tried again after errors that pass: 1, 2, 4, ... 16 seconds later, or when the Hub says.

        The client itself tries again what uploads files, but neither the creation of a repository nor a commit.

        Raises:
            HubError: in the client's words.
        """
        tries = 0
        while True:
            try:
                return action()
            except (HTTPError, RuntimeError, OSError, ValueError) as error:
                # what broke an upload or a download, the client wraps
                wrapped = isinstance(error, RuntimeError | LocalEntryNotFoundError)
                cause = error.__cause__ if wrapped and error.__cause__ else error
                if once or tries == self.retries or not _is_transient(cause):
                    raise HubError(f"{self.repo_id}: {' '.join(str(cause).split())}") from cause
                time.sleep(max(min(2**tries, _LONGEST_WAIT), _retry_after(cause)))
                tries += 1

    def read(self, revision: str | None = None) -> _Head:
        """The newest commit, or the one of that id."""
        info = self.api.model_info(self.repo_id, revision=revision or self.revision)
        tree = self.api.list_repo_tree(self.repo_id, recursive=True, revision=info.sha)  # whatever follows that commit
        return _Head(info.sha, info.private, {entry.path: entry for entry in tree if isinstance(entry, RepoFile)})

    def create(self, private: bool, create_pr: bool) -> None:
        """Make the repository and, but for a pull request, the branch where they don't exist."""
        self.retrying(lambda: self.api.create_repo(self.repo_id, private=private, exist_ok=True))
        branch = None if create_pr else self.revision
        if branch and not self.retrying(lambda: self.api.revision_exists(self.repo_id, branch)):
            self.retrying(lambda: self.api.create_branch(self.repo_id, branch=branch, exist_ok=True))

    def read_head(self, required: bool) -> list[str]:
        """Read where the branch is; a note where that isn't required and can't be seen."""
        try:
            self.head = self.retrying(self.read)
        except HubError as error:
            if required:
                raise
            if isinstance(error.__cause__, RepositoryNotFoundError | RevisionNotFoundError):
                return ["the repository or branch doesn't exist, or the token can't see it: a push would create it"]
            return [f"the files in the repository couldn't be listed ({error})"]
        return []

    def text(self, path: str, scratch: str) -> str | None:
        """Content of a text file in the repository; None if there is none."""
        if path not in self.head.files:
            return None
        where: dict[str, Any] = {"revision": self.head.commit, "local_dir": scratch}  # the cache would outlive the push
        return Path(self.retrying(lambda: self.api.hf_hub_download(self.repo_id, path, **where))).read_text("utf-8-sig")

    def commit(
        self, additions: list[CommitOperationAdd], folder: str, message: str, create_pr: bool
    ) -> tuple[str | None, str | None]:
        """Commit the files that aren't there yet; the commit's id, and the pull request's address.

        Raises:
            HubError: the branch isn't at `head` any more, the commit doesn't hold what was sent, or it isn't known
                whether a pull request was opened.
        """
        where: dict[str, Any] = {"revision": self.revision, "create_pr": create_pr}
        known = [self.head]

        def send() -> tuple[str | None, str | None]:
            head = known.pop() if known else self.read()  # an earlier try may have arrived, and only its reply got lost
            states = {file.path: file.state for file in _compared(additions, head, folder)}
            added = [addition for addition in additions if states[addition.path_in_repo] != "same"]
            deleted = [CommitOperationDelete(path) for path, state in states.items() if state == "deleted"]
            if not added and not deleted:
                return head.commit, None
            # by itself the client leaves out what the repository's .gitignore names, and commits the rest
            self.api.preupload_lfs_files(self.repo_id, added, gitignore_content="# nothing is ignored\n", **where)
            info = self.api.create_commit(
                self.repo_id, [*added, *deleted], commit_message=message, parent_commit=self.head.commit, **where
            )
            return info.oid, info.pr_url

        try:
            commit, pull_request = self.retrying(send, once=create_pr)
        except HubError as error:
            if create_pr and _is_transient(error.__cause__):
                seen = f"{self.api.endpoint}/{self.repo_id}/discussions"
                raise HubError(f"{error} A pull request may have been opened nevertheless: look at {seen}.") from error
            raise
        arrived = _compared(additions, self.retrying(lambda: self.read(commit)), folder)
        if missed := [file.path for file in arrived if file.state != "same"]:
            raise HubError(
                f"{self.repo_id}: commit {commit} doesn't contain {', '.join(missed)} as sent. Look at the "
                "repository, then push again."
            )
        return commit, pull_request


def _compared(additions: list[CommitOperationAdd], head: _Head, folder: str) -> list[PushedFile]:
    """State of each file of a push, and of stale weights in the repository, which the commit deletes."""
    files = {}
    for addition in additions:
        path, entry = addition.path_in_repo, head.files.get(addition.path_in_repo)
        state = "new" if entry is None else "same" if _is_same(addition, entry) else "changed"
        files[path] = PushedFile(path, addition.upload_info.size, state)
    for path, entry in head.files.items():
        parent, _, name = path.rpartition("/")
        if path not in files and parent == folder and any(fnmatchcase(name, glob) for glob in STALE_WEIGHTS):
            files[path] = PushedFile(path, entry.size, "deleted")
    return sorted(files.values())


def _is_same(addition: CommitOperationAdd, entry: RepoFile) -> bool:
    if addition.upload_info.size != entry.size:
        return False
    if entry.lfs is not None:
        return addition.upload_info.sha256.hex() == entry.lfs.sha256
    with addition.as_file() as file:
        return git_hash(file.read()) == entry.blob_id


def _is_transient(error: BaseException | None) -> bool:
    """Whether another try may succeed: the connection broke, or the Hub was busy or failing."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _TRANSIENT
    return isinstance(error, HTTPError | json.JSONDecodeError)  # no JSON: from a failing server or proxy


def _retry_after(error: BaseException) -> int:
    seconds = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return min(int(seconds), _LONGEST_RETRY_AFTER) if seconds.isdigit() else 0
