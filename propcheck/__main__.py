"""Entry point of the ``propcheck`` command, and of ``python -m propcheck``."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being imported ends it with status 130, as later."""
    try:
        from propcheck.cli.app import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
