"""The task graph, in which rollouts are ordinary async functions, and their engine calls are nodes
with limits.

    graph = Graph(
        rollouts=64,                                                  # in flight over all problems
        limits={"draft": Limit(slots=16), "target": Limit(slots=4, tokens=200_000)},
        sink=journal_or_recording,                                    # gets every node and span as it ends
    )

    async def solve(problem: Problem, scope: ProblemScope) -> Outcome:
        async def rollout(line: RolloutScope[Rollout]) -> Rollout:    # one per sample, line.sample says which
            for turn in range(10):
                chunk = await line.call("draft", draft.sample, request, turn=turn, tokens=len(ids) + 500)
                score = await line.call("score", target.score, request, engine="target", turn=turn)
                if gate(score).escalate:
                    await line.call("escalate", target.sample, request, engine="target", turn=turn)
                line.save(state)                                      # what a cancelled rollout leaves behind
            return state

        results = await scope.rollouts(rollout, 16, settle=vote)      # ordered; vote(result) is true: cancel the others
        return conclude(results)                                      # each has status, value, error, why

    outcomes = await graph.run(problems, solve)                       # ordered as the problems, opened lazily
    graph.stats().busy_share("target"), graph.stop("budget"), scope.cancel("why")

Free slots go to the waiting rollouts, those of earlier problems first. The next problem is opened
when no rollout waits. The `RetryPolicy` decides whether a failed call is repeated. A failed rollout
is recorded, and the other rollouts continue. Within one rollout, calls may run concurrently
(`atts.concurrency.collect`).

The top-B baselines need rounds, in which rollouts wait for each other. With `scope.rollouts(...,
admit="together")`, all samples start at once, and give back their slots together. Each rollout ends
a round by `values = await line.meet(mine)`, which returns the values of all rollouts.

`measure` and `write_trace` read nodes (`CallSpan`) of a running graph or from a journal.
"""

from atts.core import CallSpan
from atts.graph.graph import (
    Admit,
    Arrival,
    Caller,
    Graph,
    Limit,
    ProblemResult,
    ProblemScope,
    RetryPolicy,
    RolloutResult,
    RolloutScope,
    Sink,
)
from atts.graph.timing import Timing, measure, sibling_edges, trace_events, write_trace

__all__ = [
    "Admit",
    "Arrival",
    "CallSpan",
    "Caller",
    "Graph",
    "Limit",
    "ProblemResult",
    "ProblemScope",
    "RetryPolicy",
    "RolloutResult",
    "RolloutScope",
    "Sink",
    "Timing",
    "measure",
    "sibling_edges",
    "trace_events",
    "write_trace",
]
