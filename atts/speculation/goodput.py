"""Speculation lengths by goodput: proposal tokens go where they are likely to stand, while that makes a step pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, exp, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atts.speculation.costs import Condition, StepCosts, condition
from atts.speculation.survival import Outcome, Survival

_MARGIN = 0.015  # gain below which everything stays as it is
_DOUBT, _DOUBT_OF_ONE = 0.01, 0.001  # gain that proposals must promise beside none, at least and a sequence
_SURPRISE_WEIGHT = 1 / 8  # of one step
_FORGETTING = 0.97  # what is kept of surprises from one decision without proposals to the next
_PERIODS = 8, 64  # steps between two decisions: after one that changed something, at most
_LEARNING = 4  # steps between two tries of what was never measured
_HOPE = 0.75  # of the time that a length is thought to take, what it may turn out to take
_EXPLORING = 0.01  # share of time that later tries may lose
_RAREST_TRY = 400  # steps
_TRIED_WHEN_OFF = (1, 2, 1, 4)
_NEW = -1  # stands for a sequence of which nothing is known


class StepShape(NamedTuple):
    """What is known of a step before anything is proposed; `others` are tokens that it feeds beside."""

    keys: Sequence[int]  # sequences that tokens may be proposed for
    others: int  # prompts and scores that wait, and sequences whose lengths are fixed
    context: float  # mean tokens of a sequence

    @property
    def rows(self) -> int:
        """Tokens that it feeds in any case."""
        return len(self.keys) + self.others

    @property
    def condition(self) -> Condition:
        """Which curve of step times holds."""
        return condition(is_mixed=self.others > 0, context=self.context)


class Forecast(NamedTuple):
    """What was expected of a step."""

    tokens: float
    seconds: float


@dataclass(slots=True)
class _Verdict:
    """What was decided for the steps of one kind: those that feed other tokens beside, or the others."""

    steps: int = 0  # of this kind, so far
    until: int = 0  # the step of the next decision
    period: int = _PERIODS[0]
    count: int = 0  # sequences it was made for
    mean: float = 0.0  # tokens proposed a sequence
    rate: float = 0.0  # tokens a second, expected
    keys: Sequence[int] = ()
    lengths: list[int] = field(default_factory=list[int])
    wanted: int | None = None  # a length whose step time is not known and might be worth it
    tries: int = 0
    next_try: int = 0
    is_trying: bool = False  # in the step that was chosen last


class GoodputControl:
    """Chooses how many tokens are proposed for each sequence, 0 included, from measured times and survival.

    Tokens compete by the probability that they stand. Every total is compared, for the goodput need not be
    unimodal: where the step time has a cliff, stopping at the first fall would stay before it. A decision holds for
    several steps, for it takes as long as a good part of a small model's step; between two, a step costs look-ups.
    """

    def __init__(self, most: int, costs: StepCosts | None = None) -> None:
        """`costs` may know step times already."""
        self._most, self._survival = most, Survival(most)
        self._costs, self._proposing = costs or StepCosts(), StepCosts()
        self._verdicts = _Verdict(), _Verdict()
        self._standing: dict[int, list[float]] = {}  # expected tokens by length
        self._asked = set[int]()  # sequences that tokens were proposed for in the last step
        self._surprise: dict[tuple[bool, Condition], float] = {}  # log of seconds over those expected, with proposals

    def choose(self, step: StepShape) -> list[int]:
        """The most tokens to propose for each sequence."""
        verdict, count = self._verdicts[step.others > 0], len(step.keys)
        verdict.steps += 1
        if verdict.steps >= verdict.until or not 0.75 * count <= verdict.count <= 1.25 * count:
            self._decide(verdict, step)
        elif verdict.keys != step.keys:
            _hand_on(verdict, step.keys)
        verdict.is_trying = verdict.steps >= verdict.next_try
        return self._try(verdict, count) if verdict.is_trying else verdict.lengths

    def observed(
        self, step: StepShape, rounds: Sequence[Outcome], rows: int, seconds: tuple[float, float]
    ) -> Forecast | None:
        """Learn from a step that fed so many rows; what was expected of it, None where nothing could be."""
        forecast = self._forecast(step, rounds, rows)
        if rounds:
            self._learn(rounds, seconds[0])
        elif self._asked:
            self._asked = set()
        self._costs.add(step.condition, rows, seconds[1])
        verdict = self._verdicts[step.others > 0]
        if forecast is not None and not verdict.is_trying:
            self._compare((bool(rounds), _among(len(step.keys))), log(sum(seconds) / forecast.seconds))
        if verdict.is_trying and forecast is not None and verdict.wanted is None:
            lost = sum(seconds) * verdict.rate - forecast.tokens  # in tokens that would have been written meanwhile
            wait = min(_RAREST_TRY, ceil(lost / (_EXPLORING * step.rows * (1 + verdict.mean))))
            verdict.next_try = verdict.steps + max(_PERIODS[0], wait)
        return forecast

    def _learn(self, rounds: Sequence[Outcome], seconds: float) -> None:
        self._survival.add(rounds)
        asked = {key for key, _, _ in rounds}
        if 4 * len(asked & self._asked) >= 3 * len(asked):  # else a drafter began, and had to catch up with most
            self._proposing.add(_among(len(rounds)), sum([proposed for _, proposed, _ in rounds]), seconds)
        self._asked = asked

    def _compare(self, kind: tuple[bool, Condition], surprise: float) -> None:
        before = self._surprise.get(kind, 0.0)
        self._surprise[kind] = before + _SURPRISE_WEIGHT * (max(-1.0, min(1.0, surprise)) - before)

    def _doubt(self, sequences: int, is_proposing: bool) -> float:
        """By how much steps with proposals, drafters that catch up included, took longer than their parts promise."""
        among = _among(sequences)
        if not is_proposing and (True, among) in self._surprise:
            self._surprise[True, among] *= _FORGETTING
        surprise = self._surprise.get((True, among), 0.0) - self._surprise.get((False, among), 0.0)
        return (1 + max(_DOUBT, _DOUBT_OF_ONE * sequences)) * exp(max(0.0, surprise))

    def _decide(self, verdict: _Verdict, step: StepShape) -> None:
        count = len(step.keys)
        self._survival.keep(step.keys)
        standing = self._survival.standing([*step.keys, _NEW])
        self._standing = dict(zip([*step.keys, _NEW], standing.cumsum(axis=1).tolist(), strict=True))
        chances = standing[:-1].ravel()
        order = np.argsort(-chances, kind="stable")  # level by level, for no place is likelier than the one before
        tokens = step.rows + np.concatenate([[0.0], np.cumsum(chances[order])])
        before, chosen = round(verdict.mean * count), self._best_total(verdict, step, tokens)
        verdict.period = min(2 * verdict.period, _PERIODS[1]) if chosen == before else _PERIODS[0]
        verdict.until, verdict.count, verdict.mean = verdict.steps + verdict.period, count, chosen / count
        verdict.keys = step.keys
        verdict.lengths = np.bincount(order[:chosen] // self._most, minlength=count).tolist()

    def _best_total(self, verdict: _Verdict, step: StepShape, tokens: NDArray[np.float64]) -> int:
        """How many tokens to propose in all, where `tokens` are expected from a step with 0, 1, 2... of them."""
        curve, proposing = self._costs.curve(step.condition), self._proposing.curve(_among(len(step.keys)))
        if curve is None:
            verdict.wanted = 0
            return 0
        totals = np.arange(len(tokens), dtype=np.float64)
        seconds = curve.at(step.rows + totals)
        lower = np.maximum(curve.least(step.rows + totals), _HOPE * seconds)
        if proposing is None:  # it was never timed: it is tried, not chosen
            seconds[1:] = np.inf
        else:
            spent = proposing.at(totals[1:])
            seconds[1:] += spent
            lower[1:] += np.maximum(proposing.least(totals[1:]), _HOPE * spent)
        seconds[1:] *= self._doubt(len(step.keys), verdict.mean > 0)
        goodput = tokens / seconds
        best, current = int(goodput.argmax()), min(round(verdict.mean * len(step.keys)), len(tokens) - 1)
        if goodput[best] < (1 + _MARGIN) * goodput[current]:
            best = current
        verdict.rate = float(goodput[best])
        verdict.wanted = self._unknown(step, tokens > (1 + _MARGIN) * verdict.rate * lower)
        return best

    def _unknown(self, step: StepShape, may_pay: NDArray[np.bool_]) -> int | None:
        """The shortest length that was never measured and would pay if it took as little as it may."""
        count, among = len(step.keys), _among(len(step.keys))

        def is_measured(length: int) -> bool:
            return self._costs.is_measured(step.condition, step.rows + length * count) and (
                length == 0 or self._proposing.is_measured(among, length * count)
            )

        lengths = (k for k in range(self._most + 1) if (k == 0 or may_pay[k * count]) and not is_measured(k))
        return next(lengths, None)

    def _try(self, verdict: _Verdict, count: int) -> list[int]:
        """Other lengths for once: what was never measured, else what keeps survival and times up to date."""
        verdict.tries += 1
        if verdict.wanted is None:
            return self._varied(verdict, count)
        again = verdict.tries % 2 == 1  # for in the first step a drafter may have to catch up
        verdict.next_try = verdict.steps + (1 if again else _LEARNING)
        verdict.until = verdict.steps + (2 if again else 1)
        return [verdict.wanted] * count

    def _varied(self, verdict: _Verdict, count: int) -> list[int]:
        if any(verdict.lengths):
            more = [min(self._most, length + 1) for length in verdict.lengths]
            return [0] * count if verdict.tries % 2 else more
        length = min(self._most, _TRIED_WHEN_OFF[verdict.tries % len(_TRIED_WHEN_OFF)])
        few = count // 8 + 1
        return [length if (place + verdict.tries * few) % count < few else 0 for place in range(count)]

    def _forecast(self, step: StepShape, rounds: Sequence[Outcome], rows: int) -> Forecast | None:
        """Of a step that feeds so many rows, with proposals of these lengths."""
        curve, tokens = self._costs.curve(step.condition), float(step.rows)
        if curve is None:
            return None
        seconds = curve.one(rows)
        if rounds:
            proposing = self._proposing.curve(_among(len(rounds)))
            if proposing is None:
                return None
            seconds += proposing.one(sum([proposed for _, proposed, _ in rounds]))
            unknown = self._standing.get(_NEW, [])
            tokens += sum([self._standing.get(key, unknown)[proposed - 1] for key, proposed, _ in rounds])
        return Forecast(tokens, seconds)


def _among(sequences: int) -> Condition:
    """Under which one curve of proposing times holds: numbers of sequences are told apart by factors of two."""
    return False, sequences.bit_length()


def _hand_on(verdict: _Verdict, keys: Sequence[int]) -> None:
    """Sequences that are new get the lengths of those that are gone: the total stays what it was chosen to be."""
    lengths = dict(zip(verdict.keys, verdict.lengths, strict=True))
    kept = {key: lengths.pop(key) for key in keys if key in lengths}
    spare = sorted(lengths.values())
    verdict.keys = keys
    verdict.lengths = [kept[key] if key in kept else spare.pop() if spare else 0 for key in keys]
