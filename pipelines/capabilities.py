"""Check, before the run, that the engines support everything that a policy and its gate need."""

from __future__ import annotations

from atts.core import Role
from atts.engine import EngineSpec
from atts.errors import OptionError, UnsupportedByEngine
from atts.pipelines.gates import (
    AgreementGate,
    CappedGate,
    CoinGate,
    ConformalGate,
    CueGate,
    FixedGate,
    Gate,
    RoundGate,
    StaticRankGate,
    ThresholdGate,
    TopGate,
)
from atts.pipelines.policy import Policy
from atts.pipelines.scores import kind_of, source_of

_BLIND = (FixedGate, CoinGate, CueGate)  # gates that never use a score
# gates that use only the score, not the draft's log-probabilities
_BY_SCORE = (
    ConformalGate,
    StaticRankGate,
    ThresholdGate,
    TopGate,
)


def check_engines(
    policy: Policy, gate: Gate | RoundGate, draft: EngineSpec, target: EngineSpec
) -> None:
    """Check that the target can score and that engines send the log-probabilities that are used.

    :raises UnsupportedByEngine: naming the engine, what it lacks, what wants it, and what would do.
    :raises OptionError: the score needs a reward model, and none is named.
    """
    source = source_of(policy.score)
    if isinstance(_innermost(gate), _BLIND):
        source = "votes"  # this gate uses no score
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

    An unknown rule or gate may use the drafter's log-probabilities, so these are included.
    """
    if _wants_logprobs(policy) or policy.takeover == "repair":
        return frozenset({"draft", "target"})
    inner = _innermost(gate)
    compares = kind_of(policy.score) in ("speculative", "draft", "learned")
    judges = not isinstance(inner, (*_BLIND, *_BY_SCORE)) or (
        compares and isinstance(inner, _BY_SCORE)
    )
    return frozenset({policy.drafter}) if judges else frozenset()


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
        f"{target.engine} cannot score, and the method has the target score every chunk{reason}"
    )
    advice = (
        "Use a target on vLLM or SGLang, or a local one; method cascade, method spec-reason and "
        "score.kind continuation need no scores"
    )
    raise UnsupportedByEngine(target.name, problem, advice)


def _check_entropies(draft: EngineSpec, wants: str) -> None:
    if "entropy" not in draft.capabilities:
        problem = f"{draft.engine} does not show its distributions, which {wants} needs"
        raise UnsupportedByEngine(
            draft.name, problem, "Use a local draft (hf:MODEL) or one on vLLM, or score.kind draft"
        )


def _check_exact(draft: EngineSpec, target: EngineSpec) -> None:
    if "draw" not in target.capabilities:
        problem = f"{target.engine} cannot draw tokens while it scores, which method exact needs"
        raise UnsupportedByEngine(
            target.name, problem, "Use a local target (hf:MODEL), or the server's own speculation"
        )
    if target.rounds_scores:
        problem = (
            "it rounds its scores, but method exact uses the tokens that the target draws "
            "while it scores"
        )
        raise UnsupportedByEngine(target.name, problem, "Leave scores=bfloat16 out")
    if draft.tokenizer != target.tokenizer:
        problem = "its tokenizer is not the target's, but method exact compares token by token"
        raise UnsupportedByEngine(draft.name, problem, "Use a draft of the target's family")
    if "draw" not in draft.capabilities:
        problem = (
            f"{draft.engine} cannot continue the target's stream of random draws, which method "
            "exact needs"
        )
        raise UnsupportedByEngine(draft.name, problem, "Use a local draft (hf:MODEL)")


def _check_logprobs(spec: EngineSpec, role: Role, wants: str) -> None:
    if spec.logprobs == "none":
        advice = f"Choose another {wants.split(' ')[0]}, or a {role} on vLLM, SGLang or llama.cpp"
        raise UnsupportedByEngine(
            spec.name, f"it sends no log-probabilities, which {wants} needs", advice
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
