"""Tests of functions that all adapters share: replies from outcomes, questions from conversations,
and options.
"""

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
async def test_a_reply_holds_the_reasoning_or_only_the_answer() -> None:
    """By default a reply is the full text of a rollout that voted for the answer. In mode "answer"
    the reply is only the answer, or "" if the problem has no answer.
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
    """A failed problem raises an error, because a harness would grade an empty text as wrong."""
    with pytest.raises(EngineError, match="gone"):
        Reply.of(Outcome(toy_problems(1)[0], (), None, status="failed", why="the server is gone"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampels": 4}, "did you mean 'samples'"),
        ({"rate": "2"}, "rate"),
        ({"draft": "scripted"}, "give both draft and target, or neither"),
        ({"rate_scope": "questions"}, "question"),
    ],
)
def test_unknown_and_impossible_options_are_refused(options: dict[str, object], said: str) -> None:
    """An adapter accepts the options of the configuration and refuses all other options with a
    hint.
    """
    with pytest.raises(OptionError, match=said):
        setup_of("scripted", options)


def test_harness_values_become_settings() -> None:
    """The strings in which a harness passes settings become numbers, and the options `draft` and
    `target` replace the engine that the model argument names.

    A conversation without a question is refused.
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
