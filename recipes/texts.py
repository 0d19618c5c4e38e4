"""Text, tokens and blocks for the language-modelling recipes. Nothing is downloaded.

The default text are the plays of Shakespeare that come with the recipes, so figures can be compared between machines.
Every block is a pure function of (seed, index), so a run can stop anywhere and go on, and two runs with the same seed
see the same batches in the same order, whatever model they train and however many processes share the work.
"""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import ByteLevelBPETokenizer, processors
from torch.utils.data import Dataset
from transformers import (
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from hfpatch.runtime.patch_errors import PatchError, first_line

SHAKESPEARE = Path(__file__).resolve().parent / "corpus" / "shakespeare.txt"
SPEECHES = 100  # in a document of it
HELD_OUT = 0.1  # share of the documents
END_OF_TEXT = "<|endoftext|>"
TABLES = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}  # and `datasets`' names for them


class RecipeError(ValueError):
    """An input that can't work. The message is one line that says what to change; recipes exit with status 2."""


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Makes a RecipeError of whatever a library raises inside: `what`, and the error's first line."""
    try:
        yield
    except (RecipeError, PatchError):
        raise
    except Exception as error:
        raise RecipeError(f"{what}: {first_line(error)}") from None


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the process with status 2 and one line for an input that can't work, with status 130 for Ctrl-C."""
    try:
        yield
    except (RecipeError, PatchError) as error:
        print(f"{type(error).__name__}: {first_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def read_flags(kinds: Any, about: str, argv: list[str] | None, **defaults: Any) -> tuple[Any, ...]:
    """Settings from flags, a dataclass each; --help shows the second paragraph of `about`. Quiets transformers."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    parser = HfArgumentParser(kinds, description=about.split("\n\n")[1])
    parser.set_defaults(**defaults)
    return parser.parse_args_into_dataclasses(argv)


@dataclass(frozen=True)
class Document:
    """A name that is the same on every machine, and the text: of a file, a row of a table, or a run of speeches."""

    name: str
    text: str


# -- documents


def read_shakespeare() -> list[Document]:
    """The plays that come with the recipes, in runs of speeches; recipes/corpus/README.md says where they are from."""
    speeches = SHAKESPEARE.read_text("utf-8").split("\n\n")
    runs = {start: speeches[start : start + SPEECHES] for start in range(0, len(speeches), SPEECHES)}
    return [Document(f"speeches {start + 1} to {start + len(run)}", "\n\n".join(run)) for start, run in runs.items()]


def read_texts(sources: list[str] | None, column: str = "text") -> list[Document]:
    """Documents of text files, tables and data sets of the Hub; the plays if there are no sources.

    Args:
        sources: UTF-8 text files, each a document; csv, json, jsonl or parquet files, or ids as in org/name or
            org/name:config, whose rows are documents.
        column: of tables and data sets, in which the text stands.

    Raises:
        RecipeError: a source can't be read, or has no text.
    """
    if not sources:
        return read_shakespeare()
    documents = []
    for source in sources:
        path = Path(source)
        with refusing(f"can't read text from {source}"):
            if path.suffix.lower() in TABLES or not (path.suffix or path.exists()):
                documents += read_rows(source, column)
            else:
                documents.append(Document(path.name, path.read_text("utf-8")))
    if not any(document.text.strip() for document in documents):
        raise RecipeError(f"there is no text in {', '.join(sources)}")
    return [document for document in documents if document.text.strip()]


def read_rows(source: str, column: str) -> list[Document]:
    """The rows of a table, or of a data set's training split, as `datasets` reads them."""
    import datasets  # takes a second

    datasets.utils.logging.disable_progress_bar()
    name, _, config = source.partition(":")
    if kind := TABLES.get(Path(source).suffix.lower()):
        found = datasets.load_dataset(kind, data_files=source, split="train")
    else:
        found = datasets.load_dataset(name, config or None, split="train")
    if column not in found.column_names:
        raise RecipeError(f"{source} has no column {column!r} but {', '.join(found.column_names)}")
    return [Document(f"{name}:{number}", text) for number, text in enumerate(found[column]) if text]


def place(name: str) -> float:
    """A name as a number in [0, 1): it orders and splits, whatever the seed and whatever else there is."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(train, held-out): about one document in ten is held out, by its name. A lone one is cut in two."""
    documents = sorted(documents, key=lambda d: place(d.name))
    if len(documents) > 1:
        n = sum(place(d.name) < HELD_OUT for d in documents)
        n = min(max(n, 1), len(documents) - 1)
        return documents[n:], documents[:n]
    name, text = documents[0].name, documents[0].text
    cut = text.rfind("\n", 0, int(len(text) * (1 - HELD_OUT))) + 1 or int(len(text) * (1 - HELD_OUT))
    return [Document(name, text[:cut])], [Document(name, text[cut:])]


# -- tokens


def train_tokenizer(
    documents: list[Document], vocab_size: int, folder: Path, classifier: bool = False
) -> PreTrainedTokenizerBase:
    """A byte-level BPE learnt from `documents` (a second or a few), the same each time, and saved in `folder`.

    Args:
        classifier: in lower case, with padding, and with a [CLS] before each text whose state stands for it.
    """
    names = {"bos_token": END_OF_TEXT, "eos_token": END_OF_TEXT}
    if classifier:
        names = {"pad_token": "[PAD]", "cls_token": "[CLS]"}
    bpe = ByteLevelBPETokenizer(lowercase=classifier, add_prefix_space=classifier)
    special = list(dict.fromkeys(names.values()))
    bpe.train_from_iterator((d.text for d in documents), vocab_size, 0, show_progress=False, special_tokens=special)
    if classifier:
        begin = [("[CLS]", bpe.token_to_id("[CLS]"))]
        bpe.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=begin)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, **names)
    fast.save_pretrained(folder)
    return fast


def encode(documents: list[Document], tokenizer: PreTrainedTokenizerBase) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of all documents in one stream, and the UTF-8 bytes each token covers.

    Documents are closed by the tokenizer's end-of-text token where it has one (0 bytes). A tokenizer that can't tell
    where its tokens lie in the text gets the document's bytes spread evenly.
    """
    options = dict.fromkeys(("add_special_tokens", "return_attention_mask", "return_token_type_ids", "verbose"), False)
    encoded = tokenizer([d.text for d in documents], return_offsets_mapping=tokenizer.is_fast, **options)
    end = next((i for i in (tokenizer.eos_token_id, tokenizer.sep_token_id) if i is not None), None)
    ids, sizes = [], []
    for i, document in enumerate(documents):
        tokens = np.asarray(encoded["input_ids"][i], dtype=np.int32)
        points = np.frombuffer(document.text.encode("utf-32-le"), dtype=np.uint32)
        position = np.concatenate(([0], np.cumsum(1 + (points > 0x7F) + (points > 0x7FF) + (points > 0xFFFF))))
        if tokenizer.is_fast:
            chars = np.asarray(encoded["offset_mapping"][i], dtype=np.int64).reshape(-1, 2)[:, 1]
            ends = np.maximum.accumulate(position[chars])  # a character cut in two is counted once
        else:
            ends = np.linspace(0, position[-1], len(tokens) + 1)[1:]
        ids += [tokens] if end is None else [tokens, np.array([end], dtype=np.int32)]
        sizes += [np.diff(ends, prepend=0)] if end is None else [np.diff(ends, prepend=0), np.zeros(1)]
    return np.concatenate(ids), np.concatenate(sizes)


def encode_split(
    train: list[Document], heldout: list[Document], tokenizer: PreTrainedTokenizerBase, least: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids to learn from, those held out, and the bytes that each of the latter covers.

    Raises:
        RecipeError: either side has less than `least` tokens, those of a block.
    """
    tokens, (held, sizes) = encode(train, tokenizer)[0], encode(heldout, tokenizer)
    if min(len(tokens), len(held)) < least:
        raise RecipeError(f"the text has less than two blocks of {least} tokens: more --text, or a --block_size")
    return tokens, held, sizes


# -- blocks


class Objective:
    """A block of tokens as inputs and labels.

    Of a causal model: every token from those before it. With a tokenizer, BERT's: 15 % of the tokens, 80 % of these
    hidden, 10 % replaced, 10 % kept, which is a function of the seed.
    """

    def __init__(self, block_size: int, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.masked = tokenizer is not None
        self.content = block_size  # tokens of text in a block
        if tokenizer is not None:
            if tokenizer.mask_token is None:
                raise RecipeError("a masked language model needs a tokenizer with a mask token, and this one has none")
            self.collator = DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=0.15)
            self.first, self.last = (
                torch.tensor([i for i in [special] if i is not None], dtype=torch.long)
                for special in (tokenizer.cls_token_id, tokenizer.sep_token_id)
            )
            self.content = block_size - len(self.first) - len(self.last)

    def __call__(self, tokens: np.ndarray, seed: int) -> dict[str, torch.Tensor]:
        block = torch.from_numpy(tokens).long()
        if not self.masked:
            return {"input_ids": block, "labels": block}
        self.collator.generator = torch.Generator().manual_seed(seed)
        found = self.collator([torch.cat([self.first, block, self.last])])
        return {name: value[0] for name, value in found.items()}


def random_block(tokens: np.ndarray, objective: Objective, seed: int, number: int) -> dict[str, torch.Tensor]:
    """A block at a random place of the stream, the same for the same seed and number."""
    random = np.random.default_rng((seed, number))
    start = random.integers(len(tokens) - objective.content + 1)
    return objective(tokens[start : start + objective.content], seed=int(random.integers(2**31)))


class RandomBlocks(Dataset):
    """`count` random blocks of a seed, those from the number `first` on: going on is beginning at another number."""

    def __init__(self, tokens: np.ndarray, objective: Objective, seed: int, first: int, count: int) -> None:
        self.tokens, self.objective, self.seed, self.first, self.count = tokens, objective, seed, first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return random_block(self.tokens, self.objective, self.seed, self.first + index)


class HeldOutBlocks(Dataset):
    """At most `count` blocks, evenly spread over the stream without overlap; masks don't depend on the run's seed."""

    def __init__(self, tokens: np.ndarray, sizes: np.ndarray, objective: Objective, count: int) -> None:
        self.tokens, self.token_sizes, self.objective = tokens, sizes, objective
        count = min(count, len(tokens) // objective.content)
        self.starts = np.linspace(0, len(tokens) - objective.content, count).astype(int)
        # A causal model predicts all but the first token of a block: these are the bytes it is charged for.
        self.sizes = np.array([sizes[s + 1 : s + objective.content].sum() for s in self.starts])

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = self.starts[index]
        return self.objective(self.tokens[start : start + self.objective.content], seed=index)
