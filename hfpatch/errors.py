"""Exceptions and warnings of hfpatch. Each message says what, where, and what to do next."""

from __future__ import annotations

from .runtime.patch_errors import CheckpointError, PatchError, PositionError, UnsupportedError

__all__ = [
    "CheckpointError",
    "FingerprintWarning",
    "FreshHeadWarning",
    "HubError",
    "NoMatchError",
    "NotPreservedWarning",
    "NotReversibleError",
    "NothingToPatchError",
    "OptionError",
    "PatchError",
    "PositionError",
    "UnknownNameError",
    "UnsupportedError",
    "VerificationError",
    "WrappedModelError",
]


class UnknownNameError(PatchError, KeyError):
    """No scheme or architecture of this name is registered."""

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
    """A conversion that should be exact isn't, as measured on the model itself; the model is as it was.

    Attributes:
        measured: what was measured, in a few words.
    """

    def __init__(self, message: str, measured: str):
        super().__init__(message)
        self.measured = measured

    def __reduce__(self) -> tuple:
        return type(self), (*self.args, self.measured)


class NotPreservedWarning(UserWarning):
    """A patch changed what the model computes; the message says what was not preserved, and what was measured.

    Each patch that isn't exact gives it, repaired or not, unless new parameters start afresh (init="reset"). A repair
    silences it only if, on held-out sequences, the distance to the original is at most half of the distance before, and
    at most 0.1 nats a token of KL divergence (a tenth more perplexity). For models without logits the second bound is
    0.01 of the outputs' mean square (a tenth of their size). The same holds on longer sequences. On other fresh
    sequences the repair may not have led away from the original.
    """


class FingerprintWarning(UserWarning):
    """A checkpoint can't be compared fully with what was saved: it has no digests, or lacks weights.

    The warning is also given if its config.json was edited after it was saved.
    """


class HubError(PatchError):
    """A push to the Hub failed, or its result isn't known; the cause is the Hub client's own error."""


class FreshHeadWarning(UserWarning):
    """A checkpoint has no weights for the model's head; the message names the head's modules."""
