"""What the recipes minimise and compare, on tiny models with power."""

import copy

import methods
import pytest
import torch
import torch.nn.functional as F
from tiny_models import tiny

B, T = 4, 10


@pytest.fixture
def batch():
    """Token ids of unequal lengths, padded on the right."""
    ids = torch.randint(3, 97, (B, T), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(T) < torch.tensor([T, 7, 5, 3])[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": (ids * mask).masked_fill(mask == 0, -100)}


@pytest.fixture
def pair():
    """A teacher, and a copy of it with rotary positions."""
    teacher = tiny("gpt2", "AutoModelForCausalLM").eval()
    return teacher, methods.patched(copy.deepcopy(teacher), "rope", "copied", []).eval()


def test_distance_is_the_mean_divergence_of_what_isnt_padding(batch, pair):
    teacher, model = pair
    kept = batch["attention_mask"].bool()
    with torch.no_grad():
        theirs, ours = (one(**methods.inputs_of(batch)).logits[kept] for one in pair)
    expected = F.kl_div(ours.log_softmax(-1), theirs.softmax(-1), reduction="batchmean").item()
    assert methods.distance(model, teacher, batch).item() == pytest.approx(expected, rel=1e-4)
    found = methods.agreement(teacher, model, [batch])
    assert found["divergence"] == pytest.approx(expected, rel=1e-4)
    assert found["same answer"] == pytest.approx((ours.argmax(-1) == theirs.argmax(-1)).float().mean().item())
    assert methods.agreement(teacher, teacher, [batch])["divergence"] == pytest.approx(0, abs=1e-6)


def test_distilling_mixes_the_own_loss_with_the_teacher_in_one_run_of_the_student(batch, pair):
    teacher, model = pair
    runs = []
    model.register_forward_hook(lambda *_: runs.append(1))
    mixed = methods.distil(model, teacher, batch, share=0.25)
    assert len(runs) == 1
    expected = 0.75 * methods.task_loss(model, None, batch) + 0.25 * methods.distance(model, teacher, batch)
    assert mixed.item() == pytest.approx(expected.item(), rel=1e-5)
    assert methods.distil(model, teacher, batch, share=1).item() == methods.distance(model, teacher, batch).item()
    mixed.backward()
    assert all(p.grad is None for p in teacher.parameters())


def test_states_of_an_encoder(batch):
    teacher = tiny("bert").eval()
    model = methods.patched(copy.deepcopy(teacher), "dyt", "copied", []).eval()
    far = methods.distance(model, teacher, batch).item()
    assert 0 < far == pytest.approx(1 - methods.agreement(teacher, model, [batch])["cosine"], abs=1e-6)


@pytest.mark.parametrize(("start", "init"), [("auto", "auto"), ("copied", "copy"), ("reset", "reset")])
def test_patched_copies_start_as_asked(start, init):
    model = methods.patched(tiny("gpt2"), "dyt", start, [])
    assert model.config.hfpatch["request"][0].get("init", "auto") == init


def test_dropout_is_off_and_stays_on_record():
    model = tiny("gpt2", "AutoModelForCausalLM", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3)
    given = {"input_ids": torch.arange(8)[None]}
    with torch.no_grad():
        differ = [not torch.equal(*(model.train()(**given).logits for _ in range(2)))]  # control
        methods.switch_off_dropout(model)
        differ.append(not torch.equal(*(model.train()(**given).logits for _ in range(2))))
    assert differ == [True, False]
    assert model.config.attn_pdrop == 0.3
