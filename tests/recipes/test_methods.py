"""Methods of healing on tiny models with power: what they minimise, what they begin as, what they leave."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hfrecipes import methods
from hfrecipes.agreement import agreement
from hfrecipes.corpus import RecipeError
from hfrecipes.start import patched
from hfrecipes.tasks import Task
from tiny_models import tiny
from torch import nn

HEADS = {"gpt2": "AutoModelForCausalLM", "bert": "AutoModelForMaskedLM", "vit": "AutoModelForImageClassification"}
B, T = 4, 10


def padded(seed=0):
    """Token ids of unequal lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 97, (B, T), generator=generator)
    mask = (torch.arange(T) < torch.tensor([T, 7, 5, 3])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": (ids * mask).masked_fill(mask == 0, -100)}


class Tiny(Task):
    """Padded tokens, or images, on a tiny random model."""

    name = "tiny"

    def __init__(self, family="gpt2"):
        self.family = family
        self.curve = self.train_set(0, 0, 2)

    def baseline(self):
        return tiny(self.family, HEADS[self.family])

    def load(self, source):
        raise NotImplementedError(source)

    def train_set(self, seed, first, count):
        rows = [{name: value[i % B] for name, value in padded(seed + i).items()} for i in range(first, first + count)]
        if self.family == "vit":
            rows = [{"pixel_values": torch.randn(3, 8, 8), "labels": torch.tensor(1)} for _ in rows]
        return rows

    def inputs(self, batch):
        return {name: value for name, value in batch.items() if name != "labels"}

    def loss(self, model, batch):
        logits, labels = model(**self.inputs(batch)).logits, batch["labels"]
        if labels.ndim == 1:
            return F.cross_entropy(logits, labels, reduction="none"), torch.ones(len(labels))
        terms = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
        return terms.sum(1), (labels != -100).sum(1)

    def figures(self, model, loader, gather):
        raise NotImplementedError


def settings(**changed):
    config = methods.MethodConfig()
    for name, value in {"keep_dropout": False, "model": "given", "baseline_steps": None, **changed}.items():
        setattr(config, name, value)
    return config


def prepared(name, variant="rms+rope", start="copied", family="gpt2", **changed):
    """A method, and what it trains."""
    task = Tiny(family)
    goal = methods.objective(name, task, task.baseline, settings(**changed), variant)
    return goal, goal.prepare(patched(task, task.baseline(), variant, start, 0, B, 0))


def train(goal, model, steps, first=1, last=None, optimizer=None):
    """Steps first ... last of `steps`; returns the optimizer."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, lr=1e-3)
    for step in range(first, (last or steps) + 1):
        torch.manual_seed(step)  # of dropout; a run saves the stream
        sums, counts = goal.loss(model.train(), padded(step))
        (sums.sum() / counts.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@torch.no_grad()
def difference(model, original, inputs):
    """The largest difference of two models' outputs in eval mode, relative to the original's largest output."""
    a, b = (m.eval()(**inputs)[0] for m in (model, original))
    return float((a - b).abs().max() / b.abs().max())


def inputs(task):
    return task.inputs(torch.utils.data.default_collate(task.train_set(0, 0, B)))


class TestDropout:
    @pytest.mark.parametrize("family", ["gpt2", "bert", "vit", "opt", "llama"])
    @pytest.mark.parametrize("name", ["finetune", "distil"])
    def test_is_off_unless_it_is_asked_for(self, family, name):
        HEADS.setdefault(family, "AutoModelForCausalLM")
        rates = ("attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout")
        for asked in (False, True):
            task = Tiny(family)
            own = {rate: 0.3 for rate in rates if hasattr(task.baseline().config, rate)}
            task.baseline = lambda own=own: tiny(family, HEADS[family], **own)
            goal = methods.objective(name, task, task.baseline, settings(keep_dropout=asked), "dyt")
            model = goal.prepare(patched(task, task.baseline(), "dyt", "copied", 0, B, 0)).train()
            x = inputs(task)
            with torch.no_grad():
                one, other = (model(**x).logits for _ in range(2))
            assert torch.equal(one, other) is not asked
            assert {rate: getattr(goal.finished(model).config, rate) for rate in own} == own, "as it will be saved"


class TestDistil:
    def test_the_teacher_is_left_alone(self):
        goal, model = prepared("distil", distil_hidden=1.0, distil_layers="all")
        before = {name: value.clone() for name, value in goal.teacher.state_dict().items()}
        train(goal, model, 2)
        assert not goal.teacher.training
        assert all(p.grad is None and not p.requires_grad for p in goal.teacher.parameters())
        assert all(torch.equal(value, before[name]) for name, value in goal.teacher.state_dict().items())

    def test_teacher_and_student_share_nothing(self):
        task = Tiny()
        model = task.baseline()
        goal = methods.objective("distil", task, lambda: model, settings(), "dyt")
        with pytest.raises(ValueError, match="share parameters"):
            goal.prepare(model)

    @pytest.mark.parametrize("hidden", [0.0, 1.0])
    def test_a_perfect_student_has_no_distance(self, hidden):
        goal, model = prepared("distil", distil_weight=1.0, distil_hidden=hidden, distil_layers="all")
        same = goal.task.baseline()
        assert (goal.loss(same, padded())[0].abs() < 1e-4).all()
        assert (goal.loss(model.eval(), padded())[0] > 0.1).all()

    def test_weights_mix_task_and_teacher(self):
        goal, model = prepared("distil", distil_weight=1.0)
        model.eval()
        teacher = goal.loss(model, padded())[0][0]
        sums, counts = goal.task.loss(model, padded())
        goal.config.distil_weight = 0.25
        mixed, also = goal.loss(model, padded())
        assert torch.equal(also, counts)
        expected = 0.75 * sums.sum() / counts.sum() + 0.25 * teacher
        assert (mixed.sum() / also.sum()).item() == pytest.approx(expected.item(), rel=1e-5)

    def test_padding_does_not_count(self):
        torch.manual_seed(0)
        mask = padded()["attention_mask"]
        ours, theirs = torch.randn(B, T, 7), torch.randn(B, T, 7)
        kept = mask.bool()
        p, q = theirs[kept].softmax(-1), ours[kept].log_softmax(-1)
        expected = F.kl_div(q, p, reduction="batchmean")
        assert torch.allclose(methods.divergence(ours, theirs, mask, 1.0, False), expected, rtol=1e-5)
        noise = torch.randn(B, T, 7) * (1 - mask)[..., None] * 100
        moved = ours + noise
        for distance in (
            lambda x: methods.divergence(x, theirs, mask, 2.0, False),
            lambda x: methods.divergence(x, theirs, mask, 1.0, True),
            lambda x: methods.hidden_distance(x, theirs, mask),
        ):
            assert torch.equal(distance(moved), distance(ours))
            assert not torch.allclose(distance(ours + noise.flip(0)), distance(ours))

    def test_the_batch_s_padding_is_what_counts(self):
        goal, model = prepared("distil", distil_weight=1.0)
        batch = padded()
        other = {**batch, "input_ids": batch["input_ids"] + 5 * (1 - batch["attention_mask"])}
        model.eval()
        assert torch.allclose(goal.loss(model, batch)[0], goal.loss(model, other)[0], atol=1e-5)

    def test_formulas(self):
        torch.manual_seed(0)
        ours, theirs = torch.randn(B, 5), torch.randn(B, 5)
        p, q = (theirs / 2).softmax(-1), (ours / 2).softmax(-1)
        expected = 4 * (p * (p / q).log()).sum(-1).mean()
        assert torch.allclose(methods.divergence(ours, theirs, None, 2.0, False), expected, rtol=1e-5)
        p, q = theirs.sigmoid(), ours.sigmoid()
        each = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        assert torch.allclose(methods.divergence(ours, theirs, None, 1.0, True), each.mean(), rtol=1e-4)
        states, shifted = torch.randn(B, T, 8), torch.randn(B, T, 8)
        with_mean = states + torch.randn(B, T, 1)
        assert methods.hidden_distance(with_mean, states, None) < 1e-10, "the mean over the channels is free"
        assert methods.hidden_distance(shifted, states, None) > 0.5

    def test_models_without_a_head(self):
        task = Tiny("bert")
        task.baseline = lambda: tiny("bert", "AutoModel")
        goal = methods.objective("distil", task, task.baseline, settings(distil_weight=1.0), "dyt")
        model = goal.prepare(patched(task, task.baseline(), "dyt", "copied", 0, B, 0))
        assert goal.loss(task.baseline(), padded())[0].sum() < 1e-6
        sums, _ = goal.loss(model, padded())
        sums.sum().backward()
        assert model.encoder.layer[0].attention.output.LayerNorm.alpha.grad.abs() > 0

    def test_a_distance_of_the_task_s_own(self):
        task = Tiny("bert")
        task.baseline = lambda: tiny("bert", "AutoModel")
        states = lambda model, batch: model(input_ids=batch["input_ids"].flip(1)).last_hidden_state  # noqa: E731
        task.distance = lambda model, teacher, batch: (states(model, batch) - states(teacher, batch)).norm(dim=(1, 2))
        goal = methods.objective("distil", task, task.baseline, settings(distil_weight=1.0), "dyt")
        model, batch = goal.prepare(patched(task, task.baseline(), "dyt", "copied", 0, B, 0)).eval(), padded()
        expected = task.distance(model, goal.teacher, batch).mean()
        assert expected > 0.1
        assert torch.allclose(goal.loss(model, batch)[0], expected.expand(B))

    def test_the_student_runs_once_a_step(self):
        goal, model = prepared("distil", distil_hidden=1.0)
        runs = []
        model.register_forward_hook(lambda *_: runs.append(1))
        goal.loss(model, padded())
        assert len(runs) == 1


class TestLora:
    @pytest.mark.parametrize("name", ["finetune", "distil"])
    def test_merged_equals_unmerged(self, name, tmp_path):
        goal, model = prepared(name, "dyt+rope", lora_rank=2)
        frozen = model.base_model.model.transformer.h[0].attn.c_attn.base_layer.weight.clone()
        train(goal, model, 3)
        x = inputs(goal.task)
        with torch.no_grad():
            unmerged = model.eval()(**x).logits
            assert torch.equal(model.base_model.model.transformer.h[0].attn.c_attn.base_layer.weight, frozen)
            left = goal.finished(model).eval()
            assert torch.allclose(left(**x).logits, unmerged, atol=1e-4)
        assert not torch.equal(left.transformer.h[0].attn.c_attn.weight, frozen)
        plain = patched(goal.task, goal.task.baseline(), "dyt+rope", "copied", 0, B, 0)
        assert left.state_dict().keys() == plain.state_dict().keys()
        assert not torch.equal(left.transformer.h[0].ln_1.alpha, plain.transformer.h[0].ln_1.alpha), "trained as well"
        assert not torch.equal(left.transformer.wpe.constant, plain.transformer.wpe.constant)
        assert torch.equal(left.transformer.wte.weight, plain.transformer.wte.weight)
        left.save_pretrained(tmp_path)
        assert difference(type(left).from_pretrained(tmp_path), left, x) == 0

    def test_targets(self):
        _, model = prepared("finetune", lora_rank=2, lora_targets=["c_fc"])
        adapted = {name for name, _ in model.named_parameters() if "lora_A" in name}
        assert len(adapted) == 2
        assert all("mlp.c_fc" in name for name in adapted)
        with pytest.raises(RecipeError, match=r"--lora_targets q_prooj: .*q_prooj"):
            prepared("finetune", lora_rank=2, lora_targets=["q_prooj"])


class TestNames:
    @pytest.mark.parametrize(
        ("name", "changed", "message"),
        [
            ("distill", {}, "no method is called 'distill'. Did you mean 'distil'? There are finetune and distil"),
            ("annealed", {}, "no method is called 'annealed'. There are finetune and distil"),
            ("distil", {"distil_weight": 0.0}, "--distil_weight must be above 0 and at most 1, not 0.0"),
            ("distil", {"distil_temperature": 0.0}, "--distil_temperature must be positive"),
            ("distil", {"distil_hidden": -1.0}, "--distil_hidden must be at least 0"),
            ("finetune", {"lora_targets": ["q"]}, "--lora_targets needs --lora_rank"),
        ],
    )
    def test_refused(self, name, changed, message):
        with pytest.raises(RecipeError) as error:
            methods.check_method(name, settings(**changed))
        assert message in str(error.value)

    def test_a_teacher_is_needed(self):
        with pytest.raises(RecipeError, match="needs the unpatched model"):
            methods.objective("distil", Tiny(), None, settings(), "dyt")

    def test_tried_out_on_a_copy(self):
        task = Tiny("bert")
        model = task.baseline()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        methods.try_out("distil", task, model, settings(lora_rank=2), "dyt+rope", "repaired")
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with pytest.raises(RecipeError, match="--start self: a BertForMaskedLM draws no sequences"):
            methods.try_out("finetune", task, model, settings(), "dyt", "self")

    def test_lora_without_peft(self, monkeypatch):
        monkeypatch.setattr(methods.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(RecipeError, match="pip install peft"):
            methods.check_method("finetune", settings(lora_rank=2))

    def test_the_control_is_only_trained(self):
        task = Tiny()
        goal = methods.objective("distil", task, task.baseline, settings(), "control")
        model = task.baseline()
        assert goal.prepare(model) is model


def test_agreement():
    task = Tiny()
    teacher, model = task.baseline(), patched(task, task.baseline(), "rope", "copied", 0, B, 0)
    loader = torch.utils.data.DataLoader(task.train_set(0, 0, 7), B)
    same = agreement(teacher, copy.deepcopy(teacher), task, loader, lambda x: x)
    assert same["divergence"] == pytest.approx(0, abs=1e-6)
    assert same["same_answer"] == 1
    found = agreement(teacher, model, task, loader, lambda x: x)
    batches = list(loader)
    with torch.no_grad():
        rows = [
            (teacher(**task.inputs(b)).logits, model(**task.inputs(b)).logits, b["attention_mask"].bool())
            for b in batches
        ]
    theirs, ours = (torch.cat([row[i][row[2]] for row in rows]) for i in (0, 1))
    expected = F.kl_div(ours.log_softmax(-1), theirs.softmax(-1), reduction="batchmean")
    assert found["divergence"] == pytest.approx(expected.item(), rel=1e-4)
    assert found["same_answer"] == pytest.approx((ours.argmax(-1) == theirs.argmax(-1)).float().mean().item())
    bare = [nn.Module(), nn.Module()]
    states = torch.randn(2, 3, 4)
    for model, value in zip(bare, (states, states * 2), strict=True):
        model.forward = lambda value=value, **_: SimpleNamespace(last_hidden_state=value)
    task.inputs = lambda batch: {}
    found = agreement(*bare, task, [{}], lambda x: x)
    assert found["cosine"] == pytest.approx(1.0)
