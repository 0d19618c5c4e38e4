"""Times alternatives in turn, so that disturbances of the machine affect all of them alike."""

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.benchmark import timer

from hfpatch.compile import Region, compile_model, compiled_calls
from hfpatch.runtime.patch_errors import describe_error

MODES = ("eager", "compiled")
Case = tuple[str, str, Callable[[str], Iterable["Entrant"]]]  # its name, the work, what is timed in a mode
AT_LEAST = 0.003  # seconds that one sample lasts: shorter work is repeated within it
FEWEST = 3  # samples that are taken even if the time is over
NO_TIME = "out of time"
# what is counted of compiled code
GRAPHS, REGIONS, BREAKS = "graphs", "regions", "graph breaks"


@dataclass
class Entrant:
    """One of the things that are timed against one another, and what was measured of it."""

    subject: str  # as "rope" or "LayerNorm"
    once: Callable[[], Any] | None = None  # does the work once
    model: nn.Module | None = None  # whose weights the work reads; compiled, if the mode says so
    compile: dict[str, Any] | None = field(default_factory=dict)  # how it is compiled; None: never
    traffic: int | None = None  # bytes that the work has to read and write at the least
    outcome: str | None = None  # of a patch: how exact it is
    inside: dict[str, float] = field(default_factory=dict)  # seconds of parts of the work, by name, to which it adds
    modules: int | None = None  # that are timed inside
    seconds: list[float] = field(default_factory=list)  # measured, of the work done once, sample after sample
    inside_seconds: dict[str, list[float]] = field(default_factory=dict)  # likewise of the parts
    first_seconds: float | None = None  # of the first call, compilation included
    counts: Counter[str] = field(default_factory=Counter)  # of compiled graphs, and what a caller counts
    failed: str | None = None  # why there is nothing else

    def measured(self) -> dict[str, Any]:
        unmeasured = ("once", "model", "compile", "inside")
        return {name: value for name, value in vars(self).items() if name not in unmeasured}


def time_in_turn(
    entrants: Iterable[Entrant],
    mode: str,
    repeats: int,
    *,
    backend: str | None = None,
    until: float = math.inf,
    count: Callable[[Entrant], dict[str, int]] | None = None,
) -> list[dict[str, Any]]:
    """Time things that do the same work, in turn after runs that warm them up, each round in an order of its own.

    The first is what the others are compared with. One that fails is left out, with the reason.

    Args:
        backend: torch.compile's; None: its default.
        until: when, by `time.perf_counter`, no further subject is taken, and no further sample once there are a few.
        count: what else to find out of each, behind its samples.
    """
    torch.compiler.reset()
    order, memory, running = random.Random(0), SharedMemory(), []
    entrants = list(entrants)
    for entrant in entrants:
        if not entrant.failed and time.perf_counter() > until:
            entrant.failed = NO_TIME
        if entrant.failed:
            continue
        try:
            with memory.holding(entrant.model), counting_graphs(entrant):
                once = first_runs(entrant, mode, backend)
            running.append((entrant, max(1, round(AT_LEAST / once))))
        except Exception as error:  # of a kernel, a compiler or a device: the others are measured all the same
            entrant.failed = describe_error(error)
    for taken in range(repeats):
        if taken >= FEWEST and time.perf_counter() > until:
            break
        for entrant, times in order.sample(running, len(running)):
            before = dict(entrant.inside)
            with memory.holding(entrant.model), counting_graphs(entrant):
                entrant.seconds.append(clock(entrant.once, times))
            for name, seconds in entrant.inside.items():
                entrant.inside_seconds.setdefault(name, []).append((seconds - before[name]) / times)
    for entrant, _ in running if count else ():
        try:
            with memory.holding(entrant.model):
                entrant.counts.update(count(entrant))
        except Exception as error:  # of a profiler, or for want of memory: the times hold all the same
            entrant.failed = f"not counted: {describe_error(error)}"
    return [entrant.measured() for entrant in entrants]


def first_runs(entrant: Entrant, mode: str, backend: str | None) -> float:
    """Compile and warm up. Returns the seconds of a warm run."""
    compiles = mode == "compiled" and entrant.compile is not None
    if compiles:
        compile_model(entrant.model, **({"backend": backend} if backend else {}), **entrant.compile)
        regions = (part for part in entrant.model.modules() if isinstance(part._compiled_call_impl, Region))
        kinds = {tuple((name, type(inside)) for name, inside in part.named_modules()) for part in regions}
        entrant.counts[REGIONS] = len(kinds)  # blocks that hold the same modules are compiled once
    entrant.first_seconds = clock(entrant.once)
    once = min(clock(entrant.once) for _ in range(2))
    if compiles and not all(compiled_calls(entrant.model).values()):
        raise RuntimeError("its compiled code isn't called")
    return once


@contextmanager
def counting_graphs(entrant: Entrant) -> Iterator[None]:
    """Inside, the graphs that dynamo compiles, and the breaks in them, count as the entrant's."""
    counters = torch._dynamo.utils.counters

    def found() -> dict[str, int]:
        return {GRAPHS: counters["stats"]["unique_graphs"], BREAKS: sum(counters["graph_break"].values())}

    before = found()
    yield
    entrant.counts.update({name: number - before[name] for name, number in found().items()})


def clock(run: Callable[[], Any], times: int = 1) -> float:
    """Seconds that one run takes, of several in a row; a GPU is waited for."""
    started = timer()
    for _ in range(times):
        run()
    return (timer() - started) / times


class SharedMemory:
    """Memory in which the weights of all models lie while it is their turn, the n-th of a shape where the n-th lies.

    Where in memory they lie makes up to 5 % of the time in which a model decodes a token, which reads all of them.
    """

    def __init__(self) -> None:
        self.places: dict[Any, Tensor] = {}

    @contextmanager
    def holding(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model's weights lie there; behind it they are the model's own and as they were before."""
        number: Counter[Any] = Counter()
        own = [(parameter, parameter.data) for parameter in model.parameters()]
        for parameter, values in own:
            shape = values.shape, values.stride(), values.dtype
            number[shape] += 1
            place = (shape, number[shape])
            if place not in self.places:
                self.places[place] = torch.empty_like(values)
            parameter.data = self.places[place].copy_(values)
        try:
            yield
        finally:
            for parameter, values in own:
                parameter.data = values
