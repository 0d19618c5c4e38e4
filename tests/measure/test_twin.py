"""Small models that stand for large ones, copies, and a state for measuring: nothing of the model changes."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
import zoo
from tiny_models import inputs, patch, tiny, tiny_config
from torch import nn

from hfpatch.measure.copies import copy_of
from hfpatch.measure.quiet_forward import inference_state
from hfpatch.measure.twin import twin
from hfpatch.runtime.patch_errors import UnsupportedError


def on_meta(config: transformers.PreTrainedConfig, auto: str = "AutoModel") -> nn.Module:
    with torch.device("meta"):
        return getattr(transformers, auto).from_config(config)


class TestSmall:
    def test_every_kind_of_layer_is_there(self) -> None:
        kinds = ["conv", "conv", "conv", "full_attention", "conv"]
        config = transformers.Lfm2Config(layer_types=kinds, num_hidden_layers=5, hidden_size=128, vocab_size=300)
        small, _ = twin(on_meta(config))
        assert len(small.layers) < 5
        assert {type(part).__name__ for part in small.modules()} >= {"Lfm2ShortConv", "Lfm2Attention"}

    def test_a_closed_gate_is_opened(self) -> None:
        model, given = zoo.tiny("mllama_vision_model")
        gates = [name for name, parameter in model.named_parameters() if "gate" in name and parameter.numel() == 1]
        small, _ = twin(model, given)
        assert gates
        assert all(float(small.get_parameter(name)) != 0.0 for name in gates)
        assert any(float(model.get_parameter(name)) == 0.0 for name in gates)


class TestChain:
    """The cheapest candidate that is built like the model wins."""

    def test_inputs_of_the_users_keep_the_widths(self) -> None:
        model = tiny("whisper", encoder_layers=4, decoder_layers=5)
        given, config = inputs(model), copy.deepcopy(model.config)
        small, used = twin(model, given)
        assert (small.config.encoder_layers, small.config.decoder_layers) == (2, 2)
        assert small.config.d_model == config.d_model
        assert torch.equal(used["decoder_input_ids"], given["decoder_input_ids"])
        assert model.config.to_dict() == config.to_dict()
        model = tiny("vit")
        assert twin(model, inputs(model))[1]["pixel_values"].dtype == torch.float64

    def test_parameters_tied_by_hand_are_seen(self) -> None:
        model = tiny("gpt2", n_layer=3)
        model.h[2].ln_1.weight = model.h[2].ln_2.weight
        small, _ = twin(model)
        assert small.h[2].ln_1.weight is small.h[2].ln_2.weight

    def test_what_has_no_twin_is_refused(self) -> None:
        model = on_meta(tiny_config("gpt2"))
        model.h[1].mlp.dropout = nn.AlphaDropout(0.1)  # which its config doesn't tell
        with pytest.raises(UnsupportedError, match=r"example_inputs=\{"):
            twin(model)
        with pytest.raises(UnsupportedError, match="GPT2Model"):
            twin(tiny("gpt2"), {"input_ids": torch.ones(1, 4)})

    @pytest.mark.parametrize("patched", [(0, 1), (2, 3)])
    def test_a_patch_of_some_layers(self, patched: tuple[int, int]) -> None:
        """Layers of another kind by number: no smaller depth has them, so the model itself is copied."""
        model = patch(tiny("gpt2", n_layer=4), norm="dyt", only=[f"*.h.{i}.*" for i in patched])
        small, _ = twin(model)
        assert len(small.h) == 4
        assert small.h[2] is not model.h[2]
        assert [type(block.ln_1).__name__ == "DynamicTanh" for block in small.h] == [i in patched for i in range(4)]

    def test_a_patch_of_later_layers_can_be_followed_by_another(self) -> None:
        model = patch(tiny("gpt2", n_layer=4), norm="rms", only="*.h.3.*")
        patch(model, norm="fixed", only="*.h.2.*", calibration=[inputs(model)] * 2)
        assert [type(block.ln_1).__name__ for block in model.h] == ["LayerNorm"] * 2 + ["FixedNorm", "RMSNormExtended"]


def test_buffers_of_one_axis_are_never_shared() -> None:
    """transformers' dynamic scaling writes its frequencies in place where an input is longer than before."""
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = tiny("llama", max_position_embeddings=16, rope_parameters=scaling)
    before = model.rotary_emb.inv_freq.clone()
    copied = copy_of(model, share=True)
    copied(input_ids=torch.ones(1, 40).long())
    assert not torch.equal(copied.rotary_emb.inv_freq, before)  # control
    assert torch.equal(model.rotary_emb.inv_freq, before)


def test_a_model_goes_on_collecting_its_outputs() -> None:
    """transformers puts hooks in for that at the first forward that asks, once."""
    model = tiny("llama")
    for _ in range(2):
        with inference_state(model):
            assert len(model(**inputs(model), output_hidden_states=True).hidden_states) == 3
    assert len(model(**inputs(model), output_hidden_states=True).hidden_states) == 3
