"""Follow a run while it happens: `async with atts.evaluate(...) as run` and `async for event in
run`.

Leaving the block early cancels the run; a cancelled run that has a directory can be resumed.

    python examples/stream_events.py
"""

from collections import Counter

import anyio

import atts
from atts.journal import Graded, OutcomeReached, TurnFinished
from atts.testing import toy_problems


async def main() -> None:
    """Print each verdict when its problem is finished, and at the end the numbers of accepted and
    escalated chunks.
    """
    chunks = Counter[str]()
    setup = atts.Setup(draft="scripted", target="scripted", rate=0.3, policy=atts.Policy(samples=4))
    async with atts.evaluate(toy_problems(6), setup) as run:
        async for event in run:
            match event:
                case TurnFinished(turn=turn) if turn.decision is not None:
                    chunks[turn.decision.action] += 1
                case Graded(sample=None):
                    print(f"{event.problem}: {event.answer} is {event.status}")
                case OutcomeReached(status="failed"):
                    print(f"{event.problem} failed: {event.why}")
                case _:
                    pass
        result = await run.result()
    print(
        f"{result.status}: {chunks['accept']} chunks accepted, {chunks['escalate']} escalated to "
        f"the target"
    )


if __name__ == "__main__":
    anyio.run(main)
