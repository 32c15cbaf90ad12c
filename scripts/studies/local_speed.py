"""Decoding beside transformers, beside its continuous batching, beside another engine, and beside the machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from anyio.from_thread import BlockingPortal

from atts.core import ScoreRequest
from atts.local import LocalEngine
from scripts.studies.harness import Options, Spread, Table, interleaved, ratio, say, wall_seconds
from scripts.studies.local_subjects import PROMPT, Fresh, Subject, engine_on, matrix_seconds, send_all, unending
from scripts.studies.machine import Machine

Seen = dict[str, list[float]]
Rates = dict[tuple[str, int], float]
"""Tokens a second of decoding alone, by model and batch."""


def decoding(
    subjects: list[Subject], options: Options, portal: BlockingPortal, machine: Machine
) -> tuple[Table, Rates]:
    """Every model at every batch, against `generate` and against the step's own limits."""
    rows: list[tuple[str | int | float, ...]] = []
    rates: Rates = {}
    for subject in subjects:
        for batch in subject.batches:
            say(f"decoding {subject.name} at {batch}")
            seen = _race(subject, batch, options, portal)
            step = Spread.of(seen["native decode"]).median / (subject.tokens - 1)
            rates[subject.name, batch] = batch / step
            matrix, memory = matrix_seconds(subject, batch), _memory_seconds(subject, batch, machine)
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
        "bytes of weights and cache over twice the copy rate (a copy reads and writes); what the processor's caches "
        "hold is faster than that.",
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
        seen = interleaved(arms, 2 if "200M" in subject.name else options.pick(2, 3, 5))
    for side in ("native", "generate"):
        seen[f"{side} decode"] = [all_ - first for all_, first in zip(seen[side], seen[f"{side} first"], strict=True)]
    return seen


def _memory_seconds(subject: Subject, batch: int, machine: Machine) -> float:
    """The least time for a decoding step's weights and cached keys and values to come from memory once."""
    shape, context = subject.shape, PROMPT + subject.tokens / 2
    read = shape.matrix_weights * (2 if subject.is_halves else 4) + 4 * shape.kv_floats * context * batch
    return read / (2 * machine.copy_gib_per_second * 2**30)


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
    count, tokens = options.pick(16, 32, 64), options.pick(16, 32, 64)
    for subject in subjects:
        say(f"continuous batching {subject.name}")
        fresh = Fresh(subject, count, options.seed + 7)
        with unending(subject) as folder, engine_on(portal, folder, threads=1) as engine:
            arms: dict[str, Callable[[], float]] = {
                "ours": partial(fresh.ours, portal, engine, tokens),
                "theirs": partial(_their_batching, subject, count, tokens),
            }
            seen = interleaved(arms, options.pick(1, 2, 3))
        rate = count * tokens / Spread.of(seen["ours"]).median
        rows.append((subject.name, count, tokens, rate, str(ratio(seen, "theirs", "ours"))))
    title = "Continuous batching beside transformers' own (`generate_batch`)"
    return Table(title, ("model", "requests", "tokens each", "tokens/s", "ratio"), tuple(rows))


def _their_batching(subject: Subject, count: int, tokens: int) -> float:
    from transformers import GenerationConfig

    config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    prompts = [list(prompt) for prompt in subject.prompts(count, PROMPT)]
    written: list[int] = []

    def work() -> None:
        replies = subject.theirs.generate_batch(prompts, generation_config=config, progress_bar=False)
        written.extend(len(reply.generated_tokens) for reply in replies.values())

    seconds = wall_seconds(work)
    assert sum(written) == count * tokens, "their batching wrote another number of tokens"
    return seconds


def overlap(target: Subject, draft: Subject, options: Options, portal: BlockingPortal) -> Table:
    """Draft decoding beside target scoring or decoding: threads of one process, or a process each, in turn."""
    arms: dict[str, Callable[[], float]] = {}
    say("two engines at once, in threads and in processes")
    with ExitStack() as stack:
        folders = {s.name: stack.enter_context(unending(s)) for s in (target, draft)}
        for worker in ("thread", "process"):
            engines = {
                s.name: stack.enter_context(engine_on(portal, folders[s.name], worker=worker, threads=1))
                for s in (target, draft)
            }
            works = _works(target, draft, engines, options)
            for name, work in works.items():
                arms[f"{worker}: {name}"] = partial(_together, portal, [work])
            for other in ("target scoring", "target decoding"):
                pair = [works["draft decoding"], works[other]]
                arms[f"{worker}: draft decoding and {other}"] = partial(_together, portal, pair)
        seen = interleaved(arms, options.pick(2, 5, 9))
    title = "Two engines at once on this machine's cores"
    columns = ("worker", "draft decoding beside", "draft alone, s", "target alone, s", "both, s", "overlap", "at best")
    notes = (
        "Overlap: the two alone, one after the other, over both at once; at best, the longer one hides the shorter.",
    )
    rows = [
        _overlap_row(seen, w, other) for w in ("thread", "process") for other in ("target scoring", "target decoding")
    ]
    return Table(title, columns, tuple(rows), notes)


def _overlap_row(seen: Seen, worker: str, other: str) -> tuple[str | float, ...]:
    one, two = seen[f"{worker}: draft decoding"], seen[f"{worker}: {other}"]
    both = seen[f"{worker}: draft decoding and {other}"]
    gain = Spread.of([(a + b) / c for a, b, c in zip(one, two, both, strict=True)])
    a, b, c = (Spread.of(values).median for values in (one, two, both))
    return worker, other, a, b, c, str(gain), (a + b) / max(a, b)


Work = Callable[[BlockingPortal], Any]


def _works(target: Subject, draft: Subject, engines: dict[str, LocalEngine], options: Options) -> dict[str, Work]:
    """What each engine does in one round, about equally long."""
    drafts, targets = Fresh(draft, 64, options.seed + 1), Fresh(target, 16, options.seed + 2)
    tokens = options.pick(48, 96, 128)

    def drafting(portal: BlockingPortal) -> Any:
        return portal.start_task_soon(send_all, engines[draft.name], drafts.requests(2 * tokens))

    def decoding(portal: BlockingPortal) -> Any:
        return portal.start_task_soon(send_all, engines[target.name], targets.requests(tokens))

    def scoring(portal: BlockingPortal) -> Any:
        fresh = [request.ids for _ in range(3) for request in targets.requests(1)]
        bodies = [ids + ids[::-1] for ids in fresh]
        return portal.start_task_soon(send_all, engines[target.name], [ScoreRequest(b[:1], b[1:]) for b in bodies])

    return {"draft decoding": drafting, "target scoring": scoring, "target decoding": decoding}


def _together(portal: BlockingPortal, works: list[Work]) -> float:
    def run() -> None:
        for started in [work(portal) for work in works]:
            started.result()

    return wall_seconds(run)
