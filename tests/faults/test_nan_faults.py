"""The first operation that makes a NaN or an infinity."""

from __future__ import annotations

import math

import pytest
from faulty_nan import PADDING, Factored, FiniteSoftmax, Softmax, left_padded, with_decay_of_two
from scanned import errors, found, scan
from toy import (
    Decaying,
)

# ------------------------------------------------------------------ rows of attention that see nothing


class ExpAndSum(Softmax):
    """The same with the softmax written out."""

    def forward(self, x, seen):
        q, k, v = self.split(self.wq(x)), self.split(self.wk(x)), self.split(self.wv(x))
        scores = (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).masked_fill(~seen, self.hidden)
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return self.wo((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("attention", "function"), [(Softmax, "softmax"), (ExpAndSum, "sub")])
def test_a_row_of_attention_that_sees_nothing_is_found_with_its_tokens(attention, function):
    """pytorch/pytorch issue 103749: with padding on the left its first queries see padding alone."""
    run = scan(lambda: left_padded(attention))
    (finding,) = found(run, "PC209")
    assert (finding.severity, finding.site.block, finding.site.sublayer) == ("error", 0, "attention")
    (origin,) = (one for one in run.record.origins if one.direction == "forward")
    assert (origin.value, origin.block) == ("NaN", 0)
    assert function in origin.function
    assert origin.module.startswith("layers.0.attn")
    assert origin.tokens == tuple(range(PADDING))
    assert function in finding.message


def test_hiding_with_the_least_finite_number_is_silent():
    run = scan(lambda: left_padded(FiniteSoftmax))
    assert not run.record.origins
    assert not errors(run)


# ------------------------------------------------------------------ exponentials of sums


def test_factors_of_a_decay_that_overflow_are_found_at_the_first_mixer():
    """pytorch/executorch issue 21417: exp(-cumsum) is infinite, exp(cumsum) is 0, and their product is NaN."""
    run = scan(lambda: with_decay_of_two(Factored))
    (finding,) = found(run, "PC209")
    assert (finding.severity, finding.site.block, finding.site.site) == ("error", 0, 0)
    (origin,) = (one for one in run.record.origins if one.direction == "forward")
    assert (origin.value, origin.function, origin.block) == ("infinity", "exp", 0)
    assert origin.module.startswith("layers.0.attn")


def test_exponentials_of_differences_are_silent():
    run = scan(lambda: with_decay_of_two(Decaying))
    assert not run.record.origins
    assert not errors(run)
