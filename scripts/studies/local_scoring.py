"""Scoring new chunks on warm rollouts: beside the matrix rate, beside decoding, as the prefix grows."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

from atts.core import ScoreRequest
from atts.local import LocalEngine
from scripts.studies.harness import Row, Spread, Table, say
from scripts.studies.local_speed import Rates
from scripts.studies.local_subjects import Lab, Subject, matrix_seconds, send_all

CHUNK, PREFIX = 32, 128


def scoring(lab: Lab, subjects: Sequence[Subject], rates: Rates) -> Table:
    """New chunks on warm rollouts: share of the matrix rate, and tokens a second beside decoding's."""
    rows: list[Row] = []
    for subject in subjects:
        for batch in subject.batches:
            say(f"scoring {subject.name} at {batch}")
            limits, times, count = list[float](), list[float](), batch * CHUNK
            with lab.engine(subject.folder) as engine:
                for n in range(min(subject.most_rounds, lab.options.pick(3, 7, 11))):
                    limits.append(matrix_seconds(subject, count, 2))
                    times.append(_score_seconds(lab, engine, subject, batch, n))
            flops = 2.0 * subject.config.matrix_weights * count
            mixing = 4.0 * count * (PREFIX + CHUNK / 2) * subject.attention
            rate, limit = (flops + mixing) / min(times) / 1e9, flops / min(limits) / 1e9
            tokens, decoded = count / min(times), rates.get((subject.name, batch))
            ahead = None if decoded is None else tokens / decoded
            rows.append((subject.name, batch, tokens, ahead, rate, limit, rate / limit))
    return Table.of(
        f"Scoring {CHUNK} new tokens on each of several rollouts of {PREFIX} warm ones",
        "model | rollouts | scored tokens/s | to decoded tokens/s | GFLOP/s | torch.mm GFLOP/s | "
        "share of the matrix rate",
        rows,
    )


def _requests(
    subject: Subject, batch: int, seed: int, prefix: int = PREFIX
) -> tuple[list[ScoreRequest], list[ScoreRequest]]:
    """What warms the prefixes of new rollouts, and a new chunk on each."""
    bodies = subject.prompts(batch, prefix + CHUNK, seed)
    warm = [ScoreRequest(ids[:1], ids[1:prefix]) for ids in bodies]
    return warm, [ScoreRequest(ids[:prefix], ids[prefix:]) for ids in bodies]


def _score_seconds(
    lab: Lab, engine: LocalEngine, subject: Subject, batch: int, seed: int, prefix: int = PREFIX
) -> float:
    """Processor seconds for scoring one new chunk on each of `batch` rollouts whose prefix was just scored."""
    warm, requests = _requests(subject, batch, seed + 1000, prefix)
    gc.collect()  # before the prefixes: it leaves the processor's caches full of other things
    return lab.portal.call(_warm_then_timed, engine, warm, requests)


async def _warm_then_timed(engine: LocalEngine, warm: list[ScoreRequest], requests: list[ScoreRequest]) -> float:
    """What the second lot takes, seen from the event loop: how this thread gets there is not the engine's."""
    await send_all(engine, warm)
    began = time.process_time()
    await send_all(engine, requests)
    return time.process_time() - began


def warm_prefix(lab: Lab, subject: Subject) -> Table:
    """Scoring a chunk as the warm prefix grows eightfold, beside the cost of attention alone."""
    prefixes = (128, 256, 512, 1024)
    say("scoring as the prefix grows")
    times: dict[int, list[float]] = {prefix: [] for prefix in prefixes}
    fed: dict[int, int] = {}
    with lab.engine(subject.folder, kv_tokens=100_000) as engine:
        for n in range(lab.options.pick(3, 9, 15)):
            for prefix in prefixes:
                before = engine.stats()
                times[prefix].append(_score_seconds(lab, engine, subject, 8, 100 * prefix + n, prefix))
                after = engine.stats()
                computed = [s.prefilled_tokens + s.scored_tokens for s in (before, after)]
                fed[prefix] = computed[1] - computed[0] - 8 * prefix  # less the warming up
    costs = {p: subject.config.matrix_weights + 2 * (p + CHUNK / 2) * subject.attention for p in prefixes}
    rows: list[Row] = []
    for prefix in prefixes:
        expected = min(times[prefixes[0]]) * costs[prefix] / costs[prefixes[0]]
        least, middle = min(times[prefix]), Spread.of(times[prefix]).median
        rows.append((prefix, fed[prefix], 1e3 * least, 1e3 * middle, 1e3 * expected, least / expected))
    return Table.of(
        f"Scoring 8 new chunks of {CHUNK} tokens as the warm prefix grows ({subject.name})",
        "warm prefix | tokens computed | ms, best | ms, median | ms by the cost model | best over model",
        rows,
    )
