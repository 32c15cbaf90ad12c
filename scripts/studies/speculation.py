"""Compare every way to propose tokens with plain decoding, interleaved in one run.

The second part compares schemes in which draft and target work at the same time: live, on virtual
devices, and by closed formulas.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from itertools import chain
from math import ceil
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, NamedTuple, get_args

import anyio
import numpy as np
import torch
from anyio.from_thread import start_blocking_portal
from torch import Tensor

from atts.accel import build
from atts.accel.overlap.drafter import OutcomeCache
from atts.accel.overlap.mirror import ExitAdapter, ExitGuesses, ExitListener, ExitModel
from atts.accel.speculate.drafter import Calibration, GroupedDrafter
from atts.core import SampleRequest, Sampling, TokenIds
from atts.evaluators import share_estimate
from atts.evaluators.datasets.arithmetic import problems
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.local import LocalEngine
from atts.local.batch import StepBatch, single_rows
from atts.local.cpu.compiling import native_library
from atts.local.cpu.model import AheadBatch, NativeModel
from atts.local.loader import load_weights
from atts.local.logit_sampling import batch_sampling, inverse_cdf, probabilities
from atts.local.model_config import read_model_config
from atts.local.proposals import accepted_length
from atts.local.seams import LayerHook, OverlapStats, SpeculationStats
from atts.models import EMBEDDED, path
from atts.sampling import Seed, uniforms
from scripts.studies.harness import (
    Cell,
    Options,
    Row,
    Spent,
    Spread,
    Table,
    beside_best,
    cpu_seconds,
    figure,
    interleaved,
    interval,
    ratio,
    say,
    wall_seconds,
)
from scripts.studies.local import (
    Lab,
    asked,
    generated,
    noisy,
    opened,
    padded_folder,
    send_all,
    texts,
    written,
)
from scripts.studies.result_pages import page
from scripts.studies.train import Reader, Text

TOKENS = 256
SAMPLES = 4
"""Number of texts per problem."""
LAW = Sampling(0.7)
NOISE = {"weaker": 0.25, "weak": 0.32}
"""Noise added to the draft's weights, in standard deviations of each matrix."""


@dataclass
class Arm:
    """An engine and its measurements in every round."""

    lab: Lab
    engine: LocalEngine
    prompts: Sequence[TokenIds]
    count: int  # number of texts per round
    written: list[list[TokenIds]] = field(default_factory=list[list[TokenIds]])
    # tokens per second of wall time, for each round
    rates: list[float] = field(default_factory=list[float])
    used: float = 0.0  # CPU seconds of all rounds

    def seconds(self) -> float:
        """Run the next round, and return its CPU seconds per token."""
        first = len(self.written) * self.count
        requests = [self._request(number) for number in range(first, first + self.count)]
        wall = time.perf_counter()
        processor = time.process_time()
        self.written.append(self.lab.portal.call(texts, self.engine, requests))
        wall = time.perf_counter() - wall
        processor = time.process_time() - processor
        total = sum(map(len, self.written[-1]))
        self.rates.append(total / wall)
        self.used += processor
        return processor / total

    def _request(self, number: int) -> SampleRequest:
        problem, sample = divmod(number, SAMPLES)
        ids = self.prompts[problem % len(self.prompts)]
        return SampleRequest(
            ids, TOKENS, LAW, Seed(1, sample=number), rollout=f"p{problem}/{sample}"
        )

    @property
    def speculation(self) -> SpeculationStats:
        """Return the engine's statistics of proposals; they are empty if nothing was proposed."""
        return self.engine.loop_stats().speculation or SpeculationStats()


def study(options: Options) -> list[Table]:
    """Compare all proposers with plain decoding, first with the embedded draft, then with weakened
    drafts.

    A last comparison is with transformers.
    """
    torch.set_num_threads(1)
    lengths = options.pick((4,), (2, 4, 8, 12), (1, 2, 4, 6, 8, 12, 16))
    rows = list[Row]()
    places = dict[str, Row]()
    chosen = list[Row]()
    with tempfile.TemporaryDirectory() as place, start_blocking_portal() as portal:
        lab = Lab(options, portal)
        spent = Spent()
        for name, folder in _drafts(Path(place), options).items():
            is_own = name == "embedded"
            for batch in (
                options.pick((1, 4), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32))
                if is_own
                else (1, 4, 16)
            ):
                say(f"speculation: {name} draft, {batch} sequences")
                with _opened(lab, folder, batch, lengths if is_own else lengths[:3]) as arms:
                    seen = _race(lab, arms)
                    rows += [_row((name, batch), arm, arms, seen) for arm in arms]
                    chosen.append(_choice((name, batch), arms, seen))
                    places[name] = _positions(name, arms["k=auto"].speculation)
        theirs = _beside_transformers(lab)
    choices = (
        "draft | sequences | best fixed length | k=auto over best fixed | k=auto over "
        "plain | over plain, first round | mean k chosen | expected over measured "
        "seconds"
    )
    header = "draft | " + " | ".join(str(place) for place in range(1, 9))
    return [
        _speeds(rows, spent),
        Table.of(
            "Choices of the controller, compared with the best fixed length",
            choices,
            chosen,
            "The study finds the best fixed k on half of the rounds and measures it on the other "
            "half, and then swaps the halves. Before the measured rounds, the controller learns "
            "in ten rounds. In the first round (n=1), it has not learned anything yet.",
        ),
        Table.of(
            "Acceptance by position, if all earlier tokens are accepted", header, places.values()
        ),
        theirs,
    ]


@contextmanager
def _opened(
    lab: Lab, drafter: Path, batch: int, lengths: Sequence[int]
) -> Generator[dict[str, Arm]]:
    draft = {"drafter": str(drafter), "speculate": "draft"}
    # The engine with two threads gets its own process. In a process whose other threads also have
    # helpers, OpenMP's threads would sleep between the parts of a step.
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "plain, two threads": {"threads": 2, "worker": "process"},
    }
    ways |= {f"k={k}": {**draft, "k": k} for k in lengths}
    ways |= {
        "k=auto": draft,
        "k=auto, all proposers": {"drafter": str(drafter)},
        "suffix": {"speculate": "suffix"},
    }
    # a second engine without proposals shows how much measurements of two identical engines differ
    ways["plain, once more"] = {}
    questions = [problem.text for problem in problems("test", 512, 7 + lab.options.seed)]
    with ExitStack() as stack:
        arms = dict[str, Arm]()
        for name, changes in ways.items():
            engine = stack.enter_context(
                lab.engine(path("target"), max_batch=batch, kv_tokens=1 << 16, **changes)
            )
            prompts = [request.ids for request in asked(engine, questions, TOKENS, 0)]
            arms[name] = Arm(lab, engine, prompts, max(8, 2 * batch))
        yield arms


def _race(lab: Lab, arms: Mapping[str, Arm]) -> dict[str, list[float]]:
    """Return CPU seconds per token, by arm and round.

    :raises AssertionError: an arm's text differs from the text of plain decoding.
    """
    measures = {name: arm.seconds for name, arm in arms.items()}
    seen = interleaved(measures, lab.options.pick(2, 14, 24), warmup=lab.options.pick(1, 10, 10))
    for name, arm in arms.items():
        assert arm.written == arms["plain"].written, f"{name} wrote another text"
    return seen


def _row(lead: Row, name: str, arms: Mapping[str, Arm], seen: Mapping[str, Sequence[float]]) -> Row:
    arm = arms[name]
    rounds = len(seen[name])
    wall = ratio({way: one.rates[-rounds:] for way, one in arms.items()}, name, "plain")
    found = arm.speculation
    written = sum(len(text) for texts in arm.written for text in texts)
    processor = "-" if "threads" in name else str(ratio(seen, "plain", name))
    stood = found.accepted / found.proposed if found.proposed else None
    steps = arm.engine.loop_stats().step_sequences
    return *lead, name, processor, str(wall), written / steps, stood, found.seconds / arm.used


def _choice(lead: Row, arms: Mapping[str, Arm], seen: Mapping[str, Sequence[float]]) -> Row:
    found = arms["k=auto"].speculation
    best, beside = beside_best(
        seen, [name for name in seen if name[2:].isdigit() or name == "plain"], "k=auto"
    )
    expected = found.expected_seconds / found.came_seconds if found.came_seconds else None
    first = arms["k=auto"].rates[0] / arms["plain"].rates[0]
    mean = found.chosen / max(1, found.choices)
    return (
        *lead,
        ", ".join(best),
        str(beside),
        str(ratio(seen, "plain", "k=auto")),
        first,
        mean,
        expected,
    )


def _positions(draft: str, found: SpeculationStats) -> Row:
    """Return the acceptance rate of each position, counting only steps in which all earlier
    positions were accepted.
    """
    pairs = list(zip(found.accepted_at, found.tested_at, strict=True))
    shares = [figure(stood / tested, 3) if tested else "-" for stood, tested in pairs[:8]]
    return draft, *shares, *["-"] * (8 - len(shares))


def _drafts(place: Path, options: Options) -> dict[str, Path]:
    """Return the embedded draft, and copies with noise in their weights.

    A copy has the same cost as the draft, but agrees less often with the target.
    """
    noises = NOISE if options.effort != "quick" else {}
    return {
        "embedded": path("draft"),
        **{name: noisy(place / name, noise) for name, noise in noises.items()},
    }


def _beside_transformers(lab: Lab) -> Table:
    """Write texts one after another on the same prompts, with atts and with transformers."""
    say("speculation: assisted generation")
    target, draft = (opened(path(name)) for name in EMBEDDED[::-1])
    with _opened(lab, path("draft"), 1, (8,)) as arms:
        own = arms["k=auto"]
        own.count = 4

        def theirs(**ways: Any) -> float:
            began = time.process_time()
            written = 0
            for prompt in own.prompts[:2]:
                text = generated(target, torch.tensor([prompt]), TOKENS, min_new_tokens=0, **ways)
                written += text.shape[1] - len(prompt)
            return (time.process_time() - began) / written

        measures: dict[str, Callable[[], float]] = {"k=auto": own.seconds, "generate": theirs}
        measures["assisted"] = partial(theirs, assistant_model=draft)
        seen = interleaved(measures, lab.options.pick(2, 4, 9))
    return Table.of(
        "Compared with assisted generation of `transformers`, one text after another",
        "`generate` | tokens per processor second | k=auto over `generate`",
        [
            (name, 1 / Spread.of(seen[name]).median, str(ratio(seen, name, "k=auto")))
            for name in ("generate", "assisted")
        ],
        "atts and transformers run the embedded pair in float32 at temperature 0.7, on one thread.",
    )


def _speeds(rows: Sequence[Row], spent: Spent) -> Table:
    firsts = [row for row in rows if row[0] == "embedded" and row[2] == "k=auto"]
    figures = ", ".join(f"{row[3]} at {row[1]}" for row in firsts)
    return Table.of(
        "Compared with plain decoding",
        "draft | sequences | arm | speed-up in processor time | in wall time | tokens "
        "per step and sequence | accepted share of proposals | share of time spent on "
        "proposals",
        rows,
        f"The embedded target writes {SAMPLES} texts for each arithmetic problem, at "
        f"temperature {LAW.temperature} on one thread. The study checks that every row wrote the "
        "same tokens as plain decoding. `suffix` proposes continuations from other texts of the "
        "same problem. `plain, once more` repeats plain decoding with a second engine and shows "
        "the measurement noise. *Weaker* and *weak* are copies of the embedded draft with "
        "Gaussian noise on the weights: the noise has "
        f"{' and '.join(map(str, NOISE.values()))} times the standard deviation of each matrix.",
        spent.disturbance(),
        headline=f"tokens a second compared with plain decoding, embedded pair: {figures} sequences",
    )


def expected_tokens(accepted: float, proposed: int) -> float:
    """Return the expected tokens of one step: the accepted proposals and the token after the last
    of them.

    >>> expected_tokens(0.5, 2)
    1.75
    """
    return proposed + 1.0 if accepted == 1 else (1 - accepted ** (proposed + 1)) / (1 - accepted)


def serial_speedup(accepted: float, proposed: int, cost_ratio: float) -> float:
    """Return the speed-up of serial speculation, in which drafting and verifying alternate."""
    return expected_tokens(accepted, proposed) / (1 + proposed / cost_ratio)


def best_serial(accepted: float, cost_ratio: float, most: int = 64) -> tuple[float, int]:
    """Return the best speed-up of serial speculation with a fixed length, and the length."""
    return max(
        (serial_speedup(accepted, proposed, cost_ratio), proposed) for proposed in range(most + 1)
    )


def hit_rate(accepted: float, ranked: float, proposed: int) -> float:
    """Return the probability that the outcome of a step was guessed.

    One guess is that all tokens are accepted. For a rejection at any position, several tokens are
    guessed, and `ranked` is the probability that the target's token is one of them. With `ranked` =
    0, only the first guess is left, as in PEARL.
    """
    return ranked * expected_tokens(accepted, proposed) + accepted ** (proposed + 1)


def overlapped_tokens(accepted: float, ranked: float, proposed: int) -> float:
    """Return the tokens per step if drafting and verifying take place at the same time.

    After a wrong guess, the target takes a step without a proposal. With `ranked` = 0 and windows
    of `proposed` + 1 tokens, the result is PEARL's formula (1-a^G) / ((1-a) (1+a-a^G)).
    """
    alone = accepted + ranked
    hit = hit_rate(accepted, ranked, proposed)
    share = alone / (1 + alone - hit)  # share of steps in which the target has a proposal
    return 1 - share + share * expected_tokens(accepted, proposed)


def pearl_speedup(accepted: float, window: int, cost_ratio: float) -> float:
    """Return the speed-up of PEARL's pre- and post-verification with `window` draft steps per
    target step.
    """
    return overlapped_tokens(accepted, 0.0, window - 1) / max(1.0, window / cost_ratio)


def mirror_seconds(depth: float, rendezvous: float, drafting: float) -> float:
    """Return the seconds of a step of Mirror, by its equation (10).

    The target runs to its early exit and sends a message; then target and drafter work at the same
    time, and a second message follows.
    """
    return depth + rendezvous + max(1 - depth, drafting) + rendezvous


def grouped_drafting(layers: int, group: int, attention: float, mlp: float) -> float:
    """Return the time of a draft step of EasySpec.

    The first and the last layer are exact. For the layers in between, the attentions of each group
    run at the same time.
    """
    return (min(2, layers) + ceil(max(0, layers - 2) / group)) * attention + layers * mlp


_MOST_RANKS = 1 << 16  # upper limit of a token's rank at one position


class Work(NamedTuple):
    """A piece of work on a device, which a timeline shows as a bar."""

    device: str
    begin: float
    end: float
    what: str


@dataclass(slots=True)
class Device:
    """A device that does one piece of work at a time, in the order of requests."""

    name: str
    free_at: float = 0.0
    work: list[Work] = field(default_factory=list[Work])

    def run(self, ready: float, seconds: float, what: str) -> float:
        """Add work that cannot begin before `ready`, and return the time at which it ends."""
        begin = max(ready, self.free_at)
        self.free_at = begin + seconds
        self.work.append(Work(self.name, begin, self.free_at, what))
        return self.free_at


@dataclass(frozen=True, slots=True)
class AcceptanceTrace:
    """The ranks that the draft and the target's early exit give to the tokens of a text by the
    target.

    Rank 0 is the token that the draft itself samples, which the target accepts. A proposed token is
    tested only if all earlier tokens are the target's, so ranks along the target's own text are
    sufficient.
    """

    ranks: Sequence[int]
    exit_ranks: Sequence[int] = ()

    @classmethod
    def drawn(
        cls, law: Sequence[float], places: int, seed: int, exit_law: Sequence[float] = ()
    ) -> AcceptanceTrace:
        """Return a trace with ranks in random order. The share `law[r]` of all positions has rank
        r.

        If the shares add up to less than 1, the other positions have a rank beyond every requested
        rank.
        """
        random = np.random.default_rng(seed)
        ranks = list[list[int]]()
        for each in filter(None, (law, exit_law)):
            # each rank gets exactly its share of the positions, which gives less noise than
            # independent draws
            even = (random.permutation(places) + 0.5) / places
            found: list[int] = np.searchsorted(np.cumsum(each), even, side="right").tolist()
            ranks.append([rank if rank < len(each) else _MOST_RANKS for rank in found])
        return cls(*ranks)

    def drafted(self, place: int, count: int) -> list[int]:
        """Return the tokens that the draft writes after a correct prefix.

        Tokens are numbers here. A position's number is the target's token at that position.
        """
        return [at if self.ranks[at] == 0 else _other(at, 0) for at in range(place, place + count)]

    def candidates(self, place: int, first: int, stop: int, *, at_exit: bool = False) -> list[int]:
        """Return the tokens that have the ranks `first` to `stop` - 1 at a position with a correct
        prefix.
        """
        ranks = self.exit_ranks if at_exit else self.ranks
        return [
            place if ranks[place] == rank else _other(place, rank) for rank in range(first, stop)
        ]


def _other(place: int, rank: int) -> int:
    """Return a number that stands for a token other than the target's."""
    return ~(place * _MOST_RANKS + rank)


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a target step, a draft step and a message, in seconds.

    A target step's cost depends on its number of rows, and a draft step's cost on its number of
    branches. A message is sent between two devices.
    """

    draft: Callable[[int], float]
    # seconds of a target step; by default, the same for any number of rows
    target: Callable[[int], float] = lambda rows: 1.0
    message: float = 0.0


DraftDevices = tuple[list[Device], Callable[[float, int], float]]
"""Draft devices, and a function that takes the earliest time to begin and a number of tokens. It
returns the time at which these tokens are drafted.
"""


@dataclass(slots=True)
class Timeline:
    """The devices, steps, tokens and seconds of a scheme in virtual time."""

    devices: list[Device]
    tokens: int = 0
    # number of tokens that each target step writes
    written: list[int] = field(default_factory=list[int])
    hits: int = 0
    guessed: int = 0  # number of steps whose outcome the drafter had guessed in advance
    wasted: int = 0  # number of drafted branches that were not used
    seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Count the target's steps."""
        return len(self.written)

    @property
    def rate(self) -> float:
        """Return the number of tokens per second; this is the speed-up if plain decoding takes a
        second per token.
        """
        return self.tokens / self.seconds


def serial(
    trace: AcceptanceTrace, costs: Costs, proposed: int, drafter: DraftDevices | None = None
) -> Timeline:
    """Simulate serial speculation: draft and target take turns, so one of them always waits.

    By default, one device drafts at the costs of the draft; `drafter` replaces it.
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
    """Return devices that draft as EasySpec does: one exact pass, then passes with grouped
    attentions.

    The `group` devices compute the attentions of a group at the same time, one attention each.
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
    """Simulate a drafter that guesses the outcome of the target's step, and continues its guesses
    while the target verifies.

    One guess is that all tokens are accepted and the draft's own token follows. With `more` = 0
    this is the only guess, as in PEARL, whose windows have `proposed` + 1 tokens. Otherwise, `more`
    tokens of the draft's ranking are also guessed at every position.

    After a wrong guess, the target takes a step without a proposal. With `waits`, it waits for a
    new proposal instead.
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
    """Simulate Mirror: the target's early exit names likely outcomes of the step, and the drafter
    continues each of them.

    The exit is after a share `depth` of the target's layers.
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
        informed = target.run(line.seconds, depth * whole, "to the exit") + costs.message
        for at in range(proposed + 1):
            for token in trace.candidates(place + at, 0, top, at_exit=True):
                if at == proposed or token != proposal[at]:
                    cache.put(at, token, place + at + 1)
        drafted = draft.run(informed, proposed * costs.draft(len(cache)), "branches")
        checked = target.run(informed, (1 - depth) * whole, "to the end")
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
    """Verify a proposal, and return the next proposal. It has no tokens if the outcome was not
    guessed.
    """
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
    stood = accepted_length(proposal, range(line.tokens, line.tokens + len(proposal) + 1))
    line.tokens += stood + 1
    line.written.append(stood + 1)
    return stood


Speedup = Callable[[float], float]
Run = Callable[[AcceptanceTrace], Timeline]
_FAN = 3
_TOP = 8
_WINDOW = 7
_MIRROR_RATIO = 14.0
_MESSAGE = 0.01
_MIRRORED = {"14B, mean": 3.80, "14B, best": 5.32, "32B, best": 5.84}
_TARGET_MS = 18.35
_TARGET_MS_A_TOKEN = 0.064
_DRAFT_MS = 6.94
"""Published fits of the milliseconds of a step: Llama-3-70B on four H100 (first two numbers),
Llama-3-8B on one H100.
"""


def closed_forms(options: Options) -> Table:
    """Compare virtual devices with closed formulas, if tokens are accepted independently."""
    rows = list[Row]()
    for accepted, cost_ratio in ((0.6, 3), (0.8, 5), (0.9, 10), (0.95, 10)):
        trace = AcceptanceTrace.drawn(
            (accepted, (1 - accepted) / 2), options.pick(6000, 20_000, 200_000), options.seed
        )
        costs = Costs(partial(_even, cost_ratio))
        ranked = (1 - accepted) / 2
        best, proposed = best_serial(accepted, cost_ratio)
        found = (
            (f"serial, k={proposed}", serial(trace, costs, proposed), best),
            (
                "PEARL",
                ahead(trace, costs, cost_ratio - 1),
                pearl_speedup(accepted, cost_ratio, cost_ratio),
            ),
            (
                "fan-out of 1",
                ahead(trace, costs, cost_ratio - 1, 1),
                overlapped_tokens(accepted, ranked, cost_ratio - 1),
            ),
        )
        rows += [
            (accepted, cost_ratio, name, line.rate, formula, line.rate / formula - 1)
            for name, line, formula in found
        ]
    header = (
        "acceptance | draft steps per target step | scheme | simulated devices | closed "
        "formula | difference"
    )
    return Table.of("Speed-up over plain decoding, independent acceptances", header, rows)


@dataclass(frozen=True, slots=True)
class Headline:
    """A published figure, the costs of its setting, and its simulation.

    Costs are published, or derived from the setting.
    """

    system: str
    published: float
    costs: str
    speedup: Speedup  # closed formula that gives the speed-up at an acceptance rate
    run: Run
    cost_ratio: float  # draft steps per target step, for the comparison with serial speculation


def _pearl(costs: Costs, window: int, cost_ratio: float) -> tuple[Speedup, Run, float]:
    return (
        partial(pearl_speedup, window=window, cost_ratio=cost_ratio),
        lambda trace: ahead(trace, costs, window - 1),
        cost_ratio,
    )


def _mirror(hit: float) -> tuple[Speedup, Run, float]:
    """Return formula and simulation of Mirror with a window of 7 tokens and an exit at half depth.

    Drafting takes as long as the second half of the target's layers.
    """

    def speedup(accepted: float) -> float:
        seconds = mirror_seconds(0.5, _MESSAGE, 0.5) + (1 - hit) * 7 / _MIRROR_RATIO
        return expected_tokens(accepted, 7) / seconds

    costs = Costs(partial(_even, _MIRROR_RATIO), message=_MESSAGE)
    return speedup, lambda trace: mirror(trace, costs, _WINDOW, _TOP), _MIRROR_RATIO


def _easy(cost_ratio: float) -> tuple[Speedup, Run, float]:
    """Return formula and simulation of EasySpec with seven tokens from 32 layers in groups of 4.

    Attention's share of a layer is chosen such that grouping makes drafting 1.62 times as fast.
    """
    attention, mlp = (share / cost_ratio / 32 for share in (1.256 / 2.256, 1 / 2.256))
    exact, grouped = (grouped_drafting(32, group, attention, mlp) for group in (1, 4))

    def speedup(accepted: float) -> float:
        return expected_tokens(accepted, 7) / (1 + exact + 6 * grouped)

    costs = Costs(partial(_even, cost_ratio))
    return (
        speedup,
        lambda trace: serial(trace, costs, 7, fuzzy_devices(32, 4, attention, mlp)),
        cost_ratio,
    )


def headlines() -> list[Headline]:
    """Return the settings of the published figures."""
    cost_ratio = _TARGET_MS / _DRAFT_MS
    fitted = f"published fits: {_TARGET_MS} + {_TARGET_MS_A_TOKEN} n ms with {_DRAFT_MS} ms"
    five = "its window of 5 tokens, where by its theorem a target step takes 5 draft steps"
    exits = (
        "window 7, exit at half depth, drafting takes the other half, messages 0.01, exit "
        "correct 0.95"
    )
    groups = "10 draft steps a target step, 7 tokens, groups of 4 of 32 layers, 1.62x in drafting"
    return [
        Headline("PEARL, 7B and 70B", 4.43, five, *_pearl(Costs(partial(_even, 5.0)), 5, 5.0)),
        Headline("PEARL, Llama-3.1 8B and 70B", 3.87, fitted, *_pearl(_fitted(), 3, cost_ratio)),
        *[
            Headline(f"Mirror, {who}", figure, exits, *_mirror(0.95))
            for who, figure in _MIRRORED.items()
        ],
        Headline("EasySpec, 72B, best", 4.17, groups, *_easy(10.0)),
    ]


def needed(speedup: Speedup, goal: float) -> float | None:
    """Return the acceptance rate at which the speed-up reaches the goal, or None.

    The speed-up must increase with the acceptance rate.
    """
    low = 0.0
    high = 1.0
    if speedup(high) < goal:
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if speedup(middle) >= goal else (middle, high)
    return high


def published(options: Options) -> Table:
    """Tabulate the acceptance rate that each published figure needs, and the speed-up simulated at
    this rate.
    """
    rows = list[Row]()
    for each in headlines():
        needs = needed(each.speedup, each.published)
        ceiling = each.speedup(1.0)
        if needs is None:
            rows.append(
                (
                    each.system,
                    each.published,
                    each.costs,
                    ceiling,
                    "-",
                    "-",
                    "-",
                    "out of reach at these costs",
                )
            )
            continue
        law = needs, (1 - needs) / 2
        trace = AcceptanceTrace.drawn(
            law, options.pick(4000, 20_000, 100_000), options.seed, (0.6, *[0.05] * 7)
        )
        rate = each.run(trace).rate
        alone = best_serial(needs, each.cost_ratio)[0]
        verdict = f"follows from acceptance {needs:.2f}"
        rows.append(
            (
                each.system,
                each.published,
                each.costs,
                ceiling,
                needs,
                rate,
                each.published / alone,
                verdict,
            )
        )
    header = (
        "system | published | costs | at acceptance 1 | acceptance needed | simulated "
        "with it | published over best serial | verdict"
    )
    note = (
        "*Acceptance needed* is the acceptance rate at which the formula gives the published "
        "speed-up, if all tokens have the same rate. The real acceptance rates were not "
        "published. So this table shows only that a published speed-up is possible, not that it "
        "is correct."
    )
    return Table.of(
        "Published speed-ups over plain decoding, and the acceptance that they need",
        header,
        rows,
        note,
    )


class Recorder:
    """An embedded model that records its distributions along given texts.

    If only its first layers are loaded, the model is an untrained early exit of itself.
    """

    def __init__(self, name: str, layers: int | None = None, *, trained: bool = False) -> None:
        """Load the model.

        With `trained`, distributions are read at the early exit, through the shipped adapter.
        """
        folder = path(name)  # type: ignore[arg-type]
        self._reader = Reader(folder, layers)
        config = self._reader.config
        weights = self._reader.weights
        self._adapter = ExitAdapter.read(folder, config, weights, name) if trained else None

    def laws(self, ids: TokenIds, first: int, sampling: Sampling) -> Tensor:
        """Return the distribution of the next token after every prefix that has at least `first`
        ids.

        The result has the shape [places, vocabulary].
        """
        heard = list[Tensor]()
        text = Text(ids, first)
        if self._adapter is None:
            hidden = self._reader.read(text)
        else:
            self._reader.read(text, LayerHook(self._adapter.layers, heard.append))
            hidden = self._adapter(heard[0], self._reader.config.norm_eps)
        logits = self._reader.model.compute_logits(hidden)
        return probabilities(logits, batch_sampling([sampling] * len(logits), logits.shape[-1]))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Texts of the target, and the random seeds that sampled them."""

    texts: Sequence[tuple[TokenIds, int, Seed]]  # ids, index of the first written token, and seed
    sampling: Sampling

    def own_ranks(self, model: Recorder) -> list[list[int]]:
        """Return the rank that the model gives to each of the target's tokens.

        Rank 0 is the token that the model itself samples with the same random number. All other
        tokens are ranked by probability.
        """
        ranks = list[list[int]]()
        for ids, first, seed in self.texts:
            laws = model.laws(ids, first, self.sampling)
            drawn = torch.tensor(ids[first:])
            own = inverse_cdf(laws, torch.from_numpy(uniforms(seed, len(drawn)).copy()))
            laws.scatter_(1, own[:, None], 2.0)  # the token that the model samples gets rank 0
            ranks.append(_places(laws, drawn))
        return ranks

    def exit_ranks(self, model: Recorder) -> list[list[int]]:
        """Return the rank that the model gives to each of the target's tokens, by probability
        alone.
        """
        plain = replace(self.sampling, temperature=1.0)
        return [
            _places(model.laws(ids, first, plain), torch.tensor(ids[first:]))
            for ids, first, _ in self.texts
        ]


def _places(laws: Tensor, tokens: Tensor) -> list[int]:
    ranks: list[int] = (laws > laws.gather(1, tokens[:, None])).sum(1).tolist()
    return ranks


async def record(count: int, seed: int) -> Recorded:
    """Record texts of the embedded target on some problems."""
    questions = [problem.text for problem in arithmetic("test", count)]
    found = await written(path("target"), questions, 400, seed)
    return Recorded(
        [(one.ids + text, len(one.ids), one.seed) for one, text in found], found[0][0].sampling
    )


def recorded(options: Options, texts: Recorded) -> list[Table]:
    """Measure how often guesses of the next token are correct on recorded texts, and simulate every
    scheme at larger models' costs.
    """
    say("overlap: recording ranks of the target's tokens by drafts and early exits")
    drafts = {"draft": texts.own_ranks(Recorder("draft"))}
    drafts |= {
        f"target's first {n} of 6 layers": texts.own_ranks(Recorder("target", n)) for n in (4, 5)
    }
    exits = {depth: texts.exit_ranks(Recorder("target", depth)) for depth in (3, 5)}
    named = {
        f"target's exit after {depth} of 6 layers, untrained": ranks
        for depth, ranks in exits.items()
    }
    trained = texts.exit_ranks(Recorder("target", trained=True))
    named["target's exit after 3 of 6 layers, trained"] = trained
    hits: list[Row] = [
        (name, sum(map(len, ranks)), *_shares_by_rank(ranks), _named(drafts["draft"], ranks))
        for name, ranks in (drafts | named).items()
    ]
    hits.append(
        (
            "oracle",
            len(_flat(trained)),
            "1",
            "1",
            "1",
            _named(drafts["draft"], [[0] * len(own) for own in trained]),
        )
    )
    rows = [
        row
        for name, ranks in drafts.items()
        for row in _replayed(name, _flat(ranks), _flat(trained))
    ]
    header = (
        "draft | acceptance | costs | scheme | speed-up | tokens per target step | hit "
        "rate | wasted branches per step"
    )
    guesses = f"guesses by | n | first | first {_FAN} | first {_TOP} | outcome guessed, windows of {_WINDOW}"
    return [
        Table.of("The target's next token among guesses", guesses, hits),
        Table.of("Recorded acceptances at the costs of larger models, virtual time", header, rows),
    ]


def _named(draft: list[list[int]], ranks: list[list[int]]) -> str:
    """Measure how often the outcome of a step is among the `_TOP` tokens with the best ranks, if
    the draft proposes whole windows.
    """
    line = mirror(
        AcceptanceTrace(_flat(draft), _flat(ranks)),
        Costs(partial(_even, _MIRROR_RATIO)),
        _WINDOW,
        _TOP,
    )
    return interval(share_estimate([(1, 1)] * line.hits + [(0, 1)] * (line.guessed - line.hits)))


def _shares_by_rank(ranks: list[list[int]]) -> list[str]:
    shares = list[str]()
    for top in (1, _FAN, _TOP):
        counts = [(sum(rank < top for rank in text), len(text)) for text in ranks]
        shares.append(interval(share_estimate(counts)))
    return shares


def _flat(ranks: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(ranks))


def _replayed(name: str, ranks: list[int], exit_ranks: list[int]) -> Iterator[Row]:
    accepted = sum(rank == 0 for rank in ranks) / len(ranks)
    trace = AcceptanceTrace(ranks, exit_ranks)
    for words, costs, steps in _costs():
        window = max(2, round(steps))
        lines = {
            "serial, best k": max(
                (serial(trace, costs, k) for k in range(1, 17)), key=lambda line: line.rate
            ),
            "PEARL": ahead(trace, costs, window - 1),
            "fan-out": ahead(trace, costs, window - 1, _FAN),
            "Mirror": mirror(trace, costs, _WINDOW, _TOP),
            "Mirror, exit always correct": mirror(
                replace(trace, exit_ranks=[0] * len(ranks)), costs, _WINDOW, _TOP
            ),
        }
        for scheme, line in lines.items():
            counts = line.tokens / line.steps, _share(line), line.wasted / line.steps
            yield (name, accepted, words, scheme, line.rate, *counts)


def _share(line: Timeline) -> float | None:
    return line.hits / line.guessed if line.guessed else None


def _costs() -> list[tuple[str, Costs, float]]:
    apart = Costs(partial(_even, _MIRROR_RATIO), message=_MESSAGE)
    return [
        (
            "70B on 4 H100 with 8B (published fits)",
            replace(_fitted(), message=0.005),
            _TARGET_MS / _DRAFT_MS,
        ),
        ("14 draft steps a target step, drafter on a device of its own", apart, _MIRROR_RATIO),
    ]


def _fitted() -> Costs:
    """Return the costs of a 70B target and an 8B draft, from published fits."""
    rise = _TARGET_MS_A_TOKEN / _TARGET_MS
    return Costs(partial(_even, _TARGET_MS / _DRAFT_MS), lambda rows: 1 + (rows - 1) * rise)


def _even(cost_ratio: float, branches: int) -> float:
    """Return the seconds of a draft step, which are the same for any number of branches."""
    return 1 / cost_ratio


_WIDTH = 760
_LEFT = 86
_STRIP = 18
_GAP = 30
_UNIT = 108  # width of a target step in pixels
_COLOURS = {
    "verify": "#2f6fb3", "to the exit": "#6a9bd1", "to the end": "#2f6fb3", "draft": "#c4511d", "branches": "#dd9a6d",
    "attention": "#c4511d", "mlp": "#dd9a6d",
}  # fmt: skip
_NAMES = {
    "draft": "draft; attention",
    "branches": "guessed branches; MLP",
    "verify": "verify; after the exit",
    "to the exit": "up to the early exit",
}


def schemes() -> dict[str, Timeline]:
    """Simulate each scheme on the same ranks, with five draft steps per target step."""
    ranks = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2, *[0] * 60]
    trace = AcceptanceTrace(ranks, [rank % 2 for rank in ranks])
    costs = Costs(lambda branches: 0.2)
    exits = Costs(lambda branches: 0.1, message=0.04)
    easy = fuzzy_devices(8, 3, attention=0.5 / 5 / 8, mlp=0.5 / 5 / 8)
    return {
        "Serial: draft 4, verify, draft": serial(trace, costs, 4),
        "PEARL: the draft continues as if all tokens were accepted": ahead(trace, costs, 4),
        "SSD: the draft's next choices at every position are continued as well": ahead(trace, costs, 4, 2),
        "Mirror: the target's early exit chooses what the draft continues": mirror(trace, exits, 4, 2),
        "EasySpec: attentions of a group of 3 layers at once (8 layers)": serial(trace, costs, 4, easy),
    }  # fmt: skip


def drawn(lines: dict[str, Timeline]) -> str:
    """Draw the timelines from left to right. Each number counts the tokens that one target step
    wrote.
    """
    parts = list[str]()
    top = 40
    for title, line in lines.items():
        parts.append(f'<text class="axis" x="8" y="{top - 8}">{escape(title)}</text>')
        for device in reversed(line.devices):
            parts.append(
                f'<text x="{_LEFT - 8}" y="{top + 13}" '
                f'text-anchor="end">{escape(device.name)}</text>'
            )
            is_target = device.name == "target"
            step = 0
            for work in device.work:
                x = _LEFT + work.begin * _UNIT
                wide = (work.end - work.begin) * _UNIT
                if x + wide > _WIDTH - 6:
                    break
                box = f'x="{x:.1f}" y="{top}" width="{max(1.0, wide - 1):.1f}" height="{_STRIP}"'
                parts.append(
                    f'<rect {box} fill="{_COLOURS[work.what]}"><title>{work.what}</title></rect>'
                )
                if is_target and work.what != "to the exit":
                    place = f'x="{x + wide / 2:.1f}" y="{top + 13}" text-anchor="middle" style="fill:#fff"'
                    parts.append(f"<text {place}>{line.written[step]}</text>")
                    step += 1
            top += _STRIP + 3
        top += _GAP
    for step in range((_WIDTH - _LEFT) // _UNIT + 1):
        parts.append(f'<path class="grid" d="M{_LEFT + step * _UNIT} 14V{top - 20}"/>')
        parts.append(
            f'<text x="{_LEFT + step * _UNIT}" y="{top - 6}" text-anchor="middle">{step}</text>'
        )
    parts.append(f'<text x="{_LEFT - 8}" y="{top - 6}" text-anchor="end">target steps</text>')
    parts += _legend(top + 8)
    return page(
        "What each device does, and how many tokens each step of the target writes",
        _WIDTH,
        top + 34,
        parts,
    )


def _legend(top: int) -> list[str]:
    parts = list[str]()
    for number, (what, name) in enumerate(_NAMES.items()):
        x = 8 + 190 * number
        parts.append(f'<rect x="{x}" y="{top}" width="14" height="14" fill="{_COLOURS[what]}"/>')
        parts.append(f'<text x="{x + 20}" y="{top + 12}">{escape(name)}</text>')
    return parts


_PAIR = {"drafter": str(path("draft"))}
_DEEP = {"drafter": str(path("deep")), "speculate": "draft", "k": 8}
_MIRROR = {**_PAIR, "speculate": "mirror", "k": 16}
_ARMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    # The engine gets its own process, because in this process other threads would wake the engine's
    # helper threads.
    "plain, two threads": {
        "threads": 2,
        "worker": "process",
    },
    "serial, k=4": {**_PAIR, "speculate": "draft", "k": 4},
    "serial, k=8": {**_PAIR, "speculate": "draft", "k": 8},
    "serial, k=auto": {**_PAIR, "speculate": "draft"},
    "auto": {**_PAIR, "speculate": "auto"},
    "pearl": {**_PAIR, "speculate": "pearl", "k": 16},
    "ssd": {**_PAIR, "speculate": "ssd", "k": 16},
    "mirror": _MIRROR,
    "mirror, untrained": _MIRROR,
    "mirror, oracle": _MIRROR,
    "deep, k=8": _DEEP,
    "easy: deep in groups of 4": {**_DEEP, "fuzzy": 4},
}
_GROUPS = (1, 2, 3, 4, 6)  # how many attentions are computed together
_CONTEXTS = (60, 150, 250)  # numbers of tokens before the first drafted token
_TOKENS = 8
_DRAWS = 10  # number of drafting calls per round


def study_overlap(options: Options) -> list[Table]:
    """Return the tables that depend on this machine's clock."""
    return [*live(options), groups(options)]


def study_virtual(options: Options) -> list[Table]:
    """Draw the picture of all schemes, and return the tables in virtual time.

    These tables do not depend on the load of the machine.
    """
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out.parent / "acceleration.svg").write_text(drawn(schemes()))
    texts = anyio.run(record, options.pick(6, 16, 200), options.seed)
    return [closed_forms(options), published(options), *recorded(options, texts)]


class Oracle(ExitModel):
    """An ideal early exit, which knows the next token.

    It has the texts of an earlier round, and the requests come in the same order again.
    """

    texts: ClassVar[list[TokenIds]] = []

    def _heard(self, listener: ExitListener, batch: StepBatch, x: object) -> ExitGuesses:
        rows = np.repeat(batch.table_rows, np.diff(batch.query_starts))[batch.logit_rows].tolist()
        guesses = dict[int, list[tuple[Sequence[int], Sequence[float]]]]()
        for row, place in zip(rows, batch.positions[batch.logit_rows].tolist(), strict=True):
            if row in listener.rows:
                key = listener.rows[row][0]
                coming = self.texts[(key - 1) % len(self.texts)][place + 1 : place + 2]
                guesses.setdefault(key, []).append((coming, [1.0] * len(coming)))
        return guesses


@contextmanager
def _exit(arm: str) -> Generator[None]:
    """Let engines that are opened in this context use the arm's kind of early exit."""
    build.__dict__["ExitModel"] = Oracle if "oracle" in arm else ExitModel
    try:
        yield
    finally:
        build.__dict__["ExitModel"] = ExitModel


def live(options: Options) -> list[Table]:
    """Measure one sequence at a time, with the same texts for all arms, for each size to which the
    target is padded.
    """
    spent = Spent()
    tables = list[Table]()
    for pad in options.pick(("",), ("", "20M", "200M"), ("", "20M", "200M")):
        say(f"overlap: the embedded target{pad and f' padded to {pad}'}")
        tables.append(_table(options, pad, spent))
    return tables


def _padded(folder: Path, pad: str) -> Path:
    return padded_folder(folder, pad) if pad else folder


def _table(options: Options, pad: str, spent: Spent) -> Table:
    count, rounds = (2, 3) if pad == "200M" else (options.pick(2, 4, 8), options.pick(2, 5, 9))
    with start_blocking_portal() as portal, ExitStack() as stack:
        lab = Lab(options, portal)
        bare = stack.enter_context(TemporaryDirectory())
        engines = dict[str, LocalEngine]()
        for name, changes in _ARMS.items():
            with _exit(name):
                engines[name] = stack.enter_context(
                    lab.engine(_padded(_folder(name, Path(bare)), pad), **changes)
                )
        requests = asked(
            engines["plain"], [one.text for one in arithmetic("test", count)], 160, options.seed
        )
        texts = dict[str, list[TokenIds]]()
        for name, engine in engines.items():
            texts[name] = [portal.call(engine.sample, one).ids for one in requests]
            Oracle.texts = [
                one.ids + text for one, text in zip(requests, texts["plain"], strict=True)
            ]
        before = {name: engine.loop_stats() for name, engine in engines.items()}
        seen = interleaved(
            {name: partial(_seconds, lab, each, requests) for name, each in engines.items()}, rounds
        )
        rows = list[Row]()
        for name, engine in engines.items():
            now = engine.loop_stats()
            then = before[name]
            faster = texts[name] == texts["plain"], str(ratio(seen, "plain", name))
            tokens = (now.sampled_tokens - then.sampled_tokens) / (now.steps - then.steps)
            rows.append(
                (
                    name,
                    *faster,
                    tokens,
                    *_shares(now.speculation.overlap if now.speculation else None),
                )
            )
    title = f"One sequence at a time, over plain decoding, embedded target{pad and f' at the cost of {pad} weights'}"
    header = (
        "arm | same texts | speed-up | tokens per step | hit rate | late | wasted per "
        "step | draft passes per token"
    )
    return Table.of(
        title,
        header,
        rows,
        f"Each scheme decodes {count} texts in each of {rounds} rounds, and the schemes take turns.",
        spent.disturbance(),
    )


def _shares(found: OverlapStats | None) -> tuple[Cell, ...]:
    """Return the hit rate, the share of late guesses, the wasted tokens per guess, and the draft
    passes per token.

    A value is None if it has no data.
    """
    guessed = found.hits + found.misses if found else 0
    passes = found.passes / found.drafted if found and found.drafted else None
    if not found or not guessed:
        return None, None, None, passes
    return found.hits / guessed, found.late / (found.late + guessed), found.wasted / guessed, passes


def _folder(arm: str, bare: Path) -> Path:
    """Return the embedded target's folder; for an untrained exit, return a copy without the
    adapter.
    """
    if "untrained" not in arm:
        return path("target")
    for file in path("target").iterdir():
        if file.is_file():
            copyfile(file, bare / file.name)
    return bare


def _seconds(lab: Lab, engine: LocalEngine, requests: list[SampleRequest]) -> float:
    """Return the wall seconds of all requests, sent one after the other.

    Processor seconds would not show that two threads of an arm work at the same time.
    """
    return wall_seconds(lambda: [lab.portal.call(send_all, engine, [one]) for one in requests])


def groups(options: Options) -> Table:
    """Measure EasySpec on this machine: how long drafting with grouped attentions takes, and how
    many of its tokens are accepted.
    """
    say("overlap: groups of attentions of the deep drafter")
    spent = Spent()
    times = {context: _times(context, options.pick(5, 51, 201)) for context in _CONTEXTS}
    rows = list[Row]()
    with start_blocking_portal() as portal:
        for size in _GROUPS:
            accepted = [
                _later_accepted(Lab(options, portal), size, way)
                for way in get_args(Calibration)[: 2 if size > 1 else 1]
            ]
            gains = [str(ratio(times[context], "1", str(size))) for context in _CONTEXTS]
            rows.append((size, accepted[0], accepted[1] if size > 1 else None, *gains))
    header = (
        "attentions per group | later tokens accepted, calibrated | later tokens accepted, not "
        "calibrated | speed-up of drafting after 60 tokens | after 150 | after 250"
    )
    note = (
        "The draft proposes 4 tokens per step, at temperature 0.7. The speed-up of drafting is "
        f"the time to draft {_TOKENS} tokens exactly, divided by the time to draft them with "
        "grouped attentions."
    )
    return Table.of("Drafting in groups of attentions", header, rows, note, spent.disturbance())


def _times(context: int, rounds: int) -> dict[str, list[float]]:
    """Return the drafting time in seconds for each group size; the group sizes are measured in
    turn.
    """
    config = read_model_config(path("deep"), "deep")
    weights = load_weights(path("deep"), config, torch.float32, torch.device("cpu"), "deep")
    library = native_library("deep", config)[0]
    size = (8, 2, 1024, config.num_kv_heads, config.head_dim)
    models = {
        str(group): NativeModel(library, config, weights, torch.full(size, 0.1), 1, group=group)
        for group in _GROUPS
    }
    return interleaved(
        {name: partial(_draft, model, context) for name, model in models.items()}, rounds
    )


def _draft(model: NativeModel, context: int) -> float:
    """Return the processor time of several drafting calls, in seconds."""
    table = np.arange(1, 1023, dtype=np.int32)[None]
    row = np.zeros(1, dtype=np.int64)
    total = 0.0
    for _ in range(_DRAWS):
        first, following = (
            single_rows(row + 5, row + at, row, table) for at in (context, context + 1)
        )
        counts = np.ones(_TOKENS, dtype=np.int64)
        uniforms = np.full((_TOKENS, 1), 0.5)
        batch = AheadBatch(first, following, counts, torch.ones(1, dtype=torch.float64), uniforms)
        total += cpu_seconds(partial(model.draw_ahead, batch, table))
    return total


def _later_accepted(lab: Lab, size: int, calibration: Calibration) -> float:
    """Return the acceptance rate of positions after the first; a position counts only if all
    earlier positions were accepted.
    """
    kept = GroupedDrafter.calibration
    GroupedDrafter.calibration = calibration
    try:
        with lab.engine(path("target"), **{**_DEEP, "k": 4, "fuzzy": size}) as engine:
            texts = [one.text for one in arithmetic("test", lab.options.pick(2, 5, 20), seed=5)]
            for request in asked(engine, texts, 300, lab.options.seed):
                lab.portal.call(engine.sample, request)
            stats = engine.loop_stats().speculation
    finally:
        GroupedDrafter.calibration = kept
    assert stats is not None, "the engine speculates"
    return sum(stats.accepted_at[1:]) / sum(stats.tested_at[1:])
