"""Whose error it is: one that the scanned code raised is shown with its file and line, not with ours or torch's."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

import torch

import propcheck
from propcheck.errors import PropcheckError

_OURS = str(Path(propcheck.__file__).parent) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep


class TargetError(PropcheckError):
    """An exception that the scanned code raised; its cause is the exception itself."""


def target_error(error: BaseException, target: str) -> TargetError | None:
    """Return an error of the scanned code as one line that names its place; None if the fault is propcheck's.

    Parameters
    ----------
    error
        What was raised while the code was imported, built or run.
    target
        What the user named, where no line of theirs was running: in the backward pass.
    """
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith(_OURS):
        return TargetError(f"{shown(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}")
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or (frames[-1].filename.startswith(_OURS) and not _hands_on(frames[-1])):
        return None
    theirs = [one for one in frames if not one.filename.startswith((_OURS, _TORCH, "<"))]
    theirs = [one for one in theirs if "site-packages" in one.filename or not one.filename.startswith(_STANDARD)]
    # In the user's own files, if any: what they call of an installed package says less about what to change.
    own = [one for one in theirs if "site-packages" not in one.filename] or theirs
    # The frames above ours are the caller's of propcheck.scan, not the target's.
    first = next((index for index, one in enumerate(frames) if one.filename.startswith(_OURS)), 0)
    inside = [one for one in own if one in frames[first:]]
    place = f"{shown(inside[-1].filename)}:{inside[-1].lineno}" if inside else target
    text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    return TargetError(f"{place}: {' '.join(text.split())}")


def _hands_on(frame: traceback.FrameSummary) -> bool:
    """Whether a line of ours only hands a call on: to the model, to what a mode intercepted, or to the backward pass."""
    return any(mark in (frame.line or "") for mark in ("(*args", "(**args", ".backward(", "exec_module"))


def shown(filename: str) -> str:
    """Return a file's name as seen from the working directory, whole if it lies elsewhere."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
