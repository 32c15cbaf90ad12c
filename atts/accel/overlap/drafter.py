"""The overlapped drafter: it drafts tokens for likely outcomes of a verification while the target
is still verifying.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from math import prod
from time import perf_counter
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atts.accel.overlap.mirror import ExitGuesses, ExitListener, Exits, StreamHeads
from atts.accel.speculate.drafter import DraftedRows, FedRow, ModelDrafter, fed_rows
from atts.accel.speculate.goodput import Condition, StepCosts
from atts.core import TokenIds
from atts.local.batch import StepBatch, single_rows
from atts.local.cache import SlotAllocator, SlotIds
from atts.local.logit_sampling import SamplingBatch, batch_sampling, probabilities, spread_rows
from atts.local.model_config import ModelConfig
from atts.local.proposals import accepted_length
from atts.local.seams import NOTHING, Ask, Model, OverlapStats, TokenProposal

Branch = TypeVar("Branch")


class Guessing(NamedTuple):
    """The rule that selects the outcomes of a verification for which the drafter drafts in advance.

    One guess is always that all proposed tokens are accepted. The other guesses are that the target
    writes one of the `fan` likeliest tokens at some position. If `is_told` is true, the target's
    early exit estimates their probabilities; otherwise, the draft model does.
    """

    fan: int
    is_told: bool = False


class OutcomeGuess(NamedTuple):
    """A guessed outcome of a verification, with its probability: the first `accepted` proposed
    tokens are accepted, and then the target writes `token`.
    """

    accepted: int
    token: int
    probability: float


@dataclass(frozen=True, slots=True)
class PlaceLaw:
    """Estimates for one position of a proposal: how likely the proposed token is to be accepted,
    and the likeliest tokens there with their probabilities.
    """

    # probability that the proposed token is accepted if all tokens before it are accepted; 1 at the
    # position after the last proposed token
    acceptance: float
    tokens: Many[int]
    # probabilities of the tokens in `tokens`; their sum may be less than 1, because other tokens
    # are possible
    probabilities: Many[float]


def ranked_outcomes(proposal: Many[int], places: Many[PlaceLaw]) -> list[OutcomeGuess]:
    """Rank the possible outcomes of verifying a proposal, the likeliest first. `places` has one
    entry per proposed token, and one for the position after the last.

    Outcome (i, v) means that the first i tokens are accepted, and that the target then writes token
    v. S_i is the probability that the first i tokens are accepted. Given that, a_i is the
    probability that the next proposed token is accepted too. If it is rejected, r_i is the
    distribution of the token that replaces it. So outcome (i, v) has probability S_i (1 - a_i)
    r_i(v). If all k tokens are accepted and q is the distribution of the next token, outcome (k, v)
    has probability S_k q(v).

    >>> first = PlaceLaw(0.75, (7, 8), (0.5, 0.25))
    >>> [tuple(guess) for guess in ranked_outcomes((7,), (first, PlaceLaw(1.0, (5,), (0.5,))))]
    [(1, 5, 0.375), (0, 8, 0.125)]
    """
    guesses: list[OutcomeGuess] = []
    reached = 1.0
    for accepted, place in enumerate(places):
        kept = list(zip(place.tokens, place.probabilities, strict=True))
        share = reached
        if accepted < len(proposal):
            chance_proposed = sum(chance for token, chance in kept if token == proposal[accepted])
            kept = [(token, chance) for token, chance in kept if token != proposal[accepted]]
            share = (
                reached * (1 - place.acceptance) / (1 - chance_proposed)
                if chance_proposed < 1
                else 0.0
            )
            reached *= place.acceptance
        guesses += [OutcomeGuess(accepted, token, share * chance) for token, chance in kept]
    return sorted(guesses, key=lambda guess: -guess.probability)


def most_worthwhile(
    chances: Many[float], length: Callable[[int], int], acceptance: Many[float]
) -> tuple[int, int]:
    """Choose how many guessed outcomes to draft for, and how many tokens to draft for each. The
    choice maximises the expected number of accepted tokens.

    `chances` has the probabilities of the outcomes, the likeliest first. If the drafter drafts for
    n outcomes, it has time for `length(n)` tokens each. `acceptance` has, for each token of a
    branch, the probability that it is accepted if all earlier ones are. At least one outcome is
    chosen.
    """
    best = (1, max(0, length(1)))
    covered = 0.0
    most = 0.0
    for count, chance in enumerate(chances, 1):
        covered += chance
        tokens = min(length(count), len(acceptance))
        if tokens < 1:
            break
        expected = covered * sum(prod(acceptance[:place]) for place in range(1, tokens + 1))
        if expected > most:
            best = (count, tokens)
            most = expected
    return best


class OutcomeCache(dict[tuple[int, int], Branch]):
    """The branches of one step, keyed by the outcome after which each branch continues the text.

    `select` empties the cache. It returns the branch of the actual outcome, and all other branches
    so that the caller can free their slots.
    """

    def put(self, accepted: int, token: int, branch: Branch) -> None:
        """Store the branch for this outcome: `accepted` tokens are accepted, then the target writes
        `token`.
        """
        assert (accepted, token) not in self, "each guessed outcome may have only one continuation"
        self[accepted, token] = branch

    def select(self, accepted: int, token: int) -> tuple[Branch | None, list[Branch]]:
        """Return the branch of the actual outcome, and all other branches.

        The branch is None if this outcome was not guessed.
        """
        chosen = self.pop((accepted, token), None)
        others = list(self.values())
        self.clear()
        return chosen, others


# During each step of the target, the drafter guesses outcomes, and drafts a branch (some next
# tokens) after each guess. If a guess was correct, its branch is proposed at once. If no guess was
# correct, or if the drafter is late, the target takes a step without a proposal. Then the drafter
# begins again. A branch reads the keys and values of its sequence. Its own keys and values go into
# slots at the end of the drafter's cache. These slots are freed when the outcome is known.

Drawn = tuple[list[int], list[PlaceLaw]]
_CONFIDENT = 0.6
"""A token that a streaming head predicts is added to a branch only if its probability is at least
this high. The drafter's next pass or the target checks the added tokens.
"""


@dataclass(slots=True)
class DraftBranch:
    """A branch: the tokens that the drafter expects after a guessed outcome. The first token is the
    guess.
    """

    line: DraftLine
    accepted: int
    tokens: list[int]
    slots: SlotIds
    row: int  # row of the branch in the drafter's slot table
    most: int = 1  # largest number of tokens that this branch may have
    fed: int = 0  # number of tokens of the branch whose keys and values the drafter has computed
    # the draft model's distributions at the positions of `tokens`, except at the first position,
    # whose token is the guess
    laws: list[PlaceLaw] = field(default_factory=list[PlaceLaw])

    @property
    def start(self) -> int:
        """Return the position of the branch's first token in the sequence."""
        return self.line.base + self.accepted


@dataclass(slots=True)
class DraftLine:
    """One sequence at the start of a step: its text, its proposal, and a branch for each guessed
    outcome of verifying the proposal.
    """

    ask: Ask
    base: int  # number of prompt tokens and written tokens when the step begins
    row: int
    proposal: TokenIds
    # the draft model's distributions at the positions of the tokens in `proposal`
    laws: list[PlaceLaw]
    # the random numbers in [0, 1) with which the target draws the tokens at position `base` and
    # later
    uniforms: NDArray[np.float64]
    cache: OutcomeCache[DraftBranch] = field(default_factory=lambda: OutcomeCache[DraftBranch]())
    # distributions guessed by the target's early exit: one for each position of `proposal`, and one
    # for the position after it
    exits: list[PlaceLaw] = field(default_factory=list[PlaceLaw])
    # tokens of the sequence's text and of `proposal` that the draft model has not computed yet
    fed: list[FedRow] = field(default_factory=list[FedRow])

    @property
    def stop(self) -> int:
        """Return the position after the last proposed token."""
        return self.base + len(self.proposal)


@dataclass(slots=True)
class DraftJob:
    """The drafting work for all sequences of one step."""

    lines: list[DraftLine] = field(default_factory=list[DraftLine])
    moves: list[tuple[SlotIds, SlotIds]] = field(default_factory=list[tuple[SlotIds, SlotIds]])
    """Pairs (source slots, destination slots), one for each sequence whose outcome was guessed.
    Keys and values are copied from the chosen branch's slots to the sequence's slots.
    """
    # batches of prompt and text tokens that the draft model has not computed yet
    texts: list[StepBatch] = field(default_factory=list[StepBatch])
    # cache slots of the branches that are proposed in this step; they are freed after the step
    lent: list[SlotIds] = field(default_factory=list[SlotIds])
    # for each sequence: the token that the draft model draws after the proposal, and the
    # distribution at this token's position
    begun: tuple[list[int], list[PlaceLaw]] = field(default_factory=lambda: ([], []))
    # Set to True when the target's step has ended or the drafting scheme changes. The drafter then
    # stops adding tokens to branches.
    is_enough: bool = False
    error: BaseException | None = None


class BranchWriter:
    """Extends branches with the draft model: feeds it the branches' new tokens, and samples the
    next ones.
    """

    def __init__(
        self,
        model: Model,
        table: SlotIds,
        vocabulary: int,
        heads: StreamHeads | None,
        stats: OverlapStats,
    ) -> None:
        self._model = model
        self._table = table
        self._vocabulary = vocabulary
        self._heads = heads
        self._stats = stats
        self.streams = False  # whether streaming heads add tokens to the branches
        # number of likeliest tokens to guess at each position, in addition to the token that the
        # draft model draws
        self.fan = 0
        self.acceptance = 0.7  # estimated probability that a proposed token is accepted

    def following(self, batch: StepBatch, lines: list[DraftLine]) -> Drawn:
        """Run the draft model. Return the token that it samples after each proposal, and its
        distribution at this token's position.
        """
        places = [len(line.proposal) for line in lines]
        return self._drawn(self._model.forward(batch, self._table), lines, places)

    def grow(self, branches: list[DraftBranch]) -> None:
        """Run the draft model once: feed it each branch's new tokens, then sample the next one."""
        rows = [(branch, at) for branch in branches for at in range(branch.fed, len(branch.tokens))]
        numbers = [(branch.row, branch.start + at, branch.tokens[at]) for branch, at in rows]
        table_rows, positions, tokens = np.array(numbers, dtype=np.int64).T.copy()
        batch = single_rows(tokens, positions, table_rows, self._table)
        hidden = self._model.forward(batch, self._table)
        places = [branch.accepted + at + 1 for branch, at in rows]
        before = sum([len(branch.tokens) for branch in branches])
        drawn, laws = self._drawn(hidden, [branch.line for branch, _ in rows], places)
        ends = list[int]()
        first = 0
        for branch in branches:
            stop = first + len(branch.tokens) - branch.fed
            ends.append(first + _keep(branch, drawn[first:stop], laws[first:stop]) - 1)
            first = stop
        if self.streams and self._heads is not None:
            self._stream(self._heads, branches, hidden[ends])
        self._stats.passes += len(branches)
        self._stats.drafted += sum([len(branch.tokens) for branch in branches]) - before

    def _stream(self, heads: StreamHeads, branches: list[DraftBranch], hidden: Tensor) -> None:
        """Extend each branch with the tokens that the streaming heads predict. A branch ends before
        the first token whose probability is too low.
        """
        live = [
            (at, branch) for at, branch in enumerate(branches) if len(branch.tokens) < branch.most
        ]
        for width in range(1, len(heads.streams) + 1):
            if not live:
                return
            known = torch.tensor(
                [branch.tokens[-width:] for _, branch in live], device=hidden.device
            )
            states = heads(hidden[[at for at, _ in live]], known)
            places = [branch.accepted + len(branch.tokens) for _, branch in live]
            tokens, chances = self._streamed(states, [branch.line for _, branch in live], places)
            sure = [place for place, chance in enumerate(chances) if chance >= _CONFIDENT]
            for place in sure:
                live[place][1].tokens.append(tokens[place])
                live[place][1].laws.append(PlaceLaw(self.acceptance, (), ()))
            live = [
                live[place] for place in sure if len(live[place][1].tokens) < live[place][1].most
            ]

    def _streamed(
        self, states: Tensor, lines: list[DraftLine], places: list[int]
    ) -> tuple[list[int], list[float]]:
        tokens, logits, sampling = self._sampled(states, lines, places)
        chosen = torch.tensor(tokens, device=logits.device)[:, None]
        chances: list[float] = probabilities(logits, sampling).gather(1, chosen).squeeze(1).tolist()
        return tokens, chances

    def _drawn(self, hidden: Tensor, lines: list[DraftLine], places: list[int]) -> Drawn:
        tokens, logits, sampling = self._sampled(hidden, lines, places)
        return tokens, place_laws(logits, sampling, self.fan, self.acceptance)

    def _sampled(
        self, hidden: Tensor, lines: list[DraftLine], places: list[int]
    ) -> tuple[list[int], Tensor, SamplingBatch]:
        """Sample one token for each row of hidden states.

        Return the tokens, the logits of each row, and the sampling settings of each row.
        """
        logits = self._model.compute_logits(hidden)[:, : self._vocabulary].contiguous()
        asks = {line.ask.key: line.ask for line in lines}
        index = {key: place for place, key in enumerate(asks)}
        settings = batch_sampling(
            [ask.sampling for ask in asks.values()], logits.shape[-1], logits.device
        )
        sampling = spread_rows(settings, torch.tensor([index[line.ask.key] for line in lines]))
        uniforms = [float(line.uniforms[place]) for line, place in zip(lines, places, strict=True)]
        tokens: list[int] = self._model.sample(logits, sampling, uniforms).tokens.tolist()
        return tokens, logits, sampling


def _keep(branch: DraftBranch, drawn: list[int], laws: list[PlaceLaw]) -> int:
    """Keep the tokens that the streaming heads added to a branch, up to the first difference from
    the draft model's own samples. Then append the draft model's next token.

    Return how many tokens of the draft model's last pass are kept.
    """
    kept = 1
    count = len(drawn)
    while kept < count and branch.tokens[branch.fed + kept] == drawn[kept - 1]:
        kept += 1
    del branch.tokens[branch.fed + kept :], branch.laws[branch.fed :]
    branch.laws += laws[:kept]
    branch.fed += kept
    branch.tokens.append(drawn[kept - 1])
    return kept


def place_laws(
    logits: Tensor, sampling: SamplingBatch, fan: int, acceptance: float
) -> list[PlaceLaw]:
    """Return the likeliest tokens of each row with their probabilities: one token more than `fan`,
    or none if `fan` is 0.

    The additional token is needed because one of the tokens may be the proposed one.
    """
    if not fan:
        return [PlaceLaw(acceptance, (), ())] * len(logits)
    best = probabilities(logits, sampling).topk(min(fan + 1, logits.shape[-1]), -1)
    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [PlaceLaw(acceptance, ids, chances) for ids, chances in found]


Work = Callable[[], None]

PATIENCE = 5.0
"""Largest number of seconds to wait for the end of the current drafting work before the drafting
scheme is changed.
"""


BRANCH_SLOTS = 4096  # number of cache slots for the branches of all sequences together
_MOST_BRANCHES = 64
# A branch gets at least this number of tokens, even if the target's step is too short to draft
# them.
_LEAST = 2
# After each proposal, the earlier counts of tested and accepted tokens are multiplied by this
# factor.
_FADE = 0.98


class InlineTransport:
    """Runs drafting work immediately, in the caller's thread.

    Therefore the drafts depend only on the texts, and not on the duration of steps.
    """

    is_beside = False  # whether drafting runs in parallel with the target's step

    def post(self, work: Work) -> None:
        """Run the drafting work, and return when it is done."""
        work()

    def wait(self, seconds: float) -> bool:
        """Return true, because `post` returns only after the drafting work has ended."""
        return True

    def elapsed(self, began: float) -> float:
        """Return the seconds that have passed since time `began`, when the target's step began."""
        return perf_counter() - began


class OverlappedDrafter(ModelDrafter):
    """Proposes tokens that were drafted while the target verified the previous proposals.

    If `fan` is 0, the only guess is that every token is accepted and that the draft's own next
    token follows (PEARL). If `fan` is larger, the drafter also guesses that one of the likeliest
    other tokens follows at some position. The draft model's distribution (SSD) or the target's
    early exit (Mirror-SD) says which tokens are likely.
    """

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        drafted: DraftedRows,
        vocabulary: int,
        *,
        cache: Tensor,
        transport: InlineTransport,
        guessing: Guessing,
        most: int,
        exits: Exits | None = None,
        heads: StreamHeads | None = None,
    ) -> None:
        """Create a drafter that proposes at most `most` tokens.

        The draft model's `cache` has slots for the target's tokens, followed by slots for branches.
        If streaming `heads` are given, they are used for branches that start with a guess of the
        early exit. One pass then adds several tokens to each branch.
        """
        super().__init__(model, config, drafted, vocabulary)
        self._cache = cache
        self._transport = transport
        self._most = most
        self._all_exits = exits
        rows, width = drafted.table.shape
        self._table = np.zeros((rows + _MOST_BRANCHES, width), dtype=np.int32)
        # In the slot table, the rows of branches come after the rows of sequences. This is the
        # first row of a branch.
        self._first_row = rows
        self._last = min(width, self._context)
        self._first_slot = drafted.slots.num_slots
        self._spare = SlotAllocator(BRANCH_SLOTS)
        self._job: DraftJob | None = None
        self._began = 0.0  # time at which the current drafting work began
        self._budget = 0.0  # expected duration of the target's step, in seconds
        self._is_late = False
        self._costs = StepCosts(wanders=False)
        self._tested = 1.0
        self._accepted = 0.7
        self.stats = OverlapStats()
        self._writer = BranchWriter(model, self._table, self._vocabulary, heads, self.stats)
        self._guess(guessing)

    def propose(self, asks: Many[Ask]) -> list[TokenProposal]:
        """Propose the branch of each correctly guessed outcome, and start to draft for the next
        outcomes.
        """
        if self._exits is not None:
            self._exits.listen(None)
        if self._job is not None and not self._is_over(self._job):
            self.stats.late += len(asks)
            return [NOTHING] * len(asks)
        branches = self._collect(asks)
        job = DraftJob()
        proposals = [NOTHING] * len(asks)
        for place, ask in enumerate(asks):
            branch = branches.get(ask.key)
            if branch is not None:
                job.lent.append(branch.slots)
            if self._can_follow(ask):
                proposals[place] = self._begin(job, ask, branch)
        self._post(job)
        return proposals

    def verified(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Update the estimated probability that a proposed token is accepted.

        Tokens after a rejected token are not counted, because the target did not test them.
        """
        tested = min(accepted + 1, len(proposal.tokens))
        self._tested = self._tested * _FADE + tested
        self._accepted = self._accepted * _FADE + accepted
        self._writer.acceptance = self._accepted / self._tested

    def serial(self) -> ModelDrafter:
        """Return a drafter that uses the same model, but drafts before each step of the target."""
        return ModelDrafter(self._model, self._config, self._rows, self._target_vocabulary)

    def restart_drafting(self, guessing: Guessing) -> None:
        """Cancel the current drafting work, and change the rule that guesses outcomes.

        :raises RuntimeError: the current work does not end in time, or it failed.
        """
        if self._job is not None:
            self._job.is_enough = True
            if not self._transport.wait(PATIENCE):
                raise RuntimeError("the drafter did not finish its current job in time")
            self._is_late = False
            self._collect([])
        self._guess(guessing)

    def _guess(self, guessing: Guessing) -> None:
        if self._all_exits is not None:
            self._all_exits.listen(None)
        self._fan = guessing.fan
        self._exits = self._all_exits if guessing.is_told else None
        self._writer.fan = 0 if guessing.is_told else guessing.fan
        self._writer.streams = guessing.is_told
        self._before = self.stats.drafted, self.stats.passes

    def drafted(self) -> list[DraftLine]:
        """Return the sequences of the current step with their branches, finished or not.

        :raises RuntimeError: the drafting failed.
        """
        if self._job is not None and (error := self._job.error) is not None:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return self._job.lines if self._job is not None else []

    def overlap(self) -> OverlapStats:
        """Return how many guesses were right or wrong, how many drafts were late, and how many
        branches were unused.
        """
        return self.stats

    def silence(self) -> str:
        """Return the reason why no branch was proposed so far."""
        return self.stats.silence or super().silence()

    def _is_over(self, job: DraftJob) -> bool:
        """Stop the drafting work of the step, and return whether it has ended.

        The first call waits for the end of the work, at most as long as the target's step took.
        Later calls do not wait.
        """
        job.is_enough = True
        if not self._is_late:
            self._budget = self._transport.elapsed(self._began)
        self._is_late = not self._transport.wait(0.0 if self._is_late else self._budget)
        return not self._is_late

    def _collect(self, asks: Many[Ask]) -> dict[int, DraftBranch]:
        """Return, for each sequence, the branch that matches its newly written text, and free the
        slots of all other branches.
        """
        lines = self.drafted()
        job = self._job
        self._job = None
        if job is None:
            return {}
        ids = {ask.key: ask.ids for ask in asks}
        branches = dict[int, DraftBranch]()
        for line in lines:
            branch, others = self._selected(line, ids.get(line.ask.key))
            if branch is not None:
                branches[line.ask.key] = branch
            self._give_back([other.slots for other in others])
        self._give_back(job.lent)
        return branches

    def _give_back(self, runs: list[SlotIds]) -> None:
        self._spare.free([run - np.int32(self._first_slot) for run in runs])

    def _selected(
        self, line: DraftLine, ids: Many[int] | None
    ) -> tuple[DraftBranch | None, list[DraftBranch]]:
        """Return the branch that matches a sequence's newly written text, and all other branches.
        If the text has a token after the accepted proposal, count the guess as right or wrong.
        """
        written = list(ids[line.base :]) if ids is not None else []
        accepted = accepted_length(line.proposal, [*written, -1])
        if ids is not None:
            self._credit(line, line.base + min(accepted, len(written)))
        rest = written[accepted:]
        chosen, others = line.cache.select(accepted, rest[0] if rest else -1)
        if chosen is not None and chosen.tokens[1 : len(rest)] != rest[1:]:
            others = [*others, chosen]
            # The text already has other tokens than this branch, so the branch came too late.
            chosen = None
        if rest:  # If the text has no token after the proposal, no guess was tested.
            self.stats.hits = self.stats.hits + bool(chosen)
            self.stats.misses = self.stats.misses + (not chosen)
        self.stats.wasted += len(others)
        return chosen, others

    def _credit(self, line: DraftLine, known: int) -> None:
        """Record that the draft model has read a sequence's text up to position `known`.

        If the sequence got other cache slots after the drafter read them, record only the tokens
        before the first such slot.
        """
        sequence = self._rows.sequence(line.ask.key)
        start = self._rows.drafted(sequence)
        if known > start:
            same = self._table[line.row, start:known] == self._rows.table[sequence.row, start:known]
            count = len(same) if same.all() else int(same.argmin())
            self._rows.advance(sequence, start + count)

    def _begin(self, job: DraftJob, ask: Ask, branch: DraftBranch | None) -> TokenProposal:
        """Add a sequence to the drafting work of the step, and return its proposal.

        The proposal contains the branch's tokens beyond the end of the text.
        """
        sequence = self._rows.sequence(ask.key)
        base = len(ask.ids)
        # number of the branch's tokens that the text already contains
        done = base - branch.start if branch is not None else 0
        tokens = tuple(branch.tokens[done : done + ask.room]) if branch is not None else ()
        laws = branch.laws[done - 1 :][: len(tokens)] if branch is not None else []
        assert sequence.uniforms is not None, "only sampling requests have tokens to decode"
        line = DraftLine(ask, base, sequence.row, tokens, laws, sequence.uniforms[ask.written :])
        proposal = TokenProposal(tokens, 1.0) if tokens else NOTHING
        if len(line.uniforms) <= len(tokens) or line.stop >= self._last:
            return proposal
        self._table[line.row] = self._rows.table[line.row]
        start = self._moved(job, line, branch) if branch is not None else 0
        if not start:
            pieces, start = self._pieces(sequence)
            job.texts += pieces
        line.fed = fed_rows(line.row, [*ask.ids[start:], *tokens[max(0, start - base) :]], start)
        job.lines.append(line)
        return proposal

    def _moved(self, job: DraftJob, line: DraftLine, branch: DraftBranch) -> int:
        """Plan to copy the branch's keys and values to the slots of its sequence, and return the
        position after the last copied token.

        The drafter must have computed the sequence exactly up to the start of the branch.
        Otherwise, plan nothing and return 0.
        """
        if self._rows.drafted(self._rows.sequence(line.ask.key)) != branch.start:
            return 0
        # Do not copy the last token of text and proposal. The draft model computes it again to get
        # the distribution of the next token.
        count = min(branch.fed, line.stop - branch.start - 1)
        stop = branch.start + count
        job.moves.append((branch.slots[:count], self._table[line.row, branch.start : stop].copy()))
        return stop

    def _post(self, job: DraftJob) -> None:
        if not job.lines:
            self._give_back(job.lent)
            return
        self._job = job
        self._began = perf_counter()
        self._transport.post(lambda: self._run(job, self._write))
        if self._exits is not None:
            rows = {line.row: (line.ask.key, line.ask.sampling) for line in job.lines}
            self._exits.listen(ExitListener(rows, self._heard))

    def _heard(self, told: ExitGuesses | Exception) -> None:
        """Draft tokens for the outcomes that the target's early exit finds likely, while the target
        computes its remaining layers.
        """
        job = self._job
        self._began = perf_counter()
        assert job is not None, "the drafter reads messages only during a job"
        if isinstance(told, Exception):
            # stored here; `drafted` raises it when the step's branches are collected
            job.error = told
        else:
            for line in job.lines:
                laws = told.get(line.ask.key, ())
                line.exits = [
                    PlaceLaw(self._writer.acceptance, ids, chances) for ids, chances in laws
                ]
        self._transport.post(lambda: self._run(job, self._continue))

    def _run(self, job: DraftJob, work: Callable[[DraftJob], None]) -> None:
        """Run a part of the drafting work.

        An error is stored in the job, and `drafted` raises it later.
        """
        try:
            if job.error is None:
                work(job)
        except BaseException as error:  # noqa: BLE001  raised again where it is collected
            job.error = error

    @torch.inference_mode()
    def _write(self, job: DraftJob) -> None:
        for source, to in job.moves:
            if len(source):
                self._cache[:, :, torch.from_numpy(to).long()] = self._cache[
                    :, :, torch.from_numpy(source).long()
                ]
        for batch in job.texts:
            self._model.forward(batch, self._table)
        if (
            self._native is not None
            and not self._fan
            and not self._filters([line.ask for line in job.lines])
        ):
            self._write_windows(job.lines)
            return
        job.begun = self._writer.following(self._first(job.lines), job.lines)
        if self._exits is None:
            self._continue(job)

    @torch.inference_mode()
    def _continue(self, job: DraftJob) -> None:
        """Add tokens to all branches until the target's step ends or all branches are complete."""
        branches, length = self._branches(job.lines, *job.begun)
        for step in range(length):
            live = [branch for branch in branches if len(branch.tokens) < branch.most]
            if not live or (job.is_enough and step >= _LEAST):
                return
            began = perf_counter()
            self._writer.grow(live)
            self._costs.add(self._condition, len(live), perf_counter() - began)

    def _first(self, lines: list[DraftLine]) -> StepBatch:
        """Return a batch with those tokens of these sequences that the draft model has not computed
        yet.
        """
        return self._fed_batch([row for line in lines for row in line.fed])

    def _write_windows(self, lines: list[DraftLine]) -> None:
        """Draft one branch per sequence in one call of the kernels.

        Each branch gets as many tokens as can be drafted during the target's step.
        """
        began = perf_counter()
        length = max(_LEAST, self._length(len(lines), len(lines)))
        guesses = [OutcomeGuess(len(line.proposal), -1, 1.0) for line in lines]
        branches = [
            self._branch(place, guess, lines[place], length) for place, guess in enumerate(guesses)
        ]
        branches.sort(key=lambda branch: -branch.most)
        lines = [branch.line for branch in branches]
        rows, starts = (
            np.array([getattr(each, name) for each in branches]) for name in ("row", "start")
        )
        uniforms = [branch.line.uniforms[branch.accepted :][: branch.most] for branch in branches]
        asks = [line.ask for line in lines]
        drawn = self._drawn_ahead(asks, uniforms, self._first(lines), (rows, starts))
        for branch, tokens in zip(branches, drawn, strict=True):
            branch.tokens[:] = tokens
            branch.fed = len(tokens) - 1
            branch.line.cache.put(branch.accepted, branch.tokens[0], branch)
        self._costs.add(self._condition, len(lines), (perf_counter() - began) / branches[0].most)

    def _branches(
        self, lines: list[DraftLine], drawn_tokens: list[int], laws: list[PlaceLaw]
    ) -> tuple[list[DraftBranch], int]:
        """Choose the guessed outcomes to draft for, and make a branch for each of them.

        Return the branches, and the number of tokens to draft for each.
        """
        drawn = zip(lines, drawn_tokens, laws, strict=True)
        guesses = [
            (guess, line) for line, token, law in drawn for guess in self._guesses(line, token, law)
        ]
        guesses.sort(key=lambda each: -each[0].probability)
        count, length = self._worthwhile([guess.probability for guess, _ in guesses], len(lines))
        count = min(count, _MOST_BRANCHES, self._spare.num_free // max(1, length))
        branches = [
            self._branch(place, *guess, length) for place, guess in enumerate(guesses[:count])
        ]
        for branch in branches:
            branch.line.cache.put(branch.accepted, branch.tokens[0], branch)
        return branches, length

    def _branch(self, place: int, guess: OutcomeGuess, line: DraftLine, length: int) -> DraftBranch:
        """Make a branch for a guess.

        The branch's row in the slot table has the slots of the sequence's text, then new slots of
        its own.
        """
        slots = self._spare.allocate(length) + np.int32(self._first_slot)
        branch = DraftBranch(line, guess.accepted, [guess.token], slots, self._first_row + place)
        branch.most = min(
            length + 1, len(line.uniforms) - guess.accepted, self._last - branch.start
        )
        row = self._table[branch.row]
        start = branch.start
        stop = min(branch.start + length, self._last)
        row[:start] = self._table[line.row, :start]
        row[start:stop] = slots[: stop - start]
        return branch

    def _guesses(self, line: DraftLine, drawn_token: int, law: PlaceLaw) -> list[OutcomeGuess]:
        """Return the guessed outcomes for one sequence.

        One guess is that all proposed tokens are accepted, and that the draft's own next token
        follows. If `fan` is above 0, others are that one of the likeliest tokens follows at some
        position.
        """
        chance = prod([place.acceptance for place in (*line.laws, law)])
        every = OutcomeGuess(len(line.proposal), drawn_token, chance)
        if not self._fan:
            return [every]
        return [
            every,
            *ranked_outcomes((*line.proposal, drawn_token), line.exits or (*line.laws, law)),
        ]

    def _worthwhile(self, chances: list[float], lines: int) -> tuple[int, int]:
        """Choose how many guessed outcomes to draft for, and how many tokens to draft for each. The
        drafting must fit into the time of the target's step.
        """
        if not self._fan:
            return lines, self._most
        acceptance = [self._writer.acceptance] * self._most
        count, length = most_worthwhile(
            chances, lambda count: self._length(count, lines), acceptance
        )
        return count, max(length, min(_LEAST, self._most))

    def _length(self, count: int, lines: int) -> int:
        """Return the largest number of tokens per branch that can be drafted during the target's
        step.
        """
        curve = self._costs.curve(self._condition) if self._transport.is_beside else None
        if curve is None:
            return self._most if count <= (self._fan + 1) * lines else 0
        passes = self._budget / max(1e-9, curve.one(count))
        drafted = self.stats.drafted - self._before[0]
        done = self.stats.passes - self._before[1]
        return min(self._most, int(passes * max(1.0, drafted / max(1, done))))

    @property
    def _condition(self) -> Condition:
        """Return the key under which the durations of draft passes are stored.

        Passes with and without the target's early exit get different keys. The context length is
        ignored.
        """
        return False, int(self._exits is not None)
