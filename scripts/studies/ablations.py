"""One choice of the policy at a time on the embedded pair: which defaults would another option
beat?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import anyio

from atts.calibration import MODES, Calibrator
from atts.pipelines import Chunking, ConformalGate, ExploringGate, RandomGate, ScoreRule
from atts.pipelines.policy import Takeover
from scripts.studies.arms import RATE, Arm, Grid, Ledger, Pair, Sum, arm, right, run_grid
from scripts.studies.harness import Options, Row, Table, interval, points
from scripts.studies.machine import pair_name

SAMPLES = 8
# share of arithmetic or time that an option must save to replace a default it does not beat in
# votes
_WORTH = 0.05
# problems below which no default is changed: intervals of fewer are not to be trusted to a point
_ENOUGH = 100
_LOSS = -0.01  # votes it may lose at most, at the lower end of the interval


def study(options: Options) -> list[Table]:
    """Every choice, all arms in turn block by block; a folder remembers what is done."""
    chosen = choices(options.seed)
    grid = Grid(options.pick(20, _ENOUGH, 1000), (options.seed,), 2000, options.pick(10, 25, 50))
    ledger = Ledger(options.file(f"ablations-{options.effort}-{pair_name()}.jsonl"))
    anyio.run(_run, [arm("atts"), *(one for arms in chosen.values() for one in arms)], grid, ledger)
    default = ledger.of("atts", SAMPLES)
    found = [
        (choice, one.name, ledger.of(one.name, SAMPLES))
        for choice, arms in chosen.items()
        for one in arms
    ]
    count = len(default.solved)
    verdicts = list[Row]()
    for choice in chosen:
        words = {name: _verdict(one, default) for of, name, one in found if of == choice}
        wins = [f"{name}: {word}" for name, word in words.items() if word]
        change = "change" if count >= _ENOUGH else "ask again with more problems"
        verdicts.append((choice, "; ".join(wins) or "none", change if wins else "keep"))
    changed = [str(row[0]) for row in verdicts if row[2] != "keep"]
    return [
        Table.of(
            "Ablations beside the default policy",
            "choice | option | vote right | minus default, points | target tokens | arithmetic | "
            "time | "
            "realised rate | rate error by question",
            [_row(*each, default) for each in [("default", "atts", default), *found]],
            f"{count} problems x {SAMPLES} samples, rate {RATE:g}; arithmetic and time are those "
            f"of the option over "
            "the default's; 95 % intervals, paired by problem.",
        ),
        Table.of(
            "Which defaults would change",
            "choice | options that win | verdict",
            verdicts,
            "An option wins where its votes are better (interval above 0) at no more arithmetic, "
            "or where it loses "
            f"less than {-100 * _LOSS:g} point (low end) and saves {_WORTH:.0%} of arithmetic or "
            f"time; else the "
            "default stays.",
            f"No default is changed on fewer than {_ENOUGH} problems; here are {count}. Several "
            f"options per choice "
            "are looked at: one narrow win among them is weaker evidence than its interval.",
            headline=f"of {len(chosen)} choices, those that another option beats: "
            f"{', '.join(changed) or 'none'}",
        ),
    ]


async def _run(arms: Sequence[Arm], grid: Grid, ledger: Ledger) -> None:
    async with Pair() as pair:
        await run_grid(arms, grid, ledger, pair, "ablations")


def choices(seed: int = 0) -> dict[str, list[Arm]]:
    """What the policy, the gate and the vote could be instead."""
    atts = arm("atts")
    scores = {
        "per byte": ScoreRule("byte"),
        "mean": ScoreRule("mean"),
        "speculative": ScoreRule("speculative"),
    }

    def explored(fraction: float) -> Arm:
        gate = ExploringGate(
            ConformalGate(Calibrator(RATE, atts.setup.mode, seed=seed)), fraction, seed
        )
        return arm(f"explored: {fraction:g}", "atts", gate=gate)

    return {
        "score": [atts.but(f"score: {name}", score=rule) for name, rule in scores.items()],
        "mode": [arm(f"mode: {mode}", "atts", mode=mode) for mode in MODES if mode != "split"],
        "chunk": [
            atts.but(f"chunk: {n} tokens", chunking=Chunking(n, n, ())) for n in (8, 16, 32, 64)
        ],
        "takeover": [
            atts.but(f"takeover: {takeover}", takeover=takeover) for takeover in get_args(Takeover)
        ],
        "gate": [
            arm("gate: ordinal", "ordinal"),
            arm("gate: coin", "atts", gate=RandomGate(RATE, seed)),
            arm("gate: sorted rounds", "top-b"),
            arm("gate: words", "speculative-thinking"),
            arm("gate: rating", "spec-reason"),
        ],
        "vote": [atts.but("vote: confidence", vote="confidence")],
        "early stop": [
            atts.but("stop: none", early_stop="none"),
            atts.but("stop: likely .95", early_stop="likely"),
            atts.but("stop: likely .8", early_stop="likely", confidence=0.8),
        ],
        "optimistic": [atts.but("optimistic: on", optimistic=True)],
        "explored": [explored(0.05), explored(0.2)],
    }


def _row(choice: str, name: str, one: Sum, default: Sum) -> Row:
    minus = "-" if one is default else points(one.minus(default, right))
    costs = (one.each("target"), one.gflops / default.gflops, _time(one, default))
    return (
        choice,
        name,
        interval(one.estimate(right)),
        minus,
        *costs,
        one.rate,
        one.rate_error(RATE),
    )


def _time(one: Sum, default: Sum) -> float:
    """Seconds, of the default's: the median over blocks that ran in turn."""
    ratio = one.speed_up(default)
    assert ratio is not None, "all arms run every block"
    return 1 / ratio.median


def _verdict(one: Sum, default: Sum) -> str:
    """In what the option wins, if it does: a mechanical rule."""
    votes = one.minus(default, right)
    cost = one.gflops / default.gflops
    seconds = _time(one, default)
    if votes.low > 0 and cost <= 1.0:
        return f"better votes {points(votes)}"
    if votes.low > _LOSS and cost <= 1 - _WORTH:
        return f"arithmetic {cost:.0%} at {points(votes)}"
    if votes.low > _LOSS and seconds <= 1 - _WORTH:
        return f"time {seconds:.0%} at {points(votes)}"
    return ""
