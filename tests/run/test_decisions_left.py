"""Tests of the forecast of a run's remaining decisions, made from the lengths of rollouts that
ended.
"""

import itertools
import random

import pytest

from atts.core import Decision
from atts.run import RunLengthEstimate


def decide(left: RunLengthEstimate, problem: str, sample: int, turn: int) -> None:
    """Count one decision in the forecast."""
    left.count(Decision("accept", 0.2, problem, turn, sample))


def test_rollouts_that_take_equally_many_decisions_are_known_once_one_has_ended() -> None:
    """If all rollouts take the same number of decisions, the forecast is exact once one rollout has
    ended.

    A rollout in flight is expected to take only the decisions that it has not taken yet.
    """
    left = RunLengthEstimate(10, 2)
    for problem in range(4):
        for turn in range(5 if problem < 2 else 3):
            assert left.share == 1.0
            for sample in range(2):
                decide(left, str(problem), sample, turn)
    for problem in range(2):
        for sample in range(2):
            left.end(str(problem), sample)
    assert left.share == pytest.approx(1 - 32 / 100)


@pytest.mark.parametrize("in_flight", [8, 64])
def test_the_expected_number_is_near_the_truth_in_the_middle_of_a_run(in_flight: int) -> None:
    """In the middle of a run the forecast is near the true number of remaining decisions.

    The first rollouts to end are short, so the forecast must not treat them as typical.
    """
    draw = random.Random(3)
    ratios = list[float]()
    for _ in range(20):
        lengths = {(str(p), s): 4 + draw.randrange(5) for p in range(40) for s in range(8)}
        left = RunLengthEstimate(40, 8)
        waiting = list(lengths)
        going = list[tuple[str, int, int]]()
        done = 0
        while waiting or going:
            while waiting and len(going) < in_flight:
                going.append((*waiting.pop(), 0))
            problem, sample, turn = going.pop(draw.randrange(len(going)))
            decide(left, problem, sample, turn)
            done += 1
            if turn + 1 == lengths[problem, sample]:
                left.end(problem, sample)
            else:
                going.append((problem, sample, turn + 1))
            if done == sum(lengths.values()) // 2:
                share = left.share
                assert share is not None
                ratios.append(share / (1 - share))
    assert 0.9 < sum(ratios) / len(ratios) < 1.1


def test_rollouts_of_sorted_problems_are_expected_to_be_like_the_latest() -> None:
    """If hard problems come first, the forecast expects later rollouts to be like the latest ones.

    If all rollouts had equal weight, the forecast would be 1.8 times too high.
    """
    draw = random.Random(5)
    ratios = list[float]()
    for _ in range(20):
        lengths = {
            (str(p), s): 3 + (6 * (39 - p)) // 39 + draw.randrange(3)
            for p in range(40)
            for s in range(8)
        }
        left = RunLengthEstimate(40, 8)
        unfinished = dict.fromkeys(map(str, range(40)), 8)
        waiting = list(lengths)[::-1]
        going = list[tuple[str, int, int]]()
        done = 0
        total = sum(lengths.values())
        while done < 0.8 * total:
            while waiting and len(going) < 64:
                going.append((*waiting.pop(), 0))
            problem, sample, turn = going.pop(draw.randrange(len(going)))
            decide(left, problem, sample, turn)
            done += 1
            if turn + 1 == lengths[problem, sample]:
                left.end(problem, sample)
                unfinished[problem] -= 1
                if not unfinished[problem]:
                    left.conclude(problem)
            else:
                going.append((problem, sample, turn + 1))
        share = left.share
        assert share is not None
        ratios.append(done * share / (1 - share) / (total - done))
    assert 0.9 < sum(ratios) / len(ratios) < 1.5


def test_the_order_in_which_the_rollouts_of_a_problem_are_stopped_does_not_matter() -> None:
    """The forecast does not depend on the order in which rollouts of one problem are stopped.

    They are stopped together, so a resumed run may see another order.
    """
    shares = set[float | None]()
    for order in itertools.permutations(range(3)):
        left = RunLengthEstimate(4, 3)
        for problem in ("a", "b"):
            for sample in range(3):
                for turn in range(2 * sample + 1):
                    decide(left, problem, sample, turn)
            for sample in order:
                left.end(problem, sample)
            left.conclude(problem)
        shares.add(left.share)
    assert len(shares) == 1


def test_a_settled_problem_has_no_decisions_left() -> None:
    """A settled problem has no decisions left.

    Its cancelled rollouts count with the length that they reached, and those that never started do
    not count.
    """
    left = RunLengthEstimate(4, 2)
    decide(left, "0", 0, 0)
    left.conclude("0")
    # one of two rollouts took a decision, so three of the remaining six are expected to take one
    assert left.share == pytest.approx(3 / 4)
    for problem in "123":
        left.conclude(problem)
    # the forecast is never 0, because it includes the decision that is about to be taken
    assert left.share == pytest.approx(1 / 2)


def test_only_decisions_count_and_each_turn_once() -> None:
    """The forecast counts only decisions, one per turn: neither a request for a score nor a
    recalled decision counts again.
    """
    whole = RunLengthEstimate(3, 2)
    repeated = RunLengthEstimate(3, 2)
    for turn in range(3):
        decide(whole, "0", 0, turn)
        for action in ("verify", "accept", "escalate"):
            repeated.count(Decision(action, 0.2, "0", turn, 0))
    for left in (whole, repeated):
        left.end("0", 0)
    assert whole.share == repeated.share == pytest.approx(15 / 18)


def test_a_run_of_unknown_size_has_no_forecast() -> None:
    """A run with an unknown number of problems has no forecast."""
    left = RunLengthEstimate(None, 2)
    decide(left, "0", 0, 0)
    left.end("0", 0)
    assert left.share is None
