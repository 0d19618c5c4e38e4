"""What goes wrong with the Hub: what is worth another try, and what to tell of the rest. No message holds a token."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from huggingface_hub import HfApi, get_token
from huggingface_hub import errors as hub_errors
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from ..errors import (
    HubError,
    NoSuchNamespaceError,
    NotAModelRepoError,
    NotLoggedInError,
    NoWriteAccessError,
    PushConflictError,
    RepoIdError,
    UnreachableError,
)
from ..runtime.errors import PatchError, first_line

T = TypeVar("T")
HTTPError: type[Exception] = hub_errors.HTTPError  # httpx's or httpx2's, as the client has it
_AGAIN = (408, 429, 500, 502, 503, 504)  # the statuses that the client itself repeats, where it does
_LONGEST_WAIT, _LONGEST_ASKED = 16.0, 120.0  # seconds
_LOG_IN = "Log in with `hf auth login`, or set HF_TOKEN to a token with write access."


def tried(action: Callable[[], T], retries: int) -> T:
    """`action()`, repeated after errors that pass: at most `retries` times, after 1, 2, 4, 8, 16, 16, ... seconds.

    The client itself repeats the upload of files, and what comes before it, but neither the creation of a repository
    nor a commit. A longer wait that the Hub asks for (Retry-After) is kept, up to two minutes.
    """
    for attempt in range(retries):
        try:
            return action()
        except Exception as error:
            if not passes(error):
                raise
            time.sleep(max(min(2.0**attempt, _LONGEST_WAIT), _asked(error)))
    return action()


def passes(error: BaseException) -> bool:
    """Whether another try may succeed: the connection broke, or the Hub was busy or failing."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _AGAIN
    return isinstance(error, (HTTPError, json.JSONDecodeError))  # no JSON: from a failing server or proxy


def _asked(error: BaseException) -> float:
    asked = error.response.headers.get("Retry-After", "") if isinstance(error, HfHubHTTPError) else ""
    return min(float(asked), _LONGEST_ASKED) if asked.isdigit() else 0.0


def checked_repo_id(repo_id: object) -> str:
    """The id of a model repository, without what stands around it in a link.

    Raises:
        NotAModelRepoError: it is a dataset's or a space's.
        RepoIdError: the Hub could have no repository of that name.
    """
    if not isinstance(repo_id, str):
        raise RepoIdError(f"a repository's id is text such as 'me/gpt2-rms', not {type(repo_id).__name__}.")
    for prefix, kind in (("datasets/", "dataset"), ("spaces/", "space")):
        if repo_id.startswith(prefix) and repo_id.count("/") > 1:
            name = repo_id.removeprefix(prefix)
            raise NotAModelRepoError(f"{repo_id} is a {kind}'s id. Push to a model repository, such as {name!r}.")
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise RepoIdError(f"{first_line(error)} Write user/name, such as 'me/gpt2-rms'.") from None
    return repo_id


def checked_token(token: str | bool | None) -> str | bool | None:
    """The token as it came, unless it has characters that no header can hold: an error about those would show it.

    Raises:
        NotLoggedInError: it has, or so has the one of the environment.
    """
    sent = token if isinstance(token, str) else None if token is False else get_token()
    if sent is not None and not (sent.isascii() and sent.isprintable() and sent.split() == [sent]):
        raise NotLoggedInError(f"the token has blanks, line breaks or other characters that no token has. {_LOG_IN}")
    return token


@contextmanager
def told(api: HfApi, repo_id: str) -> Iterator[None]:
    """Turn what the client raises into what a user can act on."""
    try:
        yield
    except PatchError:
        raise
    except LocalTokenNotFoundError as error:
        raise NotLoggedInError(f"{repo_id}: nobody is logged in. {_LOG_IN}") from error
    except OfflineModeIsEnabled as error:
        raise UnreachableError(f"{repo_id}: HF_HUB_OFFLINE is set, so nothing can be pushed. Unset it.") from error
    except (HTTPError, RuntimeError, OSError, ValueError) as error:
        raise _explained(error, api, repo_id) from error


def _explained(error: Exception, api: HfApi, repo_id: str) -> HubError:
    cause: BaseException = error
    while not isinstance(cause, HTTPError) and cause.__cause__ is not None:
        cause = cause.__cause__  # the client wraps what broke an upload
    if not isinstance(cause, HfHubHTTPError):
        if passes(cause):
            return UnreachableError(f"{repo_id}: {_short(cause)}; {_AFTER_RETRIES}")
        return HubError(f"{repo_id}: {_short(error)}")
    status = cause.response.status_code
    said = _short(cause.server_message or cause)
    if status == 401:
        return NotLoggedInError(f"{repo_id}: the Hub takes no such token, or was given none ({said}). {_LOG_IN}")
    if status == 403:
        return _not_allowed(said, api, repo_id)
    if isinstance(cause, RevisionNotFoundError):
        return HubError(f"{repo_id} has no such revision ({said}). Push to a branch; a new one is made by its name.")
    if status == 404:
        return _not_found(said, api, repo_id)
    if status in (409, 412):
        return PushConflictError(f"{repo_id}: {MEANWHILE} ({said}).")
    if status in _AGAIN:
        return UnreachableError(f"{repo_id}: the Hub answered {status} ({said}); {_AFTER_RETRIES}")
    return HubError(f"{repo_id}: the Hub refused this with {status} ({said}).")


MEANWHILE = "somebody else committed during the push; look at the repository, then push again"
_AFTER_RETRIES = "nothing half is there. Push again: files that arrived aren't sent twice."


def _not_allowed(said: str, api: HfApi, repo_id: str) -> HubError:
    name = repo_id.split("/")[0]
    looks = (lambda: api.get_user_overview(name), lambda: api.get_organization_overview(name))
    if "/" in repo_id and all(_exists(look) is False for look in looks):
        return NoSuchNamespaceError(
            f"{repo_id}: the Hub has no user or organisation {name!r}. Push to your own name, or mend the spelling."
        )
    return NoWriteAccessError(
        f"{repo_id}: the token has no right to write there ({said}). Use one with write access, or a name of your own; "
        "to suggest the change to its owner, use create_pr=True (--create-pr)."
    )


def _not_found(said: str, api: HfApi, repo_id: str) -> HubError:
    for kind in ("dataset", "space"):
        if _exists(partial(api.repo_info, repo_id, repo_type=kind)):
            return NotAModelRepoError(f"{repo_id} is a {kind}, not a model repository. Choose another name.")
    return HubError(f"{repo_id}: the Hub has no such model repository, or the token can't see it ({said}).")


def _exists(look: Callable[[], object]) -> bool | None:
    """What the Hub says; None where it says neither."""
    try:
        look()
    except HfHubHTTPError as error:
        return False if error.response.status_code in (401, 404) else None
    except HTTPError:
        return None
    return True


def _short(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return "; ".join(lines)[:300] or type(error).__name__
