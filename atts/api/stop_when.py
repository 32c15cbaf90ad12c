"""The reader of `stop_when`: the earlier run and its votes, to which an evaluation is compared as
it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from atts.core import Problem
from atts.errors import DatasetError, OptionError
from atts.journal import Setting
from atts.run import StopWhen
from atts.sampling import Seed, generator


def drawn_order(problems: Sequence[Problem], seed: int) -> tuple[Problem, ...]:
    """The problems in an order that depends on the seed and on nothing else of theirs than how many
    they are.
    """
    places = generator(Seed(run=seed, purpose="order of problems")).permutation(len(problems))
    return tuple(problems[place] for place in places)


def read_stop_when(against: str | Path, stop_when: str) -> StopWhen:
    """What a run is compared with, and how near counts as alike.

    :raises OptionError: `stop_when` is not "decided" or "decided=POINTS".
    :raises JournalError: `against` holds no run.
    :raises DatasetError: it holds no graded results.
    """
    word, mark, points = stop_when.partition("=")
    try:
        near = float(points) if mark else 0.0
    except ValueError:
        near = -1.0
    if word != "decided" or not (0 < near <= 100 or not mark):
        raise OptionError(
            "stop_when", f"{stop_when!r} is not decided or decided=POINTS, such as decided=2"
        )
    from atts.analysis import read_results

    run = read_results(Path(against))
    return StopWhen(run.name, {name: one.vote for name, one in run.problems.items()}, near)


def common(problems: Sequence[Problem], found: StopWhen, seed: int) -> tuple[Problem, ...]:
    """The problems that can be compared, in the order in which they are taken.

    :raises DatasetError: there are none.
    """
    both = [problem for problem in problems if problem.id in found.votes]
    if not both:
        raise DatasetError(
            found.against,
            "it has graded none of the problems to be run",
            "Compare on the same problems",
        )
    return drawn_order(both, seed)


def comparison_setting(found: StopWhen) -> dict[str, Setting]:
    """What a resume must find unchanged of it."""
    votes = repr(sorted(found.votes.items())).encode()
    digest = blake2b(votes, digest_size=8).hexdigest()
    return {
        "until": Setting(
            {"against": digest, "points": found.points, "order": "drawn by seed"}, "--stop-when"
        )
    }
