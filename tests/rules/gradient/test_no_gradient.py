"""PC304: trainable parameters without a path to the loss."""

from mixtures import mixture
from synthetic import judging, parameter

from propcheck.records import Place

judged = judging("PC304", blocks=2)


def layer(block, name, **changes):
    return parameter(f"blocks.{block}.{name}", **{"block": block, "used": True, **changes})


DETACHED = {"grad_state": "none", "grad_norm": None}
UNUSED = {"grad_state": "none", "grad_norm": None, "used": False}


def test_a_trainable_parameter_without_a_path_is_named():
    (finding,) = judged(layer(0, "gate.weight", **DETACHED), layer(0, "up.weight"))
    assert finding.severity == "warning"
    assert finding.site.parameter == "blocks.0.gate.weight"
    assert finding.message.startswith(
        "The parameter blocks.0.gate.weight is trainable, used in the forward pass and has no path"
    )


def test_the_repaired_twin_is_silent():
    assert not judged(layer(0, "gate.weight"), layer(0, "up.weight"))


def test_whether_it_was_used_need_not_be_known():
    (finding,) = judged(layer(0, "gate.weight", **DETACHED, used=None), layer(0, "up.weight"))
    assert "used" not in finding.message


def test_one_name_in_many_blocks_is_one_finding():
    detached = [layer(n, "gate.weight", **DETACHED) for n in range(8)]
    (finding,) = judged(*detached, *(layer(n, "up.weight") for n in range(8)))
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
    assert not judged(*healthy)


def test_a_model_without_any_path_is_one_error():
    nothing = [layer(n, "up.weight", **DETACHED) for n in range(8)]
    frozen = parameter("embedding.weight", requires_grad=False, **DETACHED)
    (finding,) = judged(*nothing, frozen)
    assert finding.severity == "error"
    assert "none of the 8 trainable parameters gets a gradient" in finding.message
    assert "checkpointing" in finding.remedy


def test_a_model_without_trainable_parameters_is_no_fault():
    assert not judged(parameter("embedding.weight", requires_grad=False, **DETACHED))


def test_a_detached_module_is_one_finding_and_counts_only_what_is_trained():
    names = ["mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "mlp.down.bias"]
    rest = [layer(n, "attention.weight") for n in range(8)]
    healthy = [layer(n, name) for n in range(8) for name in names if n != 5]
    frozen = layer(5, "mlp.scale", requires_grad=False, **DETACHED)
    (finding,) = judged(*rest, *healthy, *(layer(5, name, **DETACHED) for name in names), frozen)
    assert finding.site == Place(block=5, module="blocks.5.mlp")
    assert finding.message.startswith("The module blocks.5.mlp is trainable, used in the forward pass and has no path")


def test_an_expert_without_a_token_is_not_without_a_path():
    for changes in (UNUSED, DETACHED, {"grad_state": "zero", "grad_norm": 0.0}):
        assert not judged(*mixture(blocks=4, experts=8, idle=(1, 5), **changes))
