"""Comparisons and gates as strict JSON."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from propcheck.analysis.growth import with_growth
from propcheck.records import SCHEMA_VERSION
from propcheck.records.document import dumps, run_document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from propcheck.comparison.compare import PairwiseComparison, RunComparison
    from propcheck.comparison.differences import Difference
    from propcheck.comparison.gate import GateResult
    from propcheck.records import Finding, Run

_ALONG = ("stream_rms", "update_rms", "sum_rms", "update_ratio", "grad_stream_norm", "grad_update_norm", "param_grad_norm")


def comparison_to_json(comparison: RunComparison) -> str:
    """Write a comparison: ``runs``, ``contrasts`` (each run against the first) and ``rows`` (all runs along the depth)."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "tolerance": comparison.tolerance,
        "runs": [_run(run, label) for label, run in zip(comparison.labels, comparison.runs, strict=True)],
        "contrasts": [_contrast(contrast) for contrast in comparison.contrasts],
        "rows": [
            {
                comparison.noun: row.label,
                "relative_depth": row.at,
                "sites": {
                    label: [
                        {name: getattr(site, name) for name in ("site", "block", "sublayer", "module", *_ALONG)}
                        for site in sites
                    ]
                    for label, sites in zip(comparison.labels, row.sites, strict=True)
                },
            }
            for row in comparison.rows
        ],
    }
    return dumps(document)


def gate_to_json(gate: GateResult) -> str:
    """Write a gate: whether it ``passed``, where the change starts, its findings, and every number outside its tolerance."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "passed": gate.passed,
        "start": None if gate.start is None else dataclasses.asdict(gate.start),
        "run": _run(gate.run),
        "baseline": _run(gate.baseline),
        "tolerance": gate.tolerance,
        "written": gate.written,
        "compared": dict(gate.compared),
        "allowed": {name: _range(allowed) for name, allowed in gate.allowed.items()},
        "findings": [dataclasses.asdict(finding) for finding in gate.findings],
        "differences": [_difference(difference) for difference in gate.differences],
        "versions": list(gate.versions),
        "notes": list(gate.notes),
    }
    return dumps(document)


def _run(run: Run, label: str | None = None) -> dict[str, Any]:
    document = run_document(with_growth(run))
    del document["schema_version"]
    return {**({} if label is None else {"label": label}), **document.pop("run"), **document}


def _contrast(contrast: PairwiseComparison) -> dict[str, Any]:
    shared = contrast.parameters
    return {
        "run": contrast.label,
        "relative_depth": contrast.relative,
        "start": None if contrast.start is None else dataclasses.asdict(contrast.start),
        "settings": [{"key": key, "first": there, "here": here} for key, there, here in contrast.settings],
        "changes": [
            {
                "quantity": change.quantity,
                "compared": change.compared,
                "differing": change.differing,
                "allowed": _range(change.allowed),
                "first": None if change.first is None else _difference(change.first),
                "most": None if change.most is None else _difference(change.most),
            }
            for change in contrast.changes
        ],
        "parameters": {
            "both": len(shared.pairs) + len(shared.regrouped),
            "missing": [parameter.name for parameter in shared.missing],
            "new": [parameter.name for parameter in shared.new],
        },
        "findings": {"won": _listed(contrast.new_findings), "lost": _listed(contrast.gone_findings)},
        "notes": list(contrast.notes),
    }


def _range(allowed: tuple[float, float]) -> dict[str, float]:
    return {"least": allowed[0], "most": allowed[1]}


def _listed(findings: Sequence[Finding] | None) -> list[dict[str, Any]] | None:
    return None if findings is None else [dataclasses.asdict(finding) for finding in findings]


def _difference(difference: Difference) -> dict[str, Any]:
    place = dataclasses.asdict(difference.place)
    return {"quantity": difference.quantity, "how": difference.kind, **place, **{
        name: getattr(difference, name) for name in ("baseline", "value", "ratio", "tolerance")
    }}  # fmt: skip
