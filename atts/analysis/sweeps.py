"""The runs of a sweep, and the curves through them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from atts.analysis.listing import RunStanding, standing_of
from atts.errors import JournalCorrupt, JournalError
from atts.evaluators import (
    Comparison,
    Estimate,
    accuracy_estimate,
    compare_runs,
    holm,
    mean_estimate,
    share_estimate,
)
from atts.files import read_ordinary, storage, write_atomic
from atts.journal import (
    REPLIES,
    FinishedProblem,
    Json,
    RecordedRun,
    RunState,
    Sampled,
    Scored,
    SharedReplies,
    SharedReply,
    reply_key,
    run_if_begun,
    run_number,
)
from atts.ledger import PRICES, money_of, recorded_prices

SWEEP = "sweep.json"
Value = str | int | float | bool | None
"""A value of a setting that varies."""
PointKind = Literal["point", "reference"]
"""The kind of a run: a run of the grid, or a baseline for comparison."""


@dataclass(frozen=True, slots=True)
class RunSetPoint:
    """One run of the set: `values` are the settings that vary, and `folder` is its folder in the
    directory of the set.
    """

    name: str
    kind: PointKind
    values: Mapping[str, Value]
    folder: str


@dataclass(frozen=True, slots=True)
class RunSet:
    """A set of runs: `over` has the settings that vary with their values, `settings` those that all
    runs share.
    """

    over: Mapping[str, tuple[Value, ...]]
    settings: Mapping[str, Json]
    points: tuple[RunSetPoint, ...]
    schema: Literal[1] = 1


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """Keys that the file must have, and the types of their values."""

    over: dict[str, list[Value]]
    settings: dict[str, msgspec.Raw]
    points: list[RunSetPoint]
    schema: Literal[1]


def load_run_set(directory: Path) -> RunSet:
    """Return the set of runs that a directory holds.

    :raises JournalError: there is none, or it cannot be read.
    :raises JournalCorrupt: the file is not one.
    """
    path = directory / SWEEP
    with storage(path):
        if not path.exists():
            raise JournalError(
                directory, "there is no sweep here", "Give the directory of `atts sweep --out`"
            )
        text = read_ordinary(path)
    try:
        stored = msgspec.json.decode(text, type=_Stored)
        settings = {name: msgspec.json.decode(raw) for name, raw in stored.settings.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JournalCorrupt(
            path,
            f"it does not describe a set of runs ({error})",
            "Its runs are not damaged; restore the file from a copy",
        ) from error
    outside = [point.folder for point in stored.points if Path(point.folder).name != point.folder]
    if outside:
        raise JournalCorrupt(
            path, f"the run {outside[0]!r} would not be in this directory", "Restore a copy"
        )
    return RunSet(
        {name: tuple(values) for name, values in stored.over.items()},
        settings,
        tuple(stored.points),
    )


def save_run_set(directory: Path, held: RunSet) -> None:
    """Write the set of runs atomically.

    :raises StorageError: the disk refuses.
    """
    text = msgspec.json.format(msgspec.json.encode(asdict(held)), indent=2)
    write_atomic(directory / SWEEP, text + b"\n")


LENGTHS = ("samples", "max_tokens", "turns")
"""The settings that a curve follows if they vary: each spends more tokens of the same models."""


@dataclass(slots=True)
class CallTotals:
    """The engine calls of a run: their number, how many replies came from other runs, and their
    seconds.
    """

    calls: int = 0
    shared: int = 0
    seconds: float = 0.0

    def count(self, own: float, held: SharedReply | None, run: int) -> None:
        """Count a call; a shared reply counts with the time that the first run waited for it."""
        is_shared = held is not None and held.run != run
        self.calls += 1
        self.shared += is_shared
        self.seconds += held.seconds if held is not None and is_shared else own


@dataclass(frozen=True, slots=True)
class Contrast:
    """A run compared with a baseline, problem by problem.

    `p_value` is corrected by Holm's method for all comparisons with this kind of baseline.
    """

    estimate: Estimate
    p_value: float

    def __str__(self) -> str:
        return f"{self.estimate.signed()} p {self.p_value:.2g}"


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One run of the set; costs are per problem, as if the run had been made alone."""

    name: str
    kind: PointKind
    values: Mapping[str, Value]
    directory: str
    standing: RunStanding
    done: int
    problems: int | None
    samples: int
    accuracy: Estimate
    oracle: Estimate  # the share of problems in which any rollout was correct
    rate: Estimate
    target_tokens: float
    draft_tokens: float
    scored_tokens: float
    seconds: float  # seconds of engine calls, added up
    calls: int
    shared: int  # number of replies that were taken from another run of the set
    dollars: float | None  # None: a model has no price
    right: Mapping[str, float] = field(repr=False)  # keyed by problem that was graded
    # keyed by problem: the share of correct ones among the rollouts that ended
    shares: Mapping[str, float] = field(repr=False)
    difference: Contrast | None = None  # difference in accuracy from the target alone
    # gain in accuracy of single rollouts over a coin of the same policy
    gain: Contrast | None = None

    @property
    def is_drawn(self) -> bool:
        """Return True if there is an accuracy to draw."""
        return not math.isnan(self.accuracy.value)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """A set of runs in numbers."""

    directory: str
    over: Mapping[str, tuple[Value, ...]]
    settings: Mapping[str, Json]
    points: tuple[ScalingPoint, ...]

    @property
    def grid(self) -> tuple[ScalingPoint, ...]:
        """Return the runs of the grid."""
        return tuple(point for point in self.points if point.kind == "point")

    @property
    def references(self) -> tuple[ScalingPoint, ...]:
        """Return the baselines."""
        return tuple(point for point in self.points if point.kind == "reference")

    @property
    def along(self) -> str | None:
        """Return the setting that a curve follows: a length if one varies, else a rate, else
        another number.
        """
        several = {
            name: values for name, values in self.over.items() if len(set(map(str, values))) > 1
        }
        numbers = [name for name, values in several.items() if all(map(_is_number, values))]
        return next((name for name in (*LENGTHS, "rate", *numbers) if name in numbers), None)

    @property
    def curves(self) -> dict[str, list[ScalingPoint]]:
        """Return the points of each curve in order, keyed by the settings that the curve keeps
        fixed.
        """
        by_curve = dict[str, list[ScalingPoint]]()
        for point in self.grid:
            fixed = ", ".join(
                f"{name} {value}" for name, value in point.values.items() if name != self.along
            )
            by_curve.setdefault(fixed or "all", []).append(point)
        along = self.along
        if along is not None:
            for points in by_curve.values():
                points.sort(key=lambda point: float(str(point.values[along])))
        return by_curve


def read_sweep(directory: Path) -> SweepReport:
    """Read the numbers of a set of runs, finished or not.

    :raises JournalError: there is no set here, or a run of it cannot be read.
    """
    run_set = load_run_set(directory)
    with SharedReplies(directory / REPLIES) as replies:
        points = [_point(directory, point, replies) for point in run_set.points]
    return SweepReport(
        str(directory), run_set.over, run_set.settings, tuple(_compared(run_set, points))
    )


def _point(directory: Path, point: RunSetPoint, replies: SharedReplies) -> ScalingPoint:
    folder = directory / point.folder
    run = run_if_begun(folder)
    state, calls = (RunState(), CallTotals()) if run is None else _read(run, point.folder, replies)
    usage = state.usage
    count = len(state.finished) or math.nan
    graded = state.graded.values()
    is_any_right = [
        float(any(sample.verdict == "correct" for sample in one.samples)) for one in graded
    ]
    return ScalingPoint(
        point.name,
        point.kind,
        point.values,
        directory=str(folder),
        standing=standing_of(folder, None if run is None else state),
        done=state.done,
        problems=None if run is None else run.manifest.problems,
        samples=0 if run is None else int(run.policy.get("samples", 0)),
        accuracy=accuracy_estimate(one.is_right for one in graded),
        oracle=mean_estimate(is_any_right, len(graded)),
        rate=share_estimate((one.escalated, one.judged) for one in state.finished.values()),
        target_tokens=usage.target_tokens / count,
        draft_tokens=usage.draft_tokens / count,
        scored_tokens=usage.scored_tokens / count,
        seconds=calls.seconds / count,
        calls=calls.calls,
        shared=calls.shared,
        dollars=None if run is None else _dollars(run, state),
        right={one.problem: float(one.is_correct) for one in graded},
        shares=dict(filter(None, map(_share_of_correct, graded))),
    )


def _dollars(run: RecordedRun, state: RunState) -> float | None:
    """Return the mean dollars of a problem, or None if a model has no price."""
    money = money_of(state.usage, recorded_prices(run.given(PRICES)))
    return None if money is None or not state.finished else money / len(state.finished)


def _read(run: RecordedRun, folder: str, replies: SharedReplies) -> tuple[RunState, CallTotals]:
    """Read a summary of the run's problems, and its calls."""
    state = RunState()
    totals = CallTotals()
    number = run_number(folder)
    for entry in run.entries():
        state.apply(entry)
        event = entry.event
        if isinstance(event, Sampled | Scored):
            engine = run.manifest.engines[event.role]
            keys = (reply_key(engine, event.key, logprobs) for logprobs in ("raw", "unneeded"))
            totals.count(event.seconds, next(filter(None, map(replies.find, keys)), None), number)
    return state, totals


def _share_of_correct(one: FinishedProblem) -> tuple[str, float] | None:
    """Return a problem with the share of correct rollouts among those that ended."""
    ended = [sample.verdict == "correct" for sample in one.complete_samples if sample.verdict]
    return (one.problem, sum(ended) / len(ended)) if ended else None


def _compared(held: RunSet, points: Sequence[ScalingPoint]) -> list[ScalingPoint]:
    """Return the points with their difference to the target alone and their gain over a coin."""
    by_method: dict[object, list[ScalingPoint]] = {}
    for point in points:
        by_method.setdefault(point.values.get("method"), []).append(point)
    targets = [one for one in by_method.get("target-only", ()) if one.kind == "reference"]
    differences = _contrasts(points, targets, lambda point: point.right)
    grid = [point for point in points if point.kind == "point"]
    gains = _contrasts(grid, by_method.get("coin", ()), lambda point: point.shares)
    return [
        replace(point, difference=differences.get(point.name), gain=gains.get(point.name))
        for point in points
    ]


def _contrasts(
    points: Sequence[ScalingPoint],
    baselines: Sequence[ScalingPoint],
    values: Callable[[ScalingPoint], Mapping[str, float]],
) -> dict[str, Contrast]:
    """Compare each point with its baseline, and correct for the number of comparisons."""
    compared: dict[str, Comparison] = {}
    for point in points:
        base = next((one for one in baselines if _is_beside(one, point)), None)
        if base is None or point in baselines:
            continue
        first = values(base)
        second = values(point)
        common = [name for name in second if name in first]
        if common:
            compared[point.name] = compare_runs(
                [first[name] for name in common], [second[name] for name in common]
            )
    corrected = holm([one.p_value for one in compared.values()])
    return {
        name: Contrast(one.difference, p_value)
        for (name, one), p_value in zip(compared.items(), corrected, strict=True)
    }


def _is_beside(reference: ScalingPoint, point: ScalingPoint) -> bool:
    """Return True if a baseline ran on the point's models and, for a coin, with its rate and
    policy.

    Single rollouts are compared with a coin's, so their limits must be the coin's as well.
    """
    is_coin = reference.values.get("method") == "coin"
    apart = ("method", "samples") if is_coin else ("method", *LENGTHS)
    shared = [name for name in reference.values if name not in apart]
    return all(point.values.get(name) == reference.values[name] for name in shared)


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
