"""Tests that the example with the whole method in one file gives the same outcomes as the real
pipeline.
"""

import ast
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from atts.calibration import Calibrator, Tuning
from atts.core import Outcome, Problem
from atts.graph import Graph, ProblemScope
from atts.pipelines import Answers, Chunking, ConformalGate, Context, Policy, ScoreRule, solve
from atts.run import EngineCalls
from atts.testing import ScriptedEngine, run_virtual, toy_answer, toy_groups, toy_problems

pytestmark = pytest.mark.checkout
NANO = Path(__file__).parents[2] / "examples" / "nano_atts.py"


@pytest.fixture(scope="module")
def nano(example: Callable[[str], ModuleType]) -> Any:
    """Import the example `nano_atts.py` as a module."""
    return example("nano_atts")


@pytest.mark.parametrize(
    ("rate", "seed", "tokens", "stop"),
    [(0.2, 0, 12, ()), (0.4, 1, 12, ()), (0.1, 2, 64, ("\n",)), (0.3, 3, 7, ())],
)
def test_nano_atts_reaches_the_outcomes_of_the_pipeline(
    nano: Any, rate: float, seed: int, tokens: int, stop: tuple[str, ...]
) -> None:
    """Tokens, escalations, answers and votes of 40 rollouts equal those of the real pipeline.

    The rollouts run one by one, because the gate depends on their order.
    """
    problems = toy_problems(10, seed)
    settings = nano.Settings(rate, chunk_tokens=tokens, stop=stop, seed=seed)
    small = run_virtual(partial(_nano, nano, problems, settings))
    assert [_facts(outcome) for outcome in run_virtual(partial(_real, problems, settings))] == [
        (
            found.answer,
            dict(found.votes),
            [(r.text, r.ids, r.answer, r.judged, r.escalated) for r in found.rollouts],
        )
        for found in small
    ]
    assert sum(rollout.escalated for found in small for rollout in found.rollouts) > 5


async def _real(problems: Sequence[Problem], settings: Any) -> list[Outcome]:
    policy = Policy(
        samples=settings.samples,
        turns=settings.turns,
        max_tokens=settings.max_tokens,
        chunking=Chunking(settings.chunk_tokens, settings.chunk_tokens, settings.stop),
        sampling=settings.sampling,
        score=ScoreRule("mean"),
        early_stop="none",
        repeats=10**9,
        system=settings.system,
    )
    gate = ConformalGate(Calibrator(settings.rate, "aci", tuning=Tuning(aci_step=settings.step)))
    async with ScriptedEngine("draft") as draft, ScriptedEngine("target") as target:
        context = Context(
            draft, target, gate, Answers(toy_answer, toy_groups), EngineCalls, settings.seed
        )

        async def one(problem: Problem, scope: ProblemScope) -> Outcome:
            return await solve(problem, policy, context, scope)

        results = await Graph(rollouts=1).run(problems, one)
    return [result.value for result in results if result.value is not None]


async def _nano(nano: Any, problems: Sequence[Problem], settings: Any) -> list[Any]:
    async with ScriptedEngine("draft") as draft, ScriptedEngine("target") as target:
        calibrator = nano.Calibrator(settings.rate, settings.step)
        solutions: list[Any] = await nano.NanoATTS(
            draft, target, calibrator, toy_answer, settings
        ).solve_all(problems, at_once=1)
    return solutions


def _facts(outcome: Outcome) -> object:
    rollouts: list[object] = []
    for rollout in outcome.rollouts:
        written = rollout.ids("draft")[len(rollout.prompt.draft_ids) :]
        decisions = [turn.decision for turn in rollout.turns if turn.decision is not None]
        escalated = sum(decision.escalate for decision in decisions)
        rollouts.append((rollout.text, written, rollout.answer, len(decisions), escalated))
    return outcome.answer, dict(outcome.votes), rollouts


def test_nano_atts_has_200_lines_and_few_imports() -> None:
    """The file has at most 200 lines of text, and imports only the engine protocol and values from
    atts.

    Its demonstration at the end imports more.
    """
    text = NANO.read_text()
    assert sum(1 for line in text.splitlines() if line.strip()) <= 200
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    ours = {node.module for node in imports if (node.module or "").startswith("atts")}
    assert ours == {"atts.core", "atts.engine", "atts.sampling"}


def test_nano_atts_runs(nano: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The program prints how many problems it solved."""
    run_virtual(nano.main)
    assert "of 8 correct" in capsys.readouterr().out
