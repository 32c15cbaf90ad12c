"""The policy of a pipeline: all settings except those of the gate, as one immutable value.

The last part checks before the run that the engines support everything that the policy and the gate
need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from atts.core import Combine, Role, Rollout, Sampling
from atts.engine import EngineSpec
from atts.errors import OptionError, UnsupportedByEngine, counted
from atts.files import plain_fields
from atts.pipelines.gates import AgreementGate, CappedGate, Gate, GateReads, RoundGate
from atts.pipelines.scores import ScoreRule, kind_of, source_of
from atts.pipelines.votes import VoteKind

Takeover = Literal["continue", "replace", "repair"]
Stop = Literal["none", "certain", "likely"]
AnswerCheck = Literal["stop", "verify"]
Escalates = Literal["chunk", "rest", "rollout", "problem"]
EscalatedVote = Literal["all", "target"]


@dataclass(frozen=True, slots=True)
class Chunking:
    """The length of a chunk and the strings that end it early.

    Without stop strings all chunks have the same length. A field that is None gets a default that
    suits the models; see `Budget`.
    """

    draft_tokens: Annotated[
        int | None,
        "largest number of tokens in a chunk of the draft; none: the default of the models",
    ] = None
    target_tokens: Annotated[
        int | None,
        "largest number of tokens that the target writes for an escalated chunk; none: the "
        "default of the models",
    ] = None
    stop: Annotated[
        tuple[str, ...] | None,
        "strings that end a chunk ([]: chunks have a fixed length; none: the default of the "
        "models)",
    ] = None


class Bounds(NamedTuple):
    """The limits of one rollout. Its fields are the token limit, the limit on turns, the token
    limit of each model's chunks, and the stop strings.
    """

    max_tokens: int
    turns: int
    draft_tokens: int
    target_tokens: int
    stop: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Budget:
    """Default lengths for one kind of models. A policy uses them for its fields that are None."""

    models: str
    max_tokens: int
    chunk_tokens: int
    stop: tuple[str, ...] = ()

    def within(self, context: int) -> Budget:
        """Return the budget cut to a model's context length, with part of the context reserved for
        the problem.

        >>> Budget("reasoning models", 16_000, 500).within(4096).max_tokens
        3584
        """
        room = context - min(_PROMPT, context // 4)
        if self is SMALL or room >= self.max_tokens:
            return self
        return Budget(
            f"{self.models} with a context of {context:,} tokens",
            room,
            min(self.chunk_tokens, room),
            self.stop,
        )


PromptName = Literal["select", "synthesis"]
COMBINE_KEYS = ("combine", "finalists", "combine_tokens", "select_prompt", "synthesis_prompt")
"""The fields of a policy that have no effect if `combine` is "vote", so manifests then leave them
out.
"""
REWARD_KEYS = ("reward", "separator")
"""The fields of a score rule that have no effect if its kind is not "prm", so manifests then leave
them out.
"""
PROMPT_FIELDS = ("{problem}", "{solutions}")


@cache
def own_prompt(name: PromptName) -> str:
    """Return the text of a prompt that is shipped with atts, such as "select"."""
    file = resources.files("atts.pipelines").joinpath(f"{name}_prompt.txt")
    return file.read_text(encoding="utf-8").strip()


SMALL = Budget("embedded models", 512, 64, ("\n\n",))
"""The budget of the embedded and the scripted models. Their chunks are steps of a solution, and a
step has at most 40 tokens.
"""
THINK = "<think>"
THINK_END = "</think>"
THINKING_END = (
    f"\n\nI have no time left to think, so I answer now.\n{THINK_END}\n\nThe final answer is"
)
"""The default for the text that atts inserts when a rollout has used up its thinking budget."""
_PROMPT = 512  # tokens of the context that are kept free for the problem
_LEAST_TURNS = 15
_STEP_TOKENS = 35  # If stop strings end the chunks, a chunk is assumed to have this many tokens.
# Without stop strings, a chunk is assumed to have this share of its token limit. The share is below
# 1, because draft and target may count tokens differently.
_FULL = 0.8


@dataclass(frozen=True, slots=True)
class ConfidenceStop:
    """The online rule of DeepConf: the first `warmup` rollouts run to their end; a later rollout
    ends once its confidence is below a threshold.

    The confidence of a rollout is its lowest mean log-probability over `window` consecutive tokens.
    The threshold is the quantile `1 - keep` of the confidences of the first `warmup` rollouts. No
    rollout is stopped before these rollouts have ended. There are too few of them for a statistical
    guarantee.
    """

    warmup: Annotated[
        int,
        "number of warm-up rollouts, which always run to their end; a later rollout may be "
        "stopped if its confidence is below a threshold computed from these rollouts",
    ] = 16
    keep: Annotated[float, "share of warm-up rollouts whose confidence is above the threshold"] = (
        0.9
    )
    window: Annotated[int, "number of consecutive tokens whose confidence is averaged"] = 64

    def __post_init__(self) -> None:
        if self.warmup < 1 or self.window < 1 or not 0 < self.keep <= 1:
            raise OptionError(
                "confidence_stop",
                f"warmup = {self.warmup}, keep = {self.keep:g} or window = {self.window} is out of "
                "range; give at least 1 for warmup and window, and a share above 0 and at most 1 for "
                "keep",
            )

    def sureness(self, rollout: Rollout) -> float:
        """Return the lowest mean log-probability over `window` consecutive tokens; inf if the
        rollout is shorter.
        """
        values = [value for chunk in rollout.chunks for value in chunk.logprobs]
        sums = [0.0, *accumulate(values)]
        means = [
            (sums[i + self.window] - sums[i]) / self.window
            for i in range(len(values) - self.window + 1)
        ]
        return min(means, default=math.inf)

    def is_below(self, rollout: Rollout, warmup: Sequence[Rollout]) -> bool:
        """Return whether a rollout's confidence is below the quantile `1 - keep` of the rollouts in
        `warmup`. Return False if `warmup` is empty.
        """
        bars = sorted(self.sureness(line) for line in warmup)
        return (
            bool(bars)
            and self.sureness(rollout) < bars[min(len(bars) - 1, int((1 - self.keep) * len(bars)))]
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules by which a pipeline spends tokens on a problem.

    There are `samples` rollouts (parallel scaling), each of at most `turns` turns and `max_tokens`
    tokens (sequential scaling). The default values are the recommended method; `atts.methods` has
    the baselines. Lengths that are None get the defaults of the models (`Budget`), and `turns` gets
    as many turns as the tokens need. The text of each field's annotation is the help of its
    configuration key.
    """

    samples: Annotated[int, "rollouts per problem"] = 8
    turns: Annotated[
        int | None,
        "largest number of turns per rollout (a turn drafts, scores and judges one chunk); none: "
        "as many as max_tokens needs",
    ] = None
    max_tokens: Annotated[
        int | None, "largest number of tokens per rollout; none: the default of the models"
    ] = None
    chunking: Chunking = Chunking()
    drafter: Annotated[
        Role,
        "model that writes chunks: draft, or target (the target alone writes the whole rollout)",
    ] = "draft"
    exact: Annotated[
        bool,
        "whether to keep a token of the draft only if the target samples the same token, so that "
        "the text is exactly the target's",
    ] = False
    escalates: Annotated[
        Escalates,
        "unit of escalation: chunk (one chunk), rest (a chunk and all later chunks of the rollout), "
        "rollout (the target writes the whole rollout again), problem (the target writes new rollouts "
        "if the draft's rollouts disagree)",
    ] = "chunk"
    escalated_vote: Annotated[
        EscalatedVote,
        "rollouts that vote on an escalated problem: all (all rollouts), target (only the "
        "target's rollouts)",
    ] = "all"
    takeover: Annotated[
        Takeover,
        "treatment of an escalated chunk: replace (the target writes another chunk instead), continue "
        "(the chunk stays, and the target writes the next chunk), repair (the chunk stays up to the "
        "first token that the target rejects, and the target writes the rest)",
    ] = "replace"
    answers: Annotated[
        AnswerCheck,
        "when a rollout with an answer ends: stop (at once), verify (after the chunk with the answer "
        "was accepted)",
    ] = "verify"
    budget_forcing: Annotated[
        int,
        "number of times that `wait_text` is inserted after an answer before the rollout may end",
    ] = 0
    wait_text: Annotated[str, "text that `budget_forcing` inserts after an answer"] = "Wait"
    thinking_tokens: Annotated[
        int | None,
        "number of tokens after which atts closes the think block and asks for the answer; none: "
        "no limit",
    ] = None
    thinking_end: Annotated[
        str, "the text that ends the thinking of a rollout, or @FILE, which contains it"
    ] = THINKING_END
    optimistic: Annotated[
        bool,
        "whether to draft the next chunk while the current chunk is scored; the distribution of "
        "results does not change",
    ] = False
    sampling: Annotated[
        Sampling,
        {
            "temperature": "temperature of the draft, and of the target unless `target_sampling` is set"
        },
    ] = Sampling(temperature=0.7)
    target_sampling: Annotated[
        Sampling | None,
        {
            "temperature": "temperature of the target; none: the value of sampling.temperature",
            "top_k": "like sampling.top_k, for the target",
            "top_p": "like sampling.top_p, for the target",
            "min_p": "like sampling.min_p, for the target",
        },
    ] = None
    score: ScoreRule = ScoreRule()
    vote: Annotated[
        VoteKind,
        "weight of a vote: majority (1), confidence (geometric mean of the token probabilities)",
    ] = "majority"
    early_stop: Annotated[
        Stop,
        "when to cancel the remaining rollouts: none (never), certain (the vote cannot change), likely "
        "(the vote is unlikely to change)",
    ] = "certain"
    confidence: Annotated[
        float,
        "early_stop=likely cancels rollouts once the vote will stay the same with at least this "
        "probability",
    ] = 0.95
    first_wave: Annotated[
        int,
        "number of rollouts that start first; more rollouts start only if these disagree (0: "
        "all rollouts start at once, or half of them if escalates=problem)",
    ] = 0
    growth: Annotated[
        float, "factor by which each wave multiplies the number of rollouts so far"
    ] = math.inf
    agreement: Annotated[
        float,
        "no further wave starts if at least this share of the finished rollouts has the "
        "same answer",
    ] = 1.0
    barrier: Annotated[
        bool, "whether each turn waits for all rollouts of the problem, as in synchronous methods"
    ] = False
    system: Annotated[str, "the system prompt"] = (
        "Solve the problem step by step. Put the final answer in \\boxed{}."
    )
    instruction: Annotated[
        str, "text after the problem, for models that do not use a system prompt"
    ] = ""
    letter: Annotated[str, "text after the choices of a multiple-choice problem"] = (
        "Answer with the letter of the right choice."
    )
    confidence_stop: ConfidenceStop | None = None
    timeout_seconds: Annotated[
        float,
        "time limit of an engine call in seconds, including its wait in a server's queue; a "
        "local engine that makes progress has no limit",
    ] = 600.0
    repeats: Annotated[
        int, "a rollout ends if it repeats the same chunk this many times in a row"
    ] = 3
    combine: Annotated[
        Combine,
        "how a problem gets its answer: vote (always by vote), select (if votes split, the "
        "target chooses one of the most frequent answers), synthesize (if votes split, the "
        "target writes a new solution), auto (select once selection is known to help)",
    ] = "vote"
    finalists: Annotated[
        int, "number of most frequent answers that the target compares if votes split"
    ] = 3
    combine_tokens: Annotated[
        int | None,
        "largest number of tokens that the target writes for a comparison or a "
        "synthesis; none: max_tokens",
    ] = None
    select_prompt: Annotated[
        str | None,
        "prompt for comparing two solutions, or @FILE, which contains it; none: the prompt of atts",
    ] = None
    synthesis_prompt: Annotated[
        str | None,
        "prompt for a synthesis of solutions, or @FILE, which contains it; none: the prompt "
        "of atts",
    ] = None

    def __post_init__(self) -> None:
        for name, floor in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < floor:
                raise OptionError(name, f"{value} is below {floor}; give at least {floor}")
        if min(self.bounds()[2:4]) < 1:
            raise OptionError("chunk tokens", "a chunk must be allowed at least 1 token")
        for name, kinds in _CHOICES.items():
            value = getattr(self, name)
            if value not in kinds:
                raise OptionError(name, f"unknown value {value!r}", kinds, value)
        self._check_thinking()
        if self.exact and self.drafter != "target":
            raise OptionError(
                "exact", "method exact writes exactly the target's text, so drafter must be target"
            )
        for name, sampling in (
            ("sampling", self.sampling),
            ("target_sampling", self.target_sampling),
        ):
            if sampling is not None:
                _check_sampling(name, sampling)
        judges_votes = source_of(self.score) == "votes"
        if self.escalates == "problem":
            self._check_problems()
        if self.escalates == "rollout" and self.takeover != "replace":
            raise OptionError(
                "takeover",
                f"{self.takeover} keeps a chunk of the draft, but with escalates=rollout the target "
                "writes the whole rollout again; leave takeover at replace",
            )
        if judges_votes != (self.escalates == "problem") and self.drafter == "draft":
            raise OptionError(
                "score",
                "score.kind=disagreement and escalates=problem must be set together; the method "
                "cascade sets both",
            )
        for name in ("select_prompt", "synthesis_prompt"):
            text = getattr(self, name)
            missing = [field for field in PROMPT_FIELDS if text is not None and field not in text]
            if missing:
                problem = (
                    f"the prompt must contain {' and '.join(missing)}, which atts replaces with "
                    "texts"
                )
                raise OptionError(name, problem)
        if not self.timeout_seconds > 0:
            raise OptionError(
                "timeout_seconds",
                f"{self.timeout_seconds} is out of range; give more than 0 seconds",
            )
        if not self.growth > 1:
            raise OptionError(
                "growth",
                f"with growth {self.growth}, no further wave would start; give more than 1",
            )
        for name in ("confidence", "agreement"):
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise OptionError(name, f"{value} is out of range; give more than 0 and at most 1")

    def _check_thinking(self) -> None:
        """Check that the thinking budget leaves a token for the answer, and that `thinking_end` is
        not empty.

        :raises OptionError: if the budget leaves no token for the answer, or `thinking_end` is
            empty.
        """
        if self.thinking_tokens is None:
            return
        if self.max_tokens is not None and self.thinking_tokens >= self.max_tokens:
            raise OptionError(
                "thinking_tokens",
                f"a thinking budget of {self.thinking_tokens} of {self.max_tokens} tokens leaves "
                f"none for the answer; lower thinking_tokens, or raise max_tokens",
            )
        if not self.thinking_end.strip():
            raise OptionError(
                "thinking_end",
                "the string that ends the thinking is empty; give at least one character",
            )

    def _check_problems(self) -> None:
        """Check that the other fields of the policy allow the escalation of whole problems.

        :raises OptionError: if the target or the draft would write no rollouts, or if `barrier`
            makes rollouts wait for each other.
        """
        if self.drafter == "target" or self.barrier:
            raise OptionError(
                "escalates",
                "with escalates=problem the draft writes its rollouts first, and they do not "
                "wait for each other; leave drafter and barrier at their defaults",
            )
        if len(self.waves) != 2:
            raise OptionError(
                "first_wave",
                "escalates=problem needs exactly two waves, one of the draft and one of the "
                f"target; a first wave of {self.first_wave} of "
                f"{counted(self.samples, 'rollout')} makes this impossible",
            )

    @property
    def waves(self) -> tuple[range, ...]:
        """Return the sample numbers of each wave of rollouts.

        >>> Policy(samples=16, first_wave=3, growth=2.0).waves
        (range(0, 3), range(3, 6), range(6, 12), range(12, 16))
        """
        first = self.first_wave
        if first == 0:
            first = math.ceil(self.samples / 2) if self.escalates == "problem" else self.samples
        ends = [min(first, self.samples)]
        while ends[-1] < self.samples:
            if math.isinf(self.growth):
                ends.append(self.samples)
            else:
                ends.append(min(self.samples, math.ceil(ends[-1] * self.growth)))
        begins = [0, *ends[:-1]]
        return tuple(range(begin, end) for begin, end in zip(begins, ends, strict=True))

    def of(self, sample: int) -> Policy:
        """Return the policy of one rollout. If whole problems are escalated, every rollout after
        the first wave gets a policy in which the target writes.
        """
        if self.escalates == "problem" and sample >= self.waves[0].stop:
            return replace(self, drafter="target", escalates="chunk")
        return self

    def sampling_of(self, role: Role) -> Sampling:
        """Return the sampling settings of the draft or of the target."""
        if role == "target" and self.target_sampling is not None:
            return self.target_sampling
        return self.sampling

    def bounds(self, budget: Budget = SMALL) -> Bounds:
        """Return all limits of a rollout. Fields that are None get defaults for the models; the
        default number of turns grows with the token limit.

        >>> Policy().bounds()[:2], Policy(max_tokens=2048).bounds()[:2], Policy(turns=4).bounds()[:2]
        ((512, 15), (2048, 59), (512, 4))
        """
        chunking = self.chunking
        tokens = budget.max_tokens if self.max_tokens is None else self.max_tokens
        draft = budget.chunk_tokens if chunking.draft_tokens is None else chunking.draft_tokens
        target = budget.chunk_tokens if chunking.target_tokens is None else chunking.target_tokens
        stop = budget.stop if chunking.stop is None else chunking.stop
        turns = self.turns
        if turns is None:
            chunk = min(draft, target)
            expected = min(chunk, _STEP_TOKENS) if stop else _FULL * chunk
            turns = max(_LEAST_TURNS, math.ceil(tokens / max(1.0, expected)))
        return Bounds(tokens, turns, draft, target, stop)

    def filled(self, budget: Budget = SMALL) -> Policy:
        """Return the policy with all lengths and prompts filled in.

        Lengths that are None come from the budget. Prompts are filled in only if answers are
        combined by the target.
        """
        tokens, turns, draft, target, stop = self.bounds(budget)
        policy = replace(
            self, max_tokens=tokens, turns=turns, chunking=Chunking(draft, target, stop)
        )
        if self.combine == "vote":
            return policy
        return replace(
            policy, select_prompt=self.prompt("select"), synthesis_prompt=self.prompt("synthesis")
        )

    def prompt(self, name: PromptName) -> str:
        """Return the user's prompt for a comparison or a synthesis, or else the default prompt."""
        given = self.select_prompt if name == "select" else self.synthesis_prompt
        return given if given is not None else own_prompt(name)

    def recorded(self) -> dict[str, Any]:
        """Return the fields that affect the results of a run, as a manifest stores them."""
        fields = plain_fields(self)
        if self.combine == "vote":
            for name in COMBINE_KEYS:
                del fields[name]
        if self.escalates != "problem":
            del fields["escalated_vote"]
        if self.score.kind != "prm":
            for name in REWARD_KEYS:
                fields["score"].pop(name, None)
        # The path of the judge's file may change, so the manifest has a digest of the judge instead
        # of the path.
        fields["score"].pop("judge", None)
        return fields


def _check_sampling(name: str, sampling: Sampling) -> None:
    """Check the sampling settings before an engine is opened.

    :raises OptionError: if a value is impossible; the error names the key.
    """
    if not 0 <= sampling.temperature < math.inf:
        raise OptionError(
            f"{name}.temperature", f"{sampling.temperature} is out of range; give 0 or more"
        )
    if not 0 < sampling.top_p <= 1:
        raise OptionError(
            f"{name}.top_p", f"{sampling.top_p} is out of range; give more than 0 and at most 1"
        )
    if not 0 <= sampling.min_p <= 1:
        raise OptionError(
            f"{name}.min_p", f"{sampling.min_p} is out of range; give a value from 0 to 1"
        )
    if sampling.top_k < 0:
        raise OptionError(
            f"{name}.top_k",
            f"{sampling.top_k} is out of range; give the number of most likely tokens to sample "
            "from, or 0 for all tokens",
        )


_LEAST = {
    "samples": 1,
    "turns": 1,
    "max_tokens": 1,
    "repeats": 2,
    "budget_forcing": 0,
    "thinking_tokens": 1,
    "first_wave": 0,
    "finalists": 2,
    "combine_tokens": 1,
}

_CHOICES: dict[str, tuple[str, ...]] = {
    name: get_args(hint)
    for name, hint in get_type_hints(Policy).items()
    if get_origin(hint) is Literal
}


def check_engines(
    policy: Policy, gate: Gate | RoundGate, draft: EngineSpec, target: EngineSpec
) -> None:
    """Check that the engines can do what the policy and the gate need, such as scoring and
    log-probabilities.

    :raises UnsupportedByEngine: an engine lacks a capability; the message names the setting that
        needs the capability, and a remedy.
    :raises OptionError: the score needs a reward model, but the policy names none.
    """
    source = source_of(policy.score)
    if _reads(gate) == "nothing":
        source = "votes"  # This gate reads no score, so the target need not be able to score.
    if source in ("log-probabilities", "judge"):
        _check_scorer(target)
    if source == "judge":
        _check_logprobs(draft, "draft", "score kind learned")
    if source == "draft":
        _check_logprobs(draft, "draft", "score kind draft")
    if source == "reward" and "reward" not in target.capabilities:
        raise OptionError(
            "score.reward",
            "score.kind prm needs the address of a reward model, such as "
            "vllm:http://HOST:PORT/Qwen/Qwen2.5-Math-PRM-7B",
        )
    if source == "entropy":
        _check_entropies(draft, f"score kind {kind_of(policy.score)}")
    if policy.exact:
        _check_exact(draft, target)
    wants = _wants_logprobs(policy)
    if wants:
        for role, spec in _writers(policy, draft, target):
            _check_logprobs(spec, role, wants)
    inner = _innermost(gate)
    if getattr(inner, "needs_draft_logprobs", False):
        drafter = draft if policy.drafter == "draft" else target
        _check_logprobs(drafter, policy.drafter, f"gate {type(inner).__name__}")


def needed_logprobs(
    policy: Policy, gate: Gate | RoundGate, draft: EngineSpec, target: EngineSpec
) -> frozenset[Role]:
    """Return the roles whose log-probabilities the score, the gate, the vote or a stop rule uses.

    For an unknown rule or gate the drafter is included, because its log-probabilities may be used.
    """
    if _wants_logprobs(policy) or policy.takeover == "repair":
        return frozenset({"draft", "target"})
    compares = kind_of(policy.score) in ("speculative", "draft", "learned")
    reads = _reads(gate)
    is_used = reads is None or (compares and reads == "score")
    return frozenset({policy.drafter}) if is_used else frozenset()


def _reads(gate: Gate | RoundGate) -> GateReads | None:
    """Return the gate's attribute `reads`, which names the input of its decisions. Return None if
    the gate lacks the attribute.
    """
    return getattr(_innermost(gate), "reads", None)


def _innermost(gate: Gate | RoundGate) -> Gate | RoundGate:
    while isinstance(gate, CappedGate | AgreementGate):
        gate = gate.inner
    return gate


def _check_scorer(target: EngineSpec) -> None:
    if "score" in target.capabilities:
        return
    finding = dict(target.findings).get("scores") or ""
    reason = f" (its probe said {finding!r})" if finding.startswith("no") else ""
    problem = (
        f"{target.engine} cannot score, but with this method the target scores every chunk{reason}"
    )
    advice = (
        "Use a target on vLLM or SGLang, or a local target; method cascade, method spec-reason "
        "and score.kind continuation need no scores"
    )
    raise UnsupportedByEngine(target.name, problem, advice)


def _check_entropies(draft: EngineSpec, wants: str) -> None:
    if "entropy" not in draft.capabilities:
        problem = (
            f"{draft.engine} does not return the probabilities of all tokens, which {wants} needs"
        )
        raise UnsupportedByEngine(
            draft.name,
            problem,
            "Use a local draft (hf:MODEL), a draft on vLLM, or score.kind draft",
        )


def _check_exact(draft: EngineSpec, target: EngineSpec) -> None:
    if "draw" not in target.capabilities:
        problem = f"{target.engine} cannot sample tokens while it scores, which method exact needs"
        raise UnsupportedByEngine(
            target.name, problem, "Use a local target (hf:MODEL), or the server's own speculation"
        )
    if target.rounds_scores:
        problem = (
            "the target rounds its scores, but method exact needs the exact tokens that the "
            "target samples while scoring"
        )
        raise UnsupportedByEngine(target.name, problem, "Leave out scores=bfloat16")
    if draft.tokenizer != target.tokenizer:
        problem = (
            "draft and target have different tokenizers, but method exact compares token by token"
        )
        raise UnsupportedByEngine(
            draft.name, problem, "Use a draft of the same model family as the target"
        )
    if "draw" not in draft.capabilities:
        problem = (
            f"{draft.engine} cannot sample with the target's random numbers, which method exact "
            "needs"
        )
        raise UnsupportedByEngine(draft.name, problem, "Use a local draft (hf:MODEL)")


def _check_logprobs(spec: EngineSpec, role: Role, wants: str) -> None:
    if spec.logprobs == "none":
        advice = f"Choose another {wants.split(' ')[0]}, or a {role} on vLLM, SGLang or llama.cpp"
        raise UnsupportedByEngine(
            spec.name, f"the engine sends no log-probabilities, which {wants} needs", advice
        )


def _wants_logprobs(policy: Policy) -> str:
    if policy.confidence_stop is not None:
        return "confidence_stop (the method deep-conf)"
    return "vote by confidence" if policy.vote == "confidence" else ""


def _writers(
    policy: Policy, draft: EngineSpec, target: EngineSpec
) -> list[tuple[Role, EngineSpec]]:
    if policy.drafter == "target":
        return [("target", target)]
    return [("draft", draft), ("target", target)]
