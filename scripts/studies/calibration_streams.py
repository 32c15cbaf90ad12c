"""Rate control on real score streams: every mode beside the published rule, the synchronous sort and a coin."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np

from atts.calibration import MODES, StoredScores, replay
from atts.calibration.conformal import escalates
from atts.calibration.metrics import METRICS, Floats, rate_metrics, sorted_decisions
from atts.calibration.modes import DEFAULTS, Tuning
from scripts.studies.calibration_data import ARRAY, ORDERS, Records, arrays, arrivals, traces
from scripts.studies.harness import Cell, Options, Table

RATES = (0.4, 0.2, 0.1)
BARS = {0.4: (0.004, 0.013, 0.060, 0.032, 0.950, 0.83), 0.2: (0.002, 0.009, 0.045, 0.025, 0.940, 0.86),
        0.1: (0.002, 0.006, 0.030, 0.018, 0.925, 0.89)}  # fmt: skip
LOCK_QUESTION_BARS = {0.4: 0.050, 0.2: 0.036, 0.1: 0.025}
COLUMNS = (
    "overall error",
    "turn RMS",
    "question RMS",
    "worst rolling 500",
    "AUROC in (question, turn)",
    "like the sort",
)


def study(options: Options) -> list[Table]:
    """Bars, modes and frontier; nothing where the traces are absent."""
    folder = traces()
    if folder is None:
        return []
    stored = next(scores for name, scores in arrays(folder).items() if ARRAY in name)
    streams = {order: arrivals(folder, order) for order in ORDERS}
    tables = [bars(streams, options), *(modes(streams, stored, rate) for rate in options.pick(RATES[:1], RATES, RATES))]
    if options.effort != "quick":
        tables.append(frontier(streams, options))
        tables.append(halves(folder))
    return tables


def bars(streams: Mapping[str, Records], options: Options) -> Table:
    """The question-turn mode against its goals, means over seeds, with the odd questions of the same run apart."""
    seeds = range(options.seed, options.seed + options.pick(1, 3, 10))
    rows = list[tuple[Cell, ...]]()
    for order, records in streams.items():
        for rate in RATES:
            limits = list(BARS[rate])
            limits[2] = LOCK_QUESTION_BARS[rate] if order == "lock" else limits[2]
            rows.append((order, rate, "goal", *limits, ""))
            done = [replay(records, rate=rate, mode="question-turn", seed=seed) for seed in seeds]
            held = all(_holds(list(d.metrics.values()), limits) for d in done)
            rows.append((order, rate, "all questions", *_means([d.metrics for d in done]), "yes" if held else "NO"))
            odd = [_part(records, [float(x.escalate) for x in d.decisions], rate, 1) for d in done]
            rows.append((order, rate, "odd questions", *_means(odd), ""))
    return Table(
        f"Question-turn mode against its goals, mean of {len(seeds)} seeds",
        ("order", "rate", "what", *COLUMNS, "every seed within"),
        tuple(rows),
        ("One configuration for all rates and both orders, chosen on the even questions and on other runs.",
         "Half of the questions are half of the decisions: their errors are larger for that reason alone."),
    )  # fmt: skip


def modes(streams: Mapping[str, Records], stored: StoredScores, rate: float) -> Table:
    """Every mode at one rate beside what it competes with."""
    rows = list[tuple[Cell, ...]]()
    for order, records in streams.items():
        x = np.array([math.log(record["score"]) for record in records])
        for name, decisions in _others(records, stored, x, rate).items():
            rows.append((order, name, *_metrics(records, decisions, rate)))
        for mode in MODES:
            start = stored if mode == "split" else ()
            done = replay(records, rate=rate, mode=mode, stored=start)
            rows.append((order, f"mode {mode}", *done.metrics.values()))
    return Table(f"Every mode on the real stream at rate {rate:g}", ("order", "rule", *COLUMNS), tuple(rows), (
        "published: stored scores of the same questions, c/N >= 1 - rate. sort: waits for all siblings. coin: dice.",
        "split starts from the stored scores; the other modes start from nothing.",
    ))  # fmt: skip


def frontier(streams: Mapping[str, Records], options: Options) -> Table:
    """What equal rates per question cost in order: the two constants that trade them, at rate 0.4."""
    grid = options.pick((), ((0.1, 0.4), (0.15, 0.6), (0.23, 0.6), (0.35, 0.6), (0.35, 1.0)), _grid())
    rows = list[tuple[Cell, ...]]()
    for gain, order_pull in grid:
        tuning: Tuning = replace(DEFAULTS, question_gain=gain, order=order_pull)
        for order, records in streams.items():
            done = replay(records, rate=0.4, mode="question-turn", tuning=tuning)
            rows.append((gain, order_pull, order, *done.metrics.values()))
    return Table("Frontier of the question-turn mode at rate 0.4", ("question gain", "order", "arrivals", *COLUMNS),
                 tuple(rows), (f"The default is {DEFAULTS.question_gain:g} and {DEFAULTS.order:g}.",))  # fmt: skip


def halves(folder: Path) -> Table:
    """The same mode replayed on a half of the questions alone."""
    rows = list[tuple[Cell, ...]]()
    for order in ORDERS:
        records = arrivals(folder, order)
        for half, name in ((0, "even alone"), (1, "odd alone")):
            part = [record for record in records if record["question"] % 2 == half]
            for rate in RATES:
                rows.append((order, name, rate, *replay(part, rate=rate).metrics.values()))
    return Table("Replayed on half of the questions alone", ("order", "questions", "rate", *COLUMNS), tuple(rows))


def _grid() -> tuple[tuple[float, float], ...]:
    return tuple((gain, pull) for gain in (0.08, 0.12, 0.17, 0.23, 0.3, 0.4) for pull in (0.2, 0.4, 0.6, 0.8, 1.2))


def _others(records: Records, stored: StoredScores, x: Floats, rate: float) -> dict[str, Floats]:
    pool = np.sort(np.asarray(stored.badness))
    below = np.searchsorted(pool, x)
    published = [escalates("reference", int(b), 0, len(pool), rate) for b in below]
    q, t = (np.array([record[name] for record in records]) for name in ("question", "turn"))
    coin = np.random.default_rng(0).random(len(x)) < rate
    return {
        "published": np.array(published, float),
        "sort": sorted_decisions(q, t, x, rate),
        "coin": coin.astype(float),
    }


def _metrics(records: Records, decisions: Floats, rate: float) -> list[float]:
    return list(_part(records, decisions.tolist(), rate, None).values())


def _part(records: Records, decisions: Sequence[float], rate: float, half: int | None) -> dict[str, float]:
    """The metrics of a half of the questions (None: of all) under decisions taken on the whole stream."""
    kept = [(r, d) for r, d in zip(records, decisions, strict=True) if half is None or r["question"] % 2 == half]
    questions, turns = ([record[name] for record, _ in kept] for name in ("question", "turn"))
    return rate_metrics(questions, turns, [math.log(r["score"]) for r, _ in kept], [d == 1 for _, d in kept], rate)


def _means(found: Sequence[Mapping[str, float]]) -> list[float]:
    return [fmean(metrics[name] for metrics in found) for name in METRICS]


def _holds(found: Sequence[float], limits: Sequence[float]) -> bool:
    return all(a <= b for a, b in zip(found[:4], limits[:4], strict=True)) and all(
        a >= b for a, b in zip(found[4:], limits[4:], strict=True)
    )
