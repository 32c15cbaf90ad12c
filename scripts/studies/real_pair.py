"""Run methods live on a real pair: accuracy, tokens, what a score knows, and the gain over a coin.

The models are those of `scripts.studies.real_models`. Problems come in parts, and every method runs
on a part before the next part begins, so the methods have the same problems whenever the study is
stopped. Each method's run of a part is a run directory of its own: the same command resumes it.

The methods of a part run at the same time. A processor reads the weights once for all rows of a
step, and what two methods ask alike is computed once.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel

from atts.accel import accelerated
from atts.concurrency import background, collect
from atts.core import (
    Completion,
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
from atts.pipelines import Chunking, ScoreRule
from atts.run import RunOptions, RunSpec, Stop, evaluate, request_key, watch_signals
from scripts.studies import bank
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
from scripts.studies.real_models import CannotBeMadeError, folder_of

MINUTES = "REAL_PAIR_MINUTES"
"""Environment variable: no run begins after so many minutes; the tables show what is complete."""
SAMPLES = 4
RATE = 0.2
CASCADE_RATE = 0.3
PART = 10  # problems
THREADS = 1  # threads of each model: both work at the same time on two cores
THREADS_ALONE = 2  # threads where one works at a time
IN_BANK = 160  # problems that the recorded bank begins with: scores were chosen on them
CACHE_TOKENS = 90_000  # slots for the rollouts of all methods on one part
FILE = "real-pair.jsonl"
COIN = f"coin, rate {RATE:g}"
REST = "the target finishes the rollout"


@dataclass(frozen=True, slots=True)
class RankedRollout:
    """The worst score of a rollout's chunks, and whether its answer is correct."""

    problem: str
    score: float
    is_correct: bool


@dataclass(frozen=True, slots=True)
class PartRun:
    """Results of one method on one part of the problems."""

    piece: Piece
    ranked: Sequence[RankedRollout]


def methods(effort: str) -> list[Arm]:
    """Return the methods; with effort full also other scores, takeovers, rates and baselines."""
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
    """Return a method with the lengths that all of them have here, and rollouts that all end."""
    policy = replace(
        one.setup.policy,
        samples=SAMPLES,
        max_tokens=bank.MAX_TOKENS,
        chunking=Chunking(bank.CHUNK_TOKENS, bank.CHUNK_TOKENS, (bank.STEP,)),
        sampling=Sampling(temperature=0.7),
        early_stop="none",
    )
    setup = replace(one.setup, policy=policy, concurrency=PART * SAMPLES)
    return replace(one, setup=setup)


def problems(count: int) -> list[Problem]:
    """Return problems of GSM8K and MATH-500 in turn, in a fixed order, none of the recorded bank's."""
    return bank.problems()[IN_BANK : IN_BANK + count]


def study(options: Options) -> list[Table]:
    """Run the methods on the Qwen2.5-Coder pair, as far as time allows.

    :raises SystemExit: neither models nor problems can be had.
    """
    asked = problems(options.pick(PART, 100, 400))
    if not asked:
        raise SystemExit("no benchmark files at hand: name their folder in ATTS_SHARED_DATA")
    try:
        folders = (folder_of("qwen05"), folder_of("qwen15"))
    except CannotBeMadeError as error:
        raise SystemExit(f"the models cannot be had: {error}") from error
    minutes = float(os.environ.get(MINUTES, "inf"))
    with tempfile.TemporaryDirectory() as scratch:
        place = options.out or Path(scratch)
        series = Series(methods(options.effort), parts_of(asked), place, options.seed)
        if series.missing():
            anyio.run(partial(with_models, series, folders, 60 * minutes))
        return tables(series)


async def with_models(series: Series, folders: tuple[Path, Path], seconds: float) -> None:
    """Run what is missing of a series on the models in these folders.

    The weights are bfloat16, and so are the products, which some processors take several times
    faster.
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
    """Methods on parts of the problems: what is complete, on disk, and how the rest is run."""

    def __init__(
        self, arms: Sequence[Arm], parts: Sequence[Sequence[Problem]], place: Path, seed: int
    ) -> None:
        self.arms = arms
        self.parts = parts
        self._place = place
        self._seed = seed
        self._kept = Parts(place / FILE)

    def missing(self) -> list[tuple[int, Arm]]:
        """Return the incomplete parts by number, and the methods of each in order."""
        everything = [(number, one) for number in range(len(self.parts)) for one in self.arms]
        return [
            (number, one) for number, one in everything if self._key(number, one) not in self._kept
        ]

    def _key(self, number: int, one: Arm) -> str:
        return f"{one.name}|{self._seed}|{number}"

    async def run(self, draft: Engine, target: Engine, seconds: float = math.inf) -> None:
        """Run what is missing; begin nothing after so many seconds.

        The seed of a part is that of all methods: chunks that nothing before distinguishes are the
        same in all of them, and differences between methods vary less.

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
                    say(f"real-pair: {len(missing)} methods, problems {number * PART + 1} and on")
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
            raise UsageError(f"the run in {folder} ended {result.status}")
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
    """An open engine that is asked for each reply once, whichever of several runs asks for it.

    What decides a reply is in the request, as for `SharingEngine`. The runs ask at the same time:
    those that ask later wait for the first.
    """

    def __init__(self, engine: Engine, role: Role) -> None:
        super().__init__(engine, "lent")
        self._role: Role = role
        self._replies: dict[str, Completion | Scores | anyio.Event] = {}

    async def around(self, request: Any, call: Callable[[Any], Awaitable[Any]]) -> Any:
        """Return the reply that is there, wait for one that is on its way, or ask."""
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
            del self._replies[key]  # a waiting run asks instead
            raise
        finally:
            asked.set()
        return answer


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in name)


def part_run(record: Mapping[str, Any]) -> PartRun:
    """Read a result back from the record on disk."""
    ranked = [RankedRollout(**one) for one in record["ranked"]]
    return PartRun(read_piece(record["piece"]), ranked)


def is_correct(problem: Problem, answer: str | None) -> bool:
    """Return whether an answer equals the reference by the problem's policy."""
    return answer is not None and judge(problem, answer).status == "equal"


def graded(outcome: Outcome) -> Solved:
    """Summarise a problem, its answers graded as `atts eval` grades them."""
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
    """Return the tables of what every method has completed."""
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
        f"{count} problems, GSM8K and MATH-500 of levels 1 to 3 in turn, x {SAMPLES} rollouts, at "
        f"most {bank.MAX_TOKENS} tokens, chunks of at most {bank.CHUNK_TOKENS} that end at a blank "
        "line, temperature 0.7. A coin escalates as often and as much; rate 0.2 for rows without one. "
        f"Tokens are per problem. A gate lives for a run of {PART} problems. Intervals are of 95 %, "
        "differences paired by problem.",
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
        "What the scores know",
        "method | problems with correct and incorrect rollouts | AUROC within problems",
        rows,
        f"Of {count} problems. 0.5 knows nothing. Chunks that scored worst were rewritten, so the "
        "figure understates what the score knows.",
    )


@dataclass(frozen=True, slots=True)
class Timed:
    """Wall and processor seconds of a run, its tokens, and its texts."""

    wall: float
    processor: float
    tokens: int
    drawn: int
    texts: Mapping[tuple[str, int], TokenIds]


def study_losses(options: Options) -> list[Table]:
    """Compare the target alone with the two ways to write its text with the draft's help.

    :raises SystemExit: neither models nor problems can be had.
    """
    asked = problems(options.pick(2, 8, 32))
    if not asked:
        raise SystemExit("no benchmark files at hand: name their folder in ATTS_SHARED_DATA")
    try:
        draft, target = folder_of("qwen05"), folder_of("qwen15")
    except CannotBeMadeError as error:
        raise SystemExit(f"the models cannot be had: {error}") from error
    local = LocalOptions(threads=THREADS_ALONE, kv_tokens=bank.CACHE_TOKENS)
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
    """Run the three ways in turn, and return what each takes for a token."""
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
    """Run a plan, and return what it took and wrote."""
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
    """Return times relative to the target alone, round by round, and how many texts are its own."""
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
        "method | tokens/s | seconds per token, of target-only's | the same, processor seconds | "
        "drawn while scoring | texts equal to target-only's",
        rows,
        f"{problems} problems of GSM8K x {samples} rollouts of at most {most} tokens, at once; "
        f"{len(base)} rounds in turn: median, least and most. On a busy machine only processor "
        "seconds can be compared.",
    )
