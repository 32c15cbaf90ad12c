"""Asks engines and believes only replies that can be true; whether to ask again is the task graph's business."""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager

import anyio

from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import Engine
from atts.errors import BadReply, EngineTimeout


async def ask_sample(engine: Engine, request: SampleRequest, timeout_seconds: float) -> Completion:
    """A completion whose parts agree with each other.

    :raises BadReply: they do not.
    :raises EngineTimeout: it did not come in time.
    :raises EngineError: the engine failed.
    """
    with _deadline(engine, timeout_seconds):
        completion = await engine.sample(request)
    flaw = _flaw(completion, request, engine)
    if flaw:
        raise BadReply(engine.spec.name, flaw)
    return completion


async def ask_score(engine: Engine, request: ScoreRequest, timeout_seconds: float) -> Scores:
    """One log-probability per suffix token, none above 0, none that is not a number; -inf is a log-probability.

    :raises BadReply: anything else came back.
    :raises EngineTimeout: it did not come in time.
    :raises EngineError: the engine failed.
    """
    with _deadline(engine, timeout_seconds):
        scores = await engine.score(request)
    if len(scores.logprobs) != len(request.suffix):
        got, want = len(scores.logprobs), len(request.suffix)
        raise BadReply(engine.spec.name, f"{got} log-probabilities came back for {want} tokens")
    if not all(value <= 1e-4 for value in scores.logprobs):  # false for nan, too; rounding may exceed 0 a little
        raise BadReply(engine.spec.name, "a log-probability is above 0 or not a number")
    return scores


@contextmanager
def _deadline(engine: Engine, seconds: float) -> Generator[None]:
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError as late:
        raise EngineTimeout(engine.spec.name, f"no answer within {seconds:g} s") from late


def _flaw(completion: Completion, request: SampleRequest, engine: Engine) -> str:
    told = completion.logprobs or engine.spec.logprobs != "none"
    if told and len(completion.logprobs) != len(completion.ids):
        return f"{len(completion.logprobs)} log-probabilities came with {len(completion.ids)} ids"
    if len(completion.ids) > request.max_tokens:
        return f"{len(completion.ids)} tokens came back, {request.max_tokens} were allowed"
    if any(not 0 <= token < engine.spec.vocabulary for token in completion.ids):
        return "an id outside the vocabulary came back"
    if any(math.isnan(value) for value in completion.logprobs):
        return "a log-probability is not a number"
    return ""
