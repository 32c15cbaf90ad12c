"""Show the round trip from a run to its training data and back: does a distilled draft escalate less?"""

from __future__ import annotations

from typing import Any

from atts.evaluators import load_dataset
from scripts.studies.harness import Options, Parts, Row, Table, say

DRAFTS = (("disturbed", 0.08), ("as shipped", 0.0))
"""Each draft with the noise on its weights, as a share of each matrix' spread."""
TITLE = "The round trip: export, train the draft, run again"
_SCALES = {"KL": 1.0, "escalated": 100.0, "correct": 100.0}


def study(options: Options) -> list[Table]:
    """Make the round trip with each draft and seed, on problems that were not trained on."""
    from examples.distil import by_measure, interval, round_trip

    count = options.pick(16, 60, 120)
    epochs = options.pick(3, 6, 6)
    seeds = options.pick(1, 2, 4)
    problems = list(load_dataset(f"arithmetic[:{count}]").problems)
    rows: list[Row] = []
    found: dict[str, Any] = {}
    parts = Parts(options.file("distil-parts.jsonl"))
    for draft, noise in DRAFTS:
        trips: list[Any] = []
        for seed in range(options.seed, options.seed + seeds):
            name = f"{draft}, seed {seed}, {count} problems, {epochs} epochs"
            if name not in parts:
                say(f"distil: {name}")
                parts.keep(name, round_trip(problems, noise, epochs, seed))
            trips.append(parts[name])
        measured = by_measure(trips)
        cells: list[str | int] = [draft, seeds]
        for measure, scale in _SCALES.items():
            now, counted, was, counts = measured[measure].sum(0)
            difference, low, high = (scale * one for one in interval(measured[measure]))
            digits = 3 if scale == 1 else 1
            before, after = scale * was / counts, scale * now / counted
            cells += [
                f"{before:.{digits}f} to {after:.{digits}f}",
                f"{difference:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]",
            ]
            found[f"{draft} {measure}"] = cells[-1]
        rows.append(tuple(cells))
    return [
        Table.of(
            TITLE,
            "draft | seeds | KL a token | change | chunks escalated, % | change, points | "
            "rollouts correct, % | change, points",
            rows,
            f"{count // 2} problems left out of the training, 4 rollouts each, {epochs} epochs; 95 % "
            f"intervals over problems. The disturbed draft has noise of {DRAFTS[0][1]} on its weights.",
            headline=f"a disturbed draft that is distilled on a run's export escalates "
            f"**{found['disturbed escalated']} points** of chunks, with "
            f"{found['disturbed correct']} points of rollouts correct",
        )
    ]
