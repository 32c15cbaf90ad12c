"""Rival stopping and voting rules: each does what it says, on planted rollouts and on real ones."""

from __future__ import annotations

import gzip
import json
import math
from itertools import permutations
from pathlib import Path
from random import Random

import pytest

from atts.analysis import PlayedProblem, PlayedRollout, RefereeOptions, referee, referee_run
from atts.analysis.stopping_rules import (
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

__all__ = ["run_import"]  # a fixture
RULES = {rule.name: rule for rule in ONE_BY_ONE}


def used(name: str, labels: list[int]) -> int:
    """Return how many of these rollouts a rule takes."""
    return RULES[name].play(Arrivals(labels)).used


def rollout(label: int, is_right: bool, *, tokens: float = 1.0, **scores: float) -> PlayedRollout:
    """Make a rollout of so many tokens."""
    costs = (1.0, tokens, math.nan, math.nan)
    return PlayedRollout(label, float(is_right), costs, tuple(sorted(scores.items())))


def planted(problems: int, samples: int, seed: int = 1) -> list[PlayedProblem]:
    """Return problems of all difficulties, on which the right answer is class 0."""
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
        ("exact", [0, 0, 0, 1, 2], 3),  # 3 against the 2 that are left
        ("exact", [0, 0, 1, 1, 2], 5),
        ("exact", [0] + [NO_ANSWER] * 5, 6),
        ("beta", [0] * 8, 4),  # P(Beta(5, 1) > 1/2) = 31/32, and 15/16 one vote earlier
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
def test_a_rule_stops_where_it_says(rule: str, labels: list[int], expected: int) -> None:
    """Each rule is tried on orders that were worked out by hand."""
    assert used(rule, labels) == expected


def test_the_beta_rule_is_the_closed_form() -> None:
    """P(p > 1/2) is a sum of binomial chances, which no library computes here."""
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


def test_no_rule_that_is_exact_changes_a_vote() -> None:
    """The exact rule gives the vote of all rollouts, in every order of many small elections."""
    for labels in ([0, 0, 0, 1, 1], [0, 1, 2, 2, NO_ANSWER], [0, 0, 1, 1, 1, 1]):
        for order in set(permutations(labels)):
            arrivals = Arrivals(order)
            assert RULES["exact"].play(arrivals).label == take_all(arrivals).label


def test_votes_by_score() -> None:
    """Scores select, weigh or rank, and a rollout without an answer has no vote."""
    arrivals = Arrivals([0, 0, 1, NO_ANSWER], {"s": [0.1, 0.2, 0.6, 0.9]})
    assert best_of_n("s").play(arrivals).rollout == 3
    assert weighted_vote("s").play(arrivals).label == 1
    assert borda_vote("s").play(Arrivals([0, 0, 1], {"s": [0.1, 0.2, 9.0]})).label == 0
    assert borda_vote("s").play(Arrivals([0, 1, 1], {"s": [9.0, 0.2, 0.1]})).label == 0
    assert fixed(2).play(arrivals).label == 0
    assert majority([]) == NO_ANSWER


def test_deepconf_offline_lets_the_confident_vote() -> None:
    """The top half decides against the majority; all of them decide with it."""
    arrivals = Arrivals([0, 0, 0, 1, 1, 0], {"c": [1.0, 1.0, 1.0, 5.0, 5.0, 5.0]})
    assert deepconf_offline("c", 0.5).play(arrivals).label == 1
    assert deepconf_offline("c", 1.0).play(Arrivals([0, 0, 1], {"c": [2.0, 2.0, 3.0]})).label == 0


def test_deepconf_online_drops_what_is_below_the_first_ones() -> None:
    """After the first half, a rollout below their bar has no vote, and agreement ends the problem."""
    labels = [0, 0, 1, 1, 0, 0]
    confident = {"c": [5.0, 5.0, 1.0, 1.0, 5.0, 5.0]}
    taken = deepconf_online("c").play(Arrivals(labels, confident))
    assert (taken.used, taken.label) == (3, 0)
    split = {"c": [5.0, 5.0, 5.0, 9.0, 4.0, 4.0]}
    taken = deepconf_online("c").play(Arrivals(labels, split))
    assert (taken.used, taken.label) == (6, 1)


def test_means_are_those_of_all_orders() -> None:
    """One problem of three rollouts, of which every order can be counted by hand."""
    problem = PlayedProblem("1", (rollout(0, True), rollout(0, True), rollout(1, False)))
    found = referee([problem, problem], RefereeOptions(orders=2_000))
    by_rule = {row.rule: row for row in found.rows}
    # a third of the orders begins with the two that agree
    assert by_rule["exact"].samples.value == pytest.approx(8 / 3, abs=0.04)
    assert by_rule["exact"].changed.value == 0
    assert by_rule["fixed 1"].accuracy.value == pytest.approx(2 / 3, abs=0.04)
    assert by_rule["fixed 1"].changed.value == pytest.approx(1 / 3, abs=0.04)
    assert by_rule["pass@n"].accuracy.value == 1.0
    assert by_rule["all"].against_all is None


def test_equal_budgets_are_equal() -> None:
    """A rule that takes a fixed number of rollouts gains nothing over a fixed number of rollouts."""
    always = StoppingRule("always 3", "", fixed(3).play)
    for unit in ("samples", "tokens"):
        options = RefereeOptions(orders=20, unit=unit)
        found = referee(planted(40, 8), options, [always]).rows[-1]
        assert found.against_fixed is not None
        assert found.against_fixed.difference.value == pytest.approx(0.0, abs=1e-9)
        assert found.samples.value == 3.0


def test_a_rule_that_stops_where_votes_agree_beats_a_fixed_number() -> None:
    """At equal samples the exact and the beta rule are more accurate, as they must be."""
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
    """Orders depend on the seed and the problem alone."""
    problems = planted(10, 8)
    options = RefereeOptions(orders=20, seed=3)
    # as text, because what is not known is nan
    assert repr(referee(problems, options)) == repr(referee(problems, options))
    other = referee(list(reversed(problems)), options)
    assert other.rows[1].samples.value == pytest.approx(
        referee(problems, options).rows[1].samples.value
    )


def test_fewer_rollouts_are_drawn_from_all() -> None:
    """With --samples the orders are random subsets, not the first of the record."""
    last = PlayedProblem("1", tuple(rollout(int(n > 3), n > 3) for n in range(8)))
    found = referee([last, last], RefereeOptions(samples=4, orders=400))
    assert found.most == 4
    assert 0.3 < found.rows[0].accuracy.value < 0.7


def test_a_point_needs_as_many_problems_as_it_can_show() -> None:
    """A rule that never differs needs no fewer than one whose every difference is of one sign."""
    (first, *rest) = referee(planted(60, 8), RefereeOptions(orders=20)).rows
    assert first.problems_for_a_point is None
    needed = {row.rule: row.problems_for_a_point or 0 for row in rest}
    assert needed["exact"] == 779
    assert needed["fixed 1"] > needed["fixed 4"] >= 779


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rules": ["betta"]}, "--rules: 'betta' is unknown; did you mean 'beta'"),
        ({"unit": "dollars"}, "--match: the dollars of some rollouts are not known"),
        ({"unit": "euros"}, "--match: 'euros' is unknown"),
        ({"orders": 0}, "--orders: 0 orders are none"),
        ({"samples": 1}, "--samples: 1: rules need 2 rollouts or more"),
    ],
)
def test_what_cannot_be_played(options: dict[str, object], problem: str) -> None:
    """Unknown rules and units that were not recorded are refused."""
    with pytest.raises(OptionError, match=problem):
        referee(planted(3, 4), RefereeOptions(**options))  # type: ignore[arg-type]


def imported(run_import: Import, tmp_path: Path, problems: int = 8) -> Path:
    """Return a run of planted rollouts with a reward and seconds."""
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


def test_a_run_is_read_with_its_scores(tmp_path: Path, run_import: Import) -> None:
    """Costs, scores and verdicts of an imported run reach the rules."""
    directory = imported(run_import, tmp_path)
    found = referee_run(open_run(directory), RefereeOptions(orders=20, unit="dollars"))
    by_rule = {row.rule: row for row in found.rows}
    assert found.scores == ("reward",)
    # a reward that knows the correct answers selects one wherever there is one
    assert by_rule["best of n by reward"].accuracy == by_rule["pass@n"].accuracy
    assert by_rule["all"].tokens == pytest.approx(210.0)
    assert by_rule["all"].dollars == pytest.approx(0.06)


def test_a_run_of_atts_has_confidences(tmp_path: Path) -> None:
    """Log-probabilities that atts recorded give confidence-weighted votes and DeepConf."""
    words = ("--draft", "scripted", "--target", "scripted", "--report", "none")
    out = str(tmp_path / "run")
    assert command(["eval", "arithmetic", *words, "--limit", "4", "--samples", "4",
                    "--early-stop", "none", "--out", out]) == 0  # fmt: skip
    found = referee_run(open_run(Path(out)), RefereeOptions(orders=5))
    names = {row.rule for row in found.rows}
    assert {"weighted by confidence", "deepconf online", "deepconf offline 10"} <= names


def test_a_run_without_verdicts(tmp_path: Path, run_import: Import) -> None:
    """Nothing says what is correct, so no rule can be judged."""
    path = write_lines(tmp_path / "a.jsonl", [{"question": "1?", "text": "\\boxed{1}"}])
    with pytest.raises(JournalError, match="no problem is finished and graded"):
        referee_run(open_run(run_import("jsonl", path).directory))


def test_the_table_and_its_json(
    tmp_path: Path, run_import: Import, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints a row per rule with its explanation, or an object per rule."""
    directory = str(imported(run_import, tmp_path))
    assert command(["replay", directory, "--rules", "exact,beta", "--orders", "10"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 problems, up to 6 of 48 rollouts in 10 random orders (seed 0)")
    assert [line.split()[0] for line in out.splitlines()[3:6]] == ["all", "exact", "beta"]
    assert "beta: stops when the leader beats the second with probability 0.95" in out
    assert command(["replay", directory, "--rules", "all", "--orders", "10", "--json"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert objects[-1]["type"] == "summary"
    assert objects[1]["rule"] == "exact"
    assert objects[1]["changed"]["value"] == 0
    assert objects[1]["against_fixed"]["n_problems"] == 8


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--rules", "all", "--rate", "0.3"], "--rate: it decides on chunks"),
        (["--orders", "3"], "--orders: it belongs to --rules"),
        (["--match", "tokens"], "--match: it belongs to --rules"),
    ],
)
def test_options_that_do_not_go_together(
    tmp_path: Path,
    run_import: Import,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    problem: str,
) -> None:
    """Rules play on whole rollouts, gates on chunks."""
    directory = str(imported(run_import, tmp_path, 2))
    assert command(["replay", directory, *words]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.checkout
def test_real_rollouts(tmp_path: Path, run_import: Import, shared_data: Path) -> None:
    """On 100 problems with 16 recorded rollouts each, the figures that were computed apart.

    They counted rollouts without an answer as votes for one common answer; so does this test.
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
