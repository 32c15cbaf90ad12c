"""Which rate and which way to spend it: candidates beside the target alone, on problems that no claim is made on."""

from __future__ import annotations

from atts.pipelines.policy import Takeover
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
    """Both ways in which the target ends up with nothing wrong before it, at several rates; then one thing changed."""
    rates = options.pick((RATE,), (0.15, 0.18, RATE), (0.1, 0.12, 0.15, 0.18, RATE, 0.25, 0.3))
    mended = options.pick((0.25,), (RATE, 0.25, 0.3), (0.15, RATE, 0.25, 0.3, 0.4))
    found = [_rated("replace", rate, samples) for rate in rates] + [_rated("repair", rate, samples) for rate in mended]
    return found if options.effort == "default" else [*found, *_changed(samples)]


def _rated(takeover: Takeover, rate: float, samples: int) -> Arm:
    name = f"{takeover} at {rate:g}"
    return arm(name, "atts", samples=samples, rate=rate, takeover=takeover, early_stop="none")


def _changed(samples: int) -> list[Arm]:
    plain = arm("atts", samples=samples, early_stop="none")
    return [
        plain,
        with_policy(plain, "answers unseen", answers="stop"),
        with_policy(plain, "stop when certain", early_stop="certain"),
        with_policy(plain, "first 3, then all", first_wave=3),
        with_policy(plain, "first 3, then the target", first_wave=3, later="target"),
        arm("by question and turn", "atts", samples=samples, mode="question-turn", early_stop="none"),
        arm("target-only, stop when certain", "target-only", samples=samples, early_stop="certain"),
        arm("target-only, first 3, then all", "target-only", samples=samples, early_stop="none", first_wave=3),
    ]
