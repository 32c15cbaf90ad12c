"""A fixture that runs a policy on the toy language in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from atts.core import Outcome, Problem
from atts.engine import Engine
from atts.graph import Graph, Limit, ProblemScope, RetryPolicy
from atts.pipelines import Answers, Context, Gate, Policy, RoundGate, solve
from atts.run import EngineCalls
from atts.testing import Backend, ScriptedEngine, run_virtual, toy_answer, toy_groups, toy_problems

Solve = Callable[..., list[Outcome]]
SLOTS = {"draft": Limit(slots=16), "target": Limit(slots=4)}


@pytest.fixture
def answers() -> Answers:
    """Return functions that extract and group answers of the toy language."""
    return Answers(toy_answer, toy_groups)


@pytest.fixture
def attempt(answers: Answers) -> Solve:
    """Return a function that solves toy problems under a policy and a gate in virtual time. If the
    caller passes a list `events`, the graph's events are added to it.
    """

    def run(
        policy: Policy,
        gate: Gate | RoundGate,
        *,
        problems: Sequence[Problem] | int = 6,
        draft: Engine | None = None,
        target: Engine | None = None,
        events: list[Any] | None = None,
        retries: RetryPolicy | None = None,
        backend: Backend = "asyncio",
        seed: int = 0,
        answers: Answers = answers,
        limits: Mapping[str, Limit] = SLOTS,
    ) -> list[Outcome]:
        chosen = toy_problems(problems, 5) if isinstance(problems, int) else problems

        async def main() -> list[Outcome]:
            async with (
                draft or ScriptedEngine("draft") as small,
                target or ScriptedEngine("target") as large,
            ):
                context = Context(small, large, gate, answers, EngineCalls, seed)
                sink = events.append if events is not None else None
                graph = Graph(rollouts=32, limits=limits, policy=retries, sink=sink)

                async def one(problem: Problem, scope: ProblemScope) -> Outcome:
                    return await solve(problem, policy, context, scope)

                results = await graph.run(chosen, one)
                for result in results:
                    if result.error:
                        raise result.error
                return [result.value for result in results if result.value is not None]

        return run_virtual(partial(main), backend=backend)

    return run
