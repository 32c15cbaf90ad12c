"""Overlapped schemes live: the embedded pair and its padded twins, all arms in turn, the same texts in each."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np
from anyio.from_thread import start_blocking_portal

from atts.core import SampleRequest, TokenIds
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.local import LocalEngine, build
from atts.local.batch import StepBatch
from atts.local.exits import Ear, ExitModel, Told
from atts.models import path
from scripts.studies.harness import Options, Row, Spent, Table, interleaved, ratio, say, wall_seconds
from scripts.studies.local_subjects import Lab, asked, send_all

_PAIR = {"drafter": str(path("draft"))}
_DEEP = {"drafter": str(path("deep")), "speculate": "draft", "k": 8}
_ARMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "plain, two threads": {"threads": 2, "worker": "process"},  # other threads of this process would wake its helpers
    "serial, k=4": {**_PAIR, "speculate": "draft", "k": 4},
    "serial, k=8": {**_PAIR, "speculate": "draft", "k": 8},
    "serial, k=auto": {**_PAIR, "speculate": "draft"},
    "auto": {**_PAIR, "speculate": "auto"},
    "pearl": {**_PAIR, "speculate": "pearl", "k": 16},
    "pearl, process": {**_PAIR, "speculate": "pearl", "k": 16, "beside": "process"},
    "ssd": {**_PAIR, "speculate": "ssd", "k": 16},
    "mirror": {**_PAIR, "speculate": "mirror", "k": 16},
    "mirror, untrained": {**_PAIR, "speculate": "mirror", "k": 16},
    "mirror, oracle": {**_PAIR, "speculate": "mirror", "k": 16},
    "deep, k=8": _DEEP,
    "easy: deep in groups of 4": {**_DEEP, "fuzzy": 4},
}


class Oracle(ExitModel):
    """An exit that knows what will be written, where the same texts are asked for again and again in this order."""

    texts: ClassVar[list[TokenIds]] = []

    def _heard(self, ear: Ear, batch: StepBatch, x: object) -> Told:
        rows = np.repeat(batch.table_rows, np.diff(batch.query_starts))[batch.logit_rows].tolist()
        told = dict[int, list[tuple[Sequence[int], Sequence[float]]]]()
        for row, place in zip(rows, batch.positions[batch.logit_rows].tolist(), strict=True):
            if row in ear.rows:
                key = ear.rows[row][0]
                coming = self.texts[(key - 1) % len(self.texts)][place + 1 : place + 2]
                told.setdefault(key, []).append((coming, [1.0] * len(coming)))
        return told


@contextmanager
def _exit(arm: str) -> Generator[None]:
    """An engine that is opened meanwhile has the exit of its arm."""
    build.__dict__["ExitModel"] = Oracle if "oracle" in arm else ExitModel
    try:
        yield
    finally:
        build.__dict__["ExitModel"] = ExitModel


def live(options: Options) -> list[Table]:
    """One sequence at a time, as long as there is one problem after the other."""
    spent, tables = Spent(), list[Table]()
    for pad in options.pick(("",), ("", "20M", "200M"), ("", "20M", "200M")):
        say(f"overlap: the embedded target{pad and f' padded to {pad}'}")
        tables.append(_table(options, pad, spent))
    return tables


def _table(options: Options, pad: str, spent: Spent) -> Table:
    count, rounds = (2, 3) if pad == "200M" else (options.pick(2, 4, 8), options.pick(2, 5, 9))
    with start_blocking_portal() as portal, ExitStack() as stack:
        lab, bare = Lab(options, portal), stack.enter_context(TemporaryDirectory())
        engines = dict[str, LocalEngine]()
        for name, changes in _ARMS.items():
            with _exit(name):
                engines[name] = stack.enter_context(lab.engine(_folder(name, Path(bare)), **{"pad": pad, **changes}))
        problems = [one.text for one in arithmetic("test", count)]
        requests = asked(engines["plain"], problems, 160, options.seed)
        texts = dict[str, list[TokenIds]]()
        for name, engine in engines.items():
            texts[name] = [portal.call(engine.sample, one).ids for one in requests]
            Oracle.texts = [one.ids + text for one, text in zip(requests, texts["plain"], strict=True)]
        before = {name: engine.loop_stats() for name, engine in engines.items()}
        seen = interleaved({name: partial(_seconds, lab, each, requests) for name, each in engines.items()}, rounds)
        rows = list[Row]()
        for name, engine in engines.items():
            now, then = engine.loop_stats(), before[name]
            tokens = now.sampled_tokens - then.sampled_tokens
            overlap = now.speculation.overlap if now.speculation is not None else None
            guessed = overlap.hits + overlap.misses if overlap is not None else 0
            rows.append(
                (
                    name,
                    texts[name] == texts["plain"],
                    str(ratio(seen, "plain", name)),
                    tokens / (now.steps - then.steps),
                    overlap.hits / guessed if overlap is not None and guessed else None,
                    overlap.late / (overlap.late + guessed) if overlap is not None and guessed else None,
                    overlap.wasted / guessed if overlap is not None and guessed else None,
                    overlap.passes / overlap.drafted if overlap is not None and overlap.drafted else None,
                )
            )
    title = f"One sequence at a time, over plain decoding, embedded target{pad and f' at the cost of {pad} weights'}"
    header = "arm | same texts | speed-up | tokens a step | hit rate | late | wasted a step | draft passes a token"
    return Table.of(title, header, rows, f"{count} texts, {rounds} rounds in turn.", spent.disturbance())


def _folder(arm: str, bare: Path) -> Path:
    """The embedded target; for an untrained exit, a copy of its files without the adapter."""
    if "untrained" not in arm:
        return path("target")
    for file in path("target").iterdir():
        if file.is_file():
            copyfile(file, bare / file.name)
    return bare


def _seconds(lab: Lab, engine: LocalEngine, requests: list[SampleRequest]) -> float:
    """Wall seconds of all, one after the other: both threads of an arm count."""
    return wall_seconds(lambda: [lab.portal.call(send_all, engine, [one]) for one in requests])
