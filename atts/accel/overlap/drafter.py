"""The overlapped drafter: it continues likely outcomes of a step while the target verifies it."""

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
    """Choice of outcomes to continue besides full acceptance: so many of each position's most
    likely tokens.

    They are those that the drafter finds likeliest, or those that the target itself tells on its
    way.
    """

    fan: int
    is_told: bool = False


class OutcomeGuess(NamedTuple):
    """So many proposed tokens stand and this one follows, with this estimated probability."""

    accepted: int
    token: int
    probability: float


@dataclass(frozen=True, slots=True)
class PlaceLaw:
    """Expectation at one position: whether the proposed token is accepted, and what the target may
    write instead.
    """

    # that the proposed token is accepted if all before it are; of the place after the last one: 1
    acceptance: float
    tokens: Many[int]
    # probabilities of `tokens`, as far as they are known; they need not sum to 1
    probabilities: Many[float]


def ranked_outcomes(proposal: Many[int], places: Many[PlaceLaw]) -> list[OutcomeGuess]:
    """Rank the outcomes of verifying a proposal; `places` has one more than the proposal.

    With S_i the probability that i tokens stand, outcome (i, v) has S_i (1 - a_i) r_i(v), where r_i
    is the distribution of what else than the proposed token is written there; after the whole
    proposal (k, v) has S_k q(v).

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
    """Choose how many of the likeliest outcomes to continue, and by how many tokens.

    `length(n)` is how many tokens n continuations get in the time there is, `acceptance` how likely
    each token of a proposal is accepted given those before it. One outcome is continued in any
    case.
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
    """The branches of one step, by outcome; used once: one is selected, and all others are given
    back.
    """

    def put(self, accepted: int, token: int, branch: Branch) -> None:
        """Keep what follows this outcome."""
        assert (accepted, token) not in self, "an outcome is continued once"
        self[accepted, token] = branch

    def select(self, accepted: int, token: int) -> tuple[Branch | None, list[Branch]]:
        """Return the branch that follows the actual outcome (None if not guessed), and the branches
        not needed.
        """
        chosen = self.pop((accepted, token), None)
        others = list(self.values())
        self.clear()
        return chosen, others


# A guess that came true is the next proposal, at once. After one that did not, the target steps
# without a proposal while the drafter begins again; so it does while the drafter is late. Branches
# read the prefix from the slots of their sequence and write into slots of their own behind the
# cache's, which they give back when the outcome is known.

Drawn = tuple[list[int], list[PlaceLaw]]
_CONFIDENT = 0.6
"""How likely a head must find its token for that to be kept until the next pass, or the target, has
seen it.
"""


@dataclass(slots=True)
class DraftBranch:
    """A guessed token and what the drafter lets follow it."""

    line: DraftLine
    accepted: int
    tokens: list[int]
    slots: SlotIds
    row: int  # row of the drafter's table
    most: int = 1  # tokens it may have
    fed: int = 0  # tokens that the drafter has computed
    # distributions of the tokens after the first
    laws: list[PlaceLaw] = field(default_factory=list[PlaceLaw])

    @property
    def start(self) -> int:
        """Return the position of the first token."""
        return self.line.base + self.accepted


@dataclass(slots=True)
class DraftLine:
    """One sequence as it stands when a step begins, and what its proposal may come to."""

    ask: Ask
    base: int  # tokens that are written
    row: int
    proposal: TokenIds
    laws: list[PlaceLaw]  # distributions at the proposal's places
    uniforms: NDArray[np.float64]  # uniform numbers of the places from `base` on
    cache: OutcomeCache[DraftBranch] = field(default_factory=lambda: OutcomeCache[DraftBranch]())
    # exit distributions at the same places and the one after, as reported
    exits: list[PlaceLaw] = field(default_factory=list[PlaceLaw])
    # rows that the drafter has not computed yet
    fed: list[FedRow] = field(default_factory=list[FedRow])

    @property
    def stop(self) -> int:
        """Return the position after the proposal."""
        return self.base + len(self.proposal)


@dataclass(slots=True)
class DraftJob:
    """The drafting that is done during one step."""

    lines: list[DraftLine] = field(default_factory=list[DraftLine])
    moves: list[tuple[SlotIds, SlotIds]] = field(default_factory=list[tuple[SlotIds, SlotIds]])
    """From where to where: keys and values of branches that become their sequences'."""
    texts: list[StepBatch] = field(default_factory=list[StepBatch])  # given text to catch up with
    lent: list[SlotIds] = field(default_factory=list[SlotIds])  # given back when it is over
    # what follows each proposal
    begun: tuple[list[int], list[PlaceLaw]] = field(default_factory=lambda: ([], []))
    is_enough: bool = False  # the step is done: no further draft step is begun
    error: BaseException | None = None


class BranchWriter:
    """Runs the draft model on what is not fed yet, and draws what follows."""

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
        self.streams = False  # whether the heads are used
        self.fan = 0  # number of a place's first tokens that are named in addition to its own
        self.acceptance = 0.7  # estimated chance that a proposed token is accepted

    def following(self, batch: StepBatch, lines: list[DraftLine]) -> Drawn:
        """Return the token after each line's proposal, and the distribution at its position."""
        places = [len(line.proposal) for line in lines]
        return self._drawn(self._model.forward(batch, self._table), lines, places)

    def grow(self, branches: list[DraftBranch]) -> None:
        """Take one pass: feed the tokens of each branch that were not fed, and draw those that
        follow.
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
        """Add what the heads let follow the newest tokens, as long as they are sure of it."""
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
        """Return a token for each row, with the number of its line's place, and what it was drawn
        from.
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
    """Keep of the tokens that were fed those that the model draws itself, and what it draws after;
    how many were.
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
    """Return the likely tokens of each row: this many, in addition to one that may be proposed
    there.
    """
    if not fan:
        return [PlaceLaw(acceptance, (), ())] * len(logits)
    best = probabilities(logits, sampling).topk(min(fan + 1, logits.shape[-1]), -1)
    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [PlaceLaw(acceptance, ids, chances) for ids, chances in found]


Work = Callable[[], None]

PATIENCE = 5.0
"""Seconds in which a drafter must end what it began, where another way to draft is tried."""


BRANCH_SLOTS = 4096  # slots of all branches together
_MOST_BRANCHES = 64
# tokens that a guess is continued by even where no draft step fits into one of the target's
_LEAST = 2
_FADE = 0.98  # a round, of the counts of accepted tokens


class InlineTransport:
    """Does pieces of work one after the other, each at once: what is drafted depends on nothing but
    the texts.
    """

    is_beside = False  # whether it works while its caller does

    def post(self, work: Work) -> None:
        """Begin a piece of work; done when this returns."""
        work()

    def wait(self, seconds: float) -> bool:
        """Return whether all work is over after so many seconds at the most."""
        return True

    def elapsed(self, began: float) -> float:
        """Return the seconds of the target's step, which began then."""
        return perf_counter() - began


class OverlappedDrafter(ModelDrafter):
    """Proposes what was drafted while the step before was verified.

    Without a fan the one guess is that every token is accepted and the draft's own token follows
    (PEARL); else the likeliest outcomes are continued, at every place the draft's first tokens
    among them (SSD), or the first of the target's early exit, as soon as that tells them (Mirror).
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
        """Create a drafter that proposes up to `most` tokens. `cache` is the model's; it has slots
        for branches after the slots of the target's tokens.

        With `heads`, branches of what `exits` tell get several tokens a pass.
        """
        super().__init__(model, config, drafted, vocabulary)
        self._cache = cache
        self._transport = transport
        self._most = most
        self._all_exits = exits
        rows, width = drafted.table.shape
        self._table = np.zeros((rows + _MOST_BRANCHES, width), dtype=np.int32)
        self._first_row = rows  # the branches begin here, after the rows of the sequences
        self._last = min(width, self._context)
        self._first_slot = drafted.slots.num_slots
        self._spare = SlotAllocator(BRANCH_SLOTS)
        self._job: DraftJob | None = None
        self._began = 0.0
        self._budget = 0.0  # seconds: when the job began, and what a step of the target takes
        self._is_late = False
        self._costs = StepCosts(wanders=False)
        self._tested = 1.0
        self._accepted = 0.7
        self.stats = OverlapStats()
        self._writer = BranchWriter(model, self._table, self._vocabulary, heads, self.stats)
        self._guess(guessing)

    def propose(self, asks: Many[Ask]) -> list[TokenProposal]:
        """Serve the guesses that came true, then begin to continue new ones."""
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

    def settled(self, key: int, proposal: TokenProposal, accepted: int) -> None:
        """Learn how likely a proposed token is accepted; those after a rejected one were not
        tested.
        """
        tested = min(accepted + 1, len(proposal.tokens))
        self._tested = self._tested * _FADE + tested
        self._accepted = self._accepted * _FADE + accepted
        self._writer.acceptance = self._accepted / self._tested

    def serial(self) -> ModelDrafter:
        """Return a drafter that drafts before a step, while nothing is drafted during one."""
        return ModelDrafter(self._model, self._config, self._rows, self._target_vocabulary)

    def begin_anew(self, guessing: Guessing) -> None:
        """Give up what is under way; from now on outcomes are guessed so.

        :raises RuntimeError: the drafter does not end, or what it did went wrong.
        """
        if self._job is not None:
            self._job.is_enough = True
            if not self._transport.wait(PATIENCE):
                raise RuntimeError("it does not end what it began")
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
        """Return the continuations of the step under way, whether finished or not.

        :raises RuntimeError: what went wrong with it.
        """
        if self._job is not None and (error := self._job.error) is not None:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        return self._job.lines if self._job is not None else []

    def overlap(self) -> OverlapStats:
        """Return what came of guesses."""
        return self.stats

    def silence(self) -> str:
        """Return why no guess was proposed."""
        return self.stats.silence or super().silence()

    def _is_over(self, job: DraftJob) -> bool:
        """Return whether the job is; a late one is waited for once, as long as the step took at the
        most.
        """
        job.is_enough = True
        if not self._is_late:
            self._budget = self._transport.elapsed(self._began)
        self._is_late = not self._transport.wait(0.0 if self._is_late else self._budget)
        return not self._is_late

    def _collect(self, asks: Many[Ask]) -> dict[int, DraftBranch]:
        """Return each sequence's branch that was written; the others give their slots back."""
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
        """Return the branch that the text took, cut to what is not written yet, and all others."""
        written = list(ids[line.base :]) if ids is not None else []
        accepted = accepted_length(line.proposal, [*written, -1])
        if ids is not None:
            self._credit(line, line.base + min(accepted, len(written)))
        rest = written[accepted:]
        chosen, others = line.cache.select(accepted, rest[0] if rest else -1)
        if chosen is not None and chosen.tokens[1 : len(rest)] != rest[1:]:
            others = [*others, chosen]
            chosen = None  # the branch came too late: the text has continued differently
        if rest:  # without further tokens nothing was verified
            self.stats.hits = self.stats.hits + bool(chosen)
            self.stats.misses = self.stats.misses + (not chosen)
        self.stats.wasted += len(others)
        return chosen, others

    def _credit(self, line: DraftLine, known: int) -> None:
        """Note that the drafter has computed the text up to here, where its slots are still the
        same.
        """
        sequence = self._rows.sequence(line.ask.key)
        start = self._rows.drafted(sequence)
        if known > start:
            same = self._table[line.row, start:known] == self._rows.table[sequence.row, start:known]
            count = len(same) if same.all() else int(same.argmin())
            self._rows.advance(sequence, start + count)

    def _begin(self, job: DraftJob, ask: Ask, branch: DraftBranch | None) -> TokenProposal:
        """Add to the job what is needed to continue from this sequence and its proposal, which is
        the branch's rest.
        """
        sequence = self._rows.sequence(ask.key)
        base = len(ask.ids)
        # tokens of the branch that are written
        done = base - branch.start if branch is not None else 0
        tokens = tuple(branch.tokens[done : done + ask.room]) if branch is not None else ()
        laws = branch.laws[done - 1 :][: len(tokens)] if branch is not None else []
        assert sequence.uniforms is not None, "only sampled sequences decode"
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
        """Give the sequence what the branch computed; return up to where that goes, 0 if it does
        not fit.
        """
        if self._rows.drafted(self._rows.sequence(line.ask.key)) != branch.start:
            return 0
        # the last is to be fed: what follows is wanted
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
        """Continue what is likely by the target's exit, while the target continues."""
        job = self._job
        self._began = perf_counter()
        assert job is not None, "it listens while a job is under way"
        if isinstance(told, Exception):
            job.error = told  # raised where it is collected
        else:
            for line in job.lines:
                laws = told.get(line.ask.key, ())
                line.exits = [
                    PlaceLaw(self._writer.acceptance, ids, chances) for ids, chances in laws
                ]
        self._transport.post(lambda: self._run(job, self._continue))

    def _run(self, job: DraftJob, work: Callable[[DraftJob], None]) -> None:
        """Work in the drafter's thread; nothing else touches its cache, table and branch slots
        meanwhile.
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
        """Continue branch by branch, as long as there is time."""
        branches, length = self._branches(job.lines, *job.begun)
        for step in range(length):
            live = [branch for branch in branches if len(branch.tokens) < branch.most]
            if not live or (job.is_enough and step >= _LEAST):
                return
            began = perf_counter()
            self._writer.grow(live)
            self._costs.add(self._condition, len(live), perf_counter() - began)

    def _first(self, lines: list[DraftLine]) -> StepBatch:
        """Return the rows of these that were not computed yet."""
        return self._fed_batch([row for line in lines for row in line.fed])

    def _write_windows(self, lines: list[DraftLine]) -> None:
        """Draw one guess each in one call of the kernels, as long as fits into the target's step."""
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
        """Choose the guesses that are continued, each with slots, and how many tokens each is to
        get.
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
        """Give a guess a row that reads its sequence's prefix, with slots of its own after it."""
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
        """Guess that all is accepted and the draft's own token follows; with a fan, guess more
        everywhere.
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
        """Choose how many guesses are continued, by how many tokens: what fits into a target's
        step.
        """
        if not self._fan:
            return lines, self._most
        acceptance = [self._writer.acceptance] * self._most
        count, length = most_worthwhile(
            chances, lambda count: self._length(count, lines), acceptance
        )
        return count, max(length, min(_LEAST, self._most))

    def _length(self, count: int, lines: int) -> int:
        """Return the number of tokens for each of so many branches: as many as fit into a step of
        the target.
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
        """Draft steps of any context are timed as one, those with heads as others."""
        return False, int(self._exits is not None)
