"""What a scan makes of each placement of the reference decoder: where the norms are is seen, not read from the config."""

import pytest

import propcheck
from propcheck.config.decoder import DecoderConfig
from propcheck.targets.decoder.model import Decoder

LAYERS = 4
SEEN = {
    "pre": ["pre"] * 8,
    "post": ["post"] * 8,
    "sandwich": ["sandwich"] * 8,
    "reordered": ["reordered"] * 8,
    "deepnorm": ["deepnorm"] * 8,
    "none": ["none"] * 8,
    "sub-ln": ["pre"] * 8,  # its second norm is inside the branch
    "lns": ["pre"] * 8,
    "mix-ln": ["post"] * 2 + ["pre"] * 6,
    "keel": ["pre"] + ["pre+post"] * 7,
}
# Norms of the width of the stream or of a projection, the final one included.
NORMS = {"sub-ln": 2 * 8 + 1, "lns": 8 + 1, "mix-ln": 8 + 1, "keel": 8 + 7}


def build(placement):
    settings = {
        "model": {
            "layers": LAYERS,
            "width": 48,
            "vocabulary": 97,
            "mixers": ["deltanet", "attention"],
            "attention": {"heads": 4},
            "deltanet": {"key_heads": 2, "value_heads": 4, "key_head_width": 8, "value_head_width": 12, "chunk": 16},
            "ffn": {"width": 80},
        },
        "residual": {"placement": placement},
        "init": {"scheme": "fan-in", "embedding_std": 1.0},
    }
    return Decoder(DecoderConfig.model_validate(settings))


@pytest.mark.parametrize("placement", SEEN)
def test_the_placement_of_every_site_is_seen(placement):
    run = propcheck.scan(build, args={"placement": placement}, tokens=19, batch=2)
    assert list(run.sublayers.placement) == SEEN[placement]
    kinds = set(SEEN[placement])
    assert run.model.placement == (kinds.pop() if len(kinds) == 1 else "mixed")
    assert [row.sublayer for row in run.record.sites] == ["linear_attention", "mlp", "attention", "mlp"] * 2
    errors = {finding.rule for finding in run.findings if finding.severity == "error"}
    assert errors == ({"PC201"} if placement == "none" else set())  # a SwiGLU that reads a bare stream squares it: it explodes


@pytest.mark.parametrize("placement", NORMS)
def test_each_placement_has_its_norms(placement):
    names = [name for name, _ in build(placement).named_parameters() if name.endswith("norm.weight")]
    assert len([name for name in names if ".mixer.norm" not in name]) == NORMS[placement]  # but those of DeltaNet's heads
