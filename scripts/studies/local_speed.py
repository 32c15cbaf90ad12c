"""Decoding beside transformers and the machine's limits; scoring new chunks on warm rollouts, as
the prefix grows.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from atts.core import ScoreRequest
from atts.local import LocalEngine
from scripts.studies.harness import (
    Machine,
    Row,
    Spent,
    Spread,
    Table,
    cpu_seconds,
    interleaved,
    ratio,
    say,
    wall_seconds,
)
from scripts.studies.local_subjects import (
    PROMPT,
    Fresh,
    Lab,
    Subject,
    matrix_seconds,
    send_all,
    unending,
)

CHUNK = 32
PREFIX = 128
Rates = dict[tuple[str, int], float]
"""Tokens a second of decoding alone, by model and batch."""


def decoding(lab: Lab, subjects: Sequence[Subject]) -> tuple[Table, Rates]:
    """Every model at every batch, against `generate` and against the step's own limits."""
    rows = list[Row]()
    rates = Rates()
    spent = Spent()
    traffic = _memory_traffic()
    for subject in subjects:
        for batch in subject.batches:
            say(f"decoding {subject.name} at {batch}")
            seen = _race(lab, subject, batch)
            step = Spread.of(seen["native decode"]).median / (subject.tokens - 1)
            rates[subject.name, batch] = batch / step
            matrix = matrix_seconds(subject, batch)
            memory = _memory_bytes(subject, batch) / traffic
            pairs = (
                ("generate decode", "native decode"),
                ("generate", "native"),
                ("generate", "torch"),
            )
            ratios = [str(ratio(seen, theirs, ours)) for theirs, ours in pairs]
            limits = (1e3 * step, 1e3 * matrix, 1e3 * memory, max(matrix, memory) / step)
            rows.append((subject.name, batch, subject.tokens, batch / step, *ratios, *limits))
    shown = next(row for row in rows if row[0] == "target" and row[1] == 16)
    table = Table.of(
        "Decoding beside `transformers.generate`",
        "model | batch | tokens each | decoded tokens/s | decoding, ratio to generate | prompt and "
        "decoding, ratio | "
        "torch kernel, ratio | ms a step | its torch.mm, ms | its memory, ms | limit over step",
        rows,
        f"Prompts of {PROMPT} tokens never seen before; one thread on each side, float32, "
        f"temperature 0.7. "
        "Decoding alone is the time for all tokens less the time for one. Limits: torch.mm on the "
        "same shapes, and the "
        f"bytes of weights and cache over the {traffic / 1e9:.1f} GB/s that a large copy reads and "
        f"writes; what the "
        "processor's caches hold is faster than that.",
        spent.disturbance(),
        headline=f"the embedded target writes {rates['target', 16]:,.0f} tokens/s on one core at "
        f"batch 16, {shown[4]} "
        "times `transformers.generate`",
    )
    return table, rates


def _race(lab: Lab, subject: Subject, batch: int) -> dict[str, list[float]]:
    """Seconds per round of every arm, in turn; "decode" is what all tokens take beyond the first."""
    fresh = Fresh(subject, batch, lab.options.seed)
    tokens = subject.tokens
    with (
        unending(subject) as folder,
        lab.engine(folder, kernel="native") as native,
        lab.engine(folder, kernel="torch") as plain,
    ):
        arms: dict[str, Callable[[], float]] = {
            "native": partial(fresh.ours, lab, native, tokens),
            "native first": partial(fresh.ours, lab, native, 1),
            "generate": partial(fresh.theirs, tokens),
            "generate first": partial(fresh.theirs, 1),
            "torch": partial(fresh.ours, lab, plain, tokens),
        }
        seen = interleaved(arms, min(subject.most_rounds, lab.options.pick(2, 3, 5)))
    for side in ("native", "generate"):
        seen[f"{side} decode"] = [
            all_ - first for all_, first in zip(seen[side], seen[f"{side} first"], strict=True)
        ]
    return seen


def _memory_bytes(subject: Subject, batch: int) -> float:
    """What a decoding step must read: every weight once, and each sequence's cached keys and
    values.
    """
    config = subject.config
    context = PROMPT + subject.tokens / 2
    return (
        config.matrix_weights * (2 if subject.is_halves else 4)
        + 4 * config.kv_floats_per_token * context * batch
    )


def _memory_traffic(size: int = 1 << 26) -> float:
    """Bytes a second that one core reads and writes while it copies more than its caches hold, at
    best.
    """
    source = torch.zeros(size // 4)
    copied = torch.empty_like(source)
    return 2 * size / min(cpu_seconds(lambda: copied.copy_(source)) for _ in range(15))


def overheads(subjects: Sequence[Subject], rates: Rates, machine: Machine) -> Table:
    """At batch 1 what counts is how many operations a step is cut into: theirs, and our whole step."""
    rows: list[Row] = []
    for subject in subjects:
        count = _operations(subject)
        step = 1e3 / rates[subject.name, 1]
        floor = count * machine.operation_microseconds / 1e3
        rows.append((subject.name, count, floor, step, floor / step))
    return Table.of(
        f"One token at a time: {machine.operation_microseconds:.2f} us per torch operation",
        "model | operations of a step in transformers | their least cost, ms | our step, ms | "
        "ratio",
        rows,
    )


def _operations(subject: Subject) -> int:
    """How many operations torch is asked for in one step of theirs, those inside others not
    counted.
    """
    ids = torch.tensor(subject.prompts(1, PROMPT))
    with torch.inference_mode():
        cache = subject.theirs(ids, use_cache=True).past_key_values
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            subject.theirs(ids[:, :1], past_key_values=cache, use_cache=True)
    events: Any = seen.events()
    return sum(event.name.startswith("aten::") and event.cpu_parent is None for event in events)


def continuous(lab: Lab, subjects: Sequence[Subject]) -> Table:
    """Against transformers' own continuous batching, requests that come all at once."""
    rows: list[Row] = []
    count = tokens = lab.options.pick(16, 32, 32)
    for subject in subjects:
        say(f"continuous batching {subject.name}")
        fresh = Fresh(subject, count, lab.options.seed + 7, wall_seconds)
        with unending(subject) as folder, lab.engine(folder) as engine:
            arms: dict[str, Callable[[], float]] = {
                "ours": partial(fresh.ours, lab, engine, tokens),
                "theirs": partial(_their_batching, subject, count, tokens),
            }
            try:
                seen = interleaved(arms, lab.options.pick(1, 2, 3))
            finally:
                subject.theirs.destroy_cached_continuous_batching_manager()
        rate = count * tokens / Spread.of(seen["ours"]).median
        rows.append((subject.name, count, tokens, rate, str(ratio(seen, "theirs", "ours"))))
    title = "Continuous batching beside transformers' own (`generate_batch`)"
    return Table.of(title, "model | requests | tokens each | tokens/s | ratio", rows)


def _their_batching(subject: Subject, count: int, tokens: int) -> float:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    prompts = [list(prompt) for prompt in subject.prompts(count, PROMPT)]
    # without limits it would take most of the machine's memory; the manager stays, so that its
    # start is not counted
    room = ContinuousBatchingConfig(
        num_blocks=2 * count * (PROMPT + tokens) // 32, max_batch_tokens=1024
    )
    settings: dict[str, Any] = {
        "continuous_batching_config": room,
        "persistent_manager": True,
        "progress_bar": False,
    }
    replies: dict[str, Any] = {}
    seconds = wall_seconds(
        lambda: replies.update(subject.theirs.generate_batch(prompts, config, **settings))
    )
    written = sum(len(reply.generated_tokens) for reply in replies.values())
    assert written == count * tokens, "their batching wrote another number of tokens"
    return seconds


def scoring(lab: Lab, subjects: Sequence[Subject], rates: Rates) -> Table:
    """New chunks on warm rollouts: share of the matrix rate, and tokens a second beside decoding's."""
    rows: list[Row] = []
    for subject in subjects:
        for batch in subject.batches:
            say(f"scoring {subject.name} at {batch}")
            limits = list[float]()
            times = list[float]()
            count = batch * CHUNK
            with lab.engine(subject.folder) as engine:
                for n in range(min(subject.most_rounds, lab.options.pick(3, 7, 11))):
                    limits.append(matrix_seconds(subject, count, 2))
                    times.append(_score_seconds(lab, engine, subject, batch, n))
            flops = 2.0 * subject.config.matrix_weights * count
            mixing = 4.0 * count * (PREFIX + CHUNK / 2) * subject.attention
            rate = (flops + mixing) / min(times) / 1e9
            limit = flops / min(limits) / 1e9
            tokens = count / min(times)
            decoded = rates.get((subject.name, batch))
            ahead = None if decoded is None else tokens / decoded
            rows.append((subject.name, batch, tokens, ahead, rate, limit, rate / limit))
    return Table.of(
        f"Scoring {CHUNK} new tokens on each of several rollouts of {PREFIX} warm ones",
        "model | rollouts | scored tokens/s | to decoded tokens/s | GFLOP/s | torch.mm GFLOP/s | "
        "share of the matrix rate",
        rows,
    )


def _score_seconds(
    lab: Lab, engine: LocalEngine, subject: Subject, batch: int, seed: int, prefix: int = PREFIX
) -> float:
    """Processor seconds for scoring one new chunk on each of `batch` rollouts whose prefix was just
    scored.
    """
    bodies = subject.prompts(batch, prefix + CHUNK, seed + 1000)
    warm = [ScoreRequest(ids[:1], ids[1:prefix]) for ids in bodies]
    gc.collect()  # before the prefixes: it leaves the processor's caches full of other things
    return lab.portal.call(
        _warm_then_timed, engine, warm, [ScoreRequest(ids[:prefix], ids[prefix:]) for ids in bodies]
    )


async def _warm_then_timed(
    engine: LocalEngine, warm: list[ScoreRequest], requests: list[ScoreRequest]
) -> float:
    """What the second lot takes, seen from the event loop: how this thread gets there is not the
    engine's.
    """
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
                times[prefix].append(
                    _score_seconds(lab, engine, subject, 8, 100 * prefix + n, prefix)
                )
                after = engine.stats()
                computed = [s.prefilled_tokens + s.scored_tokens for s in (before, after)]
                fed[prefix] = computed[1] - computed[0] - 8 * prefix  # less the warming up
    costs = {
        p: subject.config.matrix_weights + 2 * (p + CHUNK / 2) * subject.attention for p in prefixes
    }
    rows: list[Row] = []
    for prefix in prefixes:
        expected = min(times[prefixes[0]]) * costs[prefix] / costs[prefixes[0]]
        least = min(times[prefix])
        middle = Spread.of(times[prefix]).median
        rows.append(
            (prefix, fed[prefix], 1e3 * least, 1e3 * middle, 1e3 * expected, least / expected)
        )
    return Table.of(
        f"Scoring 8 new chunks of {CHUNK} tokens as the warm prefix grows ({subject.name})",
        "warm prefix | tokens computed | ms, best | ms, median | ms by the cost model | best over "
        "model",
        rows,
    )
