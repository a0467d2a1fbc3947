"""The residual additions (sites) of one forward call of every causal-LM type, read in the code of transformers 5.24.

A site is one update that a branch (attention, MLP, SSM, ...) adds to the stream, the tensor that the layers hand on. The
updates of a parallel block count one each, in whatever order they are summed; the routed and shared experts of one sublayer
are one update; sums that only enter a branch, and mixing among streams, are none. The call is the plain one: token ids alone,
no image, no encoder's output, train mode, layer drop 0, the feed-forward not in chunks. Each function takes the config that
the causal-LM class takes, or the composite one around it.
"""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

Count = Callable[[PreTrainedConfig], int]


def _text(config: PreTrainedConfig) -> Any:
    return config.get_text_config(decoder=True)


def one_a_layer(config: PreTrainedConfig) -> int:
    return int(_text(config).num_hidden_layers)


def two_a_layer(config: PreTrainedConfig) -> int:
    return 2 * one_a_layer(config)


def three_a_layer(config: PreTrainedConfig) -> int:
    return 3 * one_a_layer(config)


def four_a_layer(config: PreTrainedConfig) -> int:
    return 4 * one_a_layer(config)


def two_a_decoder_layer(config: Any) -> int:
    """Of encoder-decoder families: their num_hidden_layers counts the encoder, which a causal LM does not build."""
    return 2 * int(config.decoder_layers)


def two_a_numbered_decoder_layer(config: Any) -> int:
    return 2 * int(config.num_decoder_layers)


def five_a_double_layer(config: Any) -> int:
    return 5 * int(config.num_layers)  # num_hidden_layers is twice the number of these layers


def two_a_layer_of_three_parts(config: Any) -> int:
    return 2 * int(config.n_input_layers + config.n_recurrent_loops * config.n_recurrent_layers + config.n_output_layers)


def two_a_layer_and_cycle(config: Any) -> int:
    return 2 * int(config.num_layers_per_stack * config.H_cycles * (config.L_cycles + 1))


def two_a_self_attending_layer(config: PreTrainedConfig) -> int:
    layers = one_a_layer(config)
    return 2 * len(set(range(layers)) - set(_text(config).cross_attention_layers))


def two_a_looped_layer(config: Any) -> int:
    layers = range(one_a_layer(config))
    looped = layers[config.loop_layer_index_start : config.loop_layer_index_end]
    return 2 * (len(layers) + int(config.loop_num_passes - 1) * len(looped))


def two_a_layer_and_one_a_lexical_layer(config: PreTrainedConfig) -> int:
    layers = one_a_layer(config)
    return 2 * layers + len(set(range(1, layers + 1)) & set(_text(config).ple_layer_ids or ()))  # numbered from 1


def two_a_layer_and_one_of_its_embedding(config: PreTrainedConfig) -> int:
    return three_a_layer(config) if _text(config).hidden_size_per_layer_input else two_a_layer(config)


def bytes_patches_bytes(config: Any) -> int:
    encoder, world, decoder = config.encoder_config, config.global_config, config.decoder_config
    blocks = encoder.num_hidden_layers + world.num_hidden_layers + decoder.num_hidden_layers
    if config.patch_in_forward and config.patching_mode == "entropy":
        blocks += config.patcher_config.num_hidden_layers
    crossings = sum(part.num_hidden_layers if part.cross_attn_all_layers else 1 for part in (encoder, decoder))
    return int(2 * blocks + crossings)


SITES: dict[str, Count] = {
    # residual + attention(norm(residual)), then residual + mlp(norm(residual)): the layer of Llama and of GPT-2
    "arcee": two_a_layer,
    "aria_text": two_a_layer,
    "axk1": two_a_layer,
    "axk2": two_a_layer,
    "bitnet": two_a_layer,
    "cwm": two_a_layer,
    "deepseek_v2": two_a_layer,
    "deepseek_v3": two_a_layer,
    "deepseek_v32": two_a_layer,
    "diffllama": two_a_layer,
    "dots1": two_a_layer,
    "dots3_note": two_a_layer,
    "dots3_note_text": two_a_layer,
    "ernie4_5": two_a_layer,
    "ernie4_5_moe": two_a_layer,
    "exaone": two_a_layer,
    "exaone_moe": two_a_layer,
    "flint": two_a_layer,
    "fuyu": two_a_layer,
    "gemma": two_a_layer,
    "glm": two_a_layer,
    "glm4_moe": two_a_layer,
    "glm4_moe_lite": two_a_layer,
    "glm_moe_dsa": two_a_layer,
    "got_ocr2": two_a_layer,
    "gpt_oss": two_a_layer,
    "helium": two_a_layer,
    "hunyuan_v1_dense": two_a_layer,
    "hunyuan_v1_moe": two_a_layer,
    "hy_v3": two_a_layer,
    "internlm3": two_a_layer,
    "iquestcoder": two_a_layer,
    "jais2": two_a_layer,
    "jetmoe": two_a_layer,
    "laguna": two_a_layer,
    "llama": two_a_layer,
    "llama4": two_a_layer,
    "llama4_text": two_a_layer,
    "mellum": two_a_layer,
    "mimo_v2_flash": two_a_layer,
    "minimax_m2": two_a_layer,
    "minimax_m3_vl_text": two_a_layer,
    "ministral": two_a_layer,
    "ministral3": two_a_layer,
    "mistral": two_a_layer,
    "mixtral": two_a_layer,
    "modernbert-decoder": two_a_layer,
    "moss_transcribe_diarize": two_a_layer,
    "nanochat": two_a_layer,
    "nemotron": two_a_layer,
    "olmo": two_a_layer,
    "olmoe": two_a_layer,
    "persimmon": two_a_layer,
    "phimoe": two_a_layer,
    "qwen2": two_a_layer,
    "qwen2_moe": two_a_layer,
    "qwen3": two_a_layer,
    "qwen3_moe": two_a_layer,
    "sarvam_mla": two_a_layer,
    "sarvam_moe": two_a_layer,
    "seed_oss": two_a_layer,
    "smollm3": two_a_layer,
    "solar_open": two_a_layer,
    "starcoder2": two_a_layer,
    "vaultgemma": two_a_layer,
    "youtu": two_a_layer,
    "apertus": two_a_layer,
    "apertus1p5_text": two_a_layer,
    "gpt-sw3": two_a_layer,
    "gpt2": two_a_layer,
    "gpt_bigcode": two_a_layer,
    "gpt_neo": two_a_layer,
    "cpmant": two_a_layer,
    "mpt": two_a_layer,
    # dropout on each update before the addition
    "biogpt": two_a_layer,
    "ctrl": two_a_layer,
    "emu3": two_a_layer,
    "gpt_neox_japanese": two_a_layer,
    "phi3": two_a_layer,
    "phi4_multimodal": two_a_layer,
    "xglm": two_a_layer,
    # the main decoder alone runs: the depth decoder and the audio codec belong to another class
    "moshi": two_a_layer,
    # hybrids of attention and a recurrence, a convolution or an SSM: each layer still is one mixer and one feed-forward
    "bailing_hybrid": two_a_layer,
    "bamba": two_a_layer,
    "jamba": two_a_layer,
    "kimi_linear": two_a_layer,
    "lara_mini": two_a_layer,
    "lfm2": two_a_layer,
    "lfm2_moe": two_a_layer,
    "qwen3_5": two_a_layer,
    "qwen3_5_moe": two_a_layer,
    "qwen3_5_moe_text": two_a_layer,
    "qwen3_5_text": two_a_layer,
    "qwen3_next": two_a_layer,
    "recurrent_gemma": two_a_layer,
    "rwkv": two_a_layer,
    "xlstm": two_a_layer,
    # norms around or behind the branch: residual + norm(branch(...))
    "afmoe": two_a_layer,
    "exaone4": two_a_layer,
    "flex_olmo": two_a_layer,
    "gemma2": two_a_layer,
    "gemma3": two_a_layer,
    "gemma3_text": two_a_layer,
    "glm4": two_a_layer,
    "kolibri1": two_a_layer,
    "lfm3": two_a_layer,
    "olmo2": two_a_layer,
    "olmo3": two_a_layer,
    "olmo_hybrid": two_a_layer,
    # norm(stream + update): the sum is normed and the norm's output is the next stream
    "bert": two_a_layer,
    "bert-generation": two_a_layer,
    "big_bird": two_a_layer,
    "camembert": two_a_layer,
    "data2vec-text": two_a_layer,
    "ernie": two_a_layer,
    "git": two_a_layer,
    "openai-gpt": two_a_layer,
    "roberta": two_a_layer,
    "xlm": two_a_layer,
    "xlm-roberta": two_a_layer,
    # the same, behind an embedding of another width (electra, rembert, roformer) or of three parts (roc_bert): the stream
    # starts at that projection, and what roc_bert adds to it before the first layer are embeddings: none
    "electra": two_a_layer,
    "rembert": two_a_layer,
    "roc_bert": two_a_layer,
    "roformer": two_a_layer,
    # the same in [T, B, D]; the query stream g does not run without a target mapping
    "xlnet": two_a_layer,
    # pre-norm BERTs: the output modules add input_tensor, the norm stands in the attention and in feed_forward_chunk
    "megatron-bert": two_a_layer,
    "roberta-prelayernorm": two_a_layer,
    "xlm-roberta-xl": two_a_layer,
    # two a layer in both orders of the norm (do_layer_norm_before); the second on the stream flattened to [B * T, D]
    "opt": two_a_layer,
    # dropout_add(update, residual), inside the attention and MLP modules; the residual is the normed input where
    # apply_residual_connection_post_layernorm is set
    "bloom": two_a_layer,
    # two additions of two modules: norm_attn_norm hands on the sum and its norm, the block adds the experts
    "dbrx": two_a_layer,
    # scaled: residual + update * a constant of the config
    "granite": two_a_layer,
    "granite_swa": two_a_layer,
    "granitemoe": two_a_layer,
    "granitemoe_swa": two_a_layer,
    "granitemoehybrid": two_a_layer,
    "granitemoeshared": two_a_layer,
    "hyperclovax": two_a_layer,
    "minicpm3": two_a_layer,
    # both terms scaled by the depth: update / sqrt(n) + residual * sqrt((n - 1) / n)
    "beam": two_a_layer,
    # the residual scaled by a learned vector: vector * residual + update
    "doge": two_a_layer,
    # both terms shifted and scaled by learned vectors, the stream in float32
    "zaya": two_a_layer,
    # alpha * norm(stream) + beta * update: the normed input is the residual
    "minimax": two_a_layer,
    # the whole sum scaled in place after each layer; no branch of the layer's embedding
    "gemma4_unified": two_a_layer,
    "gemma4_unified_text": two_a_layer,
    "gemma4_unified_assistant": two_a_layer,
    # interpolation on a normed stream, stream + rate * (update - stream); the middle layers run n_recurrent_loops times;
    # norm(stream) + the first layers' output, before each loop, merges two states of the stream: none
    "dory": two_a_layer_of_three_parts,
    # two stacks called in cycles, the first low ones under no_grad; low state + high state merges two streams: none
    "hrm_text": two_a_layer_and_cycle,
    # short convolutions keep their own input, conv(u) + u, inside the branch: none
    "inkling_text": two_a_layer,
    # the first layer of a block starts the stream anew with its attention's output z: there z + conv(z) takes the place of the
    # attention's addition; elsewhere conv(u) + u is inside the branches, and the attention over earlier blocks adds nothing
    "inkling2_text": two_a_layer,
    # the same; the layers of the loop run loop_num_passes times; messages of the previous pass enter the branches only
    "inkling2_loop_text": two_a_looped_layer,
    # hyper-connections: each branch writes into all streams by one addition, post * update + mix(streams) or + streams
    "deepseek_v4": two_a_layer,
    "hy_v4": two_a_layer,
    # hyper-connections, and layers that first add a gated n-gram embedding into the streams
    "qwen4_exp": two_a_layer_and_one_a_lexical_layer,
    "qwen4_exp_text": two_a_layer_and_one_a_lexical_layer,
    # parallel: residual + attention + mlp
    "cohere": two_a_layer,
    "cohere2": two_a_layer,
    "cohere2_moe": two_a_layer,
    "cohere_compass_text": two_a_layer,
    # parallel: attention + mlp + residual, the updates summed first
    "codegen": two_a_layer,
    "gptj": two_a_layer,
    "phi": two_a_layer,
    # parallel by use_parallel_residual: mlp + attention + stream (NeoX), residual + attention + mlp (StableLM); else in turn
    "gpt_neox": two_a_layer,
    "stablelm": two_a_layer,
    # parallel by parallel_attn or new_decoder_architecture: mlp += attention, then + residual; else in turn
    "falcon": two_a_layer,
    # attention + SSM summed before they join (two), then the MLP
    "falcon_h1": three_a_layer,
    # attention, attention, MLP, MLP and a shortcut MoE that joins with the second MLP: residual + mlp + shortcut
    "longcat_flash": five_a_double_layer,
    # a third addition where hidden_size_per_layer_input is set: the gated embedding of the layer; dense MLP + experts are one
    "gemma4": two_a_layer_and_one_of_its_embedding,
    "gemma4_text": two_a_layer_and_one_of_its_embedding,
    "gemma4_assistant": two_a_layer_and_one_of_its_embedding,
    # attention, LAuReL (low rank, beside the attention) and MLP into the active stream, the layer's embedding into the others;
    # AltUp's predict and correct mix the streams, and LAuReL's own x + low_rank(x) is inside the branch: none
    "gemma3n": four_a_layer,
    "gemma3n_text": four_a_layer,
    # a bottleneck adapter of the language after the MLP, written through a mask, += its residual
    "xmod": three_a_layer,
    # one mixer a layer
    "falcon_mamba": one_a_layer,
    "mamba": one_a_layer,
    "mamba2": one_a_layer,
    "nemotron_h": one_a_layer,
    # the shared transformer (no residual inside) is added to the SSM's input only, the stream gets the SSM's output alone
    "zamba": one_a_layer,
    "zamba2": one_a_layer,
    # cross-attention layers are left out of a call without an image
    "mllama": two_a_self_attending_layer,
    # decoders of encoder-decoders, without an encoder's output: the cross-attention does not run
    "bart": two_a_decoder_layer,
    "bigbird_pegasus": two_a_decoder_layer,
    "blenderbot": two_a_decoder_layer,
    "blenderbot-small": two_a_decoder_layer,
    "marian": two_a_decoder_layer,
    "mbart": two_a_decoder_layer,
    "mvp": two_a_decoder_layer,
    "pegasus": two_a_decoder_layer,
    "plbart": two_a_decoder_layer,
    "trocr": two_a_decoder_layer,
    "whisper": two_a_decoder_layer,
    # the same, under another name; the stream holds the ngram streams behind the tokens, [B, (1 + ngram) * T, D]
    "prophetnet": two_a_numbered_decoder_layer,
    # the same, the decoder is a config of its own
    "musicgen": two_a_layer,
    "musicgen_melody": two_a_layer,
    # reversible, two streams: x1 + attention(x2), x2 + feed_forward(y1), inside a custom autograd function
    "reformer": two_a_layer,
    # bytes -> patches -> bytes, and an entropy model that cuts the patches; a cross-attention returns its own input + update,
    # which is then added to that input once more (stream + stream): one
    "blt": bytes_patches_bytes,
}
