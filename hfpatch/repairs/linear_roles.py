"""What the linear maps of a block are for, found by running it: which write to the stream, which read one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..core.globs import pattern_of
from .attention_maps import eager, map_in
from .block_replay import Segment, Walk, first_tensor, is_linear_map

_EXACTLY = 1e-2  # relative: how nearly a change of a map's output must show in the stream to be called its addend


class Roles:
    """Of the maps of a patched model, block after block; of blocks that look alike only the first is looked at."""

    def __init__(self, walk: Walk):
        self.walk = walk
        self.owners: dict[int, int] = {}  # Parameter -> how many modules it is of
        for module in walk.modules.values():
            for parameter in module.parameters(recurse=False):
                self.owners[id(parameter)] = self.owners.get(id(parameter), 0) + 1
        self._found: dict[tuple, tuple[dict[int, int], dict[int, list[int]], bool]] = {}
        self.encoder = self._encoder()

    def of(
        self, segment: Segment, norms: list[str], points: list[str]
    ) -> tuple[dict[str, str], dict[str, list[str]], bool]:
        """Which maps write to the stream, and where that shows; which maps read the same tensor, by the first of them;
        whether the block's output is a map's addition to the stream, or a norm's output.

        Found once for all blocks that look alike.
        """
        if segment.block is None:
            return {}, {}, True
        names = [segment.block, *segment.modules]
        key = (tuple(map(pattern_of, names)), tuple(name in norms for name in names))
        if key not in self._found:
            found, reached = self._writers(segment, points)
            groups = self._readers(segment, found)
            place = {name: i for i, name in enumerate(names)}
            self._found[key] = (
                {place[name]: place[point] for name, point in found.items()},
                {place[first]: [place[name] for name in group] for first, group in groups.items()},
                reached,
            )
        writers, readers, reached = self._found[key]
        return (
            {names[i]: names[point] for i, point in writers.items()},
            {names[first]: [names[i] for i in group] for first, group in readers.items()},
            reached,
        )

    def _maps(self, segment: Segment) -> list[str]:
        """Linear maps of a segment whose weights are nobody else's."""
        return [
            name
            for name in segment.modules
            if is_linear_map(self.walk.modules[name])
            and all(self.owners[id(p)] == 1 for p in self.walk.modules[name].parameters(recurse=False))
        ]

    def _writers(self, segment: Segment, norms: list[str]) -> tuple[dict[str, str], bool]:
        """Map -> the first later norm whose input (or the block whose output) moves by just what its output moves.

        Also, whether one moves the block's output so, or that is the output of the last norm.
        """
        assert segment.block is not None
        place = {name: i for i, name in enumerate(segment.modules)}
        still = self.walk.run(0, inputs=norms, outputs=[segment.block])
        found = {}
        for name in self._maps(segment):
            moved, shift = self._moved(name, norms, segment.block)
            for point in (*(norm for norm in norms if place[norm] > place[name]), segment.block):
                change = (moved[point] - still[point]).flatten(0, -2)
                added = shift.flatten(0, -2)  # OPT runs its MLP on (B T, d)
                if change.shape == added.shape and (change - added).abs().max() <= _EXACTLY * added.abs().max():
                    found[name] = point
                    break
        reached = segment.block in found.values()
        if norms and not reached:
            last, end = self.walk.run(0, outputs=norms[-1:])[norms[-1]], still[segment.block]
            reached = last.shape == end.shape and torch.equal(last, end)
        return found, reached

    def _moved(self, name: str, norms: list[str], block: str) -> tuple[dict[str, Tensor], Tensor]:
        """What is seen when noise as large as a map's output is added to it, and that noise."""
        added: list[Tensor] = []

        def add(_module: nn.Module, _args: Any, result: Tensor) -> Tensor:
            noise = torch.randn(result.shape, generator=torch.Generator().manual_seed(0))
            added.append((noise * result.float().std().cpu()).to(result))
            return result + added[-1]

        handle = self.walk.modules[name].register_forward_hook(add)
        try:
            return self.walk.run(0, inputs=norms, outputs=[block]), added[-1]
        finally:
            handle.remove()

    def _readers(self, segment: Segment, writers: Mapping[str, str]) -> dict[str, list[str]]:
        """First map -> all maps of the block that read the same tensor and don't write to the stream."""
        seen: dict[str, Tensor] = {}

        def note(kind: str, name: str, value: Any) -> None:
            if kind == "in":
                seen[name] = first_tensor(value)

        assert segment.block is not None
        maps = [name for name in self._maps(segment) if name not in writers]
        with self.walk.hooked(dict.fromkeys(maps, note)):
            self.walk.run(0, outputs=[segment.block])
        groups: dict[str, list[str]] = {}
        for name, value in seen.items():
            same = (first for first in groups if seen[first].shape == value.shape and torch.equal(seen[first], value))
            groups.setdefault(next(same, name), []).append(name)
        return groups

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
