"""Which of rate and number of samples gives most for the arithmetic it takes: live runs of the
embedded pair.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio

from atts.api import evaluate
from atts.errors import UsageError
from scripts.studies.arms import Arm, Sum, arm, right
from scripts.studies.harness import Chart, Options, Row, Table, interval, say


def study(options: Options) -> list[Table]:
    """One journalled run per method, rate and number of samples; finished ones are not repeated."""
    rates = options.pick((0.2,), (0.05, 0.1, 0.2, 0.4), (0.05, 0.1, 0.2, 0.4))
    samples = options.pick((2, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16))
    arms = [
        arm(f"{method}-{m}", method, samples=m)
        for method in ("draft-only", "target-only")
        for m in samples
    ]
    arms += [
        arm(f"atts-{rate:g}-{m}", "atts", samples=m, rate=rate) for rate in rates for m in samples
    ]
    count = options.pick(8, 40, 500)
    found = dict[str, Sum]()
    with tempfile.TemporaryDirectory() as folder:
        place = options.file(f"frontier-{options.effort}") or Path(folder)
        for one in arms:
            found[one.name] = anyio.run(
                partial(run, one, count, place / "runs" / one.name, seed=options.seed)
            )
    return [table(found)]


async def run(one: Arm, problems: int, directory: Path, seed: int) -> Sum:
    """What an arm came to on so many problems, now or in an earlier session.

    :raises UsageError: the run ended without all of its problems.
    """
    say(f"frontier: {one.name}")
    result = await evaluate(
        "arithmetic", replace(one.setup, seed=seed), limit=problems, directory=directory
    )
    if result.status != "finished":
        raise UsageError(
            f"the run {one.name} ended {result.status}; the same command goes on from there"
        )
    return Sum.of(one.name, tuple(result.outcomes()))


def table(found: Mapping[str, Sum]) -> Table:
    """All of them, the cheapest first; `found` by names that end in the number of samples."""
    rows: list[Row] = []
    for name, one in sorted(found.items(), key=lambda item: item[1].gflops):
        vote = one.estimate(right)
        accuracy = (round(vote.value, 4), interval(vote).partition(" ")[2])
        costs = (
            round(one.each("target"), 1),
            one.gflops,
            "yes" if _is_unbeaten(one, found) else "",
        )
        rows.append((name, name.rpartition("-")[0], *accuracy, *costs))
    return Table.of(
        f"The frontier: votes against arithmetic, {len(next(iter(found.values())).solved)} "
        f"problems, live",
        "run | method | vote right | 95 % | target tokens | GFLOPs | on the frontier",
        rows,
        chart=Chart("GFLOPs", "vote right", "method", "log"),
    )


def _is_unbeaten(one: Sum, found: Mapping[str, Sum]) -> bool:
    """No other is at least as right and as cheap, and better in one of them."""
    mine, *others = ((each.estimate(right).value, -each.gflops) for each in (one, *found.values()))
    return not any(
        other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in others
    )
