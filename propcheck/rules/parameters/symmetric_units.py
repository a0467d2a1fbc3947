"""PC103: rows of a weight that are bit-for-bit equal, so that units start as copies of each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from propcheck.analysis.name_patterns import folded, path, place, subject, verb
from propcheck.rules.parameters.drawn_weights import drawn_parameters
from propcheck.rules.rule import Example, Hit, Rule

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from propcheck.analysis.profile import Profile
    from propcheck.records import ParameterRecord, Run

# Shorter rows can be equal by chance: a bf16 draw takes one of a few hundred likely values.
_MIN_ROW = 8

RULE = Rule(
    scope="run",
    id="PC103",
    name="symmetric-units",
    severity="warning",
    threshold=0.01,
    unit="fraction of the rows that are not zero and equal an earlier row",
    sees="Rows of a weight that are bit-for-bit equal: units that start as copies of each other.",
    why="Units with the same inputs and the same weights compute the same output, so the layer starts narrower than it is. "
    "Their gradients differ only if the next layer weights them differently. If that layer is symmetric too (both matrices "
    "filled with a constant), the units stay equal for good.",
    formula="(duplicate_rows - rows that may be zero) / rows > threshold, where at most zeros / row length - 1 duplicates can "
    f"be zero rows. Judged: trained weights of linear layers and convolutions inside blocks, with rows of {_MIN_ROW} elements "
    "or more. Not judged: embeddings (each row has its own inputs), tensors outside the blocks (each row of a head has its own "
    "targets), stacks of experts (whose rows are experts, which may be copied on purpose), depthwise kernels, and parameters "
    "that are not named weight (each channel may have its own input). Zero rows are healthy: in a zero-initialised projection "
    "every row gets its own gradient. The rule does not claim that the units stay equal: one pass cannot show that.",
    basis=f"Random rows of {_MIN_ROW} bf16 numbers are never equal by chance, so any fraction means copies. 1 % is our own "
    "choice.",
    source="Goodfellow, Bengio and Courville 2016, Deep Learning, section 8.4 (initial parameters need to break symmetry "
    "between units).",
    remedy="Draw the weight at random. If rows were copied to widen a layer, add noise to the copies, as Net2Net does (arXiv "
    "1511.05641).",
    example=Example(
        broken="nn.init.constant_(self.up.weight, 0.01)",
        repaired="nn.init.normal_(self.up.weight, std=0.02)",
    ),
)


@RULE.checked_by
def check(_profile: Profile, run: Run, threshold: float) -> list[Hit]:
    """Report weights with equal nonzero rows."""
    equal_rows = {
        p.name: rows for p in drawn_parameters(run) if len(p.shape) > 1 and (rows := _equal_rows(p)) > threshold * p.shape[0]
    }
    return [_hit(group, equal_rows) for group in folded(p for p in run.parameters if p.name in equal_rows)]


def _hit(group: Sequence[ParameterRecord], equal_rows: Mapping[str, int]) -> Hit:
    worst = max(group, key=lambda p: equal_rows[p.name] / p.shape[0])
    equal, rows = equal_rows[worst.name], worst.shape[0]
    where = "" if len(group) == 1 else f" of {worst.name}"
    if equal == rows - 1:
        repeated = f"all {rows} rows{where} are equal"
    else:
        repeated = f"{equal} of {rows} rows{where} repeat an earlier row"
    return Hit(
        sites=(),
        place=place(worst),
        metric="duplicate_rows",
        value=equal,
        expected=0.0,
        message=f"{subject(group)} {verb(group, 'has', 'have')} equal rows that are not zero: {repeated} (expected: none). "
        "These units start as copies of each other, and stay copies as long as the next layer treats them alike.",
    )


def _equal_rows(record: ParameterRecord) -> int:
    """Count the nonzero rows that surely equal an earlier one; 0 for a parameter that is not judged."""
    if record.block is None or not record.requires_grad or not path(record).endswith("weight"):
        return 0
    is_matrix = record.role == "linear" and len(record.shape) == 2
    is_kernel = record.role == "convolution" and len(record.shape) > 2 and record.shape[1] > 1
    row = math.prod(record.shape[1:])
    if not (is_matrix or is_kernel) or row < _MIN_ROW or record.duplicate_rows is None or record.zeros is None:
        return 0
    most_zero_rows = record.zeros // row
    return record.duplicate_rows - max(0, most_zero_rows - 1)
