"""Language modelling: causal, or masked where the given model was saved as a masked one."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from methods import small_gpt2
from texts import (
    HeldOutBlocks,
    Objective,
    RecipeError,
    encode,
    random_block,
    split_documents,
    train_tokenizer,
)
from torch import nn
from torch.utils.data import DataLoader, default_collate
from transformers import MODEL_FOR_MASKED_LM_MAPPING, AutoConfig, AutoTokenizer

from .settings import COUNT, at_least, multiple_of, option
from .sources import TextConfig, fingerprint, read_sources
from .tasks import Batch, Figures, Gather, Task, Terms, load, load_whole, longest_input

TOKENS = 16384  # of held-out text at each of other lengths, the same ones


@dataclass
class LanguageModellingConfig(TextConfig):
    """Flags of `--task lm`."""

    model: str | None = option(None, "a folder or Hub id of a causal or masked LM; none: a small GPT-2 from scratch")
    block_size: int = option(128, "tokens in a block", at_least(4))
    vocab_size: int = option(1024, "of the BPE and the GPT-2 that are made from scratch", at_least(257))
    layers: int = option(4, "of the GPT-2 made from scratch", COUNT)
    width: int = option(128, "of the GPT-2 made from scratch; a head takes 32 of it", multiple_of(32))
    heldout_blocks: int = option(320, "held-out blocks behind the table, at most", COUNT)
    curve_blocks: int = option(32, "held-out blocks behind the curves", COUNT)


class LanguageModelling(Task):
    """Every token from those before it, or the hidden ones from the rest."""

    name = "lm"
    Config = LanguageModellingConfig
    by = ("perplexity", "position")  # what at_length has of parts of an input, and what parts they are

    def __init__(self, config: Any, accelerator: Accelerator, out: Path) -> None:
        self.config = c = config
        source, documents = read_sources(c)
        train, heldout = split_documents(documents)
        if c.model is None:
            self.tokenizer = train_tokenizer(train, c.vocab_size, out / "tokenizer")
        else:
            self.tokenizer = load(AutoTokenizer, c.model)
        self.masked = c.model is not None and is_masked(load(AutoConfig, c.model))
        self.block = self.objective(c.block_size)
        self.train_tokens, _ = encode(train, self.tokenizer)
        heldout_tokens, sizes = encode(heldout, self.tokenizer)
        for name, tokens in {"training": self.train_tokens, "held-out": heldout_tokens}.items():
            if len(tokens) < self.block.content:
                raise RecipeError(
                    f"the {name} text has {len(tokens)} tokens, less than one block of {c.block_size}: "
                    "give more text, or a smaller --block_size"
                )
        self.heldout = HeldOutBlocks(heldout_tokens, sizes, self.block, c.heldout_blocks)
        self.curve = HeldOutBlocks(heldout_tokens, sizes, self.block, c.curve_blocks)
        self.data = {
            "source": source,
            "sha256": fingerprint(documents),
            "documents": {"train": len(train), "heldout": len(heldout)},
            "tokens": {"train": len(self.train_tokens), "heldout": len(heldout_tokens)},
            "heldout_tokens_evaluated": len(self.heldout) * self.block.content,
            "vocab_size": len(self.tokenizer),
            "objective": "masked" if self.masked else "causal",
        }

    def objective(self, block_size: int) -> Objective:
        return Objective(block_size, self.tokenizer if self.masked else None)

    def baseline(self) -> transformers.PreTrainedModel:
        c = self.config
        model = self.load(c.model) if c.model else small_gpt2(self.tokenizer, c.block_size, c.layers, c.width)
        longest = min(longest_input(model) or math.inf, self.tokenizer.model_max_length)
        if c.block_size > longest:
            raise RecipeError(
                f"--block_size {c.block_size} is beyond the {longest} positions of the model; "
                "the figures before the patch, and the control, need them"
            )
        if len(self.tokenizer) > model.config.get_text_config().vocab_size:
            raise RecipeError(f"the tokenizer of {c.model} has more tokens ({len(self.tokenizer)}) than the model")
        return model

    def load(self, source: str) -> transformers.PreTrainedModel:
        auto = transformers.AutoModelForMaskedLM if self.masked else transformers.AutoModelForCausalLM
        return load_whole(auto, source)

    def item(self, seed: int, number: int) -> Batch:
        """A block at a random place of the stream."""
        return random_block(self.train_tokens, self.block, seed, number)

    def answers(self, model: nn.Module, batch: Batch) -> Terms:
        """Logits (B, T, vocabulary) of the tokens that are predicted, and those tokens, (B, T); -100: none."""
        logits = model(input_ids=batch["input_ids"], **({} if self.masked else {"use_cache": False})).logits.float()
        return (logits, batch["labels"]) if self.masked else (logits[:, :-1], batch["labels"][:, 1:])

    def nats(self, model: nn.Module, batch: Batch) -> Terms:
        """Of each token that is predicted the negative log-likelihood in nats, (B, T), and whether it counts."""
        logits, labels = self.answers(model, batch)
        nats = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        return nats.view_as(labels), labels != -100

    def loss(self, model: nn.Module, batch: Batch) -> Terms:
        """Per block the summed negative log-likelihood in nats, and the number of tokens that it is over."""
        nats, counts = self.nats(model, batch)
        return nats.sum(1), counts.sum(1)

    def figures(self, model: nn.Module, loader: DataLoader, gather: Gather) -> Figures:
        """Loss in nats a token, perplexity and, for causal models, bits a byte of the text predicted."""
        seen = [gather(self.loss(model, batch)) for batch in loader]
        nats = sum(n.double().sum().item() for n, _ in seen)
        loss = nats / sum(count.sum().item() for _, count in seen)
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            "bits_per_byte": None if self.masked else nats / math.log(2) / loader.dataset.sizes.sum(),
        }

    def at_length(self, model: nn.Module, length: int, parts: list[tuple[int, int]]) -> dict[str, Any]:
        """Loss and perplexity on inputs of another length, and perplexity by parts of them; or the reason for none."""
        objective, text = self.objective(length), self.heldout.tokens[:TOKENS]
        if len(text) < objective.content:
            return {"reason": f"the sweep has only {len(text)} tokens"}
        blocks = text[: len(text) // objective.content * objective.content].reshape(-1, objective.content)
        sums = counts = torch.zeros((), dtype=torch.double)  # of each position
        for seed, block in enumerate(blocks):
            batch = default_collate([objective(block, seed=seed)])
            nats, counted = self.nats(model, {key: tensor.to(model.device) for key, tensor in batch.items()})
            sums, counts = sums + nats[0].double().cpu(), counts + counted[0].double().cpu()
        if not sums.isfinite().all():
            return {"reason": f"loss is {sums.sum().item()}"}
        loss, first = (
            (sums.sum() / counts.sum()).item(),
            length - len(sums),
        )  # a causal model's first token isn't predicted
        by = {}
        for begin, end in parts:
            own = slice(max(0, begin - first), end - first)
            if counts[own].sum():
                by[f"{begin + 1:,}-{end:,}"] = perplexity((sums[own].sum() / counts[own].sum()).item())
        return {"loss": loss, "perplexity": perplexity(loss), "by": by}


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700))


def is_masked(config: transformers.PreTrainedConfig) -> bool:
    """Whether a checkpoint is a masked language model, by the class that it was saved from."""
    architecture = (config.architectures or [""])[0]
    return type(config) in MODEL_FOR_MASKED_LM_MAPPING and not architecture.endswith(("ForCausalLM", "LMHeadModel"))
