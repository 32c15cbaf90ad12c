"""Draws accuracy against target tokens, arithmetic and time, for a grid of policies replayed from recorded runs."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import anyio

from atts.api import Setup, evaluate
from atts.errors import UsageError
from atts.models import EMBEDDED, info
from scripts.studies.charts import Chart, draw
from scripts.studies.frontier_points import Flops, Grid, Point, Record, points, read_record
from scripts.studies.harness import Options, Table, say

COLUMNS = (
    "run", "policy", "kind", "vote right", "low", "high", "target tokens", "GFLOPs", "seconds", "off-policy",
)  # fmt: skip
AXES = {"target tokens": "target-tokens", "GFLOPs": "flops", "seconds": "seconds"}
_NOTES = (
    "Per problem, 95 % intervals over problems. Fewer samples, other votes and fewer turns are on the policy of the "
    "run. Another rate or gate leaves the record at the first decision that differs: `off-policy` is the share of "
    "rollouts that did, whose answers are those of the recorded path and whose tokens are estimated from the mean "
    "escalation. Points of less than 5 % are worth reading, the others want --live.",
    "Seconds: measured for a run as it was; for replays the run's seconds, scaled by the work at the run's own mean "
    "time per token of each kind.",
)


def study(options: Options) -> list[Table]:
    """Live runs of the embedded pair: which of rate and number of samples gives most for the arithmetic it takes."""
    rates, samples = (
        options.pick((0.2,), (0.05, 0.1, 0.2, 0.4), (0.05, 0.1, 0.2, 0.4)),
        options.pick((2, 8), (1, 2, 4, 8), (1, 2, 4, 8, 16)),
    )
    count = options.pick(8, 40, 500)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) if options.out is None else options.out / f"frontier-{options.effort}"
        records = [read_record(one) for one in live(count, place, rates, samples, options.seed)]
    found = [points(record, Grid((), (), ()), _flops(record, None, None))[0] for record in records]
    return [frontier_table(found, count)]


def frontier_table(found: Sequence[Point], count: int) -> Table:
    """The runs as points; those that no other beats in votes at no more arithmetic are on the frontier."""
    rows = tuple(
        (
            one.run, one.run.rpartition("-")[0], round(one.right.value, 4),
            f"[{one.right.low:.3f}, {one.right.high:.3f}]", round(one.target_tokens, 1), one.gflops,
            "yes" if _is_unbeaten(one, found) else "",
        )
        for one in sorted(found, key=lambda one: one.gflops or 0.0)
    )  # fmt: skip
    return Table(
        f"The frontier: votes against arithmetic, {count} problems, live",
        ("run", "method", "vote right", "95 %", "target tokens", "GFLOPs", "on the frontier"),
        rows,
        ("Method, rate and number of samples; per problem, on the embedded pair. On the frontier: no other run has as "
         "many right votes for less arithmetic.",
         "Arithmetic of both models, tokens written and scored. Neighbours whose intervals overlap may change places."),
        Chart("GFLOPs", "vote right", "method", "log"),
    )  # fmt: skip


def _is_unbeaten(one: Point, found: Sequence[Point]) -> bool:
    def beats(other: Point) -> bool:
        cost, mine = other.gflops or 0.0, one.gflops or 0.0
        better = other.right.value > one.right.value or cost < mine
        return other.right.value >= one.right.value and cost <= mine and better

    return not any(beats(other) for other in found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Read or make the runs, print the table, write the pictures."""
    asked = _parser().parse_args(arguments)
    directories = [Path(name) for name in asked.runs]
    if asked.live:
        directories += live(asked.live, asked.out, asked.rates, asked.samples, asked.seed)
    if not directories:
        raise SystemExit("frontier: name a run directory, or give --live N for runs of N problems")
    records = [read_record(directory) for directory in directories]
    grid = Grid(tuple(asked.rates), tuple(asked.samples), tuple(asked.turns))
    found = [one for record in records for one in _points(record, grid, asked)]
    print(write(found, asked.out))


def _points(record: Record, grid: Grid, asked: argparse.Namespace) -> list[Point]:
    say(f"frontier: {record.directory}: {len(record.outcomes)} problems")
    return points(record, grid, _flops(record, asked.draft_flops, asked.target_flops))


def live(count: int, out: Path, rates: Sequence[float], samples: Sequence[int], seed: int) -> list[Path]:
    """One journalled run per method, rate and number of samples on the embedded pair; finished ones are not repeated.

    :raises UsageError: a run ended without all of its problems.
    """
    cases = [("draft-only", 0.0, m) for m in samples] + [("target-only", 0.0, m) for m in samples]
    cases += [("atts", rate, m) for rate in rates for m in samples]
    directories: list[Path] = []
    for method, rate, m in cases:
        name = f"{method}-{rate:g}-{m}" if rate else f"{method}-{m}"
        base = Setup()
        policy = replace(base.policy, samples=m)
        setup = replace(base, method=method, rate=rate or base.rate, seed=seed, policy=policy)
        directories.append(out / "runs" / name)
        say(f"frontier: live: {name}")
        status = anyio.run(_run, setup, count, directories[-1])
        if status != "finished":
            raise UsageError(f"the run {name} ended {status}; the same command goes on from there")
    return directories


async def _run(setup: Setup, count: int, directory: Path) -> str:
    return (await evaluate("arithmetic", setup, limit=count, directory=directory)).status


def write(found: Sequence[Point], out: Path) -> str:
    """The table as Markdown; frontier.json, frontier.md and one picture per axis lie in `out` afterwards."""
    rows = tuple(
        (
            one.run, one.policy, one.kind, round(one.right.value, 4), round(one.right.low, 4), round(one.right.high, 4),
            round(one.target_tokens, 1), None if one.gflops is None else round(one.gflops, 4), round(one.seconds, 5),
            round(one.off_policy, 3),
        )
        for one in found
    )  # fmt: skip
    table = Table("Accuracy and what it costs", COLUMNS, rows, _NOTES)
    out.mkdir(parents=True, exist_ok=True)
    pictures: list[str] = []
    for axis, name in AXES.items():
        if any(row[COLUMNS.index(axis)] for row in rows):
            chart = Chart(axis, "vote right", "kind", x_scaling="log")
            (out / f"frontier-{name}.svg").write_text(draw(f"Accuracy against {axis}", chart, COLUMNS, _drawn(rows)))
            pictures.append(f"![accuracy against {axis}](frontier-{name}.svg)")
    text = table.markdown() + "\n" + "\n".join(pictures) + "\n"
    (out / "frontier.md").write_text(text)
    record = [{**asdict(one), "right": one.right.as_json()} for one in found]
    (out / "frontier.json").write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    return text


def _drawn(rows: Sequence[tuple[object, ...]]) -> list[tuple[object, ...]]:
    """Lines by run and kind; what is mostly off-policy is drawn as a kind of its own."""
    runs = {str(row[0]) for row in rows}
    drawn: list[tuple[object, ...]] = []
    for row in rows:
        label = f"{row[2]}{' (off-policy)' if float(str(row[9])) >= 0.05 else ''}"
        drawn.append((row[0], row[1], f"{row[0]}: {label}" if len(runs) > 1 else label, *row[3:]))
    return drawn


def _flops(record: Record, draft: float | None, target: float | None) -> Flops | None:
    if draft is not None and target is not None:
        return Flops(draft, target)
    if all(record.models.get(name, "").startswith(f"{name}@") for name in EMBEDDED):
        return Flops(info("draft").flops_per_token(128), info("target").flops_per_token(128))
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="frontier", description=__doc__)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="run directories with a journal")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4], metavar="RATE")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 2, 4, 8], metavar="M")
    parser.add_argument("--turns", type=int, nargs="*", default=[2, 4, 6, 8], metavar="TURNS")
    parser.add_argument("--live", type=int, metavar="N", help="run the grid on N problems with the embedded pair")
    parser.add_argument("--draft-flops", type=float, help="per token; known for the embedded pair")
    parser.add_argument("--target-flops", type=float, help="per token; known for the embedded pair")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"), help="where pictures and tables go")
    return parser


if __name__ == "__main__":
    main()
