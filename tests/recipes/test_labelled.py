"""Labelled texts: the hidden words, files and datasets, splits that leak nothing, and what is refused."""

import random

import pytest
from hfrecipes import labelled
from hfrecipes.corpus import Document, RecipeError
from run_files import write_table

SINGLE = [{"text": f"text {i}: naïve, dög\nsecond line", "label": ["good", "None"][i % 3 == 0]} for i in range(80)]
MULTI = [
    {"text": f"text {i}", "labels": [n for n, k in {"a": 2, "b": 3, "c": 5}.items() if i % k == 0]} for i in range(80)
]


def read(data=None, **settings):
    return labelled.read_labelled(labelled.DataConfig(data=None if data is None else str(data), **settings))


def everything(found):
    return [item for items in found.splits.values() for item in items]


class TestHiddenWords:
    def test_of_the_plays(self):
        """Figures in docs/results are of these texts."""
        plays = read()
        assert {name: len(items) for name, items in plays.splits.items()} == {"train": 5271, "dev": 930, "test": 668}
        assert plays.sha256.startswith("620f3e4cf34a")
        assert not any(plays.remarks().values())

    def test_by_hand(self, monkeypatch):
        monkeypatch.setattr(labelled, "HIDDEN_WORDS", 2)
        monkeypatch.setattr(labelled, "split_of", lambda name: name)
        speeches = [
            "KING:\nThou art, King,\nnot a kingdom.\nAnother",
            "no more\n\n \nThou and thou",
            "thou with with with",
        ]
        splits = labelled.hide_words([Document("train", "\n\n".join(speeches)), Document("test", "thou")])
        assert [tuple(item) for item in splits["train"]] == [
            ("BLANK:\nBLANK art, BLANK,\nnot a kingdom.", ("king", "thou")),
            ("BLANK and BLANK", ("thou",)),
            ("BLANK with with with", ("thou",)),
        ]
        assert [tuple(item) for item in splits["test"]] == [("BLANK", ("thou",))]


class TestFormats:
    """How tables are read is in test_texts.py."""

    def test_single_labels(self, tmp_path):
        rows = [{"sentence": row["text"], "kind": row["label"]} for row in SINGLE]
        found = read(write_table(tmp_path / "x.csv", rows), text_column="sentence", label_column="kind")
        assert not found.multi
        assert found.labels == ["None", "good"]
        assert {(i.text, *i.labels) for i in everything(found)} == {(row["text"], row["label"]) for row in SINGLE}

    def test_lists_of_labels(self, tmp_path):
        found = read(write_table(tmp_path / "x.parquet", MULTI))
        assert found.multi
        assert found.labels == ["a", "b", "c"]
        assert {(i.text, i.labels) for i in everything(found)} == {(r["text"], tuple(r["labels"])) for r in MULTI}

    def test_labels_that_are_numbers(self, tmp_path):
        """In their order; in a csv file as they are written."""
        rows = [{"text": f"text {i}", "label": i % 12} for i in range(200)]
        assert read(write_table(tmp_path / "x.jsonl", rows)).labels == [str(i) for i in range(12)]
        rows = [{"text": f"text {i}", "label": f"{i % 12:02}"} for i in range(200)]
        assert read(write_table(tmp_path / "x.csv", rows)).labels == [f"{i:02}" for i in range(12)]

    def test_folder(self, tmp_path):
        for name, rows in {"train": SINGLE[:40], "valid": SINGLE[40:60], "test": SINGLE[60:], "notes": MULTI}.items():
            write_table(tmp_path / f"{name}.csv", rows)
        splits = read(tmp_path).splits
        assert {name: len(items) for name, items in splits.items()} == {"train": 40, "dev": 20, "test": 20}
        assert splits["test"][0].text == SINGLE[60]["text"]

    def test_datasets_id(self, monkeypatch):
        import datasets

        classes = datasets.ClassLabel(names=["no", "yes"])
        texts = [f"text {i}" for i in range(60)]
        labels = {"single": [i % 2 for i in range(60)], "several": [[i % 2, 1] for i in range(60)], "hidden": [-1] * 60}
        kinds = {"single": classes, "several": datasets.Sequence(classes), "hidden": classes}
        made = {
            kind: datasets.Dataset.from_dict(
                {"text": texts, "label": labels[kind]},
                features=datasets.Features(text=datasets.Value("string"), label=of_kind),
            )
            for kind, of_kind in kinds.items()
        }
        configs = {
            "single": {"train": made["single"], "validation": made["single"], "test": made["hidden"]},
            "several": {"train": made["several"], "unsupervised": made["hidden"]},
        }
        monkeypatch.setattr(datasets, "load_dataset", lambda name, config, **options: configs[config])
        with pytest.raises(RecipeError, match="row 1 of org/name has no label in the column 'label'"):
            read("org/name", data_config="single")
        found = read("org/name", data_config="single", test_split="validation")
        assert found.labels == ["no", "yes"]
        assert len(found.splits["test"]) == 60
        assert len(found.splits["train"]) < 60, "development texts came out of the training texts"
        found = read("org/name", data_config="several")
        assert {i.labels for i in everything(found)} == {("yes",), ("no", "yes")}
        with pytest.raises(RecipeError, match="no split 'other', but train, validation, test"):
            read("org/name", data_config="single", test_split="other")


class TestSplits:
    def test_neither_order_nor_company_moves_a_text(self, tmp_path):
        rows = [{"text": f"text {i}", "label": i % 2} for i in range(500)]
        once = read(write_table(tmp_path / "x.jsonl", rows[:400]))
        random.Random(0).shuffle(rows)
        more = read(write_table(tmp_path / "x.jsonl", rows))
        where = {item.text: name for name, items in more.splits.items() for item in items}
        for name, items in once.splits.items():
            assert all(where[item.text] == name for item in items)
        assert all(0.05 < len(more.splits[name]) / 500 < 0.15 for name in ("dev", "test"))

    def test_what_is_told(self, tmp_path):
        write_table(tmp_path / "train.json", [*SINGLE[:40], {"text": " ", "label": "good"}])
        write_table(tmp_path / "dev.json", SINGLE[40:60])
        write_table(tmp_path / "test.json", [*SINGLE[35:], {"text": "new", "label": "odd"}])
        found = read(tmp_path)
        assert "odd" in found.labels
        assert {what: count for what, count in found.remarks().items() if count} == {
            "rows without a text, left out": 1,
            "test texts that are also training texts": 5,
            "test texts with labels that no training text has": 1,
        }

    def test_digest_is_of_texts_and_labels(self, tmp_path):
        first = read(write_table(tmp_path / "x.jsonl", SINGLE)).sha256
        assert read(write_table(tmp_path / "x.jsonl", SINGLE[::-1])).sha256 == first
        other = [{**SINGLE[0], "label": "good"}, *SINGLE[1:]]
        assert read(write_table(tmp_path / "x.jsonl", other)).sha256 != first


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.jsonl", '{"text": "one line", "label": 1}', "too few"),
        ("x.csv", "text,class\na,1\nb,2\n", "'text', 'class': --label_column"),
        ("x.csv", "text,label\na,1\nb,\nc,2\n", "row 2 of"),
        ("x.csv", "text,label\n" + "".join(f"{i},1\n" for i in range(100)), "the same labels"),
        ("x.json", '[{"text": "a", "labels": [["h", "t"]]}]', "row 1 of"),
        ("test.csv", "text,label\na,1\nb,2\n", "no split 'train'"),
    ],
)
def test_refused(tmp_path, name, content, told):
    (tmp_path / name).write_text(content)
    with pytest.raises(RecipeError) as error:
        read(tmp_path if name == "test.csv" else tmp_path / name)
    assert told in str(error.value)
    assert "\n" not in str(error.value)
