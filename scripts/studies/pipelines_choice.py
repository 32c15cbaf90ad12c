"""Which rate and which way to spend it: candidates beside the target alone, on problems that no claim is made on."""

from __future__ import annotations

from scripts.studies.harness import Options, Table
from scripts.studies.pipelines_arms import Arm, Grid, Ledger, Pair, run_grid
from scripts.studies.pipelines_policies import RATE, arm, with_policy
from scripts.studies.pipelines_tables import methods


async def choice_study(options: Options, pair: Pair, ledger: Ledger, samples: int = 8) -> list[Table]:
    """Every candidate on the calibration split, all rollouts to their end but where stopping is the candidate."""
    grid = Grid(options.pick(16, 100, 500), block=options.pick(16, 50, 50), split="calibration")
    arms = [arm("target-only", samples=samples, early_stop="none"), *candidates(options, samples)]
    await run_grid(arms, grid, ledger, pair, "choice")
    table = methods("Candidates for the claim, calibration split", ledger, [one.name for one in arms], samples)
    return [table]


def candidates(options: Options, samples: int) -> list[Arm]:
    """The default at several rates, then at its own rate with one thing changed."""
    rates = options.pick((0.1, RATE), (0.1, 0.13, 0.16, RATE), (0.05, 0.1, 0.12, 0.14, 0.16, 0.18, RATE, 0.25))
    found = [arm(f"rate {rate:g}", "atts", samples=samples, rate=rate, early_stop="none") for rate in rates]
    plain = found[-1]
    return [
        *found,
        with_policy(plain, "answers unseen", answers="stop"),
        with_policy(plain, "stop when certain", early_stop="certain"),
        with_policy(plain, "first 3, then all", first_wave=3),
        with_policy(plain, "first 3, then the target", first_wave=3, later="target"),
        arm("by question and turn", "atts", samples=samples, mode="question-turn", early_stop="none"),
        arm("target-only, stop when certain", "target-only", samples=samples, early_stop="certain"),
        arm("target-only, first 3, then all", "target-only", samples=samples, early_stop="none", first_wave=3),
    ]
