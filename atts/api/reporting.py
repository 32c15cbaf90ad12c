"""The verbs that turn a run into something to look at: a report, a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atts.errors import UsageError
from atts.run import RunResult

if TYPE_CHECKING:
    from atts.analysis import Format


def report(
    run: str | Path | RunResult,
    *,
    format: Format = "html",
    against: Sequence[str | Path | RunResult] = (),
    out: str | Path | None = None,
) -> Path:
    """Write the report of a run, finished or not, and say where it is: `report.html` in its directory unless told.

    `format` is "html" (one file, no network), "markdown" or "json", from the same numbers; `against` are runs to
    compare with, problem by problem.

    :raises OptionError: for an unknown format.
    :raises UsageError: for a result that was kept in memory only.
    :raises JournalError: a directory holds no run, or one that cannot be read.

    >>> import tempfile
    >>> from atts.api import Setup, evaluate_sync
    >>> from atts.testing import toy_problems
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     setup = Setup(draft="scripted", target="scripted")
    ...     result = evaluate_sync(toy_problems(2), setup, directory=folder)
    ...     report(result).name, report(folder, format="markdown").name
    ('report.html', 'report.md')
    """
    from atts.analysis import write_report

    others = [directory_of(other) for other in against]
    return write_report(directory_of(run), format, None if out is None else Path(out), others)


def trace(run: str | Path | RunResult, out: str | Path | None = None) -> Path:
    """Write the run's task graph as Chrome trace JSON, which ui.perfetto.dev opens; `trace.json` in its directory.

    :raises UsageError: for a result that was kept in memory only.
    :raises JournalError: there is no run, or it cannot be read.
    :raises StorageError: the disk refuses.
    """
    from io import StringIO

    from atts.analysis import read_nodes
    from atts.files import write_atomic
    from atts.graph import write_trace

    directory, text = directory_of(run), StringIO()
    write_trace(read_nodes(directory), text)
    path = directory / "trace.json" if out is None else Path(out)
    write_atomic(path, text.getvalue().encode())
    return path


def directory_of(run: str | Path | RunResult) -> Path:
    """Where a run is kept.

    :raises UsageError: in memory only.
    """
    if not isinstance(run, RunResult):
        return Path(run)
    if run.directory is None:
        raise UsageError("this run was kept in memory only; give `evaluate` a directory to have a report of it")
    return run.directory
