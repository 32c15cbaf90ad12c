"""Tests of the thinking budget: the think block is closed in time, and the rollout still answers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from atts.api import Setup, evaluate_sync
from atts.core import Completion, Outcome, Rollout, SampleRequest
from atts.errors import OptionError
from atts.pipelines import Chunking, CoinGate, FixedGate, Gate, Policy
from atts.pipelines.policy import Takeover
from atts.testing import ScriptedEngine, toy_problems

Solve = Callable[..., list[Outcome]]
BUDGET = 30
POLICY = Policy(samples=4, early_stop="none", thinking_tokens=BUDGET)
OPEN = replace(POLICY, instruction="<think>")


def lines(outcomes: list[Outcome]) -> list[Rollout]:
    return [rollout for outcome in outcomes for rollout in outcome.rollouts]


def thoughts(rollout: Rollout) -> int | None:
    """Return the number of tokens that the models wrote before atts closed the think block, or None
    if atts did not close it.
    """
    written = 0
    for turn in rollout.turns:
        if turn.is_forced:
            return written
        written += sum(len(chunk.target_ids) for chunk in turn.chunks)
    return None


@pytest.mark.parametrize(
    "gate", [FixedGate("accept"), FixedGate("escalate"), CoinGate(0.5, seed=2)]
)
@pytest.mark.parametrize("takeover", ["replace", "continue", "repair"])
@pytest.mark.parametrize("optimistic", [False, True])
def test_no_rollout_thinks_longer_than_its_budget(
    attempt: Solve, gate: Gate, takeover: Takeover, optimistic: bool
) -> None:
    """In no rollout does the thinking exceed its budget, whichever model writes, and the answer
    follows.
    """
    policy = replace(POLICY, takeover=takeover, optimistic=optimistic)
    rollouts = lines(attempt(policy, gate))
    stopped = [rollout for rollout in rollouts if thoughts(rollout) is not None]
    assert stopped
    for rollout in rollouts:
        thought = thoughts(rollout)
        whole = len(rollout.ids("target")) - len(rollout.prompt.target_ids)
        assert whole <= BUDGET if thought is None else thought <= BUDGET
        assert sum(turn.is_forced for turn in rollout.turns) == (thought is not None)
    assert sum(rollout.text.count("I have no time left") for rollout in rollouts) == len(stopped)
    # no model opened a think block, so the inserted text closes none
    assert all("</think>" not in rollout.text for rollout in rollouts)
    assert any(rollout.answer is not None for rollout in stopped)


def test_drafting_ahead_changes_no_text_at_the_budget(attempt: Solve) -> None:
    """If a chunk is drafted ahead but the thinking budget ends before it, the chunk is discarded.
    The texts equal those without drafting ahead.
    """
    gate = CoinGate(0.4, seed=3)
    plain = lines(attempt(POLICY, gate))
    ahead = lines(attempt(replace(POLICY, optimistic=True), gate))
    assert [rollout.text for rollout in plain] == [rollout.text for rollout in ahead]


def test_an_open_think_block_is_closed(attempt: Solve) -> None:
    """A block that the prompt opens is closed by the text that ends the thinking."""
    rollouts = lines(attempt(OPEN, FixedGate("accept")))
    stopped = [rollout for rollout in rollouts if thoughts(rollout) is not None]
    assert stopped
    for rollout in stopped:
        assert re.search(r"\n</think>\n\nThe final answer is", rollout.text)
    other = replace(OPEN, thinking_end="\n</think>\nSo: ")
    changed = lines(attempt(other, FixedGate("accept")))
    assert all("</think>\nSo: " in rollout.text for rollout in changed if thoughts(rollout))


class Closing(ScriptedEngine):
    """A model that closes its think block early. The mark `</think>` is split between its first and
    second chunk.
    """

    async def _sample(self, request: SampleRequest) -> Completion:
        done = await super()._sample(request)
        text = {0: "So far.\n</thi", 1: "nk>\n\n"}.get(request.seed.turn)
        if text is None:
            return done
        ids = self.tokenizer.encode(text)
        return Completion(ids, text, "delimiter", (-1.0,) * len(ids))


def test_the_budget_does_not_limit_the_answer(attempt: Solve) -> None:
    """The budget limits the think block alone; the text after the think block may be longer."""
    policy = replace(OPEN, thinking_tokens=40, chunking=Chunking(draft_tokens=40))
    rollouts = lines(attempt(policy, FixedGate("accept"), draft=Closing("draft")))
    assert all(thoughts(rollout) is None for rollout in rollouts)
    longest = max(len(r.ids("target")) - len(r.prompt.target_ids) for r in rollouts)
    assert longest > 40


def test_the_whole_length_still_bounds_the_rollout(attempt: Solve) -> None:
    """If the text that ends the thinking does not fit into the rollout's length, the rollout ends
    at its token limit.
    """
    policy = replace(POLICY, max_tokens=BUDGET + 4)
    for rollout in lines(attempt(policy, FixedGate("accept"))):
        assert len(rollout.ids("target")) - len(rollout.prompt.target_ids) <= BUDGET + 4
        assert thoughts(rollout) is None


def test_a_stopped_rollout_is_not_asked_to_wait(attempt: Solve) -> None:
    """A thinking budget is refused together with budget forcing, which would make a rollout think
    longer.
    """
    policy = replace(POLICY, budget_forcing=3)
    stopped = [r for r in lines(attempt(policy, FixedGate("accept"))) if "no time left" in r.text]
    assert stopped
    for rollout in stopped:
        assert "Wait" not in rollout.text.partition("no time left")[2]


def test_an_impossible_budget_is_refused() -> None:
    """A thinking budget is refused if it leaves no room for the answer, or if the end of the
    thinking is not a text.
    """
    with pytest.raises(OptionError, match="leaves none for the answer"):
        Policy(thinking_tokens=100, max_tokens=100)
    with pytest.raises(OptionError, match="0 is below 1"):
        Policy(thinking_tokens=0)
    with pytest.raises(OptionError, match="ends the thinking is empty"):
        Policy(thinking_tokens=10, thinking_end=" \n")


def test_a_cut_run_resumes_to_the_same_texts(tmp_path: Path) -> None:
    """A run that was cut resumes to the same texts: recorded calls are recalled, and the end of the
    thinking is inserted again.
    """
    gate = CoinGate(0.3, seed=2)  # a gate whose decisions do not depend on the order of calls
    setup = Setup(draft="scripted", target="scripted", gate=gate, policy=POLICY, seed=4)
    problems = toy_problems(4, 5)
    whole = evaluate_sync(problems, setup, directory=tmp_path / "whole")
    assert any(thoughts(rollout) is not None for rollout in lines(list(whole.outcomes())))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    journal = tmp_path / "cut" / "journal.jsonl"
    records = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(records[: len(records) // 2]))
    again = evaluate_sync(problems, setup, directory=tmp_path / "cut")
    texts = [
        {(line.problem, line.sample): line.text for line in lines(list(result.outcomes()))}
        for result in (whole, again)
    ]
    assert texts[0] == texts[1]
