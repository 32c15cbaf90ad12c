"""`atts plan`: what to spend on a problem, from recorded runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atts.cli.options import Json
from atts.cli.output import print_result

if TYPE_CHECKING:
    from atts.analysis import Advice, ChunkAdvice, Option


def plan(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run directories on the same problems, such as at several rates."),
    ],
    target_tokens: Annotated[
        float | None, typer.Option(help="Cap: written by the target, per problem.")
    ] = None,
    tokens: Annotated[float | None, typer.Option(help="Cap: written by both, per problem.")] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Cap: until a problem's last rollout ends.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan from recorded runs: which rate, samples, turns and chunk length, when a problem may take
    only so much.

    Only what was recorded is vouched for: subsets of its rollouts, and its rollouts cut short. A
    rate nobody ran gets bounds. The output says how everything was estimated.

    Example: atts plan runs/first --target-tokens 300

    Example: atts plan runs/rate-0.1 runs/rate-0.2 runs/rate-0.4 --seconds 20
    """
    from atts.api import plan as planned

    found = planned(runs, target_tokens=target_tokens, tokens=tokens, seconds=seconds)
    print_result(found, as_json, _words)


def _words(found: Advice) -> list[str]:
    lines = [
        f"From {', '.join(found.runs)}: {found.problems} problems, {found.rollouts} whole rollouts",
        "",
    ]
    lines += _best(found)
    lines += ["", "Ways that nothing cheaper equals, per problem:", _head()]
    lines += [_row(option) for option in found.options]
    if found.other_rates:
        lines += ["", "Rates nobody ran, by deciding again on the recorded scores:"]
        lines.append(
            f"  {'rate':>5}{'realised':>10}{'target tokens':>15}   vote right between   rollouts "
            f"unknown"
        )
        for guess in found.other_rates:
            between = f"{guess.low:.3f} and {guess.high:.3f}"
            lines.append(
                f"  {guess.rate:>5g}{guess.realised:>10.3f}{guess.target_tokens:>15,.0f}   "
                f"{between:<21}"
                f"{guess.off_policy:>16.1%}"
            )
        lines.append("  Run one of them (--limit 20) and plan from both runs to know more.")
    if found.chunks is not None:
        lines += ["", *_chunks(found.chunks)]
    lines += ["", "Measured speeds:"]
    for speed in found.speeds:
        scored = f", {speed.scored_per_second:,.0f} scored" if speed.scored_per_second else ""
        lines.append(
            f"  {speed.engine:<8}{speed.written_per_second:,.0f} tokens a second written{scored}, "
            f"while busy "
            f"({speed.busy_seconds:,.1f} s, {speed.calls:,} calls of "
            f"{speed.seconds_per_call * 1000:,.0f} ms)"
        )
    return [*lines, "", *found.notes]


def _best(found: Advice) -> list[str]:
    caps = " and ".join(f"{value:g} {name.replace('_', ' ')}" for name, value in found.cap.given)
    under = f"Under {caps} per problem" if caps else "Without a cap"
    if found.best is None:
        cheapest = found.options[0]
        return [
            f"{under}: nothing recorded stays below that.",
            f"The cheapest way takes {cheapest.target_tokens:,.0f} target tokens, "
            f"{cheapest.tokens:,.0f} tokens, "
            f"{cheapest.seconds:,.1f} s and is right on {cheapest.accuracy.value:.3f}.",
        ]
    best = found.best
    return [
        f"{under}: {best.method} at rate {best.rate:g}, {best.samples} samples, {best.turns} turns "
        f"(from {best.run})",
        f"  vote right  {best.accuracy}",
        f"  per problem {best.draft_tokens:,.0f} draft, {best.scored_tokens:,.0f} scored, "
        f"{best.target_tokens:,.0f} target tokens; {best.seconds:,.2f} s",
        f"  flags       --method {best.method} --rate {best.rate:g} --samples {best.samples} "
        f"--turns {best.turns}",
    ]


def _head() -> str:
    return _columns(
        (
            "method",
            "rate",
            "samples",
            "turns",
            "target tokens",
            "all tokens",
            "seconds",
            "vote right",
        )
    )


def _row(option: Option) -> str:
    numbers = (f"{option.target_tokens:,.0f}", f"{option.tokens:,.0f}", f"{option.seconds:,.2f}")
    chosen = (option.method, f"{option.rate:g}", str(option.samples), str(option.turns))
    return _columns((*chosen, *numbers, option.accuracy.brief("-")))


def _columns(cells: tuple[str, ...]) -> str:
    """Words to the left at both ends, numbers to the right between."""
    between = "".join(
        f"{cell:>{width}}" for cell, width in zip(cells[1:-1], (6, 9, 7, 15, 12, 10), strict=True)
    )
    return f"  {cells[0]:<14}{between}   {cells[-1]}"


def _chunks(found: ChunkAdvice) -> list[str]:
    lines = [
        f"Chunks: the draft's limit of {found.limit} tokens ended {found.cut:.1%} of them; "
        f"{found.fixed:.0%} of a rollout's time is paid per turn (fit {found.fit:.2f})."
    ]
    for choice in found.choices:
        lines.append(
            f"  limit {choice.limit:>5}: turns x {choice.turns:.2f}, seconds x {choice.seconds:.2f}"
        )
    return [
        *lines,
        "  What that does to accuracy only a run can tell (--set chunking.draft_tokens=...).",
    ]
