"""Times alternatives in turn, so that disturbances of the machine affect all of them alike."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from hfpatch.compile import compiled_calls, uncompile_model
from hfpatch.runtime.errors import described

MODES = ("eager", "compiled")
AT_LEAST = 0.003  # seconds that one sample lasts: shorter work is repeated within it


@dataclass
class Entrant:
    """One of the things that are timed.

    Attributes:
        subject: what it is, as "rope" or "LayerNorm".
        mode: eager or compiled.
        once: does the work once.
        model: whose regions `once` runs: compiled ones by `compile_model`, or the same ones uncompiled.
        moved: bytes that the work has to read and write at least; None where that isn't the limit.
        inside: seconds that parts of the work took, by name, to which it adds.
    """

    subject: str
    mode: str
    once: Callable[[], Any]
    model: nn.Module | None = None
    moved: int | None = None
    inside: dict[str, float] = field(default_factory=dict)


@dataclass
class Timing:
    """What was measured of an entrant.

    Attributes:
        seconds: of the work done once, sample after sample.
        inside: of parts of it, by name.
        first_seconds: of the first call, compilation included.
        graphs, breaks: that the first call and the warm-up made.
        peak_bytes: of the device's memory, above what was held before, of the work done once.
        failed: why there is nothing else.
    """

    subject: str
    mode: str
    moved: int | None = None
    seconds: list[float] = field(default_factory=list)
    inside: dict[str, list[float]] = field(default_factory=dict)
    first_seconds: float | None = None
    graphs: int = 0
    breaks: int = 0
    peak_bytes: int | None = None
    failed: str | None = None


def race(entrants: list[Entrant], repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Time them in turn, `repeats` samples each after runs that warm them up; one that fails is left out.

    Each round has an order of its own, and all models' weights lie in the same memory: decoding reads all of them for
    every token, and of two equal models one takes up to 5 % longer, by where in memory it lies. Those that are equal
    stay there from one model's turn to the next.

    Returns:
        For each a `Timing` as a dictionary, in the order given.
    """
    timings, running = [], []
    order = random.Random(0)
    with _in_one_place(entrants) as weights:
        for entrant in entrants:
            timing = Timing(entrant.subject, entrant.mode, entrant.moved)
            timings.append(timing)
            try:
                with _having_its_turn(entrant, weights):
                    once = _first_runs(entrant, timing, device)
            except Exception as error:  # of a kernel, a compiler or a device: the others are measured all the same
                timing.failed = described(error)
                continue
            running.append((entrant, timing, max(1, round(AT_LEAST / once))))
        for _ in range(repeats):
            for entrant, timing, times in order.sample(running, len(running)):
                with _having_its_turn(entrant, weights):
                    before = dict(entrant.inside)
                    timing.seconds.append(_clock(entrant.once, device, times))
                for name, seconds in entrant.inside.items():
                    timing.inside.setdefault(name, []).append((seconds - before[name]) / times)
    return [asdict(timing) for timing in timings]


def _first_runs(entrant: Entrant, timing: Timing, device: torch.device) -> float:
    """Compile, warm up, and count what that made. Returns the seconds of a warm run."""
    before = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    timing.first_seconds = _clock(entrant.once, device)
    once = min(_clock(entrant.once, device) for _ in range(2))
    timing.graphs = counters["stats"]["unique_graphs"] - before[0]
    timing.breaks = sum(counters["graph_break"].values()) - before[1]
    if entrant.mode == "compiled" and entrant.model is not None:
        calls = compiled_calls(entrant.model)
        if not calls or not all(calls.values()):
            raise RuntimeError("its compiled code isn't called")
    timing.peak_bytes = _peak_bytes(entrant.once, device)
    return once


def _peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """The most memory that tensors take while it runs, above what is taken before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        _clock(run, device)
        return torch.cuda.max_memory_allocated() - held
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    held = peak = 0
    for event in profile.profiler.kineto_results.events():  # in the order of time; freed bytes are negative
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@dataclass
class Weights:
    """Parameters of models that lie in the same memory.

    Attributes:
        of: each model's parameters and the values that they have, the same tensor where they are equal.
        laid: what lies in a place, by its address.
    """

    of: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = field(default_factory=dict)
    laid: dict[int, Tensor] = field(default_factory=dict)

    def lay(self, model: nn.Module) -> None:
        """Put a model's values where its parameters lie, unless they lie there already."""
        for parameter, values in self.of[model]:
            if self.laid.get(parameter.data_ptr()) is not values:
                parameter.data.copy_(values)
                self.laid[parameter.data_ptr()] = values

    def forget_changed(self, model: nn.Module, versions: list[int]) -> None:
        """What was written to since then, as in a training step, isn't what was laid any more."""
        for (parameter, _), version in zip(self.of[model], versions, strict=True):
            if parameter._version != version:
                self.laid.pop(parameter.data_ptr(), None)


@contextmanager
def _in_one_place(entrants: list[Entrant]) -> Iterator[Weights]:
    """While it lasts, the models' parameters share memory, the n-th of a shape with the n-th of that shape."""
    places: dict[Any, Tensor] = {}
    known: dict[Any, list[Tensor]] = {}
    weights, own = Weights(), []
    for model in dict.fromkeys(entrant.model for entrant in entrants if entrant.model is not None):
        number: Counter[Any] = Counter()
        weights.of[model] = []
        for parameter in model.parameters():
            values = parameter.data
            own.append((parameter, values))
            shape = (values.shape, values.stride(), values.dtype, values.device)
            place = shape, number[shape]
            number[shape] += 1
            if place not in places:
                places[place] = torch.empty_like(values)
            same = known.setdefault(place, [])
            equal = next((other for other in same if torch.equal(other, values)), None)
            if equal is None:
                same.append(equal := values)
            weights.of[model].append((parameter, equal))
            parameter.data = places[place]
    try:
        yield weights
    finally:
        for parameter, values in own:
            parameter.data = values


@contextmanager
def _having_its_turn(entrant: Entrant, weights: Weights) -> Iterator[None]:
    """The model's values where its weights lie; its compiled regions for a compiled entrant, none for an eager one."""
    model = entrant.model
    if model is None:
        yield
        return
    weights.lay(model)
    versions = [parameter._version for parameter, _ in weights.of[model]]
    calls = {module: module._compiled_call_impl for module in model.modules()}
    if entrant.mode != "compiled":
        uncompile_model(model)
    try:
        yield
    finally:
        for module, call in calls.items():
            module._compiled_call_impl = call
        weights.forget_changed(model, versions)


def _clock(run: Callable[[], Any], device: torch.device, times: int = 1) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    started = time.perf_counter()
    for _ in range(times):
        run()
    wait()
    return (time.perf_counter() - started) / times


def ratios(timing: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """Ratios of samples of the same round."""
    return [a / b for a, b in zip(timing["seconds"], other["seconds"], strict=True)]


def middle(values: list[float]) -> tuple[float, float, float]:
    """The median, and the ends of its 95 % interval, whatever the values' distribution (Conover 1999, section 3.2).

    The range of values that are too few for one, less than six.
    """
    from scipy.stats import quantile_test

    found = quantile_test(values).confidence_interval(0.95)
    low, high = np.where(np.isnan(found), (min(values), max(values)), found)
    return float(np.median(values)), float(low), float(high)
