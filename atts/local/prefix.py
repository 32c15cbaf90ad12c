"""Remembers which token sequences the cache holds: a radix tree, shared by all, forgotten oldest first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from torch import Tensor

from atts.core import TokenIds
from atts.local.batch import Slots


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens that follows its parent's, and the slots that hold it."""

    ids: TokenIds
    slots: Slots
    parent: Node | None
    end: int  # how many tokens a sequence that ends here has
    children: dict[int, Node] = field(default_factory=dict[int, "Node"])
    locks: int = 0  # sequences that read through this node
    used: int = 0  # when it was last of use


class Match(NamedTuple):
    """The longest known prefix of some ids: the node where it ends and the slots along the way."""

    node: Node
    slots: Slots

    @property
    def length(self) -> int:
        """How many tokens are known."""
        return len(self.slots)


_NO_SLOTS: Slots = np.zeros(0, dtype=np.int32)


class PrefixTree:
    """Token sequences by longest common prefix, exact to the token; nodes in use are locked and stay.

    A node's end may also keep the logits of its last position, so that who continues there computes nothing at first.
    """

    def __init__(self, max_logits: int) -> None:
        self._root = Node((), _NO_SLOTS, None, 0, locks=1)
        self._clock = 0
        self._held = self._locked = 0
        self._logits: OrderedDict[int, tuple[Node, Tensor]] = OrderedDict()
        self._max_logits = max_logits

    @property
    def held(self) -> int:
        """Slots the tree owns."""
        return self._held

    @property
    def evictable(self) -> int:
        """Slots of them that no sequence reads."""
        return self._held - self._locked

    def match(self, ids: TokenIds, limit: int) -> Match:
        """What is known of the first `limit` ids; splits a node where the match ends inside it."""
        return self._walk(self._root, ids, limit)

    def _walk(self, node: Node, ids: TokenIds, limit: int) -> Match:
        self._clock += 1
        at, runs = 0, list[Slots]()
        while at < limit:
            child = node.children.get(ids[at])
            if child is None:
                break
            shared = _common(child.ids, ids, at, limit)
            if shared < len(child.ids):
                child = self._split(child, shared)
            child.used = self._clock
            runs.append(child.slots)
            node, at = child, at + shared
        return Match(node, np.concatenate(runs) if len(runs) > 1 else runs[0] if runs else _NO_SLOTS)

    def insert(self, ids: TokenIds, slots: Slots, after: Node | None = None) -> Match:
        """Make `ids` known: the node where they end, and the slots of the part that was known before.

        They follow those of `after`, where it is given: then nothing before it is looked at again.
        The tree takes the other slots over; the caller reads the known part from the tree's slots and frees its own.
        """
        found = self._walk(after or self._root, ids, len(ids))
        known = found.length
        if known == len(ids):
            return found
        leaf = Node(ids[known:], slots[known:].copy(), found.node, found.node.end + len(ids) - known, used=self._clock)
        found.node.children[ids[known]] = leaf
        self._held += len(leaf.slots)
        return Match(leaf, found.slots)

    def lock(self, node: Node, after: Node | None = None) -> None:
        """Keep this node and all before it; who has `after` locked already may name it, and move that lock so."""
        step: Node | None = node
        while step is not after:
            assert step is not None, "the node to lock does not follow the one that is locked"
            if step.locks == 0:
                self._locked += len(step.slots)
            step.locks += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        step: Node | None = node
        while step is not None:
            step.locks -= 1
            assert step.locks >= 0, "unlocked more often than locked"
            if step.locks == 0:
                self._locked -= len(step.slots)
            step = step.parent

    def evict(self, count: int) -> list[Slots]:
        """Forget at least `count` unlocked slots if there are as many, those least recently used first."""
        freed: list[Slots] = []
        missing = count
        while missing > 0:
            leaves = sorted(self._loose_leaves(), key=lambda node: node.used)
            if not leaves:
                break
            for leaf in leaves:
                freed.append(self._forget(leaf))
                missing -= len(leaf.slots)
                if missing <= 0:
                    break
        return freed

    def keep_logits(self, node: Node, logits: Tensor) -> None:
        """Remember the logits after this node's last token; the oldest such memory goes when there are too many."""
        self._logits[id(node)] = (node, logits)
        self._logits.move_to_end(id(node))
        if len(self._logits) > self._max_logits:
            self._logits.popitem(last=False)

    def logits(self, node: Node) -> Tensor | None:
        """The logits after this node's last token, if they are still known."""
        kept = self._logits.get(id(node))
        return None if kept is None else kept[1]

    def _loose_leaves(self) -> list[Node]:
        leaves: list[Node] = []
        pending = [self._root]
        while pending:
            node = pending.pop()
            pending.extend(node.children.values())
            if not node.children and node.locks == 0:
                leaves.append(node)
        return leaves

    def _forget(self, leaf: Node) -> Slots:
        assert leaf.parent is not None, "the root is locked"
        del leaf.parent.children[leaf.ids[0]]
        self._logits.pop(id(leaf), None)
        self._held -= len(leaf.slots)
        return leaf.slots

    def _split(self, child: Node, at: int) -> Node:
        """Cut a node in two; the lower part stays the same object, so locks on it and its logits stay right."""
        assert child.parent is not None, "the root has no ids to cut"
        upper = Node(
            child.ids[:at],
            child.slots[:at].copy(),
            child.parent,
            child.end - len(child.ids) + at,
            locks=child.locks,
            used=child.used,
        )
        child.parent.children[child.ids[0]] = upper
        upper.children[child.ids[at]] = child
        child.ids, child.slots, child.parent = child.ids[at:], child.slots[at:].copy(), upper
        return upper


def _common(known: TokenIds, ids: TokenIds, start: int, limit: int) -> int:
    """How many of `known` equal `ids` from `start` on, up to `limit`; at least 1 is known to."""
    most = min(len(known), limit - start)
    if known[:most] == ids[start : start + most]:
        return most
    low, high = 1, most  # the first `low` are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if known[low:middle] == ids[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
