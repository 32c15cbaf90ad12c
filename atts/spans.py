"""Timed spans of a run: engine calls, rollouts and problems, as the task graph measures and the
journal keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CallStatus = Literal["done", "failed", "cancelled"]
RolloutStatus = Literal["done", "failed", "settled", "cancelled"]
ProblemStatus = Literal["done", "failed", "cancelled"]

RELEASE = "release"
"""The stage of the span that ends each rollout admitted together: it waited for all siblings' last
calls.
"""
HOLD = "hold"
"""The stage of the span of a wait for what a sibling holds: it had asked about an equal chunk."""

# Not frozen: a frozen dataclass of this width takes five times as long to make, and one is made for
# every engine call.


@dataclass(slots=True)
class CallSpan:
    """One engine call, a node of the task graph: who called, what it waited for, and when (the
    loop's clock, seconds).

    `ready <= queued <= started <= ended`. A call cancelled in the queue has `started == ended`. A
    "recalled" call took its result from an earlier session: it did no work, and stands for the call
    that did. Spans are never changed.
    """

    node: int  # its number; higher than those of the calls it waited for
    stage: str
    engine: str
    problem: str
    sample: int  # -1: asked by the problem itself, not by a rollout
    turn: int
    ready: float  # its rollout was ready; before `queued` only where it then waited for siblings
    queued: float
    started: float  # a slot (and its tokens) were granted
    ended: float
    after: tuple[int, ...] = ()  # the calls it waited for
    attempt: int = 0
    status: CallStatus = "done"
    tokens: int = 0
    source: Literal["live", "recalled"] = "live"

    @property
    def wait(self) -> float:
        """Seconds spent waiting for siblings."""
        return self.queued - self.ready

    @property
    def queue(self) -> float:
        """Seconds spent waiting for a slot."""
        return self.started - self.queued

    @property
    def compute(self) -> float:
        """Seconds spent in the call."""
        return self.ended - self.started


@dataclass(slots=True)
class RolloutSpan:
    """One rollout's life; `released` is after `ended` only where it kept its place for its
    siblings.
    """

    problem: str
    sample: int
    status: RolloutStatus
    queued: float  # submitted
    started: float  # admitted
    ended: float
    released: float
    attempts: int = 1
    waited: float = 0.0  # seconds spent waiting for siblings, in rounds and for release
    error: str = ""


@dataclass(slots=True)
class ProblemSpan:
    """One problem's life."""

    problem: str
    number: int  # its place among the problems of the run
    status: ProblemStatus
    started: float
    ended: float
    error: str = ""
