"""What reads the stream beside its blocks adds its gradient to it: no fault, and no more than a note."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from scanned import found, scan
from toy import VOCABULARY, Block, Decoder

import propcheck


class EveryBlock(Decoder):
    """A loss on every block, as in deep supervision."""

    def forward(self, ids):
        x, logits = self.embed(ids), []
        for block in self.layers:
            x = block(x)
            logits.append(self.head(self.norm(x)))
        return torch.stack(logits)


class SomeBlocks(Decoder):
    """A head over three places of the stream."""

    def forward(self, ids):
        x, read = self.embed(ids), []
        for index, block in enumerate(self.layers):
            x = block(x)
            read += [x] if index in (3, 7, 11) else []
        return self.head(self.norm(sum(read)))[None]


def with_loss(model):
    ids = torch.randint(0, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(0))

    def loss(output, batch):
        return sum(F.cross_entropy(one[:, :-1].flatten(0, 1), batch[:, 1:].flatten()) for one in output) / len(output)

    return lambda: propcheck.Target(model(Block, 12), batch=ids, loss=loss)


@pytest.mark.parametrize("model", [EveryBlock, SomeBlocks])
def test_other_readers_of_the_stream_are_a_note_that_says_so(model):
    run = scan(with_loss(model))
    (finding,) = found(run, "PC306")
    # The last reader adds a gradient as large as that of the one at the end: x2 over the addition behind it.
    assert (finding.severity, finding.value) == ("note", pytest.approx(2, rel=0.1))
    assert (
        "Another reader of the stream (a loss or a head on an inner block, which is no fault) may add this." in finding.message
    )
    assert finding.remedy.startswith("Nothing, if something else reads the stream there")


def test_a_loss_whose_targets_are_all_ignored_is_named():
    ids = torch.randint(0, VOCABULARY, (2, 64), generator=torch.Generator().manual_seed(0))

    def loss(output, _batch):
        return F.cross_entropy(output.flatten(0, 1), torch.full((128,), -100))

    (finding,) = scan(lambda: propcheck.Target(Decoder(blocks=4), batch=ids, loss=loss)).findings
    assert (finding.rule, finding.severity, finding.metric, finding.site.site) == ("PC305", "error", "loss", None)
    assert "made by cross_entropy" in finding.message
