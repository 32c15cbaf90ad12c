"""Planted bugs of speculation: each makes a check fail that passes without the bug."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest

from atts.local.batch import StepPlan
from atts.local.loop import StepLoop
from atts.models.tokenizers import StopMatcher
from tests.local.speculating import Driven, Knowing, Make, requests, run, same, texts
from tests.local.test_speculation import begun, ended_within, is_always_right


def wrong_rows(spread: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: each row gets the settings of the previous row."""
    return lambda sampling, rows: spread(sampling, rows.roll(1))


def shifted(spans: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: proposed tokens are shifted by one position."""

    def found(plan: StepPlan) -> Iterator[tuple[Any, int, int]]:
        for sequence, position, token in spans(plan):
            yield sequence, position + (position > sequence.num_computed), token

    return found


def later_uniforms(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: the drafter draws with the random number of the next position."""
    return lambda *args: replace(found := ask(*args), uniforms=np.roll(found.uniforms, 1))


def shifted_logprobs(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: each row gets the log-probabilities of the next row."""
    return lambda *args: [
        (s, tokens, [*values[1:], values[0]]) for s, tokens, values in draw(*args)
    ]


def repeated_uniforms(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: all positions of a span use the random number of the newest token."""

    def found(loop: StepLoop, sequences: list[Any], widths: list[int], logits: Any) -> Any:
        kept = [s.uniforms for s in sequences]
        for s in sequences:
            s.uniforms = np.full_like(s.uniforms, s.uniforms[len(s.logprobs)])
        drawn = draw(loop, sequences, widths, logits)
        for s, own in zip(sequences, kept, strict=True):
            s.uniforms = own
        return drawn

    return found


def forgetful(allocate: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: a slot that is allocated again is still marked as drafted if its previous
    contents were.
    """

    def found(allocator: Any, count: int) -> Any:
        kept = allocator.drafted.copy()
        slots = allocate(allocator, count)
        allocator.drafted[:] = kept
        return slots

    return found


def kept_whole(verified: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: the drafter's cache is not rolled back after a rejection."""
    return lambda self, key, proposal, accepted: verified(self, key, proposal, len(proposal.tokens))


def all_at_once(commit: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: the loop checks only the last accepted token for the end of the text, so
    tokens after the end are written.
    """

    def found(
        loop: StepLoop, sequence: Any, tokens: list[int], logprobs: list[float], started: Any
    ) -> None:
        own = loop._proposals  # pyright: ignore[reportPrivateUsage]
        accepted = own.verify(sequence, tokens) if len(tokens) > 1 else 0
        sequence.ids += tokens[:accepted]
        sequence.logprobs += logprobs[:accepted]
        sequence.num_computed += accepted
        commit(
            loop,
            sequence,
            tokens[accepted : accepted + 1],
            logprobs[accepted : accepted + 1],
            started,
        )

    return found


def later_draws(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: each position of a proposal draws with the random number of the next
    position.
    """

    def found(loop: StepLoop, sequences: list[Any], widths: list[int], logits: Any) -> Any:
        kept = [s.uniforms for s in sequences]
        for s, width in zip(sequences, widths, strict=True):
            if width > 1:
                s.uniforms = np.roll(s.uniforms, -1)
        drawn = draw(loop, sequences, widths, logits)
        for s, own in zip(sequences, kept, strict=True):
            s.uniforms = own
        return drawn

    return found


def cut_short(commit: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: if a whole proposal is accepted, the token after it is dropped."""

    def found(
        loop: StepLoop, sequence: Any, tokens: list[int], logprobs: list[float], started: Any
    ) -> None:
        cut = len(tokens) - (len(tokens) > 1)
        commit(loop, sequence, tokens[:cut], logprobs[:cut], started)

    return found


def doubled(commit: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: the token after a proposal is written twice."""

    def found(
        loop: StepLoop, sequence: Any, tokens: list[int], logprobs: list[float], started: Any
    ) -> None:
        commit(loop, sequence, tokens, logprobs, started)
        if len(tokens) > 1 and not sequence.is_finished:
            loop._append(sequence, sequence.ids[-1], 0.0)  # pyright: ignore[reportPrivateUsage]

    return found


def greedy_alone(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Plant a fault: without a proposal, the most likely token is written."""

    def found(loop: StepLoop, sequences: list[Any], widths: list[int], logits: Any) -> Any:
        drawn = draw(loop, sequences, widths, logits)
        best = iter(logits.argmax(-1).tolist())
        rows = [[next(best) for _ in range(width)] for width in widths]
        return [
            (s, t if len(t) > 1 else own, v) for (s, t, v), own in zip(drawn, rows, strict=True)
        ]

    return found


MUTANTS: dict[str, tuple[str, Callable[..., Any], str]] = {
    "tokens after a wrong one stand": (
        "atts.local.proposals.accepted_length", lambda f: lambda p, d: min(len(p), f(p, d) + 1), "text",
    ),
    "all stand": ("atts.local.proposals.accepted_length", lambda f: lambda p, d: len(p), "text"),
    "settings of another row": ("atts.local.loop.spread_rows", wrong_rows, "text"),
    "position off by one": ("atts.local.batch.StepPlan.spans", shifted, "text"),
    "slots not reserved": (
        "atts.local.scheduler.Scheduler.widen", lambda f: lambda self, sequence, count: count, "text",
    ),
    "one uniform for a span": ("atts.local.loop.StepLoop._sample", repeated_uniforms, "text"),
    "greedy where nothing is proposed": ("atts.local.loop.StepLoop._sample", greedy_alone, "text"),
    "uniforms off by one": ("atts.local.loop.StepLoop._sample", later_draws, "text"),
    "token after a proposal omitted": ("atts.local.loop.StepLoop._commit_sampled", cut_short, "steps"),
    "token after a proposal written twice": ("atts.local.loop.StepLoop._commit_sampled", doubled, "text"),
    "proposed tokens not stored": (
        "atts.local.batch.StepPlan.spans",
        lambda f: lambda plan: [(s, at, token + (at > s.num_computed)) for s, at, token in f(plan)], "text",
    ),
    "drafter at another temperature": (
        "atts.accel.speculate.drafter.batch_sampling",
        lambda f: lambda rows, *args: f([replace(row, temperature=1.0) for row in rows], *args), "drafter",
    ),
    "log-probabilities shifted": ("atts.local.loop.StepLoop._sample", shifted_logprobs, "text"),
    "ends looked for once a step": ("atts.local.loop.StepLoop._commit_sampled", all_at_once, "ends"),
    "stop strings not watched": (
        "atts.local.batch._stop_matcher", lambda f: lambda r, p: StopMatcher(r.stop), "begun",
    ),
    "begun uniforms used again": ("atts.local.batch._uniforms", lambda f: lambda r: f(replace(r, num_begun=0)), "begun"),
    "drafter not rolled back": ("atts.accel.speculate.drafter.ModelDrafter.verified", kept_whole, "drafter"),
    "drafter's numbers off by one": ("atts.local.proposals.ask_of", later_uniforms, "drafter"),
    "drafter's slots not forgotten": ("atts.accel.speculate.drafter.DraftedSlots.allocate", forgetful, "drafter"),
}  # fmt: skip


def is_green(check: str, folder: Path, plain: Driven) -> bool:
    """Return whether a small version of one of the checks above passes."""
    match check:
        case "text":
            return same(plain, run(folder, [[*requests(8)]], Knowing(texts(plain), "partly"), 5))
        case "steps":
            done = run(folder, [[*requests(8)]], Knowing(texts(plain), "right"), 1)
            return same(plain, done) and done.stats.steps <= plain.stats.steps / 1.5
        case "ends":
            return same(*ended_within(folder, 7))
        case "begun":
            return begun(folder)
        case _:
            return is_always_right(folder, 220)


@pytest.mark.parametrize("bug", MUTANTS)
def test_every_planted_bug_is_found(
    bug: str, make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each planted bug makes its check fail, which shows that the check can detect a bug."""
    place, change, check = MUTANTS[bug]
    folder = make_model("llama")
    plain = run(folder, [[*requests(8)]])
    owner, _, name = place.rpartition(".")
    original = getattr(resolve_name(owner), name)
    monkeypatch.setattr(place, change(original))
    try:
        found = is_green(check, folder, plain)
    except Exception:  # noqa: BLE001  a loop that breaks is red as well
        found = False
    assert not found
