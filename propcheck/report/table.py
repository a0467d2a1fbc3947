"""The table of a run, a row a block or a site, with findings and a summary under it; made for 80 columns.

Colours only repeat what words say, so that it reads the same on light and dark terminals, in a pipe and in a log.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from propcheck import depth
from propcheck.growth import factor, gradient_growth, stream_growth
from propcheck.report.shadow import shadow_line
from propcheck.report.spread import Spread
from propcheck.wording import count, number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from propcheck.growth import Growth
    from propcheck.records import Run, Severity, SiteRecord

_SHORT_KINDS = {"attention": "attn", "linear_attention": "linear"}
_FFN = frozenset({"mlp", "moe"})
_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold magenta", "note": "bold"}
# Inputs that are no token ids from the probe.
_OTHER_SOURCES = {"target": "the target's own", "normal": "drawn from N(0, 1)"}
# Characters between columns, the wider where everything fits.
_GAPS = (2, 1)


@dataclass(frozen=True, slots=True)
class _Column:
    """A heading of one or two lines, the cells under it, and when it goes: the lowest ``keep`` is dropped first."""

    heading: str
    cells: tuple[str, ...]
    keep: int
    text: bool = False

    @property
    def width(self) -> int:
        return max(map(len, (*self.heading.split("\n"), *self.cells)))


def print_run(run: Run, console: Console, detail: Literal["block", "site"] = "block") -> None:
    """Print a run: its table, its findings and a summary.

    Parameters
    ----------
    run
        The run, with its findings.
    console
        Where to print; its width decides which columns fit.
    detail
        What a row is.
    """
    curve = depth.profile(run)
    console.print(Text(_title(run)), highlight=False)
    if curve.sites:
        spread = Spread(run)
        columns = _site_columns(curve.sites, spread) if detail == "site" else _block_columns(curve, spread)
        _print_columns(columns, console)
    _print_findings(run, console)
    for line in summary_lines(run, curve):
        console.print(Text(line), highlight=False)


def _title(run: Run) -> str:
    model = run.model
    return (
        f"{run.target}: {model.class_name}, {_amount(model.parameters)} parameters, {count(model.blocks, 'block')}, "
        f"{count(model.sites, 'site')}, width {model.width}, placement {model.placement}, {run.precision}"
    )


def _amount(value: int) -> str:
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= unit:
            return f"{number(value / unit)}{name}"
    return str(value)


def _kind(record: SiteRecord) -> str:
    return _SHORT_KINDS.get(record.sublayer, record.sublayer)


def _block_columns(curve: depth.Profile, spread: Spread) -> list[_Column]:
    """Lay out a row a block; a block with several mixers or several feed-forward networks takes more rows."""
    rows: list[tuple[str, ...]] = []
    for index, unit in enumerate(curve.units):
        mixers = [record for record in unit if record.sublayer not in _FFN]
        ffns = [record for record in unit if record.sublayer in _FFN]
        first, last = unit[0], unit[-1]
        ends = (
            str(curve.label(index)),
            spread.cell(first, "stream_rms"),
            spread.cell(last, "sum_rms"),
            spread.cell(first, "grad_stream_norm"),
        )
        for line, (mixer, ffn) in enumerate(itertools.zip_longest(mixers, ffns)):
            block, stream, total, gradient = ends if line == 0 else ("", "", "", "")
            updates = (*_updates(mixer, spread), *_updates(ffn, spread))
            rows.append((block, _pair(mixer, ffn), stream, *updates, total, gradient))
    headings = (
        (curve.noun, 10),
        ("kinds", 3),
        ("stream\nRMS in", 5),
        ("mixer\nupdate", 7),
        ("/stream", 2),
        ("ffn\nupdate", 6),
        ("/stream", 1),
        ("sum\nRMS out", 9),
        ("gradient\nnorm in", 8),
    )
    return [
        _Column(heading, tuple(row[i] for row in rows), keep, text=heading == "kinds")
        for i, (heading, keep) in enumerate(headings)
    ]


def _pair(mixer: SiteRecord | None, ffn: SiteRecord | None) -> str:
    return "+".join(_kind(record) for record in (mixer, ffn) if record is not None)


def _updates(record: SiteRecord | None, spread: Spread) -> tuple[str, str]:
    return ("", "") if record is None else (spread.cell(record, "update_rms"), spread.cell(record, "update_ratio"))


def _site_columns(sites: Sequence[SiteRecord], spread: Spread) -> list[_Column]:
    def plain(record: SiteRecord, name: str) -> str:
        return _share(record.swallowed) if name == "swallowed" else _cosine(record.cosine)

    numbers = (
        ("stream\nRMS", 7, "stream_rms", spread.cell),
        ("update\nRMS", 8, "update_rms", spread.cell),
        ("sum\nRMS", 9, "sum_rms", spread.cell),
        ("update\n/stream", 5, "update_ratio", spread.cell),
        ("cosine", 1, "cosine", plain),
        ("lost in\nadding", 3, "swallowed", plain),
        ("add\nerror", 2, "add_error", spread.cell),
        ("grad\nnorm in", 6, "grad_stream_norm", spread.cell),
    )
    return [
        _Column("site", tuple(str(record.site) for record in sites), 10),
        _Column("block", tuple("-" if record.block is None else str(record.block) for record in sites), 4),
        _Column("kind", tuple(_kind(record) for record in sites), 5, text=True),
        *(_Column(heading, tuple(write(r, name) for r in sites), keep) for heading, keep, name, write in numbers),
    ]


def _cosine(value: float | None) -> str:
    return f"{value:.3f}" if value is not None and math.isfinite(value) else number(value)


def _share(value: float | None) -> str:
    return f"{100 * value:.1f}%" if value is not None and math.isfinite(value) else number(value)


def _print_columns(columns: list[_Column], console: Console) -> None:
    kept = list(columns)
    gap = next((gap for gap in _GAPS if _width(kept, gap) <= console.width), _GAPS[-1])
    while len(kept) > 1 and _width(kept, gap) > console.width:
        kept.remove(min(kept, key=lambda column: column.keep))
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for column in kept:
        table.add_column(column.heading, justify="left" if column.text else "right", no_wrap=True, vertical="bottom")
    for row in zip(*(column.cells for column in kept), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table, highlight=False)
    left_out = [name for column, name in zip(columns, _names(columns), strict=True) if column not in kept]
    if left_out:
        console.print(Text(f"Left out for want of width: {', '.join(left_out)}."), highlight=False)


def _names(columns: Sequence[_Column]) -> list[str]:
    """Write each heading on one line; one that repeats gets the word of the column that it belongs to, the one before."""
    headings = [column.heading for column in columns]
    return [
        " ".join([*headings[i - 1].split()[: headings.count(heading) > 1], *heading.split("\n")])
        for i, heading in enumerate(headings)
    ]


def _width(columns: Sequence[_Column], gap: int) -> int:
    return sum(column.width for column in columns) + gap * (len(columns) - 1)


def _print_findings(run: Run, console: Console) -> None:
    console.print()
    if not run.findings:
        console.print(Text("No findings."), highlight=False)
    for finding in run.findings:
        head = Text.assemble((finding.severity, _STYLES[finding.severity]), f" {finding.rule} {finding.name}")
        console.print(head, highlight=False)
        also = f"\nAlso: {', '.join(finding.also)}." if finding.also else ""
        # What a rule that has none says of that is for its page.
        source = f"\nSource: {finding.source}" if finding.source and not finding.source.startswith("None") else ""
        console.print(Padding(Text(f"{finding.message}\n{finding.remedy}{also}{source}"), (0, 0, 0, 2)), highlight=False)
    console.print()


def summary_lines(run: Run, curve: depth.Profile) -> list[str]:
    """Say in a few sentences what the table shows: growth over the depth, loss, engine, files.

    Parameters
    ----------
    run
        The run.
    curve
        Its :func:`propcheck.depth.profile`.

    Returns
    -------
    list of str
        One sentence or two a line.
    """
    lines = [
        *(line for stream in _grown(run, curve) for line in _growth_lines(stream)),
        _loss_line(run),
        _head_line(run),
        shadow_line(run),
        _seed_line(run, curve),
        _engine_line(run),
    ]
    counts = [(severity, sum(f.severity == severity for f in run.findings)) for severity in _STYLES]
    lines.append("Findings: " + ", ".join(count(amount, severity) for severity, amount in counts) + ".")
    lines += list(run.notes)
    if run.path is not None:
        lines.append(f"Files: {run.path}")
    return [line for line in lines if line]


def _grown(run: Run, curve: depth.Profile) -> list[depth.Profile]:
    """Return the streams whose growth is said: the only one, or of several those that run through blocks enough."""
    streams = depth.streams(run)
    return [one for one in streams if stream_growth(one) is not None] if len(streams) > 1 else [curve]


def _growth_lines(curve: depth.Profile) -> list[str]:
    normed = any(record.placement in depth.NORM_ON_STREAM for record in curve.sites)
    return [
        _growth_line("Stream RMS", "after", curve, stream_growth(curve), "", "" if normed else "updates of one size give 0.5"),
        _growth_line(
            "Gradient norm",
            "before",
            curve,
            gradient_growth(curve),
            " backward",
            "" if normed else "updates of one size give -0.5, of gated branches -1",
        ),
    ]


def _growth_line(name: str, side: str, curve: depth.Profile, growth: Growth | None, direction: str, usual: str) -> str:
    if growth is None:
        return f"{name}: not enough {curve.noun}s observed for a factor a {curve.noun}."
    law = f"; {growth.described(curve.noun)}" if growth.law is not None else ""
    beside = f" ({usual})" if usual and growth.law == "power" and growth.offset is not None else ""
    return (
        f"{name} {number(growth.start)} {side} {curve.noun} {growth.first}, {number(growth.end)} {side} {curve.noun} "
        f"{growth.last}: x{factor(growth.factor)} a {curve.noun}{direction}, x{number(growth.total)} over "
        f"{count(growth.steps, curve.noun)}{law}{beside}; growth exponent {number(growth.growth_exponent)}."
    )


def _loss_line(run: Run) -> str:
    value, uniform = run.loss.value, run.loss.uniform
    if value is None:
        return "Loss: not observed."
    lowest, highest = run.loss.lowest, run.loss.highest
    between = f" ({_loss(lowest)} to {_loss(highest)} over the seeds)" if lowest is not None and highest is not None else ""
    if uniform is None:
        return f"First loss {_loss(value)}{between}."
    return f"First loss {_loss(value)}{between}; a uniform guess has ln({round(math.exp(uniform))}) = {_loss(uniform)}."


def _head_line(run: Run) -> str:
    """Say how large the logits are, and the gradients of the token embedding and of the head."""
    loss = run.loss
    if loss.logit_std is None or loss.uniform is None:
        return ""
    vocabulary = round(math.exp(loss.uniform))
    rows = [p for p in run.parameters if p.block is None and p.shape[:1] == (vocabulary,) and len(p.shape) == 2]
    gradients = [
        f"{kind} {number(one.grad_norm)}"
        for kind, role in (("embedding", "embedding"), ("head", "linear"))
        if (one := next((p for p in rows if p.role == role), None)) is not None and one.grad_norm is not None
    ]
    tied = " (it is the head too)" if len(gradients) == 1 and any(" = " in p.name for p in rows) else ""
    more = f"; gradient norm of the {', of the '.join(gradients)}{tied}" if gradients else ""
    return f"Logits: std {number(loss.logit_std)} over the vocabulary, largest {number(loss.logit_absmax)}{more}."


def _loss(value: float) -> str:
    return f"{value:.3f}" if 0.01 < abs(value) < 1000 else number(value)


def _seed_line(run: Run, curve: depth.Profile) -> str:
    """Say how far seeds differ: the largest of (highest / lowest) over the sites, for the sum and for the gradient."""
    if len({record.seed for record in run.sites}) < 2:
        return ""
    parts = [
        f"{name} x{number(spread)} (site {where})"
        for name, column in (("sum RMS", "sum_rms"), ("gradient norm", "grad_stream_norm"))
        if (found := _widest(run, curve, column)) is not None
        for where, spread in [found]
    ]
    seeds = count(len({record.seed for record in run.sites}), "seed")
    return (
        f"Values are medians of {seeds}; the seeds differ by at most {', '.join(parts)}."
        if parts
        else f"Values are of {seeds}."
    )


def _widest(run: Run, curve: depth.Profile, column: str) -> tuple[int, float] | None:
    values: dict[int, list[float]] = {record.site: [] for record in curve.sites}
    for record in run.sites:
        value = getattr(record, column)
        if value is not None and 0 < value < math.inf:
            values[record.site].append(value)
    spreads = {where: max(found) / min(found) for where, found in values.items() if len(found) > 1}
    return max(spreads.items(), key=lambda item: item[1]) if spreads else None


def _engine_line(run: Run) -> str:
    engine, inputs = run.engine, run.inputs
    fed = f"{count(inputs.batch, 'sequence')} of {count(inputs.tokens, 'token')} ({inputs.source})"
    if inputs.source in _OTHER_SOURCES:
        fed = f"a batch of {inputs.batch} with {count(inputs.tokens, 'position')} each ({_OTHER_SOURCES[inputs.source]})"
    return (
        f"{engine.mode.capitalize()}, {fed}, "
        f"{count(len(run.seeds), 'seed')}: {number(engine.wall_seconds)} s on {engine.device} with "
        f"{count(engine.threads, 'thread')}, peak {number(engine.peak_rss_bytes / 2**30)} GiB."
    )
