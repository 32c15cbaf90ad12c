"""Convert the conversations of harnesses to questions, and outcomes to replies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from atts.api import Setup, configure
from atts.core import Outcome, Rollout, Usage
from atts.errors import EngineError, OptionError, UsageError
from atts.pipelines import Policy

ReplyKind = Literal["text", "answer"]
"""The content of a reply. If it is "text", the reply is the full text of a rollout whose answer won
the vote. If it is "answer", the reply is only that answer.
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """The reply of atts to one question of a harness."""

    text: str
    answer: str | None
    usage: Usage
    # Numbers of the run for the harness's log, such as votes, escalated chunks and tokens. They can
    # be written as JSON, because none is NaN or infinite.
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, outcome: Outcome, kind: ReplyKind = "text") -> Reply:
        """Make the reply from an outcome.

        :raises EngineError: if the problem or one of its rollouts failed. The harness would
            otherwise count an incomplete vote as the model's answer.
        """
        if not outcome.is_complete:
            errors = (rollout.error for rollout in outcome.rollouts if rollout.error)
            raise EngineError(
                "atts",
                next(errors, outcome.why),
                "The engine that failed is named at the start of this message",
            )
        text = (outcome.answer or "") if kind == "answer" else _speaker(outcome).text
        return cls(text, outcome.answer, outcome.usage, _facts(outcome))


def reply_kind(word: str) -> ReplyKind:
    """Return the kind of reply that a harness requests.

    :raises OptionError: for an unknown kind.
    """
    kinds: tuple[ReplyKind, ...] = get_args(ReplyKind)
    for kind in kinds:
        if kind == word:
            return kind
    raise OptionError("reply", f"unknown value {word!r}", kinds, word)


def setup_of(model: str, options: Mapping[str, object]) -> Setup:
    """Return the setup for a harness's model name and options. The options have the same names as
    on the command line.

    `model` is the address of both engines, such as "embedded" or "scripted". If `draft` and
    `target` are given, `model` is only a label.

    >>> setup_of("embedded", {"rate": "0.3", "samples": 4}).rate
    0.3

    :raises OptionError: an option is unknown (the message suggests a known option), or a value is
        impossible.
    """
    named = {"draft", "target"} & options.keys()
    if len(named) == 1:
        raise OptionError(
            "engines", f"only {named.pop()!r} is given; give both draft and target, or neither"
        )
    engines = {} if named else {"draft": model, "target": model}
    return configure({**engines, **options}).setup()


def question_of(turns: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """Convert a conversation of (role, text) pairs to a system prompt and one question.

    The system prompt is "" if atts should use its default prompt. Earlier messages are quoted in
    the question.

    >>> question_of([("system", "Be brief."), ("user", "1 + 1?")])
    ('Be brief.', '1 + 1?')
    >>> question_of([("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?")])[1]
    'User: 1 + 1?\\n\\nAssistant: 2\\n\\nUser: 2 + 2?'

    :raises UsageError: if the conversation has no question.
    """
    system = "\n\n".join(text for role, text in turns if role == "system")
    spoken = [(role, text) for role, text in turns if role != "system"]
    if not spoken:
        raise UsageError("the conversation has no question; add a user message")
    if len(spoken) == 1:
        return system, spoken[0][1]
    return system, "\n\n".join(f"{role.capitalize()}: {text}" for role, text in spoken)


def policy_changes(
    base: Policy, system: str, temperature: float | None, max_tokens: int | None
) -> dict[str, Any]:
    """Return the policy fields that a harness's settings change.

    A setting that is None or "" changes nothing. A temperature of 0 also changes nothing, because
    harnesses send it by default and it would make all rollouts the same.
    """
    changes: dict[str, Any] = {}
    if system:
        changes["system"] = system
    if temperature:
        changes["sampling"] = replace(base.sampling, temperature=temperature)
    if max_tokens:
        changes["max_tokens"] = max_tokens
    return changes


def _speaker(outcome: Outcome) -> Rollout:
    """Return the first rollout whose answer won the vote.

    If there is none, return the first rollout that has text.
    """
    agreeing = [
        line
        for line in outcome.rollouts
        if line.answer is not None and line.answer == outcome.answer
    ]
    return [*agreeing, *sorted(outcome.rollouts, key=lambda line: not line.turns)][0]


def _facts(outcome: Outcome) -> dict[str, Any]:
    asked = [turn.decision for line in outcome.rollouts for turn in line.turns if turn.decision]
    escalated = sum(decision.escalate for decision in asked)
    usage = outcome.usage
    return {
        "answer": outcome.answer,
        "votes": {name: votes for name, votes in outcome.votes.items() if math.isfinite(votes)},
        "rollouts": len(outcome.rollouts),
        "decisions": len(asked),
        "escalated": escalated,
        "draft_tokens": usage.draft_tokens,
        "target_tokens": usage.target_tokens,
        "scored_tokens": usage.scored_tokens,
    }
