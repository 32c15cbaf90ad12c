"""The public verbs; alone knows which engines exist and builds them."""

from atts.api.comparing import compare
from atts.api.config import Configuration, Job, configure
from atts.api.engines import SCHEMES, build_engine
from atts.api.evaluation import evaluate, evaluate_sync, solve, solve_sync
from atts.api.forecasting import Forecast, forecast
from atts.api.planning import plan
from atts.api.reporting import report
from atts.api.setup import Setup, answers_for, load_problems

__all__ = [
    "SCHEMES",
    "Configuration",
    "Forecast",
    "Job",
    "Setup",
    "answers_for",
    "build_engine",
    "compare",
    "configure",
    "evaluate",
    "evaluate_sync",
    "forecast",
    "load_problems",
    "plan",
    "report",
    "solve",
    "solve_sync",
]
