"""Sparse next-token distributions: a few likely tokens, and one small probability for each of the
others.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate

from atts.core import Sampling

_FILTERED_KEPT = 8192


class Distribution:
    """A few likely tokens, and one small probability for each of the others; all of it sums to one."""

    __slots__ = (
        "_bounds",
        "_floor_ids",
        "_logprobs",
        "_mass",
        "floor",
        "ids",
        "probabilities",
        "vocabulary",
    )

    def __init__(
        self,
        ids: tuple[int, ...],
        probabilities: tuple[float, ...],
        floor: float,
        floors: int,
        vocabulary: int,
    ) -> None:
        """`ids` by falling probability; `floor` is what each of the first `floors` other ids has."""
        self.ids = ids
        self.probabilities = probabilities
        self.floor = floor
        self.vocabulary = vocabulary
        self._bounds = list(accumulate(probabilities))
        self._mass = self._bounds[-1] + floors * floor
        self._logprobs = {index: math.log(p) for index, p in zip(ids, probabilities, strict=True)}
        self._floor_ids = floors

    @classmethod
    def of(cls, weights: Mapping[int, float], vocabulary: int, leak: float) -> Distribution:
        """Probabilities in proportion to `weights`, all but a share `leak` that the whole
        vocabulary divides evenly.
        """
        total = math.fsum(weights.values())
        floor = leak / vocabulary
        pairs = [
            (index, (1 - leak) * weight / total + floor)
            for index, weight in weights.items()
            if weight > 0
        ]
        pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        ids = tuple(index for index, _ in pairs)
        probabilities = tuple(p for _, p in pairs)
        return cls(ids, probabilities, floor, vocabulary - len(ids), vocabulary)

    def logprob(self, index: int) -> float:
        """The log-probability of a token; -inf for one that was filtered out."""
        found = self._logprobs.get(index)
        if found is not None:
            return found
        return math.log(self.floor) if self._floor_rank(index) < self._floor_ids else -math.inf

    def draw(self, uniform: float) -> int:
        """The token at a uniform in [0, 1): inverse distribution, likely tokens first."""
        target = uniform * self._mass
        rank = bisect_right(self._bounds, target)
        if rank < len(self.ids):
            return self.ids[rank]
        if not self._floor_ids:
            return self.ids[-1]  # the last bound may round to just below the mass
        return self._floor_id(
            min(self._floor_ids - 1, int((target - self._bounds[-1]) / self.floor))
        )

    def under(self, sampling: Sampling) -> Distribution:
        """This distribution under a temperature, then cut by top-k, top-p and min-p, and normalised
        again.
        """
        return self if sampling == Sampling() else _filtered(self, sampling)

    def filtered(self, sampling: Sampling) -> Distribution:
        """What `under` remembers."""
        if sampling.temperature == 0:
            return Distribution(self.ids[:1], (1.0,), 0.0, 0, self.vocabulary)
        power = 1 / sampling.temperature
        top = self.probabilities[0]  # scaled out, so that low temperatures do not underflow
        weights = [(p / top) ** power for p in self.probabilities]
        floor = (self.floor / top) ** power
        floors = self._floor_ids
        if sampling.top_k:
            weights, floors = (
                weights[: sampling.top_k],
                max(0, min(floors, sampling.top_k - len(weights))),
            )
        if sampling.top_p < 1:
            weights, floors = _nucleus(weights, floor, floors, sampling.top_p)
        # the largest weight is 1
        weights = [weight for weight in weights if weight >= sampling.min_p]
        if floor < sampling.min_p or floor == 0.0:
            floors = 0
        weights = [weight for weight in weights if weight > 0]
        total = math.fsum(weights) + floors * floor
        probabilities = tuple(weight / total for weight in weights)
        return Distribution(
            self.ids[: len(weights)], probabilities, floor / total, floors, self.vocabulary
        )

    def _floor_rank(self, index: int) -> int:
        return index - sum(1 for other in self._logprobs if other < index)

    def _floor_id(self, rank: int) -> int:
        for likely in sorted(self._logprobs):
            if likely > rank:
                break
            rank += 1
        return rank


_filtered = lru_cache(_FILTERED_KEPT)(Distribution.filtered)  # asked for at every token


def _nucleus(
    weights: list[float], floor: float, floors: int, top_p: float
) -> tuple[list[float], int]:
    """The fewest tokens, likeliest first, that together reach `top_p` of the mass."""
    wanted = top_p * (math.fsum(weights) + floors * floor)
    for count, reached in enumerate(accumulate(weights), start=1):
        if reached >= wanted:
            return weights[:count], 0
    missing = wanted - math.fsum(weights)
    return weights, min(floors, math.ceil(missing / floor)) if floor else 0
