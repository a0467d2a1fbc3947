"""The theory columns, against streams and gradients whose recurrence is written out here."""

import dataclasses
import math

import pytest
from synthetic import WIDTH, additive, parameter, post_norm, run_of, site, with_gradient

from propcheck.analysis.theory import expected_gradient_step, predict
from propcheck.records import NormRecord


def theory(run):
    rows = predict(run)
    return [row.theory_sum_rms for row in rows], [row.theory_grad_norm for row in rows]


def norm(number, place, gain, **changes):
    fields = {
        "seed": 0,
        "norm": number,
        "site": number,
        "block": number // 2,
        "module": None,
        "parameter": None,
        "width": WIDTH,
    }
    return NormRecord(**{**fields, "place": place, "kind": "mean_square", "dtype": "float32", "gain": gain, **changes})


def chained(updates, *, placement="pre", stream=1.0, factor=1.0, behind=None, back=2.0, last=1e-3, written=None):
    """Sites with these updates, S growing by their squares; ``behind`` the RMS after a norm on the stream, by site.

    ``factor`` scales the stream for the addition alone. Each branch sends back ``back`` times the square of its update.
    """
    records = []
    for number, update in enumerate(updates):
        total = math.hypot(stream * factor, update)
        records.append(
            site(
                number,
                number // 2,
                ("attention", "mlp")[number % 2],
                stream=stream * factor,
                update=update,
                placement=placement,
            )
        )
        records[-1] = dataclasses.replace(records[-1], continues=number - 1 if number else None)
        stream = total if behind is None else behind[number]
    gradient = last
    for number in reversed(range(len(records))):
        one = records[number]
        read = (one.stream_rms / factor) ** 2  # S of the stream before the factor
        sent = back * updates[number] ** 2
        entering = gradient * math.sqrt(factor**2 + sent / read)
        records[number] = with_gradient(one, gradient if factor != 1 else entering, gradient)
        if behind is not None and number:
            entering *= behind[number - 1] / records[number - 1].sum_rms
        gradient = entering
    return records


def test_pre_norm_follows_its_additions_both_ways_but_for_attention_on_the_embedding():
    records = additive(32, embedding=0.5)
    sums, gradients = theory(run_of(records))
    assert (sums[0], gradients[0]) == (None, None)
    assert sums[1:] == pytest.approx([r.sum_rms for r in records[1:]])
    assert gradients[1:] == pytest.approx([r.grad_stream_norm for r in records[1:]])


def test_the_law_is_no_copy_of_what_one_site_does():
    records = additive(16)
    odd = dataclasses.replace(records[9], update_rms=10.0, update_ratio=10 / records[9].stream_rms)
    sums, gradients = theory(run_of([*records[:9], odd, *records[10:]]))
    assert sums[1:] == pytest.approx([r.sum_rms for r in records[1:]])
    assert gradients[1:] == pytest.approx([r.grad_stream_norm for r in records[1:]])


def test_a_factor_on_the_stream_that_the_architecture_has_not_stands_out():
    records = additive(16)
    halved = ("stream_rms", "stream_norm", "sum_rms", "sum_norm")
    shrunk = [dataclasses.replace(r, **{name: getattr(r, name) / 2 for name in halved}) if r.site > 20 else r for r in records]
    sums, _ = theory(run_of(shrunk))
    assert sums[25] == pytest.approx(2 * shrunk[25].sum_rms)


def test_post_norm_gradients_grow_by_one_plus_b_over_one_plus_f():
    # SwiGLU, b = 2 f: (1 + 2 * 0.25) / (1 + 0.25) = 1.2 an addition, its root in the norm; 1.2^(31 / 2) over 31 additions.
    records = chained([0.5] * 32, placement="post", behind=[1.0] * 32)
    sums, gradients = theory(run_of(records, placement="post"))
    assert sums[0] is None  # reads an embedding without a norm
    assert sums[1:] == pytest.approx([math.sqrt(1.25)] * 31)
    assert gradients[1] / gradients[31] == pytest.approx(1.2**15)
    assert gradients[1:] == pytest.approx([r.grad_stream_norm for r in records[1:]])


def test_the_gain_of_a_norm_on_the_stream_is_what_the_next_sublayer_finds():
    gains = [0.5 if number == 7 else 2.0 for number in range(16)]
    # Each update keeps its proportion to what the branch reads, as a linear branch has it.
    updates = [0.3, *(0.3 * gain for gain in gains[:-1])]
    records = chained(updates, placement="post", behind=gains, back=0.0)
    norms = tuple(norm(number, "stream", gain) for number, gain in enumerate(gains))
    sums, gradients = theory(run_of(records, placement="post", norms=norms))
    assert sums[8] == pytest.approx(0.5 * math.hypot(1, 0.3))
    assert sums[1:] == pytest.approx([r.sum_rms for r in records[1:]])
    assert gradients[1:] == pytest.approx([r.grad_stream_norm for r in records[1:]])


def test_deepnorm_scales_the_stream_for_the_addition():
    # N(a x + F) with a = 3.3636 (64 blocks, arXiv 2203.00555): S of every sum is a^2 + f.
    records = chained([0.2] * 128, placement="deepnorm", behind=[1.0] * 128, factor=3.3636)
    sums, gradients = theory(run_of(records, placement="deepnorm"))
    assert sums[1:] == pytest.approx([math.hypot(3.3636, 0.2)] * 127)
    assert gradients[1:] == pytest.approx([r.grad_stream_norm for r in records[1:]])
    # b = 2 f over a^2: each addition passes on (11.314 + 0.08) / (11.314 + 0.04).
    assert gradients[1] / gradients[127] == pytest.approx(((3.3636**2 + 0.08) / (3.3636**2 + 0.04)) ** 63)


def test_additions_before_the_first_norm_on_the_stream_have_no_factor():
    # Keel (arXiv 2601.19895): N(a x + F(N x)) but for the first two additions, which are x + F(N x) and N(x + F(N x)).
    records = [
        *chained([0.5] * 2, last=1.0)[:2],
        *(dataclasses.replace(r, site=r.site + 2, block=r.block + 1, continues=r.site + 1)
          for r in chained([0.5] * 14, factor=32.0, behind=[1.0] * 14)),
    ]  # fmt: skip
    records = [dataclasses.replace(r, placement="pre+post" if r.site else "pre") for r in records]
    through = records[2].grad_sum_norm * 32 * math.sqrt(1 + 0.5 / 1024)  # what enters the third; b = 2 f as everywhere
    after = through / records[1].sum_rms
    before = after * math.sqrt(1 + 0.5 / records[1].stream_rms ** 2)
    records[1] = with_gradient(records[1], before, after)
    records[0] = with_gradient(records[0], before * math.sqrt(1.5), before)
    sums, gradients = theory(run_of(records))
    assert sums[1:] == pytest.approx([r.sum_rms for r in records[1:]])
    assert gradients[1:] == pytest.approx([r.grad_stream_norm for r in records[1:]])


def test_an_init_that_scales_each_depth_is_followed():
    # Output projections drawn with std 0.02 / sqrt(block + 1): S grows like the harmonic numbers.
    stds = [0.02 / math.sqrt(number // 2 + 1) for number in range(32)]
    records = chained([std / 0.02 for std in stds])
    weights = [parameter(f"blocks.{n}.out", site=n, writes=True, std=std) for n, std in enumerate(stds)]
    inputs = [parameter(f"blocks.{n}.in", site=n, writes=False, std=7.0) for n in range(32)]
    sums, gradients = theory(run_of(records, [*weights, *inputs]))
    assert sums[31] == pytest.approx(math.sqrt(1 + 2 * sum(1 / k for k in range(1, 17))))
    assert sums[1:] == pytest.approx([r.sum_rms for r in records[1:]])
    assert gradients[1:] == pytest.approx([r.grad_stream_norm for r in records[1:]])
    blind, _ = theory(run_of(records))
    assert max(abs(seen / told - 1) for seen, told in zip(blind[1:], sums[1:], strict=True)) > 0.05


def test_norms_that_write_the_updates_say_their_size():
    gains = [0.5 + 0.1 * number for number in range(12)]
    records = chained(gains, placement="sandwich")
    norms = tuple(norm(number, "written", gain) for number, gain in enumerate(gains))
    sums, _ = theory(run_of(records, placement="sandwich", norms=norms))
    assert sums[11] == pytest.approx(math.sqrt(1 + sum(gain**2 for gain in gains)))
    assert sums[1:] == pytest.approx([r.sum_rms for r in records[1:]])


def test_a_norm_whose_epsilon_counts_writes_less_than_its_gain():
    # Inputs of RMS 0.001 and eps 1e-6: half the mean square is left.
    small = [number in (2, 3, 8) for number in range(12)]
    records = chained([math.sqrt(0.5) if damped else 1.0 for damped in small], placement="reordered")
    norms = tuple(norm(n, "written", 1.0, eps=1e-6, input_rms=1e-3 if damped else 1e3) for n, damped in enumerate(small))
    sums, _ = theory(run_of(records, placement="reordered", norms=norms))
    assert sums[1:] == pytest.approx([r.sum_rms for r in records[1:]])


def test_both_updates_of_a_parallel_block_make_one_sum():
    records, stream = [], 1.0
    for block in range(6):
        total = math.sqrt(stream**2 + 0.04 + 0.5)
        for place, (kind, update) in enumerate((("attention", 0.2), ("mlp", math.sqrt(0.5)))):
            number = 2 * block + place
            before = 2 * block - 1 if block else None
            records.append(site(number, block, kind, stream=stream, update=update, total=total, continues=before))
        stream = total
    records = [with_gradient(r, 1 / r.stream_rms, 1 / r.sum_rms) for r in records]  # b = f: g^2 goes as 1 / S
    sums, gradients = theory(run_of(records))
    assert sums[:2] == [None, None]
    assert sums[2:] == pytest.approx([r.sum_rms for r in records[2:]])
    assert gradients[2:] == pytest.approx([r.grad_stream_norm for r in records[2:]])


def test_a_stream_that_changes_its_width_begins_anew():
    narrow, wide = chained([0.5] * 8), chained([0.5] * 8, stream=3.0)
    moved = [
        dataclasses.replace(r, site=r.site + 8, block=r.block + 4, continues=r.site + 7, stream_norm=r.stream_rms * 8)
        for r in wide
    ]
    sums, gradients = theory(run_of([*narrow, *moved]))
    assert sums[1:] == pytest.approx([r.sum_rms for r in (*narrow[1:], *moved)])
    assert gradients[1:] == pytest.approx([r.grad_stream_norm for r in (*narrow[1:], *moved)])


def test_one_sublayer_of_its_kind_is_not_predicted_but_passed():
    records = [dataclasses.replace(r, sublayer="moe" if r.site == 5 else r.sublayer) for r in additive(8)]
    sums, gradients = theory(run_of(records))
    assert (sums[5], gradients[5]) == (None, None)
    assert sums[6:] == pytest.approx([r.sum_rms for r in records[6:]])
    assert gradients[1:5] == pytest.approx([r.grad_stream_norm for r in records[1:5]])


@pytest.mark.parametrize("placement", ["none", None])
def test_nothing_is_predicted_without_a_norm_or_where_it_is_not_known(placement):
    assert theory(run_of(chained([0.5] * 8, placement=placement))) == ([None] * 8, [None] * 8)


def test_what_was_not_observed_is_not_predicted():
    records = additive(8)
    blind = [with_gradient(r, None, None) for r in records]
    assert theory(run_of(blind)) == (theory(run_of(records))[0], [None] * 16)
    assert theory(run_of([dataclasses.replace(r, stream_rms=None, update_rms=math.nan) for r in records])) == ([None] * 16,) * 2
    assert predict(run_of([])) == ()


def test_the_last_gradient_that_was_observed_starts_the_way_back():
    records = additive(8)
    cut = [with_gradient(r, math.inf, math.inf) if r.site > 11 else r for r in records]
    _, gradients = theory(run_of(cut))
    assert gradients[12:] == [None] * 4
    assert gradients[1:12] == pytest.approx([r.grad_stream_norm for r in records[1:12]])


def test_a_gradient_of_a_copy_is_predicted_as_one():
    # A stream that is cast for its addition: the copy's gradient is the sum's, and what the branch sends back joins before it.
    records = chained([1.0] * 12)
    copies = [dataclasses.replace(r, grad_stream_norm=r.grad_sum_norm) for r in records]
    _, gradients = theory(run_of(copies))
    assert gradients[1:] == pytest.approx([r.grad_sum_norm for r in records[1:]])


def test_every_seed_has_a_curve_of_its_own():
    records = [r for seed in (3, 8) for r in additive(4, embedding=1.0 + seed, seed=seed)]
    sums, _ = theory(run_of(records, seeds=(3, 8)))
    assert [value for value in sums if value is not None] == pytest.approx([r.sum_rms for r in records if r.site])


def test_a_block_behind_norms_on_the_stream_is_expected_to_pass_gradients_on_as_they_are():
    assert expected_gradient_step(post_norm(2)[2:4], 1) == 0.0
    # b / f = 2.07 and an update as large as the stream: ln sqrt(1 + 2.07), if the depth allows it.
    one = [site(9, 4, "mlp", stream=1.0, update=1.0)]
    assert expected_gradient_step(one, 1) == pytest.approx(math.log(3.07) / 2)
    assert expected_gradient_step(one, 50) == pytest.approx(2.07 / 2 * math.log(51 / 50))
