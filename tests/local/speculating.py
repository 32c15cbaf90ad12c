"""Helpers that run speculating step loops step by step, and proposers with known proposals."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest

from atts.accel import accelerated, options_of
from atts.accel.build import build_accelerated
from atts.accel.options import LoopPlan
from atts.core import SampleRequest, Sampling, TokenIds
from atts.local import LocalEngine, LocalOptions, LoopStats
from atts.local.batch import StepPlan
from atts.local.builder import build_loop
from atts.local.messages import Close, Command, LoopReport, Reply, SampleReply, Submit, WorkerConfig
from atts.local.model_config import read_model_config
from atts.local.seams import (
    Ask,
    Lengths,
    Proposer,
    SpeculationRound,
    SpeculationStats,
    TokenProposal,
)
from atts.models.tokenizers import ModelTokenizer
from atts.sampling import Seed

Make = Callable[..., Path]
LAWS = (
    Sampling(0.0), Sampling(0.7), Sampling(1.0), Sampling(0.7, top_k=5), Sampling(1.0, top_p=0.8),
    Sampling(0.9, min_p=0.1), Sampling(0.8, top_k=20, top_p=0.9, min_p=0.02),
)  # fmt: skip


class Script:
    """An inbox that returns prepared commands, one list per step, and closes when the work is done."""

    def __init__(self, steps: Sequence[Sequence[Command]]) -> None:
        self._steps = [list(step) for step in steps]

    def take(self, *, wait: bool) -> list[Command]:
        """Return the commands of the next step; close the loop when no commands are left and no
        request runs.
        """
        while self._steps and wait and not self._steps[0]:
            self._steps.pop(0)
        if self._steps:
            return self._steps.pop(0)
        return [Close()] if wait else []


@dataclass
class Driven:
    """The replies and counters of a loop."""

    replies: dict[int, Reply]
    stats: LoopStats


def ids_of(seed: int, count: int) -> TokenIds:
    """Draw random token ids, none of which is a special token."""
    return tuple(random.Random(seed).choices(range(3, 300), k=count))


def requests(count: int, tokens: int = 24, laws: Sequence[Sampling] = LAWS) -> list[Submit]:
    """Make requests with several sampling settings; some requests share a prompt, as the samples of
    one problem do.
    """
    return [
        Submit(
            n + 1,
            SampleRequest(
                ids_of(n // 3, 12),
                tokens,
                laws[n % len(laws)],
                Seed(5, sample=n),
                rollout=f"p{n // 3}/{n}",
            ),
        )
        for n in range(count)
    ]


class Knowing(Proposer):
    """A proposer that knows the tokens of an earlier run without speculation.

    Depending on its kind, its proposals become wrong at a random position, or are wrong from the
    first token on.
    """

    def __init__(self, texts: dict[int, TokenIds], kind: str) -> None:
        self._texts = texts
        self._kind = kind
        self._random = random.Random(3)

    def propose(self, asks: Sequence[Ask]) -> list[TokenProposal]:
        """Propose the known continuation of each text."""
        return [TokenProposal(self._next(ask)) for ask in asks]

    def _next(self, ask: Ask) -> TokenIds:
        right = self._texts[ask.key][ask.written : ask.written + ask.room]
        if self._kind == "right":
            return (*right, *[7] * (ask.room - len(right)))
        if self._kind == "wrong":
            return tuple((token + 1) % 300 for token in right)
        if self._kind == "random":
            return tuple(self._random.choices(range(320), k=ask.room))
        good = self._random.randrange(ask.room + 1)
        return (
            *right[:good],
            *self._random.choices(range(3, 300), k=self._random.randrange(ask.room + 1)),
        )[: ask.room]


class AnyLength:
    """A chooser of random proposal lengths, one per sequence and step. A length may be 0."""

    def __init__(self, most: int, least: int = 0) -> None:
        """Draw proposal lengths from `least` to `most` tokens; a negative length counts as 0."""
        self._most = most
        self._least = least
        self._random = random.Random(most)

    def rests(self, plan: StepPlan) -> bool:
        """Return False, because this choice never pauses speculation."""
        return False

    def choose(self, plan: StepPlan) -> list[int]:
        """Draw a proposal length from `least` to `most` tokens for each sequence."""
        return [max(0, self._random.randint(self._least, self._most)) for _ in plan.decoding]

    def observed(
        self, plan: StepPlan, rounds: Sequence[SpeculationRound], seconds: tuple[float, float]
    ) -> None:
        """Ignore the results of the verified proposals."""


@cache
def config_of(folder: Path) -> WorkerConfig:
    """Make the configuration that an engine has before it loads a model."""
    model = read_model_config(folder, "tiny")
    pieces = ModelTokenizer(folder, "tiny").pieces
    return WorkerConfig("tiny", folder, model, pieces, LocalOptions())


def engine_of(folder: Path | str, **changes: Any) -> LocalEngine:
    """Make an engine with these options."""
    name = str(changes.pop("name", ""))
    return accelerated(folder, name=name, **options_of(**changes)._asdict())


def planned(
    folder: Path, drafter: Path | None = None, proposer: Proposer | None = None, **changes: Any
) -> tuple[LoopPlan, WorkerConfig]:
    """Plan a loop from options of the engine, of speculation and of stages, each passed by name."""

    options, speculation, stages = options_of(**{"drafter": str(drafter or ""), **changes})
    plan = LoopPlan(speculation, stages)
    config = replace(config_of(folder), options=options)
    if drafter is not None:
        own = replace(config_of(drafter), options=config.options)
        plan = replace(plan, drafter=own)
        config = replace(config, more_kv_floats=own.kv_floats_per_token)
    if proposer is not None:
        plan = replace(plan, proposer=cast(Any, lambda: proposer))
    return plan, config


def run(
    folder: Path,
    steps: Sequence[Sequence[Command]],
    proposer: Proposer | None = None,
    lengths: Lengths | int | None = None,
    drafter: Path | None = None,
    **changes: Any,
) -> Driven:
    """Run a step loop over a script, optionally with another proposer and another choice of
    proposal lengths.
    """
    ways: dict[str, Any] = {"device": "cpu", "kernel": "native", "kv_tokens": 4096}
    ways |= {"max_batch": 32, "chunk_tokens": 512, "threads": 1}
    if drafter is not None:
        ways |= {"speculate": "draft", "beside": "inline"}
    ways["k"] = lengths if isinstance(lengths, int) else None
    plan, config = planned(folder, drafter, proposer, **{**ways, **changes})
    driven = Driven({}, LoopStats())

    def tell(report: LoopReport) -> None:
        driven.replies.update({reply.request_id: reply for reply in report.replies})
        driven.stats = report.stats or driven.stats

    with pytest.MonkeyPatch.context() as patch:
        if lengths is not None and not isinstance(lengths, int):
            patch.setattr("atts.accel.build.GoodputLengths", lambda *limits: lengths)
        loop = (
            build_loop(config, tell)[0]
            if plan.is_plain
            else build_accelerated(plan, config, tell)[0]
        )
    loop.run(Script(steps))
    return driven


def texts(done: Driven) -> dict[int, TokenIds]:
    """Return the text of each request."""
    return {key: reply.ids for key, reply in done.replies.items() if isinstance(reply, SampleReply)}


def same(plain: Driven, other: Driven) -> bool:
    """Return whether two runs gave bit-identical replies: the same ids, ends and
    log-probabilities.
    """
    assert plain.replies, "no reply has a token"
    return plain.replies == other.replies


def counts(done: Driven) -> SpeculationStats:
    """Return the loop's counters about speculation."""
    assert done.stats.speculation is not None, "the loop did not speculate"
    return done.stats.speculation
