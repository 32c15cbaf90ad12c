"""The local engine beside transformers and beside what the machine can do, measured in turn in one
run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
import torch
from anyio.from_thread import start_blocking_portal

from atts.concurrency import collect
from atts.core import ScoreRequest, TokenIds
from atts.evaluators.datasets.arithmetic import problems
from atts.local import LocalEngine
from atts.models import path
from scripts.studies.harness import (
    Options,
    Row,
    Spent,
    Spread,
    Table,
    interleaved,
    look,
    ratio,
    say,
    wall_seconds,
)
from scripts.studies.local_speed import continuous, decoding, overheads, scoring, warm_prefix
from scripts.studies.local_subjects import (
    Fresh,
    Lab,
    Subject,
    asked,
    send_all,
    subjects,
    texts,
    unending,
)

RATES = (0.1, 0.2, 0.4)
_ROUND = 100  # problems whose chunks are scored at once
_WORKERS: tuple[Literal["thread", "process"], ...] = ("thread", "process")
_OTHERS = ("target scoring", "target decoding")
_ALONE = ("draft decoding", *_OTHERS)
Work = Callable[[], Future[int]]


def study(options: Options) -> list[Table]:
    """Decoding, continuous batching, scoring, and two engines at once."""
    torch.set_num_threads(1)  # both sides: on a busy machine a second thread mostly waits
    with tempfile.TemporaryDirectory() as place, start_blocking_portal() as portal:
        lab = Lab(options, portal)
        machine = look()
        found = subjects(options, Path(place))
        target, draft = found[:2]
        decoded, rates = decoding(lab, found)
        return [
            decoded,
            overheads(found, rates, machine),
            continuous(lab, [target, draft]),
            scoring(lab, found, rates),
            warm_prefix(lab, target),
            *overlap(lab, target, draft),
        ]


def study_scores(options: Options) -> list[Table]:
    """Compare scores in bfloat16 with scores in float32, on the same chunks of the embedded draft."""
    torch.set_num_threads(1)
    questions = [
        problem.text
        for problem in problems("test", options.pick(200, 1500, 3000), 7 + options.seed)
    ]
    with start_blocking_portal() as portal:
        lab = Lab(options, portal)
        with lab.engine(path("draft")) as draft:
            requests = asked(draft, questions, 300, 1)
            written = zip(requests, portal.call(texts, draft, requests), strict=True)
            chunks = [_chunks(draft, request.ids, text) for request, text in written]
        with (
            lab.engine(path("target")) as exact,
            lab.engine(path("target"), scores="bfloat16") as rounded,
        ):
            found = (list[float](), list[float]())
            ratios = list[float]()
            for first in range(0, len(chunks), _ROUND):
                say(f"rounded scores: {first} of {len(chunks)} problems")
                turn = [chunk for own in chunks[first : first + _ROUND] for chunk in own]
                seconds = [
                    _scored(lab, arm, turn, into)
                    for arm, into in zip((exact, rounded), found, strict=True)
                ]
                ratios.append(seconds[0] / seconds[1])
    return [_rounded(*found, Spread.of(ratios[1:]))]


def _rounded(exact: Sequence[float], rounded: Sequence[float], faster: Spread) -> Table:
    one = np.array(exact)
    other = np.array(rounded)
    apart = abs(one - other)
    bounds = [np.quantile(one, 1 - rate) for rate in RATES]
    others = [int(((one > bound) != (other > bound)).sum()) for bound in bounds]
    header = "chunks | times as fast | mean difference, nats a token | largest"
    return Table.of(
        "Scores of rows rounded to bfloat16",
        " | ".join([header, *(f"decided otherwise at {rate}" for rate in RATES)]),
        [(len(one), str(faster), float(apart.mean()), float(apart.max()), *others)],
        "Scored from the prompt on, in batches of 100 problems, processor time with the caller's "
        "own tasks. A chunk is "
        "decided otherwise where only one of its two scores is above the bound that the rate sets "
        "in float32.",
    )


def _chunks(engine: LocalEngine, prompt: TokenIds, text: TokenIds) -> list[ScoreRequest]:
    """A text's lines, each after what is before it."""
    ends = [
        at
        for at in range(1, len(text))
        if engine.tokenizer.decode(text[at - 1 : at]).endswith("\n")
    ]
    pieces = zip([0, *ends], [*ends, len(text)], strict=True)
    return [
        ScoreRequest(prompt + text[:start], text[start:stop])
        for start, stop in pieces
        if stop > start
    ]


def _scored(
    lab: Lab, engine: LocalEngine, chunks: Sequence[ScoreRequest], into: list[float]
) -> float:
    """Processor seconds; `into` gets each chunk's mean negative log-probability."""
    began = time.process_time()
    scores = lab.portal.call(collect, [partial(engine.score, chunk) for chunk in chunks])
    seconds = time.process_time() - began
    into.extend(-fmean(score.logprobs) for score in scores)
    return seconds


def overlap(lab: Lab, target: Subject, draft: Subject) -> list[Table]:
    """Draft decoding beside target scoring or decoding, and each beside Python at work in the
    caller; all in turn.
    """
    say("two engines at once, in threads and in processes")
    arms: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        folders = [stack.enter_context(unending(subject)) for subject in (target, draft)]
        for worker in _WORKERS:
            engines = [stack.enter_context(lab.engine(folder, worker=worker)) for folder in folders]
            works = _works(lab, (target, draft), engines)
            for name in _ALONE:
                arms[f"{worker}: {name}"] = partial(_together, [works[name]])
                arms[f"{worker}: {name} beside Python"] = partial(
                    _together, [works[name]], caller="busy"
                )
            for other in _OTHERS:
                arms[f"{worker}: {other} and draft"] = partial(
                    _together, [works["draft decoding"], works[other]]
                )
        spent = Spent()
        seen = interleaved(arms, lab.options.pick(2, 5, 7))
    pairs = list[Row]()
    beside = list[Row]()
    median = {name: Spread.of(values).median for name, values in seen.items()}
    for worker in _WORKERS:
        for other in _OTHERS:
            names = [
                f"{worker}: {name}" for name in ("draft decoding", other, f"{other} and draft")
            ]
            gain = Spread.of(
                [(a + b) / c for a, b, c in zip(*(seen[name] for name in names), strict=True)]
            )
            a, b, c = (median[name] for name in names)
            pairs.append((worker, other, a, b, c, str(gain), (a + b) / max(a, b)))
        for name in _ALONE:
            alone = f"{worker}: {name}"
            busy = f"{worker}: {name} beside Python"
            beside.append(
                (worker, name, median[alone], median[busy], str(ratio(seen, busy, alone)))
            )
    return [
        Table.of(
            "Two engines at once on this machine's cores",
            "worker | draft decoding beside | draft alone, s | target alone, s | both, s | overlap "
            "| at best",
            pairs,
            spent.disturbance(),
        ),
        Table.of(
            "One engine while its caller computes in Python",
            "worker | work | alone, s | beside a caller busy in Python, s | ratio",
            beside,
            spent.disturbance(),
        ),
    ]


def _works(
    lab: Lab, subjects: tuple[Subject, Subject], engines: Sequence[LocalEngine]
) -> dict[str, Work]:
    """What each engine does in one round, about equally long."""
    seed = lab.options.seed
    tokens = lab.options.pick(48, 96, 96)
    targets = Fresh(subjects[0], 16, seed + 2)
    drafts = Fresh(subjects[1], 64, seed + 1)
    start = lab.portal.start_task_soon

    def score() -> Future[int]:
        fresh = [request.ids for _ in range(3) for request in targets.requests(1)]
        return start(
            send_all, engines[0], [ScoreRequest(ids[:1], (ids + ids[::-1])[1:]) for ids in fresh]
        )

    return {
        "draft decoding": lambda: start(send_all, engines[1], drafts.requests(2 * tokens)),
        "target scoring": score,
        "target decoding": lambda: start(send_all, engines[0], targets.requests(tokens)),
    }


def _together(works: list[Work], caller: Literal["waits", "busy"] = "waits") -> float:
    """Seconds until all is done, started at once; a busy caller computes until then."""

    def run() -> None:
        started = [work() for work in works]
        while caller == "busy" and not all(future.done() for future in started):
            sum(range(2000))
        for future in started:
            future.result()

    return wall_seconds(run)
