"""PC206: additions that do not add."""

import dataclasses
import math

import pytest
from synthetic import parameter, run_of, site

from propcheck.records import Doubling
from propcheck.rules import judge

KINDS = ("attention", "mlp")
UPDATES = {"attention": 0.017, "linear_attention": 0.017, "mlp": 0.008, "moe": 0.008, "other": 0.017}


def stack(blocks, *, missing=(), kinds=lambda block: KINDS, widths=lambda block: 1.0, unadded="replaced"):
    """Blocks that add to one stream; of those in ``missing``, (block, kind), the update replaces the stream."""
    stream, before, records = 0.04, None, []
    for block in range(blocks):
        for kind in kinds(block):
            update = UPDATES[kind]
            if (block, kind) in missing:
                if unadded == "replaced":
                    stream, before = update, None
                continue
            one = site(len(records), block, kind, stream=stream, update=update, continues=before)
            wide = {name: getattr(one, name) * widths(block) for name in ("stream_norm", "update_norm", "sum_norm")}
            records.append(dataclasses.replace(one, **wide))
            stream, before = records[-1].sum_rms, records[-1].site
    return records


def judged(sites, *parameters, blocks=8, **changes):
    run = run_of(sites, parameters, **changes)
    return judge(dataclasses.replace(run, model=dataclasses.replace(run.model, blocks=blocks)), select=["PC206"])


def test_a_stack_of_like_blocks_is_silent():
    assert judged(stack(8)) == ()


def test_a_missing_attention_residual_is_found_in_its_block():
    sites = stack(8, missing=[(5, "attention")])
    (finding,) = judged(sites)
    assert finding.severity == "error"
    assert (finding.site.block, finding.site.sublayer) == (5, "attention")
    assert (finding.value, finding.expected) == (1, 2)
    # The stream after block 4 is sqrt(0.04^2 + 5 (0.017^2 + 0.008^2)) = 0.0580; attention alone goes on, at 0.017.
    assert "residual of the attention of block 5 is missing" in finding.message
    assert "blocks 4 and 6 add attention and mlp, block 5 only mlp" in finding.message
    assert "RMS 0.058" in finding.message
    assert "RMS 0.017" in finding.message


def test_a_missing_mlp_residual_is_found_in_its_block_though_the_stream_begins_in_the_next():
    (finding,) = judged(stack(8, missing=[(5, "mlp")]))
    assert (finding.site.block, finding.site.sublayer) == (5, "mlp")
    assert "before site 11 (attention of block 6)" in finding.message


def test_a_block_without_any_residual_is_found():
    (finding,) = judged(stack(8, missing=[(3, "attention"), (3, "mlp")]))
    assert finding.site.block == 3
    assert "residual of the attention and mlp of block 3" in finding.message
    assert "block 3 nothing" in finding.message


def test_mixers_of_different_kinds_are_alike():
    hybrid = lambda block: ("attention" if block % 4 == 3 else "linear_attention", "mlp")  # noqa: E731
    (finding,) = judged(stack(8, missing=[(5, "linear_attention")], kinds=hybrid))
    assert (finding.site.block, finding.site.sublayer) == (5, "linear_attention")


def test_a_block_that_adds_less_to_the_same_stream_misses_no_residual():
    assert judged(stack(8, missing=[(5, "attention")], unadded="skipped")) == ()


def test_an_encoder_and_a_decoder_are_silent():
    encoder = stack(4)
    decoder = stack(4, kinds=lambda block: ("attention", "attention", "mlp"))
    shifted = [
        dataclasses.replace(r, site=r.site + 8, block=r.block + 4, continues=None if r.continues is None else r.continues + 8)
        for r in decoder
    ]
    assert judged([*encoder, *shifted]) == ()


def test_two_stacks_of_like_blocks_are_silent():
    second = [
        dataclasses.replace(r, site=r.site + 8, block=r.block + 4, continues=None if r.continues is None else r.continues + 8)
        for r in stack(4)
    ]
    assert judged([*stack(4), *second]) == ()


def test_a_stage_of_another_width_begins_a_stream_by_design():
    missing = [(4, "attention"), (4, "mlp")]
    assert judged(stack(8, missing=missing, widths=lambda block: 1.0 if block < 4 else 2**0.5)) == ()
    assert len(judged(stack(8, missing=missing))) == 1


def test_convolutions_of_another_stride_have_no_residual_by_design():
    assert judged(stack(8, missing=[(4, "other")], kinds=lambda block: ("other",))) == ()


def test_what_many_blocks_do_is_how_the_model_is_made():
    assert judged(stack(16, missing=[(block, "attention") for block in range(2, 16, 4)]), blocks=16) == ()
    assert judged(stack(8, missing=[(block, "attention") for block in range(8)])) == ()


def test_where_something_could_not_be_followed_nothing_is_missing():
    assert judged(stack(8, missing=[(5, "attention")]), unobserved=("blocks.5.attention: runs as one fused function",)) == ()


def of_branches(sites, *, bypassed=None):
    """A matrix for each sublayer of eight blocks; that of ``bypassed`` is in no branch."""
    places = {(r.block, r.sublayer): r.site for r in sites}
    return [
        parameter(f"blocks.{block}.{kind}.weight", role="linear", block=block, site=places.get((block, kind)), used=True)
        for block in range(8)
        for kind in KINDS
        if (block, kind) in places or (block, kind) == bypassed
    ]


def test_a_sublayer_that_a_block_does_not_have_is_not_missing():
    sites = stack(8, missing=[(5, "attention")])  # its parameters would be used, and in no branch
    assert len(judged(sites, *of_branches(sites, bypassed=(5, "attention")))) == 1
    assert judged(sites, *of_branches(sites)) == ()


@pytest.mark.parametrize("where", [(0, "attention"), (7, "mlp")])
def test_at_an_end_of_the_stack_a_sublayer_that_works_in_no_branch_has_no_residual(where):
    sites = stack(8, missing=[where])
    (finding,) = judged(sites, *of_branches(sites, bypassed=where))
    assert (finding.site.block, finding.site.sublayer) == where
    assert judged(sites, *of_branches(sites)) == ()  # there is no such sublayer


def test_doubled_additions_of_one_name_are_one_finding():
    stream, sites = 0.021, []
    for block in range(16):
        entering = 2 * stream if block else stream
        sites.append(site(block, block, "mlp", stream=entering, update=0.0128, continues=block - 1 if block else None))
        stream = sites[-1].sum_rms
    doublings = [Doubling(site=block, block=block, module=f"layers.{block}") for block in range(16)]
    (finding,) = judged(sites, blocks=16, doublings=tuple(doublings))
    assert (finding.severity, finding.site.site, finding.site.block) == ("error", None, 0)
    assert finding.value == pytest.approx(2.0)
    for part in ("at 16 additions in layers.* (blocks 0 to 15)", "x2 each time, x65500 in all"):
        assert part in finding.message


def test_a_single_doubled_addition_is_placed_and_leads_the_jump_that_it_makes():
    sites, stream, before = [], 0.04, None
    for number in range(16):
        stream = 2 * stream if number == 11 else stream
        kind = KINDS[number % 2]
        sites.append(site(number, number // 2, kind, stream=stream, update=UPDATES[kind], continues=before))
        stream, before = sites[-1].sum_rms, number
    doubling = Doubling(site=11, block=5, module="blocks.5")
    (finding,) = judge(run_of(sites, doublings=(doubling,)), select=["PC205", "PC206"])
    assert (finding.rule, finding.site.block, finding.site.module) == ("PC206", 5, "blocks.5")
    assert (finding.site.site, finding.site.sublayer) == (None, None)  # x + x lies between two sites, at none
    assert finding.also == ("PC205 at 1 site",)
    assert "in blocks.5 (block 5), before site 11 (mlp of block 5)" in finding.message
    assert [f.rule for f in judge(run_of(sites), select=["PC205", "PC206"])] == ["PC205"]


@pytest.mark.parametrize(("factor", "count"), [(2.0, 1), (1.0, 0), (0.8, 0)])
def test_a_sum_of_the_stream_with_itself_that_is_halved_again_is_silent(factor, count):
    """(x + x.detach()) / 2 is x, and (x + (x + F)) / 2 is x + F / 2."""
    sites = [dataclasses.replace(r, stream_rms=r.stream_rms * (factor if r.site == 11 else 1)) for r in stack(8)]
    assert len(judged(sites, doublings=(Doubling(site=11, block=5, module="blocks.5"),))) == count


def twice_added(doubled):
    """x + (x + F) at the attention of some of eight blocks: at each, the stream is doubled before the mlp reads it."""
    sites, stream, before = [], 0.04, None
    for number in range(16):
        kind = KINDS[number % 2]
        update = UPDATES[kind]
        if kind == "mlp" and number // 2 in doubled:  # sqrt(4 x^2 + F^2), behind sqrt(x^2 + F^2)
            stream = math.sqrt(4 * sites[-1].stream_rms ** 2 + sites[-1].update_rms ** 2)
        sites.append(site(number, number // 2, kind, stream=stream, update=update, continues=before))
        stream, before = sites[-1].sum_rms, number
    return sites, tuple(Doubling(site=2 * block + 1, block=block, module=f"blocks.{block}") for block in doubled)


def test_a_stream_that_is_doubled_behind_every_update_of_a_kind_may_be_meant():
    """BLT adds the cross-attention of each decoder layer to a stream that it already contains (transformers, modeling_blt)."""
    for doubled, severity in ((range(8), "warning"), ((2, 5), "error"), ((5,), "error")):
        sites, doublings = twice_added(doubled)
        (finding,) = judged(sites, doublings=doublings)
        assert finding.severity == severity
        first = 2 * min(doubled)  # the addition of F, which the stream is added to once more
        assert (finding.site.site, finding.site.sublayer) == (first, "attention")
        assert ("may be intentional" in finding.message) == (severity == "warning")


def test_a_norm_behind_a_doubled_stream_hides_its_factor():
    sites = [dataclasses.replace(r, placement="post", stream_rms=1.0) for r in stack(8)]
    (finding,) = judged(sites, doublings=(Doubling(site=11, block=5, module="blocks.5"),))
    assert finding.value == 2
    assert "The norm after it hides the factor" in finding.message


def test_a_doubled_last_addition_has_no_site_behind_it():
    (finding,) = judged(stack(8), doublings=(Doubling(site=None, block=7, module=None),))
    assert (finding.site.site, finding.site.block) == (None, 7)
    assert "(block 7)" in finding.message


@pytest.mark.parametrize(
    ("dtype", "ratio", "error", "broken"),
    [
        ("bfloat16", 0.0065, 0.25, False),  # measured in bf16 additions: error over update, by update over stream
        ("bfloat16", 0.001, 0.80, False),
        ("bfloat16", 1e-5, 1.0, False),  # all of it is lost, as rounding does
        ("bfloat16", 0.1, 0.017, False),
        ("bfloat16", 1.0, 1.0, True),  # the update is not in the sum, and is as large as the stream
        ("bfloat16", 0.1, 1.0, True),
        ("float32", 0.001, 1.0, True),
        ("float32", 0.001, 1e-5, False),
        ("float32", 1e-8, 1.0, False),
        ("float16", 0.01, 1.0, True),
        ("float16", 0.01, 0.02, False),
    ],
)
def test_a_sum_is_wrong_where_rounding_cannot_have_made_its_error(dtype, ratio, error, broken):
    sites = [
        dataclasses.replace(r, stream_dtype=dtype, update_dtype="float32", add_error=error) if r.site == 7 else r
        for r in (site(n, n // 2, KINDS[n % 2], update=ratio, add_error=0.0, continues=n - 1 if n else None) for n in range(12))
    ]
    findings = judged(sites, blocks=6)
    assert [f.site.site for f in findings] == ([7] if broken else [])
    assert all(f.value == error and f"{100 * error:g} % of the update" in f.message for f in findings)


def test_a_parallel_block_that_is_rounded_twice_is_silent():
    """Updates that nearly cancel: what is lost is large beside their sum, which is what the error is relative to."""
    assert judged(parallel(lambda _block: (0.1, 0.1, 0.9)), blocks=6) == ()


def test_a_parallel_block_whose_sum_is_wrong_is_found():
    (finding,) = judged(parallel(lambda block: (0.5, 0.1, 1.0 if block == 3 else 0.01)), blocks=6)
    assert finding.site.block == 3


def parallel(of_block):
    """Six blocks of two updates that are added at once: their RMS, and the error of the sum over that of both."""
    sites = []
    for block in range(6):
        *updates, error = of_block(block)
        before = 2 * block - 1 if block else None
        for kind, update in zip(KINDS, updates, strict=True):
            sites.append(site(len(sites), block, kind, update=update, total=1 + block / 10, add_error=error, continues=before))
    return sites


def test_sums_that_are_not_finite_or_not_observed_are_not_judged():
    for changes in ({"nonfinite": 3}, {"add_error": math.inf}, {"add_error": None}, {"stream_dtype": "float8_e4m3fn"}):
        one = dataclasses.replace(site(0, 0, update=0.5, add_error=1.0), **changes)
        assert judged([one], blocks=1) == ()
