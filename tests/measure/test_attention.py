"""Statistics of attention against sums over single pairs of query and key, in plain Python."""

import math

import pytest
import torch

from propcheck.measure import attention
from propcheck.measure.attention import from_logits, from_products
from propcheck.tracing.events import AttentionCall


def by_hand(query, key, *, scale, seen, bias=lambda *_: 0.0):
    """Sum over heads, queries and keys one by one; ``seen`` and ``bias`` are functions of batch, head, query and key."""
    query, key = query.double().tolist(), key.double().tolist()
    squares, pairs, largest, entropies = 0.0, 0, 0.0, []
    for b, heads in enumerate(query):
        for h, rows in enumerate(heads):
            keys = key[b][h * len(key[b]) // len(heads)]
            for i, row in enumerate(rows):
                visible = [j for j in range(len(keys)) if seen(b, h, i, j)]
                logits = [sum(q * k for q, k in zip(row, keys[j], strict=True)) * scale + bias(b, h, i, j) for j in visible]
                squares += sum(logit * logit for logit in logits)
                pairs += len(logits)
                largest = max([largest, *map(abs, logits)])
                if len(logits) > 1:
                    total = sum(map(math.exp, logits))
                    shares = [math.exp(logit) / total for logit in logits]
                    entropies.append(-sum(p * math.log(p) for p in shares) / math.log(len(shares)))
    return squares / pairs, largest, sum(entropies) / len(entropies)


def numbers(statistics):
    values = (statistics.logit_mean_square, statistics.logit_absmax, statistics.entropy)
    assert all(value.dtype == torch.float64 and value.dim() == 0 for value in values)
    return tuple(value.item() for value in values)


def drawn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [1 << 20, 40, 7, 1])
def test_causal_attention_with_fewer_key_heads_in_any_block(monkeypatch, dtype, block):
    monkeypatch.setattr(attention, "_BLOCK", block)
    query, key = drawn(2, 4, 5, 8, seed=1, dtype=dtype), drawn(2, 2, 5, 8, seed=2, dtype=dtype)
    found = from_products(AttentionCall(0, query, key, is_causal=True, enable_gqa=True))
    expected = by_hand(query, key, scale=8**-0.5, seen=lambda _b, _h, i, j: j <= i)
    assert numbers(found) == pytest.approx(expected, rel=1e-12)


def test_a_boolean_mask_says_which_pairs_are_seen_and_a_query_that_sees_none_is_left_out():
    query, key = drawn(2, 3, 4, 8, seed=3), drawn(2, 3, 6, 8, seed=4)
    mask = drawn(2, 1, 4, 6, seed=5) > 0
    mask[1, 0, 2] = False
    found = from_products(AttentionCall(0, query, key, mask=mask, scale=0.7))
    expected = by_hand(query, key, scale=0.7, seen=lambda b, _h, i, j: bool(mask[b, 0, i, j]))
    assert numbers(found) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("hides", [-math.inf, torch.finfo(torch.float32).min, torch.finfo(torch.float32).min / 2, -1e9, -1e4])
def test_numbers_in_a_mask_are_added_unless_they_hide(hides):
    query, key = drawn(1, 2, 4, 8, seed=6), drawn(1, 2, 4, 8, seed=7)
    slopes = (0.5, 0.25)
    mask = torch.tensor([[[[s * (j - i) if j <= i else hides for j in range(4)] for i in range(4)] for s in slopes]])
    found = from_products(AttentionCall(0, query, key, mask=mask))
    expected = by_hand(
        query, key, scale=8**-0.5, seen=lambda _b, _h, i, j: j <= i, bias=lambda _b, h, i, j: slopes[h] * (j - i)
    )
    assert numbers(found) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("hides", [-math.inf, torch.finfo(torch.bfloat16).min, -1e4])
def test_the_softmax_of_an_eager_attention_tells_the_same_as_the_fused_one(hides):
    query, key = drawn(2, 3, 5, 8, seed=8), drawn(2, 3, 5, 8, seed=9)
    logits = (query @ key.mT * 8**-0.5).masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), hides)
    fused = from_products(AttentionCall(0, query, key, is_causal=True))
    assert numbers(from_logits(logits, logits.softmax(-1))) == pytest.approx(numbers(fused), rel=1e-6)


def test_uniform_weights_have_entropy_1_and_a_single_key_has_0():
    one = torch.ones(1, 1, 3, 4)
    assert numbers(from_products(AttentionCall(0, one, one, is_causal=True))) == pytest.approx((4.0, 2.0, 1.0))
    peaked = torch.tensor([[[[1000.0, 0.0, 0.0], [0.0, 1000.0, 0.0]]]])
    assert numbers(from_logits(peaked, peaked.softmax(-1)))[2] == 0.0


def test_queries_without_heads_and_batch_are_measured_too():
    query, key = drawn(4, 8, seed=10), drawn(6, 8, seed=11)
    found = from_products(AttentionCall(0, query, key))
    expected = by_hand(query[None, None], key[None, None], scale=8**-0.5, seen=lambda *_: True)
    assert numbers(found) == pytest.approx(expected, rel=1e-12)


def test_what_sees_nothing_has_no_numbers_and_what_is_nan_stays_so():
    hidden = torch.full((1, 1, 2, 2), -torch.inf)
    assert all(map(math.isnan, numbers(from_logits(hidden, torch.zeros(1, 1, 2, 2)))))
    broken = torch.tensor([[[[math.nan, 1.0], [1.0, 1.0]]]])
    assert all(map(math.isnan, numbers(from_logits(broken, broken.softmax(-1)))))
