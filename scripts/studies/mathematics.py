"""Evaluate a pair on a mathematics benchmark as the paper does: several methods, one table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import anyio

from atts.api import (
    Configuration,
    Pair,
    answers_for,
    build_engines,
    config_keys,
    configure,
    find_pair,
    scores_of,
)
from atts.api.pairs import PublishedRow
from atts.api.setup import Setup
from atts.calibration import StoredScores
from atts.core import Role, Usage
from atts.engine import Engine
from atts.errors import ATTSError, OptionError
from atts.evaluators import (
    Dataset,
    Estimate,
    Samples,
    compare_runs,
    samples_of,
    score,
    share_estimate,
)
from atts.journal import FinishedProblem
from atts.methods import PAPER_DEPARTURES, preset
from atts.pipelines import ScoreRule
from atts.run import INTERRUPTED, RunOptions, RunResult, evaluate
from scripts.studies.harness import Row, Spread, Table, interval, points, say

PUBLISHED: dict[str, Any] = {
    "samples": 16,
    "turns": 15,
    "max_tokens": 15_000,
    "rate": 0.4,
    "concurrency": 256,
}
"""Settings of the published suites: 16 samples, 15 turns, chunks of 500 tokens, temperature 0.8,
and no early stop.
"""
_PUBLISHED_PAIRS = (
    "sampling.temperature=0.8",
    "sampling.top_p=1",
    "sampling.top_k=0",
    "timeout_seconds=3600",
)


@dataclass(frozen=True, slots=True)
class Arm:
    """A method of the table, with its settings."""

    name: str
    what: str
    method: str = "atts"
    mode: str = "question-turn"

    @property
    def needs_scores(self) -> bool:
        """Return whether the arm is one of the paper's presets, which are calibrated before a run."""
        return bool(preset(self.method).departures)


ARMS: tuple[Arm, ...] = (
    Arm("target", "the target alone", "target-only"),
    Arm("marginal", "one pool of scores over all questions (in the paper: Mar)", "paper-marginal"),
    Arm(
        "conditional", "a pool of scores for each question (in the paper: Con)", "paper-conditional"
    ),
    Arm(
        "atts",
        "the default of atts: rate over the whole run, escalated chunks replaced",
        mode="aci",
    ),
    Arm("turns", "as atts, but with a threshold for each question and turn"),
    Arm("draft", "the draft alone", "draft-only"),
)
_DEFAULT_ARMS = ("target", "marginal", "conditional")
_CALIBRATION_SEED = 1_000_003


@dataclass(frozen=True, slots=True)
class Job:
    """The work of one command: problems, pair, settings, arms, number of repeats, and folder."""

    dataset: Dataset
    pair: Pair
    configuration: Configuration
    arms: tuple[Arm, ...]
    repeats: int
    out: Path | None

    @property
    def rate(self) -> float:
        """Return the nominal rate."""
        return float(self.configuration["rate"])

    @property
    def published(self) -> PublishedRow | None:
        """Return the result that the paper's authors published for this benchmark, or None."""
        return self.pair.published.get(self.dataset.name.split("[")[0])


class Interrupted(Exception):
    """The error raised if a run ended early; with --out the same command continues the run."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the missing evaluations, print the table of all arms, and return the exit code."""
    asked = _parse(words)
    try:
        job = _job(asked)
        measured = anyio.run(measure, job)
    except ATTSError as error:
        print(f"math: {error}", file=sys.stderr)
        return error.exit_code
    except Interrupted as ended:
        goes_on = (
            "; the same command continues from here"
            if asked.out
            else "; a run with --out DIR can be continued"
        )
        print(f"math: {ended}{goes_on}", file=sys.stderr)
        return INTERRUPTED
    _emit(job, measured, asked.json)
    return 0


async def measure(job: Job) -> dict[str, Measured]:
    """Run every arm `repeats` times, arms in turn, on engines that are opened once.

    :raises Interrupted: a run was asked to end.
    :raises EngineError: an engine cannot be opened or is lost.
    """
    found: dict[str, list[RunResult]] = {arm.name: [] for arm in job.arms}
    async with AsyncExitStack() as stack:
        draft, target = build_engines(job.configuration["draft"], job.configuration["target"])
        for engine in dict.fromkeys((draft, target)):
            await stack.enter_async_context(engine)
        for repeat in range(job.repeats):
            start = repeat % len(job.arms)
            for arm in (*job.arms[start:], *job.arms[:start]):
                say(f"math: {arm.name} ({arm.what}), seed {job.configuration['seed'] + repeat}")
                found[arm.name].append(await _run(job, arm, repeat, draft, target))
    return {arm.name: Measured(tuple(found[arm.name])) for arm in job.arms}


async def _run(job: Job, arm: Arm, repeat: int, draft: Engine, target: Engine) -> RunResult:
    base = job.configuration.setup()
    setup = replace(base, method=arm.method, rate_scope=arm.mode, seed=base.seed + repeat)  # type: ignore[arg-type]  # a mode
    if arm.needs_scores:
        setup = replace(setup, stored=await _first_scores(job, base, repeat, draft, target))
    place = None if job.out is None else job.out / f"{arm.name}-seed{setup.seed}"
    plan = setup.plan(draft, target, job.dataset.problems[0].kind)
    result = await evaluate(job.dataset.problems, plan, RunOptions(place, engines="are open"))
    if result.status != "finished":
        raise Interrupted(f"{arm.name}: {result.status}, {result.why}")
    return result


async def _first_scores(
    job: Job, base: Setup, repeat: int, draft: Engine, target: Engine
) -> StoredScores:
    """Return the scores of the first chunks of the test questions, for calibration as in the
    published code.

    No chunk is escalated in this pass. Its random numbers differ from those of all arms.
    """
    policy = replace(base.policy, turns=1, score=ScoreRule("mean"), early_stop="none")
    setup = replace(base, rate=0.0, policy=policy, seed=base.seed + repeat + _CALIBRATION_SEED)
    place = None if job.out is None else job.out / f"calibration-seed{base.seed + repeat}"
    plan = setup.plan(draft, target, job.dataset.problems[0].kind)
    result = await evaluate(job.dataset.problems, plan, RunOptions(place, engines="are open"))
    if result.status != "finished":
        raise Interrupted(f"calibration: {result.status}, {result.why}")
    scores = scores_of(result)
    # The recorded conditions of the scores are removed. All arms score the same kind of chunk, and
    # differ from this pass only in the number of turns.
    return replace(scores, fingerprint={})


def _shares_correct(problems: Sequence[Samples]) -> dict[str, float]:
    """Return the share of correct samples of each problem."""
    shares = dict[str, float]()
    for one in problems:
        shares[one.problem] = sum(mark is True for mark in one.correct) / len(one.correct)
    return shares


@dataclass(frozen=True)
class Measured:
    """The runs of one arm on the same problems, each run with its own seed."""

    runs: tuple[RunResult, ...]

    @cached_property
    def problems(self) -> list[FinishedProblem]:
        """Return every problem with the samples and decisions of all runs together."""
        merged = list[FinishedProblem]()
        problems_of_runs = [run.problems for run in self.runs]
        for lines in zip(*problems_of_runs, strict=True):
            samples = tuple(chain.from_iterable(line.samples for line in lines))
            escalated = sum(line.escalated for line in lines)
            judged = sum(line.judged for line in lines)
            merged.append(replace(lines[0], samples=samples, escalated=escalated, judged=judged))
        return merged

    @cached_property
    def graded(self) -> list[Samples]:
        """Return the problems whose samples all have a verdict."""
        group = answers_for("math").group
        found = (samples_of(one.problem, one.complete_samples, group) for one in self.problems)
        return [each for each in found if each is not None]

    @property
    def size(self) -> int:
        """Return the number of samples per problem in one run."""
        return max((len(line.samples) for run in self.runs for line in run.problems), default=1)

    @cached_property
    def accuracies(self) -> Mapping[str, Estimate]:
        """Return three accuracies: whether "any" sample of a run is correct, whether its "vote" is
        correct, and whether "one" single sample is correct.

        With one sample per problem, all three are equal.
        """
        found = score(self.graded, ks=(self.size,)).estimates
        names = {"any": f"pass@{self.size}", "vote": f"maj@{self.size}", "one": "pass@1"}
        return {metric: found.get(name, found["pass@1"]) for metric, name in names.items()}

    @property
    def rate(self) -> Estimate:
        """Return the share of judged chunks that escalated."""
        return share_estimate((one.escalated, one.judged) for one in self.problems)

    @property
    def usage(self) -> Usage:
        """Return the tokens of all runs together."""
        return sum((run.usage for run in self.runs), Usage())

    @property
    def failed(self) -> int:
        """Count the failed problems. All rates of this arm leave them out."""
        return sum(line.status == "failed" for run in self.runs for line in run.problems)

    def speed_ups(self, alone: Measured | None) -> list[float]:
        """Return the target's seconds divided by this arm's seconds, for each run."""
        pairs = zip(alone.runs, self.runs, strict=True) if alone else ()
        return [theirs.seconds / mine.seconds for theirs, mine in pairs]

    def minus(self, alone: Measured | None) -> str:
        """Return the accuracy of single samples minus the target's, in points, paired by problem."""
        if alone is None or alone is self:
            return "-"
        mine = _shares_correct(self.graded)
        theirs = _shares_correct(alone.graded)
        common = [problem for problem in theirs if problem in mine]
        if not common:
            return "-"
        compared = compare_runs([theirs[one] for one in common], [mine[one] for one in common])
        return points(compared.difference, 1)

    def as_json(self, alone: Measured | None) -> dict[str, Any]:
        """Return all results as one strict JSON object."""
        return {
            **{metric: found.as_json() for metric, found in self.accuracies.items()},
            "rate": self.rate.as_json(),
            "usage": asdict(self.usage),
            "seconds": [run.seconds for run in self.runs],
            "speed_up": self.speed_ups(alone),
            "failed": self.failed,
        }


def tables(job: Job, arms: Mapping[str, Measured]) -> list[Table]:
    """Return a table in the paper's layout if its three arms were run, then a table of every run."""
    return [*([_paper(job, arms)] if set(_DEFAULT_ARMS) <= arms.keys() else []), _runs(job, arms)]


def _paper(job: Job, arms: Mapping[str, Measured]) -> Table:
    target, *others = (arms[name] for name in _DEFAULT_ARMS)
    words = {
        "any": f"correct in any of {target.size}",
        "vote": f"vote of {target.size}",
        "one": "one sample",
    }
    rows: list[Row] = [
        (word, *(interval(one.accuracies[metric]) for one in (*others, target)), *[""] * 4)
        for metric, word in words.items()
    ]
    speeds = [Spread.of(one.speed_ups(target)).fixed() for one in others]
    rows[0] = (*rows[0][:4], *speeds, *(interval(one.rate) for one in others))
    repeats = len(target.runs)
    how = (
        f"median and range of {repeats} repeats"
        if repeats > 1
        else "one measurement; --repeats gives a range"
    )
    notes = [
        f"{len(job.dataset)} problems (digest {job.dataset.digest[:12]}), {target.size} "
        f"samples, {repeats} seed{'s' * (repeats > 1)}; 95 % intervals over problems. atts "
        "graded the answers by equivalence.",
        "The presets of the paper take their scores from one first chunk per sample of the "
        "test questions, as the published code does. Times and tokens in these tables leave "
        "out the first chunks.",
        "Departures from the published code: " + "; ".join(PAPER_DEPARTURES) + ".",
        f"*Speed-up* is the time of the target alone divided by the time of the method ({how}). "
        "The methods run one after another on the same engines, and caches stay warm.",
    ]
    if known := job.published:
        published = (
            f"{known.accuracy:.3f}",
            "",
            "",
            f"{known.marginal:.2f}",
            f"{known.conditional:.2f}",
            "",
            "",
        )
        rows.append(("published, any of 16", *published))
        notes.append(
            "The published row has the numbers of the paper's authors. The authors measured on "
            "their own hardware, and a model judged the answers. The authors used the first 15 "
            "problems of AIME and 50 other problems of AMC. This project had no GPUs to run "
            f"{job.pair.name}."
        )
    return Table.of(
        f"{job.dataset.name}: {job.pair.draft} drafts, {job.pair.target} is the target",
        "| accuracy, marginal | accuracy, conditional | target accuracy | speed-up, marginal | "
        "speed-up, conditional | "
        f"rate, marginal (nominal {job.rate:g}) | rate, conditional",
        rows,
        *notes,
    )


def _runs(job: Job, arms: Mapping[str, Measured]) -> Table:
    alone = arms.get("target")
    rows = list[Row]()
    whole = alone.usage.target_tokens if alone else 0
    for name, one in arms.items():
        tokens = (one.usage.draft_tokens, one.usage.scored_tokens, one.usage.target_tokens)
        share = f"{100 * one.usage.target_tokens / whole:.1f} %" if whole else "-"
        accuracies = (*map(interval, one.accuracies.values()), one.minus(alone))
        seconds = Spread.of([run.seconds for run in one.runs]).fixed(1)
        rows.append((name, *accuracies, interval(one.rate), *tokens, share, seconds))
    failed = sum(one.failed for one in arms.values())
    return Table.of(
        f"{job.dataset.name}: every run",
        f"run | any | vote | one sample | minus target, points | rate (nominal {job.rate:g}) | "
        f"draft tokens | scored | "
        "target tokens | of target alone | seconds",
        rows,
        "The column *minus target* compares single samples, paired by problem.",
        *(
            [
                f"{failed} problems failed and are left out of all rates; the journals have the "
                "reasons."
            ]
            if failed
            else []
        ),
    )


def _job(asked: argparse.Namespace) -> Job:
    pair = find_pair(asked.pair)
    # "out" and "repeats" are left out, because they apply to all runs together
    names = config_keys().keys() - {"out", "repeats"}
    settings = {
        name: value for name, value in vars(asked).items() if name in names and value is not None
    }
    usual, words = (PUBLISHED, _PUBLISHED_PAIRS) if pair.name != "embedded" else ({}, ())
    chunk = (
        [f"chunking.{role}_tokens={asked.chunk}" for role in ("draft", "target")]
        if asked.chunk
        else []
    )
    configuration = configure(
        {**usual, **settings}, ["early_stop=none", *words, *chunk, *asked.set]
    )
    return Job(
        configuration.job.load(),
        pair,
        configuration,
        _arms(asked.arms),
        repeats=asked.repeats,
        out=asked.out,
    )


def _arms(names: str) -> tuple[Arm, ...]:
    known = {arm.name: arm for arm in ARMS}
    for name in (wanted := names.split(",")):
        if name not in known:
            raise OptionError("arms", f"unknown arm {name!r}", list(known), name)
    return tuple(known[name] for name in dict.fromkeys(wanted))


def _emit(job: Job, measured: Mapping[str, Measured], is_json: bool) -> None:
    dataset = job.dataset
    alone = measured.get("target")
    record = {
        "dataset": {
            "name": dataset.name,
            "source": dataset.source,
            "digest": dataset.digest,
            "problems": len(dataset),
        },
        "pair": job.pair.name,
        "engines": {role: job.configuration[role] for role in get_args(Role)},
        "nominal_rate": job.rate,
        "published": asdict(job.published) if job.published else None,
        "arms": {name: one.as_json(alone) for name, one in measured.items()},
    }
    text = "\n".join(table.markdown() for table in tables(job, measured))
    if job.out is not None:
        (job.out / "math.json").write_text(json.dumps(record, indent=1) + "\n")
        (job.out / "math.md").write_text(text)
    print(json.dumps(record) if is_json else text)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="math", description=__doc__)
    add = parser.add_argument
    add(
        "dataset",
        nargs="?",
        default="math100",
        help="benchmark: math500, math100, aime24, aime25, amc23, or a file; may end in a slice such as [:10]",
    )
    add("--pair", default="r1-1.5b/r1-70b", help="name of the pair; `atts pairs` lists all pairs")
    add(
        "--backend",
        help="kind of engines: vllm (servers on this machine: target :8000, draft :8001), sglang, or local",
    )
    add(
        "--draft",
        help="the draft's engine, such as vllm:http://host:8001/MODEL; overrides --backend",
    )
    add(
        "--target",
        help="the target's engine, such as vllm:http://host:8000/MODEL; overrides --backend",
    )
    add("--file", help="read the benchmark from this file instead of the hub")
    whole = partial(add, type=_positive)
    whole("--limit", help="use only the first LIMIT problems")
    whole("--samples", help="rollouts per problem; default 16")
    whole("--turns", help="turns per rollout; default 15")
    whole("--chunk", help="largest number of tokens per chunk; default 500")
    whole("--max-tokens", help="largest number of tokens per rollout; default 15,000")
    add("--rate", type=float, help="share of chunks that escalate to the target; default 0.4")
    add(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set any other configuration key; `atts config show` lists the keys",
    )
    add(
        "--arms",
        default=",".join(_DEFAULT_ARMS),
        help=f"methods to run, from {','.join(arm.name for arm in ARMS)}",
    )
    whole(
        "--repeats",
        default=1,
        help="runs per method, each with the next seed; several runs give a range of times",
    )
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder for the runs; the same command resumes an interrupted run")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    return parser.parse_args(words)


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
