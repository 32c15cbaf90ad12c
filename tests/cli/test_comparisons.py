"""Tests of the commands that compare and plan: numbers equal those computed by hand, and advice
states its bounds.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atts.analysis.planning import GradedCase, Option, PlanData, frontier, options, read_plan_data
from atts.api import Setup, compare, evaluate_sync, plan
from atts.cli.comparisons import option_flags
from atts.core import Problem
from atts.journal import JOURNAL, read_entries, read_outcomes
from atts.pipelines import Policy
from atts.testing import toy_problems


def results(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write a file of results."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_accuracy_costs_and_problems_needed_by_hand(tmp_path: Path) -> None:
    """The second run solves four of ten problems that the first run does not, loses one, and uses
    half the target tokens. All results equal values computed by hand.
    """
    before = results(
        tmp_path / "a.jsonl",
        [
            {"id": str(n), "correct": n < 4, "target_tokens": 100 + n, "seconds": 2.0}
            for n in range(10)
        ],
    )
    after = results(
        tmp_path / "b.jsonl",
        [
            {"id": str(n), "correct": 1 <= n < 8, "target_tokens": (100 + n) / 2, "seconds": 3.0}
            for n in range(10)
        ],
    )
    found = compare(before, after)
    assert (found.problems, found.vote.better, found.vote.worse, found.vote.tied) == (10, 4, 1, 5)
    assert (found.vote.first, found.vote.second) == (0.4, 0.7)
    assert found.vote.difference.low <= 0.3 <= found.vote.difference.high
    assert found.mcnemar is not None
    assert (found.mcnemar.both, found.mcnemar.first_only, found.mcnemar.second_only) == (3, 1, 4)
    assert found.mcnemar.p_value == pytest.approx(2 * (1 + 5) / 2**5)
    target, seconds = found.costs
    assert target.name == "target_tokens"
    assert [target.low, target.ratio, target.high] == pytest.approx([0.5, 0.5, 0.5])
    assert seconds.ratio == pytest.approx(1.5)
    # a paired t test with deviation sqrt((5 - 10 * 0.09) / 9) and difference 0.3, power 0.8
    assert found.vote.problems_needed == 42


def test_a_cost_ratio_has_an_interval_over_problems(tmp_path: Path) -> None:
    """Problems of unequal cost widen the interval, and it contains the ratio of the means."""
    costs = [(10, 5), (1000, 100), (20, 19), (500, 400), (30, 3), (70, 70)] * 4
    a = results(
        tmp_path / "a.jsonl",
        [{"id": n, "correct": 1, "target_tokens": x} for n, (x, _) in enumerate(costs)],
    )
    b = results(
        tmp_path / "b.jsonl",
        [{"id": n, "correct": 1, "target_tokens": y} for n, (_, y) in enumerate(costs)],
    )
    (target,) = compare(a, b).costs
    assert target.ratio == pytest.approx(597 / 1630)
    assert 0.05 < target.low < 597 / 1630 < target.high < 0.9


def test_problems_with_unknown_seconds_are_left_out_and_counted(atts: Any, tmp_path: Path) -> None:
    """Seconds are compared on the problems whose seconds are known in both runs. The table counts
    the other problems. If no problem remains, the row is left out.
    """
    rows = [{"id": n, "correct": 1, "seconds": 2.0} for n in range(4)]
    del rows[0]["seconds"]
    a = results(tmp_path / "a.jsonl", rows)
    longer = [{"id": n, "correct": 1, "seconds": 8.0} for n in range(4)]
    b = results(tmp_path / "b.jsonl", longer)
    (seconds,) = compare(a, b).costs
    assert (seconds.first, seconds.second, seconds.ratio, seconds.unknown) == (2.0, 8.0, 4.0, 1)
    assert "without 1 problem whose seconds are unknown" in atts("compare", str(a), str(b)).out
    none = results(tmp_path / "none.jsonl", [{"id": n, "correct": 1} for n in range(4)])
    assert not compare(none, b).costs


def test_a_ratio_over_zero_cost_is_put_into_words(tmp_path: Path) -> None:
    """The draft alone uses no target tokens, so a ratio over its cost is infinite and is written in
    words.
    """
    a = results(
        tmp_path / "a.jsonl", [{"id": n, "correct": 1, "target_tokens": 0} for n in range(3)]
    )
    b = results(
        tmp_path / "b.jsonl", [{"id": n, "correct": 1, "target_tokens": 9} for n in range(3)]
    )
    assert math.isinf(compare(a, b).costs[0].ratio)


def test_votes_without_a_verdict_are_shown_with_their_possible_effect(
    atts: Any, tmp_path: Path
) -> None:
    """Votes without a verdict count as wrong, and the table adds the difference that would result
    if these votes were correct.
    """
    verdicts = {
        "a": ["correct", "wrong", "unscored", "wrong"],
        "b": ["unscored", "unscored", "correct", "wrong"],
    }
    a, b = (
        results(
            tmp_path / f"{name}.jsonl",
            [{"id": n, "verdict": verdict} for n, verdict in enumerate(said)],
        )
        for name, said in verdicts.items()
    )
    found = compare(a, b)
    assert found.unscored == (1, 2)
    assert found.vote.difference.value == 0
    assert found.if_right is not None
    assert found.if_right.difference.value == pytest.approx(0.25)
    assert (
        "answers that could not be graded count as wrong (1 in the first run, 2 in the second); "
        "if they counted as correct, the difference would be +0.250 ["
        in atts("compare", str(a), str(b)).out
    )
    assert (
        "could not be graded"
        not in atts(
            "compare", str(results(tmp_path / "c.jsonl", [{"id": 1, "correct": 1}])), str(a)
        ).out
    )


def test_lines_of_one_problem_are_its_rollouts(tmp_path: Path) -> None:
    """Lines with equal ids are rollouts of one problem, so intervals are over problems."""
    rows = [{"id": "x", "correct": right} for right in (True, False, True)] + [
        {"id": "y", "correct": False}
    ]
    found = compare(results(tmp_path / "a.jsonl", rows), results(tmp_path / "b.jsonl", rows))
    assert found.problems == 2
    assert found.vote.first == pytest.approx((2 / 3 + 0) / 2)
    # McNemar's test needs each problem to be correct or wrong, and this problem has a share of
    # correct rollouts
    assert found.mcnemar is None


def test_accuracy_of_rollouts_reports_cancelled_ones(atts: Any, scripted: tuple[str, ...]) -> None:
    """Short rollouts end first, and a settled vote cancels the others. The accuracy of rollouts is
    therefore biased, and the output gives the number of cancelled rollouts.
    """
    command = ("eval", "arithmetic[:3]", "--samples", "8", *scripted)
    some = atts(*command, "--out", "runs/some").out
    every = atts(*command, "--early-stop", "none", "--out", "runs/every").out
    leaning = (
        r"pass@1 .*, without \d+ rollouts? cancelled after the vote was settled; .* favours fast"
    )
    assert re.search(leaning, some)
    assert "favours fast" not in every


def test_a_comparison_prints_one_p_value_for_one_difference(atts: Any, tmp_path: Path) -> None:
    """McNemar's test could contradict the interval, so only its counts are printed.

    If six of 12 problems are won and none is lost, the interval excludes 0 and McNemar's p is
    0.031; with five won p is 0.062.
    """
    a = results(tmp_path / "a.jsonl", [{"id": n, "correct": False} for n in range(12)])
    b = results(tmp_path / "b.jsonl", [{"id": n, "correct": n < 5} for n in range(12)])
    printed = atts("compare", str(a), str(b)).out
    assert printed.count("p = ") == 1
    assert (
        "answered correctly by both runs: 0, only by the first: 0, only by the second: 5, by neither: 7"
        in printed
    )
    assert "one rollout" not in printed


def test_shares_without_a_vote_are_called_accuracy(atts: Any, tmp_path: Path) -> None:
    """Results files that list rollouts have no vote. The comparison then prints only the mean over
    rollouts, as accuracy.
    """
    rows = [{"id": n, "correct": (n + m) % 3 == 0} for n in range(5) for m in range(4)]
    a = results(tmp_path / "a.jsonl", rows)
    printed = atts("compare", str(a), str(a)).out
    assert "accuracy        0.350 → 0.350" in printed
    assert "\nvote " not in printed


def test_one_problem_has_a_ratio_without_an_interval(atts: Any, tmp_path: Path) -> None:
    """With one problem the ratio is printed without an interval instead of with "nan"."""
    a = results(tmp_path / "a.jsonl", [{"id": 1, "correct": True, "target_tokens": 7}])
    printed = atts("compare", str(a), str(a)).out
    assert "1.000 (no interval for a single problem)" in printed
    assert "nan" not in printed


def test_one_problem_is_named_in_the_singular(atts: Any, tmp_path: Path) -> None:
    """A comparison of one problem says "1 problem"."""
    a, b = (
        results(tmp_path / f"{right}.jsonl", [{"id": 1, "correct": right}])
        for right in (False, True)
    )
    printed = atts("compare", str(a), str(b)).out
    assert "1 problem in common" in printed
    assert "better on 1 problem, worse on 0, the same on 0" in printed


def test_printed_json_compares_like_the_run_directory(
    atts: Any, runs: Path, tmp_path: Path, scripted: tuple[str, ...]
) -> None:
    """The output of `atts eval --json` can be compared like the run directory; only the seconds per
    problem are missing.
    """
    printed = atts(
        "eval", "arithmetic[:3]", "--samples", "3", *scripted, "--out", "runs/atts", "--json"
    ).out
    (tmp_path / "printed.jsonl").write_text(printed)
    found = compare(runs / "atts", tmp_path / "printed.jsonl")
    assert found.problems == 3
    assert found.vote.tied == 3
    assert found.single is not None
    assert found.single.tied == 3
    assert {
        cost.name: cost.ratio for cost in found.costs if cost.name != "seconds"
    } == pytest.approx({"draft_tokens": 1.0, "scored_tokens": 1.0, "target_tokens": 1.0})


def test_a_comparison_names_both_runs_and_all_numbers(atts: Any, runs: Path) -> None:
    """The text names both runs with methods, difference and ratios, and the JSON has the same
    numbers.
    """
    said = atts("compare", "runs/alone", "runs/atts")
    assert said.code == 0
    assert "runs/alone (target-only) → runs/atts (atts)" in said.out
    assert "3 problems in common" in said.out
    record = json.loads(atts("compare", "runs/alone", "runs/atts", "--json").out)
    costs = {cost["name"]: cost for cost in record["costs"]}
    assert costs["draft_tokens"]["ratio"] == "inf"
    assert 0 < costs["target_tokens"]["ratio"] < 1
    assert f"{costs['target_tokens']['ratio']:.3f}" in said.out


def test_a_comparison_with_a_coin_is_called_the_gain_over_it(
    atts: Any, runs: Path, scripted: tuple[str, ...]
) -> None:
    """If one of two compared runs used a coin, the difference is called the gain over a coin; the
    output of other comparisons names no coin.
    """
    coin = ("--method", "coin", "--out", "runs/coin")
    assert atts("eval", "arithmetic[:3]", "--samples", "3", *scripted, *coin).code == 0
    said = atts("compare", "runs/coin", "runs/atts").out
    assert "the difference is the gain of atts over the coin" in said
    reversed_order = atts("compare", "runs/atts", "runs/coin").out
    assert (
        "the gain of atts over the coin is the difference with its sign reversed" in reversed_order
    )
    assert "coin" not in atts("compare", "runs/alone", "runs/atts").out


def test_a_comparison_names_differing_settings_and_cut_rollouts(
    atts: Any, runs: Path, scripted: tuple[str, ...]
) -> None:
    """`atts compare` prints the settings that differ and can change results, and the number of
    rollouts that each run cut; settings that follow from the method are not printed.
    """
    assert "settings differ" not in atts("compare", "runs/alone", "runs/atts").out
    changes = {"chunking.draft_tokens": "12", "system": "Be brief", "sampling.temperature": "0.5"}
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    words += ["--samples", "2", "--max-tokens", "20", "--set", "vote=confidence"]
    assert atts("eval", "arithmetic[:3]", *words, *scripted, "--out", "runs/b").code == 0
    said = atts("compare", "runs/alone", "runs/b").out
    assert (
        "\nsettings differ samples 3 → 2, max_tokens 512 → 20, chunking.draft_tokens 64 → 12, "
        "sampling.temperature 0.7 → 0.5, vote majority → confidence, and 1 more\n"
    ) in said
    assert re.search(r"\ncut {13}0 of \d rollouts in the first run, 6 of 6 in the second\n", said)
    record = json.loads(atts("compare", "runs/alone", "runs/b", "--json").out)
    assert record["settings"][-1]["name"] == "system"
    assert record["settings"][-1]["second"] == "Be brief"
    assert record["cut"] == [0, 6]
    assert record["rollouts"][1] == 6


def test_problems_of_one_run_only_are_left_out_with_a_message(atts: Any, tmp_path: Path) -> None:
    """Only problems that both runs contain are compared, and a message gives the number of the
    other problems.
    """
    results(tmp_path / "a.jsonl", [{"id": n, "correct": 1} for n in range(5)])
    results(tmp_path / "b.jsonl", [{"id": n, "correct": 0} for n in range(3)])
    said = atts("compare", "a.jsonl", "b.jsonl")
    assert "2 problems of a.jsonl, and 0 problems of b.jsonl" in said.err
    assert "3 problems in common" in said.out


PROBLEMS = 12


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run twelve toy problems with five rollouts each, without early stop."""
    folder = tmp_path_factory.mktemp("plan") / "run"
    policy = Policy(samples=5, turns=8, max_tokens=300, early_stop="none")
    setup = Setup(draft="scripted", target="scripted", policy=policy, rate=0.3)
    evaluate_sync(toy_problems(PROBLEMS), setup, directory=folder)
    return folder


@pytest.fixture(scope="module")
def record(recorded: Path) -> PlanData:
    """Read from the run the data that a plan needs."""
    return read_plan_data(recorded)


def test_the_largest_option_of_a_plan_is_the_run_itself(record: PlanData, recorded: Path) -> None:
    """The option with all recorded rollouts and turns has the cost and the accuracy of the run."""
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
    """Return True if one answer has more votes than any other."""
    counts = sorted((labels.count(label) for label in set(labels) - {None}), reverse=True)
    return len(counts) == 1 or (len(counts) > 1 and counts[0] > counts[1])


def _longest(record: PlanData) -> int:
    return max(len(line.turns) for case in record.cases for line in case.rollouts)


def test_fewer_rollouts_are_counted_over_all_subsets(record: PlanData) -> None:
    """For two of five rollouts the plan averages over the ten pairs of rollouts; a tie counts as
    half, and each pair waits for its longer rollout.
    """
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


def test_each_option_reports_its_unscored_rollouts(record: PlanData) -> None:
    """In each option of a plan, unscored rollouts count as wrong. The option also has the accuracy
    that would result if they were correct.
    """
    data = replace(record, cases=[_unscored(case) for case in record.cases])
    for option, known in zip(options(data), options(record), strict=True):
        assert option.accuracy.value == 0
        assert (option.accuracy.if_right or (0,))[0] == pytest.approx(known.accuracy.value)
    assert "unscored" in list(options(data))[-1].accuracy.brief()


def _unscored(case: GradedCase) -> GradedCase:
    """Return the case with its correct rollouts marked as unscored, and all others as wrong."""
    return replace(
        case,
        rollouts=tuple(
            replace(one, is_right=None if one.is_right else False) for one in case.rollouts
        ),
    )


def test_fewer_turns_cost_only_their_tokens(record: PlanData) -> None:
    """An option with one sample and one turn costs the mean tokens of a first turn, and a rollout
    that answers only in a later turn counts as wrong.
    """
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


def test_a_plan_advises_the_best_option_below_a_cap(recorded: Path, record: PlanData) -> None:
    """The plan advises the most accurate option whose cost is below the user's cap, or says that
    all options cost more.
    """
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


def test_the_frontier_is_pareto_optimal(record: PlanData) -> None:
    """Along the frontier cost and accuracy both rise; an option that is left out costs at least as
    much as one on the frontier and is not more accurate.
    """
    every = list(options(record))
    kept = frontier(every, "target_tokens")
    assert all(a.accuracy.value < b.accuracy.value for a, b in itertools.pairwise(kept))

    def is_beaten(option: Option) -> bool:
        # two means of the same answers may differ by rounding
        value = option.accuracy.value - 1e-12
        return any(
            k.target_tokens <= option.target_tokens and k.accuracy.value >= value for k in kept
        )

    assert all(is_beaten(option) for option in every)


def test_a_rate_that_was_not_run_gets_bounds(recorded: Path) -> None:
    """The more another rate differs from the recorded one, the wider are the plan's bounds for this
    rate. The recorded rate itself is not estimated.
    """
    guesses = plan(recorded).other_rates
    assert [guess.rate for guess in guesses] == [0.05, 0.1, 0.2, 0.4, 0.6]
    assert all(0 <= guess.low <= guess.high <= 1 for guess in guesses)
    assert [guess.target_tokens for guess in guesses] == sorted(
        guess.target_tokens for guess in guesses
    )
    assert all(abs(guess.realised - guess.rate) < 0.1 for guess in guesses)


def test_a_run_at_another_rate_ends_within_its_bounds(recorded: Path, tmp_path: Path) -> None:
    """A plan bounds the accuracy at a rate that was not run. The accuracy of a real run at this
    rate, with the same problems and seeds, lies within the bounds.
    """
    policy = Policy(samples=5, turns=8, max_tokens=300, early_stop="none")
    setup = Setup(draft="scripted", target="scripted", policy=policy, rate=0.1)
    result = evaluate_sync(toy_problems(PROBLEMS), setup, directory=tmp_path / "other")
    right = sum(line.verdict == "correct" for line in result.problems) / PROBLEMS
    guess = next(guess for guess in plan(recorded).other_rates if guess.rate == 0.1)
    assert guess.low <= right <= guess.high


def test_a_plan_reports_the_gain_over_a_coin_and_the_power(recorded: Path, tmp_path: Path) -> None:
    """Without a run of a coin the plan suggests one; with a run of a coin, the plan's gain equals
    that of `compare`.
    """
    alone = "\n".join(plan(recorded).notes)
    assert "start a run with --method coin --rate 0.3" in alone
    assert "Power: " in alone
    assert "does not show how much differences vary" in alone
    policy = Policy(samples=5, turns=8, max_tokens=300, early_stop="none")
    setup = Setup(draft="scripted", target="scripted", policy=policy, rate=0.3, method="coin")
    evaluate_sync(toy_problems(PROBLEMS), setup, directory=tmp_path / "coin")
    both = "\n".join(plan([recorded, tmp_path / "coin"]).notes)
    gain = compare(tmp_path / "coin", recorded).single
    assert gain is not None
    assert f"(coin) at rate 0.3: {gain.difference.signed()}" in both
    assert "computed from how much the difference" in both


def test_a_plan_reads_runs_at_several_rates(recorded: Path, tmp_path: Path) -> None:
    """Rates of the given runs are measured instead of estimated, and runs over other problems are
    refused.
    """
    policy = Policy(samples=5, turns=8, max_tokens=300, early_stop="none")
    setup = Setup(draft="scripted", target="scripted", policy=policy, rate=0.6)
    evaluate_sync(toy_problems(PROBLEMS), setup, directory=tmp_path / "other")
    found = plan([recorded, tmp_path / "other"])
    assert {option.rate for option in found.options} <= {0.3, 0.6}
    assert found.other_rates == ()
    evaluate_sync([Problem("1", "2 + 2?", "4")], setup, directory=tmp_path / "stranger")
    with pytest.raises(Exception, match="are on different problems"):
        plan([recorded, tmp_path / "stranger"])


def test_other_chunk_limits_are_estimated_in_turns_only(recorded: Path) -> None:
    """If the plan considers another limit on the tokens of a chunk, it estimates only the number of
    turns. A larger limit gives no more turns, and no accuracy is estimated.
    """
    found = plan(recorded).chunks
    assert found is not None
    turns = [choice.turns for choice in found.choices]
    assert turns == sorted(turns, reverse=True)
    assert 0 <= found.fixed <= 1
    assert all(math.isclose(c.seconds, 1 + found.fixed * (c.turns - 1)) for c in found.choices)


def test_a_plan_prints_only_flags_that_change_the_run(recorded: Path) -> None:
    """The flags have a limit on turns only if it cuts rollouts, and a rate only if the method has
    one.
    """
    first = next(options(read_plan_data(recorded)))
    option = replace(first, method="atts", rate=0.2, samples=4, turns=8, is_cut=False)
    assert option_flags(option) == "--method atts --rate 0.2 --samples 4"
    assert option_flags(replace(option, is_cut=True)).endswith("--samples 4 --turns 8")
    assert option_flags(replace(option, method="target-only")) == "--method target-only --samples 4"


def test_a_plan_prints_flags_to_copy_and_its_basis(atts: Any, runs: Path) -> None:
    """The plan's text has flags to copy and the data behind the advice, and its JSON has the same
    numbers.
    """
    said = atts("plan", "runs/atts", "--tokens", "100000")
    assert said.code == 0
    best = json.loads(atts("plan", "runs/atts", "--tokens", "100000", "--json").out)["best"]
    flags = f"  flags       --method atts --rate {best['rate']:g} --samples {best['samples']}"
    assert flags + (f" --turns {best['turns']}" if best["is_cut"] else "") + "\n" in said.out
    assert "an average over all subsets" in said.out
    assert "no recorded setting stays below" in atts("plan", "runs/atts", "--tokens", "1").out


def test_estimated_rates_respect_the_runs_cap(tmp_path: Path) -> None:
    """The replayed gate has the cap of the recorded run, so no estimated rate exceeds the cap."""
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
