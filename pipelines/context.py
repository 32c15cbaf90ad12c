"""The context of a pipeline: engines, a gate, answers, a seed, and a listener."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from atts.core import (
    Chunk,
    Combine,
    CombinePlan,
    Problem,
    Role,
    Rollout,
    SampleRequest,
    ScoreRequest,
    Scores,
    Turn,
)
from atts.engine import Engine
from atts.graph import Caller
from atts.pipelines.gates import Gate, RoundGate
from atts.pipelines.speeds import DraftLength, WriterChoice
from atts.pipelines.votes import Grouper


async def _nothing_to_prepare(answers: Sequence[str | None]) -> None:
    """Do nothing: these answers are grouped at once."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Plain functions: the final answer of a reasoning text (None: none yet), and classes of equal
    answers.

    An answer that `extract` finds ends its rollout, so it must not guess. `extract_finished` may:
    it reads a text that its model has ended and that holds no marked answer. `unmarked` says how
    much of a text without an answer holds none however the text continues: it is not read again.
    `prepare` is awaited before `group` sees a new answer, so that `group` itself need not wait for
    anything.
    """

    extract: Callable[[str], str | None]
    group: Grouper
    unmarked: Callable[[str], int] = lambda text: 0
    extract_finished: Callable[[str], str | None] = lambda text: None
    prepare: Callable[[Sequence[str | None]], Awaitable[None]] = _nothing_to_prepare
    # makes the functions of one problem, where classes of answers depend on it; None: these are all
    for_problem: Callable[[Problem], Answers] | None = None

    def of(self, problem: Problem) -> Answers:
        """Return the functions for this problem."""
        return self if self.for_problem is None else self.for_problem(problem)


class RolloutListener(Protocol):
    """A listener to facts as they happen; it must not block."""

    def written(self, rollout: Rollout, chunk: Chunk) -> None:
        """Hear that a chunk was written after `rollout`; it may still be judged and discarded."""
        ...

    def turned(self, rollout: Rollout, turn: Turn) -> None:
        """Hear that a turn entered the rollout and will not change."""
        ...


class NullListener:
    """A listener that ignores everything."""

    def written(self, rollout: Rollout, chunk: Chunk) -> None:
        """Ignore it."""

    def turned(self, rollout: Rollout, turn: Turn) -> None:
        """Ignore it."""


class RunLength:
    """The remaining decisions of a run; this base class stands for a run of unknown size."""

    @property
    def share(self) -> float | None:
        """Return the expected share of the run's decisions that are left, the next one included;
        None if not known.
        """
        return None


class Planner(Protocol):
    """Decides what is done about a problem after its vote; `Combiner` decides so for a run."""

    def plan(self, kind: Combine, share: float, answers: int) -> CombinePlan:
        """Return the plan for a vote whose leading answer has this share, among so many answers."""
        ...


class SplitPlanner:
    """A planner that takes every vote that is not unanimous for split, and learns nothing."""

    def plan(self, kind: Combine, share: float, answers: int) -> CombinePlan:
        """Return the plan; "auto" selects."""
        if kind == "vote" or answers < 2:
            return CombinePlan("vote", why="the rollouts agree")
        return CombinePlan("select" if kind == "auto" else kind)


class RolloutEngine(Engine, Protocol):
    """An engine as one rollout calls it: admitted, timed, checked, tried again, perhaps recorded."""

    has_recorded_calls: bool  # an earlier session recorded calls of this problem

    def recorded_scores(self, request: ScoreRequest) -> Scores | None:
        """Return the record of this call by an earlier session, without using it up."""
        ...

    def recorded_length(self, request: SampleRequest) -> int:
        """Return the number of tokens, at most the request's, that an earlier session asked for
        here; 0 if it did not ask.
        """
        ...


EngineBinder = Callable[[Engine, Role, Caller, float], RolloutEngine]
"""Makes the engine that one rollout calls, with a deadline in seconds for every call."""


@dataclass(frozen=True, slots=True)
class Context:
    """One run, as its pipelines see it. Engines and gate may log and remember without the
    pipelines' knowledge.
    """

    draft: Engine
    target: Engine
    gate: Gate | RoundGate
    answers: Answers
    bind: EngineBinder  # `atts.run.EngineCalls` is one
    seed: int = 0
    listener: RolloutListener = NullListener()
    # roles whose own log-probabilities are used: see `needed_logprobs`
    logprobs: frozenset[Role] = frozenset({"draft", "target"})
    left: RunLength = field(default_factory=RunLength)
    # chooses the length of the run's drafts under method exact
    draft_length: DraftLength = field(default_factory=DraftLength)
    planner: Planner = field(default_factory=SplitPlanner)
    # chooses who writes the run's pieces under method exact
    writers: WriterChoice = field(default_factory=WriterChoice)
    # scores a chunk by its features, as `judge_features` returns them, for score.kind learned
    judge: Callable[[Sequence[float]], float] | None = None
