"""inspect_ai drives the embedded pair and benchmark end to end; runs where inspect_ai is installed."""
# pyright: reportMissingImports=false, reportUntypedFunctionDecorator=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atts.evaluators import load_dataset

inspect_ai: Any = pytest.importorskip(
    "inspect_ai", reason="inspect_ai is not installed: pip install 'atts-llm[inspect]'"
)
pytestmark = pytest.mark.filterwarnings("default")  # the harness's own, and its dependencies'


@pytest.fixture(autouse=True)
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep logs in the test's folder, and read no configuration of the machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("INSPECT_DISPLAY", "none")


def arithmetic(count: int, solver: Any = None) -> Any:
    """Make a task of inspect_ai from the first embedded problems, graded by its own scorer."""
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import match
    from inspect_ai.solver import generate

    problems = load_dataset(f"arithmetic[:{count}]").problems
    samples = [Sample(input=it.text, target=it.answer or "", id=it.id) for it in problems]
    return inspect_ai.Task(dataset=samples, solver=solver or generate(), scorer=match(numeric=True))


def test_the_provider_solves_the_embedded_benchmark() -> None:
    """`--model atts/embedded -M ...`: their log has our answers, votes and tokens; most are right."""
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


def test_the_solver_answers_whatever_the_model_is() -> None:
    """A task with another model uses ours through the solver; epochs are repeats; the reasoning is
    theirs to read.
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


def test_what_cannot_be_done_is_said() -> None:
    """Tools are refused, misspelt model arguments too."""
    from inspect_ai.model import get_model
    from inspect_ai.solver import generate, use_tools
    from inspect_ai.tool import tool

    @tool  # type: ignore[untyped-decorator]
    def nothing() -> Any:
        async def execute(word: str) -> str:
            """Say it again.

            Args:
                word: What to say.
            """
            return word

        return execute

    [log] = inspect_ai.eval(
        arithmetic(1, [use_tools(nothing()), generate()]), model="atts/scripted", log_dir="logs"
    )
    assert log.status == "error"
    assert "calls no tools" in str(log.error)
    with pytest.raises(Exception, match="did you mean 'samples'"):
        get_model("atts/scripted", sampels=2)
