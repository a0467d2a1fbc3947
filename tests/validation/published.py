"""A number that was published, beside what is measured here: a row of docs/validation.md."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "validation.md"


@dataclass(frozen=True)
class Row:
    """What was measured, in which setting, what was published where, and the numbers found."""

    what: str
    setting: str
    published: str
    source: str
    measured: tuple[float, ...]
    form: str = "{:.3g}"

    def line(self) -> str:
        numbers = " / ".join(self.form.format(number) for number in self.measured)
        return f"| {self.what} | {self.setting} | {self.published} | {numbers} | {self.source} |"


def on_page(row: Row) -> bool:
    """Whether the committed page has this row with these numbers.

    Within 5 % (0.005 where that is more): other versions of torch and other processors round, and draw, a little differently.
    """
    start = f"| {row.what} | {row.setting} | {row.published} | "
    (line,) = (line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(start))
    numbers, source = line.removeprefix(start).rsplit(" | ", 1)
    found = [float(number) for number in numbers.split(" / ")]
    near = (math.isclose(one, other, rel_tol=0.05, abs_tol=0.005) for one, other in zip(found, row.measured, strict=True))
    return source == f"{row.source} |" and all(near)
