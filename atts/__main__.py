"""The entry point of `python -m atts` and of the installed command `atts`."""

import gc
import signal
import sys

# Number of new objects after which Python collects garbage. With Python's default of 700 and
# thousands of engine calls running, garbage collection would take a third of the time.
_COLLECT_AFTER = 20_000


def main() -> None:
    """Run the command line, and exit with the exit code of the command.

    The current directory is removed from the import path, so its modules are never imported.
    """
    from atts.concurrency import import_path

    sys.path[:] = import_path()
    from atts.cli import run

    gc.set_threshold(_COLLECT_AFTER, 10, 10)
    code = run()
    # from here on, Ctrl-C could only change the exit code, so ignore it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    main()
