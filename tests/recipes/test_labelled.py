"""Labelled texts: the masked builtins, every format, splits that leak nothing, and what is refused."""

import ast
import json
import random
import sys

import pytest
from hfrecipes import labelled
from hfrecipes.corpus import Document, RecipeError
from run_files import write_table

SINGLE = [{"text": f"text {i}: naïve, dög\nsecond line", "label": ["good", "bad"][i % 3 == 0]} for i in range(60)]
MULTI = [
    {"text": f"text {i}", "labels": [n for n, k in {"a": 2, "b": 3, "c": 5}.items() if i % k == 0]} for i in range(60)
]
TRIPLES = [["P", "/lived", "C"], ["C", "/lived", "P"], ["P", "/born", "C"], ["P", "/worked", "C"]]
NYT = [{"text": f"Person {i} of city {i}.", "triple_list": TRIPLES[i % 3 : i % 4 + 1]} for i in range(60)]


def read(data=None, **settings):
    return labelled.read_labelled(labelled.DataConfig(data=None if data is None else str(data), **settings))


def everything(found):
    return [item for items in found.splits.values() for item in items]


# -- masked builtins


@pytest.fixture(scope="module")
def builtins():
    return read()


@pytest.mark.slow
class TestMaskedBuiltins:
    def test_size(self, builtins):
        assert len(builtins.labels) == 24
        assert builtins.multi
        assert len(builtins.splits["train"]) > 2000
        assert min(len(builtins.splits[name]) for name in ("dev", "test")) > 100
        assert 1.4 < sum(len(item.labels) for item in everything(builtins)) / len(everything(builtins)) < 2.0
        assert f"Python {sys.version.split()[0]}" in builtins.source

    def test_no_file_and_no_text_is_in_two_splits(self, builtins):
        keys = {name: {item.key for item in items} for name, items in builtins.splits.items()}
        texts = {name: {item.text for item in items} for name, items in builtins.splits.items()}
        for sets in (keys, texts):
            assert sum(map(len, sets.values())) == len(set.union(*sets.values()))
        # The check has teeth: split by text instead of by file, nearly every file would be on both sides.
        rows = [labelled.Labelled(item.text, item.labels, item.text) for item in everything(builtins)]
        others = labelled.make_splits({"train": rows}, "", {})
        files = {item.text: item.key for item in everything(builtins)}
        leaked = {files[i.text] for i in others["train"]} & {files[i.text] for i in others["test"]}
        assert len(leaked) > 50

    def test_labels_are_masked_and_nothing_else(self, builtins):
        assert all(labelled.MASK in item.text for item in everything(builtins))
        left = [item for item in everything(builtins) for name in item.labels if f" {name}(" in item.text]
        assert len(left) < 0.02 * len(everything(builtins)), "in strings and comments only"

    def test_one_function(self):
        source = (
            "@property\n"
            "def f(self, id, *, kind=str):\n"
            "    'len(x) in a docstring'\n"
            "    é = 'é'; n = len(é) + self.len(len(id))  # len\n"
            "    list = [map for map in ()]\n"
            "    return isinstance(n,\n"
            "                      (int, list))\n"
        )
        function = ast.parse(source).body[0]
        text, labels = labelled.mask_builtins(function, source.encode().split(b"\n"))
        assert labels == ("int", "isinstance", "len", "str"), "what the function binds itself is no builtin"
        assert text == (
            "def f(self, id, *, kind=BUILTIN):\n"
            "é = 'é'; n = BUILTIN(é) + self.len(BUILTIN(id))  # len\n"
            "return BUILTIN(n,\n"
            "(BUILTIN, list))"
        )

    def test_equal_functions_count_once(self, monkeypatch):
        body = "def f(x):\n    y = x\n    return {}(y)\n"
        files = [Document(f"{i}.py", body.format(["len", "max", "int", "str"][i % 4])) for i in range(40)]
        files += [Document(f"other{i}.py", body.replace("y", f"y{i}").format("set")) for i in range(40)]
        monkeypatch.setattr(labelled, "read_standard_library", lambda: files)
        texts = [item.text for item in labelled.masked_functions()]
        assert len(texts) == len(set(texts)) == 41, "one text for the four: all read return BUILTIN(y)"


# -- formats


class TestFormats:
    @pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet"])
    def test_single_labels(self, tmp_path, suffix):
        found = read(write_table(tmp_path / f"x{suffix}", SINGLE))
        assert not found.multi
        assert found.labels == ["bad", "good"]
        assert {(i.text, *i.labels) for i in everything(found)} == {(row["text"], row["label"]) for row in SINGLE}
        assert found.splits == read(write_table(tmp_path / "y.json", SINGLE)).splits, "the format makes no difference"

    @pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet", ".csv", ".tsv"])
    def test_lists_of_labels(self, tmp_path, suffix):
        rows = MULTI
        if suffix in (".csv", ".tsv"):  # as JSON in a cell
            rows = [{**row, "labels": json.dumps(row["labels"])} for row in MULTI]
        found = read(write_table(tmp_path / f"x{suffix}", rows))
        assert found.multi
        assert found.labels == ["a", "b", "c"]
        assert {(i.text, i.labels) for i in everything(found)} == {(r["text"], tuple(r["labels"])) for r in MULTI}

    def test_separated_labels(self, tmp_path):
        rows = [{"sentence": row["text"], "tags": " | ".join(row["labels"])} for row in MULTI]
        path = write_table(tmp_path / "x.csv", rows)
        columns = {"text_column": "sentence", "label_column": "tags"}
        found = read(path, label_separator="|", **columns)
        assert found.multi
        assert found.splits == read(write_table(tmp_path / "y.json", MULTI)).splits

    def test_numbers_are_ordered_as_numbers(self, tmp_path):
        rows = [{"text": f"text {i}", "label": i % 12} for i in range(200)]
        for suffix in (".jsonl", ".csv", ".parquet"):
            assert read(write_table(tmp_path / f"x{suffix}", rows)).labels == [str(i) for i in range(12)]

    @pytest.mark.parametrize("names", [("train.json", "valid.json", "test.json"),
                                       ("train_triples.json", "dev_triples.json", "test_triples.json")])  # fmt: skip
    def test_relations(self, tmp_path, names):
        for name, rows in zip(names, (NYT[:40], NYT[40:50], NYT[50:]), strict=True):
            write_table(tmp_path / name, rows)
        (tmp_path / "rel2id.json").write_text("{}")
        found = read(tmp_path)
        assert found.labels == ["/born", "/lived", "/worked"]
        assert found.multi
        assert [len(items) for items in found.splits.values()] == [40, 10, 10]
        for item, row in zip(found.splits["test"], NYT[50:], strict=True):
            assert set(item.labels) == {relation for _, relation, _ in row["triple_list"]}
        single = read(write_table(tmp_path / "all.json", NYT))
        assert single.multi
        assert single.labels == found.labels

    def test_parts_of_a_split(self, tmp_path):
        for i in range(3):
            write_table(tmp_path / f"train-0000{i}-of-00003.parquet", SINGLE[20 * i : 20 * i + 20])
        assert len(everything(read(tmp_path))) == 60

    def test_goemotions(self, tmp_path):
        (tmp_path / "labels.txt").write_text("joy\nfear\nneutral\n")
        for name in ("train", "dev", "test"):
            lines = [f"{name} {i}\u2028\t{'0,2' if i % 2 else '2'}\tid{i}\n" for i in range(9)]
            (tmp_path / f"{name}.tsv").write_text("".join(lines), "utf-8")
        found = read(tmp_path)
        assert found.labels == ["joy", "fear", "neutral"], "a label without texts stays"
        assert found.splits["dev"][1] == labelled.Labelled("dev 1\u2028", ("joy", "neutral"), "dev 1\u2028")
        with pytest.raises(RecipeError, match="GoEmotions' format: --label_column and --label_separator don't apply"):
            read(tmp_path, label_column="emotion")
        (tmp_path / "dev.tsv").write_text("text\t7\tid\n")
        with pytest.raises(RecipeError, match=r"line 1 of .*dev.tsv isn't: text, tab, numbers up to 2"):
            read(tmp_path)

    def test_datasets_id(self, monkeypatch):
        datasets = pytest.importorskip("datasets")
        classes = datasets.ClassLabel(names=["no", "yes"])
        rows = {"text": [f"text {i}" for i in range(30)], "label": [i % 2 for i in range(30)]}
        sets = {"text": rows["text"], "label": [[i % 2, 1] for i in range(30)]}
        single = datasets.Features(text=datasets.Value("string"), label=classes)
        several = datasets.Features(text=datasets.Value("string"), label=datasets.Sequence(classes))
        hidden = datasets.Dataset.from_dict({**rows, "label": [-1] * 30}, features=single)
        asked = []

        def load_dataset(name, config):
            asked.append((name, config))
            if config == "several":
                return datasets.DatasetDict(train=datasets.Dataset.from_dict(sets, features=several))
            made = datasets.Dataset.from_dict(rows, features=single)
            return datasets.DatasetDict(train=made, validation=made, test=hidden)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        with pytest.raises(RecipeError, match="row 1 of org/name: no label in the column 'label'"):
            read("org/name")
        found = read("org/name", test_split="validation")
        assert found.labels == ["no", "yes"]
        assert len(found.splits["test"]) == 30
        assert len(found.splits["train"]) < 30, "development texts came out of the training texts"
        found = read("org/name", data_config="several")
        assert found.multi
        assert {i.labels for i in everything(found)} == {("yes",), ("no", "yes")}
        assert asked[-1] == ("org/name", "several")
        with pytest.raises(RecipeError, match=r"has no split 'other', but train, validation, test: --dev_split"):
            read("org/name", dev_split="other")


# -- splits


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
        assert more.notes["splits_by_hash"] == ["dev", "test"]

    def test_equal_texts_fall_on_the_same_side(self, tmp_path):
        rows = [{"text": f"text {i % 50}", "label": i % 3} for i in range(200)]
        found = read(write_table(tmp_path / "x.jsonl", rows))
        texts = {name: {item.text for item in items} for name, items in found.splits.items()}
        assert sum(map(len, texts.values())) == 50
        assert found.notes["texts_also_in_train"] == {"dev": 0, "test": 0}

    def test_texts_in_two_given_splits_are_counted(self, tmp_path):
        write_table(tmp_path / "train.csv", SINGLE[:40])
        write_table(tmp_path / "test.csv", SINGLE[35:])
        found = read(tmp_path)
        held = {item.text for item in found.splits["dev"]}
        assert found.notes["splits_by_hash"] == ["dev"]
        assert len(found.splits["test"]) == 25
        assert found.notes["texts_also_in_train"]["test"] == len({r["text"] for r in SINGLE[35:40]} - held)

    def test_what_could_not_be_learnt_goes_to_the_training_texts(self, tmp_path):
        rows = [{"text": f"text {i}", "label": f"rare {i}" if i % 4 == 0 else "common"} for i in range(400)]
        found = read(write_table(tmp_path / "x.jsonl", rows))
        known = {label for item in found.splits["train"] for label in item.labels}
        assert all(known.issuperset(item.labels) for item in everything(found))
        assert found.notes["moved_to_train"] > 5
        assert len(everything(found)) == 400

    @pytest.mark.parametrize("count", [5, 8, 20])
    def test_few_texts(self, tmp_path, count):
        rows = [{"text": f"text {i}", "label": "ab"[i in (2, 3)]} for i in range(count)]
        found = read(write_table(tmp_path / "x.jsonl", rows))
        assert all(found.splits.values())
        assert len(everything(found)) == count
        with pytest.raises(RecipeError, match="2 texts, too few to train on and to measure"):
            read(write_table(tmp_path / "x.jsonl", rows[:2]))

    def test_digest_is_of_texts_and_labels(self, tmp_path):
        first = read(write_table(tmp_path / "x.jsonl", SINGLE)).sha256
        assert read(write_table(tmp_path / "x.jsonl", SINGLE[::-1])).sha256 == first
        other = [{**SINGLE[0], "label": "good"}, *SINGLE[1:]]
        assert read(write_table(tmp_path / "x.jsonl", other)).sha256 != first


class TestLabels:
    def test_problem_can_be_said(self, tmp_path):
        assert read(write_table(tmp_path / "x.json", SINGLE), problem="multi").multi
        with pytest.raises(RecipeError, match=r"\d+ texts of .* have no label or several: use --problem multi"):
            read(write_table(tmp_path / "y.json", MULTI), problem="single")

    def test_unknown_labels(self, tmp_path):
        write_table(tmp_path / "train.json", SINGLE[:40])
        write_table(tmp_path / "dev.json", SINGLE[40:50])
        new = [{"text": f"new {i}", "label": "ugly" if i else "odd"} for i in range(3)]
        write_table(tmp_path / "test.json", SINGLE[50:] + new)
        with pytest.raises(
            RecipeError, match=r"3 test texts have labels that no training text has: 'ugly' \(2\), 'odd' \(1\)"
        ):
            read(tmp_path)
        found = read(tmp_path, unknown_labels="drop")
        assert len(found.splits["test"]) == 10
        assert found.notes["unknown_labels_dropped"] == {"test": 3}
        write_table(tmp_path / "test.json", new)
        with pytest.raises(RecipeError, match="no test text has a label of the training texts"):
            read(tmp_path, unknown_labels="drop")


class TestRefused:
    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("x.csv", "", "x.csv is empty"),
            ("x.csv", "text,label\n", "x.csv is empty"),
            ("x.jsonl", '{"text": "one line", "label": 1}', "x.jsonl has 1 text, too few to train on"),
            ("x.json", '[{"text": "a"', "can't read .*x.json as json: Expecting"),
            ("x.json", '["a", "b"]', "it must hold objects such as"),
            ("x.jsonl", '{"text": "a", "label": 1}\n{"text": ', "can't read .*x.jsonl as jsonl"),
            ("x.parquet", "text", "can't read .*x.parquet as parquet: .*Parquet"),
            ("x.csv", b"text,label\n\xff\xfe,1\n", "can't read .*x.csv as csv: .*utf-8"),
            ("x.txt", "text", "can't tell the format of .*x.txt: it should end in .csv"),
            ("x.csv", "body,label\na,1\nb,2\n", "x.csv has no column 'text' but 'body', 'label': --text_column"),
            ("x.csv", "text,class\na,1\nb,2\n", "x.csv has no column 'label' but 'text', 'class': --label_column"),
            ("x.csv", "text,label\na,1\nb,\nc,2\n", "row 2 of .*x.csv: no label in the column 'label'"),
            ("x.csv", "text,label\na,1\nb,1\nc,1\nd,1\n", "have the same labels, 1: there is nothing to learn"),
            ("x.json", '[{"text": "a", "labels": [["h", "t"]]}]', "no list of labels or .* triples"),
        ],
    )
    def test_file(self, tmp_path, name, content, message):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(RecipeError, match=message) as error:
            read(tmp_path / name)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("name", ["missing.csv", "./missing", "/no/such/folder", "a/b/c"])
    def test_missing(self, name):
        with pytest.raises(RecipeError, match=f"there is no file or folder {name}"):
            read(name)

    def test_folder_without_training_texts(self, tmp_path):
        write_table(tmp_path / "test.json", SINGLE)
        with pytest.raises(RecipeError, match="no training file in the folder"):
            read(tmp_path)

    def test_rows_without_text_are_counted(self, tmp_path):
        found = read(
            write_table(tmp_path / "x.json", [*SINGLE, {"text": " ", "label": "good"}, {"text": None, "label": "bad"}])
        )
        assert found.notes["rows_without_text"] == 2
        assert len(everything(found)) == 60
