"""Events of journals that an earlier schema wrote, completed by what this one adds."""

from __future__ import annotations

from dataclasses import replace

from atts.core import Decision, Origin
from atts.journal.events import Decided, Event, Observed, TurnFinished

ORIGINS = 2
"""The schema since which a decision says what it rests on."""


def with_origin(event: Event) -> Event:
    """The event, its decision with the origin that its words tell of.

    >>> with_origin(Observed(Decision("escalate", 0.2, "p", why="forced: not scored"), True)).decision.origin
    'forced'
    """
    if isinstance(event, Decided | Observed):
        return replace(event, decision=decision_with_origin(event.decision))
    if isinstance(event, TurnFinished) and event.turn.decision is not None:
        return replace(event, turn=replace(event.turn, decision=decision_with_origin(event.turn.decision)))
    return event


def decision_with_origin(decision: Decision) -> Decision:
    """The decision of an older journal, with the origin that its words tell of."""
    origin = _origin(decision.why)
    return decision if origin == decision.origin else replace(decision, origin=origin)


def _origin(why: str) -> Origin:
    if why.startswith("forced"):
        return "forced"
    if why.startswith("warm-up"):
        return "warm-up"
    if why.startswith("exploration"):
        return "exploration"
    if why.endswith("no target slot left"):
        return "budget"
    if why.endswith("certified policy"):
        return "certificate"
    return "evidence" if why.endswith("not scored") else "gate"
