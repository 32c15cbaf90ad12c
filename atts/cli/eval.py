"""Runs one evaluation and says what came of it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from atts.run import Summary

Method = Annotated[str, typer.Option(help="atts, draft-only, target-only, top-b, random, published, spec-reason, ...")]


def evaluate(
    dataset: Annotated[str, typer.Argument(help="A benchmark, a file or hub:owner/name; a slice may follow.")] = (
        "arithmetic"
    ),
    method: Method = "atts",
    rate: Annotated[float, typer.Option(help="Share of chunks the target takes over.")] = 0.2,
    samples: Annotated[int, typer.Option(help="Rollouts per problem.")] = 8,
    draft: Annotated[str, typer.Option(help="embedded, scripted, hf:MODEL.")] = "embedded",
    target: Annotated[str, typer.Option(help="embedded, scripted, hf:MODEL.")] = "embedded",
    limit: Annotated[int | None, typer.Option(help="Only the first problems.")] = 40,
    seed: Annotated[int, typer.Option(help="Of everything random.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Run directory; the same command resumes it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Evaluate a method on a dataset: the main job.

    Example: atts eval arithmetic --samples 8 --rate 0.2 --out runs/first
    """
    import anyio

    from atts.api import Setup
    from atts.api import evaluate as run
    from atts.run import RunResult, summarise

    base = Setup()
    policy = replace(base.policy, samples=samples)
    setup = replace(base, draft=draft, target=target, method=method, rate=rate, seed=seed, policy=policy)

    async def main() -> RunResult:
        return await run(dataset, setup, limit=limit, directory=out)

    result = anyio.run(main)
    summary = summarise(result)
    if as_json:
        print(json.dumps({"status": result.status, "method": method, "nominal_rate": rate, **summary.as_json()}))
    else:
        print("\n".join(describe(method, rate, summary)))
    if result.status != "finished":
        print(f"atts: {result.status}: {result.why}; the same command goes on from here", file=sys.stderr)
    raise typer.Exit(result.exit_code)


def describe(method: str, rate: float, summary: Summary) -> list[str]:
    """The summary in lines for people."""
    usage = summary.usage
    return [
        f"{method}: {summary.problems} problems, {summary.samples} rollouts, {summary.seconds:.1f} s",
        f"  vote right     {summary.answers}",
        f"  rollouts right {summary.samples_right}",
        f"  escalated      {summary.rate}, nominal {rate:g}",
        f"  tokens         draft {usage.draft_tokens:,}, target {usage.target_tokens:,} "
        f"({summary.target_share:.1%}), scored {usage.scored_tokens:,}, discarded {usage.wasted_tokens:,}",
        *([f"  failed         {summary.failed} problems"] if summary.failed else []),
        *([f"  unanswered     {summary.unanswered} problems"] if summary.unanswered else []),
    ]
