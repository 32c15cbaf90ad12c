"""The plan of an evaluation as a value, with its models, policy, gate, answers and concurrency."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol, get_args

from atts import graph
from atts.calibration import DomainCheck, DriftEvent
from atts.concurrency import usable_cores
from atts.core import Outcome, Problem, Role
from atts.engine import Engine, EngineSpec
from atts.errors import OptionError
from atts.graph import Limit, ProblemScope
from atts.journal import Json, Manifest, Setting, VerdictStatus, dataset_digest
from atts.pipelines import (
    Answers,
    Context,
    Gate,
    GuaranteedGate,
    Policy,
    RoundGate,
    check_engines,
    solve,
)
from atts.run.calls import OnUnscored, engine_identity
from atts.run.conditions import Abstain, Conditions
from atts.run.recording import RecallTiming
from atts.run.stopping import StopWhen


class Pipeline(Protocol):
    """A function that solves one problem, such as `atts.pipelines.solve`.

    Its calls must depend only on its arguments, on results of earlier calls, and on seeds, never on
    time or chance. Then an interrupted problem can run again from the start: recorded calls return
    at once, and the problem continues at the same point.
    """

    async def __call__(
        self, problem: Problem, policy: Policy, context: Context, scope: ProblemScope, /
    ) -> Outcome:
        """Return the outcome of the problem.

        :raises ATTSError: an error that ends the run; any other error ends only this problem.
        """
        ...


class Judgement(Protocol):
    """A grader's verdict; verdicts of `atts.evaluators` fit."""

    @property
    def status(self) -> Literal["equal", "different", "unscored"]:
        """Return whether the answer equals the reference."""
        ...

    @property
    def rule(self) -> str:
        """Return the rule that decided."""
        ...


Grade = Callable[[str, Problem], Judgement]
"""A function that compares an answer with a problem's reference; it runs in a worker thread, so it
may take long.
"""


def _nothing_kept(problem: str) -> None:
    """Do nothing, for gates that store nothing for a problem."""


_WORDS: Mapping[str, VerdictStatus] = {
    "equal": "correct",
    "different": "wrong",
    "unscored": "unscored",
}


def verdict_by(grade: Grade, answer: str, problem: Problem) -> tuple[VerdictStatus, str]:
    """Return a grader's verdict for the journal; if the grader fails, the verdict is not "wrong"."""
    try:
        judgement = grade(answer, problem)
    except Exception as error:  # noqa: BLE001 - whatever it is, it says nothing about the answer
        return "unscored", f"the grader failed: {type(error).__name__}: {error}"
    return _WORDS[judgement.status], judgement.rule


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The plan of one evaluation: models, policy, gate, answers and concurrency.

    The gate learns from the run, so another run needs a new gate. `configuration` is written into
    the manifest with its origins, next to the plan's own settings.
    """

    draft: Engine
    target: Engine
    policy: Policy
    gate: Gate | RoundGate
    answers: Answers
    grade: Grade | None = None
    # The roles whose models are used. If there is only one, its engine is passed for both roles,
    # and the other engine is neither opened nor named in the manifest.
    roles: tuple[Role, ...] = ("draft", "target")
    seed: int = 0
    concurrency: int = 64  # rollouts in flight over all problems
    # keyed by engine name: "draft", "target"
    limits: Mapping[str, Limit] = field(default_factory=dict[str, Limit])
    retries: graph.RetryPolicy = graph.RetryPolicy()
    pipeline: Pipeline = solve
    configuration: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    # settings as the user gave them, shown to people only
    settings: Mapping[str, Setting] = field(default_factory=dict[str, Setting])
    recall: RecallTiming = "instant"
    # alarms so far, such as a calibrator's events
    alarms: Callable[[], Sequence[DriftEvent]] = tuple[DriftEvent, ...]
    # called with each finished problem, for example a calibrator's `forget`
    on_problem_done: Callable[[str], object] = _nothing_kept
    # conditions that the gate's stored scores record; None if it has no stored scores
    stored_under: Mapping[str, object] | None = None
    # the function that scores chunks under score.kind learned, and the conditions of the run that
    # it was fitted on
    judge: Callable[[Sequence[float]], float] | None = None
    judge_under: Mapping[str, object] | None = None
    conditions: Conditions = "match"  # what to do if conditions differ
    on_unscored: OnUnscored = "stop"  # what to do if the target stops giving usable scores
    warnings: Sequence[str] = ()  # warnings for a reader of the run
    abstain: Abstain | None = None  # the agreement threshold below which answers are withheld
    # the comparison with an earlier run, which ends this run once it is decided
    stop_when: StopWhen | None = None
    # a function that returns the policy for a context length; None: `policy` does not change
    policy_for_context: Callable[[int], Policy] | None = None
    # the check that reports problems unlike the questions of the stored scores
    domain: DomainCheck | None = None
    # time limit of this session, after which open problems conclude from their rollouts so far
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
                "concurrency", f"{self.concurrency} rollouts in flight are too few; give at least 1"
            )

    def resolved(self) -> RunSpec:
        """Return the spec for the open engines.

        Default lengths are limited by the engines' contexts.
        """
        if self.policy_for_context is None:
            return self
        context = min(engine.spec.context_length for engine in (self.draft, self.target))
        return replace(self, policy=self.policy_for_context(context))

    @property
    def specs(self) -> dict[Role, EngineSpec]:
        """Return the spec of each role's engine; the engines must be open."""
        return {"draft": self.draft.spec, "target": self.target.spec}

    @property
    def models(self) -> dict[Role, str]:
        """Return the model of each role that is used; the engines must be open."""
        return {role: self.specs[role].model for role in self.roles}

    def flag_out_of_domain(self, outcome: Outcome) -> Outcome:
        """Return the outcome with a warning if the scores of its chunks are unlike the stored ones."""
        if self.domain is None:
            return outcome
        turns = (turn for rollout in outcome.rollouts for turn in rollout.turns)
        return replace(
            outcome,
            doubt=self.domain.warning([turn.score for turn in turns if turn.score is not None]),
        )

    def manifest(self, problems: Iterable[Problem], dataset: str | None) -> Manifest:
        """Return the settings that must not change at a resume; the engines must be open.

        `dataset` is the digest of problems that stream in; a sequence's is computed. The problems are
        counted if they have a length.

        :raises UnsupportedByEngine: an engine cannot do what the policy and the gate will ask.
        :raises FingerprintError: the plan abstains by problems that were labelled under other
            settings.
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
    """Return a text with the observations of a probe of an engine."""
    return {f"{role}.{name}": Setting(seen, "probe") for name, seen in spec.findings}


_ENDLESS = 1 << 40  # context length that never cuts a rollout
_FLOPS_PER_CORE = 2e10  # assumed operations per second of a core, to distinguish hours from minutes


def engine_warnings(run: RunSpec, problems: int) -> Iterator[tuple[str, str]]:
    """Yield the code and the text of each warning about the open engines."""
    yield from _short_contexts(run)
    yield from _slow_models(run, problems)


def _short_contexts(run: RunSpec) -> Iterator[tuple[str, str]]:
    """Yield warnings about models whose context is shorter than a rollout may be, or would be by
    default.
    """
    specs = list(dict.fromkeys((run.draft.spec, run.target.spec)))
    most = run.policy.bounds().max_tokens
    usual = most
    if run.policy_for_context is not None:
        usual = run.policy_for_context(_ENDLESS).bounds().max_tokens
    if most < usual:
        shortest = min(specs, key=lambda spec: spec.context_length)
        yield "context", f"{_holds(shortest)}: rollouts get {most:,} tokens instead of {usual:,}"
    for spec in specs:
        if spec.context_length <= most:
            yield "context", f"{_holds(spec)}: rollouts end there, not at max_tokens {most:,}"


def _holds(spec: EngineSpec) -> str:
    return f"the context of {spec.model} has {spec.context_length:,} tokens, including the problem"


def _slow_models(run: RunSpec, problems: int) -> Iterator[tuple[str, str]]:
    """Yield warnings about models on this machine's processor that might take hours."""
    tokens = run.policy.bounds().max_tokens * run.policy.samples * problems
    for engine in dict.fromkeys((run.draft, run.target)):
        spec = engine.spec
        kernel = str(getattr(engine, "kernel", "cuda"))
        hours = spec.flops_per_token * tokens / (_FLOPS_PER_CORE * usable_cores()) / 3600
        if "cuda" in kernel.lower() or hours <= 1:
            continue
        slow = (
            f"{spec.model} computes on this machine's processor: {problems} problems x "
            f"{run.policy.samples} rollouts of full length would take about {hours:,.0f} hours"
        )
        yield "speed", f"{slow}; reduce them with --limit and --samples, or use a server with a GPU"
