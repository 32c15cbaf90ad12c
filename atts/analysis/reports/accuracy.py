"""Compute a report's accuracies, costs, comparisons with baselines and cost-accuracy frontier."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from atts.analysis.comparison import cost_ratio
from atts.analysis.reports.numbers import THIS_RUN, WORDS, Baseline, FrontierPoint, NamedRate, Spend
from atts.analysis.reports.run_data import ProblemFacts, RunData
from atts.core import Usage
from atts.evaluators import (
    Estimate,
    Samples,
    Scorecard,
    accuracy_estimate,
    answer_classes,
    compare_runs,
    group,
    holm,
    mean_estimate,
    samples_of,
    score,
    share_estimate,
    votes,
)
from atts.ledger import PRICES, money_of, recorded_prices


def graded(problems: Sequence[ProblemFacts]) -> list[Samples]:
    """Return the problems in which every rollout has a verdict, as arguments for the metrics.

    Censored rollouts are left out: their answers are unknown, and counting them as wrong would make
    a better method look worse.
    """
    by_problem = (
        samples_of(
            one.problem.id, one.brief.complete_samples, partial(group, kind=one.problem.kind)
        )
        for one in problems
    )
    return [samples for samples in by_problem if samples is not None]


def answered(data: RunData) -> tuple[NamedRate, ...]:
    """Return the share of problems that an abstaining run answered, and how many answers are wrong."""
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
        NamedRate("answered", share, "problems with an answer; the others count as wrong"),
        NamedRate("wrong if answered", share_estimate(given), words),
    )


def rates(problems: Sequence[ProblemFacts]) -> tuple[tuple[NamedRate, ...], str]:
    """Return the accuracies, starting with the run's vote, and a sentence on their basis."""
    with_verdict = [one for one in problems if one.brief.verdict is not None]
    if not with_verdict:
        return (), "nothing was graded: no problem has a reference answer"
    own = NamedRate("vote", _accuracy(with_verdict), "the answer that each problem's vote chose")
    samples = graded(with_verdict)
    if not samples:
        return (own,), f"{len(with_verdict):,} problems"
    card = score(samples)
    left_out = Counter(
        sample.verdict for one in with_verdict for sample in one.brief.samples if sample.is_censored
    )
    counts = (
        (
            left_out["spared"],
            "that settled votes cancelled are left out, which favours fast rollouts",
        ),
        (left_out["lost"], "that failed are left out"),
    )
    notes = (f"; {count:,} rollouts {what}" for count, what in counts if count)
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
    """Return the tokens and seconds of the whole run."""
    problems = data.problems.values()
    usage = total_usage(problems)
    seconds = data.state.seconds
    tokens = written(usage)
    right = sum(one.brief.is_correct for one in problems)
    dollars = money_of(usage, recorded_prices(data.run.given(PRICES)))
    return Spend(
        usage,
        target_share=_ratio(usage.target_tokens, tokens, math.nan),
        tokens_per_problem=_ratio(tokens, len(problems), math.nan),
        target_tokens_per_problem=_ratio(usage.target_tokens, len(problems), math.nan),
        tokens_per_right=_ratio(tokens, right, math.inf),
        seconds=seconds,
        tokens_per_second=_ratio(tokens, seconds, math.nan),
        dollars=dollars,
        dollars_per_right=None if dollars is None or not right else dollars / right,
    )


def baseline(own: RunData, other: RunData) -> Baseline | None:
    """Compare the run with another on the problems graded in both; None if there are none."""
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


def corrected(baselines: Sequence[Baseline]) -> tuple[Baseline, ...]:
    """Return the baselines with p-values corrected for their number by Holm's method."""
    p_values = holm([one.p_value for one in baselines])
    return tuple(
        replace(one, p_value=p_value) for one, p_value in zip(baselines, p_values, strict=True)
    )


def method(data: RunData) -> str:
    """Return the name of the run's method, or of its gate."""
    run = data.run
    if named := run.setting("method"):
        return str(named)
    if run.policy.get("drafter") == "target":
        return "target-only"
    gate = str(run.setting("gate"))
    return {"ConformalGate": "atts", "CoinGate": "coin", "TopGate": "top-b"}.get(gate, gate)


def accuracy_of(data: RunData) -> Estimate:
    """Estimate the accuracy of the vote."""
    return _accuracy([data.problems[name] for name in _graded_names(data)])


def total_usage(problems: Collection[ProblemFacts]) -> Usage:
    """Sum the usage of these problems."""
    return sum((one.brief.usage for one in problems), Usage())


def written(usage: Usage) -> int:
    """Return the tokens written by either model."""
    return usage.draft_tokens + usage.target_tokens


def _accuracy(problems: Sequence[ProblemFacts]) -> Estimate:
    return accuracy_estimate(one.brief.is_right for one in problems)


def _graded_names(data: RunData) -> dict[str, ProblemFacts]:
    return {name: one for name, one in data.problems.items() if one.brief.verdict is not None}


def _ratio(part: float, whole: float, without: float) -> float:
    return part / whole if whole else without


def frontier(data: RunData, others: Sequence[RunData]) -> tuple[FrontierPoint, ...]:
    """Return the points of the run, of votes of fewer rollouts or fewer turns, and of other runs.

    The run's rollouts also serve votes of fewer rollouts or turns, because a rollout never depends
    on its siblings or on later turns. The cost of fewer rollouts is the mean cost of that many
    complete rollouts; the cost of fewer turns is that of the tokens written in them. The run has
    its real cost, including votes that ended early.
    """
    known = [one for one in data.problems.values() if one.brief.verdict is not None]
    return (
        *_fewer_rollouts(known),
        *_fewer_turns(known),
        *_whole_run(data, THIS_RUN),
        *(point for other in others for point in _whole_run(other, other.run.directory.name)),
    )


def _fewer_rollouts(problems: Sequence[ProblemFacts]) -> list[FrontierPoint]:
    samples = graded(problems)
    if not samples:
        return []
    known = {held.problem for held in samples}
    rollouts = [
        r
        for one in problems
        if one.problem.id in known
        for r in one.rollouts
        if not r.brief.is_censored
    ]
    target = math.fsum(rollout.target_tokens for rollout in rollouts) / len(rollouts)
    tokens = math.fsum(rollout.tokens for rollout in rollouts) / len(rollouts)
    points = list[FrontierPoint]()
    for name, estimate in score(samples).estimates.items():
        kind, _, k = name.partition("@")
        if (kind == "maj" or name == "pass@1") and k.isdigit():
            label = "1 rollout" if k == "1" else f"vote of {k}"
            points.append(
                FrontierPoint(label, "samples", target * int(k), tokens * int(k), estimate)
            )
    return sorted(points, key=lambda point: point.tokens)


def _whole_run(data: RunData, name: str) -> list[FrontierPoint]:
    accuracy = accuracy_of(data)
    usage = total_usage(data.problems.values())
    count = len(data.problems)
    if math.isnan(accuracy.value):
        return []
    return [
        FrontierPoint(name, "run", usage.target_tokens / count, written(usage) / count, accuracy)
    ]


def _fewer_turns(problems: Sequence[ProblemFacts]) -> list[FrontierPoint]:
    """Return the point of the vote after so many turns."""
    longest = max((rollout.turns for one in problems for rollout in one.rollouts), default=0)
    return [
        _cut(problems, 1 << power) for power in range(longest.bit_length()) if 1 << power < longest
    ]


def _cut(problems: Sequence[ProblemFacts], turns: int) -> FrontierPoint:
    right = [value for one in problems if (value := _vote_within(one, turns)) is not None]
    rollouts = [rollout for one in problems for rollout in one.rollouts]
    draft = sum(sum(rollout.drafted_by_turn[:turns]) for rollout in rollouts) / len(problems)
    target = sum(sum(rollout.target_by_turn[:turns]) for rollout in rollouts) / len(problems)
    label = f"{turns} turn{'s' * (turns != 1)}"
    return FrontierPoint(label, "turns", target, draft + target, mean_estimate(right, len(right)))


def _vote_within(one: ProblemFacts, turns: int) -> float | None:
    """Return the vote's accuracy after so many turns; ties count as their mean.

    It is None if all rollouts that might have answered by then were stopped earlier.
    """
    within = [rollout.brief for rollout in one.rollouts if rollout.turns <= turns]
    samples = [brief for brief in within if brief.answer is not None]
    if not samples and any(brief.is_censored for brief in within):
        return None
    labels = answer_classes(
        [sample.answer for sample in samples], partial(group, kind=one.problem.kind)
    )
    curve = votes(labels, [sample.verdict == "correct" for sample in samples])
    best = [
        value
        for size, value in zip(curve.sizes, curve.values, strict=True)
        if size == max(curve.sizes)
    ]
    return math.fsum(best) / len(best) if best else 0.0
