"""Operations that a model dispatches: what eager decoding of a small model on a GPU spends its time on."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from rope_proof import CACHE
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """Counts what is dispatched inside, views among them, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count[str(function)] += 1
        return function(*args, **(kwargs or {}))


def of_a_step(model: Any, given: Mapping[str, Any]) -> Counter[str]:
    """Of a step that decodes one more token with a cache; where there is none, of a forward of all inputs."""
    given = copy.deepcopy(dict(given))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        output = model(**given)
        cache = output.get(CACHE) if hasattr(output, "get") else None
        if cache is not None:
            name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
            given |= {name: given[name][:, -1:], CACHE: cache}
            if name == "input_ids" and "attention_mask" in given:
                given["attention_mask"] = torch.nn.functional.pad(given["attention_mask"], (0, 1), value=1)
        with Operations() as operations:
            model(**given)
    return operations.count
