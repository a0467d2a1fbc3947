"""PC104 with a declared scheme, on numbers by hand."""

import dataclasses
import math

import pytest
from synthetic import additive, parameter, run_of

from propcheck.records import LossInfo
from propcheck.rules import judge

BLOCKS, WIDTH, VOCABULARY = 12, 768, 50257
# GPT-2: 0.02 / sqrt(2 x 12).
SCALED = 0.0040825


def matrix(at, name, std, fan_in=WIDTH, fan_out=WIDTH, **changes):
    fields = {
        "role": "linear", "block": at, "sublayer": "attention", "shape": (fan_out, fan_in), "numel": fan_out * fan_in,
        "fan_in": fan_in, "fan_out": fan_out, "std": std, "absmax": 4 * std, "init_calls": f"normal_(0, {std:g})", "site": 0,
        "writes": name.endswith(("c_proj", "o_proj", "down_proj")),
    }  # fmt: skip
    return parameter(f"h.{at}.{name}.weight", **{**fields, **changes})


def outside(name, role, std, rows=VOCABULARY):
    return matrix(None, name, std, fan_out=rows, role=role, sublayer=None, site=None, writes=None)


def model(inner=0.02, output=SCALED, embedding=0.02, head=0.02, **changes):
    blocks = [
        one
        for n in range(BLOCKS)
        for one in (
            matrix(n, "attn.q_proj", inner, **changes),
            matrix(n, "attn.o_proj", output, **changes),
            matrix(n, "mlp.up_proj", inner, fan_out=4 * WIDTH, sublayer="mlp", **changes),
            matrix(n, "mlp.down_proj", output, fan_in=4 * WIDTH, sublayer="mlp", **changes),
        )
    ]
    return [outside("wte", "embedding", embedding), *blocks, outside("lm_head", "linear", head)]


def judged(parameters, scheme="gpt2", *, settings=None, vocabulary=VOCABULARY, **expect):
    declared = {"expect": {"init": scheme, "std": 0.02, "embedding_std": None, **expect}}
    run = run_of(additive(BLOCKS), parameters, settings=settings or declared)
    loss = LossInfo(value=11.0, uniform=vocabulary and math.log(vocabulary))
    run = dataclasses.replace(run, loss=loss, model=dataclasses.replace(run.model, width=WIDTH))
    return judge(run, select=["PC104"])


def test_a_depth_factor_that_was_never_applied_is_one_finding_a_name():
    # huggingface/transformers issue 47458.
    findings = judged(model(output=0.0202))
    assert [finding.severity for finding in findings] == ["warning"] * 2
    assert {f"h.*.{name}.weight" for name in ("attn.o_proj", "mlp.down_proj")} == {
        finding.message.split()[3] for finding in findings
    }
    finding = findings[0]
    assert (finding.value, finding.expected) == (0.0202, pytest.approx(SCALED, rel=1e-4))
    assert "(blocks 0 to 11)" in finding.message
    assert "4.95 times the 0.00408 that the declared scheme gpt2 gives a residual projection at 12 blocks" in finding.message
    assert "the depth factor 1/sqrt(2 x 12) = 0.204 was not applied here" in finding.message


def test_a_depth_factor_that_was_applied_to_queries_too_is_found():
    # facebookresearch/lingua issue 39.
    odd = [matrix(n, "attn.q_proj", SCALED) for n in range(BLOCKS)]
    (finding,) = judged([*(p for p in model() if "q_proj" not in p.name), *odd])
    assert "the 0.02 that the declared scheme gpt2 gives a matrix that is no residual projection" in finding.message
    assert "was applied here too" in finding.message
    assert "only to the matrices that write the update" in finding.remedy


@pytest.mark.parametrize(("name", "right"), [("attn.o_proj", SCALED), ("attn.q_proj", 0.02)])
@pytest.mark.parametrize("std", [0.1, 0.0008])
def test_the_depth_factor_is_no_cause_of_a_scale_that_it_does_not_explain(name, right, std):
    # 0.1 is nearer to 0.02 than to 0.00408, but five times off both; 0.0008 is as far below.
    odd = [matrix(n, name, std) for n in range(BLOCKS)]
    (finding,) = judged([*(p for p in model() if name not in p.name), *odd])
    assert finding.expected == pytest.approx(right, rel=1e-4)
    assert "depth factor" not in finding.message
    assert finding.remedy.startswith("Initialise it as the declared scheme does")


def test_a_head_and_an_embedding_are_found_by_their_rows():
    # huggingface/transformers issue 26441: a head with std 1.
    (finding,) = judged(model(head=1.0))
    assert finding.site.parameter == "h.None.lm_head.weight"
    assert "the 0.02 that the declared scheme gpt2 gives the head" in finding.message
    (finding,) = judged(model(embedding=1.0))
    assert "the 0.02 that the declared scheme gpt2 gives the token embedding" in finding.message
    assert not judged(model(embedding=1.0), embedding_std=1.0)
    assert not judged(model(embedding=1.0, head=1.0), vocabulary=None)  # nothing says which they are


FANS = {
    "normal": (0.02, 0.02, 0.02, 0.02),
    "gpt2": (0.02, SCALED, 0.02, 0.02),
    "megatron": (0.02, SCALED, 0.02, 0.02),
    "small": (math.sqrt(2 / 5 / WIDTH), math.sqrt(2 / 5 / WIDTH / 24), math.sqrt(2 / 5 / WIDTH), math.sqrt(2 / 5 / WIDTH)),
}


@pytest.mark.parametrize("scheme", FANS)
def test_a_model_that_is_drawn_by_its_scheme_is_silent_and_four_times_that_is_not(scheme):
    assert not judged(model(*FANS[scheme]), scheme)
    assert len(judged(model(*(4 * std for std in FANS[scheme])), scheme)) == 6


@pytest.mark.parametrize(
    ("scheme", "std"),
    [
        ("xavier", lambda i, o: math.sqrt(2 / (i + o))),
        ("he", lambda i, o: math.sqrt(2 / i)),
        ("fan-in", lambda i, o: math.sqrt(1 / i)),
    ],
)
@pytest.mark.parametrize("transposed", [False, True])
def test_schemes_of_fans_take_either_side_of_a_matrix_for_its_inputs(scheme, std, transposed):
    def layer(factor=1.0):
        (i, o), up = (WIDTH, 4 * WIDTH), {"sublayer": "mlp"}
        a, b = (o, i) if transposed else (i, o)  # transformers' Conv1D keeps [in, out]
        return [
            matrix(0, "mlp.up_proj", factor * std(i, o), fan_in=a, fan_out=b, **up),
            matrix(0, "mlp.down_proj", factor * std(o, i), fan_in=b, fan_out=a, **up),
        ]

    assert not judged(layer(), scheme)
    assert len(judged(layer(4.0), scheme)) == 2
    assert len(judged(layer(0.25), scheme)) == 2


def test_olmo_draws_the_up_projection_like_an_output_and_the_gate_not():
    llama = [
        matrix(n, name, std, sublayer="mlp")
        for n in range(BLOCKS)
        for name, std in (("mlp.up_proj", SCALED), ("mlp.gate_proj", 0.02), ("mlp.down_proj", SCALED))
    ]
    ends = [outside("wte", "embedding", 1.0), outside("lm_head", "linear", WIDTH**-0.5)]
    assert not judged([*llama, *ends], "olmo-llama")
    (finding,) = judged([*llama, *ends, matrix(0, "attn.q_proj", SCALED)], "olmo-llama")
    assert finding.site.parameter == "h.0.attn.q_proj.weight"


def test_many_names_of_one_kind_are_one_finding():
    names = [f"mlp.{n}_proj" for n in "uvwxyz"]
    wrong = [matrix(n, name, SCALED if name == "mlp.u_proj" else 0.1) for n in range(2) for name in names]
    (finding,) = judged(wrong, "gpt2")
    assert finding.message.startswith("The 12 parameters h.*.mlp.u_proj.weight, ")
    assert "and 1 more name (blocks 0 to 1) have std 0.1 in h.0.mlp.v_proj.weight" in finding.message
    assert "depth factor" not in finding.message  # that is so of one of them only


@pytest.mark.parametrize(
    "changes",
    [
        {"role": "convolution"},
        {"role": "norm", "shape": (WIDTH,)},
        {"role": "bias", "shape": (WIDTH,)},
        {"writes": None, "site": None},  # in no branch
        {"block": None, "writes": None},  # a position embedding's projection, a pooler
        {"std": 0.0, "zeros": WIDTH * WIDTH},  # a branch that starts as the identity
        {"numel": 900, "shape": (30, 30)},
        {"init_calls": None},
        {"nonfinite": 1},
        {"std": 0.0295},
        {"shape": (8, WIDTH), "numel": 8 * WIDTH, "sublayer": "moe"},  # the router of the eight experts below
    ],
)
def test_what_a_scheme_does_not_speak_of_is_silent(changes):
    experts = [matrix(0, f"mlp.experts.{n}.up_proj", 0.02, sublayer="moe") for n in range(8)]
    assert not judged([*experts, matrix(0, "odd", **{"std": 0.2, **changes})], "normal")


def test_stacks_of_experts_are_judged_where_no_fan_is_needed():
    def stack(std):
        stacked = matrix(0, "mlp.experts.down_proj", std, shape=(8, WIDTH, WIDTH), numel=8 * WIDTH**2, sublayer="moe")
        return dataclasses.replace(stacked, fan_in=None, fan_out=None)

    (finding,) = judged([stack(0.02)], "gpt2")
    assert finding.expected == pytest.approx(SCALED, rel=1e-4)
    assert not judged([stack(0.02)], "he")
    router = matrix(0, "mlp.gate", 0.2, fan_out=8, sublayer="moe")
    assert not judged([router, stack(SCALED)], "gpt2")
    assert judged([router], "gpt2")


def test_chance_is_allowed_for():
    # 1058 numbers: 1.5 x e^(6 / 46) = 1.71.
    assert not judged([matrix(0, "odd", 0.0338, 23, 46)], "normal")
    assert judged([matrix(0, "odd", 0.0346, 23, 46)], "normal")


def test_a_weight_is_told_of_once():
    # Off its scheme and off its siblings.
    parameters = [matrix(n, "attn.q_proj", 0.1 if n == 5 else 0.02) for n in range(BLOCKS)]
    (finding,) = judged(parameters, "normal")
    assert "the 0.02 that the declared scheme normal gives" in finding.message
    (finding,) = judged(parameters, None)
    assert "of the same name before and after it" in finding.message


def decoder(scheme, placement="pre", **more):
    init = {"scheme": scheme, "std": 0.02, "embedding_std": None, "convolution_std": None}
    return {"init": init, "residual": {"placement": placement}, "expect": {"init": None}, **more}


def test_the_reference_decoder_declares_its_own_scheme():
    assert len(judged(model(output=0.02), settings=decoder("gpt2"))) == 2
    assert not judged(model(output=0.02), settings=decoder("normal"))
    assert not judged(model(output=0.02), settings=decoder("gpt2", "deepnorm"))  # with gains of its own


@pytest.mark.parametrize("target", [{"python": {"target": "m:build"}}, {"huggingface": {"config": "config.json"}}])
def test_other_targets_do_not(target):
    assert not judged(model(output=0.02), settings=decoder("gpt2", **target))
