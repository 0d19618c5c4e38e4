"""Fits norms that run several times in a forward (ALBERT's layers are one), to the original at all of their calls."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from functools import partial

from torch import Tensor

from ..measure.quiet_forward import first_tensor
from ..runtime.norms import AffineNorm
from .block_replay import BlockReplay
from .distance import mean_and_worst, output_distance
from .fits import Fitter, Moments, channels_last
from .norm_fit import fit_norm
from .repair_report import FittedValues, Step

_ROWS = 2**16  # of each norm that a fit reads, at least, if there are so many: it fits two numbers a channel
_OTHER_CALLS = "runs several times in a forward, and on other shapes than in the original"


def fit_shared_norms(fitter: Fitter, names: Collection[str]) -> None:
    """Fit changed norms that run several times in a forward to the original's outputs at all of their calls.

    Each call feeds the next ones, so there is no forward order: the norms are fitted together, each on the original's
    own inputs. They are kept if the patched model's outputs are nearer to the original's on held-out sequences. The
    report has the errors at all calls.
    """
    notes = {name: note for name in names if (note := fitter.unfit_norm(name))}
    seen = _save_calls(fitter, [name for name in names if name not in notes])
    notes |= {name: _OTHER_CALLS for name in names if name not in {**notes, **seen}}
    for name, note in notes.items():
        fitter.skip(name, "norm", note)
    fits: dict[str, FittedValues] = {}
    for name, batches in seen.items():
        norm = fitter.new.modules[name]
        assert isinstance(norm, AffineNorm)
        fits[name] = fit_norm(norm, partial(_rows, fitter, name, batches))
        fits[name].note = str(fitter.scales.get(name, fits[name].note))
    if fits:
        before, mark = _errors(fitter, fits), len(fitter.transaction)
        far, _ = mean_and_worst(output_distance(fitter.new, fitter.old, again=True)[1])
        for name, fit in fits.items():
            fitter.write_norm(name, fit.values)
        after = _errors(fitter, fits)
        kept = mean_and_worst(output_distance(fitter.new, fitter.old, again=True)[1])[0] < far
        if not kept:
            fitter.transaction.undo(mark)
        fitter.report.steps += [Step(one, "norm", before[one], after[one], kept, fits[one].note) for one in fits]
    fitter.old.delete_saved()


def _save_calls(fitter: Fitter, names: Collection[str]) -> dict[str, list[int]]:
    """Save the inputs and outputs of the original's norms at their calls. Returns, by norm, for which batches.

    Norms that are called otherwise in the patched model are left out.
    """
    found: dict[str, list[int]] = {name: [] for name in names}
    rows = dict.fromkeys(names, 0)
    for i in range(len(fitter.batches)):
        judges = fitter.batches[i].judges
        left = [name for name in found if judges or rows[name] < _ROWS]
        theirs, ours = (_calls(fitter, replay, i, left) for replay in (fitter.old, fitter.new))
        for name in left:
            x, y = theirs[name]
            if [one.shape for one in y] != [one.shape for one in ours[name][1]]:
                del found[name]
                continue
            fitter.old.save(f"{name} input", i, x)
            fitter.old.save(f"{name} output", i, y)
            found[name].append(i)
            rows[name] += 0 if judges else sum(one.shape[:-1].numel() for one in y)
    return found


def _rows(fitter: Fitter, name: str, batches: Iterable[int]) -> Iterator[tuple[Tensor, ...]]:
    """The original's inputs and outputs of all calls as rows, and which rows are held out."""
    for i in batches:
        inputs, outputs = (fitter.old.load_saved(f"{name} {side}", i) for side in ("input", "output"))
        for pair in zip(inputs, outputs, strict=True):
            yield from fitter.batches.row_pieces(i, fitter.roles.in_decoder(name), *pair)


def _errors(fitter: Fitter, names: Collection[str]) -> dict[str, float]:
    """How far the outputs of all calls are from the original's on held-out sequences, as shares of their variance."""
    moments = {name: Moments() for name in names}
    for i in fitter.batches.held_out_batches():
        for name, (_, outputs) in _calls(fitter, fitter.new, i, names).items():
            for pair in zip(outputs, fitter.old.load_saved(f"{name} output", i), strict=True):
                for y, target, _ in fitter.batches.row_pieces(i, fitter.roles.in_decoder(name), *pair):
                    moments[name].add(y, target)
    return {name: one.share() for name, one in moments.items()}


def _calls(
    fitter: Fitter, replay: BlockReplay, index: int, names: Collection[str]
) -> dict[str, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
    """The inputs and outputs of norms in one forward of a batch, call by call, channels last."""
    found = {}
    for name, sides in replay.every_call(index, names).items():
        norm = fitter.new.modules[name]  # it knows its channels' axis; the original norm is of any class
        x, y = (tuple(channels_last(norm, first_tensor(one).detach()) for one in side) for side in sides)
        found[name] = x, y
    return found
