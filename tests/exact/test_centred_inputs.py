"""Streams that begin in no module: the input of the first block is centred in every forward."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from test_fold import distance, silent
from tiny_models import changes, fingerprint, inputs, norms_of, patch, reload, tiny
from torch import Tensor, nn
from transformers.models.whisper.modeling_whisper import WhisperEncoder, WhisperEncoderLayer

from hfpatch.exact.centring import Signal
from hfpatch.exact.search import find_centring
from hfpatch.patch import unpatch_model
from hfpatch.plan import plan_patch
from hfpatch.runtime.lens import LENS
from hfpatch.runtime.norms import AffineNorm
from hfpatch.schemes.norm_schemes import RMS

AUTO = "AutoModelForSpeechSeq2Seq"
PLACE = Signal("model.encoder.layers.0", -1, "hidden_states")


def whisper() -> Any:
    """Its encoder adds convolutions and sinusoids in its forward."""
    return tiny("whisper", AUTO).double()


@pytest.mark.parametrize("mode", ["fold", "parametrize"])
def test_whisper_is_exact_in_full(mode: str, tmp_path: Path) -> None:
    plain = whisper()
    before, model = fingerprint(plain), plain
    original = copy.deepcopy(plain)
    rows = {row.module: row for row in plan_patch(model, norm=RMS(mode)).rows}
    row = rows["model.encoder.layers.0.hidden_states"]
    assert (row.now, row.becomes, row.expected) == ("input", "centred in every forward", "exact")
    assert "model.encoder.embed_positions" not in rows  # what the block centres needs no centring before it
    silent(model, norm=RMS(mode), reversible=True)
    assert not norms_of(model, nn.LayerNorm)
    assert norms_of(model, AffineNorm)
    assert distance(original, model) < 1e-12
    assert "encoder.layers.0.@lens = CentredArgument('hidden_states')" in model.config.hfpatch["edits"]
    for other in (pickle.loads(pickle.dumps(model)), reload(copy.deepcopy(model), tmp_path, AUTO, dtype=torch.float64)):
        assert distance(other, model) == 0
    unpatch_model(model)
    assert not changes(before, fingerprint(model))


def test_control_without_it_the_encoder_is_another_function() -> None:
    model = whisper()
    plain = copy.deepcopy(model)
    patch(model, norm="rms").model.encoder.layers[0].__dict__[LENS] = None
    assert distance(plain, model) > 1e-2


def reads_its_input(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A block of which something else than a norm reads the mean of the stream, faintly."""
    output = _BLOCK(self, hidden_states, *args, **kwargs)
    return output + 1e-6 * hidden_states.mean(-1, keepdim=True) * self.fc2.bias


def read_past_the_blocks(self: Any, *args: Any, **kwargs: Any) -> Any:
    """An encoder that returns what its last block gives beside what its norm makes of it."""
    stream: list[Tensor] = []
    hook = self.layers[-1].register_forward_hook(lambda _, __, output: stream.append(output))
    found = _ENCODER(self, *args, **kwargs)
    hook.remove()
    found.last_hidden_state = found.last_hidden_state + 1e-6 * stream[0]
    return found


_BLOCK, _ENCODER = WhisperEncoderLayer.forward, WhisperEncoder.forward


@pytest.mark.parametrize(
    ("host", "forward"), [(WhisperEncoderLayer, reads_its_input), (WhisperEncoder, read_past_the_blocks)]
)
def test_a_stream_that_something_else_reads_isnt_centred(
    host: type, forward: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "forward", forward)
    found = find_centring(whisper())
    assert PLACE not in found.signals
    assert found.exact_patterns
    assert all(".decoder." in name for name in found.exact_patterns)


def test_a_skip_around_the_stack_has_its_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads the stream before the first block still has its mean."""

    def skip(self: Any, *args: Any, **kwargs: Any) -> Any:
        stream: list[Tensor] = []
        hook = self.conv2.register_forward_hook(lambda _, __, output: stream.append(output))
        found = _ENCODER(self, *args, **kwargs)
        hook.remove()
        found.last_hidden_state = found.last_hidden_state + stream[0].mT
        return found

    monkeypatch.setattr(WhisperEncoder, "forward", skip)
    model = whisper()
    plain = copy.deepcopy(model)
    silent(model, norm="rms")
    assert not norms_of(model, nn.LayerNorm)
    assert distance(plain, model) < 1e-12


@pytest.mark.slow
def test_blocks_that_end_with_a_norm_centre_their_inputs() -> None:
    """A conformer's: what the next block receives is a norm's output, whose gain no weight can centre."""
    found = find_centring(*zoo.tiny("parakeet_encoder"))
    assert found.signals == (Signal("layers.*", -1, "hidden_states"),)
    assert (found.why_approximate, found.refused) == ({}, None)


def test_a_decoder_by_itself_leaves_out_what_its_cross_attention_reads() -> None:
    found = find_centring(tiny("whisper", "AutoModelForCausalLM"))
    assert found.exact_patterns == ()
    assert "leave out encoder_outputs" in str(found.refused)


def test_compiled_without_a_break() -> None:
    model = silent(whisper(), norm="rms").eval()
    encoder, given = model.get_encoder(), inputs(model)["input_features"].double()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(encoder, backend="eager", fullgraph=True)
        assert torch.equal(compiled(given).last_hidden_state, encoder(given).last_hidden_state)
