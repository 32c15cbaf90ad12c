"""An order-statistics multiset: rank and k-th smallest of the stored scores, in blocks that stay short."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any

_LOAD = 4096  # scores per block after a split; an insertion moves at most twice as many
_TOP: Callable[[Any], float] = itemgetter(-1)


class Ranks:
    """Scores in order, eight bytes each, in blocks of bounded size, none of them empty.

    Adding, counting and selecting cost O(log n) comparisons, one bounded move and a sum of n / 4096 sizes. Infinities
    and ties are ordinary values; NaN must be refused before.

    >>> pool = Ranks([3.0, 1.0, 3.0])
    >>> pool.add(2.0)
    >>> pool.counts(3.0), pool.kth(2), len(pool)
    ((2, 2), 2.0, 4)
    """

    __slots__ = ("_blocks", "_size")

    def __init__(self, scores: Iterable[float] = ()) -> None:
        ordered = sorted(scores)
        self._size = len(ordered)
        self._blocks = [array("d", ordered[start : start + _LOAD]) for start in range(0, len(ordered), _LOAD)]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[float]:
        return chain.from_iterable(self._blocks)

    def add(self, score: float) -> None:
        """Store one score."""
        self._size += 1
        if not self._blocks:
            self._blocks.append(array("d"))
        at = bisect_right(self._blocks, score, hi=len(self._blocks) - 1, key=_TOP)
        block = self._blocks[at]
        insort(block, score)
        if len(block) > 2 * _LOAD:
            self._blocks[at : at + 1] = [block[:_LOAD], block[_LOAD:]]

    def remove(self, score: float) -> None:
        """Take one stored copy of `score` out.

        :raises KeyError: if there is none.
        """
        at = bisect_left(self._blocks, score, key=_TOP)
        block = self._blocks[at] if at < len(self._blocks) else []
        place = bisect_left(block, score)
        if not block or block[place] != score:
            raise KeyError(score)
        del block[place]
        self._size -= 1
        if not block:
            del self._blocks[at]

    def counts(self, score: float) -> tuple[int, int]:
        """How many stored scores are below `score`, and how many equal it."""
        blocks = self._blocks
        at = bisect_left(blocks, score, key=_TOP)
        if at == len(blocks):
            return self._size, 0
        left = bisect_left(blocks[at], score)
        below, equal = sum(map(len, blocks[:at])) + left, bisect_right(blocks[at], score, left) - left
        while blocks[at][-1] == score and at + 1 < len(blocks):  # a tie that may span blocks
            at += 1
            equal += bisect_right(blocks[at], score)
        return below, equal

    def kth(self, k: int) -> float:
        """The k-th smallest stored score, counted from 1.

        :raises IndexError: unless 1 <= k <= len.
        """
        at = k - 1
        for block in self._blocks:
            if 0 <= at < len(block):
                return block[at]
            at -= len(block)
        raise IndexError(k)
