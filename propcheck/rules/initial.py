"""How the weights were drawn: PC103, PC104, PC105."""

from __future__ import annotations

import math
import re
import statistics
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import families, folded, path, place, subject, verb
from propcheck.formatting import count, number
from propcheck.rules.rule import Hit, Rule
from propcheck.rules.scheme import SIGMAS, off_by_more, off_scheme
from propcheck.rules.step_bias import HIGH, LOW, off_range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import ParameterRecord, Run

_WEIGHTS = frozenset({"linear", "convolution", "embedding"})
# Below this many elements chance decides too much of what these rules look at.
_LEAST_ELEMENTS = 1000
# Rows shorter than this can be equal by chance: a bf16 number is one of a few hundred likely ones.
_LEAST_ROW = 8
_FLOATS = frozenset({"float64", "float32", "bfloat16", "float16"})


def _drawn(run: Run) -> list[ParameterRecord]:
    """List the parameters whose values can be judged: written (else PC102), finite (else PC101) and not quantised."""
    return [
        p
        for p in run.parameters
        if p.kind == "parameter" and p.init_calls is not None and p.nonfinite == 0 and p.dtype in _FLOATS and p.numel
    ]


def _symmetric_units(_curve: Profile, run: Run, limit: float) -> Sequence[Hit]:
    equal = {p.name: rows for p in _drawn(run) if len(p.shape) > 1 and (rows := _equal_rows(p)) > limit * p.shape[0]}
    hits = []
    for group in folded(p for p in run.parameters if p.name in equal):
        worst = max(group, key=lambda p: equal[p.name] / p.shape[0])
        rows, shape = equal[worst.name], worst.shape
        where = "" if len(group) == 1 else f" (in {worst.name})"
        how = "all rows are equal" if rows == shape[0] - 1 else f"{rows} of {count(shape[0], 'row')} repeat an earlier one"
        hits.append(
            Hit(
                sites=(),
                place=place(worst),
                metric="duplicate_rows",
                value=rows,
                expected=0.0,
                message=f"{subject(group)} {verb(group, 'has', 'have')} equal rows that are not zero: {how}{where}. They start "
                "as copies of each other, and stay so for as long as what reads them treats them alike.",
            )
        )
    return hits


def _equal_rows(record: ParameterRecord) -> int:
    """Count, at the least, the rows that are not zero and equal an earlier one; 0 for what is not to be judged."""
    if record.block is None or not record.requires_grad or not path(record).endswith("weight"):
        return 0
    flat = record.role == "linear" and len(record.shape) == 2
    kernel = record.role == "convolution" and len(record.shape) > 2 and record.shape[1] > 1
    row = math.prod(record.shape[1:])
    if not (flat or kernel) or row < _LEAST_ROW or record.duplicate_rows is None or record.zeros is None:
        return 0
    zero_rows = record.zeros // row  # at most
    return record.duplicate_rows - max(0, zero_rows - 1)


def _init_scale(_curve: Profile, run: Run, limit: float) -> Sequence[Hit]:
    drawn = _drawn(run)
    weights = [p for p in drawn if p.role in _WEIGHTS and p.numel >= _LEAST_ELEMENTS and 0 < (p.std or 0.0) < math.inf]
    of_scheme = off_scheme(run, weights, limit)
    told = {p.name for members, _ in of_scheme for p in members}
    return [
        *(hit for _, hit in of_scheme),
        *_off_siblings([p for p in weights if p.name not in told], limit),
        *off_range(drawn, limit),
    ]


def _off_siblings(weights: Sequence[ParameterRecord], limit: float) -> list[Hit]:
    hits = []
    for family in families(weights):
        odd = _odd_ones(family, limit)
        if not odd:
            continue
        others = [p for p in family if p not in odd]
        usual = statistics.median(p.std or 0.0 for p in others)
        worst = max(odd, key=lambda p: abs(math.log((p.std or 0.0) / usual)))
        hits.append(
            Hit(
                sites=(),
                place=place(worst),
                metric="std",
                value=worst.std,
                expected=usual,
                message=f"{subject(odd)} {verb(odd, 'has', 'have')} a standard deviation of {number(worst.std)} "
                f"({worst.init_calls}); the {count(len(others), 'parameter')} of the same name in other places, on both sides, "
                f"have {number(usual)} ({others[0].init_calls}), x{number((worst.std or 0.0) / usual)} off.",
            )
        )
    return hits


def _odd_ones(family: Sequence[ParameterRecord], limit: float) -> list[ParameterRecord]:
    """Find the few members whose std is off, where all others were made by the same calls; none at either end."""
    if len(family) < 4:
        return []
    usual = statistics.median(p.std or 0.0 for p in family)
    odd = [index for index, record in enumerate(family) if off_by_more(record, usual, limit)]
    if len(odd) > max(1, len(family) // 10) or 0 in odd or len(family) - 1 in odd:
        return []
    if len({record.init_calls for index, record in enumerate(family) if index not in odd}) > 1:
        return []  # a scheme that gives each place a scale of its own
    return [family[index] for index in odd]


def _init_outliers(_curve: Profile, run: Run, limit: float) -> Sequence[Hit]:
    ratios = {
        p.name: ratio
        for p in _drawn(run)
        if p.role in _WEIGHTS and p.numel >= _LEAST_ELEMENTS and _draws_normals(p.init_calls or "")
        if (ratio := _largest_ratio(p)) is not None and ratio > limit * _expected_largest(p)
    }
    hits = []
    for group in folded(p for p in run.parameters if p.name in ratios):
        worst = max(group, key=lambda p: ratios[p.name])
        expected = _expected_largest(worst)
        hits.append(
            Hit(
                sites=(),
                place=place(worst),
                metric="absmax / rms",
                value=ratios[worst.name],
                expected=expected,
                message=f"{subject(group)} {verb(group, 'is', 'are')} drawn from a normal distribution "
                f"({worst.init_calls}), and the largest value{'' if len(group) == 1 else f', in {worst.name}'}, "
                f"{number(worst.absmax)}, is {number(ratios[worst.name])} times the RMS; {worst.numel} normal numbers reach "
                f"{number(expected)}. The mean is {number(worst.mean)}.",
            )
        )
    return hits


def _largest_ratio(record: ParameterRecord) -> float | None:
    """Give the largest value over the RMS of the values that are not zero (a padding row, a mask)."""
    nonzero = record.numel - (record.zeros or 0)
    if record.absmax is None or record.std is None or record.mean is None or not nonzero:
        return None
    rms = math.hypot(record.std, record.mean) * math.sqrt(record.numel / nonzero)
    return record.absmax / rms if rms else None


def _expected_largest(record: ParameterRecord) -> float:
    return math.sqrt(2 * math.log(max(2, record.numel - (record.zeros or 0))))


# One call as it is written: its name, and the numbers it was given.
_CALL = re.compile(r"(?P<name>\w+)(?:\((?P<arguments>[^()]*)\))?(?: x \d+)?")
_NORMAL_DRAWS = frozenset({"normal_", "normal", "randn", "randn_like", "trunc_normal_"})
_UNIFORM_DRAWS = frozenset({"uniform_", "uniform", "rand", "rand_like"})
_SAME_SHAPE = frozenset({"to", "clone", "copy_", "clamp_", "clamp", "zero_", "neg", "neg_"})
_BY_NUMBER = frozenset({"mul", "mul_", "div", "div_", "add", "add_", "sub", "sub_"})


def _draws_normals(calls: str) -> bool:
    """Whether calls draw one lot of normal numbers, scale them as a whole and do nothing else but set some to zero."""
    parsed = [_CALL.fullmatch(call) for call in re.split(r", (?![^(]*\))", calls)]
    if not all(parsed):
        return False
    steps = [(call["name"], call["arguments"]) for call in parsed if call is not None]
    draws = [name for name, _ in steps if name in _NORMAL_DRAWS | _UNIFORM_DRAWS]
    inverted = sum(name in ("erfinv", "erfinv_") for name, _ in steps)
    if len(draws) != 1 or inverted != (draws[0] in _UNIFORM_DRAWS):
        return False
    rest = [(name, arguments) for name, arguments in steps if name not in (draws[0], "erfinv", "erfinv_")]
    return all(
        name in _SAME_SHAPE
        or (name in _BY_NUMBER and bool(arguments))
        or (name in ("fill_", "masked_fill_") and arguments in ("0", "0.0"))
        for name, arguments in rest
    )


SYMMETRIC_UNITS = Rule(
    scope="run",
    id="PC103",
    name="symmetric-units",
    severity="warning",
    threshold=0.01,
    unit="fraction of the rows that are not zero and equal an earlier row",
    sees="Rows of a weight that are equal bit by bit: units that start as copies of each other.",
    why="Units with the same inputs and the same weights compute the same, so the layer starts as a narrower one. Their "
    "gradients differ only if what reads them weighs them differently; where that is symmetric too (both matrices filled "
    "with a constant) they stay equal for good.",
    formula="duplicate_rows, less the rows that can be zero (zeros / row length, but one), over the rows > threshold. Judged "
    f"are trained weights of linear layers and convolutions inside blocks, with rows of {_LEAST_ROW} elements or more. Not "
    "judged: embeddings (each row has inputs of its own), what lies outside the blocks (a head's rows have targets of their "
    "own), stacks of experts (their rows are experts, which may be copied on purpose), depthwise kernels and parameters that "
    "are not called weight (each channel may have an input of its own). Zero rows are healthy: a zero-initialised projection "
    "gets a different gradient in each row. That the units remain equal is not claimed: one pass does not show it.",
    basis=f"Random rows of {_LEAST_ROW} bf16 numbers are not equal by chance, so any share is a copy; 1 % is this tool's own.",
    source="Goodfellow, Bengio and Courville 2016, Deep Learning, section 8.4 (initial parameters need to break symmetry "
    "between units).",
    remedy="Draw the weight at random, or add noise to what was copied (as Net2Net does, arXiv 1511.05641).",
    check=_symmetric_units,
)

INIT_SCALE = Rule(
    scope="run",
    id="PC104",
    name="init-scale",
    severity="warning",
    threshold=1.5,
    least=1.0,
    unit="factor by which a scale is off its siblings, its declared scheme, or its range",
    sees="Three things. A weight that was drawn at another scale than the weights of the same name in the blocks around it. "
    "With a scheme declared in the probe's `[expect]` (or `[init]`, which is the reference decoder's own), weights that were "
    "not drawn by it, in however many blocks. And biases of step sizes that start far outside Mamba's range.",
    why="It is how an init function looks that missed a module (one created later, replaced, or named otherwise), or that "
    "applied a depth factor nowhere or everywhere: the branch writes updates of another size than it was meant to. A step "
    "size sets how much of its state a recurrence keeps from one token to the next: at 1.31, what is left of bias 1, a state "
    "with decay rate 1 keeps 27 %, so it forgets within a few tokens.",
    formula="Siblings: the same name but for numbers, the same role and shape, 4 or more. Broken where |ln(std / median)| > "
    f"ln(threshold) + {SIGMAS:g} / sqrt(2 numel), the second part being chance, for at most one in ten of them (or one), not "
    "the first or last, while all others were made by the same calls. A scheme that gives each depth its own scale is "
    "silent, and so is one that alternates. Declared scheme: the same with the scheme's standard deviation for the median, "
    "for the token embedding and the head (whose rows are as many as the vocabulary), residual projections (what wrote the "
    "update of a site) and all other matrices of the branches; one finding a name, or a kind where many names are off. The "
    "formulas are those of `init.scheme`, with the blocks of the model for layers. With he and fan-in the nearer side of a "
    "matrix is its fan-in, and stacks of experts are left out: a shape does not say which side is summed over. Not judged "
    "by it: routers of experts, convolutions, norms, biases, position embeddings, and a reference decoder whose placement "
    "scales weights by itself (deepnorm, sub-ln). A scale that is off in every block alike is not seen where no scheme is "
    "declared. Weights that are zero are never compared. Step biases (vectors added before a softplus whose result steps a "
    f"recurrence): softplus(mean) below {LOW:g} / threshold or above {HIGH:g} x threshold; the mean stands for the vector, "
    "whose values are not kept. A warning in state-space sublayers, where the harm was reported, else a note.",
    basis="Chance is accounted for, so what is left is a choice of what matters: 1.5 is this tool's own, as in PC205, no "
    "published cut-off was found. A depth factor that one block missed is 1/sqrt(2 x blocks), 4.9 at 12 blocks; torch's "
    "default of a linear layer beside std 0.02 is a factor of 2.6 at width 128, and of 1.04 at 768, which is not seen. "
    "Schemes that count depth as blocks and not as sublayers differ by 1.41 and are silent.",
    source="None for one block alone. In all blocks: huggingface/transformers issue 47458 (a depth factor whose name test "
    "never matched; scales off by 4.9), facebookresearch/lingua issue 39 (a depth factor on q, k and v too). Step sizes: Gu "
    "and Dao 2023, arXiv 2312.00752 (softplus(bias) drawn from 0.001 to 0.1); fla-org/flash-linear-attention pull request "
    "739 (Mamba-2 with biases of 1: a significantly worse loss at 7B) and huggingface/transformers issue 43717.",
    remedy="Give this weight the init of its siblings; look for a module that was made or replaced after the init ran.",
    check=_init_scale,
)

INIT_OUTLIERS = Rule(
    scope="run",
    id="PC105",
    name="init-outliers",
    severity="warning",
    threshold=2.0,
    least=1.0,
    unit="factor on sqrt(2 ln n), which n normal numbers reach",
    sees="Single values of a weight drawn from a normal distribution that lie far outside it.",
    why="The draw is broken: a uniform number that rounds to the end of its range comes out of the inverse error function as "
    "infinity and is clamped to the bound, which is 100 standard deviations away where std is 0.02. The outliers then carry "
    "most of the weight's norm.",
    formula="absmax / RMS of the elements that are not zero > threshold x sqrt(2 ln n), n being their number. Judged are "
    f"weights of linear layers, convolutions and embeddings with {_LEAST_ELEMENTS} elements or more whose recorded calls draw "
    "normal numbers once (normal_, trunc_normal_, or uniform_ then erfinv_) and then only scale, shift, clamp, cast or set to "
    "zero; heavier tails, or parts drawn at different scales, may be meant and are not judged.",
    basis="The chance that n normal numbers reach twice sqrt(2 ln n) is below n^-3: 1e-9. The reported fault gave 22 to 100 "
    "standard deviations, where 5 to 6 are expected.",
    source="pytorch/torchtitan issue 2269 (0.2 % of a bf16 truncated normal at the bound -2); the bound follows from the "
    "normal tail, P(|z| > t) < exp(-t^2 / 2).",
    remedy="Draw in fp32 and round afterwards, or truncate at a few standard deviations (a = -3 std, b = 3 std).",
    check=_init_outliers,
)

RULES = (SYMMETRIC_UNITS, INIT_SCALE, INIT_OUTLIERS)
