"""Survival: how likely each place of a proposal is accepted, with all before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Outcome = tuple[int, int, int]  # sequence, tokens proposed, tokens that were accepted

_PRIOR = 0.7  # a place of which nothing is known yet
_POOL_DECAY = 0.99
_OWN_DECAY = 0.97  # a round; the accepted share changes within a text
_POOL_WEIGHT = 2.0
_OWN_WEIGHT = 8.0  # of what a place is shrunk to, in tests
_MOST_WAITING = 1024  # rounds


class Survival:
    """Count by position the rounds that tested it and those in which its token was accepted.

    A position behind a rejected token was never tested, so it counts neither way: accepted over proposed
    would be biased.
    """

    def __init__(self, most: int) -> None:
        self._places = np.arange(most)
        self._none = np.zeros((2, most))
        self._pool = self._none
        self._own: dict[int, NDArray[np.float64]] = {}
        # rounds that wait to be counted: together they cost hardly more than one
        self._new: list[Outcome] = []

    def add(self, rounds: Sequence[Outcome]) -> None:
        """Learn from one round each of some sequences."""
        self._new += rounds
        if len(self._new) > _MOST_WAITING:
            self._count()

    def acceptance(self, keys: Sequence[int]) -> NDArray[np.float64]:
        """Estimate how likely each place is accepted with all before it: [sequences, places]."""
        self._count()
        rates = list[float]()
        rate = _PRIOR
        for tested, accepted in self._pool.T.tolist():
            rate = (accepted + _POOL_WEIGHT * rate) / (tested + _POOL_WEIGHT)
            rates.append(rate)
        own = np.array([self._own.get(key, self._none) for key in keys])
        acceptance: NDArray[np.float64] = (own[:, 1] + _OWN_WEIGHT * np.array(rates)) / (
            own[:, 0] + _OWN_WEIGHT
        )
        return acceptance.cumprod(axis=1)

    def count(self, tested: Sequence[int], accepted: Sequence[int]) -> None:
        """Learn from counts by place that somebody else kept."""
        added = np.array([tested, accepted], dtype=np.float64)
        self._pool = self._pool + np.pad(added, ((0, 0), (0, len(self._places) - len(tested))))

    def keep(self, keys: Sequence[int]) -> None:
        """Forget the other sequences, once they are many; the pool has learnt from them."""
        if len(self._own) > 64 + 2 * len(keys):
            self._own = {key: self._own[key] for key in keys if key in self._own}

    def fade(self, most: float) -> None:
        """Let old observations of a place weigh no more than so many tests."""
        self._count()
        self._pool = self._pool * most / np.maximum(self._pool[0], most)
        self._own = {}

    def _count(self) -> None:
        if not self._new:
            return
        rounds = self._new
        self._new = []
        keys, proposed, accepted = np.array(rounds, dtype=np.int64).T
        reached = np.minimum(accepted + 1, proposed)
        seen = np.stack([self._places < count[:, None] for count in (reached, accepted)], 1).astype(
            np.float64
        )
        counts = dict[int, int]()
        later = [0] * len(rounds)  # rounds of the same sequence
        for at in range(len(rounds) - 1, -1, -1):
            later[at] = counts.get(rounds[at][0], 0)
            counts[rounds[at][0]] = later[at] + 1
        own = np.where(keys == np.array([*counts])[:, None], _OWN_DECAY ** np.array(later), 0.0)
        pool = _POOL_DECAY ** np.arange(len(rounds) - 1, -1, -1)
        added = (np.vstack([pool, own]) @ seen.reshape(len(rounds), -1)).reshape(
            -1, *self._none.shape
        )
        self._pool = self._pool * _POOL_DECAY ** len(rounds) + added[0]
        for new, (key, count) in zip(added[1:], counts.items(), strict=True):
            self._own[key] = self._own.get(key, self._none) * _OWN_DECAY**count + new
