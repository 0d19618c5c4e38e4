"""Commands of a command line whose errors and warnings are one line each on stderr."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import typer
import typer.core
from safetensors import SafetensorError

from ..checkpoint.files import printable
from ..errors import FingerprintWarning, FreshHeadWarning, NotPreservedWarning
from ..runtime.errors import PatchError, first_line

_OWN_WARNINGS = (NotPreservedWarning, FingerprintWarning, FreshHeadWarning)


class Commands(typer.core.TyperGroup):
    """The commands, with errors that a user can put right as one line and exit status 1; others keep a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _own_warnings():
                return super().invoke(ctx)
        except (PatchError, OSError, ValueError, SafetensorError) as error:
            message = str(error) if isinstance(error, PatchError) else first_line(error)
            if isinstance(error, SafetensorError):
                message = f"weights can't be read: {message}. Download or save the checkpoint again."
            if "trust_remote_code=True" in str(error):
                message += " Pass --trust-remote-code to run it."
            _say(f"Error: {message}")
            raise typer.Exit(1) from None


def _say(message: str) -> None:
    """Print on stderr; what a checkpoint's files have of a terminal's codes is escaped."""
    typer.echo("\n".join(map(printable, message.split("\n"))), err=True)


@contextlib.contextmanager
def _own_warnings() -> Iterator[None]:
    """hfpatch's warnings as one line each on stderr."""
    with warnings.catch_warnings():
        for category in _OWN_WARNINGS:
            warnings.simplefilter("always", category)
        show = warnings.showwarning

        def print_own(message: Any, category: Any, *rest: Any) -> None:
            if issubclass(category, _OWN_WARNINGS):
                _say(f"Warning: {message}")
            else:
                show(message, category, *rest)

        warnings.showwarning = print_own  # type: ignore[assignment]
        yield
