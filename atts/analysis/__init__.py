"""Analysis of recorded runs by reports, comparisons, plans and replays under other policies.

built = build_report(Path("runs/first"), against=[Path("runs/target-only")])
built.report.calibration.rate            # every number is a frozen value
render(built, "html")                    # one file, no network; also "markdown" and "json"
compare(read_results(Path("runs/target-only")), read_results(Path("runs/first"))).vote.difference
advise([Path("runs/first")], Cap(target_tokens=300)).best
"""

from atts.analysis.comparison import Compared, compare, read_results
from atts.analysis.listing import RunLine, RunStanding, is_running, list_runs, standing_of
from atts.analysis.pilot import PilotArm, PilotReport, PilotRow, judge_pilot, pilot_lines
from atts.analysis.planning import Advice, Cap, ChunkAdvice, Option, advise
from atts.analysis.referee import (
    UNITS,
    PlayedProblem,
    PlayedRollout,
    Referee,
    RefereeOptions,
    RuleRow,
    referee,
    referee_run,
)
from atts.analysis.reports.build import BuiltReport, build_report
from atts.analysis.reports.calibration import (
    CalibrationReport,
    calibration_format,
    calibration_of_run,
    calibration_of_scores,
    render_calibration,
    save_calibration,
)
from atts.analysis.reports.numbers import RateControl, Standing
from atts.analysis.reports.render import (
    FORMATS,
    Format,
    as_format,
    render,
    save_report,
    save_sharing,
)
from atts.analysis.reports.svg import Axis, Plot
from atts.analysis.reports.tables import shown_score
from atts.analysis.run_replay import (
    PolicyChange,
    Replay,
    Replayed,
    ReplaySide,
    replay_policy,
    replay_run,
)
from atts.analysis.sweep_pages import render_sweep, sweep_lines
from atts.analysis.sweeps import (
    LENGTHS,
    SWEEP,
    PointKind,
    RunSet,
    RunSetPoint,
    ScalingPoint,
    SweepReport,
    Value,
    load_run_set,
    read_sweep,
    save_run_set,
)
from atts.analysis.takeovers import takeover_examples
from atts.analysis.training_data import (
    KINDS,
    DataKind,
    Exported,
    ExportOptions,
    Teacher,
    TopTokens,
    export_run,
)

__all__ = [
    "takeover_examples",
    "Advice",
    "Axis",
    "BuiltReport",
    "CalibrationReport",
    "Cap",
    "ChunkAdvice",
    "Compared",
    "DataKind",
    "ExportOptions",
    "Exported",
    "FORMATS",
    "Format",
    "KINDS",
    "LENGTHS",
    "Option",
    "PilotArm",
    "PilotReport",
    "PilotRow",
    "PlayedProblem",
    "PlayedRollout",
    "Plot",
    "PointKind",
    "PolicyChange",
    "RateControl",
    "Referee",
    "RefereeOptions",
    "Replay",
    "ReplaySide",
    "Replayed",
    "RuleRow",
    "RunLine",
    "RunSet",
    "RunSetPoint",
    "RunStanding",
    "SWEEP",
    "ScalingPoint",
    "Standing",
    "SweepReport",
    "Teacher",
    "TopTokens",
    "UNITS",
    "Value",
    "advise",
    "as_format",
    "build_report",
    "calibration_format",
    "calibration_of_run",
    "calibration_of_scores",
    "compare",
    "export_run",
    "is_running",
    "judge_pilot",
    "list_runs",
    "load_run_set",
    "pilot_lines",
    "read_results",
    "read_sweep",
    "referee",
    "referee_run",
    "render",
    "render_calibration",
    "render_sweep",
    "replay_policy",
    "replay_run",
    "save_calibration",
    "save_report",
    "save_run_set",
    "save_sharing",
    "shown_score",
    "standing_of",
    "sweep_lines",
]
