"""The main job on the embedded models, beside the small and the large model alone, in about a minute."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import anyio

from atts.api import Setup, evaluate, report
from atts.run import RunResult, Summary, summarise
from scripts.studies.harness import say

METHODS = {
    "draft-only": "the small model alone",
    "target-only": "the large model alone",
    "atts": "the small model drafts, the large one scores and takes over",
}
_COLUMNS = ("method", "answers right", "tokens: draft", "scored", "target", "target's saved", "seconds", "speed-up")


def main() -> None:
    """Run the three, print one table, say where the report is."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rate", type=float, default=Setup().rate, help="share of chunks the large model takes over")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a folder for the three runs; a new one below runs/ unless told")
    asked = parser.parse_args()
    base = Setup(rate=asked.rate, seed=asked.seed)
    policy = replace(base.policy, samples=asked.samples)
    folder = asked.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    found: dict[str, Summary] = {}
    for method, what in METHODS.items():
        say(f"demo: {method}: {what}, {asked.problems} problems x {asked.samples} rollouts")
        setup = replace(base, method=method, policy=policy)
        found[method] = summarise(anyio.run(_evaluate, setup, asked.problems, folder / method))
    page = report(folder / "atts", against=[folder / "target-only", folder / "draft-only"])
    print("\n".join([*table(found, asked.rate), "", f"report  {page}"]))


async def _evaluate(setup: Setup, problems: int, directory: Path) -> RunResult:
    return await evaluate("arithmetic", setup, limit=problems, directory=directory)


def table(found: dict[str, Summary], rate: float) -> list[str]:
    """The three side by side; speed and tokens against the large model alone, measured in this run."""
    alone, realised = found["target-only"], found["atts"].rate
    rows = [
        (
            name,
            _with_interval(one.answers.value, one.answers.low, one.answers.high),
            f"{one.usage.draft_tokens:,}",
            f"{one.usage.scored_tokens:,}",
            f"{one.usage.target_tokens:,}",
            f"{1 - one.usage.target_tokens / max(1, alone.usage.target_tokens):.0%}",
            f"{one.seconds:.1f}",
            f"{alone.seconds / one.seconds:.2f}x",
        )
        for name, one in found.items()
    ]
    held = _with_interval(realised.value, realised.low, realised.high)
    return [
        *_aligned([_COLUMNS, *rows]),
        "",
        f"Chunks handed to the large model: {held}; asked for: {rate:g}.",
        f"{alone.answers.n_problems} problems of generated arithmetic; an answer is the vote of a problem's rollouts.",
        "Brackets are 95 % intervals over problems. Saved and speed-up are against target-only, measured in this run;",
        "votes that cannot change any more end their rollouts early, for all three alike.",
    ]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)) for row in rows]
    return [f"{row[0]:<{widths[0]}}  {line}" for row, line in zip(rows, lines, strict=True)]


def _with_interval(value: float, low: float, high: float) -> str:
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
