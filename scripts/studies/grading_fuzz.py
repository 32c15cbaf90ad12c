"""Grades mutated answers by the million, in chunks that a killed run does not lose."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from scripts.studies.grading_corpus import corpus, mutated
from scripts.studies.harness import Cell, Table, say

CHUNK = 5_000


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one chunk of mutated answers showed; times are processor seconds."""

    index: int
    pairs: int
    equal: int
    different: int
    unscored: int
    crashes: int
    over_limit: int
    slowest: float
    total: float
    worst: str
    crash: str


def fuzz(pairs: int, seed: int, out: Path | None, limit_seconds: float = 1.0) -> Table:
    """Grade `pairs` mutated answers against the answers they were made from."""
    known = corpus()
    done = _done(out, seed)
    for index in range(-(-pairs // CHUNK)):
        if index not in done:
            done[index] = _chunk(index, min(CHUNK, pairs - index * CHUNK), seed, known, limit_seconds)
            _keep(out, seed, done[index])
            say(f"fuzz: chunk {index + 1}: {done[index].slowest * 1e3:.0f} ms slowest, {done[index].crashes} crashes")
    return _table([done[index] for index in sorted(done) if index < -(-pairs // CHUNK)])


def _chunk(index: int, pairs: int, seed: int, known: list[str], limit_seconds: float) -> Chunk:
    from atts.evaluators import equivalent

    draw = random.Random(f"{seed}/{index}")
    counts: Counter[str] = Counter()
    slowest, total, worst, crash = 0.0, 0.0, "", ""
    for _ in range(pairs):
        gold = draw.choice(known)
        answer = mutated(gold, known, draw)
        start = time.thread_time()
        try:
            counts[equivalent(gold, answer).status] += 1
        except Exception as error:  # noqa: BLE001  # what is looked for
            counts["crash"] += 1
            crash = f"{type(error).__name__}: {gold!r} {answer!r}"[:1_000]
        spent = time.thread_time() - start
        total += spent
        counts["over"] += spent > limit_seconds
        if spent > slowest:
            slowest, worst = spent, answer[:200]
    return Chunk(
        index, pairs, counts["equal"], counts["different"], counts["unscored"], counts["crash"], counts["over"],
        slowest, total, worst, crash,
    )  # fmt: skip


def _file(out: Path, seed: int) -> Path:
    return out / f"grading_fuzz_{seed}.jsonl"


def _done(out: Path | None, seed: int) -> dict[int, Chunk]:
    if out is None or not _file(out, seed).is_file():
        return {}
    lines = _file(out, seed).read_text(encoding="utf-8").splitlines()
    chunks = [Chunk(**json.loads(line)) for line in lines if line.endswith("}")]
    return {chunk.index: chunk for chunk in chunks}


def _keep(out: Path | None, seed: int, chunk: Chunk) -> None:
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    with _file(out, seed).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(chunk)) + "\n")


def _table(chunks: list[Chunk]) -> Table:
    pairs = sum(chunk.pairs for chunk in chunks)
    slowest = max(chunks, key=lambda chunk: chunk.slowest)
    row: tuple[Cell, ...] = (
        pairs,
        sum(chunk.equal for chunk in chunks),
        sum(chunk.different for chunk in chunks),
        sum(chunk.unscored for chunk in chunks),
        sum(chunk.crashes for chunk in chunks),
        sum(chunk.over_limit for chunk in chunks),
        slowest.slowest,
        sum(chunk.total for chunk in chunks) / pairs * 1e3,
    )
    crashes = tuple(chunk.crash for chunk in chunks if chunk.crash)[:3]
    return Table(
        "Mutated answers",
        ("pairs", "equal", "different", "unscored", "crashes", "over 1 s", "slowest (CPU s)", "mean (CPU ms)"),
        (row,),
        (f"Slowest: {slowest.worst!r}", *crashes),
    )
