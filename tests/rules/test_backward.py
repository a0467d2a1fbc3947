"""PC301, PC302 and PC305 on gradients whose law is known."""

import dataclasses
import math

import pytest
from synthetic import additive, factors, parameter, post_norm, qwen, run_of, with_gradient

from propcheck.rules import judge


def ids(run, **options):
    return [finding.rule for finding in judge(run, **options)]


def only(run, rule):
    (finding,) = judge(run, select=[rule])
    return finding


def power_law(blocks, exponent):
    """Pre-norm with a gradient of (depth + 1)^-exponent, from a forward pass with updates of one size."""
    return [
        with_gradient(r, (r.site / 2 + 1) ** -exponent, (r.site / 2 + 1.5) ** -exponent)
        for r in additive(blocks, embedding=1.0, updates=(0.01, 1.0))
    ]


@pytest.mark.parametrize("exponent", [0.5, 1.0])
@pytest.mark.parametrize("blocks", [4, 12, 64])
def test_power_laws_toward_the_input_are_healthy(blocks, exponent):
    assert ids(run_of(power_law(blocks, exponent))) == []


def test_the_stock_qwen_gradient_is_explained_by_its_forward_pass():
    records = qwen()
    assert records[0].grad_stream_norm / records[126].grad_stream_norm > 20000
    assert ids(run_of(records), select=["PC301", "PC302"]) == []


@pytest.mark.parametrize("placement", ["pre", "post", "sandwich", "none", None])
def test_ten_percent_a_block_explodes(placement):
    finding = only(run_of(factors(64, backward=1.1, placement=placement)), "PC301")
    assert finding.severity == "error"
    assert finding.value == pytest.approx(1.1)
    assert "x446 over 64 blocks" in finding.message
    assert "It goes as 1.1^block, an exponential, over blocks 17 to 63." in finding.message


@pytest.mark.parametrize("blocks", [12, 17])
def test_a_hundredfold_a_layer_explodes(blocks):
    finding = only(run_of(factors(blocks, backward=100.0)), "PC301")
    assert finding.value == pytest.approx(100.0)
    assert f"x1e{2 * blocks} over {blocks} blocks" in finding.message


def test_what_overflowed_does_not_hide_the_trend_before_it():
    records = [with_gradient(r, math.inf, math.inf) if r.site < 10 else r for r in factors(17, backward=100.0)]
    assert ids(run_of(records)) == ["PC301", "PC305"]


def test_a_forward_explosion_does_not_excuse_the_gradients():
    records = [dataclasses.replace(r, update_ratio=3.0) for r in factors(64, forward=1.2, backward=1.2)]
    assert ids(run_of(records), select=["PC301"]) == ["PC301"]
    (finding,) = judge(run_of(records))
    assert (finding.rule, finding.also) == ("PC201", ("PC301 at 86 sites",))  # 48 blocks, of which a tenth is left out


def test_a_forward_explosion_that_leads_gradients_which_are_an_error_is_one():
    # 1.05^64 = 23, a warning by itself; 1.2^64 = 1.2e5.
    (alone,) = judge(run_of(factors(64, forward=1.05)))
    (leading,) = judge(run_of(factors(64, forward=1.05, backward=1.2)))
    assert (alone.rule, alone.severity) == ("PC201", "warning")
    assert (leading.rule, leading.severity, leading.also) == ("PC201", "error", ("PC301 at 86 sites",))


def test_swiglu_under_post_norm_explodes_by_its_own_law():
    # (1+b)/(1+f) with f = 11.7 and b = 2.04 f is 1.96 an MLP addition: x1.4 a block backward.
    step = math.sqrt((1 + 2.04 * 11.7) / (1 + 11.7))
    finding = only(run_of(factors(64, backward=step, placement="post"), placement="post"), "PC301")
    assert finding.value == pytest.approx(1.4, rel=0.01)
    assert "A norm after each addition" in finding.message


def test_ten_percent_less_a_block_vanishes():
    finding = only(run_of(factors(64, backward=0.9)), "PC302")
    assert finding.severity == "error"
    assert "x0.00118 over 64 blocks" in finding.message
    assert "It goes as 0.9^block, an exponential" in finding.message


def test_post_norm_as_measured_is_silent():
    assert ids(run_of(factors(48, backward=0.61 ** (1 / 48), placement="post"))) == []
    assert ids(run_of(post_norm(64))) == []


def test_a_cut_is_reported_where_it_is():
    records = [with_gradient(r, 0.0, 0.0 if r.site < 9 else r.grad_sum_norm) if r.site <= 9 else r for r in additive(8)]
    finding = only(run_of(records), "PC302")
    assert (finding.site.site, finding.severity) == (9, "error")
    assert "10 sites get none" in finding.message


def test_no_gradient_at_all_is_an_error():
    records = [with_gradient(r, 0.0, 0.0) for r in additive(8)]
    assert only(run_of(records), "PC302").severity == "error"


def test_a_zero_head_that_learns_is_a_note():
    records = [with_gradient(r, 0.0, 0.0) for r in additive(8)]
    head = parameter("head.weight", absmax=0.0, zeros=12)
    finding = only(run_of(records, [head]), "PC302")
    assert (finding.severity, finding.site.parameter) == ("note", "head.weight")


def test_unobserved_gradients_are_not_judged():
    records = [dataclasses.replace(r, grad_stream_norm=None, grad_sum_norm=None, grad_update_norm=None) for r in additive(8)]
    assert ids(run_of(records)) == []


def test_the_last_site_with_a_bad_gradient_leads():
    records = [with_gradient(r, math.nan, math.nan) if r.site < 6 else r for r in additive(8)]
    records[5] = dataclasses.replace(records[5], grad_sum_norm=1.0, grad_update_norm=1.0)
    (finding,) = judge(run_of(records))
    assert (finding.rule, finding.site.site, finding.metric) == ("PC305", 5, "grad_stream_norm")
    assert "its own backward" in finding.message
    assert "5 earlier sites" in finding.message


def test_a_loss_that_is_nan_is_named_as_the_cause():
    records = [with_gradient(r, math.nan, math.nan) for r in additive(8)]
    assert "the loss itself is NaN" in only(run_of(records, loss=math.nan), "PC305").message


def test_a_non_finite_forward_pass_is_reported_once():
    records = [dataclasses.replace(with_gradient(r, math.nan, math.nan), nonfinite=3) for r in additive(8)]
    (finding,) = judge(run_of(records, loss=math.nan))
    assert finding.rule == "PC209"
    assert "gradient is not finite at 16 sites" in finding.message


def test_a_parameter_with_a_bad_gradient_outside_the_sites_is_found():
    bad = parameter("embedding.weight", grad_state="nonfinite", grad_norm=math.inf)
    finding = only(run_of(additive(4), [bad]), "PC305")
    assert finding.site.parameter == "embedding.weight"
    assert "The gradient of embedding.weight is NaN or infinite" in finding.message
    finding = only(run_of(additive(4), [bad, dataclasses.replace(bad, name="other.weight")]), "PC305")
    assert "The gradients of embedding.weight and 1 more parameter are NaN or infinite" in finding.message


@pytest.mark.parametrize("changes", [{"nonfinite": 3}, {"grad_stream_norm": math.nan}])
def test_parameters_are_not_told_of_where_the_stream_of_any_seed_spoilt_them(changes):
    bad = parameter("embedding.weight", grad_state="nonfinite", grad_norm=math.nan)
    first = [dataclasses.replace(r, **changes) for r in additive(4)]
    run = run_of([*first, *additive(4, seed=1), *additive(4, seed=2)], [bad], seeds=(0, 1, 2))
    (finding,) = judge(run, select=["PC209", "PC305"])
    assert finding.site.parameter is None
    assert finding.message.endswith("Seen in 1 of 3 seeds.")


def test_a_loss_that_is_nan_after_a_finite_pass_is_found():
    # A mean over no targets is 0 / 0, and its gradients are zero: those of the stream and of every parameter are finite.
    (finding,) = judge(run_of([with_gradient(r, 0.0, 0.0) for r in additive(4)], loss=math.nan))
    assert (finding.rule, finding.severity, finding.metric, finding.site.site) == ("PC305", "error", "loss", None)
    assert "The loss is NaN, although every sum of the stream" in finding.message
    seeds = [*additive(4), *additive(4, seed=1)]
    assert only(run_of(seeds, loss=math.inf, seeds=(0, 1)), "PC305").message.startswith("The loss is inf, although")


def test_what_lies_beside_two_streams_is_told_once():
    bad = parameter("embedding.weight", grad_state="nonfinite", grad_norm=math.inf)
    assert len(judge(run_of(two_streams(), [bad]), select=["PC305"])) == 1
    assert len(judge(run_of(two_streams(), loss=math.nan), select=["PC305"])) == 1


def two_streams():
    return [dataclasses.replace(r, continues=r.site - 1 if r.site not in (0, 8) else None) for r in additive(8)]


def test_each_of_two_streams_without_a_gradient_is_named():
    records = [with_gradient(r, 0.0, 0.0) for r in two_streams()]
    first, second = judge(run_of(records, [parameter("head.weight", absmax=0.0, zeros=12)]), select=["PC302"])
    assert "any of the 8 sites from site 0 (attention of block 0) to site 7 (mlp of block 3)" in first.message
    assert "any of the 8 sites from site 8 (attention of block 4) to site 15 (mlp of block 7)" in second.message


def side_stream():
    """The first of two streams, without a gradient; the second one has its own."""
    return [with_gradient(r, 0.0, 0.0) if r.site < 8 else r for r in two_streams()]


@pytest.mark.parametrize(
    "reader",
    [
        {"role": "scale", "block": 4, "site": 8, "shape": (1,), "numel": 1, "zeros": 1},  # a gated cross-attention: tanh(0)
        {"role": "linear", "block": 4, "site": 8, "zeros": 12},  # its output projection
        {"role": "linear", "zeros": 12},  # what brings the stream into the other one, outside the blocks
        {"role": "scale", "block": 0, "site": 1, "branches": 9, "zeros": 12},  # one gate, in both streams
    ],
)
def test_a_side_stream_that_is_read_through_a_zero_that_learns_is_a_note(reader):
    """Flamingo, arXiv 2204.14198: tanh of a gate that starts at 0, so that the visual stream gets no gradient at first."""
    finding = only(run_of(side_stream(), [parameter("reader", absmax=0.0, **reader)]), "PC302")
    assert (finding.severity, finding.site.site) == ("note", 7)
    assert "The parameter reader starts at zero and has a gradient of its own: if it reads" in finding.message
    assert "because" not in finding.message


@pytest.mark.parametrize(
    "other",
    [
        {"role": "scale", "block": 4, "site": 8, "grad_state": "zero", "grad_norm": 0.0},  # as dead as what it reads
        {"role": "scale", "block": 4, "site": 8, "requires_grad": False, "grad_state": "none"},
        {"role": "scale", "block": 4, "site": 8, "zeros": 0, "absmax": 0.1},
        {"role": "bias", "block": 4, "site": 8},  # it is added
        {"role": "bias", "block": None, "site": None},  # positions
        {"role": "scale", "block": 0, "site": 3},  # in the stream itself
    ],
)
def test_a_side_stream_that_nothing_will_bring_a_gradient_to_stays_an_error(other):
    finding = only(run_of(side_stream(), [parameter("other", **{"absmax": 0.0, "zeros": 12, **other})]), "PC302")
    assert (finding.severity, finding.site.site) == ("error", 7)
