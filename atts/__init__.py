"""Asynchronous test-time scaling of LLM reasoning, with conformal guarantees on who does the work."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atts.api import Setup as Setup
    from atts.api import calibrate as calibrate
    from atts.api import calibrate_sync as calibrate_sync
    from atts.api import compare as compare
    from atts.api import configure as configure
    from atts.api import evaluate as evaluate
    from atts.api import evaluate_sync as evaluate_sync
    from atts.api import merge as merge
    from atts.api import plan as plan
    from atts.api import replay as replay
    from atts.api import report as report
    from atts.api import solve as solve
    from atts.api import solve_sync as solve_sync
    from atts.api import trace as trace
    from atts.core import Completion as Completion
    from atts.core import Decision as Decision
    from atts.core import Outcome as Outcome
    from atts.core import Problem as Problem
    from atts.core import Rollout as Rollout
    from atts.core import SampleRequest as SampleRequest
    from atts.core import Sampling as Sampling
    from atts.core import ScoreRequest as ScoreRequest
    from atts.core import Scores as Scores
    from atts.engine import Engine as Engine
    from atts.engine import EngineSpec as EngineSpec
    from atts.errors import ATTSError as ATTSError
    from atts.pipelines import Policy as Policy
    from atts.run import RunResult as RunResult
    from atts.seeds import Seed as Seed

__all__ = [
    "ATTSError",
    "Completion",
    "Decision",
    "Engine",
    "EngineSpec",
    "Outcome",
    "Policy",
    "Problem",
    "Rollout",
    "RunResult",
    "SampleRequest",
    "Sampling",
    "ScoreRequest",
    "Scores",
    "Seed",
    "Setup",
    "calibrate",
    "calibrate_sync",
    "compare",
    "configure",
    "evaluate",
    "evaluate_sync",
    "merge",
    "plan",
    "replay",
    "report",
    "solve",
    "solve_sync",
    "trace",
]

_NAMES = {
    "atts.api": "Setup calibrate calibrate_sync compare configure evaluate evaluate_sync merge plan replay report "
    "solve solve_sync trace",
    "atts.core": "Completion Decision Outcome Problem Rollout SampleRequest Sampling ScoreRequest Scores",
    "atts.engine": "Engine EngineSpec",
    "atts.errors": "ATTSError",
    "atts.pipelines": "Policy",
    "atts.run": "RunResult",
    "atts.seeds": "Seed",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used, so that `import atts` stays light."""
    if name not in _HOME:
        raise AttributeError(f"module 'atts' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
