"""The main job on the embedded models, beside the small and the large model alone, in about a
minute.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from atts.api import Setup, evaluate, report
from atts.run import Summary
from scripts.studies.harness import interval, say

ARMS: dict[str, tuple[dict[str, Any], str]] = {
    "draft-only": ({"method": "draft-only"}, "the small model alone"),
    "target-only": ({"method": "target-only", "speculate": "off"}, "the large model alone"),
    "speculated": (
        {"method": "target-only"},
        "the same text, the small model proposing tokens to the large one",
    ),
    "exact": (
        {"method": "exact"},
        "the same text, drafted by the small model, drawn by the large one as it scores",
    ),
    "atts": ({"method": "atts"}, "the small model drafts, the large one scores and takes over"),
}


def main() -> None:
    """Run all, print one table, say where the report is."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument(
        "--rate",
        type=float,
        default=Setup().rate,
        help="share of chunks the large model takes over",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="a folder for the runs; a new one below runs/ unless told"
    )
    asked = parser.parse_args()
    base = Setup(rate=asked.rate, seed=asked.seed)
    base = replace(base, policy=replace(base.policy, samples=asked.samples))
    folder = asked.out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    found: dict[str, Summary] = {}
    for name, (words, what) in ARMS.items():
        say(f"demo: {name}: {what}, {asked.problems} problems x {asked.samples} rollouts")
        run = partial(
            evaluate,
            "arithmetic",
            replace(base, **words),
            limit=asked.problems,
            directory=folder / name,
        )
        found[name] = anyio.run(run).summary
    page = report(folder / "atts", compare_to=[folder / "target-only", folder / "draft-only"])
    print("\n".join([*table(found, asked.rate), "", f"report  {page}"]))


def table(found: dict[str, Summary], rate: float) -> list[str]:
    """Return the table of all methods.

    Speed and tokens are relative to the large model alone, measured in the same run.
    """
    alone = found["target-only"]
    realised = found["atts"].rate
    head = (
        "method",
        "answers right",
        "tokens: draft",
        "scored",
        "target",
        "target decoded",
        "saved",
        "speed-up",
    )
    rows: list[tuple[str, ...]] = [head]
    for name, one in found.items():
        usage = one.usage
        decoded = usage.target_tokens - usage.drawn_tokens
        tokens = (
            f"{n:,}"
            for n in (usage.draft_tokens, usage.scored_tokens, usage.target_tokens, decoded)
        )
        saved = f"{1 - decoded / max(1, alone.usage.target_tokens):.0%}"
        rows.append(
            (name, interval(one.answers), *tokens, saved, f"{alone.seconds / one.seconds:.2f}x")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return [
        *(
            "  ".join([row[0].ljust(widths[0]), *line[1:]])
            for row, line in zip(rows, lines, strict=True)
        ),
        "",
        f"Chunks handed to the large model: {interval(realised)}; asked for: {rate:g}.",
        f"{alone.answers.n_problems} problems of generated arithmetic; an answer is the vote of a "
        f"problem's rollouts.",
        "Brackets are 95 % intervals over problems. Decoded: the target's tokens, but those it "
        "drew while it scored.",
        "Saved and speed-up are against target-only, one run after the other. Votes that cannot "
        "change any more end",
        "their rollouts early, for all alike.",
    ]


if __name__ == "__main__":
    main()
