"""Text classification: figures, thresholds, the head's start, the order of items, and whole runs."""

import json
import shutil
import sys

import finetune
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hfrecipes import classify
from hfrecipes.corpus import RecipeError
from hfrecipes.start import patched
from run_files import read_results
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel

TINY = "--task classify --layers 1 --width 32 --vocab_size 200 --batch_size 8 --baseline_steps 20 --steps 3"
TINY += " --placement post --tracker none --eval_every 10 --save_every 10 --warmup_steps 2 --learning_rate 3e-3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One set with several labels a text and one with a single one; texts name them, most of the time."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    words = np.array([f"w{i}" for i in range(40)])
    many, one = [], []
    for i in range(240):
        labels = [name for name, share in {"apple": 0.6, "pear": 0.3, "plum": 0.1}.items() if random.random() < share]
        said = [name for name in labels if random.random() < 0.9] + random.choice(
            words, random.integers(1, 12)
        ).tolist()
        many.append({"text": " ".join(random.permutation([*said, f"n{i}"])), "labels": labels})
        one.append({"text": many[-1]["text"], "label": labels[0] if labels else "none"})
    (folder / "many.json").write_text(json.dumps(many))
    (folder / "one.json").write_text(json.dumps(one))
    return folder


def tiny(out, data, *more, variants="rms control"):
    return [
        *TINY.split(),
        "--data",
        str(data),
        "--output_dir",
        str(out),
        "--variants",
        *variants.split(),
        *map(str, more),
    ]


def make(out, **settings):
    sizes = {"layers": 1, "width": 32, "vocab_size": 200, "batch_size": 8, "placement": "post"}
    return classify.Classification(classify.ClassificationConfig(**{**sizes, **settings}), Accelerator(), out)


@pytest.fixture(scope="module")
def many(folder, tmp_path_factory):
    return make(tmp_path_factory.mktemp("many"), data=str(folder / "many.json"))


@pytest.fixture(scope="module")
def one(folder, tmp_path_factory):
    return make(tmp_path_factory.mktemp("one"), data=str(folder / "one.json"))


def figures(out):
    kept = ("step", "start", "end", "curve", "train_loss", "parameters")
    return {name: {k: stage[k] for k in kept} for name, stage in read_results(out)["stages"].items()}


def loader(task, items):
    return DataLoader(items, 8, collate_fn=task.collate)


def measure(task, model, items=None):
    with torch.no_grad():
        return task.figures(model.eval(), loader(task, items or task.heldout), lambda x: x)


def own_answers(model, tokenizer, task, items):
    """Probabilities of one text at a time, unpadded."""
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([tokens])).logits[0] for tokens, _ in items]
    return torch.stack(logits)


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    assert finetune.main(tiny(out, folder / "many.json")) == 0
    return out


class TestFigures:
    def test_f1_is_that_of_scikit_learn(self):
        metrics = pytest.importorskip("sklearn.metrics")
        random = np.random.default_rng(0)
        found, true = random.random((50, 6)) < 0.3, random.random((50, 6)) < 0.3
        found[:, 5] = true[:, 5] = False
        expected = [metrics.f1_score(true, found, average=kind, zero_division=0) for kind in ("micro", "macro")]
        assert classify.f1(found, true.astype(float)) == pytest.approx(expected)

    def test_threshold_comes_from_the_development_texts_alone(self, many, monkeypatch):
        torch.manual_seed(0)
        model = many.baseline()
        before = measure(many, model)
        chosen = []
        best = classify.best_threshold
        monkeypatch.setattr(classify, "best_threshold", lambda *a: chosen.append(best(*a)) or chosen[-1])
        measure(many, model)
        with monkeypatch.context() as patch:  # what the test texts say doesn't matter
            patch.setattr(many.heldout, "targets", 1 - many.heldout.targets)
            assert measure(many, model)["micro_f1"] != before["micro_f1"]
        with monkeypatch.context() as patch:  # the control: what the development texts say does
            patch.setattr(many.dev, "targets", 1 - many.dev.targets)
            measure(many, model)
        assert len(chosen) == 3, "one choice for each measurement"
        assert chosen[0] == chosen[1] != chosen[2]

    def test_best_threshold(self):
        found = np.array([[0.9, 0.2], [0.6, 0.1], [0.3, 0.05]])
        true = np.array([[1, 0], [1, 0], [0, 0]])
        assert 0.3 < classify.best_threshold(found, true) < 0.6
        assert classify.f1(found >= classify.best_threshold(found, true), true)[0] == 1.0

    def test_multi_label_by_hand(self, many):
        torch.manual_seed(0)
        model = many.baseline().eval()
        probability = {
            name: own_answers(model, many.tokenizer, many, items).sigmoid().numpy()
            for name, items in {"dev": many.dev, "test": many.heldout}.items()
        }
        true = many.heldout.targets.numpy()
        threshold = max(
            (
                sum((probability["dev"] >= t)[many.dev.targets.numpy() == 1])
                / ((probability["dev"] >= t).sum() + many.dev.targets.sum().item()),
                t,
            )
            for t in np.arange(1, 100) / 100
        )[0]  # the best F1 / 2 there is
        shown = measure(many, model, many.dev)
        assert shown["micro_f1"] == pytest.approx(2 * float(threshold), abs=1e-6)
        held = measure(many, model)
        nats = -(true * np.log(probability["test"]) + (1 - true) * np.log(1 - probability["test"]))
        assert held["loss"] == pytest.approx(nats.mean(), abs=1e-5)

    def test_single_labels_by_hand(self, one):
        torch.manual_seed(0)
        model = one.baseline().eval()
        logits = own_answers(model, one.tokenizer, one, one.heldout)
        shown = measure(one, model)
        assert shown["accuracy"] == pytest.approx((logits.argmax(1) == one.heldout.targets).float().mean().item())
        expected = torch.nn.functional.cross_entropy(logits, one.heldout.targets)
        assert shown["loss"] == pytest.approx(expected.item(), abs=1e-5)
        assert (one.main, "micro_f1" in shown) == ("accuracy", False)

    @pytest.mark.parametrize("kind", ["one", "many"])
    def test_loss_is_the_models_own(self, kind, request):
        task = request.getfixturevalue(kind)
        batch = next(iter(loader(task, task.dev)))
        model = task.baseline().eval()
        sums, counts = task.loss(model, batch)
        assert sums.shape == counts.shape == (8,)
        assert (sums.sum() / counts.sum()).item() == pytest.approx(model(**batch).loss.item(), abs=1e-6)

    def test_trivial_methods(self, many, one):
        heldout = many.heldout.targets.numpy()
        commonest = many.train_texts.targets.sum(0).argmax().item()
        assert many.labels[commonest] == "apple"
        share = heldout[:, commonest].mean()
        micro = 2 * share / (1 + heldout.mean(0).sum())
        assert many.data["baselines"]["commonest label"]["micro_f1"] == pytest.approx(micro)
        regression = many.data["baselines"]["tf-idf and logistic regression"]
        assert regression["micro_f1"] > micro + 0.1
        assert one.data["baselines"]["tf-idf and logistic regression"]["accuracy"] > 0.6

    def test_trivial_methods_are_kept_for_the_same_data_only(self, folder, tmp_path, monkeypatch):
        first = make(tmp_path, data=str(folder / "many.json")).data["baselines"]
        with monkeypatch.context() as patch:
            patch.setattr(classify, "logistic_regression", lambda *a: pytest.fail("measured again"))
            assert make(tmp_path, data=str(folder / "many.json")).data["baselines"] == first
        assert make(tmp_path, data=str(folder / "one.json")).data["baselines"] != first
        assert list(make(tmp_path, data=str(folder / "one.json"), baselines=False).data["baselines"]) == [
            "commonest label"
        ]


class TestHead:
    def test_answers_begin_at_how_often_each_label_occurs(self, many, one):
        torch.manual_seed(0)
        bias = many.baseline().classifier.bias
        assert torch.allclose(bias.sigmoid(), many.train_texts.targets.mean(0))
        single = one.baseline().classifier.bias.softmax(0)
        assert torch.allclose(single, torch.bincount(one.train_texts.targets) / len(one.train_texts), atol=1e-6)

    def test_the_prior_is_worth_something(self, many):
        torch.manual_seed(0)
        model = many.baseline()
        start = measure(many, model)["loss"]
        with torch.no_grad():
            model.classifier.bias.zero_()
        assert measure(many, model)["loss"] > start + 0.05

    def test_a_rare_label_has_a_finite_one(self):
        head = torch.nn.Linear(2, 2)
        classify.set_prior(head, torch.tensor([0.0, 1.0]), multi=True)
        assert head.bias.isfinite().all()

    @pytest.mark.parametrize("placement", ["post", "pre"])
    def test_placement_of_the_norms(self, folder, tmp_path, placement):
        task = make(tmp_path, data=str(folder / "one.json"), placement=placement, baselines=False)
        model = task.baseline()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.add_(0.3 * torch.randn_like(p) + 0.1 * ("bias" in name))
        before = measure(task, model)["loss"]
        change = abs(measure(task, patched(task, model, "rms", "auto", 0, 8, 0))["loss"] - before)
        assert (change < 1e-4) == (placement == "pre"), "an RMSNorm is exact before the branches only"

    def test_sizes(self, folder, tmp_path):
        task = make(tmp_path, data=str(folder / "one.json"), size="classic", baselines=False, layers=None, width=None,
                    vocab_size=None)  # fmt: skip
        missing = (10840 - len(task.tokenizer)) * 384  # pieces that these few texts don't give
        assert task.baseline().num_parameters() + missing == pytest.approx(7.92e6, abs=1e4)

    def test_a_checkpoint_without_a_head(self, many, folder, tmp_path):
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
        torch.manual_seed(0)
        BertModel(BertConfig(vocab_size=len(many.tokenizer), max_position_embeddings=24, **sizes)).save_pretrained(
            tmp_path / "m"
        )
        many.tokenizer.save_pretrained(tmp_path / "m")
        task = make(tmp_path / "out", data=str(folder / "many.json"), model=str(tmp_path / "m"), baselines=False)
        model = task.baseline()
        assert task.max_length == 24
        assert torch.allclose(model.classifier.bias.sigmoid(), many.train_texts.targets.mean(0))
        assert model.config.problem_type == "multi_label_classification"
        assert model.config.id2label == {0: "apple", 1: "pear", 2: "plum"}
        assert {group["lr"] for group in task.parameter_groups(model, 0.1, 0.0)} == {0.1}
        with pytest.raises(RecipeError, match=r"--max_length 25 is beyond the 24 tokens that .* takes"):
            make(tmp_path / "out", data=str(folder / "many.json"), model=str(tmp_path / "m"), max_length=25)

    @pytest.mark.slow
    def test_a_classifier_of_the_same_labels_keeps_its_head(self, finished, folder, tmp_path):
        data, model = str(folder / "many.json"), str(finished / "control")
        task = make(tmp_path, data=data, model=model, baselines=False)
        own = AutoModelForSequenceClassification.from_pretrained(model)
        assert torch.equal(task.baseline().classifier.bias, own.classifier.bias)
        assert measure(task, task.baseline()) == pytest.approx(
            read_results(finished)["stages"]["control"]["end"], abs=1e-5
        )
        other = make(tmp_path / "other", data=str(folder / "one.json"), model=model, baselines=False)
        assert other.labels == ["apple", "none", "pear", "plum"]
        assert not torch.equal(other.baseline().classifier.bias[:1], own.classifier.bias[:1])

    def test_a_classifier_of_as_many_other_labels_loses_it(self, finished, folder, tmp_path, capsys):
        text = (folder / "many.json").read_text().replace('"plum"', '"fig"')
        (tmp_path / "figs.json").write_text(text)
        task = make(tmp_path, data=str(tmp_path / "figs.json"), model=str(finished / "control"), baselines=False)
        assert torch.allclose(task.baseline().classifier.bias.sigmoid(), task.train_texts.targets.mean(0))
        assert "its last layer starts afresh" in capsys.readouterr().out

    def test_embeddings_take_longer_steps(self, many):
        model = many.baseline()
        groups = many.parameter_groups(model, 0.1, 0.01)
        words = model.get_input_embeddings().weight
        (own,) = [group for group in groups if any(p is words for p in group["params"])]
        assert own["lr"] == pytest.approx(0.3)
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


class TestItems:
    def test_item_is_a_function_of_seed_and_place(self, many):
        whole, later, other = many.train_set(3, 0, 600), many.train_set(3, 250, 350), many.train_set(4, 0, 600)
        assert all(whole[250 + i][0] == later[i][0] for i in (0, 349, 100, 3))  # in any order
        assert sum(whole[i][0] == other[i][0] for i in range(200)) < 20

    def test_every_text_once_an_epoch(self, many):
        n = len(many.train_texts)
        drawn = many.train_set(0, 0, 2 * n)
        epochs = [[tuple(drawn[i][0]) for i in range(e * n, e * n + n)] for e in (0, 1)]
        assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(map(tuple, many.train_texts.tokens))
        assert epochs[0] != epochs[1]

    def test_batches_hold_little_padding(self, many):
        def share(items):
            masks = [batch["attention_mask"] for batch in loader(many, items)]
            return sum(mask.sum() for mask in masks) / sum(mask.numel() for mask in masks)

        n = len(many.train_texts)
        random = np.random.default_rng(0).permutation(n)
        plain = [many.train_texts[int(i)] for i in random]
        assert share(many.train_set(0, 0, n)) > share(plain) + 0.1

    def test_padding_goes_to_the_longest_of_the_batch_and_is_masked(self, many):
        items = [many.train_texts[0], many.train_texts[len(many.train_texts) - 1]]
        batch = many.collate(items)
        assert batch["input_ids"].shape[1] == len(items[1][0]) > len(items[0][0])
        assert batch["attention_mask"].sum(1).tolist() == [len(tokens) for tokens, _ in items]
        assert (batch["input_ids"][0, len(items[0][0]) :] == many.tokenizer.pad_token_id).all()
        assert set(many.inputs(batch)) == set(batch) - {"labels"}

    def test_long_texts_are_cut_off_and_counted(self, folder, tmp_path, capsys):
        task = make(tmp_path, data=str(folder / "many.json"), max_length=8, baselines=False)
        rows = json.loads((folder / "many.json").read_text())
        long = sum(len(task.tokenizer(row["text"])["input_ids"]) > 8 for row in rows)
        assert sum(task.data["texts_cut_off"].values()) == long > 0
        assert f"{long} texts are longer than 8 tokens and were cut off" in capsys.readouterr().out
        longest = max(task.train_texts.tokens, key=len)
        assert len(longest) == 8
        assert longest[-1] == task.tokenizer.sep_token_id, "the end is marked all the same"

    def test_tokenizer_has_seen_the_training_texts_alone(self, tmp_path):
        (tmp_path / "x").mkdir()
        for name, word in {"train": "qqq", "dev": "jjj", "test": "zzz"}.items():
            rows = [{"text": f"{word} {i}", "label": i % 2} for i in range(30)]
            (tmp_path / "x" / f"{name}.json").write_text(json.dumps(rows))
        pieces = make(tmp_path, data=str(tmp_path / "x"), baselines=False).tokenizer.tokenize
        assert pieces("qqq") == ["▁qqq"]
        assert "[UNK]" in pieces("zzz")
        assert "[UNK]" in pieces("jjj")

    def test_punctuation_is_cut_apart_but_not_in_code(self, folder, tmp_path):
        texts = classify.read_labelled(classify.ClassificationConfig(data=str(folder / "many.json")))
        apart, together = (
            classify.train_bpe(texts, 200, code, tmp_path / str(code)).backend_tokenizer.pre_tokenizer
            for code in (False, True)
        )
        assert [piece for piece, _ in apart.pre_tokenize_str("len(x)  y")] == ["▁len", "▁(", "▁x", "▁)", "▁y"]
        assert [piece for piece, _ in together.pre_tokenize_str("len(x)  y")] == ["▁len(x)", "▁y"]

    def test_tokenizer_is_the_same_each_time(self, folder, tmp_path):
        one, other = (
            make(tmp_path / str(i), data=str(folder / "many.json"), baselines=False).tokenizer for i in (0, 1)
        )
        assert one.get_vocab() == other.get_vocab()
        assert one.decode(one("Äpple W12").input_ids, skip_special_tokens=True) == "apple w12"


class TestRuns:
    def test_multi_label(self, finished):
        results = read_results(finished)
        assert (results["main"], results["higher_is_better"]) == ("micro_f1", True)
        stages = results["stages"]
        assert set(stages["control"]["end"]) == {"loss", "micro_f1", "macro_f1"}
        assert stages["baseline"]["end"]["loss"] < stages["baseline"]["start"]["loss"]
        assert stages["control"]["start"] == stages["baseline"]["end"]
        assert stages["rms"]["start"] != stages["baseline"]["end"]
        data = results["data"]
        assert data["labels"] == ["apple", "pear", "plum"]
        assert sum(data["texts"].values()) == 240
        assert "tf-idf and logistic regression" in data["baselines"]
        simple = data["baselines"]["commonest label"]["micro_f1"]
        assert f"Simple methods: commonest label: micro f1 {simple:.3f}" in (finished / "results.md").read_text("utf-8")

    def test_saved_models_know_their_thresholds(self, finished, folder, tmp_path, capsys):
        """evaluate.py takes them as they are, and finds its own for a model without."""
        import evaluate

        def evaluated(out):
            flags = ["--task", "classify", "--data", str(folder / "many.json"), "--baselines", "false", "--models"]
            return evaluate.main([*flags, str(out), "--output_dir", str(tmp_path / "evaluated")])

        shutil.copytree(finished / "rms", tmp_path / "rms")
        path, reported = tmp_path / "rms" / "threshold.json", read_results(finished)["stages"]["rms"]["end"]
        chosen = json.loads(path.read_text())["threshold"]
        for threshold, told in ((chosen, "found in training"), (0.01, "found in training"), (None, "the best on the")):
            path.unlink() if threshold is None else path.write_text(json.dumps({"threshold": threshold}))
            assert evaluated(tmp_path / "rms") == 0
            (found,) = read_results(tmp_path / "evaluated")["models"].values()
            same = found["figures"] == pytest.approx(reported, abs=1e-6)
            assert same is (threshold != 0.01)
            expected = chosen if threshold is None else threshold
            assert found["threshold"]["value"] == expected
            assert told in capsys.readouterr().out
        path.write_text("{}")
        assert evaluated(tmp_path / "rms") == 2
        assert f"RecipeError: can't read the threshold in {path}" in capsys.readouterr().err

    def test_a_threshold_is_of_the_model_that_is_saved(self, many, one, tmp_path):
        torch.manual_seed(0)
        measure(many, many.baseline())
        many.save_extras(tmp_path)
        assert (tmp_path / "threshold.json").exists()
        model = many.baseline()
        model.save_pretrained(tmp_path)
        many.load(str(tmp_path))
        many.save_extras(tmp_path)  # it wasn't measured
        assert not (tmp_path / "threshold.json").exists()
        measure(one, one.baseline())
        one.save_extras(tmp_path / "one")
        assert not (tmp_path / "one" / "threshold.json").exists()

    def test_saved_model_has_the_reported_figures(self, finished, many):
        model = AutoModelForSequenceClassification.from_pretrained(finished / "rms")
        assert AutoTokenizer.from_pretrained(finished / "rms").get_vocab() == many.tokenizer.get_vocab()
        assert model.config.id2label == {0: "apple", 1: "pear", 2: "plum"}
        assert measure(many, model) == pytest.approx(read_results(finished)["stages"]["rms"]["end"], abs=1e-5)

    @pytest.mark.slow
    def test_resumed_run_equals_an_uninterrupted_one(self, finished, folder, tmp_path):
        for steps in (15, 6):  # in the baseline, then in the first variant; with dropout
            assert finetune.main(tiny(tmp_path, folder / "many.json", "--resume", "--stop_after", steps)) == 130
        assert finetune.main(tiny(tmp_path, folder / "many.json", "--resume")) == 0
        assert figures(tmp_path) == figures(finished)

    def test_single_labels_from_scratch(self, folder, tmp_path):
        argv = tiny(tmp_path, folder / "one.json", "--start", "reset", "--baseline_steps", 0, "--placement", "pre")
        assert finetune.main(argv) == 0
        stages = read_results(tmp_path)["stages"]
        assert set(stages["rms"]["end"]) == {"loss", "accuracy", "macro_f1"}
        assert stages["control"]["start"] == stages["baseline"]["end"] == stages["baseline"]["start"]
        assert stages["rms"]["end"]["loss"] != stages["control"]["end"]["loss"]
        assert "accuracy" in (tmp_path / "results.md").read_text("utf-8")

    def test_a_repair_takes_inputs_alone(self, many):
        torch.manual_seed(0)
        model = many.baseline()
        before = measure(many, model)
        after = measure(many, patched(many, model, "rms", "repaired", 64, 8, 0))
        assert after["loss"] == pytest.approx(before["loss"], abs=0.05)
        assert after != before

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--data", "missing.csv"], "there is no file or folder missing.csv"),
            (["--text_column", "body"], "has no column 'body' but 'text', 'labels': --text_column"),
            (["--problem", "single"], "use --problem multi"),
            (["--width", "40"], "--width must be a multiple of 32, not 40"),
            (["--dropout", "1"], "--dropout must be below 1"),
            (["--max_length", "3"], "--max_length must be at least 4"),
            (["--curve_texts", "0"], "--curve_texts must be at least 1"),
            (["--model", "./no/such/model"], "there is no model folder ./no/such/model"),
        ],
    )
    def test_refused_before_anything_is_trained(self, folder, tmp_path, capsys, monkeypatch, flags, message):
        monkeypatch.setattr(finetune.Run, "stage", lambda *a, **k: pytest.fail("training began"))
        assert finetune.main([*tiny(tmp_path, folder / "many.json"), *flags]) == 2
        error = capsys.readouterr().err.strip()
        assert message in error
        assert "\n" not in error

    def test_packages_that_are_missing(self, folder, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
        with pytest.raises(RecipeError, match="pip install scikit-learn, or take --baselines false"):
            make(tmp_path, data=str(folder / "one.json"))
