"""Tests of the distributions that pipelines draw from on the local engine, whose caches contain
scored and rejected chunks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import pytest

from atts.api import Setup
from atts.core import Outcome, Role, TokenIds
from atts.evaluators.datasets.arithmetic import problems
from atts.pipelines import CoinGate, FixedGate, Gate, ThresholdGate
from atts.run import RunOptions, evaluate

pytest.importorskip("torch", reason="the embedded models run on torch")
from atts.local import LocalEngine, LocalOptions
from atts.models import EMBEDDED, path

Texts = dict[tuple[str, int], TokenIds]
ALL_OVER = ThresholdGate(0.0)  # this gate scores every chunk and rejects it
ALL_KEPT = ThresholdGate(float("inf"))  # this gate scores every chunk and accepts it
HERE = LocalOptions(worker="thread")  # a thread, because the tests open the engine often


def run(method: str, gate: Gate, **changes: Any) -> tuple[Texts, list[Outcome]]:
    """Run a few problems on the embedded pair; return the ids of every rollout, and the outcomes."""
    base = Setup()
    policy = replace(base.policy, samples=1, early_stop="none", **changes)
    setup = replace(base, method=method, gate=gate, policy=policy, seed=11)

    async def main() -> list[Outcome]:
        draft, target = (LocalEngine(path(role), name=role, options=HERE) for role in EMBEDDED)
        async with draft, target:
            plan = setup.plan(draft, target)
            return list(
                (
                    await evaluate(
                        problems("test", 6), plan, RunOptions(engines="are open", signals="ignore")
                    )
                ).kept
            )

    outcomes = anyio.run(main)
    lines = [rollout for outcome in outcomes for rollout in outcome.rollouts]
    return {(line.problem, line.sample): line.ids("target") for line in lines}, outcomes


@pytest.fixture(scope="module")
def alone() -> dict[Role, Texts]:
    """Return the texts that each model writes alone."""
    keep = FixedGate("accept")
    return {"draft": run("draft-only", keep)[0], "target": run("target-only", keep)[0]}


@pytest.mark.parametrize("optimistic", [False, True])
def test_scored_and_kept_chunks_are_the_drafts_own(
    alone: dict[Role, Texts], optimistic: bool
) -> None:
    """If every chunk is scored and none escalates, the texts are those that the draft alone writes,
    with and without drafting ahead.
    """
    texts, outcomes = run("atts", ALL_KEPT, optimistic=optimistic)
    assert texts == alone["draft"]
    assert sum(outcome.usage.scored_tokens for outcome in outcomes) > 0


def test_scored_and_replaced_chunks_leave_the_targets_own(alone: dict[Role, Texts]) -> None:
    """At rate 1 with `replace`, tokens equal those of the target alone with the same random
    numbers.
    """
    texts, outcomes = run("atts", ALL_OVER)
    assert texts == alone["target"]
    assert sum(outcome.usage.scored_tokens for outcome in outcomes) > 0


def test_a_mixed_run_differs_from_both_models(alone: dict[Role, Texts]) -> None:
    """If a coin replaces some chunks, the texts differ, so the comparison has power."""
    texts, _ = run("atts", CoinGate(0.5, seed=0))
    assert texts not in (alone["target"], alone["draft"])
