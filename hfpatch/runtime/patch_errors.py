"""Exceptions that a patched model may raise. Each message says what, where, and what to do next."""

from __future__ import annotations


class PatchError(Exception):
    """Base class of all errors raised by hfpatch; `except PatchError` catches them all."""


class UnsupportedError(PatchError):
    """The model can't take this patch; the message names the reason and the nearest thing that works."""


class PositionError(PatchError, ValueError):
    """Positions at run time don't fit the hidden states that they should rotate."""


class CheckpointError(PatchError):
    """A checkpoint's patch record or weights can't be used."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; its type's name if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def describe_error(error: BaseException, longest: int | None = None) -> str:
    """Return an error's type and the first line of its message, of at most `longest` characters."""
    return f"{type(error).__name__}: {first_line(error)[:longest]}"
