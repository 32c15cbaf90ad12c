"""What the task graph tells: one value per finished node, rollout and problem, streamed as it happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

NodeStatus = Literal["done", "failed", "cancelled"]
RolloutStatus = Literal["done", "failed", "settled", "cancelled"]
ProblemStatus = Literal["done", "failed", "cancelled"]

RELEASE = "release"
"""The stage of the node that ends each rollout admitted together: it waited for all siblings' last nodes."""

# Named tuples, not dataclasses: a frozen dataclass of this width takes four times as long to make, and one is made
# for every engine call.


class Node(NamedTuple):
    """One engine call: who asked, what it waited for, and when (the loop's clock, in seconds).

    `ready <= queued <= started <= ended`. A node cancelled in the queue has `started == ended`.
    """

    id: int
    stage: str
    engine: str
    problem: str
    sample: int  # -1: asked by the problem itself, not by a rollout
    turn: int
    attempt: int
    status: NodeStatus
    ready: float  # its rollout was ready; before `queued` only where it then waited for siblings
    queued: float
    started: float  # a slot (and its tokens) were granted
    ended: float
    after: tuple[int, ...]  # the nodes it waited for
    tokens: int = 0

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

    def fields(self) -> dict[str, Any]:
        """The node as plain fields, under the names a journal uses: `id` is `node` there."""
        fields = self._asdict()
        return {"node": fields.pop("id"), **fields}

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Node:
        """The node that `fields` were made of; names it does not know are left alone.

        >>> node = Node(7, "draft", "draft", "p", 0, 1, 0, "done", 1.0, 1.0, 2.0, 3.0, (5,))
        >>> Node.read(node.fields()) == node
        True

        :raises KeyError: a field is missing.
        """
        values = [fields["node"], *(fields[name] for name in cls._fields[1:])]
        return cls._make(values)


class RolloutSpan(NamedTuple):
    """One rollout's life; `released` is after `ended` only where it kept its place for its siblings."""

    problem: str
    sample: int
    status: RolloutStatus
    attempts: int
    queued: float  # submitted
    started: float  # admitted
    ended: float
    released: float
    waited: float  # seconds spent waiting for siblings, in rounds and for release
    error: str = ""


class ProblemSpan(NamedTuple):
    """One problem's life."""

    problem: str
    number: int  # its place among the problems of the run
    status: ProblemStatus
    started: float
    ended: float
    error: str = ""


GraphEvent: TypeAlias = Node | RolloutSpan | ProblemSpan
