"""Padding positions count in no number."""

import pytest
import torch
from handwritten import VOCABULARY, WIDTH, Block, Model, SelfAttention, SoftmaxAttention
from torch import nn

import propcheck

REAL = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])


class Padded(Model):
    """A model whose padding tokens are enormous and are looked at by nobody."""

    def __init__(self, block, layout):
        super().__init__(block)
        self.layout = layout
        with torch.no_grad():
            self.tokens.weight[0] = 1e4

    def forward(self, input_ids, attention_mask=None):
        x = self.tokens(input_ids)
        shape = x.shape
        x = {"tokens first": x.transpose(0, 1), "flat": x.reshape(-1, WIDTH), "batch first": x}[self.layout]
        for block in self.blocks:
            x = block(x)
        x = x.transpose(0, 1) if self.layout == "tokens first" else x.view(shape)
        return self.head(self.final(x))


class PositionWise(Block):
    def __init__(self):
        super().__init__(attention=nn.Identity)

    def forward(self, x):
        return self.join(x, self.mlp(self.ln_2(x)))


@pytest.mark.parametrize("layout", ["batch first", "tokens first", "flat"])
@pytest.mark.parametrize("memory", ["8GiB", "1B"])
def test_the_rows_are_those_of_the_real_tokens_alone(layout, memory):
    ids = torch.randint(1, VOCABULARY, REAL.shape, generator=torch.Generator().manual_seed(0)) * REAL

    def mean_square(output, batch):
        return output[REAL.bool()].square().sum() if output.dim() == 3 and len(output) == 3 else output.square().sum()

    def padded():
        return propcheck.Target(Padded(PositionWise, layout), {"input_ids": ids, "attention_mask": REAL}, mean_square)

    def alone():
        return propcheck.Target(Padded(PositionWise, layout), {"input_ids": ids[REAL.bool()][None]}, mean_square)

    one, other = (propcheck.scan(build, memory=memory, eval=True).sublayers for build in (padded, alone))
    assert len(one) == 3
    for column in one.select_dtypes("floating").columns:
        assert one[column].tolist() == pytest.approx(other[column].tolist(), rel=1e-5, nan_ok=True), column
    assert (one["grad_sum_norm"] > 0).all()


@pytest.mark.parametrize("attention", [SelfAttention, SoftmaxAttention])
def test_padded_queries_count_in_no_attention(attention):
    """Padding on the right of a causal model: real queries see real keys alone, as without it."""
    ids = torch.randint(1, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0]] * 2)

    def scanned(batch):
        def build():
            return propcheck.Target(Padded(lambda: Block(attention=attention), "batch first"), batch, lambda y, _: y.sum())

        return propcheck.scan(build, eval=True).sublayers

    one = scanned({"input_ids": ids * mask, "attention_mask": mask})
    other = scanned({"input_ids": ids[:, :4]})
    for column in ("attention_logit_rms", "attention_logit_absmax", "attention_entropy"):
        assert one[column].tolist() == pytest.approx(other[column].tolist(), rel=1e-5, nan_ok=True), column
    assert one.attention_entropy.notna().sum() == 3


def test_padding_is_not_predicted():
    from propcheck.targets.losses import default_loss

    logits = torch.randn(3, 6, VOCABULARY)
    ids = torch.randint(VOCABULARY, (3, 6))
    rows = [(b, t) for b in range(3) for t in range(5) if REAL[b, t + 1]]
    expected = -sum(logits[b, t].log_softmax(-1)[ids[b, t + 1]] for b, t in rows) / len(rows)
    assert default_loss(logits, {"input_ids": ids, "attention_mask": REAL}).value == pytest.approx(expected.item(), rel=1e-6)
