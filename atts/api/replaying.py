"""Replay of a recorded run under another policy, without a model."""

from __future__ import annotations

from dataclasses import replace as changed
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atts.api.calibrating import setup_of
from atts.api.recorded import directory_of
from atts.api.setup import CalibrationMode, grade
from atts.core import Problem
from atts.journal import open_run
from atts.pipelines import Gate, RoundGate, VoteKind
from atts.run import RunResult

if TYPE_CHECKING:
    from atts.analysis import Replay


def replay(
    run: str | Path | RunResult,
    *,
    method: str | None = None,
    rate: float | None = None,
    mode: CalibrationMode | None = None,
    samples: int | None = None,
    turns: int | None = None,
    vote: VoteKind | None = None,
    budget: int | None = None,
    gate: Gate | RoundGate | None = None,
    seed: int | None = None,
) -> Replay:
    """Decide anew on every recorded score and vote again; what is not said stays as it was recorded.

    `budget` is the most takeovers by the target per problem, in the order in which decisions were taken; `gate` must be
    fresh, for it learns from this replay.

    :raises OptionError: an unknown method, mode or vote, more samples or turns than were recorded, a negative budget.
    :raises JournalError: there is no run, or it cannot be read.

    >>> import tempfile
    >>> from atts.api import Setup, evaluate_sync
    >>> from atts.testing import toy_problems
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     setup = Setup(draft="scripted", target="scripted", rate=0.3)
    ...     result = evaluate_sync(toy_problems(2), setup, directory=folder)
    ...     same, none = replay(result), replay(result, method="draft-only")
    >>> same.changed, none.replayed.rate.value, none.changed == none.recorded.decisions
    (0, 0.0, False)
    """
    from atts.analysis import PolicyChange, replay_run

    recorded = open_run(directory_of(run))
    setup = setup_of(recorded.manifest)
    options: dict[str, Any] = {"method": method, "rate": rate, "mode": mode, "seed": seed}
    given = {name: value for name, value in options.items() if value is not None}

    def fresh_gate(samples: int) -> Gate | RoundGate:
        return gate or changed(setup, policy=changed(setup.policy, samples=samples), **given).decider()[0]

    return replay_run(recorded, PolicyChange(samples, turns, vote, budget), fresh_gate, _graded)


def _graded(answer: str, problem: Problem) -> float | None:
    status = grade(answer, problem).status
    return None if status == "unscored" else float(status == "equal")
