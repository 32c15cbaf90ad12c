"""How fast the engines were, and what chunks of another length would change about the time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from atts.analysis.plan.recorded import PlanData, TurnCost
from atts.core import Chunk, Rollout


@dataclass(frozen=True, slots=True)
class Speed:
    """One engine as measured: tokens per second while it had work, all calls together."""

    engine: str
    calls: int
    seconds_per_call: float  # its queue not included
    busy_seconds: float
    written_per_second: float
    scored_per_second: float


@dataclass(frozen=True, slots=True)
class ChunkChoice:
    """Another chunk limit: turns and seconds of a rollout as factors of the recorded ones."""

    limit: int
    turns: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ChunkAdvice:
    """What the draft's chunk limit does to time; to accuracy, only a run of its own can tell.

    `cut` is the share of chunks that the limit ended, `fixed` the part of a rollout's seconds that turns cost however
    short they are, by least squares over turns; `fit` is the share of the variance which that explains.
    """

    limit: int
    cut: float
    fixed: float
    fit: float
    choices: tuple[ChunkChoice, ...]


def speeds(data: PlanData) -> tuple[Speed, ...]:
    """Every engine that was called."""
    spans: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
    for session, node in data.nodes:
        if node.engine:
            spans[node.engine].append((session, node.started, node.ended))
    written = {"draft": data.usage.draft_tokens, "target": data.usage.target_tokens}
    scored = data.usage.scored_tokens
    found = list[Speed]()
    for engine, held in sorted(spans.items()):
        busy = _union(held)
        own = math.fsum(end - start for _, start, end in held)
        per_second = (
            (written.get(engine, 0) / busy, (scored if engine == "target" else 0) / busy) if busy else (0.0, 0.0)
        )
        found.append(Speed(engine, len(held), own / len(held), busy, *per_second))
    return tuple(found)


def chunk_advice(data: PlanData) -> ChunkAdvice | None:
    """About the draft's chunk limit; None where the draft wrote nothing."""
    limit = data.policy("chunking", "draft_tokens")
    chunks = [chunk for one in data.outcomes for line in one.rollouts for chunk in _drafted(line)]
    steps = [step for case in data.cases for rollout in case.rollouts for step in rollout.turns]
    if not isinstance(limit, int) or not chunks or not steps:
        return None
    per_turn, fit = _fixed_seconds(steps)
    total = math.fsum(step.seconds for step in steps)
    fixed = min(1.0, per_turn * len(steps) / total) if total else 0.0
    lengths = [length for one in data.outcomes for line in one.rollouts for length in _natural(_drafted(line))]
    now = sum(math.ceil(length / limit) for length in lengths)
    choices = list[ChunkChoice]()
    for other in (limit // 4, limit // 2, limit * 2, limit * 4):
        if other:
            turns = sum(math.ceil(length / other) for length in lengths) / now
            choices.append(ChunkChoice(other, turns, 1 + fixed * (turns - 1)))
    return ChunkAdvice(
        limit, sum(chunk.ended == "length" for chunk in chunks) / len(chunks), fixed, fit, tuple(choices)
    )


def _union(spans: Iterable[tuple[int, float, float]]) -> float:
    """Seconds covered by at least one span, sessions apart."""
    total, latest = 0.0, (-1, 0.0)
    for session, start, end in sorted(spans):
        begin = max(start, latest[1]) if session == latest[0] else start
        total += max(0.0, end - begin)
        latest = (session, max(end, latest[1]) if session == latest[0] else end)
    return total


def _drafted(line: Rollout) -> list[Chunk]:
    return [chunk for turn in line.turns for chunk in turn.chunks if chunk.author == "draft" and chunk.logprobs]


def _natural(chunks: Sequence[Chunk]) -> Iterator[int]:
    """Lengths of the steps the draft would have written uncut: pieces that a limit ended belong to what follows."""
    held = 0
    for chunk in chunks:
        held += len(chunk.logprobs)
        if chunk.ended != "length":
            yield held
            held = 0
    if held:
        yield held


def _fixed_seconds(steps: Sequence[TurnCost]) -> tuple[float, float]:
    """Seconds of a turn without any token, and how well a straight line in the tokens tells the seconds."""
    seconds = np.array([step.seconds for step in steps])
    table = np.array([(1.0, step.draft_tokens, step.target_tokens) for step in steps])
    found, *_ = np.linalg.lstsq(table, seconds, rcond=None)
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    left = float(((seconds - table @ found) ** 2).sum())
    return max(0.0, float(found[0])), max(0.0, 1 - left / spread) if spread else 0.0
