"""The service behind the endpoint, which runs all requests on the same open engines."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Coroutine,
    Hashable,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.to_thread
from anyio import get_cancelled_exc_class

from atts.adapters import question_of
from atts.api import Setup
from atts.calibration import Calibrator, read_state, write_state
from atts.concurrency import TaskGroup, background, task_group
from atts.core import Outcome, Problem, Recent, Role
from atts.engine import Engine
from atts.errors import ATTSError, EngineUnavailable, OptionError, counted
from atts.graph import Graph
from atts.journal import Event, Sampled, Scored
from atts.ledger import (
    LEDGER,
    Account,
    Amount,
    Caps,
    LedgerFile,
    Price,
    Spending,
    check_prices,
    prices_of,
)
from atts.pipelines import Answers, ConformalGate, GuaranteedGate, let_go
from atts.run import Notice, RunOptions, RunResult, RunSpec, evaluate
from atts.serving.replies import BusyShare, LiveRun, Reply, ServedRun
from atts.serving.requests import Offer, RequestError, SolveRequest, offer_of

_log = logging.getLogger("atts.serving")


# If this number of users is stored, users without requests are forgotten. Clients could otherwise
# fill the memory with invented names.
_MOST_USERS = 4096
_FIRST_COST = 1.0


@dataclass(slots=True, eq=False)
class _Ticket:
    event: anyio.Event = field(default_factory=anyio.Event)
    state: Literal["waiting", "granted", "refused"] = "waiting"
    # expected cost, divided by the user's share, that was added to `_User.served` when this request
    # got its slot
    charged: float = 0.0


@dataclass(slots=True, eq=False)
class _User:
    share: float
    # Total cost of the user's requests, divided by the user's share. The user with the smallest
    # value gets the next slot. A new user begins at `FairSlots._reached`.
    served: float = 0.0
    running: int = 0
    waiting: deque[_Ticket] = field(default_factory=deque[_Ticket])

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting


class Displaced(Exception):
    """Error for a request that found the queue full, or lost its place in the queue to a request of
    another user.
    """


class FairSlots:
    """Slots for running requests, shared fairly among users by start-time fair queueing.

    Each user has a total: the cost of the user's requests so far, divided by the user's share. A
    free slot goes to the waiting user with the lowest total, so that every waiting user gets a slot
    eventually. When a request starts, the mean cost of earlier requests is charged to its user.
    When the request ends, its real cost replaces this estimate.

    When an idle user sends a request, a low total is raised to the largest total with which any
    user has got a slot. Idle time therefore gives no advantage.
    """

    def __init__(self, slots: int, queue: int, shares: Mapping[str, float] | None = None) -> None:
        self._free = slots
        self._queue = queue
        self._shares = dict(shares or {})
        self._users = dict[str, _User]()
        # Largest `_User.served` of a user who got a slot. New users begin at this value, so that
        # they do not get all slots for a while.
        self._reached = 0.0
        self._mean = _FIRST_COST
        # Number of ended requests, counted up to 100. Each new cost has the weight 1 / `_ended` in
        # the mean cost.
        self._ended = 0

    @property
    def waiting(self) -> int:
        """Return how many requests are waiting for a slot."""
        return sum(len(user.waiting) for user in self._users.values())

    @property
    def num_users(self) -> int:
        """Return how many users are stored."""
        return len(self._users)

    def waiting_of(self, name: str) -> int:
        """Return how many requests of one user are waiting for a slot."""
        user = self._users.get(name)
        return 0 if user is None else len(user.waiting)

    def has_room(self, name: str) -> bool:
        """Return whether one more request of this user could start or enter the queue."""
        return self._free > 0 or self.waiting < self._queue or self._heaviest(name) is not None

    @asynccontextmanager
    async def slot(self, name: str) -> AsyncGenerator[_Cost]:
        """Wait for a slot, and keep it until the block ends.

        Inside the block, the caller must set the cost of the request.

        :raises Displaced: the queue is full and no other user has too many waiting requests, or
            another user displaced this request.
        """
        user = self._user(name)
        ticket = _Ticket()
        if self._free <= 0 and self.waiting >= self._queue:
            loser = self._heaviest(name)
            if loser is None:
                raise Displaced
            dropped = loser.waiting.pop()
            dropped.state = "refused"
            dropped.event.set()
        if user.is_idle:
            user.served = max(user.served, self._reached)
        user.waiting.append(ticket)
        self._grant()
        try:
            await ticket.event.wait()
        except BaseException:
            if ticket.state == "waiting":
                user.waiting.remove(ticket)
            elif ticket.state == "granted":
                self._give(user, ticket, None)
            raise
        if ticket.state == "refused":
            raise Displaced
        cost = _Cost()
        try:
            yield cost
        finally:
            self._give(user, ticket, cost.value)

    def _heaviest(self, name: str) -> _User | None:
        """Return the user who must give up a place in the full queue, so that user `name` can
        enter. Return None if the new request must be rejected instead.
        """
        mine = self._users.get(name)
        share = self._share(name)
        after = (0 if mine is None else len(mine.waiting)) + 1
        others = [user for user in self._users.values() if user is not mine and user.waiting]
        heaviest = max(others, key=lambda user: len(user.waiting) / user.share, default=None)
        if heaviest is None or (len(heaviest.waiting) - 1) / heaviest.share < after / share:
            return None
        return heaviest

    def _share(self, name: str) -> float:
        return self._shares.get(name, 1.0)

    def _user(self, name: str) -> _User:
        if name not in self._users:
            if len(self._users) >= _MOST_USERS:
                self._users = {name: user for name, user in self._users.items() if not user.is_idle}
            self._users[name] = _User(self._share(name), self._reached)
        return self._users[name]

    def _grant(self) -> None:
        while self._free > 0:
            waiting = [user for user in self._users.values() if user.waiting]
            if not waiting:
                return
            user = min(waiting, key=lambda one: one.served)
            ticket = user.waiting.popleft()
            ticket.state = "granted"
            ticket.event.set()
            self._reached = max(self._reached, user.served)
            ticket.charged = self._mean / user.share
            user.served += ticket.charged
            user.running += 1
            self._free -= 1

    def _give(self, user: _User, ticket: _Ticket, cost: float | None) -> None:
        self._free += 1
        user.running -= 1
        user.served -= ticket.charged
        if cost is not None:
            self._ended = min(self._ended + 1, 100)
            self._mean += (cost - self._mean) / self._ended
            user.served += cost / user.share
        self._grant()


@dataclass(slots=True)
class _Cost:
    """The cost of a request in tokens, to be set inside the block of `FairSlots.slot`."""

    value: float | None = None


def conformal_gate(plan: RunSpec) -> ConformalGate | None:
    """Return the plan's gate if its calibrator learns from scores, or else None."""
    gate: Any = plan.gate
    while gate is not None and not isinstance(gate, ConformalGate):
        gate = getattr(gate, "inner", None)
    if gate is None or not isinstance(gate.calibrator, Calibrator):
        return None
    return gate


@dataclass(frozen=True, slots=True)
class _ChangedState:
    """The state of a calibrator that has not been saved yet, and the file to save it in."""

    path: Path
    state: Any
    decided: int  # number of decisions that the calibrator has made


class CalibratorFolder:
    """Folder with saved calibrators, one file per method and rate.

    Each file names the models whose scores the calibrator has learnt from.
    """

    def __init__(self, folder: Path, models: Mapping[Role, str]) -> None:
        self._folder = folder
        self._models = dict(models)
        # keyed by file name: how many decisions the calibrator had made when the file was last
        # written
        self._saved = dict[str, int]()

    def continued(self, method: str, rate: float, plan: RunSpec) -> RunSpec:
        """Return the plan with the calibrator that an earlier session saved, if there is one for
        the same models and settings.

        A file that is damaged, or belongs to other models or settings, is logged and ignored. The
        server then starts with a new calibrator.
        """
        gate = conformal_gate(plan)
        path = self._path(method, rate)
        if gate is None or not path.exists():
            return plan
        fresh = gate.calibrator
        assert isinstance(fresh, Calibrator), (
            "`conformal_gate` returns only gates with a `Calibrator`"
        )
        try:
            saved = read_state(path)
            calibrator = Calibrator.restored(saved["calibrator"])
        except (ATTSError, KeyError) as error:
            _log.warning("%s is ignored: %s", path, error)
            return plan
        is_same = calibrator.settings == fresh.settings and saved.get("models") == self._models
        if not is_same:
            _log.warning(
                "the saved calibrator %s is ignored: it belongs to other models or settings", path
            )
            return plan
        # Drop scores without a decision: their requests ended with the earlier session.
        calibrator.settle()
        gate.continue_with(calibrator, calibrator.next_issue)
        self._saved[path.name] = calibrator.decided
        return replace(
            plan,
            alarms=partial(getattr, calibrator, "events"),
            on_problem_done=partial(let_go, plan.gate),
        )

    def changed(self, method: str, rate: float, plan: RunSpec) -> _ChangedState | None:
        """Return the file and the state of a calibrator that must be saved, or None if it has not
        changed since it was last saved.
        """
        gate = conformal_gate(plan)
        if gate is None:
            return None
        path = self._path(method, rate)
        calibrator = gate.calibrator
        assert isinstance(calibrator, Calibrator), (
            "`conformal_gate` returns only gates with a `Calibrator`"
        )
        if self._saved.get(path.name, 0) == calibrator.decided:
            return None
        state = {"models": self._models, "calibrator": calibrator.state()}
        return _ChangedState(path, state, calibrator.decided)

    def write(self, changed: _ChangedState) -> None:
        """Write a calibrator's state to its file atomically.

        :raises StorageError: the file cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        write_state(changed.path, changed.state)
        self._saved[changed.path.name] = changed.decided

    def _path(self, method: str, rate: float) -> Path:
        return self._folder / f"{method}-{rate:g}.json"


# Largest number of gates in memory. Requests can name any method and rate, and each combination has
# its own gate.
_MOST_GATES = 64
# Largest number of plans in memory. Each combination of settings that requests name has its own
# plan.
_MOST_PLANS = 256
_RETRY_SECONDS = 5
_MOST_RUNS = 1000  # largest number of finished runs that are kept in memory
_ONE_CALL = Amount(calls=1, total_tokens=1)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of a server: its name, API keys, limits and state folder.

    :raises OptionError: a limit is below its least value, or a share is not above 0 or belongs to a
        user without a key.
    """

    name: str = "atts/pair"  # name of the model that clients write into their requests
    # Folder in which the ledger, the calibrators and the background responses are stored. If it is
    # None, they are lost when the server ends.
    state: Path | None = None
    # the name of the user who has each API key; "" if the key belongs to no single user
    keys: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    # When requests wait, each user gets work in proportion to this number. It must be above 0, and
    # is 1 for users who are not listed.
    shares: Mapping[str, float] = field(default_factory=dict[str, float])
    # upper limits for the caps of every request; a request can only lower its caps
    request_caps: Caps = Caps()
    # caps for all requests together, including those of earlier sessions of the server
    server_caps: Caps = Caps()
    prices: Mapping[str, Price] = field(default_factory=dict[str, Price])
    requests: int = 64  # largest number of requests that run at the same time
    queue: int = 256  # largest number of requests that wait while `requests` others run
    # Chat programs send some requests by themselves, for example for the title of a chat. Such a
    # request gets one rollout of the draft, or the policy that it names.
    housekeeping: Literal["draft", "policy"] = "draft"
    body_bytes: int = 1 << 20
    keepalive_seconds: float = 15.0
    # seconds between two times at which calibrators are written to disk if they have changed
    save_seconds: float = 5.0
    # seconds until a finished background response is removed from the disk
    response_seconds: float = 30 * 86_400.0

    def __post_init__(self) -> None:
        for name in ("requests", "body_bytes"):
            if getattr(self, name) < 1:
                raise OptionError(
                    name, f"a limit of {getattr(self, name)} allows no request; give at least 1"
                )
        if self.queue < 0:
            raise OptionError("queue", f"{self.queue} is below 0")
        if not 0 < self.response_seconds < math.inf:
            raise OptionError(
                "response_days",
                "background responses must be kept for more than 0 days, and not for ever",
            )
        for user, share in self.shares.items():
            if not 0 < share < 1e9:
                raise OptionError("share", f"{user}={share} is out of range; give a share above 0")
            if user not in self.keys.values():
                raise OptionError(
                    "share",
                    f"{user!r} has no key, so any client could use this name; add the line "
                    f"`{user} KEY` to --api-key-file",
                )

    @property
    def has_named_keys(self) -> bool:
        """Return whether any API key belongs to a named user. If so, the field `user` of requests
        is ignored.
        """
        return any(self.keys.values())


@dataclass(slots=True)
class Counts:
    """Counters for the metrics: requests in total and by result."""

    requests: int = 0
    answered: int = 0
    refused: int = 0
    cancelled: int = 0
    failed: int = 0
    limited: int = 0
    housekeeping: int = (
        0  # number of requests that chat programs sent automatically, such as for titles
    )


class _Recount:
    """Listener that adds engine calls of earlier sessions to a run's account
    (`atts.run.Listener`).
    """

    def __init__(self, account: Account) -> None:
        self._account = account

    def recalled(self, event: Event) -> None:
        """Add the tokens of a reply of an earlier session to the account."""
        if isinstance(event, Sampled):
            self._account.count_here(event.completion)
        elif isinstance(event, Scored):
            self._account.count_here(event.scores)

    def notify(self, event: Notice) -> None:
        """Ignore an event of this session, because the account itself counts this session's
        calls.
        """


@dataclass(frozen=True, slots=True)
class _Planned:
    plan: RunSpec
    method: str
    rate: float
    samples: int


class Service:
    """The open engines of a server, with the gates, ledger and slots that all its requests share."""

    def __init__(self, setup: Setup, options: ServeOptions | None = None) -> None:
        self.setup = setup
        self.options = options or ServeOptions()
        self.counts = Counts()
        self.in_flight = 0
        self.began = time.time()
        self.offer = Offer(self.options.name)
        self.is_draining = False
        self.account = Account()
        self.busy = BusyShare()
        # For each method and nominal rate, one pair of numbers per finished request: escalated
        # chunks and judged chunks. Only the latest requests are kept.
        self.judged = Recent[tuple[str, float], deque[tuple[int, int]]](_MOST_GATES)
        self.runs = Recent[str, ServedRun](_MOST_RUNS + self.options.requests + self.options.queue)
        self._slots = FairSlots(self.options.requests, self.options.queue, self.options.shares)
        self._file: LedgerFile | None = None
        self._base: RunSpec | None = None
        self._graph: Graph | None = None
        self._tasks: TaskGroup | None = None
        self._calibrators: CalibratorFolder | None = None
        self._plans = OrderedDict[tuple[str, float, bool], RunSpec]()
        self._planned = Recent[Hashable, _Planned](_MOST_PLANS)

    @property
    def is_ready(self) -> bool:
        """Return whether the server accepts new requests."""
        return self._base is not None and not self.is_draining

    @property
    def models(self) -> dict[Role, str]:
        """Return the model name of each role in use. The service must be open."""
        base, _ = self._opened()
        return base.models

    @property
    def engines(self) -> dict[Role, Engine]:
        """Return the open engine of each role in use."""
        base, _ = self._opened()
        both: dict[Role, Engine] = {"draft": base.draft, "target": base.target}
        return {role: both[role] for role in base.roles}

    @property
    def gates(self) -> dict[tuple[str, float], RunSpec]:
        """Return the plans whose gates are shared between requests, keyed by method and nominal
        rate.
        """
        return {(method, rate): plan for (method, rate, _), plan in self._plans.items()}

    @asynccontextmanager
    async def open(self, keep: Collection[str] = ()) -> AsyncGenerator[Service]:
        """Open the engines and the ledger for the `with` block.

        `keep` lists the runs of earlier sessions that will be continued, so that the ledger keeps
        their separate accounts.

        :raises OptionError: a cap is in dollars but there are no prices, or the setup cannot be
            run.
        :raises EngineError: an engine cannot be opened.
        """
        options = self.options
        async with AsyncExitStack() as stack:
            engines = self.setup.engines()
            for engine in dict.fromkeys(engines):
                await stack.enter_async_context(engine)
            base = self.setup.informed().plan(*engines)
            for caps in (options.request_caps, options.server_caps):
                check_prices(caps, options.prices, base.models)
            if options.state is not None:
                options.state.mkdir(parents=True, exist_ok=True)
                file = LedgerFile(options.state / LEDGER, keep=keep)
                self._file = stack.enter_context(file)
                self._calibrators = CalibratorFolder(options.state / "calibrators", base.models)
            self.account = Account(
                options.server_caps,
                prices=prices_of(options.prices, base.models),
                file=self._file,
                spent=None if self._file is None else self._file.total,
            )
            self._base = base
            self._graph = Graph(rollouts=base.concurrency, limits=base.limits)
            self.offer = offer_of(options.name, base.models)
            try:
                async with background(self._save_often), task_group() as tasks:
                    self._tasks = tasks
                    yield self
                    # Cancel background responses that are still running. They have no final state
                    # on disk, so the next session continues them.
                    tasks.cancel_scope.cancel()
            finally:
                self._save()
                self._tasks = None
                self._base = None

    def start(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start a coroutine function as a background task.

        The task is cancelled when the service closes. It must not raise an error.
        """
        assert self._tasks is not None, "the service must be open"
        self._tasks.start_soon(function)

    def check_room(self, user: str = "") -> None:
        """Check that another request of this user could start now or enter the queue.

        :raises RequestError: the server is overloaded (status 429), or is shutting down (status
            503).
        """
        if not self.is_ready:
            raise RequestError(
                "the server is shutting down; use another server",
                status=503,
                kind="server_error",
                retry_after=_RETRY_SECONDS,
            )
        if not self._slots.has_room(user):
            raise self._overloaded()

    def _overloaded(self) -> RequestError:
        self.counts.refused += 1
        return RequestError(
            f"the server already has {counted(self.in_flight, 'request')} in flight or waiting; "
            "try again later",
            status=429,
            kind="rate_limit_error",
            code="overloaded",
            retry_after=_RETRY_SECONDS,
        )

    def check(self, request: SolveRequest) -> None:
        """Check a request's settings and the server's caps, before any work is done for the
        request.

        :raises RequestError: the request has an impossible setting (the error names the field), or
            a cap of the server is used up.
        """
        base, _ = self._opened()
        try:
            check_prices(request.caps, self.options.prices, base.models)
            self._plan(request)
        except OptionError as error:
            raise RequestError(str(error), param=error.option) from error
        limit = self.account.caps.exceeded_by(self.account.spent + _ONE_CALL)
        if limit:
            self.counts.limited += 1
            raise RequestError(
                f"the server has used up its cap: {limit}",
                status=429,
                kind="insufficient_quota",
                code="insufficient_quota",
            )

    async def solve(
        self,
        request: SolveRequest,
        written: Callable[[int, str, bool], None] | None = None,
        *,
        run: str = "",
        directory: Path | None = None,
    ) -> Reply:
        """Run a request, and return its reply.

        If the calling task is cancelled, the engine calls are cancelled too. If `directory` is
        given, the run keeps its journal there, and an unfinished run in it is continued.

        :raises RequestError: an engine failed, the run was cancelled, the request lost its place in
            the queue, or a cap was reached and `on_limit` is "error".
        """
        run = run or new_run()
        planned = self._plan(request, is_alone=directory is not None)
        problem, plan = _posed(request, run, planned.plan)
        served = ServedRun(
            run,
            request.model,
            request.policy.name,
            request.user,
            samples=planned.samples,
            rate=planned.rate,
            account=self._account_of(request, run, is_kept=directory is not None),
            live=LiveRun(written, is_plain=request.policy.is_plain, busy=self.busy),
        )
        self.runs[run] = served
        self.counts.requests += 1
        self.counts.housekeeping += request.policy.name == "housekeeping"
        self.in_flight += 1
        try:
            result = await self._work(request, served, problem, plan, directory)
            outcome = await _outcome_of(result)
        except get_cancelled_exc_class():
            self.counts.cancelled += 1
            served.end("cancelled")
            raise
        except ATTSError as error:
            self._count_failure(served)
            raise RequestError(
                str(error), status=502, kind="server_error", code="engine_failed"
            ) from error
        finally:
            self.in_flight -= 1
        account = served.account
        if account.limit:
            self.counts.limited += 1
            if request.atts.on_limit == "error":
                served.end("failed")
                raise RequestError(
                    f"{account.limit} is used up",
                    status=402,
                    code="limit_reached",
                    kind="limit_error",
                )
        if outcome.status == "failed":
            self._count_failure(served)
            raise RequestError(outcome.why, status=502, kind="server_error", code="engine_failed")
        self.counts.answered += 1
        reply = Reply(
            run,
            request,
            outcome,
            account,
            rate=planned.rate,
            promise=_promise(plan.gate),
            created=int(served.began),
        )
        served.end("answered", reply.facts())
        if not request.policy.is_plain and served.live.judged:
            self._count_judged(planned.method, planned.rate, served.live)
        return reply

    async def _work(
        self,
        request: SolveRequest,
        served: ServedRun,
        problem: Problem,
        plan: RunSpec,
        directory: Path | None,
    ) -> RunResult:
        """Wait for a slot, then run the request's problem.

        :raises RequestError: the run was cancelled, or the request lost its place in the queue.
        """
        _, graph = self._opened()
        before = served.account.spent
        options = RunOptions(
            directory=directory,
            listeners=(served.live, _Recount(served.account)),
            engines="are open",
            signals="ignore",
            shared_graph=graph,
            gate="shared" if request.seed is None and directory is None else "own",
            account=served.account,
            on_limit="conclude",
        )
        try:
            with served.scope:
                async with self._slots.slot(request.user) as cost:
                    served.status = "running"
                    try:
                        return await evaluate([problem], plan, options)
                    finally:
                        cost.value = float((served.account.spent - before).total_tokens)
        except Displaced:
            served.end("failed")
            raise self._overloaded() from None
        self.counts.cancelled += 1
        served.end("cancelled")
        raise RequestError("the run was cancelled", status=409, code="cancelled")

    def _account_of(self, request: SolveRequest, run: str, *, is_kept: bool) -> Account:
        """Return the account that counts a run's spending.

        If the run continues after a restart, the account includes what it spent before.
        """
        spending = Spending()
        if is_kept and self._file is not None:
            self._file.keep(run)
            spending = self._file.spent_by(run)
        return Account(
            request.caps,
            name=run,
            prices=self.account.prices,
            inside=self.account,
            spent=spending.total,
            unanswered=spending.unanswered,
        )

    def close_account(self, run: str) -> None:
        """Merge the spending of a finished run into the server's total, and remove the run's own
        account from the ledger.
        """
        if self._file is not None:
            self._file.merge(run)

    def _count_judged(self, method: str, rate: float, live: LiveRun) -> None:
        """Record how many chunks of a request were judged and how many of them were escalated.

        The realised rate over the latest requests is computed from these counts.
        """
        recent = self.judged.pop((method, rate), None)
        if recent is None:
            recent = deque(maxlen=_MOST_RUNS)
        recent.append((live.escalated, live.judged))
        self.judged[method, rate] = recent

    def _count_failure(self, served: ServedRun) -> None:
        self.counts.failed += 1
        served.end("failed")

    def cancel(self, run: str) -> ServedRun:
        """Cancel a run and its engine calls, and return the run.

        A finished run does not change.

        :raises RequestError: if no stored run has this id.
        """
        served = self.find(run)
        served.scope.cancel()
        return served

    def find(self, run: str) -> ServedRun:
        """Return the run with this id.

        :raises RequestError: if no stored run has this id.
        """
        if run not in self.runs:
            raise RequestError(f"there is no run {run!r}", status=404, param="run")
        return self.runs[run]

    def _opened(self) -> tuple[RunSpec, Graph]:
        if self._base is None or self._graph is None:
            raise EngineUnavailable(
                "atts", "the service is not open", "Use the service inside `open`"
            )
        return self._base, self._graph

    def _plan(self, request: SolveRequest, *, is_alone: bool = False) -> _Planned:
        """Return the plan of a request. Its gate is shared by all requests of the same method and
        rate.

        A request with a seed, or with `is_alone`, gets a gate of its own. All other plans are
        cached, because making a plan takes longer than answering a short request.

        :raises RequestError: if the request needs a model that the server has not opened.
        """
        is_shared = request.seed is None and not is_alone
        if is_shared and request.settings in self._planned:
            return self._planned[request.settings]
        base, _ = self._opened()
        setup = request.setup(self.setup).informed()
        if not {*setup.roles} <= {*base.roles}:
            raise RequestError(
                f"{request.model!r} needs a model that this server has not opened",
                param="model",
            )
        is_plain = request.policy.is_plain
        plan = self._shared_plan(setup, is_plain=is_plain) if is_shared else None
        if plan is None:
            plan = setup.plan(base.draft, base.target)
        if is_plain:
            plan = _ended_by(plan, request.stop)
        # `resolved` computes token limits from the engines' context lengths. These are known,
        # because the engines are open.
        plan = replace(plan.resolved(), policy_for_context=None)
        planned = _Planned(plan, setup.method, setup.rate, setup.policy.samples)
        if is_shared:
            self._planned[request.settings] = planned
        return planned

    def _shared_plan(self, setup: Setup, *, is_plain: bool) -> RunSpec:
        """Return the plan of a setup. Its gate is shared by all requests of the same method and
        rate.
        """
        base, _ = self._opened()
        key = (setup.method, setup.rate, is_plain)
        shared = self._plans.pop(key, None)
        if shared is None:
            shared = setup.plan(base.draft, base.target)
            if self._calibrators is not None and not is_plain:
                shared = self._calibrators.continued(setup.method, setup.rate, shared)
        self._plans[key] = shared
        if len(self._plans) > _MOST_GATES:
            gone = self._plans.popitem(last=False)[1].gate
            for settings, planned in [*self._planned.items()]:
                if planned.plan.gate is gone:
                    del self._planned[settings]
        return replace(
            shared,
            policy=setup.run_policy,
            policy_for_context=setup.policy_within,
            roles=setup.roles,
        )

    async def _save_often(self) -> None:
        """Save changed calibrators at regular intervals, so that a killed server loses only the
        latest changes.
        """
        while True:
            await anyio.sleep(self.options.save_seconds)
            await anyio.to_thread.run_sync(self._write_states, self._changed_states())

    def _save(self) -> None:
        self._write_states(self._changed_states())

    def _changed_states(self) -> list[_ChangedState]:
        folder = self._calibrators
        if folder is None:
            return []
        changed = [
            folder.changed(method, rate, plan) for (method, rate), plan in self.gates.items()
        ]
        return [one for one in changed if one is not None]

    def _write_states(self, states: list[_ChangedState]) -> None:
        """Write the states of calibrators to their files.

        A failed write is only logged, because the server can continue without it.
        """
        assert self._calibrators is not None or not states, (
            "calibrators are saved only if the server has a state folder"
        )
        for changed in states:
            try:
                assert self._calibrators is not None
                self._calibrators.write(changed)
            except (ATTSError, OSError) as error:
                _log.error("%s cannot be saved: %s", changed.path, error)


def new_run() -> str:
    """Return a new random run id."""
    return f"r_{secrets.token_hex(8)}"


async def _outcome_of(result: RunResult) -> Outcome:
    """Return the outcome of a run's only problem.

    If the run has a directory, a worker thread reads the outcome from the journal.
    """
    if result.directory is None:
        return next(result.outcomes())
    return await anyio.to_thread.run_sync(next, result.outcomes())


def _promise(gate: object) -> tuple[str, str]:
    """Return a gate's guarantee, and the conditions that void it. Both strings are empty if the
    gate gives no guarantee.
    """
    if isinstance(gate, GuaranteedGate):
        return gate.promise
    if isinstance(gate, ConformalGate) and isinstance(gate.calibrator, Calibrator):
        # Other requests use the same calibrator, so its counts are not those of one request.
        return (
            f"requests that share this gate: {gate.calibrator.guarantee}",
            gate.calibrator.voided_by,
        )
    return "", ""


def _posed(request: SolveRequest, run: str, plan: RunSpec) -> tuple[Problem, RunSpec]:
    """Return the problem in a request, and the plan with the client's system prompt added."""
    # The problem's name determines its random numbers. With a seed, use the name that `atts solve`
    # uses, so that both give the same answer.
    name = "problem" if request.seed is not None else run
    if request.policy.is_plain:
        system, examples, question = conversation_of(request.turns)
        problem = Problem(name, question, examples=examples)
    else:
        system, question = question_of(request.turns)
        problem = Problem(name, question)
    return problem, _with_system(plan, system) if system else plan


def conversation_of(
    turns: Sequence[tuple[str, str]],
) -> tuple[str, tuple[tuple[str, str], ...], str]:
    """Split a conversation into the system prompt, the earlier pairs of question and reply, and the
    last question.

    >>> conversation_of([("system", "s"), ("user", "a"), ("user", "b"), ("assistant", "c"), ("user", "d")])
    ('s', (('a\\n\\nb', 'c'),), 'd')
    """
    system = "\n\n".join(text for role, text in turns if role == "system")
    merged: list[tuple[str, str]] = []
    for role, text in turns:
        if role == "system":
            continue
        if merged and merged[-1][0] == role:
            merged[-1] = (role, f"{merged[-1][1]}\n\n{text}")
        else:
            merged.append((role, text))
    # Chat templates expect the user's message first, so insert an empty one.
    if merged[0][0] == "assistant":
        merged.insert(0, ("user", ""))
    texts = [text for _, text in merged]
    exchanges = tuple(zip(texts[:-1:2], texts[1::2], strict=True))
    return system, exchanges, texts[-1]


def _ended_by(plan: RunSpec, stop: tuple[str, ...]) -> RunSpec:
    """Return a plan whose rollouts end at one of the client's stop strings instead of at an answer.

    If no stop string occurs, a rollout ends when the model stops.
    """
    longest = max(map(len, stop), default=1)

    def stopped(text: str) -> str | None:
        return "stopped" if any(one in text for one in stop) else None

    def unmarked(text: str) -> int:
        return max(0, len(text) - longest + 1)

    return replace(plan, answers=Answers(stopped, plan.answers.group, unmarked))


def _with_system(plan: RunSpec, system: str) -> RunSpec:
    """Return the plan with the client's system prompt placed before the method's own."""
    own = plan.policy.system
    text = f"{system}\n\n{own}" if own else system
    return replace(plan, policy=replace(plan.policy, system=text))
