"""`atts compare`: two runs side by side."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atts.cli.options import Json
from atts.cli.output import print_result
from atts.cli.terminal import tell
from atts.errors import OptionError

if TYPE_CHECKING:
    from atts.analysis import Compared
    from atts.evaluators import Comparison

Run = Annotated[
    Path, typer.Argument(help="A run directory, or results as `atts eval --json` prints them.")
]
_MANY = 100_000  # problems: more than any benchmark has


def compare(
    first: Run,
    second: Run,
    sequential: Annotated[
        bool,
        typer.Option(
            "--sequential", help="Also one by one: after how many problems they are told apart."
        ),
    ] = False,
    points: Annotated[
        float,
        typer.Option(help="With --sequential: differences within so many points count as alike."),
    ] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Of the order in which --sequential takes the problems.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Compare two runs problem by problem: accuracy, its difference with an interval, costs as
    ratios.

    Intervals and p-values are clustered by problem: a problem's rollouts stay together.

    --sequential takes the problems in an order drawn by the seed, and its interval holds after
    every one of them: one may look as often as one likes. `atts eval --against RUN --stop-when
    decided` ends a run by it.

    Example: atts compare runs/target-only runs/first
    """
    from atts.api import compare as compared

    if points and not sequential:
        raise OptionError("points", "they belong to --sequential")
    found = compared(first, second, points=points if sequential else None, seed=seed)
    left_out = found.only_first + found.only_second
    if left_out:
        tell(
            f"atts: {found.only_first} problems are only in {found.first}, {found.only_second} "
            f"only in {found.second}: "
            "left out",
        )
    print_result(found, as_json, _table)


def _table(found: Compared) -> list[str]:
    names = [
        f"{run} ({method})" if method else run
        for run, method in zip((found.first, found.second), found.methods, strict=True)
    ]
    common = "1 problem" if found.problems == 1 else f"{found.problems:,} problems"
    lines = [f"{names[0]} → {names[1]}", f"{common} in common", ""]
    lines += _accuracy("vote", found.vote)
    if found.if_right is not None:
        first, second = found.unscored
        between = found.if_right.difference.signed()
        lines.append(
            f"{'':16}unscored, counted wrong: {first} and {second}; were they right: difference "
            f"{between}"
        )
    if found.mcnemar is not None:
        pairs = found.mcnemar
        lines.append(
            f"{'':16}right by both {pairs.both}, first alone {pairs.first_only}, second alone "
            f"{pairs.second_only}, "
            f"neither {pairs.neither}; exact McNemar p = {pairs.p_value:.3g}"
        )
    if found.sequential is not None:
        lines.append(f"{'one by one':16}second {found.sequential}")
    if found.single is not None:
        lines += _accuracy("one rollout", found.single)
    if found.costs:
        lines += ["", f"{'per problem':<16}{'first':>12}{'second':>12}   second / first"]
    for cost in found.costs:
        ratio = (
            "first took none"
            if math.isinf(cost.ratio)
            else "none in either"
            if math.isnan(cost.ratio)
            else ""
        )
        ratio = ratio or f"{cost.ratio:.3f} [{cost.low:.3f}, {cost.high:.3f}]"
        name = "seconds it took" if cost.name == "seconds" else cost.name.replace("_", " ")
        lines.append(f"{name:<16}{cost.first:>12,.1f}{cost.second:>12,.1f}   {ratio}")
    if any(cost.name == "seconds" for cost in found.costs):
        lines.append(
            "Seconds a problem took are its latency: problems run side by side, a run is shorter "
            "than their sum."
        )
    return [*lines, "Brackets are 95 % intervals over problems."]


def _accuracy(name: str, found: Comparison) -> list[str]:
    between = found.difference
    ends = "" if math.isnan(between.low) else f" [{between.low:+.3f}, {between.high:+.3f}]"
    lines = [
        f"{name:<16}{found.first:.3f} → {found.second:.3f}   difference "
        f"{found.second - found.first:+.3f}{ends}, "
        f"p = {found.p_value:.3g}",
        f"{'':16}better on {found.better}, worse on {found.worse}, equal on {found.tied}",
    ]
    if found.problems_needed:
        needed = (
            f"{found.problems_needed:,}"
            if found.problems_needed <= _MANY
            else f"more than {_MANY:,}"
        )
        lines.append(
            f"{'':16}{needed} problems like these would show such a difference 4 times in 5"
        )
    return lines
