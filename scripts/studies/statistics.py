"""Statistics of small runs: what intervals cover near 0 and 1, and how near a run of few problems ends to its rate."""

from __future__ import annotations

import gzip
import heapq
import json
import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from scipy import stats

from atts.calibration import Candidate, Tuning, certify, certify_net, replay
from atts.calibration.metrics import Floats
from atts.evaluators.metrics.intervals import mean_estimate
from atts.evaluators.metrics.rates import pass_at_k
from scripts.studies.calibration import traces
from scripts.studies.harness import Options, Row, Table

Ends = tuple[float, float]
Turns = Sequence[tuple[float, int]]
"""A recorded rollout: score and characters of each chunk."""

TRUTHS = (0.02, 0.05, 0.2, 0.5, 0.8, 0.95, 0.99)
SAMPLES, EPSILON = 16, 0.02


def study(options: Options) -> list[Table]:
    """Coverage by simulation; rates on recorded scores, where the traces are at hand."""
    tables = [coverage(problems, options) for problems in options.pick((30,), (30, 40, 500), (30, 40, 500))]
    tables.append(certificates(options))
    folder = traces()
    return tables if folder is None else [*tables, small_runs(folder, options)]


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


def coverage(problems: int, options: Options) -> Table:
    """How often a nominal 95 % holds the truth: difficulties are Beta, 16 samples each."""
    runs = options.pick(100, 400, 4000)
    rows = list[Row]()
    for truth in TRUTHS:
        draw = np.random.default_rng([options.seed, problems, round(1000 * truth)])
        many = draw.beta(2 * truth, 2 * (1 - truth), 400_000)
        right = draw.binomial(SAMPLES, draw.beta(2 * truth, 2 * (1 - truth), (runs, problems)))
        for k in (1, 4):
            known = float((1 - (1 - many) ** k).mean())
            found = [pass_at_k(np.full(problems, SAMPLES), row, k) for row in right]
            held = [
                float(np.mean([low <= known <= high for low, high in map(formula, found)]))
                for formula in FORMULAS.values()
            ]
            rows.append((f"pass@{k}", known, *held))
    return Table.of(
        f"What a nominal 95 % covers with {problems} problems of {SAMPLES} samples",
        " | ".join(["rate", "true value", *FORMULAS]),
        rows,
        f"{runs:,} simulated benchmarks a row. The others' formulas are theirs, computed here.",
    )


LAWS = {
    "as good, 8.5 % lost and won": (0.085, 0.085),
    "the embedded default": (0.0074, 0.0062),
    "worse by .025": (0.11, 0.085),
}
"""Shares of problems that a policy loses to the target alone, and wins: the second as measured on 2,000 problems."""


def certificates(options: Options) -> Table:
    """How often a policy is certified against the target alone, by the answers it loses and by its net loss."""
    runs, rows = options.pick(40, 200, 1000), list[Row]()
    for name, (lost, won) in LAWS.items():
        for problems in (500, 2000):
            draw = np.random.default_rng([options.seed, problems])
            laws = (lost, won, 1 - lost - won)
            found = [draw.choice((1.0, -1.0, 0.0), problems, p=laws).tolist() for _ in range(runs)]
            old = [certify([Candidate("a", 0.2, [max(loss, 0.0) for loss in one], 1.0)], EPSILON) for one in found]
            net = [certify_net([Candidate("a", 0.2, one, 1.0)], EPSILON) for one in found]
            rows.append((name, problems, *(fmean(c.chosen is not None for c in each) for each in (old, net))))
    return Table.of(
        f"Share of runs that are certified at {EPSILON}, by simulation",
        "policy | problems | answers lost (`certify`) | net loss (`certify_net`)",
        rows,
        f"{runs:,} simulated runs a row, delta .1. A policy worse by .025 may be certified in one run of ten.",
    )


def small_runs(folder: Path, options: Options) -> Table:
    """The default mode on recorded rollouts, drawn anew for every run; the run's size known, and not."""
    runs = options.pick(2, 6, 20)
    recorded = _rollouts(folder)
    rows = list[Row]()
    for problems, samples in options.pick(
        ((20, 8),), ((20, 8), (30, 16), (40, 8)), ((20, 8), (30, 16), (40, 8), (100, 8))
    ):
        for order in ("random", "hard first", "easy first"):
            streams = [_arrivals(recorded, problems, samples, order, seed) for seed in range(runs)]
            for rate in (0.1, 0.2, 0.4):
                known, unknown = (
                    math.sqrt(np.mean([_error(stream, rate, samples, known) ** 2 for stream in streams]))
                    for known in (True, False)
                )
                rows.append((f"{problems} x {samples}", order, rate, known, unknown))
    return Table.of(
        "How far the default mode ends from its rate (root mean square)",
        "problems x samples | order | rate | problems counted | streaming in",
        rows,
        f"{runs} runs a row, problems of ct0 drawn with replacement, 64 rollouts in flight; times follow lengths.",
    )


def _rollouts(folder: Path) -> list[list[Turns]]:
    found: defaultdict[int, list[Turns]] = defaultdict(list)
    with gzip.open(folder / "draft_target.jsonl.gz", "rt") as lines:
        for record in map(json.loads, lines):
            turns = [(turn["ppl"], turn["draft_chars"]) for turn in record["turns"] if turn["ppl"] is not None]
            if record["run"] == "ct0" and turns:
                found[record["question_id"]].append(turns)
    return list(found.values())


def _arrivals(recorded: list[list[Turns]], problems: int, samples: int, order: str, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(f"{seed} {problems} {samples} {order}")
    fit = [rollouts for rollouts in recorded if len(rollouts) >= samples]
    chosen = [draw.sample(draw.choice(fit), samples) for _ in range(problems)]
    if order != "random":
        chosen.sort(key=_hardness, reverse=order == "hard first")
    waiting = [(n, s, turns) for n, rollouts in enumerate(chosen) for s, turns in enumerate(rollouts)][::-1]
    unended, found, going = len(waiting), list[dict[str, Any]](), list[tuple[float, int, int, int, Turns]]()
    now = 0.0
    while waiting or going:
        while waiting and len(going) < 64:
            problem, sample, turns = waiting.pop()
            heapq.heappush(going, (now + turns[0][1] * draw.uniform(0.8, 1.2), problem, sample, 0, turns))
        now, problem, sample, turn, turns = heapq.heappop(going)
        place = {"question": problem, "sample": sample, "turn": turn}
        found.append({**place, "score": max(1.0, turns[turn][0]), "left": unended / (problems * samples)})
        if turn + 1 < len(turns):
            heapq.heappush(going, (now + turns[turn + 1][1] * draw.uniform(0.8, 1.2), problem, sample, turn + 1, turns))
        else:
            unended -= 1
    return found


def _hardness(rollouts: Sequence[Turns]) -> float:
    scores = [score for turns in rollouts for score, _ in turns]
    return sum(scores) / len(scores)


def _error(stream: list[dict[str, Any]], rate: float, samples: int, known: bool) -> float:
    told = stream if known else [{**record, "left": None} for record in stream]
    return replay(told, rate=rate, mode="aci", tuning=Tuning.for_rollouts(samples)).escalated - rate
