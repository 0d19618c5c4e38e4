"""What the linear maps of a block are for, found by running it: which write to the stream, which read one tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..runtime.edits import pattern_of
from ..sites.blocks import OUTPUT, Block, observe_blocks
from .attention_maps import eager, map_in
from .block_replay import Segment, Walk, is_linear_map

_EXACTLY = 1e-2  # relative: how nearly a change of a map's output must show in the stream to be called its addend


class Roles:
    """Of the maps of a patched model, block after block; of blocks that look alike only the first is looked at.

    They are looked at on two sequences, which tell (B, T, d) from (T, B, d), before anything is fitted.
    """

    def __init__(self, walk: Walk, segments: Iterable[Segment]):
        self.walk = walk
        self.owners = Counter(id(p) for module in walk.modules.values() for p in module.parameters(recurse=False))
        kinds: dict[tuple, str] = {}
        for segment in segments:
            if segment.block is not None:
                kinds.setdefault(self._kind(segment), segment.block)
        count = walk.batches.count_of(0)
        lengths = {len(v) for v in walk.batches.inputs(0).values() if isinstance(v, Tensor) and v.dim()}
        few = walk.inputs(0, torch.arange(min(2, count)) if lengths == {count} else None)  # packed images stay together
        blocks = {block.name: block for block in observe_blocks(walk.model, few, kinds.values(), foreign=False)}
        self.blocks = {kind: blocks[name] for kind, name in kinds.items()}
        self._found: dict[tuple, tuple[dict[str, str], dict[str, list[str]], bool]] = {}
        self.encoder = self._encoder()

    def _kind(self, segment: Segment) -> tuple:
        """What blocks that look alike have in common: the modules inside, and which of them run."""
        assert segment.block is not None
        inside = tuple(name for name, _ in self.walk.modules[segment.block].named_modules())
        return pattern_of(segment.block), inside, tuple(_inside(segment))

    def of(self, segment: Segment, norms: list[str]) -> tuple[dict[str, str], dict[str, list[str]], bool]:
        """Which maps write to the stream, and the norm whose input (or the block whose output) first shows that; which
        maps read the same tensor, by the first of them; whether the block's output is a map's addition to the stream,
        or a norm's output.
        """
        if segment.block is None:
            return {}, {}, True
        names = _inside(segment)
        maps = tuple(short for short, name in names.items() if self._is_own_map(name))
        key = (self._kind(segment), maps, tuple(short for short, name in names.items() if name in norms))
        if key not in self._found:
            self._found[key] = self._looked_at(self.blocks[key[0]], maps, key[2], list(names))
        writers, readers, reached = self._found[key]
        names[""] = segment.block
        return (
            {names[one]: names[point] for one, point in writers.items()},
            {names[first]: [names[one] for one in group] for first, group in readers.items()},
            reached,
        )

    def _is_own_map(self, name: str) -> bool:
        """Whether a module is a linear map whose weights are nobody else's."""
        module = self.walk.modules[name]
        return is_linear_map(module) and all(self.owners[id(p)] == 1 for p in module.parameters(recurse=False))

    @staticmethod
    def _looked_at(
        block: Block, maps: tuple[str, ...], norms: tuple[str, ...], order: list[str]
    ) -> tuple[dict[str, str], dict[str, list[str]], bool]:
        """`of` by names in the block, "" for its output; the order is that in which its modules are called."""
        base = block.base
        writers: dict[str, str] = {}
        readers: dict[str, list[str]] = {}
        for name in maps:
            noise = block.noise(base.outputs[name, 0], 0)
            after = block.run({(name, 0): noise}).points
            later = [norm for norm in norms if order.index(norm) > order.index(name)]
            shows = (point for point in (*later, "") if _is_near(after[point, 0] - base.points[point, 0], noise))
            if (point := next(shows, None)) is not None:
                writers[name] = point
            else:
                same = (one for one in readers if _equal(base.inputs[one, 0], base.inputs[name, 0]))
                readers.setdefault(next(same, name), []).append(name)
        ends = "" in writers.values() or (bool(norms) and _equal(base.outputs[norms[-1], 0], base.points[OUTPUT]))
        return writers, readers, ends

    def attentions(self, segment: Segment, writers: Mapping[str, str]) -> dict[str, str]:
        """The last map of a segment that an attention's queries, keys and values come from -> that attention."""
        if segment.block is None:
            return {}
        inside = [name for name in self.walk.modules if name.startswith(f"{segment.block}.")]
        found: list[str] = []

        def note(kind: str, name: str, value: Any) -> None:
            if kind == "out" and map_in(value) is not None and not any(one.startswith(f"{name}.") for one in found):
                found.append(name)

        with eager(self.walk.model), self.walk.hooked(dict.fromkeys(inside, note)):
            self.walk.run(0, outputs=[segment.block])
        last = {}
        for name in segment.modules:
            attention = next((one for one in found if name.startswith(f"{one}.")), None)
            if attention is not None and name not in writers:
                last[attention] = name
        return {name: attention for attention, name in last.items()}

    def _encoder(self) -> str | None:
        """The name of an encoder-decoder's encoder, whose padding is another than the decoder's."""
        model = self.walk.model
        if not model.config.is_encoder_decoder:
            return None
        encoder = model.get_encoder()
        return next((name for name, module in self.walk.modules.items() if module is encoder and name), "encoder")

    def reads_encoder(self, name: str) -> bool:
        """Whether a map of a decoder reads what the encoder returned."""
        if self.encoder is None or self.encoder not in self.walk.modules:
            return False
        seen = self.walk.run(0, inputs=[name], outputs=[self.encoder])
        x, states = seen[name], seen.get(self.encoder)
        return states is not None and x.shape == states.shape and torch.equal(x, states)


def _inside(segment: Segment) -> dict[str, str]:
    """A segment's modules by their names in its block."""
    return {name.removeprefix(f"{segment.block}."): name for name in segment.modules}


def _is_near(change: Tensor, added: Tensor) -> bool:
    """Whether what was added shows as it is; some hosts run their MLP on (B T, d)."""
    change, added = change.flatten(0, -2), added.flatten(0, -2)
    return change.shape == added.shape and bool((change - added).abs().max() <= _EXACTLY * added.abs().max())


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)
