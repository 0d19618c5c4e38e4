"""Replaced modules where they stand: their time in a training step, a forward, a decoding, unpatched and patched.

A few per cent of a model's time are less than what one run of it differs from the next; the same difference, of the
modules alone that a patch replaces, stands out. What a patch does to the rest of the model isn't in it.
"""

import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from .bench_models import NATIVE, entrants, works
from .settings import CONTROL
from .timing import Entrant, Race


def replaced(plain: nn.Module, patched: nn.Module) -> set[str]:
    """Paths of the modules whose class differs, without those that hold others of them."""
    old = dict(plain.named_modules())
    found = {path for path, module in patched.named_modules() if path in old and type(module) is not type(old[path])}
    return {path for path in found if path and not any(other.startswith(f"{path}.") for other in found)}


def put_clocks(model: nn.Module, places: dict[str, set[str]]) -> dict[str, float]:
    """From now on the seconds that some modules take are added up in what this returns, by the names of `places`.

    A backward lasts from the gradients of what a module returned to those of what it was given by position. That of an
    embedding of whole numbers, which have none, isn't counted.
    """
    spent = dict.fromkeys(places, 0.0)
    began: dict[nn.Module, float] = {}

    def begin(module: nn.Module, *_: Any) -> None:
        began[module] = time.perf_counter()

    def end(names: list[str], module: nn.Module, *_: Any) -> None:
        seconds = time.perf_counter() - began[module]
        for name in names:
            spent[name] += seconds

    for path in set().union(*places.values()):
        module, ended = model.get_submodule(path), partial(end, [name for name in places if path in places[name]])
        module.register_forward_pre_hook(begin)
        module.register_forward_hook(ended)
        module.register_full_backward_pre_hook(begin)
        module.register_full_backward_hook(ended)
    return spent


def clocked(name: str, work: str, config: Any, device: torch.device) -> list[Entrant]:
    """The unpatched model is timed in the places of every patch, a patched one in its own, the control in all."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # of the embedding
    found = [entrant for entrant in entrants(name, work, "eager", config, device) if entrant.subject != NATIVE]
    made = [entrant for entrant in found if not entrant.failed]
    places = {entrant.subject: replaced(made[0].model, entrant.model) for entrant in made[1:]}
    if CONTROL in places:
        places[CONTROL] = set().union(*places.values())  # which differ by chance alone
    for entrant in made[1:]:
        own = places[entrant.subject]
        entrant.inside, entrant.modules = put_clocks(entrant.model, {entrant.subject: own}), len(own)
        entrant.failed = None if own else "it replaces no module"
    made[0].inside = put_clocks(made[0].model, places)
    return found


def place_races(config: Any, device: torch.device) -> Iterator[Race]:
    """None on a GPU, which works behind the calls' backs, and none compiled, where nothing stands by itself."""
    for name in config.models if device.type == "cpu" and "eager" in config.modes else ():
        for work in works(name):
            yield Race("places", name, work, "eager", partial(clocked, name, work, config, device))
