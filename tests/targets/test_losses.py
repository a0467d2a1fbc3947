"""The loss where a target brings none: the model's own, the next-token loss, or a random direction."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from propcheck.errors import PropcheckError
from propcheck.targets.losses import default_loss, next_token_loss, random_direction

IDS = torch.tensor([[0, 1, 0]])
LOGITS = torch.tensor([[[0.0, math.log(3)], [math.log(4), 0.0], [9.0, 9.0]]])


def test_the_next_token_is_predicted_from_the_position_before():
    # p(1 | 0) = 3/4 and p(0 | 1) = 4/5; the last position predicts nothing.
    loss = next_token_loss(LOGITS, IDS)
    assert float(loss) == pytest.approx(-(math.log(3 / 4) + math.log(4 / 5)) / 2)


@pytest.mark.parametrize(
    "output",
    [
        torch.tensor(2.5),
        (LOGITS, torch.tensor(2.5)),
        (torch.tensor(2.5), LOGITS),
        {"loss": torch.tensor(2.5), "logits": LOGITS},
        SimpleNamespace(loss=torch.tensor(2.5), logits=LOGITS),
    ],
)
def test_the_loss_that_a_model_returns_is_its_own(output):
    loss = default_loss(output, IDS)
    assert float(loss.value) == 2.5
    assert loss.uniform is None


@pytest.mark.parametrize("output", [LOGITS, (LOGITS, None), {"logits": LOGITS}, SimpleNamespace(loss=None, logits=LOGITS)])
@pytest.mark.parametrize("batch", [IDS, (IDS,), {"input_ids": IDS}])
def test_logits_give_the_next_token_loss(output, batch):
    loss = default_loss(output, batch)
    assert float(loss.value) == float(next_token_loss(LOGITS, IDS))
    assert loss.uniform == pytest.approx(math.log(2))


def test_integer_labels_of_the_logits_shape_have_a_uniform_guess():
    own = {"loss": torch.tensor(1.0), "logits": torch.zeros(2, 7)}
    assert default_loss(own, {"x": IDS, "labels": torch.tensor([0, 6])}).uniform == pytest.approx(math.log(7))
    assert default_loss(own, {"x": IDS, "labels": torch.zeros(2)}).uniform is None  # floats: a regression
    assert default_loss(own, {"x": IDS, "labels": torch.zeros(2, 4, dtype=torch.long)}).uniform is None  # of another shape
    pair = (torch.zeros(1, 3, 5), torch.tensor(1.0))
    assert default_loss(pair, {"idx": IDS, "targets": IDS}).uniform == pytest.approx(math.log(5))


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        (torch.zeros(2, 3), "a float32 tensor [2, 3]"),
        ((torch.zeros(2, 3), "x"), "a tuple of a float32 tensor [2, 3], str"),
        ({"hidden": torch.zeros(2), "other": 3}, "a dict of hidden [2], other"),
        (SimpleNamespace(x=1), "a SimpleNamespace"),
        (torch.zeros(1, 2, 5), "a float32 tensor [1, 2, 5]"),  # logits of other tokens than were given
    ],
)
def test_what_is_neither_is_shown_and_refused(output, shown):
    with pytest.raises(PropcheckError, match="neither a loss nor logits") as caught:
        default_loss(output, IDS)
    assert f"but {shown}; return propcheck.Target" in str(caught.value)


def test_a_random_direction_weighs_every_output_that_has_a_gradient():
    first = torch.ones(2, 3, requires_grad=True)
    second = torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    random_direction({"a": first, "b": [second], "c": torch.ones(9)}, IDS).backward()
    u = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(first.grad, u / 6)
    assert second.grad.abs().min() > 0
    assert float(random_direction(first, IDS).detach()) == pytest.approx(float(u.mean()))


def test_an_output_without_a_gradient_has_no_direction():
    with pytest.raises(PropcheckError, match=r"no floating-point tensor with a gradient, but a float32 tensor \[2\]"):
        random_direction(torch.zeros(2), IDS)


def test_a_loss_that_takes_something_else_is_refused_in_one_line():
    import propcheck
    from propcheck.errors import PropcheckError

    target = propcheck.Target(torch.nn.Linear(4, 4), batch=(torch.zeros(2, 4),), loss=lambda output: output.sum())
    with pytest.raises(PropcheckError, match=r"does not take loss\(output, batch\), which it is called with"):
        propcheck.scan(lambda: target)
