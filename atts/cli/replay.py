"""`atts replay`: another policy over a recorded run, without a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.cli.options import Json, RunDirectory
from atts.cli.output import json_line

if TYPE_CHECKING:
    from atts.analysis import Replay


def replay(
    directory: RunDirectory,
    method: Annotated[str | None, typer.Option(help="The gate of another method.", show_default="as recorded")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Another share for the target.", show_default="as recorded")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="What the rate is held for.", show_default="as recorded")] = None,
    samples: Annotated[int | None, typer.Option(help="Only the first rollouts of each problem.")] = None,
    turns: Annotated[int | None, typer.Option(help="Only the first rounds of each rollout.")] = None,
    vote: Annotated[str | None, typer.Option(help="majority, perplexity or confidence.")] = None,
    budget: Annotated[int | None, typer.Option(help="Takeovers per problem, at most.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the gate's coins.", show_default="as recorded")] = None,
    as_json: Json = False,
) -> None:
    """Decide anew on the recorded scores under another gate, rate, budget, number of rollouts or turns, or vote.

    Decisions that come out otherwise lead where the record does not: they are counted, and flagged in --json, and the
    answers of their rollouts are the recorded ones.

    Example: atts replay runs/first --rate 0.4 --samples 4
    """
    from atts.api import replay as again

    words: Any = {"mode": mode, "vote": vote}  # checked there
    found = again(directory, method=method, rate=rate, samples=samples, turns=turns, budget=budget, seed=seed, **words)
    print("\n".join(as_lines(found) if as_json else as_table(found)))


def as_lines(found: Replay) -> list[str]:
    """One object per decision and per problem, then the summary."""
    decisions = (
        {
            "type": "decision",
            "problem": pair.decision.question,
            **{name: getattr(pair.decision, name) for name in ("sample", "turn", "score", "p", "action", "why")},
            "recorded": pair.recorded.action,
            "off_policy": pair.off_policy,
        }
        for pair in found.decisions
    )
    problems = (
        {"type": "problem", "problem": name, "answer": new, "recorded": old}
        for name, (old, new) in found.answers.items()
    )
    rest = {name: getattr(found, name) for name in ("nominal", "changed", "off_policy")}
    sides = {name: asdict(getattr(found, name)) for name in ("recorded", "replayed", "on_policy_accuracy")}
    return [json_line(line) for line in (*decisions, *problems, {"type": "summary", **rest, **sides})]


def as_table(found: Replay) -> list[str]:
    """The two side by side, then how far the second can be believed."""
    old, new = found.recorded, found.replayed
    rows = [
        ("", "recorded", "replayed"),
        ("chunks handed over", old.rate.brief("-"), new.rate.brief("-")),
        ("answers right", old.accuracy.brief("-"), new.accuracy.brief("-")),
        ("decisions", f"{old.decisions:,}", f"{new.decisions:,}"),
        ("tokens, draft", f"{old.draft_tokens:,}", f"{new.draft_tokens:,}"),
        ("tokens, target", f"{old.target_tokens:,}", f"{new.target_tokens:,}"),
        ("tokens, scored", f"{old.scored_tokens:,}", f"{new.scored_tokens:,}"),
    ]
    asked = "" if found.nominal is None else f" (asked for: {found.nominal:g})"
    lines = [f"{name:<20}{one:<24}{other}{asked if name.startswith('chunks') else ''}" for name, one, other in rows]
    lines += ["", f"{found.changed:,} of {new.decisions:,} decisions came out otherwise."]
    if found.off_policy > 0:
        lines.append(
            f"{found.off_policy:.1%} of the rollouts left the recorded path: what they would have written is unknown,"
            " so their recorded answers and tokens were counted."
        )
        clean = found.on_policy_accuracy
        if clean.n_problems:
            lines.append(f"Problems without such rollouts: {clean.n_problems}, right {clean.brief()}.")
        else:
            lines.append("No problem is without such rollouts: the accuracy above is that of the recorded texts.")
    return lines
