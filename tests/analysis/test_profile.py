"""Which sites are one addition, and which one stream."""

import dataclasses

from synthetic import additive, qwen, run_of, site

from propcheck.analysis.profile import additions, profile, streams


def parallel(blocks, *, first=0, begins=None):
    """Two updates a block, added at once; ``begins`` is what the first block continues."""
    records, stream = [], 1.0
    for block in range(blocks):
        for place, kind in enumerate(("attention", "mlp")):
            number = first + 2 * block + place
            before = first + 2 * block - 1 if block else begins
            records.append(site(number, block, kind, stream=stream, update=0.5, total=stream + 0.1, continues=before))
        stream += 0.1
    return records


def numbers(groups):
    return [[record.site for record in group] for group in groups]


def test_updates_with_one_stream_and_one_sum_are_one_addition():
    assert numbers(additions(parallel(3))) == [[0, 1], [2, 3], [4, 5]]


def test_additions_that_follow_each_other_are_apart():
    one_by_one = [dataclasses.replace(r, continues=r.site - 1 if r.site else None) for r in additive(2)]
    assert numbers(additions(one_by_one)) == [[0], [1], [2], [3]]
    # Nor do equal values join them: an update of zero leaves the stream as it was.
    zero = [dataclasses.replace(r, stream_rms=1.0, sum_rms=1.0) for r in one_by_one]
    assert numbers(additions(zero)) == [[0], [1], [2], [3]]


def test_runs_that_do_not_say_what_a_site_continues_have_one_stream_of_single_additions():
    flat = [dataclasses.replace(r, stream_rms=1.0, sum_rms=1.0) for r in additive(2)]
    assert numbers(additions(flat)) == [[0], [1], [2], [3]]
    assert [len(stream.sites) for stream in streams(run_of(flat))] == [4]


def test_a_stream_that_begins_with_a_parallel_block_is_one_stream():
    assert numbers(stream.sites for stream in streams(run_of(parallel(3)))) == [[0, 1, 2, 3, 4, 5]]


def test_two_streams_stay_apart_in_every_seed():
    records = [dataclasses.replace(r, seed=seed) for seed in (0, 1) for r in (*parallel(2), *parallel(2, first=4))]
    run = run_of(records, seeds=(0, 1))
    assert numbers(stream.sites for stream in streams(run)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [record.seed for record in streams(run, 1)[1].sites] == [1] * 4


def test_a_profile_is_computed_once_per_run_and_anew_for_a_copy():
    run = run_of(qwen())
    assert profile(run) is profile(run)
    assert streams(run, 0) is streams(run, 0)
    copy = dataclasses.replace(run, sites=run.sites[:4])
    assert len(profile(copy).sites) == 4
    assert copy != run
    assert run == run_of(qwen())
