"""The entry point of `python -m atts` and of the installed command `atts`."""

import gc
import signal
import sys

# Python's garbage collector runs after this many new objects. At Python's default of 700, it would
# take a third of the time of a run with thousands of engine calls.
_COLLECT_AFTER = 20_000


def main() -> None:
    """Run the command line, and exit with the command's exit code.

    The current directory is removed from the import path, so that no Python file in it is imported
    by accident.
    """
    from atts.concurrency import import_path

    sys.path[:] = import_path()
    from atts.cli import run

    gc.set_threshold(_COLLECT_AFTER, 10, 10)
    code = run()
    # The command has ended. Ctrl-C could now only change the exit code, so ignore it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    main()
