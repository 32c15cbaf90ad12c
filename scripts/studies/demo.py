"""Run every method on the embedded models in about a minute, and print one table."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from atts.api import Setup, compare, evaluate, report
from atts.run import Summary
from scripts.studies.harness import interval, say

ARMS: dict[str, tuple[dict[str, Any], str]] = {
    "draft-only": ({"method": "draft-only"}, "the draft alone"),
    "target-only": ({"method": "target-only", "speculate": "off"}, "the target alone"),
    "speculated": (
        {"method": "target-only"},
        "the target's text, with tokens proposed by the draft",
    ),
    "exact": (
        {"method": "exact"},
        "the target's text, drafted in chunks and drawn while scoring",
    ),
    "coin": (
        {"method": "coin"},
        "as atts, but seeded coins choose the chunks that the target rewrites",
    ),
    "atts": (
        {"method": "atts"},
        "the draft writes, the target scores every chunk and rewrites the worst",
    ),
}


def main() -> None:
    """Run all methods, print one table, and name the report."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument(
        "--rate",
        type=float,
        default=Setup().rate,
        help="share of chunks that the target takes over",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="folder for the runs; by default a new one below runs/"
    )
    asked = parser.parse_args()
    base = Setup(rate=asked.rate, seed=asked.seed)
    base = replace(base, policy=replace(base.policy, samples=asked.samples))
    folder = asked.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    summaries: dict[str, Summary] = {}
    for name, (words, what) in ARMS.items():
        say(f"demo: {name}: {what}, {asked.problems} problems x {asked.samples} rollouts")
        run = partial(
            evaluate,
            "arithmetic",
            replace(base, **words),
            limit=asked.problems,
            directory=folder / name,
        )
        summaries[name] = anyio.run(run).summary
    others = [folder / name for name in ("coin", "target-only", "draft-only")]
    page = report(folder / "atts", compare_to=others)
    gain = compare(folder / "coin", folder / "atts").single
    lines = table(summaries, asked.rate)
    if gain is not None:
        lines.append(f"Gain of atts over the coin, single rollouts: {gain.difference.signed()}.")
    print("\n".join([*lines, "", f"report  {page}"]))


def table(summaries: dict[str, Summary], rate: float) -> list[str]:
    """Return the table of all methods.

    The target's tokens come in two kinds that cost very different times: decoded ones need a step
    each, while those drawn during a scoring pass come with the scores. One column for both would
    make the methods incomparable.
    """
    alone = summaries["target-only"]
    head = ("method", "accuracy", "draft tokens", "target: decoded", "drawn", "scored", "speed-up")
    rows: list[tuple[str, ...]] = [head]
    for name, summary in summaries.items():
        usage = summary.usage
        rows.append(
            (
                name,
                interval(summary.answers),
                f"{usage.draft_tokens:,}",
                f"{usage.target_tokens - usage.drawn_tokens:,}",
                f"{usage.drawn_tokens:,}",
                f"{usage.scored_tokens:,}",
                f"{alone.seconds / summary.seconds:.2f}x",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = list[str]()
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
    return [
        *lines,
        "",
        f"Escalated chunks: {summaries['atts'].rate.counted()}; nominal rate {rate:g}.",
        f"{alone.answers.n_problems} problems of generated arithmetic. Accuracy: majority vote of "
        "a problem's rollouts.",
        "Brackets are 95 % intervals over problems. The target decodes a token per step; it draws "
        "tokens while it scores",
        "a chunk. Speed-up: compared with target-only in this run, in wall time; it varies with "
        "the machine's load.",
    ]


if __name__ == "__main__":
    main()
