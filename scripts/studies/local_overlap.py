"""Two engines beside each other on shared cores, and each beside a caller that computes in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Literal

from atts.core import ScoreRequest
from atts.local import LocalEngine
from scripts.studies.harness import Row, Spent, Spread, Table, interleaved, say, wall_seconds
from scripts.studies.local_subjects import Fresh, Lab, Subject, send_all, unending

Work = Callable[[], Future[int]]
_WORKERS: tuple[Literal["thread", "process"], ...] = ("thread", "process")
_OTHERS = ("target scoring", "target decoding")
_ALONE = ("draft decoding", *_OTHERS)


def overlap(lab: Lab, target: Subject, draft: Subject) -> list[Table]:
    """Draft decoding beside target scoring or decoding, and each beside Python at work in the caller; all in turn."""
    say("two engines at once, in threads and in processes")
    arms: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        folders = [stack.enter_context(unending(subject)) for subject in (target, draft)]
        for worker in _WORKERS:
            engines = [stack.enter_context(lab.engine(folder, worker=worker)) for folder in folders]
            works = _works(lab, (target, draft), engines)
            for name in _ALONE:
                arms[f"{worker}: {name}"] = partial(_together, [works[name]])
                arms[f"{worker}: {name} beside Python"] = partial(_together, [works[name]], caller="busy")
            for other in _OTHERS:
                arms[f"{worker}: {other} and draft"] = partial(_together, [works["draft decoding"], works[other]])
        spent = Spent()
        seen = interleaved(arms, lab.options.pick(2, 5, 7))
    pairs, beside = list[Row](), list[Row]()
    for worker in _WORKERS:
        for other in _OTHERS:
            columns = [seen[f"{worker}: {name}"] for name in ("draft decoding", other, f"{other} and draft")]
            gain = Spread.of([(a + b) / c for a, b, c in zip(*columns, strict=True)])
            a, b, c = (Spread.of(values).median for values in columns)
            pairs.append((worker, other, a, b, c, str(gain), (a + b) / max(a, b)))
        for name in _ALONE:
            alone, busy = seen[f"{worker}: {name}"], seen[f"{worker}: {name} beside Python"]
            slower = Spread.of([b / a for a, b in zip(alone, busy, strict=True)])
            beside.append((worker, name, Spread.of(alone).median, Spread.of(busy).median, str(slower)))
    return [
        Table.of(
            "Two engines at once on this machine's cores",
            "worker | draft decoding beside | draft alone, s | target alone, s | both, s | overlap | at best",
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


def _works(lab: Lab, subjects: tuple[Subject, Subject], engines: Sequence[LocalEngine]) -> dict[str, Work]:
    """What each engine does in one round, about equally long."""
    seed, tokens = lab.options.seed, lab.options.pick(48, 96, 96)
    targets, drafts = Fresh(subjects[0], 16, seed + 2), Fresh(subjects[1], 64, seed + 1)
    start = lab.portal.start_task_soon

    def scoring() -> Future[int]:
        fresh = [request.ids for _ in range(3) for request in targets.requests(1)]
        return start(send_all, engines[0], [ScoreRequest(ids[:1], (ids + ids[::-1])[1:]) for ids in fresh])

    return {
        "draft decoding": lambda: start(send_all, engines[1], drafts.requests(2 * tokens)),
        "target scoring": scoring,
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
