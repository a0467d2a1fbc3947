"""Which experts received no token."""

import dataclasses

import pytest
from mixtures import mixture
from synthetic import parameter, run_of

from propcheck.analysis.idle_experts import idle_experts, idle_parameters

NO_TOKEN = {"used": False, "grad_state": "none", "grad_norm": None}


def sentences(parameters):
    return idle_experts(run_of([], parameters))


def test_they_are_counted_over_the_blocks():
    parameters = mixture(blocks=8, experts=8, idle=(0, 3, 7), **NO_TOKEN)
    assert sentences(parameters) == ["3 of 8 experts of blocks 0 to 7 received no token in this batch."]


def test_a_range_is_given_where_blocks_differ():
    some = [p for p in mixture(blocks=2, experts=4, idle=(0, 1), **NO_TOKEN) if p.block == 0]
    more = [p for p in mixture(blocks=2, experts=4, idle=(0, 1, 2), **NO_TOKEN) if p.block == 1]
    assert sentences([*some, *more]) == ["2 to 3 of 4 experts of blocks 0 to 1 received no token in this batch."]


def test_blocks_whose_experts_all_got_one_do_not_count():
    some = [p for p in mixture(blocks=2, experts=4, idle=(2,), **NO_TOKEN) if p.block == 0]
    none = [p for p in mixture(blocks=2, experts=4, idle=()) if p.block == 1]
    assert sentences([*some, *none]) == ["1 of 4 experts of block 0 received no token in this batch."]


def test_a_model_without_blocks_has_them_too():
    parameters = [dataclasses.replace(p, block=None) for p in mixture(blocks=1, experts=4, idle=(2,), **NO_TOKEN)]
    assert sentences(parameters) == ["1 of 4 experts received no token in this batch."]


@pytest.mark.parametrize("state", ["zero", "none"])
def test_an_expert_that_ran_on_nothing_is_idle_too(state):
    parameters = mixture(blocks=1, experts=4, idle=(2,), grad_state=state, grad_norm=None, sublayer="moe", used=True)
    idle = idle_parameters(run_of([], parameters))
    assert idle == {"blocks.0.moe.experts.2.up.weight", "blocks.0.moe.experts.2.down.weight"}


def test_where_no_expert_got_a_gradient_none_is_idle():
    assert not sentences(mixture(blocks=2, experts=4, idle=range(4), **NO_TOKEN))


def test_an_expert_of_which_a_part_got_a_gradient_is_not_idle():
    parameters = mixture(blocks=1, experts=4, idle=(2,), **NO_TOKEN)
    changes = {"grad_state": "norm", "used": True}
    parameters = [dataclasses.replace(p, **changes) if p.name.endswith("2.up.weight") else p for p in parameters]
    assert not sentences(parameters)
    assert not idle_parameters(run_of([], parameters))


def test_layers_of_a_sequence_and_modules_of_different_shapes_are_no_experts():
    layers = [parameter(f"blocks.{n}.moe.weight", block=n, sublayer="moe") for n in range(4)]
    layers[2] = dataclasses.replace(layers[2], **NO_TOKEN)
    assert not sentences(layers)
    parts = [parameter(f"moe.{n}.weight", sublayer="moe", shape=(n, 4)) for n in range(1, 4)]
    parts[1] = dataclasses.replace(parts[1], **NO_TOKEN)
    assert not sentences(parts)


def test_branches_beside_each_other_outside_a_mixture_are_no_experts():
    heads = [parameter(f"heads.{n}.weight", sublayer="mlp") for n in range(4)]
    heads[2] = dataclasses.replace(heads[2], **NO_TOKEN)
    assert not sentences(heads)
