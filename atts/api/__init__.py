"""The public verbs; alone knows which engines exist and builds them."""

from atts.api.engines import SCHEMES, build_engine
from atts.api.evaluation import evaluate, evaluate_sync, solve, solve_sync
from atts.api.reporting import report
from atts.api.setup import Setup, answers_for, load_problems

__all__ = [
    "SCHEMES",
    "Setup",
    "answers_for",
    "build_engine",
    "evaluate",
    "evaluate_sync",
    "load_problems",
    "report",
    "solve",
    "solve_sync",
]
