"""Tests of a target that stops returning usable scores: the run ends, or its report says so
first.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from atts.api import Setup, evaluate
from atts.api.calibrating import report as write_report
from atts.cli.evaluations import result_table
from atts.core import ScoreRequest, Scores
from atts.engine import EngineAround
from atts.errors import OptionError, UnusableScores
from atts.pipelines import Policy
from atts.run import RunResult
from atts.run.calls import IN_A_ROW, OnUnscored
from atts.testing import ScriptedEngine, run_virtual, toy_problems

Fault = Literal["nan", "short", "impossible", "positive"]


class Overflowing(EngineAround):
    """A target whose scores are unusable from the `after`-th call on; the scores of one text may be
    excepted.
    """

    def __init__(self, fault: Fault, after: int = 14, spared: str = "") -> None:
        super().__init__(ScriptedEngine("target"), "own")
        self._fault = fault
        self._after = after
        self._spared = spared
        self.calls = 0

    async def around(self, request: Any, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Spoil all scores except those of the excepted text."""
        answer = await call(request)
        if not isinstance(request, ScoreRequest):
            return answer
        self.calls += 1
        text = self.tokenizer.decode(request.suffix)
        if self.calls <= self._after or (self._spared and self._spared in text):
            return answer
        count = len(request.suffix)
        values = {
            "nan": (math.nan,) * count,
            "short": (-1.0,) * (count - 1),
            "impossible": (-math.inf,) * count,
            "positive": (3.0,) * count,
        }
        return Scores(values[self._fault])


def setup(target: EngineAround, reaction: OnUnscored = "stop") -> Setup:
    """Make settings of a small run whose chunks this target scores."""
    policy = Policy(samples=4, early_stop="none")
    return Setup(
        draft="scripted",
        target=target,
        policy=policy,
        rate=0.4,
        on_unscored=reaction,
        concurrency=4,
    )


@pytest.mark.parametrize("fault", ["nan", "short", "impossible", "positive"])
def test_a_target_without_usable_scores_ends_the_run(fault: Fault, tmp_path: Path) -> None:
    """If the target returns no usable scores, the run soon ends with exit code 3 and a diagnosis.

    Everything recorded is kept.
    """
    target = Overflowing(fault)
    with pytest.raises(UnusableScores, match="cannot score a fixed test sentence either") as raised:
        solved(toy_problems(12), setup(target), directory=tmp_path / "run")
    assert raised.value.exit_code == 3
    assert "--on-unscored escalate" in str(raised.value)
    assert target.calls < 14 + 6 * IN_A_ROW
    assert list((tmp_path / "run").glob("journal*"))


def test_the_diagnosis_says_if_the_target_scores_other_texts() -> None:
    """If the target still scores the probe's sentence, the diagnosis names the chunks or the load
    as the cause.
    """
    with pytest.raises(UnusableScores, match="can score a fixed test sentence"):
        solved(toy_problems(12), setup(Overflowing("nan", spared="the answer is 4.")))


def test_the_run_resumes_once_the_target_works(tmp_path: Path) -> None:
    """A run resumes once the target works; scoring failures of earlier sessions do not count."""
    directory = tmp_path / "run"
    with pytest.raises(UnusableScores):
        solved(toy_problems(6), setup(Overflowing("nan")), directory=directory)
    sound = Overflowing("nan", after=10**9)
    result = solved(toy_problems(6), setup(sound), directory=directory)
    assert result.status == "finished"
    assert len(result.problems) == 6


def solved(problems: Any, how: Setup, directory: Path | None = None) -> RunResult:
    """Evaluate in virtual time, so that retries take no real time."""

    async def run() -> RunResult:
        return await evaluate(problems, how, directory=directory)

    return run_virtual(run)


def escalated(tmp_path: Path) -> RunResult:
    """Make a run that continues without scores."""
    return solved(
        toy_problems(6), setup(Overflowing("nan"), "escalate"), directory=tmp_path / "run"
    )


def test_a_run_without_scores_says_so_first(tmp_path: Path) -> None:
    """A run without scores says so at the beginning of the summary and of the report."""
    result = escalated(tmp_path)
    assert result.status == "finished"
    judged = sum(problem.judged for problem in result.problems)
    assert 0 < result.unscored < judged
    words = f"{result.unscored:,} of {judged:,} chunks had to be decided without a score"
    lines = result_table(result, {"method": "atts", "dataset": "toys", "rate": 0.4}, None)  # type: ignore[arg-type]
    facts = [line for line in lines[1:] if line]
    assert facts[0].endswith(words)
    page = write_report(tmp_path / "run", format="markdown")
    text = page.read_text(encoding="utf-8")
    assert words in text
    assert text.index(words) < text.index("accuracy of the vote")


def test_a_run_with_scores_has_no_such_line() -> None:
    """The summary of a run with scores has no line about missing scores."""
    result = solved(toy_problems(3), setup(Overflowing("nan", after=10**9)))
    assert result.unscored == 0
    assert result.unscored_words == ""


def test_single_scoring_failures_do_not_end_the_run() -> None:
    """Single scoring failures do not end the run, because each usable score resets the count of
    failures.
    """

    class Stray(Overflowing):
        async def around(self, request: Any, call: Callable[[Any], Awaitable[Any]]) -> Any:
            self._after = 0 if self.calls % 5 == 4 else 10**9
            return await super().around(request, call)

    result = solved(toy_problems(8), setup(Stray("nan")))
    assert result.status == "finished"


def test_an_unknown_reaction_is_refused() -> None:
    """The error about an unknown reaction lists the valid reactions."""
    with pytest.raises(OptionError, match="on_unscored"):
        Setup(draft="scripted", target="scripted", on_unscored="never").plan(  # type: ignore[arg-type]
            ScriptedEngine("draft"), ScriptedEngine("target")
        )
