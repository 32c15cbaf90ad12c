"""Sweeps and pilots, which run an evaluation under many settings and reuse model replies between
the runs.

A pilot runs some problems with several gates, and measures whether a gate improves accuracy.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import product
from pathlib import Path
from typing import Any, get_args

from atts.analysis import (
    LENGTHS,
    SWEEP,
    PilotArm,
    PilotReport,
    PointKind,
    RunSet,
    RunSetPoint,
    SweepReport,
    Value,
    judge_pilot,
    load_run_set,
    read_sweep,
    render_sweep,
    save_run_set,
)
from atts.api.config import Configuration, Job, config_keys, configure
from atts.api.engines import beside_reward_model, build_engines
from atts.api.evaluation import logged, sync
from atts.api.keys import Key, keys_of
from atts.api.setup import GATE_SETTINGS
from atts.core import Role, Usage
from atts.engine import Engine
from atts.errors import JournalError, OptionError, UnsupportedByEngine, counted
from atts.files import jsonable, write_atomic
from atts.journal import (
    JOURNAL,
    LOCK,
    REPLIES,
    SharedReplies,
    check_directory,
    is_run_over,
    locked,
)
from atts.methods import preset
from atts.run import Listener, RunOptions, RunResult, SharingEngine
from atts.run import evaluate as run_evaluation

PAGE = "sweep.html"
COIN = "coin"
REFERENCES = ("target-only", "draft-only", COIN)
"""The baselines of every sweep; they run with the largest token limits of the sweep."""
_MODELS = ("pair", "backend", "draft", "target", "draft_servers", "target_servers")
_FIXED = (
    *(key.name for key in keys_of(Job, Job())),
    "concurrency",
    "conditions",
    "on_unscored",
    "give_up_after",
    "speculate",
)
"""Keys that cannot vary in a sweep, because they choose the problems or do not change the results.
"""

_NOT_OF_COINS = ("method", "by_length", "score.kind", *GATE_SETTINGS)
"""Keys that change which chunks a method escalates, but have no effect on the method coin."""


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One planned run of a sweep: a combination of values, or a baseline."""

    name: str
    kind: PointKind
    values: Mapping[str, Value]
    configuration: Configuration
    directory: Path


@dataclass(frozen=True, slots=True)
class Sweep:
    """A planned sweep; no model is loaded and no file is written yet."""

    directory: Path
    over: Mapping[str, tuple[Value, ...]]
    points: tuple[SweepPoint, ...]
    notes: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the results and do not vary between the runs of the
        sweep's grid.
        """
        made = self.points[-1].configuration
        varying = {*self.over, *made.followed}
        return {
            name: jsonable(value) for name, value in made.deciding.items() if name not in varying
        }


@dataclass(frozen=True, slots=True)
class SweepEnd:
    """The result of a sweep; `last` is the run that did not finish, or None if all runs finished."""

    report: SweepReport
    page: Path
    last: RunResult | None = field(default=None, repr=False)

    @property
    def exit_code(self) -> int:
        """Return 0 if all runs finished, or else the exit code of the unfinished run."""
        return 0 if self.last is None else self.last.exit_code


Watch = Callable[[SweepPoint, int], AbstractAsyncContextManager[Sequence[Listener]]]
"""A function that takes a point of a sweep and its index, and returns an asynchronous context
manager for the run.

The context manager yields listeners, which get the run's events.
"""


def plan_sweep(
    over: Mapping[str, Sequence[object]],
    flags: Mapping[str, object] | None = None,
    pairs: Sequence[str] = (),
    *,
    file: str | Path | None = None,
    references: Sequence[str] = REFERENCES,
) -> Sweep:
    """Plan a run for each combination of values, and runs for the baselines.

    `flags`, `pairs` and `file` are as in `configure`.

    :raises OptionError: a key is unknown or cannot vary, or a value is impossible.
    """
    axes = {name: _values(name, values, flags or {}, pairs) for name, values in over.items()}
    if not axes:
        raise OptionError("--over", "no key varies; give KEY=VALUE,VALUE such as rate=0.1,0.2,0.4")
    base = configure(flags, pairs, file=file)
    directory = _directory(base, axes)

    def point(
        kind: PointKind,
        name: str,
        values: Mapping[str, Value],
        policy: Mapping[str, object] | None = None,
    ) -> SweepPoint:
        given = {**(policy or {}), **(flags or {}), **values, "out": None}
        made = configure(given, pairs, file=file)
        # This call raises an error for an impossible value, so that the sweep fails before its
        # first run.
        made.setup()
        return SweepPoint(name, kind, values, made, directory / _folder(name))

    grid = list[SweepPoint]()
    for chosen in product(*axes.values()):
        values = dict(zip(axes, chosen, strict=True))
        name = ",".join(f"{key}={_word(value)}" for key, value in values.items())
        grid.append(point("point", name, values))
    # If a baseline has the same configuration as a point of the grid, it is not run again.
    known = {one.configuration.digest for one in grid}
    baselines = list[SweepPoint]()
    notes = list[str]()
    if not any(preset(str(one.configuration["method"])).is_judged for one in grid):
        # The coin escalates as many chunks as the gate does. If no method of the sweep has a gate,
        # the coin has no use.
        references = [name for name in references if name != COIN]
    for values in _references(axes, references):
        shared = [key for key in values if key not in ("method", *LENGTHS)]
        varied = [f"{key}={_word(values[key])}" for key in shared]
        name = ",".join([str(values["method"]), *varied])
        try:
            is_coin = values["method"] == COIN
            made = point("reference", name, values, _policy_of(base) if is_coin else None)
        except OptionError as error:
            # A flag of the user may contradict the method of this baseline. The sweep is still
            # useful without the baseline.
            notes.append(f"the baseline {name} is left out: {error}")
            continue
        if made.configuration.digest not in known:
            known.add(made.configuration.digest)
            baselines.append(made)
    return Sweep(directory, axes, (*baselines, *grid), tuple(notes))


def _policy_of(base: Configuration) -> dict[str, object]:
    """Return the changes that the sweep's method makes to the policy; the coin baseline needs the
    same changes.
    """
    changes = preset(str(base["method"])).changes
    return {name: value for name, value in changes.items() if isinstance(value, str | int | float)}


def _values(
    name: str, values: Sequence[object], flags: Mapping[str, object], pairs: Sequence[str]
) -> tuple[Value, ...]:
    """Return the distinct values of one key, in the form in which the configuration stores them."""
    known = config_keys()
    if name in _FIXED or name.startswith("limits."):
        raise OptionError(
            "--over",
            f"{name} cannot vary in a sweep, because it either selects the problems or has no "
            "effect on the results",
        )
    if name not in known:
        raise OptionError(
            "--over", f"unknown key {name!r}", [key for key in known if key not in _FIXED], name
        )
    if flags.get(name) is not None or any(pair.partition("=")[0].strip() == name for pair in pairs):
        raise OptionError(
            "--over",
            f"{name} varies in this sweep, but another flag also sets it; leave out the other flag",
        )
    unique = tuple(dict.fromkeys(_read(known[name], value) for value in values))
    if not unique:
        raise OptionError("--over", f"no values are given for {name}; write {name}=VALUE,VALUE")
    return unique


def _read(key: Key, value: object) -> Value:
    converted = key.read(value, f"--over {key.name}")
    if converted is None or isinstance(converted, str | int | float):
        return converted
    raise OptionError("--over", f"{key.name} cannot vary in a sweep, because its value is a list")


def _references(
    axes: Mapping[str, tuple[Value, ...]], methods: Sequence[str]
) -> Iterator[dict[str, Value]]:
    """Yield the settings of every baseline run, with the largest token limits of the sweep.

    A method that uses a single model runs with every model of the sweep. The method coin runs at
    all rates and policies, because it is compared with runs of the same rate and policy.
    """
    of_models = {name: values for name, values in axes.items() if name in _MODELS}
    of_coins = {
        name: values
        for name, values in axes.items()
        if name not in LENGTHS and name not in _NOT_OF_COINS
    }
    longest: dict[str, Value] = {
        name: max(values, key=lambda value: float(str(value)) if value is not None else 0.0)
        for name, values in axes.items()
        if name in LENGTHS
    }
    for method in methods:
        varied = of_coins if method == COIN else of_models
        for chosen in product(*varied.values()):
            yield {"method": method, **dict(zip(varied, chosen, strict=True)), **longest}


def _directory(base: Configuration, axes: Mapping[str, object]) -> Path:
    """Return the sweep's directory: the value of `out`, or a directory that is named after the
    settings.
    """
    job = base.job
    if job.out is not None:
        return base.directory
    digest = blake2b(f"{base.digest} {sorted(axes)}".encode(), digest_size=4).hexdigest()
    name = re.sub(r"[^\w.]+", "-", f"sweep-{Path(job.dataset).name}").strip("-")
    return base.directory.with_name(f"{name}-{digest}")


def _word(value: Value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _folder(name: str) -> str:
    """Return a folder name for a point of the sweep; different points get different names."""
    plain = re.sub(r"[^\w.=,+-]+", "-", name)
    # After replacing characters or cutting the text, two points may have the same name. A digest
    # makes the folder names different.
    if plain == name and len(name) <= 100:
        return name
    return f"{plain[:80]}-{blake2b(name.encode(), digest_size=4).hexdigest()}"


@asynccontextmanager
async def unwatched(point: SweepPoint, number: int) -> AsyncGenerator[Sequence[Listener]]:
    yield ()


async def run_sweep(planned: Sweep, watch: Watch = unwatched) -> SweepEnd:
    """Run the unfinished points of a sweep one after the other; the same call continues the sweep.

    Engines stay open between points that use the same engines. The sweep stops at the first run
    that does not finish.

    :raises JournalError: the directory cannot be used, or contains another sweep.
    :raises EngineError: an engine cannot be opened, or is lost for good.
    """
    check_directory(planned.directory)
    if (planned.directory / JOURNAL).exists():
        raise JournalError(
            planned.directory,
            "the directory belongs to a single run, but a sweep needs a directory for several runs",
            "Choose another directory with --out",
        )
    planned.directory.mkdir(parents=True, exist_ok=True)
    with locked(planned.directory / LOCK, planned.directory):
        _keep(planned)
        last = await _run_all(planned, watch)
        report = read_sweep(planned.directory)
        page = planned.directory / PAGE
        write_atomic(page, render_sweep(report).encode())
    return SweepEnd(report, page, last)


async def _run_all(planned: Sweep, watch: Watch) -> RunResult | None:
    """Run the unfinished points until one does not finish; return this run, or None if all finish."""
    left = [
        (number, point)
        for number, point in enumerate(planned.points, 1)
        if not is_run_over(point.directory)
    ]
    if not left:
        return None
    # Sort the points by their models. Points with the same models then share the open engines.
    left.sort(key=lambda one: _words(one[1]))
    async with AsyncExitStack() as stack:
        opened: tuple[tuple[str, str], Engine, Engine] | None = None
        replies = stack.enter_context(SharedReplies(planned.directory / REPLIES))
        engines = await stack.enter_async_context(AsyncExitStack())
        for number, point in left:
            async with watch(point, number) as listeners:
                if opened is None or opened[0] != _words(point):
                    await engines.aclose()
                    roles = _roles_of(one for _, one in left if _words(one) == _words(point))
                    alike = [one for _, one in left if _words(one) == _words(point)]
                    demands = [one.configuration.setup().in_flight for one in alike]
                    most = max(each[0] for each in demands), max(each[1] for each in demands)
                    draft, target = build_engines(
                        *_words(point),
                        point.configuration["speculate"],
                        roles,
                        most,
                        give_up_after=point.configuration["give_up_after"],
                    )
                    rules = {one.configuration.setup().run_policy.score for one in alike}
                    judged = [rule for rule in rules if rule.kind == "prm"]
                    if len(judged) > 1:
                        raise OptionError(
                            "score.reward",
                            "a sweep can use only one reward model; start one sweep per reward "
                            "model",
                        )
                    for rule in judged:
                        target = beside_reward_model(target, rule)
                    for engine in dict.fromkeys((draft, target)):
                        await engines.enter_async_context(engine)
                    opened = _words(point), draft, target
                result = await run_point(point, opened[1], opened[2], replies, listeners)
            if result.exit_code or result.status != "finished":
                return result
    return None


async def run_point(
    point: SweepPoint,
    draft: Engine,
    target: Engine,
    replies: SharedReplies,
    listeners: Sequence[Listener],
) -> RunResult:
    problems = point.configuration.job.load().problems
    setup = point.configuration.setup()
    folder = point.directory.name
    engines = (draft, target)
    # Method exact chooses the model that writes by measured speed. A shared reply takes no time, so
    # with shared replies of the target, drafting would never seem to be faster.
    if point.configuration["method"] != "exact":
        engines = (
            SharingEngine(draft, "draft", replies, folder),
            SharingEngine(target, "target", replies, folder),
        )
    job = point.configuration.job
    options = RunOptions(
        point.directory, listeners, engines="are open", caps=job.caps, prices=job.price_list
    )
    plan = setup.plan(*engines, problems[0].kind)
    async with logged(options, job.log) as options:
        return await run_evaluation(problems, plan, options)


def _roles_of(points: Iterable[SweepPoint]) -> tuple[Role, ...]:
    """Return the roles (draft before target) whose models at least one of these runs uses."""
    asked = {role for point in points for role in point.configuration.setup().roles}
    return tuple(role for role in get_args(Role) if role in asked)


def _words(point: SweepPoint) -> tuple[str, str]:
    return str(point.configuration["draft"]), str(point.configuration["target"])


def _keep(planned: Sweep) -> None:
    """Write the sweep's file: add the planned points to those that earlier calls stored.

    :raises JournalError: the directory contains a sweep with other settings.
    """
    directory = planned.directory
    settings = planned.settings
    points = {
        one.name: RunSetPoint(one.name, one.kind, dict(one.values), one.directory.name)
        for one in planned.points
    }
    over = dict(planned.over)
    if (directory / SWEEP).exists():
        stored = load_run_set(directory)
        if [*stored.over] != [*over]:
            raise _another(
                directory, f"the sweep in this directory varies {', '.join(stored.over)}"
            )
        for name in {**settings, **stored.settings}:
            if settings.get(name) != stored.settings.get(name):
                raise _another(
                    directory,
                    f"the sweep in this directory uses {name}={stored.settings.get(name)!r}",
                )
        points = {one.name: one for one in stored.points} | points
        over = {
            name: tuple(dict.fromkeys((*stored.over[name], *values)))
            for name, values in over.items()
        }
    save_run_set(directory, RunSet(over, settings, tuple(points.values())))


def _another(directory: Path, what: str) -> JournalError:
    return JournalError(
        directory,
        f"the directory belongs to another sweep: {what}",
        "Choose another directory with --out",
    )


async def sweep(
    over: Mapping[str, Sequence[object]],
    dataset: str = "arithmetic[:40]",
    *,
    directory: str | Path,
    settings: Mapping[str, object] | None = None,
) -> SweepReport:
    """Evaluate under every combination of values; `over` maps each key to its values.

    `settings` are the other keys, as in `configure`. Each combination is a separate run in the
    directory. The same call continues the sweep, and more values of the same keys add runs to the
    sweep.

    :raises OptionError: a key is unknown or cannot vary.
    :raises EngineError: an engine cannot be opened, or is lost.

    >>> import tempfile
    >>> from atts.api import sweep_sync
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     words = {"draft": "scripted", "target": "scripted"}
    ...     found = sweep_sync({"samples": [1, 2]}, "arithmetic[:2]", directory=folder, settings=words)
    >>> [point.name for point in found.points]
    ['target-only', 'draft-only', 'coin', 'samples=1', 'samples=2']
    """
    flags = {**(settings or {}), "dataset": dataset, "out": str(directory)}
    return (await run_sweep(plan_sweep(over, flags))).report


sweep_sync = sync(sweep)


SCORES = ("mean", "worst", "speculative", "draft", "rating", "verdict")
"""The kinds of score that a pilot compares; each is used by the gate of method `atts`."""
PILOT = {"limit": 40, "samples": 4, "early_stop": "none"}
"""The settings that a pilot uses unless the user sets them."""


@dataclass(frozen=True, slots=True)
class _Planned:
    """A planned arm of a pilot, that is, a run with its own settings; `coin` names the coin arm to
    compare with.
    """

    name: str
    flags: Mapping[str, object]
    coin: str = ""


@dataclass(frozen=True, slots=True)
class PilotEnd:
    """The result of a pilot; `last` is the run that did not finish, or None if all runs finished."""

    directory: Path
    report: PilotReport | None
    last: RunResult | None = None

    @property
    def exit_code(self) -> int:
        """Return 0 if all runs finished, or else the exit code of the unfinished run."""
        return 0 if self.last is None else self.last.exit_code


async def run_pilot(
    flags: Mapping[str, object] | None = None,
    pairs: Sequence[str] = (),
    *,
    file: str | Path | None = None,
    engines: tuple[Engine, Engine] | None = None,
    watch: Watch = unwatched,
) -> PilotEnd:
    """Run every arm of a pilot, and compare the arms; the same call continues the pilot.

    `flags`, `pairs` and `file` are as in `configure`. `engines` are a draft and a target that
    replace the engines in the flags. The report gives the reason for each arm that the models
    cannot run. Runs reuse each other's model replies if possible.

    :raises OptionError: a key is unknown, or a value is impossible.
    :raises JournalError: the directory cannot be used.
    :raises EngineError: an engine cannot be opened, or is lost for good.
    """
    given = {name: value for name, value in (flags or {}).items() if value is not None}
    base = configure({**PILOT, **given}, pairs, file=file)
    if base["method"] != "atts":
        raise OptionError("method", "a pilot chooses its methods itself; leave the method out")
    graded = [problem for problem in base.job.load().problems if problem.answer is not None]
    if len(graded) < 2:
        raise OptionError(
            "dataset",
            f"the dataset has {counted(len(graded), 'problem')} with a reference answer, but a "
            "pilot needs at least 2",
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
    """Return the first arms: each model alone, method exact, coins, every kind of score, and
    escalation of whole problems.
    """
    # A gate that decides on whole problems needs the score kind "disagreement". The coin ignores
    # the score, but runs with the same settings, so that only the gate differs.
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
    """Return arms that use the best score with takeover "continue", with half the rate, and with
    twice the rate.

    Each of these arms has a coin arm to compare with. The result is empty if no score is
    significantly better than its coin arm.
    """
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
    """The settings that all arms of a pilot share."""

    base: Configuration
    flags: Mapping[str, object]
    pairs: Sequence[str]
    file: str | Path | None
    directory: Path
    watch: Watch

    async def run(
        self, planned: _Planned, draft: Engine, target: Engine, replies: SharedReplies
    ) -> PilotArm | RunResult:
        """Run one arm and return its results, or return the run itself if it does not finish."""
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
    """Mark an arm as impossible for these models, with the first sentence of the error as the
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
    """Measure on some problems whether a gate improves this pair, and recommend a method.

    `settings` are the other keys, as in `configure`. The runs are kept in the directory, and the
    same call continues the pilot.

    :raises OptionError: a key is unknown, or a run did not finish.
    :raises EngineError: an engine cannot be opened, or is lost.
    """
    flags = {**(settings or {}), "dataset": dataset, "out": str(directory)}
    end = await run_pilot(flags)
    if end.report is None:
        raise OptionError("pilot", "a run did not finish; to continue it, make the same call again")
    return end.report


pilot_sync = sync(pilot)
