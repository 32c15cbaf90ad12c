"""The public functions and `Setup`, for programs that solve or evaluate problems, calibrate a gate,
or analyse recorded runs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atts.api.calibrating import (
    RATE_OF_FILES,
    calibrate,
    calibrate_sync,
    calibration_report,
    calibrator_of,
    certify,
    compare,
    judge_of,
    merge,
    plan,
    replay,
    report,
    scores_of,
    stored_scores,
    trace,
)
from atts.api.config import Configuration, Job, config_keys, configure
from atts.api.engines import build_engine, build_engines
from atts.api.evaluation import (
    Session,
    SyncSession,
    check_resumes,
    combine,
    combine_sync,
    evaluate,
    evaluate_sync,
    solve,
    solve_sync,
)
from atts.api.pairs import (
    CARDS,
    USUAL_CARDS,
    GpuPlacement,
    LocalPlacement,
    Pair,
    find_pair,
    gpu_placement,
    known_pairs,
    local_placement,
)
from atts.api.preflight import Check, Diagnosis, DryRun, Tokens, diagnose, dry_run, write_settings
from atts.api.setup import Setup, answers_for, load_problems
from atts.concurrency import import_lock

if TYPE_CHECKING:
    from atts.api.answer_judge import judge_unscored, read_judge_prompt
    from atts.api.block_comparison import ComparedBlocks, MeasuredPair, compare_blocks
    from atts.api.sweeping import (
        PilotEnd,
        Sweep,
        SweepEnd,
        SweepPoint,
        pilot,
        pilot_sync,
        plan_sweep,
        run_pilot,
        run_sweep,
        sweep,
        sweep_sync,
    )
    from atts.api.teachers import open_teacher
    from atts.api.tuning import TuneAdvice, tune

__all__ = [
    "CARDS",
    "Check",
    "ComparedBlocks",
    "Configuration",
    "Diagnosis",
    "DryRun",
    "GpuPlacement",
    "Job",
    "LocalPlacement",
    "MeasuredPair",
    "Pair",
    "PilotEnd",
    "RATE_OF_FILES",
    "Session",
    "Setup",
    "Sweep",
    "SweepEnd",
    "SweepPoint",
    "SyncSession",
    "Tokens",
    "TuneAdvice",
    "USUAL_CARDS",
    "answers_for",
    "build_engine",
    "build_engines",
    "calibrate",
    "calibrate_sync",
    "calibration_report",
    "calibrator_of",
    "certify",
    "check_resumes",
    "combine",
    "combine_sync",
    "compare",
    "compare_blocks",
    "config_keys",
    "configure",
    "diagnose",
    "dry_run",
    "evaluate",
    "evaluate_sync",
    "find_pair",
    "gpu_placement",
    "judge_unscored",
    "known_pairs",
    "load_problems",
    "local_placement",
    "merge",
    "open_teacher",
    "pilot",
    "pilot_sync",
    "plan",
    "plan_sweep",
    "read_judge_prompt",
    "replay",
    "report",
    "run_pilot",
    "run_sweep",
    "scores_of",
    "solve",
    "solve_sync",
    "judge_of",
    "stored_scores",
    "sweep",
    "sweep_sync",
    "trace",
    "tune",
    "write_settings",
]

# These names are imported when they are first used, because their modules are slow to import
# (reports, local models) and few programs need them.
_NAMES = {
    "atts.api.answer_judge": "judge_unscored read_judge_prompt",
    "atts.api.block_comparison": "ComparedBlocks MeasuredPair compare_blocks",
    "atts.api.teachers": "open_teacher",
    "atts.api.tuning": "TuneAdvice tune",
    "atts.api.sweeping": "PilotEnd Sweep SweepEnd SweepPoint pilot pilot_sync plan_sweep run_pilot "
    "run_sweep sweep sweep_sync",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a rarely used name, or a name that loads slow modules, when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'atts.api' has no attribute {name!r}")
    with import_lock:
        return getattr(import_module(_HOME[name]), name)
