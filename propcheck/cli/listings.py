"""``propcheck probes``, ``propcheck rules`` and ``propcheck keys``: list what a command can name."""

from __future__ import annotations

from typing import Annotated

import typer

from propcheck.cli.console import write_stdout


def probes() -> None:
    """List the bundled probes."""
    from propcheck.config.probe import load_probe
    from propcheck.config.resolve import bundled_probes

    loaded = {name: load_probe(name) for name in bundled_probes()}
    width = max(map(len, loaded))
    write_stdout("".join(f"{name:<{width}}  {probe.description}\n" for name, probe in loaded.items()))


def rules(
    rule: Annotated[str | None, typer.Argument(metavar="[ID]", help="Explain this rule, given by id or name.")] = None,
) -> None:
    """List the rules, or explain one: what it detects, why it matters, its threshold and source, and the remedy (Markdown)."""
    from propcheck.comparison.gate_findings import CHECKS
    from propcheck.rules import ALL, explain

    if rule in CHECKS:
        write_stdout(f"{rule}: {CHECKS[rule]} A check of `propcheck gate`.\n")
    elif rule is not None:
        write_stdout(explain(rule) + "\n")
    else:
        width = max(len(listed.name) for listed in ALL)
        write_stdout("".join(f"{listed.id}  {listed.name:<{width}}  {listed.severity}\n" for listed in ALL))


def keys() -> None:
    """Print every key of a probe file with its type, default and meaning (Markdown)."""
    from propcheck.config.probe import Probe
    from propcheck.config.schema_docs import page

    write_stdout(page(Probe))
