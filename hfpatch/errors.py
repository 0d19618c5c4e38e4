"""Everything that hfpatch raises or warns. Each message says what, where, and what to do next."""


class PatchError(Exception):
    """Base of all errors raised by hfpatch; catching it catches them all."""


class UnknownNameError(PatchError, KeyError):
    """A scheme or architecture was asked for by a name that nobody registered."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes


class OptionError(PatchError, ValueError):
    """An option of a scheme or of a request is outside its domain."""


class UnsupportedError(PatchError):
    """The model can't take this patch; the message names the reason and the nearest thing that works."""


class NoMatchError(PatchError, LookupError):
    """A glob in `only` or `keep` matches no module that the request could touch."""


class NothingToPatchError(PatchError):
    """The model has nothing that the request would change."""


class WrappedModelError(PatchError, TypeError):
    """The model is wrapped (DDP, FSDP, torch.compile, PEFT, ...); patch the bare model first."""


class NotReversibleError(PatchError):
    """`unpatch_model` was called on a model that keeps no way back."""


class PositionError(PatchError, ValueError):
    """Positions at run time don't fit the hidden states that they should rotate."""


class CheckpointError(PatchError):
    """A checkpoint's patch record or weights can't be used."""


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
