"""Virtual devices: speculative schemes run on recorded or drawn acceptances, and the time of all
work is added up.

Which tokens stand is decided by the walk that verifies in an engine; only time is virtual.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from atts.speculation.outcomes import OutcomeCache
from atts.speculation.verifying import standing

_WIDTH = 1 << 16  # ranks told apart at one place


class Work(NamedTuple):
    """A piece of work on a device, as it is drawn on a timeline."""

    device: str
    begin: float
    end: float
    what: str


@dataclass(slots=True)
class Device:
    """Does one piece of work at a time, in the order asked."""

    name: str
    free_at: float = 0.0
    work: list[Work] = field(default_factory=list[Work])

    def run(self, ready: float, seconds: float, what: str) -> float:
        """When a piece of work that may begin at `ready` is done."""
        begin = max(ready, self.free_at)
        self.free_at = begin + seconds
        self.work.append(Work(self.name, begin, self.free_at, what))
        return self.free_at


@dataclass(frozen=True, slots=True)
class AcceptanceTrace:
    """Along a text of the target: the rank that the draft gives its token, and the rank that its
    early exit gives it.

    Rank 0 is the token the draft draws itself, which then stands. As a proposed token is tested
    only where all before it are the target's, ranks along the target's own text say all there is to
    know.
    """

    ranks: Sequence[int]
    exit_ranks: Sequence[int] = ()

    @classmethod
    def drawn(
        cls, law: Sequence[float], places: int, seed: int, exit_law: Sequence[float] = ()
    ) -> AcceptanceTrace:
        """Ranks in random order: a share `law[r]` of them is r, what is missing to 1 lies beyond
        all that are asked.
        """
        random = np.random.default_rng(seed)
        ranks = list[list[int]]()
        for each in filter(None, (law, exit_law)):
            even = (
                random.permutation(places) + 0.5
            ) / places  # exact shares: less noise than independent draws
            found: list[int] = np.searchsorted(np.cumsum(each), even, side="right").tolist()
            ranks.append([rank if rank < len(each) else _WIDTH for rank in found])
        return cls(*ranks)

    def drafted(self, place: int, count: int) -> list[int]:
        """What the draft writes from a right prefix, where the target's token at each place is the
        place's number.
        """
        return [at if self.ranks[at] == 0 else _other(at, 0) for at in range(place, place + count)]

    def candidates(self, place: int, first: int, stop: int, *, at_exit: bool = False) -> list[int]:
        """The tokens of these ranks at a place whose prefix is right."""
        ranks = self.exit_ranks if at_exit else self.ranks
        return [
            place if ranks[place] == rank else _other(place, rank) for rank in range(first, stop)
        ]


def _other(place: int, rank: int) -> int:
    """A token that is not the target's."""
    return ~(place * _WIDTH + rank)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a target step by its rows, of a draft step by its branches, and of a message
    between the two.
    """

    draft: Callable[[int], float]
    target: Callable[[int], float] = lambda rows: 1.0  # however many it feeds
    message: float = 0.0


DraftDevices = tuple[list[Device], Callable[[float, int], float]]
"""Devices, and when so many tokens are drafted that may be begun at a time."""


@dataclass(slots=True)
class Timeline:
    """What a scheme came to."""

    devices: list[Device]
    tokens: int = 0
    written: list[int] = field(default_factory=list[int])  # tokens, by step of the target
    hits: int = 0
    guessed: int = 0  # steps before which outcomes were guessed
    wasted: int = 0  # branches that were not needed
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Of the target."""
        return len(self.written)

    @property
    def rate(self) -> float:
        """Tokens a second: the speed-up, where plain decoding takes a second a token."""
        return self.tokens / self.seconds


def serial(
    trace: AcceptanceTrace, costs: Costs, proposed: int, drafter: DraftDevices | None = None
) -> Timeline:
    """Draft, verify, draft: one side always waits. `drafter` stands in for a device with the costs
    of the draft.
    """
    draft = Device("draft")
    target = Device("target")
    devices, run = drafter or (
        [draft],
        lambda ready, count: draft.run(ready, count * costs.draft(1), "draft"),
    )
    line = Timeline([*devices, target])
    while line.tokens + proposed < len(trace.ranks):
        ready = run(line.seconds, proposed) + costs.message
        line.seconds = target.run(ready, costs.target(proposed + 1), "verify") + costs.message
        _verified(line, trace.drafted(line.tokens, proposed))
    return line


def fuzzy_devices(layers: int, group: int, attention: float, mlp: float) -> DraftDevices:
    """EasySpec's drafter on `group` devices: one exact pass, then steps whose grouped attentions
    run at once.
    """
    devices = [Device(f"draft {number}") for number in range(group)]

    def step(ready: float, size: int) -> float:
        for first in [0, *range(1, layers - 1, size), layers - 1]:
            count = 1 if first in (0, layers - 1) else min(size, layers - 1 - first)
            ready = max(devices[at].run(ready, attention, "attention") for at in range(count))
            for _ in range(count):
                ready = devices[0].run(ready, mlp, "mlp")
        return ready

    def run(ready: float, count: int) -> float:
        for number in range(count):
            ready = step(ready, 1 if number == 0 else group)
        return ready

    return devices, run


def ahead(
    trace: AcceptanceTrace, costs: Costs, proposed: int, more: int = 0, *, waits: bool = False
) -> Timeline:
    """While the target verifies, the drafter continues guesses of what comes of it.

    The guess that all stands and the draft's own token follows is one (with `more` = 0 this is
    PEARL, whose windows have `proposed` + 1 tokens); `more` tokens of the draft's ranking at every
    place are others. After a miss the target steps without a proposal, or with `waits` waits for a
    new one.
    """
    draft = Device("draft")
    target = Device("target")
    line = Timeline([draft, target])
    cache = OutcomeCache[int]()
    proposal = list[int]()
    while line.tokens + 2 * proposed + 2 < len(trace.ranks):
        begin = line.seconds
        place = line.tokens
        count = len(proposal)
        outcomes = [(count, trace.drafted(place + count, 1)[0])]
        outcomes += [
            (at, v) for at in range(count + 1) for v in trace.candidates(place + at, 1, more + 1)
        ]
        for accepted, token in outcomes:
            cache.put(accepted, token, place + accepted + 1)
        drafted = draft.run(begin, costs.draft(1), "draft")
        drafted = draft.run(drafted, proposed * costs.draft(len(outcomes)), "branches")
        checked = target.run(begin, costs.target(count + 1), "verify")
        line.seconds = max(drafted, checked) + costs.message
        proposal = _selected(line, trace, cache, (proposal, proposed))
        if not proposal and waits:
            line.seconds = (
                draft.run(line.seconds, proposed * costs.draft(1), "draft") + costs.message
            )
            proposal = trace.drafted(line.tokens, proposed)
    return line


def mirror(
    trace: AcceptanceTrace, costs: Costs, proposed: int, top: int, depth: float = 0.5
) -> Timeline:
    """The target's early exit at a share `depth` of its layers names outcomes; the drafter
    continues all meanwhile.
    """
    draft = Device("draft")
    target = Device("target")
    line = Timeline([draft, target])
    cache = OutcomeCache[int]()
    proposal = trace.drafted(0, proposed)
    line.seconds = draft.run(0.0, proposed * costs.draft(1), "draft") + costs.message
    while line.tokens + 2 * proposed + 2 < len(trace.ranks):
        place = line.tokens
        whole = costs.target(proposed + 1)
        told = target.run(line.seconds, depth * whole, "to the exit") + costs.message
        for at in range(proposed + 1):
            for token in trace.candidates(place + at, 0, top, at_exit=True):
                if at == proposed or token != proposal[at]:
                    cache.put(at, token, place + at + 1)
        drafted = draft.run(told, proposed * costs.draft(len(cache)), "branches")
        checked = target.run(told, (1 - depth) * whole, "to the end")
        line.seconds = max(drafted, checked) + costs.message
        proposal = _selected(line, trace, cache, (proposal, proposed))
        if not proposal:
            line.seconds = draft.run(line.seconds, proposed * costs.draft(1), "draft")
            proposal = trace.drafted(line.tokens, proposed)
    return line


def _selected(
    line: Timeline,
    trace: AcceptanceTrace,
    cache: OutcomeCache[int],
    proposal: tuple[list[int], int],
) -> list[int]:
    """Verify a proposal; the next one, of the given length, where its outcome was guessed."""
    tokens, length = proposal
    stood = _verified(line, tokens)
    chosen, others = cache.select(stood, line.tokens - 1)
    line.guessed = line.guessed + 1
    line.wasted = line.wasted + len(others)
    if chosen is None:
        return []
    line.hits += 1
    return trace.drafted(chosen, length)


def _verified(line: Timeline, proposal: Sequence[int]) -> int:
    stood = standing(proposal, range(line.tokens, line.tokens + len(proposal) + 1))
    line.tokens += stood + 1
    line.written.append(stood + 1)
    return stood
