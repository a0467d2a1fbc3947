"""With the same weights, the reference decoder equals transformers: logits, loss and every gradient.

The error of a tensor is max|ours - theirs| / max|theirs|, where tensors are cut and laid out as transformers
holds them (a fused QKV bias is one tensor: the gradient of its key third is zero but for rounding).
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.nn.functional as F

from propcheck.config.decoder import DecoderConfig
from propcheck.targets.decoder.model import Decoder

pytest.importorskip("transformers")


def qwen(layers=4, **changes):
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    sizes = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    } | changes
    pattern = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    theirs = Qwen3_5ForCausalLM._from_config(
        Qwen3_5TextConfig(num_hidden_layers=layers, layer_types=pattern, use_cache=False, **sizes), attn_implementation="eager"
    )
    return theirs, DecoderConfig.model_validate(
        {
            "model": {
                "layers": layers,
                "width": sizes["hidden_size"],
                "vocabulary": sizes["vocab_size"],
                "mixers": ["deltanet", "deltanet", "deltanet", "attention"],
                "attention": {
                    "heads": sizes["num_attention_heads"],
                    "kv_heads": sizes["num_key_value_heads"],
                    "head_width": sizes["head_dim"],
                    "qk_norm": True,
                    "gate": True,
                    "rotary": 0.25,
                    "rotary_theta": 1e7,
                },
                "deltanet": {
                    "key_heads": sizes["linear_num_key_heads"],
                    "value_heads": sizes["linear_num_value_heads"],
                    "key_head_width": sizes["linear_key_head_dim"],
                    "value_head_width": sizes["linear_value_head_dim"],
                },
                "ffn": {"width": sizes["intermediate_size"], "kind": "swiglu"},
                "norm": {"kind": "rmsnorm", "eps": 1e-6, "zero_centered": True},
            },
        }
    )


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM._from_config(
        LlamaConfig(
            vocab_size=97,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            use_cache=False,
        ),
        attn_implementation="eager",
    )
    return theirs, DecoderConfig.model_validate(
        {
            "model": {
                "layers": 3,
                "width": 48,
                "vocabulary": 97,
                "attention": {"heads": 6, "kv_heads": 2},
                "ffn": {"width": 80, "kind": "swiglu"},
                "norm": {"kind": "rmsnorm", "eps": 1e-5},
            },
        }
    )


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel._from_config(
        GPT2Config(
            vocab_size=97,
            n_positions=140,
            n_embd=48,
            n_layer=3,
            n_head=4,
            embd_pdrop=0,
            resid_pdrop=0,
            attn_pdrop=0,
            use_cache=False,
        ),
        attn_implementation="eager",
    )
    return theirs, DecoderConfig.model_validate(
        {
            "model": {
                "layers": 3,
                "width": 48,
                "vocabulary": 97,
                "attention": {"heads": 4, "rotary": 0.0, "bias": True},
                "ffn": {"kind": "gelu-tanh", "bias": True},
                "norm": {"kind": "layernorm", "eps": 1e-5},
                "positions": 140,
                "tied_head": True,
            },
        }
    )


# Their name piece -> ours. Order matters: the first pieces are prefixes of a path, the rest module names.
NAMES = {
    "transformers": {
        "model.embed_tokens": "embedding",
        "model.layers": "blocks",
        "model.norm": "final_norm",
        "lm_head": "head",
        "linear_attn": "mixer",
        "self_attn": "mixer",
        "mlp": "ffn",
        "input_layernorm": "mixer_norm",
        "post_attention_layernorm": "ffn_norm",
    },
    "gpt2": {
        "transformer.wte": "embedding",
        "transformer.wpe": "position_embedding",
        "transformer.h": "blocks",
        "transformer.ln_f": "final_norm",
        "attn.c_proj": "mixer.o_proj",
        "mlp.c_fc": "ffn.up_proj",
        "mlp.c_proj": "ffn.down_proj",
        "ln_1": "mixer_norm",
        "ln_2": "ffn_norm",
    },
}


def parts(theirs_name, tensor):
    """Their parameter as our (name, tensor) pairs."""
    if ".attn.c_attn." in theirs_name:  # fused q, k, v; Conv1D holds [in, out]
        prefix, leaf = theirs_name.replace("transformer.h", "blocks").split("attn.c_attn.")
        thirds = tensor.t().chunk(3)  # t() leaves the bias, one-dimensional, as it is
        return [(f"{prefix}mixer.{role}_proj.{leaf}", third) for role, third in zip("qkv", thirds, strict=True)]
    is_gpt2 = theirs_name.startswith("transformer.")
    name = theirs_name
    for old, new in NAMES["gpt2" if is_gpt2 else "transformers"].items():
        name = name.replace(old + ".", new + ".")
    transposed = is_gpt2 and ".c_" in theirs_name
    return [(name, tensor.t() if transposed else tensor)]


def paired(make, *, mild=True):
    """Both models with the same weights, every gain and bias moved off its first value.

    ``mild`` weights are transformers' own draw, a convolution that does not stifle the core (0.1) and decays of 1-25 % a
    token. With A up to 16, as drawn, transformers' gradient of A_log is itself only right to about 1e-3 in fp32 (it comes from
    differences that cancel), so there both are compared in fp64.
    """
    torch.manual_seed(0)
    theirs, config = make()
    ours = Decoder(config)
    mine = dict(ours.named_parameters())
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if mild and name.endswith("A_log"):
                parameter.uniform_(0.01, 0.2).log_()
            std = 0.1 if parameter.ndim == 1 or "conv1d" in name else 0.02
            parameter.add_(torch.randn_like(parameter), alpha=std if mild else 0.1)
            for our_name, tensor in parts(name, parameter):
                mine.pop(our_name).copy_(tensor)
    assert not mine, "parameters that transformers does not have"
    return theirs, ours


def check(theirs, ours, tokens, limit):
    """Compare the logits, the loss and every gradient of one batch."""
    ids, targets = torch.randint(97, (2, 2, tokens))
    their_logits, our_logits = theirs(ids).logits, ours(ids)
    their_loss, our_loss = (F.cross_entropy(x.flatten(0, 1), targets.flatten()) for x in (their_logits, our_logits))
    their_loss.backward()
    our_loss.backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    largest = max(parameter.grad.abs().max() for parameter in theirs.parameters())
    errors = {"logits": relative(our_logits, their_logits), "loss": relative(our_loss, their_loss)}
    for name, parameter in theirs.named_parameters():
        # The softmax over one key is constant, so what leads to its logits has gradient zero, which rounding makes about 1e-10:
        # compare that with the largest gradient of the model.
        zero = tokens == 1 and any(part in name for part in ("self_attn.q_", "self_attn.k_"))
        scale = largest if zero else parameter.grad.abs().max()
        pairs = [(gradients[our_name], grad) for our_name, grad in parts(name, parameter.grad)]
        errors[name] = max(((a - b).abs().max() / scale).item() for a, b in pairs)
    worst = max(errors, key=errors.__getitem__)
    print(f"logits {errors['logits']:.1e}, loss {errors['loss']:.1e}, worst {errors[worst]:.1e} ({worst})")
    assert errors[worst] <= limit, worst


def relative(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("tokens", [1, 7, 63, 64, 65, 130])
@pytest.mark.parametrize("make", [qwen, llama, gpt2])
def test_logits_loss_and_gradients_equal_transformers(make, tokens):
    check(*paired(make), tokens, 1e-5)


def test_every_head_count_and_width_is_told_apart():
    """One value head for a key head, one key/value head for all query heads, other widths."""
    changes = {"num_key_value_heads": 1, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 8}
    check(*paired(lambda: qwen(**changes)), 70, 1e-5)


@pytest.mark.parametrize("tokens", [7, 130])
@pytest.mark.parametrize("make", [qwen, llama, gpt2])
def test_the_equations_are_the_same_in_double_precision(make, tokens, monkeypatch):
    """With fp64 in the place of fp32 on both sides, and decays as they are drawn, the two agree to 1e-11."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        theirs, ours = paired(make, mild=False)
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
        monkeypatch.setattr(torch, "float32", torch.float64)
        monkeypatch.setattr(torch, "float", torch.float64)
        if rotary := getattr(theirs.base_model, "rotary_emb", None):
            rotary.inv_freq, _ = rotary.compute_default_rope_parameters(theirs.config)
        check(theirs, ours, tokens, 1e-11)
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-mixed"])
@pytest.mark.parametrize("make", [qwen, llama, gpt2])
def test_rounding_is_no_worse_than_that_of_transformers(make, precision):
    """Distance of the logits to those in fp32: at most a tenth more than that of transformers in the same precision."""
    theirs, ours = paired(make)
    ids = torch.randint(97, (2, 100))
    with torch.no_grad():
        truth = ours(ids)
        if precision == "bf16-mixed":
            with torch.autocast("cpu", torch.bfloat16):
                mine, reference = ours(ids), theirs(ids).logits
        else:
            dtype = torch.bfloat16 if precision == "bf16" else torch.float16
            mine, reference = ours.to(dtype)(ids), theirs.to(dtype)(ids).logits
    mine_off, reference_off = ((x.float() - truth).norm() / truth.norm() for x in (mine, reference))
    print(f"ours {mine_off:.4f}, transformers {reference_off:.4f}")
    assert mine_off <= 1.1 * reference_off


def test_full_size_qwen_has_the_published_number_of_parameters():
    """Qwen3.8-27B, built on the meta device: 26.9 billion, the same as transformers and as the shapes multiplied out."""
    with torch.device("meta"):
        theirs, config = qwen(
            layers=64,
            vocab_size=248320,
            hidden_size=5120,
            intermediate_size=17408,
            num_attention_heads=24,
            num_key_value_heads=4,
            head_dim=256,
            linear_num_key_heads=16,
            linear_num_value_heads=48,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
        )
        ours = Decoder(config)
    count = sum(parameter.numel() for parameter in ours.parameters())
    print(f"Qwen3.8-27B: {count:,} parameters")
    d = 5120
    ffn = 3 * d * 17408
    attention = d * (2 * 24 * 256 + 2 * 4 * 256) + 24 * 256 * d + 2 * 256
    deltanet = d * (2 * 16 * 128 + 2 * 48 * 128 + 2 * 48) + 10240 * 4 + 2 * 48 + 128 + 48 * 128 * d
    assert count == 2 * 248320 * d + 64 * (ffn + 2 * d) + 16 * attention + 48 * deltanet + d
    shapes = {name: parameter.shape for name, parameter in ours.named_parameters()}
    for name, parameter in theirs.named_parameters():
        ((our_name, _),) = parts(name, parameter)
        assert shapes.pop(our_name) == parameter.shape
    assert not shapes
