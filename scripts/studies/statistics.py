"""Statistics of small runs: what intervals cover near 0 and 1, and how near a run of few problems ends to its rate."""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from atts.calibration import Candidate, Tuning, certify, certify_net, replay
from atts.core import Decision
from atts.run.recorder import DecisionsLeft
from scripts.studies.calibration import traces
from scripts.studies.coverage import coverage_tables
from scripts.studies.harness import Options, Row, Table
from scripts.studies.scale_work import recorded_rollouts

Turns = Sequence[tuple[float, int]]
"""A recorded rollout: score and characters of each chunk."""

EPSILON = 0.02


def study(options: Options) -> list[Table]:
    """Coverage by simulation; rates on recorded scores, where the traces are at hand."""
    tables = [*coverage_tables(options), certificates(options), lengths(options)]
    folder = traces()
    return tables if folder is None else [*tables, small_runs(folder, options)]


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


def lengths(options: Options) -> Table:
    """Mode marginal where long chunks score worse and come later: ranks among all, and among chunks of one length."""
    runs, rows = options.pick(4, 40, 200), list[Row]()
    for chunks in options.pick((400,), (320, 400, 1600), (320, 400, 1600)):
        for in_flight in (64, 256):
            streams = [_first_chunks(chunks, in_flight, random.Random(f"{options.seed} {at}")) for at in range(runs)]
            rates = [
                fmean(replay(one, 0.2, "marginal", seed=at, by_length=by).escalated for at, one in enumerate(streams))
                for by in (False, True)
            ]
            rows.append((chunks, in_flight, *rates))
    return Table.of(
        "Rate of mode marginal, nominal 0.2, by chunks in flight",
        "chunks | in flight | ranks among all | ranks by length",
        rows,
        f"{runs} made-up runs a row of first chunks that last as long as they are; log-length and log-perplexity "
        "correlate by .54, as on a real pair, and a limit of 500 cuts some.",
    )


def _first_chunks(chunks: int, in_flight: int, draw: random.Random) -> list[dict[str, Any]]:
    places = [draw.gauss(0, 1) for _ in range(chunks)]
    waiting = [(min(500.0, 60 + math.exp(4 + 0.5 * place)), place) for place in places]
    going, found, now = list[tuple[float, float, float]](), list[dict[str, Any]](), 0.0
    while waiting or going:
        while waiting and len(going) < in_flight:
            length, place = waiting.pop()
            heapq.heappush(going, (now + length + 1e-6 * draw.random(), length, place))
        now, length, place = heapq.heappop(going)
        score = math.exp(abs(0.6 + 0.15 * (0.54 * place + math.sqrt(1 - 0.54**2) * draw.gauss(0, 1))))
        found.append({"question": len(found), "turn": 0, "score": score, "length": length})
    return found


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
                cells = [
                    cell
                    for known in (True, False)
                    for cell in _facts([_ended(stream, rate, samples, known) for stream in streams])
                ]
                rows.append((f"{problems} x {samples}", order, rate, *cells))
    return Table.of(
        "How far the default mode ends from its rate (root mean square)",
        "problems x samples | order | rate | problems counted | worst caught | streaming in | worst caught",
        rows,
        f"{runs} runs a row, problems of a recorded run drawn with replacement, 64 rollouts in flight; times follow "
        "lengths. Worst: as many chunks with the highest scores as the rate stands for; what is not caught of them, "
        "others got.",
    )


def _rollouts(folder: Path) -> list[list[Turns]]:
    found: defaultdict[int, list[Turns]] = defaultdict(list)
    for record in recorded_rollouts(folder) or ():
        if turns := [(turn["ppl"], turn["draft_chars"]) for turn in record["turns"] if turn["ppl"] is not None]:
            found[record["question_id"]].append(turns)
    return list(found.values())


def _arrivals(recorded: list[list[Turns]], problems: int, samples: int, order: str, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(f"{seed} {problems} {samples} {order}")
    fit = [rollouts for rollouts in recorded if len(rollouts) >= samples]
    chosen = [draw.sample(draw.choice(fit), samples) for _ in range(problems)]
    if order != "random":
        chosen.sort(key=_hardness, reverse=order == "hard first")
    waiting = [(n, s, turns) for n, rollouts in enumerate(chosen) for s, turns in enumerate(rollouts)][::-1]
    found, going = list[dict[str, Any]](), list[tuple[float, int, int, int, Turns]]()
    now, left = 0.0, DecisionsLeft(problems, samples)
    while waiting or going:
        while waiting and len(going) < 64:
            problem, sample, turns = waiting.pop()
            heapq.heappush(going, (now + turns[0][1] * draw.uniform(0.8, 1.2), problem, sample, 0, turns))
        now, problem, sample, turn, turns = heapq.heappop(going)
        place = {"question": problem, "sample": sample, "turn": turn}
        found.append({**place, "score": max(1.0, turns[turn][0]), "left": left.share})
        left.count(Decision("accept", 0.5, str(problem), turn, sample))
        if turn + 1 < len(turns):
            heapq.heappush(going, (now + turns[turn + 1][1] * draw.uniform(0.8, 1.2), problem, sample, turn + 1, turns))
        else:
            left.end(str(problem), sample)
    return found


def _hardness(rollouts: Sequence[Turns]) -> float:
    scores = [score for turns in rollouts for score, _ in turns]
    return sum(scores) / len(scores)


def _ended(stream: list[dict[str, Any]], rate: float, samples: int, known: bool) -> tuple[float, float]:
    """How far the realised rate is off, and the share of the worst chunks that went over."""
    told = stream if known else [{**record, "left": None} for record in stream]
    done = replay(told, rate=rate, mode="aci", tuning=Tuning.for_rollouts(samples))
    worst = sorted(done.decisions, key=lambda decision: -(decision.score or 0.0))[: max(1, round(rate * len(stream)))]
    return done.escalated - rate, fmean(decision.escalate for decision in worst)


def _facts(runs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return math.sqrt(fmean(error**2 for error, _ in runs)), fmean(caught for _, caught in runs)
