"""What to know before believing a run's numbers, worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from atts.analysis.report.gather import Evidence
from atts.analysis.report.numbers import Calibration, Caveat, Standing

_FLAGS: dict[str, tuple[Standing, str]] = {
    "reference in text": ("care", "rollouts end in the reference answer, but no answer was extracted from them"),
    "cut box": ("care", "rollouts were cut inside a \\boxed{ that was never closed: no answer"),
    "token cap": ("care", "rollouts stopped at their token limit"),
    "turn cap": ("care", "rollouts stopped at their last turn"),
    "no answer": ("care", "rollouts ended by themselves without an answer"),
    "failed": ("bad", "rollouts failed"),
    "forced": ("care", "rollouts hold chunks that had no usable score and went to the target"),
    "infinite score": ("care", "rollouts hold a chunk the target gave no probability at all"),
}
_SHOWN = 5
_LARGE = 0.05  # the share of rollouts from which a flag weighs


def caveats(evidence: Evidence, calibration: Calibration | None) -> tuple[Caveat, ...]:
    """Everything worth a warning badge."""
    found = [*_session(evidence), *_flags(evidence), *_grading(evidence), *_calibration(calibration), *_own(evidence)]
    order = {"bad": 0, "care": 1, "good": 2}
    return tuple(sorted(found, key=lambda caveat: (order[caveat.standing], -caveat.count)))


def _session(evidence: Evidence) -> Iterator[Caveat]:
    planned, done = evidence.manifest.problems, len(evidence.solved)
    if planned is not None and done < planned:
        text = f"problems of {planned:,} are not over: every number is of the {done:,} that are, the quick ones first"
        yield Caveat("unfinished", "bad", planned - done, text)
    if evidence.killed or evidence.ended is None:
        ended = evidence.killed + (evidence.ended is None)
        yield Caveat("killed", "good", ended, "sessions ended without closing (killed, or still running)")
    for error, count in evidence.failed_calls.items():
        yield Caveat("failed calls", "care", count, f"engine calls failed: {error}")


def _flags(evidence: Evidence) -> Iterator[Caveat]:
    places: dict[str, list[tuple[str, int | None]]] = {}
    total = 0
    for name, one in evidence.solved.items():
        for line in one.samples:
            total += 1
            for flag in line.flags:
                places.setdefault(flag, []).append((name, line.sample))
    for flag, (standing, text) in _FLAGS.items():
        if found := places.get(flag):
            weighs = standing == "bad" or len(found) > _LARGE * total
            yield Caveat(flag, standing if weighs else "good", len(found), text, tuple(found[:_SHOWN]))


def _grading(evidence: Evidence) -> Iterator[Caveat]:
    unscored = [(name, None) for name, one in evidence.solved.items() if one.verdict == "unscored"]
    if unscored:
        yield Caveat("unscored", "care", len(unscored), "answers that the grader could not decide count as not right",
                     tuple(unscored[:_SHOWN]))  # fmt: skip
    broken = [(name, None) for name, one in evidence.solved.items() if "the grader failed" in one.rule]
    if broken:
        yield Caveat("grader failed", "bad", len(broken), "answers on which the grader itself failed",
                     tuple(broken[:_SHOWN]))  # fmt: skip
    failed = [(name, None) for name, one in evidence.solved.items() if one.status == "failed"]
    if failed:
        yield Caveat("failed problems", "bad", len(failed), "problems failed; the next session tries them again",
                     tuple(failed[:_SHOWN]))  # fmt: skip
    silent = [(name, None) for name, one in evidence.solved.items() if one.status == "unanswered"]
    if silent:
        yield Caveat("unanswered", "care", len(silent), "problems came to no answer at all", tuple(silent[:_SHOWN]))


def _calibration(calibration: Calibration | None) -> Iterable[Caveat]:
    if calibration is None or calibration.nominal is None:
        return
    if calibration.forced:
        yield Caveat("forced decisions", "care", calibration.forced, "decisions had no score to rest on")
    for alarm in calibration.alarms:
        acted = f"; {alarm.acted}" if alarm.acted else ""
        yield Caveat("drift", "bad", alarm.scores, f"scores in, the calibration no longer held: {alarm.text}{acted}")
    outside = [group.name for group in calibration.turns if not group.inside]
    if outside:
        yield Caveat("turns", "care", len(outside), f"turns left the band of the nominal rate: {', '.join(outside)}")


def _own(evidence: Evidence) -> Iterator[Caveat]:
    """The run's own warnings, each kind once."""
    counts = Counter(warned.code for warned in evidence.warned)
    first = {warned.code: warned for warned in reversed(evidence.warned)}
    for code, count in counts.items():
        warned = first[code]
        places = tuple((w.problem, w.sample) for w in evidence.warned if w.code == code and w.problem)
        yield Caveat(code, "care" if code != "interrupted" else "good", count, warned.text, places[:_SHOWN])
