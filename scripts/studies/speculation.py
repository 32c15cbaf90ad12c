"""Compare every way to propose tokens with plain decoding, in turn in one run."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from anyio.from_thread import start_blocking_portal

from atts.core import SampleRequest, Sampling, TokenIds
from atts.evaluators.datasets.arithmetic import problems
from atts.local import LocalEngine
from atts.local.seams import SpeculationStats
from atts.models import EMBEDDED, path
from atts.sampling import Seed
from scripts.studies.harness import (
    Options,
    Row,
    Spent,
    Spread,
    Table,
    beside_best,
    figure,
    interleaved,
    ratio,
    say,
)
from scripts.studies.local import Lab, asked, generated, opened, texts
from scripts.studies.speed import noisy

TOKENS = 256
SAMPLES = 4
"""Texts per problem."""
LAW = Sampling(0.7)
NOISE = {"weaker": 0.25, "weak": 0.32}
"""Noise added to the draft's weights, in standard deviations of each matrix."""


@dataclass
class Arm:
    """An engine and its measurements in each round."""

    lab: Lab
    engine: LocalEngine
    prompts: Sequence[TokenIds]
    count: int  # texts a round
    written: list[list[TokenIds]] = field(default_factory=list[list[TokenIds]])
    # tokens a second of the wall, round by round
    rates: list[float] = field(default_factory=list[float])
    used: float = 0.0  # processor seconds

    def seconds(self) -> float:
        """Return processor seconds per token, in the next round."""
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
        """Return the statistics of proposals; empty if nothing was proposed."""
        return self.engine.loop_stats().speculation or SpeculationStats()


def study(options: Options) -> list[Table]:
    """Compare all proposers with the embedded draft, then with weakened drafts, then with
    transformers.
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
                    places[name] = _places(name, arms["k=auto"].speculation)
        theirs = _beside_transformers(lab)
    choices = (
        "draft | sequences | best fixed | k=auto, ratio to it | to plain decoding | in its first "
        "round | "
        "mean k chosen | seconds expected over come"
    )
    header = "draft | " + " | ".join(str(place) for place in range(1, 9))
    return [
        _speeds(rows, spent),
        Table.of(
            "What the controller chooses, compared with the best fixed length",
            choices,
            chosen,
            "The best fixed length is found in every other round and compared in those between, "
            "and the reverse. Ten "
            "rounds go before those that are compared; in the first one, of n=1, everything is yet "
            "to be learnt.",
        ),
        Table.of("How often a place stands when all before it do", header, places.values()),
        theirs,
    ]


@contextmanager
def _opened(
    lab: Lab, drafter: Path, batch: int, lengths: Sequence[int]
) -> Generator[dict[str, Arm]]:
    draft = {"drafter": str(drafter), "speculate": "draft"}
    # in a process of its own: with helpers of other threads around, OpenMP's own sleep between a
    # step's parts
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
    ways["plain, once more"] = {}  # a second plain engine shows the noise of the measurement
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
    """Return processor seconds per token by arm, round by round.

    :raises AssertionError: an arm wrote another text than plain decoding did.
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


def _places(draft: str, found: SpeculationStats) -> Row:
    """Return how often each of the first positions was accepted, of the rounds in which all before
    it were.
    """
    pairs = list(zip(found.accepted_at, found.tested_at, strict=True))
    shares = [figure(stood / tested, 3) if tested else "-" for stood, tested in pairs[:8]]
    return draft, *shares, *["-"] * (8 - len(shares))


def _drafts(place: Path, options: Options) -> dict[str, Path]:
    """Return the embedded draft, and copies with noise in their weights, which cost the same and
    agree less often.
    """
    noises = NOISE if options.effort != "quick" else {}
    return {
        "embedded": path("draft"),
        **{name: noisy(place / name, noise) for name, noise in noises.items()},
    }


def _beside_transformers(lab: Lab) -> Table:
    """Run one text after another on the same prompts, by us and by transformers."""
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
        "Beside assisted generation of `transformers`, one text after another",
        "`generate` | its tokens a processor second | k=auto, ratio of tokens a processor second",
        [
            (name, 1 / Spread.of(seen[name]).median, str(ratio(seen, name, "k=auto")))
            for name in ("generate", "assisted")
        ],
        "Embedded pair, float32, temperature 0.7, one thread on each side.",
    )


def _speeds(rows: Sequence[Row], spent: Spent) -> Table:
    firsts = [row for row in rows if row[0] == "embedded" and row[2] == "k=auto"]
    figures = ", ".join(f"{row[3]} at {row[1]}" for row in firsts)
    return Table.of(
        "Beside plain decoding",
        "draft | sequences | arm | ratio of tokens a processor second | of tokens a second | "
        "tokens a step and sequence | proposed tokens that stood | share of time spent on "
        "proposing",
        rows,
        f"Embedded target on arithmetic problems, {SAMPLES} texts each, temperature "
        f"{LAW.temperature}; one thread. "
        "Every arm wrote the same tokens as plain decoding, which is compared. `suffix` looks at "
        "texts of the same "
        "problem; `plain, once more` is another engine that does what `plain` does. Weaker and "
        "weak: the embedded "
        f"draft with Gaussian noise of {' and '.join(map(str, NOISE.values()))} of each matrix' "
        f"standard deviation.",
        spent.disturbance(),
        headline=f"tokens a second compared with plain decoding, embedded pair: {figures} sequences",
    )
