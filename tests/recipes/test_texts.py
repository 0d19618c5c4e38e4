"""Plain text: what comes with the recipes, files, tables and datasets, their split, tokens and blocks."""

import hashlib

import numpy as np
import pandas as pd
import pytest
import texts
import torch
from texts import RecipeError, split_documents

ROWS = [{"text": f"row {i}: naïve\nsecond\u2028line", "n": i} for i in range(30)] + [{"text": "  ", "n": 30}]
ROWS += [{"text": "NA and None are words", "n": 31}]


class TestOwn:
    def test_the_plays_are_whole_and_those_of_the_readme(self):
        documents = texts.read_texts(None)
        digest = hashlib.sha256(texts.SHAKESPEARE.read_bytes()).hexdigest()
        assert digest in (texts.SHAKESPEARE.parent / "README.md").read_text()
        assert "\n\n".join(d.text for d in documents) == texts.SHAKESPEARE.read_text()
        assert len({d.name for d in documents}) == len(documents)


class TestFiles:
    @pytest.mark.parametrize("suffix", [".jsonl", ".CSV", ".parquet"])
    def test_tables_give_the_same_documents(self, tmp_path, suffix):
        frame, path = pd.DataFrame(ROWS), tmp_path / f"t{suffix}"
        if suffix == ".parquet":
            frame.to_parquet(path)
        elif suffix == ".CSV":
            frame.to_csv(path, index=False)
        else:
            frame.to_json(path, orient="records", lines=True)
        documents = texts.read_texts([str(path)])
        assert [d.text for d in documents] == [row["text"] for row in ROWS if row["text"].strip()]

    def test_a_data_set_of_the_hub(self, monkeypatch):
        """By the library itself, on a builder that needs no network."""
        import datasets

        def local(name, config, split):
            assert (name, config, split) == ("org/name", "plain", "train")
            return datasets.Dataset.from_list(ROWS)

        monkeypatch.setattr(datasets, "load_dataset", local)
        assert len(texts.read_texts(["org/name:plain"])) == len(ROWS) - 1

    @pytest.mark.parametrize(
        ("name", "content", "told"),
        [
            ("t.txt", "", "there is no text in"),
            ("t.jsonl", '{"text": "a"}\n{"text": ', "t.jsonl"),
            ("t.csv", "body,n\nx,1\n", "has no column 'text' but body, n"),
            ("missing.txt", None, "can't read text from"),
        ],
    )
    def test_refused(self, tmp_path, name, content, told):
        if content is not None:
            (tmp_path / name).write_text(content)
        with pytest.raises(RecipeError) as error:
            texts.read_texts([str(tmp_path / name)])
        assert told in str(error.value)
        assert "\n" not in str(error.value)


class TestSplit:
    def test_is_by_name_whatever_the_order(self):
        documents = [texts.Document(f"{i}.py", str(i)) for i in range(200)]
        train, heldout = split_documents(documents)
        assert {d.name for d in train} | {d.name for d in heldout} == {d.name for d in documents}
        assert 10 <= len(heldout) <= 30
        assert len(train) + len(heldout) == 200
        assert split_documents(documents[::-1]) == (train, heldout)

    @pytest.mark.parametrize("names", [["alone"], ["b.txt", "c.txt"], ["1.txt", "18.txt"]])
    def test_few_files_leave_both_sides_with_text(self, names):
        """By their hashes alone the second pair would be for training, and the third held out."""
        train, heldout = split_documents([texts.Document(name, "word\n" * 100) for name in names])
        assert all(d.text for d in [*train, *heldout])
        assert train
        assert heldout
        assert sum(len(d.text) for d in train + heldout) == 500 * len(names)


class TestTokens:
    def test_held_out_blocks_do_not_overlap(self):
        blocks = texts.HeldOutBlocks(np.arange(100, dtype=np.int32), np.ones(100), texts.Objective(8), count=99)
        seen = torch.cat([blocks[i]["input_ids"] for i in range(len(blocks))])
        assert len(blocks) == 12
        assert len(seen.unique()) == len(seen)
        assert blocks.sizes.tolist() == [7] * 12
