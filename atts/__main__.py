"""Runs the command line: `python -m atts` and the installed `atts`."""

import sys


def main() -> None:
    """Run the command line of this process and exit with its code."""
    from atts.cli.app import run

    sys.exit(run())


if __name__ == "__main__":
    main()
