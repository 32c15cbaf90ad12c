"""Tests of planted failures and interruptions: they occur where they were planted, and nowhere
else.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import anyio
import pytest

from atts.concurrency import collect
from atts.core import Completion, Message, SampleRequest, Sampling, ScoreRequest, Scores
from atts.engine import Engine
from atts.errors import EngineTimeout, EngineUnavailable, OptionError, UsageError
from atts.sampling import Seed
from atts.testing import (
    FaultKind,
    Faults,
    FaultyEngine,
    Latency,
    ScriptedEngine,
    run_virtual,
    toy_problems,
)
from atts.testing.servers import request_of

TEXT = toy_problems(1)[0].text
SLOW = Latency(per_sample=1.0, per_score=0.5)
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


def asking(engine: Engine, sample: int = 0, attempt: int = 0) -> SampleRequest:
    """Make a request for ten tokens."""
    ids = engine.tokenizer.render([Message("user", TEXT)])
    return SampleRequest(ids, 10, seed=Seed(sample=sample, attempt=attempt))


def scoring(engine: Engine) -> ScoreRequest:
    """Make a request to score three tokens."""
    return ScoreRequest(asking(engine).ids, engine.tokenizer.encode("So we take"))


def inside(faults: Faults) -> Engine:
    """Build faults into the scripted engine."""
    return ScriptedEngine(latency=SLOW, concurrency=1, faults=faults)


def around(faults: Faults) -> Engine:
    """Put the same faults around an engine without built-in faults."""
    return FaultyEngine(ScriptedEngine(latency=SLOW, concurrency=1), faults)


ways = pytest.mark.parametrize("make", [inside, around])


async def what_happens(engine: Engine, verb: Literal["sample", "score"]) -> tuple[str, float]:
    """Return a word for how the call ended, and the seconds that it took."""
    began = anyio.current_time()
    with anyio.move_on_after(1000) as patience:
        try:
            answer = await (
                engine.sample(asking(engine)) if verb == "sample" else engine.score(scoring(engine))
            )
        except EngineUnavailable as error:
            return ("dropped" if "lost" in str(error) else "refused"), anyio.current_time() - began
        except EngineTimeout:
            return "timeout", anyio.current_time() - began
        return flaw(engine, answer), anyio.current_time() - began
    assert patience.cancelled_caught
    return "hang", 0.0


def flaw(engine: Engine, answer: Completion | Scores) -> str:
    """Name the impossible part of a reply."""
    expected = len(answer.ids) if isinstance(answer, Completion) else 3
    if not answer.logprobs:
        return "empty"
    if len(answer.logprobs) != expected:
        return "wrong_length"
    if any(math.isnan(value) for value in answer.logprobs):
        return "nan"
    if max(answer.logprobs) > 0:
        return "wrong_ids"
    if isinstance(answer, Completion) and max(answer.ids) >= engine.spec.vocabulary:
        return "wrong_ids"
    return "slow"  # a slow reply is correct


@ways
@pytest.mark.parametrize("verb", ["sample", "score"])
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_each_kind_does_what_its_name_says(
    make: Callable[[Faults], Engine],
    verb: Literal["sample", "score"],
    backend: Literal["asyncio", "trio"],
) -> None:
    """Each kind of fault does what its name says.

    After nine calls, one of each kind, a tenth call works, so the failed calls left no slot taken.
    """

    async def main() -> None:
        delay = {"slow": 7.0, "dropped": 7.0, "timeout": 7.0}
        async with make(Faults(calls=dict(enumerate(KINDS)), delay_seconds=7.0)) as engine:
            usual = 1.0 if verb == "sample" else 0.5
            for kind in KINDS:
                seen, seconds = await what_happens(engine, verb)
                assert seen == kind
                answered = kind not in ("refused", "dropped", "timeout", "hang")
                assert seconds == delay.get(kind, 0.0) + usual * answered
            assert await what_happens(engine, verb) == ("slow", usual)
            assert engine.stats().in_flight == 0

    run_virtual(main, backend=backend)


@ways
def test_shares_strike_the_same_calls_under_any_schedule(make: Callable[[Faults], Engine]) -> None:
    """The requested share of calls fails, and these are the same calls in any order.

    With another attempt number or seed, other calls fail.
    """

    async def struck(order: list[int], attempt: int = 0, seed: int = 0) -> set[int]:
        async def one(engine: Engine, sample: int) -> int | None:
            try:
                await engine.sample(asking(engine, sample, attempt))
            except EngineUnavailable:
                return sample
            return None

        async with make(Faults({"refused": 0.2}, seed=seed)) as engine:
            return {
                n
                for n in await collect([partial(one, engine, sample) for sample in order])
                if n is not None
            }

    first = run_virtual(struck, list(range(200)))
    assert 20 < len(first) < 60
    assert run_virtual(struck, list(range(199, -1, -1))) == first
    assert run_virtual(struck, list(range(200)), 1) != first
    assert run_virtual(struck, list(range(200)), 0, 1) != first


@ways
def test_a_repeated_score_request_may_succeed(make: Callable[[Faults], Engine]) -> None:
    """Scores have no seed, so faults distinguish repeated equal requests by their count."""

    async def main() -> set[str]:
        async with make(Faults({"refused": 0.5})) as engine:
            return {(await what_happens(engine, "score"))[0] for _ in range(30)}

    assert run_virtual(main) == {"refused", "slow"}


def test_faults_can_be_limited_to_sampling_or_scoring() -> None:
    """Faults may affect only sampling or only scoring: a target that scores badly may still sample
    well.
    """

    async def main() -> tuple[str, str]:
        async with inside(Faults({"nan": 1.0}, only="score")) as engine:
            return (await what_happens(engine, "sample"))[0], (await what_happens(engine, "score"))[
                0
            ]

    assert run_virtual(main) == ("slow", "nan")


def test_a_faulty_engine_is_opened_first() -> None:
    """A call before the engine is opened is an error of the caller, and the message says so."""
    engine = around(Faults())

    async def main() -> None:
        await engine.sample(asking(engine))

    with pytest.raises(UsageError, match="async with"):
        run_virtual(main)


def test_impossible_faults_are_errors() -> None:
    """Unknown kinds and shares that are not probabilities are refused."""
    with pytest.raises(OptionError, match="known: refused"):
        Faults({"refuse": 0.1})  # type: ignore[dict-item]  # pyright: ignore[reportArgumentType]
    for shares in ({"nan": -0.1}, {"nan": 0.7, "slow": 0.7}, {"nan": math.nan}):
        with pytest.raises(OptionError, match="probabilities"):
            Faults(shares)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("stop", ["\n\n", ["\n\n"], ("\n\n",)])
def test_a_server_takes_one_stop_string_as_well_as_several(stop: object) -> None:
    """A single string is one stop string, not one for each of its characters."""
    assert request_of((1,), 1, {"stop": stop}, Sampling()).stop == ("\n\n",)
