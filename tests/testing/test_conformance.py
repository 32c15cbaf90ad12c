"""The conformance suite passes good engines and catches each kind of bad one."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import ClassVar, Literal

import anyio
import anyio.lowlevel
import pytest

from atts.core import Completion, SampleRequest, Sampling, ScoreRequest, Scores, TokenIds
from atts.engine import Engine, EngineSpec, EngineStats, check_sample
from atts.errors import CheckFailed, ContextOverflow, OptionError, UsageError
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

QUICK = CheckOptions(timeout_seconds=30, settle_seconds=0.5)
SLOW = Latency(per_sample=0.01, per_score=0.005, sampled_token=0.002, jitter=0.2)


class Rig(ScriptedEngine):
    """A sound engine with a queue and some latency: what the saboteurs start from."""

    def __init__(self) -> None:
        super().__init__(latency=SLOW, concurrency=3, context_length=1024)


class WrongDigest(Rig):
    @property
    def spec(self) -> EngineSpec:
        return replace(super().spec, tokenizer="of another model")


class EndOutside(Rig):
    @property
    def spec(self) -> EngineSpec:
        return replace(super().spec, end_ids=(10**6,))


class TidyTokenizer(ToyTokenizer):
    """Merges double spaces, as some cleaning tokenizers do."""

    def decode(self, ids: Sequence[int]) -> str:
        return super().decode(ids).replace("  ", " ")


class Tidy(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__(model=ToyModel(TARGET, TidyTokenizer()))


class StripsText(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        done = await super().sample(request)
        return replace(done, text=done.text.strip())


class LosesFirstLogprob(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        done = await super().sample(request)
        return replace(done, logprobs=done.logprobs[1:])


class NotANumber(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        done = await super().sample(request)
        return replace(done, logprobs=(*done.logprobs[:-1], math.nan))


class OneTooMany(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        return await super().sample(replace(request, max_tokens=request.max_tokens + 1))


class OneTooFew(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        return await super().sample(replace(request, max_tokens=max(1, request.max_tokens - 1)))


def cut(engine: ScriptedEngine, done: Completion, count: int, *, delimiter: bool = True) -> Completion:
    """The first tokens of a completion."""
    ids = done.ids[:count]
    return Completion(ids, engine.tokenizer.decode(ids), "delimiter" if delimiter else "length", done.logprobs[:count])


class StopsInsideTokensOnly(Rig):
    """Looks for the stop string in each token by itself."""

    async def sample(self, request: SampleRequest) -> Completion:
        done = await super().sample(replace(request, stop=()))
        for count, index in enumerate(done.ids, start=1):
            if any(stop in self.tokenizer.decode((index,)) for stop in request.stop):
                return cut(self, done, count)
        return done


class DropsTheStop(Rig):
    """Leaves the completing token out, as servers do unless told otherwise."""

    async def sample(self, request: SampleRequest) -> Completion:
        done = await super().sample(request)
        return cut(self, done, len(done.ids) - 1) if done.ended == "delimiter" and len(done.ids) > 1 else done


class CallsItLength(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        done = await super().sample(request)
        return replace(done, ended="length") if done.ended == "delimiter" else done


class IgnoresStopIds(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        return await super().sample(replace(request, stop_ids=()))


class GoesOnAfterTheEnd(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        done = await super().sample(request)
        if done.ended == "end":
            return replace(done, ids=(*done.ids, 9), logprobs=(*done.logprobs, -1.0))
        return done


class HidesTheEnd(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        done = await super().sample(request)
        return replace(done, ids=done.ids[:-1], logprobs=done.logprobs[:-1]) if done.ended == "end" else done


class OffByOne(Rig):
    """Scores each token with the law after it."""

    async def score(self, request: ScoreRequest) -> Scores:
        done = await super().score(request)
        return Scores((*done.logprobs[1:], done.logprobs[0]))


class DropsAScore(Rig):
    async def score(self, request: ScoreRequest) -> Scores:
        return Scores((await super().score(request)).logprobs[1:] or (-1.0,))


class ScoresNotANumber(Rig):
    async def score(self, request: ScoreRequest) -> Scores:
        return Scores((*(await super().score(request)).logprobs[1:], math.nan))


class ScoresAtATemperature(Rig):
    async def score(self, request: ScoreRequest) -> Scores:
        return Scores(tuple(value / 0.8 for value in (await super().score(request)).logprobs))


class ForgetsThePrefix(Rig):
    """Scores parts as if nothing but the prompt's start had come before."""

    async def score(self, request: ScoreRequest) -> Scores:
        return await super().score(replace(request, prefix=request.prefix[:-3] or request.prefix))


class LooksAhead(Rig):
    """Every token's score depends on the last one."""

    async def score(self, request: ScoreRequest) -> Scores:
        done = await super().score(request)
        return Scores(tuple(value - 1e-4 * request.suffix[-1] for value in done.logprobs))


class LooksAheadFromTheMiddle(Rig):
    async def score(self, request: ScoreRequest) -> Scores:
        done = await super().score(request)
        middle = request.suffix[len(request.suffix) // 2]
        return Scores((done.logprobs[0] - 1e-3 * (middle % 7), *done.logprobs[1:]))


class LikesEverything(Rig):
    async def score(self, request: ScoreRequest) -> Scores:
        return Scores(tuple(-0.5 for _ in request.suffix))


class NeverGreedy(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        law = request.sampling
        return await super().sample(replace(request, sampling=replace(law, temperature=law.temperature or 1.0)))


class Ignores(Rig):
    """Leaves one setting out of account."""

    ignored: ClassVar[Sampling] = Sampling()
    names: ClassVar[tuple[str, ...]] = ()

    async def sample(self, request: SampleRequest) -> Completion:
        check_sample(request, self.spec)
        settings = {name: getattr(self.ignored, name) for name in self.names}
        return await super().sample(replace(request, sampling=replace(request.sampling, **settings)))


class IgnoresTopK(Ignores):
    names = ("top_k",)


class IgnoresTopP(Ignores):
    names = ("top_p",)


class IgnoresMinP(Ignores):
    names = ("min_p",)


class IgnoresTemperature(Ignores):
    """But not zero."""

    async def sample(self, request: SampleRequest) -> Completion:
        if request.sampling.temperature > 0:
            request = replace(request, sampling=replace(request.sampling, temperature=1.0))
        return await super().sample(request)


class Sharpens(Rig):
    """Draws at a lower temperature than it says."""

    async def sample(self, request: SampleRequest) -> Completion:
        temperature = request.sampling.temperature * 0.4
        return await super().sample(replace(request, sampling=replace(request.sampling, temperature=temperature)))


class OneStream(Rig):
    """Draws every request's numbers from one stream, in order of arrival."""

    arrivals = 0

    async def sample(self, request: SampleRequest) -> Completion:
        self.arrivals += 1
        return await super().sample(replace(request, seed=replace(request.seed, purpose=str(self.arrivals))))


class CompanyMatters(Rig):
    """The numbers drawn depend on how many others are in flight."""

    async def sample(self, request: SampleRequest) -> Completion:
        company = min(1, self.stats().in_flight)
        return await super().sample(replace(request, seed=replace(request.seed, purpose=f"{company}")))


class LogprobsDriftInCompany(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        company = self.stats().in_flight
        done = await super().sample(request)
        return replace(done, logprobs=tuple(value - 0.01 * company for value in done.logprobs))


class IgnoresTurn(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        return await super().sample(replace(request, seed=replace(request.seed, turn=0)))


class IgnoresAttempt(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        return await super().sample(replace(request, seed=replace(request.seed, attempt=0)))


class TrustsHints(Rig):
    """Takes a rollout's earlier text for the beginning of any later one."""

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


class ScoresDependOnCompany(Rig):
    async def score(self, request: ScoreRequest) -> Scores:
        company = self.stats().in_flight
        done = await super().score(request)
        return Scores(tuple(value - 0.01 * company for value in done.logprobs))


class Truncates(Rig):
    """Cuts long prompts instead of saying so."""

    async def sample(self, request: SampleRequest) -> Completion:
        room = self.spec.context_length - request.max_tokens
        return await super().sample(replace(request, ids=request.ids[-max(1, room) :]) if room > 0 else request)


class WrongKindOfOverflow(Rig):
    async def score(self, request: ScoreRequest) -> Scores:
        try:
            return await super().score(request)
        except ContextOverflow as error:
            raise UsageError(str(error)) from error


class RefusesTheLastToken(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        if len(request.ids) + request.max_tokens == self.spec.context_length:
            raise ContextOverflow(self.spec.name, self.spec.context_length + 1, self.spec.context_length)
        return await super().sample(request)


class ScoresNothing(Rig):
    async def score(self, request: ScoreRequest) -> Scores:
        return Scores(()) if not request.suffix else await super().score(request)


class TakesAnyId(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        known = tuple(index for index in request.ids if 0 <= index < self.spec.vocabulary)
        return await super().sample(replace(request, ids=known))


class ClampsSettings(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        top_p = request.sampling.top_p or 1.0
        return await super().sample(replace(request, sampling=replace(request.sampling, top_p=top_p)))


class ScoresAfterAll(ScriptedEngine):
    """Claims that it cannot score, and does."""

    @property
    def spec(self) -> EngineSpec:
        return replace(super().spec, capabilities=frozenset({"sample"}))


class MixesUpAnswers(Rig):
    """Under load, hands an answer to whoever asked last."""

    last: SampleRequest | None = None

    async def sample(self, request: SampleRequest) -> Completion:
        self.last = request
        await anyio.lowlevel.checkpoint()
        return await super().sample(self.last if self.stats().in_flight > 20 else request)


class CountsNothing(Rig):
    def stats(self) -> EngineStats:
        return EngineStats()


class ForgetsCounts(Rig):
    """Counters that start again."""

    asked = 0

    def stats(self) -> EngineStats:
        self.asked += 1
        return replace(super().stats(), prefilled_tokens=0 if self.asked > 1 else 5)


class CountsTwice(Rig):
    def stats(self) -> EngineStats:
        stats = super().stats()
        return replace(stats, scored_tokens=2 * stats.scored_tokens)


class ClosesOnce(Rig):
    closed = False

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True
        return await super().__aexit__(kind, error, trace)


class ServesWhenClosed(Rig):
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        return None


class SharesSettings(Rig):
    """Parks the settings of a request where all engines see them."""

    parked: ClassVar[list[Sampling]] = [Sampling()]

    async def sample(self, request: SampleRequest) -> Completion:
        self.parked[0] = request.sampling
        await anyio.lowlevel.checkpoint()
        return await super().sample(replace(request, sampling=self.parked[0]))


class ClosesForAll(Rig):
    """Closing one changes how the others draw."""

    closed: ClassVar[list[bool]] = [False]

    async def __aenter__(self) -> "ClosesForAll":
        await super().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None:
        self.closed[0] = True
        return await super().__aexit__(kind, error, trace)

    async def sample(self, request: SampleRequest) -> Completion:
        purpose = "after" if self.closed[0] else "before"
        return await super().sample(replace(request, seed=replace(request.seed, purpose=purpose)))


class LeaksSlots(Rig):
    """Does not give the slot of a cancelled request back."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = anyio.Semaphore(3)

    async def sample(self, request: SampleRequest) -> Completion:
        await self.gate.acquire()
        done = await super().sample(request)
        self.gate.release()
        return done


class StaysInFlight(Rig):
    def stats(self) -> EngineStats:
        stats = super().stats()
        return replace(stats, in_flight=stats.in_flight + stats.cancelled)


class FinishesAnyway(Rig):
    """Works on to the end when cancelled."""

    async def sample(self, request: SampleRequest) -> Completion:
        done: list[Completion] = []
        with anyio.CancelScope(shield=True):
            done.append(await super().sample(request))
        return done[0]


class SwallowsCancellation(Rig):
    """Answers with what it has when cancelled."""

    async def sample(self, request: SampleRequest) -> Completion:
        try:
            return await super().sample(request)
        except anyio.get_cancelled_exc_class():
            return Completion((9,), self.tokenizer.decode((9,)), "length", (-1.0,))


class ConfusedByCancellation(Rig):
    async def sample(self, request: SampleRequest) -> Completion:
        run = 1 if self.stats().cancelled else 0
        return await super().sample(replace(request, seed=replace(request.seed, purpose=f"{run}")))


SABOTEURS: list[tuple[str, Callable[[], Engine]]] = [
    ("spec", WrongDigest), ("spec", EndOutside), ("tokenizer", Tidy),
    ("ids", StripsText), ("ids", LosesFirstLogprob), ("ids", NotANumber),
    ("length", OneTooMany), ("length", OneTooFew),
    ("stop", StopsInsideTokensOnly), ("stop", DropsTheStop), ("stop", CallsItLength),
    ("stop_ids", IgnoresStopIds), ("stop_ids", DropsTheStop), ("end", GoesOnAfterTheEnd), ("end", HidesTheEnd),
    ("alignment", OffByOne), ("alignment", DropsAScore), ("alignment", ScoresAtATemperature),
    ("score_company", ScoresNotANumber),
    ("alignment", ForgetsThePrefix), ("alignment", LooksAhead), ("improbable", LooksAheadFromTheMiddle),
    ("improbable", LikesEverything), ("improbable", OffByOne),
    ("greedy", NeverGreedy), ("greedy", IgnoresTopK), ("greedy", IgnoresTopP), ("greedy", IgnoresMinP),
    ("seeds", OneStream), ("seeds", CompanyMatters), ("seeds", LogprobsDriftInCompany),
    ("seed_fields", IgnoresTurn), ("seed_fields", IgnoresAttempt),
    ("law", Sharpens), ("law", IgnoresTopK), ("law", IgnoresTemperature),
    ("hints", TrustsHints), ("hints", TrustsHintsWhenScoring), ("score_company", ScoresDependOnCompany),
    ("context", Truncates), ("context", WrongKindOfOverflow), ("context", RefusesTheLastToken),
    ("refusals", ScoresNothing), ("refusals", TakesAnyId), ("refusals", ClampsSettings),
    ("capabilities", ScoresAfterAll), ("order", MixesUpAnswers),
    ("stats", CountsNothing), ("stats", ForgetsCounts), ("stats", CountsTwice),
    ("closing", ClosesOnce), ("closing", ServesWhenClosed), ("isolation", SharesSettings), ("isolation", ClosesForAll),
    ("cancellation", LeaksSlots), ("cancellation", StaysInFlight), ("cancellation", FinishesAnyway),
    ("cancellation", SwallowsCancellation), ("cancellation", ConfusedByCancellation),
]  # fmt: skip


def only(check: str, options: CheckOptions = QUICK) -> CheckOptions:
    """Options that leave all other checks out."""
    return replace(options, skip=frozenset(set(CHECKS) - {check}))


@pytest.mark.parametrize(("check", "saboteur"), SABOTEURS)
def test_a_saboteur_is_caught_by_its_check(check: str, saboteur: Callable[[], Engine]) -> None:
    """Each planted bug breaks the promise it is about."""
    report = run_virtual(partial(check_engine, saboteur, options=only(check), broken="report"))
    assert [finding.check for finding in report.broken] == [check]


@pytest.mark.parametrize("check", CHECKS)
def test_every_check_has_a_saboteur_and_spares_the_sound(check: str) -> None:
    """No check is without proof that it can fail, and none fails the engine the saboteurs are made from."""
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
def test_sound_engines_pass(factory: Callable[[], Engine], backend: Literal["asyncio", "trio"]) -> None:
    """Either role, any queue, either tokenizer, one capability or both, on both back ends."""
    report = run_virtual(check_engine, factory, backend=backend)
    assert {finding.check for finding in report.findings} == set(CHECKS)


def test_an_engine_without_seeds_passes_where_seeds_are_not_promised() -> None:
    """Such an engine breaks several promises by default, and none when compared by greedy texts."""
    broken = run_virtual(partial(check_engine, OneStream, options=QUICK, broken="report")).broken
    assert {"seeds", "hints", "order"} <= {finding.check for finding in broken}
    report = run_virtual(partial(check_engine, OneStream, options=replace(QUICK, seeding="none")))
    skipped = {finding.check for finding in report.findings if finding.status == "skipped"}
    assert skipped == {"seeds", "seed_fields", "capabilities"}


@pytest.mark.anyio
async def test_an_open_engine_is_checked_and_stays_open() -> None:
    """In real time too; what would close it is skipped with a reason."""
    async with ScriptedEngine() as engine:
        report = await check_engine(engine)
        skipped = {finding.check: finding.why for finding in report.findings if finding.status == "skipped"}
        assert skipped.keys() == {"capabilities", "closing", "isolation"}
        assert "factory" in skipped["closing"]
        assert (await engine.sample(SampleRequest((3,), 2))).ids


def test_a_broken_engine_raises_with_a_list() -> None:
    """Every broken promise is named with what was seen; the kept ones are not."""
    with pytest.raises(CheckFailed, match=r"\n  broken  spec: .*another model.*\n  broken  ids: text") as caught:
        run_virtual(partial(check_engine, _TwoFlaws, options=QUICK))
    assert "kept" not in str(caught.value)


class _TwoFlaws(WrongDigest, StripsText):
    pass


def test_an_engine_that_fails_or_hangs_is_reported_not_raised() -> None:
    """Errors and hangs of an engine are findings of the check that met them."""
    failing = partial(check_engine, lambda: FaultyEngine(Rig(), Faults({"refused": 1.0})), broken="report")
    report = run_virtual(partial(failing, options=only("ids")))
    assert "EngineUnavailable" in report.broken[0].why
    hanging = partial(check_engine, lambda: FaultyEngine(Rig(), Faults({"hang": 1.0})), broken="report")
    report = run_virtual(partial(hanging, options=only("ids")))
    assert "did not finish within 30 s" in report.broken[0].why


def test_an_unknown_check_cannot_be_skipped() -> None:
    """A misspelt name is an error with a suggestion."""
    with pytest.raises(OptionError, match="did you mean 'seeds'"):
        run_virtual(partial(check_engine, ScriptedEngine, options=CheckOptions(skip=frozenset({"seed"}))))
