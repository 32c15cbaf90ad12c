"""Ordered levels: the model, its conformal sets, what may be done on its word."""

import gzip
import json
import math
import random
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
    LevelSets,
    OrdinalFit,
    entry_mass,
    feature_row,
    fit_ordinal,
    nested_windows,
)
from atts.core import Features
from atts.errors import CalibrationInputError

LAWS = st.lists(st.floats(0.001, 1), min_size=1, max_size=6).map(
    lambda raw: [value / sum(raw) for value in raw]
)


def chunk_evidence(question: str = "q", turn: int = 0, sample: int = 0, **known: Any) -> Features:
    """What a pipeline knows of a chunk of 100 tokens."""
    return Features(question, turn, sample, tokens=100, draft_logprob=-0.4, **known)


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
