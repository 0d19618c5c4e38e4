"""`push_patched`: a patched model or its folder becomes one commit of a model repository on the Hub."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, EvalResult, HfApi
from huggingface_hub.errors import OfflineModeIsEnabled, RepositoryNotFoundError, RevisionNotFoundError
from transformers import PreTrainedModel

from ..errors import HubError, NotAModelRepoError, OptionError, PushConflictError, UnreachableError
from ..verification.report import Report
from .base import find_base
from .card import card
from .contents import checkpoint_of
from .failures import MEANWHILE, checked_repo_id, checked_token, passes, told, tried
from .folder import CARD, Folder, is_stale
from .outcome import Push, PushedFile
from .remote import Local, Remote
from .section import Facts


def push_patched(
    model: PreTrainedModel | str | PathLike[str],
    repo_id: str,
    *,
    form: str | None = None,
    native: bool = False,
    tokenizer: Any = None,
    base_model: str | None = None,
    license: str | None = None,
    report: Report | None = None,
    eval_results: EvalResult | Iterable[EvalResult] = (),
    private: bool = True,
    revision: str | None = None,
    subfolder: str = "",
    create_pr: bool = False,
    commit_message: str | None = None,
    max_shard_size: str | int | None = None,
    token: str | bool | None = None,
    endpoint: str | None = None,
    retries: int = 5,
    dry_run: bool = False,
) -> Push:
    """Push a patched model to a model repository of the Hub, with its card, as one commit.

    The commit is made when every file has arrived and been checked, and only if the branch is still where it was when
    the push began; until then nobody sees anything of it. A push that broke off is resumed by the same call: files that
    arrived aren't sent again. Weights travel as safetensors only. Weights in the repository that this push replaces, of
    another number of shards say, are deleted by the same commit, since transformers might open them instead.

    The card says what was patched, how to open it, and what is known of quality and licence. A README.md of the folder
    (or of the repository, where the folder has none) keeps its text: only the section of an earlier push is renewed,
    and its metadata is completed.

    Args:
        model: the model in memory, or the folder that `save_pretrained` or an export wrote. A folder stays as it is.
        repo_id: user/name, or name alone for one's own. It is made where it doesn't exist.
        form: in which form it goes there, as in `export_model`: "plugin" opens with hfpatch, "remote" also with
            `trust_remote_code=True`, "native" with transformers alone, where a stock architecture is equal. None is
            the form that a folder has, and "plugin" of a model in memory. A folder that has another one is opened and
            exported; remote and native exports are verified before anything is sent.
        native: the folder is a native export: a stock checkpoint that transformers alone opens. Without this, a folder
            that has no patch record is refused.
        tokenizer: a tokenizer or processor to carry along, or the name of one; a folder brings its own.
        base_model: the model that was patched: its Hub id, or its folder, of which only the card is read. Of a model in
            memory that came from the Hub it is known.
        license: the licence's id on the Hub. By default the base model's, where its card can be read; never guessed.
        report: what `verify` measured, for the card.
        eval_results: results for the card's metadata.
        private: whether a repository that is made is private; one that exists stays as it is.
        revision: the branch; it is made, from the main one, where it doesn't exist. None is the main branch.
        subfolder: the folder in the repository that gets the files.
        create_pr: open a pull request instead of committing to the branch. Such a commit is sent once: another try
            could open a second one.
        commit_message: its first line.
        max_shard_size: of what is written here, as in `save_pretrained`.
        token: as everywhere in huggingface_hub: None is the one that is logged in. It is written nowhere.
        endpoint: another Hub's address.
        retries: how often what failed for a reason that passes (no connection, 408, 429, 5xx) is tried again.
        dry_run: send nothing; tell what would be.

    Returns:
        What was done; print it.

    Raises:
        CheckpointError: the folder is no checkpoint that hfpatch made, or its weights are pickles or broken.
        WrappedModelError: the model is wrapped.
        OptionError: the metadata of README.md can't be read, or the form, subfolder or tokenizer is none.
        UnsupportedError, VerificationError: the model doesn't have the form; says why.
        PatchError: the tokenizer doesn't open again beside the model.
        RepoIdError, NotAModelRepoError, NoSuchNamespaceError: there can't be, or is, no such model repository.
        NotLoggedInError, NoWriteAccessError: no valid token, or one that may not write there.
        PushConflictError: somebody else committed meanwhile.
        UnreachableError: no answer, or no good one, after all retries.
        HubError: parent of the last six; the Hub refused something else.
    """
    api = HfApi(endpoint=endpoint, token=checked_token(token), library_name="hfpatch")
    repo_id = checked_repo_id(repo_id)
    subfolder = _checked_subfolder(subfolder)
    results = (eval_results,) if isinstance(eval_results, EvalResult) else tuple(eval_results)
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint_of(model, native, tokenizer, Path(scratch), max_shard_size, form)
        with told(api, repo_id):
            if not dry_run:
                repo_id = _made(api, repo_id, private, retries)
            elif "/" not in repo_id:
                repo_id = f"{api.whoami()['name']}/{repo_id}"
            remote, notes = _found(api, repo_id, revision, create_pr, retries, dry_run)
            base = find_base(model, base_model, repo_id, api)
            contents, said = _contents(
                folder, Facts(repo_id, subfolder, base, license, report, results), remote, retries
            )
            files = _compared(contents, remote, subfolder)
            if private and remote.private is False:
                notes.append("the repository is public already, so anyone can read this")
            url = f"{api.endpoint}/{repo_id}" + (f"/tree/{revision}" if revision else "")
            notes += [*said, *folder.notes]
            push = Push(repo_id, revision, url, remote.commit, files, folder.left_out, notes, dry_run)
            if push.changed and not dry_run:
                message = commit_message or f"Upload {folder.title}, patched by hfpatch"
                push.commit, pull_request = _committed(api, push, contents, remote, message, create_pr, retries)
                push.url = pull_request or push.url
            return push


def _made(api: HfApi, repo_id: str, private: bool, retries: int) -> str:
    """The repository's full id; it exists from now on."""
    made = tried(lambda: api.create_repo(repo_id, private=private, exist_ok=True), retries)
    if made.repo_type not in (None, "model"):
        raise NotAModelRepoError(f"{repo_id} is a {made.repo_type}, not a model repository. Choose another name.")
    return repo_id if "/" in repo_id else made.repo_id


def _found(
    api: HfApi, repo_id: str, revision: str | None, create_pr: bool, retries: int, dry_run: bool
) -> tuple[Remote, list[str]]:
    """What the branch holds; without one it is made, from the main one, or in a dry run said to be."""
    try:
        return tried(lambda: Remote.read(api, repo_id, revision), retries), []
    except RevisionNotFoundError:
        if create_pr or revision is None:
            raise
        if dry_run:
            return Remote.read(api, repo_id, None), [f"the branch {revision} would be made from the main one"]
    except RepositoryNotFoundError:
        if not dry_run:
            raise
        return Remote(None, None, {}), ["there is no such repository yet (or the token can't see it): it would be made"]
    except Exception as error:
        if not dry_run or not (isinstance(error, OfflineModeIsEnabled) or passes(error)):
            raise
        return Remote(None, None, {}), ["the Hub can't be reached, so what it holds already isn't known"]
    tried(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True), retries)
    return tried(lambda: Remote.read(api, repo_id, revision), retries), []


def _contents(folder: Folder, facts: Facts, remote: Remote, retries: int) -> tuple[dict[str, Local], list[str]]:
    """All files by their path in the repository, the card among them, and notes on the card."""
    prefix = _prefix(facts.subfolder)
    contents = {f"{prefix}{name}": Local(path) for name, path in folder.files.items()}
    own = folder.files.get(CARD)
    written = tried(lambda: remote.text(f"{prefix}{CARD}"), retries) if own is None else own.read_text("utf-8-sig")
    text, notes = card(folder, facts, written)
    contents[f"{prefix}{CARD}"] = Local(text.encode())
    return contents, notes


def _checked_subfolder(subfolder: str) -> str:
    """Its path without slashes at the ends.

    Raises:
        OptionError: it leads out of the repository, or to where git keeps its own.
    """
    parts = [part for part in subfolder.split("/") if part]
    if any(part.startswith(".") or "\\" in part for part in parts):
        raise OptionError(
            f"subfolder={subfolder!r:.80} is no folder of a repository; write for example 'variants/rms'."
        )
    return "/".join(parts)


def _prefix(subfolder: str) -> str:
    return f"{subfolder}/" if subfolder else ""


def _compared(contents: dict[str, Local], remote: Remote, subfolder: str) -> list[PushedFile]:
    files = [PushedFile(path, local.size, local.state(remote.files.get(path))) for path, local in contents.items()]
    prefix = _prefix(subfolder)
    for path, entry in remote.files.items():
        if path not in contents and path.startswith(prefix) and is_stale(path.removeprefix(prefix)):
            files.append(PushedFile(path, entry.size, "deleted"))
    return sorted(files, key=lambda file: file.path)


def _missed(push: Push, contents: dict[str, Local], remote: Remote) -> list[str]:
    """What isn't in the repository as the push would have it."""
    wrong = []
    for file in push.files:
        entry = remote.files.get(file.path)
        gone = file.state == "deleted"
        if (entry is not None) if gone else contents[file.path].state(entry) != "same":
            wrong.append(file.path)
    return wrong


def _committed(
    api: HfApi, push: Push, contents: dict[str, Local], remote: Remote, message: str, create_pr: bool, retries: int
) -> tuple[str, str | None]:
    """The new commit's id, and the pull request's address.

    Raises:
        PushConflictError: the branch isn't where `remote` found it.
        UnreachableError: whether a pull request was opened isn't known.
        HubError: the commit doesn't hold what was sent.
    """
    added = [
        CommitOperationAdd(file.path, contents[file.path].content) for file in push.changed if file.state != "deleted"
    ]
    deleted = [CommitOperationDelete(file.path) for file in push.changed if file.state == "deleted"]
    where: dict[str, Any] = {"revision": push.revision, "create_pr": create_pr}
    sent = False

    def send() -> tuple[str, str | None]:
        nonlocal sent
        if sent:  # the commit may have been made, and only the reply lost
            now = Remote.read(api, push.repo_id, push.revision)
            if now.commit != remote.commit:
                if _missed(push, contents, now):
                    raise PushConflictError(f"{push.repo_id}: {MEANWHILE}.")
                return str(now.commit), None
        # by itself the client leaves out what the repository's .gitignore names, and commits the rest
        api.preupload_lfs_files(push.repo_id, added, gitignore_content="# nothing is ignored\n", **where)
        sent = True
        operations: list[Any] = [*added, *deleted]
        made = api.create_commit(push.repo_id, operations, commit_message=message, parent_commit=remote.commit, **where)
        return made.oid, made.pr_url

    try:
        commit, pull_request = tried(send, 0 if create_pr else retries)
    except Exception as error:
        if create_pr and sent and passes(error):
            raise UnreachableError(
                f"{push.repo_id}: no good reply came, so a pull request may have been opened. Look at {api.endpoint}/"
                f"{push.repo_id}/discussions, and push again if there is none."
            ) from error
        raise
    arrived = tried(lambda: Remote.read(api, push.repo_id, commit), retries)
    if missed := _missed(push, contents, arrived):
        raise HubError(
            f"{push.repo_id}: commit {commit} doesn't hold what was sent of {', '.join(missed)}. Look at the "
            "repository, then push again."
        )
    return commit, pull_request
