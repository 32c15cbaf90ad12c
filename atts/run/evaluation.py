"""The run of an evaluation, from dataset to result; a journal makes it resumable, and only the
rollouts of unfinished problems then stay in memory.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, Protocol, get_args

import anyio
import anyio.to_thread

from atts import concurrency, graph
from atts.calibration import DomainCheck, DriftEvent
from atts.concurrency import usable_cores
from atts.core import Outcome, Problem, Role
from atts.engine import Engine, EngineSpec, speculated_by, speculated_since, together
from atts.errors import DatasetError, OptionError, counted
from atts.graph import Caller, Graph, Limit, ProblemResult, ProblemScope
from atts.journal import (
    Decided,
    Entry,
    FinishedProblem,
    Graded,
    Journal,
    JournalOptions,
    Json,
    Manifest,
    Observed,
    OpenProblem,
    OutcomeReached,
    ProblemStarted,
    RunState,
    SessionClosed,
    Setting,
    VerdictStatus,
    Warned,
    check_directory,
    dataset_digest,
    judged,
    open_journal,
)
from atts.ledger import LEDGER, PRICES, Account, Caps, LedgerFile, Price, check_prices, prices_of
from atts.pipelines import (
    Answers,
    Combiner,
    Context,
    DraftLength,
    Gate,
    GuaranteedGate,
    Policy,
    RoundGate,
    WriterChoice,
    check_engines,
    needed_logprobs,
    solve,
)
from atts.run.calls import (
    AlarmWatch,
    Deadlines,
    EngineCalls,
    EscalationCounter,
    Listener,
    OnUnscored,
    ProblemLog,
    ProblemRecord,
    ProblemsLeft,
    RecallTiming,
    RecordedGate,
    RecordedPlanner,
    RecordedRoundGate,
    Recorder,
    RunBegun,
    RunEnded,
    RunLengthEstimate,
    SequentialComparison,
    Signals,
    Stop,
    StopWhen,
    UnscoredWatch,
    engine_identity,
    replay_event,
    watch_signals,
)
from atts.run.result import (
    Abstain,
    Conditions,
    IncompleteTally,
    RunResult,
    RunStatus,
    check_conditions,
)


class Pipeline(Protocol):
    """A function that solves one problem, such as `atts.pipelines.solve`.

    Its engine calls must depend only on its arguments, on results of earlier calls and on seeds,
    but not on time or chance. Only then can an interrupted problem run again from the start:
    recorded calls return at once, so the problem continues where it was interrupted.
    """

    async def __call__(
        self, problem: Problem, policy: Policy, context: Context, scope: ProblemScope, /
    ) -> Outcome:
        """Return the outcome of the problem.

        :raises ATTSError: an error that ends the run; any other error ends only this problem.
        """
        ...


class Judgement(Protocol):
    """A grader's verdict on one answer, as the graders of `atts.evaluators` return it."""

    @property
    def status(self) -> Literal["equal", "different", "unscored"]:
        """Return whether the answer is equal to the reference, different from it, or could not be
        graded.
        """
        ...

    @property
    def rule(self) -> str:
        """Return the name of the grading rule that decided the verdict."""
        ...


Grade = Callable[[str, Problem], Judgement]
"""A grader: a function that compares an answer with a problem's reference. It runs in a worker
thread, so it may take long.
"""


def _nothing_kept(problem: str) -> None:
    """Do nothing. This is the `forget` of gates that store no data about single problems."""


_WORDS: Mapping[str, VerdictStatus] = {
    "equal": "correct",
    "different": "wrong",
    "unscored": "unscored",
}


def verdict_by(grade: Grade, answer: str, problem: Problem) -> tuple[VerdictStatus, str]:
    """Return a grader's verdict in the form that the journal stores. If the grader raises an error,
    the verdict is "unscored".
    """
    try:
        judgement = grade(answer, problem)
    except Exception as error:  # noqa: BLE001 - an error of grading shows nothing about the answer
        return "unscored", f"the grader failed: {type(error).__name__}: {error}"
    return _WORDS[judgement.status], judgement.rule


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The plan of one evaluation: models, policy, gate, answers and concurrency.

    The gate learns from the run, so every run needs its own new gate. The manifest records
    `configuration`, with the origin of each value, in addition to the settings of the plan.
    """

    draft: Engine
    target: Engine
    policy: Policy
    gate: Gate | RoundGate
    answers: Answers
    grade: Grade | None = None
    # Roles of the models that the method uses. If it uses only one model, `draft` and `target` are
    # the same engine, and the manifest does not name the unused role.
    roles: tuple[Role, ...] = ("draft", "target")
    seed: int = 0
    concurrency: int = 64  # largest number of rollouts in flight, over all problems
    # limits on the calls in flight at each engine; the keys are "draft" and "target"
    limits: Mapping[str, Limit] = field(default_factory=dict[str, Limit])
    retries: graph.RetryPolicy = graph.RetryPolicy()
    pipeline: Pipeline = solve
    configuration: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    # The settings in the form in which the user gave them. They are only displayed; a resumed run
    # does not compare them.
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    recall: RecallTiming = "instant"
    # a function that returns all drift alarms of the gate so far
    alarms: Callable[[], Sequence[DriftEvent]] = tuple[DriftEvent, ...]
    # a function that gets the id of each finished problem, for example a calibrator's `forget`
    on_problem_done: Callable[[str], object] = _nothing_kept
    # The conditions (such as the models and the sampling) under which the gate's stored scores were
    # recorded. None if the gate has no stored scores.
    stored_under: Mapping[str, object] | None = None
    # With score.kind "learned", `judge` computes a chunk's score from the chunk's features.
    # `judge_under` has the conditions of the run on which this function was fitted.
    judge: Callable[[Sequence[float]], float] | None = None
    judge_under: Mapping[str, object] | None = None
    # the action if the stored scores or the judge come from a run with other conditions
    conditions: Conditions = "match"
    on_unscored: OnUnscored = "stop"
    warnings: Sequence[str] = ()  # warnings about this plan, which the run records at its start
    # the rule that withholds a problem's answer if too few of its votes agree
    abstain: Abstain | None = None
    # the comparison with an earlier run; this run ends when the comparison is decided
    stop_when: StopWhen | None = None
    # A function that returns the policy for the shorter context length of the two engines. If it is
    # None, `policy` is used unchanged.
    policy_for_context: Callable[[int], Policy] | None = None
    # the check that warns about problems whose scores are unlike the stored scores
    domain: DomainCheck | None = None
    # time limit of this session; when it is reached, each open problem concludes from its rollouts
    # so far
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", self.policy.filled())
        if self.roles == ("draft",):
            object.__setattr__(self, "target", self.draft)
        elif self.roles == ("target",):
            object.__setattr__(self, "draft", self.target)
        if self.recall not in get_args(RecallTiming):
            raise OptionError("recall", f"unknown value {self.recall!r}", get_args(RecallTiming))
        if self.conditions not in get_args(Conditions):
            raise OptionError(
                "conditions", f"unknown value {self.conditions!r}", get_args(Conditions)
            )
        if self.on_unscored not in get_args(OnUnscored):
            raise OptionError(
                "on_unscored",
                f"unknown value {self.on_unscored!r}",
                get_args(OnUnscored),
                self.on_unscored,
            )
        if self.concurrency < 1:
            raise OptionError(
                "concurrency",
                f"at least 1 rollout must be in flight, but the limit is {self.concurrency}",
            )

    def resolved(self) -> RunSpec:
        """Return the plan with its default token limits reduced to the shorter context length of
        the two engines. The engines must be open.
        """
        if self.policy_for_context is None:
            return self
        context = min(engine.spec.context_length for engine in (self.draft, self.target))
        return replace(self, policy=self.policy_for_context(context))

    @property
    def specs(self) -> dict[Role, EngineSpec]:
        """Return each role's engine spec; the engines must be open."""
        return {"draft": self.draft.spec, "target": self.target.spec}

    @property
    def models(self) -> dict[Role, str]:
        """Return the name of the model in each role that the method uses; the engines must be
        open.
        """
        return {role: self.specs[role].model for role in self.roles}

    def flag_out_of_domain(self, outcome: Outcome) -> Outcome:
        """Return the outcome, with a warning added if the scores of its chunks are unlike the
        stored scores.
        """
        if self.domain is None:
            return outcome
        turns = (turn for rollout in outcome.rollouts for turn in rollout.turns)
        return replace(
            outcome,
            doubt=self.domain.warning([turn.score for turn in turns if turn.score is not None]),
        )

    def manifest(self, problems: Iterable[Problem], dataset: str | None) -> Manifest:
        """Return the manifest of a run with this plan; the engines must be open.

        `dataset` is the digest of the dataset. If it is missing, it is computed, but only if
        `problems` is a sequence. The problems are counted if they have a length.

        :raises UnsupportedByEngine: an engine lacks an ability that the policy or the gate needs.
        :raises FingerprintError: the plan's threshold for abstaining comes from problems that were
            labelled under other settings.
        """
        check_engines(self.policy, self.gate, self.draft.spec, self.target.spec)
        count = None
        if isinstance(problems, Sized):
            count = len(problems)
        if isinstance(problems, Sequence):
            dataset = dataset or dataset_digest(problems)
        policy: dict[str, Json] = self.policy.recorded()
        configuration = {
            "policy": Setting(policy, "policy"),
            "gate": Setting(type(self.gate).__name__, "gate"),
        }
        if isinstance(self.gate, GuaranteedGate):
            configuration["promise"] = Setting(list(self.gate.promise), "gate")
        if self.abstain is not None:
            configuration |= self.abstain.setting()
        specs = {role: spec for role, spec in self.specs.items() if role in self.roles}
        probed = dict[str, Setting]()
        for role, spec in specs.items():
            probed |= _probed(role, spec)
        manifest = Manifest(
            self.seed,
            dataset or "",
            count,
            {**configuration, **self.configuration},
            {role: engine_identity(spec) for role, spec in specs.items()},
            created=time.time(),
            settings={**self.settings, **probed},
            known_logprobs={
                role: spec.known_logprobs for role, spec in specs.items() if spec.known_logprobs
            },
        )
        if self.abstain is not None:
            self.abstain.check(manifest)
        return manifest


def _probed(role: str, spec: EngineSpec) -> dict[str, Setting]:
    """Return the findings of an engine's server probe as settings. Each key is the engine's role
    and the name of the finding, joined by a dot.
    """
    return {f"{role}.{name}": Setting(seen, "probe") for name, seen in spec.findings}


# a context length above that of every real model, to compute the policy without a context limit
_ENDLESS = 1 << 40
# assumed floating-point operations per second of one CPU core, for a rough estimate of a run's time
_FLOPS_PER_CORE = 2e10


def engine_warnings(run: RunSpec, problems: int) -> Iterator[tuple[str, str]]:
    """Yield the code and the message of each warning about the open engines."""
    yield from _short_contexts(run)
    yield from _slow_models(run, problems)


def _short_contexts(run: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield a warning for each model whose context is shorter than a rollout may be."""
    specs = list(dict.fromkeys((run.draft.spec, run.target.spec)))
    most = run.policy.bounds().max_tokens
    usual = most
    if run.policy_for_context is not None:
        usual = run.policy_for_context(_ENDLESS).bounds().max_tokens
    if most < usual:
        shortest = min(specs, key=lambda spec: spec.context_length)
        yield (
            "context",
            f"{_holds(shortest)}, so rollouts get at most {most:,} tokens instead of {usual:,}",
        )
    for spec in specs:
        if spec.context_length <= most:
            yield (
                "context",
                (f"{_holds(spec)}, so rollouts end at this length, not at --max-tokens {most:,}"),
            )


def _holds(spec: EngineSpec) -> str:
    return (
        f"the context of {spec.model} is {spec.context_length:,} tokens long, including the problem"
    )


def _slow_models(run: RunSpec, problems: int) -> Iterator[tuple[str, str]]:
    """Yield a warning for each model that runs on this machine's CPU and may take more than an
    hour.
    """
    tokens = run.policy.bounds().max_tokens * run.policy.samples * problems
    for engine in dict.fromkeys((run.draft, run.target)):
        spec = engine.spec
        kernel = str(getattr(engine, "kernel", "cuda"))
        hours = spec.flops_per_token * tokens / (_FLOPS_PER_CORE * usable_cores()) / 3600
        if "cuda" in kernel.lower() or hours <= 1:
            continue
        slow = (
            f"{spec.model} runs on this machine's CPU: {counted(problems, 'problem')} x "
            f"{counted(run.policy.samples, 'rollout')} of full length would take about "
            f"{hours:,.0f} hours"
        )
        yield (
            "speed",
            (
                f"{slow}; reduce the number of problems (--limit) and of rollouts "
                "(--samples), or use a server with a GPU"
            ),
        )


Keep = Literal["lines", "nothing"]
"""Data that the result keeps about each problem: "lines" for a summary, "nothing" for no data. The
journal always contains everything.
"""

Engines = Literal["open them", "are open"]
OnLimit = Literal["keep open", "conclude"]
"""The treatment of unfinished problems when a spending cap refuses a call.

"keep open": the run stops, and a later session with a higher cap continues the problems.
"conclude": each problem gets its answer from its rollouts that have ended.
"""
_CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "engines": get_args(Engines),
        "signals": get_args(Signals),
        "keep": get_args(Keep),
        "on_limit": get_args(OnLimit),
    }
)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one session, which is the part of a run that one process does.

    :raises OptionError: for an unknown choice.
    """

    # The run directory. If it is None, nothing is written, but the result contains the outcomes.
    directory: Path | None = None
    listeners: Sequence[Listener] = ()
    journal: JournalOptions = JournalOptions()
    engines: Engines = "open them"
    signals: Signals = "handle"
    stop: Stop = field(default_factory=Stop)
    keep: Keep = "lines"
    # digest of the dataset; needed if the problems can be read only once
    dataset: str | None = None
    # a task graph whose limits apply to several runs together; None if this run has its own task
    # graph
    shared_graph: Graph | None = None
    # "shared": other runs with the same `shared_graph` use the plan's gate too; "own": only this
    # run does
    gate: Literal["shared", "own"] = "shared"
    caps: Caps = Caps()  # limits on the spending of all sessions of the run together
    # prices of tokens, keyed by the name or the role of the model
    prices: Mapping[str, Price] = field(default_factory=dict[str, Price])
    # If this run answers a request to an atts server: the account of the request, which is used
    # instead of an account for `caps`.
    account: Account | None = None
    on_limit: OnLimit = "keep open"

    def __post_init__(self) -> None:
        for name, kinds in _CHOICES.items():
            if getattr(self, name) not in kinds:
                raise OptionError(name, f"unknown value {getattr(self, name)!r}", kinds)


async def evaluate(
    problems: Iterable[Problem], plan: RunSpec, options: RunOptions | None = None
) -> RunResult:
    """Solve every problem as planned. If the directory contains an earlier session of the run,
    continue that run.

    Problems and rollouts that failed in an earlier session are tried again. After the first Ctrl-C,
    the calls in flight finish and are recorded; a second Ctrl-C ends the run at once. In both cases
    the result has the status "interrupted", and the same call of `evaluate` continues the run.

    :raises JournalError: the directory cannot be used or written; see `open_journal`.
    :raises FingerprintError: the directory contains a run with other settings, or the gate's stored
        scores were made under other conditions.
    :raises DatasetError: two problems have the same id.
    :raises EngineError: an engine lacks a needed capability, or was lost and did not come back.
    """
    options = options or RunOptions()
    if options.directory is not None:
        # Check the directory before the models are loaded, so that an error comes early.
        check_directory(options.directory)
    async with AsyncExitStack() as engines:
        if options.engines == "open them":
            await engines.enter_async_context(plan.draft)
            if plan.target is not plan.draft:
                await engines.enter_async_context(plan.target)
        plan = plan.resolved()
        check_prices(options.caps, options.prices, plan.models)
        priced = prices_of(options.prices, plan.models)
        if priced:
            prices: dict[str, Json] = {role: asdict(price) for role, price in priced.items()}
            plan = replace(plan, settings={**plan.settings, PRICES: Setting(prices, "prices")})
        manifest = plan.manifest(problems, options.dataset)
        doubt = (
            ""
            if plan.stored_under is None
            else check_conditions(manifest, plan.stored_under, plan.conditions)
        )
        if plan.judge_under is not None:
            of_judge = check_conditions(manifest, plan.judge_under, plan.conditions, "the judge")
            doubt = "; ".join(filter(None, (doubt, of_judge)))
        state = RunState("everything" if plan.recall == "recorded" else "open problems")
        # True if no other run uses this run's gate; only then is the gate's number of problems
        # known
        is_alone = (
            options.shared_graph is None or options.directory is not None or options.gate == "own"
        )
        known = manifest.problems if is_alone else None
        left = RunLengthEstimate(known, plan.policy.samples)
        if manifest.judged_unit == "problems":
            left = ProblemsLeft(known)
        counts = (EscalationCounter(), left)
        combiner = Combiner()
        async with _journal(options, manifest, plan, state, combiner, *counts) as journal:
            # The ledger needs no file lock, because only the process that locked the journal writes
            # it.
            if options.caps:
                file = (
                    engines.enter_context(LedgerFile(options.directory / LEDGER))
                    if options.directory
                    else None
                )
                options = replace(options, account=_account(options, plan, file))
            run = _Run(plan, options, manifest, state, journal, combiner, *counts)
            return await run.drive(problems, doubt)


def _account(options: RunOptions, plan: RunSpec, file: LedgerFile | None) -> Account:
    """Return the account that limits the run's spending. It already includes the spending of
    earlier sessions.
    """
    models = plan.models
    return Account(
        options.caps,
        prices=prices_of(options.prices, models),
        file=file,
        spent=None if file is None else file.total,
    )


@asynccontextmanager
async def _journal(
    options: RunOptions,
    manifest: Manifest,
    plan: RunSpec,
    state: RunState,
    combiner: Combiner,
    escalations: EscalationCounter,
    left: RunLengthEstimate,
) -> AsyncGenerator[Journal | None, None]:
    """Open the journal, and apply its events to the state of the run, to the gate and to the
    listeners.
    """
    if options.directory is None:
        yield None
        return

    def recall(entry: Entry) -> None:
        event = entry.event
        state.apply(entry)
        if isinstance(event, Decided | Observed) and not isinstance(plan.gate, RoundGate):
            replay_event(plan.gate, event)
        if isinstance(event, OutcomeReached) and state.is_over(event.problem):
            plan.on_problem_done(event.problem)
            if plan.recall == "instant":
                combiner.learn(state.finished[event.problem])
        for decision, is_escalated in judged(event):
            escalations.count(decision, is_escalated)
        # If calls take their recorded times, `left` counts each decision when the run repeats it.
        # Counted here, it would include decisions that were made after a chunk in flight was
        # written.
        if isinstance(event, Decided) and plan.recall == "instant":
            left.count(event.decision)
        for listener in options.listeners:
            listener.recalled(event)

    async with open_journal(options.directory, manifest, options.journal, recall) as journal:
        yield journal


class _Run:
    def __init__(
        self,
        plan: RunSpec,
        options: RunOptions,
        manifest: Manifest,
        state: RunState,
        journal: Journal | None,
        combiner: Combiner,
        escalations: EscalationCounter,
        left: RunLengthEstimate,
    ) -> None:
        self._plan = plan
        self._combiner = combiner
        self._options = options
        self._manifest = manifest
        self._state = state
        self._journal = journal
        self._escalations = escalations
        self._recorder = Recorder(journal, options.listeners, escalations, left)
        self._graph = Graph(
            rollouts=plan.concurrency,
            limits=plan.limits,
            policy=plan.retries,
            sink=self._recorder.on_graph,
            first_node=state.last_node + 1,
            shared_graph=options.shared_graph,
        )
        self._left = left
        if plan.recall == "instant":
            for problem in filter(state.is_over, state.finished):
                left.conclude(problem)
        self._alarms = AlarmWatch(plan.alarms, self._recorder)
        self._unscored = UnscoredWatch(plan.on_unscored)
        seconds = plan.policy.timeout_seconds
        self._deadlines: Mapping[Role, Deadlines] = {
            "draft": Deadlines(plan.draft, seconds),
            "target": Deadlines(plan.target, seconds),
        }
        self._draft_length = DraftLength()
        self._writers = WriterChoice()
        # index of each problem in the dataset, keyed by problem
        self._positions: dict[str, int] = {}
        self._lines: dict[str, FinishedProblem] = {}
        self._kept: list[Outcome] = []
        self._unfinished = 0
        self._missing = IncompleteTally()
        self._comparing = SequentialComparison(plan.stop_when, state, self._recorder.record)
        self._limit = ""  # name of the spending cap that ended the run; "" if none did
        self._taken = 0  # number of problems that this session has begun
        # "all" after the last problem of the dataset was read
        self._seen: Literal["some", "all"] = "some"

    async def drive(self, problems: Iterable[Problem], doubt: str) -> RunResult:
        """Solve all problems that are left, and return the result. The run's first session also
        records warnings: `doubt`, the plan's warnings, and warnings about the engines.
        """
        began = anyio.current_time()
        proposed = speculated_by(self._plan.target)
        self._recorder.tell(self._begun())
        if not self._state.sessions:
            warnings: list[tuple[str, str]] = []
            if doubt:
                warnings.append(("conditions", doubt))
            warnings.extend(("budget", text) for text in self._plan.warnings)
            warnings.extend(engine_warnings(self._plan, self._manifest.problems or 1))
            for code, text in warnings:
                self._recorder.record(Warned(code, text))
        for name, problem in self._state.finished.items():
            self._keep(name, problem)
        # All background tasks share one task group. Each group takes 0.1 ms, and a server makes a
        # run for every request.
        async with concurrency.task_group() as watches:
            if self._options.signals == "handle":
                watches.start_soon(watch_signals, self._options.stop, self._asked_to_end)
            watches.start_soon(self._end_when_asked)
            if self._options.account is not None:
                watches.start_soon(self._end_when_spent, self._options.account)
            for deadlines in self._deadlines.values():
                if deadlines.are_moving:
                    watches.start_soon(deadlines.keep)
            await self._graph.drive(
                self._left_over(problems),
                self._solve,
                self._finished,
                timeout_seconds=self._plan.timeout_seconds,
            )
            watches.cancel_scope.cancel()
        result = self._result(anyio.current_time() - began)
        if result.status == "finished" and self._taken and result.coarse_chunks:
            self._recorder.record(Warned("coarse chunks", result.coarse_chunks))
        more = speculated_since(proposed, self._plan.target)
        if self._journal is not None:
            await self._journal.close(
                SessionClosed(_CLOSINGS.get(result.status, "finished"), result.why, more)
            )
        result = replace(result, speculated=together(self._state.speculated, more))
        self._recorder.tell(RunEnded(result))
        return result

    def _begun(self) -> RunBegun:
        plan = self._plan
        state = self._state
        return RunBegun(
            self._manifest.problems,
            state.done,
            plan.policy.samples,
            seconds=state.seconds,
            draft=plan.draft.spec.model if "draft" in plan.roles else "",
            target=plan.target.spec.model if "target" in plan.roles else "",
            directory=self._options.directory,
            judged_unit=self._manifest.judged_unit,
            manifest=self._manifest,
        )

    def _left_over(self, problems: Iterable[Problem]) -> Iterator[Problem]:
        """Yield the problems that this session must solve, while reading the dataset one problem at
        a time.
        """
        for position, problem in enumerate(problems):
            if problem.id in self._positions:
                raise DatasetError(
                    problem.source or "given", f"two problems have the id {problem.id!r}"
                )
            self._positions[problem.id] = position
            is_left = not self._state.is_over(problem.id) or self._plan.recall == "recorded"
            if self._comparing.needs(problem.id) and is_left:
                self._unfinished += 1
                self._taken += 1
                yield problem
        self._seen = "all"

    async def _end_when_asked(self) -> None:
        """Wait until the run has been asked to end and no call is in flight, then cancel the task
        graph. A second request ends the wait at once.
        """
        await self._options.stop.finished()
        self._graph.cancel("interrupted")

    def _asked_to_end(self, number: int) -> None:
        """Report, after the first interrupt, that the run is ending and that a second interrupt
        ends it at once.
        """
        stop = self._options.stop
        if stop.asked == 1:
            text = (
                f"stopping: {counted(stop.calls, 'call')} in flight will be finished and saved; "
                "interrupt again to stop at once"
            )
            self._recorder.record(Warned("interrupted", text))

    async def _end_when_spent(self, account: Account) -> None:
        """Wait until the run's time limit is reached, or until a spending cap refuses a call and no
        call is in flight. Then end the run in the way that `on_limit` chooses.
        """
        limit = await account.exhausted(self._state.seconds)
        self._limit = limit
        self._recorder.record(Warned("limit", f"{limit} is used up"))
        if self._options.on_limit == "conclude":
            self._graph.stop(limit)
        else:
            self._options.stop.request()  # the calls in flight still finish and are recorded

    async def _solve(self, problem: Problem, scope: ProblemScope) -> FinishedProblem:
        recorded = self._state.open.pop(problem.id, None)
        if recorded is None:
            self._recorder.record(ProblemStarted(problem))
            recorded = OpenProblem(problem)
        self._recorder.saved_tokens[problem.id] += recorded.tokens
        record = ProblemRecord(self._recorder, recorded)
        context = self._context(
            ProblemLog(self._recorder, recorded, self._options.stop, self._plan.recall), record
        )
        outcome = self._plan.flag_out_of_domain(await self._attempt(problem, context, scope))
        # Count the end of the problem before its answer is graded. The gate uses this count, so the
        # count must not depend on the speed of the grader.
        self._left.conclude(problem.id)
        if self._state.is_over(problem.id):
            # An earlier session finished the problem. This session only repeated it, so nothing is
            # recorded.
            known = self._lines.get(problem.id) or self._state.finished[problem.id]
            self._combiner.learn(known)
            return known
        with self._options.stop.counted(), scope.concluding(len(outcome.rollouts)):
            line = await self._conclude(outcome, record)
        if line.is_complete:
            self._combiner.learn(line)
        if self._options.directory is None and self._options.keep == "lines":
            self._kept.append(outcome)
        return line

    async def _attempt(self, problem: Problem, context: Context, scope: ProblemScope) -> Outcome:
        """Run the pipeline on a problem. If the pipeline raises an error, return an outcome with
        the status "failed". Raise the error only if every other problem would fail in the same way.
        """
        try:
            outcome = await self._plan.pipeline(problem, self._plan.policy, context, scope)
            return outcome if self._plan.abstain is None else self._plan.abstain.applied(outcome)
        except Exception as error:
            if self._plan.retries.is_fatal(error):
                raise
            return Outcome(
                problem, (), None, status="failed", why=f"{type(error).__name__}: {error}"
            )

    def _context(self, log: ProblemLog, record: ProblemRecord) -> Context:
        plan = self._plan
        if isinstance(plan.gate, RoundGate):
            gate: RecordedGate | RecordedRoundGate = RecordedRoundGate(plan.gate, log)
        else:
            gate = RecordedGate(plan.gate, log, self._alarms)

        def bind(
            engine: Engine, role: Role, scope: Caller | None, timeout_seconds: float
        ) -> EngineCalls:
            # `engine` may already be an `EngineCalls` of this problem. Use the plan's engine,
            # because each call would otherwise be recorded twice.
            bare = plan.draft if role == "draft" else plan.target
            return EngineCalls(
                bare,
                role,
                scope,
                timeout_seconds,
                log=log,
                deadlines=self._deadlines[role],
                unscored=self._unscored,
                account=self._options.account,
            )

        seconds = plan.policy.timeout_seconds
        draft = bind(plan.draft, "draft", None, seconds)
        target = bind(plan.target, "target", None, seconds)
        needed = needed_logprobs(plan.policy, plan.gate, plan.draft.spec, plan.target.spec)
        return Context(
            draft,
            target,
            gate,
            answers=plan.answers.of(log.recorded.problem),
            seed=plan.seed,
            listener=record,
            bind=bind,
            logprobs=needed,
            left=self._left,
            planner=RecordedPlanner(self._combiner, log),
            draft_length=self._draft_length,
            writers=self._writers,
            judge=plan.judge,
        )

    async def _conclude(self, outcome: Outcome, record: ProblemRecord) -> FinishedProblem:
        """Grade and record an outcome, and wait until the record is saved. Nothing is recorded
        until all verdicts are known.
        """
        graded: list[Graded] = []
        if self._plan.grade is not None and outcome.problem.answer is not None:
            graded = await anyio.to_thread.run_sync(self._grade, outcome, self._plan.grade)
        record.finished(outcome)
        for verdict in graded:
            self._recorder.record(verdict)
        reached = OutcomeReached(
            outcome.problem.id,
            outcome.status,
            outcome.answer,
            tuple(one.sample for one in outcome.rollouts),
            votes=outcome.votes,
            why=outcome.why,
            usage=outcome.usage,
            doubt=outcome.doubt,
            combination=outcome.combination,
        )
        if outcome.doubt:
            self._recorder.record(Warned("domain", outcome.doubt, outcome.problem.id))
        self._recorder.record(reached)
        await self._recorder.saved()
        escalated, judged = self._escalations.of(reached.problem)
        return FinishedProblem.of(outcome, graded, judged=judged, escalated=escalated)

    def _grade(self, outcome: Outcome, grade: Grade) -> list[Graded]:
        """Grade the answer of every rollout and of the problem. The same answer string is graded
        only once.

        This runs in a worker thread.
        """
        problem = outcome.problem
        known: dict[str | None, tuple[VerdictStatus, str]] = {None: ("wrong", "no answer")}
        brief = FinishedProblem.of(outcome)
        wanted: list[tuple[int | None, str | None]] = [
            (one.sample, one.answer) for one in brief.complete_samples
        ]
        if not brief.is_censored:
            wanted.append((None, outcome.answer))
        graded: list[Graded] = []
        for sample, answer in wanted:
            if answer not in known and answer is not None:
                known[answer] = verdict_by(grade, answer, problem)
            status, rule = known[answer]
            graded.append(Graded(problem.id, status, sample, answer, rule))
        return graded

    def _finished(self, result: ProblemResult[FinishedProblem]) -> None:
        # other errors of a pipeline are part of the outcome, so this error ends the run
        if result.error is not None:
            raise result.error
        if result.value is not None:
            self._unfinished -= 1
            self._keep(result.problem, result.value)
            if not result.value.is_complete:
                self._missing.add(result.value)

    def _keep(self, name: str, line: FinishedProblem) -> None:
        if line.is_complete:
            self._comparing.end(line)
            self._recorder.saved_tokens.pop(name, None)
        # Drop the data of a problem that will not run again in this session. A problem that failed
        # in an earlier session runs again now; a problem that fails now runs again in a later
        # session.
        if line.is_complete or self._taken:
            self._escalations.forget(name)
            self._plan.on_problem_done(name)
        if self._options.keep == "lines":
            self._lines[name] = line

    def _result(self, seconds: float) -> RunResult:
        lines = sorted(
            self._lines.values(),
            key=lambda line: self._positions.get(line.problem, len(self._positions)),
        )
        status, why = self._status()
        is_over = status not in ("interrupted", "stopped")
        return RunResult(
            status,
            tuple(lines),
            replace(self._manifest, problems=len(self._positions)) if is_over else self._manifest,
            seconds=self._state.seconds + (seconds if self._taken else 0.0),
            sessions=self._state.sessions + 1,
            directory=self._options.directory,
            why=why,
            comparison=self._comparing.answer,
            kept=tuple(self._kept),
            unscored=self._escalations.unscored,
            saved_tokens=() if is_over else tuple(self._saved_tokens()),
        )

    def _saved_tokens(self) -> Iterator[int]:
        """Yield the number of recorded tokens of each unfinished problem that has any."""
        not_begun = {name: recorded.tokens for name, recorded in self._state.open.items()}
        for name, count in {**not_begun, **self._recorder.saved_tokens}.items():
            if count and name not in self._lines:
                yield count

    def _status(self) -> tuple[RunStatus, str]:
        """Return the status of the run and, if the run is not finished, the reason."""
        if self._seen == "all" and not self._unfinished:
            missing = self._missing
            problems = len(self._positions)
            if not missing.problems:
                words = self._comparing.tell()
                return ("decided", words) if self._comparing.spared else ("finished", "")
            return "failed" if missing.whole == problems else "incomplete", missing.words(problems)
        if self._limit:
            return "stopped", f"{self._limit} is used up"
        return (
            ("interrupted", "stopped on request")
            if self._options.stop.asked
            else ("stopped", "out of time")
        )


_CLOSINGS: Mapping[RunStatus, Literal["interrupted", "failed"]] = MappingProxyType(
    {"interrupted": "interrupted", "incomplete": "failed", "failed": "failed"}
)
