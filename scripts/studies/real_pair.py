"""Run methods live on a real pair: accuracy, tokens, the information in each score, and the gain
over a coin.

The models are those of `scripts.studies.real_models`. Problems are divided into parts. Every method
runs on a part before the next part begins, so all methods have the same problems whenever the study
is stopped. Each run of a method on a part has its own run directory, and the same command resumes
the run.

The methods of a part run at the same time. A CPU reads the weights once for all rows of a step, and
equal requests of several methods are computed once.

The second part of the study times decoding: plain, with every proposer, by transformers and by
llama.cpp. One engine is open at a time, because each engine holds the target's weights. A round
runs every arm once, in an order that changes from round to round, and each ratio compares arms
within a round.
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio.lowlevel
import torch

from atts.accel import SpeculationOptions, accelerated
from atts.concurrency import background, collect
from atts.core import (
    Completion,
    Message,
    Outcome,
    Problem,
    Role,
    Rollout,
    SampleRequest,
    Sampling,
    Scores,
    TokenIds,
)
from atts.engine import Engine, EngineAround
from atts.errors import UsageError
from atts.evaluators import Estimate, judge
from atts.local import LocalEngine, LocalOptions
from atts.models import tokenizers
from atts.pipelines import Chunking, ScoreRule
from atts.run import RunOptions, RunSpec, Stop, evaluate, request_key, watch_signals
from atts.sampling import Seed
from atts.servers import RemoteEngine, RemoteOptions
from scripts.studies import judges
from scripts.studies.arms import Arm, Piece, Solved, Sum, arm, read_piece, right, share
from scripts.studies.harness import (
    Options,
    Parts,
    Row,
    Spread,
    Table,
    interval,
    points,
    say,
    tree_seconds,
)
from scripts.studies.judges import shown, within
from scripts.studies.local import generated, opened
from scripts.studies.real_models import CannotBeMadeError, cache, folder_of, gguf_of

MINUTES = "REAL_PAIR_MINUTES"
"""Environment variable with a number of minutes. When they are over, no new run begins, and the
tables show the parts that are complete.
"""
SAMPLES = 4
RATE = 0.2
CASCADE_RATE = 0.3
PART = 10  # number of problems in a part
THREADS = 1  # threads of each model if both models work at the same time on two cores
THREADS_ALONE = 2  # threads of a model that works alone
# number of problems at the start of the recorded bank; the scores were chosen on these problems
IN_BANK = 160
# number of tokens in the cache, enough for the rollouts of all methods on one part
CACHE_TOKENS = 90_000
FILE = "real-pair.jsonl"
COIN = f"coin, rate {RATE:g}"
REST = "the target finishes the rollout"


@dataclass(frozen=True, slots=True)
class RankedRollout:
    """The worst score of a rollout's chunks, and whether the rollout's answer is correct."""

    problem: str
    score: float
    is_correct: bool


@dataclass(frozen=True, slots=True)
class PartRun:
    """Results of one method on one part of the problems."""

    piece: Piece
    ranked: Sequence[RankedRollout]


def methods(effort: str) -> list[Arm]:
    """Return the methods of the study. At effort `full`, these include other scores, takeovers,
    rates and baselines.
    """
    atts = arm(f"atts, rate {RATE:g}", "atts", rate=RATE)
    coin = arm(COIN, "coin", rate=RATE)
    made = [
        arm("draft-only"),
        arm("target-only"),
        coin,
        atts,
        atts.but("atts, takeover continue", takeover="continue"),
        arm(f"cascade, rate {CASCADE_RATE:g}", "cascade", rate=CASCADE_RATE),
    ]
    if effort == "full":
        made += [arm(f"atts, rate {rate:g}", "atts", rate=rate) for rate in (0.1, 0.4)]
        made += [arm(f"coin, rate {rate:g}", "coin", rate=rate) for rate in (0.1, 0.4)]
        made += [
            coin.but(f"coin, {REST}", escalates="rest"),
            atts.but(f"atts, {REST}", escalates="rest"),
            atts.but("atts, score speculative", score=ScoreRule("speculative")),
            atts.but("atts, score per byte", score=ScoreRule("byte")),
            arm("top-b", rate=RATE),
            arm("spec-reason"),
            arm("exact"),
        ]
    return [limited(one) for one in made]


def limited(one: Arm) -> Arm:
    """Return a method with the limits that all methods of this study share; no rollout is stopped
    early.
    """
    policy = replace(
        one.setup.policy,
        samples=SAMPLES,
        max_tokens=judges.MAX_TOKENS,
        chunking=Chunking(judges.CHUNK_TOKENS, judges.CHUNK_TOKENS, (judges.STEP,)),
        sampling=Sampling(temperature=0.7),
        early_stop="none",
    )
    setup = replace(one.setup, policy=policy, concurrency=PART * SAMPLES)
    return replace(one, setup=setup)


def problems(count: int) -> list[Problem]:
    """Return problems of GSM8K and MATH-500 in turn, in a fixed order, without the problems of the
    recorded bank.
    """
    return judges.problems()[IN_BANK : IN_BANK + count]


def study(options: Options) -> list[Table]:
    """Run the methods on the Qwen2.5-Coder pair until the time limit.

    :raises SystemExit: the models or the problems are not available.
    """
    asked = problems(options.pick(PART, 100, 400))
    if not asked:
        raise SystemExit("the benchmark files are missing; set ATTS_SHARED_DATA to their folder")
    try:
        folders = (folder_of("qwen05"), folder_of("qwen15"))
    except CannotBeMadeError as error:
        raise SystemExit(f"the models are not available: {error}") from error
    minutes = float(os.environ.get(MINUTES, "inf"))
    with tempfile.TemporaryDirectory() as scratch:
        place = options.out or Path(scratch)
        series = Series(methods(options.effort), parts_of(asked), place, options.seed)
        if series.missing():
            anyio.run(partial(with_models, series, folders, 60 * minutes))
        return tables(series)


async def with_models(series: Series, folders: tuple[Path, Path], seconds: float) -> None:
    """Run the missing parts of a series on the models in these folders.

    Weights and matrix products are bfloat16, because some CPUs compute bfloat16 products several
    times faster.
    """
    local = LocalOptions(threads=THREADS, kv_tokens=CACHE_TOKENS, dtype="bfloat16")
    async with AsyncExitStack() as stack:
        draft, target = [
            await stack.enter_async_context(LocalEngine(folder, name=name, options=local))
            for folder, name in zip(folders, ("draft", "target"), strict=True)
        ]
        await series.run(draft, target, seconds)


def parts_of(asked: Sequence[Problem], size: int = PART) -> list[tuple[Problem, ...]]:
    """Cut the problems into parts."""
    return [tuple(asked[begin : begin + size]) for begin in range(0, len(asked), size)]


class Series:
    """The methods of a study and the parts of its problems. Finished results are kept on disk, and
    only missing parts are run.
    """

    def __init__(
        self, arms: Sequence[Arm], parts: Sequence[Sequence[Problem]], place: Path, seed: int
    ) -> None:
        self.arms = arms
        self.parts = parts
        self._place = place
        self._seed = seed
        self._kept = Parts(place / FILE)

    def missing(self) -> list[tuple[int, Arm]]:
        """Return the missing runs as pairs of a part's number and a method, part by part."""
        everything = [(number, one) for number in range(len(self.parts)) for one in self.arms]
        return [
            (number, one) for number, one in everything if self._key(number, one) not in self._kept
        ]

    def _key(self, number: int, one: Arm) -> str:
        return f"{one.name}|{self._seed}|{number}"

    async def run(self, draft: Engine, target: Engine, seconds: float = math.inf) -> None:
        """Run the missing parts. After the given number of seconds, no further part begins.

        All methods use the same seed on a part. If several methods begin a chunk with the same
        tokens, they therefore write the same chunk. This reduces the noise of differences between
        methods.

        :raises KeyboardInterrupt: a run was interrupted; the same call resumes it.
        """
        began = time.monotonic()
        stop = Stop()
        async with background(watch_signals, stop, lambda _: None):
            for number, part in enumerate(self.parts):
                missing = [one for place, one in self.missing() if place == number]
                if missing and time.monotonic() - began > seconds:
                    left = len(self.missing())
                    say(f"real-pair: time is over; {left} runs are left for the next call")
                    return
                if missing:
                    say(f"real-pair: {len(missing)} methods, problems from {number * PART + 1} on")
                engines = (Once(draft, "draft"), Once(target, "target"))
                run_one = partial(self._run_one, number, part, engines, stop)
                await collect([partial(run_one, one) for one in missing])

    async def _run_one(
        self, number: int, part: Sequence[Problem], engines: tuple[Once, Once], stop: Stop, one: Arm
    ) -> None:
        setup = replace(one.setup, seed=self._seed * 1009 + number)
        folder = self._place / "runs" / f"{number:02}-{_file_name(one.name)}"
        plan = setup.plan(*engines, part[0].kind)
        options = RunOptions(directory=folder, engines="are open", signals="ignore", stop=stop)
        result = await evaluate(part, plan, options)
        if result.status == "interrupted":
            raise KeyboardInterrupt
        if result.status != "finished":
            raise UsageError(f"the run in {folder} ended with status {result.status}")
        outcomes = tuple(result.outcomes())
        piece = Piece(one.name, SAMPLES, self._seed, number)
        piece.solved = [graded(outcome) for outcome in outcomes]
        ranked = [asdict(line) for outcome in outcomes for line in ranked_rollouts(outcome)]
        self._kept.keep(self._key(number, one), {"piece": asdict(piece), "ranked": ranked})

    def complete(self) -> Mapping[str, Sequence[PartRun]]:
        """Return each method's results on the parts that every method has completed."""
        numbers = [
            number
            for number in range(len(self.parts))
            if all(self._key(number, one) in self._kept for one in self.arms)
        ]
        return {
            one.name: [part_run(self._kept[self._key(number, one)]) for number in numbers]
            for one in self.arms
        }


class Once(EngineAround):
    """An open engine that computes equal requests of several runs once.

    A request contains everything that decides its reply, as for `SharingEngine`. If several runs
    send the same request at the same time, the later runs wait for the reply to the first request.
    """

    def __init__(self, engine: Engine, role: Role) -> None:
        super().__init__(engine, "lent")
        self._role: Role = role
        self._replies: dict[str, Completion | Scores | anyio.Event] = {}

    async def around(self, request: Any, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return the reply if it is known. Otherwise wait for it if another run has sent the same
        request, or send the request.
        """
        key = request_key(self._role, request)
        if isinstance(request, SampleRequest):
            key += request.logprobs
        while isinstance(known := self._replies.get(key), anyio.Event):
            await known.wait()
        if known is not None:
            await anyio.lowlevel.checkpoint()
            return known
        asked = self._replies[key] = anyio.Event()
        try:
            self._replies[key] = answer = await call(request)
        except BaseException:
            del self._replies[key]  # the reply failed, so a waiting run sends the request again
            raise
        finally:
            asked.set()
        return answer


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in name)


def part_run(record: Mapping[str, Any]) -> PartRun:
    """Rebuild the results of one method on one part from the record on disk."""
    ranked = [RankedRollout(**one) for one in record["ranked"]]
    return PartRun(read_piece(record["piece"]), ranked)


def is_correct(problem: Problem, answer: str | None) -> bool:
    """Return whether an answer equals the reference by the problem's policy."""
    return answer is not None and judge(problem, answer).status == "equal"


def graded(outcome: Outcome) -> Solved:
    """Summarise a problem, with its answers graded as in `atts eval`."""
    problem = outcome.problem
    lines = [line for line in outcome.rollouts if line.finish not in ("settled", "cancelled")]
    correct = sum(is_correct(problem, line.answer) for line in lines)
    return replace(
        Solved.of(outcome),
        right=float(is_correct(problem, outcome.answer)),
        share=correct / max(1, len(lines)),
    )


def ranked_rollouts(outcome: Outcome) -> list[RankedRollout]:
    """Return the scored rollouts of a problem, each with the score of its worst chunk."""
    problem = outcome.problem
    found: list[RankedRollout] = []
    for line in outcome.rollouts:
        worst = worst_score(line)
        if worst is not None:
            found.append(RankedRollout(problem.id, worst, is_correct(problem, line.answer)))
    return found


def worst_score(line: Rollout) -> float | None:
    """Return the highest score of the rollout's chunks; None if none was scored."""
    return max((turn.score for turn in line.turns if turn.score is not None), default=None)


def tables(series: Series) -> list[Table]:
    """Return the tables of the parts that every method has completed."""
    runs = series.complete()
    sums = {name: Sum([one.piece for one in parts]) for name, parts in runs.items()}
    count = len(next(iter(sums.values())).solved)
    if not count:
        return [Table.of("Methods live", "method", [], "No part is complete yet.")]
    return [accuracy_table(sums, count), source_table(sums), score_table(runs, count)]


def accuracy_table(sums: Mapping[str, Sum], count: int) -> Table:
    """Return accuracy and tokens of every method, each compared with its coin and with the target."""
    rows: list[Row] = []
    for name, one in sums.items():
        coin = sums.get(name.replace("atts", "coin"), sums[COIN])
        is_gain = name.startswith("atts")
        rows.append(
            (
                name,
                interval(one.estimate(right)),
                interval(one.estimate(share)),
                _gain(one, coin) if is_gain else "-",
                "-" if name == "target-only" else _gain(one, sums["target-only"]),
                "-" if one.rate is None else f"{one.rate:.3f} ({_decisions(one)})",
                round(one.each("target")),
                round(one.each("scored")),
                round(one.each("draft")),
            )
        )
    return Table.of(
        "Methods live",
        "method | accuracy of the vote | pass@1 | pass@1 minus a coin's, points | "
        "pass@1 minus target-only's, points | realised rate | target tokens written | "
        "target tokens scored | draft tokens",
        rows,
        f"The methods run on {count} problems (GSM8K and MATH-500 of levels 1 to 3 in turn) "
        f"with {SAMPLES} rollouts each, at temperature 0.7. A rollout has at most "
        f"{judges.MAX_TOKENS} tokens, and a chunk ends at a blank line or after "
        f"{judges.CHUNK_TOKENS} tokens. Each method is compared with a coin that escalates as "
        "often and as much. The rate is 0.2 in rows that name no rate. Tokens are per problem. "
        f"Each gate starts again after {PART} problems. Intervals are 95 % intervals, and "
        "differences are paired by problem.",
    )


def source_table(sums: Mapping[str, Sum]) -> Table:
    """Return the accuracy of every method on the problems of each source."""
    names = sorted({solved.problem.split("/")[0] for one in sums.values() for solved in one.solved})
    parts = {name: {own: _of_source(one, name) for own, one in sums.items()} for name in names}
    counts = [f"{len(next(iter(part.values())).solved)} of {name}" for name, part in parts.items()]
    return Table.of(
        "Methods live, by source",
        " | ".join(["method", *(f"pass@1, {name}" for name in names)]),
        [(own, *(interval(part[own].estimate(share)) for part in parts.values())) for own in sums],
        f"Problems: {', '.join(counts)}.",
    )


def _of_source(one: Sum, name: str) -> Sum:
    pieces = [
        replace(piece, solved=[line for line in piece.solved if line.problem.startswith(name)])
        for piece in one.pieces
    ]
    return Sum(pieces)


def _gain(one: Sum, base: Sum) -> str:
    difference: Estimate = one.minus(base, share)
    return points(difference, 1)


def _decisions(one: Sum) -> str:
    made = sum(len(solved.decisions) for solved in one.solved)
    escalated = sum(solved.escalated for solved in one.solved)
    return f"{escalated} of {made}"


def score_table(runs: Mapping[str, Sequence[PartRun]], count: int) -> Table:
    """Return the table of how well the worst score of a rollout ranks incorrect rollouts within a
    problem.
    """
    rows: list[Row] = []
    for name, parts in runs.items():
        by_problem: dict[str, tuple[list[float], list[float]]] = {}
        for line in (line for part in parts for line in part.ranked):
            bad, good = by_problem.setdefault(line.problem, ([], []))
            (good if line.is_correct else bad).append(line.score)
        mixed = sum(bool(bad and good) for bad, good in by_problem.values())
        if by_problem and not name.startswith("cascade"):
            rows.append((name, mixed, shown(within(list(by_problem.values())))))
    return Table.of(
        "Scores of incorrect and correct rollouts",
        "method | problems with correct and incorrect rollouts | AUROC within problems",
        rows,
        f"The runs have {count} problems. A score without information has AUROC 0.5. Each "
        "method rewrote the chunks with the worst scores, so the AUROC is too low.",
    )


@dataclass(frozen=True, slots=True)
class Timed:
    """Wall seconds and processor seconds of a run, the number of its tokens, and its texts."""

    wall: float
    processor: float
    tokens: int
    drawn: int
    texts: Mapping[tuple[str, int], TokenIds]


def study_losses(options: Options) -> list[Table]:
    """Compare the target alone with two other ways to write the same text: speculation, and method
    exact.

    :raises SystemExit: the models or the problems are not available.
    """
    asked = problems(options.pick(2, 8, 32))
    if not asked:
        raise SystemExit("the benchmark files are missing; set ATTS_SHARED_DATA to their folder")
    try:
        draft, target = folder_of("qwen05"), folder_of("qwen15")
    except CannotBeMadeError as error:
        raise SystemExit(f"the models are not available: {error}") from error
    local = LocalOptions(threads=THREADS_ALONE, kv_tokens=judges.CACHE_TOKENS)
    engines = {
        "draft": LocalEngine(draft, name="draft", options=local),
        "target": LocalEngine(target, name="target", options=local),
        "proposed to": accelerated(target, name="target", options=local, lent=str(draft)),
    }
    sizes = options.pick((2, 160), (4, 512), (8, 512))
    return [anyio.run(partial(losses, engines, asked, sizes, options.pick(1, 3, 5)))]


async def losses(
    engines: Mapping[str, Engine],
    asked: Sequence[Problem],
    sizes: tuple[int, int],
    rounds: int,
) -> Table:
    """Run target-only, target-only with speculation, and exact in turn, and return the time per
    token of each.
    """
    samples, most = sizes
    methods = {
        "target-only": ("target-only", "target"),
        "target-only, speculate=auto": ("target-only", "proposed to"),
        "exact": ("exact", "target"),
    }
    runs: dict[str, list[Timed]] = {name: [] for name in methods}
    async with AsyncExitStack() as stack:
        for engine in engines.values():
            await stack.enter_async_context(engine)
        for number in range(rounds):
            for name in [*methods][:: 1 if number % 2 else -1]:
                say(f"real-pair-losses: {name}, round {number + 1} of {rounds}")
                method, target = methods[name]
                setup = limited(arm(method)).setup
                policy = replace(setup.policy, samples=samples, max_tokens=most)
                setup = replace(setup, policy=policy, seed=number)
                plan = setup.plan(engines["draft"], engines[target], asked[0].kind)
                runs[name].append(await timed(asked, plan))
    return losses_table(runs, len(asked), sizes)


async def timed(asked: Sequence[Problem], plan: RunSpec) -> Timed:
    """Run a plan, and return its time, tokens and texts."""
    used = tree_seconds()
    began = time.monotonic()
    result = await evaluate(asked, plan, RunOptions(engines="are open"))
    wall = time.monotonic() - began
    processor = tree_seconds() - used
    lines = [line for outcome in result.outcomes() for line in outcome.rollouts]
    return Timed(
        wall,
        processor,
        sum(line.usage.target_tokens for line in lines),
        sum(line.usage.drawn_tokens for line in lines),
        {(line.problem, line.sample): line.ids("target") for line in lines},
    )


def losses_table(
    runs: Mapping[str, Sequence[Timed]], problems: int, sizes: tuple[int, int]
) -> Table:
    """Return the times relative to the target alone, round by round, and the number of texts that
    equal the target's own texts.
    """
    base = runs["target-only"]
    rows: list[Row] = []
    for name, each in runs.items():
        pairs = list(zip(each, base, strict=True))
        wall = Spread.of([(a.wall / a.tokens) / (b.wall / b.tokens) for a, b in pairs])
        processor = Spread.of(
            [(a.processor / a.tokens) / (b.processor / b.tokens) for a, b in pairs]
        )
        same = sum(a.texts[key] == b.texts[key] for a, b in pairs for key in b.texts)
        drawn = sum(one.drawn for one in each) / sum(one.tokens for one in each)
        rows.append(
            (
                name,
                round(sum(one.tokens / one.wall for one in each) / len(each), 2),
                wall.fixed(3),
                processor.fixed(3),
                f"{100 * drawn:.0f} %",
                f"{same} of {sum(len(one.texts) for one in base)}",
            )
        )
    samples, most = sizes
    return Table.of(
        "The target's own text, with the draft's help",
        "method | tokens/s | seconds per token, relative to target-only | processor seconds "
        "per token, relative to target-only | drawn while scoring | texts equal to "
        "target-only's",
        rows,
        f"All {samples} rollouts of {problems} GSM8K problems run at once, with at most {most} "
        f"tokens each. Cells have the median, minimum and maximum of {len(base)} interleaved "
        "rounds. On a busy machine, only processor seconds can be compared.",
    )


SAMPLING = Sampling(0.7)
LLAMA = "xllamacpp==2026.10.11549"
"""A package that contains llama.cpp and its server for this processor."""
PLAIN = "plain"
LLAMA_ARMS = {"llama.cpp, 4-bit weights": "Q4_K_M", "llama.cpp, bfloat16 weights": "BF16"}
GROUPS = (2, 4)  # how many of the draft's attention layers are computed as one group


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of texts and tokens that each arm writes in a round."""

    texts: int  # number of texts that each way to speculate writes one after the other
    tokens: int  # number of tokens of each text
    together: tuple[int, ...]  # numbers of rollouts that plain decoding writes at the same time


@dataclass(frozen=True, slots=True)
class Timing:
    """Number of tokens that one arm wrote in one round, and the time that it took."""

    seconds: float
    processor: float  # processor seconds, summed over all processes
    tokens: int
    texts: list[list[int]]
    proposed: int = 0
    accepted: int = 0
    steps: int = 0

    @property
    def rate(self) -> float:
        """Return tokens per second."""
        return self.tokens / self.seconds

    @property
    def work(self) -> float:
        """Return processor seconds per token."""
        return self.processor / self.tokens


class Watch:
    """A stopwatch that adds up the wall and processor seconds of several blocks of work."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.processor = 0.0

    @contextmanager
    def running(self) -> Generator[None]:
        """Add the wall and CPU seconds of the block to the stopwatch."""
        wall = time.perf_counter()
        processor = tree_seconds()
        yield
        self.seconds += time.perf_counter() - wall
        self.processor += tree_seconds() - processor


def ways(drafter: str) -> dict[str, SpeculationOptions]:
    """Return every way to propose tokens, keyed by its name in the table."""
    return {
        PLAIN: SpeculationOptions(),
        "draft, k=2": SpeculationOptions(drafter, "draft", k=2),
        "draft, k=3": SpeculationOptions(drafter, "draft", k=3),
        "draft, k=auto (SmartSpec)": SpeculationOptions(drafter, "draft"),
        "pearl": SpeculationOptions(drafter, "pearl"),
        "ssd": SpeculationOptions(drafter, "ssd"),
        "mirror, exit not trained": SpeculationOptions(drafter, "mirror"),
        **{
            f"grouped drafting (EasySpec), {size} attentions": SpeculationOptions(
                drafter, "draft", fuzzy=size
            )
            for size in GROUPS
        },
        "suffix": SpeculationOptions(speculate="suffix"),
        "auto": SpeculationOptions(drafter, "auto"),
        "plain, once more": SpeculationOptions(),
    }


def study_speed(options: Options) -> list[Table]:
    """Time plain decoding of atts and of other programs, then every way to propose tokens.

    :raises SystemExit: the models or the problems are not available.
    """
    asked = problems(64)
    if not asked:
        raise SystemExit("the benchmark files are missing; set ATTS_SHARED_DATA to their folder")
    try:
        draft, target = folder_of("qwen05"), folder_of("qwen15")
    except CannotBeMadeError as error:
        raise SystemExit(f"the models are not available: {error}") from error
    sizes = Sizes(
        options.pick(1, 3, 8),
        options.pick(24, 64, 128),
        options.pick((1, 4), (1, 4, 16), (1, 4, 16)),
    )
    kept = Parts(options.file(f"real-speed-{options.effort}-{options.seed}.jsonl"))
    lab = Lab(draft, target, asked, sizes, kept)
    for number in range(options.pick(1, 3, 5)):
        lab.round(number)
    return speed_tables(lab)


class Lab:
    """The pair, the problems, and the timings so far. A timing on disk is not measured again."""

    def __init__(
        self, draft: Path, target: Path, asked: Sequence[Problem], sizes: Sizes, kept: Parts
    ) -> None:
        self.draft = draft
        self.target = target
        self.sizes = sizes
        self.kept = kept
        tokenizer = tokenizers.ModelTokenizer(target, "target")
        self._prompts = [tokenizer.render([Message("user", one.text)]) for one in asked]
        self._missing = set[str]()

    def round(self, number: int) -> None:
        """Time every arm once in this round."""
        arms: dict[str, Callable[[int], list[Timing]]] = {
            f"alone|{name}": partial(self.speculated, options)
            for name, options in ways(str(self.draft)).items()
        }
        arms |= {
            "together|atts": self.plain,
            "together|transformers": partial(self.transformers, is_assisted=False),
            "alone|transformers, assisted": partial(self.transformers, is_assisted=True),
        }
        arms |= {f"together|{name}": partial(self.llama, kind) for name, kind in LLAMA_ARMS.items()}
        for name in [*arms][:: -1 if number % 2 else 1]:
            key = f"{name}|{number}"
            if key in self.kept or name in self._missing:
                continue
            say(f"real-speed: {name}, round {number + 1}, load {os.getloadavg()[0]:.1f}")
            try:
                timings = arms[name](number)
            except (CannotBeMadeError, MemoryError) as error:
                say(f"real-speed: {name} is left out: {error}")
                self._missing.add(name)
                continue
            self.kept.keep(key, [asdict(one) for one in timings])

    def prompts(self, number: int, count: int) -> list[TokenIds]:
        """Return the prompts of a round."""
        begin = number * count % len(self._prompts)
        return (self._prompts + self._prompts)[begin : begin + count]

    def requests(self, number: int, count: int, tokens: int) -> list[SampleRequest]:
        """Return requests for texts on the prompts of a round."""
        return [
            SampleRequest(ids, tokens, SAMPLING, Seed(number, sample=place), rollout=f"{place}/0")
            for place, ids in enumerate(self.prompts(number, count))
        ]

    def speculated(self, speculation: SpeculationOptions, number: int) -> list[Timing]:
        """Write one text after another with proposals, in a fresh engine.

        The first text is not timed, because the drafter starts and the controller learns while this
        text is written.
        """
        # a drafter that works while the target verifies gets half of the threads
        threads = THREADS_ALONE // 2 if speculation.is_overlapped else THREADS_ALONE
        options = LocalOptions(threads=threads, kv_tokens=4096)
        engine = accelerated(self.target, options=options, speculation=speculation)
        return [anyio.run(self._one_by_one, engine, number)]

    async def _one_by_one(self, engine: LocalEngine, number: int) -> Timing:
        first, *others = self.requests(number, 1 + self.sizes.texts, self.sizes.tokens)
        texts = list[list[int]]()
        watch = Watch()
        async with engine:
            await engine.sample(first)
            before = engine.loop_stats()
            for request in others:
                # an untimed request reads the prompt first
                await engine.sample(replace(request, max_tokens=1))
                with watch.running():
                    texts.append([*(await engine.sample(request)).ids])
            after = engine.loop_stats()
        found, was = after.speculation, before.speculation
        tokens = sum(map(len, texts))
        steps = after.step_sequences - before.step_sequences - len(others)
        timing = Timing(watch.seconds, watch.processor, tokens, texts, steps=steps)
        if found is None or was is None:
            return timing
        proposed = found.proposed - was.proposed
        return replace(timing, proposed=proposed, accepted=found.accepted - was.accepted)

    def plain(self, number: int) -> list[Timing]:
        """Write several texts at once without proposals."""
        return anyio.run(self._plain, number)

    async def _plain(self, number: int) -> list[Timing]:
        options = LocalOptions(threads=THREADS_ALONE, kv_tokens=8192)
        async with LocalEngine(self.target, options=options) as engine:
            return [await self._at_once(engine, number, count) for count in self.sizes.together]

    async def _at_once(self, engine: LocalEngine | RemoteEngine, number: int, count: int) -> Timing:
        requests = self.requests(number, count, self.sizes.tokens)
        await collect([partial(engine.sample, replace(one, max_tokens=1)) for one in requests])
        watch = Watch()
        with watch.running():
            done = await collect([partial(engine.sample, request) for request in requests])
        texts = [[*one.ids] for one in done]
        return Timing(watch.seconds, watch.processor, sum(map(len, texts)), texts)

    def transformers(self, number: int, *, is_assisted: bool) -> list[Timing]:
        """Let transformers write in float32, several texts at once or assisted by the draft."""
        torch.set_num_threads(THREADS_ALONE)
        model = opened(self.target)
        found = list[Timing]()
        if is_assisted:
            helper = opened(self.draft)
            prompts = self.prompts(number, 1 + self.sizes.texts)[1:]
            each = [self._generated(model, [one], assistant_model=helper) for one in prompts]
            texts = [text for one in each for text in one.texts]
            seconds = sum(one.seconds for one in each)
            processor = sum(one.processor for one in each)
            found.append(Timing(seconds, processor, sum(map(len, texts)), texts))
        else:
            for count in self.sizes.together:
                found.append(self._generated(model, self.prompts(number, count)))
        del model
        gc.collect()
        return found

    def _generated(self, model: Any, prompts: Sequence[TokenIds], **more: Any) -> Timing:
        """Continue each prompt, with shorter prompts padded at the left. The time to read the
        prompts is not counted.
        """
        length = max(map(len, prompts))
        pad = model.generation_config.pad_token_id
        ids = torch.tensor([(pad,) * (length - len(one)) + one for one in prompts])
        mask = torch.tensor([(0,) * (length - len(one)) + (1,) * len(one) for one in prompts])
        settings = {"attention_mask": mask, "pad_token_id": pad, **more}
        if "assistant_model" in settings:
            settings["min_new_tokens"] = 0
        reading = Watch()
        with reading.running():
            generated(model, ids, 1, attention_mask=mask, pad_token_id=pad)
        watch = Watch()
        with watch.running():
            text = generated(model, ids, self.sizes.tokens, **settings)
        written = text[:, length:].tolist()
        seconds = watch.seconds - reading.seconds
        processor = watch.processor - reading.processor
        return Timing(seconds, processor, sum(map(len, written)), written)

    def llama(self, kind: str, number: int) -> list[Timing]:
        """Let llama.cpp's server write several texts at once."""
        with llama_server(gguf_of("qwen15", kind), max(self.sizes.together)) as url:
            return anyio.run(self._llama, url, number)

    async def _llama(self, url: str, number: int) -> list[Timing]:
        options = RemoteOptions(timeout_seconds=600.0, in_flight=64)
        async with RemoteEngine(
            url, dialect="llamacpp", tokenizer=self.target, options=options
        ) as engine:
            return [await self._at_once(engine, number, count) for count in self.sizes.together]

    def timings(self, name: str) -> dict[int, list[Timing]]:
        """Return the timings of an arm, round by round."""
        found = dict[int, list[Timing]]()
        for key, value in self.kept.items():
            arm, _, number = key.rpartition("|")
            if arm == name:
                found[int(number)] = [Timing(**one) for one in value]
        return found


SERVE = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, slots, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params.n_parallel, params.n_ctx, params.port = slots, 1024 * slots, int(sys.argv[4])
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
time.sleep(86400)
"""


@contextmanager
def llama_server(model: Path, slots: int) -> Generator[str]:
    """Serve a GGUF file with llama.cpp until the end of the block.

    :raises CannotBeMadeError: llama.cpp cannot be installed, or does not start.
    """
    folder = cache() / LLAMA
    if not folder.is_dir():
        install = [sys.executable, "-m", "pip", "--quiet", "install", "--no-deps"]
        install += ["--only-binary", ":all:", "--target", str(folder), LLAMA]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotBeMadeError(f"llama.cpp cannot be installed: {done.stderr[-200:]}")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    words = [sys.executable, "-c", SERVE, str(model), str(slots), str(THREADS_ALONE), "0"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        )
        try:
            assert process.stdout is not None, "it is a pipe"
            url = process.stdout.readline().strip()
            if not url:
                raise CannotBeMadeError("llama.cpp's server does not start")
            with urllib.request.urlopen(f"{url}/health", timeout=60):
                yield url
        finally:
            process.kill()
            process.wait()


def speed_tables(lab: Lab) -> list[Table]:
    """Return two tables of the complete rounds: plain decoding with several programs, and all ways
    to propose tokens.
    """
    return [together_table(lab), alone_table(lab)]


def together_table(lab: Lab) -> Table:
    """Return plain decoding of atts and of other programs, by the number of rollouts that are
    written at the same time.
    """
    own = lab.timings("together|atts")
    rows = list[Row]()
    for name in ["atts", "transformers", *LLAMA_ARMS]:
        theirs = lab.timings(f"together|{name}")
        for place, count in enumerate(lab.sizes.together):
            both = [
                (own[number][place], each[place])
                for number, each in theirs.items()
                if number in own
            ]
            if both:
                rates = Spread.of([other.rate for _, other in both])
                wall = Spread.of([mine.rate / other.rate for mine, other in both])
                work = Spread.of([other.work / mine.work for mine, other in both])
                is_own = name == "atts"
                ratios = ("-", "-") if is_own else (wall.fixed(2), work.fixed(2))
                rows.append((count, name, rates.fixed(1), *ratios))
    rows.sort(key=lambda row: int(str(row[0])))
    return Table.of(
        "Plain decoding",
        "rollouts at once | program | tokens/s | atts is faster by | less processor time by",
        rows,
        f"Qwen2.5-Coder-1.5B-Instruct writes texts of {lab.sizes.tokens} tokens at temperature "
        f"0.7 on {THREADS_ALONE} threads; the time to read prompts is left out. Cells have the "
        "median, minimum and maximum of the rounds, and ratios compare programs within a "
        "round. atts stores bfloat16 weights and multiplies in float32, and transformers "
        "stores float32 weights. llama.cpp's server stores weights in the format that the row "
        f"names, and rounds activations before it multiplies. {len(own)} rounds; a cell without a "
        "range has one round.",
    )


def alone_table(lab: Lab) -> Table:
    """Return every way to propose tokens at one rollout, compared with plain decoding."""
    plain = lab.timings(f"alone|{PLAIN}")
    names = [*ways(""), "transformers, assisted"]
    rows = [row for name in names for row in _alone(name, lab.timings(f"alone|{name}"), plain)]
    return Table.of(
        "Proposed tokens at one rollout",
        "proposed by | tokens/s, relative to plain decoding | tokens per processor second, "
        "relative to plain decoding | tokens per step | accepted | texts equal to plain "
        "decoding's",
        rows,
        f"Qwen2.5-Coder-Instruct 0.5B drafts for 1.5B: {lab.sizes.texts} texts of "
        f"{lab.sizes.tokens} tokens, one after another, at temperature 0.7. Every round has a "
        "new engine, whose first text is not timed. Cells have the median, minimum and maximum "
        f"of {len(plain)} rounds.",
    )


def _alone(
    name: str, found: Mapping[int, Sequence[Timing]], plain: Mapping[int, Sequence[Timing]]
) -> Iterator[Row]:
    """Yield the table row of one way to propose tokens. Only rounds that also timed plain decoding
    count.
    """
    pairs = [(found[number][0], plain[number][0]) for number in found if number in plain]
    if not pairs:
        return
    wall = Spread.of([mine.rate / base.rate for mine, base in pairs])
    work = Spread.of([base.work / mine.work for mine, base in pairs])
    tokens = sum(mine.tokens for mine, _ in pairs)
    steps = sum(mine.steps for mine, _ in pairs)
    proposed = sum(mine.proposed for mine, _ in pairs)
    accepted = sum(mine.accepted for mine, _ in pairs)
    texts = [(a, b) for mine, base in pairs for a, b in zip(mine.texts, base.texts, strict=True)]
    same = sum(a == b for a, b in texts)
    yield (
        name,
        wall.fixed(2),
        work.fixed(2),
        round(tokens / steps, 2) if steps else None,
        f"{accepted} of {proposed} ({100 * accepted / proposed:.0f} %)" if proposed else "-",
        f"{same} of {len(texts)}" if steps else "other numbers are drawn",
    )
