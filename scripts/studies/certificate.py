"""Whether certificates keep their promise over simulated deployments, and how near to the cheapest policy they come."""

from __future__ import annotations

import math
from statistics import fmean

import numpy as np

from atts.calibration.certificate import Candidate, certify
from atts.calibration.risk import Test, problems_needed
from scripts.studies.harness import Cell, Options, Table

DELTA = 0.1
EPSILONS = (0.02, 0.05)


def study(options: Options) -> list[Table]:
    """Validity, cost, and the sizes one needs."""
    runs = options.pick(40, 500, 500)
    rows = list[tuple[Cell, ...]]()
    tests: tuple[Test | None, ...] = (None, "hoeffding-bentkus") if options.effort != "quick" else (None,)
    for epsilon in EPSILONS:
        for problems in options.pick((300,), (300, 2000), (100, 300, 1000, 2000)):
            count = runs if problems <= 300 or options.effort == "full" else min(runs, 100)
            for test in tests:
                rows.append((epsilon, problems, test or "sharpest", count, *_runs(epsilon, problems, count, test)))
    validity = Table(
        f"Certificates over simulated deployments at delta {DELTA:g}",
        ("epsilon", "problems", "test", "runs", "certified", "true loss above epsilon", "allowed", "cost / cheapest"),
        tuple(rows),
        ("Problems differ in hardness (Beta(0.3, 1.5)); sixteen samples of a problem share it; loss = target right and "
         "policy wrong, the mean over a problem's samples. Cost is the rate. allowed = delta of the runs + 2.33 SD.",),
    )  # fmt: skip
    sizes = [
        (epsilon, *(problems_needed(share * epsilon, epsilon, DELTA) for share in (0.0, 0.25, 0.5, 0.75)))
        for epsilon in (0.01, 0.02, 0.05, 0.1)
    ]
    needed = Table("Problems needed for a certificate, by the policy's observed loss",
                   ("epsilon", "no loss", "a quarter of epsilon", "half", "three quarters"), tuple(sizes))  # fmt: skip
    return [validity, needed]


def _runs(epsilon: float, problems: int, runs: int, test: Test | None) -> tuple[int, int, float, float]:
    rates = [k / 40 for k in range(41)]
    true = {rate: (1 - rate) ** 2 * 0.3 / 1.8 for rate in rates}
    cheapest = min(rate for rate in rates if true[rate] <= epsilon)
    costs, wrong = list[float](), 0
    for seed in range(runs):
        draw = np.random.default_rng([seed, problems])
        hardness = draw.beta(0.3, 1.5, size=problems)
        lost = [(rate, draw.binomial(16, (1 - rate) ** 2 * hardness) / 16) for rate in rates]
        chosen = certify(
            [Candidate("g", rate, losses.tolist(), rate) for rate, losses in lost], epsilon, DELTA, test
        ).chosen
        if chosen is not None:
            costs.append(chosen.cost / cheapest)
            wrong += true[chosen.rate] > epsilon
    allowed = runs * DELTA + 2.33 * math.sqrt(runs * DELTA * (1 - DELTA))
    return len(costs), wrong, allowed, fmean(costs) if costs else math.nan
