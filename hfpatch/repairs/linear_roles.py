"""Finds which linear layers of a block write to the residual stream and which read the same tensor."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..measure.outputs import Outputs
from ..measure.quiet_forward import first_tensor, use_attention
from ..sites.block_runs import OUTPUT, find_sum, is_read_only_by, observe_blocks, read_same_tensor, reads_norm
from ..sites.linear_maps import Axes, is_linear_map, reading_axes, writing_axes
from ..sites.norm_facts import describe
from .attention_maps import map_in
from .block_replay import BlockReplay, Recorded, Segment, refusing_failures

_ADDEND_TOLERANCE = 1e-2  # relative: a writer's change must appear in the stream unchanged up to this


@dataclass
class BlockRoles:
    """Roles of the linear layers of one segment.

    Attributes:
        writers: map whose output is added to the stream -> the first norm whose input contains the output; if there is
            none, the block itself, whose output contains it.
        readers: maps that read the same tensor, by the first map.
        shifts: first of the maps that read a tensor -> (norm, name of its shift), if that norm gives the tensor, and
            nothing but these maps reads it.
        reads, writes: names of routers and experts among them -> their Parameters that multiply the input, or that make
            the output.
        complete: whether the last addition to the block's output is a map's output, or the block ends with a norm.
    """

    writers: dict[str, str] = field(default_factory=dict)
    readers: dict[str, list[str]] = field(default_factory=dict)
    shifts: dict[str, tuple[str, str]] = field(default_factory=dict)
    reads: dict[str, Axes] = field(default_factory=dict)
    writes: dict[str, Axes] = field(default_factory=dict)
    complete: bool = True


class Roles:
    """Finds the roles of a patched model's linear layers, block by block.

    Each block runs as it was before any fit, on arguments for two sequences (so that (B, T, d) differs from (T, B, d)).
    It gets the stream that the original's blocks return. After some blocks that aren't repaired yet, their own stream
    may have grown without bound, and would tell nothing.
    """

    def __init__(self, replay: BlockReplay, original: BlockReplay, segments: Iterable[Segment]):
        self.replay = replay
        self.owners = Counter(id(p) for module in replay.modules.values() for p in module.parameters(recurse=False))
        first = replay.batches[0]
        few = torch.arange(min(2, first.sequences)) if first.divisible else None
        names = [segment.block for segment in segments if segment.block]
        returned: dict[str, Any] = {}
        with original.observe_calls(names, on_result=returned.__setitem__):
            original.forward(0, few)
        with refusing_failures(replay.model), replay.observe_calls(names, on_result=lambda name, _: returned[name]):
            found = observe_blocks(replay.model, replay.inputs(0, few), names, foreign=False)
            reached = Recorded((block.name, block) for block in found)
            self.blocks = {name: reached[name] for name in names}
        self.encoder = self._encoder()

    def of(self, segment: Segment, norms: Collection[str]) -> BlockRoles:
        """Return the roles in one segment, found by adding noise to the outputs of its maps one by one.

        Outside of blocks the result has only readers of a norm's output: a head.

        Args:
            segment: the segment; its recorded block is freed, so each segment can be passed once.
            norms: names of the norms whose inputs are compared.
        """
        roles = BlockRoles()
        if segment.block is None:
            roles.readers = self._heads(segment, norms)
            return roles
        block = self.blocks.pop(segment.block)  # frees its recorded activations
        base, calls = block.base, {name: (name.removeprefix(f"{block.name}."), 0) for name in segment.modules}
        calls[block.name] = OUTPUT
        points = [name for name in segment.modules if name in norms]
        for i, name in enumerate(segment.modules):
            if not self.owns_parameters(name) or name in points:
                continue
            if not (plain := is_linear_map(self.replay.modules[name])):
                self._find_axes(name, roles)
            later = {calls[one]: one for one in (*segment.modules[i:], block.name) if one in {*points, block.name}}
            point = find_sum(block, calls[name], later, _ADDEND_TOLERANCE)
            if point is not None and (plain or name in roles.writes):
                roles.writers[name] = later[point]
            if (plain and point is None) or name in roles.reads:
                same = (one for one in roles.readers if read_same_tensor(block, calls[one], calls[name]))
                roles.readers.setdefault(next(same, name), []).append(name)
        for first, group in roles.readers.items():
            for norm in points:
                shift, maps = self._own_shift(norm), [calls[name] for name in group]
                reads = shift and reads_norm(block, calls[norm], maps[0])
                if shift and reads and is_read_only_by(block, calls[norm], maps):
                    roles.shifts[first] = norm, shift
        ends_in_norm = bool(points) and torch.equal(base.outputs[calls[points[-1]]], base.points[OUTPUT])
        roles.complete = block.name in roles.writers.values() or ends_in_norm
        return roles

    def _find_axes(self, name: str, roles: BlockRoles) -> None:
        """Find the Parameters that multiply the input, and that make the output, of a module that is no `nn.Linear`."""
        call = self.replay.observe(0, inputs=[name]).get(("in", name))
        for found, axes_of in ((roles.reads, reading_axes), (roles.writes, writing_axes)):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # it doesn't run on the CPU in float32
                if call is not None and (axes := axes_of(self.replay.modules[name], call)):
                    found[name] = axes

    def _heads(self, segment: Segment, norms: Collection[str]) -> dict[str, list[str]]:
        """The linear maps outside of blocks that read a norm's output, by the first map that reads the same output."""
        points = [name for name in segment.modules if name in norms]
        maps = [name for name in segment.modules if self._is_own_map(name)]
        readers: dict[str, list[str]] = {}
        if points and maps:
            seen = self.replay.observe(0, inputs=maps, outputs=points)
            given = {name: first_tensor(value) for (kind, name), value in seen.items() if kind == "in"}
            for norm in points:
                group = [name for name in maps if name in given and torch.equal(given[name], seen["out", norm])]
                readers |= {group[0]: group} if group else {}
        return readers

    def _is_own_map(self, name: str) -> bool:
        """Whether a module is a linear map whose weights no other module shares."""
        module = self.replay.modules[name]
        return is_linear_map(module) and self.owns_parameters(name)

    def owns_parameters(self, name: str) -> bool:
        """Return whether no other module shares a module's Parameters."""
        return all(self.owners[id(p)] == 1 for p in self.replay.modules[name].parameters(recurse=False))

    def _own_shift(self, norm: str) -> str | None:
        """Name of a norm's shift, if it normalises the last axis and shares no Parameters with others; else None."""
        facts = describe(self.replay.modules[norm])
        plain = facts is not None and not facts.channels_first and len(facts.shape) == 1
        return facts.shift if plain and facts is not None and self.owns_parameters(norm) else None

    def attentions(self, segment: Segment, roles: BlockRoles) -> dict[str, str]:
        """Return attentions by the last map that makes their queries, keys and values."""
        if segment.block is None:
            return {}
        found: list[str] = []

        def record_attention(name: str, returned: Any) -> None:
            if map_in(returned) is not None and not any(one.startswith(f"{name}.") for one in found):
                found.append(name)

        inside = [name for name in self.replay.modules if name.startswith(f"{segment.block}.")]
        with (
            use_attention("eager", self.replay.model),
            self.replay.observe_calls(inside, on_result=record_attention),
        ):
            self.replay.run(0, outputs=[segment.block])
        last = {}
        for name in segment.modules:
            attention = next((one for one in found if name.startswith(f"{one}.")), None)
            if attention is not None and name not in roles.writers:
                last[attention] = name
        return {name: attention for attention, name in last.items()}

    def _encoder(self) -> str | None:
        """The name of an encoder-decoder's encoder, whose padding differs from the decoder's."""
        model = self.replay.model
        if not model.config.is_encoder_decoder:
            return None
        encoder = model.get_encoder()
        return next((name for name, module in self.replay.modules.items() if module is encoder and name), "encoder")

    def in_decoder(self, name: str) -> bool:
        """Return whether a module is part of an encoder-decoder's decoder."""
        return self.encoder is not None and not name.startswith(f"{self.encoder}.")

    def reads_encoder(self, name: str) -> bool:
        """Return whether a linear map of a decoder reads the encoder's output."""
        if self.encoder is None or self.encoder not in self.replay.modules:
            return False
        seen = self.replay.observe(0, inputs=[name], outputs=[self.encoder])
        read, encoded = first_tensor(seen["in", name]), Outputs.of(seen.get(("out", self.encoder))).floats
        return any(torch.equal(read, one) for one in encoded.values())
