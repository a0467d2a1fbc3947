"""Values of the constructor that the init function forgets: on the meta device they are lost."""

from __future__ import annotations

import pytest
import torch
from scanned import errors, found, parameter, scan
from torch import nn
from toy import (
    Decoder,
    RMSNorm,
    gpt2,
)

DEPTH = 6


class WithScalars(Decoder):
    """A factor on each block's stream as a parameter; the constructor sets it."""

    def __init__(self, *, init_sets_it):
        super().__init__(blocks=DEPTH)
        self.init_sets_it = init_sets_it
        self.resid_lambdas = nn.Parameter(torch.ones(DEPTH))

    def forward(self, ids):
        x = self.embed(ids)
        for scale, layer in zip(self.resid_lambdas, self.layers, strict=True):
            x = layer(scale * x)
        return self.head(self.norm(x))

    def init_weights(self):
        for name, module in self.named_modules():
            gpt2(module, name, DEPTH)
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
        if self.init_sets_it:
            nn.init.ones_(self.resid_lambdas)


class WithBuffer(WithScalars):
    """The same factor as a buffer, 1/sqrt(block)."""

    def __init__(self, *, init_sets_it):
        super().__init__(init_sets_it=init_sets_it)
        del self.resid_lambdas
        self.register_buffer("scales", self.made())

    def made(self):
        return torch.arange(1, DEPTH + 1).rsqrt()

    def forward(self, ids):
        x = self.embed(ids)
        for scale, layer in zip(self.scales, self.layers, strict=True):
            x = x + scale * (layer(x) - x)
        return self.head(self.norm(x))

    def init_weights(self):
        init_sets_it, self.init_sets_it = self.init_sets_it, False
        super().init_weights()
        if init_sets_it:
            self.scales.copy_(self.made())


def allocated_later(model, *, init_sets_it):
    with torch.device("meta"):
        made = model(init_sets_it=init_sets_it)
    made.to_empty(device="cpu")
    made.head.weight = made.embed.weight
    made.init_weights()
    return made


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
