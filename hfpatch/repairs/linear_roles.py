"""Roles of a block's linear maps, found by running it: those that write to the stream, those that read one tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..sites.blocks import OUTPUT, observe_blocks
from .attention_maps import eager, map_in
from .block_replay import Segment, Walk, is_linear_map

_EXACTLY = 1e-2  # relative: how nearly a change of a map's output must show in the stream to be called its addend


@dataclass
class BlockRoles:
    """What the linear maps of one segment do.

    Attributes:
        writers: map whose output is added to the stream -> the norm whose input first shows that, or the block itself
            where its output does.
        readers: maps that read the same tensor, by the first of them.
        complete: whether the block's output is a map's addition to the stream, or a norm's output.
    """

    writers: dict[str, str] = field(default_factory=dict)
    readers: dict[str, list[str]] = field(default_factory=dict)
    complete: bool = True


class Roles:
    """Of the maps of a patched model, block after block.

    A block is run on what two sequences bring to it, which tell (B, T, d) from (T, B, d), before anything is fitted.
    """

    def __init__(self, walk: Walk, segments: Iterable[Segment]):
        self.walk = walk
        self.owners = Counter(id(p) for module in walk.modules.values() for p in module.parameters(recurse=False))
        count = walk.batches.count_of(0)
        lengths = {len(v) for v in walk.batches.inputs(0).values() if isinstance(v, Tensor) and v.dim()}
        few = walk.inputs(0, torch.arange(min(2, count)) if lengths == {count} else None)  # packed images stay together
        names = [segment.block for segment in segments if segment.block]
        self.blocks = {block.name: block for block in observe_blocks(walk.model, few, names, foreign=False)}
        self.encoder = self._encoder()

    def of(self, segment: Segment, norms: Collection[str]) -> BlockRoles:
        """The roles in one segment, found by moving the outputs of its maps one by one; there are none outside blocks.

        Args:
            segment: each is asked for once.
            norms: names of the norms at whose inputs the stream can be seen.
        """
        roles = BlockRoles()
        if segment.block is None:
            return roles
        block = self.blocks.pop(segment.block)  # and with it all that its runs showed
        base, calls = block.base, {name: (name.removeprefix(f"{block.name}."), 0) for name in segment.modules}
        calls[block.name] = OUTPUT
        points = [name for name in segment.modules if name in norms]
        for i, name in enumerate(segment.modules):
            if not self._is_own_map(name):
                continue
            noise = block.noise(base.outputs[calls[name]], 0)
            after = block.run({calls[name]: noise}).points
            later = [*(one for one in segment.modules[i:] if one in points), block.name]
            shows = (one for one in later if _is_near(after[calls[one]] - base.points[calls[one]], noise))
            if (point := next(shows, None)) is not None:
                roles.writers[name] = point
            else:
                read = base.inputs[calls[name]]
                same = (one for one in roles.readers if _equal(base.inputs[calls[one]], read))
                roles.readers.setdefault(next(same, name), []).append(name)
        ends_in_norm = bool(points) and _equal(base.outputs[calls[points[-1]]], base.points[OUTPUT])
        roles.complete = block.name in roles.writers.values() or ends_in_norm
        return roles

    def _is_own_map(self, name: str) -> bool:
        """Whether a module is a linear map whose weights no other module shares."""
        module = self.walk.modules[name]
        return is_linear_map(module) and all(self.owners[id(p)] == 1 for p in module.parameters(recurse=False))

    def attentions(self, segment: Segment, roles: BlockRoles) -> dict[str, str]:
        """The last map of a segment that an attention's queries, keys and values come from -> that attention."""
        if segment.block is None:
            return {}
        found: list[str] = []

        def note(kind: str, name: str, value: Any) -> None:
            if kind == "out" and map_in(value) is not None and not any(one.startswith(f"{name}.") for one in found):
                found.append(name)

        inside = [name for name in self.walk.modules if name.startswith(f"{segment.block}.")]
        with eager(self.walk.model), self.walk.hooked(inside, note):
            self.walk.run(0, outputs=[segment.block])
        last = {}
        for name in segment.modules:
            attention = next((one for one in found if name.startswith(f"{one}.")), None)
            if attention is not None and name not in roles.writers:
                last[attention] = name
        return {name: attention for attention, name in last.items()}

    def _encoder(self) -> str | None:
        """The name of an encoder-decoder's encoder, whose padding is another than the decoder's."""
        model = self.walk.model
        if not model.config.is_encoder_decoder:
            return None
        encoder = model.get_encoder()
        return next((name for name, module in self.walk.modules.items() if module is encoder and name), "encoder")

    def in_decoder(self, name: str) -> bool:
        """Whether a module is part of an encoder-decoder's decoder."""
        return self.encoder is not None and not name.startswith(f"{self.encoder}.")

    def reads_encoder(self, name: str) -> bool:
        """Whether a map of a decoder reads what the encoder returned."""
        if self.encoder is None or self.encoder not in self.walk.modules:
            return False
        seen = self.walk.run(0, inputs=[name], outputs=[self.encoder])
        return self.encoder in seen and _equal(seen[name], seen[self.encoder])


def _is_near(change: Tensor, added: Tensor) -> bool:
    """Whether what was added shows as it is; some hosts run their MLP on (B T, d)."""
    change, added = change.flatten(0, -2), added.flatten(0, -2)
    return change.shape == added.shape and bool((change - added).abs().max() <= _EXACTLY * added.abs().max())


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
