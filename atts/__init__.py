"""Asynchronous test-time scaling of LLM reasoning, with conformal control of the share of chunks
that the large model writes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atts.api import (
        Session,
        Setup,
        SyncSession,
        calibrate,
        calibrate_sync,
        combine,
        combine_sync,
        compare,
        configure,
        evaluate,
        evaluate_sync,
        merge,
        pilot,
        pilot_sync,
        plan,
        replay,
        report,
        solve,
        solve_sync,
        sweep,
        sweep_sync,
        trace,
    )
    from atts.core import (
        Completion,
        Decision,
        Outcome,
        Problem,
        Rollout,
        SampleRequest,
        Sampling,
        ScoreRequest,
        Scores,
    )
    from atts.engine import Engine, EngineSpec
    from atts.errors import ATTSError
    from atts.pipelines import Policy
    from atts.run import RunResult
    from atts.sampling import Seed

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
    "Session",
    "Setup",
    "SyncSession",
    "calibrate",
    "calibrate_sync",
    "combine",
    "combine_sync",
    "compare",
    "configure",
    "evaluate",
    "evaluate_sync",
    "merge",
    "pilot",
    "pilot_sync",
    "plan",
    "replay",
    "report",
    "solve",
    "solve_sync",
    "sweep",
    "sweep_sync",
    "trace",
]

_NAMES = {
    "atts.api": "Session Setup SyncSession calibrate calibrate_sync combine combine_sync compare configure evaluate "
    "evaluate_sync merge "
    "pilot pilot_sync plan replay report solve solve_sync sweep sweep_sync trace",
    "atts.core": "Completion Decision Outcome Problem Rollout SampleRequest Sampling ScoreRequest "
    "Scores",
    "atts.engine": "Engine EngineSpec",
    "atts.errors": "ATTSError",
    "atts.pipelines": "Policy",
    "atts.run": "RunResult",
    "atts.sampling": "Seed",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name's module when the name is first used, so that `import atts` is fast."""
    if name not in _HOME:
        raise AttributeError(f"module 'atts' has no attribute {name!r}")
    # imported here, because atts.concurrency imports anyio, which takes long to import
    from atts.concurrency import import_lock

    with import_lock:
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
