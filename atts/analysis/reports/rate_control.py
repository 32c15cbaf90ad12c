"""The comparison of a run's realised rate with its nominal rate and its guarantee."""

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
from atts.errors import CalibrationInputError, counted
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
"""The data that say whether a rollout is correct. "verdicts": the verdicts on the answers. "votes":
the agreement of an answer with the problem's vote.
"""


@dataclass(frozen=True, slots=True)
class RightBin:
    """The share of chunks whose rollouts are correct, among the chunks with p-values between `low`
    and `high`.
    """

    low: float
    high: float
    right: Estimate


@dataclass(frozen=True, slots=True)
class LabelledScores:
    """A measurement on the draft's chunks of how well scores predict which rollouts are correct.

    `gain` is the share of chunks of wrong rollouts that the score escalates, minus the share that a
    coin of the nominal rate escalates. `auroc` is the probability that a chunk of a wrong rollout
    scores worse than a chunk of a correct rollout. Both numbers compare chunks of the same
    question.
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
    """Measure how well scores predict which rollouts are correct; return None if no labelled chunk
    has a p-value.
    """
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


# To find the unknown mode of a run's calibrator, at most this many of its first steps are repeated
# in each possible mode.
_TRIAL = 300


@dataclass(frozen=True, slots=True)
class _Match:
    mode: Mode
    calibrator: Calibrator
    checked: int
    same: int


def stated_guarantee(data: RunData, nominal: float | None) -> StatedGuarantee:
    """Return the guarantee of a run's gate with the run's numbers, and the conditions that void the
    guarantee.

    If a model computed in bfloat16, the text also says that a repeated run may differ in single
    tokens.
    """
    stated = _of_gate(data, nominal)
    rounded = repeats_in_words(data.run.manifest.engines)
    if not rounded:
        return stated
    return replace(stated, voided_by="; ".join(filter(None, (stated.voided_by, rounded))))


def repeats_in_words(engines: Mapping[str, Mapping[str, Json]]) -> str:
    """Return a note that a repeated run may write other tokens because engines computed in
    bfloat16. Return "" if no engine did.
    """
    rounding = [
        role for role, engine in engines.items() if str(engine.get("dtype", "")) == "bfloat16"
    ]
    if not rounding:
        return ""
    return (
        "even with the same seed, a text may differ where two tokens are almost equally likely: "
        f"{' and '.join(rounding)} computed in bfloat16. To avoid this, add ?dtype=float32 to a "
        "local engine's address"
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
            f"no guarantee is known: {gate} is not one of the gates of atts, and has no "
            "attribute `promise`",
            "nothing, because the gate gives no guarantee",
            "",
        )
    if match is None:
        return StatedGuarantee(
            str(named or "unknown"),
            "not known: the run directory does not record the rate scope, and no scope that "
            "can be checked without stored scores reproduces the recorded decisions",
            "not known, because the rate scope is not known",
            "no rate scope reproduces the recorded p-values; if the run started from stored "
            "scores, the manifest must name them before atts can rebuild the calibrator",
        )
    missing = match.checked - match.same
    audit = (
        f"atts recomputed {counted(match.checked, 'recorded decision')} from the journal; "
        f"{match.same:,} of them had the recorded result"
        + (f"; {missing:,} of them had a different result" if missing else "")
        + ("" if named else "; the recomputation identified the rate scope")
    )
    return StatedGuarantee(
        match.mode, match.calibrator.guarantee, match.calibrator.voided_by, audit
    )


def _has_ranks(data: RunData) -> bool:
    """Return whether any decision has a p-value, which means that a calibrator decided."""
    return any(step.decision.p is not None for step in data.steps.between(0, len(data.steps)))


def _recognise(data: RunData, nominal: float, modes: Sequence[Mode]) -> _Match | None:
    """Return the calibrator mode that best reproduces the recorded decisions, or None if no mode
    reproduces over 90 % of them.
    """
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
    """Let a calibrator of this mode decide on a gate's recorded steps, and compare its decisions
    with the recorded ones.

    The parts of a merged run get separate calibrators, because each part had its own calibrator
    when it was recorded.
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
    # the mode needs stored scores, but the run does not record which scores were stored
    except CalibrationInputError:
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
        # the calibrator expects perplexities, but these scores are not perplexities
        except CalibrationInputError:
            return None
    return _Match(mode, calibrator, checked, same)


LEVEL = 0.95
DRIFT_LEVEL = 0.01
_BINS = 20
_MOMENTS = 160  # number of points in the chart of the rate over time
_CURVE = 100  # number of points in the chart of p-values


def realised_rate(data: RunData) -> RateControl | None:
    """Compare a run's realised rate with its nominal rate; return None if the run's gate took no
    decisions.
    """
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
    """Compare the realised rate of these steps with the nominal rate; there must be at least one
    step.
    """
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
        effective=str(summary) if summary else "no decision was based on a score",
        effective_n=summary.effective if summary else math.nan,
        promise=promise,
        metrics=_metrics(columns),
    )


@dataclass(slots=True)
class _Columns:
    """The decisions of a run, stored in arrays, because a run may have a million judged chunks."""

    questions: list[str] = field(default_factory=list[str])
    turns: array[int] = field(default_factory=lambda: array("I"))
    # for each decision: 1 if the chunk was escalated, 0 if it was not
    escalated: bytearray = field(default_factory=bytearray)
    # `judged`: indices of the decisions that have a score. `bad`: the nonconformities of these
    # scores (higher is worse).
    judged: array[int] = field(default_factory=lambda: array("I"))
    bad: array[float] = field(default_factory=lambda: array("d"))
    # `ranked`: indices of the decisions that have a p-value. `p`: these p-values.
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
    """Return the nominal rate that most decisions have; NaN if the gate has no nominal rate."""
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
    """Return the realised rate of each group of decisions, with bands that hold for all groups at
    once.
    """
    level = 1 - (1 - LEVEL) / max(1, len(groups))
    bands = {size: coin_band(size, nominal, level) for size in set(map(len, groups.values()))}
    rows = sorted(groups.items(), key=lambda item: item[0] if isinstance(item[0], int) else 0)
    return tuple(
        GroupRate(f"{prefix}{name}", len(flags), sum(flags), *bands[len(flags)])
        for name, flags in rows
    )


def _coin_rms(sizes: Sequence[int], nominal: float | None) -> float:
    """Return the root mean square difference from the nominal rate that chance alone would cause in
    the realised rates of groups of these sizes.

    Each decision is assumed to be an independent coin with the nominal rate.
    """
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
    # A perplexity is at least 1, so a score below 1 is not a perplexity.
    likely = PERPLEXITY if decision.score >= 1 else REAL
    return (scale or likely).nonconformity(decision.score)


def _clusters(columns: _Columns) -> ClusterSummary | None:
    if not columns.judged:
        return None
    questions = [columns.questions[place] for place in columns.judged]
    return summarise(by_cluster(columns.bad, questions))


def _uniformity(columns: _Columns) -> Uniformity | None:
    """Measure the distance of p-values from the uniform distribution, with a
    Dvoretzky-Kiefer-Wolfowitz band.
    """
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
    """Test for drift by a martingale, which bets on how each question's mean first-turn score ranks
    among earlier questions.

    Questions are ranked instead of chunks, because the scores of a question are correlated. If the
    questions are exchangeable, the probability that the martingale's capital ever reaches 1 /
    `level` is at most `level`.
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
