"""The whole method in one file: parallel draft rollouts, target scores, a conformal gate, a vote.

A small model (the draft) writes every rollout chunk by chunk. A large model (the target) only
scores each chunk, with one forward pass over the finished text. A conformal test ranks the score
among all earlier scores; the worst `rate` of all chunks are discarded and written again by the
target. No rollout ever waits for another rollout, so every engine stays busy. The rollouts vote on
the answer.

`atts.pipelines` and `atts.calibration` do the same as this file, and add what a real evaluation
needs: other gates and scores, pairs of tokenizers, limits, retries, resumption, reports. The tests
check that both give the same outcomes.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import anyio

from atts.core import (
    Completion,
    Message,
    Problem,
    Role,
    SampleRequest,
    Sampling,
    ScoreRequest,
    TokenIds,
)
from atts.engine import Engine
from atts.sampling import Seed

Extract = Callable[[str], str | None]
"""A function that returns the final answer of a text, or None if there is no answer yet."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the method. `rate` is the share of chunks that are escalated to the target."""

    rate: float = 0.2  # 1 - alpha in the paper
    samples: int = 4  # number of rollouts per problem
    turns: int = 15  # maximum number of chunks per rollout
    chunk_tokens: int = 64
    max_tokens: int = 512  # maximum number of tokens per rollout
    stop: tuple[str, ...] = ("\n\n",)  # strings that end a chunk
    sampling: Sampling = Sampling(temperature=0.7)
    system: str = "Solve the problem step by step. Put the final answer in \\boxed{}."
    step: float = 0.004  # change of the calibrator's level per decision
    seed: int = 0


@dataclass(slots=True)
class Calibrator:
    """An online conformal calibrator, which escalates the worst `rate` of scores, whatever their
    distribution.

    The p-value of a score is its rank among the stored scores, with ties broken by a coin. If
    scores are exchangeable, the p-value is uniform, so escalating if p > 1 - rate escalates exactly
    the share `rate`. Real scores drift with the turn and cluster by problem. Every decision
    therefore moves the level: down after an escalation, up after an accepted chunk (adaptive
    conformal inference).
    """

    rate: float
    step: float
    seed: int = 0
    # all scores so far, in ascending order
    scores: list[float] = field(default_factory=list[float])
    level: float = math.nan

    def __post_init__(self) -> None:
        self.level = self.rate

    def p_value(self, score: float, coin: float) -> float:
        """Return a number near 1 for a score that is worse than the stored scores.

        The formula is (below + coin * (1 + equal)) / (stored + 1).
        """
        below = bisect_left(self.scores, score)
        not_above = bisect_right(self.scores, score)
        return (below + coin * (1 + not_above - below)) / (len(self.scores) + 1)

    def escalates(self, score: float, problem: str, turn: int, sample: int) -> bool:
        """Return whether to escalate the chunk, and store the chunk's score."""
        p = self.p_value(score, self._coin(score, problem, turn, sample))
        escalate = self.level >= 1 or (self.level > 0 and p > 1 - self.level)
        self.level += self.step * (self.rate - escalate)
        insort(self.scores, score)
        return escalate

    def _coin(self, score: float, problem: str, turn: int, sample: int) -> float:
        """Return a pseudorandom number in [0, 1), the same for this chunk in a repeated run."""
        name = f"{self.seed}\x1f{problem}\x1f{turn}\x1f{sample}\x1f{math.log(score)!r}"
        return int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big") * 2.0**-56


@dataclass(slots=True)
class Rollout:
    """One attempt at a problem. It stores the generated tokens, because tokenizing a text again may
    give other tokens.
    """

    sample: int
    text: str = ""
    ids: TokenIds = ()  # token ids without the prompt
    answer: str | None = None
    judged: int = 0  # number of the draft's chunks that were judged
    escalated: int = 0  # number of chunks that the target wrote again


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer to one problem, and the problem's rollouts."""

    answer: str | None
    votes: Counter[str]
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class NanoATTS:
    """A draft and a target, with a calibrator for all rollouts and a function that finds answers."""

    draft: Engine
    target: Engine
    calibrator: Calibrator
    extract: Extract
    settings: Settings = Settings()

    async def solve_all(self, problems: Sequence[Problem], at_once: int = 64) -> list[Solution]:
        """Solve all problems with `at_once` rollouts in flight; no rollout waits for a sibling."""
        admission = anyio.CapacityLimiter(at_once)
        rollouts = [[Rollout(sample) for sample in range(self.settings.samples)] for _ in problems]

        async def run(problem: Problem, rollout: Rollout) -> None:
            async with admission:
                await self.run(problem, rollout)

        async with anyio.create_task_group() as group:
            for problem, siblings in zip(problems, rollouts, strict=True):
                for rollout in siblings:
                    group.start_soon(run, problem, rollout)
        return [vote(siblings) for siblings in rollouts]

    async def run(self, problem: Problem, rollout: Rollout) -> None:
        """Run a rollout's turns: the draft proposes, the target scores, the calibrator decides.

        An escalated chunk is discarded, and the target writes its replacement.
        """
        prompt = self.draft.tokenizer.render(
            [Message("system", self.settings.system), Message("user", problem.text)]
        )
        for turn in range(self.settings.turns):
            room = self.settings.max_tokens - len(rollout.ids)
            if room < 1:
                return
            chunk = await self.write("draft", problem, rollout, prompt, turn)
            rollout.judged += 1
            if await self.rejects(chunk, problem, rollout, prompt, turn):
                rollout.escalated += 1
                chunk = await self.write("target", problem, rollout, prompt, turn)
            rollout.ids += body(chunk, self.draft)
            rollout.text += chunk.text
            rollout.answer = self.answer(rollout.text, chunk)
            if rollout.answer is not None or chunk.ended == "end":
                return

    async def write(
        self, role: Role, problem: Problem, rollout: Rollout, prompt: TokenIds, turn: int
    ) -> Completion:
        """Write the next chunk of the rollout. Its random numbers depend only on its position."""
        settings = self.settings
        engine = self.draft if role == "draft" else self.target
        room = min(settings.chunk_tokens, settings.max_tokens - len(rollout.ids))
        seed = Seed(settings.seed, problem.id, rollout.sample, turn, role)
        return await engine.sample(
            SampleRequest(prompt + rollout.ids, room, settings.sampling, seed, settings.stop)
        )

    async def rejects(
        self, chunk: Completion, problem: Problem, rollout: Rollout, prompt: TokenIds, turn: int
    ) -> bool:
        """Score the chunk by the target's perplexity, and return True if the chunk is escalated.
        The score needs one prefill.
        """
        suffix = body(chunk, self.draft)
        if not suffix:
            return True  # an empty chunk has no score, so the target writes the chunk
        scores = await self.target.score(ScoreRequest(prompt + rollout.ids, suffix))
        # rounded, because the last digits of a sum of floats depend on the batch
        score = float(f"{max(1.0, scores.perplexity):.5g}")
        return self.calibrator.escalates(score, problem.id, turn, rollout.sample)

    def answer(self, text: str, last: Completion) -> str | None:
        """Return the answer in the text, or None if more text may change it.

        A chunk that was cut at its token limit may end within a number. Its answer counts only if
        one more digit would not change it.
        """
        answer = self.extract(text)
        if answer is not None and last.ended == "length" and self.extract(text + "0") != answer:
            return None
        return answer


def body(chunk: Completion, engine: Engine) -> TokenIds:
    """Return the token ids of a chunk without the end token."""
    is_ended = chunk.ended == "end" and chunk.ids and chunk.ids[-1] in engine.spec.end_ids
    return chunk.ids[:-1] if is_ended else chunk.ids


def vote(rollouts: Sequence[Rollout]) -> Solution:
    """Return the answer with the most votes; a tie goes to the answer that came first."""
    votes = Counter(rollout.answer for rollout in rollouts if rollout.answer is not None)
    winner = votes.most_common(1)[0][0] if votes else None
    return Solution(winner, votes, tuple(rollouts))


async def main() -> None:
    """Solve eight problems of the toy language; engines with real models work in the same way."""
    from atts.testing import ScriptedEngine, toy_answer, toy_problems

    problems = toy_problems(8, seed=1)
    settings = Settings(chunk_tokens=12, stop=())
    async with ScriptedEngine("draft") as draft, ScriptedEngine("target") as target:
        nano = NanoATTS(
            draft, target, Calibrator(settings.rate, settings.step), toy_answer, settings
        )
        solutions = await nano.solve_all(problems)
    rollouts = [rollout for solution in solutions for rollout in solution.rollouts]
    escalated = sum(r.escalated for r in rollouts)
    judged = sum(r.judged for r in rollouts)
    correct = sum(
        s.answer == problem.answer for s, problem in zip(solutions, problems, strict=True)
    )
    print(f"{correct} of {len(problems)} correct; {escalated} of {judged} chunks escalated")


if __name__ == "__main__":
    anyio.run(main)
