"""From the lines of a result to the rates of its scorecard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atts.errors import UsageError
from atts.pipelines.votes import Grouper
from atts.run.result import ProblemLine, SampleLine

if TYPE_CHECKING:
    from atts.evaluators import Samples, Scorecard


def scorecard(lines: Sequence[ProblemLine], group: Grouper) -> Scorecard:
    """pass@1, maj@k, pass@k with their intervals, over the problems that have a reference.

    :raises UsageError: no problem was graded.
    """
    from atts.evaluators import score

    graded = samples(lines, group)
    if not graded:
        raise UsageError("no problem of this run was graded; problems need reference answers, and the plan a grader")
    return score(graded)


def samples(lines: Sequence[ProblemLine], group: Grouper) -> list[Samples]:
    """Every graded problem as the metrics want it: verdicts, classes of equal answers, what became of each sample.

    Samples that a settled vote spared are left out: nobody knows what they would have answered. What is left is of
    those that came first, so rates of single samples lean towards the quick; `early_stop="none"` measures without.
    """
    from atts.evaluators import Samples, status_of

    kept = [(line.problem, [sample for sample in line.samples if not sample.is_censored]) for line in lines]
    return [
        Samples(
            problem,
            tuple(_correct(sample) for sample in ended),
            _labels(ended, group),
            tuple(status_of(sample.answer, sample.finish, sample.verdict, sample.rule) for sample in ended),
        )
        for problem, ended in kept
        if ended and all(sample.verdict is not None for sample in ended)
    ]


def _labels(lines: Sequence[SampleLine], group: Grouper) -> tuple[int | None, ...]:
    classes = iter(group([line.answer for line in lines if line.answer is not None]))
    return tuple(None if line.answer is None else next(classes) for line in lines)


def _correct(line: SampleLine) -> bool | None:
    if line.verdict == "unscored":
        return None
    return line.verdict == "correct"
