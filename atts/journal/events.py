"""The events of a journal; each kind of event has a class."""

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
"""Floats that are packed into bytes in little-endian order; JSON stores the bytes in base64.

"f4": 32-bit floats, if they represent all numbers exactly. "f8": 64-bit floats. With most engines,
a packed log-probability takes 5 characters of JSON instead of 20.
"""


class _Event(
    msgspec.Struct,
    frozen=True,
    tag_field="kind",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The base class of all events.

    The JSON of an event has a field `kind`, and omits fields that are equal to their defaults.

    Some fields are used only in the file, where they abbreviate other fields. In memory these
    fields are empty. `atts.journal.lines` converts between both forms.
    """


class SessionOpened(_Event, frozen=True, tag="session-opened"):
    """A process began a session of the run; every start and every resume does so."""

    schema: int
    session: int
    version: str
    pid: int
    host: str = ""


class SessionClosed(_Event, frozen=True, tag="session-closed"):
    """A process closed its session.

    If a session lacks this event, its process was killed or is still running.
    """

    status: Literal["finished", "interrupted", "failed"]
    why: str = ""
    # number of tokens that speculative decoding proposed to the target in this session, and number
    # that the target accepted
    speculated: Speculated | None = None


class ProblemStarted(_Event, frozen=True, tag="problem-started"):
    """Work on a problem began; the event is recorded only once, even if the run is resumed."""

    problem: Problem


class RolloutStarted(_Event, frozen=True, tag="rollout-started"):
    """A rollout of a problem began from a prompt."""

    problem: str
    sample: int
    prompt: Prompt
    # Used only in the file: True if the line leaves out the prompt, because the problem's previous
    # rollout has the same prompt. `LineReader` restores the prompt.
    is_repeated: bool = False


class WrittenChunk(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The stored form of a chunk: a reference to a recorded call, or the whole chunk.

    `call` is the index of the referenced call among the rollout's calls since its last turn. If
    `drops_end` is True, the chunk lacks the call's last token id, which is an end token. `ids` are
    the token ids of the model that wrote the chunk. `other_ids` are the token ids of the other
    model (draft or target), or None if both models have the same ids.
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

    If the rollout already has a turn with this index, the new turn replaces the old turn, and all
    later turns are dropped.
    """

    problem: str
    sample: int
    turn: Turn
    # Used only in the file: the turn's chunks. `is_decided` is True if the turn's decision is the
    # rollout's latest recorded decision. `LineReader` restores chunks and decision in `turn`.
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
    # True if the model did not mark an answer as final, and the answer was extracted from the
    # finished text
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
    """The answer of a rollout was graded, or the answer of the problem if `sample` is None."""

    problem: str
    status: VerdictStatus
    sample: int | None = None
    answer: str | None = None
    rule: str = ""


class Sampled(_Event, frozen=True, tag="sampled"):
    """A sampling call of an engine finished.

    `key` is a hash of the request; a repeated request has the same key and finds this event.
    `rollout` is the request's rollout hint; calls with the same hint continue the same text.
    `seconds` is the duration of the call.
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
    # Used only in the file. `LineReader` moves the log-probabilities to `completion`, and returns
    # the span as the next event.
    logprobs: PackedFloats | None = None
    span: CallSpan | None = None


class Scored(_Event, frozen=True, tag="scored"):
    """A scoring call of an engine finished; the fields that `Sampled` also has mean the same here."""

    problem: str
    key: str
    scores: Scores
    role: Role = "target"
    rollout: str = ""
    seconds: float = 0.0
    # Used only in the file. `LineReader` moves the log-probabilities to `scores`, and returns the
    # span as the next event.
    logprobs: PackedFloats | None = None
    beginning_logprobs: PackedFloats | None = None
    span: CallSpan | None = None


class CallFailed(_Event, frozen=True, tag="call-failed"):
    """An engine call failed; the pipeline may continue without the call's result.

    `error` is the name of a class in `atts.errors`, and `text` is the complete error message.
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
    """The gate made a decision: before the target scored ("preview"), after it scored, or on a
    whole round.

    `features` are the numbers that the gate received in addition to the score. A preview with the
    action "verify" only requests the score. Such a preview is recorded only if the gate numbered
    the request (`issue`).
    """

    decision: Decision
    features: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    asked: Literal["preview", "score", "round"] = "score"
    # Used only in the file: True if the chunk was escalated. `LineReader` returns this as an
    # `Observed` event.
    escalated: bool | None = None


class Observed(_Event, frozen=True, tag="observed"):
    """The gate was informed of the action taken after its decision; the action may differ from the
    decision.
    """

    decision: Decision
    escalated: bool


class Combining(_Event, frozen=True, tag="combining"):
    """After a problem's vote, atts decided to keep the answer of the vote or to ask the target."""

    problem: str
    plan: CombinePlan


class Warned(_Event, frozen=True, tag="warning"):
    """A warning for readers of the results.

    `code` identifies the kind of warning in all versions of atts; `text` is for people.
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
"""The code of the warning with the result of a comparison between this run and an earlier run."""


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

An interrupted run resumes from the recorded steps. The steps are results of engine calls
(`Sampled`, `Scored`, `CallFailed`), calls of the gate (`Decided`, `Observed`), and `Combining`. A
result of an engine call is found by its `key`. The calls of the gate are repeated in order, to
rebuild the gate's state. Results and reports are made from the events about problems, rollouts,
turns, outcomes and verdicts. The other events are only remarks, for example sessions, spans of the
task graph, warnings and drift.
"""


KINDS: Mapping[str, type[Event]] = MappingProxyType(
    {str(kind.__struct_config__.tag): kind for kind in get_args(Event)}
)
"""The class of each kind of event, keyed by the name of the kind in the file."""


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
"""The names and types of the numbers that a gate receives in addition to the score."""
_RARE = ("has_answer", "answered", "agreement", "agrees")
"""Features that are 0 for most chunks. If such a feature is 0, the journal leaves it out."""


def feature_numbers(features: Features) -> dict[str, float]:
    """Return the numeric features of a chunk, without the turn, and without rare features that are
    0.
    """
    numbers = {"tokens": float(features.tokens)}
    # An unknown `draft_logprob` or `draft_evidence` is NaN. JSON has no NaN, so leave such a
    # feature out.
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
