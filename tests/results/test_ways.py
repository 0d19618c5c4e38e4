"""Methods of healing on tiny models with power: what they minimise, what they begin as, what they leave."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from harness import ways
from harness.tasks import Drawn, Task
from harness.ways import agreement
from methods import request_of
from texts import RecipeError
from tiny_models import tiny

from hfpatch.errors import NotPreservedWarning
from hfpatch.patch import patch_model

HEADS = {"bert": "AutoModelForMaskedLM"}
B, T = 4, 10


def padded(seed=0):
    """Token ids of unequal lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (B, T), generator=generator)
    mask = (torch.arange(T) < torch.tensor([T, 7, 5, 3])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": (ids * mask).masked_fill(mask == 0, -100)}


class Tiny(Task):
    """Padded tokens on a tiny random model."""

    name = "tiny"

    def __init__(self, family="gpt2", **settings):
        self.family, self.settings = family, settings

    def baseline(self):
        return tiny(self.family, HEADS.get(self.family, "AutoModelForCausalLM"), **self.settings)

    def load(self, source):
        raise NotImplementedError(source)

    def item(self, seed, number):
        return {name: value[number % B] for name, value in padded(seed + number).items()}

    def inputs(self, batch):
        return {name: value for name, value in batch.items() if name != "labels"}

    def loss(self, model, batch):
        logits, labels = model(**self.inputs(batch)).logits, batch["labels"]
        terms = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        return terms.sum(1), (labels != -100).sum(1)

    def figures(self, model, loader, gather):
        raise NotImplementedError


def settings(**changed):
    config = ways.MethodConfig()
    for name, value in {"keep_dropout": False, "model": "given", "baseline_steps": None, **changed}.items():
        setattr(config, name, value)
    return config


def patched(task, variant):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotPreservedWarning)
        return patch_model(task.baseline(), **request_of(variant), init="copy")


def prepared(name, variant="rms+rope", task=None, **changed):
    """A method, and what it trains."""
    task = task or Tiny()
    goal = ways.METHODS[name](task, settings(**changed), task.baseline)
    return goal, goal.prepare(patched(task, variant))


def train(goal, model, steps):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(steps):
        sums, counts = goal.loss(model.train(), padded(step))
        (sums.sum() / counts.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


def inputs(task):
    return task.inputs(torch.utils.data.default_collate([task.item(0, i) for i in range(B)]))


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", ["gpt2", "bert", "opt"])
@pytest.mark.parametrize("asked", [False, True])
def test_dropout_is_off_unless_it_is_asked_for(family, asked):
    rates = ("attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
    own = {rate: 0.3 for rate in rates if hasattr(Tiny(family).baseline().config, rate)}
    goal, model = prepared("finetune", "dyt", Tiny(family, **own), keep_dropout=asked)
    x = inputs(goal.task)
    with torch.no_grad():
        one, other = (model.train()(**x).logits for _ in range(2))
    assert torch.equal(one, other) is not asked
    assert {rate: getattr(goal.finished(model).config, rate) for rate in own} == own, "as it will be saved"


class TestDistil:
    def test_the_teacher_is_left_alone(self):
        goal, model = prepared("distil")
        before = copy.deepcopy(goal.teacher.state_dict())
        train(goal, model, 2)
        assert not goal.teacher.training
        assert all(p.grad is None and not p.requires_grad for p in goal.teacher.parameters())
        assert all(torch.equal(value, before[name]) for name, value in goal.teacher.state_dict().items())

    def test_weights_mix_task_and_teacher_in_one_run_of_the_student(self):
        goal, model = prepared("distil", distil_weight=1.0)
        model.eval()
        far, terms = goal.loss(model, padded())
        sums, counts = goal.task.loss(model, padded())
        goal.config.distil_weight = 0.25
        runs = []
        model.register_forward_hook(lambda *_: runs.append(1))
        mixed, also = goal.loss(model, padded())
        assert len(runs) == 1
        assert torch.equal(also, counts)
        expected = 0.75 * sums.sum() / counts.sum() + 0.25 * far.sum() / terms.sum()
        assert (mixed.sum() / also.sum()).item() == pytest.approx(expected.item(), rel=1e-5)

    def test_padding_does_not_count(self):
        goal, model = prepared("distil", distil_weight=1.0)
        batch = padded()
        other = {**batch, "input_ids": batch["input_ids"] + 5 * (1 - batch["attention_mask"])}
        model.eval()
        (sums, counts), (others, _) = goal.loss(model, batch), goal.loss(model, other)
        assert torch.allclose(sums, others, atol=1e-4)
        assert counts.tolist() == batch["attention_mask"].sum(1).tolist()

    def test_a_distance_of_the_task_s_own(self):
        task = Tiny("bert")
        task.distance = lambda model, teacher, batch: batch["input_ids"].sum(1) + 0.0
        goal, model = prepared("distil", "dyt", task, distil_weight=1.0)
        sums, counts = goal.loss(model, padded())
        assert torch.equal(sums, padded()["input_ids"].sum(1) + 0.0)
        assert counts.tolist() == [1] * B


class TestLora:
    def test_without_peft(self, monkeypatch):
        monkeypatch.setattr(ways.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RecipeError, match="peft"):
            settings(lora_rank=2).check()


def test_agreement():
    task = Tiny()
    teacher, model = task.baseline(), patched(task, "rope")
    loader = torch.utils.data.DataLoader(Drawn(task, 0, 0, 7), B)
    same = agreement(teacher, copy.deepcopy(teacher), task, loader, lambda x: x)
    assert same == {"divergence": pytest.approx(0, abs=1e-6), "same_answer": 1}
    found = agreement(teacher, model, task, loader, lambda x: x)
    rows = []
    for batch in loader:
        kept = batch["attention_mask"].bool()
        with torch.no_grad():
            rows.append([m(**task.inputs(batch)).logits[kept] for m in (teacher, model)])
    theirs, ours = (torch.cat(side) for side in zip(*rows, strict=True))
    expected = F.kl_div(ours.log_softmax(-1), theirs.softmax(-1), reduction="batchmean")
    assert found["divergence"] == pytest.approx(expected.item(), rel=1e-4)
    assert found["same_answer"] == pytest.approx((ours.argmax(-1) == theirs.argmax(-1)).float().mean().item())
    task.states = lambda model, batch: torch.ones(2, 3, 4) * (1 + (model is teacher))
    assert agreement(teacher, model, task, loader, lambda x: x) == {"cosine": pytest.approx(1.0)}
