"""The first screen of a report, with its headline, its accuracy and its caveats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from atts.analysis.comparison import cost_ratio
from atts.analysis.reports.numbers import (
    THIS_RUN,
    WORDS,
    Baseline,
    Caveat,
    FrontierPoint,
    Headline,
    NamedRate,
    RateControl,
    ShownNumber,
    Spend,
)
from atts.analysis.reports.run_data import ProblemFacts, RunData
from atts.calibration import DomainCheck
from atts.core import Usage
from atts.errors import counted
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
from atts.journal import COMPARED, FinishedProblem, truncation
from atts.ledger import PRICES, money_of, recorded_prices


def graded(problems: Sequence[ProblemFacts]) -> list[Samples]:
    """Return the samples of each problem whose complete rollouts all have a verdict, in the form
    that the metrics need.

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
    """Return the share of problems that have an answer, and the share of wrong answers among the
    graded answers.

    The result is empty if the run cannot abstain, which means to leave a problem without an answer.
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
            "answered", share, "problems with an answer; problems without an answer count as wrong"
        ),
        NamedRate("wrong if answered", share_estimate(given), words),
    )


def rates(problems: Sequence[ProblemFacts]) -> tuple[tuple[NamedRate, ...], str]:
    """Return the accuracies of the run, that of the vote first, and a note on the problems that
    were counted.
    """
    with_verdict = [one for one in problems if one.brief.verdict is not None]
    if not with_verdict:
        return (), "no answer is graded, because no problem has a reference answer"
    own = NamedRate("vote", _accuracy(with_verdict), "the answer chosen by each problem's vote")
    samples = graded(with_verdict)
    if not samples:
        return (own,), counted(len(with_verdict), "problem")
    card = score(samples)
    left_out = Counter(
        sample.verdict for one in with_verdict for sample in one.brief.samples if sample.is_censored
    )
    counts = (
        (
            left_out["spared"],
            "cancelled because the vote was settled, so the accuracy is biased towards fast "
            "rollouts",
        ),
        (left_out["lost"], "that failed"),
    )
    notes = (f"; without {counted(count, 'rollout')} {what}" for count, what in counts if count)
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
    """Return the token counts and the seconds that the run used."""
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
    """Compare the run with another run on the problems that are graded in both.

    Return None if there is no such problem.
    """
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
    """Return the comparisons with p-values corrected by Holm's method for the number of
    comparisons.
    """
    p_values = holm([one.p_value for one in baselines])
    return tuple(
        replace(one, p_value=p_value) for one, p_value in zip(baselines, p_values, strict=True)
    )


def method(data: RunData) -> str:
    """Return the name of the run's method, or the name of its gate if the run records no method."""
    run = data.run
    if named := run.setting("method"):
        return str(named)
    if run.policy.get("drafter") == "target":
        return "target-only"
    gate = str(run.setting("gate"))
    return {"ConformalGate": "atts", "CoinGate": "coin", "TopGate": "top-b"}.get(gate, gate)


def accuracy_of(data: RunData) -> Estimate:
    """Estimate the accuracy of the vote, with its interval."""
    return _accuracy([data.problems[name] for name in _graded_names(data)])


def total_usage(problems: Collection[ProblemFacts]) -> Usage:
    """Return the summed usage of the problems."""
    return sum((one.brief.usage for one in problems), Usage())


def written(usage: Usage) -> int:
    """Return the number of tokens that draft and target wrote together."""
    return usage.draft_tokens + usage.target_tokens


def _accuracy(problems: Sequence[ProblemFacts]) -> Estimate:
    return accuracy_estimate(one.brief.is_right for one in problems)


def _graded_names(data: RunData) -> dict[str, ProblemFacts]:
    return {name: one for name, one in data.problems.items() if one.brief.verdict is not None}


def _ratio(part: float, whole: float, without: float) -> float:
    return part / whole if whole else without


def frontier(data: RunData, others: Sequence[RunData]) -> tuple[FrontierPoint, ...]:
    """Return the points of the cost-accuracy chart: this run, the other runs, and this run with
    fewer rollouts or turns.

    Results with fewer rollouts or turns follow from the recorded rollouts, because a rollout does
    not depend on its siblings or on later turns. The cost of fewer rollouts is the mean cost of the
    same number of complete rollouts. The cost of fewer turns is the cost of the tokens written in
    these turns. The run's own point shows its real cost, which is lower if votes ended early.
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
    """Return one point of the chart for each limit of 1, 2, 4, 8, ... turns that is smaller than
    the turn count of the longest rollout.
    """
    longest = max((rollout.turns for one in problems for rollout in one.rollouts), default=0)
    return [
        _cut(problems, 1 << power) for power in range(longest.bit_length()) if 1 << power < longest
    ]


def _cut(problems: Sequence[ProblemFacts], turns: int) -> FrontierPoint:
    right = [value for one in problems if (value := _vote_within(one, turns)) is not None]
    rollouts = [rollout for one in problems for rollout in one.rollouts]
    draft = sum(sum(rollout.drafted_by_turn[:turns]) for rollout in rollouts) / len(problems)
    target = sum(sum(rollout.target_by_turn[:turns]) for rollout in rollouts) / len(problems)
    label = counted(turns, "turn")
    return FrontierPoint(label, "turns", target, draft + target, mean_estimate(right, len(right)))


def _vote_within(one: ProblemFacts, turns: int) -> float | None:
    """Return the accuracy of a problem's vote if rollouts are cut after `turns` turns. In a tie,
    return the share of the tied answers that are correct.

    Return None if no rollout answered within these turns, and a rollout with at most `turns` turns
    was stopped before it could answer.
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


_SHOWN = 5
# A flag marks a rollout whose answer may be unreliable. A flag that is not rated "bad" counts only
# if more than this share of the rollouts has it.
_LARGE = 0.05


def caveats(data: RunData, calibration: RateControl | None) -> tuple[Caveat, ...]:
    """Return all caveats about the results in a report, the worst caveat first."""
    unsorted = [
        *_session(data),
        *_truncation(data),
        *_flags(data),
        *_grading(data),
        *calibration_caveats(calibration),
        *run_caveats(data),
    ]
    order = {"bad": 0, "care": 1, "good": 2}
    return tuple(sorted(unsorted, key=lambda caveat: (order[caveat.standing], -caveat.count)))


def _session(data: RunData) -> Iterator[Caveat]:
    planned = data.run.manifest.problems
    done = len(data.problems)
    is_decided = COMPARED in data.state.said and not data.state.open
    if planned is not None and done < planned and not is_decided:
        text = (
            f"of {counted(planned, 'problem')} not finished: all numbers describe only the "
            f"{counted(done, 'finished problem')}, and fast problems tend to finish first"
        )
        yield Caveat("unfinished", "bad", planned - done, text)
    killed = data.state.killed + (data.state.ended is None)
    if killed:
        yield Caveat(
            "killed",
            "good",
            killed,
            "sessions did not close the journal, because of a kill or because the run continues",
        )
    for error, count in data.failed_calls.items():
        yield Caveat("failed calls", "care", count, f"engine calls failed: {error}")


def _truncation(data: RunData) -> Iterator[Caveat]:
    """Yield the caveat about rollouts that reached a limit before they answered; the command line
    prints the same text.
    """
    truncated = truncation([one.brief for one in data.problems.values()], data.run.manifest)
    if truncated.cut:
        places = [
            (n, s.sample) for n, one in data.problems.items() for s in one.brief.samples if s.is_cut
        ]
        yield Caveat(
            "cut",
            "bad" if truncated.is_large else "good",
            truncated.cut,
            str(truncated),
            tuple(places[:_SHOWN]),
        )


def _flags(data: RunData) -> Iterator[Caveat]:
    places: dict[str, list[tuple[str, int | None]]] = {}
    total = 0
    for name, one in data.problems.items():
        for rollout in one.rollouts:
            total += 1
            for flag in rollout.flags:
                places.setdefault(flag, []).append((name, rollout.brief.sample))
    for flag, told in WORDS.flags.items():
        if flagged := places.get(flag):
            weighs = told.standing == "bad" or len(flagged) > _LARGE * total
            yield Caveat(
                flag,
                told.standing if weighs else "good",
                len(flagged),
                told.text,
                tuple(flagged[:_SHOWN]),
            )


def _grading(data: RunData) -> Iterator[Caveat]:
    """Yield the caveats about grading: one caveat per reason, with the number of affected problems."""
    briefs = {name: one.brief for name, one in data.problems.items()}
    belongs: dict[str, Callable[[FinishedProblem], bool]] = {
        "unscored": lambda one: one.verdict == "unscored",
        "grader failed": lambda one: "the grader failed" in one.rule,
        "incomplete": lambda one: not one.is_complete,
        "unanswered": lambda one: one.status == "unanswered" and not one.votes,
    }
    for code, told in WORDS.problems.items():
        if problems := [(name, None) for name, one in briefs.items() if belongs[code](one)]:
            yield Caveat(code, told.standing, len(problems), told.text, tuple(problems[:_SHOWN]))


def calibration_caveats(calibration: RateControl | None) -> Iterable[Caveat]:
    """Yield the caveats about the rate and about the scores."""
    if calibration is None or calibration.nominal is None:
        return
    if calibration.forced:
        yield Caveat(
            "forced decisions",
            "care",
            calibration.forced,
            "decisions had to be made without a score",
        )
    for alarm in calibration.alarms:
        acted = f"; {alarm.acted}" if alarm.acted else ""
        yield Caveat(
            "drift",
            "bad",
            alarm.scores,
            f"scores into the run, a drift alarm was raised: {alarm.text}{acted}",
        )
    outside = [group.name for group in calibration.turns if not group.inside]
    if outside and calibration.controls_turns:
        yield Caveat(
            "turns",
            "care",
            len(outside),
            "turns had a realised rate outside the 95 % band around the nominal rate: "
            f"{', '.join(outside)}",
        )


def run_caveats(data: RunData) -> Iterator[Caveat]:
    """Yield the warnings that the run recorded as caveats, one caveat for each kind of warning."""
    counts = Counter(warned.code for warned in data.warned)
    first = {warned.code: warned for warned in reversed(data.warned)}
    for code, count in counts.items():
        warned = first[code]
        places = tuple((w.problem, w.sample) for w in data.warned if w.code == code and w.problem)
        text = warned.text
        is_normal = code in ("interrupted", COMPARED)
        if code == "domain":
            normal = DomainCheck.false_warnings(len(data.problems))
            is_normal = count <= normal
            text = f"{text} (by chance, up to {counted(normal, 'problem')} would get this warning)"
        yield Caveat(code, "good" if is_normal else "care", count, text, places[:_SHOWN])


TOO_FEW = "too few decisions to tell whether the rate is on target"
_STANDINGS = {
    "held": "on target",
    "unclear": "too few questions to tell whether the rate is on target",
    "left": "OFF target",
}


def headline(
    accuracy: Sequence[NamedRate],
    cost: Spend,
    calibration: RateControl | None,
    baselines: Sequence[Baseline],
    count: int,
) -> Headline:
    """State the result of a run in one sentence, with the most important numbers."""
    vote = accuracy[0].estimate if accuracy else None
    said = ", and ".join(filter(None, (_answers(vote, count), _text(cost))))
    sentence = "; ".join((said, *map(_beside, baselines[:1])))
    numbers = (_right(vote, count), _target(cost, baselines), _escalated(cost, calibration))
    return Headline(sentence, (*_gains(baselines), *numbers))


def _gains(baselines: Sequence[Baseline]) -> Iterator[ShownNumber]:
    """Yield the gain of this run over each run with random escalation (a coin) that it is compared
    with. The gain measures how much the score helps.
    """
    for other in baselines:
        if other.method == "coin":
            what = "gain over a coin (random escalation), in accuracy of the vote"
            note = f"compared with {other.name} on {counted(other.problems, 'problem')}"
            yield ShownNumber(other.difference.signed(), what, note)


def right_of(estimate: Estimate) -> str:
    """Return a share of problems as a count, such as 38 of 40 problems.

    >>> right_of(Estimate(0.95, 0.835, 0.986, 40, 40, "wilson"))
    '38 of 40 problems'
    """
    right = estimate.value * estimate.n_problems
    return f"{right:,.0f} of {counted(estimate.n_problems, 'problem')}"


def percent(share: float) -> str:
    """Return a share in percent, without needless decimals.

    >>> percent(0.163), percent(1.0), percent(0.0), percent(0.0004), percent(0.9996)
    ('16.3 %', '100 %', '0 %', '< 0.1 %', '> 99.9 %')
    """
    if 0 < share < 0.001 or 0.999 < share < 1:
        return "< 0.1 %" if share < 0.5 else "> 99.9 %"
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def span(estimate: Estimate) -> str:
    """Return the confidence interval of a share as a string."""
    return f"95 % interval {percent(estimate.low)} to {percent(estimate.high)}"


def _answers(vote: Estimate | None, count: int) -> str:
    if vote is None:
        return f"{counted(count, 'problem')} finished, but no answer is graded"
    return f"the vote is correct on {right_of(vote)}"


def _text(cost: Spend) -> str:
    if math.isnan(cost.target_share):
        return ""
    share = {0.0: "none", 1.0: "all"}.get(cost.target_share, percent(cost.target_share))
    return f"the target wrote {share} of the tokens"


def _beside(other: Baseline) -> str:
    """Return a sentence that compares this run with another run, by correct answers and by target
    tokens.
    """
    ratio = other.target_token_ratio
    said = f"the vote of {other.name} is correct on {right_of(other.other)}"
    if math.isnan(ratio):
        return said
    much = (
        f"{1 / ratio:.2g} times as many tokens as this run's target"
        if 0 < ratio < math.inf
        else "no tokens"
    )
    if not ratio:
        much = f"{other.target_tokens_per_problem:,.0f} tokens per problem"
    if 0.95 < ratio < 1.05:
        much = "about as many tokens as this run's target"
    return f"{said}, and the target of {other.name} wrote {much}"


def _right(vote: Estimate | None, count: int) -> ShownNumber:
    if vote is None:
        return ShownNumber(
            f"{count:,}",
            "problems",
            "no answer is graded, because no problem has a reference answer",
        )
    note = f"the vote of the rollouts is correct on {right_of(vote)}; {span(vote)}"
    return ShownNumber(percent(vote.value), "of the answers are correct", note)


def _target(cost: Spend, baselines: Sequence[Baseline]) -> ShownNumber:
    if math.isnan(cost.target_share):
        return ShownNumber("0", "tokens written", "by either model")
    others = "".join(
        f", {other.name} {other.target_tokens_per_problem:,.0f}" for other in baselines[:2]
    )
    note = (
        f"{cost.usage.target_tokens:,} of {written(cost.usage):,} tokens; "
        f"{cost.target_tokens_per_problem:,.0f} per problem{others}"
    )
    return ShownNumber(percent(cost.target_share), "of the tokens were written by the target", note)


def _escalated(cost: Spend, calibration: RateControl | None) -> ShownNumber:
    if calibration is None:
        per_second = (
            ""
            if math.isnan(cost.tokens_per_second)
            else f"{cost.tokens_per_second:,.0f} tokens per second"
        )
        if not cost.seconds:
            return ShownNumber("unknown", "run time", "the imported files contain no times")
        return ShownNumber(f"{cost.seconds:,.3g} s", "run time over all sessions", per_second)
    share = calibration.escalated / calibration.decisions
    check = calibration.check()
    asked = "the gate has no nominal rate"
    if check is not None:
        verdict = TOO_FEW if check.has_few_decisions else _STANDINGS[check.standing]
        asked = f"nominal rate {percent(check.nominal)}: {verdict}"
    note = f"{calibration.escalated:,} of {counted(calibration.decisions, 'chunk')}; {asked}"
    return ShownNumber(percent(share), "of the chunks were escalated", note)
