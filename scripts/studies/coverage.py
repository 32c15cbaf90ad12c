"""Coverage by simulation: how often a nominal 95 % holds the truth, for rates, votes, differences and ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import fmean

import numpy as np
from scipy import stats

from atts.analysis.ratios import ratio_interval
from atts.calibration.metrics import Floats
from atts.evaluators.metrics.intervals import mean_estimate
from atts.evaluators.metrics.paired import difference_estimate
from atts.evaluators.metrics.rates import Votes, maj_at_k, pass_at_k
from scripts.studies.harness import Options, Row, Table

Ends = tuple[float, float]
SAMPLES = 16
TRUTHS = (0.02, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99)
_MANY = 20_000  # problems from which a true value is computed


def coverage_tables(options: Options) -> list[Table]:
    """One table for every number of problems: everything that is printed, beside the others' formulas."""
    return [_table(problems, options) for problems in options.pick((30,), (30, 40, 500), (30, 40, 500))]


def ours(values: Floats) -> Ends:
    """The interval that is printed."""
    found = mean_estimate(values, values.size * SAMPLES)
    return found.low, found.high


def inspect_ai(values: Floats) -> Ends:
    """Its clustered standard error with Student's t."""
    return _around(values, float(stats.t.ppf(0.975, values.size - 1)))


def lm_eval(values: Floats) -> Ends:
    """Its standard error of the mean, 1.96 to either side."""
    return _around(values, 1.96)


def _around(values: Floats, reach: float) -> Ends:
    half = reach * float(values.std(ddof=1)) / math.sqrt(values.size)
    return float(values.mean()) - half, float(values.mean()) + half


FORMULAS: Mapping[str, Callable[[Floats], Ends]] = {"ours": ours, "inspect_ai": inspect_ai, "lm_eval": lm_eval}


def _table(problems: int, options: Options) -> Table:
    rows = list[Row]()
    for truth in TRUTHS:
        draw = np.random.default_rng([options.seed, problems, round(1000 * truth)])
        rows += _rates(draw, truth, problems, options.pick(100, 400, 4000))
    draw = np.random.default_rng([options.seed, problems, 1])
    runs = options.pick(50, 300, 2000)
    rows += [_differences(draw, shift, problems, runs) for shift in (0.0, 0.02, 0.1)]
    rows += [_ratios(draw, law, problems, runs) for law in RATIOS]
    return Table.of(
        f"What a nominal 95 % covers with {problems} problems of {SAMPLES} samples",
        " | ".join(["what", "true value", *FORMULAS]),
        rows,
        f"{options.pick(100, 400, 4000):,} simulated benchmarks a row, {runs:,} for differences and ratios, a quarter "
        "for maj@5, where wrong answers fall on three values; difficulties are Beta. The others' formulas are theirs, "
        "computed here: inspect_ai has none for differences and ratios, lm_eval takes two runs as independent.",
    )


def _rates(draw: np.random.Generator, truth: float, problems: int, runs: int) -> list[Row]:
    law = (2 * truth, 2 * (1 - truth))
    right = draw.binomial(SAMPLES, draw.beta(*law, (runs, problems))).astype(float)
    rows = list[Row]()
    for k in (1, 4):
        known = float((1 - (1 - draw.beta(*law, 400_000)) ** k).mean())
        rows.append(_row(f"pass@{k}", known, [pass_at_k(np.full(problems, SAMPLES), row, k) for row in right]))
    fewer = right[: max(1, runs // 4)]
    many = draw.binomial(SAMPLES, draw.beta(*law, _MANY)).astype(float)
    rows.append(_row("maj@5", float(_majorities(draw, many).mean()), [_majorities(draw, row) for row in fewer]))
    return rows


def _majorities(draw: np.random.Generator, right: Floats) -> Floats:
    """Exact maj@5 of every problem: its right samples agree, its wrong ones fall on three answers."""
    wrong = draw.multinomial(SAMPLES - right.astype(int), (0.5, 0.3, 0.2))
    held = [
        Votes((int(one), *map(int, others)), (1.0, 0.0, 0.0, 0.0)) for one, others in zip(right, wrong, strict=True)
    ]
    return maj_at_k(held, 5)


def _row(name: str, known: float, found: list[Floats]) -> Row:
    return name, known, *(fmean(_holds(formula(one), known) for one in found) for formula in FORMULAS.values())


def _holds(ends: Ends, known: float) -> bool:
    return ends[0] <= known <= ends[1]


def _differences(draw: np.random.Generator, shift: float, problems: int, runs: int) -> Row:
    """Two runs of the same problems, single answers, accuracies near .9 that differ by `shift`."""
    ends, theirs = list[Ends](), list[Ends]()
    for _ in range(runs):
        chance = draw.beta(9, 1, problems) * (1 - shift)
        first = (draw.random(problems) < chance).astype(float)
        second = (draw.random(problems) < np.minimum(1, chance + shift)).astype(float)
        found = difference_estimate(second - first)
        ends.append((found.low, found.high))
        errors = [float(side.std(ddof=1)) / math.sqrt(problems) for side in (first, second)]
        mean, half = float(second.mean() - first.mean()), 1.96 * math.hypot(*errors)
        theirs.append((mean - half, mean + half))
    return f"difference of {shift:g}", shift, *_shares(shift, ends, theirs)


def _ratios(draw: np.random.Generator, law: str, problems: int, runs: int) -> Row:
    """What a problem costs in two runs: each law's costs, and the ratio of their means."""
    costs, known = RATIOS[law]
    ends = [ratio_interval(*costs(draw, problems)) for _ in range(runs)]
    return f"ratio of costs, {law}", known, *_shares(known, ends, None)


def _correlated(draw: np.random.Generator, problems: int) -> tuple[Floats, Floats]:
    common, own = draw.normal(0, 0.6, problems), draw.normal(0, 0.4, (2, problems))
    return np.exp(common + own[0]), 0.2 * np.exp(common + own[1])


def _long_tails(draw: np.random.Generator, problems: int) -> tuple[Floats, Floats]:
    first, second = np.exp(draw.normal(0, 1, problems) + draw.normal(0, 0.8, (2, problems)))
    return first, second


def _mostly_nothing(draw: np.random.Generator, problems: int) -> tuple[Floats, Floats]:
    taken = (draw.random(problems) < 0.3) * draw.exponential(1, problems)
    return np.exp(draw.normal(-0.125, 0.5, problems)), taken


RATIOS: Mapping[str, tuple[Callable[[np.random.Generator, int], tuple[Floats, Floats]], float]] = {
    "correlated": (_correlated, 0.2),
    "long tails": (_long_tails, 1.0),
    "second mostly nothing": (_mostly_nothing, 0.3),
}


def _shares(known: float, ends: list[Ends], theirs: list[Ends] | None) -> tuple[float, None, float | None]:
    other = None if theirs is None else fmean(_holds(one, known) for one in theirs)
    return fmean(_holds(one, known) for one in ends), None, other
