"""Proposals in speculative decoding: request them from the proposer, check them, and report how
many tokens were accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from time import perf_counter

from atts.core import SampleRequest
from atts.local.batch import Sequence, StepPlan, TokenTable, going_on
from atts.local.scheduler import Scheduler
from atts.local.seams import (
    NOTHING,
    Ask,
    Lengths,
    NoLengths,
    NoProposer,
    Proposer,
    SpeculationRound,
    SpeculationStats,
    TokenProposal,
)

_NONE = NOTHING, 0  # empty proposal of a sequence for which no tokens were requested
# The time between steps is averaged over about this many steps; older steps count less.
_BETWEEN = 8


def accepted_length(proposal: Many[int], drawn: Many[int]) -> int:
    """Return how many proposed tokens are accepted. `drawn[i]` is the token that the target sampled
    after the first `i` proposed tokens.

    The tokens to append are `drawn[: accepted_length + 1]`: the accepted tokens, and the token that
    the target sampled after them.

    >>> accepted_length((5, 6, 7), (5, 6, 9, 1)), accepted_length((5, 6), (5, 6, 7)), accepted_length((), (3,))
    (2, 2, 0)
    """
    for place, token in enumerate(proposal):
        if drawn[place] != token:
            return place
    return len(proposal)


class Proposals:
    """The proposals for the current step, and counters of proposed and accepted tokens."""

    def __init__(
        self,
        scheduler: Scheduler,
        proposer: Proposer | None = None,
        lengths: Lengths | None = None,
        *,
        vocabulary: int = 0,
        table: TokenTable | None = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """Create the proposals of a loop. Tokens are proposed only if both a proposer and a rule
        for lengths are given.

        `clock` measures the duration of steps. It may leave out time in which other processes used
        the processor.
        """
        self._scheduler = scheduler
        self._proposer = proposer or NoProposer()
        self._lengths = lengths or NoLengths()
        self.is_plain = lengths is None
        self._vocabulary = vocabulary
        self._table = table or TokenTable((), frozenset())
        self._clock = clock
        # largest allowed number of tokens in a proposal; it is lowered if a step with proposals
        # runs out of memory
        self._most = 1 << 30
        # for each request id: the checked proposal, and the number of its tokens before the check
        self._asked = dict[int, tuple[TokenProposal, int]]()
        self._rounds: list[SpeculationRound] = []
        self._began = self._proposing = 0.0
        # clock reading at the end of the last step; negative if the last step was not timed
        self._ended = -1.0
        # average time in seconds from the end of one step to the start of the next
        self._between = 0.0
        self._is_timed = False  # whether the duration of the current step is measured
        # ids of requests for which the proposer was asked to propose tokens
        self._known = set[int]()
        # number of times that a proposal of at least one token was wanted for a sequence
        self._num_wanted = 0
        # number of times that the proposer was asked to propose tokens for a sequence
        self._num_asked = 0
        self._num_refused = 0  # number of proposals that lost all their tokens in the check
        self._stats = SpeculationStats()

    def propose(self, plan: StepPlan) -> None:
        """Ask the proposer for the next tokens of each decoding sequence, and add its proposals to
        the plan. A proposal has no more tokens than there are cache slots for it.
        """
        if self.is_plain:
            return
        self._is_timed = False
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
            # A gap between two steps is longer if the loop sends a report in it. So a gap counts as
            # at most twice the average gap.
            self._between = usual + (min(between, 2 * usual) - usual) / _BETWEEN
        self._forget_finished()
        self._is_timed = True
        self._proposing = 0.0
        lengths = self._lengths.choose(plan)
        # The clock starts after the lengths are chosen. This choice sometimes takes long, and is
        # not counted as time for proposals.
        self._began = self._clock()
        if not any(lengths):
            return
        self._stats.chosen += sum(lengths)
        asks: list[Ask] = []
        for sequence, length in zip(plan.decoding, lengths, strict=True):
            room = self._scheduler.widen(sequence, min(length, self._most)) if length > 0 else 0
            self._num_wanted += length > 0
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

    def verify(self, sequence: Sequence, drawn: list[int]) -> int:
        """Return how many tokens of a sequence's proposal are accepted; `drawn` are the tokens that
        the target sampled at the same positions. If the tokens come from a burst, all of them are
        kept.
        """
        if sequence.request_id not in self._asked:
            # The sequence had no proposal, so these tokens come from a burst, which merges plain
            # steps. All of them are kept.
            return len(drawn) - 1
        proposal, guessed = self._asked[sequence.request_id]
        accepted = accepted_length(proposal.tokens, drawn)
        self._proposer.verified(sequence.request_id, proposal, accepted)
        self._rounds.append(
            SpeculationRound(sequence.request_id, len(proposal.tokens), accepted, guessed)
        )
        return accepted

    def observed(self, plan: StepPlan) -> None:
        """Report the step's proposals and its duration in seconds to the rule that chooses proposal
        lengths.
        """
        if self.is_plain:
            return
        for each in self._rounds:
            if each.proposed:
                self._stats.add(each.proposed, each.accepted)
        if self._is_timed and not self._stats.trouble:
            proposing = self._proposing
            computing = self._clock() - self._began - proposing + self._between
            forecast = self._lengths.observed(plan, self._rounds, (proposing, computing))
            if forecast is not None:
                written = len(plan.decoding) + sum([each.accepted for each in self._rounds])
                self._stats.compare(forecast, (written, proposing + computing), len(plan.decoding))
        self._ended = self._clock() if self._is_timed else -1.0

    def report(self) -> SpeculationStats | None:
        """Return a copy of the speculation counters; None in plain decoding."""
        if self.is_plain:
            return None
        stats = self._stats
        overlap = self._proposer.overlap()
        own = replace(overlap) if overlap is not None else None
        return replace(
            stats,
            tested_at=[*stats.tested_at],
            accepted_at=[*stats.accepted_at],
            overlap=own,
            silence=self._silence(),
        )

    def _silence(self) -> str:
        """Return the reason why no token was proposed so far. Return an empty string if a token was
        proposed, or if no step could have had a proposal.
        """
        stats = self._stats
        if stats.proposed or not stats.choices:
            return ""
        if stats.trouble:
            return stats.trouble
        if not self._num_wanted:
            return "proposing tokens was never expected to save time"
        if not self._num_asked:
            return "the cache had no room for proposed tokens"
        if self._num_refused:
            return (
                "every proposal began with a token that ends the text or is not in the target's "
                "vocabulary"
            )
        return self._proposer.silence()

    def give_way(self, plan: StepPlan, *, shorten: bool) -> None:
        """Remove the proposals from a step that failed, so that it can be tried again. If `shorten`
        is true, because memory ran out, limit later proposals to half of the longest one in this
        step.
        """
        self._is_timed = False
        if shorten:
            self._most = min(self._most, max(map(len, plan.proposals)) // 2)
        plan.proposals.clear()
        self._rounds.clear()

    def _ask(self, asks: list[Ask]) -> None:
        self._known.update(ask.key for ask in asks)
        self._num_asked += len(asks)
        try:
            asked = dict[int, tuple[TokenProposal, int]]()
            for ask, proposal in zip(asks, self._proposer.propose(asks), strict=True):
                asked[ask.key] = self._checked(ask, proposal), min(len(proposal.tokens), ask.room)
            self._asked = asked
            for key, (sound, guessed) in asked.items():
                # Even if all tokens of a proposal are dropped, it took time. So it is recorded as a
                # round with no tokens.
                if guessed and not sound.tokens:
                    self._num_refused += 1
                    self._rounds.append(SpeculationRound(key, 0, 0, guessed))
        except Exception as error:  # noqa: BLE001  a guess that fails is none; the text does not depend on it
            name = type(self._proposer).__name__
            self._stats.trouble = (
                f"speculation is off: {name} failed ({type(error).__name__}: {error})"
            )

    def _checked(self, ask: Ask, proposal: TokenProposal) -> TokenProposal:
        """Cut a proposal to the requested number of tokens. Also cut it before the first token that
        ends the text or is not in the target's vocabulary.
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
    """Return the state of a decoding sequence as an `Ask` for up to `room` tokens."""
    request = sequence.request
    assert isinstance(request, SampleRequest), "only sampling requests have tokens to decode"
    assert sequence.uniforms is not None, "only sampling requests have tokens to decode"
    written = len(sequence.logprobs)
    return Ask(
        key=sequence.request_id,
        ids=sequence.ids,
        written=written,
        room=room,
        uniforms=sequence.uniforms[written : written + room],
        sampling=request.sampling,
        rollout=request.rollout,
        hint=request.hint,
    )
