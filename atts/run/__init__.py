"""One evaluation: dataset x pipeline x engines x journal x listeners, resumable at any moment.

    spec = RunSpec(draft, target, Policy(samples=8), ConformalGate(Calibrator(0.2)), Answers(extract, group), grade)
    result = await evaluate(problems, spec, RunOptions(Path("runs/first")))

A second call with the same directory continues the run, whatever ended it.
"""

from atts.run.calls import (
    EngineCalls,
    OnUnscored,
    SharingEngine,
    check_completion,
    check_scores,
    request_key,
)
from atts.run.conditions import (
    Abstain,
    Answered,
    Conditions,
    answered,
    check_conditions,
    conditions_of,
    read_conditions,
)
from atts.run.evaluation import Keep, RunOptions, evaluate
from atts.run.merging import Merged, Shard, merge
from atts.run.progress import Progress, ProgressSnapshot
from atts.run.recording import (
    CLOSING_SECONDS,
    Background,
    CallBegun,
    CallKind,
    ChunkWritten,
    EngineAwaited,
    EscalationCounter,
    Listener,
    Notice,
    RecallTiming,
    Recorder,
    RunBegun,
    RunEnded,
    RunLengthEstimate,
    replay_event,
)
from atts.run.result import INTERRUPTED, RunResult, RunStatus, Summary
from atts.run.spec import Grade, Judgement, Pipeline, RunSpec
from atts.run.stopping import Signals, Stop, StopWhen, watch_signals
from atts.run.trackers import ClosableListener, check_logs, open_logs

__all__ = [
    "Abstain",
    "Answered",
    "Background",
    "CLOSING_SECONDS",
    "CallBegun",
    "CallKind",
    "ChunkWritten",
    "ClosableListener",
    "Conditions",
    "EngineAwaited",
    "EngineCalls",
    "EscalationCounter",
    "Grade",
    "INTERRUPTED",
    "Judgement",
    "Keep",
    "Listener",
    "Merged",
    "Notice",
    "OnUnscored",
    "Pipeline",
    "Progress",
    "ProgressSnapshot",
    "RecallTiming",
    "Recorder",
    "RunBegun",
    "RunEnded",
    "RunLengthEstimate",
    "RunOptions",
    "RunResult",
    "RunSpec",
    "RunStatus",
    "Shard",
    "SharingEngine",
    "Signals",
    "Stop",
    "StopWhen",
    "Summary",
    "answered",
    "check_completion",
    "check_conditions",
    "check_logs",
    "check_scores",
    "conditions_of",
    "evaluate",
    "merge",
    "open_logs",
    "read_conditions",
    "replay_event",
    "request_key",
    "watch_signals",
]
