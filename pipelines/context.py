"""What a pipeline is given by whoever runs it: engines, a gate, answers, a seed, and an ear for what happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from atts.core import Chunk, Rollout, Turn
from atts.engine import Engine
from atts.pipelines.gates import Gate, RoundGate
from atts.pipelines.votes import Grouper


@dataclass(frozen=True, slots=True)
class Answers:
    """Plain functions: the final answer of a reasoning text (None: none yet), and classes of equal answers."""

    extract: Callable[[str], str | None]
    group: Grouper


class Listener(Protocol):
    """Hears facts as they happen; must not block."""

    def written(self, rollout: Rollout, chunk: Chunk) -> None:
        """A chunk was written after `rollout`; it may still be judged and discarded."""
        ...

    def turned(self, rollout: Rollout, turn: Turn) -> None:
        """A turn entered the rollout and will not change."""
        ...


class Silent:
    """Hears nothing."""

    def written(self, rollout: Rollout, chunk: Chunk) -> None:
        """Ignore it."""

    def turned(self, rollout: Rollout, turn: Turn) -> None:
        """Ignore it."""


@dataclass(frozen=True, slots=True)
class Context:
    """One run, as its pipelines see it. Engines and gate may log and remember; pipelines neither know nor care."""

    draft: Engine
    target: Engine
    gate: Gate | RoundGate
    answers: Answers
    seed: int = 0
    listener: Listener = Silent()
