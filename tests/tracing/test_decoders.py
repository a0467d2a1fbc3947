"""Every column of both tables, for decoders of every kind, against an independent computation in fp64."""

import math

import numpy as np
import pytest
from reference import columns, run_plainly

from propcheck.api.measurement import measure
from propcheck.api.requests import ScanRequest
from propcheck.config.probe import Probe

SMALL = {
    "layers": 3, "width": 48, "vocabulary": 97, "attention": {"heads": 4, "kv_heads": 2}, "ffn": {"width": 80},
    "deltanet": {"key_heads": 2, "value_heads": 4, "key_head_width": 8, "value_head_width": 12, "chunk": 16},
}  # fmt: skip
GPT2 = {
    "layers": 3, "width": 48, "vocabulary": 97, "positions": 32, "tied_head": True, "norm": {"kind": "layernorm"},
    "attention": {"heads": 4, "rotary": 0.0, "bias": True}, "ffn": {"kind": "gelu-tanh", "bias": True},
}  # fmt: skip
# Large against 2 x 4 tokens: the gradients of its weights are measured through their factors.
WIDE = {
    "layers": 2,
    "width": 96,
    "vocabulary": 331,
    "attention": {"heads": 4, "bias": True},
    "ffn": {"width": 256, "bias": True},
}

DECODERS = {
    "pre": {"model": SMALL},
    "post": {"model": SMALL, "residual": {"placement": "post"}},
    "sandwich": {"model": SMALL, "residual": {"placement": "sandwich"}},
    "reordered": {"model": SMALL, "residual": {"placement": "reordered"}},
    "deepnorm": {"model": SMALL, "residual": {"placement": "deepnorm"}},
    "none": {"model": SMALL, "residual": {"placement": "none"}},
    "deltanet": {"model": {**SMALL, "mixers": ["deltanet", "attention"]}, "init": {"scheme": "fan-in"}},
    "qk-norm, gate, part rotary, 1 + w": {
        "model": {
            **SMALL,
            "attention": {"heads": 4, "kv_heads": 2, "qk_norm": True, "gate": True, "rotary": 0.5},
            "norm": {"zero_centered": True},
        },
    },
    "gpt2": {"model": GPT2, "init": {"scheme": "gpt2"}},
    "gpt2 after": {"model": GPT2, "residual": {"placement": "post", "embedding_norm": True}},
    "factored": {"model": WIDE, "inputs": {"tokens": 4, "batch": 2}, "init": {"scheme": "he"}},
    "factored, tied": {"model": {**WIDE, "tied_head": True}, "inputs": {"tokens": 4, "batch": 2, "source": "uniform"}},
    "layerscale": {"model": SMALL, "residual": {"scale": "layerscale", "placement": "sandwich"}},
    "rezero": {"model": SMALL, "residual": {"scale": "rezero"}},
    "depth": {"model": SMALL, "residual": {"scale": "depth"}},
    "bf16": {"model": {**SMALL, "mixers": ["deltanet", "attention"]}, "precision": {"preset": "bf16"}},
}


def probe_of(settings):
    return Probe.model_validate({"precision": {"preset": "fp32"}, "inputs": {"tokens": 19, "batch": 2}, **settings})


@pytest.fixture(params=DECODERS, scope="module")
def both(request):
    probe = probe_of(DECODERS[request.param])
    with pytest.MonkeyPatch.context() as patch:
        reference = run_plainly(probe, patch)
    return probe, measure(ScanRequest("test", probe)), reference


def close(value, expected, relative):
    if expected is None or value is None:
        return value is expected
    return math.isclose(value, expected, rel_tol=relative, abs_tol=0.0)


def test_every_column_of_every_site(both):
    probe, run, reference = both
    assert len(run.sites) == len(reference.additions) == 2 * probe.model.layers
    for row, addition in zip(run.sites, reference.additions, strict=True):
        for column, expected in columns(addition).items():
            if column.startswith("grad") and probe.precision.preset == "bf16":
                continue  # rounded differently in the two runs
            # The same tensors in the same precision but for the order of sums: means are differences of these.
            value = getattr(row, column)
            if column.endswith("_mean"):
                assert value == pytest.approx(expected, rel=1e-6, abs=1e-9 * getattr(row, column.replace("mean", "rms")))
            else:
                assert close(value, expected, 1e-6), (row.site, column, value, expected)


def test_what_and_where_a_site_is(both):
    probe, run, _ = both
    mixers = {"attention": "attention", "deltanet": "linear_attention"}
    dtype = "bfloat16" if probe.precision.preset == "bf16" else "float32"
    for row in run.sites:
        mixer = probe.model.mixers[row.block % len(probe.model.mixers)]
        assert (row.site, row.block) == (2 * row.block + row.site % 2, row.site // 2)
        assert row.sublayer == (mixers[mixer] if row.site % 2 == 0 else "mlp")
        assert row.placement == probe.residual.placement
        assert (row.stream_dtype, row.update_dtype) == (dtype, dtype)
        # The module that wrote the branch: a norm of its own after it counts as another.
        assert row.module == f"blocks.{row.block}.{'mixer' if row.site % 2 == 0 else 'ffn'}"


def test_the_gradient_of_every_parameter(both):
    probe, run, reference = both
    relative = 0.02 if probe.precision.preset == "bf16" else 1e-6
    assert run.loss.value == pytest.approx(reference.loss, rel=1e-6)
    found = {row.name.split(" = ")[0]: row for row in run.parameters}
    assert found.keys() == reference.gradients.keys()
    for name, expected in reference.gradients.items():
        assert close(found[name].grad_norm, expected, relative), (name, found[name].grad_norm, expected)
        assert found[name].grad_state == ("norm" if expected else "zero")


def test_the_gradient_of_every_branch(both):
    probe, run, reference = both
    placement = probe.residual.placement
    for row in run.sites:
        part = "mixer" if row.site % 2 == 0 else "ffn"
        # In post and deepnorm the norm follows the sum: it is on no branch.
        norms = () if placement in ("post", "deepnorm") else (f"{part}_norm.", f"{part}_output_norm.")
        starts = tuple(f"blocks.{row.block}.{start}" for start in (f"{part}.", f"{part}_update.", *norms))
        own = [norm for name, norm in reference.gradients.items() if name.startswith(starts)]
        relative = 0.02 if probe.precision.preset == "bf16" else 1e-6
        assert row.param_grad_norm == pytest.approx(math.hypot(*own), rel=relative)


def test_the_census_of_every_parameter(both):
    _, run, reference = both
    for row in run.parameters:
        value = reference.values[row.name.split(" = ")[0]]
        assert close(row.std, value.std(), 1e-6), row
        # A mean that only chance keeps from zero is std / sqrt(n) in size: its own digits may cancel.
        assert row.mean == pytest.approx(value.mean(), rel=1e-6, abs=1e-6 * value.std() / value.size**0.5)
        assert row.absmax == np.abs(value).max()
        assert (row.zeros, row.nonfinite) == ((value == 0).sum(), 0)
        assert row.duplicate_rows == (None if value.ndim < 2 else len(value) - len(np.unique(value, axis=0)))
        assert (row.shape, row.numel) == (value.shape, value.size)


ROLES = {
    "embedding.weight": "embedding", "position_embedding.weight": "embedding", "head.weight": "linear", "A_log": "scale",
    "dt_bias": "step_bias", "conv1d.weight": "convolution", "norm.weight": "norm", "norm.bias": "bias", "proj.weight": "linear",
    "proj.bias": "bias", "proj_qkv.weight": "linear", "update.scale": "scale", "proj_a.weight": "linear",
    "proj_b.weight": "linear", "proj_z.weight": "linear",
}  # fmt: skip


def test_the_role_and_sublayer_of_every_parameter(both):
    probe, run, _ = both
    for row in run.parameters:
        name = row.name.split(" = ")[0]
        assert row.role == next(role for ending, role in ROLES.items() if name.endswith(ending)), name
        mixer = probe.model.mixers[(row.block or 0) % len(probe.model.mixers)]
        part = name.split(".")[2] if row.block is not None else ""
        if probe.residual.placement in ("post", "deepnorm") and "norm" in part:
            part = ""  # it is between two sublayers
        kind = "linear_attention" if mixer == "deltanet" else "attention"
        assert row.sublayer == (kind if part.startswith("mixer") else "mlp" if part.startswith("ffn") else None), name


def test_a_zero_update_has_no_quotients_and_a_gradient_of_its_own():
    run = measure(ScanRequest("test", probe_of(DECODERS["rezero"])))
    for row in run.sites:
        assert (row.update_rms, row.update_ratio) == (0.0, 0.0)
        assert (row.cosine, row.add_error, row.swallowed) == (None, None, None)
        assert row.grad_update_norm == row.grad_sum_norm > 0
    states = {row.name: row.grad_state for row in run.parameters}
    assert states["blocks.1.ffn_update.scale"] == "norm"
    assert states["blocks.1.ffn.down_proj.weight"] == "zero"


def test_a_zero_output_projection_has_a_gradient_and_what_is_before_it_has_none(monkeypatch):
    from propcheck.targets.decoder import init

    drawn = init.weight_std
    monkeypatch.setattr(init, "weight_std", lambda name, *rest: 0.0 if name == "down_proj" else drawn(name, *rest))
    run = measure(ScanRequest("test", probe_of(DECODERS["pre"])))
    states = {row.name: row.grad_state for row in run.parameters}
    assert states["blocks.0.ffn.down_proj.weight"] == "norm"
    assert states["blocks.0.ffn.up_proj.weight"] == "zero"
    assert run.sites[1].update_rms == 0.0
    assert run.sites[1].param_grad_norm > 0
