"""Advice from recorded runs: what is counted is exact, what was not run is bounded."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atts.analysis.planning import GradedCase, Option, PlanData, frontier, options, read_plan_data
from atts.api import Setup, evaluate_sync, plan
from atts.core import Problem
from atts.journal import JOURNAL, read_entries, read_outcomes
from atts.pipelines import Policy
from atts.testing import toy_problems

PROBLEMS = 12


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve toy problems, five rollouts each, none spared."""
    folder = tmp_path_factory.mktemp("plan") / "run"
    policy = Policy(samples=5, turns=8, max_tokens=300, early_stop="none")
    setup = Setup(draft="scripted", target="scripted", policy=policy, rate=0.3)
    evaluate_sync(toy_problems(PROBLEMS), setup, directory=folder)
    return folder


@pytest.fixture(scope="module")
def record(recorded: Path) -> PlanData:
    """What a plan reads of it."""
    return read_plan_data(recorded)


def test_all_rollouts_at_all_turns_are_the_run_itself(record: PlanData, recorded: Path) -> None:
    """The largest option costs what the run cost, and its vote is as often right."""
    largest = list(options(record))[-1]
    outcomes = list(read_outcomes(read_entries(recorded / JOURNAL)))
    assert largest.samples == 5
    assert largest.draft_tokens == pytest.approx(
        sum(one.usage.draft_tokens for one in outcomes) / PROBLEMS
    )
    assert largest.target_tokens == pytest.approx(
        sum(one.usage.target_tokens for one in outcomes) / PROBLEMS
    )
    assert largest.scored_tokens == pytest.approx(
        sum(one.usage.scored_tokens for one in outcomes) / PROBLEMS
    )
    clear = [case for case in record.cases if _is_clear([line.label for line in case.rollouts])]
    assert len(clear) >= 3
    votes = sum(case.vote for case in record.cases) / PROBLEMS
    assert abs(largest.accuracy.value - votes) <= (PROBLEMS - len(clear)) / PROBLEMS


def _is_clear(labels: list[Any]) -> bool:
    """Whether one answer has more votes than any other."""
    counts = sorted((labels.count(label) for label in set(labels) - {None}), reverse=True)
    return len(counts) == 1 or (len(counts) > 1 and counts[0] > counts[1])


def _longest(record: PlanData) -> int:
    return max(len(line.turns) for case in record.cases for line in case.rollouts)


def test_fewer_rollouts_are_counted_over_all_subsets(record: PlanData) -> None:
    """Two of five: the mean over the ten pairs, ties as halves, the longest wait of each pair."""
    found = next(
        option
        for option in options(record)
        if option.samples == 2 and option.turns == _longest(record)
    )
    rights = []
    waits = []
    for case in record.cases:
        for pair in itertools.combinations(case.rollouts, 2):
            answered = [line for line in pair if line.label is not None]
            same = len({line.label for line in answered}) == 1
            rights.append(
                float(answered[0].is_right is True)
                if same
                else sum(line.is_right is True for line in answered) / max(1, len(answered))
            )
            waits.append(max(sum(step.seconds for step in line.turns) for line in pair))
    assert found.accuracy.value == pytest.approx(sum(rights) / len(rights))
    assert found.seconds == pytest.approx(sum(waits) / len(waits))


def test_what_could_not_be_scored_is_told_with_every_option(record: PlanData) -> None:
    """Rollouts that could not be scored count as wrong; the rate were they right is beside it."""
    data = replace(record, cases=[_unscored(case) for case in record.cases])
    for option, known in zip(options(data), options(record), strict=True):
        assert option.accuracy.value == 0
        assert (option.accuracy.if_right or (0,))[0] == pytest.approx(known.accuracy.value)
    assert "unscored" in list(options(data))[-1].accuracy.brief()


def _unscored(case: GradedCase) -> GradedCase:
    """The same, what was right unscored."""
    return replace(
        case,
        rollouts=tuple(
            replace(one, is_right=None if one.is_right else False) for one in case.rollouts
        ),
    )


def test_fewer_turns_cost_what_was_written_in_them(record: PlanData) -> None:
    """One turn of one rollout: the mean of the first steps, and no answer that came later."""
    found = next(option for option in options(record) if (option.samples, option.turns) == (1, 1))
    firsts = [line.turns[0] for case in record.cases for line in case.rollouts]
    assert found.draft_tokens == pytest.approx(
        sum(step.draft_tokens for step in firsts) / len(firsts)
    )
    right = [
        len(line.turns) == 1 and line.is_right is True
        for case in record.cases
        for line in case.rollouts
    ]
    assert found.accuracy.value == pytest.approx(sum(right) / len(right))


def test_a_cap_is_kept_and_the_best_below_it_is_advised(recorded: Path, record: PlanData) -> None:
    """No option below the cap is more often right; one that nothing fits is said to be so."""
    every = list(options(record))
    middle = sorted(option.target_tokens for option in every)[len(every) // 2]
    found = plan(recorded, target_tokens=middle)
    assert found.best is not None
    assert found.best.target_tokens <= middle
    assert found.best.accuracy.value == max(
        o.accuracy.value for o in every if o.target_tokens <= middle
    )
    assert plan(recorded, tokens=0.5).best is None
    both = plan(recorded, target_tokens=middle, seconds=found.best.seconds / 2).best
    assert both is None or both.seconds <= found.best.seconds / 2


def test_nothing_on_the_frontier_is_beaten(record: PlanData) -> None:
    """Dearer is better along it, and everything left out costs at least as much for no more,
    rounding aside.
    """
    every = list(options(record))
    kept = frontier(every, "target_tokens")
    assert all(a.accuracy.value < b.accuracy.value for a, b in itertools.pairwise(kept))

    def is_beaten(option: Option) -> bool:
        value = option.accuracy.value - 1e-12  # means of the same answers, added in another order
        return any(
            k.target_tokens <= option.target_tokens and k.accuracy.value >= value for k in kept
        )

    assert all(is_beaten(option) for option in every)


def test_a_rate_nobody_ran_is_bounded(recorded: Path) -> None:
    """More strays mean wider bounds; the recorded rate is not guessed at; more escalations cost
    more.
    """
    guesses = plan(recorded).other_rates
    assert [guess.rate for guess in guesses] == [0.05, 0.1, 0.2, 0.4, 0.6]
    assert all(0 <= guess.low <= guess.high <= 1 for guess in guesses)
    assert [guess.target_tokens for guess in guesses] == sorted(
        guess.target_tokens for guess in guesses
    )
    assert all(abs(guess.realised - guess.rate) < 0.1 for guess in guesses)


def test_the_bounds_hold_what_a_run_at_that_rate_came_to(recorded: Path, tmp_path: Path) -> None:
    """The same problems and seeds really run at another rate end between the bounds."""
    policy = Policy(samples=5, turns=8, max_tokens=300, early_stop="none")
    setup = Setup(draft="scripted", target="scripted", policy=policy, rate=0.1)
    result = evaluate_sync(toy_problems(PROBLEMS), setup, directory=tmp_path / "other")
    right = sum(line.verdict == "correct" for line in result.problems) / PROBLEMS
    guess = next(guess for guess in plan(recorded).other_rates if guess.rate == 0.1)
    assert guess.low <= right <= guess.high


def test_several_runs_bring_several_rates(recorded: Path, tmp_path: Path) -> None:
    """What was run at another rate is vouched for, so nothing is guessed; other problems are
    refused.
    """
    policy = Policy(samples=5, turns=8, max_tokens=300, early_stop="none")
    setup = Setup(draft="scripted", target="scripted", policy=policy, rate=0.6)
    evaluate_sync(toy_problems(PROBLEMS), setup, directory=tmp_path / "other")
    found = plan([recorded, tmp_path / "other"])
    assert {option.rate for option in found.options} <= {0.3, 0.6}
    assert found.other_rates == ()
    evaluate_sync([Problem("1", "2 + 2?", "4")], setup, directory=tmp_path / "stranger")
    with pytest.raises(Exception, match="not of the same problems"):
        plan([recorded, tmp_path / "stranger"])


def test_chunk_lengths_are_recounted_from_whole_steps(recorded: Path) -> None:
    """Twice the limit cannot take more turns, half of it not fewer; nothing is claimed about
    accuracy.
    """
    found = plan(recorded).chunks
    assert found is not None
    turns = [choice.turns for choice in found.choices]
    assert turns == sorted(turns, reverse=True)
    assert 0 <= found.fixed <= 1
    assert all(math.isclose(c.seconds, 1 + found.fixed * (c.turns - 1)) for c in found.choices)


def test_the_words_name_the_choice_and_how_it_was_found(atts: Any, runs: Path) -> None:
    """People get flags to copy and what the estimate rests on; programs get the same numbers."""
    said = atts("plan", "runs/atts", "--tokens", "100000")
    assert said.code == 0
    best = json.loads(atts("plan", "runs/atts", "--tokens", "100000", "--json").out)["best"]
    assert (
        f"--method atts --rate {best['rate']:g} --samples {best['samples']} --turns {best['turns']}"
        in said.out
    )
    assert "counted over all subsets" in said.out
    assert "nothing recorded stays below" in atts("plan", "runs/atts", "--tokens", "1").out


def test_a_rate_nobody_ran_is_held_below_the_runs_cap(tmp_path: Path) -> None:
    """The gate that decides again has the cap of the run's own: no rate escalates more than that."""
    setup = Setup(
        draft="scripted",
        target="scripted",
        policy=Policy(samples=4, early_stop="none"),
        rate=0.1,
        cap=0.1,
    )
    found = plan(evaluate_sync(toy_problems(PROBLEMS), setup, directory=tmp_path / "run"))
    assert [one.rate for one in found.other_rates][-1] == 0.6
    assert all(one.realised <= 0.11 for one in found.other_rates)
