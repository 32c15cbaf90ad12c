"""Tests of withheld answers: atts gives an answer only if labelled problems support it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atts.api import Session, Setup, evaluate_sync, report
from atts.errors import FingerprintError, OptionError
from atts.pipelines import Policy
from atts.testing import toy_problems

SETUP = Setup(draft="scripted", target="scripted", method="draft-only", policy=Policy(samples=4))
NEW = toy_problems(12, 9)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make forty graded problems in which unanimous votes are correct and split votes are sometimes
    wrong.
    """
    directory = tmp_path_factory.mktemp("labelled")
    evaluate_sync(toy_problems(40, 1), SETUP, directory=directory)
    return directory


def abstaining(labelled: Path, abstain: str = ".2@.9") -> Setup:
    """Return the settings of the labelled run, with answers withheld if too few rollouts agree."""
    return replace(SETUP, abstain=abstain, labelled=str(labelled))


@pytest.mark.anyio
async def test_an_answer_with_too_few_agreeing_votes_is_withheld(labelled: Path) -> None:
    """If too few rollouts agree, the outcome keeps its votes but has no answer, and gives the
    reason.
    """
    async with Session(abstaining(labelled)) as session, Session(SETUP) as plain:
        for problem in NEW:
            found = await session.solve(problem)
            usual = await plain.solve(problem)
            assert found.votes == usual.votes
            if usual.agreement >= 0.6:
                assert found.answer == usual.answer
            elif usual.agreement < 0.5:
                assert (found.answer, found.status) == (None, "unanswered")
                assert "abstained" in found.why


def test_a_run_reports_its_answers_and_the_guarantee(labelled: Path, tmp_path: Path) -> None:
    """The result, its JSON and the report state how many answers were given and the guarantee, also
    after the run is reopened.
    """
    result = evaluate_sync(NEW, abstaining(labelled), directory=tmp_path / "run")
    given = [problem for problem in result.problems if problem.answer is not None]
    assert 0 < len(given) < len(NEW)
    assert result.answered is not None
    assert result.answered.share.value == pytest.approx(len(given) / len(NEW))
    assert result.answered.wrong.n_samples == len(given)
    assert (
        "with probability at least 0.9 over the choice of the 40 labelled problems"
        in result.answered.guarantee
    )
    assert result.to_dict()["answered"]["guarantee"] == result.answered.guarantee
    page = report(result, format="markdown").read_text()
    assert "wrong if answered" in page
    assert "with probability at least 0.9" in page
    again = evaluate_sync(NEW, abstaining(labelled), directory=tmp_path / "run")
    assert (again.problems, again.answered) == (result.problems, result.answered)
    assert evaluate_sync(NEW[:2], SETUP).answered is None


def test_labels_of_other_settings_or_of_the_same_problems_are_refused(labelled: Path) -> None:
    """Labels from other settings, or from the run's own problems, are refused with an error that
    lists each difference.

    Labels from another seed and from other problems are allowed.
    """
    setup = abstaining(labelled)
    with pytest.raises(FingerprintError, match="policy.samples: stored 4, now 5"):
        evaluate_sync(NEW, replace(setup, policy=Policy(samples=5)))
    with pytest.raises(FingerprintError, match="configuration.rate"):
        evaluate_sync(NEW, replace(setup, rate=0.3))
    with pytest.raises(OptionError, match="the same problems"):
        evaluate_sync(toy_problems(40, 1), setup)
    assert evaluate_sync(NEW[:1], replace(setup, seed=4)).status == "finished"


@pytest.mark.parametrize("text", ["x", "2@.9", ".1@1", ".1@", "@.9", "-.1", "nan@.9"])
def test_a_malformed_guarantee_is_refused(labelled: Path, text: str) -> None:
    """A malformed guarantee is refused before anything runs, with an error that shows the correct
    form.
    """
    with pytest.raises(OptionError, match=r"RISK@PROBABILITY; 0\.1@0\.9"):
        evaluate_sync(NEW, abstaining(labelled, text))


def test_too_few_labelled_problems_are_refused_with_the_number_needed(
    labelled: Path, tmp_path: Path
) -> None:
    """If there are too few labelled problems, the error gives the number needed.

    Unfinished runs and runs that withheld answers are refused too, and so is one of the settings
    `abstain` and `labelled` without the other.
    """
    with pytest.raises(OptionError, match="about .* similar labelled problems are needed"):
        evaluate_sync(NEW, abstaining(labelled, ".02@.9"))
    half: dict[str, Any] = {"directory": tmp_path / "half"}
    evaluate_sync(NEW, SETUP, **half)
    journal = tmp_path / "half/journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]))
    with pytest.raises(OptionError, match="unfinished problem"):
        evaluate_sync(NEW, abstaining(tmp_path / "half"))
    evaluate_sync(NEW, abstaining(labelled), directory=tmp_path / "withheld")
    with pytest.raises(OptionError, match="itself used abstain"):
        evaluate_sync(NEW, abstaining(tmp_path / "withheld"))
    with pytest.raises(OptionError, match="or neither"):
        evaluate_sync(NEW, replace(SETUP, abstain=".1"))
