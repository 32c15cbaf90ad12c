"""Advise how many tokens a server's speculation should propose at each load (number of requests in
flight).
"""

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
from atts.errors import EngineError, OptionError, counted
from atts.sampling import Seed
from atts.servers import DraftCounts, RemoteEngine

_QUESTION = "What is {} + {}? Reason step by step, and check the result in another way."
_SAMPLING = Sampling(0.7)
_REPEATS = 3
# Recommend speculation only if it raises the tokens per second by at least this fraction.
_MARGIN = 0.03
# The cost model fits a separate curve for each kind of step. All timed steps count as this one
# kind, so that one curve is fitted to all of them.
_STEPS = condition(is_mixed=False, context=256.0, sequences=1)


@dataclass(frozen=True, slots=True)
class LoadTiming:
    """The measurements of a server that had `load` requests in flight."""

    load: int
    tokens: int  # number of tokens in all replies together
    seconds: float
    # None if the server does not speculate, or does not report its counts
    drafted: DraftCounts | None

    @property
    def goodput(self) -> float:
        """Return the number of tokens per second, summed over all requests."""
        return self.tokens / self.seconds

    @property
    def steps(self) -> int:
        """Return the number of steps, summed over all requests. In each step, a request gets its
        accepted tokens and one more.
        """
        accepted = 0 if self.drafted is None else sum(self.drafted.accepted)
        return max(1, self.tokens - accepted)

    @property
    def length(self) -> float:
        """Return the mean number of tokens that the server proposed to a request in one step."""
        return 0.0 if self.drafted is None else self.drafted.proposed / self.steps

    @property
    def step_seconds(self) -> float:
        """Return the mean duration of a step in seconds; every step serves all requests."""
        return self.seconds * self.load / self.steps


@dataclass(frozen=True, slots=True)
class LoadAdvice:
    """The measurements at one load (number of requests in flight), and the number of tokens to
    propose at this load.
    """

    load: int
    step_ms: float
    measured: float  # measured tokens per second at the server's current settings
    # Predicted tokens per second at the same settings. The prediction uses the measured step costs
    # and acceptance rates.
    forecast: float
    # The number of proposed tokens that gives the highest predicted speed; 0 if speculation is not
    # faster.
    length: int
    best: float  # predicted tokens per second, if `length` tokens are proposed in each step
    plain: float  # predicted tokens per second without speculation


@dataclass(frozen=True, slots=True)
class TuneAdvice:
    """Advice on a server's speculation, with the measurements that support it."""

    method: str
    # For each position in a proposal: the acceptance rate of its token, if all earlier tokens were
    # accepted. Empty if the server does not speculate.
    acceptance: tuple[float, ...]
    loads: tuple[LoadAdvice, ...]
    fewest_rows: int = 1  # the fewest tokens, summed over all requests, that a timed step computed

    @property
    def config(self) -> str:
        """Return the value of vLLM's --speculative-config, or "none" if proposals save no time at
        any load.
        """
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
        """Return warnings about the measurements, and about using the advised settings."""
        if not self.acceptance:
            return (
                "the server proposed no tokens, so their acceptance rate is unknown; start the "
                "server with a --speculative-config, and tune again",
            )
        found = list[str]()
        if self.loads and self.fewest_rows > self.loads[0].load:
            found.append(
                "the server proposes tokens at every load, so each timed step computed at least "
                f"{self.fewest_rows} tokens. For smaller loads, the gain is therefore only an "
                "estimate; to measure it, also time the server without speculation"
            )
        paying = [each.load for each in self.loads if each.length]
        if paying and not self.loads[-1].length:
            found.append(
                f"with more than {counted(max(paying), 'request')} in flight, proposed tokens cost "
                "more time than they save. An open defect of vLLM (vLLM issue 49548) prevents the "
                "printed setting from turning proposals off at such loads; keep --concurrency at "
                f"{max(paying)} or below"
            )
        return tuple(found)

    def _ranges(self) -> list[tuple[int, int, int]]:
        """Return the ranges of loads in which speculation saves time. Each range has its first
        load, its last load, and the number of tokens to propose.
        """
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
        """Return the advice as JSON data."""
        return {**asdict(self), "config": self.config, "warnings": list(self.warnings)}

    def __str__(self) -> str:
        """Return a table with a row for each load, then the acceptance, the advised setting and the
        warnings.
        """
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
                "share of tokens accepted at each position, given that all earlier tokens were "
                f"accepted: {shares}"
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
    """Time a server with each number of requests in flight, and advise how many tokens to propose.

    The server must be open. `loads` has the numbers of requests. The advice is at most `most`
    tokens. `method` is vLLM's name of the speculation method.

    :raises OptionError: the loads are not in rising order, or a number is below 1.
    :raises EngineError: the server fails.
    """
    if not loads or min(loads) < 1 or any(one >= other for one, other in pairwise(loads)):
        raise OptionError(
            "--load",
            f"{list(loads)} is not a list of increasing whole numbers of at least 1",
        )
    for name, value in (("--tokens", tokens), ("--most", most)):
        if value < 1:
            raise OptionError(name, f"{value} is below 1")
    # The server may still compile code, so this first request is not timed.
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
    """Choose, for each load, the number of proposed tokens with the highest predicted speed in
    tokens per second. The number is 0 unless speculation is predicted to be at least 3 % faster
    than no speculation.

    The duration of a step is assumed to depend only on its number of rows: one row for each request
    and each proposed token.
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
    assert curve is not None, "at least one step must have been timed"
    shares = np.concatenate([[1.0], survival.acceptance([0])[0]])
    # index: number of proposed tokens; value: expected tokens that one step adds to one request
    expected = shares.cumsum()

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
            # If several numbers of proposed tokens have the same predicted speed, the smallest one
            # is chosen.
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
