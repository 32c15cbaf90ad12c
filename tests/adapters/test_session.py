"""What every harness gets: one question at a time, engines kept open, repeats that are real, options by their names."""

from __future__ import annotations

import pytest

from atts.adapters import Reply, SolverSession
from atts.adapters.session import policy_changes, question_of, setup_of
from atts.api import Setup
from atts.core import Outcome
from atts.errors import EngineError, EngineUnavailable, OptionError, UsageError
from atts.pipelines import Policy
from atts.tasks import collect
from atts.testing import Faults, ScriptedEngine, run_virtual, toy_problems

SMALL = Policy(samples=3, turns=10, early_stop="none")


@pytest.mark.anyio
async def test_questions_asked_at_once_share_engines_and_gate() -> None:
    """Many tasks ask one opened pair; answers are right more often than not, and what they cost is said."""
    draft, target = ScriptedEngine("draft"), ScriptedEngine("target")
    problems = toy_problems(12)
    async with SolverSession(Setup(draft=draft, target=target, policy=SMALL, rate=0.4)) as session:
        replies = await collect([lambda text=it.text: session.ask(text) for it in problems])  # type: ignore[misc]
        assert draft.stats().in_flight == target.stats().in_flight == 0
    right = sum(reply.answer == it.answer for reply, it in zip(replies, problems, strict=True))
    assert right > len(problems) / 2
    asked = sum(reply.facts["decisions"] for reply in replies)
    assert 0 < sum(reply.facts["escalated"] for reply in replies) < asked  # one gate, neither fresh nor stuck
    assert sum(reply.usage.draft_tokens for reply in replies) == draft.stats().sampled_tokens
    assert all(f"\\boxed{{{reply.answer}}}" in reply.text for reply in replies if reply.answer)


@pytest.mark.anyio
async def test_a_question_asked_again_is_answered_anew() -> None:
    """Epochs are repeats, not copies."""
    async with SolverSession(Setup(draft="scripted", target="scripted", policy=SMALL)) as session:
        texts = {(await session.ask(toy_problems(1)[0].text)).text for _ in range(4)}
    assert len(texts) > 1


@pytest.mark.anyio
async def test_the_answer_alone_and_changes_of_the_policy() -> None:
    """`answer` hands back the bare answer; a token limit cuts rollouts, and no answer is an empty text."""
    question = toy_problems(1)[0]
    async with SolverSession(Setup(draft="scripted", target="scripted", policy=SMALL), "answer") as session:
        assert (await session.ask(question.text)).text == question.answer
        cut = await session.ask(question.text, policy={"max_tokens": 3})
    assert (cut.text, cut.answer) == ("", None)
    assert cut.usage.draft_tokens <= 3 * SMALL.samples
    assert cut.usage.target_tokens <= 3 * SMALL.samples  # in the place of as many of the draft's


@pytest.mark.anyio
async def test_it_opens_by_itself_and_ends_for_good() -> None:
    """The first question opens the engines; closing twice is fine, asking after it is not."""
    session = SolverSession(Setup(draft="scripted", target="scripted", policy=SMALL))
    assert (await session.ask(toy_problems(1)[0].text)).answer
    await session.aclose()
    await session.aclose()
    with pytest.raises(EngineUnavailable, match="closed"):
        await session.ask("again")


@pytest.mark.anyio
async def test_engines_are_closed_when_the_second_cannot_open() -> None:
    """Nothing is left open behind an error."""
    draft, target = ScriptedEngine("draft"), ScriptedEngine("target")
    async with target:
        pass  # a closed engine refuses to open again
    with pytest.raises(EngineUnavailable):
        async with SolverSession(Setup(draft=draft, target=target)):
            pass
    with pytest.raises(EngineUnavailable, match="closed"):
        await draft.__aenter__()


def test_a_failed_problem_is_an_error_not_an_empty_answer() -> None:
    """A harness would count an empty text as wrong."""
    with pytest.raises(EngineError, match="gone"):
        Reply.of(Outcome(toy_problems(1)[0], (), None, status="failed", why="the server is gone"))


def test_a_lost_engine_reaches_whoever_asks() -> None:
    """An engine that fails for good is an error of the question, after as much patience as in any run."""

    async def main() -> None:
        broken = ScriptedEngine("draft", faults=Faults({"refused": 1.0}))
        async with SolverSession(Setup(draft=broken, target="scripted", policy=SMALL)) as session:
            with pytest.raises(EngineError):
                await session.ask(toy_problems(1)[0].text)

    run_virtual(main)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sampels": 4}, "did you mean 'samples'"),
        ({"rate": "2"}, "rate"),
        ({"draft": "scripted"}, "give draft and target, or neither"),
        ({"mode": "turns"}, "turn"),
    ],
)
def test_options_are_those_of_the_configuration(options: dict[str, object], said: str) -> None:
    """A misspelt or impossible one is refused with a hint."""
    with pytest.raises(OptionError, match=said):
        setup_of("scripted", options)


def test_words_of_harnesses() -> None:
    """Strings are read as what they say; a label may name engines given apart; a conversation needs a question."""
    setup = setup_of("mine", {"draft": "scripted", "target": "embedded", "samples": "4", "chunking.draft_tokens": 9})
    assert (setup.draft, setup.target, setup.policy.samples) == ("scripted", "embedded", 4)
    assert setup.policy.chunking.draft_tokens == 9
    with pytest.raises(UsageError):
        question_of([("system", "alone")])
    changes = policy_changes(SMALL, "Be brief.", 0.9, 100)
    assert (changes["system"], changes["sampling"].temperature, changes["max_tokens"]) == ("Be brief.", 0.9, 100)
    assert policy_changes(SMALL, "", 0.0, None) == {}
    with pytest.raises(OptionError, match="did you mean 'answer'"):
        SolverSession(setup, "anwser")  # type: ignore[arg-type]
