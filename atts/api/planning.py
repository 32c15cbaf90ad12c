"""The verb that turns recorded runs into advice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atts.api.reporting import directory_of
from atts.run import RunResult

if TYPE_CHECKING:
    from atts.analysis import Advice


def plan(
    runs: str | Path | RunResult | Sequence[str | Path | RunResult],
    *,
    target_tokens: float | None = None,
    tokens: float | None = None,
    seconds: float | None = None,
) -> Advice:
    """Which rate, samples, turns and chunk length, when a problem may take so much; several runs bring several rates.

    :raises JournalError: a directory holds no run, or one that cannot be read.
    :raises UsageError: a result kept in memory only, a run without a graded problem, runs of different problems, or a
        cap that is not positive.

    >>> import tempfile
    >>> from atts.api import Setup, evaluate_sync
    >>> from atts.testing import toy_problems
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     setup = Setup(draft="scripted", target="scripted")
    ...     advice = plan(evaluate_sync(toy_problems(3), setup, directory=folder), tokens=10_000)
    >>> advice.problems, advice.best is not None
    (3, True)
    """
    from atts.analysis import Cap, advise

    several = [runs] if isinstance(runs, str | Path | RunResult) else runs
    return advise([directory_of(run) for run in several], Cap(target_tokens, tokens, seconds))
