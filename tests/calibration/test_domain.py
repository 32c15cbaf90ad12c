"""Tests of warnings about questions whose scores differ from the stored ones: warnings are raised
for such questions and rarely for others.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from random import Random

import anyio
import pytest

from atts.api import Setup, build_engines
from atts.api.setup import embedded_scores
from atts.calibration import PERPLEXITY, DomainCheck, StoredScores
from atts.core import Sampling
from atts.journal import Warned, open_run
from atts.local import LocalEngine, LocalOptions
from atts.models import EMBEDDED, path
from atts.pipelines import Policy
from atts.run import RunOptions, RunResult, evaluate
from atts.testing import toy_problems


def question(random: Random, shift: float = 0.0) -> list[float]:
    """Sample the scores of one question: first the question's level, then chunks around this level."""
    level = random.expovariate(1.0) + shift
    return [math.exp(random.expovariate(1.0) * level) for _ in range(random.randint(3, 9))]


def stored(random: Random, questions: int) -> StoredScores:
    """Sample the stored scores of this number of questions."""
    rows = [(score, f"{name}") for name in range(questions) for score in question(random)]
    return StoredScores(
        tuple(row[0] for row in rows), tuple(row[1] for row in rows), (0,) * len(rows)
    )


def test_questions_like_the_stored_ones_are_seldom_doubted() -> None:
    """At most one in twenty questions like the stored ones raises a warning.

    The test samples 1,000 questions and allows a binomial tolerance.
    """
    random = Random(0)
    doubted = 0
    for _ in range(1000):
        domain = DomainCheck.of(stored(random, 39))
        assert domain is not None
        doubted += bool(domain.warning(question(random)))
    assert doubted / 1000 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)


def test_questions_with_worse_scores_raise_a_doubt() -> None:
    """Questions with worse scores raise a warning that states its numbers; a single extreme chunk
    or better scores raise no warning.
    """
    domain = DomainCheck.of(stored(Random(1), 100))
    assert domain is not None
    assert "average, the 4 chunks" in domain.warning([math.inf, 1e300, 1e40, math.inf])
    assert domain.p_value([math.inf] * 4) == 1 / 101
    assert domain.warning([1.01] * 9 + [math.inf]) == ""
    assert domain.warning([1.0] * 9) == ""
    assert domain.warning([math.inf] * 2) == ""


def test_stored_scores_without_questions_raise_no_doubt() -> None:
    """If the stored scores have few questions, or unknown ones, they cannot show that a new
    question differs, so no warning is raised.
    """
    assert DomainCheck.of(StoredScores.of([1.0, 2.0] * 50)) is None
    assert DomainCheck.of(stored(Random(2), 18)) is None


def test_the_embedded_pair_starts_with_shipped_scores() -> None:
    """The embedded pair starts with shipped scores, if the run has the pair's own weights and
    conditions.
    """
    shipped = embedded_scores()
    assert (len(set(shipped.questions)), len(shipped) < 2000) == (200, True)
    usual = Setup()
    assert usual.informed().stored is shipped
    for other in (
        Setup(draft="scripted", target="scripted"), Setup(stored=[1.0]), Setup(warmup=8),
        Setup(policy=Policy(sampling=Sampling(temperature=0.2))), Setup(target="embedded:draft"),
    ):  # fmt: skip
        assert other.informed() is other


@pytest.mark.parametrize("role", EMBEDDED)
@pytest.mark.anyio
async def test_the_shipped_scores_are_of_the_shipped_weights(role: str) -> None:
    """The digest stored with the shipped scores is that of the shipped weights; `python -m
    scripts.studies.models` writes both.
    """
    options = LocalOptions(worker="thread", kv_tokens=256)
    async with LocalEngine(path(role), name=role, options=options) as engine:  # type: ignore[arg-type]
        assert embedded_scores().fingerprint[f"{role}.weights"] == engine.spec.weights


@pytest.mark.parametrize(("scores", "doubts"), [((1.0, 1.1, 1.2), 0), ((1e9, 1e12, math.inf), 2)])
def test_a_run_records_its_doubts(scores: tuple[float, ...], doubts: int, tmp_path: Path) -> None:
    """A run records a warning for each problem whose chunks score unlike the stored ones, and its
    report counts warnings by code.
    """
    known = StoredScores(
        scores * 40, tuple(f"{n}" for n in range(40) for _ in scores), (0,) * 3 * 40
    )
    setup = Setup(
        draft="scripted", target="scripted", rate=0.0, policy=Policy(samples=2), stored=known
    )
    domain = (
        DomainCheck((0.0,) * 40, 100.0, PERPLEXITY)
        if doubts
        else DomainCheck((1e6,) * 40, 1e7, PERPLEXITY)
    )

    async def main() -> RunResult:
        plan = replace(
            setup.plan(*build_engines("scripted", "scripted")), domain=domain, stored_under=None
        )
        return await evaluate(toy_problems(2), plan, RunOptions(tmp_path / "run"))

    result = anyio.run(main)
    assert [bool(problem.doubt) for problem in result.problems] == [bool(doubts)] * 2
    assert [bool(outcome.doubt) for outcome in result.outcomes()] == [bool(doubts)] * 2
    told = [
        entry.event
        for entry in open_run(tmp_path / "run").entries({Warned})
        if isinstance(entry.event, Warned)
    ]
    assert [warned.code for warned in told].count("domain") == doubts
