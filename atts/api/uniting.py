"""The verb that makes one run of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from atts.api.reporting import directory_of
from atts.run import Merged, RunResult
from atts.run import merge as merge_runs


def merge(runs: Sequence[str | Path | RunResult], out: str | Path) -> Merged:
    """Put the shards of an evaluation together in a new directory: what one process would have left there.

    With a gate that learns nothing it is the same, decision by decision; gates that learn have each learnt from their
    own shard, and the rate is held in every one of them.

    :raises UsageError: they are not the shards of one evaluation, all over; or a result was kept in memory only.
    :raises FingerprintError: they ran under different settings.
    :raises JournalError: one cannot be read, or `out` not be written.

    >>> import tempfile
    >>> from atts.api import Setup, evaluate_sync
    >>> from atts.testing import toy_problems
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     setup, problems = Setup(draft="scripted", target="scripted"), toy_problems(5)
    ...     parts = [
    ...         evaluate_sync(problems, setup, shard=f"{number}/2", directory=f"{folder}/{number}") for number in (1, 2)
    ...     ]
    ...     merge(parts, f"{folder}/all").problems
    5
    """
    return merge_runs([directory_of(run) for run in runs], Path(out))
