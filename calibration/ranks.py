"""An order-statistics multiset: rank and k-th smallest of the stored scores in logarithmic time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import chain

_LOAD = 512  # scores per block after a split; an insertion moves at most twice as many pointers


class Ranks:
    """Scores in order, in blocks of bounded size under a Fenwick tree of their sizes.

    Adding, counting and selecting cost O(log n) comparisons plus one bounded move; the tree is rebuilt at a split,
    which is n / 512 work once per 512 additions. Infinities and ties are ordinary values; NaN must be refused before.

    >>> pool = Ranks([3.0, 1.0, 3.0])
    >>> pool.add(2.0)
    >>> pool.counts(3.0), pool.kth(2), len(pool)
    ((2, 2), 2.0, 4)
    """

    __slots__ = ("_blocks", "_size", "_tops", "_tree")

    def __init__(self, scores: Iterable[float] = ()) -> None:
        ordered = sorted(scores)
        self._size = len(ordered)
        self._blocks = [ordered[start : start + _LOAD] for start in range(0, len(ordered), _LOAD)]
        self._rebuild()

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[float]:
        return chain.from_iterable(self._blocks)

    def add(self, score: float) -> None:
        """Store one score."""
        self._size += 1
        if not self._blocks:
            self._blocks.append([score])
            self._rebuild()
            return
        at = bisect_right(self._tops, score)
        if at == len(self._tops):
            at -= 1
            self._blocks[at].append(score)
            self._tops[at] = score
        else:
            insort(self._blocks[at], score)
        if len(self._blocks[at]) > 2 * _LOAD:
            self._split(at)
        else:
            self._shift(at, 1)

    def remove(self, score: float) -> None:
        """Take one stored copy of `score` out.

        :raises KeyError: if there is none.
        """
        at = bisect_left(self._tops, score)
        place = bisect_left(self._blocks[at], score) if at < len(self._blocks) else 0
        if at == len(self._blocks) or self._blocks[at][place] != score:
            raise KeyError(score)
        block = self._blocks[at]
        del block[place]
        self._size -= 1
        if not block:
            del self._blocks[at]
            self._rebuild()
            return
        self._tops[at] = block[-1]
        self._shift(at, -1)

    def counts(self, score: float) -> tuple[int, int]:
        """How many stored scores are below `score`, and how many equal it."""
        tops = self._tops
        at = bisect_left(tops, score)
        if at == len(tops):
            return self._size, 0
        block = self._blocks[at]
        left = bisect_left(block, score)
        right = bisect_right(block, score, left)
        below = self._before(at) + left
        if right < len(block) or at + 1 == len(tops) or self._blocks[at + 1][0] != score:
            return below, right - left
        last = bisect_right(tops, score)  # a tie that spans blocks
        inside = bisect_right(self._blocks[last], score) if last < len(tops) else 0
        return below, self._before(last) + inside - below

    def kth(self, k: int) -> float:
        """The k-th smallest stored score, counted from 1.

        :raises IndexError: unless 1 <= k <= len.
        """
        if not 1 <= k <= self._size:
            raise IndexError(k)
        at, left, step = 0, k, 1 << (len(self._blocks).bit_length() - 1)
        while step:
            after = at + step
            if after <= len(self._blocks) and self._tree[after] < left:
                at, left = after, left - self._tree[after]
            step >>= 1
        return self._blocks[at][left - 1]

    def _before(self, at: int) -> int:
        """The number of scores in the blocks before `at`."""
        tree, total = self._tree, 0
        while at:
            total += tree[at]
            at &= at - 1
        return total

    def _shift(self, at: int, by: int) -> None:
        tree, at = self._tree, at + 1
        while at < len(tree):
            tree[at] += by
            at += at & -at

    def _split(self, at: int) -> None:
        block = self._blocks[at]
        self._blocks[at : at + 1] = [block[:_LOAD], block[_LOAD:]]
        self._rebuild()

    def _rebuild(self) -> None:
        self._tops = [block[-1] for block in self._blocks]
        self._tree = tree = [0, *map(len, self._blocks)]
        for at in range(1, len(tree)):
            parent = at + (at & -at)
            if parent < len(tree):
                tree[parent] += tree[at]
