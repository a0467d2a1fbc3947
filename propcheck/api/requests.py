"""Turn a target and its options into a request: the probe with all defaults, and the rules that judge it.

``[tool.propcheck]`` of the pyproject.toml in the working directory supplies defaults here, for every front.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from propcheck import rules
from propcheck.config.probe import load_probe
from propcheck.config.pyproject import ToolSettings, read_settings
from propcheck.config.resolve import Source
from propcheck.errors import PropcheckError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from propcheck.api.options import ScanOptions
    from propcheck.config.probe import Probe
    from propcheck.progress import Progress
    from propcheck.targets.target import Task


@dataclass(frozen=True, slots=True)
class ScanRequest:
    """A target that is ready to be scanned."""

    target: str  # as the user named it
    probe: Probe  # with overrides and defaults applied
    task: Callable[[Probe], Task] | None = None  # returns what is run; None: what the probe names
    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    threads: int | None = None
    settings: ToolSettings = field(default_factory=ToolSettings)
    command: str | None = None
    progress: Progress | None = None

    @property
    def directory(self) -> Path:
        """The default run directory."""
        return Path(self.settings.out or Path("reports") / self.probe.name)


def scan_request(target: Any, options: ScanOptions, settings: ToolSettings | None = None) -> ScanRequest:
    """Read a target, as :func:`propcheck.scan` takes it, and check everything that can be checked before the scan.

    ``settings`` is ``[tool.propcheck]``; default: that of the working directory.

    Raises
    ------
    PropcheckError
        The target, a key, a value or a rule is wrong.
    """
    settings = settings or read_settings(Path.cwd())
    named = isinstance(target, str)
    probe = load_probe(target if named else _source(target), options.overrides, settings.defaults)
    select, ignore = options.select or settings.select, options.ignore or settings.ignore
    check_rules(probe, (*select, *ignore))
    return ScanRequest(
        target=target if named else probe.python.target,
        probe=probe,
        task=None if named and not options.arguments else _python_task(target, options),
        select=select,
        ignore=ignore,
        threads=options.threads or settings.threads,
        settings=settings,
        command=options.command,
        progress=options.progress,
    )


def check_rules(probe: Probe, names: Sequence[str]) -> None:
    """Refuse unknown rules, and thresholds that a rule cannot use."""
    rules.chosen(names)
    for name, setting in probe.rules.items():
        rule, threshold = rules.find(name), setting.threshold
        if threshold is None:
            continue
        if not rule.threshold:
            raise PropcheckError(f"rules.{name}.threshold: {rule.id} has no threshold; remove the key")
        if not threshold > rule.least:
            unit = rule.unit.partition(";")[0]
            raise PropcheckError(f"rules.{name}.threshold = {threshold:g} must be above {rule.least:g} ({unit})")


def _source(target: object) -> Source:
    """Describe an in-process target: its keys only say what it was."""
    name = getattr(target, "__qualname__", None) or type(getattr(target, "model", target)).__qualname__
    module = getattr(target, "__module__", "__main__")
    return Source(name, {"name": "run", "python": {"target": f"{module}:{name}"}})


def _python_task(target: Any, options: ScanOptions) -> Callable[[Probe], Task]:
    def task(probe: Probe) -> Task:
        from propcheck.targets.python import python_task

        # A sweep varies arguments of the probe; those given by the call may be objects that a probe cannot hold.
        return python_task(probe, None if isinstance(target, str) else target, {**probe.python.args, **options.arguments})

    return task
