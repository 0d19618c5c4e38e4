"""Shrinks a model's config (layers, widths, vocabulary) by the names of its attributes."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from transformers import PreTrainedConfig

WIDTH, HEADS, HEAD_DIM, LAYERS, VOCABULARY = 64, 4, 16, 2, 256
TOKENS, BATCH = 12, 2
IMAGE_SIZE, PATCH_SIZE = 64, 16
SPREAD = 0.4  # standard deviation of the initial weights
DEPTH = r"(num_|n_|num_hidden_|encoder_|decoder_|num_encoder_|num_decoder_)?layers?|depth|num_blocks"
DEPTHS = (
    rf"{DEPTH}|(encoder|decoder)_num_(hidden_)?layers|.*_num_hidden_layers|depths|attention_types"
    r"|(speech_|t2u_)(encoder|decoder)_layers|num_layers_per_stage|block_depths|.*layer_types|layers_block_type"
)
# Lists over the stages of a hierarchy: if there are any, a single width belongs to one stage, and is derived from them.
HIERARCHY = ("depths", "hidden_sizes", "num_block_repeats", "embed_dim_per_stage")

# The size that an attribute shrinks to: expressions that must match its whole name; the first match counts.
# A list shrinks element by element. Smaller values stay.
SIZES: list[tuple[int, str]] = [
    (
        WIDTH,
        """hidden_size d_model n_embd dim embed_dim emb_dim hidden_dim model_dim text_hidden_size vision_hidden_size
        (encoder|decoder|cross|audio|backbone|projector|out|output|attention|pooler|image_text|d)_hidden_(size|dim)
        embedding_size word_embed_proj_dim output_dim projection_dim projection_size out_hidden_size proj_dim
        vision_output_dim pooler_output_size codebook_embed_dim hidden_size_per_layer_input unit_embed_dim
        output_channels fpn_hidden_size vit_dim post_conv_in_channels decoder_in_channels d_latents lru_width
        conv_dim upsample_groups""",
    ),
    (
        2 * WIDTH,
        """(moe_|expert_|shared_expert_|moe_shared_expert_|encoder_|decoder_)?intermediate_size(_mlp)?
        (encoder_|decoder_)?(ffn_dim|feed_forward_hidden_size) (expert_)?ffn_hidden_size d_ff d_inner mlp_dim
        (speech_|t2u_)(encoder|decoder)_(ffn_dim|intermediate_size) intermediate_dim dim_feedforward feedforward_dim
        inner_dim n_inner ffn_size feed_forward_size""",
    ),
    (
        HEADS,
        """(encoder_|decoder_|num_|n_|swa_num_|cross_num_)?(attention_heads|heads|head)
        (encoder|decoder)_num_attention_heads decoder_(self|cross)_attention_heads num_(self|cross)_attention_heads
        resampler_n_heads
        (speech_|t2u_)(encoder|decoder)_attention_heads (num_|n_routed_|num_local_|moe_num_|n_)experts""",
    ),
    (HEADS // 2, "((cross_|swa_)?num_|(encoder|decoder)_num_)key_value_heads num_kv_heads"),
    (
        HEAD_DIM,
        """(cross_|swa_|global_)?head_dim d_kv attention_head_dim d_head attention_head_size rotary_dim rotary_ndims
        qk_rope_head_dim qk_nope_head_dim v_head_dim kv_lora_rank q_lora_rank o_lora_rank""",
    ),
    (2 * HEAD_DIM, "qk_head_dim base_channels"),
    (
        LAYERS,
        rf"""{DEPTHS} num_hidden_groups zero_expert_num
        num_experts_per_tok num_experts_per_token moe_topk moe_k top_k""",
    ),
    (1, "n_group topk_group num_expert_group"),
    (4, "index_topk"),
    (8, "sliding_window"),
    (12, "num_queries num_latents"),
    (64, "max_source_positions max_target_positions"),
    (128, "max_position_embeddings n_positions max_seq_len n_ctx max_sequence_length"),
    (VOCABULARY, ".*vocab_size(_per_layer_input)? .*byte_group_vocab"),
]


def shrink(
    config: PreTrainedConfig,
    changes: dict[str, Any] | None = None,
    of_types: Mapping[str, dict[str, Any]] | None = None,
) -> PreTrainedConfig:
    """Return a small config of the same class: few narrow layers, at least one of each kind.

    Args:
        config: isn't changed.
        changes: values that the small config takes; a dotted key reaches a sub-configuration.
        of_types: changes by model type, for sub-configurations.
    """
    return _shrink(config, _small_ids(config), changes or {}, of_types or {})


def shallow(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the config with few layers, at least one of each kind, and the same widths."""
    small = copy.deepcopy(config)
    for part in parts_of(small):
        kinds = _kinds_of_layers(part)
        count = max(LAYERS, len(kinds))
        depth = next((value for name, value in vars(part).items() if re.fullmatch(DEPTHS, name)), None)
        for name, value in list(vars(part).items()):
            if isinstance(value, list) and len(value) == depth and len(value) > count:
                setattr(part, name, _some_of_each(value, count))
            elif re.fullmatch(DEPTHS, name) or _counts_layers(name, value):
                setattr(part, name, _small(name, value, count, {}))
    return small


def _kinds_of_layers(config: PreTrainedConfig) -> set[str]:
    return {kind for name, value in vars(config).items() if name.endswith("layer_types") and value for kind in value}


def _shrink(
    config: PreTrainedConfig, ids: dict[int, int], changes: dict[str, Any], of_types: Mapping[str, dict[str, Any]]
) -> PreTrainedConfig:
    """Rebuild `config` smaller. Values equal to the class's defaults are derived anew rather than copied."""
    default = _default_of(type(config))
    layers = changes.get("num_hidden_layers", max(LAYERS, len(_kinds_of_layers(config))))
    stages = any(isinstance(getattr(config, name, None), list | tuple) for name in HIERARCHY)
    depth = next((value for name, value in vars(config).items() if re.fullmatch(DEPTH, name) and not stages), None)
    arguments: dict[str, Any] = {}
    for name, value in vars(config).items():
        if name.startswith("_") or name in ("id2label", "label2id", "stage_names", "dtype", "transformers_version"):
            continue
        if isinstance(value, PreTrainedConfig):
            inner = dict(of_types.get(value.model_type, {}))
            inner |= {key.removeprefix(name + "."): v for key, v in changes.items() if key.startswith(name + ".")}
            arguments[name] = _shrink(value, ids, inner, of_types)
            continue
        if isinstance(value, list) and len(value) == depth and len(value) > layers:  # one entry per layer
            value = _some_of_each(value, layers)
        small = _small(name, value, layers, ids)
        added = bool(default) and name not in default  # such as the record of a patch
        if added or small != value or value != default.get(name, value):
            arguments[name] = small
    arguments |= _derived_sizes(config, layers)
    if stages:
        for name in ("hidden_size", "hidden_dim", "num_hidden_layers", "num_layers"):
            arguments.pop(name, None)
    arguments |= {name: value for name, value in changes.items() if "." not in name}
    rope = arguments.get("rope_parameters", getattr(config, "rope_parameters", None))
    if isinstance(rope, dict) and "rope_parameters" not in changes:
        # split over time, height and width by a list that must fit the head
        sections = "mrope_section" in getattr(config, "ignore_keys_at_rope_validation", ())
        arguments["rope_parameters"] = _small_rope(rope, _rotary_width(config, arguments), sections)
    return type(config)(**arguments)


def _default_of(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    try:
        return vars(kind())
    except Exception:  # defaults of a few types contradict one another; then no value counts as derived
        return {}


def _small(name: str, value: Any, layers: int, ids: dict[int, int]) -> Any:
    """The small value of one attribute."""
    if name in ("initializer_range", "init_std"):
        return SPREAD
    if value is None:
        return {"head_dim": HEAD_DIM, "num_key_value_heads": HEADS}.get(name)
    if isinstance(value, bool | str | float):
        return value
    if re.fullmatch(r".*token_(id|index)s?|vocab_offset", name):
        return _map_ints(value, lambda one: ids.get(one, one))
    if name.endswith(("layer_types", "layers_block_type")):
        return _some_of_each(value, layers)
    if name == "attention_types":  # GPT-Neo's [[kinds, repetitions]]
        return [[_some_of_each(value[0][0], layers), 1]]
    if _counts_layers(name, value):
        return type(value)(dict.fromkeys(min(one, layers - 1) for one in value))
    if name in ("image_size", "pretrain_image_size"):
        return _map_ints(value, lambda one: min(one, IMAGE_SIZE))
    if name == "patch_size":
        return _map_ints(value, lambda one: PATCH_SIZE if one > 8 else one)
    if name.endswith("heads") and not isinstance(value, int):
        return value
    size = _size_of(name)
    if size is None:
        return value
    return _map_ints(value, lambda one: min(one, max(layers, size) if re.fullmatch(DEPTH, name) else size))


def _counts_layers(name: str, value: Any) -> bool:
    """Whether an attribute is a list of layers' numbers."""
    listed = re.fullmatch(r".*(indexes|indices)|mlp_only_layers|cross_attention_layers", name)
    return bool(listed) and _is_list_of(value, int)


@cache
def _size_of(name: str) -> int | None:
    return next((size for size, names in SIZES if re.fullmatch("|".join(names.split()), name)), None)


def _map_ints(value: Any, function: Any) -> Any:
    """`function` of an int, of every int of a (nested) list, or of every value of a dict; other values stay."""
    if isinstance(value, dict):
        return {key: _map_ints(one, function) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_ints(one, function) for one in value)
    return function(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(one, kind) for one in value)


def _some_of_each(kinds: list[str], count: int) -> list[str]:
    """`count` entries with every distinct kind at least once, in the order in which kinds first occur."""
    distinct = [kind for place, kind in enumerate(kinds) if kind not in kinds[:place]]
    return (distinct + [distinct[-1]] * count)[: max(count, len(distinct))]


def _small_ids(config: PreTrainedConfig) -> dict[int, int]:
    """New ids of special tokens beyond the small vocabulary: at its end; distinct tokens stay distinct."""
    large = set()
    for part in parts_of(config):
        for name, value in vars(part).items():
            if re.fullmatch(r".*token_(id|index)s?|vocab_offset", name):
                _map_ints(value, lambda one: large.add(one) if one >= VOCABULARY // 2 else None)
    return {one: VOCABULARY // 2 + rank for rank, one in enumerate(sorted(large))}


def parts_of(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Yield the config and its sub-configs, breadth first."""
    queue = [config]
    while queue:
        yield (part := queue.pop(0))
        queue += [value for value in vars(part).values() if isinstance(value, PreTrainedConfig)]


def _derived_sizes(config: PreTrainedConfig, layers: int) -> dict[str, Any]:
    """Sizes that depend on several attributes of the original."""
    found: dict[str, Any] = {}
    own = vars(config)
    indices, stages = getattr(config, "_out_indices", None), getattr(config, "stage_names", None)
    if indices and stages:  # a backbone returns stages that are still there
        found["out_indices"] = list(indices)
        if len(stages) - 1 == getattr(config, "num_hidden_layers", None) and not hasattr(config, "depths"):
            count = max(layers, len(indices))
            found |= {"num_hidden_layers": count, "out_indices": list(range(count + 1))[-len(indices) :]}
    for groups in [name for name in own if name.endswith("num_key_value_heads")]:
        heads = groups.replace("key_value", "attention")
        if own[groups] is not None and own[groups] == own.get(heads):
            found[groups] = min(own[groups], HEADS)
    if _is_list_of(heads := own.get("num_heads"), int) and isinstance(own.get("embed_dim"), int):
        found["embed_dim"] = 8 * heads[0]  # a hierarchy: stage i has embed_dim * 2**i channels
        found |= {"window_size": 2} if isinstance(own.get("window_size"), int) else {}
    return found


def _rotary_width(config: PreTrainedConfig, arguments: dict[str, Any]) -> int:
    """Channels per head that the small model may rotate."""
    look = lambda name: arguments.get(name) or getattr(config, name, None)  # noqa: E731
    for name in ("qk_rope_head_dim", "head_dim", "attention_head_dim"):
        if isinstance(channels := look(name), int):
            return channels
    width, heads = look("hidden_size"), look("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) else 16


def _small_rope(rope: dict[str, Any], channels: int, sections: bool) -> dict[str, Any]:
    """Rotary parameters whose lists fit `channels` per head."""
    if any(isinstance(value, dict) for value in rope.values()):
        return {
            key: _small_rope(one, channels, sections) if isinstance(one, dict) else one for key, one in rope.items()
        }
    pairs, small = int(channels * rope.get("partial_rotary_factor", 1.0)) // 2, dict(rope)
    for name, value in rope.items():
        if name.endswith("_factor") and isinstance(value, list | tuple):
            small[name] = list(value)[:pairs]
        if name == "mrope_section":
            most = (pairs + 1) // len(value)
            small[name] = [*[most] * (len(value) - 1), pairs - most * (len(value) - 1)]
    if rope.get("mrope_section") is None and sections and rope:
        most = (pairs + 1) // 3
        small["mrope_section"] = [most, most, pairs - 2 * most]
    if "original_max_position_embeddings" in rope:
        small["original_max_position_embeddings"] = 64
    return small
