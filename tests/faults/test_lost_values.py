"""Values of the constructor that the init function forgets: on the meta device they are lost."""

from __future__ import annotations

import pytest
import torch
from faulty_lost_values import DEPTH, WithBuffer, WithScalars, allocated_later
from scanned import errors, found, parameter, scan
from torch import nn
from toy import (
    Decoder,
)


def test_a_parameter_that_only_the_constructor_set_is_named():
    """karpathy/nanochat issue 686: built on the meta device, its values are lost when memory is given to it."""
    run = scan(lambda: allocated_later(WithScalars, init_sets_it=False))
    (finding,) = found(run, "PC102")
    assert (finding.severity, finding.site.parameter) == ("error", "resid_lambdas")


def test_it_is_silent_and_has_its_value_where_the_init_function_sets_it():
    run = scan(lambda: allocated_later(WithScalars, init_sets_it=True))
    assert not errors(run)
    assert (parameter(run, "resid_lambdas").mean, parameter(run, "resid_lambdas").std) == (1.0, 0.0)


def test_a_buffer_that_only_the_constructor_set_is_named():
    """allenai/OLMo-core issue 698."""
    run = scan(lambda: allocated_later(WithBuffer, init_sets_it=False))
    (finding,) = found(run, "PC102")
    assert (finding.severity, finding.site.parameter) == ("error", "scales")


def test_a_buffer_is_silent_and_has_its_values_where_the_init_function_sets_it():
    run = scan(lambda: allocated_later(WithBuffer, init_sets_it=True))
    assert not errors(run)
    row = parameter(run, "scales")
    assert (row.absmax, row.mean) == pytest.approx((1.0, sum(n**-0.5 for n in range(1, DEPTH + 1)) / DEPTH))


class NeverSet(Decoder):
    """Without a meta device: memory that is asked for and not written."""

    def __init__(self):
        super().__init__(blocks=DEPTH)
        self.resid_lambdas = nn.Parameter(torch.empty(DEPTH))

    forward = WithScalars.forward


def test_so_is_memory_that_is_asked_for_and_never_written():
    (finding,) = found(scan(NeverSet), "PC102")
    assert (finding.severity, finding.site.parameter) == ("error", "resid_lambdas")
