"""Warnings about a run's numbers, worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from atts.analysis.report.numbers import Caveat, RateControl
from atts.analysis.report.run_data import RunData
from atts.analysis.report.words import WORDS
from atts.journal import COMPARED, FinishedProblem, truncation

_SHOWN = 5
_LARGE = 0.05  # the share of rollouts from which a flag weighs


def caveats(data: RunData, calibration: RateControl | None) -> tuple[Caveat, ...]:
    """Everything worth a warning badge."""
    found = [
        *_session(data),
        *_truncation(data),
        *_flags(data),
        *_grading(data),
        *_calibration(calibration),
        *_own(data),
    ]
    order = {"bad": 0, "care": 1, "good": 2}
    return tuple(sorted(found, key=lambda caveat: (order[caveat.standing], -caveat.count)))


def _session(data: RunData) -> Iterator[Caveat]:
    planned = data.run.manifest.problems
    done = len(data.problems)
    is_decided = COMPARED in data.state.said and not data.state.open
    if planned is not None and done < planned and not is_decided:
        text = f"problems of {planned:,} are not over: every number is of the {done:,} that are, the quick ones first"
        yield Caveat("unfinished", "bad", planned - done, text)
    killed = data.state.killed + (data.state.ended is None)
    if killed:
        yield Caveat(
            "killed", "good", killed, "sessions ended without closing (killed, or still running)"
        )
    for error, count in data.failed_calls.items():
        yield Caveat("failed calls", "care", count, f"engine calls failed: {error}")


def _truncation(data: RunData) -> Iterator[Caveat]:
    """The sentence that the command line ends with, too."""
    found = truncation([one.brief for one in data.problems.values()], data.run.manifest)
    if found.cut:
        places = [
            (n, s.sample) for n, one in data.problems.items() for s in one.brief.samples if s.is_cut
        ]
        yield Caveat(
            "cut",
            "bad" if found.is_large else "good",
            found.cut,
            str(found),
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
        if found := places.get(flag):
            weighs = told.standing == "bad" or len(found) > _LARGE * total
            yield Caveat(
                flag,
                told.standing if weighs else "good",
                len(found),
                told.text,
                tuple(found[:_SHOWN]),
            )


def _grading(data: RunData) -> Iterator[Caveat]:
    """Problems whose verdict, or lack of one, weighs on the numbers."""
    briefs = {name: one.brief for name, one in data.problems.items()}
    belongs: dict[str, Callable[[FinishedProblem], bool]] = {
        "unscored": lambda one: one.verdict == "unscored",
        "grader failed": lambda one: "the grader failed" in one.rule,
        "incomplete": lambda one: not one.is_complete,
        "unanswered": lambda one: one.status == "unanswered" and not one.votes,
    }
    for code, told in WORDS.problems.items():
        if found := [(name, None) for name, one in briefs.items() if belongs[code](one)]:
            yield Caveat(code, told.standing, len(found), told.text, tuple(found[:_SHOWN]))


def _calibration(calibration: RateControl | None) -> Iterable[Caveat]:
    if calibration is None or calibration.nominal is None:
        return
    if calibration.forced:
        yield Caveat(
            "forced decisions", "care", calibration.forced, "decisions had no score to rest on"
        )
    for alarm in calibration.alarms:
        acted = f"; {alarm.acted}" if alarm.acted else ""
        yield Caveat(
            "drift",
            "bad",
            alarm.scores,
            f"scores in, the calibration no longer held: {alarm.text}{acted}",
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
    """The run's own warnings, each kind once."""
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
