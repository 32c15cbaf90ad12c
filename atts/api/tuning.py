"""Advise how many tokens a server should propose in its speculation at each load."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np

from atts.accel import StepCosts, Survival, condition
from atts.concurrency import collect
from atts.core import Message, SampleRequest, Sampling, TokenIds
from atts.errors import EngineError, OptionError
from atts.sampling import Seed
from atts.servers import DraftCounts, RemoteEngine

_QUESTION = "What is {} + {}? Reason step by step, and check the result in another way."
_SAMPLING = Sampling(0.7)
_REPEATS = 3
_MARGIN = 0.03  # smallest gain for which tokens are proposed
# All timed steps are of one kind, so that one cost curve fits all of them.
_STEPS = condition(is_mixed=False, context=256.0, sequences=1)


@dataclass(frozen=True, slots=True)
class LoadTiming:
    """The measurements of a server with `load` requests in flight."""

    load: int
    tokens: int  # number of tokens in the replies
    seconds: float
    drafted: DraftCounts | None  # None if the server proposes nothing, or does not count

    @property
    def goodput(self) -> float:
        """Return the tokens per second of all requests together."""
        return self.tokens / self.seconds

    @property
    def steps(self) -> int:
        """Return the number of steps of all requests; a step writes its accepted tokens and one
        more.
        """
        accepted = 0 if self.drafted is None else sum(self.drafted.accepted)
        return max(1, self.tokens - accepted)

    @property
    def length(self) -> float:
        """Return the tokens that the server proposed per step of a request."""
        return 0.0 if self.drafted is None else self.drafted.proposed / self.steps

    @property
    def step_seconds(self) -> float:
        """Return the time of one step, in which every request takes part."""
        return self.seconds * self.load / self.steps


@dataclass(frozen=True, slots=True)
class LoadAdvice:
    """The measurements at one load, and the number of tokens to propose there."""

    load: int
    step_ms: float
    measured: float  # tokens per second
    forecast: float  # tokens per second by the models of costs and acceptance
    length: int  # the length with the best prediction; 0: propose nothing
    best: float  # predicted tokens per second with the best length
    plain: float  # tokens per second without proposals


@dataclass(frozen=True, slots=True)
class TuneAdvice:
    """Advice on a server's speculation, with the numbers behind it."""

    method: str
    # acceptance at each position if all before it were accepted; empty if nothing was proposed
    acceptance: tuple[float, ...]
    loads: tuple[LoadAdvice, ...]
    fewest_rows: int = 1  # fewest rows of a timed step

    @property
    def config(self) -> str:
        """Return the value of vLLM's --speculative-config, or "none" if no proposal gains time."""
        ranges = self._ranges()
        if not ranges:
            return "none"
        value: dict[str, Any] = {"method": self.method}
        value["num_speculative_tokens"] = max(length for *_, length in ranges)
        if len({length for *_, length in ranges}) > 1:
            value["num_speculative_tokens_per_batch_size"] = ranges
        return json.dumps(value, separators=(",", ":"))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return warnings about a server that is started with these settings."""
        if not self.acceptance:
            return (
                "the server proposed nothing, so the acceptance is not known: start it with a "
                "--speculative-config, and tune again",
            )
        found = list[str]()
        if self.loads and self.fewest_rows > self.loads[0].load:
            found.append(
                f"no step with fewer than {self.fewest_rows} rows was timed, because the server "
                "proposes at every load; for fewer requests in flight the gain is an estimate. "
                "Time the server without speculation as well"
            )
        paying = [each.load for each in self.loads if each.length]
        if paying and not self.loads[-1].length:
            found.append(
                f"above {max(paying)} requests in flight proposals cost more than they gain. No "
                "range of 0 tokens is printed because of an open defect of vLLM (its issue "
                f"49548): keep --concurrency at {max(paying)} or below"
            )
        return tuple(found)

    def _ranges(self) -> list[tuple[int, int, int]]:
        """Return first load, last load and length of neighbouring loads of one length."""
        ranges = list[tuple[int, int, int]]()
        before = 0
        for each in self.loads:
            first = before + 1
            before = each.load
            if not each.length:
                continue
            if ranges and ranges[-1][2] == each.length and ranges[-1][1] == first - 1:
                first = ranges.pop()[0]
            ranges.append((first, each.load, each.length))
        return ranges

    def as_json(self) -> dict[str, Any]:
        """Return plain data for programs."""
        return {**asdict(self), "config": self.config, "warnings": list(self.warnings)}

    def __str__(self) -> str:
        """Return a row per load, then the acceptance, the setting and the warnings."""
        head = f"{'load':>6}{'step ms':>10}{'tokens/s':>11}{'forecast':>10}{'propose':>9}{'then':>9}{'plain':>9}"
        lines = [head]
        for each in self.loads:
            numbers = f"{each.load:>6}{each.step_ms:>10.2f}{each.measured:>11,.0f}"
            lines.append(
                f"{numbers}{each.forecast:>10,.0f}{each.length:>9}{each.best:>9,.0f}{each.plain:>9,.0f}"
            )
        if self.acceptance:
            shares = ", ".join(f"{share:.2f}" for share in self.acceptance)
            lines.append(
                f"share accepted by position, if all earlier tokens were accepted: {shares}"
            )
        lines.append(f"--speculative-config {self._quoted}")
        lines += [f"warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)

    @property
    def _quoted(self) -> str:
        return "none" if self.config == "none" else f"'{self.config}'"


async def tune(
    engine: RemoteEngine,
    loads: Sequence[int] = (1, 4, 16, 64),
    *,
    tokens: int = 64,
    most: int = 8,
    method: str = "ngram",
) -> TuneAdvice:
    """Time an open server at each load, and advise up to `most` proposed tokens of a `method`.

    :raises OptionError: loads that do not rise, or a number below 1.
    :raises EngineError: the server fails.
    """
    if not loads or min(loads) < 1 or any(one >= other for one, other in pairwise(loads)):
        raise OptionError("--load", f"{list(loads)} are not rising numbers of at least 1")
    for name, value in (("--tokens", tokens), ("--most", most)):
        if value < 1:
            raise OptionError(name, f"{value} is below 1")
    # the first request of a server includes compilation, so it is not timed
    await _timed(engine, 1, min(tokens, 16), 0)
    timings = list[LoadTiming]()
    for load in loads:
        for repeat in range(_REPEATS):
            timings.append(await _timed(engine, load, tokens, 1 + repeat))
    return advise(timings, most, method)


async def _timed(engine: RemoteEngine, load: int, tokens: int, repeat: int) -> LoadTiming:
    before = await engine.drafted()
    began = perf_counter()
    requests = [_request(engine, load, number, tokens, repeat) for number in range(load)]
    done = await collect([partial(engine.sample, request) for request in requests])
    seconds = perf_counter() - began
    after = await engine.drafted()
    counts = None if before is None or after is None else after.since(before)
    written = sum(len(completion.ids) for completion in done)
    if not written:
        raise EngineError(engine.spec.name, "it wrote nothing", "Tune another model")
    return LoadTiming(load, written, max(seconds, 1e-9), counts)


def _request(
    engine: RemoteEngine, load: int, number: int, tokens: int, repeat: int
) -> SampleRequest:
    text = _QUESTION.format(17 + number, 25 + load + 1000 * repeat)
    ids: TokenIds = engine.tokenizer.render([Message("user", text)])
    seed = Seed(run=load, sample=number, purpose="probe")
    return SampleRequest(ids, tokens, _SAMPLING, seed, logprobs="unneeded")


def advise(timings: Sequence[LoadTiming], most: int, method: str = "ngram") -> TuneAdvice:
    """Choose the length with the most tokens per second at each load.

    The cost of a step is assumed to depend only on its rows: one row for each request, and one for
    each proposed token.
    """
    costs = StepCosts(wanders=False)
    survival = Survival(most)
    has_proposed = False
    fewest = round(min(timing.load * (1 + timing.length) for timing in timings))
    for timing in timings:
        rows = round(timing.load * (1 + timing.length))
        costs.add(_STEPS, rows, timing.step_seconds)
        counts = timing.drafted
        if counts is not None and counts.rounds and counts.accepted:
            has_proposed = True
            accepted = counts.accepted[:most]
            survival.count([counts.rounds, *accepted][: len(accepted)], accepted)
    curve = costs.curve(_STEPS)
    assert curve is not None, "something was timed"
    shares = np.concatenate([[1.0], survival.acceptance([0])[0]])
    expected = shares.cumsum()  # expected tokens of a step, by the number of proposed tokens

    def goodput(load: int, length: float) -> float:
        tokens = float(np.interp(length, np.arange(most + 1), expected))
        return load * tokens / float(curve.at(np.array([load * (1 + length)]))[0])

    advice = list[LoadAdvice]()
    for load in sorted({timing.load for timing in timings}):
        own = [timing for timing in timings if timing.load == load]
        current = float(np.mean([timing.length for timing in own]))
        plain = goodput(load, 0)
        best = 0
        if has_proposed:
            # The shortest of the lengths with equally good predictions.
            best = max(range(most + 1), key=lambda length: (goodput(load, length), -length))
            if goodput(load, best) < (1 + _MARGIN) * plain:
                best = 0
        advice.append(
            LoadAdvice(
                load,
                step_ms=1e3 * float(np.median([timing.step_seconds for timing in own])),
                measured=float(np.median([timing.goodput for timing in own])),
                forecast=goodput(load, current),
                length=best,
                best=goodput(load, best),
                plain=plain,
            )
        )
    shown = tuple(float(share) for share in shares[1:]) if has_proposed else ()
    return TuneAdvice(method, shown, tuple(advice), fewest)
