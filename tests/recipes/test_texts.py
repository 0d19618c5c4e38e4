"""Plain text from files, tables and datasets, and what is refused."""

import sys

import pytest
from hfrecipes import tables, texts
from hfrecipes.corpus import RecipeError, split_documents
from run_files import write_table

ROWS = [{"text": f"row {i}: naïve\nsecond line", "n": i} for i in range(30)] + [{"text": "  ", "n": 30}]


def read(**settings):
    return texts.read_texts(texts.TextConfig(**settings))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_every_format_gives_the_same_documents(tmp_path, suffix):
    source, documents = read(text=[write_table(tmp_path / f"t{suffix}", ROWS)])
    assert source == f"t{suffix}"
    assert [d.text for d in documents] == [row["text"] for row in ROWS[:30]], "a blank row is no document"
    train, heldout = split_documents(documents)
    assert train
    assert heldout
    assert not {d.name for d in train} & {d.name for d in heldout}


def test_text_files_and_tables_together(tmp_path):
    (tmp_path / "a.txt").write_text("plain\n")
    _, documents = read(text=[str(tmp_path / "a.txt"), write_table(tmp_path / "b.jsonl", ROWS)])
    assert len(documents) == 31
    assert len({d.name for d in documents}) == 31


@pytest.mark.parametrize("rows", [None, 5])
def test_datasets(tmp_path, rows, monkeypatch):
    """The library itself, on a builder that needs no network; streamed, no more rows are read than asked for."""
    import datasets

    path, read_rows = write_table(tmp_path / "t.jsonl", ROWS), []
    real = datasets.load_dataset

    def local(name, config, **options):
        assert (name, config) == ("org/name", "plain")
        found = real("json", data_files={"validation": path}, cache_dir=str(tmp_path / "cache"), **options)
        if not options.get("streaming"):
            return found
        return (read_rows.append(row) or row for row in found)

    monkeypatch.setattr(datasets, "load_dataset", local)
    source, documents = read(
        dataset="org/name", dataset_config="plain", dataset_split="validation", dataset_rows=rows, text_column="text"
    )
    assert source == "org/name, validation"
    assert len(documents) == (rows or 30)
    assert len(read_rows) == (rows or 0)


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("t.jsonl", "", "t.jsonl is empty"),
            ("t.jsonl", '{"text": "a"}\n{"text": ', "can't read .*t.jsonl as jsonl"),
            ("t.json", '["a"]', "it must hold objects"),
            ("t.parquet", "no parquet", "can't read .*t.parquet as parquet"),
            ("t.csv", "body,n\nx,1\n", "row 1 of t.csv has no column 'text' but 'body', 'n': --text_column"),
            ("t.csv", "text,n\n,1\n", "no row of t.csv has a text in its column 'text'"),
        ],
    )
    def test_files(self, tmp_path, name, content, message):
        (tmp_path / name).write_text(content)
        with pytest.raises(RecipeError, match=message):
            read(text=[str(tmp_path / name)])

    def test_missing_file(self, tmp_path):
        with pytest.raises(RecipeError, match=r"can't read .*no\.csv: No such file"):
            read(text=[str(tmp_path / "no.csv")])

    def test_two_sources(self):
        with pytest.raises(RecipeError, match="two sources"):
            read(text=["a.txt"], dataset="org/name")

    def test_dataset_that_can_not_be_loaded(self, monkeypatch):
        import datasets

        def fail(*a, **k):
            raise ConnectionError("offline\nsecond line")

        monkeypatch.setattr(datasets, "load_dataset", fail)
        with pytest.raises(RecipeError, match=r"^datasets can't load org/name: offline$"):
            read(dataset="org/name")

    def test_datasets_not_installed(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(RecipeError, match="pip install datasets"):
            read(dataset="org/name")

    def test_unknown_format(self, tmp_path):
        with pytest.raises(RecipeError, match=r"can't tell the format of .*t\.xml"):
            tables.read_table(tmp_path / "t.xml")
