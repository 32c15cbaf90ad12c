"""The choice of the drafting scheme that was measured to be fastest, in tokens per second."""

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

_TURN = 16  # number of steps of a trial, in which a scheme other than the best one is timed
# number of steps with the best scheme after which its speed is compared with the others again
_STRETCH = 64
# number of untimed steps at the start of a turn (a series of steps with one scheme). In them, the
# drafter first reads the tokens that were written without it.
_SETTLE = 4
# In the mean speed of a scheme, all earlier steps together weigh at most as much as this number of
# steps.
_KNOWN = 128
# A trial ends after only this number of steps if its scheme is less than half as fast as the best
# scheme.
_GLANCE = 8
# Trials of one scheme may lower the number of tokens that a run writes by at most this share.
_SHARE = 0.005
# The early exit only improves guesses. Its scheme is tried only if perfect guesses would make
# another scheme more than this number of times as fast as the best scheme.
_WORTH = 1.05
# The smallest number of steps between two trials doubles while the same scheme stays the best, up
# to this number.
_LONGEST = 1024


@dataclass(slots=True)
class _Turn:
    """Sums over one turn: a series of consecutive steps with the same scheme."""

    # number of all steps of the turn; the sums below leave out its first `_SETTLE` steps
    steps: int = 0
    sequences: int = 0
    # number of sequences that had a proposal, summed over the steps
    served: int = 0
    tokens: int = 0
    seconds: float = 0.0

    @property
    def promise(self) -> float:
        """Estimate the scheme's tokens per second if every sequence had a proposal in every step.

        The measured speed is lower, because a sequence without a proposal gets only one token in a
        step.
        """
        extra_tokens = (self.tokens - self.sequences) / self.served if self.served else float("inf")
        return self.sequences * (1 + extra_tokens) / max(1e-9, self.seconds)


@dataclass(slots=True)
class _Scheme:
    """Statistics of one drafting scheme, for steps with about the same number of sequences."""

    rate: float = 0.0  # mean speed with this scheme, in tokens per second
    # number of steps behind the mean `rate`, counted up to `_KNOWN`; 0 if the scheme was never
    # tried
    known: int = 0
    # Estimated tokens per second if every guess of an outcome had been correct. It is unused for
    # the first scheme, which guesses no outcomes.
    promise: float = 0.0
    seconds: float = 0.0  # duration of the scheme's last turn, in seconds
    # number of tokens that were written with other schemes since this scheme's last turn
    since: float = 0.0

    def learn(self, turn: _Turn) -> None:
        """Update the scheme's speed from a finished turn."""
        steps = turn.steps - _SETTLE
        rate = turn.tokens / max(1e-9, turn.seconds)
        self.rate = (self.rate * self.known + rate * steps) / (self.known + steps)
        self.known = min(self.known + steps, _KNOWN)
        self.promise = turn.promise
        self.seconds = turn.seconds * turn.steps / steps
        self.since = 0.0

    def wait(self, most: float) -> float:
        """Return the number of tokens to write before the scheme is tried again. If it is 0 or
        less, the scheme may be tried now.

        `most` is the speed of the best scheme, in tokens per second.
        """
        return (most - self.rate) * self.seconds / _SHARE - self.since


@dataclass(slots=True)
class _Load:
    """Scheme statistics for steps with a similar number of sequences, and the current turn."""

    schemes: list[_Scheme]
    current: int = 0
    best: int = -1  # index of the scheme that is used between trials; -1 until it is known
    turn: _Turn = field(default_factory=_Turn)
    stayed: int = 0  # number of steps since the last trial
    stay: int = _TURN  # smallest number of steps between two trials

    @property
    def is_try(self) -> bool:
        """Return whether this turn is a trial of a scheme that is not the best one."""
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
    """Chooses the drafting scheme of the next step from measured speeds.

    It keeps separate statistics for steps with about 1, 2, 4, 8, ... sequences.
    """

    def __init__(self, schemes: int, *, has_oracle: bool = False) -> None:
        """Create a control that chooses among this number of schemes.

        If `has_oracle` is true, the last scheme differs from the others only in its better guesses.
        It is tried only if one of the other overlapped schemes would be clearly faster than the
        best scheme if all its guesses were correct.
        """
        self._schemes = schemes
        self._has_oracle = has_oracle
        self._loads = dict[int, _Load]()
        # class of the number of sequences per step (1, 2 to 3, 4 to 7, ...) whose statistics are
        # updated now
        self._place = -1
        # number of consecutive steps, up to now, whose number of sequences was in another class
        self._away = 0
        self.current = 0

    def observed(self, sequences: tuple[int, int], tokens: int, seconds: float) -> None:
        """Update the statistics after a step.

        `sequences` has the number of sequences in the step, and the number of sequences that had a
        proposal.
        """
        load_class = sequences[0].bit_length()
        self._away = 0 if load_class == self._place else self._away + 1
        # Change the size class only after several steps in another class. Otherwise it could change
        # in every step when the number of sequences is near the border of two classes.
        has_moved = self._place < 0 or self._away >= _SETTLE
        self._place = load_class if has_moved else self._place
        load = self._loads.setdefault(self._place, _Load([_Scheme() for _ in range(self._schemes)]))
        # A step in which the size class changes is not timed, because its proposals were chosen for
        # another number of sequences.
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
        """Return whether the first scheme is used only for a trial, because another scheme is
        faster.
        """
        return self._place >= 0 and self.current == 0 < self._loads[self._place].best

    def _next(self, load: _Load) -> None:
        """Choose the next scheme.

        A scheme that was never tried comes first, then a scheme whose next trial is due, and then
        the best scheme.
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
        """Return the indices of the schemes that may be tried now."""
        most = max([scheme.rate for scheme in load.schemes])
        is_vain = (
            self._has_oracle
            and max([scheme.promise for scheme in load.schemes[1:-1]]) <= _WORTH * most
        )
        return range(self._schemes - is_vain)


GUESSING = {"pearl": Guessing(0), "ssd": Guessing(3), "mirror": Guessing(8, is_told=True)}
"""For each overlapped drafting scheme: the rule that selects which outcomes of a verification it
guesses.

`pearl` guesses only that all proposed tokens are accepted. `ssd` also guesses the draft model's
likeliest tokens at each position. `mirror` also guesses the tokens at each position that the
target's early exit finds likeliest.
"""


class AdaptiveDrafting(Proposer, Lengths):
    """Proposes tokens with the drafting scheme that gives the most tokens per second.

    The first scheme drafts before each step of the target with `serial`, and `lengths` chooses how
    many tokens to propose. The other schemes draft during the target's step with `ahead`. They are
    not tried before the first scheme's proposals save time.
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
        """Create a proposer that chooses between the drafters `serial` and `ahead`.

        `ahead` proposes at most `most` tokens. If `has_exit` is true, one of its schemes uses the
        target's early exit.
        """
        self._serial = serial
        self._ahead = ahead
        self._lengths = lengths
        self._fixed = FixedLength(most)
        self._guessing = [way for way in GUESSING.values() if has_exit or not way.is_told]
        self._control = SchemeControl(1 + len(self._guessing), has_oracle=has_exit)
        # `_scheme` is the index of this step's scheme. `_asked` is the index of the scheme that
        # made proposals last.
        self._scheme = self._asked = 0
        self._began = 0.0

    def rests(self, plan: StepPlan) -> bool:
        """Return whether nothing is proposed in this step. This is the case if the first scheme is
        in use and its proposals slow the run down.
        """
        self._scheme = self._control.current
        return self._scheme == 0 and not self._control.is_contested and self._lengths.rests(plan)

    def choose(self, plan: StepPlan) -> Many[int]:
        """Choose how many tokens to propose for each sequence.

        With the first scheme, the rule `lengths` chooses. All other schemes may propose up to the
        largest number of tokens, because they stop drafting when the target's step ends.
        """
        self._began = perf_counter()
        return (self._fixed if self._scheme else self._lengths).choose(plan)

    def observed(
        self, plan: StepPlan, rounds: Many[SpeculationRound], seconds: tuple[float, float]
    ) -> Forecast | None:
        """Update the statistics of proposal lengths and of schemes after a step.

        Schemes are compared by wall-clock time, because this process's CPU time does not include
        the drafter's process.
        """
        tokens = len(plan.decoding) + sum([each.accepted for each in rounds])
        forecast = None if self._scheme else self._lengths.observed(plan, rounds, seconds)
        pays = bool(plan.proposals) and not (forecast and forecast.is_trial)
        # While the first scheme is the best, two kinds of its steps say nothing about its usual
        # speed: steps without proposals, and steps that try another proposal length.
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
        """Return how many guesses were right or wrong, how many drafts were late, and how many
        branches were unused.
        """
        return self._ahead.overlap()

    def silence(self) -> str:
        """Return the reason why the current scheme proposed nothing."""
        return self._used.silence()
