"""Labelled texts: the hidden words, files and datasets, splits that leak nothing, and what is refused."""

import pytest
from hfrecipes import labelled
from hfrecipes.corpus import Document, RecipeError
from run_files import write_table

SINGLE = [{"text": f"text {i}: naïve, dög\nsecond line", "label": ["good", "None"][i % 3 == 0]} for i in range(80)]


def read(data, **settings):
    """Texts and labels by split."""
    _, texts, _ = labelled.read_labelled(labelled.DataConfig(data=data and str(data), **settings))
    return {split: list(zip(own.text, own.labels, strict=True)) for split, own in texts.groupby("split")}


def everything(splits):
    return {item for items in splits.values() for item in items}


class TestHiddenWords:
    @pytest.mark.slow
    def test_of_the_plays(self):
        """Figures in docs/results are of these texts."""
        plays = read(None)
        assert {name: len(items) for name, items in plays.items()} == {"train": 5271, "dev": 930, "test": 668}
        assert len(labelled.names_of(labelled.read_labelled(labelled.DataConfig())[1])) == 24

    def test_by_hand(self, monkeypatch):
        monkeypatch.setattr(labelled, "HIDDEN_WORDS", 2)
        monkeypatch.setattr(labelled, "split_of", lambda name: name)
        speeches = [
            "KING:\nThou art, King,\nnot a kingdom.\nAnother",
            "no more\n\n \nThou and thou",
            "thou with with with",
        ]
        found = labelled.hide_words([Document("train", "\n\n".join(speeches)), Document("test", "thou")])
        assert [(document.name, *item) for document, item in found] == [
            ("train", "BLANK:\nBLANK art, BLANK,\nnot a kingdom.", ("king", "thou")),
            ("train", "BLANK and BLANK", ("thou",)),
            ("train", "BLANK with with with", ("thou",)),
            ("test", "BLANK", ("thou",)),
        ]


class TestFormats:
    """How tables are read is in test_texts.py."""

    def test_datasets_id(self, monkeypatch):
        import datasets

        classes = datasets.ClassLabel(names=["no", "yes"])
        labels = {"single": [i % 2 for i in range(60)], "several": [[i % 2, 1] for i in range(60)], "hidden": [-1] * 60}
        made = {}
        for kind, own in labels.items():
            features = {"text": datasets.Value("string"), "label": datasets.Sequence(classes)}
            features |= {"label": classes} if kind != "several" else {}
            columns = {"text": [f"text {i}" for i in range(60)], "label": own}
            made[kind] = datasets.Dataset.from_dict(columns, datasets.Features(features))
        configs = {
            "single": {"train": made["single"], "validation": made["single"], "test": made["hidden"]},
            "several": {"train": made["several"], "unsupervised": made["hidden"]},
        }
        monkeypatch.setattr(datasets, "load_dataset", lambda name, config, **options: configs[config])
        with pytest.raises(RecipeError, match="row 1 of org/name has no label in the column 'label'"):
            read("org/name", data_config="single")
        found = read("org/name", data_config="single", test_split="validation")
        assert {labels for _, labels in everything(found)} == {("no",), ("yes",)}
        assert len(found["test"]) == 60 > len(found["train"]), "development texts came out of the training texts"
        found = read("org/name", data_config="several")
        assert {labels for _, labels in everything(found)} == {("yes",), ("no", "yes")}
        with pytest.raises(RecipeError, match="no split 'other', but train, validation, test"):
            read("org/name", data_config="single", test_split="other")


class TestSplits:
    def test_what_is_told(self, tmp_path):
        write_table(tmp_path / "train.json", [*SINGLE[:40], {"text": " ", "label": "good"}])
        write_table(tmp_path / "dev.json", SINGLE[40:60])
        write_table(tmp_path / "test.json", [*SINGLE[35:], {"text": "new", "label": "odd"}])
        _, texts, left_out = labelled.read_labelled(labelled.DataConfig(data=str(tmp_path)))
        assert "odd" in labelled.names_of(texts)
        assert left_out == 1
        assert {what: count for what, count in labelled.remarks(texts).items() if count} == {
            "test texts that are also training texts": 5,
            "test texts with labels that no training text has": 1,
        }


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
