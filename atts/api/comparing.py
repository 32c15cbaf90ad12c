"""The verb that sets two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from atts.api.reporting import directory_of
from atts.run import RunResult

if TYPE_CHECKING:
    from atts.analysis import Compared


def compare(first: str | Path | RunResult, second: str | Path | RunResult) -> Compared:
    """The second run against the first, problem by problem: run directories, results in JSONL files, or results.

    :raises JournalError: a directory holds no run, or one that cannot be read.
    :raises DatasetError: a file holds no results, or the two have no graded problem in common.
    :raises UsageError: for a result that was kept in memory only.

    >>> import tempfile
    >>> from atts.api import Setup, evaluate_sync
    >>> from atts.testing import toy_problems
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     def run(method: str) -> RunResult:
    ...         setup = Setup(draft="scripted", target="scripted", method=method)
    ...         return evaluate_sync(toy_problems(2), setup, directory=f"{folder}/{method}")
    ...     compare(run("target-only"), run("atts")).problems
    2
    """
    from atts.analysis import compare, read_side

    return compare(*(read_side(directory_of(one)) for one in (first, second)))
