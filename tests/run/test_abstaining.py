"""Answers that are withheld where labelled problems do not vouch for them."""

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
    """Make forty graded problems: if the votes agree the draft is correct, if they are split it is
    not always.
    """
    directory = tmp_path_factory.mktemp("labelled")
    evaluate_sync(toy_problems(40, 1), SETUP, directory=directory)
    return directory


def abstaining(labelled: Path, abstain: str = ".2@.9") -> Setup:
    """Return the same settings, with answers withheld."""
    return replace(SETUP, abstain=abstain, labelled=str(labelled))


@pytest.mark.anyio
async def test_an_answer_is_withheld_where_too_few_votes_agree(labelled: Path) -> None:
    """The outcome keeps its votes, loses its answer, and says why."""
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


def test_a_run_says_what_it_answered_and_what_was_promised(labelled: Path, tmp_path: Path) -> None:
    """Result, JSON and report say it, and again when the run is opened a second time."""
    result = evaluate_sync(NEW, abstaining(labelled), directory=tmp_path / "run")
    given = [problem for problem in result.problems if problem.answer is not None]
    assert 0 < len(given) < len(NEW)
    assert result.answered is not None
    assert result.answered.share.value == pytest.approx(len(given) / len(NEW))
    assert result.answered.wrong.n_samples == len(given)
    assert (
        "with probability at least 0.9 over the 40 labelled problems" in result.answered.guarantee
    )
    assert result.to_dict()["answered"]["guarantee"] == result.answered.guarantee
    page = report(result, format="markdown").read_text()
    assert "wrong if answered" in page
    assert "with probability at least 0.9" in page
    again = evaluate_sync(NEW, abstaining(labelled), directory=tmp_path / "run")
    assert (again.problems, again.answered) == (result.problems, result.answered)
    assert evaluate_sync(NEW[:2], SETUP).answered is None


def test_other_settings_and_the_labelled_problems_themselves_are_refused(labelled: Path) -> None:
    """Each difference is named; a seed and other problems are none."""
    setup = abstaining(labelled)
    with pytest.raises(FingerprintError, match="policy.samples: stored 4, now 5"):
        evaluate_sync(NEW, replace(setup, policy=Policy(samples=5)))
    with pytest.raises(FingerprintError, match="configuration.rate"):
        evaluate_sync(NEW, replace(setup, rate=0.3))
    with pytest.raises(OptionError, match="label others"):
        evaluate_sync(toy_problems(40, 1), setup)
    assert evaluate_sync(NEW[:1], replace(setup, seed=4)).status == "finished"


@pytest.mark.parametrize("text", ["x", "2@.9", ".1@1", ".1@", "@.9", "-.1", "nan@.9"])
def test_a_promise_that_is_none_is_refused(labelled: Path, text: str) -> None:
    """Before anything is run, with the form."""
    with pytest.raises(OptionError, match=r"such as \.1@\.9"):
        evaluate_sync(NEW, abstaining(labelled, text))


def test_what_labels_too_little_says_how_much_would_do(labelled: Path, tmp_path: Path) -> None:
    """Too few problems, a run that is not over, one that withheld answers, one without the other."""
    with pytest.raises(OptionError, match="about .* labelled problems like these would do"):
        evaluate_sync(NEW, abstaining(labelled, ".02@.9"))
    half: dict[str, Any] = {"directory": tmp_path / "half"}
    evaluate_sync(NEW, SETUP, **half)
    journal = tmp_path / "half/journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[: len(lines) // 2]))
    with pytest.raises(OptionError, match="are not over"):
        evaluate_sync(NEW, abstaining(tmp_path / "half"))
    evaluate_sync(NEW, abstaining(labelled), directory=tmp_path / "withheld")
    with pytest.raises(OptionError, match="withheld answers itself"):
        evaluate_sync(NEW, abstaining(tmp_path / "withheld"))
    with pytest.raises(OptionError, match="need each other"):
        evaluate_sync(NEW, replace(SETUP, abstain=".1"))
