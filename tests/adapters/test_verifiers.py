"""Tests of the verifiers adapter; they are skipped where verifiers is missing."""
# pyright: reportMissingImports=false, reportMissingTypeStubs=false

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.evaluators import load_dataset

vf: Any = pytest.importorskip(
    "verifiers.v1", reason="verifiers is not installed: pip install verifiers"
)
# verifiers and its dependencies raise warnings, which must not fail the tests
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def taskset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Load the taskset by its module's name, as verifiers does."""
    (tmp_path / "math_tasks.py").write_text(
        "from atts.adapters.verifiers import *\n__all__ = ['ATTSTaskset']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from verifiers.v1.utils.loaders import load_taskset, taskset_class

    kind = taskset_class("math_tasks")
    config_type = kind.__orig_bases__[0].__args__[1]
    yield load_taskset(config_type(id="math_tasks", dataset="arithmetic[:6]"))
    sys.modules.pop("math_tasks", None)


def test_every_problem_is_a_task(taskset: Any) -> None:
    """Each verifiers task has the id, question and prompt that a run of atts uses for the problem,
    and is the same after serialisation.
    """
    problems = load_dataset("arithmetic[:6]").problems
    tasks = list(taskset)
    assert [task.key for task in tasks] == [problem.id for problem in problems]
    for task, problem in zip(tasks, problems, strict=True):
        assert task.data.prompt == problem.text
        assert "\\boxed{}" in task.data.system_prompt
        again = type(task.data).model_validate_json(task.data.model_dump_json())
        assert again == task.data


@pytest.mark.parametrize(
    ("reply", "correct", "answered"),
    [
        ("So it is \\boxed{24.0}.", 1.0, 1.0),
        ("So it is \\boxed{25}.", 0.0, 1.0),
        ("I do not know", 0.0, 0.0),
    ],
)
def test_the_reward_is_the_verdict_of_atts(
    taskset: Any, reply: str, correct: float, answered: float
) -> None:
    """The reward that verifiers computes equals the verdict of atts, and the trace records this
    reward.
    """
    task = next(iter(taskset))
    assert task.data.problem["answer"] == "24"
    trace = vf.Trace.model_construct(root_reply=reply, rewards={}, metrics={})
    anyio.run(task.score, trace)
    assert trace.rewards["correct"].score == correct
    assert trace.metrics == {"answered": answered}
