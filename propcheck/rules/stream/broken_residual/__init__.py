"""PC206: a residual that is missing, a stream added to itself, and a sum that is not stream + update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.rules.rule import Example, Hit, Rule
from propcheck.rules.stream.broken_residual.doubled_stream import doubled_streams
from propcheck.rules.stream.broken_residual.missing_addition import missing_additions
from propcheck.rules.stream.broken_residual.wrong_sum import wrong_sums

if TYPE_CHECKING:
    from propcheck.analysis.profile import Profile
    from propcheck.records import Run

RULE = Rule(
    scope="run",
    id="PC206",
    name="broken-residual",
    severity="error",
    threshold=4.0,
    least=1.0,
    unit="factor on the largest error that rounding can make in a sum; missing and doubled residuals have no threshold",
    sees="A residual that is missing in one block, a stream that is added to itself, and a sum that is not stream + update.",
    why="The model does not compute what its code says. A missing residual cuts the stream: what earlier blocks wrote goes on "
    "only through that sublayer. x + x instead of x + F multiplies the stream by 2 per block, 2^16 = 65536 over 16 blocks, and "
    "leaves the sublayer out of the model.",
    formula="Missing: a block lacks an addition that the three blocks on each side have (at least two thirds of them; mixers "
    "of different kinds count as alike), a new stream of the same width begins there (not required in the first and "
    "last block, where none can), and the matrices of that sublayer are used but are in no branch. Not judged if more "
    "than an eighth of the blocks (and more than one) would be affected, if some place could not be observed (PC503), "
    "or for convolutions and other kinds, whose stages lack additions by design.\n\n"
    "Doubled: both operands of an addition carry the stream, x + x or x + (x + F), and the stream is larger after it "
    "(unless a norm hides that). It is only a warning if x + (x + F) follows every update of its kind.\n\n"
    "Wrong sum: add_error x update_rms > threshold x u (sum_rms + n (stream_rms + update_rms)) plus 1e-5 of the "
    "update. Here u is the unit roundoff of the coarser operand (bf16 2^-8, fp16 2^-11, fp32 2^-24), update_rms is "
    "summed over the n + 1 updates of a parallel block, and n = 1 if there is one update.",
    basis="BLT has x + (x + F) at every place of one kind (the cross-attention of each decoder layer), and it trains; if that "
    "compounds, PC201 reports it. A sum that is rounded once is off by at most u times itself, in RMS too. Each partial sum or "
    "product before it adds at most u times its terms. 1e-5 covers sums fused with a product, which add in another order. The "
    "factor 4 leaves room for kernels that reduce in half precision; a wrong sum is off by the order of the stream or the "
    "update. The number is this tool's own.",
    source="He 2015, arXiv 1512.03385 (what a residual is); Higham 2002, Accuracy and Stability of Numerical Algorithms, "
    "section 2.2 (rounding of a sum); kyegomez/BitNet issue 32 (x = x + x).",
    remedy="Compare the forward code of that block with its neighbours'.",
    example=Example(
        broken="x = x + self.block(x)  # block(x) already returns x + F(x): the stream counts twice",
        repaired="x = self.block(x)",
    ),
)


@RULE.checked_by
def check(profile: Profile, run: Run, threshold: float) -> list[Hit]:
    """Look for missing additions, doubled streams and wrong sums."""
    return [*missing_additions(profile, run), *doubled_streams(profile, run), *wrong_sums(profile, threshold)]
