"""The service behind the endpoint: open engines, one graph, one ledger, one gate per policy."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from anyio import CancelScope, get_cancelled_exc_class

from atts.adapters import question_of
from atts.api import Setup
from atts.calibration import Calibrator
from atts.concurrency import SlotQueue
from atts.core import Outcome, Problem, Recent, Role, Rollout
from atts.errors import ATTSError, EngineUnavailable, OptionError
from atts.graph import Graph
from atts.journal import Event, TurnFinished
from atts.ledger import LEDGER, Account, Amount, Caps, LedgerFile, Price, check_prices, prices_of
from atts.pipelines import ConformalGate, GuaranteedGate
from atts.run import Notice, RunOptions, RunResult, RunSpec, evaluate
from atts.serving.policies import POLICIES
from atts.serving.requests import ChatRequest, RequestError

_MOST_GATES = 64  # of rates that requests choose
_RETRY_SECONDS = 5
_MOST_RUNS = 1000  # that are remembered after their end
RunWord = Literal["running", "answered", "cancelled", "failed"]
_ONE_CALL = Amount(calls=1, total_tokens=1)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """The limits of a server, and the folder in which its ledger is kept.

    :raises OptionError: a limit below 1.
    """

    name: str = "atts/pair"  # of the model that clients ask
    state: Path | None = None  # None: what was spent is forgotten at the end
    api_key: str | None = field(default=None, repr=False)
    request_caps: Caps = Caps()  # the most that one request may ask
    server_caps: Caps = Caps()  # on all requests together, earlier sessions included
    prices: Mapping[str, Price] = field(default_factory=dict[str, Price])
    requests: int = 64  # worked on at once
    queue: int = 256  # more that wait
    body_bytes: int = 1 << 20
    keepalive_seconds: float = 15.0

    def __post_init__(self) -> None:
        for name in ("requests", "body_bytes"):
            if getattr(self, name) < 1:
                raise OptionError(name, f"{getattr(self, name)} serves nothing; give at least 1")
        if self.queue < 0:
            raise OptionError("queue", f"{self.queue} is below 0")


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a request: its outcome, what it spent, and the rules it ran under."""

    run: str
    request: ChatRequest
    outcome: Outcome
    account: Account
    rate: float
    guarantee: str
    created: int

    @property
    def speaker(self) -> Rollout | None:
        """Return the rollout whose reasoning is shown: the first one that gave the answer."""
        rollouts = self.outcome.rollouts
        agreeing = [one for one in rollouts if one.answer and one.answer == self.outcome.answer]
        return next(iter([*agreeing, *(one for one in rollouts if one.turns)]), None)

    @property
    def reasoning(self) -> str:
        """Return the reasoning behind the answer."""
        return "" if self.speaker is None else self.speaker.text

    @property
    def content(self) -> str:
        """Return the answer, or the text of one rollout where no answer could be extracted."""
        return self.outcome.answer if self.outcome.answer is not None else self.reasoning

    @property
    def finish_reason(self) -> str:
        """Return "stop", or "length" where a limit ended the work before there was an answer."""
        if self.outcome.answer is not None:
            return "stop"
        is_cut = self.speaker is None or self.speaker.finish != "end"
        return "length" if self.account.limit or is_cut else "stop"

    def usage(self) -> dict[str, Any]:
        """Return the usage over all calls that were answered."""
        answered = self.account.spent - self.account.unanswered
        written = self.account.written
        plain: dict[str, Any] = {
            "prompt_tokens": answered.total_tokens - written,
            "completion_tokens": written,
            "total_tokens": answered.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.account.cached},
            "completion_tokens_details": {"reasoning_tokens": written},
        }
        if self.account.prices:
            plain["cost"] = self.account.spent.dollars
        return plain

    def facts(self) -> dict[str, Any]:
        """Return the object `atts` of the reply."""
        outcome = self.outcome
        ends = Counter(rollout.finish for rollout in outcome.rollouts)
        cancelled = ends["cancelled"] + ends["settled"]
        decisions = [
            turn.decision
            for rollout in outcome.rollouts
            for turn in rollout.turns
            if turn.decision is not None
        ]
        escalated = sum(decision.escalate for decision in decisions)
        usage = outcome.usage
        return {
            "run": self.run,
            "answer": outcome.answer,
            "votes": {one: vote for one, vote in outcome.votes.items() if math.isfinite(vote)},
            "settled": outcome.why,
            "samples": {
                "started": sum(bool(rollout.turns) for rollout in outcome.rollouts),
                "finished": len(outcome.rollouts) - cancelled - ends["failed"],
                "cancelled": cancelled,
                "failed": ends["failed"],
            },
            "by_model": {
                "draft": {"completion": usage.draft_tokens},
                "target": {"completion": usage.target_tokens, "scored": usage.scored_tokens},
            },
            "rate": {
                "nominal": self.rate,
                "realised": escalated / len(decisions) if decisions else None,
                "chunks": len(decisions),
            },
            "guarantee": self.guarantee,
            "spent": self.account.as_json(),
            "limit": self.account.limit or None,
            "policy": self.request.policy,
            "ignored": list(self.request.ignored),
        }


@dataclass(slots=True, eq=False)
class ServedRun:
    """One request as `/atts/runs` shows it: while it runs, and afterwards."""

    run: str
    request: ChatRequest
    account: Account
    began: float = field(default_factory=time.time)
    status: RunWord = "running"
    reply: Reply | None = None
    scope: CancelScope = field(default_factory=CancelScope, repr=False)

    def as_json(self) -> dict[str, Any]:
        """Return the run as strict JSON: without the text of the conversation."""
        plain = {
            "run": self.run,
            "status": self.status,
            "created": int(self.began),
            "model": self.request.model,
            "policy": self.request.policy,
            "spent": self.account.as_json(),
            "reserved_calls": self.account.reserved.calls,
        }
        return plain if self.reply is None else {**plain, **self.reply.facts()}


@dataclass(slots=True)
class Counts:
    """Growing counts of the server, for its metrics."""

    requests: int = 0
    answered: int = 0
    refused: int = 0
    cancelled: int = 0
    failed: int = 0
    limited: int = 0


@dataclass(frozen=True, slots=True)
class _Watch:
    """Passes each turn of a rollout on once it will not change."""

    written: Callable[[int, str], None]

    def recalled(self, event: Event) -> None:
        """Ignore an event of an earlier session."""

    def notify(self, event: Notice) -> None:
        """Pass on the text of a turn."""
        if isinstance(event, TurnFinished):
            text = "".join(chunk.text for chunk in event.turn.chunks)
            self.written(event.sample, text)


class Service:
    """Engines that stay open, and everything that the requests of one server share."""

    def __init__(self, setup: Setup, options: ServeOptions | None = None) -> None:
        self.setup = setup
        self.options = options or ServeOptions()
        self.counts = Counts()
        self.in_flight = 0
        self._slots = SlotQueue(self.options.requests)
        self.is_draining = False
        self.account = Account()
        self.runs = Recent[str, ServedRun](_MOST_RUNS + self.options.requests + self.options.queue)
        self._base: RunSpec | None = None
        self._graph: Graph | None = None
        self._plans = OrderedDict[tuple[str, float], RunSpec]()

    @property
    def is_ready(self) -> bool:
        """Return True if requests are taken."""
        return self._base is not None and not self.is_draining

    @property
    def models(self) -> dict[Role, str]:
        """Return the model of each role; the service must be open."""
        base = self._opened()[0]
        return base.models

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Service]:
        """Open the engines and the ledger for the length of the block.

        :raises OptionError: a cap in dollars without prices, or a setup that cannot be run.
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
            file: LedgerFile | None = None
            if options.state is not None:
                options.state.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(LedgerFile(options.state / LEDGER))
            self.account = Account(
                options.server_caps,
                prices=prices_of(options.prices, base.models),
                file=file,
                spent=None if file is None else file.total,
            )
            self._base = base
            self._graph = Graph(rollouts=base.concurrency, limits=base.limits)
            try:
                yield self
            finally:
                self._base = None

    def check_room(self) -> None:
        """Refuse a request where too many are in flight and waiting.

        :raises RequestError: 429 under overload, 503 while the server ends.
        """
        if not self.is_ready:
            raise RequestError(
                "the server is ending; ask another one",
                status=503,
                kind="server_error",
                retry_after=_RETRY_SECONDS,
            )
        if self.in_flight >= self.options.requests + self.options.queue:
            self.counts.refused += 1
            raise RequestError(
                f"{self.in_flight} requests are in flight or wait; try again",
                status=429,
                kind="rate_limit_error",
                code="overloaded",
                retry_after=_RETRY_SECONDS,
            )

    @asynccontextmanager
    async def admitted(self) -> AsyncGenerator[None]:
        """Count a request in for the length of the block.

        :raises RequestError: as `check_room` does.
        """
        self.check_room()
        self.in_flight += 1
        self.counts.requests += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def check(self, request: ChatRequest) -> None:
        """Refuse what cannot be run, before any work.

        :raises RequestError: naming the field.
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
                f"the server's own {limit} is spent",
                status=429,
                kind="insufficient_quota",
                code="insufficient_quota",
            )

    async def solve(
        self, request: ChatRequest, written: Callable[[int, str], None] | None = None
    ) -> Reply:
        """Solve a request; cancelling the awaiting scope cancels its calls down to the engines.

        :raises RequestError: an engine failed, or a cap was reached and the request asks for an
            error then.
        """
        _, graph = self._opened()
        run = f"r_{secrets.token_hex(8)}"
        plan = self._plan(request)
        system, question = question_of(request.turns)
        if system:
            plan = _with_system(plan, system)
        account = Account(request.caps, name=run, prices=self.account.prices, inside=self.account)
        served = ServedRun(run, request, account)
        self.runs[run] = served
        # A request with a seed has the problem id and the gate of `atts solve`, and its answer.
        problem = Problem("problem" if request.seed is not None else run, question)
        options = RunOptions(
            listeners=() if written is None else (_Watch(written),),
            engines="are open",
            signals="ignore",
            shared_graph=graph,
            gate="shared" if request.seed is None else "own",
            account=account,
            on_limit="conclude",
        )
        result: RunResult | None = None
        try:
            with served.scope:
                await self._slots.take()
                try:
                    result = await evaluate([problem], plan, options)
                finally:
                    self._slots.give()
            if result is None:
                self._cancelled(served)
                raise RequestError("the run was cancelled", status=409, code="cancelled")
            outcome = next(result.outcomes())
        except get_cancelled_exc_class():
            self._cancelled(served)
            raise
        except ATTSError as error:
            self.counts.failed += 1
            served.status = "failed"
            raise RequestError(
                str(error), status=502, kind="server_error", code="engine_failed"
            ) from error
        if account.limit:
            self.counts.limited += 1
            if request.atts.on_limit == "error":
                served.status = "failed"
                raise RequestError(
                    f"{account.limit} is spent",
                    status=402,
                    code="limit_reached",
                    kind="limit_error",
                )
        if outcome.status == "failed":
            self.counts.failed += 1
            served.status = "failed"
            raise RequestError(outcome.why, status=502, kind="server_error", code="engine_failed")
        self.counts.answered += 1
        setup = request.setup(self.setup)
        guarantee = _guarantee(plan.gate)
        reply = Reply(
            run,
            request,
            outcome,
            account,
            rate=setup.rate,
            guarantee=guarantee,
            created=int(time.time()),
        )
        served.status = "answered"
        served.reply = reply
        return reply

    def cancel(self, run: str) -> ServedRun:
        """Cancel a run down to the engines; a run that is over stays as it is.

        :raises RequestError: there is no such run.
        """
        served = self.find(run)
        served.scope.cancel()
        return served

    def find(self, run: str) -> ServedRun:
        """Return a run by its id.

        :raises RequestError: there is none, or it was forgotten.
        """
        if run not in self.runs:
            raise RequestError(f"there is no run {run!r}", status=404, param="run")
        return self.runs[run]

    def _cancelled(self, served: ServedRun) -> None:
        self.counts.cancelled += 1
        served.status = "cancelled"

    def _opened(self) -> tuple[RunSpec, Graph]:
        if self._base is None or self._graph is None:
            raise EngineUnavailable("atts", "the service is not open", "Use it inside `open`")
        return self._base, self._graph

    def _plan(self, request: ChatRequest) -> RunSpec:
        """Return the plan of a request, with the gate that requests of its policy and rate share."""
        base, _ = self._opened()
        setup = request.setup(self.setup).informed()
        if not {*setup.roles} <= {*base.roles}:
            raise RequestError(
                f"the policy {request.policy!r} asks a model that this server does not have open",
                param="model",
            )
        if request.seed is not None:
            return setup.plan(base.draft, base.target)
        key = (POLICIES[request.policy].method, setup.rate)
        shared = self._plans.pop(key, None) or setup.plan(base.draft, base.target)
        self._plans[key] = shared
        if len(self._plans) > _MOST_GATES:
            self._plans.popitem(last=False)
        return replace(
            shared,
            policy=setup.run_policy,
            policy_for_context=setup.policy_within,
            roles=setup.roles,
        )


def _guarantee(gate: object) -> str:
    """Return the guarantee of a gate in words, and what voids it; "" for a gate without one."""
    if isinstance(gate, GuaranteedGate):
        promise = gate.promise
    elif isinstance(gate, ConformalGate) and isinstance(gate.calibrator, Calibrator):
        promise = (gate.calibrator.guarantee, gate.calibrator.voided_by)
    else:
        return ""
    return "; void if: ".join(filter(None, promise))


def _with_system(plan: RunSpec, system: str) -> RunSpec:
    """Return the plan with the client's system prompt before the method's own."""
    own = plan.policy.system
    text = f"{system}\n\n{own}" if own else system
    within = plan.policy_for_context
    assert within is not None, "a setup's plan follows the context"
    return replace(
        plan,
        policy=replace(plan.policy, system=text),
        policy_for_context=lambda context: replace(within(context), system=text),
    )
