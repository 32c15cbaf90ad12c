"""Tables of a comparison: methods against the target alone, rate control, the claim, accuracy along an axis."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from scripts.studies.arms import Ledger, Sum, right, share
from scripts.studies.harness import Chart, Row, Table, interval, points


def methods(
    title: str, ledger: Ledger, names: Sequence[str], samples: int, *words: str, base: str = "target-only"
) -> Table:
    """Accuracy, tokens, arithmetic and time of every arm against the base."""
    alone = ledger.of(base, samples)
    found = {name: ledger.of(name, samples) for name in names}
    problems, seeds = {one.problem for one in alone.solved}, {piece.seed for piece in alone.pieces}
    return Table.of(
        f"{title}: {len(problems)} problems x {samples} samples x {len(seeds)} seeds",
        f"method | vote right | minus {base}, points | pass@1 | pass@1 minus, points | draft tokens | scored | "
        f"target tokens | of {base} | GFLOPs | seconds | speed-up | escalated",
        [_method(name, one, alone) for name, one in found.items() if one.pieces],
        f"Speed-up: {base}'s seconds over the method's, block by block, interleaved in one run; median and range; "
        "none where they ran at different times.",
        *words,
    )


def _method(name: str, one: Sum, alone: Sum) -> Row:
    accuracies: list[str] = []
    for value in (right, share):
        minus = "-" if one.pieces == alone.pieces else points(one.minus(alone, value))
        accuracies += [interval(one.estimate(value)), minus]
    tokens = (round(one.each("draft"), 1), round(one.each("scored"), 1), round(one.each("target"), 1))
    part = f"{one.each('target') / max(1e-9, alone.each('target')):.1%}"
    seconds = f"{one.seconds:.1f}" if all(piece.seconds for piece in one.pieces) else None
    speed, rate = one.speed_up(alone), None if one.rate is None else f"{one.rate:.3f}"
    return name, *accuracies, *tokens, part, round(one.gflops, 3), seconds, speed and speed.fixed(), rate


def scores_asked(title: str, ledger: Ledger, names: Sequence[str], samples: int, base: str) -> Table:
    """How many tokens were drafted, decided on by a score, and read by the target for it; against reading them all."""
    alone = ledger.of(base, samples)
    rows: list[Row] = []
    for name in names:
        one = ledger.of(name, samples)
        tokens = (round(one.each("draft"), 1), round(one.each("judged"), 1), round(one.each("scored"), 1))
        change = f"{one.each('scored') / max(1e-9, alone.each('judged')) - 1:+.0%}"
        rows.append((name, *tokens, change, "-" if name == base else points(one.minus(alone, right))))
    return Table.of(
        f"{title}: {len(alone.by_problem(right))} problems x {samples} samples",
        f"gate | drafted tokens | of chunks decided on by a score | asked of the target | change | "
        f"vote minus {base}, points",
        rows,
        f"Change: what is asked against asking for the score of every chunk that {base} decides on by one. Of equal "
        "chunks after equal beginnings the target is asked about one; a rejected one is read again where the target "
        "draws meanwhile. Where no two rollouts write the same, as with chunks of hundreds of tokens, only what a gate "
        "keeps or hands over unscored is spared.",
    )


def control(ledger: Ledger, arm: str, samples: int, nominal: float) -> Table:
    """Realised rates of a live arm by turn, level and question."""
    found = ledger.of(arm, samples)
    groups: dict[str, defaultdict[int, list[bool]]] = {kind: defaultdict(list) for kind in ("turn", "level", "all")}
    for one in found.solved:
        for _, turn, over in one.decisions:
            for kind, number in (("turn", turn), ("level", one.level), ("all", 0)):
                groups[kind][number].append(over)
    rows: list[Row] = []
    for kind, numbers in groups.items():
        for number, taken in sorted(numbers.items()):
            if len(taken) >= 50:
                rate = fmean(taken)
                name = kind if kind == "all" else f"{kind} {number}"
                rows.append((name, len(taken), round(rate, 4), round(rate - nominal, 4)))
    asked = [len(one.decisions) for one in found.solved if one.decisions]
    coins = math.sqrt(fmean(nominal * (1 - nominal) / n for n in asked)) if asked else math.nan
    return Table.of(
        f"Rate control of {arm} in the live pipeline, nominal {nominal:g}, {samples} samples",
        "group | decisions | realised rate | minus nominal",
        rows,
        f"By question ({len(asked)} of them): root mean square of rate - nominal {found.rate_error(nominal):.3f}; "
        f"independent coins at the nominal rate would give {coins:.3f}.",
    )


def verdict(ledger: Ledger, arm: str, samples: int) -> Table:
    """The claim in three lines: is it met, and by how much."""
    alone, found = ledger.of("target-only", samples), ledger.of(arm, samples)
    vote, single = found.minus(alone, right), found.minus(alone, share)
    part = found.each("target") / alone.each("target")
    rows: list[tuple[str, str, bool]] = [
        ("vote not below target-only: lower end above -1 point", points(vote), vote.low > -0.01),
        ("target tokens at most 20 % of target-only's", f"{part:.1%}", part <= 0.2),
        ("pass@1 at least target-only's", points(single), single.value >= 0),
    ]
    return Table.of(
        f"The claim for {arm}, {samples} samples",
        "what | measured | met",
        [(what, measured, "yes" if is_met else "no") for what, measured, is_met in rows],
    )


def curve(title: str, found: Mapping[tuple[str, int], Sum], *notes: str) -> Table:
    """Accuracy, tokens and time of methods under a growing limit."""
    rows: list[Row] = []
    for (method, limit), one in found.items():
        vote, tokens = one.estimate(right), (one.each("target"), one.each("draft") + one.each("target"))
        accuracy = (round(vote.value, 4), interval(vote).partition(" ")[2], interval(one.estimate(share)))
        costs = (*(round(each, 1) for each in tokens), round(one.gflops, 3), round(one.seconds / len(one.solved), 4))
        rows.append((method, limit, *accuracy, *costs))
    problems = len(next(iter(found.values())).solved)
    return Table.of(
        f"{title}: {problems} problems, live",
        "method | at most | vote right | 95 % | pass@1 | target tokens | all tokens | GFLOPs | seconds per problem",
        rows,
        *notes,
        chart=Chart("at most", "vote right", "method", x_scaling="log"),
    )
