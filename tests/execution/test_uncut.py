"""A model that cannot be cut into units runs whole, with the gradients of plain autograd, or is refused; it says why."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from plain import RESIDENT, STREAMED, WIDTH, Block, Model, by_autograd, scan
from recomputed import Recomputed
from torch import Tensor
from uncuttable import SharedDict

from propcheck.errors import PropcheckError
from propcheck.execution import single_pass


@pytest.fixture(autouse=True)
def _budget_is_the_models_alone(monkeypatch):
    monkeypatch.setattr(single_pass, "resident_bytes", lambda: 0)


class KeptFromTheFirstRun(SharedDict):
    """What the first attempt left in the dict would be used by the second."""

    def run(self, x):
        return Model.run(self, x)


class LossBesideTheOutput(Model):
    class Block(Block):
        def forward(self, x):
            self.extra = self.update(x).square().mean()
            return x + self.update(x)

    def __init__(self):
        super().__init__(self.Block)

    def forward(self, ids):
        logits = super().forward(ids)
        return logits + sum(block.extra for block in self.blocks)


class LossOfAWeight(LossBesideTheOutput):
    class Block(Block):
        def forward(self, x):
            self.extra = self.inner.weight.square().mean()
            return x + self.update(x)

    def __init__(self):
        Model.__init__(self, self.Block)


@dataclass
class State:
    hidden: Tensor


class Objects(Model):
    class Block(Block):
        def forward(self, state):
            return State(super().forward(state.hidden))

    def __init__(self):
        super().__init__(self.Block)

    def run(self, x):
        return super().run(State(x)).hidden


class ObjectsOut(Objects):
    class Block(Block):
        def forward(self, x):
            return State(super().forward(x))

    def run(self, x):
        for block in self.blocks:
            x = block(x).hidden
        return x


class ListGiven(Model):
    class Block(Block):
        def forward(self, x, collected):
            collected.append(self.update(x))
            return x + collected[-1]

    def __init__(self):
        super().__init__(self.Block)

    def run(self, x):
        collected = []
        for block in self.blocks:
            x = block(x, collected)
        return x + sum(collected)


class Reversible(Model):
    """Blocks within a function that computes them again."""

    def run(self, x):
        for block in self.blocks:
            x = Recomputed.apply(block, x)
        return x


class InputUsedAgain(Model):
    class Block(Block):
        def forward(self, x):
            x += self.update(x * 1.0)
            return x

    def __init__(self):
        super().__init__(self.Block)

    def run(self, x):
        for block in self.blocks:
            block(x)
        return x


class ViewChanged(Model):
    class Block(Block):
        def forward(self, x):
            return super().forward(x * 1.0), x[:, 1:]

    def __init__(self):
        super().__init__(self.Block)

    def run(self, x):
        for block in self.blocks:
            x = x * 1.0
            y, part = block(x)
            part.mul_(0.5)
            x = y + x
        return x


class ChangedThroughAnotherInput(Model):
    class Block(Block):
        def forward(self, x, part):
            part = part.mul_(0.5)
            return self.update(x * 1.0) + part.mean()

    def __init__(self):
        super().__init__(self.Block)

    def run(self, x):
        for block in self.blocks:
            x = x * 1.0
            x = block(x, x[:, 1:])
        return x


class GradientInTheForward(Model):
    def run(self, x):
        x = super().run(x)
        (slope,) = torch.autograd.grad(x.square().sum(), x, retain_graph=True)
        first = self.tokens(torch.zeros(1, dtype=torch.long))
        (again,) = torch.autograd.grad(super().run(first).sum(), first)
        return x + slope.detach() + again


class StateBetweenCalls(Model):
    class Block(Block):
        def forward(self, x):
            y = super().forward(x)
            if hasattr(self, "state"):
                y = y + self.state
            self.state = y
            return y

    def __init__(self):
        super().__init__(self.Block)

    def run(self, x):
        return super().run(super().run(x))


class Mapped(Model):
    def run(self, x):
        return torch.vmap(super().run)(x)


class CallsAnother(Model):
    class Block(Block):
        before = ()

        def forward(self, x):
            return super().forward(x) + sum(one(x) for one in self.before)

    def __init__(self):
        super().__init__(self.Block)
        self.blocks[2].before = (self.blocks[0],)


class CatchesAll(SharedDict):
    def run(self, x):
        self.blocks[0].shared.clear()
        for block in self.blocks:
            try:
                x = block(x)
            except Exception:  # noqa: BLE001
                x = x * 1.0
        return x


class GivesMaskAGradient(Model):
    class Block(Block):
        def forward(self, x, mask):
            mask += self.inner.bias
            return super().forward(x)

    def __init__(self):
        super().__init__(self.Block)

    def run(self, x):
        mask = torch.ones(WIDTH)
        for block in self.blocks:
            x = block(x, mask)
        return x * mask


MODELS = {
    SharedDict: r"blocks\.1: it uses a tensor that has a gradient and is neither",
    LossBesideTheOutput: r"blocks\.\d: it computes a tensor that reaches the loss by another way",
    LossOfAWeight: r"blocks\.\d: it computes a tensor that reaches the loss by another way",
    Objects: r"blocks\.\d: it computes a tensor that reaches the loss by another way",
    ObjectsOut: r"blocks\.\d: it computes a tensor that reaches the loss by another way",
    ListGiven: r"blocks\.0: it changes a list or dict that it is given",
    Reversible: r"blocks\.2: it is called in the backward pass",
    InputUsedAgain: r"blocks\.0: it changes one of its inputs in place, and that is used again",
    ViewChanged: r"blocks\.0: it returns a view of an input, and one of the two is changed",
    ChangedThroughAnotherInput: r"blocks\.0: it changes one of its inputs in place, and another input shares",
    GradientInTheForward: r"blocks\.2: it is differentiated by the model itself",
    StateBetweenCalls: r"blocks\.0: it uses a tensor that has a gradient",
    Mapped: r"blocks\.0: it is called within a transform of torch\.func",
    CallsAnother: r"blocks\.2: it uses a tensor that has a gradient",
    CatchesAll: r"blocks\.1: it uses a tensor that has a gradient",
    GivesMaskAGradient: r"blocks\.0: it gives an input a gradient",
}


@pytest.mark.parametrize(("build", "reason"), MODELS.items(), ids=[build.__name__ for build in MODELS])
def test_whole_it_has_the_gradients_of_plain_autograd_and_says_why(build, reason):
    whole = scan(build, RESIDENT)
    loss, gradients = by_autograd(build)
    assert whole.loss == pytest.approx(loss, rel=1e-6)
    assert whole.gradients == pytest.approx(gradients, rel=5e-6)
    assert whole.mode == "resident"
    assert whole.blocks == 3
    (note,) = whole.notes
    assert re.match(reason, note)
    assert note.endswith("; so the whole model was run at once, in memory.")


@pytest.mark.parametrize(("build", "reason"), MODELS.items(), ids=[build.__name__ for build in MODELS])
def test_where_it_does_not_fit_it_is_refused_in_one_line(build, reason):
    with pytest.raises(PropcheckError, match=rf"^{reason}") as caught:
        scan(build, STREAMED)
    assert "\n" not in str(caught.value)
    assert "raise --memory" in str(caught.value)


def test_nothing_of_the_first_attempt_is_left():
    whole = scan(KeptFromTheFirstRun, RESIDENT)
    loss, gradients = by_autograd(KeptFromTheFirstRun)
    assert whole.notes
    assert whole.loss == pytest.approx(loss, rel=1e-6)
    assert whole.gradients == pytest.approx(gradients, rel=5e-6)


def test_sites_of_an_uncut_model_have_their_block():
    whole = scan(SharedDict, RESIDENT)
    assert [site.block for site in whole.sites] == [0, 1, 2]
    assert all({"stream", "update", "sum"} <= site.gradients.keys() for site in whole.sites)
    assert whole.used == {entry.name for entry in whole.entries}


def test_what_changed_before_it_is_computed_again_is_refused_and_right_where_it_need_not_be():
    class Detached(SharedDict):
        class Block(Block):
            shared = None

            def forward(self, x):
                y = self.update(x) * self.shared.get("previous", torch.ones(())).sigmoid()
                self.shared["previous"] = y.detach()
                return x + y

    whole = scan(Detached, RESIDENT)
    assert whole.notes == ()
    assert whole.gradients == pytest.approx(by_autograd(Detached)[1], rel=5e-6)
    with pytest.raises(PropcheckError, match=r"blocks\.\d: it computed again for the backward pass gives another output"):
        scan(Detached, STREAMED)


def test_an_input_that_is_changed_after_the_call_is_refused_where_it_is_needed_again():
    class ChangedAfter(Model):
        class Block(Block):
            def forward(self, x):
                return self.update(x * 1.0)

        def __init__(self):
            super().__init__(self.Block)

        def run(self, x):
            for block in self.blocks:
                x += block(x)
            return x

    assert scan(ChangedAfter, RESIDENT).gradients == pytest.approx(by_autograd(ChangedAfter)[1], rel=5e-6)
    with pytest.raises(PropcheckError, match=r"blocks\.\d: it gets an input that is changed in place after the call"):
        scan(ChangedAfter, STREAMED)


def test_weights_gradients_and_activations_must_fit():
    weights = sum(parameter.numel() * 4 for parameter in SharedDict().parameters())
    with pytest.raises(PropcheckError, match="the whole of it needs about"):
        scan(SharedDict, 2 * weights)
    assert scan(SharedDict, 20 * weights).notes


def test_an_error_of_the_model_is_its_own():
    class Broken(Model):
        def run(self, x):
            raise KeyError("theirs")

    with pytest.raises(KeyError, match="theirs"):
        scan(Broken, RESIDENT)


def test_a_cache_of_the_first_call_is_no_part_of_the_second():
    """The same output comes of it, and a gradient that goes nowhere."""

    class Caches(Model):
        class Block(Block):
            def forward(self, x):
                if not hasattr(self, "cache"):
                    self.cache = self.update(x)
                return x + self.cache

        def __init__(self):
            super().__init__(self.Block)

    resident = scan(Caches, RESIDENT)
    assert resident.notes == ()
    assert resident.gradients == pytest.approx(by_autograd(Caches)[1], rel=5e-6)
    with pytest.raises(PropcheckError, match=r"blocks\.\d: it computed again .*another output|blocks\.\d: it uses a tensor"):
        scan(Caches, STREAMED)


def test_what_fails_when_it_is_computed_again_is_refused():
    class Grows(Model):
        class Block(Block):
            def forward(self, x):
                self.past = [*getattr(self, "past", []), x.detach()]
                return super().forward(x) + torch.cat(self.past)[: len(x)] * len(self.past) * torch.ones(
                    2 // len(self.past), 1, 1
                )

        def __init__(self):
            super().__init__(self.Block)

    assert scan(Grows, RESIDENT).gradients == pytest.approx(by_autograd(Grows)[1], rel=5e-6)
    with pytest.raises(PropcheckError, match=r"blocks\.2: it (fails when|computed again)"):
        scan(Grows, STREAMED)


def test_parts_that_a_function_computes_again_beside_the_call_are_not_lost():
    class PartsAgain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, block, x):
            ctx.block = block
            ctx.save_for_backward(x)
            return block(x)

        @staticmethod
        def backward(ctx, grad):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = x + ctx.block.update(x)
            torch.autograd.backward(y, grad)
            return None, x.grad

    class Reformer(Model):
        def run(self, x):
            for block in self.blocks:
                x = PartsAgain.apply(block, x)
            return x

    whole = scan(Reformer, RESIDENT)
    assert re.match(r"blocks\.0: it is differentiated beside its calls", whole.notes[0])
    assert whole.gradients == pytest.approx(by_autograd(Reformer)[1], rel=5e-6)
    with pytest.raises(PropcheckError, match=r"blocks\.0: it is differentiated beside its calls"):
        scan(Reformer, STREAMED)
