"""Speeds of the engines, and what another chunk length would change about the time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from atts.analysis.plan.plan_data import PlanData, TurnCost
from atts.analysis.turns import is_written
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

    `cut` is the share of chunks that the limit ended, `fixed` the part of a rollout's seconds that
    turns cost however short they are, by least squares over turns; `fit` is the share of the
    variance which that explains.
    """

    limit: int
    cut: float
    fixed: float
    fit: float
    choices: tuple[ChunkChoice, ...]


def speeds(data: PlanData) -> tuple[Speed, ...]:
    """Every engine that was called."""
    calls: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for node in data.nodes:
        if node.engine:
            calls[node.engine].append((node.started, node.ended))
    written = {"draft": data.usage.draft_tokens, "target": data.usage.target_tokens}
    scored = {"target": data.usage.scored_tokens}
    return tuple(
        _speed(engine, spans, written.get(engine, 0), scored.get(engine, 0))
        for engine, spans in sorted(calls.items())
    )


def _speed(engine: str, spans: Sequence[tuple[float, float]], written: int, scored: int) -> Speed:
    busy = _covered(spans)
    own = math.fsum(end - start for start, end in spans)
    per_second = (written / busy, scored / busy) if busy else (0.0, 0.0)
    return Speed(engine, len(spans), own / len(spans), busy, *per_second)


def chunk_advice(data: PlanData) -> ChunkAdvice | None:
    """About the draft's chunk limit; None where the draft wrote nothing."""
    limit = data.run.policy.get("chunking", {}).get("draft_tokens")
    drafted = [_drafted(rollout) for outcome in data.outcomes for rollout in outcome.rollouts]
    chunks = [chunk for own in drafted for chunk in own]
    turns = [turn for case in data.cases for rollout in case.rollouts for turn in rollout.turns]
    if not isinstance(limit, int) or not chunks or not turns:
        return None
    per_turn, fit = _fixed_seconds(turns)
    total = math.fsum(turn.seconds for turn in turns)
    fixed = min(1.0, per_turn * len(turns) / total) if total else 0.0
    lengths = [length for own in drafted for length in _uncut_lengths(own)]
    others = (limit // 4, limit // 2, limit * 2, limit * 4)
    choices = tuple(_choice(lengths, limit, other, fixed) for other in others if other)
    return ChunkAdvice(
        limit, sum(chunk.ended == "length" for chunk in chunks) / len(chunks), fixed, fit, choices
    )


def _choice(lengths: Sequence[int], limit: int, other: int, fixed: float) -> ChunkChoice:
    now, then = (sum(math.ceil(length / each) for length in lengths) for each in (limit, other))
    return ChunkChoice(other, then / now, 1 + fixed * (then / now - 1))


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds covered by at least one span."""
    total = 0.0
    latest = -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, latest))
        latest = max(end, latest)
    return total


def _drafted(rollout: Rollout) -> list[Chunk]:
    turns = ((turn, chunk) for turn in rollout.turns for chunk in turn.chunks)
    return [chunk for turn, chunk in turns if chunk.author == "draft" and is_written(turn, chunk)]


def _uncut_lengths(chunks: Sequence[Chunk]) -> Iterator[int]:
    """Lengths of the steps the draft would have written uncut: pieces that a limit ended belong to
    what follows.
    """
    length = 0
    for chunk in chunks:
        length += chunk.tokens
        if chunk.ended != "length":
            yield length
            length = 0
    if length:
        yield length


def _fixed_seconds(turns: Sequence[TurnCost]) -> tuple[float, float]:
    """Seconds of a turn without any token, and how well a straight line in the tokens tells the
    seconds.
    """
    seconds = np.array([turn.seconds for turn in turns])
    table = np.array([(1.0, turn.draft_tokens, turn.target_tokens) for turn in turns])
    found, *_ = np.linalg.lstsq(table, seconds, rcond=None)
    spread = float(((seconds - seconds.mean()) ** 2).sum())
    left = float(((seconds - table @ found) ** 2).sum())
    return max(0.0, float(found[0])), max(0.0, 1 - left / spread) if spread else 0.0
