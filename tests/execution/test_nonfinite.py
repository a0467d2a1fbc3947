"""The operation that first makes a NaN or an infinity out of finite numbers is named, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from plain import RESIDENT, STREAMED, WIDTH, Block, Model, scan
from torch import nn

from propcheck.deferred_init.keyed_rng import Workers
from propcheck.execution.passes import execute
from propcheck.targets.target import Target, Task

BOTH = pytest.mark.parametrize("memory", [RESIDENT, STREAMED], ids=["resident", "streamed"])
CPU = torch.device("cpu")
TOKENS = 6  # of 2 sequences


def with_middle(kind):
    """Give what builds a model whose middle block is of a kind of its own."""

    def build():
        blocks = iter([Block, kind, Block])
        return Model(block=lambda: next(blocks)())  # noqa: PLW0108 - each call is another block

    return build


def origins(update, memory=RESIDENT, **options):
    """Scan a model whose middle block adds ``update(its module, what its linear layer gives)``."""

    class Odd(Block):
        def update(self, x):
            return update(self, super().update(x))

    return scan(with_middle(Odd), memory, **options).origins


def only(found):
    (one,) = found
    return one


class Attention(nn.Module):
    """Attention by hand, with a mask of its own."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(WIDTH, WIDTH)

    def mask(self):
        """Leave nothing to tokens 0 and 1: the first two of a sequence padded on the left."""
        return torch.full((TOKENS, TOKENS), -torch.inf).triu(1).masked_fill(torch.arange(TOKENS) < 2, -torch.inf)

    def probabilities(self, scores):
        return torch.softmax(scores, -1)

    def forward(self, x):
        return self.probabilities(x @ x.transpose(-1, -2) + self.mask()) @ self.value(x)


def attending(kind):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = kind()

        def forward(self, x):
            return x + self.attention(F.rms_norm(x, (WIDTH,)))

    return with_middle(Attending)


class ByLogarithm(Attention):
    def mask(self):
        seen = torch.ones(TOKENS, TOKENS).tril()
        seen[:, :2] = 0
        return seen.log()


class Extended(Attention):
    """Each row has an element of its own to attend to, so -inf everywhere else is no fault."""

    def probabilities(self, scores):
        return torch.cat([scores, torch.zeros(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


class Healthy(Attention):
    def mask(self):
        return torch.full((TOKENS, TOKENS), -torch.inf).triu(1)


@BOTH
@pytest.mark.parametrize("kind", [Attention, ByLogarithm])
def test_a_row_that_is_masked_as_a_whole_is_named_with_its_tokens(kind, memory):
    one = only(scan(attending(kind), memory).origins)
    assert (one.direction, one.value, one.function, one.module, one.block) == (
        "forward",
        "NaN",
        "softmax",
        "blocks.1.attention",
        1,
    )
    assert one.inputs == "scores with entire rows of -infinity"
    assert (one.tokens, one.affected, one.positions) == ((0, 1), 2, TOKENS)


def test_a_row_that_torch_s_own_layer_masks_as_a_whole_is_named():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, x):
            hidden = torch.tensor([[False] * TOKENS, [True] * TOKENS])
            return self.layer(x, x, x, key_padding_mask=hidden, need_weights=True)[0]

    one = only(scan(attending(Layer), RESIDENT).origins)
    assert (one.value, one.function, one.module) == ("NaN", "multi_head_attention_forward", "blocks.1.attention.layer")
    assert one.inputs == "a mask that hides every key from some queries"


@pytest.mark.parametrize("kind", [Extended, Healthy])
def test_a_mask_of_infinities_that_harms_nothing_has_no_origin(kind):
    one = scan(attending(kind), RESIDENT)
    assert one.loss < 10
    assert one.origins == ()


def test_an_infinity_written_into_a_mask_is_not_taken_for_the_one_that_harms():
    def update(_module, y):
        y = y.masked_fill(torch.arange(WIDTH) < 3, -torch.inf).relu()  # harmless
        return (y + 100).exp()  # exp(88.8) is the last that float32 holds

    one = only(origins(update))
    assert (one.value, one.function) == ("infinity", "exp")
    assert "float32 numbers from 100 to 10" in one.inputs


@BOTH
def test_an_exponential_that_overflows_before_it_is_multiplied_by_zero_is_named_with_the_product(memory):
    one = only(origins(lambda _module, y: (y - y + 100).exp() * torch.zeros(WIDTH), memory))
    assert (one.value, one.function, one.module, one.block) == ("infinity", "exp", "blocks.1", 1)
    assert one.inputs == "float32 numbers all equal to 100; mul in blocks.1 turns the infinity into NaN"
    assert one.affected == one.positions == TOKENS


def test_a_cast_to_a_dtype_with_a_smaller_range_is_named():
    # 65504 is the largest number of float16.
    one = only(origins(lambda _module, y: (y.clamp(-1, 1) * 0 + 7e4).half().float()))
    assert (one.value, one.function, one.inputs) == ("infinity", "half", "float32 numbers all equal to 70000")


def test_what_is_written_in_place_through_a_view_is_followed():
    def update(_module, y):
        whole = torch.zeros_like(y)
        part = whole[:, 4:]
        part.copy_(y[:, 4:])
        part.div_(part * 0)
        return whole

    one = only(origins(update))
    assert (one.value, one.function) == ("infinity", "div")
    assert one.inputs.startswith("float32 numbers from -")


def test_a_parameter_that_is_not_a_number_is_no_operation():
    def build():
        model = Model()
        nn.init.constant_(model.blocks[1].inner.weight, float("nan"))
        return model

    one = scan(build, RESIDENT)
    assert one.loss != one.loss
    assert one.origins == ()


def test_the_stream_s_own_overflow_is_that_of_the_addition():
    def build():
        model = Model().half()
        nn.init.constant_(model.tokens.weight, 6e4)
        nn.init.zeros_(model.blocks[1].inner.weight)
        nn.init.constant_(model.blocks[1].inner.bias, 6e4)
        return model

    one = only(scan(build, RESIDENT, loss=lambda logits, _batch: logits.float().mean()).origins)
    assert (one.value, one.function, one.block) == ("infinity", "add", 1)


def test_a_loss_that_is_not_finite_has_an_origin_of_its_own():
    one = only(scan(Model, RESIDENT, loss=lambda logits, _batch: (logits.mean() * 0).log()).origins)
    assert (one.direction, one.value, one.function, one.module) == ("forward", "infinity", "log", None)


# ---------------------------------------------------------------------- backward


@BOTH
def test_a_root_of_zero_is_named_in_the_backward_pass(memory):
    one = only(origins(lambda _module, y: (y * 0).square().sum(-1, keepdim=True).sqrt() * y, memory))
    assert (one.direction, one.value, one.function) == ("backward", "infinity", "the backward of sqrt")
    assert (one.module, one.block) == ("blocks.1", 1)
    assert one.inputs.endswith("(float32); its forward output has zeros")
    assert (one.affected, one.positions) == (TOKENS, TOKENS)


class Division(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient / 0


@BOTH
def test_a_custom_function_is_named_by_its_class(memory):
    one = only(origins(lambda _module, y: Division.apply(y), memory))
    assert (one.direction, one.function, one.block) == ("backward", "the backward of Division", 1)


def test_gradients_that_overflow_only_when_they_are_summed_are_said_to():
    def loss(logits, _batch):
        small = logits * 1e-20
        return (small * 3e38 + small * 3e38).sum()  # 6e38 is more than float32 holds

    one = only(scan(Model, RESIDENT, loss=loss).origins)
    assert (one.direction, one.value, one.function) == ("backward", "infinity", "the sum of gradients")
    assert one.inputs == "the finite gradients from all readers of the output of mul"


def test_a_number_that_only_the_backward_pass_meets_is_traced_to_the_forward_pass():
    def loss(logits, _batch):
        spoilt = logits / torch.zeros(TOKENS, 1).masked_fill(torch.arange(TOKENS)[:, None] > 0, 1.0)
        return (spoilt * spoilt.detach().isfinite()).nan_to_num().square().mean() + spoilt[:, 1:].square().mean()

    found = scan(Model, RESIDENT, loss=loss).origins
    one = only(found)
    assert one.direction == "backward"
    assert "the forward pass already has infinity there, first made by div" in one.inputs


def test_a_pass_that_is_finite_is_not_looked_at_again():
    phases = []
    task = Task(lambda: Target(Model()), lambda _model, _seed: torch.arange(12).view(2, 6))
    with Workers(1) as workers:
        execute(task, 0, memory=RESIDENT, device=CPU, workers=workers, progress=lambda phase, *_: phases.append(phase))
    assert set(phases) == {"forward", "backward"}


def test_a_target_that_can_be_built_only_once_keeps_what_its_one_pass_showed():
    class Odd(Block):
        def update(self, x):
            return super().update(x) / 0

    models = iter([Model(block=Odd)])
    one = scan(lambda: next(models), RESIDENT)
    assert len(one.sites) == 3
    assert one.origins == ()
    assert "Could not locate the source of the NaN or infinity" in one.notes[-1]
