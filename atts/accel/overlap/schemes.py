"""The choice among drafting schemes, by the tokens a second that each of them writes."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from time import perf_counter

from atts.accel.overlap.drafter import Guessing, OverlappedDrafter
from atts.accel.overlap.process import DrafterProcess
from atts.local.batch import StepPlan
from atts.local.seams import (
    Ask,
    FixedLength,
    Forecast,
    Lengths,
    OverlapStats,
    Proposer,
    SpeculationRound,
    TokenProposal,
)

_TURN = 16  # steps of a try
_STRETCH = 64  # steps of the one that is used, after which it is looked at again
_SETTLE = 4  # first steps of a turn, which do not count: a drafter catches up in them
_KNOWN = 128  # steps that what is known of a scheme counts for at most
_GLANCE = 8  # steps after which a try ends that writes half as fast as another
_SHARE = 0.005  # share of the tokens that tries of one scheme may lose
_WORTH = 1.05  # gain that an oracle must promise
_LONGEST = 1024  # steps between two tries, where they lose next to nothing


@dataclass(slots=True)
class _Turn:
    """Counts of the steps of one turn."""

    steps: int = 0  # all of them; those that settle count for nothing else
    sequences: int = 0
    served: int = 0  # sequences that had a proposal
    tokens: int = 0
    seconds: float = 0.0

    @property
    def promise(self) -> float:
        """Return the tokens per second that the scheme would give if every sequence had a proposal.
        Sequences without one wrote one token each.
        """
        extra_tokens = (self.tokens - self.sequences) / self.served if self.served else float("inf")
        return self.sequences * (1 + extra_tokens) / max(1e-9, self.seconds)


@dataclass(slots=True)
class _Scheme:
    """Statistics of one scheme while about as many sequences decode."""

    rate: float = 0.0  # tokens a second
    # steps that this was measured in, those long ago left out; 0: it was never tried
    known: int = 0
    # tokens a second, had every outcome been guessed; of the first scheme, which guesses none, 0
    promise: float = 0.0
    seconds: float = 0.0  # that its last try took
    since: float = 0.0  # tokens that others wrote after it

    def learn(self, turn: _Turn) -> None:
        """Learn what a turn of it came to."""
        steps = turn.steps - _SETTLE
        rate = turn.tokens / max(1e-9, turn.seconds)
        self.rate = (self.rate * self.known + rate * steps) / (self.known + steps)
        self.known = min(self.known + steps, _KNOWN)
        self.promise = turn.promise
        self.seconds = turn.seconds * turn.steps / steps
        self.since = 0.0

    def wait(self, most: float) -> float:
        """Return the number of tokens to write before it is tried again, at this many tokens a
        second without it.
        """
        return (most - self.rate) * self.seconds / _SHARE - self.since


@dataclass(slots=True)
class _Load:
    """The schemes, and the turn that is under way."""

    schemes: list[_Scheme]
    current: int = 0
    best: int = -1  # the one that is used between tries
    turn: _Turn = field(default_factory=_Turn)
    stayed: int = 0  # steps since the last try
    stay: int = _TURN  # that must be at least

    @property
    def is_try(self) -> bool:
        """Return whether a scheme other than the best one is measured."""
        return self.current != self.best

    @property
    def is_over(self) -> bool:
        """Return whether the scheme's turn is over."""
        turn = self.turn
        most = max([each.rate for each in self.schemes])
        is_hopeless = (
            self.is_try and turn.steps == _GLANCE and 2 * turn.tokens < most * turn.seconds
        )
        return is_hopeless or turn.steps >= (_TURN if self.is_try else _STRETCH)


class SchemeControl:
    """Says which of several schemes is used in the next step, for loads of about 1, 2, 4, 8...
    sequences apart.
    """

    def __init__(self, schemes: int, *, has_oracle: bool = False) -> None:
        """Create a control of so many schemes. If `has_oracle` is set, the last scheme differs from
        the others only in guessing outcomes better.

        It is tried only where the goodput of those would pay with every outcome guessed.
        """
        self._schemes = schemes
        self._has_oracle = has_oracle
        self._loads = dict[int, _Load]()
        self._place = -1
        self._away = 0  # the load that is measured; steps in a row that were of another
        self.current = 0

    def observed(self, sequences: tuple[int, int], tokens: int, seconds: float) -> None:
        """Learn what a step wrote in how much time, and how many of its sequences had a proposal."""
        load_class = sequences[0].bit_length()
        self._away = 0 if load_class == self._place else self._away + 1
        # a load that goes to and fro is one load
        has_moved = self._place < 0 or self._away >= _SETTLE
        self._place = load_class if has_moved else self._place
        load = self._loads.setdefault(self._place, _Load([_Scheme() for _ in range(self._schemes)]))
        if has_moved:  # the lengths of this step were chosen for another load
            self._away = 0
            load.turn = _Turn()
        else:
            turn = load.turn
            turn.steps += 1
            if turn.steps > _SETTLE:
                turn.tokens = turn.tokens + tokens
                turn.seconds = turn.seconds + seconds
                turn.sequences = turn.sequences + sequences[0]
                turn.served = turn.served + sequences[1]
            if load.is_over:
                self._next(load)
        self.current = load.current

    @property
    def is_contested(self) -> bool:
        """Return whether the first scheme is only tried, while another scheme is the best."""
        return self._place >= 0 and self.current == 0 < self._loads[self._place].best

    def _next(self, load: _Load) -> None:
        """Choose the next scheme: one never tried, else the best, and now and then another for a
        while.
        """
        turn = load.turn
        was_try = load.is_try
        load.turn = _Turn()
        for scheme in load.schemes:
            scheme.since += turn.tokens
        load.schemes[load.current].learn(turn)
        rates = [scheme.rate for scheme in load.schemes]
        best = rates.index(max(rates))
        fit = self._fit(load)
        load.stayed = 0 if was_try else load.stayed + turn.steps
        untried = [at for at in fit if not load.schemes[at].known]
        waits = {at: load.schemes[at].wait(max(rates)) for at in fit if at != best}
        if untried:
            load.current = untried[0]
        elif waits and load.stayed >= load.stay and min(waits.values()) <= 0:
            load.current = min(waits, key=lambda at: waits[at])
        else:
            load.stay = min(2 * load.stay, _LONGEST) if best == load.best else _TURN
            load.current = load.best = best

    def _fit(self, load: _Load) -> range:
        """Return the schemes that may be tried."""
        most = max([scheme.rate for scheme in load.schemes])
        is_vain = (
            self._has_oracle
            and max([scheme.promise for scheme in load.schemes[1:-1]]) <= _WORTH * most
        )
        return range(self._schemes - is_vain)


GUESSING = {"pearl": Guessing(0), "ssd": Guessing(3), "mirror": Guessing(8, is_told=True)}
"""One guess; the draft's first tokens at a place besides its own; those of the target's exit."""


class AdaptiveDrafting(Proposer, Lengths):
    """Proposes by one of several schemes, as long as it writes the most tokens a second.

    The first scheme is `serial` with the `lengths` that pay for it, none included; the others are
    those of `ahead`, tried where the first one proposes.
    """

    def __init__(
        self,
        serial: Proposer,
        ahead: OverlappedDrafter | DrafterProcess,
        lengths: Lengths,
        most: int,
        *,
        has_exit: bool,
    ) -> None:
        """Create a proposer that chooses between `serial` and `ahead`. `ahead` proposes up to
        `most` tokens, and uses the target's exit if `has_exit` is set.
        """
        self._serial = serial
        self._ahead = ahead
        self._lengths = lengths
        self._fixed = FixedLength(most)
        self._guessing = [way for way in GUESSING.values() if has_exit or not way.is_told]
        self._control = SchemeControl(1 + len(self._guessing), has_oracle=has_exit)
        # scheme of this step, and of the last step in which something was proposed
        self._scheme = self._asked = 0
        self._began = 0.0

    def rests(self, plan: StepPlan) -> bool:
        """Return whether nothing pays that is drafted before a step."""
        self._scheme = self._control.current
        return self._scheme == 0 and not self._control.is_contested and self._lengths.rests(plan)

    def choose(self, plan: StepPlan) -> Many[int]:
        """Return the first scheme's lengths; the others end with the target's step."""
        self._began = perf_counter()
        return (self._fixed if self._scheme else self._lengths).choose(plan)

    def observed(
        self, plan: StepPlan, rounds: Many[SpeculationRound], seconds: tuple[float, float]
    ) -> Forecast | None:
        """Compare schemes by seconds on the wall: what another process takes is not time of this
        one.
        """
        tokens = len(plan.decoding) + sum([each.accepted for each in rounds])
        forecast = None if self._scheme else self._lengths.observed(plan, rounds, seconds)
        pays = bool(plan.proposals) and not (forecast and forecast.is_trial)
        # if neither scheme pays, the other is not tried
        if self._scheme or pays or self._control.is_contested:
            served = sum([each.proposed > 0 for each in rounds])
            self._control.observed(
                (len(plan.decoding), served), tokens, perf_counter() - self._began
            )
        return forecast

    def propose(self, asks: Many[Ask]) -> Many[TokenProposal]:
        """Propose by the scheme whose turn it is."""
        if self._scheme != self._asked:
            self._asked = self._scheme
            self._ahead.begin_anew(self._guessing[max(0, self._scheme - 1)])
        return self._used.propose(asks)

    @property
    def _used(self) -> Proposer:
        return self._ahead if self._scheme else self._serial

    def settled(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Tell the drafter that proposed."""
        self._used.settled(key, proposal, accepted)

    def ended(self, key: int) -> None:
        """Tell both drafters."""
        self._serial.ended(key)
        self._ahead.ended(key)

    def overlap(self) -> OverlapStats:
        """Return the statistics of guesses, if guessing was tried."""
        return self._ahead.overlap()

    def silence(self) -> str:
        """Return why the scheme in use proposed nothing."""
        return self._used.silence()
