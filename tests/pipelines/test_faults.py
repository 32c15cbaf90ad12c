"""Tests of engines that fail: no rollout hangs, no chunk is silently accepted, and the outcome says
what happened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from atts.calibration import Calibrator
from atts.core import (
    Completion,
    Decision,
    Features,
    Outcome,
    Rollout,
    SampleRequest,
    ScoreRequest,
    Scores,
)
from atts.engine import EngineSpec
from atts.errors import UsageError
from atts.graph import RetryPolicy
from atts.pipelines import ConformalGate, FixedGate, Gate, Policy
from atts.testing import FaultKind, Faults, ScriptedEngine

Solve = Callable[..., list[Outcome]]
POLICY = Policy(samples=4, early_stop="none", timeout_seconds=5)
PATIENT = RetryPolicy(calls=2, delay_seconds=0.1, failures_in_row=None)


def lines(outcomes: Sequence[Outcome]) -> list[Rollout]:
    return [rollout for outcome in outcomes for rollout in outcome.rollouts]


def conformal() -> Gate:
    return ConformalGate(Calibrator(0.3, "marginal"))


class Silent(ScriptedEngine):
    """A draft that returns no log-probabilities, as most chat servers do."""

    @property
    def spec(self) -> EngineSpec:
        return replace(super().spec, logprobs="none")

    async def sample(self, request: SampleRequest) -> Completion:
        return replace(await super().sample(request), logprobs=())


class TrustsTheDraft(ConformalGate):
    """A gate that accepts a chunk without a score if the draft's log-probability is high."""

    def preview(self, features: Features) -> Decision:
        if features.draft_logprob > -9.0:
            return features.decision("accept")
        return super().preview(features)


class Undecided(ConformalGate):
    """A gate whose final decision is always "verify", which only a preview may return."""

    def decide(self, features: Features, score: float) -> Decision:
        return features.decision("verify", score=score)


def test_a_draft_without_log_probabilities_is_never_sure(attempt: Solve) -> None:
    """If the draft returns no log-probabilities, a gate that would accept a chunk because of them
    does not accept it without a score.
    """
    gate = TrustsTheDraft(Calibrator(0.3, "marginal"))
    judged = [
        turn.decision
        for rollout in lines(attempt(POLICY, gate, draft=Silent("draft"), problems=2))
        for turn in rollout.turns
        if turn.decision
    ]
    assert judged
    assert all(decision.score is not None or decision.escalate for decision in judged)


def test_a_final_decision_to_verify_is_refused(attempt: Solve) -> None:
    """A final decision of "verify" is an error: the chunk is already scored, so a gate must accept
    or escalate it.
    """
    with pytest.raises(UsageError, match="must return 'accept' or 'escalate'"):
        attempt(POLICY, Undecided(Calibrator(0.3, "marginal")), problems=1)


BROKEN: list[FaultKind] = ["wrong_length", "nan", "empty", "wrong_ids"]
LOST: list[FaultKind] = ["refused", "dropped", "timeout", "hang"]


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_chunk_that_cannot_be_scored_escalates(
    attempt: Solve, kind: FaultKind, backend: str
) -> None:
    """If every scoring call fails, each judged chunk goes to the target, and its decision has the
    reason.
    """
    target = ScriptedEngine("target", faults=Faults({kind: 1.0}, only="score"))
    outcomes = attempt(
        POLICY, conformal(), target=target, retries=PATIENT, problems=2, backend=backend
    )
    judged = [turn for rollout in lines(outcomes) for turn in rollout.turns if turn.decision]
    assert judged
    for turn in judged:
        assert turn.decision is not None
        assert turn.decision.escalate
        assert turn.decision.why.startswith("forced: not scored")
        assert turn.score is None
    assert {rollout.finish for rollout in lines(outcomes)} == {"answer"}


@pytest.mark.parametrize("kind", LOST)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_missing_target_leaves_chunks_undecided(
    attempt: Solve, kind: FaultKind, backend: str
) -> None:
    """If no scoring call is answered, no chunk is judged, and the rollout fails for that reason."""
    target = ScriptedEngine("target", faults=Faults({kind: 1.0}, only="score"))
    outcomes = attempt(
        POLICY, conformal(), target=target, retries=PATIENT, problems=2, backend=backend
    )
    assert {rollout.finish for rollout in lines(outcomes)} == {"failed"}
    assert not [
        turn.decision for rollout in lines(outcomes) for turn in rollout.turns if turn.decision
    ]
    assert {outcome.status for outcome in outcomes} == {"failed"}


@pytest.mark.parametrize("kind", ["refused", "hang", "nan"])
def test_a_dead_target_fails_only_the_rollouts_that_need_it(
    attempt: Solve, kind: FaultKind
) -> None:
    """If the target is unavailable, rollouts that never escalate finish. The others fail with the
    engine's error.
    """
    target = ScriptedEngine("target", faults=Faults({kind: 1.0}, only="sample"))
    outcomes = attempt(POLICY, conformal(), target=target, retries=PATIENT, problems=4)
    ends = {rollout.finish for rollout in lines(outcomes)}
    assert ends <= {"answer", "turns", "failed"}
    assert "answer" in ends
    failed = [rollout for rollout in lines(outcomes) if rollout.finish == "failed"]
    assert failed
    assert all("engine target" in rollout.error for rollout in failed)
    assert all(rollout.turns == () or rollout.turns[-1].decision is not None for rollout in failed)


def test_finished_work_is_kept_when_the_target_dies_in_mid_run(attempt: Solve) -> None:
    """Answers from before the failure are kept, and their votes count."""

    class Mortal(ScriptedEngine):
        """A target that fails after some calls and stays unavailable."""

        calls = 0

        async def score(self, request: ScoreRequest) -> Scores:
            Mortal.calls += 1
            return (
                await self._dying().score(request)
                if Mortal.calls > 60
                else await super().score(request)
            )

        async def sample(self, request: SampleRequest) -> Completion:
            return (
                await self._dying().sample(request)
                if Mortal.calls > 60
                else await super().sample(request)
            )

        def _dying(self) -> ScriptedEngine:
            return ScriptedEngine("target")  # an engine that was never opened refuses every call

    outcomes = attempt(POLICY, conformal(), target=Mortal("target"), retries=PATIENT, problems=12)
    assert len(outcomes) == 12
    statuses = [outcome.status for outcome in outcomes]
    assert statuses[0] == "answered"
    assert sum(rollout.finish == "failed" for rollout in lines(outcomes)) > 0
    for outcome in outcomes:
        if outcome.status == "failed":
            assert "target" in outcome.why


class Mute(ScriptedEngine):
    """A draft that returns no token, although its text has not ended."""

    async def sample(self, request: SampleRequest) -> Completion:
        return Completion((), "", "length", ())


def test_an_empty_chunk_escalates(attempt: Solve) -> None:
    """An empty chunk cannot be scored, so it escalates, and the target alone finishes the problem."""
    outcomes = attempt(POLICY, conformal(), draft=Mute("draft"), problems=2)
    assert {rollout.finish for rollout in lines(outcomes)} == {"answer"}
    decisions = [turn.decision for rollout in lines(outcomes) for turn in rollout.turns]
    assert all(d is not None and d.escalate and "wrote nothing" in d.why for d in decisions)


class Stuck(ScriptedEngine):
    """A draft that repeats the same chunk forever."""

    async def sample(self, request: SampleRequest) -> Completion:
        ids = self.tokenizer.encode("Hmm.\n\n")
        return Completion(ids, "Hmm.\n\n", "delimiter", (-0.1,) * len(ids))


def test_a_chunk_repeated_three_times_ends_the_rollout(attempt: Solve) -> None:
    """A rollout whose draft repeats a chunk three times ends long before its limits."""
    outcomes = attempt(POLICY, FixedGate("accept"), draft=Stuck("draft"), problems=1)
    assert all(len(rollout.turns) == 3 and rollout.finish == "end" for rollout in lines(outcomes))
    assert all("in a row" in rollout.error for rollout in lines(outcomes))
    assert outcomes[0].status == "unanswered"


def test_nan_from_a_score_rule_is_not_a_score(attempt: Solve) -> None:
    """If the score rule gives NaN for a chunk, the chunk is not accepted, whatever the gate would
    decide.
    """

    def rule(logprobs: Sequence[float], text: str) -> float:
        return math.nan

    policy = replace(POLICY, score=rule)  # type: ignore[arg-type]
    outcomes = attempt(policy, conformal(), problems=2)
    decisions = [
        turn.decision for rollout in lines(outcomes) for turn in rollout.turns if turn.decision
    ]
    assert decisions
    assert all(d.escalate and d.origin == "forced" for d in decisions)
