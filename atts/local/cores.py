"""Count the step loops that share this machine's cores; `WorkerConfig.threads` divides them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

SMALL_MODEL = 10_000_000
"""Weights below which a second thread costs more in waiting than it computes."""
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}


def worker_environment() -> dict[str, str]:
    """Return the environment of a process that computes: its threads sleep while they wait.

    OpenMP's threads spin by default. As soon as two engines compute at once, the one that spins
    takes the core that the other one needs, and both are several times slower. What the user has
    set in the environment is kept.
    """
    return {**_PASSIVE, **os.environ}


class OpenLoops:
    """The step loops that compute with several threads, and share the cores for that."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._listeners: list[Callable[[int], None]] = []

    def register(self, listener: Callable[[int], None]) -> int:
        """Add a loop, report the new count to the others, and return it."""
        with self._lock:
            for other in self._listeners:
                other(len(self._listeners) + 1)
            self._listeners.append(listener)
            return len(self._listeners)

    def leave(self, listener: Callable[[int], None]) -> None:
        """Give the cores of a loop to the others; leaving twice is fine."""
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
                for other in self._listeners:
                    other(len(self._listeners))


OPEN_LOOPS = OpenLoops()
