"""The decoder as a whole: precisions, construction, dropout, and what the engine relies on."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from propcheck.config.decoder import DecoderConfig, FFNConfig
from propcheck.errors import PropcheckError
from propcheck.targets.decoder.ffn import FeedForward
from propcheck.targets.decoder.model import Decoder

HYBRID = {
    "layers": 4,
    "width": 32,
    "vocabulary": 61,
    "mixers": ["deltanet", "deltanet", "deltanet", "attention"],
    "attention": {"heads": 4, "kv_heads": 2, "head_width": 16, "qk_norm": True, "gate": True, "rotary": 0.25},
    "deltanet": {"key_heads": 2, "value_heads": 4, "key_head_width": 8, "value_head_width": 8, "chunk": 16},
    "ffn": {"width": 48},
    # A large eps: the first tokens' q·k may be near zero, and the head norm would amplify its rounding without bound.
    "norm": {"zero_centered": True, "eps": 1e-2},
}
GPT = {
    "layers": 3,
    "width": 32,
    "vocabulary": 61,
    "attention": {"heads": 4, "rotary": 0.0, "bias": True},
    "ffn": {"kind": "gelu-tanh", "bias": True},
    "norm": {"kind": "layernorm"},
    "positions": 64,
    "tied_head": True,
}
PLACEMENTS = ["pre", "post", "sandwich", "reordered", "deepnorm", "sub-ln", "lns", "mix-ln", "keel"]
IDS = torch.randint(61, (2, 37), generator=torch.Generator().manual_seed(0))


def config(model, keep_fp32=("A_log", "dt_bias"), **sections):
    sections = {"init": {"scheme": "fan-in", "embedding_std": 1.0}} | sections
    return DecoderConfig.model_validate({"model": model, "keep_fp32": keep_fp32, **sections})


def build(settings, dtype=torch.float32):
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        return Decoder(settings)
    finally:
        torch.set_default_dtype(default)


def loss_of(logits):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())


def error(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("model", [HYBRID, GPT], ids=["hybrid", "gpt"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_fp32(dtype, model, placement):
    """Logits within 16 roundings (2^-8 and 2^-11), gradients within 64, of those of the same weights in fp32."""
    settings = config(model, residual={"placement": placement})
    half = build(settings, dtype)
    full = build(settings)
    full.load_state_dict(half.state_dict())
    logits, truth = half(IDS), full(IDS)
    loss_of(logits).backward()
    loss_of(truth).backward()
    rounding = torch.finfo(dtype).eps / 2
    assert logits.dtype == dtype
    assert error(logits, truth) < 16 * rounding
    gradients = torch.cat([p.grad.flatten().double() for p in half.parameters()])
    assert gradients.isfinite().all()
    assert error(gradients, torch.cat([p.grad.flatten() for p in full.parameters()])) < 64 * rounding


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("model", [HYBRID, GPT], ids=["hybrid", "gpt"])
def test_autocast_follows_fp32(model, placement):
    net = build(config(model, residual={"placement": placement}))
    truth = net(IDS)
    loss_of(truth).backward()
    expected = torch.cat([p.grad.flatten() for p in net.parameters()])
    net.zero_grad()
    streams = []
    for block in net.blocks:
        block.register_forward_hook(lambda _, args, out: streams.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits = net(IDS)
    loss_of(logits).backward()
    assert logits.dtype == torch.bfloat16
    assert set(streams) == {torch.float32}
    assert error(logits, truth) < 16 * 2**-8
    assert error(torch.cat([p.grad.flatten() for p in net.parameters()]), expected) < 64 * 2**-8


def test_only_the_named_parameters_stay_in_fp32():
    model = build(config(HYBRID), torch.bfloat16)
    for name, parameter in model.named_parameters():
        kept = name.split(".")[-1] in ("A_log", "dt_bias")
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
    assert {p.dtype for p in build(config(HYBRID, keep_fp32=()), torch.bfloat16).parameters()} == {torch.bfloat16}


def test_a_scale_in_fp32_leaves_the_stream_in_bf16():
    model = build(config(HYBRID, keep_fp32=("scale",), residual={"scale": "layerscale"}), torch.bfloat16)
    assert model.blocks[0].ffn_update.scale.dtype == torch.float32
    assert model.blocks[0](torch.zeros(1, 5, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_matrices_cannot_be_kept_in_fp32():
    with pytest.raises(PropcheckError, match="keep_fp32"):
        Decoder(config(HYBRID, keep_fp32=("weight",)))


@pytest.mark.parametrize("scale", ["plain", "layerscale"])
@pytest.mark.parametrize("model", [HYBRID, GPT], ids=["hybrid", "gpt"])
def test_construction_and_forward_under_fake_tensors(model, scale):
    with FakeTensorMode():
        net = build(config(model, residual={"scale": scale}), torch.bfloat16)
        logits = net(torch.zeros(2, 37, dtype=torch.long))
    assert all(isinstance(parameter, FakeTensor) for parameter in net.parameters())
    assert logits.shape == (2, 37, 61)
    assert logits.dtype == torch.bfloat16


@pytest.mark.parametrize("model", [HYBRID, GPT], ids=["hybrid", "gpt"])
def test_a_block_is_a_function_of_its_stream_alone(model):
    """The engine runs blocks again, one by one, from the streams that it kept."""
    net = build(config(model))
    kept = []
    for block in net.blocks:
        block.register_forward_hook(lambda _, args, out: kept.append((args, out)))
    net(IDS)
    calls = list(kept)
    assert not list(net.buffers())
    for block, (args, out) in reversed(list(zip(net.blocks, calls, strict=True))):
        assert len(args) == 1
        assert torch.equal(block(*args), out)


def test_no_position_sees_a_later_token():
    net = build(config(HYBRID))
    changed = IDS.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 61
    before, after = net(IDS), net(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=1e-4, atol=1e-5)
    assert (before[:, 20:] - after[:, 20:]).abs().amax(-1).min() > 1e-3


def test_dropout_acts_on_embedding_and_updates_in_training_only():
    settings = config({**GPT, "dropout": 0.25}, residual={"scale": "rezero"})
    net = build(settings).train()
    inputs = []
    net.blocks[0].register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    torch.manual_seed(0)
    net(IDS)
    stream = inputs[0]
    exact = net.embedding(IDS) + net.position_embedding(torch.arange(37))
    survivors = stream != 0
    n = stream.numel()
    assert survivors.double().mean().item() == pytest.approx(0.75, abs=5 * (0.1875 / n) ** 0.5)
    torch.testing.assert_close(stream[survivors], (exact / 0.75)[survivors])

    update = net.blocks[0].ffn_update
    with torch.no_grad():
        update.scale.fill_(3.0)
    values = update(torch.ones(1, 100, 100))
    assert values.unique().tolist() == [0.0, 4.0]  # 3 / 0.75
    assert values.mean().item() == pytest.approx(3.0, rel=0.05)

    net.eval()
    assert torch.equal(net(IDS), net(IDS))
    assert torch.equal(inputs[-1], exact)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # up 2 and gate 1: SiLU(1) = 0.731059, GELU(1) = 0.841345, GELU(2) = 1.954500, its tanh form 1.954598
        ("swiglu", 2 * 0.731059),
        ("geglu", 2 * 0.841345),
        ("gelu", 1.954500),
        ("gelu-tanh", 1.954598),
        ("relu", 2.0),
    ],
)
def test_each_ffn_kind_has_its_activation(kind, expected):
    net = FeedForward(1, FFNConfig(width=1, kind=kind))
    with torch.no_grad():
        net.up_proj.weight.fill_(2.0)
        net.down_proj.weight.fill_(1.0)
        if net.gate_proj is not None:
            net.gate_proj.weight.fill_(1.0)
    assert net(torch.ones(1, 1, 1)).item() == pytest.approx(expected, abs=2e-6)


def test_more_tokens_than_positions_are_refused():
    with pytest.raises(PropcheckError, match=r"the input has 65 tokens, more than model\.positions = 64"):
        build(config(GPT))(torch.zeros(1, 65, dtype=torch.long))


def test_an_odd_number_of_rotated_elements_is_refused():
    with pytest.raises(PropcheckError, match=r"attention\.rotary = 0\.5 rotates 3 of 6"):
        Decoder(config({**GPT, "attention": {"heads": 4, "head_width": 6, "rotary": 0.5}}))
