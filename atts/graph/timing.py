"""Where the time went: busy shares, the critical path, time lost to siblings, arithmetic intensity."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from atts.core import CallSpan

COMPUTE_BOUND = frozenset({"score"})
"""Stages that are one prefill: their time is arithmetic. Decoding moves every weight for every
token: memory.
"""


@dataclass(slots=True)
class StageTime:
    """Seconds summed over a stage's nodes."""

    nodes: int = 0
    wait: float = 0.0  # for siblings
    queue: float = 0.0  # for a slot
    compute: float = 0.0


@dataclass(frozen=True, slots=True)
class Path:
    """A chain of nodes, each of which waited for the one before."""

    seconds: float
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """A run's time, taken apart."""

    seconds: float  # from the first node asked for to the last one ended
    stages: Mapping[str, StageTime]
    busy_seconds: Mapping[str, float]  # per engine, summed over slots
    critical_path: Path  # no schedule and no number of slots ends sooner
    arithmetic_seconds: float  # Tc
    memory_seconds: float  # Tm
    sibling_seconds: float  # Ts

    @property
    def intensity(self) -> float:
        """r = Tc / (Tm + Ts): arithmetic done per second of moving weights or of waiting for
        siblings.
        """
        rest = self.memory_seconds + self.sibling_seconds
        if not rest:
            return math.inf if self.arithmetic_seconds else math.nan
        return self.arithmetic_seconds / rest


def measure(nodes: Iterable[CallSpan], *, compute_bound: Collection[str] = COMPUTE_BOUND) -> Timing:
    """Take a run's nodes apart, live ones or ones read from a journal, in any order.

    >>> draft = CallSpan(0, "draft", "draft", "p", 0, 0, ready=0.0, queued=0.0, started=0.0, ended=2.0)
    >>> score = CallSpan(1, "score", "target", "p", 0, 0, ready=2.0, queued=2.0, started=3.0, ended=4.0, after=(0,))
    >>> found = measure([score, draft])
    >>> found.seconds, found.critical_path.seconds, found.intensity, found.sibling_seconds
    (4.0, 3.0, 0.5, 0.0)
    """
    found = sorted(nodes, key=lambda node: node.node)
    stages: defaultdict[str, StageTime] = defaultdict(StageTime)
    busy: defaultdict[str, float] = defaultdict(float)
    for node in found:
        stage = stages[node.stage]
        compute = node.ended - node.started
        stage.nodes += 1
        stage.wait += node.queued - node.ready
        stage.queue += node.started - node.queued
        stage.compute += compute
        if node.engine:
            busy[node.engine] += compute
    arithmetic = math.fsum(time.compute for stage, time in stages.items() if stage in compute_bound)
    return Timing(
        seconds=max((n.ended for n in found), default=0.0)
        - min((n.ready for n in found), default=0.0),
        stages=MappingProxyType(dict(stages)),
        busy_seconds=MappingProxyType(dict(busy)),
        critical_path=_longest_chain(found),
        arithmetic_seconds=arithmetic,
        memory_seconds=math.fsum(time.compute for time in stages.values()) - arithmetic,
        sibling_seconds=math.fsum(time.wait for time in stages.values()),
    )


def _longest_chain(nodes: list[CallSpan]) -> Path:
    ends: dict[int, float] = {}
    before: dict[int, int] = {}
    for node in nodes:
        known = [other for other in node.after if other in ends]
        if known:
            before[node.node] = last = (
                known[0] if len(known) == 1 else max(known, key=ends.__getitem__)
            )
            ends[node.node] = node.ended - node.started + ends[last]
        else:
            ends[node.node] = node.ended - node.started
    if not ends:
        return Path(0.0, ())
    chain = [max(ends, key=ends.__getitem__)]
    while chain[-1] in before:
        chain.append(before[chain[-1]])
    return Path(ends[chain[0]], tuple(reversed(chain)))


def sibling_edges(nodes: Iterable[CallSpan]) -> set[tuple[int, int]]:
    """The edges between different rollouts of one problem; none in a run without barriers."""
    found = {node.node: node for node in nodes}
    pairs = (
        (found[other], node) for node in found.values() for other in node.after if other in found
    )
    return {
        (a.node, b.node) for a, b in pairs if a.sample != b.sample and min(a.sample, b.sample) >= 0
    }
