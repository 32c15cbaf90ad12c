"""The events of a journal: one frozen value for each kind.

The order of the lines is the order in which things happened. Three families:

* *steps*, from which an interrupted run goes on: `Sampled`, `Scored`, `CallFailed` (what engine calls came to, found
  again by `key`), `Decided`, `Observed` (calls of the gate, replayed in order to rebuild its state);
* *facts*, from which results and reports are made: problems, rollouts, turns, outcomes, verdicts;
* *remarks*: sessions, the task graph's nodes and spans, warnings, drift.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from atts.core import (
    CallSpan,
    Completion,
    Decision,
    Finish,
    Problem,
    ProblemSpan,
    Prompt,
    Role,
    RolloutSpan,
    Scores,
    Turn,
    Usage,
)
from atts.engine import Speculated

SCHEMA = 4
"""Raised with every change that an older version could not read; what older ones wrote is read.

4: turns say how many tokens were scored in them, and which were forced (their notes said so). 3: a
line's checksum goes on from that of the line before; the manifest has a checksum of its own. 2:
decisions bear an origin; a call's line holds its span, a decision's what was done with it, which is
true or false (schema 1 wrote lines of their own, and "yes" or "no").
"""

OutcomeStatus = Literal["answered", "unanswered", "cancelled", "failed"]
FailureKind = Literal["EngineUnavailable", "EngineTimeout", "BadReply", "OutOfMemory"]
VerdictStatus = Literal["correct", "wrong", "unscored"]


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A process began to write; every start and every resume opens one."""

    schema: int
    session: int
    version: str
    pid: int
    host: str = ""


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The process stopped writing on purpose; its absence means that it was killed."""

    status: Literal["finished", "interrupted", "failed"]
    why: str = ""
    speculated: Speculated | None = None  # what was proposed to the target while the session lasted


@dataclass(frozen=True, slots=True)
class ProblemStarted:
    """Work on a problem began; written once, however often the run is resumed."""

    problem: Problem


@dataclass(frozen=True, slots=True)
class RolloutStarted:
    """One sample of a problem, and the prompt it starts from."""

    problem: str
    sample: int
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """One turn of a rollout is complete. An index seen before replaces that turn and drops those
    after it.
    """

    problem: str
    sample: int
    turn: Turn


@dataclass(frozen=True, slots=True)
class RolloutFinished:
    """A rollout ended; its turns are the `turns` events before this one."""

    problem: str
    sample: int
    finish: Finish
    turns: int
    answer: str | None = None
    usage: Usage = Usage()
    error: str = ""
    is_fallback_answer: bool = False


@dataclass(frozen=True, slots=True)
class OutcomeReached:
    """A problem is over; `samples` names its rollouts in the order of the outcome."""

    problem: str
    status: OutcomeStatus
    answer: str | None
    samples: tuple[int, ...]
    votes: Mapping[str, float] = field(default_factory=dict[str, float])
    why: str = ""
    usage: Usage = Usage()
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class Graded:
    """What the evaluator said of an answer: the problem's (`sample` None) or one rollout's."""

    problem: str
    status: VerdictStatus
    sample: int | None = None
    answer: str | None = None
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Sampled:
    """An engine call that finished; `key` names the request by content, so a repeated request finds
    it.

    `rollout` is the request's own hint: what bears the same one is one line of work. `seconds` is
    what the call took. `span` shares the call's line; readers are given it as an event of its own,
    after this one.
    """

    problem: str
    key: str
    completion: Completion
    role: Role
    rollout: str = ""
    sample: int = 0
    turn: int = 0
    attempt: int = 0
    seconds: float = 0.0
    span: CallSpan | None = None


@dataclass(frozen=True, slots=True)
class Scored:
    """A scoring call that finished."""

    problem: str
    key: str
    scores: Scores
    role: Role = "target"
    rollout: str = ""
    seconds: float = 0.0
    span: CallSpan | None = None  # as that of `Sampled`


@dataclass(frozen=True, slots=True)
class CallFailed:
    """An engine call that failed in a way the pipeline may go on from; `error` is the class in
    `atts.errors`.
    """

    problem: str
    key: str
    role: Role
    error: FailureKind
    engine: str
    text: str  # the whole message
    rollout: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Decided:
    """The gate was asked and answered: before the target had scored ("preview"), after, or for a
    round at once.

    `features` are the numbers it was told besides the score. A preview of "verify" asks for the
    score and decides nothing yet; it is recorded only where the gate numbered it (`issue`).
    `escalated` is what the gate was told at once of what was done; readers are given it as an event
    of its own (`Observed`), after this one.
    """

    decision: Decision
    features: Mapping[str, float] = field(default_factory=dict[str, float])
    asked: Literal["preview", "score", "round"] = "score"
    escalated: bool | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """The gate was told what was really done with a decision."""

    decision: Decision
    escalated: bool


@dataclass(frozen=True, slots=True)
class Warned:
    """Something a reader of the results should know; `code` is stable, `text` is for people."""

    code: str
    text: str
    problem: str = ""
    sample: int | None = None


COMPARED = "compared"
"""The code of the warning that says what came of a comparison with an earlier run."""


@dataclass(frozen=True, slots=True)
class Drifted:
    """The scores left what the calibration promised: how surprising that is after how many, and
    what was done.
    """

    alarm: str
    p: float
    scores: int
    acted: str = ""
    text: str = ""


Event = (
    SessionOpened
    | SessionClosed
    | ProblemStarted
    | RolloutStarted
    | TurnFinished
    | RolloutFinished
    | OutcomeReached
    | Graded
    | Sampled
    | Scored
    | CallFailed
    | Decided
    | Observed
    | CallSpan
    | RolloutSpan
    | ProblemSpan
    | Warned
    | Drifted
)

_OTHER_WORDS: Mapping[type[Event], str] = {
    OutcomeReached: "outcome",
    CallSpan: "node",
    RolloutSpan: "rollout-timed",
    ProblemSpan: "problem-timed",
    Warned: "warning",
    Drifted: "drift",
}
KINDS: Mapping[str, type[Event]] = MappingProxyType(
    {
        _OTHER_WORDS.get(kind) or re.sub(r"\B(?=[A-Z])", "-", kind.__name__).lower(): kind
        for kind in get_args(Event)
    }
)
"""The word each event bears in the file: its class's name, "session-opened", where it has no other.
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event with its place in the journal and both clocks.

    `at` is the run's clock, in seconds since its session opened; `wall` the date, in seconds since
    the epoch.
    """

    number: int
    session: int
    at: float
    wall: float
    event: Event
