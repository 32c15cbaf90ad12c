"""Use your own engine: any object with `spec`, `tokenizer`, `sample`, `score` and `stats`."""

import anyio

import atts
from atts.core import Completion, SampleRequest, ScoreRequest, Scores
from atts.engine import EngineAround
from atts.testing import ScriptedEngine, check_engine, toy_problems


class CountingEngine(EngineAround):
    """A wrapper around an engine that adds up the cost; prices are per million tokens."""

    def __init__(self, engine: atts.Engine, written: float, read: float) -> None:
        super().__init__(engine, "own")
        self.prices = written, read
        self.cost = 0.0

    async def sample(self, request: SampleRequest) -> Completion:
        """Continue the token ids; tokens in the cache are not read again and cost nothing."""
        done = await super().sample(request)
        self.cost += (
            len(done.ids) * self.prices[0]
            + (len(request.ids) - done.cached_tokens) * self.prices[1]
        ) / 1e6
        return done

    async def score(self, request: ScoreRequest) -> Scores:
        """Score the suffix. This costs only the price of input tokens, as nothing is written."""
        done = await super().score(request)
        self.cost += (
            (len(request.prefix) + len(request.suffix) - done.cached_tokens) * self.prices[1] / 1e6
        )
        return done


async def main() -> None:
    """Run the conformance suite, then an evaluation, and print the cost of the evaluation."""
    report = await check_engine(lambda: CountingEngine(ScriptedEngine("target"), 8.0, 0.8))
    print(f"{len(report.results)} promises checked, {len(report.broken)} broken")
    draft = CountingEngine(ScriptedEngine("draft"), written=0.4, read=0.04)
    target = CountingEngine(ScriptedEngine("target"), written=8.0, read=0.8)
    result = await atts.evaluate(toy_problems(8), atts.Setup(draft=draft, target=target))
    print(
        f"{len(result.problems)} problems for ${draft.cost + target.cost:.4f}, of which the target "
        f"cost ${target.cost:.4f}"
    )


if __name__ == "__main__":
    anyio.run(main)
