"""Read ``[tool.propcheck]`` from the pyproject.toml of the working directory: defaults for every scan, gate and sweep."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from propcheck.config.probe import GateConfig, RuleId, RuleSettings, ScanConfig
from propcheck.config.schema_docs import explain
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from pathlib import Path


class ToolSettings(ScanConfig):
    """The keys of the table: those of ``[scan]`` in a probe, and some of its own."""

    out: str | None = Field(None, description="Run directory, relative to the pyproject.toml.")
    fail_level: Literal["error", "warning", "note", "never"] = Field(
        "error", alias="fail-level", description="Lowest severity that makes the command exit with status 1."
    )
    detail: Literal["block", "site"] = Field("block", description="One row of the table per block or per site.")
    select: tuple[str, ...] = Field((), description="Apply only these rules: ids, names or families such as PC1.")
    ignore: tuple[str, ...] = Field((), description="Skip these rules: ids, names or families such as PC1.")
    rules: dict[RuleId, RuleSettings] = Field(default_factory=dict, description="Threshold and severity, e.g. `[rules.PC204]`.")
    gate: GateConfig = Field(default_factory=GateConfig, description="How much a run may differ from its baseline.")
    threads: int | None = Field(None, ge=1, le=1024, description="Number of threads; default: chosen by torch.")

    @property
    def defaults(self) -> dict[str, dict[str, Any]]:
        """Defaults for the sections of a probe; the keys of the probe win."""
        return {
            "scan": self.model_dump(include=self.model_fields_set & set(ScanConfig.model_fields)),
            "rules": {id_: rule.model_dump(exclude_none=True) for id_, rule in self.rules.items()},
            "gate": self.gate.model_dump(exclude_unset=True),
        }


def read_settings(folder: Path) -> ToolSettings:
    """Read the table; without a file or a table, every key has its default.

    Raises
    ------
    PropcheckError
        The file cannot be read, or a key or value is wrong.
    """
    path = folder / "pyproject.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get("propcheck", {})
    except FileNotFoundError:
        return ToolSettings()
    except (OSError, ValueError, AttributeError) as error:  # ValueError: not TOML, not UTF-8; AttributeError: tool = 1
        raise PropcheckError(f"{path}: cannot be read: {error}") from error
    try:
        return ToolSettings.model_validate(table)
    except ValidationError as error:
        _, message = explain(error, ToolSettings)
        raise PropcheckError(f"{path}: [tool.propcheck]: {message}") from error
