"""What a run got right and what that cost, alone and beside other runs on the same problems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add

from atts.analysis.report.gather import Evidence, Sample, Solved
from atts.analysis.report.numbers import Baseline, Rate, Spend
from atts.analysis.report.promises import setting
from atts.core import AnswerKind, Usage
from atts.evaluators import (
    Comparison,
    Estimate,
    Samples,
    Scorecard,
    compare_runs,
    group,
    mean_estimate,
    score,
    status_of,
)

_MEANINGS = {
    "pass@1": "one rollout, on average: what a single line of reasoning is worth",
    "pass@": "some of k rollouts is right: the ceiling of any vote",
    "maj@": "the vote of k rollouts, drawn from those recorded",
}


def graded(solved: Sequence[Solved]) -> list[Samples]:
    """The problems whose every rollout has a verdict, as the metrics want them.

    Rollouts that a settled vote spared are left out: nobody knows what they would have answered, and to call them wrong
    would make the better method look worse.
    """
    whole = [one for one in solved if one.samples and all(line.verdict is not None for line in one.samples)]
    return [held for held in map(_samples, whole) if held.correct]


def rates(solved: Sequence[Solved]) -> tuple[tuple[Rate, ...], str]:
    """Accuracies, the run's own vote first, and what stands behind them."""
    with_verdict = [one for one in solved if one.verdict is not None]
    if not with_verdict:
        return (), "nothing was graded: no problem has a reference answer"
    right = [float(one.verdict == "correct") for one in with_verdict]
    own = Rate("vote", mean_estimate(right, len(right)), "the answer each problem settled on")
    samples = graded(with_verdict)
    if not samples:
        return (own,), f"{len(with_verdict):,} problems"
    card = score(samples)
    spared = sum(line.is_censored for one in with_verdict for line in one.samples)
    note = f"; {spared:,} rollouts that settled votes spared are left out" if spared else ""
    return (own, *_card_rates(card)), str(card.coverage) + note


def _card_rates(card: Scorecard) -> list[Rate]:
    found = list[Rate]()
    for name, estimate in card.estimates.items():
        meaning = _MEANINGS.get(name) or next((text for key, text in _MEANINGS.items() if name.startswith(key)), None)
        if meaning:
            found.append(Rate(name, estimate, meaning))
    return sorted(found, key=lambda rate: (rate.name.partition("@")[0] != "maj", rate.name != "pass@1"))


def _samples(one: Solved) -> Samples:
    lines = [line for line in one.samples if not line.is_censored]
    return Samples(
        one.problem.id,
        tuple(None if line.verdict == "unscored" else line.verdict == "correct" for line in lines),
        labels(lines, one.problem.kind),
        tuple(status_of(line.answer, line.finish, line.verdict, line.rule) for line in lines),
    )


def labels(samples: Sequence[Sample], kind: AnswerKind) -> tuple[int | None, ...]:
    """A class per answer; each different text is compared once."""
    texts = list(dict.fromkeys(line.answer for line in samples if line.answer is not None))
    classes = dict(zip(texts, group(texts, kind), strict=True))
    return tuple(None if line.answer is None else classes[line.answer] for line in samples)


def spend(evidence: Evidence) -> Spend:
    """Tokens and seconds of the whole run."""
    solved = list(evidence.solved.values())
    usage = reduce(add, (one.usage for one in solved), Usage())
    tokens, right = usage.draft_tokens + usage.target_tokens, sum(one.verdict == "correct" for one in solved)
    return Spend(
        usage,
        usage.target_tokens / tokens if tokens else math.nan,
        tokens / len(solved) if solved else math.nan,
        usage.target_tokens / len(solved) if solved else math.nan,
        tokens / right if right else math.inf,
        evidence.seconds,
        tokens / evidence.seconds if evidence.seconds else math.nan,
    )


def baseline(own: Evidence, other: Evidence) -> Baseline | None:
    """This run against another on the problems both have graded; None when there are none."""
    ours, theirs = _verdicts(own), _verdicts(other)
    common = [name for name in ours if name in theirs]
    if not common:
        return None
    first, second = [theirs[name] for name in common], [ours[name] for name in common]
    paired: Comparison = compare_runs(first, second)
    our_spend, their_spend = (_usage(side, common) for side in (own, other))
    seconds = (_per_problem(own.seconds, own), _per_problem(other.seconds, other))
    return Baseline(
        other.directory.name,
        method(other),
        len(common),
        mean_estimate(second, len(common)),
        mean_estimate(first, len(common)),
        paired.difference,
        paired.p_value,
        paired.problems_needed,
        _ratio(_tokens(our_spend), _tokens(their_spend)),
        _ratio(our_spend.target_tokens, their_spend.target_tokens),
        _ratio(*seconds),
        their_spend.target_tokens / len(common),
        other.seconds,
    )


def method(evidence: Evidence) -> str:
    """What the run calls its method, else its gate."""
    named = setting(evidence, "method")
    if named:
        return str(named)
    policy, gate = setting(evidence, "policy"), setting(evidence, "gate")
    if isinstance(policy, Mapping) and policy.get("drafter") == "target":
        return "target-only"
    return {"ConformalGate": "atts", "RandomGate": "random", "TopGate": "top-b"}.get(str(gate), str(gate))


def accuracy_of(evidence: Evidence) -> Estimate:
    """The vote's accuracy."""
    right = list(_verdicts(evidence).values())
    return mean_estimate(right, len(right))


def _verdicts(evidence: Evidence) -> dict[str, float]:
    return {name: float(one.verdict == "correct") for name, one in evidence.solved.items() if one.verdict is not None}


def _usage(evidence: Evidence, names: Sequence[str]) -> Usage:
    return reduce(add, (evidence.solved[name].usage for name in names), Usage())


def _tokens(usage: Usage) -> int:
    return usage.draft_tokens + usage.target_tokens


def _per_problem(seconds: float, evidence: Evidence) -> float:
    return seconds / len(evidence.solved) if evidence.solved else math.nan


def _ratio(ours: float, theirs: float) -> float:
    if theirs:
        return ours / theirs
    return math.inf if ours else math.nan
