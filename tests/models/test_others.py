"""Encoders, encoder-decoders, vision and speech of transformers: how many sites, of what kind, and what is measured there."""

import math

import pytest
from once import scanned_once
from others import CANNOT_BF16, OTHERS
from others_sites import OTHERS_SITES

import propcheck
from propcheck.targets.losses import random_direction

RUNS = [
    (name, precision) for name in OTHERS for precision in ("fp32", "bf16") if precision == "fp32" or name not in CANNOT_BF16
]
PAIR, TRIPLE = ["attention", "mlp"], ["attention", "attention", "mlp"]
ENCODER_DECODER = PAIR * 3 + TRIPLE * 3
KINDS = {
    **dict.fromkeys(("bert", "roberta", "distilbert", "electra", "albert", "longformer", "modernbert", "xlnet"), PAIR * 3),
    **dict.fromkeys(("vit", "deit", "dinov2", "beit", "videomae", "ast"), PAIR * 3),
    **dict.fromkeys(("bart", "mbart", "pegasus", "marian", "t5", "whisper", "speech-to-text", "blip"), ENCODER_DECODER),
    "swin": PAIR * 4,
    "clip": PAIR * 6,
    "perceiver": [*PAIR * 4, "mlp"],
}
# Sites outside of the blocks, by number.
OUTSIDE = {
    "wav2vec2": {0}, "hubert": {0},  # the positional convolution
    "deberta-v2": {2},  # the convolution behind the first layer
    "funnel": {6},  # the skip from the encoder's first block to the decoder
    "perceiver": {0, 1, 8},  # the cross-attentions into the latents and out of them
    "siglip": {6},  # the pooling head
    "detr": {0},  # the backbone's
    "mask2former": set(range(8, 22)),  # the blocks are the backbone's
}  # fmt: skip
VISION_FIRST = {"clip", "siglip"}
GRADIENTS = ("grad_stream_norm", "grad_update_norm", "grad_sum_norm")
WITHOUT_GRADIENT = {
    # Reversible layers run in an autograd.Function of their own, whose forward has no graph.
    **{("reformer", number): GRADIENTS for number in range(6)},
    ("detr", 0): GRADIENTS,  # the first stages of the backbone are frozen
    ("detr", 7): ("grad_stream_norm",),  # of queries that are a constant
}
# DETR's queries start as zeros, and the first self-attention among them, of values without biases yet, leaves them so.
ZERO = {("detr", 7): ("stream_rms", "update_rms", "sum_rms"), ("detr", 8): ("stream_rms",)}
CLASSIFIERS = {"xlnet", "ast", "vit", "deit", "dinov2", "beit", "swin", "convnext", "poolformer", "videomae"}
# The loss is none of classes, or not a row of logits for each label.
WITHOUT_UNIFORM = {"wav2vec2", "hubert", "segformer", "detr", "mask2former", "clip", "siglip"}


@pytest.fixture(scope="module")
def scans():
    return scanned_once(_target)


def _target(name):
    model, batch = OTHERS[name]()
    has_loss = "labels" in batch or "return_loss" in batch
    return propcheck.Target(model, batch=batch, loss=None if has_loss else random_direction)


def test_the_table_covers_every_model():
    assert OTHERS_SITES.keys() == OTHERS.keys()
    assert CANNOT_BF16.keys() <= OTHERS.keys()
    print(f"\n{len(OTHERS)} models scanned in fp32 and bf16; not in bf16: {CANNOT_BF16}")


@pytest.mark.parametrize(("name", "precision"), RUNS)
def test_every_residual_addition_is_found_in_order(name, precision, scans):
    rows = scans(name, precision).record.sites
    assert len(rows) == OTHERS_SITES[name]
    assert [row.site for row in rows] == list(range(len(rows)))
    assert all(row.module is not None and row.placement is not None for row in rows)


@pytest.mark.parametrize(("name", "precision"), RUNS)
def test_a_site_in_a_block_knows_its_block(name, precision, scans):
    rows = scans(name, precision).record.sites
    assert {row.site for row in rows if row.block is None} == OUTSIDE.get(name, set())
    blocks = [row.block for row in rows if row.block is not None]
    # The vision tower runs before the text's, which comes first among the modules.
    turn = len(blocks) // 2 if name in VISION_FIRST else 0
    assert blocks[turn:] + blocks[:turn] == sorted(blocks)


@pytest.mark.parametrize(("name", "precision"), RUNS)
def test_what_is_measured_at_a_site_is_finite_and_not_zero(name, precision, scans):
    run = scans(name, precision)
    assert math.isfinite(run.loss.value)
    for row in run.record.sites:
        zero = ZERO.get((name, row.site), ())
        for column in ("stream_rms", "update_rms", "sum_rms"):
            value = getattr(row, column)
            assert value == 0 if column in zero else 0 < value < math.inf, (row.site, column)
        none = WITHOUT_GRADIENT.get((name, row.site), ())
        for column in GRADIENTS:
            value = getattr(row, column)
            assert value is None if column in none else 0 < value < math.inf, (row.site, column)


@pytest.mark.parametrize("name", KINDS)
def test_the_kinds_of_sublayers(name, scans):
    assert [row.sublayer for row in scans(name, "fp32").record.sites] == KINDS[name]


def test_convolutions_of_one_pixel_are_an_mlp(scans):
    assert [row.sublayer for row in scans("poolformer", "fp32").record.sites][1::2] == ["mlp"] * 5


@pytest.mark.parametrize("name", ["convnext", "poolformer"])
def test_the_width_of_a_stream_of_images_is_its_channels(name, scans):
    a_layer = len(scans(name, "fp32").record.sites) // 5
    widths = [channels for channels in (16, 32, 32, 64, 64) for _ in range(a_layer)]
    found = [(row.sum_norm / row.sum_rms) ** 2 for row in scans(name, "fp32").record.sites]
    assert found == pytest.approx(widths)


@pytest.mark.parametrize("name", ["t5", "whisper", "speech-to-text", "siglip", "swin", "poolformer"])
def test_where_a_new_stream_begins_is_no_jump_and_no_collapse(name, scans):
    """A decoder after its encoder, a tower after the other, a stage behind merged patches: each at a scale of its own."""
    assert not [finding.message for finding in scans(name, "fp32").findings if finding.rule in ("PC202", "PC205")]


def test_a_jump_in_one_of_two_towers_is_said_of_that_tower(scans):
    """The text tower's embedding (std 0.02) is buried by its first updates; it does not begin where the images end."""
    (finding,) = [finding for finding in scans("clip", "fp32").findings if finding.rule in ("PC202", "PC205")]
    assert finding.site.module.startswith("text_model.")


@pytest.mark.parametrize(("name", "precision"), RUNS)
def test_nothing_goes_unobserved_and_the_loss_of_a_uniform_guess_is_known(name, precision, scans):
    run = scans(name, precision)
    assert not {finding.rule for finding in run.findings} & {"PC101", "PC102", "PC502", "PC503"}
    assert not [finding for finding in run.findings if finding.severity == "error"]
    if name in WITHOUT_UNIFORM:
        assert run.loss.uniform is None
    else:
        assert run.loss.uniform == pytest.approx(math.log(4 if name in CLASSIFIERS else 512))
