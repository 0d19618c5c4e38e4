"""Retrieval of long documents: how they are cut, what is asked for, how they are read, and the figures."""

import json
import sys
from types import SimpleNamespace

import measure_saved
import numpy as np
import pytest
from harness import retrieval
from harness.embed import open_encoder
from run_files import read_results
from texts import RecipeError
from tiny_encoder import write_bert
from transformers import BertModel

LENGTHS = [32, 80]
PLACES = ("0-24", "28-78")


def article(number):
    """Two windows and more of 78 tokens, with a title; no sentence is like another."""
    sentences = [f"In year {i} the {number} sheep of farm {i}{number} went uphill ." for i in range(20)]
    return f" \n = Farm {number} = \n \n " + " ".join(sentences) + " \n "


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("articles") / "articles.txt"
    path.write_text("".join(map(article, range(8))))
    return str(path)


@pytest.fixture(scope="module")
def short(text, tmp_path_factory):
    """An encoder of 40 positions."""
    return write_bert(BertModel, tmp_path_factory.mktemp("short"), [text], positions=40)


@pytest.fixture(scope="module")
def long(text, tmp_path_factory):
    return write_bert(BertModel, tmp_path_factory.mktemp("long"), [text], positions=80)


@pytest.fixture(autouse=True)
def places(monkeypatch):
    """Places of a window of 78 tokens: the first 24 and the last 50."""
    monkeypatch.setattr(retrieval, "PLACES", ((0, 24), (300, 480)))
    monkeypatch.setattr(retrieval, "LAST", 50)
    monkeypatch.setattr(retrieval, "CHUNK", 20)


def make_task(text, *models, lengths=LENGTHS, **more):
    config = retrieval.RetrievalConfig(text=[text], **more)
    return retrieval.Retrieval(
        SimpleNamespace(**vars(config), models=models, lengths=lengths, batch_size=4), None, None
    )


def run(out, text, *flags):
    flags = [*flags, "--text", text, "--output_dir", out]
    return measure_saved.main(["--task", "retrieval", "--lengths", *map(str, LENGTHS), *map(str, flags)])


class TestDocuments:
    def test_windows_and_the_places_of_their_queries(self, text, long):
        task, tokenizer = make_task(text, long), open_encoder(long).tokenizer
        assert [d.removesuffix(" tokens") for d in task.data["places"]] == list(PLACES)
        assert task.data["articles"] == 8
        assert len(task.windows) == task.data["documents"] >= 16
        for window in task.windows:
            assert len(tokenizer(window.text, add_special_tokens=False)["input_ids"]) == 78
            assert window.text.count(" = ") <= 2, "a window is of one article"
            for query, (begin, end) in zip(window.queries, ((0, 24), (28, 78)), strict=True):
                before = window.text[: window.text.index(query)]
                tokens = [
                    len(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before, before + query)
                ]
                assert begin <= tokens[0] <= tokens[1] <= end

    def test_settings(self, text, long):
        windows = make_task(text, long).windows
        assert len(make_task(text, long, documents=12).windows) == 12
        assert make_task(text, long).windows == windows, "drawn by the seed alone"
        other = make_task(text, long, seed=1).windows
        assert [w.text for w in other] == [w.text for w in windows]
        assert other != windows

    def test_too_few(self, text, long):
        with pytest.raises(RecipeError, match="there are 8 windows of 78 tokens with a sentence at every place"):
            make_task(text, long, windows=1)

    def test_sentences(self):
        text = "A title without a mark\n\nANNA:\nOne two three four, five six\nseven eight. Too short. "
        text += "The one with No number 3.5 is whole, as it goes on? no mark at the end of these eight words"
        found = [" ".join(text[a:b].split()) for a, b in retrieval.split_sentences(text)]
        assert found == [
            "One two three four, five six seven eight.",
            "The one with No number 3.5 is whole, as it goes on?",
        ]

    def test_dropped_words(self):
        sentence = "The red lobster, in 1901 ( the year ), found a Red stone ."
        kept = retrieval.drop_words(sentence, lambda content: list(content)[1::2])
        assert kept == "The red in 1901 ( the ), found a Red ."

    def test_queries_without_their_rarer_words(self, text, long):
        task = make_task(text, long)
        queries = task.queries()
        assert len(set(map(len, queries.values()))) == 1
        for whole, common in zip(queries["literal"], queries["common"], strict=True):
            dropped = set(whole.split()) - set(common.split())
            assert any(word.isdigit() for word in dropped), "a number is rarer than 'sheep'"
            assert {"sheep", "went"} <= set(common.split())


class TestFigures:
    def test_by_hand(self):
        own = retrieval.figures([[1, 2], [11, 4], [1, 10]])
        assert own["by_place"]["mrr_at_10"] == pytest.approx([2 / 3, (1 / 2 + 1 / 4 + 1 / 10) / 3])
        assert own["mrr_at_10"] == pytest.approx((2 + 0.85) / 6)
        gains = [1, 1 / np.log2(3), 0, 1 / np.log2(5), 1, 1 / np.log2(11)]
        assert own["ndcg_at_10"] == pytest.approx(sum(gains) / 6)
        assert own["recall_at_1"] == pytest.approx(2 / 6)
        assert own["recall_at_10"] == pytest.approx(5 / 6)
        low, high = own["interval"]
        assert 0.125 <= low < own["mrr_at_10"] < high <= 0.75

    def test_ranks(self):
        task = SimpleNamespace(windows=[0, 1, 2])
        scores = np.array([[3, 1, 2], [1, 2, 3], [0, 5, 1], [9, 9, 9], [1, 2, 3], [3, 2, 1]])  # two queries a document
        assert retrieval.Retrieval.ranks(task, scores) == [[1, 3], [1, 3], [1, 3]]
        with pytest.raises(RecipeError, match="isn't finite"):
            retrieval.Retrieval.ranks(task, scores * np.nan)


class TestReads:
    def test_by_hand(self, text, long):
        task = make_task(text, long)
        rows = {row["reads"]: row for row in task.reads(task.load(long).eval())}
        encoder, tokenizer = open_encoder(long), open_encoder(long).tokenizer
        queries = encoder.encode(task.queries()["literal"], normalize_embeddings=True)
        documents = [tokenizer(w.text, add_special_tokens=False)["input_ids"] for w in task.windows]

        def encode(ids):
            return encoder.encode(tokenizer.decode(ids), normalize_embeddings=True)

        first = np.stack([encode(ids[:30]) for ids in documents])
        chunks = np.stack([[encode(ids[i : i + 20]) for i in range(0, 78, 20)] for ids in documents])
        for name, scores, vectors in (
            ("first 32 tokens", queries @ first.T, 1),
            (retrieval.MEAN, queries @ chunks.mean(1).T / np.linalg.norm(chunks.mean(1), axis=1), 1),
            (retrieval.BEST, np.einsum("qd,wcd->qwc", queries, chunks).max(-1), 4),
        ):
            expected = np.asarray(task.ranks(scores))
            assert (expected == rows[name]["ranks"]["literal"]).mean() > 0.9, "but for near ties"
            assert rows[name]["vectors"] == vectors
        assert rows["first 80 tokens"]["default"]

    def test_what_takes_no_such_length(self, text, short):
        task = make_task(text, short)
        rows = {row["reads"]: row for row in task.reads(task.load(short).eval())}
        assert rows["first 80 tokens"]["reason"] == "takes no 80 tokens (RuntimeError)"
        assert "ranks" in rows["first 32 tokens"]

    def test_bm25(self, text, long):
        pytest.importorskip("bm25s")
        task = make_task(text, long)
        (row,) = task.bm25()
        assert retrieval.figures(row["ranks"]["literal"])["mrr_at_10"] > 0.9
        shuffled = np.random.default_rng(0).permutation(len(task.windows))
        task.windows = [
            retrieval.Window(w.text, task.windows[i].queries) for w, i in zip(task.windows, shuffled, strict=True)
        ]
        (row,) = task.bm25()
        assert retrieval.figures(row["ranks"]["literal"])["mrr_at_10"] < 0.5, "the control asks for other documents"

    def test_bm25_is_left_out_with_a_reason(self, text, long, monkeypatch):
        monkeypatch.setitem(sys.modules, "bm25s", None)
        (row,) = make_task(text, long).bm25()
        assert row["reason"] == "isn't installed: pip install bm25s"


def test_report(text, short, long, tmp_path, capsys):
    assert run(tmp_path, text, "--models", short, long, "--against", long) == 0
    results = read_results(tmp_path)
    own, other, _ = results["models"].values()
    chunked = next(row for row in other["reads"] if row["reads"] == retrieval.MEAN)
    assert chunked["figures"]["literal"]["difference"] == [0, 0, 0], "the baseline's own"
    assert results["baseline"] == f"{long}, {retrieval.MEAN}"
    out = capsys.readouterr().out
    assert out.count("takes no 80 tokens (RuntimeError)") == len(retrieval.KINDS)
    assert all(place in out for place in PLACES)
    assert (tmp_path / "results.md").read_text() in out
    assert (tmp_path / "retrieval_by_depth.png").stat().st_size > 10_000
    json.dumps(results, allow_nan=False)
    assert len(own["reads"]) == len(LENGTHS) + 2
