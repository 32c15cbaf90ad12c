"""Small runs, live on the embedded pair: how near they end to their rate, what they escalate, what
they get right.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import fmean

import anyio

from atts.calibration import Calibrator, Tuning
from atts.core import Decision, Features, Outcome, Problem
from atts.evaluators import compare_runs
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.pipelines import Calibrating, ConformalGate
from scripts.studies.arms import Pair, arm, run_block
from scripts.studies.harness import Options, Row, Table, interval, say
from scripts.studies.parts import Parts

SIZES = ((20, 8), (30, 16), (40, 8), (100, 8))
ORDERS = ("random", "hard first", "easy first")
RATES = (0.1, 0.2, 0.4)
GATES = ("counted", "streaming in")
"""The default, and the same that is not told how much of the run is left."""


class WatchedGate(ConformalGate):
    """The conformal gate with its decisions kept: those of a chunk that a settled vote cut off are
    in no outcome.
    """

    def __init__(self, calibrator: Calibrating, is_counted: bool) -> None:
        super().__init__(calibrator)
        self._is_counted = is_counted
        self.made: list[tuple[float, bool]] = []  # score, and whether the target took over

    def decide(self, features: Features, score: float) -> Decision:
        """As the gate; of a run whose problems stream in, without the share that is left."""
        return super().decide(features if self._is_counted else replace(features, left=None), score)

    def observe(self, decision: Decision, escalated: bool) -> None:
        """Keep it, too."""
        self.made.append((math.inf if decision.score is None else decision.score, escalated))
        super().observe(decision, escalated)


@dataclass(frozen=True, slots=True)
class Ended:
    """One run: its decisions, those that went over, those of its worst chunks that did, and each
    problem's answer.
    """

    decisions: int
    escalated: int
    caught: float
    right: dict[str, float]

    @classmethod
    def of(cls, gate: WatchedGate, outcomes: Sequence[Outcome], rate: float) -> Ended:
        """Of what the gate decided, and what came of it."""
        worst = sorted(gate.made, reverse=True)[: max(1, round(rate * len(gate.made)))]
        right = {one.problem.id: float(one.answer == one.problem.answer) for one in outcomes}
        return cls(
            len(gate.made),
            sum(over for _, over in gate.made),
            fmean(over for _, over in worst),
            right,
        )

    @property
    def share(self) -> float:
        """The realised rate."""
        return self.escalated / self.decisions


def study(options: Options) -> list[Table]:
    """Every size, order, rate and seed with both gates in turn; finished runs are kept, and not run
    again.
    """
    parts = Parts(options.file("small-runs.jsonl"))
    sizes = options.pick(SIZES[:1], SIZES[:2], SIZES)
    seeds = options.pick(1, 3, 20)
    anyio.run(_run_all, parts, sizes, seeds, options.seed)
    return [_table(parts, sizes)]


async def _run_all(parts: Parts, sizes: Sequence[tuple[int, int]], seeds: int, first: int) -> None:
    async with Pair() as pair:
        for seed, size, rate, order, gate in product(
            range(first, first + seeds), sizes, RATES, ORDERS, GATES
        ):
            problems, samples = size
            name = f"{problems}|{samples}|{order}|{rate}|{gate}|{seed}"
            if name not in parts:
                say(f"small runs: {name}")
                plan = pair.plan(arm("atts", samples=samples, rate=rate), seed * 31 + len(order))
                tuning = Tuning.for_rollouts(samples)
                watched = WatchedGate(
                    Calibrator(rate, "aci", seed=plan.seed, tuning=tuning), gate == GATES[0]
                )
                chosen = _ordered(arithmetic("test", problems, 5000 + seed), order)
                outcomes, _ = await run_block(chosen, replace(plan, gate=watched))
                parts.keep(name, asdict(Ended.of(watched, outcomes, rate)))


def _ordered(problems: Sequence[Problem], order: str) -> list[Problem]:
    if order == ORDERS[0]:
        return list(problems)
    return sorted(problems, key=lambda problem: problem.level or 0, reverse=order == ORDERS[1])


def _table(parts: Parts, sizes: Sequence[tuple[int, int]]) -> Table:
    # by all but the seed, then by seed
    found: defaultdict[tuple[str, ...], dict[str, Ended]] = defaultdict(dict)
    for name, value in parts.items():
        *place, seed = name.split("|")
        found[tuple(place)][seed] = Ended(**value)
    rows = list[Row]()
    for (problems, samples), order, rate in product(sizes, ORDERS, RATES):
        cell = (str(problems), str(samples), order)
        counted, streaming = (found[*cell, str(rate), gate] for gate in GATES)
        both = sorted(counted.keys() & streaming.keys())
        facts = [
            fact
            for runs in (counted, streaming)
            for fact in _facts([runs[seed] for seed in both], rate)
        ]
        spent = [sum(runs[seed].escalated for seed in both) for runs in (counted, streaming)]
        gained = _gained([(streaming[seed].right, counted[seed].right) for seed in both])
        alike = list[tuple[Mapping[str, float], Mapping[str, float]]]()
        for seed, run in counted.items():
            others = [found[*cell, str(each), GATES[1]].get(seed) for each in RATES]
            if len(known := [one for one in others if one is not None]) > 1:
                alike.append((_at_share(known, run.share), run.right))
        more = spent[1] / spent[0] if both else None
        rows.append(
            (
                f"{problems} x {samples}",
                order,
                rate,
                len(both),
                *facts,
                more,
                gained,
                _gained(alike),
            )
        )
    return Table.of(
        "Small runs, live: how far they end from their rate, and what of the worst chunks went "
        "over",
        "problems x samples | order | rate | runs | RMS error, counted | worst caught | RMS error, "
        "streaming in | "
        "worst caught | chunks escalated, streaming in over counted | answers right more often, "
        "counted | "
        "the same, where streaming in escalated as many",
        rows,
        "Runs of the embedded pair on arithmetic problems, sorted by level or not, 64 rollouts in "
        "flight, each with "
        "the run's size known and not. Worst: as many chunks with the highest scores as the rate "
        "stands for. "
        "Last column: between the runs of a seed at the two nearest rates, by a line.",
    )


def _at_share(runs: Sequence[Ended], share: float) -> dict[str, float]:
    """How often each problem was right where this share of chunks was escalated: on the line of the
    two nearest.
    """
    nearest = sorted(runs, key=lambda run: abs(run.share - share))[:2]
    low, high = sorted(nearest, key=lambda run: run.share)
    place = (share - low.share) / (high.share - low.share)
    return {name: right + place * (high.right[name] - right) for name, right in low.right.items()}


def _gained(runs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]]) -> str:
    """How much more often problems were right in the second of two runs."""
    pairs = [(first[name], right) for first, second in runs for name, right in second.items()]
    return interval(compare_runs(*map(list, zip(*pairs, strict=True))).difference) if pairs else "-"


def _facts(runs: Sequence[Ended], rate: float) -> tuple[float | None, float | None]:
    """How far runs end from their rate (root mean square), and what share of their worst chunks
    went over.
    """
    if not runs:
        return None, None
    return math.sqrt(fmean((run.share - rate) ** 2 for run in runs)), fmean(
        run.caught for run in runs
    )
