"""Pool of replicas that acts as one engine: it keeps each rollout on one replica, avoids failed
replicas, and repeats their requests on others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from types import TracebackType
from typing import Literal, Protocol, Self, TypeVar

import anyio

from atts.concurrency import backoff, clock, task_group
from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import (
    Engine,
    EngineSpec,
    EngineState,
    EngineStats,
    Returning,
    Tokenizer,
    first_values,
    is_other_model,
    not_open,
    opened,
)
from atts.errors import (
    ATTSError,
    BadReply,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    FingerprintError,
    OptionError,
    UnsupportedByEngine,
)

T = TypeVar("T")
State = Literal["up", "down", "refused"]
"""The state of a replica. "down": it failed, and will be checked again later. "refused": a check
found another model or version on it, so it is never used again.
"""
# Seconds until a replica that failed once is checked again. The time doubles with every further
# failure.
_BACK_SECONDS = 0.5
_LONGEST_SECONDS = 30.0
# If this number of calls in a row time out or get invalid replies, the replica counts as lost.
_FAILURES = 3
# A rollout moves to another replica if its usual replica is too busy: if this has more requests in
# flight than 1.25 times the mean of the usable replicas, plus this number.
_SLACK = 8


class Replica(Engine, Protocol):
    """An engine that can be part of a pool. It may be lost during a run, and is used again once
    `recheck` succeeds.
    """

    async def recheck(self) -> None:
        """Open the engine at the first call. At later calls, check that its server has not changed.

        :raises EngineUnavailable: the server cannot be reached.
        :raises EngineError: the server has changed.
        """
        ...


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Snapshot of one replica: its state, and the counts of its requests, failures and requests in
    flight.
    """

    name: str
    state: State
    in_flight: int
    requests: int
    failures: int
    reason: str = ""


Prefer = Callable[[Sequence[ReplicaLoad], SampleRequest | ScoreRequest], int]
"""Function that takes the loads of the usable replicas and a request, and returns the index of the
replica to use.
"""


@dataclass(slots=True)
class _Member:
    """One replica of a pool, with its current state and counters."""

    name: str
    engine: Replica
    state: State = "up"
    in_flight: int = 0
    requests: int = 0
    failures: int = 0
    in_a_row: int = 0
    retry_at: float = 0.0
    checking: anyio.Lock = field(default_factory=anyio.Lock)
    checks: int = 0  # how often a check found that the replica was usable again
    reason: str = ""

    @property
    def load(self) -> ReplicaLoad:
        """Return a snapshot of the replica's state and counters."""
        return ReplicaLoad(
            self.name, self.state, self.in_flight, self.requests, self.failures, self.reason
        )


class ReplicaPool:
    """Several engines with the same model that act as one engine.

    All requests of a rollout go to the same replica, whose cache holds the rollout's prefix. If
    that replica is down or much busier than the others, another one is used. If the function
    `prefer` is given, it chooses the replica of each request instead.

    If a replica is lost, its requests are repeated on other replicas. After some time, one request
    checks whether the lost replica is back, while other requests use other replicas. A replica that
    comes back with another model or version is never used again.

    :raises OptionError: if there is no replica.
    """

    def __init__(
        self,
        replicas: Sequence[tuple[str, Replica]],
        *,
        name: str = "pool",
        prefer: Prefer | None = None,
    ) -> None:
        if not replicas:
            raise OptionError("replicas", "a pool needs at least one replica")
        self._name = name
        self._prefer = prefer
        self._members = [_Member(label, engine) for label, engine in replicas]
        self._stack = AsyncExitStack()
        self._state: EngineState = "new"
        self._first: Replica | None = None
        # A stand-in for the event loop's clock, which is set when the pool opens.
        self._clock: Callable[[], float] = lambda: 0.0

    @property
    def spec(self) -> EngineSpec:
        """Return the engine spec, which all replicas share."""
        return self._one().spec

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer, which all replicas share."""
        return self._one().tokenizer

    def stats(self) -> EngineStats:
        """Return the sums of all replicas' statistics.

        A request that was repeated on another replica counts twice.
        """
        each = [member.engine.stats() for member in self._members]
        return EngineStats(
            *(sum(getattr(stats, field.name) for stats in each) for field in fields(EngineStats))
        )

    def load(self) -> tuple[ReplicaLoad, ...]:
        """Return a snapshot of each replica, in the order in which the replicas were given."""
        return tuple(member.load for member in self._members)

    async def sample(self, request: SampleRequest) -> Completion:
        """Send a sampling request to one of the replicas; see `atts.engine.Engine`."""
        return await self._anywhere(request, lambda engine: engine.sample(request))

    async def score(self, request: ScoreRequest) -> Scores:
        """Send a scoring request to one of the replicas; see `atts.engine.Engine`."""
        return await self._anywhere(request, lambda engine: engine.score(request))

    async def comes_back(self) -> bool:
        """Wait until at least one replica is up, and return whether one is; see
        `atts.engine.Returning`.
        """
        if self._state != "open":
            return False

        async def wait_for(member: _Member) -> None:
            engine = member.engine
            if member.state == "down" and isinstance(engine, Returning):
                if await engine.comes_back():
                    # If several calls wait for the same replica, only the first call checks it. The
                    # others then find its state changed.
                    async with member.checking:
                        if member.state == "down":
                            await self._look(member)
            if member.state == "up":
                # One usable replica is enough, so do not wait for the others.
                group.cancel_scope.cancel()

        async with task_group() as group:
            for member in self._members:
                group.start_soon(wait_for, member)
        return any(member.state == "up" for member in self._members)

    async def __aenter__(self) -> Self:
        if self._state == "closed":
            raise not_open(self._name, self._state)
        self._clock = clock()
        async with AsyncExitStack() as stack:
            for member in self._members:
                stack.push_async_exit(member.engine.__aexit__)
                await self._check(member)
            if self._first is None:
                reasons = "; ".join(f"{member.name}: {member.reason}" for member in self._members)
                raise EngineUnavailable(self._name, f"no replica can be used ({reasons})")
            self._stack = stack.pop_all()
        self._state = "open"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> bool | None:
        self._state = "closed"
        await self._stack.aclose()
        return None

    async def _anywhere(
        self, request: SampleRequest | ScoreRequest, call: Callable[[Engine], Awaitable[T]]
    ) -> T:
        """Send a request to the best replica. If that replica is lost, try the others, each at most
        once.
        """
        if self._state != "open":
            raise not_open(self._name, self._state)
        tried: set[str] = set()
        last: EngineError | None = None
        while True:
            member = await self._pick(request, tried)
            if member is None:
                break
            tried.add(member.name)
            try:
                return await self._at(member, call)
            except EngineUnavailable as error:
                last = error
        if last is not None:
            raise last
        reasons = "; ".join(
            f"{member.name} {member.state}: {member.reason}" for member in self._members
        )
        raise EngineUnavailable(self._name, f"no replica can be used now ({reasons})")

    async def _at(self, member: _Member, call: Callable[[Engine], Awaitable[T]]) -> T:
        member.in_flight += 1
        member.requests += 1
        checks = member.checks
        try:
            answer = await call(member.engine)
        except EngineUnavailable as error:
            # Ignore the error if a check has found the replica usable since this request began. The
            # check is newer than the connection that was lost.
            if member.checks == checks:
                self._fail(member, error)
            raise
        except (EngineTimeout, BadReply) as error:
            member.failures += 1
            member.in_a_row += 1
            if member.in_a_row >= _FAILURES:
                self._fail(member, error)
            raise
        except UnsupportedByEngine as error:
            await self._suspect(member, error)
            raise
        finally:
            member.in_flight -= 1
        member.in_a_row = 0
        return answer

    async def _suspect(self, member: _Member, error: EngineError) -> None:
        """Check whether a replica has changed, because it refused a request as unsupported.

        :raises EngineUnavailable: the replica has changed since it was opened.
        """
        await self._check(member)
        if member.state == "refused":
            raise EngineUnavailable(
                self._name, f"{member.name} came back with a different model or version ({error})"
            ) from error

    def _fail(self, member: _Member, error: EngineError) -> None:
        """Count a failure, and take the replica out of use for a while. This time grows with the
        number of failures in a row.
        """
        member.failures += 1
        member.reason = str(error)
        if member.state == "up":
            member.in_a_row += 1
            wait = backoff(
                member.in_a_row,
                _BACK_SECONDS,
                longest=_LONGEST_SECONDS,
                salt=self._members.index(member),
            )
            member.state = "down"
            member.retry_at = self._clock() + wait

    async def _pick(self, request: SampleRequest | ScoreRequest, tried: set[str]) -> _Member | None:
        """Return the best replica for a request, or None if all untried replicas are down.

        Replicas that are down and due for a check are checked first.
        """
        for member in self._members:
            if self._is_due(member) and member.name not in tried:
                await self._check(member)
        free = [
            member for member in self._members if member.state == "up" and member.name not in tried
        ]
        if not free:
            return None
        if self._prefer is not None:
            return free[self._prefer([member.load for member in free], request)]
        least = min(free, key=lambda member: member.in_flight)
        rollout = request.rollout
        if not rollout:
            return least
        # Every rollout has one replica that caches its prefix. Use this replica, unless it has far
        # more requests than the others.
        home = max(free, key=lambda member: _weight(member.name, rollout))
        fair = sum(member.in_flight for member in free) / len(free)
        return home if home.in_flight <= 1.25 * fair + _SLACK else least

    def _is_due(self, member: _Member) -> bool:
        return (
            member.state == "down"
            and not member.checking.locked()
            and self._clock() >= member.retry_at
        )

    async def _check(self, member: _Member) -> None:
        """Check whether a replica can be used, and update its state."""
        async with member.checking:
            await self._look(member)

    async def _look(self, member: _Member) -> None:
        try:
            await member.engine.recheck()
            if self._first is None:
                self._first = member.engine
            advice = "Serve the same model with the same settings on every replica"
            require_alike(f"replica {member.name}", self._first.spec, member.engine.spec, advice)
        except (EngineUnavailable, EngineTimeout, BadReply) as error:
            # `_fail` makes the waiting time longer only if the state is "up", so set this state
            # first.
            member.state = "up"
            self._fail(member, error)
        except ATTSError as error:
            if self._state == "new":
                raise
            member.state = "refused"
            member.reason = str(error)
        else:
            if member.state == "down":
                member.state = "up"
                member.in_a_row = 0
                member.reason = ""
                member.checks += 1

    def _one(self) -> Replica:
        return opened(self._first, self._name)


def _weight(name: str, rollout: str) -> bytes:
    """Return the weight that a replica has for a rollout; the usable replica with the largest
    weight gets the rollout.

    This is rendezvous hashing: if a replica is lost, only its own rollouts move to other replicas.
    """
    return blake2b(f"{name}\x1f{rollout}".encode(), digest_size=8).digest()


def require_alike(name: str, ours: EngineSpec, theirs: EngineSpec, advice: str) -> None:
    """Check that two engines have the same model and settings, so that one run can mix their
    results.

    :raises FingerprintError: the engines differ.
    """
    one = ours.fingerprint()
    other = theirs.fingerprint()
    differences = [
        (field, one[field], other.get(field)) for field in one if one[field] != other.get(field)
    ]
    if is_other_model(ours.known_logprobs, theirs.known_logprobs):
        was = first_values(ours.known_logprobs)
        now = first_values(theirs.known_logprobs)
        differences.append(("log-probabilities of a fixed text", was, now))
    if differences:
        raise FingerprintError(name, differences, advice)
