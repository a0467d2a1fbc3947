"""Each placement and each scale against its equation, written out here, in float64."""

import math
from functools import partial

import pytest
import torch
from torch.overrides import TorchFunctionMode

from propcheck.config.decoder import DecoderConfig
from propcheck.targets.decoder.model import Decoder
from propcheck.targets.decoder.residual import UpdateScale, deepnorm_alpha, deepnorm_beta, equation, sub_ln_gain

PLACEMENTS = ["pre", "post", "sandwich", "reordered", "deepnorm", "sub-ln", "lns", "mix-ln", "keel", "none"]
SCALES = ["plain", "rezero", "layerscale", "depth"]


def tiny(placement="pre", scale="plain", **residual):
    """A decoder of four blocks with random gains and scales, in float64."""
    config = DecoderConfig.model_validate(
        {
            "model": {
                "layers": 4,
                "width": 12,
                "vocabulary": 11,
                "attention": {"heads": 3},
                "ffn": {"width": 10},
                "norm": {"eps": 1e-3},
            },
            "residual": {"placement": placement, "scale": scale, **residual},
        }
    )
    torch.manual_seed(0)
    model = Decoder(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight


def sub_normed(F):
    """F with a norm in front of its output projection (sub-LN), from what F itself gives that norm."""
    projection = F.o_proj if hasattr(F, "o_proj") else F.down_proj

    def run(x):
        given = []
        handle = F.sub_norm.register_forward_pre_hook(lambda _, args: given.append(args[0]))
        F(x)
        handle.remove()
        if hasattr(F, "down_proj"):
            torch.testing.assert_close(given[0], torch.nn.functional.silu(F.gate_proj(x)) * F.up_proj(x))
        return rms(given[0], F.sub_norm.weight) @ projection.weight.T

    return run


def by_hand(model, ids, placement, scale):
    x = model.embedding.weight[ids]
    for number, block in enumerate(model.blocks, start=1):
        modules = dict(block.named_modules())
        for name in ("mixer", "ffn"):
            F = modules[name]
            N = partial(rms, weight=getattr(modules.get(f"{name}_norm"), "weight", None))
            M = partial(rms, weight=getattr(modules.get(f"{name}_output_norm"), "weight", None))
            learned = modules[f"{name}_update"].scale
            s = {"plain": 1.0, "depth": 8**-0.5, "rezero": learned, "layerscale": learned}[scale]  # depth: 2 * 4 sublayers
            if placement == "pre" or (placement == "mix-ln" and number > 1):
                x = x + s * F(N(x))
            elif placement in ("post", "mix-ln"):  # of mix-ln one block in four
                x = N(x + s * F(x))
            elif placement == "sandwich":
                x = x + s * M(F(N(x)))
            elif placement == "reordered":
                x = x + s * N(F(x))
            elif placement == "deepnorm":
                x = N(1.681792830507429 * x + s * F(x))  # (2 * 4)^(1/4)
            elif placement == "sub-ln":
                x = x + s * sub_normed(F)(N(x))
            elif placement == "lns":
                x = x + s * F(N(x) / math.sqrt(number))
            elif placement == "keel" and number > 1:
                x = M(8 * x + s * F(N(x)))  # 2 * 4 sublayers
            elif placement == "keel":  # the first block: no factor, and no outer norm at its mixer
                x = M(x + s * F(N(x))) if name == "ffn" else x + s * F(N(x))
            else:
                x = x + s * F(x)
    if placement in ("pre", "sandwich", "reordered", "sub-ln", "lns", "mix-ln"):
        x = rms(x, model.final_norm.weight)
    else:
        assert model.final_norm is None
    return x @ model.head.weight.T


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_logits_follow_the_equation(placement, scale):
    model = tiny(placement, scale)
    ids = torch.randint(11, (2, 5))
    torch.testing.assert_close(model(ids), by_hand(model, ids, placement, scale), rtol=1e-12, atol=1e-12)


def test_complete_p_divides_by_the_number_of_sublayers():
    update = UpdateScale(3, 2, tiny("pre", "depth", depth_power=1.0).config.residual, 0.0)
    assert update(torch.ones(1, 1, 3)).tolist() == [[[0.25, 0.25, 0.25]]]


def test_first_values_of_the_learned_scales():
    config = tiny("pre", "layerscale", layerscale=1e-4).config.residual
    assert torch.equal(UpdateScale(3, 2, config, 0.0).scale, torch.full((3,), 1e-4))
    config = tiny("pre", "rezero").config.residual
    assert UpdateScale(3, 2, config, 0.0).scale.tolist() == [0.0]


def test_deepnorm_constants_of_64_layers_are_the_published_ones():
    assert deepnorm_alpha(64) == pytest.approx(3.3636, abs=5e-5)
    assert deepnorm_beta(64) == pytest.approx(0.2102, abs=5e-5)


def test_sub_ln_gain_of_64_layers():
    assert sub_ln_gain(64) == pytest.approx(2.20273, abs=5e-6)  # sqrt(ln 128) = sqrt(4.852030)


def test_mix_ln_rounds_the_quarter_down():
    post = [equation("mix-ln", layer, 11, mixer=True)[0] for layer in range(11)]
    assert post == ["post"] * 2 + ["pre"] * 9  # floor(11 / 4), arXiv 2412.13795


def test_keel_keeps_the_weight_of_the_stream_near_one():
    """prod α / sqrt(α² + 1) over L sublayers with α = L tends to 1 (arXiv 2601.19895): (1 + 1/L²)^(-L/2) = 0.9961 at 128."""
    alphas = [equation("keel", layer, 64, mixer=mixer)[1] for layer in range(1, 64) for mixer in (True, False)]
    assert set(alphas) == {128.0}
    assert math.prod(a / math.sqrt(a * a + 1) for a in alphas) == pytest.approx(0.9962, abs=1e-4)


def test_the_embedding_norm_comes_before_the_first_block():
    model = tiny("none", embedding_norm=True)
    ids = torch.randint(11, (1, 4))
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(ids)
    torch.testing.assert_close(seen[0], rms(model.embedding.weight[ids], model.embedding_norm.weight))


class Additions(TorchFunctionMode):
    """Counts additions of two tensors of the stream's shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        names = {"add", "__add__", "__radd__"}
        if getattr(func, "__name__", "") in names and all(getattr(x, "shape", None) == self.shape for x in args[:2]):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_site_is_one_plain_addition(placement, scale):
    model = tiny(placement, scale)
    with Additions((2, 5, 12)) as additions:
        model(torch.randint(11, (2, 5)))
    assert additions.count == 8
