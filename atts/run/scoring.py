"""The scorecard of a run: pass@1, maj@k and pass@k of its finished problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atts.errors import UsageError
from atts.journal import FinishedProblem
from atts.pipelines import Grouper

if TYPE_CHECKING:
    from atts.evaluators import Samples, Scorecard


def scorecard(problems: Sequence[FinishedProblem], group: Grouper) -> Scorecard:
    """pass@1, maj@k, pass@k with their intervals, over the problems that have a reference.

    :raises UsageError: no problem was graded.
    """
    from atts.evaluators import score

    graded = samples(problems, group)
    if not graded:
        raise UsageError("no problem of this run was graded; problems need reference answers, and the plan a grader")
    return score(graded)


def samples(problems: Sequence[FinishedProblem], group: Grouper) -> list[Samples]:
    """Every graded problem as the metrics want it: verdicts, classes of equal answers, what became of each sample.

    Censored samples are left out: what they would have answered is unknown. What is left is of those that came first,
    so rates of single samples lean towards the quick; `early_stop="none"` measures without.
    """
    from atts.evaluators import samples_of

    found = (samples_of(problem.problem, problem.complete_samples, group) for problem in problems)
    return [held for held in found if held is not None]
