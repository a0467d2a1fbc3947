"""Whatever way a block takes and returns tensors, streamed equals resident, and both have the gradients of plain autograd."""

from __future__ import annotations

import plain
import pytest
import torch
import torch.nn.functional as F
from plain import IDS, RESIDENT, STREAMED, WIDTH, Block, Model, by_autograd, scan
from recomputed import Recomputed
from torch import nn

from propcheck.errors import PropcheckError
from propcheck.execution import single_pass


@pytest.fixture(autouse=True)
def _budget_is_the_models_alone(monkeypatch):
    monkeypatch.setattr(single_pass, "resident_bytes", lambda: 0)


class ChangesItsInput(Block):
    def forward(self, x):
        x += self.update(x * 1.0)
        return x


class OutputChangedOutside(Model):
    def run(self, x):
        for block in self.blocks:
            x = block(x)
            x += 1.0
            x.mul_(0.5)
        return x


class SeveralOutputs(Model):
    """A tuple: a new tensor, it again, an input as it came, integers, None and a number; the second is changed outside."""

    class Block(Block):
        def forward(self, x, mask):
            y = super().forward(x)
            return y, y, x, mask, y.argmax(-1), None, 3

    def __init__(self):
        super().__init__(self.Block)

    def run(self, x):
        mask = torch.ones(6, 1)
        for block in self.blocks:
            y, again, before, mask, chosen, none, three = block(x, mask)
            assert again is y
            assert before is x
            assert none is None
            assert three == 3
            assert not chosen.requires_grad
            again += mask
            x = y + 0.1 * before + 0.01 * chosen[..., None]
        return x


class ReturnsItsInput(Model):
    class Block(Block):
        def forward(self, x, *, through):
            return x if through else super().forward(x)

    def __init__(self):
        super().__init__(self.Block)

    def run(self, x):
        for index, block in enumerate(self.blocks):
            y = block(x, through=index == 1)
            assert (y is x) == (index == 1)
            x = y
        return x


class KeywordsAndDicts(Model):
    class Block(Block):
        def forward(self, *, state, scale):
            return {"x": super().forward(state["x"]) * scale, "steps": state["steps"] + 1, "extra": [state["x"], None]}

    def __init__(self):
        super().__init__(self.Block)

    def run(self, x):
        state = {"x": x, "steps": 0}
        for block in self.blocks:
            state = block(state=state, scale=0.5)
        assert state["steps"] == 3
        return state["x"] + state["extra"][0]


class OneTensorTwice(Model):
    class Block(Block):
        def forward(self, x, y):
            assert x is y
            return super().forward(x) * y.sigmoid()

    def __init__(self):
        super().__init__(self.Block)

    def run(self, x):
        for block in self.blocks:
            x = block(x, x)
        return x


class LoopPartlyWithoutGradient(Model):
    def run(self, x):
        with torch.no_grad():
            for _ in range(2):
                x = super().run(x)
        return super().run(x)


class InferenceModeFirst(Model):
    def run(self, x):
        with torch.inference_mode():
            offset = super().run(x).mean()
        return super().run(x) + offset.item()


class FrozenBefore(Model):
    """The first units need no gradient, and what they return has none."""

    def __init__(self):
        super().__init__()
        self.tokens.requires_grad_(False)
        self.blocks[0].requires_grad_(False)

    def run(self, x):
        assert not x.requires_grad
        y = self.blocks[0](x)
        assert not y.requires_grad
        return self.blocks[2](self.blocks[1](y))


class UnusedOutput(Model):
    """The last block is called twice; nothing comes of one of the calls, and nothing of the second block's."""

    def run(self, x):
        x = self.blocks[0](x)
        self.blocks[1](x)
        self.blocks[2](x)
        return self.blocks[2](x)


class FunctionOfItsOwn(Block):
    def update(self, x):
        return Recomputed.apply(self.inner, F.rms_norm(x, (WIDTH,)))


class TransposedElsewhere(Model):
    """The head is the embedding's weight, read as an attribute of it."""

    def forward(self, ids):
        return self.run(self.tokens(ids)) @ self.tokens.weight.T + self.head.bias


class PartsUsedDirectly(Model):
    def run(self, x):
        for block in self.blocks:
            x = x + block.inner(F.rms_norm(x, (WIDTH,)))
        return x


class GivesItsWeight(Model):
    class Block(Block):
        def forward(self, x):
            return super().forward(x), self.inner.bias, self.inner.weight[0]

    def __init__(self):
        super().__init__(self.Block)

    def run(self, x):
        total = 0
        for block in self.blocks:
            x, bias, row = block(x)
            total = total + bias * row
        return x + total


class Lists(Model):
    """Blocks that are lists of parts, and cannot be called."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]) for _ in range(3))

    def run(self, x):
        for norm, inner in self.blocks:
            x = x + inner(norm(x))
        return x


class ComplexBetween(Model):
    class Block(Block):
        def forward(self, x):
            return torch.view_as_complex(super().forward(torch.view_as_real(x).flatten(-2)).unflatten(-1, (-1, 2)))

    def __init__(self):
        super().__init__(self.Block)

    def run(self, x):
        x = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(super().run(x)).flatten(-2)


MODELS = {
    "an input changed in place": lambda: Model(ChangesItsInput),
    "an output changed in place": OutputChangedOutside,
    "several outputs": SeveralOutputs,
    "an input returned as it came": ReturnsItsInput,
    "keywords and dicts": KeywordsAndDicts,
    "one tensor given twice": OneTensorTwice,
    "a loop partly without gradient": LoopPartlyWithoutGradient,
    "inference mode first": InferenceModeFirst,
    "frozen before": FrozenBefore,
    "an output not used": UnusedOutput,
    "a function of its own": lambda: Model(FunctionOfItsOwn),
    "a weight transposed elsewhere": TransposedElsewhere,
    "a weight returned": GivesItsWeight,
    "lists of parts": Lists,
    "complex between": ComplexBetween,
}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_streamed_resident_and_plain_autograd_agree(build):
    streamed, resident = scan(build, STREAMED), scan(build, RESIDENT)
    assert (streamed.mode, resident.mode) == ("streamed", "resident")
    assert streamed.notes == resident.notes == ()
    assert streamed.loss == resident.loss
    assert streamed.gradients == resident.gradients
    assert [site.gradients for site in streamed.sites] == [site.gradients for site in resident.sites]
    loss, gradients = by_autograd(build)
    assert resident.loss == pytest.approx(loss, rel=1e-6)
    assert resident.gradients == pytest.approx(gradients, rel=5e-6)


def test_loops_have_a_site_a_call():
    assert len(scan(LoopPartlyWithoutGradient, STREAMED).sites) == 9


def test_parts_used_beside_their_block_are_right_and_refused_where_they_do_not_fit(monkeypatch):
    one = scan(PartsUsedDirectly, RESIDENT)
    loss, gradients = by_autograd(PartsUsedDirectly)
    assert one.loss == pytest.approx(loss, rel=1e-6)
    assert one.gradients == pytest.approx(gradients, rel=5e-6)
    with pytest.raises(PropcheckError, match=r"blocks\.\d\.inner\.\w+: it is used while its module is not called"):
        scan(lambda: PartsUsedDirectly(depth=8), STREAMED)


def test_used_names_every_parameter_that_the_forward_pass_used():
    class Partly(TransposedElsewhere):
        def run(self, x):
            return self.blocks[0](x)

    one = scan(Partly, STREAMED)
    assert one.used == {"tokens.weight", "blocks.0.inner.weight", "blocks.0.inner.bias", "head.bias"}


def test_a_loss_without_any_gradient_has_none():
    class Detached(Model):
        def forward(self, ids):
            return super().forward(ids).detach()

    one = scan(Detached, STREAMED)
    assert one.gradients == {}
    assert one.loss > 0


@pytest.mark.parametrize(
    ("loss", "message"),
    [(lambda y, _: y, r"must be a scalar, it has the shape \[2, 6, 31\]"), (lambda *_: 1.0, "it returned a float")],
)
def test_what_is_no_loss_is_refused(loss, message):
    with pytest.raises(PropcheckError, match=message):
        scan(Model, RESIDENT, loss=loss)


def test_the_ids_are_left_as_they_were():
    before = IDS.clone()
    scan(Model, STREAMED)
    assert torch.equal(IDS, before)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(6, WIDTH))

    def forward(self):
        return self.table


def test_a_unit_without_arguments_is_a_unit_like_others():
    class WithPositions(Model):
        def __init__(self):
            super().__init__()
            self.positions = Positions()

        def run(self, x):
            return super().run(x + self.positions())

    assert scan(WithPositions, STREAMED).gradients == pytest.approx(by_autograd(WithPositions)[1], rel=5e-6)


class HeldInAList(Model):
    """Parameters that code holds beside their modules: a tied head that is not registered, a penalty in the loss."""

    def __init__(self):
        super().__init__()
        self.tied = [self.tokens.weight]
        self.values = [self.blocks[1].inner.weight.detach()]

    def forward(self, ids):
        x = self.run(self.tokens(ids))
        return x @ self.tied[0].T + x @ self.values[0] @ self.tied[0].mT + self.head(x)


def test_parameters_that_are_held_in_a_list_or_a_closure_are_the_models_own():
    held = []

    def build():
        model = HeldInAList()
        held[:] = [model.head.bias, model.blocks[0].inner.weight]
        return model

    def loss(logits, batch):
        return plain.cross_entropy(logits, batch) + held[0].square().sum() + held[1].square().sum()

    streamed, resident = scan(build, STREAMED, loss=loss), scan(build, RESIDENT, loss=loss)
    assert streamed.gradients == resident.gradients
    value, gradients = by_autograd(build, loss=loss)
    assert resident.loss == pytest.approx(value, rel=1e-6)
    assert resident.gradients == pytest.approx(gradients, rel=5e-6)


def test_a_view_of_a_weight_that_a_block_keeps_has_its_values():
    class Keeps(Block):
        kept = None

        def update(self, x):
            if self.kept is None:
                self.kept = self.inner.weight.t()
            return F.rms_norm(x, (WIDTH,)) @ self.kept + self.inner.bias

    def build():
        return Model(Keeps, depth=5)

    streamed, resident = scan(build, STREAMED), scan(build, RESIDENT)
    assert streamed.mode == "streamed"
    assert streamed.gradients == resident.gradients
    assert resident.gradients == pytest.approx(by_autograd(build)[1], rel=5e-6)


def test_sizes_stay_sizes():
    class Sized(Model):
        class Block(Block):
            def forward(self, x, size):
                assert isinstance(size, torch.Size)
                return super().forward(x) * size.numel()

        def __init__(self):
            super().__init__(self.Block)

        def run(self, x):
            for block in self.blocks:
                x = block(x, x.shape)
            return x

    one = scan(Sized, STREAMED)
    assert one.mode == "streamed"
    assert one.gradients == pytest.approx(by_autograd(Sized)[1], rel=5e-6)


def test_an_input_that_a_unit_makes_differentiable_itself_is_no_other_units():
    class Requires(Model):
        class Block(Block):
            def forward(self, x):
                if not x.requires_grad:
                    x = x.clone()
                    x.requires_grad = True
                return super().forward(x)

        def __init__(self):
            super().__init__(self.Block)
            self.tokens.requires_grad_(False)

    one = scan(Requires, STREAMED)
    assert one.mode == "streamed"
    assert one.gradients == pytest.approx(by_autograd(Requires)[1], rel=5e-6)


def test_a_seed_that_the_model_takes_itself_is_the_scans():
    class Seeds(Model):
        class Block(Block):
            def forward(self, x):
                seed = torch.seed()
                first = torch.rand(())
                torch.manual_seed(seed)
                assert torch.rand(()) == first
                return super().forward(x) * first

        def __init__(self):
            super().__init__(self.Block)

    one, again, other = scan(Seeds, STREAMED), scan(Seeds, RESIDENT), scan(Seeds, RESIDENT, seed=1)
    assert one.loss == again.loss
    assert one.gradients == again.gradients
    assert one.loss != other.loss
    assert torch.seed() != torch.seed()
