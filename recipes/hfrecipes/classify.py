"""Text classification: one label for each text, or any number of them."""

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
from sklearn.dummy import DummyClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score, precision_recall_curve
from sklearn.multiclass import OneVsRestClassifier
from sklearn.preprocessing import MultiLabelBinarizer
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from .corpus import Document, RecipeError, fingerprint, train_tokenizer
from .labelled import SPLITS, DataConfig, names_of, read_labelled, remarks
from .settings import CONTROL, COUNT, RATE, at_least, multiple_of, option
from .tasks import Batch, Figures, Gather, LabelTask, load, longest_input, place_of

Item = dict[str, Any]  # input_ids and, as the loss takes them, labels: 0 or 1 for each, or one number
Table = torch.Tensor | np.ndarray  # (N, labels)


@dataclass
class ClassificationConfig(DataConfig):
    """Flags of `--task classify`; the last ones are training's, with defaults that suit it."""

    model: str | None = option(None, "a folder or Hub id of a text model; none: a BERT-style encoder from scratch")
    max_length: int | None = option(
        None, "tokens; longer texts are cut off. None: the model's length, from scratch 128", at_least(4)
    )
    layers: int = option(2, "of the encoder made from scratch", COUNT)
    width: int = option(128, "of the encoder made from scratch; a head takes 32 of it", multiple_of(32))
    vocab_size: int = option(8192, "of the encoder made from scratch and its tokenizer", at_least(300))
    dropout: float = option(0.1, "of the encoder made from scratch", RATE)
    curve_texts: int = option(1000, "development texts behind the curves, at most", COUNT)
    baselines: bool = option(True, "also measure simple methods, as tf-idf with logistic regression")
    output_dir: str = option("runs/classify", "where results, models and states go")
    variants: list[str] = option(["rms", "dyt", CONTROL], "what to compare; see --task lm")
    batch_size: int = option(64, "texts in a batch, over all processes", COUNT)


class Classification(LabelTask):
    """Labels of a text: the likeliest one, or all whose probability reaches a threshold.

    The threshold is the one that gives the development texts the best micro F1; test texts play no part in it.
    """

    name = "classify"
    Config = ClassificationConfig
    auto = AutoModelForSequenceClassification

    def __init__(self, config: Any, accelerator: Accelerator, out: Path) -> None:
        self.config, self.accelerator = config, accelerator
        source, texts, left_out = read_labelled(config)
        splits = {name: texts[texts.split == name] for name in SPLITS}
        self.multi = bool((texts.labels.map(len) != 1).any())  # any text has several labels, or none
        self.main = "micro_f1" if self.multi else "accuracy"
        given = self.choose_labels(names_of(texts), self.multi)
        if given is None:
            with accelerator.main_process_first():
                documents = [Document("", text) for text in splits["train"].text]
                self.tokenizer = train_tokenizer(documents, config.vocab_size, out / "tokenizer", classifier=True)
        else:
            self.tokenizer = load(AutoTokenizer, config.model)
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.unk_token
        self.pad = DataCollatorWithPadding(self.tokenizer)
        self.max_length = longest(config, self.tokenizer)
        self.train_texts, self.dev, self.heldout = map(self.encode, splits.values())
        self.prior = torch.tensor(binary(splits["train"], self.labels).mean(0), dtype=torch.float)
        self.curve = self.dev[:: math.ceil(len(self.dev) / config.curve_texts)]  # of all lengths
        full = [len(item["input_ids"]) == self.max_length for item in [*self.train_texts, *self.dev, *self.heldout]]
        told = {"rows without a text, left out": left_out, **remarks(texts)}
        told[f"texts that fill {self.max_length} tokens, longer ones cut off"] = sum(full)
        self.data = {
            "source": source,
            "sha256": fingerprint([Document(f"{row.split} {row.labels}", row.text) for row in texts.itertuples()]),
            "texts": {name: len(part) for name, part in splits.items()},
            "labels": self.labels,
            "labels_per_text": float(splits["train"].labels.map(len).mean()),
            "new_head": config.model is not None and not self.keep_head,
            "remarks": {what: count for what, count in told.items() if count},
            "baselines": measure_baselines(splits, names_of(texts), self.multi) if config.baselines else {},
        }
        counts = ", ".join(f"{count:,} {what}" for what, count in (self.data["texts"] | self.data["remarks"]).items())
        new_head = "; its last layer starts afresh, as the model wasn't made for these labels" * self.data["new_head"]
        accelerator.print(f"{source}: {counts}, {len(self.labels)} labels{new_head}", flush=True)

    def encode(self, texts: pd.DataFrame) -> list[Item]:
        """Texts as tokens and numbers of labels, the shorter ones first: batches of like length hold little padding."""
        options = {"truncation": True, "max_length": self.max_length, "return_attention_mask": False}
        tokens = self.tokenizer(texts.text.tolist(), **options)["input_ids"]
        targets = binary(texts, self.labels)
        labels = (targets.astype(float) if self.multi else targets.argmax(1)).tolist()
        encoded = [{"input_ids": ids, "labels": own} for ids, own in zip(tokens, labels, strict=True)]
        return sorted(encoded, key=lambda item: len(item["input_ids"]))

    # -- the model

    def small_model(self) -> transformers.PreTrainedModel:
        """MegatronBERT: BERT with its norms before the branches, where an RMSNorm can replace a LayerNorm exactly."""
        c = self.config
        bert = transformers.MegatronBertConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=c.width,
            num_hidden_layers=c.layers,
            num_attention_heads=c.width // 32,
            intermediate_size=4 * c.width,
            max_position_embeddings=self.max_length,
            type_vocab_size=1,
            hidden_dropout_prob=c.dropout,
            attention_probs_dropout_prob=c.dropout,
            initializer_range=c.width**-0.5,  # 0.02 suits a width of 768
            pad_token_id=self.tokenizer.pad_token_id,
            **self.head,
        )
        model = transformers.MegatronBertForSequenceClassification(bert)
        self.begin_head(model)
        return model

    def begin_head(self, model: nn.Module) -> None:
        """A new last layer, whose logits begin at how often each label occurs: nothing is spent on learning that."""
        head = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == len(self.labels)][-1]
        nn.init.normal_(head.weight, std=getattr(model.config, "initializer_range", 0.02))
        if head.bias is not None:
            share = self.prior.clamp(1e-4, 1 - 1e-4)
            head.bias.data.copy_(share.logit() if self.multi else share.log())

    def load(self, source: str) -> transformers.PreTrainedModel:
        model = super().load(source)
        if source == self.config.model:
            model.config.pad_token_id = self.tokenizer.pad_token_id
            if not self.keep_head:
                self.begin_head(model)
        return model

    def parameter_groups(self, model: nn.Module, learning_rate: float, weight_decay: float) -> list[dict[str, Any]]:
        """A word's vector learns from its own texts alone: from scratch it takes longer steps than what all share."""
        groups = super().parameter_groups(model, learning_rate, weight_decay)
        if self.config.model:
            return groups
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
        """Of the label, (B, 1), or of every label's yes or no, (B, labels)."""
        if self.multi:
            return F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
        return super().nats(logits, labels)

    def figures(self, model: nn.Module, loader: DataLoader, gather: Gather) -> Figures:
        """Loss; micro and macro F1 at the development texts' threshold, and that threshold; or, of single labels,
        accuracy and macro F1.

        Of development texts, as in the curves, the threshold is chosen on the texts themselves.
        """
        logits, labels = self.answers(model, loader, gather)
        loss = self.nats(logits, labels).double().mean().item()
        if not self.multi:
            return {"loss": loss, **scores(logits, F.one_hot(labels, len(self.labels)))}
        of_test = loader.dataset is self.heldout
        chosen_on = self.answers(model, self.dev_loader(), gather) if of_test else (logits, labels)
        threshold = best_threshold(chosen_on[0].sigmoid(), chosen_on[1])
        return {"loss": loss, **scores(logits.sigmoid(), labels, threshold), "threshold": threshold}

    def dev_loader(self) -> DataLoader:
        loader = DataLoader(self.dev, self.config.batch_size, collate_fn=self.collate, generator=torch.Generator())
        return prepare_data_loader(loader, self.accelerator.device, split_batches=True, put_on_device=True)


def longest(config: Any, tokenizer: transformers.PreTrainedTokenizerBase) -> int:
    """Tokens of a text at most: --max_length, or else what the model takes."""
    if config.model is None:
        return config.max_length or 128
    most = min(longest_input(load(AutoModel, config.model)) or 512, tokenizer.model_max_length)
    if config.max_length is not None and config.max_length > most:
        raise RecipeError(f"--max_length {config.max_length} is beyond the {most} tokens that {config.model} takes")
    return config.max_length or most


# -- figures


def binary(texts: pd.DataFrame, labels: list[str]) -> np.ndarray:
    """(N, labels) of 0 and 1."""
    return MultiLabelBinarizer(classes=labels).fit_transform(texts.labels)


def best_threshold(probability: Table, truth: Table) -> float:
    """The probability from which on labels are given so that micro F1 is best."""
    precision, recall, thresholds = precision_recall_curve(np.ravel(truth), np.ravel(probability))
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    return float(thresholds[f1[:-1].argmax()])


def scores(found: Table, truth: Table, threshold: float | None = None) -> Figures:
    """Micro and macro F1 of all labels from the threshold on, or accuracy and macro F1 of the likeliest one."""
    found = np.asarray(found)
    given = np.eye(found.shape[1])[found.argmax(1)] if threshold is None else found >= threshold
    micro, macro = (float(f1_score(truth, given, average=kind, zero_division=0)) for kind in ("micro", "macro"))
    return {"accuracy" if threshold is None else "micro_f1": micro, "macro_f1": macro}  # of one label each it is both


def measure_baselines(splits: dict[str, pd.DataFrame], labels: list[str], multi: bool) -> dict[str, Figures]:
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
        figures[name] = scores(test, truth["test"], best_threshold(dev, truth["dev"]) if multi else None)
    return figures
