"""Tests of the state rebuilt from events: a short record of finished problems, and the exact state
of open ones.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from atts.core import (
    Completion,
    Decision,
    Problem,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
)
from atts.journal import (
    CallFailed,
    CallSpan,
    Decided,
    Entry,
    Event,
    Graded,
    Observed,
    OpenProblem,
    ProblemStarted,
    RolloutFinished,
    RunState,
    Sampled,
    Scored,
    SessionClosed,
    SessionOpened,
    TurnFinished,
    Warned,
    read_outcomes,
)
from atts.run import request_key
from atts.sampling import Seed


def entries(events: list[Event]) -> list[Entry]:
    """Number events as a journal would."""
    return [Entry(number, 1, float(number), 0.0, event) for number, event in enumerate(events)]


def test_a_finished_problem_is_whole(story: list[Event]) -> None:
    """The outcome of a finished problem has each rollout turn by turn, in the recorded order."""
    (outcome,) = read_outcomes(entries(story))
    assert [rollout.sample for rollout in outcome.rollouts] == [1, 0]
    turns = [event.turn for event in story if isinstance(event, TurnFinished) and event.sample == 0]
    assert outcome.rollouts[1].turns == tuple(turns)
    assert (outcome.answer, outcome.votes, outcome.rollouts[0].finish) == (
        "4",
        {"4": 2.0},
        "answer",
    )


def test_every_prefix_is_a_state(story: list[Event]) -> None:
    """After any number of events, the state has exactly the rollouts of the open problem that were
    recorded so far.
    """
    for count in range(1, len(story)):
        state = RunState()
        for entry in entries(story[:count]):
            assert state.apply(entry) is None
        inside = state.open["p0"]
        turns = [event for event in story[:count] if isinstance(event, TurnFinished)]
        assert sum(len(rollout.turns) for rollout in inside.rollouts.values()) == len(turns)
        ended = [event.sample for event in story[:count] if isinstance(event, RolloutFinished)]
        assert [sample for sample, rollout in inside.rollouts.items() if rollout.finish] == ended


def test_a_finished_problem_keeps_one_line(story: list[Event]) -> None:
    """The state drops the turns of a finished problem to save memory, but keeps all verdicts,
    including those recorded after the outcome.
    """
    state = RunState()
    graded = [Graded("p0", "correct", sample=0), Graded("p0", "wrong")]
    for entry in entries(
        [*story[:-1], graded[0], story[-1], graded[1], Scored("p0", "late", Scores((-1.0,)))]
    ):
        state.apply(entry)
    assert not state.open
    assert state.finished["p0"].answer == "4"
    assert state.finished["p0"].verdict == "wrong"
    assert [(one.sample, one.verdict) for one in state.finished["p0"].samples] == [
        (1, None),
        (0, "correct"),
    ]


DONE = Completion((1,), "x", "end", (0.0,))
SAMPLED = Sampled("p0", "a", DONE, "draft", "p0/0")
REFUSED = CallFailed(
    "p0", "b", "target", "EngineUnavailable", "target", "engine target: refused", "p0/0"
)


def open_problem(story: list[Event], steps: list[Event]) -> OpenProblem:
    """Return the first problem after these steps."""
    state = RunState()
    for entry in entries([story[0], *steps]):
        state.apply(entry)
    return state.open["p0"]


def test_recorded_calls_are_found_by_key(story: list[Event]) -> None:
    """The state finds the recorded result of a call by the call's key, and keeps the gate's calls
    of each turn in order. It leaves out calls of other problems.
    """
    first, second = (Decision("accept", 0.4, "p0", turn=1, score=score) for score in (1.0, 2.0))
    scored = Scored("p0", "b", Scores((-2.0,)), rollout="p0/0")
    calls: list[Event] = [Decided(first), Decided(second), Observed(first, False)]
    others: list[Event] = [
        structs.replace(SAMPLED, problem="elsewhere"),
        Warned("w", "about it", problem="p0"),
    ]
    inside = open_problem(story, [SAMPLED, scored, *calls, *others, SAMPLED])
    assert {key: list(found) for key, found in inside.calls.items()} == {
        "a": [SAMPLED, SAMPLED],
        "b": [scored],
    }
    assert [list(found) for found in inside.gate.values()] == [calls]


def test_a_failure_is_final_once_its_rollout_continued(story: list[Event]) -> None:
    """A recorded failure of a call is final once the same rollout records a later step or note, or
    ends its turn. A sibling's step does not make it final.
    """
    prompt = story[1]
    turn = story[2]
    forced = Observed(Decision("escalate", 0.4, "p0", why="forced: not scored"), True)
    other = structs.replace(SAMPLED, rollout="p0/1", sample=1, key="c")
    assert "b" not in open_problem(story, [SAMPLED, REFUSED]).calls
    assert "b" not in open_problem(story, [SAMPLED, REFUSED, other]).calls
    for after in ([SAMPLED], [forced], [prompt, turn]):
        assert list(open_problem(story, [SAMPLED, REFUSED, REFUSED, *after]).calls["b"]) == [
            REFUSED,
            REFUSED,
        ]


def test_a_turn_may_be_replaced(story: list[Event]) -> None:
    """The later record of a turn replaces the earlier one and removes the records after it."""
    prompt, first, second = story[1:4]
    assert isinstance(first, TurnFinished)
    assert isinstance(second, TurnFinished)
    second_report = structs.replace(first, turn=replace(first.turn, note="again"))
    inside = open_problem(story, [prompt, first, second, second_report])
    assert inside.rollouts[0].turns == (second_report.turn,)
    assert list(inside.turns[0]) == [first.turn, second.turn, second_report.turn]


def test_numbers_and_time_continue_across_sessions() -> None:
    """Node numbers continue from the last session's, and the run's duration is the sum over all
    sessions.
    """
    node = CallSpan(7, "draft", "draft", "p", 0, 0, 0.0, 0.0, 0.0, 1.0)
    state = RunState()
    opened = SessionOpened(1, 1, "", 1)
    for at, event in (
        (0.0, opened),
        (2.5, node),
        (0.0, structs.replace(opened, session=2)),
        (1.5, Warned("w", "")),
    ):
        state.apply(Entry(0, 1, at, 0.0, event))
    assert (state.last_node, state.seconds) == (7, 4.0)
    state.apply(Entry(0, 1, 0.0, 0.0, structs.replace(opened, session=3)))
    state.apply(Entry(0, 1, 9.0, 0.0, SessionClosed("finished")))
    assert state.seconds == 4.0, "an empty session must not add to the run's time"


def test_a_session_counts_as_killed_until_its_closing_line() -> None:
    """A session counts as killed until its closing line, which says how it ended, is read."""
    state = RunState()
    state.apply(entries([SessionOpened(1, 3, "", 1)])[0])
    assert (state.sessions, state.ended) == (3, None)
    state.apply(entries([SessionClosed("interrupted")])[0])
    assert state.ended == SessionClosed("interrupted")


REQUEST = SampleRequest((1, 2), 5, Sampling(0.5), Seed(1, "p", 2, 3), ("\n",), (7,), "hint", 1)


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, ids=(1, 3)),
        replace(REQUEST, ids=(1, 2, 2)),
        replace(REQUEST, max_tokens=6),
        replace(REQUEST, sampling=Sampling(0.6)),
        replace(REQUEST, seed=Seed(1, "p", 2, 4)),
        replace(REQUEST, stop=()),
        replace(REQUEST, stop_ids=(8,)),
        replace(REQUEST, rollout="another"),
    ],
)
def test_a_key_contains_all_that_decides_the_reply(other: SampleRequest) -> None:
    """Different requests never have the same key, and priorities do not change the key."""
    assert request_key("draft", other) != request_key("draft", REQUEST)
    assert request_key("draft", replace(REQUEST, priority=9)) == request_key("draft", REQUEST)
    assert request_key("target", REQUEST) != request_key("draft", REQUEST)


def test_a_score_key_knows_where_the_suffix_begins() -> None:
    """A score request's key depends on where the prefix ends and the suffix begins, because only
    the suffix is scored.
    """
    keys = [
        ScoreRequest((1, 2), (3,)),
        ScoreRequest((1,), (2, 3)),
        ScoreRequest((1, 2), (4,)),
        ScoreRequest((1,), (2,)),
        ScoreRequest((1,), (2,), draw=REQUEST),
        ScoreRequest((1,), (2,), draw=replace(REQUEST, seed=Seed(1, "p", 9, 4))),
        ScoreRequest((1,), (2,), draw=replace(REQUEST, num_begun=1)),
    ]
    assert len({request_key("target", key) for key in keys}) == len(keys)
    assert request_key("target", replace(keys[0], priority=3)) == request_key("target", keys[0])


def test_problems_are_known_by_id() -> None:
    """A problem that a resumed session starts again is the same problem."""

    state = RunState()
    for entry in entries([ProblemStarted(Problem("a", "x")), ProblemStarted(Problem("a", "x"))]):
        state.apply(entry)
    assert list(state.open) == ["a"]
