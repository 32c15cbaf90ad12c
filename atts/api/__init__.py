"""The public verbs and `Setup`: solve, evaluate, calibrate, and everything over recorded runs."""

from atts.api.calibrating import (
    RATE_OF_FILES,
    calibrate,
    calibrate_sync,
    calibration_report,
    calibrator_of,
    scores_of,
    stored_scores,
)
from atts.api.config import Configuration, Job, config_keys, configure
from atts.api.doctor import Check, Diagnosis, diagnose, write_settings
from atts.api.engines import SCHEMES, build_engine, build_engines
from atts.api.estimate import DryRun, Tokens, dry_run
from atts.api.evaluation import Session, SyncSession, evaluate, evaluate_sync, solve, solve_sync
from atts.api.pairs import Pair, find_pair, known_pairs
from atts.api.placement import CARDS, Placement, place
from atts.api.recorded import certify, compare, merge, plan, replay, report, trace
from atts.api.setup import Setup, answers_for, load_problems
from atts.api.standing_in import ComparedBlocks, MeasuredPair, compare_blocks
from atts.api.sweeping import Sweep, SweepEnd, SweepPoint, plan_sweep, run_sweep, sweep, sweep_sync

__all__ = [
    "CARDS",
    "Check",
    "ComparedBlocks",
    "Configuration",
    "Diagnosis",
    "DryRun",
    "Job",
    "MeasuredPair",
    "Pair",
    "Placement",
    "RATE_OF_FILES",
    "SCHEMES",
    "Session",
    "Setup",
    "Sweep",
    "SweepEnd",
    "SweepPoint",
    "SyncSession",
    "Tokens",
    "answers_for",
    "build_engine",
    "build_engines",
    "calibrate",
    "calibrate_sync",
    "calibration_report",
    "calibrator_of",
    "certify",
    "compare",
    "compare_blocks",
    "config_keys",
    "configure",
    "diagnose",
    "dry_run",
    "evaluate",
    "evaluate_sync",
    "find_pair",
    "known_pairs",
    "load_problems",
    "merge",
    "place",
    "plan",
    "plan_sweep",
    "replay",
    "report",
    "run_sweep",
    "scores_of",
    "solve",
    "solve_sync",
    "stored_scores",
    "sweep",
    "sweep_sync",
    "trace",
    "write_settings",
]
