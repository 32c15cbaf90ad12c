"""The runs in a folder: a list of all runs, and the numbers and curves of a sweep.

The list has the status and the main results of each run. The end of the module builds the HTML page
and the text lines of a sweep.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from atts.analysis.reports.charts import LETTER, LINE, Axis, Chart, Plot
from atts.analysis.reports.render import page
from atts.analysis.reports.tables import ReportTable
from atts.errors import JournalCorrupt, JournalError, counted
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
    FACTS,
    JOURNAL,
    LOCK,
    MANIFEST,
    REPLIES,
    Decided,
    FinishedProblem,
    Json,
    Observed,
    RecordedRun,
    RunState,
    Sampled,
    Scored,
    SharedReplies,
    SharedReply,
    is_held,
    open_run,
    reply_key,
    run_if_begun,
    run_number,
)
from atts.ledger import PRICES, money_of, recorded_prices

RunStanding = Literal["finished", "running", "interrupted", "failed", "killed", "not begun"]
"""The status of a run. finished: all problems are finished. running: a process writes the run.
interrupted: the run was asked to end. failed: some problems failed. killed: the process ended
without closing the journal. not begun: the run is only planned.
"""


def standing_of(directory: Path, state: RunState | None) -> RunStanding:
    """Return the status of the run in a directory; None if the directory has no run."""
    if state is None:
        return "running" if is_running(directory) else "not begun"
    if state.ended is not None:
        return state.ended.status
    return "running" if is_running(directory) else "killed"


def is_running(directory: Path) -> bool:
    """Return True if a process on this machine is writing to the run directory."""
    return is_held(directory / LOCK)


_DEEP = 4
"""The number of levels of subfolders that are searched for runs, counted from a given folder."""


@dataclass(frozen=True, slots=True)
class RunLine:
    """A run in the list of runs.

    If the run cannot be read, `problem` has the reason, and the results are missing.
    """

    directory: str
    standing: RunStanding | None
    method: str = ""
    models: str = ""  # name of the pair of models; without a pair, the names of both models
    done: int = 0
    problems: int | None = None
    accuracy: Estimate | None = None
    rate: Estimate | None = None
    draft_tokens: int = 0
    target_tokens: int = 0
    scored_tokens: int = 0
    begun: float = 0.0  # start of the run, as Unix time in seconds
    changed: float = 0.0
    problem: str = ""


def list_runs(folders: Sequence[Path]) -> list[RunLine]:
    """Return the runs in and below these folders, the newest last; a folder may itself be a run
    directory.

    :raises JournalError: a folder does not exist, or cannot be read.
    """
    directories = dict.fromkeys(
        directory for folder in folders for directory in _directories(folder)
    )
    return sorted(map(_line, directories), key=lambda line: (line.begun, line.directory))


def _directories(folder: Path) -> Iterator[Path]:
    with storage(folder):
        if not folder.is_dir():
            raise JournalError(
                folder,
                "there is no such folder",
                "Give a folder of runs, or the directory of a run",
            )
        # Raise an error if the user's folder cannot be read. An unreadable subfolder is only left
        # out.
        os.listdir(folder)
    yield from _below(folder, _DEEP)


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(folder.iterdir())
        if (folder / JOURNAL).exists() or (folder / MANIFEST).exists():
            yield folder
            return
    except OSError:
        return
    for path in inside if depth else ():
        if path.is_dir() and not path.is_symlink():
            yield from _below(path, depth - 1)


def _line(directory: Path) -> RunLine:
    try:
        run = open_run(directory)
        state = run.state((*FACTS, Decided, Observed))
    except JournalError as error:
        return RunLine(str(directory), None, begun=_changed(directory), problem=str(error))
    usage = state.usage
    return RunLine(
        str(directory),
        standing_of(directory, state),
        method=str(run.setting("method") or run.setting("gate") or ""),
        models=_models(run),
        done=state.done,
        problems=run.manifest.problems,
        accuracy=accuracy_estimate(one.is_right for one in state.graded.values()),
        rate=share_estimate((one.escalated, one.judged) for one in state.finished.values()),
        draft_tokens=usage.draft_tokens,
        target_tokens=usage.target_tokens,
        scored_tokens=usage.scored_tokens,
        begun=run.manifest.created,
        changed=_changed(directory),
    )


def _models(run: RecordedRun) -> str:
    """Return the name of the run's pair; without a pair, return the last path component of each
    model's name.
    """
    pair = run.manifest.settings.get("pair")
    if pair is not None and pair.value:
        return str(pair.value)
    roles = [*run.manifest.engines] or ["draft", "target"]
    words = [run.manifest.settings.get(role) for role in roles]
    engines = [str(run.manifest.engines.get(role, {}).get("model", "?")) for role in roles]
    names = [str(word.value) if word else name for word, name in zip(words, engines, strict=True)]
    short = [name.partition("?")[0].rstrip("/").rpartition("/")[2] for name in names]
    return " + ".join(dict.fromkeys(short))


def _changed(directory: Path) -> float:
    try:
        return (directory / JOURNAL).stat().st_mtime
    except OSError:
        return 0.0


SWEEP = "sweep.json"
Value = str | int | float | bool | None
"""A value of a setting that a sweep varies."""
PointKind = Literal["point", "reference"]
"""The kind of a run in a sweep: a point of the grid of settings, or a reference (a baseline)."""


@dataclass(frozen=True, slots=True)
class RunSetPoint:
    """A run of a sweep.

    `values` has the run's values of the settings that vary. `folder` is the run's folder in the
    directory of the sweep.
    """

    name: str
    kind: PointKind
    values: Mapping[str, Value]
    folder: str


@dataclass(frozen=True, slots=True)
class RunSet:
    """The runs of a sweep. `over` has the settings that vary, with their values; `settings` has the
    settings that all runs share.
    """

    over: Mapping[str, tuple[Value, ...]]
    settings: Mapping[str, Json]
    points: tuple[RunSetPoint, ...]
    schema: Literal[1] = 1


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """The keys that the file of a sweep must have, and the types of their values."""

    over: dict[str, list[Value]]
    settings: dict[str, msgspec.Raw]
    points: list[RunSetPoint]
    schema: Literal[1]


def load_run_set(directory: Path) -> RunSet:
    """Read the file that describes the sweep in a directory.

    :raises JournalError: the directory does not contain a sweep, or its file cannot be read.
    :raises JournalCorrupt: the file does not describe a sweep.
    """
    path = directory / SWEEP
    with storage(path):
        if not path.exists():
            raise JournalError(
                directory, "this directory has no sweep", "Give the directory of `atts sweep --out`"
            )
        text = read_ordinary(path)
    try:
        stored = msgspec.json.decode(text, type=_Stored)
        settings = {name: msgspec.json.decode(raw) for name, raw in stored.settings.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise JournalCorrupt(
            path,
            f"the file does not describe a sweep ({error})",
            "The runs of the sweep are not damaged; restore the file from a copy",
        ) from error
    outside = [point.folder for point in stored.points if Path(point.folder).name != point.folder]
    if outside:
        raise JournalCorrupt(
            path,
            f"the file names the run {outside[0]!r}, which is outside the directory of the sweep",
            "Restore the file from a copy",
        )
    return RunSet(
        {name: tuple(values) for name, values in stored.over.items()},
        settings,
        tuple(stored.points),
    )


def save_run_set(directory: Path, held: RunSet) -> None:
    """Write the file of a sweep atomically.

    :raises StorageError: the file cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(asdict(held)), indent=2)
    write_atomic(directory / SWEEP, text + b"\n")


LENGTHS = ("samples", "max_tokens", "turns")
"""Settings that a curve prefers as its varying setting: with a larger value, the same models can
use more tokens.
"""


@dataclass(slots=True)
class CallTotals:
    """Totals over the engine calls of a run: the number of calls, the number of replies taken from
    other runs, and the seconds.
    """

    calls: int = 0
    shared: int = 0
    seconds: float = 0.0

    def count(self, own: float, held: SharedReply | None, run: int) -> None:
        """Count a call; for a reply taken from another run, add the seconds that the call took in
        that run.
        """
        is_shared = held is not None and held.run != run
        self.calls += 1
        self.shared += is_shared
        self.seconds += held.seconds if held is not None and is_shared else own


@dataclass(frozen=True, slots=True)
class Contrast:
    """A comparison of a run with a baseline, paired by problem.

    `p_value` is corrected by Holm's method for all comparisons with this kind of baseline.
    """

    estimate: Estimate
    p_value: float

    def __str__(self) -> str:
        return f"{self.estimate.signed()} p {self.p_value:.2g}"


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """The results of a run of a sweep. Costs are means per problem. Calls that reuse a reply of
    another run cost as much as if this run had made them.
    """

    name: str
    kind: PointKind
    values: Mapping[str, Value]
    directory: str
    standing: RunStanding
    done: int
    problems: int | None
    samples: int
    accuracy: Estimate
    oracle: Estimate  # share of problems with at least one correct rollout
    rate: Estimate
    target_tokens: float
    draft_tokens: float
    scored_tokens: float
    seconds: float  # sum of the durations of all engine calls for a problem; mean over the problems
    calls: int
    shared: int  # number of replies that were taken from another run of the sweep
    dollars: float | None  # None if a model has no price
    # for each graded problem: 1 if the run's answer is correct, 0 if it is wrong
    right: Mapping[str, float] = field(repr=False)
    # keyed by problem: the share of correct rollouts among those that ran to their end
    shares: Mapping[str, float] = field(repr=False)
    difference: Contrast | None = None  # accuracy of this run minus accuracy of the target alone
    # share of correct rollouts, minus the same share if a coin decides which chunks escalate
    gain: Contrast | None = None

    @property
    def is_drawn(self) -> bool:
        """Return whether the run has an accuracy, which a chart can draw."""
        return not math.isnan(self.accuracy.value)


@dataclass(frozen=True, slots=True)
class SweepReport:
    """The results of a sweep, with one point for each run."""

    directory: str
    over: Mapping[str, tuple[Value, ...]]
    settings: Mapping[str, Json]
    points: tuple[ScalingPoint, ...]

    def __str__(self) -> str:
        """Return one line: the number of runs, the varied settings, and the folder."""
        return (
            f"sweep of {counted(len(self.points), 'run')} over {', '.join(self.over)} in "
            f"{self.directory}"
        )

    @property
    def grid(self) -> tuple[ScalingPoint, ...]:
        """Return the points of the grid, without the baselines."""
        return tuple(point for point in self.points if point.kind == "point")

    @property
    def references(self) -> tuple[ScalingPoint, ...]:
        """Return the baselines: the target alone, the draft alone and the coins."""
        return tuple(point for point in self.points if point.kind == "reference")

    @property
    def along(self) -> str | None:
        """Return the name of the numeric setting that varies along a curve; None if no numeric
        setting varies.

        The settings in `LENGTHS` are preferred, then the rate, then any other numeric setting.
        """
        several = {
            name: values for name, values in self.over.items() if len(set(map(str, values))) > 1
        }
        numbers = [name for name, values in several.items() if all(map(_is_number, values))]
        return next((name for name in (*LENGTHS, "rate", *numbers) if name in numbers), None)

    @property
    def curves(self) -> dict[str, list[ScalingPoint]]:
        """Return the points of each curve, ordered by the setting that varies along the curve.

        A curve's key has the names and values of the settings that are constant along it.
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
    """Read the results of a finished or unfinished sweep.

    :raises JournalError: the directory contains no set of runs, or one of the runs cannot be read.
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
    """Return the mean cost of a problem in dollars, or None if a model has no price."""
    money = money_of(state.usage, recorded_prices(run.given(PRICES)))
    return None if money is None or not state.finished else money / len(state.finished)


def _read(run: RecordedRun, folder: str, replies: SharedReplies) -> tuple[RunState, CallTotals]:
    """Read the finished problems of a run, and the totals of its engine calls."""
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
    """Return a problem's name, and the share of correct rollouts among those of its rollouts that
    are complete and graded. Return None if it has no such rollout.
    """
    ended = [sample.verdict == "correct" for sample in one.complete_samples if sample.verdict]
    return (one.problem, sum(ended) / len(ended)) if ended else None


def _compared(held: RunSet, points: Sequence[ScalingPoint]) -> list[ScalingPoint]:
    """Return the points, each with its difference from the target alone. Points of the grid also
    get their gain over a coin (random escalation).
    """
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
    """Compare each point with its baseline, with p-values corrected for the number of comparisons."""
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
    """Return True if a baseline can be compared with a point, because both have the same values of
    the settings that matter for the comparison.

    The method may differ. A coin may also have another number of samples than the point, because
    single rollouts are compared. Other baselines may differ from the point in all `LENGTHS`.
    """
    is_coin = reference.values.get("method") == "coin"
    apart = ("method", "samples") if is_coin else ("method", *LENGTHS)
    shared = [name for name in reference.values if name not in apart]
    return all(point.values.get(name) == reference.values[name] for name in shared)


def _is_number(value: Value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_WIDE = 60
_TALL = 12
_LETTERS = "abcdefghijklmnopqrsuvwxyz"


def sweep_lines(report: SweepReport) -> Iterator[str]:
    """Return a sweep as text lines with a table, a chart and notes."""
    yield from _table(report)
    yield ""
    yield from _picture(report)
    yield from sweep_notes(report)


def sweep_notes(report: SweepReport) -> Iterator[str]:
    """Return notes that explain the results of a sweep."""
    yield (
        "Brackets are 95 % intervals over problems. A difference is the vote's accuracy minus the "
        "accuracy of method target-only. A gain is the accuracy of single rollouts minus the "
        "accuracy of a coin with the same policy and rate. Differences and gains compare the runs "
        "problem by problem."
    )
    compared = (("differences", "difference"), ("gains", "gain"))
    counts = {
        words: sum(getattr(point, name) is not None for point in report.points)
        for words, name in compared
    }
    several = [f"{count} {words}" for words, count in counts.items() if count > 1]
    if several:
        yield f"p-values are corrected by Holm's method for {' and for '.join(several)}."
    yield (
        "Best of all: the share of problems that at least one rollout solved; no vote can be more "
        "accurate. Rollouts that were cancelled because the vote was settled count as wrong here."
    )
    calls, shared = (
        sum(getattr(point, name) for point in report.points) for name in ("calls", "shared")
    )
    if shared:
        yield (
            f"{shared:,} of {calls:,} engine calls reused the result of another run of the "
            "sweep. The tokens and seconds of each run include its reused calls."
        )


def _table(report: SweepReport) -> Iterator[str]:
    wide = max([len(point.name) for point in report.points] + [12])
    has_prices = any(point.dollars is not None for point in report.points)
    money = f"  {'dollars':>10}" if has_prices else ""
    yield (
        f"  {'':<{wide}}  {'done':>9}  {'accuracy':<21}  {'difference':<31}  "
        f"{'gain over a coin':<31}  {'best of all':>11}  {'rate':>5}  {'target':>8}  "
        f"{'seconds':>8}{money}"
    )
    marks = _marks(report)
    for point in (*report.references, *report.grid):
        done = f"{point.done}/{point.problems if point.problems is not None else '?'}"
        what = point.accuracy.brief("-") if point.done else point.standing
        difference = "" if point.difference is None else str(point.difference)
        gain = "" if point.gain is None else str(point.gain)
        yield (
            f"{marks[point.name]} {point.name:<{wide}}  {done:>9}  {what:<21}  "
            f"{difference:<31}  {gain:<31}  {_number(point.oracle.value, '.3f'):>11}  "
            f"{_number(point.rate.value, '.2f'):>5}  "
            f"{_number(point.target_tokens, ',.0f'):>8}  "
            f"{_number(point.seconds, ',.2f'):>8}{_dollars_column(point) if has_prices else ''}"
        ).rstrip()
    yield (
        "  target: number of tokens written by the target per problem; seconds: total duration "
        "of the engine calls per problem."
    )
    if has_prices:
        yield "  dollars: cost per problem, at the prices of the models."


def _dollars_column(point: ScalingPoint) -> str:
    return f"  {'-' if point.dollars is None else f'{point.dollars:.6f}':>10}"


def _number(value: float, form: str) -> str:
    return "" if math.isnan(value) else f"{value:{form}}"


def _marks(report: SweepReport) -> dict[str, str]:
    """Return the letter that marks each point: one letter per curve, and T, D and C for the target
    alone, the draft alone and coins.
    """
    curves = enumerate(report.curves.values())
    marks = {
        point.name: _LETTERS[number % len(_LETTERS)]
        for number, points in curves
        for point in points
    }
    return marks | {
        point.name: str(point.values.get("method", "r"))[:1].upper() for point in report.references
    }


def _picture(report: SweepReport) -> Iterator[str]:
    """Draw accuracy against target tokens as text; each baseline is a dashed line at its accuracy."""
    drawn = [point for point in report.points if point.is_drawn]
    if not drawn:
        return
    low, high = _range(drawn)
    right = max(point.target_tokens for point in drawn) or 1.0
    rows = [[" "] * (_WIDE + 1) for _ in range(_TALL + 1)]
    marks = _marks(report)
    for point in sorted(drawn, key=lambda point: point.kind == "point"):
        up = round((point.accuracy.value - low) / (high - low) * _TALL)
        across = round(point.target_tokens / right * _WIDE)
        if point.kind == "reference":
            rows[up] = [
                "-" if at % 2 == 0 and old == " " else old for at, old in enumerate(rows[up])
            ]
        rows[up][across] = marks[point.name]
    yield "accuracy"
    for number in range(_TALL, -1, -1):
        label = f"{low + (high - low) * number / _TALL:.3f}" if number % 3 == 0 else ""
        yield f"{label:>7} |{''.join(rows[number])}".rstrip()
    yield f"{'':>7} +{'-' * (_WIDE + 1)}"
    yield f"{'':>8} 0{f'{right:,.0f}':>{_WIDE}}  target tokens per problem"
    if report.along is not None:
        named = (f"{marks[points[0].name]}: {name}" for name, points in report.curves.items())
        yield (
            f"{'':>8} {report.along} varies along each curve; {'; '.join(named)}; T, D, C: "
            "target alone, draft alone, coin"
        )


def _range(drawn: Sequence[ScalingPoint]) -> tuple[float, float]:
    """Return the lowest and the highest accuracy of the chart's axis."""
    values = [point.accuracy.value for point in drawn]
    low = max(0.0, min(values) - 0.02)
    high = min(1.0, max(values) + 0.02)
    return (low, high) if high > low else (low - 0.01, high + 0.01)


COLOURS = 6
"""The number of different colours of curves. If there are more curves, some have the same colour.
"""


def render_sweep(report: SweepReport) -> str:
    """Return the HTML page of a sweep, which needs neither network nor server."""
    return page(
        "sweep.html",
        ("tables.js",),
        report=report,
        charts=list(sweep_charts(report)),
        runs=sweep_table(report),
        notes=list(sweep_notes(report)),
        headline=headline(report),
    )


def headline(report: SweepReport) -> str:
    """Return a sentence about the most accurate run and the target alone.

    If several runs are equally accurate, the cheapest of them is described.
    """
    drawn = [point for point in report.grid if point.is_drawn]
    if not drawn:
        return "No answer is graded yet"
    best = max(drawn, key=lambda point: (point.accuracy.value, -point.target_tokens))
    target = next(
        (
            one
            for one in report.references
            if one.values.get("method") == "target-only" and one.is_drawn
        ),
        None,
    )
    said = (
        f"Best: {best.name}, accuracy {best.accuracy.brief()} for {best.target_tokens:,.0f} "
        "target tokens per problem"
        if best.accuracy.value
        else "No combination of settings solved a problem"
    )
    if target is None:
        return said
    return (
        f"{said}; the target alone reaches {target.accuracy.brief()} for "
        f"{target.target_tokens:,.0f} target tokens per problem"
    )


def sweep_charts(report: SweepReport) -> Iterator[Chart]:
    """Draw one chart of accuracy for each kind of cost."""
    yield _chart(
        report,
        "Accuracy against target tokens",
        "target tokens per problem",
        lambda p: p.target_tokens,
    )
    yield _chart(
        report,
        "Accuracy against engine time",
        "seconds of engine calls per problem",
        lambda p: p.seconds,
    )
    if len(set(report.over.get("samples", ()))) > 1:
        yield _chart(
            report, "Accuracy against samples", "rollouts per problem", lambda p: float(p.samples)
        )


def _chart(
    report: SweepReport, title: str, label: str, cost: Callable[[ScalingPoint], float]
) -> Chart:
    drawn = [point for point in report.points if point.is_drawn]
    plot = Plot(
        Axis(0, max([cost(p) for p in drawn] + [1e-9]) * 1.08, label), _accuracies(drawn), 760, 340
    )
    marks = [*_ceiling(plot, report, cost), *_baselines(plot, report, cost)]
    for number, (name, points) in enumerate(report.curves.items()):
        shown = [p for p in points if p.is_drawn]
        marks.append(
            "<g "
            f'class="s{number % COLOURS}">{"".join(_curve(plot, name, shown, cost, report.along))}</g>'
        )
    rows = [
        (p.name, cost(p), p.accuracy.value, p.accuracy.low, p.accuracy.high, p.oracle.value)
        for p in drawn
    ]
    columns = ("run", label, "accuracy", "from", "to", "any rollout correct")
    legend = [(f"s{number % COLOURS}", name) for number, name in enumerate(report.curves)]
    words = (
        "Bands and whiskers: 95 % intervals over problems. Dashed lines: the baselines. "
        "Dotted lines: the share of problems that at least one rollout solved."
    )
    along = f" Along each curve, {report.along} varies." if report.along else ""
    return replace(
        Chart.of(title, words + along, plot, marks, (columns, rows)),
        wide=True,
        legend=tuple(legend),
    )


def _accuracies(drawn: Sequence[ScalingPoint]) -> Axis:
    """Return a range of accuracies that contains all points with their intervals."""
    low = min([p.accuracy.low for p in drawn] + [1.0])
    high = max([max(p.accuracy.high, p.oracle.value) for p in drawn] + [0.0])
    return (
        Axis(max(0.0, low - 0.02), min(1.0, high + 0.02), "accuracy")
        if high > low
        else Axis(0, 1, "accuracy")
    )


def _curve(
    plot: Plot,
    name: str,
    points: Sequence[ScalingPoint],
    cost: Callable[[ScalingPoint], float],
    along: str | None,
) -> Iterator[str]:
    at = [cost(p) for p in points]
    labelled = list[tuple[float, float]]()  # the labelled points, in pixels
    if len(points) > 1 and along is not None:
        yield plot.band(at, [p.accuracy.low for p in points], [p.accuracy.high for p in points])
        yield plot.line([(x, p.accuracy.value) for x, p in zip(at, points, strict=True)], "main")
    for x, p in zip(at, points, strict=True):
        if along is None or len(points) == 1:
            yield plot.line([(x, p.accuracy.low), (x, p.accuracy.high)], "whisker")
        tip = f"{p.name}: {p.accuracy.brief()}, {x:,.1f} {plot.x.label}"
        yield plot.dot(x, p.accuracy.value, "run", tip)
        if along is not None and len(points) > 1:
            label = f"{p.values[along]}"
            middle, up = plot.at(x, p.accuracy.value)
            # a label without room is left out; the point has a tooltip
            if all(
                abs(middle - across) > LETTER * len(label) or abs(up - height) > LINE
                for across, height in labelled
            ):
                yield plot.text(x, p.accuracy.value, label, "middle", 0, -3)
                labelled.append((middle, up))


def _baselines(
    plot: Plot, report: SweepReport, cost: Callable[[ScalingPoint], float]
) -> Iterator[str]:
    """Draw a dashed line for each baseline, with a point at the baseline's cost.

    The name of the baseline is at the right end of the line. It is below the line, or as much
    higher as is needed not to cover the names of lower lines.
    """
    free = plot.up(plot.y.low) - 2  # bottom of the room that is left for names, in pixels
    for p in sorted(report.references, key=lambda p: p.accuracy.value if p.is_drawn else -1.0):
        if not p.is_drawn:
            continue
        value = p.accuracy.value
        yield plot.line([(plot.x.low, value), (plot.x.high, value)], "nominal")
        yield plot.dot(
            cost(p),
            value,
            "baseline",
            f"{p.name}: {p.accuracy.brief()}, {cost(p):,.1f} {plot.x.label}",
            3,
        )
        up = plot.up(value)
        # a name that does not fit below its line is above the line
        foot = up + LINE if up + LINE <= free else min(up - 4, free)
        free = foot - LINE
        # `text` writes 7 pixels above the line unless it is given a drop
        yield plot.text(plot.x.high, value, p.name, "end", -6, foot - up + 7)


def _ceiling(
    plot: Plot, report: SweepReport, cost: Callable[[ScalingPoint], float]
) -> Iterator[str]:
    """Draw for each curve the share of problems with at least one correct rollout. This share is an
    upper bound of the vote's accuracy.
    """
    for number, points in enumerate(report.curves.values()):
        line = [
            (cost(p), p.oracle.value)
            for p in points
            if p.is_drawn and not math.isnan(p.oracle.value)
        ]
        if len(line) > 1 and report.along is not None:
            yield f'<g class="s{number % COLOURS}">{plot.line(line, "oracle")}</g>'
        elif line:
            yield from (
                "<g "
                f'class="s{number % COLOURS}">{plot.dot(x, y, "oracle", "any rollout correct", 2.5)}</g>'
                for x, y in line
            )


def _cells(contrast: Contrast | None) -> tuple[float | None, ...]:
    """Return the table cells of a comparison; if there is no comparison, the cells are empty."""
    if contrast is None:
        return (None,) * 4
    estimate = contrast.estimate
    return (estimate.value, estimate.low, estimate.high, contrast.p_value)


def sweep_table(report: SweepReport) -> ReportTable:
    """Return a table with a row for every run of a sweep."""
    columns = (
        "run", "status", "problems", "accuracy", "from", "to", "difference from the target alone", "from", "to",
        "p (Holm)", "gain over a coin, single rollouts", "from", "to", "p (Holm)",
        "any rollout correct", "rate", "target tokens", "draft tokens", "scored tokens", "seconds of calls", "calls",
        "shared calls", "dollars",
    )  # fmt: skip
    rows = [
        (
            p.name, p.standing, p.done, p.accuracy.value, p.accuracy.low, p.accuracy.high,
            *_cells(p.difference), *_cells(p.gain),
            p.oracle.value, p.rate.value, p.target_tokens, p.draft_tokens, p.scored_tokens, p.seconds, p.calls,
            p.shared, math.nan if p.dollars is None else p.dollars,
        )
        for p in (*report.references, *report.grid)
    ]  # fmt: skip
    return ReportTable.of("Every run, with its costs per problem", columns, rows)
