"""The entry point of `python -m atts` and of the installed `atts`."""

import gc
import signal
import sys

# number of new objects between collections; with Python's 700 and thousands of calls in flight, a
# third of the time would go into collections
_COLLECT_AFTER = 20_000


def main() -> None:
    """Run the command line of this process and exit with its code; import nothing from the current
    directory.
    """
    from atts.concurrency import import_path

    sys.path[:] = import_path()
    from atts.cli import run

    gc.set_threshold(_COLLECT_AFTER, 10, 10)
    code = run()
    # after this line, a Ctrl-C would only change the exit code
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    main()
