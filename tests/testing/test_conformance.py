"""Tests that the conformance suite passes correct engines and finds each kind of faulty one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Literal

import anyio
import anyio.lowlevel
import pytest

from atts.core import Completion, SampleRequest, Sampling, ScoreRequest, Scores, TokenIds
from atts.engine import Capability, Engine, EngineSpec, EngineStats, check_sample
from atts.errors import CheckFailed, ContextOverflow, ModelLoadError, OptionError, UsageError
from atts.testing import (
    CHECKS,
    TARGET,
    CheckOptions,
    Faults,
    FaultyEngine,
    Latency,
    ScriptedEngine,
    ToyModel,
    ToyTokenizer,
    check_engine,
    run_virtual,
)

Logprobs = tuple[float, ...]
QUICK = CheckOptions(timeout_seconds=30, settle_seconds=0.5)
SLOW = Latency(per_sample=0.01, per_score=0.005, sampled_token=0.002, jitter=0.2)


class Rig(ScriptedEngine):
    """A correct engine with a queue and some latency, from which the tests make faulty engines."""

    def __init__(self) -> None:
        super().__init__(latency=SLOW, concurrency=3, context_length=1024)


def asks(change: Callable[[Rig, SampleRequest], SampleRequest]) -> type[Rig]:
    """Make an engine that changes a request before it samples."""

    class Saboteur(Rig):
        async def sample(self, request: SampleRequest) -> Completion:
            return await super().sample(change(self, request))

    return Saboteur


def answers(change: Callable[[Rig, Completion], Completion]) -> type[Rig]:
    """Make an engine that changes its sampled tokens."""

    class Saboteur(Rig):
        async def sample(self, request: SampleRequest) -> Completion:
            return change(self, await super().sample(request))

    return Saboteur


def scores(change: Callable[[Logprobs, ScoreRequest], Logprobs]) -> type[Rig]:
    """Make an engine that changes its scores."""

    class Saboteur(Rig):
        async def score(self, request: ScoreRequest) -> Scores:
            return Scores(change((await super().score(request)).logprobs, request))

    return Saboteur


def counts(change: Callable[[EngineStats], EngineStats]) -> type[Rig]:
    """Make an engine that counts differently."""

    class Saboteur(Rig):
        def stats(self) -> EngineStats:
            return change(super().stats())

    return Saboteur


def claims(**fields: Any) -> type[Rig]:
    """Make an engine whose spec is false."""

    class Saboteur(Rig):
        @property
        def spec(self) -> EngineSpec:
            return replace(super().spec, **fields)

    return Saboteur


def ignores(**settings: Any) -> type[Rig]:
    """Make an engine that checks requests and then ignores some sampling settings."""

    def change(engine: Rig, request: SampleRequest) -> SampleRequest:
        check_sample(request, engine.spec)
        return replace(request, sampling=replace(request.sampling, **settings))

    return asks(change)


def seeded(purpose: Callable[[Rig], object]) -> type[Rig]:
    """Make an engine whose random stream depends on more than the seed."""
    return asks(lambda engine, r: replace(r, seed=replace(r.seed, purpose=str(purpose(engine)))))


def reheated(temperature: Callable[[float], float]) -> type[Rig]:
    """Make an engine that samples at a temperature other than requested."""
    return asks(
        lambda _, r: replace(
            r, sampling=replace(r.sampling, temperature=temperature(r.sampling.temperature))
        )
    )


def cut(engine: ScriptedEngine, done: Completion, count: int) -> Completion:
    """Return the first tokens of a completion."""
    return Completion(
        done.ids[:count],
        engine.tokenizer.decode(done.ids[:count]),
        "delimiter",
        done.logprobs[:count],
    )


def drops_the_stop(engine: Rig, done: Completion) -> Completion:
    """Leave out the token that completes the stop string, as servers do by default."""
    return (
        cut(engine, done, len(done.ids) - 1)
        if done.ended == "delimiter" and len(done.ids) > 1
        else done
    )


def continues_after_the_end(_: Rig, done: Completion) -> Completion:
    """Add one token after the model's end."""
    return (
        replace(done, ids=(*done.ids, 9), logprobs=(*done.logprobs, -1.0))
        if done.ended == "end"
        else done
    )


def hides_the_end(_: Rig, done: Completion) -> Completion:
    """Leave out the end token."""
    return (
        replace(done, ids=done.ids[:-1], logprobs=done.logprobs[:-1])
        if done.ended == "end"
        else done
    )


def truncates(engine: Rig, request: SampleRequest) -> SampleRequest:
    """Cut long prompts instead of refusing them."""
    room = engine.spec.context_length - request.max_tokens
    return replace(request, ids=request.ids[-max(1, room) :]) if room > 0 else request


class TidyTokenizer(ToyTokenizer):
    """A tokenizer that merges double spaces, as some do."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).replace("  ", " ")


class Tidy(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__(model=ToyModel(TARGET, TidyTokenizer()))


class StopsInsideTokensOnly(Rig):
    """An engine that looks for the stop string in each token separately."""

    async def sample(self, request: SampleRequest) -> Completion:
        done = await super().sample(replace(request, stop=()))
        for count, index in enumerate(done.ids, start=1):
            if any(stop in self.tokenizer.decode((index,)) for stop in request.stop):
                return cut(self, done, count)
        return done


class ForgetsThePrefix(Rig):
    """An engine that scores a continuation without the last tokens of its prefix."""

    async def score(self, request: ScoreRequest) -> Scores:
        return await super().score(replace(request, prefix=request.prefix[:-3] or request.prefix))


class ScoresDependOnCompany(Rig):
    async def score(self, request: ScoreRequest) -> Scores:
        company = self.stats().in_flight
        done = await super().score(request)
        return Scores(tuple(value - 0.01 * company for value in done.logprobs))


class LogprobsDriftInCompany(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        company = self.stats().in_flight
        done = await super().sample(request)
        return replace(done, logprobs=tuple(value - 0.01 * company for value in done.logprobs))


class TrustsHints(Rig):
    """An engine that uses the first prompt of a rollout for all later requests of the rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.warm: dict[str, TokenIds] = {}

    async def sample(self, request: SampleRequest) -> Completion:
        if request.rollout:
            request = replace(request, ids=self.warm.setdefault(request.rollout, request.ids))
        return await super().sample(request)


class TrustsHintsWhenScoring(Rig):
    def __init__(self) -> None:
        super().__init__()
        self.warm: dict[str, TokenIds] = {}

    async def score(self, request: ScoreRequest) -> Scores:
        if request.rollout:
            request = replace(request, prefix=self.warm.setdefault(request.rollout, request.prefix))
        return await super().score(request)


class WrongKindOfOverflow(Rig):
    async def score(self, request: ScoreRequest) -> Scores:
        try:
            return await super().score(request)
        except ContextOverflow as error:
            raise UsageError(str(error)) from error


class RefusesTheLastToken(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        if len(request.ids) + request.max_tokens == self.spec.context_length:
            raise ContextOverflow(
                self.spec.name, self.spec.context_length + 1, self.spec.context_length
            )
        return await super().sample(request)


class ScoresNothing(Rig):
    async def score(self, request: ScoreRequest) -> Scores:
        return Scores(()) if not request.suffix else await super().score(request)


class ScoresAfterAll(ScriptedEngine):
    """An engine whose spec says that it cannot score, although it can."""

    @property
    def spec(self) -> EngineSpec:
        return replace(super().spec, capabilities=frozenset({"sample"}))

    def _admit(self, verb: Capability) -> None:
        """Refuse nothing."""


class MixesUpAnswers(Rig):
    """An engine that, under load, answers the newest request instead of the caller's own."""

    last: SampleRequest | None = None

    async def sample(self, request: SampleRequest) -> Completion:
        self.last = request
        await anyio.lowlevel.checkpoint()
        return await super().sample(self.last if self.stats().in_flight > 20 else request)


class ForgetsCounts(Rig):
    """An engine whose counters start again at 0."""

    asked = 0

    def stats(self) -> EngineStats:
        self.asked += 1
        return replace(super().stats(), prefilled_tokens=0 if self.asked > 1 else 5)


class ClosesOnce(Rig):
    closed = False

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True
        return await super().__aexit__(kind, error, trace)


class ServesWhenClosed(Rig):
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        return None


class SharesSettings(Rig):
    """An engine that stores the settings of a request where all engines see them."""

    parked: ClassVar[list[Sampling]] = [Sampling()]

    async def sample(self, request: SampleRequest) -> Completion:
        self.parked[0] = request.sampling
        await anyio.lowlevel.checkpoint()
        return await super().sample(replace(request, sampling=self.parked[0]))


class ClosesForAll(Rig):
    """An engine that changes the tokens sampled by other engines when it is closed."""

    closed: ClassVar[list[bool]] = [False]

    async def __aenter__(self) -> "ClosesForAll":
        await super().__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        self.closed[0] = True
        return await super().__aexit__(kind, error, trace)

    async def sample(self, request: SampleRequest) -> Completion:
        purpose = "after" if self.closed[0] else "before"
        return await super().sample(replace(request, seed=replace(request.seed, purpose=purpose)))


class LeaksSlots(Rig):
    """An engine that does not free the slot of a cancelled request."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = anyio.Semaphore(3)

    async def sample(self, request: SampleRequest) -> Completion:
        await self.gate.acquire()
        done = await super().sample(request)
        self.gate.release()
        return done


class FinishesAnyway(Rig):
    """An engine that continues to the end when it is cancelled."""

    async def sample(self, request: SampleRequest) -> Completion:
        done: list[Completion] = []
        with anyio.CancelScope(shield=True):
            done.append(await super().sample(request))
        return done[0]


class SwallowsCancellation(Rig):
    """An engine that returns its tokens so far when it is cancelled."""

    async def sample(self, request: SampleRequest) -> Completion:
        try:
            return await super().sample(request)
        except anyio.get_cancelled_exc_class():
            return Completion((9,), self.tokenizer.decode((9,)), "length", (-1.0,))


def _arrival(engine: Rig) -> int:
    return engine.stats().requests


STRIPS_TEXT = answers(lambda _, done: replace(done, text=done.text.strip()))
DROPS_THE_STOP = answers(drops_the_stop)
IGNORES_TOP_K = ignores(top_k=0)
# the random numbers of all requests come from one stream, in order of arrival
ONE_STREAM = seeded(_arrival)
# a planted bug that gives each token the score of the next token
OFF_BY_ONE = scores(lambda logprobs, _: (*logprobs[1:], logprobs[0]))


class Renderless:
    """A tokenizer that lacks a method."""

    digest = "none"

    def encode(self, text: str) -> TokenIds:
        return (1,)

    def decode(self, ids: Sequence[int]) -> str:
        return ""


class Lacking(Rig):
    """An engine with a tokenizer that lacks a method."""

    @property
    def tokenizer(self) -> Any:
        return Renderless()


class Shut(Rig):
    """An engine that cannot be opened."""

    async def __aenter__(self) -> Any:
        raise ModelLoadError("shut", "its model is missing")


class DrawsOtherwise(Rig):
    """An engine that uses another attempt's random stream for the tokens that it samples while it
    scores.
    """

    async def score(self, request: ScoreRequest) -> Scores:
        draw = request.draw and replace(request.draw, seed=replace(request.draw.seed, attempt=1))
        return await super().score(replace(request, draw=draw))


class Stuck(Rig):
    """An engine that cannot be closed."""

    async def __aexit__(self, kind: Any, error: Any, trace: Any, /) -> bool | None:
        raise OSError("it does not let go")


SABOTEURS: dict[tuple[str, str], Callable[[], Engine]] = {
    ("opening", "a tokenizer without render"): Lacking,
    ("spec", "wrong digest"): claims(tokenizer="of another model"),
    ("spec", "end outside the vocabulary"): claims(end_ids=(10**6,)),
    ("tokenizer", "merges spaces"): Tidy,
    ("ids", "strips text"): STRIPS_TEXT,
    ("ids", "loses a log-prob"): answers(lambda _, done: replace(done, logprobs=done.logprobs[1:])),
    ("ids", "not a number"): answers(
        lambda _, done: replace(done, logprobs=(*done.logprobs[:-1], math.nan))
    ),
    ("length", "one too many"): asks(lambda _, r: replace(r, max_tokens=r.max_tokens + 1)),
    ("length", "one too few"): asks(lambda _, r: replace(r, max_tokens=max(1, r.max_tokens - 1))),
    ("stop", "inside tokens only"): StopsInsideTokensOnly,
    ("stop", "drops the stop"): DROPS_THE_STOP,
    ("stop", "calls it length"): answers(
        lambda _, done: replace(done, ended="length") if done.ended == "delimiter" else done
    ),
    ("stop_ids", "ignores them"): asks(lambda _, r: replace(r, stop_ids=())),
    ("stop_ids", "drops the stop"): DROPS_THE_STOP,
    ("end", "goes on"): answers(continues_after_the_end),
    ("end", "hides it"): answers(hides_the_end),
    ("alignment", "off by one"): OFF_BY_ONE,
    ("alignment", "drops a score"): scores(lambda logprobs, _: logprobs[1:] or (-1.0,)),
    ("alignment", "at a temperature"): scores(
        lambda logprobs, _: tuple(value / 0.8 for value in logprobs)
    ),
    ("alignment", "forgets the prefix"): ForgetsThePrefix,
    ("alignment", "looks ahead"): scores(
        lambda logprobs, r: tuple(x - 1e-4 * r.suffix[-1] for x in logprobs)
    ),
    ("improbable", "looks ahead"): scores(
        lambda logprobs, r: (logprobs[0] - 1e-3 * (r.suffix[len(r.suffix) // 2] % 7), *logprobs[1:])
    ),
    ("improbable", "likes everything"): scores(lambda logprobs, _: (-0.5,) * len(logprobs)),
    ("improbable", "off by one"): OFF_BY_ONE,
    ("greedy", "never"): reheated(lambda temperature: temperature or 1.0),
    ("greedy", "ignores top_k"): IGNORES_TOP_K,
    ("greedy", "ignores top_p"): ignores(top_p=1.0),
    ("greedy", "ignores min_p"): ignores(min_p=0.0),
    ("seeds", "one stream"): ONE_STREAM,
    ("seeds", "company matters"): seeded(lambda engine: min(1, engine.stats().in_flight)),
    ("seeds", "log-probs drift in company"): LogprobsDriftInCompany,
    ("seed_fields", "ignores the turn"): asks(
        lambda _, r: replace(r, seed=replace(r.seed, turn=0))
    ),
    ("seed_fields", "ignores the attempt"): asks(
        lambda _, r: replace(r, seed=replace(r.seed, attempt=0))
    ),
    ("distribution", "sharpens"): reheated(lambda temperature: temperature * 0.4),
    ("distribution", "ignores top_k"): IGNORES_TOP_K,
    ("distribution", "ignores the temperature"): reheated(
        lambda temperature: 1.0 if temperature else 0.0
    ),
    ("drawing", "another stream"): DrawsOtherwise,
    ("drawing", "begins the stream anew"): asks(lambda _, r: replace(r, num_begun=0)),
    ("hints", "trusts them"): TrustsHints,
    ("hints", "trusts them when scoring"): TrustsHintsWhenScoring,
    ("score_company", "company matters"): ScoresDependOnCompany,
    ("score_company", "not a number"): scores(lambda logprobs, _: (*logprobs[1:], math.nan)),
    ("context", "truncates"): asks(truncates),
    ("context", "wrong kind of overflow"): WrongKindOfOverflow,
    ("context", "refuses the last token"): RefusesTheLastToken,
    ("refusals", "scores nothing"): ScoresNothing,
    ("refusals", "takes any id"): asks(
        lambda engine, r: replace(
            r, ids=tuple(index for index in r.ids if 0 <= index < engine.spec.vocabulary)
        )
    ),
    ("refusals", "clamps settings"): asks(
        lambda _, r: replace(r, sampling=replace(r.sampling, top_p=r.sampling.top_p or 1.0))
    ),
    ("capabilities", "scores after all"): ScoresAfterAll,
    ("order", "mixes up answers"): MixesUpAnswers,
    ("stats", "counts nothing"): counts(lambda _: EngineStats()),
    ("stats", "forgets"): ForgetsCounts,
    ("stats", "counts twice"): counts(
        lambda stats: replace(stats, scored_tokens=2 * stats.scored_tokens)
    ),
    ("closing", "once only"): ClosesOnce,
    ("closing", "serves when closed"): ServesWhenClosed,
    ("isolation", "shares settings"): SharesSettings,
    ("isolation", "closes for all"): ClosesForAll,
    ("cancellation", "leaks slots"): LeaksSlots,
    ("cancellation", "stays in flight"): counts(
        lambda s: replace(s, in_flight=s.in_flight + s.cancelled)
    ),
    ("cancellation", "finishes anyway"): FinishesAnyway,
    ("cancellation", "swallows it"): SwallowsCancellation,
    ("cancellation", "confused by it"): seeded(lambda engine: 1 if engine.stats().cancelled else 0),
}


def only(check: str, options: CheckOptions = QUICK) -> CheckOptions:
    """Return options that skip all other checks."""
    return replace(options, skip=frozenset(set(CHECKS) - {check}))


@pytest.mark.parametrize(("check", "what"), SABOTEURS)
def test_each_fault_is_found_by_its_check(check: str, what: str) -> None:
    """Each faulty engine fails the check of the promise that it breaks."""
    report = run_virtual(
        partial(check_engine, SABOTEURS[check, what], options=only(check), broken="report")
    )
    assert [result.check for result in report.broken] == [check]


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_can_fail_and_passes_a_correct_engine(check: str) -> None:
    """Each check has a planted bug that fails it, and no check fails the engine in which the bugs
    were planted.
    """
    assert check in {name for name, _ in SABOTEURS}
    assert not run_virtual(partial(check_engine, Rig, options=only(check))).broken


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize(
    "factory",
    [
        ScriptedEngine,
        partial(ScriptedEngine, "target", concurrency=1, latency=SLOW),
        partial(ScriptedEngine, model=ToyModel(TARGET, ToyTokenizer("other"))),
        partial(ScriptedEngine, capabilities=frozenset({"sample"})),
        partial(ScriptedEngine, capabilities=frozenset({"score"})),
        lambda: FaultyEngine(ScriptedEngine("target"), Faults()),
    ],
)
def test_correct_engines_pass(
    factory: Callable[[], Engine], backend: Literal["asyncio", "trio"]
) -> None:
    """Correct engines pass as draft or target, with one slot or several, with either tokenizer,
    with one or both capabilities, and on both back ends.
    """
    report = run_virtual(check_engine, factory, backend=backend)
    assert {result.check for result in report.results} == set(CHECKS)


def test_an_engine_without_seeds_passes_where_seeds_are_not_promised() -> None:
    """An engine without seeds fails several checks by default, and none with `seeding="none"`,
    which compares greedy texts.
    """
    broken = run_virtual(partial(check_engine, ONE_STREAM, options=QUICK, broken="report")).broken
    assert {"seeds", "hints", "order"} <= {result.check for result in broken}
    report = run_virtual(partial(check_engine, ONE_STREAM, options=replace(QUICK, seeding="none")))
    skipped = {result.check for result in report.results if result.status == "skipped"}
    assert skipped == {"seeds", "seed_fields", "drawing", "capabilities"}


@pytest.mark.anyio
async def test_an_open_engine_is_checked_and_stays_open() -> None:
    """An open engine is checked in real time, and checks that would close it are skipped with a
    reason.
    """
    async with ScriptedEngine() as engine:
        report = await check_engine(engine)
        skipped = {
            result.check: result.why for result in report.results if result.status == "skipped"
        }
        assert skipped.keys() == {"capabilities", "closing", "isolation"}
        assert "pass a function" in skipped["closing"]
        assert (await engine.sample(SampleRequest((3,), 2))).ids


def test_a_broken_engine_raises_with_a_list() -> None:
    """The error about a broken engine lists each broken promise with the observation, and no kept
    promise.
    """

    class TwoFlaws(Rig):
        @property
        def spec(self) -> EngineSpec:
            return replace(super().spec, tokenizer="of another model")

        async def sample(self, request: SampleRequest) -> Completion:
            done = await super().sample(request)
            return replace(done, text=done.text.strip())

    with pytest.raises(
        CheckFailed, match=r"\n  broken  spec: .*another model.*\n  broken  ids: text"
    ) as caught:
        run_virtual(partial(check_engine, TwoFlaws, options=QUICK))
    assert "kept" not in str(caught.value)


def test_an_engine_that_fails_or_hangs_is_reported_not_raised() -> None:
    """An error or hang of the engine is a failure of the check that caused it."""
    failing = partial(
        check_engine, lambda: FaultyEngine(Rig(), Faults({"refused": 1.0})), broken="report"
    )
    report = run_virtual(partial(failing, options=only("ids")))
    assert "EngineUnavailable" in report.broken[0].why
    hanging = partial(
        check_engine, lambda: FaultyEngine(Rig(), Faults({"hang": 1.0})), broken="report"
    )
    report = run_virtual(partial(hanging, options=only("ids")))
    assert "did not finish within 30 s" in report.broken[0].why


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (Lacking, "the tokenizer lacks render"),
        (Shut, "ModelLoadError: engine shut: its model is missing"),
        (Stuck, "OSError: it does not let go"),
        (lambda: object(), "TypeError"),
    ],
)
def test_an_engine_that_lacks_something_is_reported_not_raised(engine: Any, why: str) -> None:
    """The report names the missing method, or why the engine does not open or close; other checks
    are skipped.
    """
    report = run_virtual(partial(check_engine, engine, options=QUICK, broken="report"))
    assert why in [result.why for result in report.broken if result.check == "opening"][0]
    assert {result.check for result in report.results} == set(CHECKS)
    with pytest.raises(CheckFailed, match="opening"):
        run_virtual(partial(check_engine, engine, options=QUICK))


def test_an_unknown_check_cannot_be_skipped() -> None:
    """A misspelt name is an error with a suggestion."""
    with pytest.raises(OptionError, match="did you mean 'seeds'"):
        run_virtual(
            partial(check_engine, ScriptedEngine, options=CheckOptions(skip=frozenset({"seed"})))
        )


class Wordless(Rig):
    """An engine that returns no log-probabilities, whatever its spec says."""

    async def sample(self, request: SampleRequest) -> Completion:
        """Sample without log-probabilities."""
        return replace(await super().sample(request), logprobs=())


class HonestlyWordless(Wordless):
    """An engine that returns no log-probabilities, and says so."""

    @property
    def spec(self) -> EngineSpec:
        return replace(super().spec, logprobs="none")


def test_an_engine_may_return_no_log_probabilities_if_it_says_so() -> None:
    """An engine without log-probabilities passes if its spec says so, and fails the check of ids if
    not.
    """
    broken = {
        made: {
            result.check
            for result in run_virtual(
                partial(check_engine, made, options=QUICK, broken="report")
            ).broken
        }
        for made in (Wordless, HonestlyWordless)
    }
    assert "ids" in broken[Wordless]
    assert "ids" not in broken[HonestlyWordless]
