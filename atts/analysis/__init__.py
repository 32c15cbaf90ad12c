"""Analysis of recorded runs: reports, comparisons, plans, replays under other policies.

built = build_report(Path("runs/first"), against=[Path("runs/target-only")])
built.report.calibration.rate            # every number is a frozen value
render(built, "html")                    # one file, no network; also "markdown" and "json"
compare(read_results(Path("runs/target-only")), read_results(Path("runs/first"))).vote.difference
advise([Path("runs/first")], Cap(target_tokens=300)).best
"""

from atts.analysis.comparison import Compared, compare
from atts.analysis.listing import RunLine, list_runs
from atts.analysis.plan.advice import Advice, Cap, advise
from atts.analysis.plan.options import Option
from atts.analysis.plan.speeds import ChunkAdvice
from atts.analysis.policy_replay import Replayed, replay_policy
from atts.analysis.report.build import BuiltReport, build_report
from atts.analysis.report.calibration_page import (
    calibration_format,
    render_calibration,
    save_calibration,
)
from atts.analysis.report.calibration_report import (
    CalibrationReport,
    calibration_of_run,
    calibration_of_scores,
)
from atts.analysis.report.numbers import RateControl, Standing
from atts.analysis.report.render import FORMATS, Format, as_format, render, save_report
from atts.analysis.report.svg import Axis, Plot
from atts.analysis.results import read_results
from atts.analysis.run_replay import PolicyChange, Replay, ReplaySide, replay_run
from atts.analysis.sharing_chart import save_sharing
from atts.analysis.status import RunStanding, is_running, standing_of
from atts.analysis.sweep.curves import LENGTHS, ScalingPoint, SweepReport, read_sweep
from atts.analysis.sweep.page import render_sweep
from atts.analysis.sweep.run_set import (
    SWEEP,
    PointKind,
    RunSet,
    RunSetPoint,
    Value,
    load_run_set,
    save_run_set,
)
from atts.analysis.sweep.text import sweep_lines

__all__ = [
    "Advice",
    "Axis",
    "BuiltReport",
    "CalibrationReport",
    "Cap",
    "ChunkAdvice",
    "Compared",
    "FORMATS",
    "Format",
    "LENGTHS",
    "Option",
    "Plot",
    "PointKind",
    "PolicyChange",
    "RateControl",
    "Replay",
    "ReplaySide",
    "Replayed",
    "RunLine",
    "RunSet",
    "RunSetPoint",
    "RunStanding",
    "SWEEP",
    "ScalingPoint",
    "Standing",
    "SweepReport",
    "Value",
    "advise",
    "as_format",
    "build_report",
    "calibration_format",
    "calibration_of_run",
    "calibration_of_scores",
    "compare",
    "is_running",
    "list_runs",
    "load_run_set",
    "read_results",
    "read_sweep",
    "render",
    "render_calibration",
    "render_sweep",
    "replay_policy",
    "replay_run",
    "save_calibration",
    "save_report",
    "save_run_set",
    "save_sharing",
    "standing_of",
    "sweep_lines",
]
