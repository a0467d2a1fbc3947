"""A pass is compared with the same weights in fp32, as two passes in plain torch are."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import IDS, RESIDENT, STREAMED, WIDTH, Block, Model, cross_entropy
from torch import nn

from propcheck.deferred_init.keyed_rng import Workers
from propcheck.deferred_init.materialize import Materializer
from propcheck.deferred_init.record import record
from propcheck.errors import PropcheckError
from propcheck.execution import passes as engine
from propcheck.measure.fp32_reference import Spool
from propcheck.targets.target import Target, Task


def shadowed(build, memory=RESIDENT, *, batch=IDS, **task):
    settings = Task(lambda: Target(build(), loss=loss), lambda _model, _seed: batch, **task)
    with Workers(1) as workers:
        return engine.execute(settings, 0, memory=memory, device=torch.device("cpu"), workers=workers, shadow=True)


def loss(logits, batch):
    return cross_entropy(logits.float(), batch)


def of(dtype, block=Block):
    return lambda: Model(block=block).to(dtype)


def drawn(build):
    """Give the model with the values that a scan draws."""
    recording, model = record(build), build()
    with Workers(1) as workers:
        materializer = Materializer(recording, workers)
        values = {name: materializer.materialize(entry, 0) for entry in recording.entries for name in entry.names}
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(values[name])
    return model


def by_hand(model, scale=1.0, dtype=None):
    """Give stream, update and their gradients at each addition of a ``Model``."""
    seen = []
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        x = model.tokens(IDS)
        for block in model.blocks:
            update = block.update(x)
            for tensor in (x, update):
                tensor.retain_grad()
            seen.append((x, update))
            x = x + update
        value = loss(model.head(x), IDS)
    (value * scale).backward()
    return [[one.detach().double() for one in (x, u, x.grad / scale, u.grad / scale)] for x, u in seen]


def apart(narrow, wide):
    return [[((a - b).norm() / b.norm()).item() for a, b in zip(*pair, strict=True)] for pair in zip(narrow, wide, strict=True)]


def numbers(one):
    return [[site.stream, site.update, site.grad_stream, site.grad_update] for site in one.shadow]


CASES = {
    "bf16": (torch.bfloat16, {}, {}),
    "fp16": (torch.float16, {"loss_scale": 1024.0}, {"scale": 1024.0}),
    "mixed": (torch.float32, {"autocast": torch.bfloat16}, {"dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_differences_are_those_of_two_passes_in_plain_torch(case):
    dtype, task, ways = CASES[case]
    model = drawn(of(dtype))
    expected = apart(by_hand(copy.deepcopy(model), **ways), by_hand(copy.deepcopy(model).float()))
    one = shadowed(of(dtype), **task)
    for found, known in zip(numbers(one), expected, strict=True):
        assert found == pytest.approx(known, rel=1e-9)
    assert one.loss == pytest.approx(loss(drawn(of(dtype))(IDS), IDS).item(), rel=1e-2)  # its own, and not the shadow's
    assert not one.notes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_streamed_pass_and_its_shadow_give_the_bits_of_resident_ones(dtype):
    resident, streamed = (shadowed(of(dtype), memory) for memory in (RESIDENT, STREAMED))
    assert (resident.mode, streamed.mode) == ("resident", "streamed")
    assert numbers(resident) == numbers(streamed)


def test_dropout_leaves_out_the_same_elements_in_both():
    class Dropped(Block):
        def update(self, x):
            return F.dropout(super().update(x), 0.5)

    one = shadowed(of(torch.bfloat16, Dropped))
    # Where masks differed an update would differ by about its own size.
    assert all(site.update < 0.02 for site in one.shadow)
    assert not one.notes


def test_numbers_drawn_in_half_precision_are_said_to_differ():
    class Noisy(Block):
        def update(self, x):
            return super().update(x) * (1 + torch.rand_like(x))

    (note,) = shadowed(of(torch.bfloat16, Noisy)).notes
    assert "random numbers in half precision (rand_like)" in note


class Parallel(Block):
    """x + a + m, in which both branches read x."""

    def __init__(self):
        super().__init__()
        self.query, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        a = F.scaled_dot_product_attention(self.query(x), x, x)
        return x + self.update(x) + self.second(a)


def test_updates_of_a_parallel_block_share_the_differences_of_the_stream():
    one = shadowed(of(torch.bfloat16, Parallel), STREAMED)
    assert len(one.shadow) == 6
    for first, second in zip(one.shadow[::2], one.shadow[1::2], strict=True):
        assert (first.stream, first.grad_stream) == (second.stream, second.grad_stream)
        assert first.update != second.update
        assert 1e-4 < second.update < 0.05


class Counted(Block):
    """Its second additions happen in bf16 only."""

    def forward(self, x):
        x = super().forward(x)
        return super().forward(x) if x.dtype == torch.bfloat16 else x


def test_a_model_that_adds_otherwise_in_fp32_is_refused():
    with pytest.raises(PropcheckError, match="has 6 residual additions, the fp32 pass has 3"):
        shadowed(of(torch.bfloat16, Counted))


class Fixed(Block):
    """It asks for bf16 by name."""

    def update(self, x):
        return super().update(x.to(torch.bfloat16))


def test_a_model_that_does_not_run_in_fp32_is_refused_with_its_own_error():
    with pytest.raises(PropcheckError, match=r"scan\.shadow: the model does not run in fp32 \(RuntimeError: .*dtype"):
        shadowed(of(torch.bfloat16, Fixed))


class Recast(Block):
    """Its sums are in bf16 whatever the weights have."""

    def forward(self, x):
        return (x.bfloat16() + self.update(x).bfloat16()).to(x.dtype)


def test_additions_that_the_code_itself_makes_in_half_precision_are_said():
    notes = shadowed(of(torch.bfloat16, Recast)).notes
    assert any("At 3 of 3 sites the fp32 pass also adds in half precision" in note for note in notes)


class HalfUpdate(Block):
    """Its updates are rounded to fp16, and added in the dtype of the stream."""

    def update(self, x):
        return super().update(x).half().to(x.dtype)


@pytest.mark.parametrize("memory", [RESIDENT, STREAMED])
def test_casts_of_the_code_between_additions_are_said_too(memory):
    (note,) = shadowed(of(torch.bfloat16, HalfUpdate), memory).notes
    assert "the model's code casts to it (half). The comparison does not show that rounding." in note
    assert not shadowed(of(torch.bfloat16), memory).notes


def test_a_model_in_fp32_has_no_shadow():
    one = shadowed(of(torch.float32))
    assert one.shadow == ()
    assert "No fp32 pass was run" in one.notes[-1]


class Cast(Block):
    """The stream is read as it is, and added to in fp32: the cast is none in a model that is fp32."""

    def forward(self, x):
        return (x.float() + self.update(x)).to(x.dtype)


def test_the_gradient_of_a_stream_that_is_cast_before_the_sum_is_that_of_the_stream():
    model = drawn(of(torch.bfloat16, Cast))
    x = model.tokens(IDS)
    x.retain_grad()
    loss(model.head(model.run(x)), IDS).backward()
    one = shadowed(of(torch.bfloat16, Cast), STREAMED)
    assert float(one.sites[0].gradients["stream"]) == pytest.approx(x.grad.double().norm().item(), rel=1e-6)
    assert all(site.grad_stream < 0.05 for site in one.shadow)  # a part of it against the whole would differ far more


def test_a_model_that_is_built_already_is_compared_and_left_as_it_is():
    from propcheck import scan

    model = of(torch.bfloat16)()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    run = scan(model, tokens=6, batch=2, set={"scan.shadow": "fp32"}, threads=1)
    assert all(1e-5 < record.shadow_update_error < 0.05 for record in run.record.sites)
    assert all(
        torch.equal(tensor, before[name]) and tensor.dtype == torch.bfloat16 for name, tensor in model.named_parameters()
    )


def test_what_is_kept_has_no_name_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    with Spool() as spool:
        spool.restart()
        assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_is_one_line(monkeypatch):
    class Full:
        def seek(self, *_):
            return 0

        def write(self, _):
            raise OSError(28, "No space left on device")

    with Spool() as spool:
        monkeypatch.setattr(spool, "_file", Full())
        with pytest.raises(PropcheckError, match=r"cannot write .*: No space left on device; set TMPDIR"):
            spool.keep(object(), "stream", 0, torch.ones(2, 3))
        monkeypatch.undo()
