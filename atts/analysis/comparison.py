"""The comparison of two runs, each read from a run directory or from a file of results."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atts.errors import DatasetError, counted
from atts.evaluators import (
    Comparison,
    McNemar,
    Sequential,
    compare_in_order,
    compare_runs,
    json_lines,
    mcnemar,
)
from atts.files import read_ordinary
from atts.journal import FinishedProblem, RecordedRun, check_exists, is_censored, open_run
from atts.ledger import PRICES, Prices, money_of, recorded_prices
from atts.sampling import Seed, generator, student_quantile

Floats = NDArray[np.float64]
Ends = tuple[float, float]


def cost_ratio(cost: float, beside: float) -> float:
    """Divide `cost` by `beside`; return infinity if only `beside` is 0, and NaN if both are 0."""
    return cost / beside if beside else math.inf if cost else math.nan


def ratio_interval(first: Floats, second: Floats, level: float = 0.95) -> Ends:
    """Return an interval for the second run's mean cost divided by the first run's mean cost.

    The result is the smallest interval that contains both Fieller's interval and the jackknife
    interval of the log ratio. Fieller's interval is valid if costs have long tails. The jackknife
    interval is valid if most problems cost the second run nothing. In both cases a bootstrap
    interval would be too short (`scripts/bench statistics`). The upper end is infinite if the first
    run's true mean cost may be 0. For a single problem both ends are NaN.
    """
    if len(first) < 2 or not first.any():
        return math.nan, math.nan
    if not second.any():
        return 0.0, 0.0
    reach = student_quantile((1 + level) / 2, len(first) - 1)
    both = _fieller(first, second, reach), _jackknife(first, second, reach)
    return min(low for low, _ in both), max(high for _, high in both)


def _fieller(first: Floats, second: Floats, reach: float) -> Ends:
    """Return Fieller's interval for mean(second) / mean(first), where `reach` is a quantile of
    Student's t.

    The interval spans all ratios r >= 0 at which a t-test does not reject that `second - r * first`
    has mean 0.
    """
    unit = reach**2 / len(first)
    (spread, shared), (_, other) = unit * np.cov(first, second)
    square = float(first.mean() ** 2 - spread)
    half = float(first.mean() * second.mean() - shared)
    rest = float(second.mean() ** 2 - other)
    root = math.sqrt(max(0.0, half**2 - square * rest))
    if square > 0:
        return max(0.0, (half - root) / square), (half + root) / square
    return rest / (half + root) if rest > 0 else 0.0, math.inf


def _jackknife(first: Floats, second: Floats, reach: float) -> Ends:
    """Return the jackknife interval of the ratio of mean costs, computed on the log scale.

    Its width follows from how much the ratio varies when one problem at a time is left out.
    """
    n = len(first)
    without = np.maximum(second.sum() - second, 0.0), first.sum() - first
    if any(
        not np.all(left > 1e-12 * whole.sum())
        for left, whole in zip(without, (second, first), strict=True)
    ):
        # A single problem has all of a run's costs. Without this problem the run costs nothing, so
        # no interval of the ratio can be computed.
        return 0.0, math.inf
    logs = np.log(without[0] / without[1])
    half = reach * math.sqrt((n - 1) * float(logs.var()))
    ratio = float(second.sum() / first.sum())
    return ratio * math.exp(-half), ratio * math.exp(half)


_NAMES = ("problem", "id", "problem_id")
_WORDS = {"correct": 1.0, "wrong": 0.0, "unscored": 0.0, "equal": 1.0, "different": 0.0}
COSTS = ("draft_tokens", "scored_tokens", "target_tokens", "seconds", "dollars")


@dataclass(frozen=True, slots=True)
class GradedProblem:
    """The results of a run on one problem: whether the vote is correct, the share of correct
    rollouts, and the costs.
    """

    vote: float
    share: float
    samples: int
    costs: Mapping[str, float]  # the known costs of the problem, keyed by the names in COSTS
    # amount by which `vote` would be larger if unscored answers counted as correct
    unscored: float = 0.0
    rollouts: int = 0  # number of recorded rollouts, without those that were stopped early
    cut: int = 0  # number of these rollouts that a limit cut before they could answer


@dataclass(frozen=True, slots=True)
class GradedRun:
    """A run with its graded problems and its settings.

    A file of results has no settings.
    """

    name: str
    method: str
    problems: Mapping[str, GradedProblem]
    # settings that can change results, keyed by their configuration keys
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    # keys in `settings` whose values atts derived from other settings or from the models
    derived: frozenset[str] = frozenset()
    roles: frozenset[str] = frozenset()  # roles whose models the run used


def read_results(path: Path) -> GradedRun:
    """Read the results of a run directory, or of a JSONL file in the format of `atts eval --json`.

    Each line of a file describes a problem: {"problem": "7", "verdict": "correct", "samples":
    [...], "usage": {...}}, or simply {"id": "7", "correct": true, "target_tokens": 310}. If several
    lines have the same id, each of them is one rollout of this problem.

    :raises JournalError: the directory contains no run, or its run cannot be read.
    :raises DatasetError: the file does not contain results, or none of its results was graded.
    """
    check_exists(path)
    run = _run(path) if path.is_dir() else _file(path)
    if not run.problems:
        raise DatasetError(
            str(path),
            "no problem was graded",
            "Only problems with reference answers can be compared",
        )
    return run


def _run(directory: Path) -> GradedRun:
    run = open_run(directory)
    prices = recorded_prices(run.given(PRICES))
    problems = {name: _brief(one, prices) for name, one in run.state().graded.items()}
    return GradedRun(
        str(directory),
        str(run.setting("method") or ""),
        problems,
        settings=_settings(run),
        derived=frozenset(
            name
            for name, setting in run.manifest.settings.items()
            if setting.origin == "max_tokens" or setting.origin.endswith(" models")
        ),
        roles=frozenset(run.manifest.engines),
    )


# Settings of the gate. They are compared only if both runs have the same method.
_GATE = ("rate_scope", "cap", "warmup", "accept_when_agreeing")
# Fields of a policy that do not change the results of a rollout that finishes.
_WITHOUT_EFFECT = ("optimistic", "timeout_seconds")


def _settings(run: RecordedRun) -> dict[str, Any]:
    """Return the settings of a run that can change its results, except the method and the rate."""
    policy = {name: value for name, value in run.policy.items() if name not in _WITHOUT_EFFECT}
    settings = {role: engine.get("model") for role, engine in run.manifest.engines.items()}
    policy["target_sampling"] = policy.get("target_sampling") or policy.get("sampling")
    settings |= dict(_flat(policy))
    return settings | {name: run.setting(name) for name in (*_GATE, "grader")}


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _brief(one: FinishedProblem, prices: Prices) -> GradedProblem:
    known = [
        _WORDS[sample.verdict] for sample in one.complete_samples if sample.verdict is not None
    ]
    costs = {name: float(getattr(one.usage, name)) for name in COSTS[:3]}
    if one.seconds is not None:
        costs["seconds"] = one.seconds
    dollars = money_of(one.usage, prices)
    if dollars is not None:
        costs["dollars"] = dollars
    return GradedProblem(
        float(one.is_correct),
        _mean(known),
        len(known),
        costs,
        float(one.is_right is None),
        rollouts=len(one.complete_samples),
        cut=sum(sample.is_cut for sample in one.complete_samples),
    )


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _file(path: Path) -> GradedRun:
    try:
        lines = read_ordinary(path).decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DatasetError(
            str(path), f"is not UTF-8 text (invalid byte at position {error.start})"
        ) from error
    except OSError as error:
        raise DatasetError(
            str(path), f"cannot be read: {error.strerror}", "Give a run directory or a JSONL file"
        ) from error
    rows: dict[str, list[Mapping[str, Any]]] = {}
    method = ""
    record: Mapping[str, Any]
    for _, record in json_lines(lines, str(path)):
        if record.get("type") == "summary":
            method = str(record.get("method", ""))
        else:
            rows.setdefault(_name(record, path), []).append(record)
    problems = {name: one for name, held in rows.items() if (one := _row(held, path)) is not None}
    return GradedRun(str(path), method, problems)


def _name(record: Mapping[str, Any], path: Path) -> str:
    named = next((record[name] for name in _NAMES if name in record), None)
    if named is None:
        raise DatasetError(
            str(path),
            f"a line has none of the fields {', '.join(_NAMES)}; the line is "
            f"{json.dumps(record)[:80]}",
        )
    return str(named)


def _list(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def _row(rows: Sequence[Mapping[str, Any]], path: Path) -> GradedProblem | None:
    """Combine the lines of a problem into its results; return None if no line has a verdict.

    If each line describes a rollout, the share of correct rollouts is also used as the correctness
    of the vote.
    """
    votes = [value for row in rows if (value := _right(row, path)) is not None]
    if not votes:
        return None
    samples = _list(rows[0].get("samples")) if len(rows) == 1 else []
    complete = [one for one in samples if not is_censored(one.get("answer"), one.get("finish"))]
    known = [value for one in complete if (value := _right(one, path)) is not None]
    mean = _mean(votes)
    share = _mean(known) if samples else mean
    costs: dict[str, float] = {}
    for row in rows:
        usage = row.get("usage")
        fields = {**(usage if isinstance(usage, Mapping) else {}), **row}
        for name in COSTS:
            value = fields.get(name)
            if (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and 0 <= value < math.inf
            ):
                costs[name] = costs.get(name, 0.0) + value
    unscored = sum(row.get("correct", row.get("verdict")) == "unscored" for row in rows) / len(
        votes
    )
    cut = sum(
        one.get("answer") is None and one.get("finish") in ("tokens", "turns") for one in complete
    )
    return GradedProblem(
        mean, share, len(known) or len(votes), costs, unscored, rollouts=len(complete), cut=cut
    )


def _right(row: Mapping[str, Any], path: Path) -> float | None:
    value = row.get("correct", row.get("verdict"))
    if value in (None, "spared", "lost"):
        return None
    if isinstance(value, str) and value in _WORDS:
        return _WORDS[value]
    if isinstance(value, bool | int | float) and 0 <= value <= 1:
        return float(value)
    raise DatasetError(
        str(path),
        f"{value!r} is not a verdict that atts knows",
        'Set "correct" to true, to false, or to the share of correct rollouts (0 to 1)',
    )


@dataclass(frozen=True, slots=True)
class CostRatio:
    """The second run's mean cost per problem divided by the first run's, with an interval."""

    name: str
    first: float  # mean cost per problem in the first run
    second: float
    # the second run's cost divided by the first run's; infinite if the first run's cost is 0
    ratio: float
    low: float
    high: float
    # number of problems that are left out, because their cost is unknown in at least one run
    unknown: int = 0


@dataclass(frozen=True, slots=True)
class ChangedSetting:
    """A setting with different values in two runs."""

    name: str  # the configuration key; "draft" and "target" are the models
    first: Any
    second: Any


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison of two runs, on the problems that are graded in both runs.

    `single` compares single rollouts (the share of correct ones per problem). `mcnemar` tests votes
    that are correct or wrong.
    """

    first: str
    second: str
    methods: tuple[str, str]
    problems: int
    only_first: int
    only_second: int
    vote: Comparison
    single: Comparison | None
    mcnemar: McNemar | None
    costs: tuple[CostRatio, ...]
    # number of votes in the first and in the second run that count as wrong because they could not
    # be scored
    unscored: tuple[int, int] = (0, 0)
    # the comparison of the votes if all unscored votes counted as correct
    if_right: Comparison | None = None
    # the result of a test after every problem; the seed determines the order of the problems
    sequential: Sequential | None = None
    # settings that differ and can change results, except the method, the rate, and settings that
    # follow from them
    settings: tuple[ChangedSetting, ...] = ()
    # number of rollouts of the first and of the second run that a limit cut before they could
    # answer, and number of all rollouts that were not stopped early
    cut: tuple[int, int] = (0, 0)
    rollouts: tuple[int, int] = (0, 0)

    def __str__(self) -> str:
        """Return one line: both runs and the difference of their votes."""
        vote = self.vote
        return (
            f"{self.first} → {self.second} on {counted(self.problems, 'problem')}: vote "
            f"{vote.first:.3f} → {vote.second:.3f}, difference {vote.difference.signed()}"
        )


def compare(
    first: GradedRun,
    second: GradedRun,
    *,
    seed: int = 0,
    points: float | None = None,
    by_method: Collection[str] = (),
) -> Compared:
    """Compare two runs on their common problems.

    If `points` is set, also test the difference after every problem. Runs that differ by at most
    `points` percentage points are called alike. `by_method` has the names of the settings that the
    methods of the two runs fix.

    :raises DatasetError: the runs have no problem in common.
    """
    common = [name for name in first.problems if name in second.problems]
    if not common:
        example = next(iter(first.problems)), next(iter(second.problems))
        raise DatasetError(
            f"{first.name} and {second.name}",
            "the two results have no problem in common; for example, problem ids look like "
            f"{example[0]!r} in the first and {example[1]!r} in the second",
            "Compare runs on the same problems",
        )
    ours, theirs = ([side.problems[name] for name in common] for side in (first, second))
    votes = [one.vote for one in ours], [one.vote for one in theirs]
    doubted = [one.unscored for one in ours], [one.unscored for one in theirs]
    best = (
        [vote + more for vote, more in zip(*side, strict=True)]
        for side in zip(votes, doubted, strict=True)
    )
    shares = [
        (a.share, b.share)
        for a, b in zip(ours, theirs, strict=True)
        if not math.isnan(a.share + b.share)
    ]
    samples = sum(one.samples for one in (*ours, *theirs))
    whole = all(vote in (0.0, 1.0) for side in votes for vote in side)
    costs = [_cost(name, [o.costs for o in ours], [t.costs for t in theirs]) for name in COSTS]
    taken = generator(Seed(run=seed, purpose="order of problems")).permutation(len(common))
    differences = (votes[1][place] - votes[0][place] for place in taken)
    return Compared(
        first.name,
        second.name,
        methods=(first.method, second.method),
        problems=len(common),
        only_first=len(first.problems) - len(common),
        only_second=len(second.problems) - len(common),
        vote=compare_runs(*votes),
        single=compare_runs(*zip(*shares, strict=True), n_samples=samples) if shares else None,
        mcnemar=mcnemar(*([vote == 1.0 for vote in side] for side in votes)) if whole else None,
        costs=tuple(cost for cost in costs if cost is not None),
        unscored=(sum(map(bool, doubted[0])), sum(map(bool, doubted[1]))),
        if_right=compare_runs(*best) if any(map(any, doubted)) else None,
        sequential=None if points is None else compare_in_order(differences, points),
        settings=tuple(_changed_settings(first, second, by_method)),
        cut=(sum(one.cut for one in ours), sum(one.cut for one in theirs)),
        rollouts=(sum(one.rollouts for one in ours), sum(one.rollouts for one in theirs)),
    )


def _changed_settings(
    first: GradedRun, second: GradedRun, by_method: Collection[str]
) -> Iterator[ChangedSetting]:
    """Yield the settings with different values, except those that follow from other settings."""
    # A file of results has no settings.
    if not first.settings or not second.settings:
        return
    before = first.settings
    after = second.settings
    for name in {**before, **after}:
        change = before.get(name), after.get(name)
        table, _, field_name = name.partition(".")
        if change[0] == change[1] or name in by_method or table in by_method:
            continue
        # A run with one model records no model for the other role.
        if name in ("draft", "target") and None in change:
            continue
        if name in _GATE and first.method != second.method:
            continue
        # Some methods read no chunks, and then chunks have other default lengths. The default limit
        # on turns is computed from the lengths of chunks.
        follows = name == "turns" or (table == "chunking" and first.roles != second.roles)
        if follows and name in first.derived & second.derived:
            continue
        # If both models are sampled alike, print the change only once.
        sampling = f"sampling.{field_name}"
        if table == "target_sampling" and change == (before.get(sampling), after.get(sampling)):
            continue
        yield ChangedSetting(name, *change)


def _cost(name: str, ours: Sequence[Any], theirs: Sequence[Any]) -> CostRatio | None:
    """Compare one cost of two runs; return None if the cost is not known.

    Tokens and dollars must be known for every problem. Seconds are unknown for single problems of a
    run that was killed and resumed, so these problems are left out.
    """
    known = [
        (a[name], b[name]) for a, b in zip(ours, theirs, strict=True) if name in a and name in b
    ]
    unknown = len(ours) - len(known)
    if not known or (unknown and name != "seconds"):
        return None
    first, second = np.array(known, dtype=np.float64).T
    before = float(first.mean())
    after = float(second.mean())
    ends = ratio_interval(first, second)
    return CostRatio(name, before, after, cost_ratio(after, before), *ends, unknown)
