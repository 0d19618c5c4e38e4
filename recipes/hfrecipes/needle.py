"""A key that was stated early is asked for late: does a model find its value, and from how far?

An input is a row of pairs, a key and its value. Every key comes twice, at random places: once with its value, and once
to be asked for. Keys and values are tokens at random, no two of them alike, so that nothing but the input tells the
value. A model of two layers that rotates learns it in a minute or two, from inputs in which most keys are asked for
soon; with a learned table it takes far longer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoTokenizer

from .corpus import RecipeError, fingerprint, train_tokenizer
from .lm import TOKENS, LanguageModelling, is_masked
from .settings import CONTROL, COUNT, at_least, multiple_of, option
from .tasks import Batch, Drawn, Figures, Gather, load

HELD_OUT = 2**32 - 1  # the seed of held-out inputs


@dataclass
class NeedleConfig:
    """Flags of `--task needle`."""

    model: str | None = option(None, "a folder or Hub id of a causal LM; none: a small GPT-NeoX from scratch")
    block_size: int = option(64, "tokens in an input", at_least(8))
    vocab_size: int = option(257, "of the tokenizer and the GPT-NeoX that are made from scratch", at_least(257))
    layers: int = option(2, "of the GPT-NeoX made from scratch", at_least(2))
    width: int = option(64, "of the GPT-NeoX made from scratch; a head takes 32 of it", multiple_of(32))
    heldout_blocks: int = option(256, "held-out inputs behind the table", COUNT)
    curve_blocks: int = option(64, "held-out inputs behind the curves", COUNT)
    # other defaults than other tasks have
    variants: list[str] = option(["rms", "dyt", "nope", CONTROL], "as of other tasks; the GPT-NeoX rotates already")
    batch_size: int = option(32, "inputs in a batch, over all processes", COUNT)


class Needle(LanguageModelling):
    """The values of keys that are asked for, and of nothing else."""

    name = "needle"
    Config = NeedleConfig
    main = "accuracy"
    higher_is_better = True
    from_scratch = 1500
    by = ("accuracy", "distance")
    masked = False

    def __init__(self, config: Any, accelerator: Accelerator, out: Path) -> None:
        self.config = c = config
        if c.model is None:
            with accelerator.main_process_first():
                self.tokenizer = train_tokenizer([], c.vocab_size, out / "tokenizer")  # of bytes alone
        else:
            self.tokenizer = load(AutoTokenizer, c.model)
            if is_masked(load(AutoConfig, c.model)):
                raise RecipeError(f"{c.model} is a masked language model, and --task needle asks a causal one")
        self.ids = np.setdiff1d(np.arange(len(self.tokenizer)), self.tokenizer.all_special_ids)
        if reason := self.refusal(c.block_size):
            raise RecipeError(f"--block_size {c.block_size}: {reason}")
        self.heldout = Drawn(self, HELD_OUT, 0, c.heldout_blocks)
        self.curve = Drawn(self, HELD_OUT, 0, min(c.curve_blocks, c.heldout_blocks))
        self.data = {
            "source": "keys and values at random",
            "sha256": fingerprint([]),
            "heldout_tokens_evaluated": len(self.heldout) * c.block_size,
            "vocab_size": len(self.tokenizer),
        }

    def refusal(self, length: int) -> str:
        """Why there is no input of so many tokens; "" if there is one."""
        few = length > 2 * len(self.ids)
        return f"{length // 2} different tokens are needed, and the tokenizer has {len(self.ids)}" * few

    def small_model(self) -> transformers.GPTNeoXForCausalLM:
        c, end = self.config, self.tokenizer.eos_token_id
        neox = transformers.GPTNeoXConfig(
            vocab_size=len(self.tokenizer),
            max_position_embeddings=c.block_size,
            hidden_size=c.width,
            intermediate_size=4 * c.width,
            num_hidden_layers=c.layers,
            num_attention_heads=c.width // 32,
            use_parallel_residual=False,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            tie_word_embeddings=True,
            initializer_range=c.width**-0.5,
            bos_token_id=end,
            eos_token_id=end,
        )
        return transformers.GPTNeoXForCausalLM(neox)

    # -- inputs

    def item(self, seed: int, number: int) -> Batch:
        batch, _ = self.draw(self.config.block_size, np.random.default_rng((seed, number)), soon=True)
        return batch

    def draw(self, length: int, random: np.random.Generator, soon: bool = False) -> tuple[Batch, torch.Tensor]:
        """An input; its labels are the values that are asked for. And how many tokens before it each was stated.

        Args:
            soon: to learn from, most keys are asked for soon; else they are at random places.
        """
        count = length // 4  # of keys
        ids, labels, distances = np.full((3, length), -100)
        drawn = random.choice(self.ids, 2 * count + length % 4, replace=False)
        keys, values = drawn[: 2 * count].reshape(2, count)
        order = ask_soon(count, random) if soon else random.permutation(np.repeat(np.arange(count), 2))
        _, first = np.unique(order, return_index=True)
        asked = np.setdiff1d(np.arange(len(order)), first)
        begin = length % 4  # tokens that mean nothing
        ids[:begin], ids[begin::2], ids[begin + 1 :: 2] = drawn[2 * count :], keys[order], values[order]
        labels[begin + 1 + 2 * asked] = values[order[asked]]
        distances[begin + 1 + 2 * asked] = 2 * (asked - first[order[asked]])
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}, torch.from_numpy(distances)

    # -- figures

    def figures(self, model: nn.Module, loader: DataLoader, gather: Gather) -> Figures:
        """Loss in nats of a value that is asked for, and the share of them that is found."""
        seen = []
        for batch in loader:
            logits, labels = self.answers(model, batch)
            nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
            seen.append(gather((nats.sum(1), (logits.argmax(-1) == labels).sum(1), (labels != -100).sum(1))))
        nats, right, count = (sum(part.double().sum().item() for part in parts) for parts in zip(*seen, strict=True))
        return {"loss": nats / count, "accuracy": right / count}

    def at_length(self, model: nn.Module, length: int, parts: list[tuple[int, int]]) -> dict[str, Any]:
        """Accuracy on inputs of another length, and by the distance of what is asked for; or the reason for none."""
        if reason := self.refusal(length):
            return {"reason": reason}
        right, far = [], []
        for number in range(max(1, TOKENS // length)):
            batch, distances = self.draw(length, np.random.default_rng((HELD_OUT, number)))
            logits, labels = self.answers(model, {k: x[None].to(model.device) for k, x in batch.items()})
            asked = labels[0] != -100
            right.append((logits[0].argmax(-1) == labels[0])[asked].cpu())
            far.append(distances[1:][asked.cpu()])
        found, distance = torch.cat(right).double(), torch.cat(far)
        by = {}
        for begin, end in parts:
            own = (begin < distance) & (distance <= end)
            if own.any():
                by[f"{begin + 1:,}-{end:,}"] = found[own].mean().item()
        return {"accuracy": found.mean().item(), "by": by}


def ask_soon(count: int, random: np.random.Generator) -> np.ndarray:
    """All keys in order, and every other time, as it falls, one of those that weren't asked for yet."""
    order: list[int] = []
    stated, waiting = 0, []
    while len(order) < 2 * count:
        if stated < count and (not waiting or random.random() < 0.5):
            order.append(stated)
            waiting.append(stated)
            stated += 1
        else:
            order.append(waiting.pop(random.integers(len(waiting))))
    return np.array(order)
