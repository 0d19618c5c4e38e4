"""Text classification: any number of labels for each text."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from methods import CONTROL
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, precision_recall_curve
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import MultiLabelBinarizer
from texts import Document, train_tokenizer
from torch import nn
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding

from .labelled import SPLITS, read_labelled, remarks
from .settings import COUNT, RATE, at_least, multiple_of, option
from .sources import fingerprint
from .tasks import Batch, Figures, Gather, Task, Terms, load_whole, place_of

Item = dict[str, Any]  # input_ids and, as the loss takes them, labels: 0 or 1 for each, or one number
Table = torch.Tensor | np.ndarray  # (N, labels)


@dataclass
class ClassificationConfig:
    """Flags of `--task classify`; the last ones are training's, with defaults that suit it."""

    model: str | None = option(None, argparse.SUPPRESS)  # none: what is published begins from scratch
    max_length: int = option(128, "tokens; longer texts are cut off", at_least(4))
    layers: int = option(2, "of the encoder", COUNT)
    width: int = option(128, "of the encoder; a head takes 32 of it", multiple_of(32))
    vocab_size: int = option(8192, "of the encoder and its tokenizer", at_least(300))
    dropout: float = option(0.1, "of the encoder", RATE)
    curve_texts: int = option(1000, "development texts behind the curves, at most", COUNT)
    baselines: bool = option(True, "also measure simple methods, as tf-idf with logistic regression")
    output_dir: str = option("runs/classify", "where results, models and states go")
    variants: list[str] = option(["rms", "dyt", CONTROL], "what to compare; see --task lm")
    batch_size: int = option(64, "texts in a batch", COUNT)


class Classification(Task):
    """All labels of a text whose probability reaches a threshold.

    The threshold is the one that gives the development texts the best micro F1; test texts play no part in it.
    """

    name = "classify"
    Config = ClassificationConfig
    main = "micro_f1"
    higher_is_better = True

    def __init__(self, config: Any, accelerator: Accelerator, out: Path) -> None:
        self.config, self.accelerator = config, accelerator
        source, texts = read_labelled()
        splits = {name: texts[texts.split == name] for name in SPLITS}
        self.labels = sorted(set(texts.labels.explode()))
        documents = [Document("", text) for text in splits["train"].text]
        self.tokenizer = train_tokenizer(documents, config.vocab_size, out / "tokenizer", classifier=True)
        self.pad = DataCollatorWithPadding(self.tokenizer)
        self.train_texts, self.dev, self.heldout = map(self.encode, splits.values())
        self.prior = torch.tensor(binary(splits["train"], self.labels).mean(0), dtype=torch.float)
        self.curve = self.dev[:: math.ceil(len(self.dev) / config.curve_texts)]  # of all lengths
        full = [len(item["input_ids"]) == config.max_length for item in [*self.train_texts, *self.dev, *self.heldout]]
        told = {**remarks(texts), f"texts that fill {config.max_length} tokens, longer ones cut off": sum(full)}
        self.data = {
            "source": source,
            "sha256": fingerprint([Document(f"{row.split} {row.labels}", row.text) for row in texts.itertuples()]),
            "texts": {name: len(part) for name, part in splits.items()},
            "labels": self.labels,
            "labels_per_text": float(splits["train"].labels.map(len).mean()),
            "remarks": {what: count for what, count in told.items() if count},
            "baselines": measure_baselines(splits, self.labels) if config.baselines else {},
        }
        counts = ", ".join(f"{count:,} {what}" for what, count in (self.data["texts"] | self.data["remarks"]).items())
        accelerator.print(f"{source}: {counts}, {len(self.labels)} labels", flush=True)

    def encode(self, texts: pd.DataFrame) -> list[Item]:
        """Texts as tokens and numbers of labels, the shorter ones first: batches of like length hold little padding."""
        options = {"truncation": True, "max_length": self.config.max_length, "return_attention_mask": False}
        tokens = self.tokenizer(texts.text.tolist(), **options)["input_ids"]
        labels = binary(texts, self.labels).astype(float).tolist()
        encoded = [{"input_ids": ids, "labels": own} for ids, own in zip(tokens, labels, strict=True)]
        return sorted(encoded, key=lambda item: len(item["input_ids"]))

    # -- the model

    def baseline(self) -> transformers.PreTrainedModel:
        """MegatronBERT: BERT with its norms before the branches, where an RMSNorm can replace a LayerNorm exactly."""
        c = self.config
        bert = transformers.MegatronBertConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=c.width,
            num_hidden_layers=c.layers,
            num_attention_heads=c.width // 32,
            intermediate_size=4 * c.width,
            max_position_embeddings=c.max_length,
            type_vocab_size=1,
            hidden_dropout_prob=c.dropout,
            attention_probs_dropout_prob=c.dropout,
            initializer_range=c.width**-0.5,  # 0.02 suits a width of 768
            pad_token_id=self.tokenizer.pad_token_id,
            id2label=dict(enumerate(self.labels)),
            label2id={label: i for i, label in enumerate(self.labels)},
            problem_type="multi_label_classification",
        )
        model = transformers.MegatronBertForSequenceClassification(bert)
        nn.init.normal_(model.classifier.weight, std=bert.initializer_range)
        model.classifier.bias.data.copy_(self.prior.clamp(1e-4, 1 - 1e-4).logit())  # how often each label occurs
        return model

    def load(self, source: str) -> transformers.PreTrainedModel:
        return load_whole(transformers.AutoModelForSequenceClassification, source)

    def parameter_groups(self, model: nn.Module, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
        """A word's vector learns from its own texts alone: from scratch it takes longer steps than what all share."""
        groups = super().parameter_groups(model, learning_rate, weight_decay)
        words = getattr(model, "module", model).get_input_embeddings().weight
        for group in groups:
            group["params"] = [p for p in group["params"] if p is not words]
        return [*groups, {"params": [words], "lr": 3 * learning_rate, "weight_decay": weight_decay}]

    # -- training and measuring

    def item(self, seed: int, number: int) -> Item:
        """Each text once an epoch, beside others of like length."""
        return self.train_texts[place_of(seed, number, len(self.train_texts), self.config.batch_size)]

    def collate(self, items: list[Item]) -> Batch:
        """Tokens padded to the longest text of the batch."""
        return dict(self.pad(items))

    def nats(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of every label's yes or no, (B, labels)."""
        return F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")

    def loss(self, model: nn.Module, batch: Batch) -> Terms:
        terms = self.nats(model(**self.inputs(batch)).logits, batch["labels"])
        return terms.sum(1), torch.full_like(terms[:, 0], terms.shape[1])

    def answers(self, model: nn.Module, loader: DataLoader, gather: Gather) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, labels) and labels of all items of a loader."""
        seen = [gather((model(**self.inputs(batch)).logits.float(), batch["labels"])) for batch in loader]
        logits, labels = zip(*seen, strict=True)
        return torch.cat(logits).cpu(), torch.cat(labels).cpu()

    def figures(self, model: nn.Module, loader: DataLoader, gather: Gather) -> Figures:
        """Loss; micro and macro F1 at the development texts' threshold, and that threshold.

        Of development texts, as in the curves, the threshold is chosen on the texts themselves.
        """
        logits, labels = self.answers(model, loader, gather)
        loss = self.nats(logits, labels).double().mean().item()
        of_test = loader.dataset is self.heldout
        chosen_on = self.answers(model, self.dev_loader(), gather) if of_test else (logits, labels)
        threshold = best_threshold(chosen_on[0].sigmoid(), chosen_on[1])
        return {"loss": loss, **scores(logits.sigmoid(), labels, threshold), "threshold": threshold}

    def dev_loader(self) -> DataLoader:
        loader = DataLoader(self.dev, self.config.batch_size, collate_fn=self.collate, generator=torch.Generator())
        return prepare_data_loader(loader, self.accelerator.device, split_batches=True, put_on_device=True)


# -- figures


def binary(texts: pd.DataFrame, labels: list[str]) -> np.ndarray:
    """(N, labels) of 0 and 1."""
    return MultiLabelBinarizer(classes=labels).fit_transform(texts.labels)


def best_threshold(probability: Table, truth: Table) -> float:
    """The probability from which on labels are given so that micro F1 is best."""
    precision, recall, thresholds = precision_recall_curve(np.ravel(truth), np.ravel(probability))
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    return float(thresholds[f1[:-1].argmax()])


def scores(found: Table, truth: Table, threshold: float) -> Figures:
    """Micro and macro F1 of all labels from the threshold on."""
    given = np.asarray(found) >= threshold
    return {f"{kind}_f1": float(f1_score(truth, given, average=kind, zero_division=0)) for kind in ("micro", "macro")}


def measure_baselines(splits: dict[str, pd.DataFrame], labels: list[str]) -> dict[str, Figures]:
    """Figures on the test texts of methods that take seconds: how often each label occurs, and the words of a text."""
    words = TfidfVectorizer(token_pattern=r"\w+|[^\w\s]", ngram_range=(1, 2), sublinear_tf=True)
    words.fit(splits["train"].text)
    inputs = {name: words.transform(texts.text) for name, texts in splits.items()}
    truth = {name: binary(texts, labels) for name, texts in splits.items()}
    methods = {
        "commonest labels": DummyClassifier(strategy="prior"),
        "tf-idf and logistic regression": LogisticRegression(C=10.0, solver="liblinear"),
    }
    figures = {}
    for name, method in methods.items():
        model = OneVsRestClassifier(method).fit(inputs["train"], truth["train"])
        dev, test = (model.predict_proba(inputs[split]) for split in ("dev", "test"))
        figures[name] = scores(test, truth["test"], best_threshold(dev, truth["dev"]))
    return figures
