"""The events of a journal, as one tagged struct for each kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import msgspec

from atts.core import (
    CallSpan,
    Combination,
    CombinePlan,
    Completion,
    Decision,
    Ending,
    Features,
    Finish,
    Problem,
    ProblemSpan,
    Prompt,
    Role,
    RolloutSpan,
    Scores,
    TokenIds,
    Turn,
    Usage,
)
from atts.engine import Speculated

SCHEMA = 5
"""The version of the journal's format; a journal of another version is refused."""

OutcomeStatus = Literal["answered", "unanswered", "cancelled", "failed"]
FailureKind = Literal["EngineUnavailable", "EngineTimeout", "BadReply", "OutOfMemory"]
VerdictStatus = Literal["correct", "wrong", "unscored"]

PackedFloats = tuple[Literal["f4", "f8"], bytes]
"""Numbers as bytes, which JSON contains in base64. They are little-endian 32-bit floats if these
represent all numbers exactly, or else 64-bit floats. A log-probability of most engines then takes 5
characters instead of 20.
"""


class _Event(
    msgspec.Struct,
    frozen=True,
    tag_field="kind",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The base of all events: JSON has a `kind`, and leaves out fields equal to their defaults.

    Some fields exist only in the lines of the file, where they abbreviate other fields that the line
    omits. They are empty in the events that writers record and readers return; `atts.journal.lines`
    converts in both directions.
    """


class SessionOpened(_Event, frozen=True, tag="session-opened"):
    """A process began a session of the run; every start and every resume does so."""

    schema: int
    session: int
    version: str
    pid: int
    host: str = ""


class SessionClosed(_Event, frozen=True, tag="session-closed"):
    """The process ended its session on purpose; a session without this event was killed."""

    status: Literal["finished", "interrupted", "failed"]
    why: str = ""
    speculated: Speculated | None = None  # tokens proposed to the target while the session lasted


class ProblemStarted(_Event, frozen=True, tag="problem-started"):
    """Work on a problem began; written once, however often the run is resumed."""

    problem: Problem


class RolloutStarted(_Event, frozen=True, tag="rollout-started"):
    """One sample of a problem, and the prompt it starts from."""

    problem: str
    sample: int
    prompt: Prompt
    # in lines only: whether the prompt is left out, because the problem's previous rollout has the
    # same
    is_repeated: bool = False


class WrittenChunk(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A chunk in the line of a turn: the completion of a call recorded before, or the whole chunk.

    `call` counts the calls recorded for the rollout since its last turn; with `drops_end` the
    call's last id, an end token, is not part of the chunk. `ids` are the author's, `other_ids` those
    of the other model, None if both read the same ids.
    """

    author: Role
    call: int | None = None
    drops_end: bool = False
    text: str = ""
    ended: Ending = "delimiter"
    ids: TokenIds = ()
    other_ids: TokenIds | None = None
    logprobs: PackedFloats | None = None


class TurnFinished(_Event, frozen=True, tag="turn-finished"):
    """One turn of a rollout is complete.

    If the rollout already has a turn with this index, this turn replaces it, and the turns after it
    are dropped.
    """

    problem: str
    sample: int
    turn: Turn
    # in lines only: the turn's chunks, and whether its decision is the rollout's latest one
    chunks: tuple[WrittenChunk, ...] = ()
    discarded: tuple[WrittenChunk, ...] = ()
    is_decided: bool = False


class RolloutFinished(_Event, frozen=True, tag="rollout-finished"):
    """A rollout ended; its turns are the `turns` events before this one."""

    problem: str
    sample: int
    finish: Finish
    turns: int
    answer: str | None = None
    usage: Usage = Usage()
    error: str = ""
    # whether the answer was found in a finished text without a marked answer
    is_fallback_answer: bool = False


class OutcomeReached(_Event, frozen=True, tag="outcome"):
    """A problem is over; `samples` names its rollouts in the order of the outcome."""

    problem: str
    status: OutcomeStatus
    answer: str | None
    samples: tuple[int, ...]
    votes: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    why: str = ""
    usage: Usage = Usage()
    doubt: str = ""
    combination: Combination | None = None


class Graded(_Event, frozen=True, tag="graded"):
    """An answer was graded: the problem's (if `sample` is None) or one rollout's."""

    problem: str
    status: VerdictStatus
    sample: int | None = None
    answer: str | None = None
    rule: str = ""


class Sampled(_Event, frozen=True, tag="sampled"):
    """An engine call that finished.

    `key` names the request by content, so a repeated request finds it. `rollout` is the hint in the
    request; calls with the same hint belong to one line of work. `seconds` is the duration of the
    call.
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
    # in lines only: the completion's log-probabilities, and the span, which readers get as the next
    # event
    logprobs: PackedFloats | None = None
    span: CallSpan | None = None


class Scored(_Event, frozen=True, tag="scored"):
    """A scoring call finished; the fields that it shares with `Sampled` have the same meaning."""

    problem: str
    key: str
    scores: Scores
    role: Role = "target"
    rollout: str = ""
    seconds: float = 0.0
    # in lines only: log-probabilities of the suffix and of the beginning, and the span, which
    # readers get as the next event
    logprobs: PackedFloats | None = None
    beginning_logprobs: PackedFloats | None = None
    span: CallSpan | None = None


class CallFailed(_Event, frozen=True, tag="call-failed"):
    """An engine call failed, and the pipeline may continue without its result.

    `error` is the class in `atts.errors`, `text` the whole message.
    """

    problem: str
    key: str
    role: Role
    error: FailureKind
    engine: str
    text: str
    rollout: str = ""
    seconds: float = 0.0


class Decided(_Event, frozen=True, tag="decided"):
    """The gate decided: before the target scored ("preview"), after it scored, or on a whole round.

    `features` are the numbers the gate was given in addition to the score. A preview of "verify"
    requests the score and decides nothing yet; it is recorded only if the gate numbered the request
    (`issue`).
    """

    decision: Decision
    features: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    asked: Literal["preview", "score", "round"] = "score"
    # only in lines: the action that was carried out, which readers get as an `Observed` event
    escalated: bool | None = None


class Observed(_Event, frozen=True, tag="observed"):
    """The gate observed the action that was really carried out after a decision."""

    decision: Decision
    escalated: bool


class Combining(_Event, frozen=True, tag="combining"):
    """After a problem's vote, the plan was made to keep the vote or to ask the target."""

    problem: str
    plan: CombinePlan


class Warned(_Event, frozen=True, tag="warning"):
    """A warning for readers of the results; `code` is stable, `text` is for people."""

    code: str
    text: str
    problem: str = ""
    sample: int | None = None


class Measured(_Event, frozen=True, tag="measured"):
    """Numbers that another tool recorded of a rollout: its cost, and scores such as a reward."""

    problem: str
    sample: int
    scores: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    dollars: float | None = None
    seconds: float | None = None


COMPARED = "compared"
"""The code of the warning that reports the comparison with an earlier run."""


class Drifted(_Event, frozen=True, tag="drift"):
    """The scores no longer follow the distribution of the calibration.

    The event has the p-value, the number of scores and the action.
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
    | Combining
    | CallSpan
    | RolloutSpan
    | ProblemSpan
    | Warned
    | Drifted
    | Measured
)
"""All events of a run. The order of the lines is the order in which the events happened.

Steps, from which an interrupted run resumes, are `Sampled`, `Scored` and `CallFailed` (results of
engine calls, found again by `key`), `Decided` and `Observed` (calls of the gate, repeated in order to
rebuild its state), and `Combining`. Facts, from which results and reports are made, are problems, rollouts,
turns, outcomes and verdicts. The rest are remarks: sessions, the task graph's spans, warnings, drift,
measurements of other tools.
"""


KINDS: Mapping[str, type[Event]] = MappingProxyType(
    {str(kind.__struct_config__.tag): kind for kind in get_args(Event)}
)
"""Each event by its `kind` in the file."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event with its number in the journal and both clocks.

    `at` is the run's clock, in seconds since its session opened; `wall` the date, in seconds since
    the epoch.
    """

    number: int
    session: int
    at: float
    wall: float
    event: Event


FEATURES: Mapping[str, type[int | float | bool]] = {
    "tokens": int,
    "draft_logprob": float,
    "draft_evidence": float,
    "has_answer": bool,
    "answered": int,
    "agreement": float,
    "agrees": bool,
}
"""Numbers that a gate receives besides the score, with their types."""
_RARE = ("has_answer", "answered", "agreement", "agrees")
"""Features that are 0 for most chunks; a feature that a journal lacks is 0."""


def feature_numbers(features: Features) -> dict[str, float]:
    """Return all features except the text, the turn, and rare features that are 0."""
    numbers = {"tokens": float(features.tokens)}
    # both have NaN as default, which JSON cannot write as a number
    if not math.isnan(features.draft_logprob):
        numbers["draft_logprob"] = features.draft_logprob
    if not math.isnan(features.draft_evidence):
        numbers["draft_evidence"] = features.draft_evidence
    for name in _RARE:
        value = getattr(features, name)
        if value:
            numbers[name] = float(value)
    if features.left is not None:
        numbers["left"] = features.left
    return numbers


def recorded_features(
    question: str, turn: int, sample: int, numbers: Mapping[str, float]
) -> Features:
    """Return the features that `feature_numbers` made numbers of; a missing one has its default."""
    known: dict[str, Any] = {
        name: kind(numbers[name]) for name, kind in FEATURES.items() if name in numbers
    }
    return Features(question, turn, sample, left=numbers.get("left"), **known)
