"""Shared parts of commands: arguments, options, checks of the places they write to, one-line errors and warnings."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core
from huggingface_hub import split_torch_state_dict_into_shards

from ..checkpoint.by_name import is_own
from ..checkpoint.files import printable
from ..core.mapped import read_into_memory
from ..core.registry import MLPS, NORMS, PLACEMENTS, POSITIONS
from ..errors import FingerprintWarning, FreshHeadWarning, NotPreservedWarning, OptionError
from ..measure.batches import read_batches, tokenizer_of
from ..repairs.sample import SELF, sample_batches
from ..runtime.patch_errors import PatchError, first_line

_OWN_WARNINGS = (NotPreservedWarning, FingerprintWarning, FreshHeadWarning)


def one_of(names: Any) -> str:
    """Names for a help text."""
    return f"One of: {', '.join(names)}."


def option(text: str, *names: str, **settings: Any) -> Any:
    """A typer option whose help comes first."""
    return typer.Option(*names, help=text, **settings)


_SEVERAL = (
    "Several schemes: `*.h.[0-5].*=dyt` and `*=rms`, each in its own option. The first glob that matches a module "
    "counts; `keep` keeps the module."
)
_BY_GLOB = re.compile(r"(?P<glob>[^:=]*[*?.\[][^:=]*)=(?P<scheme>.*)")  # a scheme's name has no such characters
Model = Annotated[str, typer.Argument(help="Hub id, folder, or config:FAMILY for random weights (config:gpt2).")]
Patched = Annotated[str, typer.Argument(help="The patched checkpoint: Hub id or folder.")]
Reference = Annotated[str | None, typer.Argument(help="The original model: Hub id or folder.")]
Text = Annotated[Path | None, option("Text file with one example a line. Default: random inputs.")]
Sequences = Annotated[int, option("How many sequences the repair reads.", min=2)]
Examples = Annotated[int, option("How many lines of the text to use, from its start.", min=1)]
_INIT = (
    "How new parameters start. auto: same function if possible, otherwise the closest initial values; exact: same "
    "function, or an error; copy: keep the weights as they are; reset: re-initialise, for training."
)
Schemes = list[str] | None
Norm = Annotated[Schemes, option(f"New norms, with options as in dyt:alpha=0.8. {one_of(NORMS)} {_SEVERAL}")]
Pos = Annotated[Schemes, option(f"New positions, with options as in rope:theta=5e5. {one_of(POSITIONS)}")]
Mlp = Annotated[Schemes, option(f"New MLPs, with options as in swiglu:d_ff=2048. {one_of(MLPS)}")]
Placement = Annotated[str | None, option(f"Where norms stand, for training from scratch. {one_of(PLACEMENTS)}")]
Only = Annotated[list[str] | None, option("Change only modules whose names match this pattern (*.ln_1). Repeatable.")]
Keep = Annotated[list[str] | None, option("Keep modules of this pattern, or norms by a budget (auto:0.3). Repeatable.")]
Init = Annotated[Literal["auto", "exact", "copy", "reset"], option(_INIT)]
Head = Annotated[str | None, option("Auto class to open the model with (AutoModel). Default: the saved class.")]
Trust = Annotated[bool, option("Run Python code from the model's repository.", "--trust-remote-code")]
Shard = Annotated[str, option("Largest file of weights, such as 2GB.")]
Length = Annotated[int, option("Longest sequence in tokens; longer ones are cut.", "--length", "--tokens", min=2)]
Overwrite = Annotated[bool, option("Replace the folder OUT, once everything else has succeeded.", "--overwrite")]
_CALIBRATION = (
    "Repair what isn't exact, without training, on this data: 'self' (sequences that the model generates) or a text "
    "file with one example a line. Default: no repair."
)
_FIT = "What a repair of new positions changes. qk: weights and biases of queries and keys; bias: their biases only."
Calibration = Annotated[str | None, option(_CALIBRATION)]
Fit = Annotated[Literal["qk", "bias"], option(_FIT)]
Form = Literal["native", "remote", "plugin"]


def choices(**options: list[str] | None) -> dict[str, Any]:
    """Return what `patch_model` takes for each kind: one scheme, or a mapping of globs if they are GLOB=SCHEME."""
    return {kind: _choice(kind, values or []) for kind, values in options.items()}


def _choice(kind: str, values: list[str]) -> Any:
    found = [match for value in values if (match := _BY_GLOB.fullmatch(value))]
    by_glob = {match["glob"]: match["scheme"] for match in found}
    if len(values) > 1 and len(by_glob) < len(values):
        raise OptionError(
            f"--{kind} occurs {len(values)} times: write each as GLOB=SCHEME, with globs that differ, such as "
            f"--{kind} '*.h.[0-5].*={values[0].rpartition('=')[2]}'."
        )
    return by_glob or next(iter(values), None)


def texts_of(path: Path, model: Any, processor: Any, sequences: int, length: int) -> Any:
    """The lines of a text file as batches, by the tokenizer that came with the model."""
    if tokenizer_of(processor) is None:
        raise PatchError(f"no tokenizer for the text in {path} comes with the model.")
    return read_batches(path, model, processor, sequences=sequences, length=length, option="text")


def data_of_repair(calibration: str | None, model: Any, processor: Any, sequences: int, length: int, seed: int) -> Any:
    """Return what a repair reads: a text file's lines, or for "self" a function that samples the original's.

    Its values have to be in memory, since a repair writes them.
    """
    if calibration is None:
        return None
    read_into_memory(model)
    most = f"up to {sequences} sequences of {length} tokens"
    typer.echo(f"\nWhat isn't exact is repaired on {most} (--sequences, --length: fewer take less time).")
    if calibration == SELF:
        return functools.partial(sample_batches, sequences=sequences, length=length, seed=seed)
    return texts_of(Path(calibration), model, processor, sequences, length)


def require_apart(out: Path | None, *sources: str | Path | None) -> None:
    """Refuse an output that would replace an input: a folder that holds the input, or a file that is part of it."""
    for source in sources:
        if out is not None and source and Path(source).exists():
            read, written = Path(source).resolve(), out.resolve()
            if read.is_relative_to(written) or (written.is_file() and written.is_relative_to(read)):
                raise PatchError(f"{out} would replace {source}, or a part of it. Choose another place.")


def require_size(size: str) -> None:
    """Refuse a text that isn't a size of weight files."""
    try:
        split_torch_state_dict_into_shards({}, max_shard_size=size)
    except (ValueError, OverflowError) as error:
        raise OptionError(f"--max-shard-size takes a size such as 2GB or 500MB, not {size!r:.80}.") from error


class Commands(typer.core.TyperGroup):
    """The commands, with errors that a user can correct as one line and exit status 1; others keep a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _own_warnings():
                return super().invoke(ctx)
        except (PatchError, OSError, ValueError) as error:
            if is_own(error) and not isinstance(error, PatchError | OSError):
                raise
            message = str(error) if isinstance(error, PatchError) else first_line(error)
            if "trust_remote_code=True" in f"{error} {error.__cause__}":
                message += " Pass --trust-remote-code to run it."
            _say(f"Error: {message}")
            raise typer.Exit(1) from None


def _say(message: str) -> None:
    """Print on stderr; a terminal's codes in a checkpoint's files are escaped."""
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
