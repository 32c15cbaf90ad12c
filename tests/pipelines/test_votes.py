"""Tests of votes: equivalent answers count together, a vote settles only if certain, and weights
follow confidence.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atts.core import Outcome, Prompt, Rollout
from atts.graph import RolloutResult
from atts.pipelines import (
    Ballot,
    FixedGate,
    Policy,
    Tally,
    cannot_change,
    settled_probability,
    tally,
)
from atts.pipelines.rollout import RunningVote
from atts.pipelines.votes import weight

Solve = Callable[..., list[Outcome]]


def modulo(answers: Sequence[str]) -> list[int]:
    """Group numbers by their remainder modulo 3, so that different strings may be one answer."""
    return [int(answer) % 3 for answer in answers]


BALLOTS = st.lists(st.integers(0, 8), min_size=1, max_size=8)


@settings(max_examples=100, deadline=None)
@given(BALLOTS, st.randoms(use_true_random=False))
def test_the_count_does_not_depend_on_spelling_or_on_order(
    numbers: list[int], rng: random.Random
) -> None:
    """The weight of each class depends neither on the spelling nor on the order of the answers.

    The spelling that represents a class may change. If two classes tie, the class seen first wins.
    """
    count = tally([Ballot(str(n)) for n in numbers], modulo)
    shuffled = numbers[:]
    rng.shuffle(shuffled)
    other = tally([Ballot(str(n)) for n in shuffled], modulo)
    assert sorted(count.weights) == sorted(other.weights)
    assert sum(count.counts) == len(numbers)
    assert count.weights == tuple(sorted(count.weights, reverse=True))
    assert count.winner in {str(n) for n in numbers}


@settings(max_examples=60, deadline=None)
@given(BALLOTS, st.integers(0, 4))
def test_a_settled_vote_cannot_change(numbers: list[int], remaining: int) -> None:
    """For every vote called settled, an enumeration shows that the remaining votes cannot change
    the winner.
    """
    count = tally([Ballot(str(n)) for n in numbers], modulo)
    if cannot_change(count, remaining):
        for more in itertools.product(range(9), repeat=remaining):
            final = tally([Ballot(str(n)) for n in (*numbers, *more)], modulo)
            assert int(final.winner or -1) % 3 == int(count.winner or -1) % 3


def test_a_lead_that_could_be_caught_is_not_settled() -> None:
    """A lead equal to the number of remaining votes is not settled, but a lead of one vote more is
    settled.
    """
    assert not cannot_change(Tally(("1", "2"), (4.0, 1.0), (4, 1)), 3)
    assert cannot_change(Tally(("1", "2"), (5.0, 1.0), (5, 1)), 3)
    assert not cannot_change(Tally((), (), ()), 0)


def test_a_vote_settles_with_the_first_rollout_after_which_no_other_answer_can_win() -> None:
    """A vote is settled once the remaining rollouts cannot change its winner. Of four or five
    rollouts this takes three with the same answer, of three it takes two.
    """
    for samples, needed in ((5, 3), (4, 3), (3, 2)):
        rollouts = [
            Rollout("p", sample, Prompt((1,), (1,)), finish="answer", answer="7")
            for sample in range(samples)
        ]
        vote = RunningVote(Policy(samples=samples, early_stop="certain"), modulo)
        settled_after = [
            sample + 1
            for sample in range(samples - 1)
            if vote.add_result(RolloutResult(sample, "done", rollouts[sample]))
        ]
        assert settled_after[0] == needed


@pytest.mark.parametrize(
    ("counts", "remaining"), [((4,), 4), ((3, 1), 4), ((2, 1, 1), 4), ((5, 2), 6)]
)
def test_the_settled_probability_is_a_lower_bound(counts: tuple[int, ...], remaining: int) -> None:
    """Under the documented model of answers, the leader of a vote wins at least as often as
    computed, and at most 0.2 more often.
    """
    names = tuple(str(i) for i in range(len(counts)))
    claim = settled_probability(Tally(names, tuple(map(float, counts)), counts), remaining)
    rng = random.Random(1)
    wins = 0
    for _ in range(4000):
        urn = [*(count + 1.0 for count in counts), 1.0]
        final = [*counts, 0]
        for _ in range(remaining):
            drawn = rng.choices(range(len(urn)), urn)[0]
            urn[drawn] += 1
            final[drawn] += 1
        wins += final[0] > max(final[1:])
    noise = 3 * math.sqrt(0.25 / 4000)
    assert claim - noise <= wins / 4000 <= claim + 0.2


def test_weights_are_bounded_and_survive_bad_scores() -> None:
    """If log-probabilities are missing or infinite, the vote still counts, with a weight between 0
    and 1.
    """
    assert weight("majority", []) == 1.0
    assert weight("confidence", [math.log(0.25), math.log(0.25)]) == pytest.approx(0.25)
    assert 0 < weight("confidence", [-math.inf]) == weight("confidence", []) < 1


POLICY = Policy(samples=12, early_stop="none")


@pytest.mark.parametrize("stop", ["certain", "likely"])
def test_settling_a_vote_saves_rollouts(attempt: Solve, stop: Literal["certain", "likely"]) -> None:
    """Both settings cancel rollouts once a vote is settled. With `certain` every winner is that of
    the full vote, and with `likely` nearly every winner is.
    """
    full = attempt(POLICY, FixedGate("accept"), problems=15)
    early = attempt(replace(POLICY, early_stop=stop), FixedGate("accept"), problems=15)
    spared = [sum(r.finish == "settled" for r in outcome.rollouts) for outcome in early]
    assert sum(spared) > 0
    assert all("settled" in outcome.why for outcome, n in zip(early, spared, strict=True) if n)
    agree = [a.answer == b.answer for a, b in zip(full, early, strict=True)]
    assert all(agree) if stop == "certain" else sum(agree) >= 13


def test_a_first_wave_that_agrees_ends_the_problem(attempt: Solve) -> None:
    """If the first three rollouts give the same answer, no more are requested. Otherwise all twelve
    are.
    """
    outcomes = attempt(replace(POLICY, first_wave=3), FixedGate("accept"), problems=15)
    sizes = {len(outcome.rollouts) for outcome in outcomes}
    assert sizes == {3, 12}
    for outcome in outcomes:
        first = {rollout.answer for rollout in outcome.rollouts[:3]}
        assert (len(outcome.rollouts) == 3) == (len(first) == 1 and None not in first)


def test_waves_grow_until_they_agree(attempt: Solve) -> None:
    """With growing waves, easy problems end after the first wave and the hardest problems use all
    samples.
    """
    policy = replace(POLICY, samples=16, first_wave=2, growth=2.0, agreement=0.7)
    sizes = [len(outcome.rollouts) for outcome in attempt(policy, FixedGate("accept"), problems=20)]
    assert set(sizes) <= {2, 4, 8, 16}
    assert len(set(sizes)) > 2


def test_the_heaviest_answer_wins_not_the_most_frequent() -> None:
    """Two uncertain votes weigh less than a certain vote, and the reported counts are
    unweighted.
    """
    count = tally([Ballot("1", 0.2), Ballot("4", 0.3), Ballot("2", 0.9)], modulo)
    assert count.winner == "2"
    assert count.weights == pytest.approx((0.9, 0.5))
    assert count.counts == (1, 2)
    assert count.lead == pytest.approx(0.4)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0.001, 1.0)), min_size=1, max_size=8))
def test_weighted_votes_match_a_sum_by_hand(ballots: list[tuple[int, float]]) -> None:
    """Each class weighs the sum of its votes, and no class is heavier than the winner's."""
    count = tally([Ballot(str(number), share) for number, share in ballots], modulo)
    sums = [0.0] * 3
    for number, share in ballots:
        sums[number % 3] += share
    assert count.winner is not None
    assert sums[int(count.winner) % 3] == pytest.approx(max(sums))
    assert count.weights == pytest.approx(tuple(sorted((s for s in sums if s), reverse=True)))


def test_a_lead_equal_to_what_is_left_is_not_settled() -> None:
    """A vote is not settled if the remaining votes could make a tie, because a tie is won by the
    class seen first.
    """
    ahead = tally([Ballot("1"), Ballot("1"), Ballot("2")], modulo)
    assert not cannot_change(ahead, 1)
    assert cannot_change(tally([Ballot("1"), Ballot("1")], modulo), 1)
    assert not cannot_change(tally([], modulo), 0)


def test_a_tie_is_never_settled() -> None:
    """The computed probability that the leader wins excludes ties: if two classes tie and no vote
    remains, it is 0.
    """
    level = Tally(("1", "2"), (2.0, 2.0), (2, 2))
    assert settled_probability(level, 0) == 0.0
    assert settled_probability(level, 3) < 0.5
    ahead = Tally(("1", "2"), (3.0, 2.0), (3, 2))
    assert settled_probability(ahead, 0) == 1.0
    # the last vote makes a tie with probability (2 + 1) / (5 + 3)
    assert settled_probability(ahead, 1) == pytest.approx(1 - 3 / 8)
