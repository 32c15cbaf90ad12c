"""What a journal says about a run so far: finished problems in brief, unfinished ones exactly."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from atts.core import Completion, Outcome, Problem, Rollout, SampleRequest, ScoreRequest, Scores, TokenIds
from atts.journal.events import (
    Decided,
    Entry,
    Event,
    Graded,
    Observed,
    OutcomeReached,
    ProblemStarted,
    RolloutFinished,
    RolloutStarted,
    Sampled,
    Scored,
    SessionClosed,
    SessionOpened,
    TurnFinished,
)


@dataclass(slots=True)
class OpenProblem:
    """A problem that was started: its rollouts as they stood, and every step already taken.

    A step taken is not taken again: engine results are found by the request's key, decisions in their order within
    (sample, turn). `finished` holds the samples whose rollouts ended, in the order in which they did.
    """

    problem: Problem
    rollouts: dict[int, Rollout] = field(default_factory=dict[int, Rollout])
    finished: list[int] = field(default_factory=list[int])
    completions: dict[str, Completion] = field(default_factory=dict[str, Completion])
    scores: dict[str, Scores] = field(default_factory=dict[str, Scores])
    gate: dict[tuple[int, int], deque[Decided | Observed]] = field(
        default_factory=dict[tuple[int, int], deque[Decided | Observed]]
    )
    graded: list[Graded] = field(default_factory=list[Graded])

    def outcome(self, reached: OutcomeReached) -> Outcome:
        """The whole outcome, its rollouts in the order it names them."""
        rollouts = tuple(self.rollouts[sample] for sample in reached.samples)
        return Outcome(
            self.problem, rollouts, reached.answer, reached.votes, reached.status, reached.why, reached.usage
        )


@dataclass(slots=True)
class RunState:
    """Built entry by entry with `apply`, in order; its size is that of the unfinished problems and a line per other.

    `reached` and `graded` (of whole problems, by id) are kept for finished problems; their rollouts are let go.
    """

    open: dict[str, OpenProblem] = field(default_factory=dict[str, OpenProblem])
    reached: dict[str, OutcomeReached] = field(default_factory=dict[str, OutcomeReached])
    graded: dict[str, tuple[Graded, ...]] = field(default_factory=dict[str, tuple[Graded, ...]])
    sessions: int = 0
    ended: SessionClosed | None = None  # how the last session ended; None: it was killed, or still runs

    def apply(self, entry: Entry) -> Outcome | None:
        """Take one entry in; the outcome of the problem when the entry completes one."""
        event = entry.event
        match event:
            case SessionOpened():
                self.sessions, self.ended = event.session, None
            case SessionClosed():
                self.ended = event
            case ProblemStarted(problem):
                self.open.setdefault(problem.id, OpenProblem(problem))
            case OutcomeReached(problem):
                closed = self.open.pop(problem)
                self.reached[problem] = event
                self.graded[problem] = tuple(closed.graded)
                return closed.outcome(event)
            case Graded(problem) if problem in self.reached:
                self.graded[problem] += (event,)
            case _:
                self._apply_step(event)
        return None

    def _apply_step(self, event: Event) -> None:
        """Events inside an open problem; those of finished problems (late clean-up) and remarks change nothing."""
        name = event.decision.question if isinstance(event, Decided | Observed) else getattr(event, "problem", None)
        inside = self.open.get(name) if isinstance(name, str) else None
        if inside is None:
            return
        match event:
            case RolloutStarted(_, sample, prompt):
                inside.rollouts[sample] = Rollout(inside.problem.id, sample, prompt)
            case TurnFinished(_, sample, turn):
                rollout = inside.rollouts[sample]
                inside.rollouts[sample] = replace(rollout, turns=(*rollout.turns, turn))
            case RolloutFinished():
                inside.rollouts[event.sample] = _finished(inside.rollouts[event.sample], event)
                inside.finished.append(event.sample)
            case Sampled():
                inside.completions[event.key] = event.completion
            case Scored():
                inside.scores[event.key] = event.scores
            case Decided(decision) | Observed(decision):
                inside.gate.setdefault((decision.sample, decision.turn), deque()).append(event)
            case Graded():
                inside.graded.append(event)
            case _:
                pass


def _finished(rollout: Rollout, event: RolloutFinished) -> Rollout:
    return replace(rollout, finish=event.finish, answer=event.answer, usage=event.usage, error=event.error)


def read_outcomes(entries: Iterable[Entry]) -> Iterator[Outcome]:
    """Every finished problem's whole outcome, in the order in which they finished; memory holds the open ones only."""
    state = RunState()
    for entry in entries:
        outcome = state.apply(entry)
        if outcome is not None:
            del state.reached[outcome.problem.id], state.graded[outcome.problem.id]
            yield outcome


def sample_key(request: SampleRequest) -> str:
    """A name for what is asked, from all that decides the answer; cache hints and priorities are left out."""
    seed = request.seed
    law = (request.max_tokens, request.sampling, seed, request.stop, request.stop_ids)
    return _digest(repr(law), request.ids)


def score_key(request: ScoreRequest) -> str:
    """The same for a scoring request."""
    return _digest(f"score {len(request.prefix)}", request.prefix + request.suffix)


def _digest(law: str, ids: TokenIds) -> str:
    hasher = blake2b(law.encode(), digest_size=12)
    hasher.update(array("q", ids).tobytes())
    return hasher.hexdigest()
