"""Speculation lengths by goodput: proposal tokens go where they are likely to stand, while that makes a step pay."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atts.speculation.costs import Condition, Curve, StepCosts, condition
from atts.speculation.survival import Outcome, Survival

_MARGIN = 0.015  # gain below which everything stays as it is
_PERIOD = 8  # steps between two decisions, while as many sequences decode
_LEARNING = 4  # steps between two tries of what was never measured
_EXPLORING = 0.01  # share of time that later tries may lose
_TRIED_WHEN_OFF = (1, 2, 1, 4)


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


class GoodputControl:
    """Chooses how many tokens are proposed for each sequence, 0 included, from measured times and survival.

    Tokens compete by the probability that they stand. Every total is compared, for the goodput need not be
    unimodal: where the step time has a cliff, stopping at the first fall would stay before it.
    """

    def __init__(self, most: int) -> None:
        self._most, self._survival, self._costs = most, Survival(most), StepCosts()
        self._tick = self._tries = self._next_try = self._next_decision = 0
        self._decided_for = 0  # sequences
        self._mean = 0.0  # tokens a sequence, as last decided
        self._lengths: dict[int, int] = {}
        self._standing: dict[int, NDArray[np.float64]] = {}  # expected tokens by length
        self._asked = set[int]()  # sequences that tokens were proposed for in the last step
        self._goodput = 0.0
        self._wanted: int | None = None  # a length whose step time is not known and might be worth it

    def choose(self, step: StepShape) -> list[int]:
        """The most tokens to propose for each sequence."""
        self._tick += 1
        count = len(step.keys)
        if self._tick >= self._next_decision or not 0.75 * count <= self._decided_for <= 1.25 * count:
            self._decide(step)
        elif any(key not in self._lengths for key in step.keys):
            self._hand_on(step.keys)
        lengths = [self._lengths[key] for key in step.keys]
        return self._try(step, lengths) if self._tick >= self._next_try else lengths

    def observed(
        self, step: StepShape, rounds: Sequence[Outcome], rows: int, seconds: tuple[float, float]
    ) -> Forecast | None:
        """Learn from a step that fed so many rows; what was expected of it, None where nothing could be."""
        proposed = sum(count for _, count, _ in rounds)
        asked = {key: count for key, count, _ in rounds}
        forecast = self._forecast(step, [asked.get(key, 0) for key in step.keys], rows - step.rows)
        self._survival.add(rounds)
        if proposed and (asked.keys() <= self._asked or self._costs.per_token(len(rounds)) is None):
            self._costs.add_proposing(len(rounds), proposed, seconds[0])
        self._asked = set(asked)
        self._costs.add(step.condition, rows, seconds[1])
        return forecast

    def _decide(self, step: StepShape) -> None:
        count = len(step.keys)
        self._survival.keep(step.keys)
        self._next_decision, self._decided_for = self._tick + _PERIOD, count
        standing = self._survival.standing(step.keys)
        self._standing = dict(zip(step.keys, np.cumsum(standing, axis=1), strict=True))
        chances = standing.ravel()
        order = np.argsort(-chances, kind="stable")  # level by level, for no place is likelier than the one before
        tokens = step.rows + np.concatenate([[0.0], np.cumsum(chances[order])])
        chosen = self._best_total(step, tokens)
        self._mean = chosen / count
        lengths = np.bincount(order[:chosen] // self._most, minlength=count)
        self._lengths = dict(zip(step.keys, lengths.tolist(), strict=True))

    def _hand_on(self, keys: Sequence[int]) -> None:
        """Sequences that are new get the lengths of those that are gone: the total stays what it was chosen to be."""
        kept = {key: self._lengths.pop(key) for key in keys if key in self._lengths}
        spare = sorted(self._lengths.values())
        self._lengths = {key: kept[key] if key in kept else spare.pop() if spare else 0 for key in keys}

    def _best_total(self, step: StepShape, tokens: NDArray[np.float64]) -> int:
        """How many tokens to propose in all, where `tokens` are expected from a step with 0, 1, 2... of them."""
        curve, count = self._costs.curve(step.condition), len(step.keys)
        each = self._costs.per_token(count)
        if curve is None:
            self._wanted = 0
            return 0
        totals = np.arange(len(tokens), dtype=np.float64)
        seconds = curve.at(step.rows + totals)
        if each is None:  # proposing was never timed: it is tried, not chosen
            seconds[1:] = np.inf
        goodput = tokens / (seconds + (each or 0.0) * totals)
        best, current = int(goodput.argmax()), round(self._mean * count)
        if goodput[best] < (1 + _MARGIN) * goodput[current]:
            best = current
        self._goodput = float(goodput[best])
        lower = np.maximum(curve.least(step.rows + totals), curve.at(step.rows + totals) / 2) + (each or 0.0) * totals
        self._wanted = self._unknown(step, tokens > (1 + _MARGIN) * self._goodput * lower)
        return best

    def _unknown(self, step: StepShape, may_pay: NDArray[np.bool_]) -> int | None:
        """The shortest length that was never measured and would pay if it took as little as it may."""
        count, where = len(step.keys), step.condition
        if not self._costs.is_measured(where, step.rows):
            return 0
        lengths = range(1, self._most + 1)
        return next(
            (k for k in lengths if may_pay[k * count] and not self._costs.is_measured(where, step.rows + k * count)),
            None,
        )

    def _try(self, step: StepShape, lengths: list[int]) -> list[int]:
        """Other lengths for once: what was never measured, else what keeps survival and times up to date."""
        if self._wanted is not None:
            self._tries += 1
            again = self._tries % 2 == 1  # for in the first step a drafter may have to catch up
            self._next_try = self._tick + (1 if again else _LEARNING)
            self._next_decision = self._tick + (2 if again else 1)
            return [self._wanted] * len(lengths)
        tried = self._varied(lengths)
        curve = self._costs.curve(step.condition)
        now = self._expected(step, lengths, sum(lengths), curve)
        then = self._expected(step, tried, sum(tried), curve)
        if now is None or then is None:
            return lengths
        loss = then.seconds - then.tokens / now.tokens * now.seconds
        self._next_try = self._tick + max(_PERIOD, ceil(loss / (_EXPLORING * now.seconds)))
        return tried

    def _varied(self, lengths: list[int]) -> list[int]:
        self._tries += 1
        count = len(lengths)
        if any(lengths):
            return [0] * count if self._tries % 2 else [min(self._most, length + 1) for length in lengths]
        length = min(self._most, _TRIED_WHEN_OFF[self._tries % len(_TRIED_WHEN_OFF)])
        few = count // 8 + 1
        return [length if (place + self._tries * few) % count < few else 0 for place in range(count)]

    def _forecast(self, step: StepShape, lengths: list[int], more: int) -> Forecast | None:
        return self._expected(step, lengths, more, self._costs.curve(step.condition))

    def _expected(self, step: StepShape, lengths: list[int], more: int, curve: Curve | None) -> Forecast | None:
        """Of a step with proposals of these lengths, which feeds so many rows more than it must."""
        proposed = sum(lengths)
        each = self._costs.per_token(sum(length > 0 for length in lengths)) if proposed else 0.0
        if curve is None or each is None:
            return None
        stood = [
            float(self._standing[key][length - 1])
            for key, length in zip(step.keys, lengths, strict=True)
            if length and key in self._standing
        ]
        seconds = float(curve.at(np.array([float(step.rows + more)]))[0]) + each * proposed
        return Forecast(step.rows + sum(stood), seconds)
