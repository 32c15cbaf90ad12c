"""Migration of journals of earlier schemas: their events are completed by the fields that later
ones added.
"""

from __future__ import annotations

from dataclasses import replace

from atts.core import Decision, Origin, Turn
from atts.journal.events import Decided, Event, Observed, TurnFinished

ORIGINS = 2
"""The schema since which a decision says what it rests on."""
TURN_FACTS = 4
"""The schema since which a turn says how many tokens were scored in it, and whether its words were
forced.
"""
_EQUAL_CHUNK = "scored as an equal chunk after an equal beginning was"
_FORCING = "budget forcing"


def completed(event: Event, schema: int) -> Event:
    """The event as the newest schema would have it.

    >>> completed(Observed(Decision("escalate", 0.2, "p", why="forced: not scored"), True), 1).decision.origin
    'forced'
    """
    if isinstance(event, TurnFinished):
        event = replace(event, turn=_with_facts(event.turn))
    return _with_origin(event) if schema < ORIGINS else event


def _with_facts(turn: Turn) -> Turn:
    """The turn with what its note tells of, or its chunks: the first that the draft wrote was
    scored.
    """
    if turn.note in (_EQUAL_CHUNK, _FORCING):
        return replace(turn, note="", is_forced=turn.note == _FORCING)
    drafted = turn.drafted
    return (
        turn
        if turn.score is None or drafted is None
        else replace(turn, scored_tokens=len(drafted.target_ids))
    )


def _with_origin(event: Event) -> Event:
    if isinstance(event, Decided | Observed):
        return replace(event, decision=_decision_with_origin(event.decision))
    if isinstance(event, TurnFinished) and event.turn.decision is not None:
        return replace(
            event, turn=replace(event.turn, decision=_decision_with_origin(event.turn.decision))
        )
    return event


def _decision_with_origin(decision: Decision) -> Decision:
    """The decision of an older journal, with the origin that its words tell of."""
    origin = _origin(decision.why)
    return decision if origin == decision.origin else replace(decision, origin=origin)


def _origin(why: str) -> Origin:
    if why.startswith("forced"):
        return "forced"
    if why.startswith("warm-up"):
        return "warm-up"
    if why.endswith("no target slot left"):
        return "budget"
    if why.endswith("certified policy"):
        return "certificate"
    return "evidence" if why.endswith("not scored") else "gate"
