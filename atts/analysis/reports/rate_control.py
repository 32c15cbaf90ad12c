"""Compare the realised rate of a run with the nominal rate and with the guarantee."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Literal

import numpy as np

from atts.analysis.reports.numbers import (
    WORDS,
    DriftAlarm,
    DriftTest,
    GroupRate,
    RateControl,
    RatePoint,
    StatedGuarantee,
    Uniformity,
)
from atts.analysis.reports.run_data import AUDIT, RunData
from atts.analysis.run_replay import fresh_calibrator
from atts.analysis.steps import GateStep
from atts.calibration import (
    MODES,
    PERPLEXITY,
    REAL,
    Calibrator,
    ClusterSummary,
    Mode,
    Scale,
    SimpleJumper,
    by_cluster,
    coin_band,
    rate_metrics,
    summarise,
)
from atts.core import Decision
from atts.errors import CalibrationInputError
from atts.evaluators import (
    Estimate,
    LabelledChunk,
    gain_over_coin,
    share_estimate,
    within_question_auroc,
)
from atts.journal import Json
from atts.sampling import Seed, uniforms

_RELIABILITY_BINS = 5
LabelSource = Literal["verdicts", "votes"]
"""How a rollout is known to be correct: by verdicts on its answer, or by agreement with the vote.
"""


@dataclass(frozen=True, slots=True)
class RightBin:
    """The chunks with p-values between `low` and `high`, and how many of their answers are correct."""

    low: float
    high: float
    right: Estimate


@dataclass(frozen=True, slots=True)
class LabelledScores:
    """The share of correct rollouts by score, from chunks that the draft wrote.

    `gain` is the additional share of wrong rollouts' chunks that the score escalates, compared with
    a coin of the nominal rate. `auroc` is the probability that a chunk of a wrong rollout scores
    worse than one of a correct rollout. Both compare chunks within a question.
    """

    labelled: int
    labels: LabelSource
    gain: Estimate
    auroc: Estimate
    bins: tuple[RightBin, ...]


def labelled_scores(
    labels: Sequence[tuple[GateStep, bool]],
    rate: float,
    source: LabelSource = "verdicts",
    scale: Scale | None = None,
) -> LabelledScores | None:
    """Compare scores with whether their rollouts were correct; None if no chunk is labelled."""
    known = sorted(
        ((step.decision.p, right, step) for step, right in labels if step.decision.p is not None),
        key=itemgetter(0),
    )
    if not known:
        return None
    chunks = [
        LabelledChunk(step.decision.question, _nonconformity(step.decision, scale), not right)
        for _, right, step in known
        if step.decision.score is not None
    ]
    parts = np.array_split(np.arange(len(known)), min(_RELIABILITY_BINS, len(known)))
    return LabelledScores(
        len(known),
        labels=source,
        gain=gain_over_coin(chunks, rate),
        auroc=within_question_auroc(chunks),
        bins=tuple(_bin([known[at] for at in part]) for part in parts),
    )


def _bin(rows: Sequence[tuple[float, bool, GateStep]]) -> RightBin:
    counts = dict[str, tuple[int, int]]()
    for _, right, step in rows:
        had, of = counts.get(step.decision.question, (0, 0))
        counts[step.decision.question] = (had + right, of + 1)
    return RightBin(rows[0][0], rows[-1][0], share_estimate(counts.values()))


_TRIAL = 300  # number of steps by which the mode is recognised


@dataclass(frozen=True, slots=True)
class _Match:
    mode: Mode
    calibrator: Calibrator
    checked: int
    same: int


def stated_guarantee(data: RunData, nominal: float | None) -> StatedGuarantee:
    """Return the text of the guarantee, with the run's numbers and the conditions that void it.

    If a model computed in bfloat16, the text also says that a repetition may differ in single
    tokens.
    """
    stated = _of_gate(data, nominal)
    rounded = repeats_in_words(data.run.manifest.engines)
    if not rounded:
        return stated
    return replace(stated, voided_by="; ".join(filter(None, (stated.voided_by, rounded))))


def repeats_in_words(engines: Mapping[str, Mapping[str, Json]]) -> str:
    """Return a note on what a repetition of the run may change because engines round; "" if none
    does.
    """
    rounding = [
        role for role, engine in engines.items() if str(engine.get("dtype", "")) == "bfloat16"
    ]
    if not rounding:
        return ""
    return (
        f"the same seed may give another text where tokens almost tie: {' and '.join(rounding)} computed "
        f"in bfloat16 (?dtype=float32 behind a local engine's name avoids this)"
    )


def _of_gate(data: RunData, nominal: float | None) -> StatedGuarantee:
    """Return the guarantee of the run's gate."""
    gate = str(data.run.setting("gate") or "unknown")
    own = data.run.setting("promise")
    if isinstance(own, list) and len(own) == 2:
        return StatedGuarantee(gate, str(own[0]), str(own[1]), "")
    if told := WORDS.gates.get(gate):
        return StatedGuarantee(gate, told.guarantee, told.voided_by, "")
    named = next(
        filter(None, map(data.run.setting, ("rate_scope", "calibration.mode", "calibration"))), None
    )
    modes: list[Mode] = [mode for mode in reversed(MODES) if named not in MODES or mode == named]
    match = _recognise(data, nominal, modes) if nominal is not None else None
    if match is None and not _has_ranks(data):
        return StatedGuarantee(
            gate,
            f"no guarantee is stated: {gate} is not a gate of atts, and has no `promise`",
            "nothing, because the gate promises nothing",
            "",
        )
    if match is None:
        return StatedGuarantee(
            str(named or "unknown"),
            "not known: the run directory does not name the mode of the gate, and no mode "
            "without stored scores "
            "takes the recorded decisions",
            "not known, because the mode of the gate is not known",
            "no mode reproduces the recorded p-values; a calibrator cannot be rebuilt if the "
            "manifest does not name its stored scores",
        )
    missing = match.checked - match.same
    audit = (
        f"atts repeated {match.checked:,} recorded decisions from the journal alone, and {match.same:,} "
        "had the recorded result"
        + (f"; {missing:,} had another result" if missing else "")
        + ("" if named else "; this repetition identified the mode of the gate")
    )
    return StatedGuarantee(
        match.mode, match.calibrator.guarantee, match.calibrator.voided_by, audit
    )


def _has_ranks(data: RunData) -> bool:
    """Return whether any decision has a p-value, which all calibrated decisions have."""
    return any(step.decision.p is not None for step in data.steps.between(0, len(data.steps)))


def _recognise(data: RunData, nominal: float, modes: Sequence[Mode]) -> _Match | None:
    """Return the mode whose calibrator reproduces the journal's decisions."""
    best: _Match | None = None
    first = data.steps.between(0, data.parts[1] if len(data.parts) > 1 else len(data.steps))
    for mode in modes:
        trial = _replayed(data, first[:_TRIAL], mode, nominal, _TRIAL)
        if trial is not None and trial.checked and trial.same > 0.9 * trial.checked:
            best = trial if best is None or trial.same > best.same else best
            if best.same == best.checked:
                break
    return None if best is None else _audited(data, best.mode, nominal)


def _audited(data: RunData, mode: Mode, nominal: float) -> _Match | None:
    """Audit all steps; in a merged run, the steps of each part are audited against that part's
    calibrator.
    """
    ends = [*data.parts[1:], len(data.steps)]
    whole: _Match | None = None
    for begin, end in zip(data.parts, ends, strict=True):
        part = _replayed(data, data.steps.between(begin, end), mode, nominal, AUDIT - begin)
        if part is None:
            return None
        part.calibrator.settle()
        if whole is None:
            whole = part
            continue
        whole.calibrator.merge(part.calibrator.state())
        whole = replace(whole, checked=whole.checked + part.checked, same=whole.same + part.same)
    return whole


def _replayed(
    data: RunData, steps: Sequence[GateStep], mode: Mode, rate: float, audit: int
) -> _Match | None:
    try:
        calibrator = fresh_calibrator(data.run, rate, mode)
    except CalibrationInputError:  # this mode needs stored scores
        return None
    checked = same = 0
    for place, step in enumerate(steps):
        decision = step.decision
        overruled = step.decision.origin == "budget"
        try:
            if step.kind == "observed":
                calibrator.observe(decision, step.escalated)
            elif (
                place < audit
                and not overruled
                and decision.score is not None
                and decision.p is not None
            ):
                again = calibrator.decide(
                    decision.score, decision.question, decision.turn, decision.sample, decision.issue,
                    left=step.left, length=decision.length,
                )  # fmt: skip
                checked += 1
                same += again.action == decision.action and math.isclose(
                    again.p or 0.0, decision.p, abs_tol=1e-9
                )
        except CalibrationInputError:  # the scores are on another scale than perplexities
            return None
    return _Match(mode, calibrator, checked, same)


LEVEL = 0.95
DRIFT_LEVEL = 0.01
_BINS = 20
_MOMENTS = 160  # points of the curve over time
_CURVE = 100  # points of the curve of p-values


def realised_rate(data: RunData) -> RateControl | None:
    """Return all numbers about a run's rate; None if its gate took no decisions."""
    done = data.done
    if not done:
        return None
    alarms = tuple(
        DriftAlarm(event.alarm, event.scores, event.p, event.acted, event.text)
        for event in data.drifted
    )
    return rate_control(done, stated_guarantee(data, _nominal(done)), alarms)


def rate_control(
    done: Sequence[GateStep],
    promise: StatedGuarantee,
    alarms: tuple[DriftAlarm, ...],
    scale: Scale | None = None,
) -> RateControl:
    """Return all numbers about the rate; there must be at least one decision."""
    columns = _columns(done, scale)
    nominal = columns.nominal
    by_question = _groups(columns.questions, columns.escalated)
    shares = [sum(flags) / len(flags) for flags in by_question.values()]
    summary = _clusters(columns)
    window = max(20, min(500, len(done) // 6))
    rms = (
        math.sqrt(float(np.mean([(share - nominal) ** 2 for share in shares])))
        if nominal is not None
        else math.nan
    )
    return RateControl(
        nominal,
        decisions=len(done),
        escalated=sum(columns.escalated),
        forced=columns.forced,
        questions=len(by_question),
        rate=share_estimate((sum(flags), len(flags)) for flags in by_question.values()),
        turns=_banded(_groups(columns.turns, columns.escalated), nominal, "turn "),
        by_question=_banded(by_question, nominal),
        question_rms=rms,
        coin_rms=_coin_rms([len(flags) for flags in by_question.values()], nominal),
        window=window,
        moments=_moments(columns.escalated, nominal, window),
        p_values=_uniformity(columns),
        drift=_drift(columns),
        alarms=alarms,
        effective=str(summary) if summary else "no decision is based on a score",
        effective_n=summary.effective if summary else math.nan,
        promise=promise,
        metrics=_metrics(columns),
    )


@dataclass(slots=True)
class _Columns:
    """The decision on each chunk, stored in columns, because a run may have judged a million
    chunks.
    """

    questions: list[str] = field(default_factory=list[str])
    turns: array[int] = field(default_factory=lambda: array("I"))
    escalated: bytearray = field(default_factory=bytearray)  # 0 or 1 for each decision
    # indices of the decisions that have a score, and their nonconformities
    judged: array[int] = field(default_factory=lambda: array("I"))
    bad: array[float] = field(default_factory=lambda: array("d"))
    # indices of the decisions that have a p-value, and their p-values
    ranked: array[int] = field(default_factory=lambda: array("I"))
    p: array[float] = field(default_factory=lambda: array("d"))
    forced: int = 0
    nominal: float | None = None


def _columns(done: Sequence[GateStep], scale: Scale | None) -> _Columns:
    columns = _Columns()
    rates = Counter[float]()
    for place, step in enumerate(done):
        decision = step.decision
        columns.questions.append(decision.question)
        columns.turns.append(decision.turn)
        columns.escalated.append(step.escalated)
        columns.forced += decision.origin == "forced"
        rates[decision.rate] += math.isfinite(decision.rate)
        if decision.score is not None:
            columns.judged.append(place)
            columns.bad.append(_nonconformity(decision, scale))
        if decision.p is not None:
            columns.ranked.append(place)
            columns.p.append(decision.p)
    columns.nominal = _most_named(rates)
    return columns


def _nominal(done: Sequence[GateStep]) -> float | None:
    """Return the most frequent rate of the decisions; a gate without a rate has NaN."""
    return _most_named(
        Counter(step.decision.rate for step in done if math.isfinite(step.decision.rate))
    )


def _most_named(rates: Counter[float]) -> float | None:
    named = [(rate, count) for rate, count in rates.most_common(2) if count]
    return named[0][0] if named else None


def _groups(keys: Sequence[Hashable], flags: Iterable[int]) -> dict[Hashable, bytearray]:
    groups: dict[Hashable, bytearray] = {}
    for key, flag in zip(keys, flags, strict=True):
        groups.setdefault(key, bytearray()).append(flag)
    return groups


def _banded(
    groups: Mapping[Hashable, Sequence[int]], nominal: float | None, prefix: str = ""
) -> tuple[GroupRate, ...]:
    """Return each group with a band that is valid for all groups simultaneously."""
    level = 1 - (1 - LEVEL) / max(1, len(groups))
    bands = {size: coin_band(size, nominal, level) for size in set(map(len, groups.values()))}
    rows = sorted(groups.items(), key=lambda item: item[0] if isinstance(item[0], int) else 0)
    return tuple(
        GroupRate(f"{prefix}{name}", len(flags), sum(flags), *bands[len(flags)])
        for name, flags in rows
    )


def _coin_rms(sizes: Sequence[int], nominal: float | None) -> float:
    """Return the root mean square that a coin of the nominal rate would give."""
    if nominal is None:
        return math.nan
    return math.sqrt(nominal * (1 - nominal) * float(np.mean([1 / size for size in sizes])))


def _moments(flags: bytearray, nominal: float | None, window: int) -> tuple[RatePoint, ...]:
    sums = np.concatenate([[0], np.cumsum(np.frombuffer(flags, np.uint8), dtype=np.int64)])
    at = np.unique(np.linspace(min(10, len(flags)), len(flags), _MOMENTS).astype(int))
    return tuple(
        RatePoint(
            int(n),
            float(sums[n] / n),
            *coin_band(int(n), nominal),
            float((sums[n] - sums[n - window]) / window) if n >= window else None,
        )
        for n in at
    )


def _nonconformity(decision: Decision, scale: Scale | None) -> float:
    assert decision.score is not None, "the decision has no score"
    likely = PERPLEXITY if decision.score >= 1 else REAL  # perplexities are never below 1
    return (scale or likely).nonconformity(decision.score)


def _clusters(columns: _Columns) -> ClusterSummary | None:
    if not columns.judged:
        return None
    questions = [columns.questions[place] for place in columns.judged]
    return summarise(by_cluster(columns.bad, questions))


def _uniformity(columns: _Columns) -> Uniformity | None:
    """Compare the p-values with the uniform distribution, in a Dvoretzky-Kiefer-Wolfowitz band."""
    if not columns.ranked:
        return None
    values = np.sort(np.array(columns.p, float))
    questions = [columns.questions[place] for place in columns.ranked]
    effective = summarise(by_cluster(columns.p, questions)).effective
    n = len(values)
    grid = np.linspace(0, 1, _CURVE + 1)
    above = np.arange(1, n + 1) / n - values
    below = values - np.arange(n) / n
    return Uniformity(
        n,
        effective,
        float(max(above.max(), below.max())),
        min(1.0, math.sqrt(math.log(2 / (1 - LEVEL)) / (2 * max(1.0, effective)))),
        tuple(int(count) for count in np.histogram(values, _BINS, (0, 1))[0]),
        tuple((float(p), float(np.searchsorted(values, p, "right") / n)) for p in grid),
    )


def _drift(columns: _Columns) -> DriftTest | None:
    """Bet on the smoothed rank of each question's mean first-turn score among the questions before
    it.

    Questions are the units because the scores of a question are correlated. If the questions are
    exchangeable, the capital ever reaches 1 / level with probability at most level.
    """
    first = dict[str, list[float]]()
    for place, nonconformity in zip(columns.judged, columns.bad, strict=True):
        if columns.turns[place] == 0 and math.isfinite(nonconformity):
            first.setdefault(columns.questions[place], []).append(nonconformity)
    means = [math.fsum(scores) / len(scores) for scores in first.values()]
    if len(means) < 2:
        return None
    martingale = SimpleJumper()
    path = list[float]()
    earlier = list[float]()
    for place, mean in enumerate(means):
        below = bisect_left(earlier, mean)
        up_to = bisect_right(earlier, mean)
        theta = float(uniforms(Seed(0, "drift", place), 1)[0])
        martingale.update((below + theta * (1 + up_to - below)) / (place + 1))
        path.append(martingale.log_value / math.log(10))
        earlier.insert(up_to, mean)
    return DriftTest(
        len(means), tuple(path), martingale.log_peak / math.log(10), -math.log10(DRIFT_LEVEL)
    )


def _metrics(columns: _Columns) -> Mapping[str, float]:
    if columns.nominal is None or not columns.judged:
        return {}
    return rate_metrics(
        [columns.questions[place] for place in columns.judged],
        [columns.turns[place] for place in columns.judged],
        columns.bad,
        [bool(columns.escalated[place]) for place in columns.judged],
        columns.nominal,
    )
