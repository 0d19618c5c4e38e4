"""What a repair reports is measured here again: by forwards of the whole model, on sequences that are divided here."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zoo
from sampled import slow_but
from tiny_models import patch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hfpatch.patch import repair_report
from hfpatch.repairs import fits
from hfpatch.repairs.repair import _Repairer
from hfpatch.sites.linear_maps import is_linear_map

WITHOUT_BIASES = ("llama", "gemma", "qwen3", "olmo", "olmo2", "mistral", "nemotron", "granite", "glm", "falcon")
WITH_BIASES = ("gpt2", "opt", "gpt_neox", "bloom", "starcoder2", "stablelm", "phi")
REQUESTS: list[dict[str, Any]] = [
    {"norm": "dyt"},
    {"norm": "derf"},
    {"norm": "fixed"},
    {"pos": "nope"},
    {"norm": "dyt", "pos": "nope"},
]
CALIBRATIONS = ("plain", "duplicates", "near", "bfloat16", "padded")
CASES = [
    (family, request, CALIBRATIONS[(i + j) % len(CALIBRATIONS)])
    for i, family in enumerate(WITHOUT_BIASES + WITH_BIASES)
    for j, request in enumerate(REQUESTS)
]
CASES += [("gpt2", {"mlp": "swiglu"}, "plain"), ("gpt_neox", {"mlp": "swiglu"}, "duplicates")]
DEFAULT = [
    ("llama", {"norm": "dyt"}, "plain"),
    ("olmo", {"norm": "derf"}, "duplicates"),
    ("gemma", {"norm": "dyt", "pos": "nope"}, "plain"),
    ("qwen3", {"pos": "nope"}, "near"),
    ("nemotron", {"norm": "dyt"}, "bfloat16"),
    ("gpt2", {"norm": "dyt"}, "padded"),
    ("llama", {"norm": "fixed"}, "padded"),
]


def model_of(family: str) -> PreTrainedModel:
    """A tiny model whose stream has a mean far above its spread in some channels, as trained ones have."""
    model = zoo.tiny(family, auto_class="AutoModelForCausalLM")[0]
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        table += 2 * table.std() * torch.randn(table.shape[1], generator=torch.Generator().manual_seed(3))
    return model


def calibration(model: PreTrainedModel, kind: str, sequences: int = 24) -> tuple[dict[str, Tensor], list[int]]:
    """Some sequences, and the places of those that judge: every eighth that differs from all before it."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(5, model.config.get_text_config().vocab_size, (sequences, 12), generator=generator)
    data, held_out = {"input_ids": ids}, [*range(7, sequences, 8)]
    if kind == "duplicates":  # of sequences that judge and of others
        ids[8:16] = ids[:8]
        held_out.remove(15)
    if kind == "near":  # one token of twelve differs from the sequence that judges
        ids[3] = ids[7]
        ids[3, 0] += 1
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[::3, 9:] = 0
        data["attention_mask"] = mask
    return data, held_out


class Witness:
    """Measures each kept step anew, by runs of the whole model on the held-out sequences."""

    def __init__(self, original: PreTrainedModel, held: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch):
        self.original, self.held = original, held
        self.mask = held.get("attention_mask", torch.ones_like(held["input_ids"])).bool()
        self.tolerance = 0.1 if original.dtype == torch.bfloat16 else 1e-3
        self.checked: list[str] = []
        self.groups: list[dict[str, list[str]]] = []
        keep, add, roles_of = fits.Fitter.keep_if_nearer, fits.Fitter.__init__, fits.Roles.of

        def of(roles: Any, *args: Any) -> Any:
            self.groups.append((found := roles_of(roles, *args)).readers)
            return found

        def initialised(fitter: Any, new: Any, *rest: Any) -> None:
            self.model = new.model
            add(fitter, new, *rest)

        def kept(fitter: Any, name: str, kind: str, *rest: Any) -> None:
            self.before = copy.deepcopy({n: m for n, m in fitter.new.modules.items() if is_linear_map(m)})
            count = len(fitter.report.steps)
            keep(fitter, name, kind, *rest)
            if len(fitter.report.steps) > count and fitter.report.steps[-1].kept:
                self.check(fitter.report.steps[-1])

        monkeypatch.setattr(fits.Roles, "of", of)
        monkeypatch.setattr(fits.Fitter, "__init__", initialised)
        monkeypatch.setattr(fits.Fitter, "keep_if_nearer", kept)

    def run(self, model: nn.Module, name: str, of: str) -> Tensor:
        """The first input or output of a module in one forward of a model, as rows without padding."""
        seen: list[Tensor] = []

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            value = output if of == "out" else (*args, *kwargs.values())[0]
            seen.append(value[0] if isinstance(value, tuple) else value)

        while name not in dict(model.named_modules()):  # a gate, which the original hasn't
            name = name.rpartition(".")[0]
        replayed = {module: vars(module).pop("forward", None) for module in model.modules()}
        handle = model.get_submodule(name).register_forward_hook(hook, with_kwargs=True)
        with torch.no_grad():
            type(model).forward(model, **self.held)
        handle.remove()
        for module, forward in replayed.items():
            if forward is not None:
                vars(module)["forward"] = forward
        return seen[0].reshape(-1, seen[0].shape[-1])[self.mask.flatten()].double()

    def check(self, step: Any) -> None:
        """Assert that a step's error is that of the model as it is now."""
        name = step.module
        if step.kind == "norm":
            pairs = [(self.run(self.model, name, "out"), self.run(self.original, name, "out"))]
        elif step.kind == "readers":
            group = next(readers for readers in self.groups if name in readers)[name]
            x, pairs = self.run(self.original, name, "in"), []
            with torch.no_grad():
                for one in group:
                    pairs.append((self.run(self.model, one, "out"), self.before[one].double()(x)))
        else:
            return
        shares = [float((y - t).square().mean(0).sum() / t.var(0, correction=0).sum()) for y, t in pairs]
        assert sum(shares) / len(shares) == pytest.approx(step.after, rel=self.tolerance, abs=1e-7), step
        self.checked.append(step.kind)


def unrepaired(original: PreTrainedModel, request: dict[str, Any], data: dict[str, Tensor]) -> Any:
    """The patched model that a repair starts from."""
    if request != {"norm": "fixed"}:
        return patch(copy.deepcopy(original), **request)
    with pytest.MonkeyPatch.context() as patched:  # its constants are measured, and nothing is fitted
        patched.setattr(_Repairer, "_repair", lambda *_: None)
        patched.setattr(_Repairer, "_require_usable", lambda *_: None)
        return patch(copy.deepcopy(original), calibration=[data], **request)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("family", "request_", "kind"), slow_but(CASES + DEFAULT, DEFAULT))
def test_what_is_reported_is_what_the_model_computes(
    family: str, request_: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = model_of(family)
    half = kind == "bfloat16"
    if half:
        original = original.to(torch.bfloat16)
    data, places = calibration(original, kind, 96 if request_ == {"norm": "fixed"} else 24)  # or it isn't repaired
    held = {name: value[places] for name, value in data.items()}
    witness = Witness(original, held, monkeypatch)
    plain = unrepaired(original, request_, data)
    model = patch(copy.deepcopy(original), calibration=[data], **request_)
    report = repair_report(model)
    assert report.held_out == len(places)
    assert report.distinct == len({tuple(row) for row in data["input_ids"].tolist()})

    def divergence(other: nn.Module) -> float:
        with torch.no_grad():
            p, q = (torch.log_softmax(m(**held).logits.float(), -1) for m in (original, other))
        return float((p.exp() * (p - q)).sum(-1)[witness.mask].mean())

    close = {"rel": 0.05 if half else 1e-3, "abs": 1e-6}
    assert report.before == pytest.approx(divergence(plain), **close)
    assert (report.after if report.kept else report.before) == pytest.approx(divergence(model), **close)
    assert divergence(model) <= divergence(plain)
    assert {step.kind for step in report.steps if step.kept} & {"norm", "readers"} == set(witness.checked)
    assert report.kept or request_.get("norm") not in ("dyt", "derf")


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_constant_that_no_parameter_takes_is_not_fitted(family: str) -> None:
    """Llama's readers have no bias: the constant of their fit is in the norm's shift, without which it is lost."""
    original = model_of(family)
    data, places = calibration(original, "plain")
    model = patch(copy.deepcopy(original), norm="dyt", calibration=[data])
    before = repair_report(model)
    with torch.no_grad():  # control
        for module in model.modules():
            if type(module).__name__ == "DynamicTanh":
                module.shift.zero_()
    held = data["input_ids"][places]
    with torch.no_grad():
        p, q = (torch.log_softmax(m(held).logits, -1) for m in (original, model))
    assert float((p.exp() * (p - q)).sum(-1).mean()) > 3 * before.after


def test_the_shift_takes_no_constant_where_others_read_the_norm() -> None:
    """A parallel block's norm is read by attention and MLP: both are one group. A residual that reads it isn't."""
    original = zoo.tiny("falcon", auto_class="AutoModelForCausalLM", parallel_attn=True, bias=False)[0]
    data, _ = calibration(original, "plain")
    seen: list[dict[str, tuple[str, str]]] = []
    with pytest.MonkeyPatch.context() as patched:
        roles_of = fits.Roles.of

        def of(roles: Any, *args: Any) -> Any:
            seen.append((found := roles_of(roles, *args)).shifts)
            return found

        patched.setattr(fits.Roles, "of", of)
        patch(copy.deepcopy(original), norm="dyt", calibration=[data])
        assert any(seen)
        seen.clear()
        for block in original.transformer.h:
            block.register_forward_hook(lambda block, args, out: out)
            block.mlp.register_module("extra", _Reader(block.mlp))
            block.mlp.forward = block.mlp.extra.forward
        patch(copy.deepcopy(original), norm="dyt", calibration=[data])
        assert not any(seen)


class _Reader(nn.Module):
    """An MLP that reads its input once more, without a linear map."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.__dict__["mlp"] = mlp

    def forward(self, x: Tensor) -> Tensor:
        return type(self.mlp).forward(self.mlp, x) + 0.1 * x.sin()
