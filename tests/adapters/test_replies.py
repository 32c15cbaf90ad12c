"""Replies of outcomes, conversations as questions, and options by their names."""

from __future__ import annotations

import pytest

from atts.adapters import Reply
from atts.adapters.replies import policy_changes, question_of, reply_kind, setup_of
from atts.api import Session, Setup
from atts.core import Outcome
from atts.errors import EngineError, OptionError, UsageError
from atts.pipelines import Policy
from atts.testing import toy_problems

SMALL = Policy(samples=3, turns=10, early_stop="none")


@pytest.mark.anyio
async def test_the_reasoning_or_the_answer_alone() -> None:
    """The text is that of a rollout that voted for the answer; `answer` is the bare one, "" where
    there is none.
    """
    question = toy_problems(1)[0]
    async with Session(Setup(draft="scripted", target="scripted", policy=SMALL)) as session:
        outcome = await session.solve(question.text)
        cut = await session.solve(question.text, policy={"max_tokens": 3})
    reply = Reply.of(outcome)
    assert f"\\boxed{{{question.answer}}}" in reply.text
    assert 0 < reply.facts["decisions"]
    assert Reply.of(outcome, "answer").text == question.answer
    assert (Reply.of(cut, "answer").text, Reply.of(cut).answer) == ("", None)


def test_a_failed_problem_is_an_error_not_an_empty_answer() -> None:
    """A harness would count an empty text as wrong."""
    with pytest.raises(EngineError, match="gone"):
        Reply.of(Outcome(toy_problems(1)[0], (), None, status="failed", why="the server is gone"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampels": 4}, "did you mean 'samples'"),
        ({"rate": "2"}, "rate"),
        ({"draft": "scripted"}, "give draft and target, or neither"),
        ({"rate_scope": "questions"}, "question"),
    ],
)
def test_options_are_those_of_the_configuration(options: dict[str, object], said: str) -> None:
    """A misspelt or impossible one is refused with a hint."""
    with pytest.raises(OptionError, match=said):
        setup_of("scripted", options)


def test_words_of_harnesses() -> None:
    """Strings are read as what they say; a label may name engines given apart; a conversation needs
    a question.
    """
    setup = setup_of(
        "mine",
        {"draft": "scripted", "target": "embedded", "samples": "4", "chunking.draft_tokens": 9},
    )
    assert (setup.draft, setup.target, setup.policy.samples) == ("scripted", "embedded", 4)
    assert setup.policy.chunking.draft_tokens == 9
    with pytest.raises(UsageError):
        question_of([("system", "alone")])
    changes = policy_changes(SMALL, "Be brief.", 0.9, 100)
    assert (changes["system"], changes["sampling"].temperature, changes["max_tokens"]) == (
        "Be brief.",
        0.9,
        100,
    )
    assert policy_changes(SMALL, "", 0.0, None) == {}
    with pytest.raises(OptionError, match="did you mean 'answer'"):
        reply_kind("anwser")
