"""The ready-made methods, each a preset of a policy and a gate, and functions that build and
certify gates from calibration data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from atts.calibration import (
    DEFAULTS,
    Calibrator,
    Candidate,
    Certificate,
    Mode,
    StoredScores,
    Tuning,
    certify,
    certify_net,
    lost_answers,
    net_losses,
)
from atts.core import Outcome, Role
from atts.errors import CalibrationInputError, OptionError, counted
from atts.pipelines import (
    CertifiedGate,
    CoinGate,
    ConfidenceStop,
    ConformalGate,
    CueGate,
    FixedGate,
    Gate,
    Meanwhile,
    Policy,
    RoundGate,
    ScoreRule,
    StaticRankGate,
    ThresholdGate,
    TopGate,
    TrialGate,
    WarmingGate,
    WarmScore,
)


@dataclass(frozen=True, slots=True)
class GateInputs:
    """The data from which a method builds its gate: the calibrator and the gate settings.

    The calibrator has the rate, the seed and the stored scores. Each other field is also a
    configuration key: `Setup` has a field with the same name, default and help text. A run records
    the settings that differ from their defaults. A resumed run compares its settings with the
    recorded ones.
    """

    calibrator: Calibrator
    # The conformal gate first collects this many scores, and uses them instead of stored scores.
    warmup: int = 0

    @classmethod
    def settings(cls) -> tuple[str, ...]:
        """Return the names of the gate settings, which are the fields other than `calibrator`."""
        return tuple(one.name for one in fields(cls) if one.name != "calibrator")

    @property
    def rate(self) -> float:
        """Return the nominal rate of the calibrator."""
        return float(self.calibrator.rate)


@dataclass(frozen=True, slots=True)
class Preset:
    """A named method: the policy settings that it changes, and its gate."""

    name: str
    what: str
    changes: dict[str, Any]
    gate: Callable[[GateInputs], Gate | RoundGate]
    # False if no gate decides about chunks, so that every chunk is kept
    is_judged: bool = True
    # False if the method does not use the nominal rate to decide how many chunks escalate
    has_rate: bool = True
    # texts that say how the method differs from its published implementation
    departures: tuple[str, ...] = ()

    def policy(self, base: Policy) -> Policy:
        """Return a copy of the base policy with this method's changes."""
        return replace(base, **self.changes)

    def roles(self, policy: Policy) -> tuple[Role, ...]:
        """Return the roles whose models this method uses under a policy, draft first."""
        return asked_roles(policy, is_judged=self.is_judged)

    def reads_chunks(self, policy: Policy) -> bool:
        """Return True if each chunk of a rollout must be read before the next one is written.

        The chunk is read by a gate, a stop rule or the target.
        """
        return reads_chunks(policy, is_judged=self.is_judged)


def asked_roles(policy: Policy, *, is_judged: bool) -> tuple[Role, ...]:
    """Return the roles whose models a policy uses, draft first.

    For example, the target's model is used if it judges the draft's chunks or combines the answers.

    >>> asked_roles(Policy(), is_judged=False), asked_roles(Policy(drafter="target"), is_judged=True)
    (('draft',), ('target',))
    """
    if policy.exact:
        return ("draft", "target")
    # The target writes all chunks, and does not judge its own chunks.
    if policy.drafter == "target":
        return ("target",)
    is_target_asked = is_judged or policy.combine != "vote"
    return ("draft", "target") if is_target_asked else ("draft",)


def reads_chunks(policy: Policy, *, is_judged: bool) -> bool:
    """Return True if each chunk of a rollout must be read before the next one is written.

    The chunk is read by a gate, a stop rule or the target. If nothing reads the chunks, one request
    can write the whole rollout.
    """
    if policy.exact or policy.confidence_stop is not None:
        return True
    return is_judged and policy.drafter == "draft" and policy.escalates != "problem"


def preset(name: str) -> Preset:
    """Return the preset with this name.

    :raises OptionError: no preset has this name.
    """
    for row in PRESETS:
        if row.name == name:
            return row
    raise OptionError("method", f"unknown method {name!r}", [row.name for row in PRESETS], name)


def _conformal(inputs: GateInputs) -> Gate:
    known = inputs.calibrator
    if inputs.warmup:
        return warming_gate(inputs.warmup, inputs.rate, known.mode, known.seed, tuning=known.tuning)
    return ConformalGate(known)


def _marginal(inputs: GateInputs) -> Gate:
    first_turns = _first_turns(inputs)
    return StaticRankGate.of([score for _, score in first_turns], inputs.rate)


def _conditional(inputs: GateInputs) -> Gate:
    first_turns = _first_turns(inputs)
    questions = [question for question, _ in first_turns]
    return StaticRankGate.by_question([score for _, score in first_turns], questions, inputs.rate)


def _first_turns(inputs: GateInputs) -> list[tuple[str, float]]:
    """Return the stored scores of first turns, as pairs (question, score). The published rule does
    not use scores of later turns.
    """
    stored = inputs.calibrator.stored
    rows = zip(stored.questions, stored.turns, stored.scores, strict=True)
    return [(question, score) for question, turn, score in rows if turn == 0]


# The published code of the paper scores a chunk before it looks for an answer in the chunk. After
# an escalation, the target continues the text. Every rollout runs to its end, even if its text
# repeats itself.
_AS_PUBLISHED: dict[str, Any] = {
    "takeover": "continue",
    "score": ScoreRule("mean"),
    "answers": "verify",
    "first_wave": 0,
    "early_stop": "none",
    "repeats": 1_000_000,
}

PAPER_DEPARTURES = (
    "atts joins chunks token by token under one prompt; the published code puts a blank line "
    "between chunks, and sends the system prompt only on the first turn",
    "atts also scores the first token of a chunk; the published code leaves it out",
    "in atts, only a complete `\\boxed{}` with content ends a rollout; the published code also "
    "stops at an empty or incomplete box",
    "atts requests no more text after a model has ended its text",
    "atts escalates a chunk whose score is not finite; the published code accepts a chunk whose "
    "score request failed",
    "in atts, all problems share the engines; the published code runs one question after the other",
    "atts reports the accuracy of the vote and of single rollouts, graded by equivalence; in the "
    "published code a model grades, and a question counts as solved if any of 16 rollouts is "
    "correct",
)
"""Differences between atts, run with a preset for the paper, and the paper's published code. Given
the same scores, atts and the published code make the same decisions.
"""

PRESETS: tuple[Preset, ...] = (
    Preset(
        "atts",
        "the draft writes chunks, and chunks with the worst scores escalate; no rollout waits for "
        "another",
        {},
        _conformal,
    ),
    Preset(
        "cascade",
        "the draft's rollouts vote; if too few of these rollouts agree, the target adds rollouts",
        {"escalates": "problem", "score": ScoreRule("disagreement"), "early_stop": "none"},
        _conformal,
    ),
    Preset(
        "paper-marginal",
        "the rule in the published code: each score is ranked among all stored first-turn scores; "
        "an escalated chunk is kept, and the target writes the next one",
        _AS_PUBLISHED,
        _marginal,
        departures=PAPER_DEPARTURES,
    ),
    Preset(
        "paper-conditional",
        "the rule in the published code, with ranks per question: each score is ranked among the "
        "stored first-turn scores of its own question",
        _AS_PUBLISHED,
        _conditional,
        departures=PAPER_DEPARTURES,
    ),
    Preset(
        "draft-only",
        "the draft alone",
        {},
        lambda g: FixedGate("accept"),
        is_judged=False,
        has_rate=False,
    ),
    Preset(
        "target-only",
        "the target alone",
        {"drafter": "target"},
        lambda g: FixedGate("accept"),
        is_judged=False,
        has_rate=False,
    ),
    Preset(
        "exact",
        "speculative decoding: the draft proposes tokens, and the target decides every token",
        {"drafter": "target", "exact": True},
        lambda g: FixedGate("accept"),
        is_judged=False,
        has_rate=False,
    ),
    Preset(
        "coin",
        "random control for method atts: chunks escalate at the same rate, regardless of scores",
        {},
        lambda g: CoinGate(g.rate, g.calibrator.seed),
    ),
    Preset(
        "trial",
        "method coin, but every chunk is also scored, so that a judge can be fitted to the run",
        {"early_stop": "none"},
        lambda g: TrialGate(g.rate, g.calibrator.seed),
    ),
    Preset(
        "top-b",
        "rollouts advance in synchronous rounds; the worst chunks of each round escalate",
        {"barrier": True},
        lambda g: TopGate.of(g.rate),
    ),
    Preset(
        "spec-reason",
        "the target rates each chunk from 0 to 9, and rewrites chunks rated below 7",
        {"score": ScoreRule("rating"), "takeover": "replace", "answers": "verify"},
        # The score of a chunk is 10 minus its rating. So a chunk rated below 7 has a score above 3.
        lambda g: ThresholdGate(3.0),
        has_rate=False,
    ),
    Preset(
        "speculative-thinking",
        "a chunk escalates if its text hesitates or checks itself",
        {"takeover": "continue", "answers": "stop"},
        lambda g: CueGate(),
        has_rate=False,
    ),
    Preset(
        "deep-conf",
        "a rollout of the draft ends early if it is less confident than most warm-up rollouts",
        {
            "first_wave": 4,
            "agreement": 0.95,
            "confidence_stop": ConfidenceStop(warmup=4, window=16),
        },
        lambda g: FixedGate("accept"),
        is_judged=False,
        has_rate=False,
    ),
)


Right = Callable[[Outcome], bool]


@dataclass(frozen=True, slots=True)
class LabelledRun:
    """The outcomes of the labelled problems in a run with one gate at one nominal rate."""

    gate: str
    rate: float
    outcomes: Sequence[Outcome]


def frozen_gate(rate: float, stored: StoredScores, seed: int = 0) -> ConformalGate:
    """Return a gate that compares each score with stored scores only.

    It learns nothing during a run, so it can be certified.

    :raises CalibrationInputError: no score is stored.
    """
    return ConformalGate(Calibrator(rate, "split", stored=stored, seed=seed, drift="report"))


def warming_gate(
    scores: int,
    rate: float,
    mode: Mode = "question-turn",
    seed: int = 0,
    meanwhile: Meanwhile = "accept",
    tuning: Tuning = DEFAULTS,
) -> WarmingGate:
    """Return a conformal gate that has no stored scores at first, and uses the first scores of its
    own run instead.

    :raises OptionError: the number of scores is below 1, or `meanwhile` is unknown.
    """

    def make(warmup: Sequence[WarmScore]) -> ConformalGate:
        stored = StoredScores(
            tuple(one.score for one in warmup),
            tuple(one.question for one in warmup),
            tuple(one.turn for one in warmup),
        )
        return ConformalGate(Calibrator(rate, mode, stored=stored, seed=seed, tuning=tuning))

    return WarmingGate(scores, make, meanwhile)


@dataclass(frozen=True, slots=True)
class GradedPolicy:
    """The results of one policy on labelled problems.

    `right` says for each problem whether the policy's answer was correct. `cost` is the mean number
    of target tokens per problem.
    """

    gate: str
    rate: float
    right: Mapping[str, bool]
    cost: float


def certify_runs(
    target: Sequence[Outcome],
    runs: Sequence[LabelledRun],
    right: Right,
    epsilon: float,
    delta: float = 0.1,
) -> Certificate:
    """Certify the cheapest policy that loses few of the target's correct answers.

    A policy loses an answer if it is wrong on a problem that the target alone solves. The fraction
    of problems with a lost answer must be at most `epsilon`. The cost is the number of target
    tokens per problem. All runs must have the same problems, and their gates must not learn from
    one problem to the next.

    For each gate, rates are tested from the highest to the lowest. The tests end at the first rate
    that fails, so lower rates need no run.

    :raises CalibrationInputError: there are no runs, or a run has different problems than the run
        of the target alone.
    """
    return _certified(target, runs, right, epsilon, delta, net=False)


def certify_net_runs(
    target: Sequence[Outcome],
    runs: Sequence[LabelledRun],
    right: Right,
    epsilon: float,
    delta: float = 0.1,
) -> Certificate:
    """Certify the cheapest policy whose accuracy is at most `epsilon` below that of the target
    alone.

    Random sampling alone makes a policy lose some of the target's correct answers and gain others.
    Here the gains offset the losses, so a policy that is as good as the target can be certified.

    :raises CalibrationInputError: for the same reasons as in `certify_runs`.
    """
    return _certified(target, runs, right, epsilon, delta, net=True)


def _certified(
    target: Sequence[Outcome],
    runs: Sequence[LabelledRun],
    right: Right,
    epsilon: float,
    delta: float,
    *,
    net: bool,
) -> Certificate:
    alone, *policies = (
        GradedPolicy(
            run.gate,
            run.rate,
            {one.problem.id: right(one) for one in run.outcomes},
            _cost(run.outcomes),
        )
        for run in (LabelledRun("target-only", 1.0, target), *runs)
    )
    return certify_graded(alone, policies, epsilon, delta, net=net)


def _cost(outcomes: Sequence[Outcome]) -> float:
    return sum(outcome.usage.target_tokens for outcome in outcomes) / max(1, len(outcomes))


def certify_graded(
    target: GradedPolicy,
    policies: Sequence[GradedPolicy],
    epsilon: float,
    delta: float = 0.1,
    *,
    net: bool,
) -> Certificate:
    """Certify the cheapest policy. If `net` is true, the test counts net losses (losses minus
    gains), otherwise all lost answers.

    :raises CalibrationInputError: there are no policies, or a policy has different problems than
        the target alone.
    """
    names = sorted(target.right)
    candidates: list[Candidate] = []
    for policy in policies:
        if policy.right.keys() != target.right.keys():
            missing = len(target.right.keys() ^ policy.right.keys())
            raise CalibrationInputError(
                "labelled run",
                counted(missing, "other problem"),
                "the same problems as in the run of the target alone",
            )
        pair = [[one.right[name] for name in names] for one in (target, policy)]
        losses = (net_losses if net else lost_answers)(*pair)
        candidates.append(Candidate(policy.gate, policy.rate, losses.tolist(), policy.cost))
    return (certify_net if net else certify)(candidates, epsilon, delta)


def certified_gate(certificate: Certificate, stored: StoredScores, seed: int = 0) -> CertifiedGate:
    """Return the gate of the certified policy, with exactly the settings that were tested.

    :raises CalibrationInputError: no policy is certified; the message says how many problems a
        certificate needs.
    """
    if certificate.chosen is None:
        raise CalibrationInputError(
            "certificate", certificate.guarantee, "a certificate that names a certified policy"
        )
    promise = (certificate.guarantee, certificate.voided_by)
    return CertifiedGate(frozen_gate(certificate.chosen.rate, stored, seed), promise)
