"""From the events alone: finished problems whole, unfinished ones exactly as they stood."""

from __future__ import annotations

from dataclasses import replace

import pytest

from atts.core import Completion, Decision, Problem, SampleRequest, Sampling, ScoreRequest, Scores
from atts.journal import (
    Decided,
    Entry,
    Event,
    Graded,
    Observed,
    RolloutFinished,
    RunState,
    Sampled,
    Scored,
    SessionClosed,
    SessionOpened,
    TurnFinished,
    Warned,
    read_outcomes,
    sample_key,
    score_key,
)
from atts.seeds import Seed


def entries(events: list[Event]) -> list[Entry]:
    """Events as a journal would number them."""
    return [Entry(number, 1, float(number), 0.0, event) for number, event in enumerate(events)]


def test_a_finished_problem_is_whole(story: list[Event]) -> None:
    """Its outcome holds every rollout, turn by turn, in the outcome's order."""
    (outcome,) = read_outcomes(entries(story))
    assert [rollout.sample for rollout in outcome.rollouts] == [1, 0]
    turns = [event.turn for event in story if isinstance(event, TurnFinished) and event.sample == 0]
    assert outcome.rollouts[1].turns == tuple(turns)
    assert (outcome.answer, outcome.votes, outcome.rollouts[0].finish) == ("4", {"4": 2.0}, "answer")


def test_every_prefix_is_a_state(story: list[Event]) -> None:
    """After any number of events, an open problem's rollouts are what had been recorded by then."""
    for count in range(1, len(story)):
        state = RunState()
        for entry in entries(story[:count]):
            assert state.apply(entry) is None
        inside = state.open["p0"]
        turns = [event for event in story[:count] if isinstance(event, TurnFinished)]
        assert sum(len(rollout.turns) for rollout in inside.rollouts.values()) == len(turns)
        ended = [event.sample for event in story[:count] if isinstance(event, RolloutFinished)]
        assert inside.finished == ended
        assert [sample for sample, rollout in inside.rollouts.items() if rollout.finish] == ended


def test_a_finished_problem_lets_go_of_its_steps(story: list[Event]) -> None:
    """What stays is a line per problem, verdicts before and after the outcome included."""
    state = RunState()
    graded = [Graded("p0", "correct", sample=0), Graded("p0", "wrong")]
    for entry in entries([*story[:-1], graded[0], story[-1], graded[1], Scored("p0", "late", Scores((-1.0,)))]):
        state.apply(entry)
    assert not state.open
    assert state.reached["p0"].answer == "4"
    assert state.graded["p0"] == tuple(graded)


def test_steps_are_found_again(story: list[Event]) -> None:
    """Results by key, the gate's calls in order within their turn."""
    done = Completion((1,), "x", "end", (0.0,))
    first, second = (Decision("accept", 0.4, "p0", turn=1, score=score) for score in (1.0, 2.0))
    steps: list[Event] = [
        Sampled("p0", "a", done, "draft"),
        Scored("p0", "b", Scores((-2.0,))),
        Decided(first),
        Decided(second),
        Observed(first, "no"),
        Sampled("elsewhere", "c", done, "draft"),
        Warned("w", "about it", problem="p0"),
    ]
    state = RunState()
    for entry in entries([story[0], *steps]):
        state.apply(entry)
    inside = state.open["p0"]
    assert (inside.completions, inside.scores) == ({"a": done}, {"b": Scores((-2.0,))})
    assert [list(calls) for calls in inside.gate.values()] == [[Decided(first), Decided(second), Observed(first, "no")]]


def test_how_the_last_session_ended() -> None:
    """Killed, until a closing line says otherwise."""
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
    ],
)
def test_a_key_names_all_that_decides_the_answer(other: SampleRequest) -> None:
    """Different questions never share a key; hints and priorities make no difference."""
    assert sample_key(other) != sample_key(REQUEST)
    assert sample_key(replace(REQUEST, rollout="elsewhere", priority=9)) == sample_key(REQUEST)


def test_a_score_key_knows_where_the_suffix_begins() -> None:
    """The same ids cut elsewhere are another question."""
    keys = [
        ScoreRequest((1, 2), (3,)),
        ScoreRequest((1,), (2, 3)),
        ScoreRequest((1, 2), (4,)),
        ScoreRequest((1,), (2,)),
    ]
    assert len({score_key(key) for key in keys}) == 4
    assert score_key(replace(keys[0], rollout="x", priority=3)) == score_key(keys[0])


def test_problems_are_known_by_id() -> None:
    """A problem started twice (resumed) stays one."""
    from atts.journal import ProblemStarted

    state = RunState()
    for entry in entries([ProblemStarted(Problem("a", "x")), ProblemStarted(Problem("a", "x"))]):
        state.apply(entry)
    assert list(state.open) == ["a"]
