"""One evaluation: dataset x pipeline x engines x journal x listeners, resumable at any moment.

    plan = Plan(draft, target, Policy(samples=8), ConformalGate(Calibrator(0.2)), Answers(extract, group), grade)
    result = await evaluate(problems, plan, RunOptions(Path("runs/first")))

Call it again with the same directory and it goes on where it was, whatever ended it.
"""

from atts.run.abstaining import Abstain, Answered, answered
from atts.run.calls import (
    EngineCalls,
    RecallTiming,
    SharingEngine,
    check_completion,
    check_scores,
)
from atts.run.conditions import Conditions, check_conditions, conditions_of, read_conditions
from atts.run.evaluate import Keep, RunOptions, evaluate
from atts.run.merging import Merged, Shard, merge
from atts.run.plan import Grade, Judgement, Pipeline, Plan
from atts.run.progress import Progress, ProgressSnapshot
from atts.run.recorded_gates import replay_event
from atts.run.recorder import (
    CallBegun,
    CallKind,
    ChunkWritten,
    EngineAwaited,
    Listener,
    Notice,
    Recorder,
    RunBegun,
)
from atts.run.result import INTERRUPTED, RunResult, RunStatus
from atts.run.stop_when import StopWhen
from atts.run.stopping import Signals, Stop
from atts.run.summary import Summary

__all__ = [
    "INTERRUPTED",
    "Abstain",
    "Answered",
    "CallBegun",
    "CallKind",
    "EngineCalls",
    "check_completion",
    "check_scores",
    "EngineAwaited",
    "ChunkWritten",
    "Conditions",
    "Grade",
    "Notice",
    "Judgement",
    "Keep",
    "Listener",
    "Merged",
    "RecallTiming",
    "Pipeline",
    "Plan",
    "Progress",
    "Recorder",
    "RunBegun",
    "RunResult",
    "RunStatus",
    "RunOptions",
    "Shard",
    "SharingEngine",
    "Signals",
    "ProgressSnapshot",
    "Stop",
    "Summary",
    "StopWhen",
    "answered",
    "check_conditions",
    "conditions_of",
    "evaluate",
    "merge",
    "read_conditions",
    "replay_event",
]
