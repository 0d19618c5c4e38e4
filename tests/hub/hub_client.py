"""The genuine client in a process of its own, since huggingface_hub reads its settings when it is imported.

One process serves a whole session: it opens torch, transformers and hfpatch once. It is sent the name of a function of
`hub_actions` with its arguments, and answers with what that returned or raised, and all that was printed and logged.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import pickle
import re
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hfpatch

# none of them is a real one; the last is nobody's
OWNER, READER, OTHER, INVALID = "hf_test-owner-7c1", "hf_test-reader-2e9", "hf_test-other-5d4", "hf_test-nobody-8b0"
_REAL_SLEEP = time.sleep


@dataclass
class Told:
    """What one call did.

    Attributes:
        value: what it returned; None where it raised.
        error: the error's class and message; None where it returned.
        text: all that was printed and logged, and the traceback.
        waits: the seconds it wanted to sleep.
    """

    value: Any = None
    error: tuple[str, str] | None = None
    text: str = ""
    waits: list[float] = field(default_factory=list)


class HubClient:
    """Calls functions of `hub_actions` in the other process; `transcript` is all that it ever printed or raised."""

    def __init__(self, endpoint: str, home: Path):
        ours = re.compile(r"HF_|HUGGING|TRANSFORMERS_OFFLINE|.*_PROXY$", re.IGNORECASE)
        inherited = {name: value for name, value in os.environ.items() if not ours.match(name)}
        paths = [
            str(Path(hfpatch.__file__).parents[1]),
            str(Path(__file__).parent),
            str(Path(__file__).parents[1] / "support"),
        ]
        settings = {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home),
            # Xet sends files, in pieces that it chooses itself, to servers of its own by a compiled client; git-lfs,
            # which every version of the client falls back to, is what can be spoken here
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }
        self.transcript: list[str] = []
        self.environment = inherited | settings
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=self.environment
        )

    def ask(self, action: str, *args: Any, token: str | None = None, **kwargs: Any) -> Told:
        """Call `hub_actions.<action>`, with `token` as the HF_TOKEN of that call."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        pickle.dump((action, args, kwargs, token), self._process.stdin)
        self._process.stdin.flush()
        told: Told = Told(**pickle.load(self._process.stdout))
        self.transcript += [repr(told.value), repr(told.error), told.text]
        return told

    def call(self, action: str, *args: Any, token: str | None = None, **kwargs: Any) -> Any:
        """The same, for what must not fail: its value."""
        told = self.ask(action, *args, token=token, **kwargs)
        assert told.error is None, told.text
        return told.value

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what prints straight to the terminal doesn't get into the replies
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        _REAL_SLEEP(seconds / 100)

    time.sleep = sleep  # waits between tries are cut short; nothing else of the client is touched
    actions = importlib.import_module("hub_actions")
    while True:
        try:
            action, args, kwargs, token = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        waits.clear()
        os.environ.pop("HF_TOKEN", None)
        if token is not None:
            os.environ["HF_TOKEN"] = token
        told = _done(getattr(actions, action), args, kwargs)
        pickle.dump({**told, "waits": list(waits)}, replies)
        replies.flush()


def _done(action: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    text = io.StringIO()
    log = logging.StreamHandler(text)
    loggers = [logging.getLogger(name) for name in (None, "huggingface_hub", "transformers")]
    for logger in loggers:
        logger.addHandler(log)
    told: dict[str, Any] = {}
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            told["value"] = action(*args, **kwargs)
    except BaseException as error:
        text.write(traceback.format_exc())
        told["error"] = type(error).__name__, str(error)
    finally:
        for logger in loggers:
            logger.removeHandler(log)
    return {**told, "text": text.getvalue()}


if __name__ == "__main__":
    _serve()
