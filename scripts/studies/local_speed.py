"""Decoding beside transformers, beside its continuous batching and beside the machine's limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from anyio.from_thread import BlockingPortal

from scripts.studies.harness import Calm, Options, Spread, Table, interleaved, ratio, say, wall_seconds
from scripts.studies.local_subjects import (
    PROMPT,
    Fresh,
    Subject,
    disturbed,
    engine_on,
    matrix_seconds,
    memory_traffic,
    unending,
)
from scripts.studies.machine import Machine

Seen = dict[str, list[float]]
Rates = dict[tuple[str, int], float]
"""Tokens a second of decoding alone, by model and batch."""


def decoding(subjects: list[Subject], options: Options, portal: BlockingPortal) -> tuple[Table, Rates]:
    """Every model at every batch, against `generate` and against the step's own limits."""
    rows: list[tuple[str | int | float, ...]] = []
    rates: Rates = {}
    calm, traffic = Calm(), memory_traffic()
    for subject in subjects:
        for batch in subject.batches:
            say(f"decoding {subject.name} at {batch}")
            seen = _race(subject, batch, options, portal)
            step = Spread.of(seen["native decode"]).median / (subject.tokens - 1)
            rates[subject.name, batch] = batch / step
            matrix, memory = matrix_seconds(subject, batch), _memory_bytes(subject, batch) / traffic
            rows.append(
                (
                    subject.name,
                    batch,
                    subject.tokens,
                    batch / step,
                    str(ratio(seen, "generate decode", "native decode")),
                    str(ratio(seen, "generate", "native")),
                    str(ratio(seen, "generate", "torch")),
                    1e3 * step,
                    1e3 * matrix,
                    1e3 * memory,
                    max(matrix, memory) / step,
                )
            )
    columns = (
        "model",
        "batch",
        "tokens each",
        "decoded tokens/s",
        "decoding, ratio to generate",
        "prompt and decoding, ratio",
        "torch kernel, ratio",
        "ms a step",
        "its torch.mm, ms",
        "its memory, ms",
        "limit over step",
    )
    notes = (
        f"Prompts of {PROMPT} tokens never seen before; one thread on each side, float32, temperature 0.7. "
        "Decoding alone is the time for all tokens less the time for one. Limits: torch.mm on the same shapes, and the "
        f"bytes of weights and cache over the {traffic / 1e9:.1f} GB/s that a large copy reads and writes; what the "
        "processor's caches hold is faster than that.",
        "Times are those of the processor in this process; on an idle machine they are the wall's.",
        disturbed(calm),
    )
    return Table("Decoding beside `transformers.generate`", columns, tuple(rows), notes), rates


def _race(subject: Subject, batch: int, options: Options, portal: BlockingPortal) -> Seen:
    """Seconds per round of every arm, in turn; "decode" is what all tokens take beyond the first."""
    fresh, tokens = Fresh(subject, batch, options.seed), subject.tokens
    with (
        unending(subject) as folder,
        engine_on(portal, folder, kernel="native", threads=1) as native,
        engine_on(portal, folder, kernel="torch", threads=1) as plain,
    ):
        arms: dict[str, Callable[[], float]] = {
            "native": partial(fresh.ours, portal, native, tokens),
            "native first": partial(fresh.ours, portal, native, 1),
            "generate": partial(fresh.theirs, tokens),
            "generate first": partial(fresh.theirs, 1),
            "torch": partial(fresh.ours, portal, plain, tokens),
        }
        seen = interleaved(arms, min(subject.most_rounds, options.pick(2, 3, 5)))
    for side in ("native", "generate"):
        seen[f"{side} decode"] = [all_ - first for all_, first in zip(seen[side], seen[f"{side} first"], strict=True)]
    return seen


def _memory_bytes(subject: Subject, batch: int) -> float:
    """What a decoding step must read: every weight once, and each sequence's cached keys and values."""
    config, context = subject.config, PROMPT + subject.tokens / 2
    return config.matrix_weights * (2 if subject.is_halves else 4) + 4 * config.kv_floats_per_token * context * batch


def _operations(subject: Subject) -> int:
    """How many operations torch is asked for in one step of theirs, those inside others not counted."""
    ids = torch.tensor(subject.prompts(1, PROMPT))
    with torch.inference_mode():
        cache = subject.theirs(ids, use_cache=True).past_key_values
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
            subject.theirs(ids[:, :1], past_key_values=cache, use_cache=True)
    events: Any = seen.events()
    return sum(event.name.startswith("aten::") and event.cpu_parent is None for event in events)


def overheads(subjects: list[Subject], rates: Rates, machine: Machine) -> Table:
    """At batch 1 what counts is how many operations a step is cut into: theirs, and our whole step."""
    rows: list[tuple[str | int | float, ...]] = []
    for subject in subjects:
        count = _operations(subject)
        floor = count * machine.operation_microseconds / 1e3
        step = 1e3 / rates[subject.name, 1]
        rows.append((subject.name, count, floor, step, floor / step))
    title = f"One token at a time: {machine.operation_microseconds:.2f} us per torch operation"
    columns = ("model", "operations of a step in transformers", "their least cost, ms", "our step, ms", "ratio")
    notes = ("The least cost is what calling that many empty operations takes; no Python and no arithmetic in it.",)
    return Table(title, columns, tuple(rows), notes)


def continuous(subjects: list[Subject], options: Options, portal: BlockingPortal) -> Table:
    """Against transformers' own continuous batching, requests that come all at once."""
    rows: list[tuple[str | int | float, ...]] = []
    count = tokens = options.pick(16, 32, 32)
    for subject in subjects:
        say(f"continuous batching {subject.name}")
        fresh = Fresh(subject, count, options.seed + 7, wall_seconds)
        with unending(subject) as folder, engine_on(portal, folder, threads=1) as engine:
            arms: dict[str, Callable[[], float]] = {
                "ours": partial(fresh.ours, portal, engine, tokens),
                "theirs": partial(_their_batching, subject, count, tokens),
            }
            try:
                seen = interleaved(arms, options.pick(1, 2, 3))
            finally:
                subject.theirs.destroy_cached_continuous_batching_manager()
        rate = count * tokens / Spread.of(seen["ours"]).median
        rows.append((subject.name, count, tokens, rate, str(ratio(seen, "theirs", "ours"))))
    title = "Continuous batching beside transformers' own (`generate_batch`)"
    return Table(title, ("model", "requests", "tokens each", "tokens/s", "ratio"), tuple(rows))


def _their_batching(subject: Subject, count: int, tokens: int) -> float:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [list(prompt) for prompt in subject.prompts(count, PROMPT)]
    # without limits it would take most of the machine's memory; the manager stays, so that its start is not counted
    room = ContinuousBatchingConfig(num_blocks=2 * count * (PROMPT + tokens) // 32, max_batch_tokens=1024)
    written: list[int] = []

    def work() -> None:
        replies = subject.theirs.generate_batch(
            prompts, config, continuous_batching_config=room, persistent_manager=True, progress_bar=False
        )
        written.extend(len(reply.generated_tokens) for reply in replies.values())

    seconds = wall_seconds(work)
    assert sum(written) == count * tokens, "their batching wrote another number of tokens"
    return seconds
