"""What is done on a model's word alone: its errors among what it acts on, by simulation and on
recorded runs.
"""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from atts.calibration.ordinal import LEVELS, ActionRule, OrdinalFit, fit_ordinal
from atts.errors import CalibrationInputError
from atts.evaluators import share_estimate

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
