"""The exception for bad targets, options and files, which reaches the user as one line."""

from __future__ import annotations


class PropcheckError(Exception):
    """A bad target, option or file.

    The message is one line that names the file and the key and says what would be right. The command line prints it on
    stderr and exits with status 2; it prints a traceback only with ``--debug``.
    """
