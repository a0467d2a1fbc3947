"""Write the page of the healthy controls from their tables: ``python docs/healthy.py``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "healthy"))

from expected import EXPECTED, NOT_AS_TRAINED, REASONS  # noqa: E402 - found by the line above
from stock import VOCABULARY, stocks  # noqa: E402

from propcheck import rules  # noqa: E402

if TYPE_CHECKING:
    from stock import Stock

HEAD = f"""# Healthy controls

Generated from `tests/healthy/` by `python docs/healthy.py`; do not edit.

The stock configs of model families that were trained successfully, at their real depth, in bf16, at transformers' own
initialisation. `tests/healthy/test_healthy.py` scans all of them: none may give an error, and what each gives must be what
this page says. A finding here is true of the numbers that were measured; it does not say that the released model was
trained from this initialisation, which transformers often does not know. Inputs and weights of seed 0; with seeds 1 and 2 the
rules find the same in every model but wav2vec 2.0, whose layer drop then leaves another number of layers out.

## How a width is reduced

Depth, norms, eps, activations, multipliers and dropout are the published ones. Where the width is smaller than published:

- The std that a config gives to all matrices (`initializer_range`, `init_std`) is multiplied by sqrt(published width / width),
  so that a matrix times a vector gives what it gives in the full model. FFN and low ranks shrink by about the same factor;
  heads and experts are fewer. Matrices that transformers draws by their own fan-in need nothing.
- What sums over no width keeps its published std: embeddings of tokens and positions, depthwise convolutions, patches.
- Token embeddings that the model multiplies by sqrt(width) or norms follow the matrices ("embedding follows" in the table): the
  stream starts as in the full model.
- So where head and embedding are one table and it keeps its std, logits are smaller than in the full model, by
  sqrt(published width / width), and so is the gradient that comes from them.
- The vocabulary is {VOCABULARY} and the inputs are one sequence of 64 tokens, unless the table says otherwise. Fewer tokens
  make the updates of attention larger.

The check of it is the model that was measured at full size too: Qwen3.8-27B, 64 layers 5120 wide, has a stream of RMS 3.42
behind block 0 and of 27.44 behind block 63, and at width 256 the same within 3 % (a test). Numbers of published configs are
given from knowledge of them, beside transformers' class defaults. Only those of Mamba, Falcon, Bamba, LFM2 and MiniMax-Text-01
were compared with the published files.
"""


def page() -> str:
    """Return the page's text."""
    known = stocks()
    rows = ["| model | type | config of | layers | width | reduced besides | findings |", "|---|---|---|---|---|---|---|"]
    rows += [_row(stock) for name, stock in known.items() if name not in NOT_AS_TRAINED]
    parts = [
        HEAD,
        f"## {len(known) - len(NOT_AS_TRAINED)} models of {len({one.kind for one in known.values()})} types",
        "\n".join(rows),
    ]
    parts += ["", "## Why each finding is true", ""]
    for kind, text in REASONS.items():
        found = [(rule, name, own) for name, one in EXPECTED.items() for rule, own in one.items() if own[1] == kind]
        rule = found[0][0]
        values = ", ".join(f"{name} {value:.3g}" for _, name, (value, _) in found)
        parts.append(f"**{rule} {rules.find(rule).name}, {kind}.** {text} Measured: {values}.\n")
    parts += ["## Not as trained", ""]
    for name, (rule, value, text) in NOT_AS_TRAINED.items():
        stock = known[name]
        parts.append(
            f"**{name}** (`{stock.kind}`, config of {stock.source}, {_depth(stock)} layers, {_width(stock)}): "
            f"{rule} {rules.find(rule).name}, {value:.3g}. {text}\n"
        )
    return "\n".join(parts).rstrip() + "\n"


def _row(stock: Stock) -> str:
    found = EXPECTED.get(stock.name, {})
    what = "; ".join(f"{rule} ({kind}, {value:.3g})" for rule, (value, kind) in found.items()) or "none"
    return (
        f"| {stock.name} | `{stock.kind}` | {stock.source} | {_depth(stock)} | {_width(stock)} | {_reduced(stock)} | {what} |"
    )


def _depth(stock: Stock) -> str:
    config = stock.config
    if getattr(config, "is_encoder_decoder", False):
        encoder = getattr(config, "encoder_layers", None) or config.num_layers
        return f"{encoder} + {getattr(config, 'decoder_layers', None) or config.num_decoder_layers}"
    return str(config.num_hidden_layers)


def _width(stock: Stock) -> str:
    full, small = stock.full.hidden_size, stock.config.hidden_size
    return str(full) if full == small else f"{full} -> {small}"


def _reduced(stock: Stock) -> str:
    width = {"hidden_size", "n_embd", "d_model", "vocab_size"}
    parts = [f"{key} {value}" for key, value in stock.small.items() if key not in width]
    parts += [f"vocabulary {stock.small['vocab_size']}"] if "vocab_size" in stock.small else []
    parts += ["embedding follows"] if stock.embeddings == "follow" else []
    parts += [f"{stock.tokens} tokens"] if stock.tokens != 64 else []
    return ", ".join(parts) or "none"


if __name__ == "__main__":
    (HERE / "healthy.md").write_text(page(), encoding="utf-8")
