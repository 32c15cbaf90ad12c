"""The choice among drafting schemes by the measured tokens per second of each."""

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

_TURN = 16  # steps of a trial
_STRETCH = 64  # steps between two checks of the scheme in use
_SETTLE = 4  # first steps of a turn that do not count, because a drafter catches up in them
_KNOWN = 128  # limit of the weight, in steps, of a scheme's earlier rate
_GLANCE = 8  # steps after which a trial ends if its rate is half the other scheme's rate
_SHARE = 0.005  # share of the tokens that trials of one scheme may lose
_WORTH = 1.05  # least gain, with every outcome guessed, for which a scheme is tried
_LONGEST = 1024  # steps between two trials if trials lose almost nothing


@dataclass(slots=True)
class _Turn:
    """Counts of the steps of one turn."""

    steps: int = 0  # all steps, including the first ones, which count for nothing else
    sequences: int = 0
    served: int = 0  # number of sequences that had a proposal
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
    """Statistics of one scheme at loads of about the same number of sequences."""

    rate: float = 0.0  # measured tokens per second
    # steps behind that rate, without those long ago; 0: the scheme was never tried
    known: int = 0
    # tokens per second if every outcome had been guessed; 0 for the first scheme, which guesses
    # none
    promise: float = 0.0
    seconds: float = 0.0  # seconds of the scheme's last trial
    since: float = 0.0  # tokens that other schemes wrote after that trial

    def learn(self, turn: _Turn) -> None:
        """Learn from the counts of a turn of this scheme."""
        steps = turn.steps - _SETTLE
        rate = turn.tokens / max(1e-9, turn.seconds)
        self.rate = (self.rate * self.known + rate * steps) / (self.known + steps)
        self.known = min(self.known + steps, _KNOWN)
        self.promise = turn.promise
        self.seconds = turn.seconds * turn.steps / steps
        self.since = 0.0

    def wait(self, most: float) -> float:
        """Return the number of tokens to write before the scheme is tried again; `rate` is the rate
        without the trial.
        """
        return (most - self.rate) * self.seconds / _SHARE - self.since


@dataclass(slots=True)
class _Load:
    """The schemes, and the current turn."""

    schemes: list[_Scheme]
    current: int = 0
    best: int = -1  # the scheme in use between trials
    turn: _Turn = field(default_factory=_Turn)
    stayed: int = 0  # steps since the last trial
    stay: int = _TURN  # least number of steps between two trials

    @property
    def is_try(self) -> bool:
        """Return whether a scheme is measured that is not the best one."""
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
    """Chooses the scheme of the next step, with separate statistics for loads of about 1, 2, 4,
    8... sequences.
    """

    def __init__(self, schemes: int, *, has_oracle: bool = False) -> None:
        """Create a control of this many schemes. If `has_oracle` is set, the last scheme differs
        from the others only in guessing outcomes better.

        The last scheme is then tried only if the others would pay with every outcome guessed.
        """
        self._schemes = schemes
        self._has_oracle = has_oracle
        self._loads = dict[int, _Load]()
        self._place = -1
        # the load that is measured, and the number of consecutive steps at another load
        self._away = 0
        self.current = 0

    def observed(self, sequences: tuple[int, int], tokens: int, seconds: float) -> None:
        """Learn from a step: its tokens, its time, and how many of its sequences had a proposal."""
        load_class = sequences[0].bit_length()
        self._away = 0 if load_class == self._place else self._away + 1
        # a load that moves between two neighbouring classes counts as one load
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
        """Return whether the first scheme runs as a trial only, while another scheme is the best."""
        return self._place >= 0 and self.current == 0 < self._loads[self._place].best

    def _next(self, load: _Load) -> None:
        """Choose the next scheme: a scheme never tried, or else the best scheme. From time to time,
        choose another scheme for a trial.
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
"""Ways to guess: one guess; the draft's likeliest tokens at each position; the likeliest tokens of
the target's exit.
"""


class AdaptiveDrafting(Proposer, Lengths):
    """Proposes with the scheme that writes the most tokens per second.

    The first scheme is `serial`, with the `lengths` that pay, which may be 0. The other schemes are
    those of `ahead`, which are tried when the first one proposes tokens.
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
        # scheme of this step, and of the last step with proposals
        self._scheme = self._asked = 0
        self._began = 0.0

    def rests(self, plan: StepPlan) -> bool:
        """Return whether drafting before a step currently pays for no length."""
        self._scheme = self._control.current
        return self._scheme == 0 and not self._control.is_contested and self._lengths.rests(plan)

    def choose(self, plan: StepPlan) -> Many[int]:
        """Return the lengths of the first scheme; the other schemes draft until the target's step
        ends.
        """
        self._began = perf_counter()
        return (self._fixed if self._scheme else self._lengths).choose(plan)

    def observed(
        self, plan: StepPlan, rounds: Many[SpeculationRound], seconds: tuple[float, float]
    ) -> Forecast | None:
        """Compare schemes by wall-clock seconds, because a drafter's process does not add to this
        process's time.
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
        """Propose with the scheme whose turn it is."""
        if self._scheme != self._asked:
            self._asked = self._scheme
            self._ahead.restart_drafting(self._guessing[max(0, self._scheme - 1)])
        return self._used.propose(asks)

    @property
    def _used(self) -> Proposer:
        return self._ahead if self._scheme else self._serial

    def verified(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Report the outcome to the drafter that proposed."""
        self._used.verified(key, proposal, accepted)

    def ended(self, key: int) -> None:
        """Report the ended sequence to both drafters."""
        self._serial.ended(key)
        self._ahead.ended(key)

    def overlap(self) -> OverlapStats:
        """Return the statistics of guesses, if guessing was tried."""
        return self._ahead.overlap()

    def silence(self) -> str:
        """Return why the scheme in use proposed nothing."""
        return self._used.silence()
