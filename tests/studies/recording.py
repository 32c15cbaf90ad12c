"""A sink that keeps every event of a graph in memory, small enough for a million calls."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from struct import Struct
from typing import Any

from atts.core import CallSpan, CallStatus, ProblemSpan, RolloutSpan

_ROW = Struct("<qiiiiiddddqibqb")
_STATUS: tuple[CallStatus, ...] = ("done", "failed", "cancelled")
_CODE = {status: code for code, status in enumerate(_STATUS)}
_NO_NODE = -1
_rollout_fields = attrgetter(*RolloutSpan.__struct_fields__)
_problem_fields = attrgetter(*ProblemSpan.__struct_fields__)


class Recording:
    """A sink that keeps what it is given; reading it back gives equal values in the order they
    came.

    Calls are packed into a hundred bytes each: kept as objects, a million of them slow every
    further step, because the garbage collector visits them again and again.
    """

    __slots__ = ("_codes", "_edges", "_names", "_problems", "_rollouts", "_rows", "others")

    def __init__(self) -> None:
        self.others: list[object] = []  # events that pipelines emit themselves
        # plain tuples of plain values: the collector soon forgets them
        self._rollouts: list[tuple[Any, ...]] = []
        self._problems: list[tuple[Any, ...]] = []
        self._rows = bytearray()
        self._codes: dict[str, int] = {}
        self._names: list[str] = []
        self._edges: dict[int, tuple[int, ...]] = {}  # of calls that waited for other than one call

    def __call__(self, event: object) -> None:
        """Keep an event."""
        if isinstance(event, CallSpan):
            self._keep(event)
        elif isinstance(event, RolloutSpan):
            self._rollouts.append(_rollout_fields(event))
        elif isinstance(event, ProblemSpan):
            self._problems.append(_problem_fields(event))
        else:
            self.others.append(event)

    def __len__(self) -> int:
        """How many calls."""
        return len(self._rows) // _ROW.size

    @property
    def rollouts(self) -> list[RolloutSpan]:
        """The rollouts, in the order they ended."""
        return [RolloutSpan(*values) for values in self._rollouts]

    @property
    def problems(self) -> list[ProblemSpan]:
        """The problems, in the order they ended."""
        return [ProblemSpan(*values) for values in self._problems]

    def nodes(self) -> Iterator[CallSpan]:
        """The calls, in the order they ended."""
        names = self._names
        for row in _ROW.iter_unpack(self._rows):
            node, stage, engine, problem, sample, turn, *_ = row
            ready, queued, started, ended, first, attempt, status, tokens, live = row[6:]
            yield CallSpan(
                node=node,
                stage=names[stage],
                engine=names[engine],
                problem=names[problem],
                sample=sample,
                turn=turn,
                ready=ready,
                queued=queued,
                started=started,
                ended=ended,
                after=self._edges[node] if first == _NO_NODE else (first,),
                attempt=attempt,
                status=_STATUS[status],
                tokens=tokens,
                source="live" if live else "recalled",
            )

    def _keep(self, span: CallSpan) -> None:
        if len(span.after) == 1:
            first = span.after[0]
        else:
            first = _NO_NODE
            self._edges[span.node] = span.after
        codes = self._codes
        try:
            names = (codes[span.stage], codes[span.engine], codes[span.problem])
        except KeyError:
            names = (self._code(span.stage), self._code(span.engine), self._code(span.problem))
        who = (span.node, *names, span.sample, span.turn)
        times = (span.ready, span.queued, span.started, span.ended)
        done = (first, span.attempt, _CODE[span.status], span.tokens, span.source == "live")
        self._rows += _ROW.pack(*who, *times, *done)

    def _code(self, name: str) -> int:
        if name not in self._codes:
            self._codes[name] = len(self._names)
            self._names.append(name)
        return self._codes[name]
