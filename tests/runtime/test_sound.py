"""Sound: any length, Whisper's kind beyond its window, and no position left where wav2vec 2.0's convolution was."""

from __future__ import annotations

import proof
import pytest
import torch
from proof import DIFFERENT, EXACT, HOMES, STACKS

from hfpatch.errors import NotPreservedWarning
from hfpatch.patch import patch_model
from hfpatch.runtime.length_lenses import CountedLength
from hfpatch.sites.architectures.architecture import ZEROS

OWNERS = proof.here()
WINDOWED = [
    owner
    for owner in OWNERS
    if any(isinstance(limit, CountedLength) and limit.argument == "input_features" for _, limit in STACKS[owner].limits)
]
CONVOLVED = [
    owner
    for owner in OWNERS
    if ("pos_conv_embed", ZEROS) in STACKS[owner].removal and owner != "SEWEncoder"  # which pools first
]


def longer(inputs: dict, times: float) -> dict:
    features = inputs["input_features"]
    frames = int(times * features.shape[-1])
    noise = torch.randn(*features.shape[:-1], frames, generator=torch.Generator().manual_seed(0))
    given = {**inputs, "input_features": noise.to(features.dtype)}
    if "input_features_mask" in inputs:
        given["input_features_mask"] = torch.ones(len(features), frames, dtype=torch.long)
    return given


@pytest.mark.sample(3)
@pytest.mark.parametrize("owner", WINDOWED)
def test_windows_of_any_length(owner: str) -> None:
    model, inputs = proof.patched(HOMES[owner])
    for times in (4, 0.5):
        found = dict(proof.floating_tensors(proof.run(model, longer(inputs, times))))
        assert found
        assert all(value.isfinite().all() for value in found.values())
    plain, inputs = proof.tiny(HOMES[owner])
    with pytest.raises((ValueError, RuntimeError)):  # the control
        proof.run(plain, longer(inputs, 4))


@pytest.mark.sample(2)
@pytest.mark.parametrize("owner", CONVOLVED)
def test_without_positions_frames_may_change_places(owner: str) -> None:
    states = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1))
    for pos, blind in (("nope", True), ("rope", False)):
        model, _ = proof.patched(HOMES[owner], pos)
        encoder = proof.stack_of(model, owner).owner
        with torch.no_grad():
            before, after = (encoder(given.clone()).last_hidden_state for given in (states, states[:, order]))
        change = proof.difference({"states": after}, {"states": before[:, order]})
        assert change <= EXACT if blind else change >= DIFFERENT


def test_the_host_reads_the_row_that_is_left() -> None:
    """Whisper's kind adds `embed_positions.weight` as it is: that must be the constant, not scratch."""
    model, inputs = proof.tiny("voxtral_encoder")
    expected = model.embed_positions.weight.mean(0)
    with pytest.warns(NotPreservedWarning):
        patch_model(model, pos="nope")
    torch.testing.assert_close(model.embed_positions.constant.data, expected.detach())
    assert torch.equal(model.embed_positions.weight, model.embed_positions.constant.expand(64, -1))
    out = proof.run(model, inputs).last_hidden_state
    with torch.no_grad():
        model.embed_positions.constant[::2] += 1.0
    assert proof.difference({"o": proof.run(model, inputs).last_hidden_state}, {"o": out}) >= DIFFERENT
