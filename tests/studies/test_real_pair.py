"""Tests of the study of a real pair on scripted models: it runs, stops, resumes and makes its
tables.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.concurrency import collect
from atts.core import Completion, Outcome, Problem, Prompt, Rollout, SampleRequest
from atts.errors import BadReply
from atts.sampling import Seed
from atts.testing import ScriptedEngine, run_virtual, toy_problems

arms = pytest.importorskip("scripts.studies.arms", reason="needs a checkout")
real_pair = pytest.importorskip("scripts.studies.real_pair", reason="needs a checkout")
SOLVED = arms.Solved("p", 0, 0.0, 0.0, 0, 0, 0, ())


def series(place: Path) -> Any:
    """Return a series of two parts with three toy problems each, and with every method of the
    default effort.
    """
    asked = [toy_problems(6, 5)[begin : begin + 3] for begin in (0, 3)]
    return real_pair.Series(real_pair.methods("default"), asked, place, seed=1)


def run(one: Any, seconds: float = float("inf")) -> None:
    """Run a series on scripted models."""

    async def main() -> None:
        async with ScriptedEngine("draft") as draft, ScriptedEngine("target") as target:
            await one.run(draft, target, seconds)

    run_virtual(partial(main))


def test_the_study_is_tabulated_and_runs_nothing_twice(tmp_path: Path) -> None:
    """Both tables have every problem, and the second call reads all results from the disk."""
    first = series(tmp_path)
    run(first)
    methods, _, scores = real_pair.tables(first)
    assert [row[0] for row in methods.rows] == [one.name for one in first.arms]
    assert all("6 problems" in table.notes[0] for table in (methods, scores))
    assert {row[0] for row in scores.rows} == {
        row[0] for row in methods.rows if row[0][:4] == "atts"
    }
    by_name = {row[0]: row for row in methods.rows}
    assert by_name["draft-only"][6] == 0
    assert by_name["target-only"][8] == 0
    assert by_name["atts, rate 0.2"][3] != "-"
    again = series(tmp_path)
    assert again.missing() == []
    assert real_pair.tables(again) == real_pair.tables(first)


def test_only_parts_that_every_method_completed_are_tabulated(tmp_path: Path) -> None:
    """If no time is left, no part of the study begins; a part that one method did not complete is
    left out for all methods.
    """
    one = series(tmp_path)
    run(one, seconds=-1)
    assert len(one.missing()) == 2 * len(one.arms)
    assert real_pair.tables(one)[0].rows == ()
    run(one)
    lines = (tmp_path / real_pair.FILE).read_text().splitlines(keepends=True)
    (tmp_path / real_pair.FILE).write_text("".join(lines[:-1]))
    cut = series(tmp_path)
    assert len(cut.missing()) == 1
    assert "3 problems" in real_pair.tables(cut)[0].notes[0]


def test_what_runs_ask_alike_is_asked_once() -> None:
    """Equal requests of two runs get one reply; if the request fails, one of the waiting runs sends
    it again.
    """
    asked: list[int] = []
    request = SampleRequest((1, 2), 4)
    other = replace(request, seed=Seed(1))

    async def call(request: SampleRequest) -> Completion:
        asked.append(request.seed.run)
        await anyio.sleep(1)
        if len(asked) == 1:
            raise BadReply("draft", "a first failure")
        return Completion((3,), "c", "length", (-1.0,))

    async def main() -> None:
        once = real_pair.Once(ScriptedEngine("draft"), "draft")

        async def ask() -> Any:
            return await once.around(request, call)

        async def fail() -> None:
            with pytest.raises(BadReply):
                await ask()

        _, one, two = await collect([fail, ask, ask])
        assert one is two
        assert await ask() is one
        assert asked == [0, 0]
        await once.around(other, call)
        await once.around(replace(request, logprobs="unneeded"), call)
        assert asked == [0, 0, 1, 0]

    run_virtual(main)


def test_accuracy_is_told_by_source() -> None:
    """Problems are grouped into sources by the beginning of their names, and the table has the
    accuracy for each source.
    """
    solved = [
        replace(SOLVED, problem=name, share=share)
        for name, share in (("gsm8k/1", 1.0), ("gsm8k/2", 1.0), ("math500/algebra/3", 0.0))
    ]
    one = arms.Sum([arms.Piece("draft-only", 4, 1, 0, solved)])
    table = real_pair.source_table({"draft-only": one})
    assert table.rows[0][1].startswith("1.000")
    assert table.rows[0][2].startswith("0.000")
    assert table.notes == ("Problems: 2 of gsm8k, 1 of math500.",)


def test_answers_are_graded_as_runs_grade_them() -> None:
    """An answer in another notation than the reference's is correct; a missing answer is not."""
    problem = Problem("p", "How many?", "18", kind="math")
    prompt = Prompt((1,), (1,))
    rollouts = tuple(
        Rollout("p", sample, prompt, finish="answer", answer=answer)
        for sample, answer in enumerate(("18.0", None, "17"))
    )
    outcome = Outcome(problem, rollouts, "18.0")
    solved = real_pair.graded(outcome)
    assert solved.right == 1
    assert solved.share == pytest.approx(1 / 3)
    assert real_pair.graded(replace(outcome, answer=None)).right == 0


def test_the_ways_to_the_targets_text_are_compared_in_turn() -> None:
    """The methods target-only, target-only with speculation, and exact write the same texts; times
    are relative to target-only.
    """

    engines = {
        "draft": ScriptedEngine("draft"),
        "target": ScriptedEngine("target"),
        "proposed to": ScriptedEngine("target"),
    }
    asked = toy_problems(2, 5)
    table = anyio.run(partial(real_pair.losses, engines, asked, (2, 64), rounds=2))
    assert [row[0] for row in table.rows] == ["target-only", "target-only, speculate=auto", "exact"]
    assert table.rows[0][2:4] == ("1.000 [1.000, 1.000]", "1.000 [1.000, 1.000]")
    assert {row[5] for row in table.rows} == {"8 of 8"}
