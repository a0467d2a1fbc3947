"""A small model of every causal-LM type that transformers ships: one function that shrinks, one table of exceptions."""

import dataclasses
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LAYERS = 3  # more only where that many do not show each kind of layer once
VOCABULARY = 512
RESERVED = 32  # ids below are special tokens, and in no batch
TOKENS = (2, 16)

# What an attribute is cut down to. A default that is smaller (one shared expert) stays, and so does None.
SIZES = {
    VOCABULARY: "vocab_size vocab_size_per_layer_input output_vocab_size unpadded_vocab_size decoder_vocab_size "
    "audio_vocab_size pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab "
    "ngram_vocab_size_base",
    128: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff dff feed_forward_size "
    "d_inner shared_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
    "dense_intermediate_size intermediate_size_mlp moe_shared_expert_intermediate_size "
    "prefix_dense_intermediate_size mamba_d_ssm max_position_embeddings n_positions n_ctx max_seq_len "
    "context_length max_target_positions max_source_positions original_max_position_embeddings rel_extent "
    "position_bias_max_distance relative_max_distance",
    64: "hidden_size d_model n_embd nemo_conv_channels ext_pw_out_channel depthwise_separable_out_channel emb_dim "
    "hidden_size_global attention_hidden_size lru_width backbone_hidden_size num_centroids",
    32: "q_lora_rank o_lora_rank embedding_size input_embedding_size output_embedding_size moe_intermediate_size "
    "expert_ffn_hidden_size router_hidden_size pronunciation_embed_dim shape_embed_dim adapter_rank hc_lowrank "
    "position_bias_num_buckets prompt_mid_dim ple_embed_dim",
    16: "head_dim attention_head_size attention_head_dim dim_head d_head swa_head_dim index_head_dim "
    "indexer_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim kv_channels v_head_dim "
    "qk_nope_head_dim kv_lora_rank mamba_head_dim hidden_size_per_layer_input laurel_rank gated_norm_rank "
    "loop_gate_rank block_multiple_of dim_model_base centroid_intermediate_top_k",
    8: "qk_rope_head_dim rotary_dim mamba_d_state state_size ssm_state_size sliding_window sliding_window_size "
    "index_topk chunk_size mamba_chunk_size attention_chunk_size attention_window_size local_attention "
    "local_attention_window_len window_size keep_window_size d_rel mamba_num_heads mamba_n_heads time_step_rank "
    "index_block_size ffn_round_up_to_multiple_of prompt_length",
    4: "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads "
    "encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads "
    "index_n_heads indexer_n_heads linear_num_heads linear_num_value_heads num_experts n_routed_experts "
    "num_local_experts moe_num_experts zero_expert_num heads_per_ngram",
    LAYERS: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers mamba_d_conv conv_kernel conv_kernel_size linear_conv_kernel_dim short_conv_kernel_size "
    "conv1d_width ple_conv_kernel_size conv_L_cache num_blocks depth",
    2: "swa_num_key_value_heads linear_num_key_heads num_experts_per_tok moe_topk moe_top_k moe_k top_k_experts "
    "n_group n_groups mamba_n_groups mamba_ngroups hc_mult hc_count num_codebooks o_groups index_topk_blocks "
    "num_key_value_heads num_kv_heads",
    1: "topk_group first_k_dense_replace num_dense_layers moe_num_shared_experts n_shared_experts num_shared_experts",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}

PADDED = {"pad_token_id": 1}  # positions, masks or losses are computed from the padding id: it must be a number
WITHOUT_DEFAULT = {"head_dim": 16}  # None is the default and the class cannot build from it
WIDE = {"global_head_dim": 32}  # the full-attention layers' own, an argument that is no field
SHARED = {"num_kv_shared_layers": 2}  # the last layer of each kind shares, not more layers than there are
CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"]}  # the default has one kind only, or none
MAMBAS = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}  # the default has no attention
TWICE = {"layers_block_type": ["linear_attention", "hybrid"] * 2}  # the shared block, at two places
DENSE_TOO = {"interleave_moe_layer_step": 2}  # the default has no dense layer
SLIDING = {  # arguments that are no fields: the sliding layers' own sizes
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 32,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
NGRAMS = {  # the default has no indexer sizes and no layer with an n-gram embedding
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1],
    "eos_token_id": 1,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 1,
}

# Beside the sizes above, by model type. Nested: of that part of a multimodal config.
EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},  # the default has no attention
    "bloom": {"n_layer": LAYERS},  # the default is two
    "camembert": PADDED,
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},  # no default
    "data2vec-text": PADDED,
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},  # no default
    "deepseek_v2": {"num_experts_per_tok": 2},  # no default
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},  # 128 > tokens
    "dory": {"n_input_layers": 1, "n_output_layers": 1},  # one layer is left to be looped
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},  # no default
    "dots3_note": {  # the parts' adapters are as wide as they are, and the vision experts' pyramid as deep
        "text_config": SLIDING,
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64, "pyramid_num_routed": [-1, 4, 8]},
    },
    "dots3_note_text": SLIDING,
    "gemma3n": {"text_config": SHARED},
    "gemma3n_text": SHARED,
    "gemma4": {"text_config": WIDE},
    "gemma4_assistant": {"text_config": WIDE | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "gemma4_text": WIDE,
    "gemma4_unified": {"text_config": WIDE},
    "gemma4_unified_assistant": {"text_config": WIDE},
    "gemma4_unified_text": WIDE,
    "gpt_neo": {"attention_types": [[["global", "local"], 1], [["global"], 1]]},  # as long as the model is deep
    "granitemoehybrid": MAMBAS,
    "hunyuan_v1_dense": WITHOUT_DEFAULT,
    "hunyuan_v1_moe": WITHOUT_DEFAULT,
    "inkling2_loop_text": {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2},
    "inkling2_text": {"n_layers_per_attn_res_block": 2},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 2},  # mamba and dense, mamba and sparse, attention and dense
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    "llama4": {"text_config": DENSE_TOO},
    "llama4_text": DENSE_TOO,
    "longcat_flash": {"head_dim": 8},  # is the rotary part's
    "mamba2": {"num_heads": 8},  # times head_dim is expand times hidden_size
    "minimax_m3_vl_text": {  # the default has no sparse attention and no dense MLP
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "ministral": WITHOUT_DEFAULT,
    "mllama": {"text_config": {"cross_attention_layers": [1]}},  # is skipped where no image is given
    "nemotron": {"num_key_value_heads": 2},  # no default
    "prophetnet": PADDED,
    "qwen4_exp": {"text_config": NGRAMS},
    "qwen4_exp_text": NGRAMS,
    "reformer": {  # in training the tokens must fill the grid of positions, and chunks divide them
        "axial_pos_shape": (4, 4),
        "axial_pos_embds_dim": (16, 48),
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "roberta": PADDED,
    "roberta-prelayernorm": PADDED,
    "xlm": PADDED,
    "xlm-roberta": PADDED,
    "xlm-roberta-xl": PADDED,
    "xmod": PADDED | {"default_language": "en_XX"},  # no default
    "xlstm": {"mode": "train"},  # the default's states are float32 whatever the model is
    "zamba": TWICE | {"num_hidden_layers": 4},
    "zamba2": TWICE | {"num_hidden_layers": 4},
}
DRAFT = "a draft head: its forward takes the hidden states and the keys and values of the model it assists, and no token ids"

CANNOT = {"gemma4_assistant": DRAFT, "gemma4_unified_assistant": DRAFT}
CANNOT_BF16: dict[str, str] = {}


def whole_config(model_type: str) -> PreTrainedConfig:
    """The type's own config, small: with its vision and audio parts where it has them."""
    return _shrunk(CONFIG_MAPPING[model_type], {}, EXCEPTIONS.get(model_type, {}))


def small_config(model_type: str) -> PreTrainedConfig:
    """The config that the causal-LM class of the type takes; of a multimodal type the text model's."""
    whole = whole_config(model_type)
    if model_type in CANNOT or not type(whole).sub_configs:
        return whole
    text = whole.get_text_config(decoder=True)
    return text if type(text) in (*MODEL_FOR_CAUSAL_LM_MAPPING, _class_of(model_type).config_class) else whole


def small_model(model_type: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The causal-LM class of the type, small, in train mode, with the dtypes that loading a checkpoint in ``dtype`` gives."""
    config = small_config(model_type)
    config.use_cache = False
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    cls: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] if known else _class_of(model_type)
    model: PreTrainedModel = cls._from_config(config, dtype=dtype)
    kept = model._keep_in_fp32_modules_strict or ()
    for name, parameter in model.named_parameters():
        if not any(part in name for part in kept):
            parameter.data = parameter.data.to(dtype)  # loading overrules a constructor that says float32
    model.train()
    return model


def small_batch(config: PreTrainedConfig, seed: int) -> Tensor:
    """Random token ids, int64, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(RESERVED, config.get_text_config().vocab_size, TOKENS, generator=generator)


def _class_of(model_type: str) -> type[PreTrainedModel]:
    cls: type[PreTrainedModel] = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    return cls


def _shrunk(cls: type[PreTrainedConfig], preset: dict[str, Any], exceptions: dict[str, Any]) -> PreTrainedConfig:
    """Construct, never set afterwards: derived values and validation then see what they would see of a user's config."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    values = {name: f.default for name, f in fields.items()} | preset
    small = preset | {name: _cut(name, value) for name, value in values.items() if name in SMALL}
    if values.get("num_key_value_heads") == values.get("num_attention_heads") and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]  # some kinds of attention know no groups
    small |= _special_tokens(values)
    if "pad_token_id" in small and "None" in str(fields["pad_token_id"].type):
        small["pad_token_id"] = None
    for name, part in cls.sub_configs.items():
        spec = cls.sub_configs_defaults.get(name)
        if spec is None:
            small[name] = _shrunk(part, {}, exceptions.get(name, {}))
        elif not spec.optional or isinstance(values[name], dict):
            known = issubclass(part, PreTrainedConfig)
            small[name] = _shrunk(
                part if known else CONFIG_MAPPING[spec.model_type], spec.init_kwargs or {}, exceptions.get(name, {})
            )
    if "is_decoder" in fields:
        small["is_decoder"] = True  # a causal LM, as the class warns otherwise
    if not cls.sub_configs:
        small |= _layers(cls(**preset), fields)
    return cls(**small | {name: value for name, value in exceptions.items() if name not in cls.sub_configs})


def _cut(name: str, value: Any) -> Any:
    return min(value, SMALL[name]) if name in SMALL and _is_int(value) else value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _special_tokens(values: dict[str, Any]) -> dict[str, Any]:
    names = sorted(n for n in values if n.endswith(("_token_id", "_token_index")) and values[n] is not None)
    return {name: number if _is_int(values[name]) else [number] for number, name in enumerate(names)}


def _layers(default: PreTrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """The per-layer lists of the full-size config, cut to the first layer of each kind (and some more)."""
    count = getattr(default, "num_hidden_layers", 0)
    lists = {
        name: values
        for name in fields
        if isinstance(values := vars(default).get(name), (list, tuple))
        and len(values) == count
        and list(values) != list(range(count))
    }
    if not lists:
        return {}
    kinds = list(zip(*lists.values(), strict=True))
    firsts = {kinds.index(kind) for kind in kinds}
    others = [i for i in range(count) if i not in firsts]
    chosen = sorted([*firsts, *others[: max(LAYERS - len(firsts), 0)]])
    cut = {name: [_cut(name, values[i]) for i in chosen] for name, values in lists.items()}
    depth = type(default).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return cut | ({depth: len(chosen)} if depth in fields else {})
