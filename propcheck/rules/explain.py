"""Explanations of the rules, in Markdown: `propcheck rules ID` and docs/rules.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from propcheck.rules.registry import ALL, FAMILIES, find

if TYPE_CHECKING:
    from propcheck.rules.rule import Example, Rule

_HEAD = """\
# Rules

Generated from `propcheck/rules/` by `python docs/generate.py`; do not edit.

Severities:

- `error`: the model will not train, or does not compute what its code says.
- `warning`: published evidence ties this to instability or waste.
- `note`: worth knowing.

`--select PC201`, `--select PC2` (a family) and `--ignore` choose the rules. A table such as `[rules.PC204]` in a probe sets the
`threshold` and the `severity` of a rule."""


def explain(name: str) -> str:
    """Explain a rule in Markdown: what it detects, why it matters, its threshold and source, and what to do.

    Raises
    ------
    PropcheckError
        If there is no such rule. The message suggests the nearest.
    """
    rule = find(name)
    return "\n\n".join([f"## {rule.id} {rule.name}", *_paragraphs(rule)])


def markdown() -> str:
    """Render docs/rules.md: one heading per family, and a section per rule."""
    parts = [_HEAD]
    for prefix, title in FAMILIES.items():
        parts.append(f"## {prefix}xx {title}")
        for rule in ALL:
            if rule.id.startswith(prefix):
                parts += [f"### {rule.id} {rule.name}", *_paragraphs(rule)]
    return "\n\n".join(parts) + "\n"


def _paragraphs(rule: Rule) -> list[str]:
    threshold = f" Default threshold: {rule.threshold:g} ({rule.unit})."
    return [
        f"Default severity: {rule.severity}.{threshold}",
        f"**What it sees.** {rule.sees}",
        f"**Why it matters.** {rule.why}",
        *_example(rule.example),
        f"**What to do.** {rule.remedy}",
        f"**How it judges.** {rule.formula}",
        f"**How the threshold was chosen.** {rule.basis}",
        f"**Source.** {rule.source}",
    ]


def _example(example: Example) -> list[str]:
    return [
        f"**Example.** Broken:\n\n```{example.language}\n{example.broken}\n```",
        f"Repaired:\n\n```{example.language}\n{example.repaired}\n```",
    ]
