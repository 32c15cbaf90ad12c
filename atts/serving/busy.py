"""The busy shares of engines, which are the parts of the last minute with a call in flight."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 60.0


class BusyShare:
    """The intervals of work by engine within the window; overlapping intervals are merged."""

    def __init__(self) -> None:
        self._work = dict[str, deque[tuple[float, float]]]()
        self._began: float | None = None

    def add(self, engine: str, started: float, ended: float) -> None:
        """Add one call; calls come in the order of their ends."""
        if self._began is None or started < self._began:
            self._began = started
        intervals = self._work.setdefault(engine, deque())
        while intervals and intervals[-1][1] >= started:
            before = intervals.pop()
            started = min(started, before[0])
            ended = max(ended, before[1])
        intervals.append((started, ended))
        while intervals[0][1] < ended - WINDOW_SECONDS:
            intervals.popleft()

    @property
    def num_intervals(self) -> int:
        """Return how many intervals are stored, over all engines."""
        return sum(map(len, self._work.values()))

    def shares(self, now: float) -> dict[str, float]:
        """Return the busy share of each engine that had a call.

        >>> busy = BusyShare()
        >>> busy.add("draft", 0.0, 10.0)
        >>> busy.add("draft", 5.0, 15.0)
        >>> busy.add("target", 18.0, 20.0)
        >>> busy.shares(20.0)
        {'draft': 0.75, 'target': 0.1}
        """
        if self._began is None:
            return {}
        since = max(self._began, now - WINDOW_SECONDS)
        length = now - since
        if length <= 0:
            return dict.fromkeys(self._work, 0.0)
        shares = dict[str, float]()
        for engine, intervals in self._work.items():
            worked = sum(max(0.0, min(end, now) - max(start, since)) for start, end in intervals)
            shares[engine] = worked / length
        return shares
