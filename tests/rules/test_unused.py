"""PC304 and PC501: parameters that training would not change."""

from mixtures import mixture
from synthetic import additive, parameter, run_of

from propcheck.records import Place
from propcheck.rules import judge


def judged(*parameters, rule):
    return judge(run_of(additive(2), parameters), select=[rule])


def layer(block, name, **changes):
    return parameter(f"blocks.{block}.{name}", **{"block": block, "used": True, **changes})


DETACHED = {"grad_state": "none", "grad_norm": None}
UNUSED = {"grad_state": "none", "grad_norm": None, "used": False}


def test_a_trainable_parameter_without_a_path_is_named():
    (finding,) = judged(layer(0, "gate.weight", **DETACHED), layer(0, "up.weight"), rule="PC304")
    assert finding.severity == "warning"
    assert finding.site.parameter == "blocks.0.gate.weight"
    assert finding.message.startswith(
        "The parameter blocks.0.gate.weight is trainable, used in the forward pass and has no path"
    )


def test_the_repaired_twin_is_silent():
    assert not judged(layer(0, "gate.weight"), layer(0, "up.weight"), rule="PC304")


def test_whether_it_was_used_need_not_be_known():
    (finding,) = judged(layer(0, "gate.weight", **DETACHED, used=None), layer(0, "up.weight"), rule="PC304")
    assert "used" not in finding.message


def test_one_name_in_many_blocks_is_one_finding():
    detached = [layer(n, "gate.weight", **DETACHED) for n in range(8)]
    (finding,) = judged(*detached, *(layer(n, "up.weight") for n in range(8)), rule="PC304")
    assert "The 8 parameters blocks.*.gate.weight (blocks 0 to 7) are trainable" in finding.message


def test_frozen_and_unobserved_parameters_zero_gradients_and_buffers_are_no_fault():
    healthy = [
        layer(0, "up.weight"),
        layer(0, "frozen.weight", requires_grad=False, **DETACHED),
        layer(0, "zero.weight", grad_state="zero", grad_norm=0.0),
        layer(0, "unknown.weight", grad_state=None, grad_norm=None),
        layer(0, "position_ids", kind="buffer", requires_grad=False, grad_state=None, grad_norm=None),
        layer(0, "unused.weight", **UNUSED),  # PC501 reports it
    ]
    assert not judged(*healthy, rule="PC304")


def test_a_model_without_any_path_is_one_error():
    nothing = [layer(n, "up.weight", **DETACHED) for n in range(8)]
    frozen = parameter("embedding.weight", requires_grad=False, **DETACHED)
    (finding,) = judged(*nothing, frozen, rule="PC304")
    assert finding.severity == "error"
    assert "none of the 8 trainable parameters gets a gradient" in finding.message
    assert "checkpointing" in finding.remedy


def test_a_model_without_trainable_parameters_is_no_fault():
    assert not judged(parameter("embedding.weight", requires_grad=False, **DETACHED), rule="PC304")


def test_an_unused_module_is_reported_once_and_at_the_top():
    names = ["pooler.dense.weight", "pooler.dense.bias", "pooler.norm.weight"]
    (finding,) = judged(*(parameter(n, **UNUSED) for n in names), layer(0, "up.weight"), rule="PC501")
    assert finding.severity == "warning"
    assert finding.site.module == "pooler"
    assert finding.value == 3
    assert finding.message.startswith("The module pooler was not used in the forward pass (3 parameters, 36 elements)")


def test_a_used_module_has_no_finding():
    names = ["pooler.dense.weight", "pooler.dense.bias"]
    assert not judged(*(parameter(n, used=True) for n in names), rule="PC501")
    assert not judged(*(parameter(n, used=None, **DETACHED) for n in names), rule="PC501")


def test_a_single_parameter_beside_used_ones_is_named():
    scales = [layer(n, f"attention.{name}_scale", **UNUSED) for n in range(6) for name in "qk"]
    used = [layer(n, "attention.q.weight") for n in range(6)]
    findings = judged(*scales, *used, rule="PC501")
    assert [f.site.parameter for f in findings] == ["blocks.0.attention.q_scale", "blocks.0.attention.k_scale"]
    assert findings[0].site.module == "blocks.0.attention"
    assert "The 6 parameters blocks.*.attention.q_scale (blocks 0 to 5) were not used" in findings[0].message


def test_the_same_module_in_many_blocks_is_one_finding():
    unused = [layer(n, f"cross.{name}.weight", **UNUSED) for n in range(6) for name in "qkv"]
    used = [layer(n, "attention.q.weight") for n in range(6)]
    (finding,) = judged(*unused, *used, rule="PC501")
    assert "The 6 modules blocks.*.cross (blocks 0 to 5) were not used in the forward pass (18 parameters" in finding.message


def test_a_tied_parameter_counts_in_each_of_its_places():
    head = [parameter("embedding.weight = head.weight", used=True), parameter("head.bias", **UNUSED)]
    (finding,) = judged(*head, rule="PC501")
    assert finding.site.parameter == "head.bias"
    unused = [parameter("first.weight = second.weight", **UNUSED), parameter("second.bias", used=True)]
    (finding,) = judged(*unused, rule="PC501")
    assert finding.site.module == "first"


def test_a_model_of_which_nothing_was_used_is_one_finding():
    (finding,) = judged(layer(0, "a.weight", **UNUSED), layer(1, "b.weight", **UNUSED), rule="PC501")
    assert finding.message.startswith("No parameter of the model was used in the forward pass (2 parameters")
    assert finding.site == Place()


def test_a_detached_module_is_one_finding_and_counts_only_what_is_trained():
    names = ["mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "mlp.down.bias"]
    rest = [layer(n, "attention.weight") for n in range(8)]
    healthy = [layer(n, name) for n in range(8) for name in names if n != 5]
    frozen = layer(5, "mlp.scale", requires_grad=False, **DETACHED)
    (finding,) = judged(*rest, *healthy, *(layer(5, name, **DETACHED) for name in names), frozen, rule="PC304")
    assert finding.site == Place(block=5, module="blocks.5.mlp")
    assert finding.message.startswith("The module blocks.5.mlp is trainable, used in the forward pass and has no path")


def test_unused_buffers_are_no_fault():
    assert not judged(parameter("position_ids", kind="buffer", used=False), parameter("weight", used=True), rule="PC501")


def test_an_expert_without_a_token_is_neither_unused_nor_without_a_path():
    for changes in (UNUSED, DETACHED, {"grad_state": "zero", "grad_norm": 0.0}):
        parameters = mixture(blocks=4, experts=8, idle=(1, 5), **changes)
        assert not judged(*parameters, rule="PC304")
        assert not judged(*parameters, rule="PC501")


def test_an_unused_layer_beside_used_ones_is_no_idle_expert():
    layers = [layer(n, "mlp.up.weight", sublayer="mlp", **({} if n < 5 else UNUSED)) for n in range(6)]
    (finding,) = judged(*layers, rule="PC501")
    assert finding.site.module == "blocks.5"


def test_all_experts_unused_is_reported():
    parameters = mixture(blocks=2, experts=4, idle=range(4), **UNUSED)
    findings = judged(*parameters, rule="PC501")
    assert [f.site.module for f in findings] == ["blocks.0.moe.experts"]
    assert "The 2 modules blocks.*.moe.experts (blocks 0 to 1)" in findings[0].message
