"""The same distributions on the real engine: its caches hold scored and rejected chunks, and none
may shine through.
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
ALL_OVER = ThresholdGate(0.0)  # every chunk is scored, and every score is too bad
ALL_KEPT = ThresholdGate(float("inf"))  # every chunk is scored, and none is
HERE = LocalOptions(worker="thread")  # opened often


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
    """Return the texts that each model writes without interference."""
    keep = FixedGate("accept")
    return {"draft": run("draft-only", keep)[0], "target": run("target-only", keep)[0]}


@pytest.mark.parametrize("optimistic", [False, True])
def test_scored_and_kept_chunks_are_the_drafts_own(
    alone: dict[Role, Texts], optimistic: bool
) -> None:
    """Rate 0 with every chunk scored: token for token what the draft writes alone, drafted ahead or
    not.
    """
    texts, outcomes = run("atts", ALL_KEPT, optimistic=optimistic)
    assert texts == alone["draft"]
    assert sum(outcome.usage.scored_tokens for outcome in outcomes) > 0


def test_scored_and_replaced_chunks_leave_the_targets_own(alone: dict[Role, Texts]) -> None:
    """Rate 1, replace, answers verified: token for token what the target writes alone with the same
    random numbers.
    """
    texts, outcomes = run("atts", ALL_OVER)
    assert texts == alone["target"]
    assert sum(outcome.usage.scored_tokens for outcome in outcomes) > 0


def test_a_mixed_run_is_neither(alone: dict[Role, Texts]) -> None:
    """The comparison has power: where coins keep some chunks and replace others, the texts are
    another story.
    """
    texts, _ = run("atts", CoinGate(0.5, seed=0))
    assert texts not in (alone["target"], alone["draft"])
