"""The class `Setup`, which contains the settings of a run and makes the run's plan from them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import anyio.to_thread

from atts.api.engines import (
    Speculate,
    beside_reward_model,
    budget_of,
    budget_warnings,
    build_engines,
    score_warnings,
    unknown_kind_advice,
)
from atts.api.keys import Key, flat, keys_of
from atts.api.pairs import PAIR, run_tokens
from atts.calibration import (
    HOLD,
    AdvantageJudge,
    Calibrator,
    DomainCheck,
    StoredScores,
    Tuning,
    certify_abstention,
    read_scores,
    read_state,
)
from atts.core import AnswerKind, Problem, Role
from atts.engine import GIVE_UP_AFTER, Engine
from atts.errors import CalibrationInputError, DatasetError, OptionError, counted
from atts.graph import Limit
from atts.journal import Json, Manifest, Setting, open_run
from atts.methods import GateInputs, asked_roles, preset, reads_chunks
from atts.pipelines import (
    JUDGE_FEATURES,
    AgreementGate,
    Answers,
    Budget,
    ConformalGate,
    FixedGate,
    Gate,
    Policy,
    RoundGate,
    let_go,
)
from atts.run import (
    COARSE_CHUNKS,
    SHORTER_CHUNKS,
    Abstain,
    Conditions,
    Grade,
    OnUnscored,
    RunSpec,
    conditions_of,
)

if TYPE_CHECKING:
    from atts.evaluators import Verdict


CalibrationMode = Literal["split", "marginal", "aci", "question", "question-turn"]

LENGTHS = (
    "max_tokens",
    "turns",
    "chunking.draft_tokens",
    "chunking.target_tokens",
    "chunking.stop",
)
"""Keys whose defaults are derived from the models. The default of `turns` is derived from
`max_tokens`.
"""
_RISK_FORM = (
    "RISK@PROBABILITY; 0.1@0.9 means that, with probability 0.9, at most 10 % of answers are wrong"
)


def read_abstain(abstain: str | None, labelled: str | Path | None) -> Abstain | None:
    """Return the agreement threshold that the labelled run certifies, or None if abstaining is not
    requested.

    :raises OptionError: only one of `abstain` and `labelled` is given, or `abstain` is not
        RISK@PROBABILITY. The error is also raised if the labelled run is unfinished, has no graded
        problem or itself used abstain. It is also raised if the run has too few problems to certify
        a threshold.

    :raises JournalError: `labelled` contains no run.
    """
    if abstain is None and labelled is None:
        return None
    if abstain is None or labelled is None:
        raise OptionError(
            "abstain",
            "give both abstain (the allowed share of wrong answers) and labelled (a graded run), "
            "or neither",
        )
    risk, kept = _parsed_risk(abstain)
    run = open_run(Path(labelled))
    state = run.state()
    if run.setting("abstain") is not None:
        raise OptionError(
            "labelled",
            f"the run in {labelled} itself used abstain; start the labelled run without it",
        )
    undone = (run.manifest.problems or 0) - state.done
    if undone > 0:
        raise OptionError(
            "labelled",
            f"{labelled} has {counted(undone, 'unfinished problem')}, and finished problems alone "
            "are a biased sample; finish the run first",
        )
    graded = state.graded.values()
    if not graded:
        raise OptionError(
            "labelled", f"no problem of {labelled} was graded; problems need reference answers"
        )
    confidence = [one.agreement if one.answer is not None else math.nan for one in graded]
    certified = certify_abstention(confidence, [not one.is_correct for one in graded], risk, kept)
    if certified.threshold is None:
        raise OptionError("abstain", certified.guarantee)
    return Abstain(certified, run.manifest)


def _parsed_risk(text: str) -> tuple[float, float]:
    risk, mark, kept = text.partition("@")
    try:
        risk_level = float(risk)
        probability = float(kept) if mark else 0.9
    except ValueError:
        # A text that is not a number becomes NaN. The range check below refuses NaN too.
        risk_level = probability = math.nan
    if not (0 < risk_level < 1 and 0 < probability < 1):
        raise OptionError("abstain", f"{text!r} is not {_RISK_FORM}")
    return risk_level, probability


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of a run; the method `plan` makes the plan of the run from them."""

    # For each field below, the text in `Annotated` is the help text of its configuration key.
    draft: Annotated[
        str | Engine,
        "draft model: embedded, scripted, hf:MODEL, vllm:URL, sglang:URL, llamacpp:URL, server:URL",
    ] = "embedded"
    target: Annotated[str | Engine, "target model, in the same formats as draft"] = "embedded"
    method: Annotated[
        str,
        "method: atts, a baseline such as target-only, or the method of another paper",
    ] = "atts"
    rate: Annotated[float, "share of chunks to escalate to the target"] = 0.2
    # The scope "aci" controls only the rate of the whole run. So hard problems may get more
    # escalations than easy ones.
    rate_scope: Annotated[
        CalibrationMode,
        "scope of rate control: each question (question), each turn of a question "
        "(question-turn), or the whole run (aci corrects deviations during the run; marginal "
        "and split do not)",
    ] = "aci"
    by_length: Annotated[
        bool | None,
        "whether each score is compared only with the scores of chunks of similar length; "
        "none: true for rate scope marginal, false otherwise",
    ] = None
    cap: Annotated[
        float | None,
        "hard cap on escalations: at most ceil(cap * n) of the first n chunks, for every n; none: "
        "no cap",
    ] = None
    policy: Policy = Policy()
    # the gate that decides about chunks; None: the gate of `method`
    gate: Gate | RoundGate | None = None
    # scores computed before this run, from which the gate is calibrated
    stored: Sequence[float] | StoredScores = ()
    conditions: Annotated[
        Conditions,
        "what to do if the stored scores come from other models or settings than this run: "
        "match refuses them, ignore uses them with a warning",
    ] = "match"
    on_unscored: Annotated[
        OnUnscored,
        "what to do if many chunks in a row have no usable score: stop (end the run and keep "
        "its work) or escalate (the target rewrites such chunks)",
    ] = "stop"
    give_up_after: Annotated[
        float,
        "seconds to wait for a lost server; after that the run ends, and the same command resumes "
        "it",
    ] = GIVE_UP_AFTER
    warmup: Annotated[
        int,
        "warm-up: how many of the run's first scores calibrate the gate, instead of stored "
        "scores; 0: no warm-up",
    ] = 0
    grader: Annotated[
        str | None,
        "function that grades answers, as package.module:function; none: atts grades by the kind "
        "of answer",
    ] = None
    abstain: Annotated[
        str | None,
        "give no answer to problems with too little agreement; 0.1@0.9: with probability 0.9, at "
        "most 10 % of the given answers are wrong",
    ] = None
    labelled: Annotated[
        str | None,
        "graded run with the same settings; abstain takes its agreement threshold from that run",
    ] = None
    accept_when_agreeing: Annotated[
        float | None,
        "accept a chunk without a score if this share of the finished rollouts agrees on an "
        "answer; to keep the rate, other chunks are escalated instead",
    ] = None
    # Speculation makes the target faster, but does not change the texts that the target writes.
    speculate: Annotated[
        Speculate,
        "source of the tokens that speculation proposes to a local target: draft (the draft "
        "model), auto (the draft model if compatible), suffix (earlier texts), off (none). "
        "With pearl, ssd or mirror, the draft model works during the target's steps",
    ] = "auto"
    seed: Annotated[int, "random seed"] = 0
    concurrency: Annotated[
        int, "largest number of rollouts in flight at the same time, over all problems"
    ] = 64
    limits: Mapping[str, Limit] = field(default_factory=dict[str, Limit])
    # for each key, the source of its value, such as a file or a flag; `configure` fills this
    # mapping
    provenance: Mapping[str, Setting] = field(default_factory=dict[str, Setting], repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise OptionError(
                "rate",
                f"{self.rate} is outside [0, 1]; give the share of chunks to escalate",
            )
        if self.cap is not None and not 0 <= self.cap <= 1:
            raise OptionError(
                "cap", f"{self.cap} is outside [0, 1]; the cap is a share of the chunks"
            )
        if not 0 <= self.give_up_after < math.inf:
            problem = f"{self.give_up_after} is not a valid number of seconds; give 0 or more"
            raise OptionError("give_up_after", problem)

    @property
    def run_policy(self) -> Policy:
        """Return the policy of the run, with the changes of its method and the default token limits
        of its models.
        """
        return self._policy.filled(self.budget)

    @property
    def roles(self) -> tuple[Role, ...]:
        """Return the roles whose models the method uses, draft first.

        Only these models are opened, and only they determine default token limits.
        """
        return asked_roles(self._policy, is_judged=self._is_judged)

    @property
    def asked(self) -> tuple[str | Engine, ...]:
        """Return the addresses or engines of the models that the method uses."""
        return tuple(self.draft if role == "draft" else self.target for role in self.roles)

    @property
    def budget(self) -> Budget:
        """Return the default token limits of the models that the method uses."""
        reads = reads_chunks(self._policy, is_judged=self._is_judged)
        return budget_of(*self.asked, reads_chunks=reads)

    @property
    def _policy(self) -> Policy:
        """Return the policy with the changes of the method, but without default token limits."""
        return preset(self.method).policy(self.policy)

    @property
    def _is_judged(self) -> bool:
        """Return whether the run has a gate that may escalate chunks."""
        # A gate may escalate chunks, unless it is the fixed gate that accepts every chunk.
        if self.gate is not None:
            return self.gate != FixedGate("accept")
        return preset(self.method).is_judged

    def engines(self) -> tuple[Engine, Engine]:
        """Build the engines of draft and target without opening them; the draft may also propose
        tokens to a local target.

        :raises OptionError: if an address names no engine, or if these engines cannot speculate as
            requested.
        """
        draft, target = build_engines(
            self.draft,
            self.target,
            self.speculation,
            self.roles,
            self.in_flight,
            give_up_after=self.give_up_after,
        )
        return draft, beside_reward_model(target, self.run_policy.score)

    @property
    def in_flight(self) -> tuple[int, int]:
        """Return the number of concurrent rollouts, and the largest number of tokens that a rollout
        and its problem may have together.
        """
        return self.concurrency, run_tokens(self.run_policy.bounds().max_tokens)

    @property
    def speculation(self) -> Speculate:
        """Return the setting `speculate`, with "auto" replaced by "off" for method exact, whose
        target only scores.
        """
        return "off" if self.speculate == "auto" and self.run_policy.exact else self.speculate

    @property
    def ranks_by_length(self) -> bool:
        """Return whether scores are ranked only among chunks of similar length.

        If so, stored scores must include the lengths of their chunks.
        """
        if self.by_length is not None:
            return self.by_length
        lengths = self.stored.lengths if isinstance(self.stored, StoredScores) else ()
        return self.rate_scope == "marginal" and bool(lengths or not len(self.stored))

    def informed(self) -> Setup:
        """Return the setup with the scores that are shipped with its models. If the setup already
        has a gate, stored scores or a warm-up, or if no such scores fit it, return it unchanged.

        Single questions need these scores. A run over a dataset soon has enough scores of its own.
        """
        has_start = self.gate is not None or len(self.stored) > 0 or self.warmup > 0
        shipped = self._shipped
        if has_start or shipped is None:
            return self
        return replace(self, stored=shipped)

    @property
    def _shipped(self) -> StoredScores | None:
        """Return the scores that are shipped with the embedded pair, or None if this setup has
        other models or other conditions.
        """
        if (self.draft, self.target) != ("embedded", "embedded"):
            return None
        scores = embedded_scores()
        manifest = Manifest(configuration={"policy": Setting(self.run_policy.recorded())})
        conditions = conditions_of(manifest)
        if any(scores.fingerprint.get(name) != value for name, value in conditions.items()):
            return None
        return scores

    def policy_within(self, context: int) -> Policy:
        """Return the policy for models with this context length. Default token limits and those of
        a pair are reduced to it; limits that the user set are not.
        """
        policy = self._policy
        budget = self.budget
        setting = self.provenance.get("max_tokens")
        is_of_pair = (
            setting is not None
            and setting.origin.startswith(PAIR)
            and setting.value == policy.max_tokens
        )
        if is_of_pair and policy.max_tokens is not None:
            # The user did not choose this limit; the pair did. So reduce it to the context length,
            # like the default limit of a model.
            needed = replace(budget, max_tokens=policy.max_tokens)
            policy = replace(policy, max_tokens=needed.within(context).max_tokens)
        return policy.filled(budget.within(context))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the warnings that are printed before a run, about small token limits and
        unsuitable scores.
        """
        return (
            *budget_warnings(self._policy, self.budget),
            *self._coarse_chunks(),
            *score_warnings(self._policy),
        )

    def _coarse_chunks(self) -> Iterator[str]:
        """Yield a warning if the token limit allows so few judged chunks per rollout that an
        escalation rewrites most of a solution.
        """
        policy = self.run_policy
        tokens, _, chunk, _, stop = policy.bounds()
        is_judged = self._is_judged and not policy.exact
        if not is_judged or not reads_chunks(policy, is_judged=True) or stop:
            return
        if tokens <= COARSE_CHUNKS * chunk:
            chunks = counted(math.ceil(tokens / chunk), "chunk")
            yield (
                f"--max-tokens {tokens:,} allows at most {chunks} of {chunk:,} tokens per rollout, "
                f"so an escalation rewrites most of a solution; {SHORTER_CHUNKS}"
            )

    @property
    def unknown_kind_advice(self) -> str:
        """Return advice on the default token limits of models of unknown kind, or ""."""
        return unknown_kind_advice(self._policy, self.budget)

    @property
    def settings(self) -> dict[str, Setting]:
        """Return the value and the origin of every key; the origin of a value that a program set is
        "code".

        Keys for problems and directories are included only if `configure` made the setup.
        """
        values = _values(self)
        given = self.provenance
        if not given:
            usual = _values(Setup())
            given = {name: Setting(usual.get(name)) for name in values}
        settings = dict[str, Setting]()
        for name, setting in given.items():
            value = values.get(name, setting.value)
            settings[name] = setting if setting.value == value else Setting(value, "code")
        return settings

    @classmethod
    def recorded(cls, manifest: Manifest) -> Setup:
        """Return a setup with those settings of a recorded run that affect the decisions of its
        gate.
        """
        settings: dict[str, Any] = {
            name: setting.value for name, setting in manifest.configuration.items()
        }
        samples = (settings.get("policy") or {}).get("samples", 1)
        given: dict[str, Any] = {
            name: settings[name] for name in ("method", "rate", *GATE_SETTINGS) if name in settings
        }
        given["by_length"] = bool(settings.get("by_length"))
        if "concurrency" in manifest.settings:
            given["concurrency"] = manifest.settings["concurrency"].value
        stored = StoredScores.of(
            settings.get("stored") or (), lengths=settings.get("stored_lengths") or ()
        )
        if questions := settings.get("stored_questions"):
            stored = replace(
                stored, questions=tuple(questions), turns=tuple(settings["stored_turns"])
            )
        return cls(policy=Policy(samples=samples), stored=stored, seed=manifest.seed, **given)

    def plan(self, draft: Engine, target: Engine, kind: AnswerKind = "math") -> RunSpec:
        """Make the plan of a run for problems with one kind of answer.

        :raises OptionError: the method or rate scope is unknown, or the run in `labelled` does not
            certify `abstain`.
        """
        gate, calibrator = self.decider()
        stored = calibrator.stored
        judge = self._judge() if self._is_judged else None
        return RunSpec(
            draft,
            target,
            self.run_policy,
            gate,
            answers=answers_for(kind),
            grade=grade if self.grader is None else read_grader(self.grader),
            roles=self.roles,
            seed=self.seed,
            concurrency=self.concurrency,
            limits=self.limits,
            configuration=self._configuration(calibrator),
            settings=self.settings,
            alarms=partial(getattr, calibrator, "events"),
            on_problem_done=partial(let_go, gate),
            # Without a gate, stored scores are not used. So the conditions under which they were
            # made need no check.
            stored_under=stored.fingerprint if len(stored) and self._is_judged else None,
            judge=None if judge is None else judge.score,
            judge_under=None if judge is None else judge.fingerprint,
            conditions=self.conditions,
            on_unscored=self.on_unscored,
            warnings=self.warnings,
            policy_for_context=self.policy_within,
            domain=DomainCheck.of(stored if len(stored) else self._shipped or stored),
            abstain=read_abstain(self.abstain, self.labelled),
        )

    def _judge(self) -> AdvantageJudge | None:
        """Return the learned judge that the score rule needs, or None if the rule's kind is not
        "learned".

        :raises OptionError: the kind is "learned", but no file of a judge is given.
        :raises CalibrationInputError: the file contains no judge, or a judge with other features.
        """
        rule = self.run_policy.score
        if rule.kind != "learned":
            return None
        if not rule.judge:
            raise OptionError(
                "score.judge",
                "score.kind=learned needs a judge file, which `atts calibration judge` writes",
            )
        judge = AdvantageJudge.from_state(read_state(Path(rule.judge)))
        if judge.names != JUDGE_FEATURES:
            raise CalibrationInputError("the judge's features", judge.names, str(JUDGE_FEATURES))
        return judge

    def decider(self) -> tuple[Gate | RoundGate, Calibrator]:
        """Make a new gate and its calibrator.

        :raises OptionError: the method or rate scope is unknown, the method lacks a setting that it
            needs, or its gate cannot enforce the setting `cap`.
        :raises CalibrationInputError: the stored scores are not valid scores.
        """
        chosen = preset(self.method)
        tuning = Tuning.for_rollouts(self.policy.samples)
        calibrator = Calibrator(
            self.rate,
            self.rate_scope,
            seed=self.seed,
            stored=self.stored,
            hold=max(HOLD, self.concurrency),
            tuning=tuning,
            by_length=self.ranks_by_length,
            cap=self.cap,
        )
        gate = self.gate
        if gate is None:
            given = {name: getattr(self, name) for name in GateInputs.settings()}
            gate = chosen.gate(GateInputs(calibrator, **given))
        if self.cap is not None and not isinstance(gate, ConformalGate):
            raise OptionError(
                "cap",
                f"method {self.method!r} cannot keep a hard cap on escalations; use method atts "
                "without a warm-up",
            )
        return self._sparing(gate), calibrator

    def _sparing(self, gate: Gate | RoundGate) -> Gate | RoundGate:
        if self.accept_when_agreeing is None:
            return gate
        if not 0 < self.accept_when_agreeing <= 1:
            raise OptionError(
                "accept_when_agreeing",
                f"{self.accept_when_agreeing} is not a valid share of rollouts; give a number "
                "above 0 and at most 1",
            )
        if not isinstance(gate, ConformalGate):
            raise OptionError(
                "accept_when_agreeing",
                f"method {self.method!r} does not control the rate of escalations; use method atts",
            )
        return AgreementGate(gate, self.accept_when_agreeing)

    def _configuration(self, calibrator: Calibrator) -> dict[str, Setting]:
        """Return the settings that determine the gate's decisions; a resumed run must have the same
        settings.
        """
        decisive: dict[str, Json] = {
            "method": self.method,
            "rate": self.rate,
            "stored": list(calibrator.stored.scores),
        }
        # A setting is recorded only if it has an effect: `aci_step` is used only by the scope
        # "aci".
        if self.rate_scope == "aci":
            decisive["aci_step"] = calibrator.tuning.aci_step
        judge = self._judge() if self._is_judged else None
        if judge is not None:
            decisive["judge"] = [judge.mean_gain, *judge.weights]
        for name in GATE_SETTINGS:
            value = getattr(self, name)
            if name == "rate_scope" or value != default_of(name):
                decisive[name] = value
        if self.grader is not None:
            decisive["grader"] = self.grader
        if preset(self.method).departures and any(calibrator.stored.questions):
            decisive["stored_questions"] = list(calibrator.stored.questions)
            decisive["stored_turns"] = list(calibrator.stored.turns)
        if self.ranks_by_length:
            decisive["by_length"] = True
            decisive["stored_lengths"] = list(calibrator.stored.lengths)
        return {name: Setting(value, "setup") for name, value in decisive.items()}


GATE_SETTINGS = ("rate_scope", "cap", "accept_when_agreeing", *GateInputs.settings())
"""The configuration keys that gates use.

A run records these keys, a resumed run must have the same values, and a replay uses the recorded
values. The method coin uses none of these keys.
"""


def default_of(name: str) -> Any:
    """Return the default value of a field of `Setup`."""
    return next(one.default for one in fields(Setup) if one.name == name)


@cache
def embedded_scores() -> StoredScores:
    """Return the scores that are shipped with the embedded pair."""
    from atts.models import scores_path

    return read_scores(scores_path())


@cache
def setup_keys() -> tuple[Key, ...]:
    """Return the configuration keys for the fields of `Setup`, except the fields `policy` and
    `limits`.
    """
    return tuple(key for key in keys_of(Setup, Setup()) if "." not in key.name)


def _values(setup: Setup) -> dict[str, Json]:
    """Return the values of a setup's keys; the value for an engine object is the name of its class."""
    keys = {key.name: getattr(setup, key.name) for key in setup_keys()}
    keys |= {
        role: type(keys[role]).__name__
        for role in get_args(Role)
        if not isinstance(keys[role], str)
    }
    policy = flat(setup.run_policy.recorded())
    limits = {role: asdict(limit) for role, limit in setup.limits.items()}
    return {
        **keys,
        **{name: value for name, value in policy if value is not None},
        **dict(flat(limits, "limits.")),
    }


def answers_for(kind: AnswerKind) -> Answers:
    """Return the functions that extract and group answers of this kind.

    Only a marked answer, such as an answer in a box, ends a rollout. An answer without a mark, in
    the last sentence of a text, counts only after the model has ended the text.
    """
    from atts.evaluators import extract, group, unmarked

    if kind == "code":
        return _program_answers()
    return Answers(
        extract=partial(extract, kind=kind, fallback="none"),
        group=partial(group, kind=kind),
        unmarked=unmarked,
        extract_finished=partial(extract, kind=kind),
        prepare=partial(_ask_ahead, kind=kind),
    )


def _program_answers() -> Answers:
    """Return the functions that extract and group programs.

    A program does not end its rollout, because the model may write a better program later.

    :raises UsageError: if this system cannot confine programs.
    """
    from atts.evaluators import ProgramVotes, check_confinement, find_program

    check_confinement()

    def nothing(text: str) -> str | None:
        return None

    def of(problem: Problem) -> Answers:
        votes = ProgramVotes(problem.answer)

        async def prepare(programs: Sequence[str | None]) -> None:
            await anyio.to_thread.run_sync(votes.prepare, programs)

        return Answers(nothing, votes.group, len, find_program, prepare)

    return Answers(nothing, ProgramVotes(None).group, len, find_program, for_problem=of)


async def _ask_ahead(answers: Sequence[str | None], *, kind: AnswerKind) -> None:
    """Group answers in a worker thread if grouping may take seconds, because it needs sympy. The
    results are cached for later calls.
    """
    from atts.evaluators import group, takes_long

    if len(set(answers)) < 2:
        # Fewer than two different answers cannot be compared, so nothing needs to be prepared.
        return
    if takes_long(answers, kind):
        await anyio.to_thread.run_sync(partial(group, answers, kind))


def grade(answer: str, problem: Problem) -> Verdict:
    """Return the verdict on an answer to a problem that has a reference."""
    from atts.evaluators import judge

    return judge(problem, answer)


def read_grader(path: str) -> Grade:
    """Import the user's grader from `package.module:function`; the module may be in the working
    directory.

    The function takes an answer and its `Problem`. It returns True, False, None if it cannot
    decide, or a verdict with `status` and `rule`.

    :raises OptionError: the path does not have this form, or names nothing that can be called.
    """
    module, mark, name = path.partition(":")
    if not (module and mark and name):
        raise OptionError("grader", f"{path!r} is not package.module:function")
    folder = os.getcwd()
    sys.path.append(folder)
    try:
        function = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise OptionError("grader", f"{path!r} cannot be imported: {error}") from error
    finally:
        sys.path.remove(folder)
    if not callable(function):
        raise OptionError("grader", f"{path!r} is a {type(function).__name__}, not a function")
    return partial(_graded_by, function, name)


def _graded_by(
    function: Callable[[str, Problem], Any], name: str, answer: str, problem: Problem
) -> Any:
    """Call a user's grader, and convert a boolean to a verdict whose rule is the grader's name.

    :raises TypeError: if the grader returned neither a boolean, None nor a verdict.
    """
    from atts.evaluators import Verdict

    said = function(answer, problem)
    if hasattr(said, "status") and hasattr(said, "rule"):
        return said
    if said is not None and not isinstance(said, bool):
        raise TypeError(f"{name} returned {said!r} instead of True, False, None or a verdict")
    return Verdict("unscored" if said is None else "equal" if said else "different", name)


def load_problems(
    dataset: str | Path | Sequence[Problem], limit: int | None = None
) -> tuple[Problem, ...]:
    """Load the problems of a benchmark or a file; if problems are given, return them as a tuple.

    :raises DatasetError: the file cannot be read, or has no problems.
    """
    if limit is not None and limit < 1:
        raise OptionError("limit", f"{limit} leaves no problem")
    if isinstance(dataset, str | Path):
        from atts.evaluators import load_dataset

        problems = load_dataset(dataset).problems
    else:
        problems = tuple(dataset)
    if not problems:
        raise DatasetError(str(dataset)[:60], "the dataset has no problem")
    return problems[:limit]
