"""Text classification: one label for each text, or any number of them."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from .corpus import RecipeError
from .labelled import DataConfig, Labelled, LabelledData, read_labelled
from .settings import CONTROL
from .tasks import Batch, Figures, Task, load, load_whole

# Layers, width and tokens of the encoder made from scratch.
SIZES = {
    "small": {"layers": 2, "width": 128, "vocab_size": 8192},
    "classic": {"layers": 2, "width": 384, "vocab_size": 10840},  # 7.92M parameters, 4.16M of them embeddings
}
GRID = np.linspace(0.01, 0.99, 99)  # thresholds that are tried
THRESHOLD = "threshold.json"  # beside a saved model of several labels


@dataclass
class ClassificationConfig(DataConfig):
    """Flags of `--task classify`; the last ones are training's, with defaults that suit it."""

    model: str | None = field(
        default=None, metadata={"help": "a folder or Hub id of a text model; none: a BERT-style encoder from scratch"}
    )
    max_length: int | None = field(
        default=None, metadata={"help": "tokens; longer texts are cut off. None: the model's length, from scratch 128"}
    )
    size: Literal["small", "classic"] = field(
        default="small", metadata={"help": "of the encoder made from scratch: 1.5M or 7.9M parameters"}
    )
    layers: int | None = field(default=None, metadata={"help": "of the encoder made from scratch; none: by --size"})
    width: int | None = field(default=None, metadata={"help": "likewise; a head takes 32 of it"})
    vocab_size: int | None = field(default=None, metadata={"help": "of its tokenizer; none: by --size"})
    placement: Literal["pre", "post"] = field(
        default="pre",
        metadata={"help": "of its norms: before each branch, which learns sooner and where an RMSNorm can replace a "
                  "LayerNorm exactly, or after each residual sum, as in BERT"},
    )  # fmt: skip
    dropout: float = field(default=0.1, metadata={"help": "of the encoder made from scratch"})
    curve_texts: int = field(default=1000, metadata={"help": "development texts behind the curves, at most"})
    baselines: bool = field(default=True, metadata={"help": "also measure tf-idf with logistic regression"})
    output_dir: str = field(default="runs/classify", metadata={"help": "where results, models and states go"})
    variants: list[str] = field(
        default_factory=lambda: ["rms", "dyt", CONTROL], metadata={"help": "what to compare; see --task lm"}
    )
    batch_size: int = field(default=64, metadata={"help": "texts in a batch, over all processes"})


class Classification(Task):
    """Labels of a text: the likeliest one, or all whose probability exceeds a threshold.

    The threshold is the one that gives the development texts the best micro F1; test texts play no part in it.

    Attributes:
        threshold: by which the test texts were measured last; it is saved beside the model.
        given: one that was found in training, which takes its place.
    """

    name = "classify"
    Config = ClassificationConfig
    at_least: ClassVar = {"max_length": 4, "vocab_size": 100, "dropout": 0} | dict.fromkeys(
        ("layers", "width", "curve_texts"), 1
    )
    higher_is_better = True
    threshold: float | None = None
    given: float | None = None

    @classmethod
    def check(cls, config: Any) -> None:
        if config.width is not None and config.width % 32:
            raise RecipeError(f"--width must be a multiple of 32, not {config.width}")
        if not config.dropout < 1:
            raise RecipeError(f"--dropout must be below 1, not {config.dropout:g}")

    def __init__(self, config: Any, accelerator: Accelerator, out: Path) -> None:
        self.config, self.accelerator = config, accelerator
        texts = read_labelled(config)
        given = load(AutoConfig, config.model) if config.model else None
        self.sizes = SIZES[config.size] | {
            name: value for name in ("layers", "width", "vocab_size") if (value := getattr(config, name)) is not None
        }
        self.multi, self.main = texts.multi, "micro_f1" if texts.multi else "accuracy"
        self.labels, self.keep_head = label_order(texts.labels, given)
        with accelerator.main_process_first():
            if given is None:
                code = config.data is None
                self.tokenizer = train_bpe(texts, self.sizes["vocab_size"], code, out / "tokenizer")
            else:
                self.tokenizer = load(AutoTokenizer, config.model)
            baselines = measure_baselines(texts, config.baselines, out / "baselines.json")
        if self.tokenizer.pad_token is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token or self.tokenizer.unk_token
        self.max_length = longest(config, given, self.tokenizer)
        self.pad = DataCollatorWithPadding(self.tokenizer)
        splits, counts = {}, {}
        for name, items in texts.splits.items():
            splits[name], counts[name] = self.encode(items)
        self.train_texts, self.dev, self.heldout = (splits[name] for name in ("train", "dev", "test"))
        self.curve = self.dev if len(self.dev) <= config.curve_texts else self.dev.part(config.curve_texts)
        self.prior = (
            self.train_texts.targets.float().mean(0) if self.multi else self.train_texts.shares(len(self.labels))
        )
        self.data = {
            "source": texts.source,
            "sha256": texts.sha256,
            "texts": {name: len(items) for name, items in texts.splits.items()},
            "problem": "multi" if texts.multi else "single",
            "labels": self.labels,
            "labels_per_text": sum(len(item.labels) for item in texts.splits["train"]) / len(self.train_texts),
            "new_head": config.model is not None and not self.keep_head,
            "max_length": self.max_length,
            "texts_cut_off": counts,
            "vocab_size": len(self.tokenizer),
            **texts.notes,
            "baselines": baselines,
        }
        if accelerator.is_main_process:
            print(summary(self.data), flush=True)

    def encode(self, items: list[Labelled]) -> tuple["Encoded", int]:
        """Texts as tokens and numbers of labels, and how many of them were cut off."""
        options: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
        texts = [item.text for item in items]
        try:
            tokens = self.tokenizer(texts, **options)["input_ids"]
            long = [i for i, own in enumerate(tokens) if len(own) > self.max_length]
            cut = [texts[i] for i in long]
            shorter = self.tokenizer(cut, truncation=True, max_length=self.max_length, **options) if cut else {}
        except Exception as error:  # tokenizers raises nothing narrower
            raise RecipeError(f"the tokenizer can't read the text: {error}") from None
        for i, own in zip(long, shorter.get("input_ids", []), strict=True):
            tokens[i] = own
        number = {label: i for i, label in enumerate(self.labels)}
        if self.multi:
            targets = torch.zeros(len(items), len(self.labels))
            for row, item in zip(targets, items, strict=True):
                row[[number[label] for label in item.labels]] = 1.0
        else:
            targets = torch.tensor([number[item.labels[0]] for item in items])
        return Encoded(tokens, targets), len(long)

    # -- the model

    def baseline(self) -> transformers.PreTrainedModel:
        return self.load(self.config.model) if self.config.model else self.encoder()

    def encoder(self) -> transformers.PreTrainedModel:
        """BERT or, with its norms before the branches, MegatronBERT, otherwise the same."""
        c, width = self.config, self.sizes["width"]
        kind, model = {
            "post": (transformers.BertConfig, transformers.BertForSequenceClassification),
            "pre": (transformers.MegatronBertConfig, transformers.MegatronBertForSequenceClassification),
        }[c.placement]
        bert = kind(
            vocab_size=len(self.tokenizer),
            hidden_size=width,
            num_hidden_layers=self.sizes["layers"],
            num_attention_heads=width // 32,
            intermediate_size=4 * width,
            max_position_embeddings=self.max_length,
            type_vocab_size=1,
            hidden_dropout_prob=c.dropout,
            attention_probs_dropout_prob=c.dropout,
            initializer_range=width**-0.5,  # 0.02 suits a width of 768
            pad_token_id=self.tokenizer.pad_token_id,
            **self.head(),
        )
        made = model(bert)
        set_prior(last_linear(made, len(self.labels)), self.prior, self.multi)
        return made

    def head(self) -> dict[str, Any]:
        return {
            "id2label": dict(enumerate(self.labels)),
            "label2id": {label: i for i, label in enumerate(self.labels)},
            "problem_type": f"{'multi' if self.multi else 'single'}_label_classification",
        }

    def load(self, source: str) -> transformers.PreTrainedModel:
        self.threshold = None
        auto = AutoModelForSequenceClassification
        if source != self.config.model:
            return load_whole(auto, source)
        options = {"ignore_mismatched_sizes": True, "output_loading_info": True, **self.head()}
        model, found = load(auto, source, dtype=torch.float32, **options)
        model.config.pad_token_id = self.tokenizer.pad_token_id
        head = last_linear(model, len(self.labels))
        absent = {*found["missing_keys"], *(key for key, *_ in found["mismatched_keys"])}
        names = {name for name, p in model.named_parameters() if p is head.weight}
        self.keep_head = self.keep_head and not names & absent
        if not self.keep_head:
            nn.init.normal_(head.weight, std=getattr(model.config, "initializer_range", 0.02))
            set_prior(head, self.prior, self.multi)
        return model

    def save_extras(self, folder: Path) -> None:
        """The tokenizer and, of several labels, the probability from which on they are given."""
        self.tokenizer.save_pretrained(folder)
        (folder / THRESHOLD).unlink(missing_ok=True)
        if self.threshold is not None:
            (folder / THRESHOLD).write_text(json.dumps({"threshold": self.threshold}), "utf-8")

    def take_threshold(self, source: str) -> None:
        """Measure by the threshold that is saved beside a model, or by the development texts where there is none.

        Raises:
            RecipeError: it can't be read.
        """
        path, self.given = Path(source) / THRESHOLD, None
        if self.multi and path.exists():
            try:
                self.given = float(json.loads(path.read_text("utf-8"))["threshold"])
            except (OSError, ValueError, TypeError, KeyError) as error:
                raise RecipeError(f"can't read the threshold in {path} ({error}): remove the file") from None

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

    def train_set(self, seed: int, first: int, count: int) -> Dataset:
        return Drawn(self.train_texts, seed, first, count, self.config.batch_size)

    def collate(self, items: list[Any]) -> Batch:
        """Tokens padded to the longest text of the batch."""
        batch = self.pad([{"input_ids": tokens} for tokens, _ in items])
        return {**batch, "labels": torch.stack([target for _, target in items])}

    def inputs(self, batch: Batch) -> Batch:
        return {name: value for name, value in batch.items() if name != "labels"}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Cross-entropy in nats: of the label, or of every label's yes or no."""
        terms = self.nats(model(**self.inputs(batch)).logits, batch["labels"])
        return terms.sum(1), torch.full_like(terms[:, 0], terms.shape[1])

    def nats(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """(B, labels), or (B, 1) where each text has one."""
        if self.multi:
            return F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none")
        return F.cross_entropy(logits.float(), labels, reduction="none")[:, None]

    def figures(self, model: nn.Module, loader: DataLoader, gather: Callable[[Any], Any]) -> Figures:
        """Loss; micro and macro F1 at the development texts' threshold, or accuracy and macro F1 of single labels.

        Of development texts, as in the curves, the threshold is chosen on the texts themselves.
        """
        if not self.multi:
            logits, labels = self.answers(model, loader, gather)
            answers = F.one_hot(logits.argmax(1), len(self.labels)).numpy()
            shown = {"accuracy": float((logits.argmax(1) == labels).float().mean())}
            shown["macro_f1"] = f1(answers, F.one_hot(labels, len(self.labels)).numpy())[1]
        else:
            if loader.dataset is self.heldout:
                self.threshold = threshold = self.find_threshold(model, gather)
            logits, labels = self.answers(model, loader, gather)
            found, true = probabilities(logits, labels)
            if loader.dataset is not self.heldout:
                threshold = best_threshold(found, true)
            shown = dict(zip(("micro_f1", "macro_f1"), f1(found >= threshold, true), strict=True))
        return {"loss": float(self.nats(logits, labels).double().mean()), **shown}

    def find_threshold(self, model: nn.Module, gather: Callable[[Any], Any]) -> float:
        if self.given is not None:
            return self.given
        return best_threshold(*probabilities(*self.answers(model, self.dev_loader(), gather)))

    def answers(
        self, model: nn.Module, loader: DataLoader, gather: Callable[[Any], Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (N, labels) and labels of all texts of a loader."""
        seen = [gather((model(**self.inputs(batch)).logits.float(), batch["labels"])) for batch in loader]
        logits, labels = zip(*seen, strict=True)
        return torch.cat(logits).cpu(), torch.cat(labels).cpu()

    def dev_loader(self) -> DataLoader:
        loader = DataLoader(self.dev, self.config.batch_size, collate_fn=self.collate, generator=torch.Generator())
        return prepare_data_loader(loader, self.accelerator.device, split_batches=True, put_on_device=True)


# -- items


class Encoded(Dataset):
    """Tokens of texts, the shorter ones first, and their targets: (N, labels) of 0 and 1, or (N,) of numbers."""

    def __init__(self, tokens: list[list[int]], targets: torch.Tensor) -> None:
        order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))  # batches of like length hold little padding
        self.tokens, self.targets = [tokens[i] for i in order], targets[order]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[list[int], torch.Tensor]:
        return self.tokens[index], self.targets[index]

    def part(self, count: int) -> "Encoded":
        """`count` of the items, of all lengths."""
        kept = np.linspace(0, len(self) - 1, count).astype(int)
        return Encoded([self.tokens[i] for i in kept], self.targets[kept])

    def shares(self, labels: int) -> torch.Tensor:
        """How often each number is the target, (labels,)."""
        return torch.bincount(self.targets, minlength=labels) / len(self)


class Drawn(Dataset):
    """Each text once an epoch, beside others of like length. Item i is a function of (seed, first + i)."""

    def __init__(self, texts: Encoded, seed: int, first: int, count: int, group: int) -> None:
        self.texts, self.seed, self.first, self.count, self.group = texts, seed, first, count, group
        self.order: tuple[int, np.ndarray] = (-1, np.empty(0))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[list[int], torch.Tensor]:
        epoch, place = divmod(self.first + index, len(self.texts))
        if self.order[0] != epoch:
            self.order = (epoch, self.shuffled(epoch))
        return self.texts[int(self.order[1][place])]

    def shuffled(self, epoch: int) -> np.ndarray:
        """All places in random order, but sorted by length within every eight groups, whose order is random again."""
        random, pool = np.random.default_rng((self.seed, epoch)), 8 * self.group
        places = random.permutation(len(self.texts))
        groups = []
        for start in range(0, len(places), pool):
            alike = np.sort(places[start : start + pool])  # texts lie in the order of their lengths
            cut = np.split(alike, range(self.group, len(alike), self.group))
            groups += [cut[i] for i in random.permutation(len(cut))]
        return np.concatenate(groups)


def train_bpe(texts: LabelledData, vocab_size: int, code: bool, folder: Path) -> transformers.PreTrainedTokenizerBase:
    """BERT's tokenizer, but with pieces learnt from the training texts, by BPE: WordPiece's trainer isn't reproducible.

    Lower case, without accents; a piece at the beginning of a word differs from one inside; [CLS] text [SEP]. Of code
    a word is all up to the next space, so that 'len(x)' may be one piece; else punctuation is cut apart, as BERT does.
    """
    key, stamp = f"{vocab_size} {code} {texts.sha256}", folder / "trained_on.txt"
    if not (stamp.exists() and stamp.read_text() == key):
        names = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")}
        tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        cut = pre_tokenizers.WhitespaceSplit() if code else pre_tokenizers.BertPreTokenizer()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.Metaspace()])
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[*names.values()], show_progress=False)
        tokenizer.train_from_iterator((item.text for item in texts.splits["train"]), trainer)
        ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
        stamp.write_text(key)
    return AutoTokenizer.from_pretrained(folder)


def longest(config: Any, given: Any, tokenizer: transformers.PreTrainedTokenizerBase) -> int:
    """Tokens of a text at most: --max_length, or else what the model takes."""
    if given is None:
        return config.max_length or 128
    positions = getattr(given.get_text_config(), "max_position_embeddings", None) or 512
    if given.model_type in ("roberta", "xlm-roberta", "camembert"):  # their positions begin behind the padding's
        positions -= 1 + (given.pad_token_id or 0)
    most = min(positions, tokenizer.model_max_length)
    if config.max_length is not None and config.max_length > most:
        raise RecipeError(f"--max_length {config.max_length} is beyond the {most} tokens that {config.model} takes")
    return config.max_length or most


# -- labels


def label_order(labels: list[str], given: Any) -> tuple[list[str], bool]:
    """Labels in the order of the outputs, and whether a given model's head already is for them."""
    known = getattr(given, "label2id", None) or {}
    if set(known) == set(labels):
        return sorted(known, key=lambda name: known[name]), True
    return labels, False


def last_linear(model: nn.Module, labels: int) -> nn.Linear:
    """The layer whose outputs are the logits."""
    found = [m for m in model.modules() if isinstance(m, nn.Linear) and m.out_features == labels]
    if not found:
        raise RecipeError(f"no layer of {type(model).__name__} has {labels} outputs, one for each label")
    return found[-1]


def set_prior(head: nn.Linear, prior: torch.Tensor, multi: bool) -> None:
    """Logits begin at how often each label occurs, (labels,): nothing is spent on learning that."""
    if head.bias is not None:
        share = prior.clamp(1e-4, 1 - 1e-4)
        with torch.no_grad():
            head.bias.copy_(share.logit() if multi else share.log())


# -- figures


def probabilities(logits: torch.Tensor, labels: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    return logits.sigmoid().numpy(), labels.numpy()


def f1(found: np.ndarray, true: np.ndarray) -> tuple[float, float]:
    """Micro and macro F1 = 2 TP / (2 TP + FP + FN) of (N, labels) of 0 and 1; 0 for a label that is never involved."""
    hits, either = (found * true).sum(0).astype(float), (found.sum(0) + true.sum(0)).astype(float)
    return float(2 * hits.sum() / max(either.sum(), 1)), float(np.mean(2 * hits / np.maximum(either, 1)))


def best_threshold(found: np.ndarray, true: np.ndarray) -> float:
    """The probability from which on labels are given so that micro F1 is best; the middle one where several tie."""
    scores = np.array([f1(found >= threshold, true)[0] for threshold in GRID])
    best = np.flatnonzero(scores >= scores.max() - 1e-12)
    return float(GRID[best[len(best) // 2]])


def measure_baselines(texts: LabelledData, regression: bool, path: Path) -> dict[str, Figures]:
    """Figures of trivial methods on the test texts, kept in a file for the next run on the same data."""
    key = f"{texts.sha256} {regression}"
    if path.exists() and (kept := json.loads(path.read_text("utf-8"))).get("key") == key:
        return kept["figures"]
    targets = {name: hot(items, texts.labels) for name, items in texts.splits.items()}
    commonest = np.eye(len(texts.labels))[targets["train"].sum(0).argmax()]
    figures = {"commonest label": scores(np.tile(commonest, (len(targets["test"]), 1)), targets["test"], texts.multi)}
    if regression:
        figures["tf-idf and logistic regression"] = logistic_regression(texts, targets)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"key": key, "figures": figures}), "utf-8")
    return figures


def logistic_regression(texts: LabelledData, targets: dict[str, np.ndarray]) -> Figures:
    """Words, punctuation and pairs of both by tf-idf, one logistic regression for each label."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise RecipeError("tf-idf needs a package: pip install scikit-learn, or take --baselines false") from None
    counts = TfidfVectorizer(token_pattern=r"\w+|[^\w\s]", ngram_range=(1, 2), sublinear_tf=True)
    try:
        inputs = {"train": counts.fit_transform([item.text for item in texts.splits["train"]])}
    except ValueError:  # no words at all
        return {}
    inputs |= {name: counts.transform([item.text for item in texts.splits[name]]) for name in ("dev", "test")}
    found = {name: np.zeros_like(targets[name]) for name in ("dev", "test")}
    for label, column in enumerate(targets["train"].T):
        if 0 < column.sum() < len(column):
            model = LogisticRegression(C=10.0, solver="liblinear").fit(inputs["train"], column)
            for name, answers in found.items():
                answers[:, label] = model.predict_proba(inputs[name])[:, 1]
        else:
            for answers in found.values():
                answers[:, label] = column[0]
    if texts.multi:
        given = found["test"] >= best_threshold(found["dev"], targets["dev"])
    else:
        given = np.eye(len(texts.labels))[found["test"].argmax(1)]
    return scores(given, targets["test"], texts.multi)


def hot(items: list[Labelled], labels: list[str]) -> np.ndarray:
    """(N, labels) of 0 and 1."""
    return np.array([[label in item.labels for label in labels] for item in items], dtype=float)


def scores(found: np.ndarray, true: np.ndarray, multi: bool) -> Figures:
    micro, macro = f1(found, true)
    return {"micro_f1" if multi else "accuracy": micro, "macro_f1": macro}  # of one label each they are the same


def summary(data: dict[str, Any]) -> str:
    """What was read and what was left out, in a few lines."""
    count = ", ".join(f"{number:,} {name}" for name, number in data["texts"].items())
    lines = [f"{data['source']}: {count} texts, {len(data['labels'])} labels, {data['labels_per_text']:.2f} each"]
    if cut := sum(data["texts_cut_off"].values()):
        lines.append(f"{cut:,} texts are longer than {data['max_length']} tokens and were cut off")
    told = {
        "rows_without_text": "rows without a text were left out",
        "moved_to_train": "texts with labels that no training text had were moved to the training texts",
    }
    if data["new_head"]:
        lines.append("the model wasn't made for these labels: its last layer starts afresh")
    lines += [f"{data[name]:,} {what}" for name, what in told.items() if data.get(name)]
    for split, number in data.get("unknown_labels_dropped", {}).items():
        lines.append(f"{number:,} {split} texts with labels that no training text has were left out")
    for split, number in data["texts_also_in_train"].items():
        if number:
            lines.append(f"{number:,} {split} texts are also training texts")
    for name, figures in data["baselines"].items():
        lines.append(
            f"{name}: " + ", ".join(f"{what.replace('_', ' ')} {value:.3f}" for what, value in figures.items())
        )
    return "\n".join(lines)
