"""Accuracy and cost of a run, alone and beside other runs on the same problems."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial

from atts.analysis.ratios import cost_ratio
from atts.analysis.report.numbers import Baseline, NamedRate, Spend
from atts.analysis.report.run_data import ProblemFacts, RunData
from atts.analysis.report.words import WORDS
from atts.core import Usage
from atts.evaluators import (
    Estimate,
    Samples,
    Scorecard,
    accuracy_estimate,
    compare_runs,
    group,
    samples_of,
    score,
    share_estimate,
)


def graded(problems: Sequence[ProblemFacts]) -> list[Samples]:
    """The problems whose every rollout has a verdict, as the metrics want them.

    Censored rollouts are left out: what they would have answered is unknown, and to call them wrong
    would make the better method look worse.
    """
    found = (
        samples_of(
            one.problem.id, one.brief.complete_samples, partial(group, kind=one.problem.kind)
        )
        for one in problems
    )
    return [samples for samples in found if samples is not None]


def answered(data: RunData) -> tuple[NamedRate, ...]:
    """Of a run that withholds answers: the share it gave, and how many of these are wrong, beside
    what was promised.
    """
    promise = data.run.setting("abstain")
    if promise is None:
        return ()
    problems = [one.brief for one in data.problems.values()]
    given = [
        (not one.is_correct, 1)
        for one in problems
        if one.answer is not None and one.verdict is not None
    ]
    share = share_estimate((one.answer is not None, 1) for one in problems)
    words = f"{promise['guarantee']}. Voided by: {promise['voided_by']}"
    return (
        NamedRate(
            "answered", share, "problems whose answer was given; the others count as not right"
        ),
        NamedRate("wrong if answered", share_estimate(given), words),
    )


def rates(problems: Sequence[ProblemFacts]) -> tuple[tuple[NamedRate, ...], str]:
    """Accuracies, the run's own vote first, and what stands behind them."""
    with_verdict = [one for one in problems if one.brief.verdict is not None]
    if not with_verdict:
        return (), "nothing was graded: no problem has a reference answer"
    own = NamedRate("vote", _accuracy(with_verdict), "the answer each problem settled on")
    samples = graded(with_verdict)
    if not samples:
        return (own,), f"{len(with_verdict):,} problems"
    card = score(samples)
    left_out = Counter(
        sample.verdict for one in with_verdict for sample in one.brief.samples if sample.is_censored
    )
    counts = ((left_out["spared"], "that settled votes spared"), (left_out["lost"], "that failed"))
    notes = (f"; {count:,} rollouts {what} are left out" for count, what in counts if count)
    return (own, *_card_rates(card)), str(card.coverage) + "".join(notes)


def _card_rates(card: Scorecard) -> list[NamedRate]:
    found = list[NamedRate]()
    for name, estimate in card.estimates.items():
        meaning = WORDS.rates.get(name) or next(
            (text for key, text in WORDS.rates.items() if name.startswith(key)), None
        )
        if meaning:
            found.append(NamedRate(name, estimate, meaning))
    return sorted(
        found, key=lambda rate: (rate.name.partition("@")[0] != "maj", rate.name != "pass@1")
    )


def spend(data: RunData) -> Spend:
    """Tokens and seconds of the whole run."""
    problems = data.problems.values()
    usage = total_usage(problems)
    seconds = data.state.seconds
    tokens = written(usage)
    right = sum(one.brief.is_correct for one in problems)
    return Spend(
        usage,
        target_share=_ratio(usage.target_tokens, tokens, math.nan),
        tokens_per_problem=_ratio(tokens, len(problems), math.nan),
        target_tokens_per_problem=_ratio(usage.target_tokens, len(problems), math.nan),
        tokens_per_right=_ratio(tokens, right, math.inf),
        seconds=seconds,
        tokens_per_second=_ratio(tokens, seconds, math.nan),
    )


def baseline(own: RunData, other: RunData) -> Baseline | None:
    """This run against another on the problems both have graded; None when there are none."""
    common = [name for name in _graded_names(own) if name in _graded_names(other)]
    if not common:
        return None
    ours, theirs = ([side.problems[name] for name in common] for side in (own, other))
    paired = compare_runs(
        *([float(one.brief.is_correct) for one in side] for side in (theirs, ours))
    )
    our_usage = total_usage(ours)
    their_usage = total_usage(theirs)
    seconds, other_seconds = (
        _ratio(side.state.seconds, len(side.problems), math.nan) for side in (own, other)
    )
    return Baseline(
        other.run.directory.name,
        method(other),
        len(common),
        own=_accuracy(ours),
        other=_accuracy(theirs),
        difference=paired.difference,
        p_value=paired.p_value,
        problems_needed=paired.problems_needed,
        token_ratio=cost_ratio(written(our_usage), written(their_usage)),
        target_token_ratio=cost_ratio(our_usage.target_tokens, their_usage.target_tokens),
        second_ratio=cost_ratio(seconds, other_seconds),
        target_tokens_per_problem=their_usage.target_tokens / len(common),
        seconds=other.state.seconds,
    )


def method(data: RunData) -> str:
    """What the run calls its method, else its gate."""
    run = data.run
    if named := run.setting("method"):
        return str(named)
    if run.policy.get("drafter") == "target":
        return "target-only"
    gate = str(run.setting("gate"))
    return {"ConformalGate": "atts", "RandomGate": "random", "TopGate": "top-b"}.get(gate, gate)


def accuracy_of(data: RunData) -> Estimate:
    """The vote's accuracy."""
    return _accuracy([data.problems[name] for name in _graded_names(data)])


def total_usage(problems: Collection[ProblemFacts]) -> Usage:
    """What these problems cost together."""
    return sum((one.brief.usage for one in problems), Usage())


def written(usage: Usage) -> int:
    """Tokens written by either model."""
    return usage.draft_tokens + usage.target_tokens


def _accuracy(problems: Sequence[ProblemFacts]) -> Estimate:
    return accuracy_estimate(one.brief.is_right for one in problems)


def _graded_names(data: RunData) -> dict[str, ProblemFacts]:
    return {name: one for name, one in data.problems.items() if one.brief.verdict is not None}


def _ratio(part: float, whole: float, without: float) -> float:
    return part / whole if whole else without
