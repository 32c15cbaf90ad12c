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
    """The outcomes that the drafter continues, in addition to the outcome that all tokens are
    accepted.

    At each position, the `fan` likeliest tokens are guessed. If `is_told` is true, the target's
    early exit says how likely tokens are; otherwise, the draft model says it.
    """

    fan: int
    is_told: bool = False


class OutcomeGuess(NamedTuple):
    """A guessed outcome with its probability: the first `accepted` proposed tokens are accepted,
    and then `token` follows.
    """

    accepted: int
    token: int
    probability: float


@dataclass(frozen=True, slots=True)
class PlaceLaw:
    """The probabilities at one position of a proposal.

    They are the probability that the proposed token is accepted, and the probabilities that the
    target writes certain other tokens instead.
    """

    # probability that the proposed token is accepted if all tokens before it are accepted; 1 at the
    # position after the last proposed token
    acceptance: float
    tokens: Many[int]
    # probabilities of the tokens in `tokens`; their sum may be less than 1, because other tokens
    # are possible
    probabilities: Many[float]


def ranked_outcomes(proposal: Many[int], places: Many[PlaceLaw]) -> list[OutcomeGuess]:
    """Rank the outcomes of verifying a proposal. `places` has one entry per proposed token, and one
    for the position after them.

    Outcome (i, v): the first i tokens are accepted, and token v follows. S_i is the probability
    that the first i tokens are accepted, and a_i that the next proposed token is accepted then. If
    the next token is rejected, r_i is the distribution of its replacement. So outcome (i, v) has
    probability S_i (1 - a_i) r_i(v). If all k tokens are accepted and q is the distribution of the
    next token, outcome (k, v) has probability S_k q(v).

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
    """Choose how many of the likeliest outcomes to continue, and how many tokens to draft for each.

    If n outcomes are continued, there is time for `length(n)` tokens for each. `acceptance` has,
    for each token, the probability that it is accepted if all earlier tokens are accepted. At least
    one outcome is continued.
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
    """The branches of one step. Each branch is stored under the outcome that it continues.

    `select` empties the cache: it returns the branch to propose, and all other branches so that the
    caller can free their slots.
    """

    def put(self, accepted: int, token: int, branch: Branch) -> None:
        """Store the branch that continues the outcome (accepted, token)."""
        assert (accepted, token) not in self, "a guessed outcome may get only one continuation"
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
    """A guessed outcome, and the tokens with which the drafter continues this outcome."""

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
    """The state of one sequence when a step begins, and the possible outcomes of its proposal."""

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
    """For each sequence whose outcome was guessed: the slots of the chosen branch, and the slots of
    the sequence to which keys and values are copied.
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
    """Computes new tokens of branches with the draft model, and draws the next tokens."""

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
        """Return the token that the draft model draws after each proposal, and its distribution."""
        places = [len(line.proposal) for line in lines]
        return self._drawn(self._model.forward(batch, self._table), lines, places)

    def grow(self, branches: list[DraftBranch]) -> None:
        """Run the draft model once: compute the new tokens of each branch, and draw the next
        tokens.
        """
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
        """Add the tokens that the heads predict to each branch, until a token's probability is too
        low.
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
        """Draw one token for each row.

        Return the tokens, their logits and their sampling settings.
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
    """Keep the tokens of the heads up to the first one that the draft model does not draw itself.

    Then add the draft model's own token. Return the number of computed tokens that are kept.
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
    """Return the `fan` + 1 likeliest tokens of each row.

    One token more than `fan` is returned, because one of them may be the proposed token.
    """
    if not fan:
        return [PlaceLaw(acceptance, (), ())] * len(logits)
    best = probabilities(logits, sampling).topk(min(fan + 1, logits.shape[-1]), -1)
    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [PlaceLaw(acceptance, ids, chances) for ids, chances in found]


Work = Callable[[], None]

PATIENCE = 5.0
"""Largest number of seconds to wait for the end of the current drafting work before the drafting
scheme changes.
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
    """Runs drafting work at once, in the caller's thread.

    So the drafts depend only on the texts, and not on the time that steps take.
    """

    is_beside = False  # whether drafting runs in parallel with the target's step

    def post(self, work: Work) -> None:
        """Run the drafting work, and return when it is done."""
        work()

    def wait(self, seconds: float) -> bool:
        """Wait at most this number of seconds for the drafting work, and return whether it has
        ended.
        """
        return True

    def elapsed(self, began: float) -> float:
        """Return the time in seconds since `began`, when the target's step began."""
        return perf_counter() - began


class OverlappedDrafter(ModelDrafter):
    """Proposes tokens that were drafted while the previous step was verified.

    Without a fan, the only guess is that every token is accepted and the draft's own token follows
    (PEARL). With a fan, the drafter continues the likeliest outcomes at every position. The draft's
    own distribution (SSD) or the target's early exit (Mirror-SD) says which outcomes are likely.
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
        With `heads`, one pass adds several tokens to each branch that continues a guess of `exits`.
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
        """Propose the branches whose guesses were correct, and begin to draft for new guesses."""
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
        """Return a drafter with the same model that works before each step of the target."""
        return ModelDrafter(self._model, self._config, self._rows, self._target_vocabulary)

    def restart_drafting(self, guessing: Guessing) -> None:
        """Cancel the current drafting work, and use another scheme to guess outcomes from now on.

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
        """Return the numbers of correct guesses, wrong guesses, late drafts and unused branches."""
        return self.stats

    def silence(self) -> str:
        """Return the reason why no branch was proposed."""
        return self.stats.silence or super().silence()

    def _is_over(self, job: DraftJob) -> bool:
        """Return whether the drafting work of the step has ended.

        A late drafter gets additional time once: at most as long as the target's step took.
        """
        job.is_enough = True
        if not self._is_late:
            self._budget = self._transport.elapsed(self._began)
        self._is_late = not self._transport.wait(0.0 if self._is_late else self._budget)
        return not self._is_late

    def _collect(self, asks: Many[Ask]) -> dict[int, DraftBranch]:
        """Return the branch of each sequence that matches the written text, and free all other
        branches.
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
        """Return the branch that matches the written text of a sequence, and all other branches."""
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
        """Record that the drafter has read the text up to position `known`.

        Tokens whose slots the sequence has lost are not recorded.
        """
        sequence = self._rows.sequence(line.ask.key)
        start = self._rows.drafted(sequence)
        if known > start:
            same = self._table[line.row, start:known] == self._rows.table[sequence.row, start:known]
            count = len(same) if same.all() else int(same.argmin())
            self._rows.advance(sequence, start + count)

    def _begin(self, job: DraftJob, ask: Ask, branch: DraftBranch | None) -> TokenProposal:
        """Add this sequence to the drafting work of the step.

        Return the tokens of its branch that the text does not contain yet, as the proposal.
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
        """Copy the branch's keys and values to the slots of its sequence.

        Return the position at which the copy ends, or 0 if the sequence lacks the keys and values
        before the branch.
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
        """Continue the outcomes that the target's early exit reports as likely.

        Meanwhile the target computes its remaining layers.
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
        """Return a batch of those tokens of these sequences that the drafter has not read yet."""
        return self._fed_batch([row for line in lines for row in line.fed])

    def _write_windows(self, lines: list[DraftLine]) -> None:
        """Draft one branch per sequence in one call of the kernels.

        Each branch gets the number of tokens that can be drafted during the target's step.
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
        """Choose the guesses to continue, and make a branch for each of them.

        Return the branches, and the number of tokens of each.
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
        """Guess that all proposed tokens are accepted, and that the draft's own next token follows.

        With a fan, also guess the likeliest outcomes at every position.
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
        """Choose how many guesses to continue and with how many tokens, for the time of the
        target's step.
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
        """Return the condition under which times of draft steps are stored.

        Times with and without the target's early exit are stored separately. The context length is
        ignored.
        """
        return False, int(self._exits is not None)
