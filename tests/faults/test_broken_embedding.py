"""One broken embedding gives a few headlines, with what it leads to under them, however many blocks there are."""

from __future__ import annotations

import functools

import pytest
import torch
from scanned import found, scan
from torch import nn
from toy import Block, Decoder, Gpt2Block, RMSNorm, gpt2


def embedded(std, *, block=None, eps=1e-6):
    """A tied decoder of 12 blocks whose table has another std."""
    norm = functools.partial(RMSNorm, eps=eps)

    def init(module, name, blocks):
        gpt2(module, name, blocks)
        if name in ("embed", "head"):  # one table
            nn.init.normal_(module.weight, std=std)

    return Decoder(block or (lambda _: Block(norm=norm)), 12, init=init, norm=norm)


def test_a_tiny_embedding_that_eps_outweighs_is_named_by_the_first_norm():
    """RMS 1e-6 where the root of the eps is 1e-3; the updates that dwarf such a stream are no headline of their own."""
    run = scan(lambda: embedded(1e-6))
    assert [one.rule for one in run.findings] == ["PC208", "PC208"]  # the norms before attention, and those before the MLP
    first = run.findings[0]
    assert (first.site.block, first.also) == (0, ("PC204 at 2 sites",))
    assert "The input has the scale of the embedding embed.weight = head.weight" in first.message


def test_where_no_eps_damps_it_the_first_block_is_the_headline():
    run = scan(lambda: embedded(1e-6, eps=1e-16))
    (finding,) = run.findings
    assert (finding.rule, finding.site.block, finding.also) == ("PC205", 0, ("PC204 at 1 site",))
    assert finding.value > 1e3


def test_other_spellings_have_few_headlines_too():
    run = scan(lambda: embedded(1e-6, block=Gpt2Block))
    assert [one.rule for one in run.findings] == ["PC205", "PC208", "PC208"]
    assert {one.site.block for one in run.findings} == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_huge_embedding_is_named_by_the_head_that_shares_it_and_by_what_rounding_takes(dtype):
    """RMS 100 under updates of .01: ratio 1e-4, far below bf16's 2^-9; logits of std 100 sqrt(256) and more."""
    run = scan(lambda: embedded(100.0).to(dtype))
    head = [one.rule for one in run.findings if one.rule in ("PC401", "PC402")]
    assert head == ["PC401", "PC402"]
    assert run.loss.logit_std > 100 * 256**0.5
    lost = found(run, "PC207")
    assert [one.site.sublayer for one in lost] == ([] if dtype == torch.float32 else ["attention", "mlp"])
    assert len(run.findings) == len(head) + len(lost)
