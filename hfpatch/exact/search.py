"""Search for the weights to centre so that LayerNorms may become RMSNorms, measured on a small model of the class.

A Parameter is a *writer* of the residual stream if adding values to it, constant along one of its axes and random over
the others, changes the mean over channels of some norm's input, but no output of the model. Then only norms read what
it writes, and norms subtract this mean. So the Parameter's own mean may be subtracted as well, since that is an
addition of the same kind.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..measure.inputs import input_embedding
from ..measure.outputs import deviating, outputs_inside
from ..measure.quiet_forward import CallArguments, default_device, observe_calls
from ..measure.twin import twin
from ..runtime.edits import pattern_of
from ..runtime.patch_errors import UnsupportedError
from ..sites.norm_facts import describe
from .centring import EMBEDDINGS, Axis, Centring, Signal
from .observe import SEED, add_constants, norms_with_changed_mean, observe, relative_error
from .probe import TOLERANCE, Effect, Moved, Probe, is_constant, off_centre

_POST_NORM = "post-norm: the output of another norm is part of its input"
_SHARED_WRITERS = "the mean of its input isn't zero, and not only norms read the layers that write it"
_MASKS = ("bool_masked_pos", "mask_time_indices")  # inputs that replace some of the tokens by a learned vector
_OTHER_INPUTS = re.compile(r"pixel|image|video|audio|speech|visual|input_features|input_values|encoder_(hidden|out)")
# cache of `search`: class, mode and names -> (numbers of the unchanged forward, result)
_CACHE: dict[tuple[Any, ...], tuple[dict[str, Tensor], Centring]] = {}


def find_centring(model: nn.Module, example_inputs: Mapping[str, Any] | None = None, mode: str = "fold") -> Centring:
    """Find what to centre so that a model's LayerNorms may become RMSNorms without changing its outputs.

    LN(x) = RMS(C x) * gain + shift with C = I - 11'/d, so a norm whose input is zero-mean computes RMS(x) already. The
    centring is found and verified on a small model of the same class and settings (`twin`), in float64.

    Args:
        model: isn't changed; may be on "meta".
        example_inputs: keyword arguments of one forward; needed if they can't be generated.
        mode: "fold", or "parametrize", which centres outputs only and changes no weight.

    Returns:
        The centring. If no norm can be exact, its `refused` says why.

    Raises:
        UnsupportedError: no small model of this class runs.
    """
    small, inputs = twin(model, example_inputs)
    return search(small, inputs, mode)


def search(model: nn.Module, inputs: Mapping[str, Any], mode: str = "fold") -> Centring:
    """Search on the small model itself (float64, random weights); `inputs` are the arguments of its forward.

    The latest result for each class is cached, since `plan_patch` is often followed by `patch_model`. It is used again
    for a model with the same modules whose forward computes the same numbers.
    """
    facts = {name: describe(module) for name, module in model.named_modules()}
    norms = {name: one for name, one in facts.items() if one is not None and one.kind == "layer"}
    if not norms:
        return Centring(refused="it has no LayerNorm")
    with default_device(torch.device("cpu")):
        probe = Probe(model, inputs, norms)
        key = type(model), mode, *dict.fromkeys(map(pattern_of, probe.modules)), *probe.parameters
        numbers = probe.base.numbers()
        known, found = _CACHE.get(key, ({}, Centring()))
        if known.keys() != numbers.keys() or not all(torch.equal(known[name], numbers[name]) for name in numbers):
            found = _Search(probe).run(mode)
            _CACHE[key] = numbers, found
        return found


@dataclass
class _Search:
    """One search: its steps as methods, run in order by `run`.

    Attributes:
        probe: measures on the small model.
        returned_streams: norm -> name of a model output, which is the residual stream that the norm reads.
        unused_parameters: patterns of Parameters that no output depends on with these inputs.
    """

    probe: Probe
    returned_streams: dict[str, str] = field(default_factory=dict)
    unused_parameters: set[str] = field(default_factory=set)

    def run(self, mode: str) -> Centring:
        """Run all steps and return the centring."""
        probe, norms = self.probe, list(self.probe.norms)
        writers = self.writers()
        if self.unused_parameters and self.add_mask_input():
            self.unused_parameters.clear()
            writers = self.writers()
        if (unreached := self.find_unreached()) is not None:
            return Centring(why_approximate=dict.fromkeys(map(pattern_of, norms), unreached), refused=unreached)
        while writers and probe.error_of(Centring(tuple(writers))) > TOLERANCE:  # drop the worst, which is no writer
            alone = {writer: probe.error_of(Centring((writer,))) for writer in writers}
            del writers[max(alone, key=alone.__getitem__)]
        signals = self.without_costly(writers, self.outputs(writers))
        if inputs := self.inputs(writers, signals):
            signals = self.without_costly(writers, signals | inputs)
            writers = probe.not_centred_later(writers, probe.shift, signals)
        centring = Centring(tuple(writers), tuple(signals))
        patterns, compensated = self.find_exact(centring), self.find_compensated(centring)
        useful = {norm for norm in norms if pattern_of(norm) in {*patterns, *compensated}}
        centring = Centring(
            folds=tuple(writer for writer, seen in writers.items() if seen.keys() & useful),
            signals=tuple(one for one, seen in signals.items() if patterns and seen.keys() & useful),
            exact_patterns=tuple(patterns),
        )
        reasons = self.reasons(patterns, compensated)
        if mode == "parametrize":
            last = self.outputs({}) if patterns else {}
            if inputs := {one: seen for one, seen in signals.items() if one.argument and patterns}:
                last = probe.not_centred_later(last, probe.shift_signal, inputs) | inputs
            last = {one: seen for one, seen in last.items() if seen.keys() & useful}
            centring, compensated = Centring(signals=tuple(last), exact_patterns=tuple(patterns)), []
            if patterns and not (last and probe.error_of(centring) <= TOLERANCE):
                return Centring(refused="mode='parametrize' isn't exact for this model; mode='fold' is")
        return replace(
            centring,
            signals=(*centring.signals, *(self.embeddings(centring) if patterns else ())),
            why_approximate=reasons,
            compensated=tuple(compensated),
            returned=self.returned(centring) if patterns else (),
            refused=None if patterns else self.refusal(reasons),
        )

    # --- writers ------------------------------------------------------------------------------------------------------

    def writers(self) -> dict[Axis, Moved]:
        """Return the writers, each with the norms that it affects; without a layer-scale, then with one."""
        found: dict[Axis, Moved] = {}
        rest = []
        for axis in self.candidates():
            effect = self.probe.measure(partial(self.probe.shift, axis))
            if effect.invisible:
                found[axis] = effect.moved
                continue
            rest.append(axis)
            if effect.moved:
                self.note_returned_streams(effect)
            elif effect.error == 0.0:
                self.unused_parameters.add(axis.pattern)
        scaled = (replace(axis, scale=scale) for scale in self.scales() for axis in rest)
        for writer in filter(self.probe.scale_fits, scaled):
            if (effect := self.probe.measure(partial(self.probe.shift, writer))).invisible:
                found[writer] = effect.moved
        return found

    def candidates(self) -> Iterator[Axis]:
        """Return axes that may be the stream's channels: as wide as some norm, of all Parameters outside norms."""
        probe = self.probe
        for pattern, named in probe.parameters.items():
            dims = {parameter.dim() for parameter in named.values()}
            if len(dims) != 1 or any(name.rpartition(".")[0] in probe.norms for name in named):
                continue
            for axis in range(dims.pop()):
                if all(parameter.shape[axis] in probe.widths for parameter in named.values()):
                    yield Axis(pattern, axis)

    def scales(self) -> Iterator[str]:
        """Return patterns of Parameters that may be layer-scales: vectors over the channels, no biases or norms."""
        for pattern, named in self.probe.parameters.items():
            owner, _, name = next(iter(named)).rpartition(".")
            vectors = (p.dim() == 1 and p.numel() in self.probe.widths and bool((p != 0).all()) for p in named.values())
            if name != "bias" and owner not in self.probe.norms and all(vectors):
                yield pattern

    def note_returned_streams(self, effect: Effect) -> None:
        """Record the outputs that a shift changed by constants along the channels: they are the residual stream."""
        for name, old in self.probe.base.outputs.items():
            new = effect.after.outputs.get(name)
            if new is None or new.shape != old.shape or not old.is_floating_point() or old.dim() < 2:
                continue
            if old.shape[-1] in self.probe.widths and is_constant(new - old, -1):
                for norm in effect.moved:
                    self.returned_streams.setdefault(norm, name)

    # --- inputs ---------------------------------------------------------------------------------------

    def add_mask_input(self) -> bool:
        """Add a forward with a masked input, if the model takes a mask, so that its mask embedding is measured too."""
        probe, inputs = self.probe, self.probe.inputs[""]
        takes = inspect.signature(probe.model.forward).parameters
        batch = next((len(value) for value in inputs.values() if isinstance(value, Tensor)), 1)
        for name in (one for one in _MASKS if one in takes and one not in inputs):
            for count in probe.mask_lengths():
                mask = torch.arange(batch * count).reshape(batch, count) % 3 == 0
                try:
                    observe(probe.model, {**inputs, name: mask})
                except UnsupportedError:  # the mask has another length; if none fits, no forward is added
                    continue
                probe.add_inputs(name, mask)
                return True
        return False

    def find_unreached(self) -> str | None:
        """Return a reason to refuse if modules that may write to the stream didn't run; None if all ran."""
        probe = self.probe
        takes = inspect.signature(probe.model.forward).parameters
        missing = [name for name in takes if _OTHER_INPUTS.search(name) and name not in probe.inputs[""]]
        for name, module in probe.modules.items():
            if name in probe.base.called or module._modules or name in probe.norms or not missing:
                continue
            named = [pattern_of(f"{name}.{own}") for own, p in module.named_parameters() if p.dim() > 1]
            if any(pattern in self.unused_parameters for pattern in named):
                return (
                    f"the example inputs leave out {', '.join(missing)}, so they don't reach {pattern_of(name)}, which "
                    "may write to the same stream. Pass example_inputs= with them"
                )
        return None

    # --- centred in every forward -------------------------------------------------------------------------------------

    def outputs(self, writers: Mapping[Axis, Any]) -> dict[Signal, Moved]:
        """Return modules to centre in every forward, since folding these writers leaves their outputs off-centre.

        The last module of a branch is taken. For an embedding this is the dropout after it, through which embeddings
        pass that a user passes instead of tokens.
        """
        probe = self.probe
        found: dict[Signal, Moved] = {}
        tried: set[Signal] = set()
        while True:
            with probe.centre(Centring(tuple(writers), tuple(found))):
                after = probe.forward(watch=True)
            off = off_centre(after)
            sources = [one for one in probe.sources(after) if one not in tried] if off else []
            source = next((one for one in sources if probe.centrable(one).keys() & off), None)
            if source is None:
                return found
            last = probe.last_carrier(source) or source
            tried |= {source, last}
            found[last] = probe.centrable(last)

    def inputs(self, writers: Mapping[Axis, Any], signals: Mapping[Signal, Any]) -> dict[Signal, Moved]:
        """Return inputs of blocks to centre, if norms aren't exact otherwise: the most useful first, one by one.

        So the input of the first block is centred if the model's forward adds up the beginning of the stream, and the
        input of every block if each block ends with a norm.
        """
        probe, found = self.probe, dict[Signal, Moved]()
        off = probe.base.means.keys() - probe.zero_mean(Centring(tuple(writers), tuple(signals)))
        candidates = [one for one in probe.inputs_of_blocks() if probe.centrable(one).keys() & off] if off else []
        worth = probe.worth(writers, signals) if candidates else 0
        while left := [one for one in candidates if one not in found]:
            values = {one: probe.worth(writers, (*signals, *found, one)) for one in left}
            best = max(left, key=values.__getitem__)
            if values[best] <= worth:
                break
            worth, found[best] = values[best], probe.centrable(best)
        return found

    def without_costly(self, writers: Mapping[Axis, Any], signals: Mapping[Signal, Moved]) -> dict[Signal, Moved]:
        """Return signals worth centring: each makes more norms exact than it adds operations to a forward."""
        kept = dict(signals)
        for one in signals:
            fewer = {other: seen for other, seen in kept.items() if other != one}
            kept = fewer if self.probe.worth(writers, fewer) >= self.probe.worth(writers, kept) else kept
        return kept

    def returned(self, centring: Centring) -> tuple[str, ...]:
        """Return the outputs of models inside that a centring changes."""
        inputs = self.probe.inputs[""]
        with outputs_inside(self.probe.model, inputs) as before:
            self.probe.forward()
        with self.probe.centre(centring), outputs_inside(self.probe.model, inputs) as after:
            self.probe.forward()
        return tuple(deviating(before, after, TOLERANCE))

    # --- embeddings passed in place of tokens -------------------------------------------------------------------------

    def embeddings(self, centring: Centring) -> tuple[Signal, ...]:
        """Return `inputs_embeds` of the innermost modules for which they must be centred; () if there are none."""
        probe = self.probe
        taken: set[str] = set()

        def note(name: str, call: CallArguments) -> None:
            if isinstance(call.kwargs.get(EMBEDDINGS), Tensor):
                taken.add(name)

        inputs = self.with_random_embeddings()
        if inputs is None:
            return ()
        try:
            with observe_calls(probe.modules, on_call=note):
                plain = observe(probe.model, inputs)
        except UnsupportedError:  # the model takes no embeddings, or not without further inputs
            return ()
        for modules in ((), *_from_within(taken)):
            embeddings = tuple(Signal(one, -1, EMBEDDINGS) for one in dict.fromkeys(map(pattern_of, sorted(modules))))
            with probe.centre(replace(centring, signals=(*centring.signals, *embeddings))):
                if relative_error(plain, observe(probe.model, inputs)) <= TOLERANCE:
                    return embeddings
        return ()

    def with_random_embeddings(self) -> dict[str, Any] | None:
        """Return the inputs with random embeddings in place of tokens; None if the model has no table of tokens."""
        probe, inputs = self.probe, dict(self.probe.inputs[""])
        table, takes = input_embedding(probe.model), inspect.signature(probe.model.forward).parameters
        names = [one for one in (EMBEDDINGS, f"decoder_{EMBEDDINGS}") if one in takes]
        generator = torch.Generator().manual_seed(SEED)
        for name in names:
            tokens = inputs.pop(name.replace(EMBEDDINGS, "input_ids"), None)
            if isinstance(tokens, Tensor) and table is not None:
                shape = *tokens.shape, table.embedding_dim
                inputs[name] = torch.randn(shape, generator=generator, dtype=torch.float64) + 1
        return inputs if any(name in inputs for name in names) else None

    # --- norms --------------------------------------------------------------------------------------------------------

    def find_exact(self, centring: Centring) -> list[str]:
        """Return patterns of norms that are exact as RMSNorms once the model is centred."""
        probe = self.probe
        inexact = {pattern_of(name) for name in probe.norms.keys() - probe.zero_mean(centring)}
        found = list(dict.fromkeys(one for name in probe.norms if (one := pattern_of(name)) not in inexact))
        error = lambda norms: probe.error_of(replace(centring, exact_patterns=tuple(norms)))  # noqa: E731
        if error(found) <= TOLERANCE:
            return found
        found = [one for one in found if error([one]) <= TOLERANCE]
        return found if error(found) <= TOLERANCE else []

    def find_compensated(self, centring: Centring) -> list[str]:
        """Return patterns of post-norms whose input mean is nearly the mean of an earlier norm's shift.

        The earlier norm's output is part of their input: a constant added to it changes their input's mean by as much.
        """
        probe = self.probe
        found: set[str] = set()
        with probe.centre(centring):
            centred = probe.forward()
            for norm in centred.means if off_centre(centred) else ():
                axis = 1 if probe.norms[norm].channels_first else -1
                with add_constants({norm: probe.modules[norm]}, axis) as constants:
                    shifted = probe.forward()
                places = norms_with_changed_mean(centred, shifted)
                for other in sorted(places, key=places.__getitem__):
                    change = shifted.means[other][0].value - centred.means[other][0].value
                    constant = constants[0].squeeze(axis)  # a shared layer's later calls depend on its first
                    if change.shape != constant.shape:
                        continue
                    if (change - constant).abs().max() <= 1e-6 * constant.abs().max():
                        found.add(pattern_of(other))
                        break
        off = {pattern_of(name) for name in off_centre(centred)}
        layers = {pattern_of(name): 1 if probe.norms[name].channels_first else -1 for name in centred.means}
        and_norms = replace(centring, signals=(*centring.signals, *(Signal(*one) for one in layers.items())))
        rest = {pattern_of(name) for name in probe.norms.keys() - probe.zero_mean(and_norms)}
        return [one for one in dict.fromkeys(map(pattern_of, probe.norms)) if one in (found & off) - rest]

    def reasons(self, exact_patterns: list[str], compensated: list[str]) -> dict[str, str]:
        """Return why norms aren't exact, by pattern."""
        found = {}
        for name in self.probe.norms:
            pattern = pattern_of(name)
            if pattern in exact_patterns:
                continue
            if name not in self.probe.base.means:
                found[pattern] = "the example inputs don't reach it"
            elif pattern in compensated:
                found[pattern] = _POST_NORM
            elif name in self.returned_streams:
                found[pattern] = (
                    f"its input is returned as well, in {self.returned_streams[name]}: centring would change that"
                )
            else:
                found.setdefault(pattern, _SHARED_WRITERS)
        return found

    def refusal(self, reasons: dict[str, str]) -> str:
        """Return why no norm is exact: the commonest reason."""
        counts = Counter(reasons[pattern_of(name)] for name in self.probe.norms)
        return f"none of its {len(self.probe.norms)} LayerNorms has a zero-mean input: {counts.most_common(1)[0][0]}"


def _from_within(names: set[str]) -> Iterator[set[str]]:
    """Sets of modules, the innermost first, then the modules around them; at last the model itself.

    The innermost module may read only the shape of its input (Kosmos-2's table of positions).
    """
    while names:
        inner = {one for one in names if not any(other.startswith(f"{one}.".lstrip(".")) for other in names - {one})}
        yield inner
        names = names - inner
    yield {""}
