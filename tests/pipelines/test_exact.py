"""Tests of method exact: the target draws while it scores, which saves steps but changes no token."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest

from atts.api import Setup, evaluate_sync
from atts.core import (
    Beginning,
    Completion,
    Outcome,
    RolloutSpan,
    SampleRequest,
    Sampling,
    ScoreRequest,
    Scores,
    TokenIds,
)
from atts.engine import EngineAround, EngineSpec
from atts.errors import BadReply, OptionError, UnsupportedByEngine
from atts.journal import JOURNAL
from atts.methods import preset
from atts.pipelines import (
    DraftLength,
    FixedGate,
    Policy,
    ThresholdGate,
    WriterChoice,
    check_engines,
)
from atts.pipelines.speeds import BegunChunk
from atts.run import check_scores
from atts.sampling import Seed
from atts.testing import Latency, ScriptedEngine, check_engine, run_virtual, toy_problems

Solve = Callable[..., list[Outcome]]
PLAIN = Policy(samples=3, early_stop="none")
BLIND = frozenset[Literal["sample", "score"]]({"sample", "score"})


def texts(outcomes: Sequence[Outcome]) -> dict[tuple[str, int], tuple[TokenIds, str | None]]:
    """Return each rollout's token ids and finish reason."""
    return {
        (line.problem, line.sample): (line.ids("target"), line.finish)
        for outcome in outcomes
        for line in outcome.rollouts
    }


def used(outcomes: Sequence[Outcome], kind: str) -> int:
    """Return the number of tokens of one kind over all problems."""
    return sum(getattr(outcome.usage, kind) for outcome in outcomes)


def only_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the draft write every chunk, whatever its cost."""

    def begin(_self: WriterChoice, now: float) -> BegunChunk:
        return BegunChunk("draft", now, is_look=False)

    monkeypatch.setattr(WriterChoice, "begin", begin)
    monkeypatch.setattr(WriterChoice, "is_given_up", lambda *_: False)
    for name in ("wrote", "end", "fail"):
        monkeypatch.setattr(WriterChoice, name, lambda *_: None)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("length", [1, 3, 64])
def test_exact_writes_what_the_target_alone_writes(
    attempt: Solve, monkeypatch: pytest.MonkeyPatch, temperature: float, length: int
) -> None:
    """With the same seeds, method exact gives the texts of the target alone. The target samples all
    tokens while it scores.
    """
    monkeypatch.setattr(DraftLength, "length", lambda _self, most: min(most, length))
    only_drafts(monkeypatch)
    base = replace(PLAIN, sampling=Sampling(temperature))
    alone = attempt(preset("target-only").policy(base), FixedGate("accept"))
    exact = attempt(preset("exact").policy(base), FixedGate("accept"))
    assert texts(exact) == texts(alone)
    assert (
        used(exact, "drawn_tokens") == used(exact, "target_tokens") == used(alone, "target_tokens")
    )


def test_a_draft_token_is_kept_only_if_the_target_drew_it(attempt: Solve) -> None:
    """A draft that is the same model as the target wastes no token. A draft that writes nonsense
    wastes nearly all its tokens but does not change the text.
    """
    policy = preset("exact").policy(PLAIN)
    twin = attempt(policy, FixedGate("accept"), draft=ScriptedEngine("target"))
    nonsense = attempt(policy, FixedGate("accept"), draft=Nonsense(ScriptedEngine("draft"), "own"))
    assert texts(twin) == texts(nonsense)
    assert used(twin, "wasted_tokens") == 0
    assert used(nonsense, "wasted_tokens") > 0.9 * used(nonsense, "draft_tokens")


class Nonsense(EngineAround):
    """A draft that always writes the first token of the vocabulary."""

    async def sample(self, request: SampleRequest) -> Completion:
        count = min(4, request.max_tokens)
        return Completion(
            (0,) * count, self.tokenizer.decode((0,) * count), "length", (-1.0,) * count
        )


def test_a_takeover_starts_with_tokens_drawn_during_scoring(attempt: Solve) -> None:
    gate = ThresholdGate(1.3)
    policy = replace(PLAIN, takeover="replace")
    drawn = attempt(policy, gate, problems=12)
    asked = attempt(policy, gate, problems=12, target=ScriptedEngine("target", capabilities=BLIND))
    assert texts(drawn) == texts(asked)
    assert used(asked, "drawn_tokens") == 0 < used(drawn, "drawn_tokens")
    assert used(drawn, "target_tokens") == used(asked, "target_tokens")
    assert used(drawn, "drawn_tokens") > 0.1 * used(drawn, "target_tokens")


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_text_in_two_requests_equals_one_request(cut: int) -> None:
    """A text that is sampled in two requests equals the text of one request. A stop string that
    begins in the first part still ends the text.
    """

    async def main() -> None:
        async with ScriptedEngine("target") as engine:
            prompt = engine.tokenizer.encode("Start at 4. +3, -2, +5, -1. What is the result?")
            request = SampleRequest(prompt, 60, Sampling(1.5), Seed(run=5), stop=("\n\n", "st"))
            whole = await engine.sample(request)
            at = min(cut, len(whole.ids) - 1)
            ids = prompt + whole.ids[:at]
            left = request.max_tokens - at
            rest = await engine.sample(replace(request, ids=ids, max_tokens=left, num_begun=at))
            assert (whole.ids[:at] + rest.ids, rest.ended) == (whole.ids, whole.ended)

    run_virtual(main)


def test_an_engine_that_draws_other_tokens_is_found() -> None:
    """The conformance suite detects an engine that samples other tokens while scoring than without
    scoring.

    One planted bug uses the random numbers of another attempt. The other starts again with the
    first random number when a text is continued.
    """

    class OtherStream(ScriptedEngine):
        async def score(self, request: ScoreRequest) -> Scores:
            draw = request.draw and replace(
                request.draw, seed=replace(request.draw.seed, attempt=1)
            )
            return await super().score(replace(request, draw=draw))

    class Anew(ScriptedEngine):
        async def sample(self, request: SampleRequest) -> Completion:
            return await super().sample(replace(request, num_begun=0))

    for engine in (OtherStream, Anew):
        report = run_virtual(partial(check_engine, engine, broken="report"))
        assert [result.check for result in report.broken] == ["drawing"], engine


def test_drawn_tokens_must_follow_the_scored_text() -> None:
    draw = SampleRequest((1, 2), 3)
    request = ScoreRequest((1, 2), (4, 5, 6), draw=draw)
    spec = _spec(ScriptedEngine("target"))
    check_scores(Scores((-1.0,) * 3, 0, Beginning((4, 7), (-1.0, -1.0))), request, spec)
    lies = [
        Beginning((7, 5), (-1.0, -1.0)),
        Beginning((), ()),
        Beginning((4, 5, 6, 7), (-1.0,) * 4),
        Beginning((4, 5, 6), (-1.0,) * 3),
        Beginning((4, 10**9), (-1.0, -1.0)),
        Beginning((4, 5), (-1.0,)),
    ]
    for lie in lies:
        with pytest.raises(BadReply):
            check_scores(Scores((-1.0,) * 3, 0, lie), request, spec)


def test_engines_that_cannot_draw_while_scoring_are_refused() -> None:
    policy = preset("exact").policy(PLAIN)
    gate = FixedGate("accept")
    able = _spec(ScriptedEngine("target"))
    blind = _spec(ScriptedEngine("target", capabilities=BLIND))
    check_engines(policy, gate, able, able)
    refusals = {
        "cannot sample tokens while it scores": (able, blind),
        "the target rounds its scores": (able, replace(able, rounds_scores=True)),
        "cannot sample with the target's random numbers": (blind, able),
        "draft and target have different tokenizers": (replace(able, tokenizer="other"), able),
    }
    for words, (draft, target) in refusals.items():
        with pytest.raises(UnsupportedByEngine, match=words):
            check_engines(policy, gate, draft, target)
    with pytest.raises(OptionError, match="drafter"):
        Policy(exact=True)


def _spec(engine: ScriptedEngine) -> EngineSpec:
    async def main() -> EngineSpec:
        async with engine:
            return engine.spec

    return run_virtual(main)


def test_all_problems_of_a_run_share_the_learned_draft_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = list[DraftLength]()

    def watched(length: DraftLength, most: int) -> int:
        kept.append(length)
        return most

    monkeypatch.setattr(DraftLength, "length", watched)
    setup = Setup(
        draft="scripted", target="scripted", method="exact", policy=replace(PLAIN, samples=1)
    )
    found = evaluate_sync(toy_problems(3, 5), setup)
    assert len(found.problems) == 3
    assert all(one is kept[0] for one in kept)


def test_draft_length_grows_with_acceptance() -> None:
    lengths = [
        DraftLength(1000, stood, 1000, draft_seconds=1.0, scores=100, score_seconds=1.0).length(64)
        for stood in (0, 300, 600, 900, 980, 1000)
    ]
    assert lengths == sorted(lengths)
    assert lengths[0] == 1
    assert lengths[-1] == 64


def timed(
    attempt: Solve, method: str, problems: int, draft: ScriptedEngine, target: ScriptedEngine
) -> float:
    """Return the duration of a run in virtual seconds."""
    events = list[Any]()
    attempt(
        preset(method).policy(PLAIN),
        FixedGate("accept"),
        problems=problems,
        draft=draft,
        target=target,
        events=events,
    )
    return max(event.ended for event in events if isinstance(event, RolloutSpan))


def test_if_drafts_are_rarely_accepted_the_target_writes_alone(
    attempt: Solve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the target accepts few drafted tokens, method exact stops using drafts. The texts are
    those of the target alone.
    """

    def engines() -> tuple[ScriptedEngine, ScriptedEngine]:
        slow = Latency(per_score=0.5, sampled_token=0.02)
        quick = Latency(sampled_token=0.02)
        return ScriptedEngine("draft", latency=quick), ScriptedEngine("target", latency=slow)

    policy = preset("exact").policy(PLAIN)
    gate = FixedGate("accept")
    draft, target = engines()
    exact = attempt(policy, gate, problems=40, draft=Nonsense(draft, "own"), target=target)
    alone = attempt(preset("target-only").policy(PLAIN), gate, problems=40)
    assert texts(exact) == texts(alone)
    assert used(exact, "drawn_tokens") < 0.25 * used(exact, "target_tokens")
    chosen = timed(attempt, "exact", 40, *engines())  # virtual seconds
    only_drafts(monkeypatch)
    assert chosen < 2 * timed(attempt, "target-only", 40, *engines())
    assert chosen < 0.5 * timed(attempt, "exact", 40, *engines())


def test_if_drafts_are_accepted_and_the_target_is_slow_the_draft_writes(
    attempt: Solve,
) -> None:
    """If drafts are accepted and the target is slow, the draft writes nearly all chunks. The target
    writes only at the start, when it can take all requests in one batch.
    """
    draft = ScriptedEngine("target", latency=Latency(sampled_token=0.001))
    target = ScriptedEngine("target", latency=Latency(per_score=0.03, sampled_token=0.03))
    exact = attempt(
        preset("exact").policy(PLAIN),
        FixedGate("accept"),
        problems=80,
        draft=draft,
        target=target,
        limits={},
    )
    assert used(exact, "drawn_tokens") > 0.8 * used(exact, "target_tokens")


def test_a_better_writer_is_found_again_when_it_has_changed() -> None:
    """If the draft becomes four times slower during a run, method exact chooses the target as
    writer.
    """
    choice = WriterChoice()
    now = 0.0
    written = {"draft": [0, 0], "target": [0, 0]}
    for number in range(3000):
        chunk = choice.begin(now)
        seconds = (1.0 if number < 1000 else 4.0) if chunk.writer == "draft" else 2.0
        now += seconds
        if chunk.writer == "draft":
            choice.wrote(chunk, 10, now)
        choice.end(chunk, 10, now)
        written[chunk.writer][number >= 1000] += 1
    assert written["draft"][0] > 20 * written["target"][0]
    assert written["target"][1] > 20 * written["draft"][1]


def test_a_piece_that_failed_is_no_longer_in_flight() -> None:
    choice = WriterChoice()
    choice.fail(choice.begin(0.0), 1.0)
    assert choice.in_flight == []


def test_a_piece_that_is_given_up_is_finished_by_the_target(
    attempt: Solve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the draft's chunk is abandoned before its end, the target finishes it. The text is still
    the one that the target alone would write.
    """
    only_drafts(monkeypatch)
    monkeypatch.setattr(DraftLength, "length", lambda _self, most: min(most, 3))
    asked = count()
    monkeypatch.setattr(WriterChoice, "is_given_up", lambda *_: next(asked) % 3 == 2)
    alone = attempt(preset("target-only").policy(PLAIN), FixedGate("accept"))
    exact = attempt(preset("exact").policy(PLAIN), FixedGate("accept"))
    assert texts(exact) == texts(alone)
    assert 0 < used(exact, "drawn_tokens") < used(exact, "target_tokens")
    assert used(exact, "target_tokens") == used(alone, "target_tokens")


@pytest.mark.parametrize("stop_after", [5, 20, 45])
def test_a_run_with_pieces_that_were_given_up_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    """A run that is killed and resumed gives the texts of the target alone, although some of the
    draft's chunks were abandoned.
    """
    only_drafts(monkeypatch)
    monkeypatch.setattr(DraftLength, "length", lambda _self, most: min(most, 3))
    asked = count()
    monkeypatch.setattr(WriterChoice, "is_given_up", lambda *_: next(asked) % 3 == 2)
    problems = toy_problems(4, 5)
    setup = Setup(draft="scripted", target="scripted", policy=PLAIN)
    alone = evaluate_sync(problems, replace(setup, method="target-only"))
    exact = replace(setup, method="exact")
    whole = evaluate_sync(problems, exact, directory=tmp_path / "whole")
    journal = (tmp_path / "whole" / JOURNAL).read_bytes().splitlines(keepends=True)
    killed = tmp_path / "killed"
    shutil.copytree(tmp_path / "whole", killed)
    (killed / JOURNAL).write_bytes(b"".join(journal[:stop_after]))
    resumed = evaluate_sync(problems, exact, directory=killed)
    wanted = texts(tuple(alone.outcomes()))
    assert texts(tuple(whole.outcomes())) == wanted
    assert texts(tuple(resumed.outcomes())) == wanted
