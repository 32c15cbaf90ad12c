"""The whole method in one file: parallel draft rollouts, target scores, a conformal gate, a vote.

A small model (the draft) writes every rollout chunk by chunk. A large one (the target) only scores
each chunk: one forward pass over text that is already there. A conformal test ranks the score among
those seen so far; the worst `rate` of all chunks are thrown away and written again by the target.
No rollout ever waits for another, so every engine stays busy. Answers are voted.

`atts.pipelines` and `atts.calibration` are this file with what a real evaluation needs: other gates
and scores, pairs of tokenizers, limits, retries, resumption, reports. The tests hold both to the
same outcomes.
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
"""A function that returns the final answer of a reasoning text, or None while there is none."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the method. `rate` is the share of chunks that the target takes over."""

    rate: float = 0.2  # the paper's 1 - alpha
    samples: int = 4  # rollouts of a problem
    turns: int = 15  # most chunks of a rollout
    chunk_tokens: int = 64
    max_tokens: int = 512  # most tokens of a rollout
    stop: tuple[str, ...] = ("\n\n",)  # where a chunk ends
    sampling: Sampling = Sampling(temperature=0.7)
    system: str = "Solve the problem step by step. Put the final answer in \\boxed{}."
    step: float = 0.004  # how far one decision moves the calibrator's level
    seed: int = 0


@dataclass(slots=True)
class Calibrator:
    """Online conformal calibration: it escalates the worst `rate` of scores, whatever their
    distribution.

    The p-value of a score is its rank among the stored ones, with ties broken by a coin. While
    scores are exchangeable it is uniform, so escalating p > 1 - rate escalates exactly `rate`. Real
    scores drift with the turn and cluster by problem. Every decision therefore moves the level:
    down after an escalation, up after an accepted chunk (adaptive conformal inference).
    """

    rate: float
    step: float
    seed: int = 0
    scores: list[float] = field(default_factory=list[float])  # in order
    level: float = math.nan

    def __post_init__(self) -> None:
        self.level = self.rate

    def p_value(self, score: float, coin: float) -> float:
        """Return a number near 1 for a score worse than the stored ones.

        It is (below + coin * (1 + equal)) / (stored + 1).
        """
        below = bisect_left(self.scores, score)
        not_above = bisect_right(self.scores, score)
        return (below + coin * (1 + not_above - below)) / (len(self.scores) + 1)

    def escalates(self, score: float, problem: str, turn: int, sample: int) -> bool:
        """Return whether the target takes the chunk over; its score counts from now on."""
        p = self.p_value(score, self._coin(score, problem, turn, sample))
        escalate = self.level >= 1 or (self.level > 0 and p > 1 - self.level)
        self.level += self.step * (self.rate - escalate)
        insort(self.scores, score)
        return escalate

    def _coin(self, score: float, problem: str, turn: int, sample: int) -> float:
        """Return a uniform number made from the chunk's name, so a repeated run decides the same."""
        name = f"{self.seed}\x1f{problem}\x1f{turn}\x1f{sample}\x1f{math.log(score)!r}"
        return int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big") * 2.0**-56


@dataclass(slots=True)
class Rollout:
    """One line of reasoning: exactly the tokens that were generated, never re-tokenised text."""

    sample: int
    text: str = ""
    ids: TokenIds = ()  # without the prompt
    answer: str | None = None
    judged: int = 0  # chunks of the draft that were judged
    escalated: int = 0  # chunks that the target rewrote


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer to one problem, and the rollouts it comes from."""

    answer: str | None
    votes: Counter[str]
    rollouts: tuple[Rollout, ...]


@dataclass(frozen=True, slots=True)
class NanoATTS:
    """The pair of models, the calibrator they share, and a way to find answers."""

    draft: Engine
    target: Engine
    calibrator: Calibrator
    extract: Extract
    settings: Settings = Settings()

    async def solve_all(self, problems: Sequence[Problem], at_once: int = 64) -> list[Solution]:
        """Solve all problems, `at_once` rollouts at any time; none waits for a sibling."""
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
        """Take turns: the draft proposes, the target scores, the calibrator decides.

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
        """Write one chunk after the rollout, with random numbers that belong to its position."""
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
        """Judge the chunk by the rank of the target's perplexity, which takes one prefill, among
        all earlier ones.
        """
        suffix = body(chunk, self.draft)
        if not suffix:
            return True  # an empty chunk has no score, so the target writes this one
        scores = await self.target.score(ScoreRequest(prompt + rollout.ids, suffix))
        # rounded, because the last digits of a float sum depend on the batch it was computed in
        score = float(f"{max(1.0, scores.perplexity):.5g}")
        return self.calibrator.escalates(score, problem.id, turn, rollout.sample)

    def answer(self, text: str, last: Completion) -> str | None:
        """Return the answer in the text, or None while it may still change.

        A chunk that was cut at its token limit may end within a number. Its answer counts only if
        another digit after the text would not change it.
        """
        answer = self.extract(text)
        if answer is not None and last.ended == "length" and self.extract(text + "0") != answer:
            return None
        return answer


def body(chunk: Completion, engine: Engine) -> TokenIds:
    """Return the ids without the end token."""
    is_ended = chunk.ended == "end" and chunk.ids and chunk.ids[-1] in engine.spec.end_ids
    return chunk.ids[:-1] if is_ended else chunk.ids


def vote(rollouts: Sequence[Rollout]) -> Solution:
    """Return the majority answer; a tie goes to the first answer."""
    votes = Counter(rollout.answer for rollout in rollouts if rollout.answer is not None)
    winner = votes.most_common(1)[0][0] if votes else None
    return Solution(winner, votes, tuple(rollouts))


async def main() -> None:
    """Solve eight problems of the toy language; engines on real models work just the same."""
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
