"""The one exception that reaches the user as a single line."""

from __future__ import annotations


class PropcheckError(Exception):
    """A bad target, option or file.

    The message is one line that names the file, the key and what would be right. The command line prints it on
    stderr and ends with status 2; no traceback unless ``--debug``.
    """
