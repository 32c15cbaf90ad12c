"""One choice of the policy at a time on the embedded pair: which defaults would another option beat?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import anyio
import numpy as np

from atts.calibration import MODES, Calibrator
from atts.evaluators import mean_estimate
from atts.pipelines import Chunking, ConformalGate, ExploringGate, RandomGate, ScoreRule
from atts.pipelines.policy import Takeover
from scripts.studies.harness import Cell, Options, Table
from scripts.studies.machine import pair_name
from scripts.studies.pipelines_arms import Arm, Grid, Ledger, Pair, Piece, run_grid
from scripts.studies.pipelines_policies import RATE, arm, with_policy
from scripts.studies.pipelines_tables import block_ratios, difference, flops, interval, points, right, solved_of

SAMPLES = 8
_WORTH = 0.05  # share of arithmetic or time that an option must save to replace a default it does not beat in votes
_ENOUGH = 100  # problems below which no default is changed: intervals of fewer are not to be trusted to a point
_LOSS = -0.01  # votes it may lose at most, at the lower end of the interval


@dataclass(frozen=True, slots=True)
class Choice:
    """A thing to be chosen, and its options beside the default."""

    name: str
    options: tuple[Arm, ...]


def study(options: Options) -> list[Table]:
    """Every choice, all arms in turn block by block; a folder remembers what is done."""
    return anyio.run(_study, options)


async def _study(options: Options) -> list[Table]:
    chosen = choices(options.seed)
    grid = Grid(options.pick(20, _ENOUGH, 1000), (options.seed,), 2000, options.pick(10, 25, 50))
    path = None if options.out is None else options.out / f"ablations-{options.effort}-{pair_name()}.jsonl"
    ledger = Ledger(path)
    default = arm("atts")
    async with Pair() as pair:
        await run_grid(
            [default, *(one for choice in chosen for one in choice.options)], grid, ledger, pair, "ablations"
        )
    rows = [row for choice in chosen for row in _rows(choice, ledger)]
    return [_table(rows, ledger.of(default.name, SAMPLES)), _verdicts(chosen, ledger)]


def choices(seed: int = 0) -> list[Choice]:
    """What the policy, the gate and the vote could be instead."""
    atts = arm("atts")

    def changed(name: str, **changes: object) -> Arm:
        return with_policy(atts, name, **changes)

    def explored(fraction: float) -> Arm:
        gate = ExploringGate(ConformalGate(Calibrator(RATE, atts.setup.mode, seed=seed)), fraction, seed)
        return replace(atts, name=f"explored: {fraction:g}", setup=replace(atts.setup, gate=gate))

    coin = replace(atts, name="gate: coin", setup=replace(atts.setup, gate=RandomGate(RATE, seed)))
    lengths = [changed(f"chunk: {n} tokens", chunking=Chunking(n, n, ())) for n in (8, 16, 32, 64)]
    scores = {
        "min": ScoreRule("min"),
        "last 4": ScoreRule("last", 4),
        "last 8": ScoreRule("last", 8),
        "per byte": ScoreRule("byte"),
        "mean": ScoreRule("mean"),
        "speculative": ScoreRule("speculative"),
    }
    return [
        Choice("score", tuple(changed(f"score: {name}", score=rule) for name, rule in scores.items())),
        Choice("mode", tuple(arm(f"mode: {mode}", "atts", mode=mode) for mode in MODES if mode != "split")),
        Choice("chunk", tuple(lengths)),
        Choice(
            "takeover",
            tuple(changed(f"takeover: {t}", takeover=t) for t in get_args(Takeover)),
        ),
        Choice(
            "gate",
            (
                arm("gate: ordinal", "ordinal"),
                coin,
                arm("gate: sorted rounds", "top-b"),
                arm("gate: words", "speculative-thinking"),
                arm("gate: rating", "spec-reason"),
            ),
        ),
        Choice(
            "vote", (changed("vote: perplexity", vote="perplexity"), changed("vote: confidence", vote="confidence"))
        ),  # fmt: skip
        Choice(
            "early stop",
            (
                changed("stop: none", early_stop="none"),
                changed("stop: likely .95", early_stop="likely"),
                changed("stop: likely .8", early_stop="likely", confidence=0.8),
            ),
        ),
        Choice("optimistic", (changed("optimistic: on", optimistic=True),)),
        Choice("explored", (explored(0.05), explored(0.2))),
    ]


def _rows(choice: Choice, ledger: Ledger) -> list[tuple[Cell, ...]]:
    default = ledger.of("atts", SAMPLES)
    return [_row(choice.name, one.name, ledger.of(one.name, SAMPLES), default) for one in choice.options]


def _row(choice: str, name: str, pieces: Sequence[Piece], default: Sequence[Piece]) -> tuple[Cell, ...]:
    solved = solved_of(pieces)
    n, asked = len(solved), sum(one.decisions for one in solved)
    rates = [one.escalated / one.decisions for one in solved if one.decisions]
    spread = math.sqrt(float(np.mean([(rate - RATE) ** 2 for rate in rates]))) if rates else math.nan
    return (
        choice,
        name,
        interval(mean_estimate([right(one) for one in solved], n)),
        points(difference(default, pieces, right)) if pieces is not default else "-",
        sum(one.target for one in solved) / n,
        _cost(pieces, default),
        _time(pieces, default),
        sum(one.escalated for one in solved) / asked if asked else None,
        spread,
    )


def _cost(pieces: Sequence[Piece], default: Sequence[Piece]) -> float:
    """Arithmetic per problem, of the default's."""
    mine, base = solved_of(pieces), solved_of(default)
    return flops(mine) / len(mine) / (flops(base) / len(base))


def _time(pieces: Sequence[Piece], default: Sequence[Piece]) -> float:
    """Seconds, of the default's: the median over blocks that ran in turn."""
    return 1 / float(np.median(block_ratios(default, pieces))) if pieces is not default else 1.0


def _table(rows: Sequence[tuple[Cell, ...]], default: Sequence[Piece]) -> Table:
    count = len(solved_of(default))
    columns = ("choice", "option", "vote right", "minus default, points", "target tokens", "arithmetic", "time",
               "realised rate", "rate error by question")  # fmt: skip
    notes = (
        f"{count} problems x {SAMPLES} samples, rate {RATE:g}; arithmetic and time are those of the option over the "
        "default's; 95 % intervals, paired by problem.",
        "Rate error: root mean square over questions; gates that promise no rate have one all the same.",
    )
    return Table(
        "Ablations beside the default policy", columns, (_row("default", "atts", default, default), *rows), notes
    )


def _verdicts(chosen: Sequence[Choice], ledger: Ledger) -> Table:
    """The mechanical rule, applied."""
    rows: list[tuple[Cell, ...]] = []
    default = ledger.of("atts", SAMPLES)
    count = len(solved_of(default))
    for choice in chosen:
        words = [(one.name, _verdict(ledger.of(one.name, SAMPLES), default)) for one in choice.options]
        wins = [f"{name}: {word}" for name, word in words if word != "no"]
        change = "change" if count >= _ENOUGH else "ask again with more problems"
        rows.append((choice.name, "; ".join(wins) or "none", change if wins else "keep"))
    notes = (
        "An option wins where its votes are better (interval above 0) at no more arithmetic, or where it loses less "
        f"than {-100 * _LOSS:g} point (low end) and saves {_WORTH:.0%} of arithmetic or time; else the default stays.",
        f"No default is changed on fewer than {_ENOUGH} problems; here are {count}. Several options per choice are "
        "looked at: one narrow win among them is weaker evidence than its interval.",
    )
    return Table("Which defaults would change", ("choice", "options that win", "verdict"), tuple(rows), notes)


def _verdict(pieces: Sequence[Piece], default: Sequence[Piece]) -> str:
    votes = difference(default, pieces, right)
    cost, seconds = _cost(pieces, default), _time(pieces, default)
    if votes.low > 0 and cost <= 1.0:
        return f"better votes {points(votes)}"
    if votes.low > _LOSS and cost <= 1 - _WORTH:
        return f"arithmetic {cost:.0%} at {points(votes)}"
    if votes.low > _LOSS and seconds <= 1 - _WORTH:
        return f"time {seconds:.0%} at {points(votes)}"
    return "no"
