"""Place methods against each other at equal cost: accuracy with its interval against four costs.

Every method runs live on the embedded pair, on the same problems. Its tokens are then priced as those
of pairs of real models: what is decoded, read and computed, and the seconds of the GPUs. So the
accuracies are the embedded pair's, and the prices those of the pair that is named.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from scripts.studies.arms import Arm, Sum, arm, frontier_run, right
from scripts.studies.harness import Chart, Options, Row, Table, interval
from scripts.studies.modelled import DRAFT_1B, DRAFT_8B, TARGET_70B, Cost

BATCH = 64  # sequences that a step decodes
CONTEXT = 1000  # tokens that each of them has in the cache


def scaled(cost: Cost, share: float, origin: str) -> Cost:
    """Return the cost of a model with this share of the weights, on as many GPUs."""
    return replace(
        cost,
        step=cost.step * share,
        sequence=cost.sequence * share,
        prefilled=cost.prefilled * share,
        origin=origin,
    )


@dataclass(frozen=True, slots=True)
class Prices:
    """A pair's costs: parameters, seconds of a step, and GPUs of each model."""

    name: str
    draft_parameters: float
    target_parameters: float
    draft: Cost
    target: Cost
    draft_gpus: int = 1
    target_gpus: int = 4

    def tflops(self, one: Sum) -> float:
        """Return the arithmetic of a problem: two operations per parameter and token."""
        draft = one.each("draft") * self.draft_parameters
        target = (one.each("target") + one.each("scored")) * self.target_parameters
        return 2 * (draft + target) / 1e12

    def gpu_seconds(self, one: Sum) -> float:
        """Return the seconds of a problem on each GPU, added up, with full batches.

        Tokens that the target draws while it scores take no decoding step.
        """
        count = max(1, len(one.solved))
        decoded = decoded_by_target(one)
        draft = one.each("draft") * decoding_seconds(self.draft)
        target = decoded * decoding_seconds(self.target)
        target += one.total("scored") / count * self.target.prefilled
        return self.draft_gpus * draft + self.target_gpus * target


def decoding_seconds(cost: Cost) -> float:
    """Return a sequence's share of the step that writes one token of it."""
    return cost.seconds(BATCH, BATCH * CONTEXT) / BATCH


def decoded_by_target(one: Sum) -> float:
    """Return the tokens per problem for which the target took a decoding step."""
    return (one.total("target") - one.total("drawn")) / max(1, len(one.solved))


_OF_70B = "the 70B row scaled by weights"
PRICES = (
    Prices("1.5B/70B", 1.54e9, 70.6e9, DRAFT_1B, TARGET_70B),
    Prices("8B/32B", 8.03e9, 32.8e9, DRAFT_8B, scaled(TARGET_70B, 32.8 / 70.6, _OF_70B)),
)


def arms(options: Options) -> list[tuple[str, Arm]]:
    """Return every run with the method that it is a point of."""
    few = options.effort == "quick"
    samples = (2,) if few else (1, 4, 8)
    made: list[tuple[str, Arm]] = []

    def add(method: str, name: str, m: int, rate: float = 0.2, **changes: Any) -> None:
        made.append((method, arm(f"{method} {rate:g} {m}", name, samples=m, rate=rate, **changes)))

    for m in (4,) if few else (4, 8, 16):
        add("draft alone, early stop", "draft-only", m, early_stop="likely")
    for m in samples:
        add("target alone, early stop", "target-only", m, early_stop="likely")
    for rate in (0.3,) if few else (0.1, 0.3, 0.6):
        add("cascade by vote", "cascade", 8, rate)
    for m in samples[:2]:
        add("SpecReason", "spec-reason", m)
    for m in () if few else (8, 16):
        add("DeepConf", "deep-conf", m)
    for m in samples:
        add("ATTS as published", "atts", m, takeover="continue")
        add("ATTS, default", "atts", m)
    for m in samples[:2]:
        add("exact", "exact", m)
    return made


def study(options: Options) -> list[Table]:
    """Run every method, and price its tokens as those of each pair; finished runs are kept."""
    count = options.pick(6, 40, 200)
    found: list[tuple[str, Sum]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = options.file(f"field-{options.effort}") or Path(folder)
        for number, (method, one) in enumerate(arms(options)):
            directory = place / "runs" / f"{number:02d}"
            run = partial(frontier_run, one, count, directory, seed=options.seed)
            found.append((method, anyio.run(run)))
    return [field_table(prices, found) for prices in PRICES]


def field_table(prices: Prices, found: Sequence[tuple[str, Sum]]) -> Table:
    """Return accuracy and costs of every run at a pair's prices, the cheapest first."""
    rows: list[Row] = []
    best = pareto({number: _point(prices, one) for number, (_, one) in enumerate(found)})
    for number, (method, one) in enumerate(found):
        vote = one.estimate(right)
        rows.append(
            (
                method,
                round(vote.value, 4),
                interval(vote).partition(" ")[2],
                round(vote.low, 4),
                round(vote.high, 4),
                round(decoded_by_target(one), 1),
                round(one.each("scored"), 1),
                round(one.each("draft"), 1),
                round(prices.tflops(one), 2),
                round(prices.gpu_seconds(one), 3),
                "yes" if number in best else "",
            )
        )
    rows.sort(key=lambda row: (float(str(row[9])), str(row[0])))
    count = len(found[0][1].solved) if found else 0
    return Table.of(
        f"The field at the prices of {prices.name}, {count} problems",
        "method | accuracy | 95 % | low | high | target tokens decoded | target tokens read | "
        "draft tokens | TFLOPs | GPU seconds | Pareto-optimal",
        rows,
        f"Per problem. The accuracies are the embedded pair's; the prices are those of {prices.name}: "
        f"{prices.draft_gpus} GPU for the draft and {prices.target_gpus} for the target, steps of "
        f"{BATCH} sequences with {CONTEXT:,} tokens each.",
        chart=Chart("GPU seconds", "accuracy", "method", "log", low="low", high="high"),
    )


def _point(prices: Prices, one: Sum) -> tuple[float, float]:
    return prices.gpu_seconds(one), one.estimate(right).value


def pareto(points: Mapping[int, tuple[float, float]]) -> set[int]:
    """Return the names of the Pareto-optimal points: no other is as cheap and as accurate as one of them.

    >>> sorted(pareto({1: (1.0, 0.5), 2: (2.0, 0.5), 3: (3.0, 0.9)}))
    [1, 3]
    """
    best: set[int] = set()
    for name, (cost, accuracy) in points.items():
        beaten = any(
            other != (cost, accuracy) and other[0] <= cost and other[1] >= accuracy
            for other in points.values()
        )
        if not beaten:
            best.add(name)
    return best
