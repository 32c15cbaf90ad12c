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
"""Floats packed into bytes in little-endian order; JSON stores the bytes in base64.

"f4" means 32-bit floats, and is used if they represent all values exactly. "f8" means 64-bit
floats. With most engines, a packed log-probability takes 5 characters of JSON instead of 20.
"""


class _Event(
    msgspec.Struct,
    frozen=True,
    tag_field="kind",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The base class of all events. The JSON of an event has a field `kind`, and omits fields that
    have their default value.

    Some fields are used only in the file, where they replace longer fields; in memory they are
    empty. `atts.journal.lines` converts events between the two forms.
    """


class SessionOpened(_Event, frozen=True, tag="session-opened"):
    """A session of the run began: the run was started, or it was resumed."""

    schema: int
    session: int
    version: str
    pid: int
    host: str = ""


class SessionClosed(_Event, frozen=True, tag="session-closed"):
    """A session of the run ended. If a session lacks this event, its process was killed or is still
    running.
    """

    status: Literal["finished", "interrupted", "failed"]
    why: str = ""
    # number of tokens that speculative decoding proposed to the target in this session, and number
    # that the target accepted
    speculated: Speculated | None = None


class ProblemStarted(_Event, frozen=True, tag="problem-started"):
    """Work on a problem began. The event is recorded only once, even if a later session continues
    the problem.
    """

    problem: Problem


class RolloutStarted(_Event, frozen=True, tag="rollout-started"):
    """A rollout of a problem began; the event contains its prompt."""

    problem: str
    sample: int
    prompt: Prompt
    # Used only in the file: True if the line leaves out the prompt, because the problem's previous
    # rollout has the same prompt. `LineReader` restores the prompt.
    is_repeated: bool = False


class WrittenChunk(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The form in which a chunk is stored: a reference to a recorded call, or the whole chunk.

    `call` is the index of the referenced call among the sampling calls that the rollout made since
    its last turn. If `drops_end` is True, the chunk lacks the call's last token id, which is an end
    token. `ids` are the token ids of the model that wrote the chunk. `other_ids` are the token ids
    of the other model (draft or target), or None if they are the same.
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

    If the rollout already has a turn with this index, this turn replaces it, and all later turns of
    the rollout are dropped.
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
    """A rollout ended after `turns` turns."""

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
    """A problem is finished; `samples` lists its rollouts in the order in which the outcome has
    them.
    """

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
    """The answer of a rollout was graded. If `sample` is None, the answer of the problem was
    graded.
    """

    problem: str
    status: VerdictStatus
    sample: int | None = None
    answer: str | None = None
    rule: str = ""


class Sampled(_Event, frozen=True, tag="sampled"):
    """A sampling call of an engine finished.

    `key` is a hash of the request. When a resumed run repeats the request, it finds this event by
    the key. `rollout` is copied from the request; calls with the same `rollout` continue the same
    text. `seconds` is the duration of the call.
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
    """A scoring call of an engine finished. Fields that `Sampled` also has are explained there."""

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
    """An engine call failed, but with a kind of error after which the pipeline may continue.

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
    """The gate made a decision. `asked` says when: before the target scored the chunk ("preview"),
    after it scored the chunk ("score"), or for a whole round ("round").

    `features` are the values that the gate received in addition to the score. A preview with the
    action "verify" only requests the score. It is recorded only if the gate gave this request a
    number, which is stored as `issue`.
    """

    decision: Decision
    features: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    asked: Literal["preview", "score", "round"] = "score"
    # Used only in the file: True if the chunk was escalated. `LineReader` returns this as an
    # `Observed` event.
    escalated: bool | None = None


class Observed(_Event, frozen=True, tag="observed"):
    """The gate received the action that was really taken, which may differ from its decision."""

    decision: Decision
    escalated: bool


class Combining(_Event, frozen=True, tag="combining"):
    """After a problem's vote, atts decided whether to keep the voted answer or to ask the
    target.
    """

    problem: str
    plan: CombinePlan


class Warned(_Event, frozen=True, tag="warning"):
    """A warning for readers of the results. `code` identifies the kind of warning and is the same
    in all versions of atts; `text` is for people.
    """

    code: str
    text: str
    problem: str = ""
    sample: int | None = None


class Measured(_Event, frozen=True, tag="measured"):
    """Values that another tool recorded about a rollout: its cost, its duration, and scores such as
    a reward.
    """

    problem: str
    sample: int
    scores: Mapping[str, float] = msgspec.field(default_factory=dict[str, float])
    dollars: float | None = None
    seconds: float | None = None


COMPARED = "compared"
"""Code of the warning that records the result of a comparison with an earlier run."""


class Drifted(_Event, frozen=True, tag="drift"):
    """The scores no longer follow the distribution of the calibration scores.

    The event contains the p-value of the drift test, the number of scores, and how the run reacts.
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
"""All events of a run. Their lines are in the order in which the events happened.

An interrupted run resumes from its recorded steps: results of engine calls (`Sampled`, `Scored`,
`CallFailed`), calls of the gate (`Decided`, `Observed`), and `Combining`. The run finds the result
of an engine call by the request's `key`. It repeats the calls of the gate in order, to rebuild the
gate's state.

Results and reports are made from the events about problems, rollouts, turns, outcomes and verdicts.
The other events are only for information: sessions, spans of the task graph, warnings, drift and
the like.
"""


KINDS: Mapping[str, type[Event]] = MappingProxyType(
    {str(kind.__struct_config__.tag): kind for kind in get_args(Event)}
)
"""The class of each kind of event, keyed by the name of the kind in the file."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An event with its line number in the journal, and its time on two clocks.

    `at` is in seconds since the session opened; `wall` is in seconds since the epoch.
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
"""The names and types of the values that a gate receives in addition to the score."""
_RARE = ("has_answer", "answered", "agreement", "agrees")
"""Features that are 0 for most chunks. The journal leaves out those that are 0."""


def feature_numbers(features: Features) -> dict[str, float]:
    """Return the features of a chunk as named numbers. Unknown values are left out, and so are the
    features in `_RARE` that are 0.
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
    """Return the features of a chunk from recorded numbers. A feature that was not recorded gets
    its default.
    """
    known: dict[str, Any] = {
        name: kind(numbers[name]) for name, kind in FEATURES.items() if name in numbers
    }
    return Features(question, turn, sample, left=numbers.get("left"), **known)
