"""What single model types need besides the general rules of `hfpatch.measure` to be made tiny and run. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hfpatch.measure.shrink import BATCH, IMAGE_SIZE, PATCH_SIZE, TOKENS


@dataclass(frozen=True)
class Override:
    """What one model type needs besides the sizes by name.

    Attributes:
        config: changes of the small configuration; a dotted key reaches a sub-configuration. They also hold wherever
            this type is itself a sub-configuration.
        inputs: added to those that the forward's signature asks for: `...` for the usual input of that name, None to
            leave one out, a function of the `Inputs` that makes them, or a value.
        class_name: the model class, where the base model won't do.
        reason: why this type isn't made at all.
    """

    config: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    class_name: str | None = None
    reason: str | None = None


# --- inputs, as functions of the `Inputs` that makes them ---------------------------------------------------------


def normal(*shape: int) -> Any:
    return lambda make: make.normal(*shape)


def ids(*shape: int, below: int = 100) -> Any:
    return lambda make: make.ids(*shape, below=below)


def ones(*shape: int, dtype: torch.dtype = torch.long) -> Any:
    return lambda make: torch.ones(shape, dtype=dtype)


def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Any:
    return lambda make: torch.zeros(shape, dtype=dtype)


def tensor(values: Any) -> Any:
    return lambda make: torch.tensor(values)


def marked(token: int, count: int) -> Any:
    """Text that begins with `count` places for image features."""
    return lambda make: torch.cat([torch.full((BATCH, count), token), make.ids(BATCH, TOKENS)], 1)


def placed_patches(make: Any) -> torch.Tensor:
    """Four patches, each after its row and column, counted from one."""
    places = torch.tensor([[[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [2.0, 2.0]]] * BATCH)
    return torch.cat([places, make.normal(BATCH, 4, 768)], -1)


IMAGE_TOKEN = 250
PIXELS = 3 * PATCH_SIZE**2  # of one patch
NO_TEXT = {"input_ids": None, "attention_mask": None}
VIDEO = {"pixel_values": normal(BATCH, 4, 3, IMAGE_SIZE, IMAGE_SIZE)}
PAIR = {"pixel_values": normal(1, 2, 3, IMAGE_SIZE, IMAGE_SIZE)}
PATCHES = {"pixel_values": normal(BATCH, 16, PIXELS)}
PACKED = {"pixel_values": normal(16, PIXELS)}
PACKED_FRAMES = {"pixel_values": normal(16, 2 * PIXELS)}
STRIP = {"pixel_values": normal(1, 3, PATCH_SIZE, 16 * PATCH_SIZE), "target_sizes": tensor([[4, 4]])}
SIZED_PATCHES = PATCHES | {"pixel_attention_mask": ones(BATCH, 16), "spatial_shapes": tensor([[4, 4]] * BATCH)}
PLACED_PATCHES = {"flattened_patches": placed_patches, "attention_mask": ones(BATCH, 4)}
BOXES = {"bbox": tensor([[[1, 2, 30, 40]] * TOKENS] * BATCH)}
POINTS = {"input_points": lambda make: make.normal(BATCH, 1, 1, 2) + 30}
CODEBOOKS = {"input_ids": ids(4 * BATCH, TOKENS), "attention_mask": None}
AUDIO = {"input_values": normal(BATCH, 1, 3840)}
SPECTROGRAM = {"spectrogram": normal(BATCH, 20, 80)}
AUDIO_AND_FEATURES = AUDIO | {"input_features": normal(BATCH, 12, 160)}
SERIES = {
    "past_values": normal(BATCH, 11),
    "past_time_features": normal(BATCH, 11, 2),
    "past_observed_mask": ones(BATCH, 11),
    "future_values": normal(BATCH, 4),
    "future_time_features": normal(BATCH, 4, 2),
}
DETR_ENCODER = {
    "vision_features": lambda make: [make.normal(BATCH, 64, 4, 4)],
    "text_features": normal(BATCH, 4, 64),
    "vision_pos_embeds": lambda make: [make.normal(BATCH, 64, 4, 4)],
}
DETR_DECODER = {
    "vision_features": normal(BATCH, 16, 64),
    "text_features": normal(BATCH, 4, 64),
    "vision_pos_encoding": normal(BATCH, 16, 64),
    "spatial_shapes": tensor([[4, 4]]),
}
MASK_DECODER = {
    "decoder_queries": normal(BATCH, 6, 64),
    "backbone_features": lambda make: [make.normal(BATCH, 64, side, side) for side in (16, 8, 4)],
    "encoder_hidden_states": normal(BATCH, 16, 64),
}

# --- configurations that several types need ---------------------------------------------------------------------------

FORECAST = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2, 3], "num_time_features": 2}
FULL_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
PYRAMID = {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]}
SAM = {"prompt_encoder_config.image_embedding_size": 4, "vision_config.num_pos_feats": 32}
FEW_QUERIES = {"num_queries": 4, "group_detr": 2, "init_std": 0.05}  # wider weights overflow the boxes' exponential
FEW_CHOSEN = 2  # of 12 tokens; of more, another norm of the indexer would choose the same
MANY_HEADS = {  # of a layer with more heads, and larger ones, than the rest
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
MIXED_MAMBA = {
    "num_hidden_layers": 4,
    "attention_hidden_size": 128,
    "attention_head_dim": 32,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
}
OCR_NECK = {
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
    "intraclass_block_config": {
        f"{way}_{length}ratio": [
            [1 + tall * (size - 1), 1 + wide * (size - 1)],
            [1, 1],
            [tall * size // 2, wide * size // 2],
        ]
        for way, tall, wide in (
            ("vertical_long_to_small_conv", 1, 0),
            ("horizontal_small_to_long_conv", 0, 1),
            ("symmetric_conv_long", 1, 1),
        )
        for length, size in (("long", 7), ("mid", 5), ("short", 3))
    }
    | {"reduce_channel": [1, 1, 0], "return_channel": [1, 1, 0]},
}
NO_FORWARD = Override(reason="the model class has no forward of its own: its parts are types of their own")
SESSION = Override(reason="takes a video inference session rather than tensors: no inputs written for it")

OVERRIDES: dict[str, Override] = {
    "align": Override({"projection_dim": 640}),
    "audio-spectrogram-transformer": Override(
        {"max_length": 96, "num_mel_bins": 32}, {"input_values": normal(BATCH, 96, 32)}
    ),
    "audioflamingo3_encoder": Override(inputs={"input_features_mask": ones(BATCH, 128)}),
    "autoformer": Override({**FORECAST, "label_length": 4}, SERIES),
    "bamba": Override({"attn_layer_indices": [1], "mamba_n_heads": 8}),
    "bark": NO_FORWARD,
    "blip-2": Override(
        {"image_token_index": IMAGE_TOKEN, "num_query_tokens": 4},
        {"input_ids": marked(IMAGE_TOKEN, 4), "attention_mask": None},
    ),
    "blip_2_qformer": Override(
        inputs={"query_embeds": normal(BATCH, 4, 64), "encoder_hidden_states": normal(BATCH, 16, 64)}
    ),
    "blt": Override({"num_hidden_layers": 2}),
    "blt_local_decoder": Override(
        {"hidden_size_global": 64}, {"inputs_embeds": ..., "patch_embeds": normal(BATCH, 6, 64), **NO_TEXT}
    ),
    "blt_local_encoder": Override(
        {"hidden_size_global": 64},
        {
            "attention_mask": None,
            "num_patches": lambda make: 6,
            "patch_ids": lambda make: torch.arange(TOKENS).expand(BATCH, -1) // 2,
        },
    ),
    "bridgetower_vision_model": Override(inputs={"image": normal(BATCH, 3, IMAGE_SIZE, IMAGE_SIZE)}),
    "bros": Override(inputs={"bbox": normal(BATCH, TOKENS, 8)}),
    "chameleon": Override({"vocabulary_map": {"<image>": IMAGE_TOKEN, "IMGIMGBS": 251, "IMGIMGBT": 252}}),
    "chameleon_vqgan": NO_FORWARD,
    "clap": Override(inputs={"input_features": normal(BATCH, 1, 256, 64)}),
    "clap_audio_model": Override(inputs={"input_features": normal(BATCH, 1, 256, 64)}),
    "clvp": Override({"decoder_config.num_mel_attn_blocks": 2}, {"input_features": normal(BATCH, 80, 64)}),
    "clvp_encoder": Override({"num_attention_heads": 1}),
    "cohere_compass_text": Override({"rope_parameters": FULL_ROPE}),
    "cosmos3_edge_vision": Override(inputs=PACKED),
    "cvt": Override({"embed_dim": (16, 48, 96), "num_heads": (1, 3, 6), "depth": (1, 2, 3)}),
    "dac": Override(inputs={"input_values": normal(BATCH, 1, 4000)}),
    "dbrx": Override({"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0}),
    "decision_transformer": Override(
        inputs={
            "states": normal(BATCH, TOKENS, 17),
            "actions": normal(BATCH, TOKENS, 4),
            "rewards": normal(BATCH, TOKENS, 1),
            "returns_to_go": normal(BATCH, TOKENS, 1),
            "timesteps": lambda make: torch.arange(TOKENS).expand(BATCH, -1),
        }
    ),
    "deepseek_ocr2_encoder": Override(inputs={"num_patches": lambda make: 4}),
    "deepseek_ocr2_text": Override({"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}),
    "deepseek_ocr2_vision": Override({"sam_config.downsample_channels": [32, 64]}),
    "deepseek_v2": Override({"num_experts_per_tok": 2}),
    "depth_anything": Override({"reassemble_hidden_size": 64}),
    "depth_pro": Override(
        {
            "patch_size": 64,
            "image_model_config.num_hidden_layers": 4,
            "patch_model_config.num_hidden_layers": 4,
            "intermediate_hook_ids": (3, 1),
        },
        {"pixel_values": normal(1, 3, 256, 256)},
    ),
    "dia": Override(inputs={"decoder_input_ids": ids(BATCH, TOKENS, 9)}),
    "dia_decoder": Override(
        inputs={"input_ids": ids(BATCH, TOKENS, 9), "encoder_hidden_states": normal(BATCH, TOKENS, 64)}
    ),
    "diffusion_gemma_text": Override({"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 128}),
    "dory": Override({"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3}),
    "dots1": Override({"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}),
    "dots3_note_audio_encoder": Override(
        {"adapter_input_size": 64, "adapter_out_dim": 64, "conv_output_size": 7680},
        {"input_features": normal(1, 128, 64), "chunk_sample_lengths": tensor([10240])},
    ),
    "dots3_note_text": Override(
        {"index_topk": FEW_CHOSEN, "per_layer_config": dict.fromkeys(("1", "2", "3"), MANY_HEADS)}
    ),
    "dots3_note_vision_encoder": Override({"adapter_in_dim": 64, "adapter_out_dim": 64}, PACKED),
    "edgetam_video": SESSION,
    "efficientloftr": Override(
        {
            "hidden_size": 256,
            "stage_num_blocks": [1, 1, 2, 2],
            "num_attention_layers": 1,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
        },
        {"pixel_values": normal(1, 2, 1, 64, 64)},
    ),
    "emu3": Override(
        {"vocabulary_map": {"<|extra_200|>": 249, "<image>": IMAGE_TOKEN, "<|visual token 000000|>": 251}}
    ),
    "emu3_vqgan": NO_FORWARD,
    "esm": Override({"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32}),
    "esmfold2": Override(reason="takes the atoms of a protein complex in ten tensors: no inputs written for it"),
    "falcon_h1": Override({"mamba_chunk_size": 16}),
    "fastspeech2_conformer_hifigan": Override(inputs=SPECTROGRAM),
    "florence_vision": Override(inputs={"hidden_states": normal(BATCH, 3, 64, 64)}),
    "fun_asr_nano": Override({"adaptor_config.intermediate_size": 16}),
    "fun_asr_nano_encoder": Override(
        inputs={"input_features": normal(BATCH, 64, 560), "input_features_mask": ones(BATCH, 64)}
    ),
    "gemma3n_audio": Override(
        inputs={"audio_mel": normal(BATCH, 64, 128), "audio_mel_mask": zeros(BATCH, 64, dtype=torch.bool)}
    ),
    "gemma3n_text": Override({"num_kv_shared_layers": 0}),
    "gemma4_audio": Override({"subsampling_conv_channels": [128, 32]}, {"input_features": normal(BATCH, 64, 128)}),
    "gemma4_vision": Override(
        inputs={
            "pixel_position_ids": lambda make: torch.stack([torch.arange(16) % 4, torch.arange(16) // 4], -1).expand(
                BATCH, -1, -1
            ),
            "pixel_values": normal(BATCH, 16, 3 * PATCH_SIZE**2),
        }
    ),
    "glm5_next": Override({"text_config.linear_num_heads": 4}),
    "glm5_next_text": Override({"index_kpool": 2, "index_topk": FEW_CHOSEN, "linear_num_heads": 4}),
    "glm_image_vision": Override(inputs=PACKED),
    "glm_image_vqmodel": NO_FORWARD,
    "glmasr_encoder": Override(inputs={"input_features": normal(BATCH, 128, 64)}),
    "got_ocr2_vision": Override(inputs={"pixel_values": ...}),
    "gpt_neo": Override({"attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "gradium_phonon_tts": Override({"flow_head_config.condition_dim": 64}),
    "granite4_vision": Override({"deepstack_layer_map": [[-2, 0]], "downsample_rate": "1/2"}),
    "granite_speech5_ctc": Override(inputs={"input_features": normal(BATCH, 64, 320)}),
    "granite_speech5_encoder": Override(inputs={"input_features": normal(BATCH, 64, 320)}),
    "granite_speech_encoder": Override(inputs={"hidden_states": normal(BATCH, 64, 160)}),
    "granite_speech_plus_encoder": Override(inputs={"hidden_states": normal(BATCH, 64, 160)}),
    "granitemoehybrid": Override({"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 8}),
    "hgnet_v2": Override(
        {
            "stem_channels": [3, 8, 8],
            "stage_in_channels": [8, 8, 16, 32],
            "stage_mid_channels": [8, 8, 8, 16],
            "stage_out_channels": [8, 16, 32, 64],
            "hidden_sizes": [8, 16, 32, 64],
        }
    ),
    "hunyuan_vl_vision": Override(inputs=PACKED),
    "hy_v4_vl_vision": Override(inputs=PACKED),
    "idefics": Override(
        inputs={"pixel_values": normal(BATCH, 1, 3, 64, 64), "image_attention_mask": ones(BATCH, TOKENS, 1)}
    ),
    "idefics2_perceiver": Override(inputs={"context": normal(BATCH, 16, 64), "attention_mask": ones(BATCH, 16)}),
    "informer": Override(FORECAST, SERIES),
    "inkling2_vision": Override(
        inputs={"pixel_values": normal(4, 2 * PATCH_SIZE, 2 * PATCH_SIZE, 3), "image_grid_thw": tensor([[1, 2, 2]])}
    ),
    "inkling_audio": Override(inputs={"audio_input_ids": ids(TOKENS, 80)}),
    "inkling_vision": Override(inputs={"pixel_values": normal(BATCH, 2, 64, 64, 3)}),
    "instructblip": Override(
        {"image_token_index": IMAGE_TOKEN, "num_query_tokens": 4},
        {"input_ids": marked(IMAGE_TOKEN, 4), "attention_mask": None, "qformer_input_ids": ids(BATCH, TOKENS)},
    ),
    "instructblipvideo": Override(
        {"video_token_index": IMAGE_TOKEN, "num_query_tokens": 4},
        {
            "input_ids": marked(IMAGE_TOKEN, 16),
            "attention_mask": None,
            "qformer_input_ids": ids(BATCH, TOKENS),
            **VIDEO,
        },
    ),
    "jamba": Override({"attn_layer_period": 2, "attn_layer_offset": 1}),
    "janus_vqgan": Override({"num_patches": 4}),
    "jev": Override(
        inputs={
            "input_ids": ids(1, TOKENS),
            "attention_mask": None,
            "marks": tensor([[3, 6]]),
            "num_options": tensor([[2, 2]]),
            "question_type_ids": tensor([[0, 1]]),
        }
    ),
    "kimi_k25_vision": Override(inputs={"pixel_values": normal(16, 3, PATCH_SIZE, PATCH_SIZE)}),
    "kimi_linear": Override({"linear_num_heads": 4}),
    "kosmos-2": Override(
        {"latent_query_num": 4},
        {"image_embeds_position_mask": lambda make: torch.tensor([[0] + [1] * 4 + [0] * (TOKENS - 5)] * BATCH)},
    ),
    "kosmos_2_5_vision_model": Override(inputs=PLACED_PATCHES),
    "kyutai_speech_to_text": Override(inputs={"input_ids": ids(BATCH, TOKENS, 33)}),
    "layoutlmv3": Override({"coordinate_size": 12, "shape_size": 8}, BOXES | {"pixel_values": None}),
    "levit": Override({"initializer_range": 0.05}),
    "lfm2_moe": Override({"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "lfm3_vl_vision": Override(inputs=PACKED_FRAMES),
    "lightglue": Override(inputs=PAIR),
    "lilt": Override({"hidden_size": 96}, BOXES),
    "llama4_vision_model": Override({"projector_input_dim": 64, "projector_output_dim": 64, "intermediate_size": 256}),
    "lw_detr": Override({"projector_scale_factors": [1.0], **FEW_QUERIES}),
    "lxmert": Override(
        {"l_layers": 2, "x_layers": 2, "r_layers": 2},
        {"visual_feats": normal(BATCH, 4, 2048), "visual_pos": normal(BATCH, 4, 4)},
    ),
    "mamba2": Override({"num_heads": 8, "n_groups": 2}),
    "mimi_decoder": Override(inputs={"latents": normal(BATCH, 64, 8)}),
    "minicpm_ocr_vision": Override({"insert_layer_id": 0, "initializer_range": 0.4}, STRIP),
    "minicpmv4_6_vision": Override({"insert_layer_id": 0, "initializer_range": 0.4}, STRIP),
    "minicpmv4_7_vision": Override({"insert_layer_id": 0, "initializer_range": 0.4}, STRIP),
    "mistral4": Override({"head_dim": 32}),
    "omniasr_audio": Override(inputs=AUDIO),
    "omniasr_ctc": Override(inputs=AUDIO),
    "videoprism_vision_model": Override({"num_spatial_layers": 1, "num_temporal_layers": 1}),
    "mllama_vision_model": Override(
        {"num_global_layers": 2, "intermediate_layers_indices": [0, 1], "vision_output_dim": 192},
        {
            "pixel_values": normal(BATCH, 1, 4, 3, 64, 64),
            "aspect_ratio_ids": ones(BATCH, 1),
            "aspect_ratio_mask": ones(BATCH, 1, 4),
        },
    ),
    "molmo2": Override(inputs={"pixel_values": None}),
    "molmo2_adapter": Override(
        {"vision_feature_layer": [-1, -2]},
        {"image_features": normal(BATCH, 16, 128), "pooled_patches_idx": lambda make: torch.arange(16).reshape(4, 4)},
    ),
    "molmo2_vision": Override(inputs=PATCHES),
    "moonshine_streaming": Override({"num_key_value_heads": 4}),
    "moshi_depth": Override(
        {"input_size": 64},
        {"input_ids": ids(BATCH, 8), "attention_mask": None, "last_hidden_state": normal(BATCH, 1, 64)},
    ),
    "muse_glimmer_assistant": Override(
        inputs={"noise_embeds": normal(BATCH, 4, 64), "context_hidden_states": normal(BATCH, TOKENS, 320)}
    ),
    "muse_glimmer_vision": Override(inputs=PACKED_FRAMES),
    "muse_spark_audio": Override(
        {"num_hidden_layers": 4, "hidden_sizes": (32, 64, 128, 256)}, {"input_values": normal(BATCH, 3840)}
    ),
    "muse_spark_text": Override({"moe_hidden_size": 64}),
    "muse_spark_vision": Override(inputs=PACKED_FRAMES),
    "musicgen": Override(
        class_name="MusicgenForConditionalGeneration", inputs={"decoder_input_ids": ids(4 * BATCH, TOKENS)}
    ),
    "musicgen_decoder": Override(inputs=CODEBOOKS),
    "musicgen_melody": Override(
        class_name="MusicgenMelodyForConditionalGeneration", inputs={"decoder_input_ids": ids(4 * BATCH, TOKENS)}
    ),
    "musicgen_melody_decoder": Override(inputs=CODEBOOKS),
    "neucodec": Override({"quantization_dim": 128}, AUDIO_AND_FEATURES),
    "oneformer": Override({"conv_dim": 256, "hidden_dim": 256}, {"task_inputs": ids(BATCH, 77)}),
    "paddleocr_vl_text": Override(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}}
    ),
    "paddleocr_vl_vision": Override(inputs={"pixel_values": normal(1, 16, 3, PATCH_SIZE, PATCH_SIZE), "grid_thw": ...}),
    "patchtsmixer": Override(inputs={"past_values": normal(BATCH, 32, 1)}),
    "patchtst": Override(inputs={"past_values": normal(BATCH, 32, 1)}),
    "pe_audio": Override(inputs=AUDIO),
    "pe_audio_encoder": Override(inputs=AUDIO),
    "perceiver": Override({"num_self_attends_per_block": 2}, {"inputs": normal(BATCH, 16, 64)}),
    "phi4_multimodal_audio": Override(
        {"nemo_conv_channels": 64, "ext_pw_out_channel": 64, "depthwise_separable_out_channel": 64},
        {"hidden_states": normal(BATCH, 64, 80), "mask": lambda make: None},
    ),
    "pi0": Override(
        inputs={
            "action_embeds": normal(BATCH, 4, 64),
            "pixel_values": normal(BATCH, 1, 3, 64, 64),
            "input_ids": marked(128, 16),
            "attention_mask": ones(BATCH, 16 + TOKENS),
            "pixel_attention_mask": ones(BATCH, 1, dtype=torch.bool),
        }
    ),
    "pix2struct": Override(inputs=PLACED_PATCHES | {"decoder_input_ids": ...}),
    "pix2struct_text_model": Override({"initializer_range": 0.4}),
    "pix2struct_vision_model": Override(inputs=PLACED_PATCHES),
    "pocket_tts": Override({"flow_head_config.condition_dim": 64}),
    "pocket_tts_audio_tokenizer_decoder": Override(inputs={"latents": normal(BATCH, 64, 8)}),
    "pop2piano": Override(
        class_name="Pop2PianoForConditionalGeneration", inputs={"input_features": normal(BATCH, TOKENS, 64), **NO_TEXT}
    ),
    "pp_doclayout_v3": Override({"x4_feat_dim": 8}),  # of the backbone's first stage
    "pp_ocrv5_mobile_det": Override(class_name="PPOCRV5MobileDetForObjectDetection"),
    "pp_ocrv5_mobile_rec": Override(inputs={"pixel_values": normal(BATCH, 3, 96, 320)}),
    "pp_ocrv5_server_det": Override(OCR_NECK),
    "pp_ocrv6_medium_det": Override({**OCR_NECK, "backbone_config.out_indices": [1, 2, 3, 4]}),
    "pp_ocrv6_small_det": Override(
        {"backbone_config.out_indices": [1, 2, 3, 4], "layer_list_out_channels": (96, 96, 192, 384)}
    ),
    "prompt_depth_anything": Override({"reassemble_hidden_size": 64}),
    "qwen2_5_omni": NO_FORWARD,
    "qwen2_5_omni_audio_encoder": Override(inputs={"input_features": normal(128, 64), "feature_lens": tensor([64])}),
    "qwen2_5_omni_bigvgan": Override({"upsample_initial_channel": 128}, {"mel_spectrogram": normal(1, 80, 12)}),
    "qwen2_5_omni_dit": Override(
        {"num_embeds": 65},
        {
            "hidden_states": normal(1, 8, 80),
            "condition_vector": normal(1, 8, 80),
            "speaker_embedding": normal(1, 8, 192),
            "quantized_code": ids(1, 4, below=60),
            "time_step": lambda make: torch.tensor(0.5),
        },
    ),
    "qwen2_5_omni_thinker": Override({"vision_start_token_id": 140}),
    "qwen2_5_omni_token2wav": Override(
        inputs={
            "code": ids(1, 4, below=60),
            "conditioning": normal(1, 192),
            "reference_mel": normal(1, 8, 80),
            "num_steps": lambda make: 2,
        }
    ),
    "qwen3_asr_encoder": Override(
        inputs={"input_features": normal(BATCH, 128, 100), "input_features_mask": ones(BATCH, 100)}
    ),
    "qwen3_omni_moe": NO_FORWARD,
    "qwen3_omni_moe_audio_encoder": Override(inputs={"input_features": normal(128, 64), "feature_lens": tensor([64])}),
    "qwen3_omni_moe_talker_code_predictor": Override(inputs={"input_ids": None, "inputs_embeds": ...}),
    "qwen3_omni_moe_talker_text": Override(
        {"shared_expert_intermediate_size": 128}, {"input_ids": None, "inputs_embeds": ...}
    ),
    "qwen3_omni_moe_thinker": Override({"vision_start_token_id": 140}),
    "qwen4_exp_text": Override(
        {
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 2,
        }
    ),
    "rag": Override(
        {"n_docs": 1},
        {
            "context_input_ids": ids(BATCH, TOKENS),
            "context_attention_mask": ones(BATCH, TOKENS),
            "doc_scores": normal(BATCH, 1),
        },
    ),
    "recurrent_gemma": Override({"block_types": ["recurrent", "attention"], "num_hidden_layers": 2}),
    "reformer": Override({"axial_pos_embds_dim": (16, 48), "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4}),
    "rf_detr": Override(FEW_QUERIES),
    "sam": Override(SAM, POINTS),
    "sam2_video": SESSION,
    "sam2_vision_model": Override(PYRAMID),
    "sam3_detr_decoder": Override(inputs=DETR_DECODER),
    "sam3_detr_encoder": Override(inputs=DETR_ENCODER),
    "sam3_lite_text_detr_decoder": Override(inputs=DETR_DECODER),
    "sam3_lite_text_detr_encoder": Override(inputs=DETR_ENCODER),
    "sam3_lite_text_mask_decoder": Override(inputs=MASK_DECODER),
    "sam3_mask_decoder": Override(inputs=MASK_DECODER),
    "sam3_tracker_video": SESSION,
    "sam3_video": SESSION,
    "sam3_vision_model": Override(PYRAMID),
    "sam_hq": Override(SAM, POINTS),
    "sapiens2": Override({"num_key_value_heads_per_layer": [4, 2]}),
    "seggpt": Override(
        {"num_hidden_layers": 4, "merge_index": 0, "intermediate_hidden_state_indices": (1, 3), "image_size": (64, 32)},
        {
            "pixel_values": normal(BATCH, 3, 32, 32),
            "prompt_pixel_values": normal(BATCH, 3, 32, 32),
            "prompt_masks": normal(BATCH, 3, 32, 32),
        },
    ),
    "shieldgemma2": Override({"yes_token_index": 20, "no_token_index": 21}),
    "siglip2": Override(inputs=SIZED_PATCHES),
    "siglip2_vision_model": Override(inputs=SIZED_PATCHES),
    "slanet": Override(class_name="SLANetForTableRecognition"),
    "slanext": Override(class_name="SLANeXtForTableRecognition"),
    "speech-encoder-decoder": Override(inputs={"inputs": lambda make: make("input_values")}),
    "speecht5": Override(class_name="SpeechT5ForSpeechToText"),
    "speecht5_hifigan": Override(inputs=SPECTROGRAM),
    "step3p5": Override({"sliding_window": 8}),
    "step3p7_text": Override({"sliding_window": 8}),
    "superglue": Override(
        {
            "keypoint_detector_config.descriptor_decoder_dim": 64,
            "keypoint_encoder_sizes": [32, 64],
            "gnn_layers_types": ["self", "cross"],
        },
        PAIR,
    ),
    "t5gemma2_decoder": Override({"dropout_rate": 0.0}, {"encoder_hidden_states": ...}),
    "t5gemma2_text": Override({"dropout_rate": 0.0}),
    "time_series_transformer": Override(FORECAST, SERIES),
    "timesfm": Override(
        inputs={
            "past_values": normal(BATCH, 64),
            "past_values_padding": zeros(BATCH, 64, dtype=torch.float32),
            "freq": zeros(BATCH, 1),
        }
    ),
    "timesfm2_5": Override(inputs={"past_values": normal(BATCH, 64)}),
    "timesformer": Override({"num_frames": 4}, VIDEO),
    "trocr": Override(inputs={"input_ids": ...}),
    "tvp": Override(
        {"max_img_size": 64, "visual_prompt_size": 8, "num_frames": 4},
        {"input_ids": ids(1, TOKENS), "attention_mask": ones(1, TOKENS), "pixel_values": normal(1, 4, 3, 64, 64)},
    ),
    "udop": Override(inputs={"bbox": lambda make: torch.tensor([[[0.1, 0.2, 0.3, 0.4]] * TOKENS] * BATCH)}),
    "unlimited_ocr_sam_vision_model": Override({"downsample_channels": (32, 64)}),
    "unlimited_ocr_vision_encoder": Override(inputs={"patch_embeds": normal(BATCH, 64, 4, 4)}),
    "uvdoc": Override({"backbone_config.out_indices": [1, 2, 3, 4, 5, 6]}),
    "vibevoice_acoustic_tokenizer": Override({"num_filters": 4}, {"input_values": normal(BATCH, 1, 3200)}),
    "vibevoice_acoustic_tokenizer_decoder": Override({"num_filters": 4}, {"hidden_states": normal(BATCH, 64, 4)}),
    "vibevoice_acoustic_tokenizer_encoder": Override({"num_filters": 4}, {"hidden_states": normal(BATCH, 1, 3200)}),
    "video_llama_3_vision": Override(inputs=PACKED | {"merge_sizes": tensor([2])}),
    "videomae": Override({"num_frames": 4}, VIDEO),
    "vitmatte": Override({"backbone_config.num_channels": 4, "fusion_hidden_sizes": [256, 128, 64, 32]}),
    "vivit": Override({"num_frames": 4}, VIDEO),
    "voxtral_realtime": Override(inputs={"input_ids": ids(BATCH, 8), "input_features": normal(BATCH, 128, 64)}),
    "voxtral_realtime_encoder": Override(inputs={"input_features": normal(BATCH, 128, 64)}),
    "voxtral_realtime_text": Override(inputs={"t_cond": normal(1, 1, 64)}),
    "wav2vec2-bert": Override(inputs={"input_features": normal(BATCH, 24, 160)}),
    "wavtokenizer": Override({"codebook_dim": 64}),
    "wavtokenizer_encoder": Override({"codebook_dim": 64}),
    "xclip": Override({"vision_config.mit_hidden_size": 64, "vision_config.mit_intermediate_size": 128}, VIDEO),
    "xclip_vision_model": Override({"num_frames": 4}, {"pixel_values": normal(4 * BATCH, 3, 64, 64)}),
    "xcodec": Override(inputs={"input_values": normal(BATCH, 1, 4000)}),
    "xcodec2": Override({"quantization_dim": 128}, AUDIO_AND_FEATURES),
    "xlstm": Override({"hidden_size": 64, "num_heads": 4, "qk_dim_factor": 1.0}),
    "xmod": Override({"default_language": "en_XX"}),
    "zamba": Override(MIXED_MAMBA),
    "zamba2": Override(MIXED_MAMBA),
}
