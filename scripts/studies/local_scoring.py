"""Scoring new chunks on warm rollouts: beside the matrix rate, beside decoding, and as the prefix grows."""

from __future__ import annotations

import gc
import time

from anyio.from_thread import BlockingPortal

from atts.core import ScoreRequest
from atts.local import LocalEngine
from scripts.studies.harness import Options, Spread, Table, say
from scripts.studies.local_speed import Rates
from scripts.studies.local_subjects import Subject, engine_on, matrix_seconds, send_all

CHUNK = 32
PREFIX = 128


def scoring(subjects: list[Subject], rates: Rates, options: Options, portal: BlockingPortal) -> Table:
    """New chunks on warm rollouts: share of the matrix rate, and tokens a second beside decoding's."""
    rows: list[tuple[str | int | float | None, ...]] = []
    for subject in subjects:
        for batch in subject.batches:
            say(f"scoring {subject.name} at {batch}")
            limits: list[float] = []
            times: list[float] = []
            with engine_on(portal, subject.folder, threads=1) as engine:
                for n in range(min(subject.most_rounds, options.pick(3, 7, 11))):
                    limits.append(matrix_seconds(subject, batch * CHUNK, 2))
                    times.append(score_seconds(portal, engine, subject, batch, PREFIX, n))
            rows.append(_scoring_row(subject, batch, min(times), min(limits), rates.get((subject.name, batch))))
    columns = (
        "model",
        "rollouts",
        "scored tokens/s",
        "to decoded tokens/s",
        "GFLOP/s",
        "torch.mm GFLOP/s",
        "share of the matrix rate",
    )
    notes = (
        "Best of several rounds in turn, whole calls through the engine as the caller's event loop sees them; torch.mm "
        "at the same shapes. The work counted is that of the matrices and of attention over prefix and chunk.",
    )
    title = f"Scoring {CHUNK} new tokens on each of several rollouts of {PREFIX} warm ones"
    return Table(title, columns, tuple(rows), notes)


def _scoring_row(
    subject: Subject, batch: int, seconds: float, bare: float, decoded: float | None
) -> tuple[str | int | float | None, ...]:
    config, count = subject.config, batch * CHUNK
    flops = 2.0 * config.matrix_weights * count
    mixing = 4.0 * count * (PREFIX + CHUNK / 2) * config.num_layers * config.num_heads * config.head_dim
    rate, limit = (flops + mixing) / seconds / 1e9, flops / bare / 1e9
    ahead = None if decoded is None else count / seconds / decoded
    return subject.name, batch, count / seconds, ahead, rate, limit, rate / limit


def score_seconds(
    portal: BlockingPortal, engine: LocalEngine, subject: Subject, batch: int, prefix: int, seed: int
) -> float:
    """Processor seconds for scoring one new chunk on each of `batch` rollouts whose prefix was just scored."""
    bodies = subject.prompts(batch, prefix + CHUNK, seed + 1000)
    warm = [ScoreRequest(ids[:1], ids[1:prefix]) for ids in bodies]
    requests = [ScoreRequest(ids[:prefix], ids[prefix:]) for ids in bodies]
    gc.collect()  # before the prefixes: it leaves the processor's caches full of other things
    return portal.call(_warm_then_timed, engine, warm, requests)


async def _warm_then_timed(engine: LocalEngine, warm: list[ScoreRequest], requests: list[ScoreRequest]) -> float:
    """What the second lot takes, seen from the event loop: how this thread gets there is not the engine's."""
    await send_all(engine, warm)
    began = time.process_time()
    await send_all(engine, requests)
    return time.process_time() - began


def warm_prefix(subject: Subject, options: Options, portal: BlockingPortal) -> Table:
    """Scoring a chunk as the warm prefix grows eightfold, beside the cost of attention alone."""
    config, prefixes = subject.config, (128, 256, 512, 1024)
    say("scoring as the prefix grows")
    times: dict[int, list[float]] = {prefix: [] for prefix in prefixes}
    fed: dict[int, int] = {}
    with engine_on(portal, subject.folder, threads=1, kv_tokens=100_000) as engine:
        for n in range(options.pick(3, 9, 15)):
            for prefix in prefixes:
                before = engine.stats()
                times[prefix].append(score_seconds(portal, engine, subject, 8, prefix, 100 * prefix + n))
                after = engine.stats()
                computed = [s.prefilled_tokens + s.scored_tokens for s in (before, after)]
                fed[prefix] = computed[1] - computed[0] - 8 * prefix  # less the warming up
    mixed = 2 * config.num_layers * config.num_heads * config.head_dim
    costs = {prefix: config.matrix_weights + (prefix + CHUNK / 2) * mixed for prefix in prefixes}
    rows: list[tuple[int | float | str, ...]] = []
    for prefix in prefixes:
        expected = min(times[prefixes[0]]) * costs[prefix] / costs[prefixes[0]]
        least, spread = min(times[prefix]), Spread.of(times[prefix])
        rows.append((prefix, fed[prefix], 1e3 * least, 1e3 * spread.median, 1e3 * expected, least / expected))
    columns = ("warm prefix", "tokens computed", "ms, best", "ms, median", "ms by the cost model", "best over model")
    notes = ("The model: multiplications of the matrices and of attention, scaled to the shortest prefix.",)
    return Table(
        f"Scoring 8 new chunks of {CHUNK} tokens as the warm prefix grows ({subject.name})",
        columns,
        tuple(rows),
        notes,
    )
