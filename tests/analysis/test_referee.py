"""Tests of stopping and voting rules, on invented rollouts and on recorded ones."""

from __future__ import annotations

import gzip
import json
import math
from itertools import permutations
from pathlib import Path
from random import Random

import pytest

from atts.analysis import PlayedProblem, PlayedRollout, RefereeOptions, referee, referee_run
from atts.analysis.referee import (
    NO_ANSWER,
    ONE_BY_ONE,
    Arrivals,
    StoppingRule,
    best_of_n,
    borda_vote,
    deepconf_offline,
    deepconf_online,
    fixed,
    majority,
    take_all,
    weighted_vote,
)
from atts.cli.app import run as command
from atts.errors import JournalError, OptionError
from atts.journal import open_run
from tests.importers.conftest import Import, run_import, write_lines

__all__ = ["run_import"]  # a fixture; the import makes it known to pytest
RULES = {rule.name: rule for rule in ONE_BY_ONE}


def used(name: str, labels: list[int]) -> int:
    """Return the number of rollouts that a stopping rule uses."""
    return RULES[name].play(Arrivals(labels)).used


def rollout(label: int, is_right: bool, *, tokens: float = 1.0, **scores: float) -> PlayedRollout:
    """Make a rollout with this number of tokens."""
    costs = (1.0, tokens, math.nan, math.nan)
    return PlayedRollout(label, float(is_right), costs, tuple(sorted(scores.items())))


def planted(problems: int, samples: int, seed: int = 1) -> list[PlayedProblem]:
    """Return problems of all difficulties; class 0 is the correct answer."""
    random = Random(seed)
    made: list[PlayedProblem] = []
    for number in range(problems):
        skill = random.betavariate(2, 1)
        rollouts: list[PlayedRollout] = []
        for _ in range(samples):
            label = 0 if random.random() < skill else random.choice([1, 1, 2, NO_ANSWER])
            tokens = random.choice([50.0, 100.0, 200.0])
            rollouts.append(rollout(label, label == 0, tokens=tokens))
        made.append(PlayedProblem(str(number), tuple(rollouts)))
    return made


@pytest.mark.parametrize(
    ("rule", "labels", "expected"),
    [
        ("exact", [0, 0, 0, 1, 2], 3),  # the two remaining votes cannot overtake three equal votes
        ("exact", [0, 0, 1, 1, 2], 5),
        ("exact", [0] + [NO_ANSWER] * 5, 6),
        # P(Beta(5, 1) > 1/2) = 31/32 >= 0.95, but one vote earlier it is 15/16
        ("beta", [0] * 8, 4),
        ("beta", [0, 1] + [0] * 8, 7),
        ("doubling", [0, 0, 1, 1, 1], 2),
        ("doubling", [0, 1, 0, 0, 1], 4),
        ("doubling", [0, 1, 0, 1, 0, 0, 0, 0, 1, 1], 8),
        ("windows", [0, 0, 0, 0, 0, 1, 1], 5),
        ("windows", [0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0], 10),
        ("certaindex", [0, 0, 0, 0, 1], 4),
        ("certaindex", [0, 1, 2, 3, 4, 5], 6),
    ],
)
def test_each_rule_stops_where_hand_computation_says(
    rule: str, labels: list[int], expected: int
) -> None:
    """Each rule stops after the number of rollouts that was computed by hand."""
    assert used(rule, labels) == expected


def test_the_beta_rule_equals_a_sum_of_binomials() -> None:
    """The beta rule's probability P(p > 1/2) equals a sum of binomial probabilities that the test
    computes itself.
    """
    random = Random(2)
    for _ in range(50):
        labels = [random.choice([0, 0, 0, 1, 2]) for _ in range(20)]
        expected = 20
        for seen in range(1, 21):
            votes = sorted((labels[:seen].count(label) for label in range(3)), reverse=True)
            n = votes[0] + votes[1] + 1
            # P(Beta(a, b) > 1/2) = P(Binomial(a + b - 1, 1/2) < a)
            if sum(math.comb(n, k) for k in range(votes[0] + 1)) / 2**n >= 0.95:
                expected = seen
                break
        assert used("beta", labels) == expected


def test_the_exact_rule_never_changes_a_vote() -> None:
    """For many small sets of votes, the exact rule returns the vote of all rollouts, whatever the
    order of the votes.
    """
    for labels in ([0, 0, 0, 1, 1], [0, 1, 2, 2, NO_ANSWER], [0, 0, 1, 1, 1, 1]):
        for order in set(permutations(labels)):
            arrivals = Arrivals(order)
            assert RULES["exact"].play(arrivals).label == take_all(arrivals).label


def test_scores_select_weigh_or_rank_votes() -> None:
    """Scores can select, weigh or rank the votes of rollouts; a rollout without an answer has no
    vote.
    """
    arrivals = Arrivals([0, 0, 1, NO_ANSWER], {"s": [0.1, 0.2, 0.6, 0.9]})
    assert best_of_n("s").play(arrivals).rollout == 3
    assert weighted_vote("s").play(arrivals).label == 1
    assert borda_vote("s").play(Arrivals([0, 0, 1], {"s": [0.1, 0.2, 9.0]})).label == 0
    assert borda_vote("s").play(Arrivals([0, 1, 1], {"s": [9.0, 0.2, 0.1]})).label == 0
    assert fixed(2).play(arrivals).label == 0
    assert majority([]) == NO_ANSWER


def test_deepconf_offline_counts_only_confident_rollouts() -> None:
    """In offline DeepConf, the votes of the more confident half decide against the majority; if all
    rollouts vote, the majority wins.
    """
    arrivals = Arrivals([0, 0, 0, 1, 1, 0], {"c": [1.0, 1.0, 1.0, 5.0, 5.0, 5.0]})
    assert deepconf_offline("c", 0.5).play(arrivals).label == 1
    assert deepconf_offline("c", 1.0).play(Arrivals([0, 0, 1], {"c": [2.0, 2.0, 3.0]})).label == 0


def test_deepconf_online_drops_rollouts_below_the_threshold() -> None:
    """The first half of the rollouts sets a confidence threshold. Later rollouts below the
    threshold have no vote, and if the first votes agree, sampling stops.
    """
    labels = [0, 0, 1, 1, 0, 0]
    confident = {"c": [5.0, 5.0, 1.0, 1.0, 5.0, 5.0]}
    taken = deepconf_online("c").play(Arrivals(labels, confident))
    assert (taken.used, taken.label) == (3, 0)
    split = {"c": [5.0, 5.0, 5.0, 9.0, 4.0, 4.0]}
    taken = deepconf_online("c").play(Arrivals(labels, split))
    assert (taken.used, taken.label) == (6, 1)


def test_means_over_orders_equal_an_enumeration() -> None:
    """For one problem of three rollouts, the mean over random orders equals the mean over all
    orders, enumerated by hand.
    """
    problem = PlayedProblem("1", (rollout(0, True), rollout(0, True), rollout(1, False)))
    found = referee([problem, problem], RefereeOptions(orders=2_000))
    by_rule = {row.rule: row for row in found.rows}
    # the two rollouts with equal answers come first in a third of the orders
    assert by_rule["exact"].samples.value == pytest.approx(8 / 3, abs=0.04)
    assert by_rule["exact"].changed.value == 0
    assert by_rule["fixed 1"].accuracy.value == pytest.approx(2 / 3, abs=0.04)
    assert by_rule["fixed 1"].changed.value == pytest.approx(1 / 3, abs=0.04)
    assert by_rule["pass@n"].accuracy.value == 1.0
    assert by_rule["all"].against_all is None


def test_a_fixed_number_of_rollouts_gains_nothing_over_itself() -> None:
    """A rule that always uses three rollouts has the same accuracy as a fixed number of rollouts of
    the same mean cost.
    """
    always = StoppingRule("always 3", "", fixed(3).play)
    for unit in ("samples", "tokens"):
        options = RefereeOptions(orders=20, unit=unit)
        found = referee(planted(40, 8), options, [always]).rows[-1]
        assert found.against_fixed is not None
        assert found.against_fixed.difference.value == pytest.approx(0.0, abs=1e-9)
        assert found.samples.value == 3.0


def test_stopping_on_agreement_beats_a_fixed_number() -> None:
    """Rules that stop on agreement are more accurate than a fixed number of rollouts with the same
    mean cost.

    The exact rule changes no vote, although it uses fewer rollouts than all.
    """
    found = referee(planted(150, 16), RefereeOptions(orders=15))
    by_rule = {row.rule: row for row in found.rows}
    for name in ("beta", "doubling", "likely"):
        compared = by_rule[name].against_fixed
        assert compared is not None
        assert compared.difference.value > 0, name
    assert by_rule["exact"].samples.value < 16
    assert by_rule["exact"].changed.value == 0
    assert by_rule["doubling"].samples.value < by_rule["beta"].samples.value


def test_the_same_seed_gives_the_same_table() -> None:
    """The orders depend on the seed and the problem alone, so a table can be repeated."""
    problems = planted(10, 8)
    options = RefereeOptions(orders=20, seed=3)
    # compared as text, because unknown numbers are nan
    assert repr(referee(problems, options)) == repr(referee(problems, options))
    other = referee(list(reversed(problems)), options)
    assert other.rows[1].samples.value == pytest.approx(
        referee(problems, options).rows[1].samples.value
    )


def test_fewer_rollouts_are_drawn_from_all() -> None:
    """With `--samples` the rule is evaluated on random subsets of the recorded rollouts, not only
    on the first ones.
    """
    last = PlayedProblem("1", tuple(rollout(int(n > 3), n > 3) for n in range(8)))
    found = referee([last, last], RefereeOptions(samples=4, orders=400))
    assert found.most == 4
    assert 0.3 < found.rows[0].accuracy.value < 0.7


def test_needed_problems_grow_with_the_variance_of_the_difference() -> None:
    """For a rule that never changes the vote of all rollouts, atts assumes a minimal variance. To
    detect a loss of 1 percentage point then takes 779 problems, and more for rules that change more
    votes.
    """
    (first, *rest) = referee(planted(60, 8), RefereeOptions(orders=20)).rows
    assert first.problems_for_a_point is None
    needed = {row.rule: row.problems_for_a_point or 0 for row in rest}
    assert needed["exact"] == 779
    assert needed["fixed 1"] > needed["fixed 4"] >= 779


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rules": ["betta"]}, "--rules: 'betta' is unknown; did you mean 'beta'"),
        ({"unit": "dollars"}, "--match: the run does not record the dollars of every rollout"),
        ({"unit": "euros"}, "--match: 'euros' is unknown"),
        ({"orders": 0}, "--orders: 0 is too few random orders"),
        ({"samples": 1}, "--samples: 1 is too few rollouts to apply a rule to"),
    ],
)
def test_unknown_rules_and_unrecorded_units_are_refused(
    options: dict[str, object], problem: str
) -> None:
    """The error about an unknown stopping rule names the rule; the error about a cost that the run
    did not record names its unit.
    """
    with pytest.raises(OptionError, match=problem):
        referee(planted(3, 4), RefereeOptions(**options))  # type: ignore[arg-type]


def imported(run_import: Import, tmp_path: Path, problems: int = 8) -> Path:
    """Import a run of invented rollouts with rewards and times in seconds."""
    random = Random(5)
    lines = [
        {"question": f"What is {n}?", "text": f"\\boxed{{{n if right else n + 1}}}", "gold": str(n),
         "tokens": 10 * (s + 1), "seconds": 2.0, "cost": 0.01, "rm": random.random() + right}
        for n in range(problems)
        for s in range(6)
        for right in [random.random() < 0.7]
    ]  # fmt: skip
    path = write_lines(tmp_path / "mine.jsonl", lines)
    return run_import("jsonl", path, columns={"score.reward": "rm"}).directory


def test_rules_see_costs_scores_and_verdicts_of_an_import(
    tmp_path: Path, run_import: Import
) -> None:
    """Stopping rules use the costs, scores and verdicts of an imported run."""
    directory = imported(run_import, tmp_path)
    found = referee_run(open_run(directory), RefereeOptions(orders=20, unit="dollars"))
    by_rule = {row.rule: row for row in found.rows}
    assert found.scores == ("reward",)
    # this reward marks correct answers, so the best rollout is correct if any rollout is correct
    assert by_rule["best of n by reward"].accuracy == by_rule["pass@n"].accuracy
    assert by_rule["all"].tokens == pytest.approx(210.0)
    assert by_rule["all"].dollars == pytest.approx(0.06)


def test_a_run_of_atts_allows_confidence_rules(tmp_path: Path) -> None:
    """A run with log-probabilities can be judged by confidence-weighted votes and by DeepConf."""
    words = ("--draft", "scripted", "--target", "scripted", "--report", "none")
    out = str(tmp_path / "run")
    assert command(["eval", "arithmetic", *words, "--limit", "4", "--samples", "4",
                    "--early-stop", "none", "--out", out]) == 0  # fmt: skip
    found = referee_run(open_run(Path(out)), RefereeOptions(orders=5))
    names = {row.rule for row in found.rows}
    assert {"weighted by confidence", "deepconf online", "deepconf offline 10"} <= names


def test_a_run_without_verdicts_cannot_be_judged(tmp_path: Path, run_import: Import) -> None:
    """Without references no answer is known to be correct, so the comparison is refused."""
    path = write_lines(tmp_path / "a.jsonl", [{"question": "1?", "text": "\\boxed{1}"}])
    with pytest.raises(JournalError, match="no problem is finished and graded"):
        referee_run(open_run(run_import("jsonl", path).directory))


def test_the_command_prints_a_row_or_an_object_per_rule(
    tmp_path: Path, run_import: Import, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table explains each rule; `--json` prints one object per rule."""
    directory = str(imported(run_import, tmp_path))
    assert command(["replay", directory, "--rules", "exact,beta", "--orders", "10"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        "8 problems with 48 rollouts, up to 6 per problem, in 10 random orders (seed 0)"
    )
    assert [line.split()[0] for line in out.splitlines()[3:6]] == ["all", "exact", "beta"]
    assert "beta: stops when the leading answer is truly more frequent than the second one" in out
    assert command(["replay", directory, "--rules", "all", "--orders", "10", "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert objects[-1]["type"] == "summary"
    assert objects[1]["rule"] == "exact"
    assert objects[1]["changed"]["value"] == 0
    assert objects[1]["against_fixed"]["n_problems"] == 8


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--rules", "all", "--rate", "0.3"], "--rate: this option changes decisions on chunks"),
        (["--orders", "3"], "--orders: this option needs --rules"),
        (["--match", "tokens"], "--match: this option needs --rules"),
    ],
)
def test_rules_refuse_options_of_gates(
    tmp_path: Path,
    run_import: Import,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    problem: str,
) -> None:
    """Stopping rules use whole rollouts and gates use chunks, so their options cannot be
    combined.
    """
    directory = str(imported(run_import, tmp_path, 2))
    assert command(["replay", directory, *words]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.checkout
def test_recorded_rollouts_give_the_published_figures(
    tmp_path: Path, run_import: Import, shared_data: Path
) -> None:
    """For 100 problems with 16 recorded rollouts each, the rules give the same figures as a
    separate computation. The separate computation and this test both count rollouts without an
    answer as votes for one common answer.
    """
    traces = shared_data / "traces" / "draft_target.jsonl.gz"
    with gzip.open(traces, "rt") as file:
        records = [record for line in file if (record := json.loads(line))["run"] == "ct0"]
    path = write_lines(
        tmp_path / "ct0.jsonl",
        [
            {"id": str(record["question_id"]), "answer": record["answer_balanced"] or "invalid",
             "reference": record["gold"], "seconds": record["duration_seconds"]}
            for record in records
        ],
    )  # fmt: skip
    directory = run_import("jsonl", path, columns={"answer": "answer"}).directory
    found = referee_run(
        open_run(directory), RefereeOptions(["exact", "beta", "doubling", "pass@n"], orders=25)
    )
    by_rule = {row.rule: row for row in found.rows}
    assert found.rows[0].accuracy.value == pytest.approx(0.91)
    assert by_rule["pass@n"].accuracy.value == pytest.approx(0.97)
    for rule, samples, changed in (
        ("exact", 10.2, 0.0),
        ("beta", 6.4, 0.0001),
        ("doubling", 3.9, 0.0114),
    ):
        assert by_rule[rule].samples.value == pytest.approx(samples, abs=0.15)
        assert by_rule[rule].changed.value == pytest.approx(changed, abs=0.004)
