"""The context of a pipeline, which has engines, a gate, answer functions, a seed and a listener."""

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
    """Do nothing, because these answers can be grouped without waiting."""


@dataclass(frozen=True, slots=True)
class Answers:
    """The functions that extract the answer of a reasoning text and group equal answers.

    `extract` returns None if there is no answer yet. Its answer ends the rollout, so it must not
    guess. `extract_finished` may guess: it reads a text that its model has ended without a marked
    answer. `unmarked` returns how many characters of a text cannot contain an answer however the
    text continues; these are not read again. `prepare` is awaited before `group` gets a new answer,
    so that `group` need not wait.
    """

    extract: Callable[[str], str | None]
    group: Grouper
    unmarked: Callable[[str], int] = lambda text: 0
    extract_finished: Callable[[str], str | None] = lambda text: None
    prepare: Callable[[Sequence[str | None]], Awaitable[None]] = _nothing_to_prepare
    # makes the functions of one problem if classes depend on the problem; None if they do not
    for_problem: Callable[[Problem], Answers] | None = None

    def of(self, problem: Problem) -> Answers:
        """Return the functions for this problem."""
        return self if self.for_problem is None else self.for_problem(problem)


class RolloutListener(Protocol):
    """A listener that is called while rollouts grow; its methods must not block."""

    def written(self, rollout: Rollout, chunk: Chunk) -> None:
        """Handle a chunk that was written after `rollout`; the chunk may still be discarded."""
        ...

    def turned(self, rollout: Rollout, turn: Turn) -> None:
        """Handle a turn that was added to the rollout and will not change."""
        ...


class NullListener:
    """A listener that ignores everything."""

    def written(self, rollout: Rollout, chunk: Chunk) -> None:
        """Ignore the chunk."""

    def turned(self, rollout: Rollout, turn: Turn) -> None:
        """Ignore the turn."""


class RunLength:
    """The remaining decisions of a run; this base class stands for a run of unknown size."""

    @property
    def share(self) -> float | None:
        """Return the expected share of the run's decisions that are left, including the next one;
        None if it is not known.
        """
        return None


class Planner(Protocol):
    """A planner that decides how a problem's answers are combined after its vote, such as
    `Combiner`.
    """

    def plan(self, kind: Combine, share: float, answers: int) -> CombinePlan:
        """Return the plan for a vote among so many answers, the leading one of which has this
        share.
        """
        ...


class SplitPlanner:
    """A planner that treats every vote that is not unanimous as split, and learns nothing."""

    def plan(self, kind: Combine, share: float, answers: int) -> CombinePlan:
        """Return the plan; with "auto" the target selects."""
        if kind == "vote" or answers < 2:
            return CombinePlan("vote", why="the rollouts agree")
        return CombinePlan("select" if kind == "auto" else kind)


class RolloutEngine(Engine, Protocol):
    """An engine for one rollout, with limits, timeouts, checks, retries and perhaps a record of
    calls.
    """

    has_recorded_calls: bool  # an earlier session recorded calls of this problem

    def recorded_scores(self, request: ScoreRequest) -> Scores | None:
        """Return the record of this call by an earlier session, without using it up."""
        ...

    def recorded_length(self, request: SampleRequest) -> int:
        """Return how many tokens an earlier session requested at this point, but no more than the
        request asks for; 0 if it made no such request.
        """
        ...


EngineBinder = Callable[[Engine, Role, Caller, float], RolloutEngine]
"""A function that makes the engine for one rollout, with a deadline in seconds for every call."""


@dataclass(frozen=True, slots=True)
class Context:
    """The engines, gate, functions and settings that a run gives to its pipelines.

    The run may wrap engines and gate to log calls; pipelines do not notice this.
    """

    draft: Engine
    target: Engine
    gate: Gate | RoundGate
    answers: Answers
    bind: EngineBinder  # `atts.run.EngineCalls` is one
    seed: int = 0
    listener: RolloutListener = NullListener()
    # roles whose log-probabilities are used; see `needed_logprobs`
    logprobs: frozenset[Role] = frozenset({"draft", "target"})
    left: RunLength = field(default_factory=RunLength)
    # chooses the length of the run's drafts under method exact
    draft_length: DraftLength = field(default_factory=DraftLength)
    planner: Planner = field(default_factory=SplitPlanner)
    # chooses who writes the run's chunks under method exact
    writers: WriterChoice = field(default_factory=WriterChoice)
    # scores a chunk by its features, as `judge_features` returns them, for score.kind learned
    judge: Callable[[Sequence[float]], float] | None = None
