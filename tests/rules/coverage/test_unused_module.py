"""PC501: modules and parameters that the forward pass did not use."""

from mixtures import mixture
from synthetic import judging, parameter

from propcheck.records import Place

judged = judging("PC501", blocks=2)


def layer(block, name, **changes):
    return parameter(f"blocks.{block}.{name}", **{"block": block, "used": True, **changes})


DETACHED = {"grad_state": "none", "grad_norm": None}
UNUSED = {"grad_state": "none", "grad_norm": None, "used": False}


def test_an_unused_module_is_reported_once_and_at_the_top():
    names = ["pooler.dense.weight", "pooler.dense.bias", "pooler.norm.weight"]
    (finding,) = judged(*(parameter(n, **UNUSED) for n in names), layer(0, "up.weight"))
    assert finding.severity == "warning"
    assert finding.site.module == "pooler"
    assert finding.value == 3
    assert finding.message.startswith("The module pooler was not used in the forward pass (3 parameters, 36 elements)")


def test_a_used_module_has_no_finding():
    names = ["pooler.dense.weight", "pooler.dense.bias"]
    assert not judged(*(parameter(n, used=True) for n in names))
    assert not judged(*(parameter(n, used=None, **DETACHED) for n in names))


def test_a_single_parameter_beside_used_ones_is_named():
    scales = [layer(n, f"attention.{name}_scale", **UNUSED) for n in range(6) for name in "qk"]
    used = [layer(n, "attention.q.weight") for n in range(6)]
    findings = judged(*scales, *used)
    assert [f.site.parameter for f in findings] == ["blocks.0.attention.q_scale", "blocks.0.attention.k_scale"]
    assert findings[0].site.module == "blocks.0.attention"
    assert "The 6 parameters blocks.*.attention.q_scale (blocks 0 to 5) were not used" in findings[0].message


def test_the_same_module_in_many_blocks_is_one_finding():
    unused = [layer(n, f"cross.{name}.weight", **UNUSED) for n in range(6) for name in "qkv"]
    used = [layer(n, "attention.q.weight") for n in range(6)]
    (finding,) = judged(*unused, *used)
    assert "The 6 modules blocks.*.cross (blocks 0 to 5) were not used in the forward pass (18 parameters" in finding.message


def test_a_tied_parameter_counts_in_each_of_its_places():
    head = [parameter("embedding.weight = head.weight", used=True), parameter("head.bias", **UNUSED)]
    (finding,) = judged(*head)
    assert finding.site.parameter == "head.bias"
    unused = [parameter("first.weight = second.weight", **UNUSED), parameter("second.bias", used=True)]
    (finding,) = judged(*unused)
    assert finding.site.module == "first"


def test_a_model_of_which_nothing_was_used_is_one_finding():
    (finding,) = judged(layer(0, "a.weight", **UNUSED), layer(1, "b.weight", **UNUSED))
    assert finding.message.startswith("No parameter of the model was used in the forward pass (2 parameters")
    assert finding.site == Place()


def test_unused_buffers_are_no_fault():
    assert not judged(parameter("position_ids", kind="buffer", used=False), parameter("weight", used=True))


def test_an_expert_without_a_token_is_not_unused():
    for changes in (UNUSED, DETACHED, {"grad_state": "zero", "grad_norm": 0.0}):
        assert not judged(*mixture(blocks=4, experts=8, idle=(1, 5), **changes))


def test_an_unused_layer_beside_used_ones_is_no_idle_expert():
    layers = [layer(n, "mlp.up.weight", sublayer="mlp", **({} if n < 5 else UNUSED)) for n in range(6)]
    (finding,) = judged(*layers)
    assert finding.site.module == "blocks.5"


def test_all_experts_unused_is_reported():
    parameters = mixture(blocks=2, experts=4, idle=range(4), **UNUSED)
    findings = judged(*parameters)
    assert [f.site.module for f in findings] == ["blocks.0.moe.experts"]
    assert "The 2 modules blocks.*.moe.experts (blocks 0 to 1)" in findings[0].message
