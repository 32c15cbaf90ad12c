"""Ordered levels: the model, its conformal sets, and what is done on its word alone."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from atts.calibration.ordinal import (
    FEATURES,
    LEVELS,
    ActionRule,
    LevelSets,
    OrdinalFit,
    entry_mass,
    feature_row,
    fit_ordinal,
    nested_windows,
)
from atts.core import Features
from atts.errors import CalibrationInputError
from atts.evaluators import share_estimate

LAWS = st.lists(st.floats(0.001, 1), min_size=1, max_size=6).map(
    lambda raw: [value / sum(raw) for value in raw]
)


def chunk_evidence(question: str = "q", turn: int = 0, sample: int = 0, **known: Any) -> Features:
    """What a pipeline knows of a chunk of 100 tokens."""
    return Features(question, turn, sample, tokens=100, draft_evidence=-0.4, **known)


def simulated(n: int, seed: int) -> tuple[list[list[float | None]], list[str]]:
    """Rows of a cumulative-logit law with weights (1, -0.5, 0) and cuts (-0.5, 1)."""
    draw = np.random.default_rng(seed)
    table = draw.normal(size=(n, 3))
    places = np.searchsorted([-0.5, 1.0], table @ [1.0, -0.5, 0.0] + draw.logistic(size=n))
    return [list(map(float, row)) for row in table], [LEVELS[place] for place in places]


def test_the_fit_recovers_the_law_it_was_drawn_from() -> None:
    """Weights and cuts within three standard errors, probabilities that are frequencies."""
    rows, labels = simulated(4000, 0)
    model = fit_ordinal(rows, labels, ("a", "b", "c"))
    assert [w / s for w, s in zip(model.weights, model.spread, strict=True)] == pytest.approx(
        [1, -0.5, 0], abs=0.12
    )
    assert model.cuts == pytest.approx((-0.5, 1.0), abs=0.15)
    predicted = np.mean([model.probabilities(row) for row in rows], axis=0)
    assert predicted == pytest.approx([labels.count(level) / 4000 for level in LEVELS], abs=0.01)


def test_the_fit_is_the_optimum_of_the_penalised_likelihood() -> None:
    """A derivative-free search over the same objective finds nothing better."""
    rows, labels = simulated(120, 1)
    model = fit_ordinal(rows, labels, ("a", "b", "c"), ridge=2.0)
    table = (np.array(rows, float) - model.centre) / model.spread
    places = np.array([LEVELS.index(label) for label in labels])

    def objective(parameters: Any) -> float:
        weights = np.array(parameters[:3])
        cuts = np.array([-np.inf, *parameters[3:5], np.inf])
        if cuts[1] >= cuts[2]:
            return math.inf
        total = float(weights @ weights)  # ridge 2, halved
        for lean, place, weight in [*zip(table @ weights, places, [1.0] * 120, strict=True),
                                    *((0.0, k, 0.5) for k in range(3))]:  # fmt: skip
            high = 1 / (1 + np.exp(-(cuts[place + 1] - lean)))
            low = 1 / (1 + np.exp(-(cuts[place] - lean)))
            total -= weight * math.log(high - low)
        return total

    ours = objective([*model.weights, *model.cuts])
    found = optimize.minimize(
        objective, [*model.weights, *model.cuts], method="Nelder-Mead", options={"maxiter": 4000}
    )
    assert ours <= float(found.fun) + 1e-4


def test_separable_rare_and_missing_data_have_finite_answers() -> None:
    """Complete separation, a level never seen, a feature mostly absent or constant."""
    separable = fit_ordinal(
        [[float(k)] for k in range(100)], ["accept"] * 50 + ["escalate"] * 50, ("a",)
    )
    assert all(map(math.isfinite, (*separable.weights, *separable.cuts)))
    assert separable.probabilities([0.0])[0] > 0.9 < separable.probabilities([99.0])[2]
    assert 0 < separable.probabilities([50.0])[1] < 0.05
    alone = fit_ordinal([[1.0]] * 30, ["accept"] * 30, ("constant",))
    assert alone.probabilities([1.0])[0] > 0.9
    rows: list[list[float | None]] = [[None] if k % 2 else [1.0 * (k % 4)] for k in range(200)]
    informative = fit_ordinal(
        rows, ["escalate" if row[0] is None else "accept" for row in rows], ("a",)
    )
    assert informative.probabilities([None])[2] > 0.8 < informative.probabilities([2.0])[0]


def test_bad_rows_are_refused() -> None:
    """Wrong rows, labels and features."""
    rows, labels = simulated(60, 2)
    model = fit_ordinal(rows, labels, ("a", "b", "c"))
    for bad in ([1.0, 2.0], [1.0, 2.0, math.nan], [math.inf, 0.0, 0.0]):
        with pytest.raises(CalibrationInputError):
            model.probabilities(bad)
    for rows_, labels_ in (
        ([], []),
        ([[1.0]], ["perhaps"]),
        ([[1.0]], []),
        ([[1.0], [1.0, 2.0]], ["accept"] * 2),
    ):
        with pytest.raises(CalibrationInputError):
            fit_ordinal(rows_, labels_, ("a",))


@given(LAWS)
def test_windows_are_contiguous_nested_and_grow_by_one(law: list[float]) -> None:
    """From the mode to everything; each the heaviest that contains the one before."""
    windows = nested_windows(law)
    assert [len(window) for window in windows] == list(range(1, len(law) + 1))
    assert law[windows[0][0]] == max(law)
    for small, large in zip(windows, windows[1:], strict=False):
        assert set(small) < set(large)
        added = law[(set(large) - set(small)).pop()]
        others = [law[k] for k in (small.start - 1, small.stop) if 0 <= k < len(law)]
        assert added == max(others)


def test_level_sets_cover_exactly_by_enumeration() -> None:
    """All orders of labelled chunks: the last one's level is in its set at least 1 - alpha of the
    time.
    """
    chunks = [((0.6, 0.3, 0.1), 1), ((0.2, 0.5, 0.3), 0), ((0.1, 0.2, 0.7), 2), ((0.4, 0.35, 0.25), 2),
              ((0.8, 0.1, 0.1), 0), ((0.3, 0.3, 0.4), 0)]  # fmt: skip
    for alpha in (0.2, 0.35, 0.5):
        hits = 0
        for last in range(len(chunks)):
            sets = LevelSets(alpha)
            for place, (law, level) in enumerate(chunks):
                if place != last:
                    sets.learn(law, level)
            hits += chunks[last][1] in sets.levels(chunks[last][0])
        assert hits / len(chunks) >= 1 - alpha


def test_level_sets_cover_fresh_data_and_shrink_with_knowledge() -> None:
    """Coverage within binomial noise of 0.9 from above; all levels while nothing is known; smaller
    than all later.
    """
    rows, labels = simulated(3000, 3)
    model = fit_ordinal(rows[:500], labels[:500], ("a", "b", "c"))
    sets = LevelSets(0.1)
    assert list(sets.levels(model.probabilities(rows[0]))) == [0, 1, 2]
    for row, label in zip(rows[500:1500], labels[500:1500], strict=True):
        sets.learn(model.probabilities(row), LEVELS.index(label), "q")
    found = [(LEVELS.index(label), sets.levels(model.probabilities(row))) for row, label in
             zip(rows[1500:], labels[1500:], strict=True)]  # fmt: skip
    assert (
        np.mean([level in window for level, window in found])
        >= 0.9 - 3 * math.sqrt(0.09 / 1500) - 0.01
    )
    assert np.mean([len(window) for _, window in found]) < 2.6
    assert "at least 0.9" in sets.guarantee


def test_bad_probabilities_are_refused() -> None:
    """They are numbers from 0 that sum to 1."""
    for law in ((), (0.5, 0.4), (1.2, -0.2), (math.nan, 1.0)):
        with pytest.raises(CalibrationInputError):
            nested_windows(law)
    with pytest.raises(CalibrationInputError):
        entry_mass((0.5, 0.5), 2)
    with pytest.raises(CalibrationInputError):
        LevelSets(1.0)


def test_features_are_missing_until_a_sibling_has_answered() -> None:
    """Not a made-up zero; support carries the sign of whether this chunk agrees."""
    row = dict(zip(FEATURES, feature_row(chunk_evidence()), strict=True))
    assert (row["agreement"], row["support"]) == (None, None)
    for agrees, sign in ((True, 1), (False, -1)):
        seen = chunk_evidence(has_answer=True, answered=3, agreement=0.75, agrees=agrees)
        assert dict(zip(FEATURES, feature_row(seen), strict=True))["support"] == sign * 0.75
    assert len(feature_row(chunk_evidence())) == len(FEATURES)


def learned(agreeing: float = 0.98) -> OrdinalFit:
    """Return a fit that has seen agreement decide everything."""
    draw = random.Random(0)
    fit = OrdinalFit(FEATURES, alpha=0.1)
    for k in range(900):
        agrees = draw.random() < 0.5
        evidence = chunk_evidence(
            f"q{k}", has_answer=True, answered=8, agreement=0.9, agrees=agrees
        )
        right = draw.random() < (agreeing if agrees else 1 - agreeing)
        fit.learn(feature_row(evidence), "accept" if right else "escalate", evidence.question)
    return fit


def test_a_fit_accepts_verifies_or_escalates() -> None:
    """Sure it suffices: accept. Hopeless: escalate. Nothing learnt: every level, and verify."""
    fit = learned()
    sure = feature_row(chunk_evidence(has_answer=True, answered=8, agreement=0.9, agrees=True))
    lost = feature_row(chunk_evidence(has_answer=True, answered=8, agreement=0.9, agrees=False))
    assert (fit.action(sure), fit.levels(sure)) == ("accept", ("accept",))
    assert (fit.action(lost), fit.levels(lost)) == ("escalate", ("escalate",))
    blank = OrdinalFit(FEATURES, alpha=0.1)
    assert (blank.action(sure), blank.levels(sure)) == ("verify", LEVELS)


def test_a_chunk_unlike_any_labelled_one_is_not_judged() -> None:
    """Features missing that never were: every level stays possible. Wrong labels are refused."""
    fit = learned()
    row = feature_row(chunk_evidence())
    assert (fit.action(row), fit.levels(row)) == ("verify", LEVELS)
    for bad, level in ((row, "perhaps"), (row[1:], "accept")):
        with pytest.raises(CalibrationInputError, match="label or features"):
            fit.learn(bad, level, "q")


def within_question_auroc(rows: list[tuple[int, float, bool]]) -> float:
    """P(a right sample has the higher value) over all pairs of one question, ties half."""
    wins = pairs = 0.0
    for question in {q for q, _, _ in rows}:
        right = [v for q, v, ok in rows if q == question and ok]
        wrong = [v for q, v, ok in rows if q == question and not ok]
        wins += sum((a > b) + 0.5 * (a == b) for a in right for b in wrong)
        pairs += len(right) * len(wrong)
    return wins / pairs


def test_on_real_traces_the_model_uses_agreement_not_perplexity(shared_data: Path) -> None:
    """Perplexity says nothing of correctness and agreement nearly everything: the fit finds out."""
    samples = [s for s in _samples(shared_data) if s["run"] == "ct0"]
    right = _right_answers(shared_data)
    rows = list[Any]()
    labels = list[str]()
    for sample in samples:
        group = [s["answer_direct"] for s in samples if s["question_id"] == sample["question_id"]]
        others = [a for a in group if a != "invalid"]
        own = sample["answer_direct"]
        share = (others.count(own) - 1) / max(1, len(others) - 1) if own != "invalid" else 0.0
        rows.append([math.log(sample["turns"][0]["ppl"] or 2.0), share])
        labels.append("accept" if (sample["question_id"], own) in right else "escalate")
    even = [
        k
        for k, sample in enumerate(samples)
        if sample["question_id"] % 2 == 0 and sample["question_id"] < 60
    ]
    odd = [
        k
        for k, sample in enumerate(samples)
        if sample["question_id"] % 2 and sample["question_id"] < 60
    ]
    value = dict[str, float]()
    for name, columns in (("perplexity", [0]), ("both", [0, 1])):
        model = fit_ordinal(
            [[rows[k][c] for c in columns] for k in even],
            [labels[k] for k in even],
            ["x"] * len(columns),
        )
        scored = [
            (
                samples[k]["question_id"],
                -model.lean([rows[k][c] for c in columns]),
                labels[k] == "accept",
            )
            for k in odd
        ]
        value[name] = within_question_auroc(scored)
    assert 0.3 < value["perplexity"] < 0.65
    assert value["both"] > 0.88


def _samples(shared_data: Path) -> list[dict[str, Any]]:
    path = shared_data / "traces" / "draft_target.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        return [json.loads(line) for line in lines]


def _right_answers(shared_data: Path) -> set[tuple[int, str]]:
    lines = (shared_data / "traces" / "answer_pairs.jsonl").read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    return {(pair["question_id"], pair["pred"]) for pair in pairs if pair["judged_equal"]}


Chunks = Iterator[tuple[float, bool]]
# by question: log-perplexity, share of siblings, right
Recorded = dict[int, list[tuple[float, float, bool]]]


def question(seed: int, number: int, chunks: int = 8) -> Chunks:
    """Chunks that move together: a question is easy or hard; the probability is the true one of its
    law.
    """
    draw = np.random.default_rng([seed, number])
    leans = draw.normal(size=chunks) + draw.normal()
    for chance in 1 / (1 + np.exp(-(1.5 + 1.5 * leans))):
        yield float(chance), bool(draw.random() > chance)


def test_few_of_the_chunks_acted_on_are_wrong_with_the_probability_promised() -> None:
    """Twenty runs of 300 questions: most act, and two at most may be wrong more often than a
    seventh.
    """
    acted = broken = 0
    for seed in range(20):
        rule = ActionRule(0.14)
        for number in range(300):
            for chance, wrong in question(seed, number):
                rule.learn(chance, wrong, str(number))
        if math.isfinite(rule.threshold):
            acted += 1
            fresh = [pair for number in range(1000, 1600) for pair in question(seed, number)]
            errors = [wrong for chance, wrong in fresh if chance >= rule.threshold]
            broken += sum(errors) > 0.14 * len(errors)
    assert acted >= 15
    assert broken <= 4  # Binomial(20, .1) is above that in 4 % of cases


def test_chunks_of_one_question_are_one_witness() -> None:
    """A thousand right chunks of twenty questions show less than one each of two hundred."""
    few = ActionRule(0.1)
    many = ActionRule(0.1)
    for number in range(1000):
        few.learn(0.99, False, str(number % 20))
        many.learn(0.99, False, str(number))
    assert few.threshold == math.inf
    assert "none yet" in few.guarantee
    assert many.threshold == 0.5
    assert "with probability 0.9" in many.guarantee
    with pytest.raises(CalibrationInputError):
        ActionRule(1.0)


def recorded(shared_data: Path) -> Recorded:
    """The rollouts of run ct0 on the questions whose answers were judged."""
    pairs = map(json.loads, (shared_data / "traces/answer_pairs.jsonl").read_text().splitlines())
    right = {(pair["question_id"], pair["pred"]) for pair in pairs if pair["judged_equal"]}
    found: Recorded = defaultdict(list)
    groups: dict[int, list[tuple[float, str]]] = defaultdict(list)
    with gzip.open(shared_data / "traces/draft_target.jsonl.gz", "rt") as lines:
        for one in map(json.loads, lines):
            if one["run"] == "ct0" and one["question_id"] < 60:
                groups[one["question_id"]].append(
                    (math.log(one["turns"][0]["ppl"] or 2.0), one["answer_direct"])
                )
    for name, rollouts in groups.items():
        answers = [answer for _, answer in rollouts if answer != "invalid"]
        for score, own in rollouts:
            share = (answers.count(own) - 1) / max(1, len(answers) - 1) if own != "invalid" else 0.0
            found[name].append((score, share, (name, own) in right))
    return found


def test_on_recorded_rollouts_sets_err_where_they_act_and_tested_actions_do_not(
    shared_data: Path,
) -> None:
    """Rollouts judged by their siblings' agreement, learnt on 45 questions, used on 15, in three
    random splits.
    """
    rollouts = recorded(shared_data)
    sets = defaultdict[int, list[bool]](list)
    actions = defaultdict[int, list[bool]](list)
    for split in range(3):
        order = random.Random(split).sample(sorted(rollouts), len(rollouts))
        stage = (
            OrdinalFit(("score", "share"), alpha=0.1),
            OrdinalFit(("score", "share"), alpha=0.2),
        )
        for name in order[:45]:
            for score, share, right in rollouts[name]:
                for one in stage:
                    one.learn([score, share], "accept" if right else "escalate", str(name))
        for name in order[45:]:
            for score, share, right in rollouts[name]:
                if stage[0].levels([score, share]) == ("escalate",):
                    sets[name].append(right)
                if stage[1].action([score, share]) == "accept":
                    actions[name].append(not right)
    given_up, accepted = (
        share_estimate((sum(errors), len(errors)) for errors in found.values())
        for found in (sets, actions)
    )
    assert given_up.value > 0.15  # sets of one level at alpha .1
    assert accepted.n_samples > 300
    assert accepted.high < 0.2


def test_weights_differ_by_cut_where_the_data_say_so() -> None:
    """A feature that tells accept from the rest and not escalate from the rest; and one law that is
    proportional.
    """
    draw = np.random.default_rng(3)
    table = draw.normal(size=(3000, 2))
    noise = draw.logistic(size=3000)
    steep = -0.5 - 2.2 * table[:, 0]
    flat = 1.5 + 0.1 * table[:, 0]
    levels = np.where(noise < steep, 0, np.where(noise < np.maximum(steep, flat), 1, 2))
    model = fit_ordinal(table.tolist(), [LEVELS[level] for level in levels], ("a", "b"))
    assert model.shifts
    weights = [model.weights[0] + shift[0] for shift in model.shifts]
    assert weights[0] - weights[1] > 1.2
    laws = np.array([model.probabilities(row) for row in table.tolist()])
    assert laws.sum(axis=1) == pytest.approx(1)
    assert (laws >= 0).all()
    for low, high in ((-9.0, -0.7), (-0.7, 0.7), (0.7, 9.0)):  # frequencies, not only on average
        part = (table[:, 0] > low) & (table[:, 0] <= high)
        told = [np.mean(levels[part] == level) for level in range(3)]
        assert laws[part].mean(axis=0) == pytest.approx(told, abs=0.05)
    even = np.searchsorted([-0.5, 1.0], table @ [1.0, -0.5] + noise)
    assert fit_ordinal(table.tolist(), [LEVELS[level] for level in even], ("a", "b")).shifts == ()
