"""Attribute an exception to the scanned code, and show it with the file and line of that code."""

from __future__ import annotations

import os
import sysconfig
import traceback
from pathlib import Path

import torch

from propcheck.errors import PropcheckError

_PROPCHECK = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep


class TargetError(PropcheckError):
    """An exception that the scanned code raised; its cause is that exception."""


def target_error(error: BaseException, target: str) -> TargetError | None:
    """Return an exception of the scanned code as one line with its file and line; None if propcheck itself failed.

    Parameters
    ----------
    error
        The exception that was raised while the code was imported, built or run.
    target
        The target as the user named it, for an exception outside the user's lines: in the backward pass.
    """
    if isinstance(error, SyntaxError) and error.filename and not error.filename.startswith(_PROPCHECK):
        return TargetError(f"{display_path(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}")
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or (_is_propcheck(frames[-1]) and not _calls_target(frames[-1])):
        return None
    # Frames before the first of propcheck belong to the caller of propcheck.scan.
    first = next((index for index, frame in enumerate(frames) if _is_propcheck(frame)), 0)
    target_frames = [frame for frame in frames[first:] if _is_target(frame)]
    # Name the user's own files if possible: a line of an installed package says less about what to change.
    user_frames = [frame for frame in target_frames if not _is_installed(frame)] or target_frames
    place = f"{display_path(user_frames[-1].filename)}:{user_frames[-1].lineno}" if user_frames else target
    text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    return TargetError(f"{place}: {' '.join(text.split())}")


def _is_propcheck(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_PROPCHECK)


def _is_installed(frame: traceback.FrameSummary) -> bool:
    return "site-packages" in frame.filename


def _is_target(frame: traceback.FrameSummary) -> bool:
    """Return whether the frame is of the user's code or of a package other than torch and the standard library."""
    if frame.filename.startswith((_PROPCHECK, _TORCH, "<")):
        return False
    return _is_installed(frame) or not frame.filename.startswith(_STANDARD_LIBRARY)


def _calls_target(frame: traceback.FrameSummary) -> bool:
    """Return whether a line of propcheck only forwards a call: to the model, an intercepted function or the backward pass."""
    return any(mark in (frame.line or "") for mark in ("(*args", "(**args", "(*self.args", ".backward(", "exec_module"))


def display_path(filename: str) -> str:
    """Return a path relative to the working directory; unchanged if it lies elsewhere."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
