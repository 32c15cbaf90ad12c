"""`atts replay`: another policy over a recorded run, without a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.cli.options import Json, RunDirectory
from atts.cli.output import json_line
from atts.cli.terminal import say

if TYPE_CHECKING:
    from atts.analysis import Replay, ReplaySide


def replay(
    directory: RunDirectory,
    method: Annotated[
        str | None, typer.Option(help="The gate of another method.", show_default="as recorded")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Another share for the target.", show_default="as recorded")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="What the rate is held for.", show_default="as recorded")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(help="Only the first rollouts of each problem.")
    ] = None,
    turns: Annotated[
        int | None, typer.Option(help="Only the first rounds of each rollout.")
    ] = None,
    vote: Annotated[str | None, typer.Option(help="majority or confidence.")] = None,
    budget: Annotated[int | None, typer.Option(help="Takeovers per problem, at most.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the gate's coins.", show_default="as recorded")
    ] = None,
    as_json: Json = False,
) -> None:
    """Decide anew on the recorded scores under another gate, rate, budget, number of rollouts or
    turns, or vote.

    Decisions that come out otherwise lead where the record does not: they are counted, and flagged
    in --json; the answers of their rollouts are the recorded ones, and tokens are estimates.
    Rollouts that were stopped before they could answer count neither as right nor as wrong:
    --samples takes others first.

    Where the run left decisions to chance (--set explore=0.2), what single rollouts would be worth
    is estimated with an interval (doubly robust).

    Example: atts replay runs/first --rate 0.4 --samples 4
    """
    from atts.api import replay as again

    words: Any = {"mode": mode, "vote": vote}  # checked there
    found = again(
        directory,
        method=method,
        rate=rate,
        samples=samples,
        turns=turns,
        budget=budget,
        seed=seed,
        **words,
    )
    say("\n".join(as_lines(found) if as_json else as_table(found)))


def as_lines(found: Replay) -> list[str]:
    """One object per decision and per problem, then the summary."""
    decisions = (
        {
            "type": "decision",
            "problem": pair.decision.question,
            **{
                name: getattr(pair.decision, name)
                for name in ("sample", "turn", "score", "p", "action", "why")
            },
            "recorded": pair.recorded.action,
            "off_policy": pair.off_policy,
        }
        for pair in found.decisions
    )
    problems = (
        {"type": "problem", "problem": name, "answer": new, "recorded": old}
        for name, (old, new) in found.answers.items()
    )
    rest = {name: getattr(found, name) for name in ("nominal", "changed", "off_policy", "censored")}
    sides = {
        name: asdict(getattr(found, name))
        for name in ("recorded", "replayed", "on_policy_accuracy")
    }
    estimated = None if found.estimated is None else asdict(found.estimated)
    summary = {"type": "summary", **rest, **sides, "estimated": estimated}
    return [json_line(line) for line in (*decisions, *problems, summary)]


def as_table(found: Replay) -> list[str]:
    """How far the numbers can be believed, then the two side by side."""
    old = found.recorded
    new = found.replayed
    rows = [
        ("", "recorded", "replayed"),
        ("chunks handed over", old.rate.brief("-"), new.rate.brief("-")),
        ("answers right", old.accuracy.brief("-"), new.accuracy.brief("-")),
        ("decisions", f"{old.decisions:,}", f"{new.decisions:,}"),
        ("tokens, draft", *(_tokens(side, side.draft_tokens) for side in (old, new))),
        ("tokens, target", *(_tokens(side, side.target_tokens) for side in (old, new))),
        ("tokens, scored", *(_tokens(side, side.scored_tokens) for side in (old, new))),
    ]
    asked = "" if found.nominal is None else f" (asked for: {found.nominal:g})"
    table = [
        f"{name:<20}{one:<24}{other}{asked if name.startswith('chunks') else ''}"
        for name, one, other in rows
    ]
    if found.estimated is not None:
        one = found.estimated
        worth = f"worth {one.effective:,.0f} of {one.rollouts:,} rollouts drawn by it"
        table.append(
            f"{'one rollout right':<44}{one.accuracy.brief()}, estimated from what was left to "
            f"chance; {worth}"
        )
    changed = f"{found.changed:,} of {new.decisions:,} decisions came out otherwise."
    return [*_doubts(found), *table, "", changed]


def _tokens(side: ReplaySide, count: int | None) -> str:
    if count is None:
        return "unknown"
    return f"about {count:,}" if side.tokens == "estimated" else f"{count:,}"


def _doubts(found: Replay) -> Iterator[str]:
    """What the numbers below rest on, where that is not the record alone."""
    if found.off_policy > 0:
        yield (
            f"{found.off_policy:.1%} of the rollouts left the recorded path: what they would have "
            f"written is unknown. "
            "Below, their recorded answers vote; tokens are estimates, with as many by the target "
            "for each takeover "
            "as it wrote in the record."
        )
        clean = found.on_policy_accuracy
        if clean.n_problems:
            yield f"Problems without such rollouts: {clean.n_problems}, right {clean.brief()}."
        else:
            yield "No problem is without such rollouts: the accuracy replayed is that of the recorded texts."
    if found.censored:
        yield f"{found.censored:,} problems are left out: their rollouts were stopped before any could answer."
    if found.off_policy > 0 or found.censored:
        yield ""
