"""The first screen of a report, with its headline and its caveats."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from atts.analysis.reports.accuracy import written
from atts.analysis.reports.numbers import (
    WORDS,
    Baseline,
    Caveat,
    Headline,
    NamedRate,
    RateControl,
    ShownNumber,
    Spend,
)
from atts.analysis.reports.run_data import RunData
from atts.evaluators import Estimate
from atts.journal import COMPARED, FinishedProblem, truncation

_SHOWN = 5
_LARGE = 0.05  # share of rollouts from which a flag counts as a caveat


def caveats(data: RunData, calibration: RateControl | None) -> tuple[Caveat, ...]:
    """Return all caveats about the numbers, worst first."""
    unsorted = [
        *_session(data),
        *_truncation(data),
        *_flags(data),
        *_grading(data),
        *_calibration(calibration),
        *_own(data),
    ]
    order = {"bad": 0, "care": 1, "good": 2}
    return tuple(sorted(unsorted, key=lambda caveat: (order[caveat.standing], -caveat.count)))


def _session(data: RunData) -> Iterator[Caveat]:
    planned = data.run.manifest.problems
    done = len(data.problems)
    is_decided = COMPARED in data.state.said and not data.state.open
    if planned is not None and done < planned and not is_decided:
        text = (
            f"of {planned:,} problems are not finished: every number is about the {done:,} "
            "finished ones, which favours fast problems"
        )
        yield Caveat("unfinished", "bad", planned - done, text)
    killed = data.state.killed + (data.state.ended is None)
    if killed:
        yield Caveat(
            "killed", "good", killed, "sessions ended without closing (killed, or still running)"
        )
    for error, count in data.failed_calls.items():
        yield Caveat("failed calls", "care", count, f"engine calls failed: {error}")


def _truncation(data: RunData) -> Iterator[Caveat]:
    """Yield the caveat about cut rollouts, which the command line prints as well."""
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
    """Yield a caveat for each kind of problem whose verdict, or missing verdict, affects the
    numbers.
    """
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


def _calibration(calibration: RateControl | None) -> Iterable[Caveat]:
    if calibration is None or calibration.nominal is None:
        return
    if calibration.forced:
        yield Caveat(
            "forced decisions", "care", calibration.forced, "decisions were made without a score"
        )
    for alarm in calibration.alarms:
        acted = f"; {alarm.acted}" if alarm.acted else ""
        yield Caveat(
            "drift",
            "bad",
            alarm.scores,
            f"scores after the start, an alarm reported drift: {alarm.text}{acted}",
        )
    outside = [group.name for group in calibration.turns if not group.inside]
    if outside:
        yield Caveat(
            "turns",
            "care",
            len(outside),
            f"turns left the band of the nominal rate: {', '.join(outside)}",
        )


def _own(data: RunData) -> Iterator[Caveat]:
    """Yield the run's own warnings, each kind once."""
    counts = Counter(warned.code for warned in data.warned)
    first = {warned.code: warned for warned in reversed(data.warned)}
    for code, count in counts.items():
        warned = first[code]
        places = tuple((w.problem, w.sample) for w in data.warned if w.code == code and w.problem)
        yield Caveat(
            code,
            "good" if code in ("interrupted", COMPARED) else "care",
            count,
            warned.text,
            places[:_SHOWN],
        )


_STANDINGS = {"held": "on target", "unclear": "too few questions to tell", "left": "OFF target"}


def headline(
    accuracy: Sequence[NamedRate],
    cost: Spend,
    calibration: RateControl | None,
    baselines: Sequence[Baseline],
    count: int,
) -> Headline:
    """State the result in one sentence, with the numbers behind it."""
    vote = accuracy[0].estimate if accuracy else None
    said = ", and ".join(filter(None, (_answers(vote, count), _text(cost))))
    sentence = "; ".join((said, *map(_beside, baselines[:1])))
    numbers = (_right(vote, count), _target(cost, baselines), _escalated(cost, calibration))
    return Headline(sentence, (*_gains(baselines), *numbers))


def _gains(baselines: Sequence[Baseline]) -> Iterator[ShownNumber]:
    """Yield the gain over each coin that the run is compared with, which shows whether its score
    helps.
    """
    for other in baselines:
        if other.method == "coin":
            what = "gain over a coin, in accuracy of the vote"
            note = f"compared with {other.name} on {other.problems:,} problems"
            yield ShownNumber(other.difference.signed(), what, note)


def right_of(estimate: Estimate) -> str:
    """Return a share of problems as a count of correct ones.

    >>> right_of(Estimate(0.95, 0.835, 0.986, 40, 40, "wilson"))
    '38 of 40'
    """
    return f"{estimate.value * estimate.n_problems:,.0f} of {estimate.n_problems:,}"


def percent(share: float) -> str:
    """Return a share in percent, without needless decimals.

    >>> percent(0.163), percent(1.0), percent(0.0), percent(0.0004), percent(0.9996)
    ('16.3 %', '100 %', '0 %', '< 0.1 %', '> 99.9 %')
    """
    if 0 < share < 0.001 or 0.999 < share < 1:
        return "< 0.1 %" if share < 0.5 else "> 99.9 %"
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def span(estimate: Estimate) -> str:
    """Return the text of the interval of a share."""
    return f"95 % interval {percent(estimate.low)} to {percent(estimate.high)}"


def _answers(vote: Estimate | None, count: int) -> str:
    problems = f"{count:,} problem{'s' * (count != 1)}"
    if vote is None:
        return f"{problems} finished, none of them graded"
    return f"the vote is correct on {right_of(vote)} problem{'s' * (vote.n_problems != 1)}"


def _text(cost: Spend) -> str:
    if math.isnan(cost.target_share):
        return ""
    share = {0.0: "none", 1.0: "all"}.get(cost.target_share, percent(cost.target_share))
    return f"the target wrote {share} of the text"


def _beside(other: Baseline) -> str:
    """Return a sentence that compares the run with the first other run."""
    ratio = other.target_token_ratio
    said = f"the vote of {other.name} is correct on {right_of(other.other)}"
    if math.isnan(ratio):
        return said
    much = f"{1 / ratio:.2g} times as many tokens" if 0 < ratio < math.inf else "no tokens"
    if not ratio:
        much = f"{other.target_tokens_per_problem:,.0f} tokens per problem"
    if 0.95 < ratio < 1.05:
        much = "as many tokens"
    return f"{said}, and its target wrote {much}"


def _right(vote: Estimate | None, count: int) -> ShownNumber:
    if vote is None:
        return ShownNumber(f"{count:,}", "problems", "none graded: there is no reference answer")
    problems = "problem" if vote.n_problems == 1 else "problems"
    note = f"{right_of(vote)} {problems}, each by the vote of its rollouts; {span(vote)}"
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
    return ShownNumber(percent(cost.target_share), "of the text was written by the target", note)


def _escalated(cost: Spend, calibration: RateControl | None) -> ShownNumber:
    if calibration is None:
        per_second = (
            ""
            if math.isnan(cost.tokens_per_second)
            else f"{cost.tokens_per_second:,.0f} tokens a second"
        )
        if not cost.seconds:
            return ShownNumber("unknown", "seconds", "the run was imported")
        return ShownNumber(f"{cost.seconds:,.3g} s", "in all sessions", per_second)
    share = calibration.escalated / calibration.decisions
    check = calibration.check()
    asked = "no rate was promised"
    if check is not None:
        asked = f"nominal rate {percent(check.nominal)}: {_STANDINGS[check.standing]}"
    note = f"{calibration.escalated:,} of {calibration.decisions:,} chunks; {asked}"
    return ShownNumber(percent(share), "of the chunks were escalated", note)
