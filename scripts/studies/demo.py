"""The main job on the embedded models, beside the small and the large model alone, in about a minute."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import anyio

from atts.api import Setup, evaluate, report
from atts.run import RunResult, Summary
from scripts.studies.harness import interval, say

METHODS = {
    "draft-only": "the small model alone",
    "target-only": "the large model alone",
    "atts": "the small model drafts, the large one scores and takes over",
}


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
        found[method] = anyio.run(_evaluate, setup, asked.problems, folder / method).summary
    page = report(folder / "atts", against=[folder / "target-only", folder / "draft-only"])
    print("\n".join([*table(found, asked.rate), "", f"report  {page}"]))


async def _evaluate(setup: Setup, problems: int, directory: Path) -> RunResult:
    return await evaluate("arithmetic", setup, limit=problems, directory=directory)


def table(found: dict[str, Summary], rate: float) -> list[str]:
    """The three side by side; speed and tokens against the large model alone, measured in this run."""
    alone, realised = found["target-only"], found["atts"].rate
    rows = [("method", "answers right", "tokens: draft", "scored", "target", "target's saved", "seconds", "speed-up")]
    for name, one in found.items():
        usage = one.usage
        tokens = [f"{n:,}" for n in (usage.draft_tokens, usage.scored_tokens, usage.target_tokens)]
        saved = f"{1 - usage.target_tokens / max(1, alone.usage.target_tokens):.0%}"
        speed = f"{alone.seconds / one.seconds:.2f}x"
        rows.append((name, interval(one.answers), tokens[0], tokens[1], tokens[2], saved, f"{one.seconds:.1f}", speed))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pairs = [list(zip(row[1:], widths[1:], strict=True)) for row in rows]
    lines = ["  ".join(cell.rjust(width) for cell, width in pair) for pair in pairs]
    return [
        *(f"{row[0]:<{widths[0]}}  {line}" for row, line in zip(rows, lines, strict=True)),
        "",
        f"Chunks handed to the large model: {interval(realised)}; asked for: {rate:g}.",
        f"{alone.answers.n_problems} problems of generated arithmetic; an answer is the vote of a problem's rollouts.",
        "Brackets are 95 % intervals over problems. Saved and speed-up are against target-only, measured in this run;",
        "votes that cannot change any more end their rollouts early, for all three alike.",
    ]


if __name__ == "__main__":
    main()
