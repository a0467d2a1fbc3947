"""Traps that tools like this one fell into, each named by its behaviour; the public report is cited.

Those that are tested where they belong:

- in-place sums, where full backward hooks raise (pytorch#61519): ``observe/test_follow.py``,
  ``test_the_sum_may_be_written_in_any_way``;
- activation checkpointing, which fires forward hooks twice or not at all (pytorch#81296, pytorch#130996):
  ``engine/test_checkpoint.py``, ``test_sites_loss_and_gradients_are_those_without_it``, and ``observe/test_models.py``,
  ``test_checkpointing_of_the_users_own``;
- keyword-only calls, whose hooks get no arguments (transformers#29247, pytorch#156695): ``observe/test_streams.py``,
  ``test_blocks_and_sublayers_that_are_called_with_keywords_alone``;
- hooks on a compiled model, which never fire (pytorch#117758): ``engine/test_compiled.py``;
- norms accumulated in bf16, which are quantised (fairscale#1092): ``observe/test_gradients.py``,
  ``test_a_gradient_that_is_formed_is_measured_as_it_is``, and ``observe/test_statistics.py``;
- gradient norms with the loss scale still in them (pytorch-lightning#9205): ``test_measurement.py``,
  ``test_fp16_gradients_are_those_of_a_scaled_loss``, and of a scale that is exact below;
- column types inferred from the first batch, which drift (NVTabular#429, cryptostore#162): ``test_store.py``,
  ``test_columns_have_the_records_order_and_a_type_whatever_was_found``;
- a streamed backward that is wrong while the loss is right (Soup#331): ``engine/test_streamed_equals_resident.py`` and
  ``models/test_streamed.py``, every gradient, three times;
- NaN and infinity dropped before they are counted (wandb, watch): ``observe/test_models.py``,
  ``test_non_finite_values_are_counted_and_come_through``, ``observe/test_census.py``, ``test_store.py``,
  ``test_null_and_nan_stay_apart_in_the_file``, ``report/test_table.py``, ``report/test_plots.py``.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from synthetic import additive, parameter, run_of
from torch import nn

import propcheck
from propcheck import rules
from propcheck.deferred_init.keyed_rng import Workers
from propcheck.execution.passes import execute
from propcheck.measure.site_rows import site_records
from propcheck.targets.target import Target, Task

WIDTH, VOCABULARY, DEPTH = 16, 23, 3
IDS = torch.arange(12).view(2, 6)


class Block(nn.Module):
    """x + W rms_norm(x)."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def update(self, x):
        return self.inner(F.rms_norm(x, (WIDTH,)))

    def forward(self, x):
        return x + self.update(x)


class Model(nn.Module):
    def __init__(self, block=Block, final=nn.Identity):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(DEPTH))
        self.final, self.head = final(), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x))


def cross_entropy(logits, _batch):
    return F.cross_entropy(logits.flatten(0, 1).float(), IDS.flatten())


def observe(build, *, loss_scale=1.0, memory=1 << 40, loss=cross_entropy):
    """Return the pass and the rows of its sites."""
    task = Task(lambda: Target(build(), loss=loss), lambda _model, _seed: IDS, loss_scale=loss_scale)
    with Workers(1) as workers:
        one = execute(task, 0, memory=memory, device=torch.device("cpu"), workers=workers)
    return one, site_records(one.sites, 0, one.gradients)


def scan(build, loss=cross_entropy):
    return propcheck.scan(lambda: propcheck.Target(build(), batch=IDS, loss=loss), memory="1GiB")


# ---------------------------------------------------------------------- a stored reference is changed later


@pytest.mark.parametrize("what", ["update", "stream", "sum"])
@pytest.mark.parametrize("memory", [1 << 40, 0], ids=["resident", "streamed"])
def test_what_is_changed_after_the_sum_is_measured_as_it_was_at_the_sum(what, memory):
    """A reference kept for later would see what the code did to the tensor since (thingsvision#44)."""
    asked = []

    class Overwriting(Block):
        def forward(self, x):
            update = self.update(x)
            total = x + update
            if what == "sum":
                given = total.clone()
                total.detach().mul_(3)  # what nobody reads any more
                return given
            asked.append(what)
            {"update": update, "stream": x}[what].detach().mul_(3)
            return total

    class Copied(Overwriting):
        """What autograd keeps of the stream is a copy, which is not overwritten."""

        def forward(self, x):
            return super().forward(x.clone())

        def update(self, x):
            return super().update(x * 1.0)

    class Plain(Copied):
        def forward(self, x):
            x = x.clone()
            return x + self.update(x)

    _, expected = observe(lambda: Model(Plain))
    _, rows = observe(lambda: Model(Copied), memory=memory)
    assert rows == expected
    assert asked or what == "sum"


def test_a_parallel_sum_whose_first_operands_are_gone_is_still_measured():
    """The second update of a parallel block asks for the first one again."""

    class Parallel(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            h = F.rms_norm(x, (WIDTH,))
            q, k, v = self.qkv(h).chunk(3, -1)
            attention, mlp = self.out(F.scaled_dot_product_attention(q, k, v)), self.down(F.gelu(self.up(h)))
            x = x + attention
            self.forget(attention)
            return x + mlp

        def forget(self, attention):
            pass

    class Forgetting(Parallel):
        def forget(self, attention):
            attention.detach().zero_()

    _, expected = observe(lambda: Model(Parallel))
    _, rows = observe(lambda: Model(Forgetting))
    assert len(rows) == len(expected) == 2 * DEPTH
    for row, other in zip(rows, expected, strict=True):
        assert (row.module, row.update_rms) == (other.module, other.update_rms)


# ---------------------------------------------------------------------- NaN passes every comparison


class Poisoned(Block):
    """One NaN; where and when is ``what``."""

    what = ""

    def update(self, x):
        update = super().update(x)
        if self.what == "activation":
            mask = torch.zeros_like(update)
            mask[0, 1, 2] = float("nan")
            return update + mask
        if self.what == "gradient" and update.requires_grad:
            update.register_hook(lambda gradient: gradient * float("nan"))
        return update


@pytest.mark.parametrize(("what", "rule"), [("activation", "PC209"), ("gradient", "PC305")])
def test_one_nan_is_an_error_and_passes_no_threshold(what, rule):
    """max(norm) < tolerance is true of no NaN, and max() may drop it (openfast#1156)."""
    run = scan(lambda: Model(type("Poisoned", (Poisoned,), {"what": what})))
    assert rule in {finding.rule for finding in run.findings if finding.severity == "error"}


def test_a_nan_in_a_parameter_or_in_the_loss_alone_is_an_error():
    class Broken(Block):
        def __init__(self):
            super().__init__()
            with torch.no_grad():
                self.inner.bias[3] = float("nan")

    findings = scan(lambda: Model(Broken)).findings
    assert {"PC101", "PC209"} <= {finding.rule for finding in findings if finding.severity == "error"}

    def lost(logits, batch):
        return cross_entropy(logits, batch) * float("nan")

    run = scan(Model, loss=lost)
    assert math.isnan(run.loss.value)
    assert any(finding.severity == "error" for finding in run.findings)


@pytest.mark.parametrize(
    "column", ["stream_rms", "update_rms", "sum_rms", "grad_stream_norm", "grad_update_norm", "grad_sum_norm"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_statistic_of_a_site_hides_behind_a_comparison(column, value):
    """Of a healthy run, one number of one site that is none."""
    records = additive(8)
    assert not rules.judge(run_of(records))
    changes = {column: value} if column.startswith("grad") else {column: value, "nonfinite": 1}
    records[7] = dataclasses.replace(records[7], **changes)
    findings = rules.judge(run_of(records))
    assert [finding.severity for finding in findings] == ["error"]
    assert findings[0].site.site == 7


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_gradient_of_a_parameter_hides_behind_a_comparison(value):
    good = [parameter(f"blocks.{block}.weight", grad_state="norm", grad_norm=0.1) for block in range(8)]
    bad = [*good[:5], dataclasses.replace(good[5], grad_state="nonfinite", grad_norm=value), *good[6:]]
    assert not [finding for finding in rules.judge(run_of(additive(8), good)) if finding.rule == "PC305"]
    (finding,) = [finding for finding in rules.judge(run_of(additive(8), bad)) if finding.rule == "PC305"]
    assert (finding.severity, finding.site.parameter) == ("error", "blocks.5.weight")


# ---------------------------------------------------------------------- the loss scale


@pytest.mark.parametrize("memory", [1 << 40, 0], ids=["resident", "streamed"])
def test_gradients_are_those_of_the_loss_without_its_scale(memory):
    """A power of two scales without rounding: every norm is the very same (pytorch-lightning#9205)."""
    one, rows = observe(Model, memory=memory)
    two, scaled = observe(Model, memory=memory, loss_scale=2.0**10)
    assert scaled == rows
    assert two.gradients == one.gradients
    assert two.loss == one.loss


# ---------------------------------------------------------------------- the final norm


class Large(nn.RMSNorm):
    def __init__(self):
        super().__init__(WIDTH)
        nn.init.constant_(self.weight, 30.0)


def test_the_final_norm_is_no_site_and_no_jump():
    """The last hidden state that models hand out is behind it, at another scale (transformers#26142)."""
    _, rows = observe(lambda: Model(final=Large))
    assert [row.module for row in rows] == [f"blocks.{block}.inner" for block in range(DEPTH)]
    assert [row.placement for row in rows] == ["pre"] * DEPTH
    assert rows[-1].sum_rms < 3  # of the sum, not of what the norm makes of it
    found = {finding.rule for finding in scan(lambda: Model(final=Large)).findings}
    assert not found & {"PC201", "PC202", "PC205", "PC206"}


# ---------------------------------------------------------------------- what is added


class Sublayer(nn.Module):
    """Its module gives W x; what is added is norm(2 (W x + b))."""

    def __init__(self):
        super().__init__()
        self.attn = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.RMSNorm(WIDTH)

    kept: list | None = None

    def forward(self, x):
        given = self.attn(F.rms_norm(x, (WIDTH,)))
        added = self.norm((given + self.bias) * 2.0) * 0.5
        added.retain_grad()
        self.kept.append((given.detach(), added))
        return x + added


def test_the_update_is_what_is_added_and_not_what_a_module_gives(monkeypatch):
    """A bias, a multiplier and a norm come between the two (TransformerLens#1639, TransformerLens#1648)."""
    kept = []
    monkeypatch.setattr(Sublayer, "kept", kept)
    one, rows = observe(lambda: Model(Sublayer))
    assert len(rows) == len(kept) == DEPTH
    for site, row, (given, added) in zip(one.sites, rows, kept, strict=True):
        assert row.update_rms == pytest.approx(added.detach().double().square().mean().sqrt().item(), rel=1e-9)
        assert row.update_rms != pytest.approx(given.double().square().mean().sqrt().item(), rel=0.05)
        assert row.grad_update_norm == pytest.approx(added.grad.double().norm().item(), rel=1e-6)
        assert {f"blocks.{row.block}.{name}" for name in ("attn.weight", "bias", "norm.weight")} == site.branch.parameters
        assert row.placement == "sandwich"


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        return self.head(torch.vmap(lambda one: one + self.inner(one))(x))


def test_an_addition_within_a_transform_is_unobserved_and_no_crash():
    run = propcheck.scan(Mapped, tokens=4)
    assert [finding.rule for finding in run.findings if finding.rule in ("PC502", "PC503")] == ["PC502", "PC503"]
