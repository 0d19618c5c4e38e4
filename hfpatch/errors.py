"""Everything that hfpatch raises or warns. Each message says what, where, and what to do next."""

from __future__ import annotations

from .runtime.errors import PatchError


class UnknownNameError(PatchError, KeyError):
    """A scheme or architecture was asked for by a name that nobody registered."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class OptionError(PatchError, ValueError):
    """An option of a scheme or of a request is outside its domain."""


class NoMatchError(PatchError, LookupError):
    """A glob in `only` or `keep` matches no module that the request could touch."""


class NothingToPatchError(PatchError):
    """The model has nothing that the request would change."""


class WrappedModelError(PatchError, TypeError):
    """The model is wrapped (DDP, FSDP, torch.compile, PEFT, ...); patch the bare model first."""


class NotReversibleError(PatchError):
    """`unpatch_model` was called on a model that wasn't patched with `reversible=True`."""


class VerificationError(PatchError):
    """A conversion that should have been exact wasn't, measured on the model itself; the model is as it was.

    Attributes:
        measured: what was measured, in a few words.
    """

    def __init__(self, message: str, measured: str):
        super().__init__(message)
        self.measured = measured

    def __reduce__(self) -> tuple:
        return type(self), (*self.args, self.measured)


class NotPreservedWarning(UserWarning):
    """A patch changed what the model computes; the message says what was not preserved."""


class FingerprintWarning(UserWarning):
    """A checkpoint has no fingerprint, or less of one, so that opening it can't fully check what came back."""


class MissingPackageError(PatchError, ImportError):
    """An optional package is needed; the message names what installs it."""


class HubError(PatchError):
    """A push to the Hub couldn't be done, or it isn't known whether it was; the cause is the client's own error."""
