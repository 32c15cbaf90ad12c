"""Tests of the inspect_ai adapter on the embedded models; they are skipped where inspect_ai is
missing.
"""
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atts.evaluators import load_dataset

inspect_ai: Any = pytest.importorskip(
    "inspect_ai", reason="inspect_ai is not installed: pip install 'atts-llm[inspect]'"
)
# inspect_ai and its dependencies raise warnings, which must not fail the tests
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write inspect_ai's logs into the test's folder, and ignore this machine's settings of
    inspect_ai.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INSPECT_DISPLAY", "none")


def arithmetic(count: int, solver: Any = None) -> Any:
    """Make an inspect_ai task from the first embedded problems, graded by inspect_ai's own scorer."""
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import match
    from inspect_ai.solver import generate

    problems = load_dataset(f"arithmetic[:{count}]").problems
    samples = [Sample(input=it.text, target=it.answer or "", id=it.id) for it in problems]
    return inspect_ai.Task(dataset=samples, solver=solver or generate(), scorer=match(numeric=True))


def test_model_provider_solves_the_embedded_benchmark() -> None:
    """With `--model atts/embedded`, inspect_ai's log has the answers, votes and tokens of atts, and
    most answers are correct.
    """
    import atts.adapters.inspect_ai

    options = {"samples": 4, "rate": 0.3, "reply": "answer"}
    [log] = inspect_ai.eval(
        arithmetic(6), model="atts/embedded", model_args=options, log_dir="logs"
    )
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value >= 0.5
    for sample in log.samples:
        facts = sample.output.metadata
        assert sample.output.completion == (facts["answer"] or "")
        assert facts["rollouts"] == 4
        assert (
            sample.output.usage.output_tokens == facts["draft_tokens"] + facts["target_tokens"] > 0
        )
    assert atts.adapters.inspect_ai.ATTSModelAPI is not None


def test_solver_answers_in_place_of_the_tasks_model() -> None:
    """If a task is given the solver of atts, atts answers instead of the model that the task names.
    Each epoch is a new run.
    """
    from atts.adapters.inspect_ai import atts_solver

    task = arithmetic(2, atts_solver("scripted", samples=2))
    [log] = inspect_ai.eval(task, model="mockllm/model", epochs=2, log_dir="logs")
    assert log.status == "success", log.error
    assert len(log.samples) == 4
    assert all(sample.metadata["atts"]["rollouts"] == 2 for sample in log.samples)
    by_problem: dict[str, set[str]] = {}
    for sample in log.samples:
        by_problem.setdefault(sample.id, set()).add(sample.output.completion)
    assert all(len(texts) == 2 for texts in by_problem.values())


def test_tools_and_misspelt_arguments_are_refused() -> None:
    """The inspect_ai adapter refuses tools, which atts cannot call, and unknown model arguments."""
    from inspect_ai.model import get_model
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool  # type: ignore[untyped-decorator]
    def nothing() -> Any:
        async def execute(word: str) -> str:
            """Return the word.

            Args:     word: The word to return.
            """
            return word

        return execute

    [log] = inspect_ai.eval(
        arithmetic(1, [use_tools(nothing()), generate()]), model="atts/scripted", log_dir="logs"
    )
    assert log.status == "error"
    assert "does not support tools" in str(log.error)
    with pytest.raises(Exception, match="did you mean 'samples'"):
        get_model("atts/scripted", sampels=2)
