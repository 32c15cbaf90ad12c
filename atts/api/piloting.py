"""Pilots, which run some problems with every gate to find out whether a gate helps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atts.analysis import PilotArm, PilotReport, judge_pilot
from atts.api.config import Configuration, configure
from atts.api.engines import build_engines
from atts.api.evaluation import sync
from atts.api.sweeping import SweepPoint, Watch, run_point, unwatched
from atts.core import Usage
from atts.engine import Engine
from atts.errors import OptionError, UnsupportedByEngine
from atts.journal import REPLIES, SharedReplies, check_directory
from atts.run import RunResult

SCORES = ("mean", "worst", "speculative", "draft", "rating", "verdict")
"""The scores that a pilot tries, each with the gate of method `atts`."""
PILOT = {"limit": 40, "samples": 4, "early_stop": "none"}
"""The default settings of a pilot."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """An arm to run; `coin` is the name of the coin it is compared with."""

    name: str
    flags: Mapping[str, object]
    coin: str = ""


@dataclass(frozen=True, slots=True)
class PilotEnd:
    """The end of a pilot; `last` is the run that did not finish, or None."""

    directory: Path
    report: PilotReport | None
    last: RunResult | None = None

    @property
    def exit_code(self) -> int:
        """Return 0, or the exit code of the run that did not finish."""
        return 0 if self.last is None else self.last.exit_code


async def run_pilot(
    flags: Mapping[str, object] | None = None,
    pairs: Sequence[str] = (),
    *,
    file: str | Path | None = None,
    engines: tuple[Engine, Engine] | None = None,
    watch: Watch = unwatched,
) -> PilotEnd:
    """Run every arm of a pilot, and compare them; the same call continues it.

    `flags`, `pairs` and `file` are those of `configure`; `engines` are a draft and a target that
    replace those named by the flags. Arms that the models cannot run are left out, with the reason
    in the report. Runs share replies if possible.

    :raises OptionError: an unknown key or an impossible value.
    :raises JournalError: the directory cannot be used.
    :raises EngineError: an engine cannot be opened, or is lost for good.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    base = configure({**PILOT, **given}, pairs, file=file)
    if base["method"] != "atts":
        raise OptionError("method", "a pilot runs several methods; leave this key out")
    graded = [problem for problem in base.job.load().problems if problem.answer is not None]
    if len(graded) < 2:
        raise OptionError(
            "dataset",
            f"{len(graded)} of the problems has a reference answer, but a pilot needs two",
        )
    directory = base.directory
    if base.job.out is None:
        directory = directory.with_name(f"pilot-{directory.name}")
    check_directory(directory)
    directory.mkdir(parents=True, exist_ok=True)
    runner = _Runner(base, {**PILOT, **given}, pairs, file, directory, watch)
    async with AsyncExitStack() as stack:
        draft, target = engines or build_engines(
            base["draft"],
            base["target"],
            base["speculate"],
            ("draft", "target"),
            give_up_after=base["give_up_after"],
        )
        for engine in dict.fromkeys((draft, target)):
            await stack.enter_async_context(engine)
        replies = stack.enter_context(SharedReplies(directory / REPLIES))
        arms: list[PilotArm] = []
        for planned in _first_arms(float(base["rate"])):
            arm = await runner.run(planned, draft, target, replies)
            if isinstance(arm, RunResult):
                return PilotEnd(directory, None, arm)
            arms.append(arm)
        for planned in _second_arms(judge_pilot(arms), float(base["rate"])):
            arm = await runner.run(planned, draft, target, replies)
            if isinstance(arm, RunResult):
                return PilotEnd(directory, None, arm)
            arms.append(arm)
    return PilotEnd(directory, judge_pilot(arms))


def _first_arms(rate: float) -> list[_Planned]:
    """Return the first arms: either model alone, exact, a coin, every score, and whole problems."""
    # a coin needs no score, but escalating whole problems needs the score of whole problems
    whole_problems = {"escalates": "problem", "score.kind": "disagreement", "rate": rate}
    return [
        _Planned("draft-only", {"method": "draft-only"}),
        _Planned("target-only", {"method": "target-only"}),
        _Planned("exact", {"method": "exact"}),
        _Planned("coin", {"method": "coin", "rate": rate}),
        *(
            _Planned(kind, {"method": "atts", "rate": rate, "score.kind": kind}, "coin")
            for kind in SCORES
        ),
        _Planned("coin, problems", {"method": "coin", **whole_problems}),
        _Planned("cascade", {"method": "cascade", "rate": rate}, "coin, problems"),
    ]


def _second_arms(report: PilotReport, rate: float) -> list[_Planned]:
    """Return other takeovers and rates of the best score, each with its coin; none if none helps."""
    helpful = [row for row in report.rows if row.helps and row.arm.name in SCORES]
    if not helpful:
        return []
    best = max(helpful, key=lambda row: row.accuracy.value)
    planned: list[_Planned] = []
    for changes in (
        {"takeover": "continue", "rate": rate},
        {"rate": rate / 2},
        {"rate": min(1.0, 2 * rate)},
    ):
        words = ", ".join(
            value if isinstance(value, str) else f"rate {value:g}"
            for name, value in changes.items()
            if name != "rate" or value != rate
        )
        coin = f"coin, {words}"
        planned.append(_Planned(coin, {"method": "coin", **changes}))
        flags = {"method": "atts", "score.kind": best.arm.name, **changes}
        planned.append(_Planned(f"{best.arm.name}, {words}", flags, coin))
    return planned


@dataclass(frozen=True, slots=True)
class _Runner:
    """The data that the arms of a pilot share."""

    base: Configuration
    flags: Mapping[str, object]
    pairs: Sequence[str]
    file: str | Path | None
    directory: Path
    watch: Watch

    async def run(
        self, planned: _Planned, draft: Engine, target: Engine, replies: SharedReplies
    ) -> PilotArm | RunResult:
        """Run one arm; return its results, or the run that did not finish."""
        given = {**self.flags, **planned.flags, "out": None}
        nothing = PilotArm(planned.name, planned.flags, {}, Usage(), math.nan, planned.coin)
        try:
            made = configure(given, self.pairs, file=self.file)
            made.setup()
        except OptionError as error:
            return _without(nothing, error)
        folder = planned.name.replace(", ", "+").replace(" ", "-")
        values: dict[str, Any] = dict(planned.flags)
        point = SweepPoint(planned.name, "point", values, made, self.directory / folder)
        async with self.watch(point, 0) as listeners:
            try:
                result = await run_point(point, draft, target, replies, listeners)
            except (UnsupportedByEngine, OptionError) as error:
                return _without(nothing, error)
        if result.exit_code or result.status != "finished":
            return result
        return _arm(planned, result)


def _without(arm: PilotArm, error: Exception) -> PilotArm:
    """Return the arm for a method that the models cannot run, with the first sentence of the
    reason.
    """
    return replace(arm, unavailable=str(error).partition(". ")[0])


def _arm(planned: _Planned, result: RunResult) -> PilotArm:
    graded = [one for one in result.problems if one.verdict is not None]
    correct = {
        one.problem: [sample.verdict == "correct" for sample in one.complete_samples]
        for one in graded
    }
    judged = sum(one.judged for one in result.problems)
    escalated = sum(one.escalated for one in result.problems)
    return PilotArm(
        planned.name,
        planned.flags,
        {name: row for name, row in correct.items() if row},
        sum((one.usage for one in graded), Usage()),
        escalated / judged if judged else math.nan,
        planned.coin,
    )


async def pilot(
    dataset: str = "arithmetic",
    *,
    directory: str | Path,
    settings: Mapping[str, object] | None = None,
) -> PilotReport:
    """Measure on some problems whether a gate helps this pair, and recommend a method.

    `settings` are other keys, as for `configure`. The runs are kept in the directory, and the same
    call continues them.

    :raises OptionError: an unknown key, or a run that did not finish.
    :raises EngineError: an engine cannot be opened, or is lost.
    """
    flags = {**(settings or {}), "dataset": dataset, "out": str(directory)}
    end = await run_pilot(flags)
    if end.report is None:
        raise OptionError("pilot", "a run did not finish; the same call continues it")
    return end.report


pilot_sync = sync(pilot)
