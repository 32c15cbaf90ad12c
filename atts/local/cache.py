"""The slots of the key-value cache, and the radix tree of the token sequences in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from atts.core import Recent, TokenIds

SlotIds = NDArray[np.int32]
"""Indices of slots in the key-value cache, one per token, [tokens]. A store that uses several slots
per token has arrays of shape [tokens, columns].
"""


class SlotAllocator:
    """A stack of free slots in the KV cache. Slot 0 is never allocated: it stays zero, and padding
    rows read it.

    >>> allocator = SlotAllocator(4)
    >>> slots = allocator.allocate(3)
    >>> allocator.num_free, allocator.num_used
    (1, 3)
    >>> allocator.free([slots]); allocator.num_free
    4
    """

    def __init__(self, num_slots: int) -> None:
        # Slots are taken from the end of the array, so slot 1 is handed out first.
        self._stack: SlotIds = np.arange(num_slots, 0, -1, dtype=np.int32)
        self.num_slots = self.num_free = num_slots
        self._least_free = num_slots

    @property
    def num_used(self) -> int:
        """Return the number of allocated slots."""
        return self.num_slots - self.num_free

    @property
    def peak_used(self) -> int:
        """Return the largest number of slots that were allocated at the same time."""
        return self.num_slots - self._least_free

    def new_table(self, rows: int, width: int) -> SlotIds:
        """Return a slot table for `rows` sequences of up to `width` tokens, [rows, width], filled
        with 0.
        """
        return np.zeros((rows, width), dtype=np.int32)

    def allocate(self, count: int) -> SlotIds:
        """Allocate `count` slots. The caller must have checked that enough slots are free."""
        assert count <= self.num_free, (
            "the cache must have enough free slots before slots are allocated"
        )
        self.num_free -= count
        self._least_free = min(self._least_free, self.num_free)
        return self._stack[self.num_free : self.num_free + count][::-1].copy()

    def free(self, runs: Sequence[SlotIds]) -> None:
        """Mark slots as free; no sequence may read them any longer."""
        for run in runs:
            count = len(run)
            assert self.num_free + count <= self.num_slots, "a slot was freed twice"
            self._stack[self.num_free : self.num_free + count] = run[::-1]
            self.num_free += count


@dataclass(slots=True, eq=False)
class PrefixNode:
    """A node of the prefix tree: consecutive tokens, which follow those of the parent node, and
    their slots.
    """

    ids: TokenIds
    slots: SlotIds
    parent: PrefixNode | None
    depth: int  # number of tokens on the path from the root to the end of this node
    children: dict[int, PrefixNode] = field(default_factory=dict[int, "PrefixNode"])
    locks: int = 0  # number of running sequences that read this node's slots
    last_used: int = 0  # value of the tree's search counter when the node was last used
    is_idle: bool = False  # whether the node is in the tree's eviction queue `_idle`
    # log-probability of each token of this node, NaN where it is not known
    scores: NDArray[np.float32] | None = None


class PrefixMatch(NamedTuple):
    """The longest cached prefix of some token ids: the node where it ends, and the slots of its
    tokens.
    """

    node: PrefixNode
    slots: SlotIds

    @property
    def length(self) -> int:
        """Return the number of tokens in the cached prefix."""
        return len(self.slots)


_NO_SLOTS: SlotIds = np.zeros(0, dtype=np.int32)


class PrefixTree:
    """A radix tree of token sequences, which stores a common prefix only once. Nodes that running
    sequences read are locked, so that they are not evicted.

    A node may also store the logits after its last token. A sequence that continues from this node
    can then sample a token without a forward pass. A node may also store the log-probabilities of
    its tokens, at four bytes per token.
    """

    def __init__(self, max_logits: int) -> None:
        self.no_slots = _NO_SLOTS  # an empty array of slots: [0], or [0, columns]
        self._root = PrefixNode((), _NO_SLOTS, None, 0, locks=1)
        self._clock = 0
        self.num_cached = 0  # number of cache slots that the tree owns
        self._num_locked = 0  # number of the tree's slots that running sequences read
        # Leaves to evict, as a heap; the least recently used leaf comes first. Some entries are out
        # of date, so `evict` checks each entry.
        self._idle: list[tuple[int, int, PrefixNode]] = []
        self._logits: Recent[int, tuple[PrefixNode, Tensor]] = Recent(max_logits)

    def root(self, kind: int) -> PrefixNode:
        """Return the root of the tree for sequences with this `Sequence.kind`. Each kind has its
        own root, because sequences of different kinds never share slots.
        """
        if not kind:
            return self._root
        return self._root.children.setdefault(
            -kind, PrefixNode((-kind,), self.no_slots, self._root, 0, locks=1)
        )

    @property
    def num_evictable(self) -> int:
        """Return the number of the tree's slots that could be evicted, because no running sequence
        reads them.
        """
        return self.num_cached - self._num_locked

    def match(self, ids: TokenIds, limit: int, after: PrefixNode | None = None) -> PrefixMatch:
        """Find the longest cached prefix of the first `limit` ids, searching below node `after`, or
        below the root if `after` is None. If the prefix ends inside a node, this node is split.
        """
        self._clock += 1
        node = after or self._root
        at = 0
        runs = list[SlotIds]()
        while at < limit:
            child = node.children.get(ids[at])
            if child is None:
                break
            shared = _shared_length(child.ids, ids, at, limit)
            if shared < len(child.ids):
                child = self._split(child, shared)
            child.last_used = self._clock
            runs.append(child.slots)
            node = child
            at = at + shared
        if not runs:
            return PrefixMatch(node, self.no_slots)
        return PrefixMatch(node, runs[0] if len(runs) == 1 else np.concatenate(runs))

    def insert(self, ids: TokenIds, slots: SlotIds, after: PrefixNode | None = None) -> PrefixMatch:
        """Add ids to the tree, below node `after` if it is given. Return the node where the ids
        end, and the slots of those ids that the tree already had.

        The tree takes over the slots of the new ids. For the other ids, the caller must read the
        tree's slots and free its own slots.
        """
        match = self.match(ids, len(ids), after)
        known = match.length
        if known == len(ids):
            return match
        depth = match.node.depth + len(ids) - known
        leaf = PrefixNode(
            ids[known:], slots[known:].copy(), match.node, depth, last_used=self._clock
        )
        match.node.children[ids[known]] = leaf
        self.num_cached += len(leaf.slots)
        self._offer(leaf)
        return PrefixMatch(leaf, match.slots)

    def lock(self, node: PrefixNode, after: PrefixNode | None = None) -> None:
        """Lock a node and all its ancestors. If `after` is given, lock only the nodes below
        `after`, which the caller has already locked.
        """
        step: PrefixNode | None = node
        while step is not after:
            assert step is not None, (
                "the node to lock must be below the node that is already locked"
            )
            if step.locks == 0:
                self._num_locked += len(step.slots)
            step.locks += 1
            step = step.parent

    def unlock(self, node: PrefixNode) -> None:
        """Remove one lock from a node and from each of its ancestors."""
        step: PrefixNode | None = node
        while step is not None:
            step.locks -= 1
            assert step.locks >= 0, "a node was unlocked more often than it was locked"
            if step.locks == 0:
                self._num_locked -= len(step.slots)
                self._offer(step)
            step = step.parent

    def evict(self, count: int) -> list[SlotIds]:
        """Evict unlocked nodes, least recently used first, until `count` slots are freed or no
        unlocked node is left. Return the freed slots.
        """
        freed: list[SlotIds] = []
        while count > 0 and self._idle:
            used, _, node = heappop(self._idle)
            node.is_idle = False
            if used < node.last_used:
                self._offer(node)
            elif not node.children and not node.locks:
                freed.append(self._remove(node))
                count -= len(node.slots)
        return freed

    def _offer(self, node: PrefixNode) -> None:
        """Add a node to the eviction queue if it is an unlocked leaf."""
        if not (node.children or node.locks or node.is_idle):
            node.is_idle = True
            heappush(self._idle, (node.last_used, id(node), node))

    def keep_logits(self, node: PrefixNode, logits: Tensor) -> None:
        """Store the logits after this node's last token. If the tree has too many logits, drop the
        oldest.
        """
        self._logits[id(node)] = (node, logits)

    def logits(self, node: PrefixNode) -> Tensor | None:
        """Return the stored logits after this node's last token, or None if they are not stored."""
        kept = self._logits.get(id(node))
        return None if kept is None else kept[1]

    def keep_scores(self, node: PrefixNode, scores: Sequence[float]) -> None:
        """Store the log-probabilities of the last tokens on the path from the root to the end of
        this node.
        """
        left = np.array(scores, dtype=np.float32)
        step = node
        while len(left):
            assert step.parent is not None, "a sequence has more scores than tokens"
            if step.scores is None:
                step.scores = np.full(len(step.ids), np.nan, dtype=np.float32)
            own = min(len(left), len(step.ids))
            step.scores[len(step.ids) - own :] = left[len(left) - own :]
            left = left[: len(left) - own]
            step = step.parent

    def scores(self, node: PrefixNode, first: int) -> list[float]:
        """Return the stored log-probabilities of the tokens on the path from the root to the end of
        this node, beginning at index `first`. Stop before the first token whose log-probability is
        not known.
        """
        parts = list[NDArray[np.float32]]()
        step = node
        while step.depth > first and step.parent is not None:
            own = (
                step.scores
                if step.scores is not None
                else np.full(len(step.ids), np.nan, dtype=np.float32)
            )
            parts.append(own[max(0, first - step.depth + len(step.ids)) :])
            step = step.parent
        values = np.concatenate([*parts[::-1], [np.nan]])
        known: list[float] = values[: int(np.isnan(values).argmax())].tolist()
        return known

    def nodes(self) -> Iterator[PrefixNode]:
        """Yield all nodes of the tree, each before its children."""
        pending = [self._root]
        while pending:
            yield (node := pending.pop())
            pending.extend(node.children.values())

    def _remove(self, leaf: PrefixNode) -> SlotIds:
        assert leaf.parent is not None, "the root of the prefix tree cannot be removed"
        del leaf.parent.children[leaf.ids[0]]
        self._logits.pop(id(leaf), None)
        self.num_cached -= len(leaf.slots)
        self._offer(leaf.parent)
        return leaf.slots

    def _split(self, child: PrefixNode, at: int) -> PrefixNode:
        """Split a node into two, and return the new upper one. The lower part keeps the node
        object, so locks and logits of the node remain valid.
        """
        assert child.parent is not None, "the root of the prefix tree cannot be split"
        upper = PrefixNode(
            child.ids[:at],
            child.slots[:at].copy(),
            child.parent,
            child.depth - len(child.ids) + at,
            locks=child.locks,
            last_used=child.last_used,
        )
        child.parent.children[child.ids[0]] = upper
        upper.children[child.ids[at]] = child
        child.ids = child.ids[at:]
        child.slots = child.slots[at:].copy()
        child.parent = upper
        if child.scores is not None:
            upper.scores = child.scores[:at].copy()
            child.scores = child.scores[at:].copy()
        return upper


def _shared_length(known: TokenIds, ids: TokenIds, start: int, limit: int) -> int:
    """Return the length of the longest common prefix of `known` and `ids[start:limit]`. The caller
    has already checked that their first tokens are the same.
    """
    most = min(len(known), limit - start)
    if known[:most] == ids[start : start + most]:
        return most
    low = 1
    # Binary search: the first `low` tokens are equal, but the first `high` tokens are not.
    high = most
    while high - low > 1:
        middle = (low + high) // 2
        if known[low:middle] == ids[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
