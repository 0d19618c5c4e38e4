"""What users have at hand becomes inputs of a model: texts, rows and batches, in every form that people keep."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from tiny_models import patch, tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoModelForMaskedLM,
    BatchEncoding,
    GPT2LMHeadModel,
    IBertConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from hfpatch import outcomes, read_batches, repair, repair_report, verify
from hfpatch.errors import OptionError

LM = "AutoModelForCausalLM"
WORDS = ["the", "cat", "sat", "on", "mat"]
TEXTS = ["the cat sat", "on the mat the cat sat", "cat"]
IDS = [[20, 5, 6, 7, 21], [20, 8, 5, 9, 5, 6, 7, 21], [20, 6, 21]]


def make_tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """One token a word, between [CLS] and [SEP]."""
    vocabulary = {word: 5 + i for i, word in enumerate(WORDS)} | {"[UNK]": 19, "[CLS]": 20, "[SEP]": 21, "[PAD]": 22}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 20), ("[SEP]", 21)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, **options)


class Processor:
    def __init__(self, inner: Any):
        self.tokenizer = inner


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny("gpt2", LM)


def rows_of(batches: Any) -> list[list[int]]:
    """The sequences in batches without their padding, which has to be behind them."""
    found = []
    for batch in batches:
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        for ids, m in zip(batch["input_ids"], mask, strict=True):
            assert m.tolist() == sorted(m.tolist(), reverse=True)
            found.append(ids[m.bool()].tolist())
    return found


def streamed() -> Iterator[str]:
    yield from TEXTS


TOKENISED = {"input_ids": IDS, "attention_mask": [[1] * len(ids) for ids in IDS]}
COLUMNS = {"text": TEXTS, "label": [0, 1, 0], "title": ["a", "b", "c"]}
FORMS_OF_TEXT: dict[str, Callable[[], Any]] = {
    "list": lambda: TEXTS,
    "tuple": lambda: tuple(TEXTS),
    "generator": streamed,
    "blank lines": lambda: ["", *TEXTS, " \n"],
    "Series": lambda: pd.Series(TEXTS),
    "array": lambda: np.array(TEXTS),
    "Dataset": lambda: datasets.Dataset.from_dict(COLUMNS),
    "Dataset, one column": lambda: datasets.Dataset.from_dict({"sentence": TEXTS, "labels": [0, 1, 0]}),
    "IterableDataset": lambda: datasets.Dataset.from_dict(COLUMNS).to_iterable_dataset(),
    "column": lambda: datasets.Dataset.from_dict(COLUMNS)["text"],
    "DataLoader of texts": lambda: DataLoader(TEXTS, batch_size=2),
    "DataLoader of rows": lambda: DataLoader(datasets.Dataset.from_dict(COLUMNS), batch_size=2),
}
FORMS_OF_INPUTS: dict[str, Callable[[], Any]] = {
    "rows of tensors": lambda: [{"input_ids": torch.tensor(ids), "idx": 7} for ids in IDS],
    "tensors of ids": lambda: [torch.tensor(ids) for ids in IDS],
    "empty rows": lambda: [{"input_ids": []}, *({"input_ids": ids} for ids in IDS)],
    "Dataset": lambda: datasets.Dataset.from_dict(COLUMNS | TOKENISED),
    "Dataset of tensors": lambda: datasets.Dataset.from_dict(COLUMNS | TOKENISED).with_format("torch"),
    "Dataset of arrays": lambda: datasets.Dataset.from_dict(COLUMNS | TOKENISED).with_format("numpy"),
    "BatchEncoding": lambda: make_tokenizer()(TEXTS),
    "BatchEncodings of lists": lambda: [make_tokenizer()(TEXTS[:2]), make_tokenizer()(TEXTS[2:])],
    "BatchEncoding of tensors": lambda: make_tokenizer(pad_token="[PAD]")(TEXTS, return_tensors="pt", padding=True),
    "BatchEncodings of tensors": lambda: [make_tokenizer()(text, return_tensors="pt") for text in TEXTS],
    "a text column besides": lambda: [{"text": ["a"], "input_ids": torch.tensor([ids])} for ids in IDS],
    "DataLoader": lambda: DataLoader([torch.tensor(ids) for ids in IDS], batch_size=1),
}


@pytest.mark.parametrize("form", FORMS_OF_TEXT)
def test_texts(form: str, model: PreTrainedModel) -> None:
    read = list(read_batches(FORMS_OF_TEXT[form](), model, make_tokenizer()))
    assert rows_of(read) == IDS
    assert all(set(batch) == {"input_ids", "attention_mask"} for batch in read)


@pytest.mark.parametrize("form", FORMS_OF_INPUTS)
def test_inputs(form: str, model: PreTrainedModel) -> None:
    read = list(read_batches(FORMS_OF_INPUTS[form](), model))
    assert rows_of(read) == IDS
    assert all(isinstance(value, torch.Tensor) for batch in read for value in batch.values())
    model(**read[0])


def test_a_text_file(model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join([TEXTS[0], "", *TEXTS[1:]]) + "\n", encoding="utf-8")
    for given in (path, str(path)):
        assert rows_of(read_batches(given, model, make_tokenizer())) == IDS
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OptionError, match="UTF-8"):
        read_batches(path, model, make_tokenizer())


@pytest.mark.parametrize("options", [{}, {"pad_token": "[PAD]", "padding_side": "left"}, {"eos_token": "[SEP]"}])
def test_a_tokenizer_stays_as_it_is(options: dict[str, Any], model: PreTrainedModel, tmp_path: Path) -> None:
    """With a pad token or without one, on whatever side it pads; and nothing of the call is saved with it."""
    tokenizer = make_tokenizer(**options)
    tokenizer.save_pretrained(tmp_path / "before")
    seen = tokenizer.padding_side, tokenizer.pad_token, tokenizer.backend_tokenizer.to_str()
    assert rows_of(read_batches(TEXTS, model, tokenizer)) == IDS
    assert rows_of(read_batches(TEXTS, model, Processor(tokenizer))) == IDS
    assert (tokenizer.padding_side, tokenizer.pad_token, tokenizer.backend_tokenizer.to_str()) == seen
    tokenizer.save_pretrained(tmp_path / "after")
    for path in (tmp_path / "before").iterdir():
        assert path.read_bytes() == (tmp_path / "after" / path.name).read_bytes()


def test_texts_are_cut(model: PreTrainedModel) -> None:
    """At the length, at the tokenizer's and at the model's; special tokens stay."""
    long, most = ["the " * 500], model.config.max_position_embeddings
    [cut] = rows_of(read_batches(long, model, make_tokenizer(), length=9))
    assert len(cut) == 9
    assert (cut[0], cut[-1]) == (20, 21)
    assert len(rows_of(read_batches(long, model, make_tokenizer(), length=1000))[0]) == most
    assert len(rows_of(read_batches(long, model, make_tokenizer(model_max_length=11)))[0]) == 11
    wide = tiny("gpt2", LM, n_positions=600)
    assert len(rows_of(read_batches(long, wide, make_tokenizer()))[0]) == 128
    assert len(rows_of(read_batches([{"input_ids": [5] * 500}], wide))[0]) == 500  # a row keeps its length


@pytest.mark.parametrize("padding", [1, 0])
@pytest.mark.parametrize("kind", [RobertaConfig, IBertConfig])
def test_texts_are_as_long_as_tables_that_begin_behind_the_padding(kind: Any, padding: int) -> None:

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = kind(**sizes, vocab_size=99, max_position_embeddings=34, pad_token_id=padding)
    model = AutoModelForMaskedLM.from_config(config).eval()
    [batch] = read_batches([" ".join(["cat"] * 40)], model, make_tokenizer(), length=34)
    longest = 34 - padding - 1
    assert batch["input_ids"].shape == (1, longest)
    model(**batch)
    with pytest.raises((IndexError, RuntimeError)):  # control: the table isn't longer
        model(input_ids=torch.full((1, longest + 1), 7))


def test_texts_and_rows_are_read_up_to_a_number(model: PreTrainedModel) -> None:
    def endless(value: Any) -> Iterator[Any]:
        while True:
            yield value

    assert len(rows_of(read_batches(endless("cat"), model, make_tokenizer()))) == 256
    assert len(rows_of(read_batches(endless({"input_ids": [5, 6]}), model, sequences=3))) == 3
    assert len(rows_of(read_batches(endless(["cat"] * 5), model, make_tokenizer(), sequences=7))) == 7
    assert len(rows_of(read_batches(["cat"] * 7, model, make_tokenizer(), sequences=7))) == 7
    assert len(rows_of(read_batches([torch.ones(4, 5).long()] * 3, model, sequences=7))) == 12  # batches all


def test_padding_counts_for_nothing() -> None:
    """The outputs of a padded row are those of the row alone."""
    model = tiny("roberta", "AutoModelForMaskedLM")
    [batch] = read_batches([{"input_ids": ids} for ids in IDS], model)
    padded = batch["input_ids"][batch["attention_mask"] == 0]
    assert padded.unique().tolist() == [model.config.pad_token_id]
    with torch.no_grad():
        for i, ids in enumerate(IDS):
            alone = model(input_ids=torch.tensor([ids])).logits[0]
            torch.testing.assert_close(model(**batch).logits[i, : len(ids)], alone, rtol=1e-4, atol=1e-5)


class Strict(GPT2LMHeadModel):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(input_ids, attention_mask=attention_mask)


def test_columns_are_padded_left_out_and_added(model: PreTrainedModel) -> None:
    rows = [{"input_ids": ids, "labels": ids, "token_type_ids": [1] * len(ids)} for ids in IDS]
    [batch] = read_batches(rows, model)
    assert batch["labels"][0].tolist() == [*IDS[0], -100, -100, -100]
    assert batch["token_type_ids"][2].tolist() == [1] * 3 + [0] * 5
    # DistilBERT has no token types, and its tokenizer is BERT's
    given = BatchEncoding({"input_ids": torch.ones(2, 3).long(), "special_tokens_mask": torch.ones(2, 3).long()})
    [batch] = read_batches(given, tiny("distilbert"))
    assert "input_ids" in batch
    # other columns of rows, where the forward takes nothing but its inputs
    [batch] = read_batches([{"input_ids": ids, "idx": 7} for ids in IDS], Strict(model.config))
    assert set(batch) == {"input_ids", "attention_mask"}
    [batch] = read_batches(given, Strict(model.config))
    assert set(batch) == {"input_ids"}
    # an encoder-decoder reads texts on both sides
    [batch] = read_batches(TEXTS, tiny("bart", "AutoModelForSeq2SeqLM"), make_tokenizer())
    assert torch.equal(batch["decoder_input_ids"][:, 1:], batch["input_ids"][:, :-1])
    assert torch.equal(batch["decoder_attention_mask"], batch["attention_mask"])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (TEXTS, r"batches holds text: pass tokenizer="),
        (None, r'takes texts with tokenizer=tokenizer: \["a text".* a DataLoader\. Not NoneType\.'),
        (3, "Not int"),
        ([object()], r"item 0 is object\. It takes texts"),
        (["", "\n"], "is empty"),
        ([{"input_ids": []}], "is empty"),
        (IDS, "item 0 is list. It takes texts .* dictionaries of inputs"),
        (DataLoader(TensorDataset(torch.tensor(IDS[:1]))), "item 0 is list. It takes texts .* dictionaries of inputs"),
        (pd.DataFrame(COLUMNS), "takes texts with .* Not DataFrame"),
        ("no/such.txt", r"there is no text file no/such\.txt"),
        ("a text " * 100, "there is no text file"),
        ({"train": datasets.Dataset.from_dict(COLUMNS)}, "has 'train', and GPT2LMHeadModel takes none of these"),
        ([{"question": "a", "answer": "b"}], r"several columns of text \('question', 'answer'\)"),
        (
            [{"input_ids": torch.ones(2, 3).long(), "attention_masks": torch.ones(2, 3)}],
            "Did you mean 'attention_mask'",
        ),
        ([{"input_ids": [1, 2], "atention_mask": [1, 1]}], "item 0 has .* Did you mean 'attention_mask'"),
        ([{"input_ids": [[1, 2], ["a"]]}], "batch 0: input_ids can't be made a tensor"),
        ([{"messages": [{"role": "user", "content": "a"}]}], "has 'messages', and GPT2LMHeadModel takes none of these"),
        (DataLoader([{"input_ids": [1, 2]}] * 4, batch_size=4), r"with_format\('torch'\)"),
        ([{"input_ids": [1, 2]}, {"input_ids": [1, 500]}], "tokens 1 to 500"),
    ],
)
def test_what_cant_be_read_says_what_can(data: Any, message: str, model: PreTrainedModel) -> None:
    with pytest.raises(OptionError, match=message):
        list(read_batches(data, model))


@pytest.mark.parametrize("other", ["gpt2", make_tokenizer().backend_tokenizer], ids=["a name", "a backend"])
def test_what_is_no_tokenizer_is_refused(other: Any, model: PreTrainedModel) -> None:
    with pytest.raises(OptionError, match="tokenizer= takes a tokenizer or a processor"):
        read_batches(TEXTS, model, other)


def test_a_model_of_images_reads_no_text() -> None:
    model = tiny("vit")
    with pytest.raises(OptionError, match="reads pixel_values"):
        read_batches(TEXTS, model, make_tokenizer())
    size = model.config.image_size
    images = [{"pixel_values": torch.randn(3, size, size), "label": 1} for _ in range(3)]
    [batch] = read_batches(images, model)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {"pixel_values": (3, 3, size, size)}


# Where they are used


MANY = [" ".join(WORDS[(i + j) % 5] for j in range(3 + i % 4)) for i in range(16)]


def test_patch_repair_and_verify_read_the_same() -> None:
    original, tokenizer = tiny("gpt2", LM), make_tokenizer()
    model = patch(copy.deepcopy(original), norm="dyt", calibration=MANY, tokenizer=tokenizer)
    assert repair_report(model).sequences == 16
    model = patch(copy.deepcopy(original), norm="dyt")
    report = verify(model, original, MANY * 5, dtypes=(), tokenizer=tokenizer)
    assert (report.inputs, report.examples) == ("8 batches given", 64)
    assert repair(model, original, MANY, tokenizer=tokenizer).sequences == 16
    ready = read_batches(MANY * 5, original, tokenizer, sequences=80)
    assert verify(model, original, ready, dtypes=()).examples == 80


def test_a_model_of_several_main_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As OneFormer, whose main inputs are a list: the first one counts."""
    model, inputs = tiny("gpt2"), {"input_ids": torch.randint(5, 90, (2, 12))}
    monkeypatch.setattr(type(model), "main_input_name", ["input_ids", "task_inputs"])
    patched = patch(model, norm="rms", example_inputs=inputs)
    assert "exact" in outcomes(patched)["norm='rms'"]
    assert [list(batch) for batch in read_batches([inputs], model)] == [["input_ids"]]
