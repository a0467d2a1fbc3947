"""The table of a run, a row a block or a site, with findings and a summary under it; made for 80 columns.

Colours only repeat what words say, so that it reads the same on light and dark terminals, in a pipe and in a log.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from propcheck.analysis import profile as depth
from propcheck.analysis.growth import describe, factor, gradient_growth, stream_growth
from propcheck.formatting import count, number
from propcheck.render.terminal.columns import block_columns, one_line_names, site_columns
from propcheck.render.terminal.fp32_line import shadow_line
from propcheck.render.terminal.seed_spread import Spread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from propcheck.records import Finding, Growth, Run, Severity
    from propcheck.render.terminal.columns import Column

_STYLES: dict[Severity, str] = {"error": "bold red", "warning": "bold magenta", "note": "bold"}
# Inputs that are no token ids from the probe.
_OTHER_SOURCES = {"target": "the target's own", "normal": "drawn from N(0, 1)"}
# Characters between columns, the wider where everything fits.
_GAPS = (2, 1)


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
    console.print(Text(title(run)), highlight=False)
    if curve.sites:
        spread = Spread(run)
        columns = site_columns(curve.sites, spread) if detail == "site" else block_columns(curve, spread)
        print_columns(columns, console)
    console.print()
    print_findings(run.findings, console)
    for line in summary_lines(run, curve):
        console.print(Text(line), highlight=False)


def title(run: Run) -> str:
    """Say in one line what was scanned: target, class, size, placement, precision."""
    model = run.model
    # Where only the rows of the sites were kept, nothing is known of the rest.
    whole = f"{model.class_name}, {_amount(model.parameters)} parameters" if model.parameters else "sites alone"
    return (
        f"{run.target}: {whole}, {count(model.blocks, 'block')}, "
        f"{count(model.sites, 'site')}, width {model.width}, placement {model.placement}, {run.precision}"
    )


def _amount(value: int) -> str:
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if value >= unit:
            return f"{number(value / unit)}{name}"
    return str(value)


def print_columns(columns: Sequence[Column], console: Console) -> None:
    """Print columns side by side; what does not fit is dropped and named under them."""
    kept = list(columns)
    gap = next((gap for gap in _GAPS if _width(kept, gap) <= console.width), _GAPS[-1])
    while len(kept) > 1 and _width(kept, gap) > console.width:
        least = min(column.keep for column in kept)
        others = [column for column in kept if column.keep > least]
        # Of the last ones that go together as many stay as there is room for.
        kept = others if len(others) > 1 else kept[:-1]
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False, header_style="bold")
    for column in kept:
        table.add_column(column.heading, justify="left" if column.text else "right", no_wrap=True, vertical="bottom")
    for row in zip(*(column.cells for column in kept), strict=True):
        table.add_row(*(Text(cell) for cell in row))
    console.print(table, highlight=False)
    left_out = [name for column, name in zip(columns, one_line_names(columns), strict=True) if column not in kept]
    if left_out:
        console.print(Text(f"Left out for want of width: {', '.join(left_out)}."), highlight=False)


def _width(columns: Sequence[Column], gap: int) -> int:
    return sum(column.width for column in columns) + gap * (len(columns) - 1)


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Print findings with what to do and their sources, and an empty line after them."""
    if not findings:
        console.print(Text("No findings."), highlight=False)
    for finding in findings:
        head = Text.assemble((finding.severity, _STYLES[finding.severity]), f" {finding.rule} {finding.name}")
        console.print(head, highlight=False)
        also = f"\nAlso: {', '.join(finding.also)}." if finding.also else ""
        # What a rule that has none says of that is for its page.
        source = f"\nSource: {finding.source}" if finding.source and not finding.source.startswith("None") else ""
        remedy = f"\n{finding.remedy}" if finding.remedy else ""
        console.print(Padding(Text(f"{finding.message}{remedy}{also}{source}"), (0, 0, 0, 2)), highlight=False)
    console.print()


def summary_lines(run: Run, curve: depth.Profile) -> list[str]:
    """Say in a few sentences what the table shows: growth over the depth, loss, engine, files.

    Parameters
    ----------
    run
        The run.
    curve
        Its :func:`propcheck.analysis.profile.profile`.

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
    law = f"; {describe(growth, curve.noun)}" if growth.law is not None else ""
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
