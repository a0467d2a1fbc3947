"""Make the task of the target that a probe names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from propcheck.config.probe import Probe
    from propcheck.targets.target import Task


def task_of(probe: Probe) -> Task:
    """Return the target of ``probe``, ready to be built.

    Raises
    ------
    PropcheckError
        If the target does not exist or cannot be built.
    """
    if probe.kind == "huggingface":
        from propcheck.targets.huggingface import huggingface_task

        return huggingface_task(probe)
    if probe.kind == "python":
        from propcheck.targets.python import python_task

        return python_task(probe)
    from propcheck.targets.decoder.task import decoder_task

    return decoder_task(probe)
