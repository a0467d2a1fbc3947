"""``[tool.propcheck]`` in the pyproject.toml of the working directory: defaults for the options of ``propcheck scan``."""

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
    """The keys of the table: those of a probe's ``[scan]``, and the command line's own."""

    out: str | None = Field(None, description="Directory of the run; relative to the pyproject.toml.")
    fail_level: Literal["error", "warning", "note", "never"] = Field(
        "error", alias="fail-level", description="Least severity that gives status 1."
    )
    detail: Literal["block", "site"] = Field("block", description="What a row of the table is.")
    select: tuple[str, ...] = Field((), description="Ids or names of the only rules to judge by.")
    ignore: tuple[str, ...] = Field((), description="Ids or names of rules to leave out.")
    rules: dict[RuleId, RuleSettings] = Field(default_factory=dict, description="How one rule judges, e.g. `[rules.PC204]`.")
    gate: GateConfig = Field(default_factory=GateConfig, description="By how much a run may differ from its baseline.")
    threads: int | None = Field(None, ge=1, le=1024, description="Threads; default: as many as torch takes.")

    @property
    def scan(self) -> dict[str, Any]:
        """The keys of ``[scan]`` that the table gives; a probe file that has one overrules it."""
        return self.model_dump(include=self.model_fields_set & set(ScanConfig.model_fields))

    @property
    def defaults(self) -> dict[str, dict[str, Any]]:
        """What the table gives for the sections of a probe."""
        return {"scan": self.scan, "rules": self.judging, "gate": self.gate.model_dump(exclude_unset=True)}

    @property
    def judging(self) -> dict[str, Any]:
        """The tables of rules; one of the same rule in the probe overrules it."""
        return {id_: rule.model_dump(exclude_none=True) for id_, rule in self.rules.items()}


def read_settings(folder: Path) -> ToolSettings:
    """Read the table; all defaults where there is no file or no table. ``PropcheckError`` when it is wrong."""
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
