"""Says which norms of a language model can be replaced by constants within a budget, and what each costs.

    python tools/norm_prices.py FOLDER --text FILE [--budget 0.05 0.1] [--output prices.json]

The price of a norm is the KL divergence (nats a token) of the model from itself if this norm alone has the median of
1/sigma in place of its own scale, and nothing is refitted. If the first token is three or more times as large as the
median (an attention sink), the true norm stays there: a constant would leave it hundreds of times too large, and a
repair can tell what reads it to give what it gave. Prices don't add up: where one norm bounds what another makes of it,
both are cheap alone and dear together. So norms are taken out together, cheapest first, as long as the divergence stays
within the budget; a group that goes beyond it is halved.

At the end stand the arguments for `patch_model`: `norm="none", keep=[...]`. What its repair makes of them is another
figure, which `repair_report(model)` has: the repair has no true norm at a sink.
Every sequence begins with the model's first token (BOS), if it has one, in calibration and in use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from hfpatch import plan_patch
from hfpatch.measure.blocks import listed_modules
from hfpatch.measure.hooks import CallArguments, first_tensor, observe_calls
from hfpatch.repairs.distance import token_distances
from hfpatch.sites.norms import describe

SINK = 3.0  # medians


class Prices:
    """Prices of a causal language model's norms on some sequences.

    Args:
        model: in eval mode; it isn't changed.
        ids: (B, T), what prices are measured on, and the constants too.
        norms: names of the norms.
    """

    def __init__(self, model: Any, ids: Tensor, norms: Sequence[str]):
        self.model, self.ids, self.norms = model, ids, norms
        self.modules = dict(model.named_modules())
        self.blocks = [name for name in listed_modules(model) if any(norm.startswith(f"{name}.") for norm in norms)]
        self.constants: dict[str, float] = {}
        self.sinks: dict[str, bool] = {}
        self.returned: dict[str, Any] = {}
        with observe_calls({name: self.modules[name] for name in norms}, on_call=self._measure):
            self.output = self._forward()

    def _forward(self) -> Any:
        with torch.no_grad():
            return self.model(input_ids=self.ids, use_cache=False)

    def _scale(self, name: str, x: Tensor) -> Tensor:
        facts = describe(self.modules[name])
        assert facts is not None
        centred = x - x.mean(-1, keepdim=True) if facts.kind == "layer" else x
        return (centred.square().mean(-1, keepdim=True) + (facts.eps or 0.0)).rsqrt()

    def _measure(self, name: str, call: CallArguments) -> None:
        scales = self._scale(name, first_tensor(call).float())
        self.constants[name] = float(scales[:, 1:].median())
        self.sinks[name] = self.constants[name] / float(scales[:, 0].median()) >= SINK

    @contextlib.contextmanager
    def _replaced(self, names: Sequence[str]) -> Iterator[None]:
        """Context in which the scale of these norms' inputs is a constant."""
        given: dict[str, Tensor] = {}

        def on_call(name: str, call: CallArguments) -> None:
            given[name] = first_tensor(call)

        def on_result(name: str, output: Tensor) -> Tensor:
            x, facts = given.pop(name), describe(self.modules[name])
            assert facts is not None
            shift = facts.parameters_of(self.modules[name])[1]
            scaled = output if shift is None else output - shift
            y = scaled * (self.constants[name] / self._scale(name, x.float())).to(output)
            y = y if shift is None else y + shift
            return torch.cat([output[:, :1], y[:, 1:]], 1) if self.sinks[name] else y

        with observe_calls({name: self.modules[name] for name in names}, on_call, on_result):
            yield

    @contextlib.contextmanager
    def _from(self, block: int) -> Iterator[None]:
        """Context in which earlier blocks return what they returned before."""
        names = self.blocks[:block]
        own = {name: self.modules[name].__dict__.get("forward") for name in names}
        try:
            for name in names:
                self.modules[name].__dict__["forward"] = lambda *args, _of=name, **kwargs: self.returned[_of]
            yield
        finally:
            for name, forward in own.items():
                self.modules[name].__dict__.pop("forward")
                if forward is not None:
                    self.modules[name].__dict__["forward"] = forward

    def together(self, names: Sequence[str], block: int = 0) -> Tensor:
        """Return the KL divergence at each token if these norms are replaced; blocks before `block` aren't run."""
        with self._from(block), self._replaced(names):
            distances = token_distances(self.output, self._forward())[1]
        return distances.nan_to_num(nan=torch.inf)

    def alone(self) -> dict[str, tuple[float, float]]:
        """Return each norm's price, and that of the token where it is largest."""
        found = {}
        for i, block in enumerate(self.blocks):
            for name in (norm for norm in self.norms if norm.startswith(f"{block}.")):
                costs = self.together([name], i)
                found[name] = float(costs.mean()), float(costs.max())
                print(f"{name}: {found[name][0]:.5f} (worst token {found[name][1]:.2f})", flush=True)
            with self._from(i), observe_calls({block: self.modules[block]}, on_result=self.returned.__setitem__):
                self._forward()
        return found

    def within(self, budget: float, prices: dict[str, tuple[float, float]]) -> list[str]:
        """Return norms that can be replaced together within a budget, cheapest first."""
        taken: list[str] = []

        def take(group: list[str]) -> None:
            if group and float(self.together([*taken, *group]).mean()) <= budget:
                taken.extend(group)
            elif len(group) > 1:
                half = len(group) // 2
                take(group[:half])
                take(group[half:])

        take(sorted((name for name in prices if prices[name][0] <= budget), key=lambda name: prices[name][0]))
        return taken


def windows(tokenizer: Any, text: str, sequences: int, length: int) -> Tensor:
    """Return token ids (sequences, length) of a text, each row with the first token that the model knows, if any."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"][0][: sequences * length].view(sequences, length)
    if tokenizer.bos_token_id is not None:
        ids[:, 0] = tokenizer.bos_token_id
    return ids


def norms_in_blocks(model: nn.Module) -> list[str]:
    """Return the names of the norms that `norm="fixed"` would replace inside blocks."""
    blocks = listed_modules(model)
    rows = [row for row in plan_patch(model, norm="fixed").rows if row.action == "replace"]
    return [row.module for row in rows if any(row.module.startswith(f"{block}.") for block in blocks)]


def main() -> None:
    """Measure prices and print them, and what goes within each budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder or a name of the Hub")
    parser.add_argument("--text", type=Path, required=True, help="a text file, of a kind that the model is used for")
    parser.add_argument("--budget", type=float, nargs="+", default=[0.05, 0.1], help="nats of KL divergence")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    ids = windows(tokenizer, args.text.read_text(encoding="utf-8"), args.sequences, args.length)
    found = Prices(model, ids, norms_in_blocks(model))
    prices = found.alone()
    results: dict[str, Any] = {"prices": prices, "within": {}}
    for budget in args.budget:
        taken = found.within(budget, prices)
        costs = found.together(taken)
        results["within"][budget] = {"gone": taken, "together": float(costs.mean()), "worst": float(costs.max())}
        keep = [name for name in prices if name not in taken]
        print(f"{budget:g} nats: {len(taken)} of {len(prices)} norms, together {float(costs.mean()):.4f}")
        print(f"norm='none', keep={keep}")
        if args.output:
            args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
