"""Tests that a vote in an event loop does not wait for sympy, because a thread calls sympy's
worker.
"""

import threading
from typing import Any

import anyio
import pytest

from atts.api import answers_for
from atts.evaluators import takes_long
from atts.evaluators.equivalence import algebra

ANSWERS = (r"\sum_{k=1}^{n}k^7\binom{n}{k}", r"\int_0^n x^7\binom{n}{x}\,dx", "12")


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace sympy's worker by one that decides nothing, and list the threads that call it."""
    threads = list[str]()

    def reply(question: str) -> Any:
        threads.append(threading.current_thread().name)
        return None

    monkeypatch.setattr(algebra, "WORKER", algebra.Worker())
    monkeypatch.setattr(algebra.WORKER, "reply", reply)
    return threads


def test_a_thread_asks_each_question_once(asking: list[str]) -> None:
    """Before a vote, another thread asks sympy each question once. The vote in the event loop then
    uses the stored replies.
    """
    answers = answers_for("math")

    async def vote() -> list[int]:
        await answers.prepare(ANSWERS)
        assert not takes_long(ANSWERS)
        return list(answers.group(ANSWERS))

    assert takes_long(ANSWERS)
    assert asking == []
    assert anyio.run(vote) == [0, 1, 2]
    assert asking
    assert threading.current_thread().name not in asking


def test_answers_that_are_grouped_at_once_start_no_thread(asking: list[str]) -> None:
    """Numbers can be grouped without sympy, so atts groups them in the event loop and starts no
    thread.
    """
    assert not takes_long(("1/2", "0.5", None, "7"))
    assert asking == []


def test_a_remembered_answer_does_not_wait_for_another_question(asking: list[str]) -> None:
    """While one question waits for sympy, atts can still read replies to earlier ones."""
    algebra.WORKER.answers["a", "b", "[]"] = True
    with algebra.WORKER.lock:
        thread = threading.Thread(target=lambda: asking.append(str(algebra.WORKER.ask("a", "b"))))
        thread.start()
        thread.join(10)
    assert asking == ["True"]


def test_equal_texts_are_not_grouped_before_a_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """If all answers are the same string, they are not grouped before the vote, which saves time
    because rollouts mostly agree.
    """
    grouped = list[Any]()

    def takes_none(answers: Any, kind: str) -> bool:
        grouped.append(answers)
        return False

    monkeypatch.setattr("atts.evaluators.takes_long", takes_none)
    prepare = answers_for("math").prepare
    anyio.run(prepare, ("5", "5"))
    assert grouped == []
    anyio.run(prepare, ("5", "7"))
    assert grouped == [("5", "7")]
