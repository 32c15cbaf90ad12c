"""The best policy under a cap among those that recorded runs can evaluate, with its evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from atts.analysis.plan.options import Option, frontier, options
from atts.analysis.plan.plan_data import PlanData, read_plan_data
from atts.analysis.plan.speeds import ChunkAdvice, Speed, chunk_advice, speeds
from atts.analysis.plan.untried_rates import UntriedRate, untried_rates
from atts.errors import OptionError


@dataclass(frozen=True, slots=True)
class Cap:
    """What a problem may take, None being as much as it likes.

    :raises OptionError: a cap that is not positive.
    """

    target_tokens: float | None = None
    tokens: float | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.given:
            if not value > 0 or math.isinf(value):
                raise OptionError(
                    name.replace("_", "-"), f"{value:g} is no cap; give a positive number"
                )

    @property
    def given(self) -> list[tuple[str, float]]:
        """The caps there are, by the name of the cost."""
        return [(name, value) for name, value in asdict(self).items() if value is not None]

    @property
    def cost(self) -> str:
        """What options are ordered by: the first cap's cost."""
        return self.given[0][0] if self.given else "target_tokens"

    def allows(self, option: Option) -> bool:
        """Whether the option stays below every cap."""
        return all(getattr(option, name) <= value for name, value in self.given)


@dataclass(frozen=True, slots=True)
class Advice:
    """`best` is None where nothing recorded stays below the cap; `options` are those that nothing
    cheaper equals.
    """

    cap: Cap
    runs: tuple[str, ...]
    problems: int
    rollouts: int
    best: Option | None
    options: tuple[Option, ...]
    other_rates: tuple[UntriedRate, ...]
    chunks: ChunkAdvice | None
    speeds: tuple[Speed, ...]
    notes: tuple[str, ...]


def advise(directories: Sequence[Path], cap: Cap | None = None) -> Advice:
    """From one recorded run, or several on the same problems, such as at different rates.

    :raises JournalError: a directory holds no run, or one that cannot be read.
    :raises UsageError: a run without a graded problem.
    :raises OptionError: runs of different problems.
    """
    cap = cap or Cap()
    runs = [read_plan_data(directory) for directory in directories]
    if len({data.run.manifest.dataset for data in runs}) > 1:
        raise OptionError(
            "runs", "they are not of the same problems; plan from runs of one dataset"
        )
    found = [option for data in runs for option in options(data)]
    allowed = [option for option in found if cap.allows(option)]
    best = max(
        allowed,
        key=lambda option: (option.accuracy.value, -getattr(option, cap.cost)),
        default=None,
    )
    main = next((data for data in runs if data.method == "atts"), runs[0])
    return Advice(
        cap,
        runs=tuple(str(data.run.directory) for data in runs),
        problems=len(main.cases),
        rollouts=sum(len(case.rollouts) for case in main.cases),
        best=best,
        options=tuple(frontier(found, cap.cost)),
        other_rates=untried_rates(main) if len(runs) == 1 else (),
        chunks=chunk_advice(main),
        speeds=speeds(main),
        notes=tuple(_notes(runs, found, best)),
    )


def _notes(runs: Sequence[PlanData], found: Sequence[Option], best: Option | None) -> list[str]:
    notes = [
        "Accuracies are of these problems and samples, counted over all subsets of the recorded "
        "rollouts; the best "
        f"of {len(found)} options looks a little better than it is.",
        "Costs are before settled votes spare rollouts, so a run takes at most that; seconds are "
        "at the recorded load.",
    ]
    if censored := sum(data.censored for data in runs):
        notes.append(
            f"{censored} rollouts that settled votes spared are left out: what is left came first "
            f"and leans towards "
            "the quick. A run with --set early_stop=none has no such lean."
        )
    if best is not None and not math.isnan(best.accuracy.low):
        wide = best.accuracy.high - best.accuracy.low
        if wide > 0.15:
            notes.append(
                f"The interval is {wide:.2f} wide: more problems would tell options apart."
            )
    return notes
