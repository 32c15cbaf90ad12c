"""The entry point of `python -m atts` and of the installed command `atts`."""

import gc
import signal
import sys

# number of new objects between two garbage collections. With Python's default of 700 and thousands
# of calls in flight, collections would take a third of the time.
_COLLECT_AFTER = 20_000


def main() -> None:
    """Run the command line of this process, and exit with the exit code of the command. Modules in
    the current directory are never imported.
    """
    from atts.concurrency import import_path

    sys.path[:] = import_path()
    from atts.cli import run

    gc.set_threshold(_COLLECT_AFTER, 10, 10)
    code = run()
    # ignore Ctrl-C from here on, because it could only change the exit code
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


if __name__ == "__main__":
    main()
