"""The choice of a drafting scheme: the scheme with the most tokens per second, as measured, is
used.
"""

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

_TURN = 16  # number of steps of a trial
_STRETCH = 64  # number of steps after which the scheme in use is compared with the others again
# first steps of a turn, which do not count, because the drafter must first compute missed text
_SETTLE = 4
_KNOWN = 128  # most steps that a scheme's earlier rate weighs in its mean rate
_GLANCE = 8  # steps after which a trial ends if its rate is below half the best scheme's rate
_SHARE = 0.005  # most tokens that trials of one scheme may lose, as a share of all tokens
# the early exit's scheme is tried only if perfect guesses would give this many times the best rate
_WORTH = 1.05
_LONGEST = 1024  # the least number of steps between two trials doubles up to this number


@dataclass(slots=True)
class _Turn:
    """Totals of one turn: consecutive steps with the same scheme."""

    steps: int = 0  # all steps of the turn; the totals below leave out the first `_SETTLE` steps
    sequences: int = 0
    served: int = 0  # number of sequences that had a proposal, summed over steps
    tokens: int = 0
    seconds: float = 0.0

    @property
    def promise(self) -> float:
        """Return the tokens per second that the scheme would give if every sequence had a proposal.
        A sequence without a proposal wrote one token per step.
        """
        extra_tokens = (self.tokens - self.sequences) / self.served if self.served else float("inf")
        return self.sequences * (1 + extra_tokens) / max(1e-9, self.seconds)


@dataclass(slots=True)
class _Scheme:
    """Statistics of one drafting scheme, for steps with about the same number of sequences."""

    rate: float = 0.0  # measured tokens per second
    # number of steps that `rate` is a mean of, at most `_KNOWN`; 0: the scheme was never tried
    known: int = 0
    # tokens per second if every outcome had been guessed; not used for the first scheme, which
    # guesses no outcomes
    promise: float = 0.0
    seconds: float = 0.0  # seconds that the scheme's last turn took
    since: float = 0.0  # number of tokens that other schemes wrote after this scheme's last turn

    def learn(self, turn: _Turn) -> None:
        """Learn from the totals of a turn of this scheme."""
        steps = turn.steps - _SETTLE
        rate = turn.tokens / max(1e-9, turn.seconds)
        self.rate = (self.rate * self.known + rate * steps) / (self.known + steps)
        self.known = min(self.known + steps, _KNOWN)
        self.promise = turn.promise
        self.seconds = turn.seconds * turn.steps / steps
        self.since = 0.0

    def wait(self, most: float) -> float:
        """Return the number of tokens to write before the scheme is tried again; `most` is the best
        scheme's rate.
        """
        return (most - self.rate) * self.seconds / _SHARE - self.since


@dataclass(slots=True)
class _Load:
    """The statistics of all schemes for one class of loads (numbers of sequences per step), and the
    current turn.
    """

    schemes: list[_Scheme]
    current: int = 0
    best: int = -1  # the scheme in use between trials
    turn: _Turn = field(default_factory=_Turn)
    stayed: int = 0  # number of steps since the last trial
    stay: int = _TURN  # least number of steps between two trials

    @property
    def is_try(self) -> bool:
        """Return whether this turn is a trial: its scheme is not the best one."""
        return self.current != self.best

    @property
    def is_over(self) -> bool:
        """Return whether the current turn is over."""
        turn = self.turn
        most = max([each.rate for each in self.schemes])
        is_hopeless = (
            self.is_try and turn.steps == _GLANCE and 2 * turn.tokens < most * turn.seconds
        )
        return is_hopeless or turn.steps >= (_TURN if self.is_try else _STRETCH)


class SchemeControl:
    """Chooses the drafting scheme of the next step, with separate statistics for about 1, 2, 4,
    8... sequences per step.
    """

    def __init__(self, schemes: int, *, has_oracle: bool = False) -> None:
        """Create a control of this many schemes. With `has_oracle`, the last scheme is like the
        others but guesses outcomes better.

        This last scheme is then tried only if one of the other schemes would save time with perfect
        guesses.
        """
        self._schemes = schemes
        self._has_oracle = has_oracle
        self._loads = dict[int, _Load]()
        self._place = -1
        # `_place`: the class of loads that is measured; `_away`: number of consecutive steps in
        # another class
        self._away = 0
        self.current = 0

    def observed(self, sequences: tuple[int, int], tokens: int, seconds: float) -> None:
        """Learn from a step. `sequences` has its number of sequences, and the number of them that
        had a proposal.
        """
        load_class = sequences[0].bit_length()
        self._away = 0 if load_class == self._place else self._away + 1
        # the class changes only after several steps, so a load between two classes does not switch
        # back and forth
        has_moved = self._place < 0 or self._away >= _SETTLE
        self._place = load_class if has_moved else self._place
        load = self._loads.setdefault(self._place, _Load([_Scheme() for _ in range(self._schemes)]))
        # the proposals of this step were chosen for another load, so it does not count
        if has_moved:
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
        """Return whether the first scheme is in use only for a trial, because another scheme is the
        best.
        """
        return self._place >= 0 and self.current == 0 < self._loads[self._place].best

    def _next(self, load: _Load) -> None:
        """Choose the next scheme: one that was never tried, one whose next trial is due, or else
        the best one.
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
        """Return the indices of the schemes that may be tried."""
        most = max([scheme.rate for scheme in load.schemes])
        is_vain = (
            self._has_oracle
            and max([scheme.promise for scheme in load.schemes[1:-1]]) <= _WORTH * most
        )
        return range(self._schemes - is_vain)


GUESSING = {"pearl": Guessing(0), "ssd": Guessing(3), "mirror": Guessing(8, is_told=True)}
"""Schemes that guess outcomes. pearl: full acceptance only; ssd: the draft's likeliest tokens at
each position; mirror: the likeliest tokens of the target's early exit.
"""


class AdaptiveDrafting(Proposer, Lengths):
    """Proposes tokens with the drafting scheme that gives the most tokens per second.

    The first scheme drafts before each step with `serial`, and `lengths` chooses how many tokens
    (or none). The other schemes draft during a step with `ahead`. They are tried once the first
    scheme's proposals save time.
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
        `most` tokens. With `has_exit`, one of its schemes uses the target's early exit.
        """
        self._serial = serial
        self._ahead = ahead
        self._lengths = lengths
        self._fixed = FixedLength(most)
        self._guessing = [way for way in GUESSING.values() if has_exit or not way.is_told]
        self._control = SchemeControl(1 + len(self._guessing), has_oracle=has_exit)
        # `_scheme`: index of this step's scheme; `_asked`: scheme of the last step with requests
        # for proposals
        self._scheme = self._asked = 0
        self._began = 0.0

    def rests(self, plan: StepPlan) -> bool:
        """Return whether the first scheme is in use and rests, because proposals of any length lose
        time.
        """
        self._scheme = self._control.current
        return self._scheme == 0 and not self._control.is_contested and self._lengths.rests(plan)

    def choose(self, plan: StepPlan) -> Many[int]:
        """Choose proposal lengths. The first scheme's rule chooses them; the other schemes use the
        most tokens, because their drafting ends with the target's step.
        """
        self._began = perf_counter()
        return (self._fixed if self._scheme else self._lengths).choose(plan)

    def observed(
        self, plan: StepPlan, rounds: Many[SpeculationRound], seconds: tuple[float, float]
    ) -> Forecast | None:
        """Learn from a step. Schemes are compared by wall-clock seconds, because this process's CPU
        time excludes the drafter's process.
        """
        tokens = len(plan.decoding) + sum([each.accepted for each in rounds])
        forecast = None if self._scheme else self._lengths.observed(plan, rounds, seconds)
        pays = bool(plan.proposals) and not (forecast and forecast.is_trial)
        # a step without proposals in the first scheme does not count, unless the first scheme is on
        # trial
        if self._scheme or pays or self._control.is_contested:
            served = sum([each.proposed > 0 for each in rounds])
            self._control.observed(
                (len(plan.decoding), served), tokens, perf_counter() - self._began
            )
        return forecast

    def propose(self, asks: Many[Ask]) -> Many[TokenProposal]:
        """Propose tokens with the current scheme."""
        if self._scheme != self._asked:
            self._asked = self._scheme
            self._ahead.restart_drafting(self._guessing[max(0, self._scheme - 1)])
        return self._used.propose(asks)

    @property
    def _used(self) -> Proposer:
        return self._ahead if self._scheme else self._serial

    def verified(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Report to the drafter in use how many of its proposed tokens were accepted."""
        self._used.verified(key, proposal, accepted)

    def ended(self, key: int) -> None:
        """Report to both drafters that a sequence ended."""
        self._serial.ended(key)
        self._ahead.ended(key)

    def overlap(self) -> OverlapStats:
        """Return counts of correct and wrong guesses, late drafts and unused branches."""
        return self._ahead.overlap()

    def silence(self) -> str:
        """Return the reason why the current scheme proposed nothing."""
        return self._used.silence()
