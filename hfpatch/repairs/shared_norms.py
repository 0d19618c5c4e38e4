"""Fits norms that run several times in a forward (ALBERT's layers are one), to the original at all of their calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import torch
from torch import Tensor

from ..runtime.norms import AffineNorm
from .block_replay import BlockReplay
from .distance import output_distance
from .fits import Fitter, Moments, channels_last
from .norm_fit import fit_norm
from .report import FittedValues, Step

_ROWS = 2**16  # of each norm that a fit looks at, at least, if there are so many: it has two numbers a channel
_OTHER_CALLS = "runs several times in a forward, and on other shapes than in the original"


def fit_shared_norms(fitter: Fitter, names: Collection[str]) -> None:
    """Fit changed norms that run several times in a forward to the original's outputs at all of their calls.

    Each call feeds the next ones, so there is no forward order: the norms are fitted together, each on the original's
    own inputs. They are kept if the patched model's outputs are nearer to the original's on held-out sequences. The
    report has the errors at all calls.
    """
    fits: dict[str, FittedValues] = {}
    for name in names:
        note = fitter.unfit_norm(name) or _save_calls(fitter, name)
        if note:
            fitter.skip(name, "norm", note)
            continue
        norm = fitter.new.modules[name]
        assert isinstance(norm, AffineNorm)
        fits[name] = fit_norm(norm, partial(_rows, fitter, name))
        fits[name].note = str(fitter.scales.get(name, fits[name].note))
    if fits:
        before, mark = _errors(fitter, fits), len(fitter.transaction)
        far = output_distance(fitter.new, fitter.old, again=True)[1].mean()
        for name, fit in fits.items():
            fitter.write_norm(name, fit.values)
        after = _errors(fitter, fits)
        kept = bool(output_distance(fitter.new, fitter.old, again=True)[1].mean() < far)
        if not kept:
            fitter.transaction.undo(mark)
        fitter.report.steps += [Step(one, "norm", before[one], after[one], kept, fits[one].note) for one in fits]
    fitter.old.delete_saved()


def _save_calls(fitter: Fitter, name: str) -> str:
    """Save what the original's norm gets and returns at its calls; why the norm can't be fitted to it, or ""."""
    rows = 0
    for i in range(len(fitter.batches)):
        if rows >= _ROWS and not fitter.batches.judges(i):
            continue
        theirs, ours = (_calls(replay, name, i) for replay in (fitter.old, fitter.new))
        if [y.shape for _, y in theirs] != [y.shape for _, y in ours]:
            return _OTHER_CALLS
        for number, (x, y) in enumerate(theirs):
            fitter.old.save(f"{name} input {number}", i, x)
            fitter.old.save(f"{name} output {number}", i, y)
            rows += 0 if fitter.batches.judges(i) else y.shape[:-1].numel()
    return ""


def _rows(fitter: Fitter, name: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The original's inputs and outputs of all calls as rows, and which of them are held out."""
    decoder, old = fitter.roles.in_decoder(name), fitter.old
    for i in range(len(fitter.batches)):
        number = 0
        while old.has_saved(f"{name} input {number}", i):
            x, y = (old.load_saved(f"{name} {side} {number}", i) for side in ("input", "output"))
            for u, target in fitter.batches.row_pieces(i, decoder, x, y):
                yield u, target, torch.full((len(u),), fitter.batches.judges(i), device=u.device)
            number += 1


def _errors(fitter: Fitter, names: Collection[str]) -> dict[str, float]:
    """How far the outputs of all calls are from the original's on held-out sequences, as shares of their variance."""
    moments = {name: Moments() for name in names}
    for i in fitter.batches.held_out_batches():
        for name in names:
            for number, (_, y) in enumerate(_calls(fitter.new, name, i)):
                target = fitter.old.load_saved(f"{name} output {number}", i)
                for pair in fitter.batches.row_pieces(i, fitter.roles.in_decoder(name), y, target):
                    moments[name].add(*pair)
    return {name: one.share() for name, one in moments.items()}


def _calls(replay: BlockReplay, name: str, index: int) -> list[tuple[Tensor, Tensor]]:
    """What a norm gets and returns in one forward of a batch, call by call, channels last."""
    norm = replay.modules[name]
    return [(channels_last(norm, x), channels_last(norm, y)) for x, y in replay.every_call(index, name)]
