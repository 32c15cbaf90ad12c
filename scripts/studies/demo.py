"""The main job on the embedded models, beside the small and the large model alone, in about a minute."""

from __future__ import annotations

import argparse
from dataclasses import replace

import anyio

from atts.api import Setup, evaluate
from atts.run import RunResult, Summary, summarise
from scripts.studies.harness import Table, say

METHODS = {
    "draft-only": "the small model alone",
    "target-only": "the large model alone",
    "atts": "the small model drafts, the large one scores and takes over",
}


def main() -> None:
    """Run the three, print one table."""
    parser = argparse.ArgumentParser(prog="demo", description=__doc__)
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.2, help="share of chunks the large model takes over")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    base = Setup(rate=asked.rate, seed=asked.seed)
    policy = replace(base.policy, samples=asked.samples)
    found: dict[str, Summary] = {}
    for method, what in METHODS.items():
        say(f"demo: {method}: {what}, {asked.problems} problems x {asked.samples} rollouts")
        setup = replace(base, method=method, policy=policy)
        found[method] = summarise(anyio.run(_evaluate, setup, asked.problems))
    print(table(found, asked.rate).markdown())


async def _evaluate(setup: Setup, problems: int) -> RunResult:
    return await evaluate("arithmetic", setup, limit=problems)


def table(found: dict[str, Summary], rate: float) -> Table:
    """The three side by side; speed and tokens against the large model alone, measured in this run."""
    alone = found["target-only"]
    rows = [
        (
            name,
            _with_interval(one.answers.value, one.answers.low, one.answers.high),
            one.usage.draft_tokens,
            one.usage.scored_tokens,
            one.usage.target_tokens,
            f"{one.usage.target_tokens / max(1, alone.usage.target_tokens):.1%}",
            f"{one.seconds:.1f}",
            f"{alone.seconds / one.seconds:.2f}x",
        )
        for name, one in found.items()
    ]
    realised = found["atts"].rate
    return Table(
        "Graded arithmetic, answers by vote",
        ("method", "accuracy", "draft tokens", "scored", "target tokens", "of target-only", "seconds", "speed-up"),
        tuple(rows),
        (
            f"Accuracy with 95 % intervals over {alone.answers.n_problems} problems.",
            f"Escalation rate {_with_interval(realised.value, realised.low, realised.high)}, nominal {rate:g}.",
            "Votes stop early once they cannot change; seconds are of this machine, now: read the ratios.",
        ),
    )


def _with_interval(value: float, low: float, high: float) -> str:
    return f"{value:.3f} [{low:.3f}, {high:.3f}]"


if __name__ == "__main__":
    main()
