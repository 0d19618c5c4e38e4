"""Encoders of long documents: windows, sentences and batches; training at a size of seconds; refusals."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import train_healed
from accelerate import Accelerator
from harness import long
from run_files import read_results, words
from sentence_transformers import SentenceTransformer
from texts import RecipeError
from tiny_encoder import write_bert
from transformers import BertModel

LENGTH = 64  # tokens of a window; the encoder reads 24


@pytest.fixture(scope="module")
def prose(tmp_path_factory):
    """Thirty documents of sentences, each with words of its own."""
    folder = tmp_path_factory.mktemp("prose")
    for number in range(30):
        names = [f"{a}{number}{b}" for a in ("tal", "ron", "mis") for b in "aeiou"]
        random = np.random.default_rng(number)
        lines = [
            f"The {random.choice(names)} of {random.choice(names)} went uphill and met a {random.choice(names)} there."
            for _ in range(30)
        ]
        (folder / f"d{number}.txt").write_text("\n".join(lines))
    return sorted(map(str, folder.iterdir()))


@pytest.fixture(scope="module")
def encoder(prose, tmp_path_factory):
    return write_bert(BertModel, tmp_path_factory.mktemp("encoder"), prose)


def make_task(encoder, prose, **more):
    small = {"max_length": LENGTH, "batch_size": 4, "heldout_windows": 4, "curve_windows": 3, "sentences": 2}
    config = SimpleNamespace(**vars(long.LongConfig(model=encoder, text=prose)) | small | more)
    return long.LongDocuments(config, Accelerator(), Path("unused"))


@pytest.fixture(scope="module")
def task(encoder, prose):
    return make_task(encoder, prose)


class TestData:
    def test_windows_of_an_epoch_are_apart_and_lie_in_groups(self, task):
        order = task.order(0, 0)
        assert len(order) == task.windows
        places = {number: sorted(begin for n, begin in order if n == number) for number, _ in order}
        assert all(np.diff(begins).min(initial=task.content) >= task.content for begins in places.values())
        assert all(begins[-1] + task.content <= len(task.articles[n].starts) for n, begins in places.items())
        groups = sum(-(-len(begins) // long.GROUP) for begins in places.values())
        numbers = [number for number, _ in order]
        assert sum(a != b for a, b in pairwise(numbers)) < groups < task.windows, "hard negatives lie together"
        assert order != task.order(1, 0) != task.order(0, 1)

    def test_sentences_are_of_their_window(self, task):
        item = task.item(0, 3)
        assert item == task.item(0, 3) != task.item(1, 3)
        assert " ".join(item["queries"][0].split()) in " ".join(item["window"].split())
        thinned = item["queries"][1].split()
        assert 4 <= len(thinned) < 11, "of eleven words, of which some are content"
        assert item["short"] in item["window"]
        batch = task.collate([task.item(0, i) for i in range(4)])
        assert batch["window_input_ids"].shape == (4, LENGTH)
        assert [len(batch[name]) for name in ("query_input_ids", "input_ids")] == [4 * 2, 4]

    def test_held_out_documents_are_others(self, task):
        texts = {article.text for article in task.articles}
        assert task.heldout_articles
        assert not texts & {article.text for article in task.heldout_articles}

    def test_too_little_text(self, encoder, prose):
        with pytest.raises(RecipeError, match="0 windows of 4096 tokens"):
            make_task(encoder, prose, max_length=4096)


class TestLoss:
    @torch.no_grad()
    def test_by_hand(self, task, encoder):
        """Of the original itself the anchor is zero; the rest is the cross-entropy of cosines."""
        model, batch = task.baseline().eval(), task.collate([task.item(0, i) for i in range(4)])
        sums, counts = task.loss(model, batch)
        scores = 20 * task.embed(model, batch, "query_") @ task.embed(model, batch, "window_").T
        expected = -scores.log_softmax(-1)[torch.arange(8), torch.arange(8) // 2].view(4, 2).mean(1)
        assert torch.allclose(sums, expected, atol=1e-5)
        assert counts.tolist() == [1.0] * 4
        for parameter in model.parameters():
            parameter.mul_(1.1)
        moved = task.loss(model, batch)[0]
        task.config.anchor, kept = 0.0, task.config.anchor
        alone = task.loss(model, batch)[0]
        task.config.anchor = kept
        assert (moved > alone).all(), "the anchor weighs what has moved"

    @torch.no_grad()
    def test_a_model_reads_what_it_can(self, task):
        model, batch = task.baseline().eval(), task.collate([task.item(0, i) for i in range(4)])
        assert task.reach(model) == 24
        cut = {name: batch[f"window_{name}"][:, :24] for name in ("input_ids", "attention_mask")}
        assert torch.equal(task.embed(model, batch, "window_"), task.embed(model, cut))


def run(out, encoder, prose, *more):
    flags = f"--task long --start copied --no_control --max_length {LENGTH} --batch_size 4"
    flags += " --heldout_windows 4 --curve_windows 3 --sentences 2 --steps 4 --eval_every 2 --save_every 2"
    flags += " --learning_rate 1e-3"
    return train_healed.main([*words(flags, "--model", encoder, "--output_dir", out), "--text", *prose, *more])


@pytest.mark.slow
class TestHeal:
    def test_one_command_to_an_encoder_of_long_documents(self, encoder, prose, tmp_path):
        patch = ("--patch", f"learned:max_positions={LENGTH}")
        assert run(tmp_path / "whole", encoder, prose, *patch) == 0
        stages = read_results(tmp_path / "whole")["stages"]
        assert 0 < stages["healed"]["end"]["mrr"] <= 1
        assert stages["baseline"]["end"]["similarity"] == pytest.approx(1, abs=1e-6)
        healed = SentenceTransformer(str(tmp_path / "whole" / "healed"), device="cpu")
        assert healed.max_seq_length == LENGTH
        assert healed.encode(["word " * 200]).shape == (1, 32)

        assert run(tmp_path / "parts", encoder, prose, *patch, "--stop_after", "3") == 130
        assert run(tmp_path / "parts", encoder, prose, *patch, "--resume") == 0
        assert read_results(tmp_path / "parts")["stages"]["healed"]["end"] == stages["healed"]["end"]

    def test_a_patch_that_does_not_reach_is_refused(self, encoder, prose, tmp_path, capsys):
        assert run(tmp_path, encoder, prose, "--patch", "rms") == 2
        assert f"reads 24 of the {LENGTH} tokens" in capsys.readouterr().err
