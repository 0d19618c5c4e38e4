"""Going through a model block after block: the model's own forward, run again only where something may have changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from tiny_models import changes, fingerprint, inputs, tiny
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hfpatch.errors import OptionError
from hfpatch.patch import patch_model, repair_report
from hfpatch.repairs import calibration
from hfpatch.repairs.block_replay import BlockReplay, segments_of
from hfpatch.repairs.calibration import Calibration, calibration_for, read_calibration
from hfpatch.repairs.distance import token_distances
from hfpatch.runtime.patch_errors import PatchError, UnsupportedError
from hfpatch.sites.linear_maps import is_linear_map


def norms_in(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "Norm" in type(module).__name__]


def walk_of(model: PreTrainedModel, data: list[Any] | None = None) -> BlockReplay:
    data = [inputs(model), inputs(model, 1)] if data is None else data
    return BlockReplay(model, Calibration(data).batches(model))


@pytest.mark.parametrize("family", ["gpt2", "bert", "bart", "whisper", "vit", "t5", "gptj", "mixtral"])
def test_replaying_blocks_gives_what_the_model_gives(family: str) -> None:
    """Block after block is replaced by what it returned, the one before the last forgotten: nothing later moves."""
    model, given = zoo.tiny(family) if family not in ("whisper", "vit") else (tiny(family), inputs(tiny(family)))
    walk = walk_of(model, [given])
    segments = segments_of(walk, norms_in(model))
    assert not any(segment.shared for segment in segments)
    blocks = [segment for segment in segments if segment.block]
    assert len(blocks) >= 2
    want = walk.forward(0)[0]
    before = fingerprint(model)
    latest: dict[str, str] = {}
    for segment in blocks:
        assert segment.block is not None
        walk.freeze(segment.block, 0)
        stack = walk.stacks[segment.block]
        if stack in latest:
            walk.discard(latest[stack])
        latest[stack] = segment.block
        with walk.replaying(0):
            assert torch.equal(walk.forward(0)[0], want)
    assert not changes(before, fingerprint(model))
    for block in walk.forms:
        walk.release(block)
    assert torch.equal(walk.forward(0)[0], want)


@pytest.mark.parametrize(
    ("family", "chains", "others"),
    [
        ("gpt2", {"h"}, set()),
        ("depth_anything", {"neck.fusion_stage.layers"}, {"neck.reassemble_stage.layers", "neck.convs"}),
        ("mask2former", {"transformer_module.decoder.layers"}, {"pixel_level_module.encoder.swin.encoder.layers"}),
    ],
)
def test_a_blocks_output_is_dropped_only_where_the_next_block_alone_reads_it(
    family: str, chains: set[str], others: set[str]
) -> None:
    model, given = zoo.tiny(family)
    walk = walk_of(model, [given])
    segments_of(walk, norms_in(model))
    walk.forward_and_store(0, torch.zeros(1, dtype=torch.long))
    assert chains <= walk.chains
    assert others <= {*walk.stacks.values()}
    assert not walk.chains & others


@pytest.mark.slow
def test_norms_that_run_several_times_may_have_their_channels_first() -> None:
    """EoMT upsamples three times by the same blocks, with norms of (B, C, H, W)."""
    model, given = zoo.tiny("eomt")
    patch_model(model, norm="dyt", init="copy", calibration=zoo.noise(given, 8, seed=0))
    steps = [step for step in repair_report(model).steps if "layernorm2d" in step.module]
    assert len(steps) == 2
    assert all(step.kept and step.after < 0.5 * step.before for step in steps)


def test_errors_of_ours_pass_and_others_are_typed() -> None:
    model = tiny("gpt2")
    walk = walk_of(model)
    for raised, expected in ((OptionError("ours"), "^ours$"), (KeyError("theirs"), "can't be repaired.*KeyError")):
        with (
            model.wte.register_forward_pre_hook(lambda *_, raised=raised: (_ for _ in ()).throw(raised)),
            pytest.raises(PatchError, match=expected),
        ):
            walk.forward(0)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["blt_local_encoder", "blt_local_decoder", "informer", "inkling_text"])
def test_unusual_models_are_repaired(family: str) -> None:
    """Their output is a tuple, or a tensor; a list of modules has None in it; a module that reads x takes more."""
    model, given = zoo.tiny(family)
    patch_model(model, norm="dyt", init="copy", calibration=zoo.noise(given, 8, seed=0))
    report = repair_report(model)
    assert report.kept
    assert report.after < 0.5 * report.before


def test_outputs_of_another_length_are_refused() -> None:
    """VITS chooses how long its speech is."""
    with pytest.raises(UnsupportedError, match=r"\(1, 8, 2\) and \(1, 6, 2\)"):
        token_distances({"waveform": torch.ones(1, 8, 2)}, {"waveform": torch.ones(1, 6, 2)})
    assert token_distances({"waveform": torch.ones(1, 8, 2)}, {"waveform": torch.zeros(1, 8, 2)})[1].mean() == 1


@pytest.mark.slow
@pytest.mark.parametrize(("family", "says"), [("diffusion_gemma", "its forward fails"), ("lightglue", "runs on some")])
def test_models_whose_blocks_cant_be_run_alone_are_refused(family: str, says: str) -> None:
    """A decoder that reads the cache which the encoder's blocks write; a model that leaves early on easy inputs."""
    model, given = zoo.tiny(family)
    before = fingerprint(model)
    with pytest.raises(UnsupportedError, match=says):
        patch_model(model, norm="dyt", init="copy", calibration=zoo.noise(given, 32, seed=1))
    assert not changes(before, fingerprint(model))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["depth_anything", "mask2former"])
def test_models_that_read_features_of_several_depths_are_repaired(family: str) -> None:
    model, given = zoo.tiny(family)
    patch_model(model, norm="dyt", init="copy", calibration=zoo.noise(given, 8, seed=0))
    assert repair_report(model).steps


def test_a_replayed_block_doesnt_run_and_the_rest_stops_early() -> None:
    model = tiny("gpt2", n_layer=4)
    walk = walk_of(model)
    segments_of(walk, norms_in(model))
    ran: list[int] = []
    for i, block in enumerate(model.h):
        block.mlp.register_forward_hook(lambda *a, i=i: ran.append(i))
    walk.freeze("h.0", 0)
    ran.clear()
    walk.run(0, outputs=["h.1"])
    assert ran == [1]  # neither what is replayed nor what comes later
    ran.clear()
    walk.run(1, outputs=["h.1"])
    assert ran == [0, 1]  # another batch, for which nothing was kept
    kept, other = (walk.run(i, outputs=["h.1"])["h.1"] for i in (0, 1))
    model.h[0].mlp.c_proj.weight.data.zero_()
    assert torch.equal(walk.run(0, outputs=["h.1"])["h.1"], kept)
    assert not torch.equal(walk.run(1, outputs=["h.1"])["h.1"], other)


def test_a_settled_part_runs_once_and_gives_the_same_bits() -> None:
    """What ends before the first module that will still change is stored; a part that holds others replaces them."""
    model = tiny("gpt2")
    walk = walk_of(model)
    plain = BlockReplay(model, walk.batches)
    block = next(segment for segment in segments_of(walk, norms_in(model)) if segment.block)
    assert {"h.0.attn", "h.0.attn.c_attn", "h.0.mlp.c_fc"} <= set(block.parts)
    assert not {"h.0", "h.0.ln_1", "h.0.attn.attn_dropout"} & set(block.parts)
    ran: list[str] = []
    for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc"):
        module = model.h[0].get_submodule(name)
        module.forward = lambda x, name=name, inner=module.forward: ran.append(name) or inner(x)  # type: ignore[func-returns-value]
    walk.parts = block.parts

    def replay(first: str | None, point: str) -> list[str]:
        walk.unsettled = first
        ran.clear()
        found, calls = walk.run(0, inputs=[point])[point], list(ran)
        assert torch.equal(found, plain.run(0, inputs=[point])[point])
        return calls

    assert replay("h.0.ln_1", "h.0.ln_2") == ["attn.c_attn", "attn.c_proj"]  # control: nothing is settled
    assert replay("h.0.attn.c_proj", "h.0.ln_2") == ["attn.c_attn", "attn.c_proj"]
    assert replay("h.0.ln_2", "h.0.ln_2") == ["attn.c_proj"]
    assert replay("h.0.ln_2", "h.0.ln_2") == []
    assert replay("h.0.mlp.c_proj", "h.0.mlp.c_proj") == ["mlp.c_fc"]
    assert {key[0] for key in walk._stored} == {"h.0.attn", "h.0.mlp.c_fc"}
    walk.release_parts()
    assert replay(None, "h.0.ln_2") == ["attn.c_attn", "attn.c_proj"]


def test_a_part_that_writes_to_its_input_isnt_stored() -> None:
    model = tiny("gpt2")
    inner = model.h[0].mlp.forward
    model.h[0].mlp.forward = lambda x: inner(x.mul_(1))
    walk = walk_of(model)
    first, second = (one for one in segments_of(walk, norms_in(model)) if one.block)
    assert "h.0.mlp" not in first.parts
    assert "h.1.mlp" in second.parts


def test_linear_maps() -> None:
    assert is_linear_map(nn.Linear(3, 4))
    assert is_linear_map(Conv1D(3, 4))
    assert not is_linear_map(nn.Conv1d(3, 4, 1))
    assert not is_linear_map(nn.Embedding(3, 4))
    assert not is_linear_map(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))
    packed = nn.Linear(3, 4)
    packed._parameters["weight"] = nn.Parameter(torch.zeros(6, 1, dtype=torch.uint8), requires_grad=False)
    assert not is_linear_map(packed)


# Batches


def test_sequences_held_out() -> None:
    """Every eighth, two of fewer, or the last of two or three, in batches of their own."""
    model = tiny("gpt2")
    for sizes, held in (((2,), [1]), ((1, 1), [1]), ((3, 2), [1, 3]), ((8,), [3, 7]), ((5, 12), [7, 15])):
        ids = torch.randint(5, 90, (sum(sizes), 6))
        data = Calibration(list(ids.split(sizes))).batches(model)
        sides: dict[bool, list[Tensor]] = {True: [], False: []}
        for i in range(len(data)):
            sides[data[i].judges].append(data.inputs(i)["input_ids"])
        assert torch.equal(torch.cat(sides[True]), ids[held])
        assert torch.equal(torch.cat(sides[False]), torch.stack([row for i, row in enumerate(ids) if i not in held]))
        assert (data.sequences, data.distinct, data.tokens) == (sum(sizes),) * 2 + (6 * (sum(sizes) - len(held)),)


def test_many_sequences_are_run_some_at_a_time() -> None:
    model = tiny("gpt2", n_positions=512)
    ids = torch.randint(5, 90, (40, 300))
    data = Calibration([ids]).batches(model)
    assert [data[i].sequences for i in range(len(data))] == [3] * 11 + [2] + [3, 2]
    assert torch.equal(torch.cat([data.inputs(i)["input_ids"] for i in data.held_out_batches()]), ids[7::8])


def test_an_endless_generator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_MOST", 10)
    endless = iter(lambda: torch.ones(3, 4).long(), None)
    with pytest.raises(OptionError, match="generator"):
        Calibration(endless).batches(tiny("gpt2"))


def test_rows_of_activations() -> None:
    model = tiny("bart")
    given = {"input_ids": torch.arange(12).view(3, 4), "decoder_input_ids": torch.ones(3, 3).long()}
    given |= {"attention_mask": torch.tensor([[0, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 1]])}
    given |= {"decoder_attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 1]])}
    data = Calibration([given]).batches(model)  # the third judges, in a batch of its own
    valid = data.rows(0, torch.Size([2, 4, 7]), decoder=False)
    assert valid.tolist() == [False, True, True, True, True, True, True, False]
    assert data.rows(0, torch.Size([2, 3, 7]), decoder=True).tolist() == [True, True, False, True, True, True]
    assert data.rows(0, torch.Size([6, 7]), decoder=True).tolist() == [True, True, False, True, True, True]
    assert data.rows(0, torch.Size([2, 5, 7]), decoder=True).all()  # no mask of that shape
    assert data.rows(1, torch.Size([1, 4, 7]), decoder=False).tolist() == [True] * 4
    with pytest.raises(OptionError):
        data.rows(0, torch.Size([3, 7]), decoder=False)


def test_labels_become_a_decoders_input() -> None:
    model = tiny("bart", "AutoModelForSeq2SeqLM")
    ids, labels = torch.ones(2, 5).long(), torch.tensor([[9, 8, 2], [7, 2, -100]])
    [given] = read_calibration({"input_ids": ids, "labels": labels}, model)
    assert given["decoder_input_ids"].tolist() == [[3, 9, 8], [3, 7, 2]]
    assert given["decoder_attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert "labels" not in given
    [alone] = read_calibration({"input_ids": ids}, model)
    assert alone["decoder_input_ids"][:, 0].tolist() == [3, 3]


@pytest.mark.parametrize("shuffled", [False, True])
def test_what_is_tried_leaves_no_trace(shuffled: bool) -> None:
    """Neither does a loader that draws its order."""
    model = tiny("gpt2").train()
    loader = DataLoader(torch.randint(5, 90, (8, 6)), batch_size=4, shuffle=shuffled)
    before = fingerprint(model)
    calibration_for(model, loader, None)
    assert not changes(before, fingerprint(model))
