"""Turns the pieces of a comparison into tables: methods against the target alone, rate control, time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from atts.evaluators import Estimate, compare_runs, mean_estimate
from atts.models import info
from scripts.studies.harness import Cell, Table
from scripts.studies.pipelines_arms import Ledger, Piece, Solved

CONTEXT = 128
"""Tokens that a token of the embedded pair sees on average, for the arithmetic it costs."""


def solved_of(pieces: Sequence[Piece]) -> list[Solved]:
    """Every problem of these pieces, once per seed."""
    return [one for piece in pieces for one in piece.solved]


def by_problem(pieces: Sequence[Piece], value: Callable[[Solved], float]) -> dict[str, float]:
    """The mean over seeds of each problem: a problem stays one unit however often it was run."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for one in solved_of(pieces):
        found[one.problem].append(value(one))
    return {name: float(np.mean(values)) for name, values in found.items()}


def flops(solved: Sequence[Solved]) -> float:
    """Of both models: tokens written, scored and read, each once."""
    draft, target = info("draft").flops_per_token(CONTEXT), info("target").flops_per_token(CONTEXT)
    return sum(one.draft * draft + (one.target + one.scored) * target for one in solved)


def interval(estimate: Estimate) -> str:
    """A number with its 95 % interval."""
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def points(estimate: Estimate) -> str:
    """A difference in points with its interval."""
    return f"{100 * estimate.value:+.2f} [{100 * estimate.low:+.2f}, {100 * estimate.high:+.2f}]"


def difference(base: Sequence[Piece], other: Sequence[Piece], value: Callable[[Solved], float]) -> Estimate:
    """Paired by problem, over those that both have."""
    first, second = by_problem(base, value), by_problem(other, value)
    names = sorted(first.keys() & second.keys())
    return compare_runs([first[name] for name in names], [second[name] for name in names]).difference


def right(one: Solved) -> float:
    """Whether the vote is."""
    return one.right


def share(one: Solved) -> float:
    """How many of the rollouts that ended are right."""
    return one.share


def methods(title: str, ledger: Ledger, names: Sequence[str], samples: int, base: str = "target-only") -> Table:
    """Accuracy, tokens, arithmetic and time of every arm against the base."""
    alone = ledger.of(base, samples)
    rows = [_method(name, ledger.of(name, samples), alone) for name in names if ledger.of(name, samples)]
    problems = {one.problem for one in solved_of(alone)}
    seeds = {piece.seed for piece in alone}
    return Table(
        f"{title}: {len(problems)} problems x {samples} samples x {len(seeds)} seeds",
        (
            "method", "vote right", f"minus {base}, points", "pass@1", "pass@1 minus, points", "draft tokens",
            "scored", "target tokens", "of target-only", "GFLOPs", "seconds", "speed-up", "escalated",
        ),
        tuple(rows),
        (
            "95 % intervals over problems; differences are paired by problem, seeds averaged within each.",
            "Tokens and arithmetic per problem. pass@1 is over rollouts that ran to their end; where a method stops "
            "early, a vote that can no longer change cancels the rest.",
            f"Speed-up: {base}'s seconds over the method's, block by block, interleaved in one run; median and range; "
            "none where they ran at different times.",
        ),
    )  # fmt: skip


def _method(name: str, pieces: Sequence[Piece], alone: Sequence[Piece]) -> tuple[Cell, ...]:
    solved, base = solved_of(pieces), solved_of(alone)
    n, asked = len(solved), sum(one.decisions for one in solved)
    tokens = [sum(getattr(one, kind) for one in solved) / n for kind in ("draft", "scored", "target")]
    part = tokens[2] / max(1e-9, sum(one.target for one in base) / len(base))
    ratios = block_ratios(alone, pieces)
    return (
        name,
        interval(mean_estimate(list(by_problem(pieces, right).values()), n)),
        points(difference(alone, pieces, right)) if pieces != alone else "-",
        interval(mean_estimate(list(by_problem(pieces, share).values()), n)),
        points(difference(alone, pieces, share)) if pieces != alone else "-",
        *(round(value, 1) for value in tokens),
        f"{part:.1%}",
        round(flops(solved) / n / 1e9, 3),
        f"{sum(sum(piece.seconds) for piece in pieces):.1f}" if all(piece.seconds for piece in pieces) else "-",
        f"{np.median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]" if ratios else "-",
        f"{sum(one.escalated for one in solved) / asked:.3f}" if asked else "-",
    )


def block_ratios(base: Sequence[Piece], other: Sequence[Piece]) -> list[float]:
    """Seconds of the base over the other's, for blocks that both ran at the same place."""
    mine = {piece.key[1:]: piece.seconds for piece in other}
    pairs = [(piece.seconds, mine[piece.key[1:]]) for piece in base if piece.key[1:] in mine]
    return [a / b for first, second in pairs for a, b in zip(first, second, strict=False)]


def control(ledger: Ledger, arm: str, samples: int, nominal: float) -> Table:
    """Realised rates of a live arm by turn, level and question."""
    solved = solved_of(ledger.of(arm, samples))
    rows: list[tuple[Cell, ...]] = []
    turns: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    levels: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for one in solved:
        levels[one.level].append((one.decisions, one.escalated))
        for turn, pair in one.turns.items():
            turns[turn].append(pair)
    for turn in sorted(turns, key=int):
        rows.append(_rate(f"turn {turn}", turns[turn], nominal))
    rows += [_rate(f"level {level}", levels[level], nominal) for level in sorted(levels)]
    rows.append(_rate("all", [(one.decisions, one.escalated) for one in solved], nominal))
    rates = [one.escalated / one.decisions for one in solved if one.decisions]
    expected = [nominal * (1 - nominal) / one.decisions for one in solved if one.decisions]
    spread = math.sqrt(float(np.mean([(rate - nominal) ** 2 for rate in rates]))) if rates else math.nan
    coins = math.sqrt(float(np.mean(expected))) if expected else math.nan
    return Table(
        f"Rate control of {arm} in the live pipeline, nominal {nominal:g}, {samples} samples",
        ("group", "decisions", "realised rate", "minus nominal"),
        tuple(row for row in rows if isinstance(row[1], int) and row[1] >= 50),
        (
            f"By question ({len(rates)} of them): root mean square of rate - nominal {spread:.3f}; "
            f"independent coins at the nominal rate would give {coins:.3f}.",
        ),
    )


def _rate(name: str, pairs: Sequence[tuple[int, int]], nominal: float) -> tuple[Cell, ...]:
    asked, over = sum(a for a, _ in pairs), sum(o for _, o in pairs)
    realised = over / asked if asked else math.nan
    return name, asked, round(realised, 4), round(realised - nominal, 4)


def verdict(ledger: Ledger, arm: str, samples: int, base: str = "target-only") -> Table:
    """The claim in three lines: is it met, and by how much."""
    alone, pieces = ledger.of(base, samples), ledger.of(arm, samples)
    vote, single = difference(alone, pieces, right), difference(alone, pieces, share)
    spent = sum(one.target for one in solved_of(pieces)) / max(1, len(solved_of(pieces)))
    whole = sum(one.target for one in solved_of(alone)) / max(1, len(solved_of(alone)))
    rows = (
        ("vote not below target-only: lower end above -1 point", points(vote), _met(vote.low > -0.01)),
        ("target tokens at most 20 % of target-only's", f"{spent / whole:.1%}", _met(spent <= 0.2 * whole)),
        ("pass@1 at least target-only's", points(single), _met(single.value >= 0)),
    )
    return Table(f"The claim for {arm}, {samples} samples", ("what", "measured", "met"), rows)


def _met(is_met: bool) -> str:
    return "yes" if is_met else "no"
