"""Tests of rollouts that write the same chunk after the same text: the target scores it once, and
each rollout gets its own decision.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from atts.analysis import replay_policy
from atts.core import (
    HOLD,
    Outcome,
    Rollout,
    RolloutSpan,
    Sampling,
    ScoreRequest,
    Scores,
    TokenIds,
    Turn,
)
from atts.errors import EngineTimeout
from atts.graph import CallSpan, RetryPolicy, measure, sibling_edges
from atts.pipelines import Answers, Policy, ThresholdGate
from atts.pipelines.policy import Takeover
from atts.pipelines.scores import score_of
from atts.testing import Latency, ScriptedEngine, run_virtual

Solve = Callable[..., list[Outcome]]
POLICY = Policy(samples=6, early_stop="none")
GREEDY = replace(POLICY, sampling=Sampling(temperature=0.0))
GATE = ThresholdGate(1.8)
KEEP = ThresholdGate(math.inf)


class Heedful(ScriptedEngine):
    """A target that counts its scoring requests. Its first `lost` replies contain no
    log-probabilities.
    """

    def __init__(self, lost: int = 0, *, draws: bool = False, latency: float = 0.0) -> None:
        capabilities = frozenset({"sample", "score", *(["draw"] if draws else [])})
        super().__init__("target", capabilities=capabilities, latency=Latency(per_score=latency))  # type: ignore[arg-type]
        self.asked = Counter[tuple[TokenIds, TokenIds]]()
        self._lost = lost

    async def _rate(self, request: ScoreRequest) -> Scores:
        self.asked[request.prefix, request.suffix] += 1
        found = await super()._rate(request)
        return replace(found, logprobs=()) if self.asked.total() <= self._lost else found


def lines(outcomes: list[Outcome]) -> list[Rollout]:
    return [line for outcome in outcomes for line in outcome.rollouts]


def turns(outcomes: list[Outcome]) -> list[tuple[Rollout, Turn]]:
    return [(line, turn) for line in lines(outcomes) for turn in line.turns]


@pytest.mark.parametrize("latency", [0.0, 2.0])
def test_equal_chunks_are_scored_once(attempt: Solve, latency: float) -> None:
    """The target scores no repeated chunk twice, even if its first score is still being computed.
    Each rollout gets a decision on its own chunk.
    """
    target = Heedful(latency=latency)
    outcomes = attempt(GREEDY, GATE, target=target)
    assert set(target.asked.values()) == {1}
    judged = [turn for _, turn in turns(outcomes) if turn.decision]
    assert all(turn.score is not None for turn in judged)
    recalled = sum(turn.score_reused for turn in judged)
    assert recalled == len(judged) - target.asked.total() > 0
    scored = sum(len(suffix) for _, suffix in target.asked)
    assert scored == sum(line.usage.scored_tokens for line in lines(outcomes))


def test_a_recalled_score_is_the_chunks_own(attempt: Solve) -> None:
    """A score that is reused from a sibling equals the target's score of this rollout's own chunk
    after its own text.
    """
    found = turns(attempt(POLICY, KEEP, target=Heedful()))
    recalled = [(line, turn) for line, turn in found if turn.score_reused]
    assert len(recalled) > 5

    async def alone(line: Rollout, turn: Turn) -> float:
        chunk, before = (
            turn.chunks[0],
            [chunk for other in line.turns[: turn.index] for chunk in other.chunks],
        )
        prefix = sum((chunk.target_ids for chunk in before), line.prompt.target_ids)
        async with ScriptedEngine("target") as target:
            logprobs = (await target.score(ScoreRequest(prefix, chunk.target_ids))).logprobs
            return score_of(POLICY.score, logprobs, chunk)

    for line, turn in recalled:
        assert turn.score == run_virtual(partial(alone, line, turn))


def test_a_lost_score_is_not_shared(attempt: Solve) -> None:
    """If a score is lost, the rollout that requested it escalates its chunk. Another rollout with
    the same chunk requests the score again, and all others use this score.
    """
    target = Heedful(lost=1)
    outcomes = attempt(GREEDY, KEEP, target=target, problems=1, retries=RetryPolicy(calls=1))
    first = [line.turns[0] for line in lines(outcomes)]
    assert sorted(turn.score is None for turn in first) == [False] * 5 + [True]
    assert max(target.asked.values()) == 2


def test_an_escalated_chunk_with_a_recalled_score_is_read_again(attempt: Solve) -> None:
    """If the target samples while it scores, no score is reused for an equal chunk, because each
    rollout needs its own sample.

    The texts are the same as with a target that only scores.
    """
    nothing = ThresholdGate(0.5)
    drawing = Heedful(draws=True)
    plain = Heedful()
    drawn, written = (attempt(GREEDY, nothing, target=target) for target in (drawing, plain))
    assert [line.text for line in lines(drawn)] == [line.text for line in lines(written)]
    assert all(line.usage.drawn_tokens > 0 for line in lines(drawn))
    assert set(drawing.asked.values()) == {6}
    assert set(plain.asked.values()) == {1}
    assert not any(turn.score_reused for _, turn in turns(drawn))


def test_a_replay_counts_only_requested_scores(attempt: Solve, answers: Answers) -> None:
    """If a replay shortens rollouts, their scored tokens are those of requested scores; a reused
    score adds none.
    """
    outcomes = attempt(GREEDY, KEEP, target=Heedful())
    again = replay_policy(outcomes, KEEP, replace(GREEDY, turns=1), answers.group)
    first = [line.turns[0] for line in lines(outcomes)]
    asked = sum(len(turn.chunks[0].target_ids) for turn in first if not turn.score_reused)
    assert (
        sum(line.scored_tokens for problem in again.problems for line in problem.rollouts)
        == asked
        > 0
    )


@pytest.mark.parametrize("takeover", ["continue", "replace", "repair"])
def test_turns_count_the_tokens_scored_in_them(attempt: Solve, takeover: Takeover) -> None:
    """The scored tokens of a rollout's turns add up to the number in its usage. A reused score adds
    none.
    """
    policy = replace(POLICY, takeover=takeover, sampling=Sampling(temperature=0.7))
    outcomes = attempt(policy, ThresholdGate(1.8), target=Heedful())
    found = turns(outcomes)
    assert any(turn.score_reused for _, turn in found)
    for line in lines(outcomes):
        assert sum(turn.scored_tokens for turn in line.turns) == line.usage.scored_tokens


@pytest.mark.parametrize("latency", [0.0, 2.0])
def test_waiting_for_a_siblings_score_is_recorded(attempt: Solve, latency: float) -> None:
    """If six rollouts write the same text, the first one requests the score in each turn. The other
    five wait for it, and the run records this waiting time.
    """
    events: list[Any] = []
    [outcome] = attempt(GREEDY, KEEP, target=Heedful(latency=latency), problems=1, events=events)
    recalled = [turn for line in outcome.rollouts for turn in line.turns if turn.score_reused]
    waits = [event for event in events if isinstance(event, CallSpan) and event.stage == HOLD]
    assert measure(
        event for event in events if isinstance(event, CallSpan)
    ).sibling_seconds == latency * len(recalled)
    assert Counter(wait.turn for wait in waits) == Counter(turn.index for turn in recalled)
    assert all(wait.wait == latency and wait.queue == wait.compute == 0.0 for wait in waits)
    waited = sum(event.waited for event in events if isinstance(event, RolloutSpan))
    assert waited == latency * len(recalled)
    # each wait is an edge from the score's call
    spans = [event for event in events if isinstance(event, CallSpan)]
    scored = {span.node for span in spans if span.stage == "score"}
    edges = sibling_edges(spans)
    assert {after for _, after in edges} == {wait.node for wait in waits}
    assert {before for before, _ in edges} <= scored


def test_a_failed_shared_call_delays_no_sibling(attempt: Solve) -> None:
    """If a scoring call on which several rollouts wait fails, another rollout requests the score at
    once instead of waiting for the retry.
    """

    class Failing(Heedful):
        """A target whose first attempt to score the second chunk times out after two seconds."""

        async def _rate(self, request: ScoreRequest) -> Scores:
            fails = len(self.asked) == 1 and not self.asked[request.prefix, request.suffix]
            scores = await super()._rate(request)
            if fails:
                raise EngineTimeout("target", "lost")
            return scores

    events: list[Any] = []
    slow = RetryPolicy(calls=3, delay_seconds=100.0)
    target = Failing(latency=2.0)
    [outcome] = attempt(GREEDY, KEEP, target=target, problems=1, events=events, retries=slow)
    waits = [event for event in events if isinstance(event, CallSpan) and event.stage == HOLD]
    assert max(wait.wait for wait in waits) == 2.0
    assert max(target.asked.values()) == 3
    assert len({tuple(turn.score for turn in line.turns) for line in outcome.rollouts}) == 1
