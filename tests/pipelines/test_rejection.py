"""Tests of drafting, scoring and takeover in every mode."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atts.analysis import replay_policy
from atts.calibration import Calibrator
from atts.core import Completion, Outcome, Rollout, SampleRequest, Turn
from atts.errors import EngineError
from atts.pipelines import (
    Answers,
    Chunking,
    CoinGate,
    ConformalGate,
    FixedGate,
    Gate,
    Policy,
    ScoreRule,
    ThresholdGate,
    TopGate,
)
from atts.pipelines.scores import first_rejected_token
from atts.testing import (
    TARGET,
    Latency,
    ScriptedEngine,
    ToyModel,
    ToyTokenizer,
    toy_answer,
    toy_groups,
)

Solve = Callable[..., list[Outcome]]
POLICY = Policy(samples=4, early_stop="none")


def lines(outcomes: list[Outcome]) -> list[Rollout]:
    return [rollout for outcome in outcomes for rollout in outcome.rollouts]


def turns(outcomes: list[Outcome]) -> list[Turn]:
    return [turn for rollout in lines(outcomes) for turn in rollout.turns]


def conformal(rate: float) -> Gate:
    return ConformalGate(Calibrator(rate, "question-turn"))


def test_at_rate_0_only_the_draft_writes(attempt: Solve) -> None:
    """At rate 0 each chunk is the draft's, and the target neither scores nor writes."""
    outcomes = attempt(POLICY, FixedGate("accept"))
    assert {chunk.author for turn in turns(outcomes) for chunk in turn.chunks} == {"draft"}
    assert all(o.usage.target_tokens == o.usage.scored_tokens == 0 for o in outcomes)


def test_continue_keeps_the_chunk_and_appends_the_targets(attempt: Solve) -> None:
    """With takeover `continue`, as in the paper, the target's chunk follows the draft's, with
    nothing discarded or inserted.
    """
    outcomes = attempt(replace(POLICY, takeover="continue"), FixedGate("escalate"))
    judged = [turn for turn in turns(outcomes) if turn.decision]
    assert judged
    assert all([chunk.author for chunk in turn.chunks] == ["draft", "target"] for turn in judged)
    assert not any(turn.discarded for turn in judged)
    for rollout in lines(outcomes):
        ids = rollout.ids("target")[len(rollout.prompt.target_ids) :]
        assert ScriptedEngine().tokenizer.decode(ids) == rollout.text


def test_replace_discards_the_chunk(attempt: Solve) -> None:
    """With takeover `replace`, the target's chunk replaces the draft's chunk, which is
    discarded.
    """
    outcomes = attempt(replace(POLICY, takeover="replace"), FixedGate("escalate"))
    judged = [turn for turn in turns(outcomes) if turn.decision]
    assert all([c.author for c in t.chunks] == ["target"] and len(t.discarded) == 1 for t in judged)
    assert all(o.usage.wasted_tokens > 0 for o in outcomes)


def test_repair_keeps_the_part_before_the_first_rejected_token(
    attempt: Solve, answers: Answers
) -> None:
    """With takeover `repair`, the part before the first rejected token is kept and the target
    continues after it.

    Each token counts once.
    """
    policy = replace(POLICY, takeover="repair", score=ScoreRule("speculative"))
    outcomes = attempt(policy, ThresholdGate(0.0))
    mended = [turn for turn in turns(outcomes) if len(turn.chunks) == 2]
    assert mended
    for turn in mended:
        (part, written) = turn.chunks
        (whole,) = turn.discarded
        assert (part.author, written.author, whole.author) == ("draft", "target", "draft")
        assert whole.target_ids[: len(part.target_ids)] == part.target_ids != whole.target_ids
        assert whole.text.startswith(part.text)
        assert (
            f"the first {part.tokens} of the chunk's {whole.tokens} tokens were kept" in turn.note
        )
    for rollout in lines(outcomes):
        ids = rollout.ids("target")[len(rollout.prompt.target_ids) :]
        assert ScriptedEngine().tokenizer.decode(ids) == rollout.text
    again = [
        line
        for problem in replay_policy(outcomes, None, policy, answers.group).problems
        for line in problem.rollouts
    ]
    assert sum(line.draft_tokens for line in again) == sum(o.usage.draft_tokens for o in outcomes)
    assert sum(line.scored_tokens for line in again) == sum(o.usage.scored_tokens for o in outcomes)
    wasted = [whole.tokens for turn in turns(outcomes) for whole in turn.discarded]
    assert sum(o.usage.wasted_tokens for o in outcomes) == sum(wasted) - sum(
        t.chunks[0].tokens for t in mended
    )


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 11, 12, 13, 24, 25])
@pytest.mark.parametrize("small", ["neither", "draft", "target"])
def test_repair_respects_the_remaining_tokens(attempt: Solve, max_tokens: int, small: str) -> None:
    """If the token limit or the context ends in the middle of a turn, repair raises no error and
    exceeds no limit.
    """
    policy = Policy(
        samples=3,
        max_tokens=max_tokens,
        chunking=Chunking(12, 12, ()),
        takeover="repair",
        score=ScoreRule("speculative"),
        early_stop="none",
    )
    prompts = [line.prompt.target_ids for line in lines(attempt(policy, FixedGate("accept")))]
    context = max(map(len, prompts)) + 11
    outcomes = attempt(
        policy,
        ThresholdGate(0.0),
        draft=ScriptedEngine("draft", context_length=context if small == "draft" else 1024),
        target=ScriptedEngine("target", context_length=context if small == "target" else 1024),
    )
    assert lines(outcomes)
    for rollout in lines(outcomes):
        assert not rollout.error
        written = len(rollout.ids("target")) - len(rollout.prompt.target_ids)
        assert written <= max_tokens
        if small != "neither":
            assert len(rollout.ids("target")) <= context
    for turn in turns(outcomes):
        if turn.discarded and len(turn.chunks) == 2:
            assert turn.chunks[0].tokens < turn.discarded[0].tokens
            assert turn.chunks[1].tokens >= 1


@given(st.lists(st.tuples(st.floats(-50, 0), st.floats(-50, 0)), min_size=1))
def test_the_first_rejected_token_is_the_first_large_drop(pairs: list[tuple[float, float]]) -> None:
    """The first rejected token is the first whose log-probability is lower under the target than
    under the draft by at least 1. If there is none, it is the token with the largest difference.
    """
    theirs = [a for a, _ in pairs]
    own = [b for _, b in pairs]
    drops = [b - a for a, b in pairs]
    place = first_rejected_token(theirs, own)
    assert all(drop < 1 for drop in drops[:place])
    assert drops[place] >= 1 or drops[place] == max(drops)
    assert first_rejected_token(theirs, own[:-1]) == 0


def test_an_answer_ends_a_rollout_unjudged(attempt: Solve) -> None:
    """By default, the chunk with the boxed answer gets no score, unless the user requests
    verification.
    """
    stopped = attempt(replace(POLICY, answers="stop"), conformal(0.3))
    assert all(
        r.turns[-1].decision is None or r.turns[-1].chunks[-1].author == "target"
        for r in lines(stopped)
    )
    verified = attempt(replace(POLICY, answers="verify"), conformal(0.3))
    assert all(r.turns[-1].decision is not None for r in lines(verified) if r.finish == "answer")


def test_every_limit_ends_a_rollout_and_says_so(attempt: Solve) -> None:
    """A rollout ends at its limit on turns or tokens, and its finish reason names the limit. An
    answer that is cut by a limit does not count.
    """
    few = lines(attempt(replace(POLICY, turns=1), FixedGate("accept")))
    assert {r.finish for r in few} <= {"turns", "answer"}
    assert all(len(r.turns) == 1 for r in few)
    short = lines(attempt(replace(POLICY, max_tokens=20), FixedGate("escalate")))
    assert all(len(r.ids("target")) - len(r.prompt.target_ids) <= 20 for r in short)
    assert {r.finish for r in short} <= {"tokens", "answer"}


def test_a_number_cut_by_the_chunk_limit_is_not_an_answer(attempt: Solve) -> None:
    """If an answer has no closing brace, the end of a chunk may cut its number. The answer
    therefore counts only once more text follows.
    """

    def after_the_mark(text: str) -> str | None:
        found = re.search(r"boxed\{(\d+)", text)
        return found[1] if found else None

    named = Answers(after_the_mark, lambda found: list(range(len(found))))
    chunking = replace(POLICY.chunking, draft_tokens=1, stop=())
    outcomes = attempt(
        replace(POLICY, turns=400, chunking=chunking), FixedGate("accept"), answers=named
    )
    ended = [rollout for rollout in lines(outcomes) if rollout.finish == "answer"]
    assert any(len(rollout.answer or "") > 1 for rollout in ended)
    assert all(not rollout.text[-1].isdigit() for rollout in ended)


def test_a_finished_text_gets_the_fallback_extraction(attempt: Solve) -> None:
    """An answer found by the fallback extraction counts only if the model ended its text, and is
    marked as a fallback answer.
    """
    unmarked = Answers(lambda text: None, toy_groups)
    guessing = replace(unmarked, extract_finished=toy_answer)
    plain = attempt(replace(POLICY, turns=60), FixedGate("accept"), answers=unmarked)
    read_again = attempt(replace(POLICY, turns=60), FixedGate("accept"), answers=guessing)
    assert [r.text for r in lines(read_again)] == [r.text for r in lines(plain)]
    assert {(r.finish, r.answer) for r in lines(plain)} == {("end", None)}
    assert not any(r.is_fallback_answer for r in lines(plain))
    assert {r.finish for r in lines(read_again)} == {"end"}
    for rollout in lines(read_again):
        assert rollout.answer == toy_answer(rollout.text)
        assert rollout.is_fallback_answer == (rollout.answer is not None)
    assert any(outcome.answer for outcome in read_again)


def test_a_cut_text_gets_no_fallback_extraction(attempt: Solve) -> None:
    """The fallback does not search a cut text, which may end in a part of an answer."""
    eager = Answers(lambda text: None, toy_groups, extract_finished=lambda text: "1")
    for limits in ({"turns": 1}, {"max_tokens": 10}):
        cut = lines(attempt(replace(POLICY, **limits), FixedGate("accept"), answers=eager))  # type: ignore[arg-type]
        assert {(r.finish, r.answer) for r in cut if r.finish != "end"} in (
            {("turns", None)},
            {("tokens", None)},
        )
        assert not any(r.is_fallback_answer for r in cut if r.finish != "end")


def test_a_marked_answer_is_never_guessed(attempt: Solve, answers: Answers) -> None:
    """If the text marks its answer, the fallback is not used."""
    eager = replace(answers, extract_finished=lambda text: "a guess")
    outcomes = attempt(replace(POLICY, turns=60), FixedGate("accept"), answers=eager)
    marked = [r for r in lines(outcomes) if r.finish == "answer"]
    assert marked
    assert not any(r.is_fallback_answer or r.answer == "a guess" for r in marked)


def test_text_without_an_answer_is_searched_once(attempt: Solve) -> None:
    """For each chunk, only the newest part of a long text is searched for an answer. The rollouts
    are the same as if the whole text were searched.
    """
    looked: list[int] = []

    def extract(text: str) -> str | None:
        looked.append(len(text))
        return toy_answer(text)

    wordy = ToyModel(replace(TARGET, verbosity=300.0), ToyTokenizer())
    run = partial(
        attempt, replace(POLICY, turns=4_000, max_tokens=20_000), FixedGate("accept"), problems=1
    )
    grown, whole = (
        lines(run(draft=ScriptedEngine(model=wordy, context_length=30_000),
                  target=ScriptedEngine("target", model=wordy, context_length=30_000), answers=each))
        for each in (Answers(extract, toy_groups, lambda text: len(text) - 100), Answers(toy_answer, toy_groups))
    )  # fmt: skip
    assert grown == whole
    assert all(rollout.answer for rollout in grown)
    assert max(len(rollout.text) for rollout in grown) > 5_000
    assert max(looked) < 2_000


def test_the_context_is_a_limit_too(attempt: Solve) -> None:
    """A rollout that fills the smaller of the two contexts ends instead of overflowing it."""
    tight = ScriptedEngine("target", context_length=150)
    short = lines(attempt(POLICY, FixedGate("escalate"), target=tight))
    assert {r.finish for r in short} <= {"tokens", "answer"}
    assert all(len(r.ids("target")) <= 150 for r in short)
    none = lines(
        attempt(POLICY, FixedGate("escalate"), target=ScriptedEngine("target", context_length=20))
    )
    assert {r.finish for r in none} == {"failed"}
    assert all("context has only 20" in r.error for r in none)


def test_budget_forcing_extends_a_rollout(attempt: Solve) -> None:
    """With budget forcing, a rollout is prompted to wait after its first answer.

    The first answer counts if no other follows.
    """
    plain = lines(attempt(POLICY, FixedGate("accept")))
    forced = lines(attempt(replace(POLICY, budget_forcing=1, turns=30), FixedGate("accept")))
    waited = [r for r in forced if any(t.is_forced for t in r.turns)]
    assert waited
    assert all("Wait" in r.text for r in waited)
    assert sum(len(r.turns) for r in forced) > sum(len(r.turns) for r in plain)
    assert sum(r.answer is None for r in forced) <= sum(r.answer is None for r in plain)


def test_drafting_ahead_changes_nothing_but_time(attempt: Solve) -> None:
    """Drafting ahead changes no text for the same seeds, because a chunk drafted ahead is discarded
    only if the earlier chunk escalates.
    """
    gate = CoinGate(0.4, seed=3)
    plain = attempt(POLICY, _scoring(gate))
    ahead = attempt(replace(POLICY, optimistic=True), _scoring(gate))
    assert [r.text for r in lines(plain)] == [r.text for r in lines(ahead)]
    assert sum(o.usage.wasted_tokens for o in ahead) > 0


class Broken(ScriptedEngine):
    """A target that scores slowly and cannot write."""

    async def sample(self, request: SampleRequest) -> Completion:
        """Raise an error, because this target cannot write."""
        raise EngineError("target", "it writes nothing")


def test_a_failed_takeover_wastes_the_drafted_chunks_once(attempt: Solve) -> None:
    """After a failed takeover each written token is in a turn or counts as wasted, including those
    of the chunk drafted ahead.
    """
    target = Broken("target", latency=Latency(per_score=5.0))
    policy = replace(POLICY, optimistic=True, takeover="replace")
    outcomes = attempt(policy, _scoring(CoinGate(0.9, seed=3)), target=target)
    failed = [rollout for rollout in lines(outcomes) if rollout.error]
    assert failed
    for rollout in failed:
        kept = sum(chunk.tokens for turn in rollout.turns for chunk in turn.chunks)
        usage = rollout.usage
        assert usage.draft_tokens + usage.target_tokens == kept + usage.wasted_tokens
    # a failed rollout wastes two chunks: the judged chunk and the chunk drafted ahead
    assert max(rollout.usage.wasted_tokens for rollout in failed) > 20


def _scoring(gate: Gate) -> Gate:
    """Return a coin gate that decides as the given one, but requests the score of every chunk
    first.
    """

    class Scoring(CoinGate):
        def preview(self, features):  # type: ignore[no-untyped-def]
            return replace(super().preview(features), action="verify")

        def decide(self, features, score):  # type: ignore[no-untyped-def]
            return CoinGate.preview(self, features)

    assert isinstance(gate, CoinGate)
    return Scoring(gate.rate, gate.seed)


def test_a_seed_repeats_a_run_under_any_schedule(attempt: Solve) -> None:
    """With a gate that does not learn, other latencies do not change the run, but another seed
    does.
    """
    gate = CoinGate(0.3)
    quick = attempt(POLICY, gate)
    slow = attempt(
        POLICY, gate, draft=ScriptedEngine("draft", latency=Latency(sampled_token=0.02, jitter=1.0))
    )
    other = attempt(POLICY, gate, seed=1)
    assert [r.text for r in lines(quick)] == [r.text for r in lines(slow)]
    assert [r.text for r in lines(quick)] != [r.text for r in lines(other)]


def test_rollouts_wait_for_siblings_only_for_equal_chunks(attempt: Solve) -> None:
    """A node of the graph waits for nodes of its own rollout, or for the score of a sibling's equal
    chunk.
    """
    events: list[Any] = []
    attempt(POLICY, conformal(0.3), events=events)
    nodes = {e.node: e for e in events if hasattr(e, "after")}
    assert nodes
    for node in nodes.values():
        assert node.wait == 0
        others = [nodes[i] for i in node.after if nodes[i].sample != node.sample]
        assert {nodes[i].problem for i in node.after} <= {node.problem}
        assert {other.stage for other in others} <= {"score"}


def test_the_barrier_ranks_whole_rounds(attempt: Solve) -> None:
    """With method top-b, rollouts wait until all siblings have written their chunk. The number of
    escalated chunks per problem is a fixed share, up to rounding.
    """
    events: list[object] = []
    slow = ScriptedEngine("draft", latency=Latency(sampled_token=0.02, jitter=0.5))
    outcomes = attempt(
        replace(POLICY, samples=8, barrier=True), TopGate.of(0.25), draft=slow, events=events
    )
    for outcome in outcomes:
        judged = [t for r in outcome.rollouts for t in r.turns if t.decision]
        assert abs(sum(t.decision.escalate for t in judged) - 0.25 * len(judged)) <= 0.5 + 1e-9  # type: ignore[union-attr]
    assert sum(e.wait for e in events if hasattr(e, "after")) > 0  # type: ignore[attr-defined]


def test_the_rate_is_met_in_a_live_run(attempt: Solve) -> None:
    """The realised rate of the calibrated gate is near its nominal rate in a live run too."""
    outcomes = attempt(replace(POLICY, samples=8), conformal(0.3), problems=30)
    decisions = [t.decision for t in turns(outcomes) if t.decision]
    rate = sum(d.escalate for d in decisions) / len(decisions)
    assert abs(rate - 0.3) < 3 * math.sqrt(0.21 / len(decisions)) + 0.01


def test_the_usage_adds_up(attempt: Solve) -> None:
    """In the usage, tokens of kept and discarded chunks add up to the tokens that were charged."""
    for outcome in attempt(replace(POLICY, takeover="replace"), CoinGate(0.5)):
        for rollout in outcome.rollouts:
            chunks = [c for t in rollout.turns for c in (*t.chunks, *t.discarded)]
            assert rollout.usage.draft_tokens == sum(
                len(c.logprobs) for c in chunks if c.author == "draft"
            )
            assert rollout.usage.target_tokens == sum(
                len(c.logprobs) for c in chunks if c.author == "target"
            )
            assert all(b.index == a.index + 1 for a, b in pairwise(rollout.turns))


def test_different_tokenizers_read_the_same_text(attempt: Solve) -> None:
    """Draft and target each keep their own ids, both decode to the rollout's text, and no text is
    tokenised twice.
    """
    other = ToyTokenizer("other")
    outcomes = attempt(
        POLICY, conformal(0.4), target=ScriptedEngine("target", model=ToyModel(TARGET, other))
    )
    written = {chunk.author for turn in turns(outcomes) for chunk in turn.chunks}
    assert written == {"draft", "target"}
    for rollout in lines(outcomes):
        draft_ids = rollout.ids("draft")[len(rollout.prompt.draft_ids) :]
        target_ids = rollout.ids("target")[len(rollout.prompt.target_ids) :]
        assert draft_ids != target_ids
        assert ToyTokenizer().decode(draft_ids) == rollout.text == other.decode(target_ids)


def test_one_model_can_be_draft_and_target(attempt: Solve) -> None:
    """If the draft scores its own chunks, the scores are its own log-probabilities."""
    one = ScriptedEngine("draft")
    outcomes = attempt(
        replace(POLICY, takeover="continue", score=ScoreRule("mean")),
        conformal(0.3),
        draft=one,
        target=one,
    )
    scored = [turn for turn in turns(outcomes) if turn.score is not None]
    assert scored
    for turn in scored:
        own = turn.chunks[0].logprobs[: len(turn.chunks[0].draft_ids)]
        # only approximately equal, because scores are rounded
        assert turn.score == pytest.approx(math.exp(-math.fsum(own) / len(own)), rel=1e-4)
