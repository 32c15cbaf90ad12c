"""Decisions under uncertainty: when comparisons end, and how often given answers are wrong."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from atts.calibration import certify_abstention
from atts.evaluators import compare_in_order
from scripts.studies.harness import Options, Row, Table

Floats = NDArray[np.float64]
EFFECTS = ((0.2, 0.3), (0.1, 0.2), (0.05, 0.15), (0.0, 0.2), (0.0, 0.05))
"""Differences of accuracy, and the share of problems on which the runs differ."""


def study(options: Options) -> list[Table]:
    """By simulation, from the seed."""
    return [stopping(options), answering(options)]


def stopping(options: Options) -> Table:
    """Looking after every problem, up to 2,000 of them, beside a t test at every look."""
    runs = options.pick(10, 100, 1000)
    draw, rows = np.random.default_rng(options.seed), list[Row]()
    for effect, share in EFFECTS:
        chances = [(share - effect) / 2, 1 - share, (share + effect) / 2]
        many = [draw.choice([-1.0, 0.0, 1.0], 2000, p=chances) for _ in range(runs)]
        found = [compare_in_order(differences.tolist()) for differences in many]
        ended = [one.problems if one.settled != "undecided" else math.inf for one in found]
        misled = ("worse",) if effect else ("better", "worse")
        wrong = float(np.mean([one.settled in misled for one in found]))
        rows.append((effect, share, float(np.median(ended)), wrong, float(np.mean(list(map(_peeked, many))))))
    return Table.of(
        "Comparisons that look after every one of 2,000 problems",
        "difference | share that differs | median end | misled | misled or ended, t at every look",
        rows,
        f"{runs} runs a row, at 95 %. Where there is no difference every end is misled.",
    )


def _peeked(differences: Floats) -> bool:
    count = np.arange(1, differences.size + 1)
    mean = np.cumsum(differences) / count
    spread = np.sqrt(np.maximum(np.cumsum(differences**2) / count - mean**2, 1e-12) / count)
    return bool((np.abs(mean[29:]) > 1.96 * spread[29:]).any())


def answering(options: Options) -> Table:
    """Thresholds of agreement from labelled problems of laws where more agreement is seldomer wrong."""
    runs, rows = options.pick(40, 300, 2000), list[Row]()
    for problems in (60, 150, 400):
        for slope in (0.25, 0.5):
            broken = certified = share = 0.0
            for seed in range(runs):
                draw = np.random.default_rng([options.seed, problems, seed])
                agreed = draw.integers(2, 9, problems) / 8
                wrong = draw.random(problems) < slope * (1 - agreed) + 0.03
                found = certify_abstention(agreed.tolist(), wrong.tolist(), 0.1)
                if found.threshold is not None:
                    levels = [step / 8 for step in range(2, 9) if step / 8 >= found.threshold - 1e-9]
                    certified += 1 / runs
                    share += len(levels) / 7 / runs
                    broken += (sum(slope * (1 - level) + 0.03 for level in levels) / len(levels) > 0.1) / runs
            rows.append((problems, slope, certified, share / certified if certified else math.nan, broken))
    return Table.of(
        "Answers withheld so that at most a tenth of those given are wrong, with probability .9",
        "labelled problems | wrong more by disagreement | certified | answered, if so | wrong more than promised",
        rows,
        f"{runs} runs a row; the last column may be .1.",
    )
