"""PC303: branches that no gradient trains, and what PC304 leaves to it."""

import dataclasses

import pytest
from mixtures import mixture
from synthetic import additive, parameter, run_of

from propcheck.records import Doubling
from propcheck.rules import judge

BLOCKS = 8
NAMES = {"attention": ("norm1", "attn.qkv", "attn.proj"), "mlp": ("norm2", "mlp.up", "mlp.down")}
NONE = {"grad_state": "none", "grad_norm": None}
ZERO = {"grad_state": "zero", "grad_norm": 0.0}


def block_of(block, **changes):
    """Parameters of one block, in their branches; ``changes`` by part of the name."""
    found = []
    for position, kind in enumerate(("attention", "mlp")):
        for name in NAMES[kind]:
            own = {"block": block, "site": 2 * block + position, "used": True, "sublayer": kind}
            own["role"] = "norm" if "norm" in name else "linear"
            for part, change in changes.items():
                own |= change if part in name else {}
            found.append(parameter(f"h.{block}.{name}.weight", **own))
    return found


def model(at=(), **changes):
    return [p for block in range(BLOCKS) for p in block_of(block, **(changes if block in at else {}))]


def judged(parameters, *, sites=None, select=("PC303", "PC304"), **changes):
    return judge(run_of(sites or additive(BLOCKS), parameters, **changes), select=select)


def at_site(number, **changes):
    return [dataclasses.replace(r, **changes) if r.site == number else r for r in additive(BLOCKS)]


def test_a_model_that_trains_is_silent():
    assert judged(model()) == ()


def test_a_branch_under_no_grad_is_one_error_in_place_of_warnings():
    sites = at_site(11, grad_update_norm=None, param_grad_norm=None)
    (finding,) = judged(model([5], norm2=NONE, mlp=NONE), sites=sites)
    assert (finding.rule, finding.severity) == ("PC303", "error")
    assert (finding.site.site, finding.site.block, finding.site.sublayer) == (11, 5, "mlp")
    assert "it has no path to the loss" in finding.message
    assert (
        "The 3 parameters h.5.norm2.weight, h.5.mlp.up.weight, h.5.mlp.down.weight (block 5) are never trained"
        in finding.message
    )
    assert "no_grad" in finding.remedy


def test_a_branch_some_of_which_is_trained_is_left_to_the_other_rule():
    (finding,) = judged(model([5], up=NONE))
    assert (finding.rule, finding.site.parameter) == ("PC304", "h.5.mlp.up.weight")
    assert judged(model([5], up=ZERO)) == ()


def test_a_branch_whose_gradients_are_exactly_zero_is_found():
    (finding,) = judged(model([5], norm2=ZERO, mlp=ZERO))
    assert (finding.rule, finding.value) == ("PC303", "zero")
    assert (
        "Every trainable parameter of the branch at site 11 (mlp of block 5) has a gradient of exactly zero" in finding.message
    )


def test_a_detached_branch_of_a_parallel_block_is_found_though_its_norm_is_trained_by_the_other():
    sites = at_site(10, grad_update_norm=None)
    (finding,) = judged(model([5], attn=NONE), sites=sites)
    assert (finding.rule, finding.site.site) == ("PC303", 10)
    assert "The 2 parameters h.5.attn.qkv.weight, h.5.attn.proj.weight (block 5) are never trained" in finding.message


def test_frozen_and_unobserved_branches_are_silent():
    assert judged(model([5], norm2={**NONE, "requires_grad": False}, mlp={**NONE, "requires_grad": False})) == ()
    assert judged(model([5], norm2=ZERO, up=ZERO, down={"grad_state": None, "grad_norm": None})) == ()


def test_the_same_branch_in_every_block_is_one_finding():
    (finding,) = judged(model(range(BLOCKS), norm2=ZERO, mlp=ZERO))
    assert "site 1 (mlp of block 0) and 7 more sites" in finding.message


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_sum_norm": 0.0, "grad_update_norm": 0.0},  # nothing reaches the sum: PC302
        {"grad_sum_norm": None, "grad_update_norm": None},
        {"masked": True},  # stochastic depth
    ],
)
def test_a_branch_that_no_gradient_can_reach_is_not_blamed(changes):
    assert judged(model([5], norm2=ZERO, mlp=ZERO), sites=at_site(11, **changes)) == ()


def test_a_branch_that_adds_nothing_either_is_folded_under_the_dead_branch():
    sites = at_site(11, update_rms=0.0, param_grad_norm=0.0, sum_rms=1.0)
    findings = judged(model([5], norm2=ZERO, mlp=ZERO), sites=sites, select=("PC203", "PC303", "PC304"))
    assert [(f.rule, f.also) for f in findings] == [("PC203", ("PC303 at 1 site",))]


def test_a_model_without_any_path_is_left_to_the_rule_for_that():
    sites = [dataclasses.replace(r, grad_stream_norm=None, grad_update_norm=None, grad_sum_norm=None) for r in additive(BLOCKS)]
    findings = judged([dataclasses.replace(p, **NONE) for p in model()], sites=sites)
    assert [(f.rule, f.severity) for f in findings] == [("PC304", "error")]


def test_experts_without_a_token_are_not_dead():
    placed = [
        dataclasses.replace(p, site=2 * p.block + 1) for p in mixture(blocks=2, experts=4, idle=(1,), **{**NONE, "used": False})
    ]
    assert judged(placed, sites=additive(2)) == ()


# ---------------------------------------------------------------------- computed and never added

DROPPED = {**NONE, "site": None, "sublayer": None}


def without_attention(blocks):
    """Sites of a stack whose attention is not added in some blocks; the others keep their numbers."""
    return [r for r in additive(BLOCKS) if not (r.block in blocks and r.sublayer == "attention")]


def test_attention_that_is_dropped_in_one_block_is_found_there():
    parameters = model([5], norm1=DROPPED, attn=DROPPED)
    (finding,) = judged(parameters, sites=without_attention([5]))
    assert (finding.rule, finding.severity) == ("PC303", "error")
    assert (finding.site.block, finding.site.module) == (5, "h.5.attn")
    assert "The output of h.5.attn in block 5 is added to nothing" in finding.message
    assert (
        "The 3 parameters h.5.norm1.weight, h.5.attn.qkv.weight, h.5.attn.proj.weight (block 5) are never trained"
        in finding.message
    )


def test_attention_that_is_dropped_in_every_block_for_a_doubled_stream_is_one_finding():
    parameters = model(range(BLOCKS), norm1=DROPPED, attn=DROPPED)
    doublings = tuple(Doubling(site=2 * block + 1, block=block, module=f"h.{block}") for block in range(BLOCKS))
    (finding,) = judged(parameters, sites=without_attention(range(BLOCKS)), doublings=doublings)
    assert (finding.rule, finding.site.block) == ("PC303", 0)
    assert "The output of h.*.attn in blocks 0 to 7 is added to nothing" in finding.message


def test_a_part_that_only_chooses_is_no_branch_that_was_dropped():
    """An index that picks tokens is used, gets no gradient, and has a loss of its own: a warning."""
    index = [
        parameter(f"h.{block}.attn.index.weight", block=block, role="linear", used=True, **NONE) for block in range(BLOCKS)
    ]
    assert [f.rule for f in judged([*model(), *index])] == ["PC304"]
    doublings = (Doubling(site=11, block=5, module="h.5"),)
    assert [f.rule for f in judged([*model(), *index], doublings=doublings)] == ["PC304"]


def test_the_end_of_a_second_stream_that_the_loss_does_not_read_was_not_dropped():
    parameters = model([BLOCKS - 1], norm1=DROPPED, attn=DROPPED)
    assert {f.rule for f in judged(parameters, sites=without_attention([BLOCKS - 1]))} == {"PC304"}


def test_a_module_that_was_not_called_is_not_called_dropped():
    parameters = model([5], norm1={**DROPPED, "used": False}, attn={**DROPPED, "used": False})
    assert judged(parameters, sites=without_attention([5])) == ()


# ---------------------------------------------------------------------- adapters

FROZEN = {"requires_grad": False, **NONE}
NULL = {"zeros": 32, "std": 0.0, "absmax": 0.0}


def adapter(block, target, *, a, b, rank=4, width=8):
    """The two matrices of an adapter on one linear layer of the attention."""
    return [
        parameter(
            f"h.{block}.attn.{target}.lora_{name}.weight",
            block=block,
            site=2 * block,
            role="linear",
            used=True,
            shape=shape,
            numel=32,
            **change,
        )
        for name, shape, change in (("A", (rank, width), a), ("B", (width, rank), b))
    ]


DEAD = {"a": {**NULL, **ZERO}, "b": {**NULL, **ZERO}}
HEALTHY = {"a": ZERO, "b": NULL}  # the first random, the second zero: it alone has a gradient at first


def adapted(of_target, **changes):
    frozen = [dataclasses.replace(p, **FROZEN) for p in model()]
    return [*frozen, *(p for block in range(BLOCKS) for t in ("q", "v") for p in adapter(block, t, **of_target, **changes))]


def test_adapters_of_two_zero_matrices_are_found_as_one():
    (finding,) = judged(adapted(DEAD))
    assert (finding.rule, finding.severity) == ("PC303", "error")
    assert "matrices in a row are zero" in finding.message
    assert "site 0 (attention of block 0) and 7 more sites" in finding.message
    assert "The 32 parameters h.*.attn.q.lora_A.weight, h.*.attn.q.lora_B.weight" in finding.message


def test_they_are_found_beside_others_that_train():
    trained = model()
    (finding,) = judged([*trained, *adapter(3, "q", **DEAD)])
    assert finding.site.parameter == "h.3.attn.q.lora_A.weight"
    assert "at site 6 (attention of block 3) are zero and get a gradient of exactly zero" in finding.message


def test_healthy_adapters_are_silent():
    assert judged(adapted(HEALTHY)) == ()


def test_healthy_adapters_behind_a_gate_or_projection_that_starts_at_zero_are_silent():
    """Nothing passes yet, so that every second matrix is zero with a gradient of zero; the gate is trained first."""
    held = {"a": ZERO, "b": {**NULL, **ZERO}}
    for role, shape in (("scale", ()), ("linear", (8, 8))):
        gates = [
            parameter(f"h.{n}.attn.gate", block=n, site=2 * n, role=role, shape=shape, numel=32, used=True, **NULL)
            for n in range(BLOCKS)
        ]
        for rank in (4, 8):
            assert judged([*adapted(held, rank=rank), *gates]) == ()


def test_second_matrices_as_large_as_the_first_are_no_pair():
    held = {"a": {}, "b": {**NULL, **ZERO}}
    assert judged(adapted(held, rank=8)) == ()


@pytest.mark.parametrize("start", ["proj", "down"])
def test_an_output_projection_that_starts_at_zero_is_silent(start):
    inner = {"proj": {"norm1": ZERO, "qkv": ZERO}, "down": {"norm2": ZERO, "up": ZERO}}[start]
    assert judged(model(range(BLOCKS), **inner, **{start: {"zeros": 12}})) == ()


def test_rezero_is_silent():
    scales = [
        parameter(f"h.{n}.alpha", block=n, site=2 * n, role="scale", shape=(), numel=1, zeros=1, used=True)
        for n in range(BLOCKS)
    ]
    assert judged([*model(range(BLOCKS), norm1=ZERO, attn=ZERO), *scales]) == ()
    frozen = [dataclasses.replace(p, requires_grad=False, **NONE) for p in scales]
    (finding,) = judged([*model(range(BLOCKS), norm1=ZERO, attn=ZERO), *frozen])
    assert (finding.rule, finding.value) == ("PC303", "zero")
    assert "zero and not trained" in finding.remedy


# ---------------------------------------------------------------------- zeros that several branches share

SILENT = {"norm": ZERO, "attn": ZERO, "mlp": ZERO}


def gate(block, *, site, branches, name="gate", **changes):
    own = {"role": "scale", "shape": (1,), "numel": 1, "zeros": 1, "used": True, **changes}
    return parameter(name if block is None else f"h.{block}.{name}", block=block, site=site, branches=branches, **own)


def without_updates():
    return [dataclasses.replace(r, update_rms=0.0, param_grad_norm=0.0, sum_rms=1.0) for r in additive(BLOCKS)]


def test_one_gate_for_both_branches_of_a_block_holds_them_back():
    """ReZero has one scale a layer (arXiv 2003.04887), adaLN-zero one matrix a block (arXiv 2212.09748)."""
    for role in ("scale", "linear"):
        gates = [gate(n, site=2 * n, branches=2, role=role) for n in range(BLOCKS)]
        assert judged([*model(range(BLOCKS), **SILENT), *gates]) == ()


def test_a_gate_of_another_block_holds_nothing_back():
    found = judged([*model(range(BLOCKS), **SILENT), gate(3, site=6, branches=2)])
    assert {f.rule for f in found} == {"PC303"}
    sites = {f.site.site for f in judged([*model([3, 4], **SILENT), gate(3, site=6, branches=2)])}
    assert sites == {8}


@pytest.mark.parametrize(
    "outside",
    [
        gate(None, site=0, branches=16),
        gate(None, site=0, branches=1),  # a gate that is computed before the blocks is met in the first
        gate(None, site=None, branches=None, role=None),  # handed to the blocks as an argument
        gate(0, site=0, branches=16, name="gate = h.1.gate"),  # one parameter under several names
    ],
)
def test_one_gate_for_all_branches_holds_them_back(outside):
    frozen = dataclasses.replace(outside, requires_grad=False, **NONE)
    dead = model(range(BLOCKS), **SILENT)
    rules = ("PC203", "PC303")
    assert judged([*dead, outside], sites=without_updates(), select=rules) == ()
    assert [f.rule for f in judged([*dead, frozen], sites=without_updates(), select=rules)] == ["PC203"]


def test_positions_that_start_at_zero_are_no_gate():
    positions = gate(None, site=None, branches=None, role="bias", name="positions")
    assert [f.rule for f in judged([*model([5], norm2=ZERO, mlp=ZERO), positions])] == ["PC303"]


def bias(of, **changes):
    """The bias beside a weight, zero, with a gradient of its own."""
    return dataclasses.replace(
        of, name=of.name.replace("weight", "bias"), role="bias", shape=(4,), numel=4, zeros=4, grad_state="norm", **changes
    )


def test_a_norm_of_two_parallel_branches_whose_bias_is_zero_holds_neither_back():
    norm = next(p for p in model() if p.name == "h.5.norm1.weight")
    parameters = [*model([5], mlp=ZERO, norm2=ZERO), bias(norm, branches=2)]
    assert [f.rule for f in judged(parameters)] == ["PC303"]


def test_adapters_of_two_zero_matrices_are_found_beside_biases_that_are_zero():
    pair = adapter(3, "q", **DEAD)
    norm = next(p for p in model() if p.name == "h.3.norm1.weight")
    found = judged([*model(), *pair, bias(norm), bias(pair[1])])
    assert [(f.rule, f.site.parameter) for f in found] == [("PC303", "h.3.attn.q.lora_A.weight")]


def test_a_bias_that_a_gate_may_consist_of_is_not_excused():
    pair = adapter(3, "q", **DEAD)
    table = dataclasses.replace(bias(pair[1]), name="h.3.table")
    assert judged([*model(), *pair, table]) == ()
    projection = parameter("h.3.modulate.weight", block=3, site=6, role="linear", zeros=12, used=True, **ZERO)
    assert judged([*model(), *pair, projection, bias(projection)]) == ()


def test_an_adapter_is_told_from_the_matrices_beside_it_by_its_inner_width():
    """In one branch, at one depth of names: the adapter's input is the output of the matrix before the addition."""
    own = {"block": 3, "site": 7, "role": "linear", "used": True, "numel": 40}
    rest = [parameter(f"h.3.{n}.weight", **{**own, "shape": shape}) for n, shape in (("fc", (16, 8)), ("out", (8, 16)))]
    null = {**NULL, "zeros": 40}
    pair = [parameter(f"h.3.{n}.weight", **own, shape=s, **null, **ZERO) for n, s in (("dn", (5, 8)), ("up", (8, 5)))]
    (finding,) = judged([*model(), *rest, *pair])
    assert "The 2 parameters h.3.dn.weight, h.3.up.weight (block 3) at site 7" in finding.message
    first = dataclasses.replace(pair[0], zeros=0)
    assert judged([*model(), *rest, first, pair[1]]) == ()
