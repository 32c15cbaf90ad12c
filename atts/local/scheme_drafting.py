"""Drafting with a learnt choice of scheme: proposals before a step, or guesses continued beside it,
by one drafter.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from time import perf_counter

from atts.local.ahead import AheadDrafter
from atts.local.batch import StepPlan
from atts.local.drafter_process import DrafterProcess
from atts.local.speculating import FixedLength, Lengths, SpeculationRound
from atts.speculation import (
    Ask,
    Forecast,
    Guessing,
    OverlapStats,
    Proposer,
    SchemeControl,
    TokenProposal,
)

GUESSING = {"pearl": Guessing(0), "ssd": Guessing(3), "mirror": Guessing(8, is_told=True)}
"""One guess; the draft's first tokens at a place beside its own; those of the target's exit."""


class SchemeDrafting(Proposer, Lengths):
    """Proposes by one of several schemes, as long as it writes the most tokens a second.

    The first scheme is `serial` with the `lengths` that pay for it, none included; the others are
    those of `ahead`, tried where the first one proposes.
    """

    def __init__(
        self,
        serial: Proposer,
        ahead: AheadDrafter | DrafterProcess,
        lengths: Lengths,
        most: int,
        *,
        has_exit: bool,
    ) -> None:
        """`ahead` proposes up to `most` tokens, and can hear the target's exit where it has one."""
        self._serial = serial
        self._ahead = ahead
        self._lengths = lengths
        self._fixed = FixedLength(most)
        self._guessing = [way for way in GUESSING.values() if has_exit or not way.is_told]
        self._control = SchemeControl(1 + len(self._guessing), has_oracle=has_exit)
        # of this step, and of the last one in which something was proposed
        self._scheme = self._asked = 0
        self._began = 0.0

    def rests(self, plan: StepPlan) -> bool:
        """As long as nothing pays that is drafted before a step."""
        self._scheme = self._control.current
        return self._scheme == 0 and not self._control.is_contested and self._lengths.rests(plan)

    def choose(self, plan: StepPlan) -> Many[int]:
        """The first scheme's lengths; the others end with the target's step."""
        self._began = perf_counter()
        return (self._fixed if self._scheme else self._lengths).choose(plan)

    def observed(
        self, plan: StepPlan, rounds: Many[SpeculationRound], seconds: tuple[float, float]
    ) -> Forecast | None:
        """Between schemes seconds on the wall count: what another thread takes is no time of this
        one's.
        """
        tokens = len(plan.decoding) + sum([each.stood for each in rounds])
        forecast = None if self._scheme else self._lengths.observed(plan, rounds, seconds)
        pays = bool(plan.proposals) and not (forecast and forecast.is_trial)
        if self._scheme or pays or self._control.is_contested:  # where none pays, no other is tried
            served = sum([each.proposed > 0 for each in rounds])
            self._control.observed(
                (len(plan.decoding), served), tokens, perf_counter() - self._began
            )
        return forecast

    def propose(self, asks: Many[Ask]) -> Many[TokenProposal]:
        """By the scheme whose turn it is."""
        if self._scheme != self._asked:
            self._asked = self._scheme
            self._ahead.begin_anew(self._guessing[max(0, self._scheme - 1)])
        return self._used.propose(asks)

    @property
    def _used(self) -> Proposer:
        return self._ahead if self._scheme else self._serial

    def settled(self, key: int, proposal: TokenProposal, stood: int) -> None:
        """Told to whoever proposed."""
        self._used.settled(key, proposal, stood)

    def ended(self, key: int) -> None:
        """Told to all."""
        self._serial.ended(key)
        self._ahead.ended(key)

    def overlap(self) -> OverlapStats:
        """What was guessed, where that was tried."""
        return self._ahead.overlap()
