"""Tests that the presets of the paper decide as its published code did, on recorded runs and
arrays.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atts.api import Setup, configure, dry_run, evaluate_sync, replay, scores_of
from atts.calibration import Calibrator, StoredScores, read_scores
from atts.cli.evaluations import dry_run_lines
from atts.core import Features
from atts.errors import OptionError
from atts.methods import GateInputs, preset
from atts.pipelines import Gate, Policy, RoundGate, StaticRankGate
from atts.testing import toy_problems

ARRAYS = {"ct0": "*__ec846181.npy", "ct1_feb23_partial": "*__397d5a21.npy"}
Load = Callable[[str, int | None], StoredScores]


@pytest.fixture
def load(shared_data: Path) -> Load:
    """Return a function that reads a published calibration array, given a pattern of its file
    name.
    """

    def read(pattern: str, per_question: int | None = None) -> StoredScores:
        (path,) = (shared_data / "traces" / "calibration").glob(pattern)
        return read_scores(path, per_question)

    return read


def gate_of(method: str, stored: StoredScores, rate: float = 0.4) -> Gate:
    """Return the gate that a preset builds from stored scores."""
    gate = preset(method).gate(GateInputs(Calibrator(rate, "aci", stored=stored)))
    assert not isinstance(gate, RoundGate)
    return gate


def recorded(shared_data: Path, run: str) -> Iterator[dict[str, Any]]:
    """Yield every judged turn of a recorded run, with its question."""
    path = shared_data / "traces" / "draft_target.jsonl.gz"
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            if record["run"] == run:
                for turn in record["turns"]:
                    if turn["ppl"] is not None:
                        yield {**turn, "question": str(record["question_id"])}


@pytest.mark.parametrize("run", ARRAYS)
def test_every_recorded_decision_is_repeated(shared_data: Path, load: Load, run: str) -> None:
    """For each turn, the preset gives the percentile and action of the published code."""
    gate = gate_of("paper-marginal", load(ARRAYS[run], None))
    turns = list(recorded(shared_data, run))
    decisions = [
        gate.decide(Features(turn["question"], turn["turn"]), turn["ppl"]) for turn in turns
    ]
    assert len(turns) == {"ct0": 6065, "ct1_feb23_partial": len(turns)}[run] > 500
    assert [one.escalate for one in decisions] == [turn["escalated"] for turn in turns]
    for decision, turn in zip(decisions, turns, strict=True):
        assert decision.p == pytest.approx(turn["percentile"], abs=1e-12)


@pytest.mark.parametrize(
    ("flat", "by_question", "questions", "rate", "spread"),
    [
        ("*aime24_s1.1*__7564d923.npy", "*__f2d34ae4.json", 15, 0.367, 0.120),
        ("*amc_s1.1*__67acab3f.npy", "*__9aee1bd3.json", 50, 0.403, 0.150),
    ],
)
def test_questions_are_ranked_among_their_own_scores(
    shared_data: Path,
    load: Load,
    flat: str,
    by_question: str,
    questions: int,
    rate: float,
    spread: float,
) -> None:
    """With sixteen stored scores per question, the gate ranks a score among those of its own
    question.

    The gate decides on other scores of the same questions. Its rate, and the rate's standard
    deviation over questions, equal those of the released code.
    """
    scores = load(flat, 16)
    names = [str(place // 16) for place in range(len(scores.scores))]
    gate = gate_of("paper-conditional", replace(scores, questions=tuple(names)))
    (path,) = (shared_data / "traces" / "calibration").glob(by_question)
    live: dict[str, list[float]] = json.loads(path.read_text())
    assert len(live) == questions
    rates: list[float] = []
    for question, (key, values) in enumerate(live.items()):
        del key  # the flat array has the questions in the same order, so their keys are not needed
        pool = np.array(scores.scores[question * 16 : question * 16 + 16])
        decided = [gate.decide(Features(str(question)), value).escalate for value in values]
        assert decided == [(pool < value).mean() >= 0.6 for value in values]
        rates.append(float(np.mean(decided)))
    assert np.mean(rates) == pytest.approx(rate, abs=6e-4)
    assert np.std(rates) == pytest.approx(spread, abs=6e-4)


def test_only_first_turns_are_stored_and_unknown_questions_accepted() -> None:
    """The published rule ranks scores only among those of first turns. With scores per question, a
    chunk of a question without stored scores is accepted.
    """
    stored = StoredScores((1.0, 2.0, 9.0, 9.0), ("a", "a", "a", "b"), (0, 0, 1, 0))
    marginal = gate_of("paper-marginal", stored, 0.5)
    assert isinstance(marginal, StaticRankGate)
    assert marginal.pools == {"": (1.0, 2.0, 9.0)}
    conditional = gate_of("paper-conditional", stored, 0.5)
    assert isinstance(conditional, StaticRankGate)
    assert conditional.pools == {"a": (1.0, 2.0), "b": (9.0,)}
    strange = conditional.decide(Features("c"), 100.0)
    assert not strange.escalate
    assert "this question has no stored score" in strange.why
    with pytest.raises(OptionError, match="the stored scores do not record their questions"):
        gate_of("paper-conditional", StoredScores.of([1.0, 2.0]))


def test_an_answer_is_judged_before_it_ends_its_rollout() -> None:
    """As in the published loop, the chunk with the answer is judged like any other. If it
    escalates, its answer still counts.
    """
    base = Policy(samples=2, turns=1)
    first = Setup(draft="scripted", target="scripted", rate=0.0, policy=base)
    stored = scores_of(evaluate_sync(toy_problems(6), first))
    low = replace(stored, scores=tuple(1.0 for _ in stored.scores), fingerprint={})
    setup = Setup(
        draft="scripted",
        target="scripted",
        method="paper-marginal",
        rate=1.0,
        stored=low,
        policy=replace(base, turns=20),
    )
    result = evaluate_sync(toy_problems(6), setup)
    turns = [turn for one in result.kept for rollout in one.rollouts for turn in rollout.turns]
    assert all(turn.decision is not None and turn.decision.escalate for turn in turns)
    assert any("boxed" in turn.chunks[0].text and len(turn.chunks) == 2 for turn in turns)


def test_a_recorded_run_is_replayed_by_its_own_preset(tmp_path: Path) -> None:
    """The manifest keeps the questions of stored scores, so no decision changes in a replay."""
    base = Policy(samples=4, turns=1, early_stop="none")
    first = Setup(draft="scripted", target="scripted", rate=0.0, policy=base, seed=7)
    stored = replace(scores_of(evaluate_sync(toy_problems(5), first)), fingerprint={})
    setup = Setup(
        draft="scripted",
        target="scripted",
        method="paper-conditional",
        rate=0.4,
        stored=stored,
        policy=replace(base, turns=15),
    )
    evaluate_sync(toy_problems(5), setup, directory=tmp_path / "run")
    again = replay(tmp_path / "run", rate=0.4)
    assert len(again.decisions) > 20
    assert again.changed == 0


@pytest.mark.checkout
@pytest.mark.parametrize("method", ["paper-marginal", "paper-conditional"])
def test_departures_from_the_paper_are_listed(method: str, tmp_path: Path) -> None:
    """The dry run and the page of methods list each departure from the paper."""
    departures = preset(method).departures
    assert departures
    scores = tmp_path / "scores.jsonl"
    scores.write_text('{"question": "1", "turn": 0, "score": 1.5}\n')
    flags = {"draft": "scripted", "target": "scripted", "method": method, "scores": str(scores)}
    configuration = configure({**flags, "dataset": "arithmetic[:1]"})
    estimate = dry_run(configuration)
    assert estimate.departures == departures
    lines = "\n".join(dry_run_lines(estimate, configuration))
    page = (Path(__file__).resolve().parents[2] / "docs/pipelines.md").read_text()
    for text in departures:
        assert text in lines
        assert text in " ".join(page.split())
