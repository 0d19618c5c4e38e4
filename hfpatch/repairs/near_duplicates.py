"""Splits calibration sequences into fitted and held-out ones without near duplicates across the two.

Two sequences count as nearly equal if one holds at least four fifths of the other's runs of four tokens. Sequences of
numbers (images, sound) do if they differ by less than a tenth of their distance from the mean of all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

HELD_OUT, LEAST = 8, 2  # of every so many distinct sequences one judges; of four at least two
_RUN, _SHARED = 4, 0.8  # tokens; share of the runs of the sequence with fewer runs
_FEATURES, _NEAR = 256, 0.1  # averages that stand for a sequence of numbers; relative distance
_ROWS_AT_ONCE = 1024

Key = frozenset[tuple[int, ...]] | Tensor  # of a sequence, to compare it with others


def key_of(sequence: Tensor, mask: Tensor | None) -> Key:
    """Return the key by which a sequence is compared: its runs of four tokens, or its numbers averaged to 256.

    Args:
        sequence: one row of the main input, without the batch axis.
        mask: 1 where its tokens aren't padding, of the same shape; None for all.
    """
    if sequence.is_floating_point():
        return F.adaptive_avg_pool1d(sequence.detach().float().reshape(1, 1, -1), _FEATURES)[0, 0].cpu()
    tokens = (sequence if mask is None or mask.shape != sequence.shape else sequence[mask.bool()]).flatten().tolist()
    runs = range(max(1, len(tokens) - _RUN + 1))
    return frozenset(tuple(tokens[i : i + _RUN]) for i in runs)


def divide(keys: Sequence[Key]) -> tuple[list[int], list[int]]:
    """Return the indices of sequences to fit and of sequences to judge, without near duplicates between them.

    Every eighth distinct sequence judges; of 4 to 15 two do, since one sequence is no judgement, and of fewer the last.
    Near duplicates of these are on neither side. A fitted sequence that occurs several times counts as often as it
    occurs.
    """
    names = names_of(keys)
    first: dict[Hashable, int] = {}  # first index of each distinct sequence
    for i, name in enumerate(names):
        first.setdefault(name, i)
    every = min(HELD_OUT, len(first) // LEAST if len(first) >= 2 * LEAST else len(first))
    held_out = list(first.values())[every - 1 :: every]
    judges = {names[i] for i in held_out}
    others = [i for i, name in enumerate(names) if name not in judges]
    near = _near_tokens(keys, others, held_out) | _near_numbers(keys, others, held_out)
    return [i for i in others if i not in near], held_out


def names_of(keys: Sequence[Key]) -> list[Hashable]:
    """Return the keys as values that are equal if the sequences are."""
    return [key if isinstance(key, frozenset) else key.numpy().tobytes() for key in keys]


def _near_tokens(keys: Sequence[Key], others: Sequence[int], held_out: Sequence[int]) -> set[int]:
    """The indices in `others` of sequences that share most runs of tokens with a sequence that judges."""
    holders = defaultdict[tuple[int, ...], list[int]](list)
    for i in held_out:
        for run in keys[i] if isinstance(keys[i], frozenset) else ():
            holders[run].append(i)
    near = set()
    for i in others:
        if isinstance(key := keys[i], frozenset):
            shared = Counter(holder for run in key for holder in holders.get(run, ()))
            if any(count >= _SHARED * min(len(key), len(keys[j])) for j, count in shared.items()):
                near.add(i)
    return near


def _near_numbers(keys: Sequence[Key], others: Sequence[int], held_out: Sequence[int]) -> set[int]:
    """The indices in `others` of sequences whose numbers nearly equal those of a sequence that judges."""
    others = [i for i in others if isinstance(keys[i], Tensor)]
    judges = [keys[i] for i in held_out if isinstance(keys[i], Tensor)]
    if not others or not judges:
        return set()
    mean = torch.stack([keys[i] for i in (*others, *held_out) if isinstance(keys[i], Tensor)]).mean(0)  # type: ignore[misc]
    b, near = torch.stack(judges) - mean, set()  # type: ignore[arg-type]
    for start in range(0, len(others), _ROWS_AT_ONCE):
        some = others[start : start + _ROWS_AT_ONCE]
        a = torch.stack([keys[i] for i in some]) - mean  # type: ignore[misc]
        most = _NEAR * torch.minimum(a.norm(dim=1)[:, None], b.norm(dim=1))
        near |= {i for i, is_near in zip(some, (torch.cdist(a, b) < most).any(1).tolist(), strict=True) if is_near}
    return near
