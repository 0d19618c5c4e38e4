"""What hosts derive from a length in their config: other weights, buffers, settings of biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import proof
import pytest
import tiny_models
import torch
import zoo
from position_checks import patched
from position_families import make
from rope_proof import floating_tensors

from hfpatch.core.transaction import Transaction
from hfpatch.plan import plan_patch
from hfpatch.planners.config_diff import ConfigDiff
from hfpatch.runtime.patch_errors import UnsupportedError

NEW = 512
RELATIVE = {"relative_attention": True, "position_biased_input": True, "pos_att_type": ["c2p", "p2c"]}
SETTINGS: dict[str, dict[str, Any]] = {"deberta": RELATIVE, "deberta-v2": {**RELATIVE, "position_buckets": 8}}
# hosts that keep buffers of the table's length, saved or not; biases as long as the table; a table in a buffer
CASES = [
    *(("bros", f"{pos}:max_positions={NEW}") for pos in ("learned", "rope")),
    *((name, f"learned:max_positions={NEW}") for name in ("deberta-v2", "nystromformer", "openai-gpt")),
    *((name, f"sinusoidal:max_positions={NEW}") for name in ("deberta", "yoso")),
    ("ctrl", f"rope:max_positions={NEW}"),
]


def tiny(model_type: str) -> tuple[Any, dict[str, Any]]:
    return zoo.tiny(model_type, **SETTINGS.get(model_type, {}))


@pytest.mark.sample(3)
@pytest.mark.parametrize(("model_type", "pos"), CASES)
def test_reads_the_new_length_now_and_when_it_is_opened(model_type: str, pos: str, tmp_path: Path) -> None:
    model, inputs = tiny(model_type)
    patched(model, pos=pos)
    given = proof.lengthened(inputs, 64)
    assert given is not None
    expected = [value for _, value in floating_tensors(proof.run(model, given))]
    loaded = proof.opened(model, tmp_path)
    seen = [value for _, value in floating_tensors(proof.run(loaded, given))]
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(seen, expected, strict=True))
    ours, theirs = dict(model.named_buffers()), dict(loaded.named_buffers())
    assert ours.keys() == theirs.keys()
    scratch = ("attn.bias", "position_embeddings.weight")  # a window made in the forward, a table that is computed
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if not name.endswith(scratch))


@pytest.mark.parametrize("model_type", ["deberta", "deberta-v2"])
def test_distances_keep_their_number(model_type: str) -> None:
    """DeBERTa's relative table (or its logarithmic buckets) is as long as the other one unless the config says more."""
    model, inputs = tiny(model_type)
    old, before = model.config.max_position_embeddings, proof.run(model, inputs)
    patched(model, pos=f"learned:max_positions={NEW}")
    assert (model.config.max_position_embeddings, model.config.max_relative_positions) == (NEW, old)
    after = proof.run(model, inputs)
    assert torch.equal(after.last_hidden_state, before.last_hidden_state)


@pytest.mark.parametrize("pos", ["learned", "rope"])
def test_other_weights_are_refused_before_anything_changes(pos: str) -> None:
    """ProphetNet's decoder has a table as long as its encoder's, which isn't known how to change."""
    model, _ = zoo.tiny("prophetnet")
    before = tiny_models.fingerprint(model)
    message = r"decoder.position_embeddings.weight: the shape also depends on max_position_embeddings=\d+,"
    with pytest.raises(UnsupportedError, match=message):
        patched(model, pos=f"{pos}:max_positions={NEW}")
    assert tiny_models.changes(before, tiny_models.fingerprint(model)) == []
    if pos == "rope":
        assert plan_patch(model, pos="rope").lengths == []


def test_what_the_patch_has_changed_itself_stays() -> None:
    model = make("whisper")
    derived = ConfigDiff([("model.decoder", "max_target_positions", 31, 99)])
    derived.apply(model, Transaction())
    assert model.model.decoder.max_target_positions == 32
    derived = ConfigDiff([("model.decoder", "max_target_positions", 32, 99)])
    edits = Transaction()
    derived.apply(model, edits)
    assert model.model.decoder.max_target_positions == 99
    edits.undo()
    assert model.model.decoder.max_target_positions == 32
