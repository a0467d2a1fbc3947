"""The line of the summary that compares a run with fp32."""

import dataclasses
import math

from synthetic import additive, run_of

from propcheck.render.summary import shadow_line


def shadowed(errors, seed=0):
    names = ("shadow_stream_error", "shadow_update_error", "shadow_grad_stream_error", "shadow_grad_update_error")
    records = additive(len(errors) // 2, seed=seed)
    return [
        dataclasses.replace(record, **dict(zip(names, values, strict=True)))
        for record, values in zip(records, errors, strict=True)
    ]


ERRORS = [(None, 0.003, 0.05, 0.04), (0.002, 0.011, 0.04, 0.07), (0.003, 0.004, 0.03, 0.02), (0.0042, 0.005, 0.02, 0.01)]


def test_it_gives_the_end_of_the_stream_and_the_worst_update_and_gradient():
    assert shadow_line(run_of(shadowed(ERRORS))) == (
        "Compared with fp32: the stream differs by 0.42 % at the last site, updates by at most 1.1 % (site 1), gradients by "
        "at most 7 % (site 1)."
    )


def test_of_several_seeds_the_worst_counts():
    other = [(0.5, 0.001, 0.001, 0.001)] * 4
    line = shadow_line(run_of([*shadowed(ERRORS), *shadowed(other, seed=1)], seeds=(0, 1)))
    assert "the stream differs by 50 % at the last site, updates by at most 1.1 % (site 1)" in line


def test_what_is_no_number_is_the_worst():
    errors = [ERRORS[0], (0.002, math.nan, 0.04, 0.03), *ERRORS[2:]]
    assert "updates by at most NaN (site 1)" in shadow_line(run_of(shadowed(errors)))


def test_gradients_that_were_not_seen_are_left_out():
    line = shadow_line(run_of(shadowed([(0.1, 0.2, None, None)] * 2)))
    assert line == "Compared with fp32: the stream differs by 10 % at the last site, updates by at most 20 % (site 0)."


def test_a_run_without_a_shadow_has_no_line():
    assert shadow_line(run_of(additive(2))) == ""
