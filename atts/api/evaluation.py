"""Evaluations, sessions whose engines stay open, and synchronous versions of evaluations and
sessions.
"""

from __future__ import annotations

import json
import math
import os
from collections import OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial, update_wrapper
from hashlib import blake2b
from inspect import signature
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, get_args, get_type_hints

import anyio
import anyio.to_thread
from anyio.from_thread import BlockingPortal
from anyio.lowlevel import current_token
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from atts import concurrency
from atts.api.keys import flat
from atts.api.pairs import PAIR
from atts.api.setup import (
    GATE_SETTINGS,
    LENGTHS,
    Setup,
    answers_for,
    default_of,
    load_problems,
)
from atts.core import AnswerKind, Outcome, Problem
from atts.errors import (
    DatasetError,
    EngineUnavailable,
    FingerprintError,
    OptionError,
    UsageError,
    counted,
)
from atts.files import jsonable
from atts.graph import Graph
from atts.interrupts import run_async
from atts.journal import (
    MANIFEST,
    Event,
    Manifest,
    RecordedRun,
    Setting,
    dataset_digest,
    load_manifest,
    open_run,
)
from atts.ledger import PRICES
from atts.pipelines import RecordedRollouts
from atts.run import (
    CLOSING_SECONDS,
    Notice,
    RunOptions,
    RunResult,
    RunSpec,
    Shard,
    StopWhen,
    open_logs,
)
from atts.run import evaluate as run_evaluation
from atts.sampling import Seed, generator


def drawn_order(problems: Sequence[Problem], seed: int) -> tuple[Problem, ...]:
    """Return the problems in a random order that depends only on the seed and the number of
    problems.
    """
    places = generator(Seed(run=seed, purpose="order of problems")).permutation(len(problems))
    return tuple(problems[position] for position in places)


def read_stop_when(compare_to: str | Path, stop_when: str) -> StopWhen:
    """Read the earlier run's votes, and the difference in accuracy that counts as a tie.

    The earlier run is in the folder `compare_to`. The difference is in percentage points, and is
    part of `stop_when`.

    :raises OptionError: `stop_when` is not "decided" or "decided=POINTS".
    :raises JournalError: `compare_to` contains no run.
    :raises DatasetError: `compare_to` contains no graded results.
    """
    word, mark, points = stop_when.partition("=")
    try:
        near = float(points) if mark else 0.0
    except ValueError:
        near = -1.0
    if word != "decided" or not (0 < near <= 100 or not mark):
        raise OptionError(
            "stop_when",
            f"{stop_when!r} is not a condition that ends a run; use decided, or decided= with "
            "percentage points, such as decided=2",
        )
    from atts.analysis import read_results

    run = read_results(Path(compare_to))
    return StopWhen(run.name, {name: one.vote for name, one in run.problems.items()}, near)


def common_problems(
    problems: Sequence[Problem], comparison: StopWhen, seed: int
) -> tuple[Problem, ...]:
    """Return the problems that the earlier run has graded too, in the random order in which they
    will run.

    :raises DatasetError: the runs have no problem in common.
    """
    both = [problem for problem in problems if problem.id in comparison.votes]
    if not both:
        raise DatasetError(
            comparison.against,
            "the earlier run graded none of the problems of this run",
            "Compare with an earlier run on the same problems",
        )
    return drawn_order(both, seed)


def comparison_setting(comparison: StopWhen) -> dict[str, Setting]:
    """Return the configuration entry that records a comparison; a resumed run must have the same
    entry.
    """
    votes = repr(sorted(comparison.votes.items())).encode()
    digest = blake2b(votes, digest_size=8).hexdigest()
    return {
        "until": Setting(
            {"against": digest, "points": comparison.points, "order": "drawn by seed"},
            "--stop-when",
        )
    }


# Seconds that trackers get to send their last data, if the run ends with an error or a second
# Ctrl-C.
_IN_A_HURRY = 5.0
# A session counts how often each question was asked, for at most this many different questions.
_REMEMBERED = 10_000
P = ParamSpec("P")
T = TypeVar("T")


class evaluate:
    """An evaluation; `await` it for its result, or iterate over its events inside `async with`.

    `dataset` is a benchmark's name ("math500[:20]"), a file, or problems. With a `directory` the
    run has a journal, and the same call resumes the run. The `shard` "2/3" runs every third
    problem, beginning with the second; `atts.merge` merges the shards. `compare_to` is an earlier
    run or a file of results, and `stop_when` is "decided" or "decided=2". With both, problems start
    in a random order that depends only on the seed. No further problem starts once a test shows
    that this run is better or worse than the earlier run. With "decided=2", the run also stops once
    the difference is shown to be at most 2 points. `log` names trackers that get the run's numbers,
    such as "mlflow:EXPERIMENT". Leaving the `async with` block before the run ends cancels the run;
    a run with a journal can be resumed.

    >>> import anyio
    >>> async def main() -> str:
    ...     setup = Setup(draft="scripted", target="scripted", method="draft-only")
    ...     from atts.testing import toy_problems
    ...     result = await evaluate(toy_problems(2), setup)
    ...     return result.status
    >>> anyio.run(main)
    'finished'
    """

    def __init__(
        self,
        dataset: str | Path | Sequence[Problem] = "arithmetic",
        setup: Setup | None = None,
        *,
        limit: int | None = None,
        directory: str | Path | None = None,
        options: RunOptions | None = None,
        shard: str | Shard | None = None,
        compare_to: str | Path | None = None,
        stop_when: str | None = None,
        log: Sequence[str] = (),
        within: Session | None = None,
    ) -> None:
        if (compare_to is None) != (stop_when is None):
            raise OptionError(
                "stop_when",
                "give --compare-to and --stop-when together; to compare finished runs, use "
                "`atts compare`",
            )
        if compare_to is not None and shard is not None:
            raise OptionError(
                "stop_when",
                "a shard runs only some of the problems, so it cannot decide the comparison; "
                "leave out --shard or --stop-when",
            )
        self._stop_when: StopWhen | None = None
        if compare_to is not None and stop_when is not None:
            self._stop_when = read_stop_when(compare_to, stop_when)
        self._dataset = dataset
        self._setup = setup or Setup()
        self._log = (log,) if isinstance(log, str) else tuple(log)
        self._within = within
        self._limit = limit
        self._shard = Shard.parse(shard) if isinstance(shard, str) else shard
        self._options = replace(
            options or RunOptions(), directory=Path(directory) if directory else None
        )
        self._stack = AsyncExitStack()
        self._events: MemoryObjectReceiveStream[Notice] | None = None
        self._done = anyio.Event()
        self._result: RunResult | None = None

    def __await__(self) -> Generator[Any, Any, RunResult]:
        return self._whole().__await__()

    async def __aenter__(self) -> Self:
        send, self._events = anyio.create_memory_object_stream[Notice](math.inf)
        listener = _Stream(send)
        self._options = replace(self._options, listeners=(*self._options.listeners, listener))
        await self._stack.enter_async_context(concurrency.background(self._follow, send))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        try:
            return await self._stack.__aexit__(kind, error, trace)
        finally:
            if self._events is not None:
                self._events.close()

    def __aiter__(self) -> AsyncIterator[Notice]:
        """Iterate over the events as they happen, until the run ends.

        :raises UsageError: if called outside `async with`.
        """
        if self._events is None:
            raise UsageError(
                "events are available only inside `async with atts.evaluate(...) as run:`"
            )
        return self._events.__aiter__()

    async def result(self) -> RunResult:
        """Wait until the run ends, and return its result."""
        await self._done.wait()
        assert self._result is not None, "a run that ended without an error must have a result"
        return self._result

    async def _follow(self, send: MemoryObjectSendStream[Notice]) -> None:
        async with send:
            self._result = await self._run()
        self._done.set()

    async def _whole(self) -> RunResult:
        # `async with` has already started the run.
        if self._events is not None:
            return await self.result()
        return await self._run()

    async def _run(self) -> RunResult:
        problems = load_problems(self._dataset, self._limit)
        if self._stop_when is not None:
            problems = common_problems(problems, self._stop_when, self._setup.seed)
        if self._shard is not None:
            problems = self._shard.take(problems)
        setup = self._setup
        options = self._options
        if options.directory is not None:
            check_resumes(options.directory, problems, setup, self._shard)
        if self._within is None:
            plan = setup.plan(*setup.engines(), problems[0].kind)
        else:
            plan, options = await self._within.plan(problems[0].kind, options)
        if self._shard is not None:
            settings = {"shard": Setting(str(self._shard), "--shard")}
            plan = replace(plan, configuration={**plan.configuration, **settings})
        if self._stop_when is not None:
            settings = comparison_setting(self._stop_when)
            plan = replace(
                plan, stop_when=self._stop_when, configuration={**plan.configuration, **settings}
            )
        async with logged(options, self._log) as options:
            return await run_evaluation(problems, plan, options)


@asynccontextmanager
async def logged(options: RunOptions, names: Sequence[str]) -> AsyncGenerator[RunOptions]:
    """Add the named trackers to a run's listeners, and give the trackers time to finish after the
    run.

    :raises OptionError: a name is unknown.
    :raises MissingExtra: a tracker is not installed.
    """
    trackers = open_logs(names, options.directory)
    seconds = _IN_A_HURRY
    try:
        yield replace(options, listeners=(*options.listeners, *trackers))
        seconds = CLOSING_SECONDS
    finally:
        with anyio.CancelScope(shield=True):
            for tracker in trackers:
                await anyio.to_thread.run_sync(tracker.close, seconds)


def check_resumes(
    directory: Path, problems: Sequence[Problem], setup: Setup, shard: Shard | None = None
) -> None:
    """Check, before a model is loaded, that the directory does not contain a run with other
    settings.

    Only settings that are known without an engine are compared here. The journal compares all
    settings after the engines have opened.

    :raises FingerprintError: a setting differs; the message has each such setting with its stored
        and its new value.
    :raises JournalError: the directory's manifest cannot be read.
    """
    stored = load_manifest(directory / MANIFEST)
    if stored is None:
        return
    now = {name: getattr(setup, name) for name in _DECISIVE} | _decisive_policy(setup)
    now["shard"] = None if shard is None else str(shard)
    then: dict[str, Any] = {name: setting.value for name, setting in stored.configuration.items()}
    recorded_policy = then.pop("policy", None)
    if isinstance(recorded_policy, dict):
        then |= dict(flat(recorded_policy))
    then["seed"] = stored.seed
    # The manifest has a gate setting only if its value is not the default, so add the defaults.
    then = {name: default_of(name) for name in GATE_SETTINGS} | then
    # `None` and an empty value both mean that a setting is not set.
    changed = [name for name in now if (now[name] or None) != (then.get(name) or None)]
    # If the user chose another method, report the method, but not the settings that this method
    # sets itself.
    if "method" in changed:
        settled = {name for name, setting in setup.settings.items() if setting.origin[:2] != "--"}
        changed = [name for name in changed if name in _DECISIVE or name not in settled]
    if "shard" not in changed and dataset_digest(problems) != stored.dataset:
        changed += _changed_problems(setup, stored, now, then)
    if changed:
        given = setup.settings
        differences = list[tuple[str, object, object]]()
        for name in changed:
            origin = given[name].origin if name in given else ""
            flag = f"--set {name}" if origin == "--set" else origin
            label = flag if flag.startswith("--") else name
            differences.append((label, then.get(name), now[name]))
        advice = "Name another directory, or use the settings of the run in this directory"
        raise FingerprintError(f"the run in {directory}", differences, advice)


_DECISIVE = ("method", "rate", "seed", "grader", *GATE_SETTINGS)
_OF_PROBLEMS = (
    *("dataset", "limit", "file", "column", "relative", "absolute", "units", "choices"),
    *("references", "shots"),
)
"""Keys that decide which problems run, and how answers are compared with references."""


def _decisive_policy(setup: Setup) -> dict[str, Any]:
    """Return the policy's keys and values, without the token limits that may be reduced when
    engines open.
    """
    policy = dict(flat(json.loads(json.dumps(setup.run_policy.recorded()))))
    given = dict(flat(asdict(setup.policy)))
    for name in LENGTHS:
        setting = setup.provenance.get(name)
        is_of_pair = setting is not None and setting.origin.startswith(PAIR)
        if given.get(name) is None or is_of_pair:
            del policy[name]
    # The manifest has the key "letter" only if the problems have choices, so do not compare it
    # here.
    del policy["letter"]
    return policy


def _changed_problems(
    setup: Setup, stored: Manifest, now: dict[str, Any], then: dict[str, Any]
) -> list[str]:
    """Return the keys that differ between the problems of this run and of the stored run. If no key
    differs, return "problems": their texts or their order changed.

    All compared values are added to `now` (this run) and `then` (the stored run).
    """
    keys = [name for name in _OF_PROBLEMS if name in setup.settings]
    here = {name: jsonable(setup.settings[name].value) for name in keys}
    there = {name: stored.settings[name].value for name in keys if name in stored.settings}
    changed = [name for name in keys if (here[name] or None) != (there.get(name) or None)]
    if not changed:
        changed = ["problems"]
        here["problems"] = "others"
        count = stored.problems or 0
        there["problems"] = (
            f"{counted(count, 'problem')} with different texts or in a different order"
        )
    now |= here
    then |= there
    return changed


@dataclass(frozen=True, slots=True)
class _Stream:
    """A listener that puts a run's events into a queue for a reader, so that the run never waits
    for the reader.
    """

    send: MemoryObjectSendStream[Notice]

    def recalled(self, event: Event) -> None:
        """Ignore an event of an earlier session, because readers get only new events."""

    def notify(self, event: Notice) -> None:
        """Queue an event, or drop it if the reader has left."""
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            self.send.send_nowait(event)


class Session:
    """Engines that stay open and a gate that keeps learning, for any number of questions.

    All questions share the same limits. The session opens with `async with`, or with the first
    question. Cancelling one question does not affect other questions. Closing the session does not
    wait for unfinished questions.

    >>> import anyio
    >>> async def main() -> str | None:
    ...     async with Session(Setup(draft="scripted", target="scripted", method="draft-only")) as session:
    ...         return (await session.solve("What is 1 + 1?")).status
    >>> anyio.run(main)
    'answered'
    """

    def __init__(self, setup: Setup | None = None) -> None:
        self.setup = setup or Setup()
        self._stack = AsyncExitStack()
        self._opening = anyio.Lock()
        self._plan: RunSpec | None = None
        self._shared: Graph | None = None
        self._is_closed = False
        # For each question (by its digest): how often it was asked. The question that was asked
        # last is the last entry.
        self._asked = OrderedDict[str, int]()
        # When `_asked` is full, the question that was not asked for the longest time is removed.
        # This is the largest count of all removed questions.
        self._forgotten = 0

    async def solve(
        self, problem: str | Problem, *, policy: Mapping[str, Any] | None = None
    ) -> Outcome:
        """Solve one problem; `policy` has fields of the setup's policy that change for this problem
        only.

        A question that is asked again as a string gets new random numbers. A `Problem` with the
        same id always gets the same random numbers.

        :raises EngineError: an engine cannot be opened or is lost.
        :raises OptionError: an impossible policy.
        """
        one = problem if isinstance(problem, Problem) else self._named(problem)
        plan, options = await self.plan(one.kind, RunOptions(signals="ignore"))
        if policy:
            changed = replace(self.setup, policy=replace(self.setup.policy, **policy))
            if not {*changed.roles} <= {*plan.roles}:
                missing = next(role for role in changed.roles if role not in plan.roles)
                problem = (
                    f"the policy needs the {missing}, which this session did not open because "
                    "its method does not need it"
                )
                raise OptionError("policy", problem)
            plan = replace(
                plan,
                policy=changed.run_policy,
                policy_for_context=changed.policy_within,
                roles=changed.roles,
            )
        return next((await run_evaluation([one], plan, options)).outcomes())

    def evaluate(
        self,
        dataset: str | Path | Sequence[Problem] = "arithmetic",
        *,
        limit: int | None = None,
        directory: str | Path | None = None,
        options: RunOptions | None = None,
    ) -> evaluate:
        """Evaluate like `atts.evaluate`, with this session's engines and limits.

        A run in a directory gets a new gate, because the run's journal must contain everything from
        which its gate has learnt.
        """
        options = options or RunOptions(signals="ignore")
        return evaluate(
            dataset, self.setup, limit=limit, directory=directory, options=options, within=self
        )

    async def plan(self, kind: AnswerKind, options: RunOptions) -> tuple[RunSpec, RunOptions]:
        """Open the engines if they are not open, and return the plan and the options of one run in
        this session.

        :raises EngineUnavailable: the session is closed.
        """
        async with self._opening:
            if self._is_closed:
                raise EngineUnavailable("atts", "the session is closed", "Create a new session")
            if self._plan is None or self._shared is None:
                engines = self.setup.engines()
                # If the second engine cannot be opened, leaving this block closes the first engine.
                async with AsyncExitStack() as stack:
                    for engine in dict.fromkeys(engines):
                        await stack.enter_async_context(engine)
                    self._stack = stack.pop_all()
                self._plan = plan = self.setup.informed().plan(*engines)
                self._shared = Graph(rollouts=plan.concurrency, limits=plan.limits)
        plan = self._plan
        if options.directory is not None:
            # The session's gate has learned from earlier questions, which the journal of this run
            # does not contain. So a run with a journal gets a new gate.
            plan = self.setup.plan(plan.draft, plan.target)
        plan = replace(plan, answers=answers_for(kind))
        return plan, replace(options, engines="are open", shared_graph=self._shared)

    async def __aenter__(self) -> Self:
        await self.plan("math", RunOptions())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the engines; further calls do nothing."""
        self._is_closed = True
        await self._stack.aclose()

    def _named(self, text: str) -> Problem:
        digest = blake2b(text.encode(), digest_size=6).hexdigest()
        count = self._asked.pop(digest, self._forgotten) + 1
        # A question that is asked again moves to the end, so the first entry is the oldest.
        self._asked[digest] = count
        if len(self._asked) > _REMEMBERED:
            # A removed question may be asked again. Counting then continues above the largest
            # removed count, so that every problem id is unique.
            _, oldest = self._asked.popitem(last=False)
            self._forgotten = max(self._forgotten, oldest)
        return Problem(f"{digest}-{count}", text)


class SyncSession:
    """A `Session` for code without an event loop: its event loop runs in a separate thread, and any
    thread may call its methods.

    >>> with SyncSession(Setup(draft="scripted", target="scripted", method="draft-only")) as session:
    ...     session.solve("What is 1 + 1?").status
    'answered'
    """

    def __init__(self, setup: Setup | None = None) -> None:
        self._setup = setup
        self._open: tuple[BlockingPortal, Session] | None = None
        self._thread: Thread | None = None
        self._process = 0
        self._opening = Future[tuple[BlockingPortal, Session]]()
        self._is_interrupted = False
        self._cancel_opening: Callable[[], None] | None = None
        self._closing_error: BaseException | None = None

    def __enter__(self) -> Self:
        """Open the session.

        :raises UsageError: if the session is already open; all threads must share one `with` block.
        :raises EngineError: an engine cannot be opened.
        """
        if self._open is not None:
            raise UsageError(
                "this session is already open; use it inside its `with` block, or create another "
                "session"
            )
        self._process = os.getpid()
        self._opening = Future()
        self._is_interrupted = False
        self._cancel_opening = None
        self._closing_error = None
        # A daemon thread does not keep the process alive. So a second Ctrl-C ends the program even
        # while the session closes.
        self._thread = Thread(target=self._work, name="atts-session", daemon=True)
        self._thread.start()
        try:
            self._open = self._opening.result()
        # The session could not be opened, or Ctrl-C was pressed while it opened.
        except BaseException:
            self._is_interrupted = True
            if self._cancel_opening is not None:
                self._cancel_opening()
            self._thread.join()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        opened = self._open
        self._open = None
        # After a fork, the session's thread runs only in the parent process. A child has nothing to
        # close.
        if opened is None or self._thread is None or os.getpid() != self._process:
            return
        portal, _ = opened
        # The call fails if the event loop has already ended. The loop's own error is raised below.
        with suppress(RuntimeError):
            portal.call(portal.stop, error is not None)
        self._thread.join()
        if self._closing_error is not None and error is None:
            raise self._closing_error

    def _work(self) -> None:
        """Run the session's event loop until it is stopped, in the session's thread."""
        try:
            anyio.run(self._serve)
        except BaseException as error:  # noqa: BLE001  # another thread raises it
            if self._opening.done():
                self._closing_error = error
            else:
                self._opening.set_exception(error)

    async def _serve(self) -> None:
        scope = anyio.CancelScope()
        schedule = concurrency.loop_caller()
        self._cancel_opening = lambda: schedule(scope.cancel)
        if self._is_interrupted:
            return
        # `async with` closes the portal first. The portal cancels the open questions, but not the
        # clean-up of the session, which closes second.
        with scope:
            async with Session(self._setup) as session, BlockingPortal() as portal:
                self._opening.set_result((portal, session))
                await portal.sleep_until_stopped()

    def solve(self, problem: str | Problem, *, policy: Mapping[str, Any] | None = None) -> Outcome:
        """Solve one problem like `Session.solve`.

        :raises EngineError: an engine is lost, or the session is not open.
        """
        portal, session = self._opened()
        return portal.call(partial(session.solve, problem, policy=policy))

    def evaluate(
        self,
        dataset: str | Path | Sequence[Problem] = "arithmetic",
        *,
        limit: int | None = None,
        directory: str | Path | None = None,
    ) -> RunResult:
        """Evaluate like `Session.evaluate`, and wait until the run ends.

        :raises EngineError: an engine is lost, or the session is not open.
        """
        portal, session = self._opened()

        async def main() -> RunResult:
            return await session.evaluate(dataset, limit=limit, directory=directory)

        return portal.call(main)

    def _opened(self) -> tuple[BlockingPortal, Session]:
        if self._open is None:
            raise EngineUnavailable(
                "atts", "the session is not open", "Use the session inside its `with` block"
            )
        if os.getpid() != self._process:
            raise EngineUnavailable(
                "atts",
                f"the session was opened by process {self._process}, and this process was "
                "forked from it",
                "Open another session in the child process",
            )
        return self._open


async def solve(problem: str | Problem, setup: Setup | None = None) -> Outcome:
    """Solve one problem with rollouts, a gate and a vote; a problem given as a text has no
    reference.

    :raises OptionError: the setup contains an unknown name.
    :raises EngineError: an engine cannot be opened or is lost.
    """
    one = problem if isinstance(problem, Problem) else Problem("problem", problem)
    # With "ignore", the run does not handle Ctrl-C, so Ctrl-C cancels it at once. For a single
    # problem, a partial result would be useless.
    options = RunOptions(signals="ignore")
    result = await evaluate([one], (setup or Setup()).informed(), options=options)
    return next(result.outcomes())


def _check_other_directory(run: str | Path, directory: str | Path) -> None:
    if os.path.realpath(directory) == os.path.realpath(run):
        raise OptionError(
            "out", f"{directory} is the directory of the recorded run; name another directory"
        )


@dataclass(slots=True)
class _RecordedProblems:
    """Facts about a run's complete problems: their count, kind and digest, and the largest number
    of samples.
    """

    count: int = 0
    samples: int = 0
    kind: AnswerKind = "math"
    digest: str = ""

    @classmethod
    def of(cls, run: RecordedRun) -> _RecordedProblems:
        """Gather the facts of a run, reading one outcome at a time.

        :raises OptionError: a problem is not complete.
        """
        found = cls()

        def problems() -> Iterator[Problem]:
            for outcome in run.outcomes():
                if outcome.is_complete:
                    if not found.count:
                        found.kind = outcome.problem.kind
                    found.count += 1
                    last = max((rollout.sample for rollout in outcome.rollouts), default=0)
                    found.samples = max(found.samples, last + 1)
                    yield outcome.problem

        found.digest = dataset_digest(problems())
        planned = run.manifest.problems
        missing = 0 if planned is None else planned - found.count
        if missing > 0 or not found.count:
            still = f"{counted(missing, 'unfinished problem')}" if missing > 0 else "no result"
            raise OptionError("run", f"{run.directory} has {still}; repeat its command first")
        return found


async def combine(
    run: str | Path,
    setup: Setup | None = None,
    *,
    directory: str | Path | None = None,
    options: RunOptions | None = None,
) -> RunResult:
    """Let a target combine recorded rollouts into one answer, for each problem whose votes are
    split.

    The setup's target selects or synthesizes the answer, as `setup.policy.combine` says; "vote"
    means "auto" here. The recorded run is read twice, and only unfinished problems are kept in
    memory. With a `directory`, the result is a new run that contains the recorded rollouts; the
    same call resumes this run.

    :raises OptionError: the recorded run is not finished, or `directory` is the recorded run's
        directory.
    :raises JournalError: there is no run, or it cannot be read.
    """
    setup = setup or Setup()
    source = open_run(Path(run))
    if directory is not None:
        _check_other_directory(run, directory)
    found = _RecordedProblems.of(source)
    kind = setup.policy.combine
    policy = replace(
        setup.policy,
        combine="auto" if kind == "vote" else kind,
        samples=found.samples,
    )
    setup = replace(setup, method="target-only", policy=policy)
    plan = setup.plan(*setup.engines(), found.kind)
    recorded = {
        name: source.manifest.settings[name]
        for name in ("dataset", "method", PRICES)
        if name in source.manifest.settings
    }
    decisive = {"rollouts_of": Setting(Path(run).name, "atts combine")}
    # The new run combines recorded answers, but its configuration must name the method that wrote
    # the recorded rollouts.
    if "method" in source.manifest.configuration:
        decisive["method"] = source.manifest.configuration["method"]
    rollouts = RecordedRollouts(source.outcomes, found.count)
    gate_is_done = plan.on_problem_done

    def is_over(problem: str) -> None:
        gate_is_done(problem)
        rollouts.forget(problem)

    plan = replace(
        plan,
        pipeline=rollouts,
        on_problem_done=is_over,
        configuration={**plan.configuration, **decisive},
        settings={**plan.settings, **recorded},
    )
    options = replace(
        options or RunOptions(),
        directory=Path(directory) if directory else None,
        dataset=found.digest,
    )
    return await run_evaluation(rollouts, plan, options)


def sync(call: Callable[P, Awaitable[T]]) -> Callable[P, T]:
    """Return the synchronous version of an asynchronous function, for code without an event loop.

    Inside a running event loop, the synchronous version would block the loop. It therefore raises
    an error that shows what to write instead.
    """
    verb = call.__name__

    def run(*arguments: P.args, **options: P.kwargs) -> T:
        async def main() -> T:
            return await call(*arguments, **options)

        try:
            current_token()
        except anyio.NoEventLoopError:
            return run_async(main)
        raise UsageError(
            f"atts.{verb}_sync was called inside a running event loop; write `await "
            f"atts.{verb}(...)` instead"
        )

    update_wrapper(run, call, ("__module__",), ())
    if isinstance(call, type):
        # The signature of a class returns None, but a call of `run` returns what awaiting returns.
        awaited = get_args(get_type_hints(vars(call)["__await__"])["return"])[-1]
        run.__signature__ = signature(call).replace(return_annotation=awaited)  # type: ignore[attr-defined]  # read by inspect
    run.__name__ = run.__qualname__ = f"{verb}_sync"
    run.__doc__ = (
        f"Call `{verb}` from code without an event loop.\n\n:raises UsageError: if an event "
        "loop is running."
    )
    return run


solve_sync = sync(solve)
evaluate_sync = sync(evaluate)
combine_sync = sync(combine)
