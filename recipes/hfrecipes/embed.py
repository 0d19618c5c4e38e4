"""Sentence embeddings: texts that belong together lie close, as with all-MiniLM-L6-v2.

The model is an encoder with the pooling of its sentence-transformers folder, or the mean over tokens. Its data are
pairs (a docstring and the body of its function) for the contrastive loss, and passages of all lengths, on which a
patched encoder is repaired, distilled from the original (`recipes/heal.py`) and compared with it.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from .corpus import RecipeError, fingerprint, split_documents
from .encoder import (
    MINILM,
    POOLINGS,
    find_model,
    load_encoder,
    longest_input,
    read_pooling,
    special_tokens,
    write_pooling,
)
from .passages import Corpus, Ids, Lengths, Pair, Passages, one_line
from .tasks import Batch, Figures, Task, load
from .texts import TextConfig, read_texts

SCALE = 20.0  # of cosines in the contrastive loss
CHUNK = 32  # held-out pairs that are told apart at a time, whatever the batch


@dataclass
class EmbeddingConfig(TextConfig):
    """Flags of `--task embed`."""

    text: list[str] | None = field(
        default=None,
        metadata={"help": "UTF-8 files: Python source, whose docstrings and functions are read, or any text; or tables "
                  "with a --text_column; none: Python's standard library"},
    )  # fmt: skip
    model: str | None = field(
        default=MINILM, metadata={"help": f"a folder or Hub id of an encoder; the default is the PyPI package {MINILM}"}
    )
    reference: str | None = field(
        default=None,
        metadata={"help": "the model that embeddings are compared with, a folder or Hub id; none: --model"},
    )
    max_length: int = field(default=256, metadata={"help": "tokens of a text, with special ones; the rest is cut off"})
    heldout_passages: int = field(default=128, metadata={"help": "held-out passages behind the table's similarity"})
    heldout_pairs: int = field(default=128, metadata={"help": "held-out pairs behind the table's retrieval"})
    curve_passages: int = field(default=48, metadata={"help": "held-out passages behind the curves"})
    # other defaults than language models have
    batch_size: int = field(default=24, metadata={"help": "passages, or pairs, in a batch, over all processes"})
    learning_rate: float = field(default=1e-4, metadata={"help": "peak of AdamW's learning rate"})
    calibration: int = field(default=480, metadata={"help": "passages that a repair takes"})


class HeldOutTexts(Dataset):
    """Texts by length, each with its row among all of the task's held-out texts."""

    def __init__(self, texts: list[Ids], rows: range) -> None:
        self.texts, self.rows = texts, sorted(rows, key=lambda row: len(texts[row]))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"passage": self.texts[self.rows[index]], "row": self.rows[index]}


class TrainTexts(Dataset):
    """A passage and, where there are any, a pair: a function of (seed, first + i) alone."""

    def __init__(self, passages: Passages) -> None:
        self.passages = passages

    def __len__(self) -> int:
        return len(self.passages)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pairs, item = self.passages.corpus.pairs, {"passage": self.passages[index]}
        if pairs:
            random = np.random.default_rng((self.passages.seed, 1, self.passages.first + index))
            pair = pairs[random.integers(len(pairs))]
            item |= {"query": pair.query, "target": pair.target}
        return item


class Embedding(Task):
    """Sentence embeddings: pooled over the valid tokens, of norm one."""

    name = "embed"
    Config = EmbeddingConfig
    at_least = dict.fromkeys(("heldout_pairs", "curve_passages"), 1) | {"heldout_passages": 3, "max_length": 16}
    main = "similarity"
    higher_is_better = True

    @classmethod
    def check(cls, config: Any) -> None:
        if config.model is None:
            raise RecipeError("--task embed needs a --model: embeddings aren't learnt from scratch here")

    def __init__(self, config: Any, accelerator: Accelerator, out: Path) -> None:
        self.config, self.device = config, accelerator.device
        self.source = find_model(config.model)
        self.tokenizer = load(AutoTokenizer, self.source)
        if self.tokenizer.pad_token_id is None:
            raise RecipeError(f"the tokenizer of {config.model} has no padding token, which batches of texts need")
        self.before, self.after = special_tokens(self.tokenizer)
        self.pooling = read_pooling(self.source)
        positions = getattr(load(AutoConfig, self.source), "max_position_embeddings", None)
        self.longest = min(positions or self.tokenizer.model_max_length, self.tokenizer.model_max_length)
        source, documents = read_texts(config)
        train, heldout = split_documents(documents)
        self.corpus = Corpus(train, self.tokenizer)
        self.heldout_corpus = Corpus(heldout, self.tokenizer, without=self.corpus.texts)
        for name, corpus in {"training": self.corpus, "held-out": self.heldout_corpus}.items():
            if not corpus.runs:
                raise RecipeError(
                    f"the {name} text has no passage to embed (docstrings of Python source, or paragraphs, of 30 "
                    "characters or more): give more text"
                )
        self.lengths = Lengths(config.max_length - len(self.before) - len(self.after), config.batch_size)
        own = config.text or config.dataset
        self.hold_out(outside=[] if own else language_reference())
        count = len(self.kinds["query"])
        self.data = {
            "source": source if own else f"docstrings and functions of the {source}",
            "sha256": fingerprint(documents),
            "files": {"train": len(train), "heldout": len(heldout)},
            "tokens": {"train": self.corpus.tokens, "heldout": self.heldout_corpus.tokens},
            "pairs": {"train": len(self.corpus.pairs), "heldout": len(self.heldout_corpus.pairs)},
            "heldout_texts": {kind: len(rows) for kind, rows in self.kinds.items()},
            "pooling": self.pooling,
            "baselines": {
                "recall_at_1 by chance": 1 / count if count else None,
                "mrr by chance": sum(1 / rank for rank in range(1, count + 1)) / count if count else None,
            },
        }

    def hold_out(self, outside: list[str]) -> None:
        """All texts behind the figures, kind after kind."""
        c, corpus = self.config, self.heldout_corpus
        lengths = Lengths(self.lengths.longest, 1)  # each passage has a length of its own
        passages = Passages(corpus, lengths, 0, 0, c.heldout_passages)
        pairs = one_of_each(corpus.pairs)
        pairs = [pairs[i] for i in np.random.default_rng(0).permutation(len(pairs))[: c.heldout_pairs]]
        self.heldout_pairs = pairs
        encoded = self.tokenizer(outside, add_special_tokens=False, verbose=False)["input_ids"] if outside else []
        kinds = {
            "passage": [passages[i] for i in range(len(passages))],
            "outside": [np.asarray(ids, dtype=np.int64) for ids in encoded],
            "query": [pair.query for pair in pairs],
            "target": [pair.target for pair in pairs],
        }
        self.texts = [ids[: self.lengths.longest] for texts in kinds.values() for ids in texts]
        ends = np.cumsum([0, *map(len, kinds.values())]).tolist()
        self.kinds = {kind: range(a, b) for kind, a, b in zip(kinds, ends, ends[1:], strict=False)}
        self.heldout = HeldOutTexts(self.texts, range(len(self.texts)))
        self.curve = HeldOutTexts(self.texts, range(min(c.curve_passages, c.heldout_passages)))

    # -- models

    def baseline(self) -> PreTrainedModel:
        return self.load(self.config.model)

    def load(self, source: str) -> PreTrainedModel:
        model = load_encoder(find_model(source))
        if len(self.tokenizer) > model.get_input_embeddings().num_embeddings:
            raise RecipeError(f"the tokenizer of {self.config.model} has more tokens than {source}")
        return model

    def save_extras(self, folder: Path) -> None:
        """The tokenizer, and what sentence-transformers wants to know."""
        c, settings = self.config, json.loads((folder / "config.json").read_text("utf-8"))
        longest = settings.get("max_position_embeddings") or self.tokenizer.model_max_length
        self.tokenizer.save_pretrained(folder)
        if longest > self.tokenizer.model_max_length:  # a patch lifted the limit
            path = folder / "tokenizer_config.json"
            path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"model_max_length": longest}, indent=2))
        write_pooling(folder, self.pooling, settings["hidden_size"], min(c.max_length, longest))

    # -- learning

    def train_set(self, seed: int, first: int, count: int) -> TrainTexts:
        return TrainTexts(Passages(self.corpus, self.lengths, seed, first, count))

    def collate(self, items: list[dict[str, Any]]) -> Batch:
        """Passages as input_ids and attention_mask, (B, T); pairs as query_... and target_...; rows, (B,)."""
        batch = self.pad([item["passage"] for item in items])
        for side in ("query", "target"):
            if side in items[0]:
                padded = self.pad([item[side][: self.lengths.longest] for item in items])
                batch |= {f"{side}_{name}": tensor for name, tensor in padded.items()}
        if "row" in items[0]:
            batch["row"] = torch.tensor([item["row"] for item in items])
        return batch

    def pad(self, texts: list[Ids]) -> Batch:
        texts = [np.concatenate([self.before, ids, self.after]) for ids in texts]
        ids = torch.full((len(texts), max(map(len, texts))), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = torch.from_numpy(text)
            mask[row, : len(text)] = 1
        return {"input_ids": ids, "attention_mask": mask}

    def inputs(self, batch: Batch) -> Batch:
        """As the given model takes them; longer passages are cut off."""
        return {name: batch[name][:, : self.longest] for name in ("input_ids", "attention_mask")}

    def side(self, batch: Batch, name: str) -> Batch:
        return {key: batch[f"{name}_{key}"] for key in ("input_ids", "attention_mask")}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Contrastive: each query finds its target among the batch's (those of one process).

        -log softmax of 20 times the cosines (Henderson et al. 2017, arXiv:1705.00652; sentence-transformers'
        MultipleNegativesRankingLoss).

        Raises:
            RecipeError: the training text has no pairs.
        """
        if "query_input_ids" not in batch:
            raise RecipeError("the training text has no pairs to learn from: give more text, or distil (heal.py)")
        queries, targets = (self.embed(model, self.side(batch, name)) for name in ("query", "target"))
        return contrastive(queries, targets), torch.ones(len(queries), device=queries.device)

    def embed(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Embeddings of norm one, (B, d), of a batch's passages."""
        return self.pool(self.states(model, batch), batch["attention_mask"])

    def pool(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """States (B, T, d) and mask (B, T) to embeddings (B, d) of norm one."""
        return F.normalize(POOLINGS[self.pooling](states.float(), mask), dim=-1)

    def states(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """The last hidden states, (B, T, d), as in `layers`."""
        return self.layers(model, batch, every=False)[-1]

    def layers(self, model: nn.Module, batch: Batch, every: bool = True) -> list[torch.Tensor]:
        """Hidden states (B, T, d): behind the embedding and every layer, or the last alone.

        A model that takes fewer tokens reads windows of equal size. Each has special tokens of its own; the states of
        those that the text doesn't have are left out.
        """
        limit, device = self.limit(model), batch["input_ids"].device
        whole = {name: batch[name] for name in ("input_ids", "attention_mask")}
        if batch["input_ids"].shape[1] <= limit:
            return run_encoder(model, whole, every)
        before, after = len(self.before), len(self.after)
        windows, lengths = [], batch["attention_mask"].sum(1).tolist()
        for ids, length in zip(batch["input_ids"].cpu().numpy(), lengths, strict=True):
            content = ids[before : length - after]
            windows.append(np.array_split(content, math.ceil(len(content) / (limit - before - after))))
        padded = self.pad([window for text in windows for window in text])
        found = []
        for states in run_encoder(model, {name: tensor.to(device) for name, tensor in padded.items()}, every):
            read, joined = iter(states), []
            for text in windows:
                parts = [next(read)[: before + len(window) + after] for window in text]
                inner = [part[before : len(part) - after] for part in parts]
                joined.append(torch.cat([parts[0][:before], *inner, parts[-1][len(parts[-1]) - after :]]))
            found.append(nn.utils.rnn.pad_sequence(joined, batch_first=True))
        return found

    def distance(self, model: nn.Module, teacher: nn.Module, batch: Batch) -> torch.Tensor:
        """Per passage, (B,), for distillation: 1 - cosine of the embeddings, plus the squared distance of the last
        hidden states relative to the teacher's size, over the valid tokens; with `--distil_layers all` plus the mean of
        the other layers' likewise. A teacher that takes fewer tokens reads windows.
        """
        mask, every = batch["attention_mask"], getattr(self.config, "distil_layers", "last") == "all"
        with torch.no_grad():
            theirs = self.layers(teacher, batch, every)
        ours = self.layers(model, batch, every)
        cosine = (self.pool(ours[-1], mask) * self.pool(theirs[-1], mask)).sum(-1)
        *others, last = (relative_distance(a, b, mask) for a, b in zip(ours, theirs, strict=True))
        return 1 - cosine + last + (torch.stack(others).mean(0) if others else 0.0)

    def limit(self, model: nn.Module) -> float:
        """How many tokens a model takes."""
        return longest_input(model, self.tokenizer.model_max_length)

    # -- figures

    @cached_property
    def references(self) -> torch.Tensor:
        """The reference's embeddings of all held-out texts."""
        model = self.load(self.config.reference or self.config.model).to(self.device).eval()
        found = []
        with torch.no_grad():
            for start in range(0, len(self.heldout), 16):
                batch = self.collate([self.heldout[i] for i in range(start, min(start + 16, len(self.heldout)))])
                batch = {name: tensor.to(self.device) for name, tensor in batch.items()}
                found.append((self.embed(model, batch).cpu(), batch["row"].cpu()))
        return by_row(found, len(self.texts))

    def embeddings(self, model: nn.Module, loader: DataLoader, gather: Callable[[Any], Any]) -> torch.Tensor:
        """(texts, d): of all held-out texts that a loader has, at their rows; zero elsewhere."""
        seen = [gather((self.embed(model, batch).float(), batch["row"])) for batch in loader]
        return by_row([(embeddings.cpu(), rows.cpu()) for embeddings, rows in seen], len(self.texts))

    def figures(self, model: nn.Module, loader: DataLoader, gather: Callable[[Any], Any]) -> Figures:
        """Cosine to the reference of held-out passages (mean and least) and of another kind of text; Spearman's
        correlation of all pairwise cosines of passages with the reference's; and of pairs the share of queries whose
        target is the nearest of all, the mean reciprocal rank and the contrastive loss."""
        return self.figures_of(self.embeddings(model, loader, gather), loader.dataset.rows)

    def figures_of(self, found: torch.Tensor, seen: list[int]) -> Figures:
        """`figures` of embeddings at the rows that were seen."""
        rows = {kind: sorted(set(of_kind) & set(seen)) for kind, of_kind in self.kinds.items()}
        cosines = (found * self.references).sum(-1)
        passage, outside, query = rows["passage"], rows["outside"], rows["query"]
        figures: Figures = {
            "similarity": cosines[passage].mean().item(),
            "similarity_min": cosines[passage].min().item(),
            "similarity_outside": cosines[outside].mean().item() if outside else None,
            "spearman": spearman_of_pairs(found[passage], self.references[passage]),
        }
        if not query:
            return figures | dict.fromkeys(("recall_at_1", "mrr", "loss"))
        queries, targets = found[query], found[rows["target"]]
        chunks = zip(queries.split(CHUNK), targets.split(CHUNK), strict=True)
        loss = torch.cat([contrastive(q, t) for q, t in chunks]).mean().item()
        return figures | retrieval(ranks(queries @ targets.T)) | {"loss": loss}


# -- states and figures


def run_encoder(model: nn.Module, inputs: Batch, every: bool) -> list[torch.Tensor]:
    if every:
        return list(model(**inputs, output_hidden_states=True).hidden_states)
    return [model(**inputs).last_hidden_state]


def relative_distance(a: torch.Tensor, b: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """|a - b|² / |b|² of states (B, T, d), each summed over the valid tokens: (B,)."""
    apart, size = ((x.float().square().sum(-1) * mask).sum(1) for x in (a - b, b))
    return apart / size


def contrastive(queries: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Per query the loss of finding its target, (B,), of embeddings (B, d) of norm one."""
    return F.cross_entropy(
        SCALE * queries @ targets.T, torch.arange(len(queries), device=queries.device), reduction="none"
    )


def ranks(scores: torch.Tensor, own: torch.Tensor | None = None) -> torch.Tensor:
    """(queries,): at which rank each query's own target is, of scores (queries, targets); ties count against it.

    Args:
        own: each query's target; none: the one of its number.
    """
    own = torch.arange(len(scores)) if own is None else own
    return (scores >= scores.gather(1, own[:, None])).sum(1)


def retrieval(found: torch.Tensor) -> Figures:
    """Of ranks: how often the first is right, and the mean reciprocal rank."""
    return {"recall_at_1": (found == 1).double().mean().item(), "mrr": (1 / found.double()).mean().item()}


def spearman_of_pairs(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Spearman's correlation of all pairwise cosines of the texts, (N, d) each; None for fewer than three texts."""
    if len(a) < 3:
        return None
    upper = torch.triu_indices(len(a), len(a), offset=1)
    return float(stats.spearmanr(*((x @ x.T)[*upper].double().numpy() for x in (a, b))).statistic)


def by_row(found: list[tuple[torch.Tensor, torch.Tensor]], count: int) -> torch.Tensor:
    """(count, d): embeddings at the rows that they came with; zero elsewhere."""
    embeddings, rows = (torch.cat(parts) for parts in zip(*found, strict=True))
    return embeddings.new_zeros(count, embeddings.shape[1]).index_copy(0, rows, embeddings)


# -- texts


def language_reference() -> list[str]:
    """100 paragraphs of Python's language reference, prose unlike docstrings; none where Python comes without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    paragraphs = dict.fromkeys(one_line(p) for topic in sorted(topics) for p in topics[topic].split("\n\n"))
    paragraphs = [p for p in paragraphs if len(p) >= 60]
    return [paragraphs[i] for i in np.random.default_rng(0).permutation(len(paragraphs))[:100]]


def one_of_each(pairs: list[Pair]) -> list[Pair]:
    """Pairs whose query and whose target no earlier pair has."""
    kept, queries, targets = [], set(), set()
    for pair in pairs:
        query, target = pair.texts
        if query not in queries and target not in targets:
            kept.append(pair)
        queries.add(query)
        targets.add(target)
    return kept
