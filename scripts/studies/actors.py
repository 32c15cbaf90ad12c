"""What Ray actors gain: the embedded evaluation in this process, in one actor and in two."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio

from atts.api import build_engine
from atts.api.setup import answers_for, grade, load_problems
from atts.core import Problem, Role
from atts.engine import Engine
from atts.pipelines import Chunking, Policy, ThresholdGate
from atts.run import Plan, RunResult, Session, evaluate
from scripts.studies.harness import Options, Spread, Table, interleaved, say

COLUMNS = ("where", "seconds", "times as fast as 1 actor", "same answers")
Arm = Callable[[Role], Engine]


@dataclass(slots=True)
class _Cluster:
    """A Ray cluster in this machine for the length of a block, so that no arm pays for its start."""

    def __enter__(self) -> None:
        ray: Any = importlib.import_module("ray")
        ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    def __exit__(self, *_: object) -> None:
        ray: Any = importlib.import_module("ray")
        ray.shutdown()


def study(options: Options) -> list[Table]:
    """Seconds of a whole evaluation, engines opened before the clock starts; no rows where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        return [Table("Ray actors", COLUMNS, (), ("Not measured: Ray is not installed (pip install 'atts[ray]').",))]
    problems = load_problems(f"arithmetic[:{options.pick(4, 16, 48)}]")
    arms: dict[str, Arm] = {
        "this process": lambda role: build_engine(f"embedded:{role}?threads=1&worker=thread", role),
        "1 actor each": lambda role: build_engine(f"ray:embedded:{role}?threads=1&actors=1&cpus=0.5", role),
        "2 actors each": lambda role: build_engine(f"ray:embedded:{role}?threads=1&actors=2&cpus=0.25", role),
    }
    answers: dict[str, dict[str, str | None]] = {}

    def seconds(name: str) -> float:
        say(f"ray: {name}")
        took, result = anyio.run(_timed, problems, arms[name])
        answers[name] = {outcome.problem.id: outcome.answer for outcome in result.outcomes()}
        return took

    with _Cluster():
        measured = interleaved({name: partial(seconds, name) for name in arms}, options.pick(1, 3, 5))
    base = measured["1 actor each"]
    rows = [
        (
            name,
            str(Spread.of(values)),
            str(Spread.of([one / own for one, own in zip(base, values, strict=True)])),
            "yes" if answers[name] == answers["this process"] else "no",
        )
        for name, values in measured.items()
    ]
    notes = (
        f"{len(problems)} problems of 8 rollouts, a frozen gate, one thread a step; rounds interleaved, the first not"
        " counted. Drafts and targets share this machine's cores, so a second actor gains only what one leaves idle.",
    )
    return [Table("Ray actors", COLUMNS, tuple(rows), notes)]


async def _timed(problems: tuple[Problem, ...], make: Arm) -> tuple[float, RunResult]:
    policy = Policy(samples=8, max_tokens=320, chunking=Chunking(64, 64), early_stop="none")
    draft, target = make("draft"), make("target")
    plan = Plan(draft, target, policy, ThresholdGate(1.2), answers_for("math"), grade)
    async with draft, target:
        began = time.perf_counter()
        result = await evaluate(problems, plan, Session(signals="ignore", engines="are open"))
        return time.perf_counter() - began, result
