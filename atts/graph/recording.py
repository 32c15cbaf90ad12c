"""Every event of a graph kept in memory, small enough for a million nodes."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any

from atts.graph.nodes import Node, NodeStatus, ProblemSpan, RolloutSpan

_ROW = Struct("<qiiiiiibddddqq")
_STATUS: tuple[NodeStatus, ...] = ("done", "failed", "cancelled")
_CODE = {status: code for code, status in enumerate(_STATUS)}
_NO_NODE = -1


class Recording:
    """A sink that keeps what it is given; reading it back gives equal values in the order they came.

    Nodes are packed into a hundred bytes each: kept as objects, a million of them slow every further step, because
    the garbage collector visits them again and again.
    """

    __slots__ = ("_codes", "_edges", "_names", "_problems", "_rollouts", "_rows", "others")

    def __init__(self) -> None:
        self.others: list[object] = []  # events that pipelines emit themselves
        self._rollouts: list[tuple[Any, ...]] = []  # plain tuples of plain values: the collector soon forgets them
        self._problems: list[tuple[Any, ...]] = []
        self._rows = bytearray()
        self._codes: dict[str, int] = {}
        self._names: list[str] = []
        self._edges: dict[int, tuple[int, ...]] = {}  # of nodes that waited for other than one node

    def __call__(self, event: object) -> None:
        """Keep an event."""
        if isinstance(event, Node):
            self._keep(event)
        elif isinstance(event, RolloutSpan):
            self._rollouts.append(tuple(event))
        elif isinstance(event, ProblemSpan):
            self._problems.append(tuple(event))
        else:
            self.others.append(event)

    def __len__(self) -> int:
        """How many nodes."""
        return len(self._rows) // _ROW.size

    @property
    def rollouts(self) -> list[RolloutSpan]:
        """The rollouts, in the order they ended."""
        return [RolloutSpan._make(fields) for fields in self._rollouts]

    @property
    def problems(self) -> list[ProblemSpan]:
        """The problems, in the order they ended."""
        return [ProblemSpan._make(fields) for fields in self._problems]

    def nodes(self) -> Iterator[Node]:
        """The nodes, in the order they ended."""
        names, edges = self._names, self._edges
        for row in _ROW.iter_unpack(self._rows):
            (
                node,
                stage,
                engine,
                problem,
                sample,
                turn,
                attempt,
                status,
                ready,
                queued,
                started,
                ended,
                first,
                tokens,
            ) = row
            after = edges[node] if first == _NO_NODE else (first,)
            who = (node, names[stage], names[engine], names[problem], sample, turn, attempt, _STATUS[status])
            yield Node(*who, ready, queued, started, ended, after, tokens)

    def _keep(self, event: Node) -> None:
        node, stage, engine, problem, sample, turn, attempt, status, ready, queued, started, ended, after, tokens = (
            event
        )
        if len(after) == 1:
            first = after[0]
        else:
            first = _NO_NODE
            self._edges[node] = after
        codes = self._codes
        try:
            who = (codes[stage], codes[engine], codes[problem])
        except KeyError:
            who = (self._code(stage), self._code(engine), self._code(problem))
        times = (ready, queued, started, ended)
        self._rows += _ROW.pack(node, *who, sample, turn, attempt, _CODE[status], *times, first, tokens)

    def _code(self, name: str) -> int:
        if name not in self._codes:
            self._codes[name] = len(self._names)
            self._names.append(name)
        return self._codes[name]
