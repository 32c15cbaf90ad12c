"""Accuracy, tokens and time along both axes, live: samples per problem, and turns or tokens per rollout."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atts.evaluators import mean_estimate
from scripts.studies.charts import Chart
from scripts.studies.harness import Cell, Options, Table
from scripts.studies.pipelines_arms import Arm, Grid, Ledger, Pair, run_grid
from scripts.studies.pipelines_policies import arm, with_policy, with_samples
from scripts.studies.pipelines_tables import by_problem, flops, interval, right, share, solved_of

METHODS = ("draft-only", "target-only", "atts")
_COLUMNS = (
    "method", "at most", "vote right", "95 %", "pass@1", "target tokens", "all tokens", "GFLOPs", "seconds per problem",
)  # fmt: skip


async def samples_axis(options: Options, pair: Pair, ledger: Ledger) -> Table:
    """m = 1, 2, 4, ... rollouts, every point a run of its own with its own early stop."""
    grid = Grid(options.pick(8, 40, 400), block=options.pick(8, 20, 50))
    most = options.pick(8, 64, 64)
    sizes = [1 << power for power in range(most.bit_length())]
    for m in sizes:
        await run_grid([with_samples(arm(name), m) for name in METHODS], grid, ledger, pair, "samples axis")
    rows = [_row(name, m, ledger, name, m) for name in METHODS for m in sizes]
    notes = (
        "Live runs, votes stopped as soon as they cannot change; per problem; 95 % intervals over problems.",
        "With ties given to whoever comes first, the vote of 2 is no better than 1: monotone is the vote of odd "
        "numbers where the right answer is the most probable one, and on problems where a wrong answer is, more "
        "samples make it worse.",
    )
    return _table("Samples per problem", grid, rows, notes)


async def turns_axis(options: Options, pair: Pair, ledger: Ledger, samples: int = 4) -> Table:
    """At most 1, 2, 3, ... turns."""
    steps = options.pick((2, 4, 8), (2, 4, 6, 8, 12), (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 15))
    return await _sequential(options, pair, ledger, samples, "turns", steps, "Turns per rollout")


async def tokens_axis(options: Options, pair: Pair, ledger: Ledger, samples: int = 4) -> Table:
    """At most so many tokens per rollout."""
    steps = options.pick((50, 200), (50, 100, 150, 200, 300), (25, 50, 75, 100, 125, 150, 200, 250, 300, 400))
    return await _sequential(options, pair, ledger, samples, "max_tokens", steps, "Tokens per rollout")


async def _sequential(
    options: Options, pair: Pair, ledger: Ledger, samples: int, option: str, steps: Sequence[int], title: str
) -> Table:
    grid = Grid(options.pick(8, 40, 400), block=options.pick(8, 40, 50))
    name_of: Callable[[str, int], str] = lambda name, step: f"{name}, {option} {step}"  # noqa: E731
    for step in steps:
        arms: list[Arm] = [
            with_policy(arm(name, samples=samples), name_of(name, step), **{option: step}) for name in METHODS
        ]
        await run_grid(arms, grid, ledger, pair, title.lower())
    rows = [_row(name, step, ledger, name_of(name, step), samples) for name in METHODS for step in steps]
    notes = (
        f"{samples} samples; a rollout that is cut has no answer and does not vote, so accuracy cannot fall as the "
        "limit grows except by chance. The target's own steps are as long as the draft's, so both need as many turns.",
    )
    return _table(title, grid, rows, notes)


def _row(method: str, at: int, ledger: Ledger, name: str, samples: int) -> tuple[Cell, ...]:
    pieces = ledger.of(name, samples)
    solved = solved_of(pieces)
    n = len(solved)
    vote = mean_estimate(list(by_problem(pieces, right).values()), n)
    single = mean_estimate(list(by_problem(pieces, share).values()), n)
    written = sum(one.draft + one.target for one in solved) / n
    return (
        method, at, round(vote.value, 4), f"[{vote.low:.3f}, {vote.high:.3f}]", interval(single),
        round(sum(one.target for one in solved) / n, 1), round(written, 1), round(flops(solved) / n / 1e9, 3),
        round(sum(sum(piece.seconds) for piece in pieces) / n, 4),
    )  # fmt: skip


def _table(title: str, grid: Grid, rows: list[tuple[Cell, ...]], notes: tuple[str, ...]) -> Table:
    chart = Chart("at most", "vote right", "method", x_scaling="log")
    return Table(f"{title}: {grid.problems} problems, live", _COLUMNS, tuple(rows), notes, chart)
