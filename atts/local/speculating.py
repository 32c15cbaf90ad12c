"""Speculation in the step loop: how much is proposed, by whom, and how much of it stood."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from typing import Protocol

from atts.core import SampleRequest
from atts.local.batch import StepPlan
from atts.local.messages import SpeculationStats
from atts.local.scheduler import Scheduler
from atts.local.sequence import Sequence, TokenTable, going_on
from atts.speculation import (
    NOTHING,
    Ask,
    Forecast,
    GoodputControl,
    Proposer,
    StepShape,
    TokenProposal,
    standing,
)

_NONE = NOTHING, 0  # of a sequence for which nothing was asked
_BETWEEN = 8  # steps over which the time between two steps is averaged


class Lengths(Protocol):
    """Decides how many tokens are proposed for each decoding sequence in a step; it may see all but
    the tokens.
    """

    def rests(self, plan: StepPlan) -> bool:
        """Whether the step is as it would be without speculation: nothing is chosen, and nothing
        observed.
        """
        return False

    def choose(self, plan: StepPlan) -> Many[int]:
        """The most tokens to propose for each of `plan.decoding`; 0: none."""
        ...

    def observed(
        self, plan: StepPlan, rounds: Many[SpeculationRound], seconds: tuple[float, float]
    ) -> Forecast | None:
        """What came of the step: each round, and how long it took to propose and then to compute
        the step.

        The answer is what was expected of it, where anything was.
        """
        return None


@dataclass(frozen=True, slots=True)
class SpeculationRound:
    """One proposal and what came of it."""

    request_id: int
    proposed: int
    stood: int
    guessed: int  # tokens there were at first, those included after which there is nothing to write


@dataclass(frozen=True, slots=True)
class FixedLength(Lengths):
    """The same number of tokens for every sequence and step."""

    tokens: int

    def choose(self, plan: StepPlan) -> list[int]:
        """That many each."""
        return [self.tokens] * len(plan.decoding)


class GoodputLengths(Lengths):
    """Lengths by goodput."""

    def __init__(self, most: int) -> None:
        self._control = GoodputControl(most)
        self._shape = StepShape((), 0, 0.0)  # of the step that lengths were chosen for last

    def rests(self, plan: StepPlan) -> bool:
        """As long as nothing pays."""
        return self._control.rests(len(plan.decoding))

    def choose(self, plan: StepPlan) -> Many[int]:
        """As many as pay, by what is known of times and of what was accepted."""
        keys = [sequence.request_id for sequence in plan.decoding]
        others = sum([chunk.stop - chunk.start for chunk in plan.prefills])
        context = sum([sequence.num_computed for sequence in plan.decoding]) / len(plan.decoding)
        self._shape = StepShape(keys, others, context)
        return self._control.choose(self._shape)

    def observed(
        self, plan: StepPlan, rounds: Many[SpeculationRound], seconds: tuple[float, float]
    ) -> Forecast | None:
        """Learn survival and times."""
        outcomes = [(each.request_id, each.guessed, each.stood) for each in rounds]
        rows = plan.num_rows + sum([chunk.stop - chunk.start for chunk in plan.prefills])
        forecast = self._control.observed(self._shape, outcomes, rows, seconds)
        return forecast._replace(tokens=forecast.tokens - self._shape.others) if forecast else None


class Speculation:
    """Adds proposals to plans and says what of them stands; a proposal lives no longer than its
    step.
    """

    def __init__(
        self,
        proposer: Proposer,
        lengths: Lengths,
        scheduler: Scheduler,
        clock: Callable[[], float],
        *,
        vocabulary: int,
        table: TokenTable,
    ) -> None:
        """`clock` says what steps take, with nothing in it that others took of the processor where
        that can be.
        """
        self._proposer = proposer
        self._lengths = lengths
        self._scheduler = scheduler
        self._clock = clock
        self._vocabulary = vocabulary
        self._table = table
        self._most = 1 << 30  # tokens a proposal may have, less once memory ran out
        self._asked = dict[
            int, tuple[TokenProposal, int]
        ]()  # by sequence; with how many tokens there were at first
        self._rounds: list[SpeculationRound] = []
        self._began = self._proposing = 0.0
        # the last step; negative where it was not timed; the first one after a wait never is
        self._ended = -1.0
        self._between = 0.0  # seconds from the end of one step to this part of the next one
        self._is_timed = False  # this step
        self._known = set[int]()  # request ids that proposers were asked about
        self._stats = SpeculationStats()

    def propose(self, plan: StepPlan) -> None:
        """Add to the plan what may follow each decoding sequence's newest token, as far as there
        are slots for it.
        """
        self._is_timed = False
        if self._asked:
            self._rounds.clear()
            self._asked.clear()
        if self._stats.trouble or not plan.decoding:
            return
        self._stats.choices += len(plan.decoding)
        if self._lengths.rests(plan):
            self._ended = -1.0
            return
        if self._ended >= 0:
            between = self._clock() - self._ended
            usual = self._between or between
            # reports are sent now and then
            self._between = usual + (min(between, 2 * usual) - usual) / _BETWEEN
        self._forget_finished()
        self._is_timed = True
        self._proposing = 0.0
        lengths = self._lengths.choose(plan)
        # deciding takes long now and then, and is no part of what proposals take
        self._began = self._clock()
        if not any(lengths):
            return
        self._stats.chosen += sum(lengths)
        asks: list[Ask] = []
        for sequence, length in zip(plan.decoding, lengths, strict=True):
            room = self._scheduler.widen(sequence, min(length, self._most)) if length > 0 else 0
            if room > 0:
                asks.append(ask_of(sequence, room))
        if asks:
            self._ask(asks)
            plan.proposals.extend(
                [self._asked.get(each.request_id, _NONE)[0].tokens for each in plan.decoding]
            )
            if not any(plan.proposals):
                plan.proposals.clear()
        self._proposing = self._clock() - self._began
        self._stats.seconds += self._proposing

    def settle(self, sequence: Sequence, drawn: list[int]) -> int:
        """Return how many tokens of a sequence's proposal are accepted, where its rows drew these."""
        proposal, guessed = self._asked[sequence.request_id]
        stood = standing(proposal.tokens, drawn)
        self._proposer.settled(sequence.request_id, proposal, stood)
        self._rounds.append(
            SpeculationRound(sequence.request_id, len(proposal.tokens), stood, guessed)
        )
        return stood

    def observed(self, plan: StepPlan) -> None:
        """Tell who decides about lengths what came of the step, and how long it took."""
        for each in self._rounds:
            if each.proposed:
                self._stats.add(each.proposed, each.stood)
        if self._is_timed and not self._stats.trouble:
            proposing = self._proposing
            computing = self._clock() - self._began - proposing + self._between
            forecast = self._lengths.observed(plan, self._rounds, (proposing, computing))
            if forecast is not None:
                written = len(plan.decoding) + sum([each.stood for each in self._rounds])
                self._stats.compare(forecast, (written, proposing + computing), len(plan.decoding))
        self._ended = self._clock() if self._is_timed else -1.0

    def report(self) -> SpeculationStats:
        """A copy of the counters."""
        stats = self._stats
        overlap = self._proposer.overlap()
        own = replace(overlap) if overlap is not None else None
        return replace(stats, tested_at=[*stats.tested_at], stood_at=[*stats.stood_at], overlap=own)

    def give_way(self, plan: StepPlan, *, shorten: bool) -> None:
        """A step broke: it is tried again without proposals, untimed; where memory ran out, later
        ones are shorter.
        """
        self._is_timed = False
        if shorten:
            self._most = min(self._most, max(map(len, plan.proposals)) // 2)
        plan.proposals.clear()
        self._rounds.clear()

    def _ask(self, asks: list[Ask]) -> None:
        self._known.update(ask.key for ask in asks)
        try:
            found = list(zip(asks, self._proposer.propose(asks), strict=True))
            self._asked = {
                ask.key: (self._checked(ask, own), min(len(own.tokens), ask.room))
                for ask, own in found
            }
            cut = [
                (key, guessed)
                for key, (sound, guessed) in self._asked.items()
                if guessed and not sound.tokens
            ]
            # these cost time as well
            self._rounds += [SpeculationRound(key, 0, 0, guessed) for key, guessed in cut]
        except Exception as error:  # noqa: BLE001  a guess that fails is none; the text does not depend on it
            name = type(self._proposer).__name__
            self._stats.trouble = (
                f"speculation is off: {name} failed ({type(error).__name__}: {error})"
            )

    def _checked(self, ask: Ask, proposal: TokenProposal) -> TokenProposal:
        """The proposal up to the room there is, and to the first token after which there is nothing
        to write.
        """
        tokens = proposal.tokens[: ask.room]
        known = next(
            (at for at, token in enumerate(tokens) if not 0 <= token < self._vocabulary),
            len(tokens),
        )
        sound = going_on(self._scheduler.sequence(ask.key), tokens[:known], self._table)
        if sound == len(proposal.tokens):
            return proposal
        return replace(proposal, tokens=tuple(tokens[:sound]))

    def _forget_finished(self) -> None:
        gone = [key for key in self._known if not self._scheduler.is_unfinished(key)]
        for key in gone:
            self._known.discard(key)
            self._proposer.ended(key)


def ask_of(sequence: Sequence, room: int) -> Ask:
    """What a proposer is told of a decoding sequence."""
    request = sequence.request
    assert isinstance(request, SampleRequest), "only sampled sequences decode"
    assert sequence.uniforms is not None, "only sampled sequences decode"
    written = len(sequence.logprobs)
    return Ask(
        key=sequence.request_id,
        ids=sequence.ids,
        written=written,
        room=room,
        uniforms=sequence.uniforms[written : written + room],
        sampling=request.sampling,
        rollout=request.rollout,
        hint=request.draft,
    )
