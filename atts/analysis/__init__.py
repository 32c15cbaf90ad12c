"""What recorded runs say: reports, comparisons, plans, replays under other policies.

collected = collect(Path("runs/first"), against=[Path("runs/target-only")])
collected.report.calibration.rate        # every number is a frozen value
render(collected, "html")                # one file, no network; also "markdown" and "json"
compare(read_side(Path("runs/target-only")), read_side(Path("runs/first"))).vote.difference
advise([Path("runs/first")], Cap(target_tokens=300)).best
"""

from atts.analysis.comparison import Compared, CostRatio, compare
from atts.analysis.plan.advice import Advice, Cap, advise
from atts.analysis.plan.options import Option
from atts.analysis.plan.rates import RateGuess
from atts.analysis.plan.speeds import ChunkAdvice, Speed
from atts.analysis.replay import Replayed, ReplayedProblem, ReplayedRollout, replay_policy
from atts.analysis.report.collect import PAGE_BYTES, Collected, collect
from atts.analysis.report.nodes import read_nodes
from atts.analysis.report.numbers import Calibration, Report, Standing
from atts.analysis.report.svg import Axis, Plot
from atts.analysis.report.write import FORMATS, NAMES, Format, render, write_report
from atts.analysis.results import Side, Solved, read_side

__all__ = [
    "FORMATS",
    "NAMES",
    "PAGE_BYTES",
    "Advice",
    "Axis",
    "Calibration",
    "Cap",
    "ChunkAdvice",
    "Collected",
    "Compared",
    "CostRatio",
    "Format",
    "Option",
    "Plot",
    "RateGuess",
    "Replayed",
    "ReplayedProblem",
    "ReplayedRollout",
    "Report",
    "Side",
    "Solved",
    "Speed",
    "Standing",
    "advise",
    "collect",
    "compare",
    "read_nodes",
    "read_side",
    "render",
    "replay_policy",
    "write_report",
]
