"""Placement of blocks on servers, and the choice of a server for a request, as pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Instance(NamedTuple):
    """A server that holds a block, as one request sees it; all in seconds."""

    wait: float  # for what is before it
    run: float
    owns: bool  # the request's keys and values of this block are there
    move: float  # to bring them there
    recompute: float  # to compute them there anew
    hop: float  # to bring the states there

    @property
    def cost(self) -> float:
        """When the request is through."""
        return (
            self.wait + self.run + (0.0 if self.owns else min(self.move, self.recompute)) + self.hop
        )


def dispatched(instances: Sequence[Instance]) -> int:
    """Choose the cheapest; where several are, one that owns the keys and values.

    >>> busy, idle = Instance(0.5, 0.1, True, 0, 0, 0), Instance(0.0, 0.1, False, 0.3, 0.9, 0.01)
    >>> dispatched([busy, idle]), dispatched([busy._replace(wait=0.3), idle])
    (1, 0)
    """
    return min(range(len(instances)), key=lambda at: (instances[at].cost, not instances[at].owns))


class Demand(NamedTuple):
    """What is asked of a block: its bytes, and the servers' time that it takes, in servers."""

    bytes: float
    load: float


def placed(
    blocks: Mapping[str, Demand], transitions: Mapping[tuple[str, str], int], rooms: Sequence[float]
) -> dict[str, list[int]]:
    """Place each block on as many servers as its load asks for, near its neighbours.

    The busiest block is placed first. Then a block goes where its neighbours by counted transitions
    are, while there is room and no other server is idler by half a server; at least one server
    holds it. Room that is left takes smaller neighbours, so that fewer requests hop.

    :raises ValueError: a block fits nowhere.
    """
    left = list(rooms)
    loads = [0.0] * len(rooms)
    found = dict[str, list[int]]()
    near = Counter[tuple[str, str]]()
    for (one, other), count in transitions.items():
        near[one, other] += count
        near[other, one] += count
    for name in sorted(blocks, key=lambda name: (-blocks[name].load, name)):
        demand = blocks[name]
        mine = list[int]()
        for _ in range(min(len(rooms), max(1, math.ceil(demand.load)))):
            fits = [at for at, room in enumerate(left) if room >= demand.bytes and at not in mine]
            if not fits:
                break
            beside = {
                at: sum(near[name, other] for other, at_ in found.items() if at in at_)
                for at in fits
            }
            calm = min(loads[at] for at in fits)
            close = [at for at in fits if loads[at] <= calm + 0.5]
            mine.append(max(close, key=lambda at: (beside[at], -loads[at], -at)))
            left[mine[-1]] -= demand.bytes
        if not mine:
            raise ValueError(f"{name} of {demand.bytes / 1e9:.1f} GB fits on no server")
        for at in mine:
            loads[at] += demand.load / len(mine)
        found[name] = mine
    for one, other in near:  # no hop where a neighbour fits in as well
        for at in found[one]:
            if (
                at not in found[other]
                and left[at] >= blocks[other].bytes
                and blocks[other].bytes < blocks[one].bytes
            ):
                found[other].append(at)
                left[at] -= blocks[other].bytes
    return found
