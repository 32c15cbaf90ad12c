"""Counters of speculation: what was proposed to an engine and accepted, and what was expected and
realised.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from itertools import zip_longest
from operator import add, sub
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Speculated:
    """Counters since an engine opened, or the difference of two such."""

    rounds: int = 0  # proposals verified: one sequence in one step
    proposed: int = 0
    accepted: int = 0
    tested_at: tuple[int, ...] = ()  # by place: rounds in which all tokens before it stood
    stood_at: tuple[int, ...] = ()  # of them, those in which the one at it did as well
    seconds: float = 0.0  # spent on proposing
    choices: int = 0  # of a length: sequences summed over steps
    chosen: int = 0  # summed lengths: divided by choices, the mean k
    expected_tokens: float = (
        0.0  # of steps of which something was expected; beside it what came of them
    )
    expected_seconds: float = 0.0
    came_tokens: int = 0
    came_seconds: float = 0.0
    saved_seconds: float = (
        0.0  # of these, beside what steps without proposals take for as many tokens
    )

    def __add__(self, other: Speculated) -> Speculated:
        return self._with(other, add)

    def __sub__(self, other: Speculated) -> Speculated:
        return self._with(other, sub)

    @property
    def by_place(self) -> tuple[float, ...]:
        """The share that stood at each place, of those that were tested there."""
        return tuple(
            stood / tested
            for stood, tested in zip(self.stood_at, self.tested_at, strict=True)
            if tested
        )

    def __str__(self) -> str:
        """In a line for people.

        >>> print(Speculated(100, 300, 240, (100, 90, 80), (90, 80, 70), choices=200, chosen=320))
        300 tokens, 80% stood (by place 0.90 0.89 0.88), 1.6 at a time
        """
        places = " ".join(f"{share:.2f}" for share in self.by_place[:8])
        saved = (
            f", {self.saved_seconds:.1f} s saved of {self.came_seconds + self.saved_seconds:.1f}"
        )
        return (
            f"{self.proposed:,} tokens, {self.accepted / max(1, self.proposed):.0%} stood (by "
            f"place {places}), "
            f"{self.chosen / max(1, self.choices):.1f} at a time{saved * bool(self.came_seconds)}"
        )

    def _with(self, other: Speculated, sign: Any) -> Speculated:
        def both(mine: Any, theirs: Any) -> Any:
            if isinstance(mine, tuple):
                return tuple(sign(a, b) for a, b in zip_longest(mine, theirs, fillvalue=0))
            return sign(mine, theirs)

        return Speculated(*map(both, astuple(self), astuple(other)))


@runtime_checkable
class Speculating(Protocol):
    """An engine that may count what was proposed to it."""

    def speculated(self) -> Speculated | None:
        """The counters so far; None where nothing is ever proposed."""
        ...


def speculated_by(engine: object) -> Speculated | None:
    """The counters of an engine of any kind."""
    return engine.speculated() if isinstance(engine, Speculating) else None


def speculated_since(before: Speculated | None, engine: object) -> Speculated | None:
    """What was proposed to an engine since its counters stood so; None where nothing was."""
    now = speculated_by(engine)
    more = now - (before or Speculated()) if now is not None else None
    return more if more is not None and more.proposed else None


def together(one: Speculated | None, other: Speculated | None) -> Speculated | None:
    """Both, as far as there are any."""
    return one + other if one and other else one or other


def counters_of(stats: Any) -> Speculated:
    """The same numbers out of counters that still grow."""
    values: dict[str, Any] = {
        field.name: getattr(stats, field.name) for field in fields(Speculated)
    }
    values["tested_at"] = tuple(values["tested_at"])
    values["stood_at"] = tuple(values["stood_at"])
    return Speculated(**values)
