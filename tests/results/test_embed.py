"""Sentence embeddings: texts taken apart, pooled, compared; the task at a size of seconds, and its refusals."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import texts as data
import torch
import torch.nn.functional as F
import train_healed
import yaml
from accelerate import Accelerator
from harness import embed, settings
from harness.tasks import Drawn, longest_input
from run_files import ROOT
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, RobertaConfig, RobertaModel

from hfpatch.errors import NotPreservedWarning
from hfpatch.patch import patch_model


def rotary(task, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPreservedWarning)
        return patch_model(task.load(folder).eval(), pos="rope", init="copy")


def make_task(folder, files, **more):
    small = {"max_length": 16, "batch_size": 4, "heldout_passages": 12, "heldout_pairs": 10, "curve_passages": 4}
    config = SimpleNamespace(**vars(embed.EmbeddingConfig(model=folder, text=files)) | small | more)
    return embed.Embedding(config, Accelerator(), Path("unused"))


@pytest.fixture(scope="module")
def task(folder, files):
    return make_task(folder, files)


@pytest.fixture(scope="module")
def model(task, folder):
    return task.load(folder).eval()


@pytest.fixture(scope="module")
def rope(task, folder):
    return rotary(task, folder)


def ids(*numbers):
    return [2, *numbers, 3]  # between [CLS] and [SEP]


@torch.no_grad()
def measure(task, model, dataset=None):
    loader = torch.utils.data.DataLoader(dataset or task.heldout, batch_size=4, collate_fn=task.collate)
    return task.figures(model, loader, lambda tensors: tensors)


class TestTexts:
    def test_python_is_taken_apart(self):
        text = '''"""A module that has a docstring of its own."""

class A:
    def f(self):
        """Says what it does.

        In more than one line.
        """
        x = 1
        return x

    def g(self):
        return 2
'''
        texts, pairs = embed.take_apart(data.Document("a.py", text))
        docstring, body = "Says what it does. In more than one line.", "        x = 1\n        return x"
        assert texts == ["A module that has a docstring of its own.", docstring, body]
        assert pairs == [(docstring, body)]

    @pytest.mark.parametrize(("name", "between"), [("a.txt", "\n\n"), ("no python.py", "\n\n"), ("lines.txt", "\n")])
    def test_other_text_is_paragraphs_or_lines(self, name, between):
        paragraphs = [f"Paragraph {i} of a text that is no Python at all." for i in range(5)]
        texts, pairs = embed.take_apart(data.Document(name, between.join([*paragraphs, "short"])))
        assert texts == paragraphs
        assert pairs == [tuple(paragraphs[:2]), tuple(paragraphs[2:4])]

    def test_items_depend_on_seed_and_place_alone(self, task):
        whole, later, other = Drawn(task, 3, 0, 40), Drawn(task, 3, 7, 40), Drawn(task, 4, 0, 40)
        assert [whole[i + 7] for i in range(33)] == [later[i] for i in range(33)]
        assert whole[0].keys() == {"passage", "length", "query", "target"}
        assert any(whole[i] != other[i] for i in range(40))

    def test_held_out_texts_are_not_learnt(self, folder, files, tmp_path):
        _, heldout = data.split_documents(data.read_texts(files))
        copy = tmp_path / "copy.py"  # of a file that is held out; its own name isn't
        copy.write_text(heldout[0].text)
        task = make_task(folder, [*files, str(copy)])
        assert len(heldout) > 1
        assert not set(task.corpus.texts) & set(task.heldout_corpus.texts)
        assert not set(task.corpus.pairs) & set(task.heldout_corpus.pairs)

    def test_held_out_pairs_share_no_text(self):
        corpus = embed.Corpus([])
        corpus.pairs = [("a", "b"), ("a", "c"), ("d", "b"), ("e", "f")]
        found = corpus.distinct_pairs(9)
        assert len({text for pair in found for text in pair}) == 2 * len(found) >= 4


class TestPooling:
    @pytest.mark.parametrize("mode", ["mean", "cls"])
    def test_the_models_own_is_kept(self, folder, files, tmp_path, mode):
        """Read from its folder, and written again beside a patched model, which the library opens."""
        given = SentenceTransformer(folder, device="cpu")
        pooling = type(given[1])(32, mode)
        SentenceTransformer(modules=[given[0], pooling]).save(str(tmp_path / "given"))
        task = make_task(str(tmp_path / "given"), files)
        states, mask = torch.randn(2, 3, 32), torch.tensor([[1, 1, 0], [1, 1, 1]])
        pooled = {"mean": [states[0, :2].mean(0), states[1].mean(0)], "cls": states[:, 0].unbind()}[mode]
        torch.testing.assert_close(task.pool(states, mask), F.normalize(torch.stack(pooled), dim=-1))
        rope = rotary(task, str(tmp_path / "given"))
        rope.save_pretrained(tmp_path / "patched")
        task.save_extras(tmp_path / "patched")
        opened = SentenceTransformer(str(tmp_path / "patched"), device="cpu")
        assert opened.max_seq_length == 16
        text = task.heldout_pairs[0][0]
        with torch.no_grad():
            expected = task.embed(rope, task.pad([task.encode(text, 16)]))
        found = opened.encode([text], convert_to_tensor=True, normalize_embeddings=True)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_distance_by_hand(task, model, rope):
    batch = task.pad([ids(*range(4, 14)), ids(*range(4, 8))])
    with torch.no_grad():
        ours, theirs = (m(**batch, output_hidden_states=True).hidden_states for m in (rope, model))
        cosine = (task.embed(rope, batch) * task.embed(model, batch)).sum(-1)[1].item()
        *others, last = (
            (((a[1, :6] - b[1, :6]) ** 2).sum() / (b[1, :6] ** 2).sum()).item()
            for a, b in zip(ours, theirs, strict=True)
        )
        found = task.distance(rope, model, batch)[1].item()
    assert found == pytest.approx(1 - cosine + last + sum(others) / 2, rel=1e-4)
    assert task.distance(model, model, batch).abs().max() < 1e-5


class TestFigures:
    def test_retrieval_at_chance_and_perfect(self):
        torch.manual_seed(0)
        targets = F.normalize(torch.randn(400, 16), dim=-1)
        assert (embed.reciprocal_ranks(targets, targets) == 1).all()
        shuffled = embed.reciprocal_ranks(targets[torch.randperm(400)], targets)
        assert shuffled.mean() == pytest.approx(sum(1 / rank for rank in range(1, 401)) / 400, abs=0.015)
        ties = embed.reciprocal_ranks(torch.ones(5, 1), torch.ones(5, 1))
        assert ties.tolist() == [0.2] * 5, "a model that tells nothing apart gets nothing for it"

    def test_by_hand(self, task, folder, rope):
        reference = AutoModel.from_pretrained(folder).eval()

        def embeddings(model, texts):
            with torch.no_grad():
                states = [model(**task.pad([task.encode(text, 16)])).last_hidden_state[0] for text in texts]
            return F.normalize(torch.stack([s.mean(0) for s in states]), dim=-1)

        texts = [task.tokenizer.decode(ids[1:-1]) for ids in task.heldout[:12]]
        figures = measure(task, rope)
        ours, theirs = embeddings(rope, texts), embeddings(reference, texts)
        cosines = (ours * theirs).sum(-1)
        assert figures["similarity"] == pytest.approx(cosines.mean().item(), abs=1e-5)
        assert figures["similarity_min"] == pytest.approx(cosines.min().item(), abs=1e-5)
        ranks = [(x @ x.T)[*torch.triu_indices(12, 12, 1)].argsort().argsort().float() for x in (ours, theirs)]
        assert figures["spearman"] == pytest.approx(torch.corrcoef(torch.stack(ranks))[0, 1].item(), abs=1e-3)
        queries, targets = (embeddings(rope, [pair[side] for pair in task.heldout_pairs]) for side in (0, 1))
        scores = queries @ targets.T
        assert figures["recall_at_1"] == (scores.argmax(1) == torch.arange(10)).double().mean().item()
        assert figures["loss"] == pytest.approx(F.cross_entropy(20 * scores, torch.arange(10)).item(), abs=1e-4)

    def test_a_model_is_itself(self, task, model):
        figures = measure(task, model)
        assert [figures[k] for k in ("similarity", "similarity_min", "spearman")] == pytest.approx([1, 1, 1], abs=1e-4)
        assert measure(task, model, task.curve)["mrr"] is None, "curves are of passages alone"
        assert len(task.curve) == 4


def test_config_is_of_heal_and_can_work(tmp_path):
    path = ROOT / "tools/results/configs/encoder.yaml"
    config = settings.read_run([str(path)], "train_healed.py", "", (train_healed.HealConfig,))
    config.output_dir = str(tmp_path)
    settings.check(config)
    assert (config.task, config.model, config.method) == ("embed", embed.MINILM, "distil")
    assert set(yaml.safe_load(path.read_text())) <= set(vars(config))


def test_longest_input(folder, tmp_path):
    """RoBERTa's table has rows that are no positions: up to the padding index, and that one."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    model = RobertaModel(RobertaConfig(vocab_size=400, max_position_embeddings=26, pad_token_id=1, **sizes))
    assert longest_input(model) == 24
    model(torch.full((1, 24), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, 25), 5))
    assert longest_input(AutoModel.from_pretrained(folder)) == 24
