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
"""The version of the journal's format; atts refuses journals of other versions."""

OutcomeStatus = Literal["answered", "unanswered", "cancelled", "failed"]
FailureKind = Literal["EngineUnavailable", "EngineTimeout", "BadReply", "OutOfMemory"]
VerdictStatus = Literal["correct", "wrong", "unscored"]

PackedFloats = tuple[Literal["f4", "f8"], bytes]
"""Floats as bytes, which JSON contains in base64. All floats have 32 bits, little-endian, if that
represents each of them exactly; or else all have 64 bits. With most engines, a log-probability then
takes 5 characters instead of 20.
"""


class _Event(
    msgspec.Struct,
    frozen=True,
    tag_field="kind",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The base of all events; their JSON has a `kind`, and omits fields that equal their defaults.

    Some fields are used only in the lines of the file, where they abbreviate other fields. They are
    empty in the events that a writer receives and that a reader returns; `atts.journal.lines`
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
    """A process closed its session; a session without this event was killed, or still runs."""

    status: Literal["finished", "interrupted", "failed"]
    why: str = ""
    # counts of the tokens that the session proposed to the target, and of the accepted ones
    speculated: Speculated | None = None


class ProblemStarted(_Event, frozen=True, tag="problem-started"):
    """Work on a problem began; recorded once, no matter how often the run is resumed."""

    problem: Problem


class RolloutStarted(_Event, frozen=True, tag="rollout-started"):
    """A rollout of a problem began from a prompt."""

    problem: str
    sample: int
    prompt: Prompt
    # used only in the file's lines: whether the prompt is omitted, because the problem's previous
    # rollout has the same prompt
    is_repeated: bool = False


class WrittenChunk(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """A chunk as the line of a turn stores it: as a reference to a recorded call, or in full.

    `call` is the index of the referenced call among the rollout's calls since its last turn. With
    `drops_end`, the chunk lacks the call's last id, which is an end token. `ids` are ids of the
    model that wrote the chunk. `other_ids` are those of the other model; None if both models have
    the same ids.
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
    # used only in the file's lines: the turn's chunks, and whether the turn's decision is the
    # rollout's latest decision
    chunks: tuple[WrittenChunk, ...] = ()
    discarded: tuple[WrittenChunk, ...] = ()
    is_decided: bool = False


class RolloutFinished(_Event, frozen=True, tag="rollout-finished"):
    """A rollout ended after the number of turns in `turns`."""

    problem: str
    sample: int
    finish: Finish
    turns: int
    answer: str | None = None
    usage: Usage = Usage()
    error: str = ""
    # whether the answer comes from a finished text that does not mark its answer
    is_fallback_answer: bool = False


class OutcomeReached(_Event, frozen=True, tag="outcome"):
    """A problem is finished; `samples` lists its rollouts in the order of the outcome."""

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
    """An answer was graded: one rollout's answer, or the problem's answer if `sample` is None."""

    problem: str
    status: VerdictStatus
    sample: int | None = None
    answer: str | None = None
    rule: str = ""


class Sampled(_Event, frozen=True, tag="sampled"):
    """A sampling call of an engine finished.

    `key` is a hash of the request, so a repeated request finds this event. `rollout` is the
    request's rollout hint; calls with the same hint continue the same text. `seconds` is the
    duration of the call.
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
    # used only in the file's lines: the completion's log-probabilities, and the call's span, which
    # readers get as a second event
    logprobs: PackedFloats | None = None
    span: CallSpan | None = None


class Scored(_Event, frozen=True, tag="scored"):
    """A scoring call of an engine finished; fields with names as in `Sampled` have the same
    meaning.
    """

    problem: str
    key: str
    scores: Scores
    role: Role = "target"
    rollout: str = ""
    seconds: float = 0.0
    # used only in the file's lines: log-probabilities of the suffix and of the beginning, and the
    # call's span, which readers get as a second event
    logprobs: PackedFloats | None = None
    beginning_logprobs: PackedFloats | None = None
    span: CallSpan | None = None


class CallFailed(_Event, frozen=True, tag="call-failed"):
    """An engine call failed; the pipeline may continue without the call's result.

    `error` is the name of the error's class in `atts.errors`, and `text` is the whole message.
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

    `features` are the numbers that the gate received in addition to the score. A preview with the
    action "verify" only requests the score. Such a preview is recorded only if the gate numbered
    the request (`issue`).
    """

    decision: Decision
    features: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    asked: Literal["preview", "score", "round"] = "score"
    # used only in the file's lines: whether the chunk was escalated, which readers get as an
    # `Observed` event
    escalated: bool | None = None


class Observed(_Event, frozen=True, tag="observed"):
    """The gate was informed of the action that followed its decision, which may differ from the
    decision.
    """

    decision: Decision
    escalated: bool


class Combining(_Event, frozen=True, tag="combining"):
    """After a problem's vote, atts planned to keep the vote's answer or to ask the target."""

    problem: str
    plan: CombinePlan


class Warned(_Event, frozen=True, tag="warning"):
    """A warning for readers of the results; `code` stays the same between versions, `text` is for
    people.
    """

    code: str
    text: str
    problem: str = ""
    sample: int | None = None


class Measured(_Event, frozen=True, tag="measured"):
    """Numbers that another tool recorded about a rollout: its cost, its duration, and scores such
    as a reward.
    """

    problem: str
    sample: int
    scores: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    dollars: float | None = None
    seconds: float | None = None


COMPARED = "compared"
"""The code of the warning that reports how a run compares with an earlier run."""


class Drifted(_Event, frozen=True, tag="drift"):
    """The scores no longer follow the distribution of the calibration.

    The event contains the p-value of the drift test, the number of scores, and what the run does
    about the drift.
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

An interrupted run resumes from the recorded steps. Steps are results of engine calls (`Sampled`,
`Scored` and `CallFailed`, found by `key`), calls of the gate (`Decided` and `Observed`), and
`Combining`. The gate's calls are repeated in order, to rebuild the gate's state. Results and
reports are made from facts: problems, rollouts, turns, outcomes and verdicts. All other events are
remarks: sessions, spans of the task graph, warnings, drift, and measurements of other tools.
"""


KINDS: Mapping[str, type[Event]] = MappingProxyType(
    {str(kind.__struct_config__.tag): kind for kind in get_args(Event)}
)
"""The class of each event, by the event's `kind` in the file."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An event with the number of its line in the journal, and its time on two clocks.

    `at` is the time in seconds since the session opened; `wall` is the date, in seconds since the
    epoch.
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
"""Numbers that a gate receives in addition to the score, with their types."""
_RARE = ("has_answer", "answered", "agreement", "agrees")
"""Features that are 0 for most chunks. The journal omits them if they are 0."""


def feature_numbers(features: Features) -> dict[str, float]:
    """Return the features of a chunk as numbers, without the text, the turn, and rare features that
    are 0.
    """
    numbers = {"tokens": float(features.tokens)}
    # both features are NaN by default, which JSON cannot write as a number
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
    """Return the features of a chunk from recorded numbers; a feature without a number gets its
    default.
    """
    known: dict[str, Any] = {
        name: kind(numbers[name]) for name, kind in FEATURES.items() if name in numbers
    }
    return Features(question, turn, sample, left=numbers.get("left"), **known)
