"""Evaluates a pair on a mathematics benchmark as the paper does: `atts eval --pair` three times, one table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import anyio

from atts.api import Configuration, Pair, build_engines, configure, find_pair
from atts.core import Role
from atts.engine import Engine
from atts.errors import ATTSError, OptionError
from atts.evaluators import Dataset
from atts.run import INTERRUPTED, RunOptions, RunResult, evaluate
from scripts.studies.harness import say
from scripts.studies.mathematics_table import Measured, as_json, tables

PUBLISHED: dict[str, Any] = {"samples": 16, "turns": 15, "max_tokens": 15_000, "rate": 0.4, "rollouts": 256}
"""As the published suites have it: 16 samples, 15 turns, pieces of 500 tokens, temperature 0.8, nothing cut short."""
_PUBLISHED_PAIRS = ("sampling.temperature=0.8", "sampling.top_p=1", "sampling.top_k=0", "timeout_seconds=3600")


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the runs of the table."""

    name: str
    what: str
    method: str = "atts"
    mode: str = "question-turn"


ARMS: tuple[Arm, ...] = (
    Arm("target", "the target alone", "target-only"),
    Arm("marginal", "one pool of scores over all questions: the paper's Mar", "paper", "marginal"),
    Arm("conditional", "a level per question: the paper's Con", "paper", "question"),
    Arm("atts", "the rate held over the run, rejected chunks replaced: this project's default", mode="aci"),
    Arm("turns", "the same with a level per question and turn"),
    Arm("draft", "the draft alone", "draft-only"),
)
_DEFAULT_ARMS = ("target", "marginal", "conditional")


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured: the problems, how tokens are spent on them, which runs, how often, and where that is kept."""

    dataset: Dataset
    pair: Pair
    configuration: Configuration
    arms: tuple[Arm, ...]
    repeats: int
    out: Path | None


class Interrupted(Exception):
    """A run that did not come to its end; with --out the same command goes on."""


def main(words: Sequence[str] | None = None) -> int:
    """Parse, run what is missing, print the table; the exit code."""
    asked = _parse(words)
    try:
        job = _job(asked)
        measured = anyio.run(measure, job)
    except ATTSError as error:
        print(f"math: {error}", file=sys.stderr)
        return error.exit_code
    except Interrupted as ended:
        goes_on = "; the same command goes on from here" if asked.out else "; with --out DIR it could go on"
        print(f"math: {ended}{goes_on}", file=sys.stderr)
        return INTERRUPTED
    _emit(job, measured, asked.json)
    return 0


async def measure(job: Job) -> list[Measured]:
    """Every arm as often as asked, arms in turn, on engines that are opened once.

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
    return [Measured(arm.name, arm.what, tuple(found[arm.name])) for arm in job.arms]


async def _run(job: Job, arm: Arm, repeat: int, draft: Engine, target: Engine) -> RunResult:
    base = job.configuration.setup()
    setup = replace(base, method=arm.method, mode=arm.mode, seed=base.seed + repeat)  # type: ignore[arg-type]  # a mode
    place = None if job.out is None else job.out / f"{arm.name}-seed{setup.seed}"
    plan = setup.plan(draft, target, job.dataset.problems[0].kind)
    result = await evaluate(job.dataset.problems, plan, RunOptions(place, engines="are open"))
    if result.status != "finished":
        raise Interrupted(f"{arm.name}: {result.status}, {result.why}")
    return result


def _job(asked: argparse.Namespace) -> Job:
    pair = find_pair(asked.pair)
    names = (
        "dataset",
        "pair",
        "at",
        "draft",
        "target",
        "file",
        "limit",
        "samples",
        "turns",
        "max_tokens",
        "rate",
        "seed",
    )
    told = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    usual, words = (PUBLISHED, _PUBLISHED_PAIRS) if pair.name != "embedded" else ({}, ())
    chunk = [f"chunking.{role}_tokens={asked.chunk}" for role in ("draft", "target")] if asked.chunk else []
    configuration = configure({**usual, **told}, ["early_stop=none", *words, *chunk, *asked.set])
    return Job(configuration.job.load(), pair, configuration, _arms(asked.arms), repeats=asked.repeats, out=asked.out)


def _arms(names: str) -> tuple[Arm, ...]:
    known = {arm.name: arm for arm in ARMS}
    for name in (wanted := names.split(",")):
        if name not in known:
            raise OptionError("arms", f"unknown arm {name!r}", list(known), name)
    return tuple(known[name] for name in dict.fromkeys(wanted))


def _emit(job: Job, measured: Sequence[Measured], is_json: bool) -> None:
    engines: dict[Role, str] = {role: job.configuration[role] for role in get_args(Role)}
    rate = job.configuration["rate"]
    record = as_json(job.dataset, job.pair, engines, rate, measured)
    text = "\n".join(table.markdown() for table in tables(job.dataset, job.pair, rate, measured))
    if job.out is not None:
        (job.out / "math.json").write_text(json.dumps(record, indent=1) + "\n")
        (job.out / "math.md").write_text(text)
    print(json.dumps(record) if is_json else text)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="math", description=__doc__)
    add = parser.add_argument
    add("dataset", nargs="?", default="math100", help="math500, math100, aime24, aime25, amc23, a file; with a slice")
    add("--pair", default="r1-1.5b/r1-70b", help="`atts pairs` lists them")
    add("--at", help="vllm (servers on this machine: target :8000, draft :8001), sglang, or local")
    add("--draft", help="the draft's engine in words, such as vllm:http://host:8001/MODEL; overrules --at")
    add("--target", help="the same for the target")
    add("--file", help="read the benchmark from this file, not from the hub")
    whole = partial(add, type=_positive)
    whole("--limit", help="only the first problems")
    whole("--samples", help="rollouts a problem: 16")
    whole("--turns", help="turns a rollout: 15")
    whole("--chunk", help="tokens a piece: 500")
    whole("--max-tokens", help="tokens a rollout: 15,000")
    add("--rate", type=float, help="share of chunks the target takes over: 0.4")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any other key of `atts config show`")
    add("--arms", default=",".join(_DEFAULT_ARMS), help=f"which runs, of {','.join(arm.name for arm in ARMS)}")
    whole("--repeats", default=1, help="how often, each time with the next seed; times then have a spread")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="keep the runs here; the same command goes on where it was")
    add("--json", action="store_true", help="one JSON object instead of tables")
    return parser.parse_args(words)


def _positive(word: str) -> int:
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is below 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
