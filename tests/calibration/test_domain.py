"""Tests of warnings about questions unlike the stored ones: such questions raise a warning, and
others rarely do.
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
    """Draw the scores of one question: a level for the question, and its chunks around this level."""
    level = random.expovariate(1.0) + shift
    return [math.exp(random.expovariate(1.0) * level) for _ in range(random.randint(3, 9))]


def stored(random: Random, questions: int) -> StoredScores:
    """Draw the stored scores of this number of questions."""
    rows = [(score, f"{name}") for name in range(questions) for score in question(random)]
    return StoredScores(
        tuple(row[0] for row in rows), tuple(row[1] for row in rows), (0,) * len(rows)
    )


def test_questions_like_the_stored_ones_are_seldom_doubted() -> None:
    """At most one question in twenty raises a warning at every level, within a binomial tolerance
    over 1,000 draws.
    """
    random = Random(0)
    doubted = 0
    for _ in range(1000):
        domain = DomainCheck.of(stored(random, 39))
        assert domain is not None
        doubted += bool(domain.warning(question(random)))
    assert doubted / 1000 < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)


def test_questions_with_worse_scores_raise_a_doubt() -> None:
    """The warning states its numbers; a single extreme chunk raises no warning, and neither do
    better scores.
    """
    domain = DomainCheck.of(stored(Random(1), 100))
    assert domain is not None
    assert "out of domain: the 4 chunks" in domain.warning([math.inf, 1e300, 1e40, math.inf])
    assert domain.p_value([math.inf] * 4) == 1 / 101
    assert domain.warning([1.01] * 9 + [math.inf]) == ""
    assert domain.warning([1.0] * 9) == ""
    assert domain.warning([math.inf] * 2) == ""


def test_stored_scores_without_questions_raise_no_doubt() -> None:
    """Stored scores of too few or unknown questions cannot show that a question is unlike them."""
    assert DomainCheck.of(StoredScores.of([1.0, 2.0] * 50)) is None
    assert DomainCheck.of(stored(Random(2), 18)) is None


def test_the_embedded_pair_starts_with_shipped_scores() -> None:
    """The shipped scores are used with the pair's own weights and conditions only."""
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
    """The scores' digest names the shipped weights; `python -m scripts.studies.models` writes both
    the scores and the weights.
    """
    options = LocalOptions(worker="thread", kv_tokens=256)
    async with LocalEngine(path(role), name=role, options=options) as engine:  # type: ignore[arg-type]
        assert embedded_scores().fingerprint[f"{role}.weights"] == engine.spec.weights


@pytest.mark.parametrize(("scores", "doubts"), [((1.0, 1.1, 1.2), 0), ((1e9, 1e12, math.inf), 2)])
def test_a_run_records_its_doubts(scores: tuple[float, ...], doubts: int, tmp_path: Path) -> None:
    """Each problem whose chunks score unlike the stored ones has a warning, and reports count the
    warnings by code.
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
