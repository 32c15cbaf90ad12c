"""Evaluates a draft and target pair on a mathematics benchmark as the paper does: three runs, one table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio

from atts.api import Setup, build_engine
from atts.api.setup import CalibrationMode
from atts.core import Role
from atts.engine import Engine
from atts.errors import ATTSError, OptionError
from atts.evaluators import Dataset, LoadOptions, load_dataset
from atts.pipelines import Chunking
from atts.run import INTERRUPTED, RunOptions, RunResult, evaluate
from scripts.studies.harness import say
from scripts.studies.mathematics_table import Measured, as_json, tables
from scripts.studies.pairs import PAIRS, Pair, find_pair

BENCHMARKS = ("math500", "math100", "aime24", "aime25", "amc23")


@dataclass(frozen=True, slots=True)
class Arm:
    """One of the runs of the table."""

    name: str
    what: str
    method: str = "atts"
    mode: CalibrationMode = "question-turn"


ARMS: tuple[Arm, ...] = (
    Arm("target", "the target alone", "target-only"),
    Arm("marginal", "one pool of scores over all questions: the paper's Mar", "paper", "marginal"),
    Arm("conditional", "a level per question: the paper's Con", "paper", "question"),
    Arm("turns", "a level per question and turn: what this project recommends"),
    Arm("draft", "the draft alone", "draft-only"),
)
_DEFAULT_ARMS = ("target", "marginal", "conditional")


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured: problems, the pair, its engines in words, how tokens are spent, how often."""

    dataset: Dataset
    pair: Pair
    engines: dict[Role, str]
    setup: Setup
    arms: tuple[Arm, ...]
    repeats: int
    out: Path | None


class Interrupted(Exception):
    """A run that did not come to its end; with --out the same command goes on."""


def main(words: Sequence[str] | None = None) -> int:
    """Parse, run what is missing, print the table; the exit code."""
    asked = _parse(words)
    try:
        if asked.list:
            print(listing())
            return 0
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
        engines = {role: await stack.enter_async_context(_engine(job, role)) for role in ("draft", "target")}
        for repeat in range(job.repeats):
            start = repeat % len(job.arms)
            for arm in (*job.arms[start:], *job.arms[:start]):
                say(f"math: {arm.name} ({arm.what}), seed {job.setup.seed + repeat}")
                found[arm.name].append(await _run(job, arm, repeat, engines["draft"], engines["target"]))
    return [Measured(arm.name, arm.what, tuple(found[arm.name])) for arm in job.arms]


async def _run(job: Job, arm: Arm, repeat: int, draft: Engine, target: Engine) -> RunResult:
    seed = job.setup.seed + repeat
    setup = replace(job.setup, method=arm.method, mode=arm.mode, seed=seed)
    place = None if job.out is None else job.out / f"{arm.name}-seed{seed}"
    plan = setup.plan(draft, target, job.dataset.problems[0].kind)
    result = await evaluate(job.dataset.problems, plan, RunOptions(place, engines="are open"))
    if result.status != "finished":
        raise Interrupted(f"{arm.name}: {result.status}, {result.why}")
    return result


def _engine(job: Job, role: Role) -> Engine:
    words = job.engines[role]
    if not words.startswith("hf:"):
        return build_engine(words, role)
    import torch

    from atts.local import LocalOptions

    return build_engine(words, role, LocalOptions(dtype="bfloat16" if torch.cuda.is_available() else "float32"))


def listing() -> str:
    """Every pair, what the paper reports of it, and whether it was run here."""
    lines = [f"benchmarks: {', '.join(BENCHMARKS)}, or any other dataset; a slice may follow, as in 'aime24[:15]'", ""]
    for pair in PAIRS:
        lines += [pair.name, f"  draft   {pair.draft}", f"  target  {pair.target}", f"  {pair.note}"]
        lines += [
            f"  published {name}: any of 16 {row.accuracy:.1%}, speed-up {row.marginal:g}x marginal, "
            f"{row.conditional:g}x conditional"
            for name, row in pair.published.items()
        ]
        lines += [f"  {pair.run_here}", ""]
    return "\n".join(lines)


def _job(asked: argparse.Namespace) -> Job:
    pair = find_pair(asked.pair)
    engines: dict[Role, str] = {
        "draft": asked.draft or pair.words("draft", asked.at),
        "target": asked.target or pair.words("target", asked.at),
    }
    dataset = load_dataset(asked.dataset, options=LoadOptions(file=asked.file))
    told = {name: getattr(asked, name) for name in ("samples", "turns", "max_tokens") if getattr(asked, name)}
    if asked.chunk is not None:
        told["chunking"] = Chunking(asked.chunk, asked.chunk, pair.policy.chunking.stop)
    policy, rate = replace(pair.policy, **told), pair.rate if asked.rate is None else asked.rate
    setup = Setup(rate=rate, policy=policy, seed=asked.seed, rollouts=asked.rollouts)
    limited = replace(dataset, problems=dataset.problems[: asked.limit])
    return Job(limited, pair, engines, setup, _arms(asked.arms), repeats=asked.repeats, out=asked.out)


def _arms(names: str) -> tuple[Arm, ...]:
    known = {arm.name: arm for arm in ARMS}
    for name in (wanted := names.split(",")):
        if name not in known:
            raise OptionError("arms", f"unknown arm {name!r}", list(known), name)
    return tuple(known[name] for name in dict.fromkeys(wanted))


def _emit(job: Job, measured: Sequence[Measured], is_json: bool) -> None:
    record = as_json(job.dataset, job.pair, job.engines, job.setup.rate, measured)
    text = "\n".join(table.markdown() for table in tables(job.dataset, job.pair, job.setup.rate, measured))
    if job.out is not None:
        (job.out / "math.json").write_text(json.dumps(record, indent=1) + "\n")
        (job.out / "math.md").write_text(text)
    print(json.dumps(record) if is_json else text)


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="math", description=__doc__)
    add = parser.add_argument
    add("dataset", nargs="?", default="math100", help=f"{', '.join(BENCHMARKS)}, a file, a hub dataset; with a slice")
    add("--pair", default="r1-1.5b/r1-70b", help="see --list")
    add("--list", action="store_true", help="say which pairs there are, and what is known of them")
    add("--at", choices=("vllm", "sglang", "local"), default="vllm",
        help="servers on this machine (target on port 8000, draft on 8001), or models in this process")  # fmt: skip
    add("--draft", help="the draft's engine in words, such as vllm:http://host:8001/MODEL; overrules --at")
    add("--target", help="the same for the target")
    add("--file", type=Path, help="read the benchmark from this file, not from the hub")
    whole = partial(add, type=_positive)
    whole("--limit", help="only the first problems")
    whole("--samples", help="rollouts a problem; the pair's preset unless told: 16 for the paper's")
    whole("--turns", help="turns a rollout: 15")
    whole("--chunk", help="tokens a piece: 500")
    whole("--max-tokens", help="tokens a rollout: 15,000")
    add("--rate", type=float, help="share of chunks the target takes over: 0.4")
    add("--arms", default=",".join(_DEFAULT_ARMS), help=f"which runs, of {','.join(arm.name for arm in ARMS)}")
    whole("--repeats", default=1, help="how often, each time with the next seed; times then have a spread")
    whole("--rollouts", default=256, help="in flight at once")
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
