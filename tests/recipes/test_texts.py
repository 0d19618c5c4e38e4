"""Plain text: what comes with the recipes, files, tables and datasets, their split, tokens and blocks."""

import hashlib

import numpy as np
import pytest
import torch
from hfrecipes import corpus, texts
from hfrecipes.corpus import RecipeError, split_documents
from run_files import write_table

ROWS = [{"text": f"row {i}: naïve\nsecond\u2028line", "n": i} for i in range(30)] + [{"text": "  ", "n": 30}]
ROWS += [{"text": word, "n": 31} for word in ("None", "NA", "00001", "1e5", "true")]  # text as written


def read(**settings):
    return texts.read_texts(texts.TextConfig(**settings))


class TestOwn:
    def test_the_plays_are_whole_and_those_of_the_readme(self):
        source, documents = read()
        assert "Shakespeare" in source
        digest = hashlib.sha256(corpus.SHAKESPEARE.read_bytes()).hexdigest()
        assert digest in (corpus.SHAKESPEARE.parent / "README.md").read_text()
        assert "\n\n".join(d.text for d in documents) == corpus.SHAKESPEARE.read_text()
        assert len({d.name for d in documents}) == len(documents)


class TestFiles:
    @pytest.mark.parametrize("suffix", [".jsonl", ".json", ".CSV", ".tsv", ".parquet"])
    def test_every_format_gives_the_same_documents(self, tmp_path, suffix):
        source, documents = read(text=[write_table(tmp_path / f"t{suffix}", ROWS)])
        assert source == f"t{suffix}"
        written = [row["text"] for row in ROWS if row["text"].strip()]
        assert [d.text for d in documents] == written, "a blank row is no document, and None is a word"

    @pytest.mark.parametrize("rows", [None, 5])
    def test_datasets_id(self, tmp_path, rows, monkeypatch):
        """The library itself, on a builder that needs no network; streamed, no more rows are read than asked for."""
        import datasets

        path, read_rows = write_table(tmp_path / "t.jsonl", ROWS), []
        real = datasets.load_dataset

        def local(name, config, streaming, **options):
            assert (name, config, streaming) == ("org/name", "plain", rows is not None)
            found = real("json", data_files={"validation": path}, cache_dir=str(tmp_path / "cache"), **options)
            return found.to_iterable_dataset().map(lambda row: read_rows.append(row) or row)

        monkeypatch.setattr(datasets, "load_dataset", local)
        source, documents = read(
            dataset="org/name", dataset_config="plain", dataset_split="validation", dataset_rows=rows
        )
        assert source == "org/name, validation"
        assert len(documents) == (rows or 35)
        assert len(read_rows) <= (rows + 1 if rows else 36)

    @pytest.mark.parametrize(
        ("name", "content", "told"),
        [
            ("t.txt", "", "t.txt is empty"),
            ("t.csv", "text,n\n", "t.csv has no rows"),
            ("t.jsonl", '{"text": "a"}\n{"text": ', "t.jsonl: Expecting value"),
            ("t.csv", "body,n\nx,1\n", "'body', 'n': --text_column"),
        ],
    )
    def test_refused(self, tmp_path, name, content, told):
        (tmp_path / name).write_text(content)
        with pytest.raises(RecipeError) as error:
            read(text=[str(tmp_path / name)])
        assert told in str(error.value)
        assert "\n" not in str(error.value)


class TestSplit:
    def test_is_by_name_whatever_the_order(self):
        documents = [corpus.Document(f"{i}.py", str(i)) for i in range(200)]
        train, heldout = split_documents(documents)
        assert {d.name for d in train} | {d.name for d in heldout} == {d.name for d in documents}
        assert 10 <= len(heldout) <= 30
        assert len(train) + len(heldout) == 200
        assert split_documents(documents[::-1]) == (train, heldout)

    @pytest.mark.parametrize("names", [["alone"], ["b.txt", "c.txt"], ["1.txt", "18.txt"]])
    def test_few_files_leave_both_sides_with_text(self, names):
        """By their hashes alone the second pair would be for training, and the third held out."""
        train, heldout = split_documents([corpus.Document(name, "word\n" * 100) for name in names])
        assert all(d.text for d in [*train, *heldout])
        assert train
        assert heldout
        assert sum(len(d.text) for d in train + heldout) == 500 * len(names)


class TestTokens:
    def test_held_out_blocks_do_not_overlap(self):
        blocks = corpus.HeldOutBlocks(np.arange(100, dtype=np.int32), np.ones(100), corpus.Objective(8), count=99)
        seen = torch.cat([blocks[i]["input_ids"] for i in range(len(blocks))])
        assert len(blocks) == 12
        assert len(seen.unique()) == len(seen)
        assert blocks.sizes.tolist() == [7] * 12
