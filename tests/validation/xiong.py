"""The setting of Xiong et al. 2020 (arXiv 2002.04745, section 3.1), scanned.

Single-head attention that is uniform over all tokens (W_Q = 0), a ReLU network with d_ff = d, every weight N(0, 1/d), no bias,
an input with E||x||^2 = d. Lemma 2: of post-norm E||x + FFN x||^2 = 3d/2; of pre-norm (1 + l/2) d <= E||x_l||^2 <= (1 + 3l/2) d
after l layers.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from published import Row
from torch import Tensor, nn

import propcheck

SOURCE = "Xiong et al. 2020, arXiv 2002.04745"
SEEDS = (0, 1, 2)
SHAPES = ((256, 24), (512, 12), (1024, 6))  # width, layers
DEPTHS = (6, 12, 24, 48)
TOKENS, VOCABULARY = 32, 1000


class Layer(nn.Module):
    def __init__(self, width: int, *, pre: bool) -> None:
        super().__init__()
        self.pre = pre
        self.query, self.key, self.value, self.inner, self.outer = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.attention_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        for linear in (self.key, self.value, self.inner, self.outer):
            nn.init.normal_(linear.weight, std=width**-0.5)
        nn.init.zeros_(self.query.weight)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)  # [batch, tokens, width]
        return torch.softmax(q @ k.mT / x.shape[-1] ** 0.5, dim=-1) @ v

    def ffn(self, x: Tensor) -> Tensor:
        return self.outer(F.relu(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.pre:
            x = x + self.attention(self.attention_norm(x))
            return x + self.ffn(self.ffn_norm(x))
        x = self.attention_norm(x + self.attention(x))
        return self.ffn_norm(x + self.ffn(x))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, *, pre: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight)
        self.layers = nn.ModuleList(Layer(width, pre=pre) for _ in range(layers))
        self.norm = nn.LayerNorm(width) if pre else nn.Identity()
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.head.weight, std=width**-0.5)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@cache
def scanned(width: int, layers: int, *, pre: bool) -> propcheck.Run:
    return propcheck.scan(
        Transformer,
        args={"width": width, "layers": layers, "pre": pre},
        tokens=TOKENS,
        batch=2,
        seeds=SEEDS,
        set={"inputs.source": "uniform"},
    )


def squared_norms(width: int, layers: int, *, pre: bool) -> list[float]:
    """E||x + F||^2 / d at each addition: sum_rms squared, averaged over the seeds."""
    rows = scanned(width, layers, pre=pre).sublayers
    return [(group.sum_rms**2).mean() for _, group in rows.groupby("site")]


def last_gradient(layers: int, *, pre: bool) -> float:
    """Norm of the gradient of the last layer's second FFN matrix, the quantity of fig. 3, at width 256."""
    parameters = scanned(256, layers, pre=pre).parameters
    return float(parameters.set_index("name").grad_norm[f"layers.{layers - 1}.outer.weight"])


def post_row(width: int, layers: int) -> Row:
    sums = squared_norms(width, layers, pre=False)[1::2]
    return Row(
        "post-norm, min and max E‖x+FFN x‖²/d",
        f"width {width}, {layers} layers, {len(SEEDS)} seeds",
        "1.5",
        SOURCE + ", lemma 2",
        (min(sums), max(sums)),
    )


def pre_row(width: int, layers: int) -> Row:
    streams = squared_norms(width, layers, pre=True)[1::2]
    slopes = [(value - 1) / layer for layer, value in enumerate(streams, start=1)]
    return Row(
        "pre-norm, min and max (E‖x_l‖²/d − 1)/l",
        f"width {width}, {layers} layers, {len(SEEDS)} seeds",
        "between 0.5 and 1.5",
        SOURCE + ", lemma 2",
        (min(slopes), max(slopes)),
    )


def gradient_row(*, pre: bool) -> Row:
    return Row(
        f"{'pre' if pre else 'post'}-norm, gradient of the last FFN matrix",
        f"width 256, {' / '.join(map(str, DEPTHS))} layers, {len(SEEDS)} seeds",
        "falls as 1/√L" if pre else "does not depend on L",
        SOURCE + ", theorem 1, fig. 3",
        tuple(last_gradient(layers, pre=pre) for layers in DEPTHS),
    )


def rows() -> list[Row]:
    lemma = [row(*shape) for shape in SHAPES for row in (post_row, pre_row)]
    return [*lemma, gradient_row(pre=False), gradient_row(pre=True)]
