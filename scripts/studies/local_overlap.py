"""Two engines on two cores, and one beside a busy caller: does a thread do, or must it be a process?"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Literal

from anyio.from_thread import BlockingPortal

from atts.core import ScoreRequest
from atts.local import LocalEngine
from scripts.studies.harness import Calm, Options, Spread, Table, interleaved, say, wall_seconds
from scripts.studies.local_subjects import Fresh, Subject, disturbed, engine_on, send_all, unending

Work = Callable[[], Future[int]]
Seen = dict[str, list[float]]
_WORKERS: tuple[Literal["thread", "process"], ...] = ("thread", "process")
_OTHERS = ("target scoring", "target decoding")
_ALONE = ("draft decoding", *_OTHERS)


def overlap(target: Subject, draft: Subject, options: Options, portal: BlockingPortal) -> list[Table]:
    """Draft decoding beside target scoring or decoding, and each beside Python at work in the caller; all in turn."""
    say("two engines at once, in threads and in processes")
    arms: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        folders = {s.name: stack.enter_context(unending(s)) for s in (target, draft)}
        for worker in _WORKERS:
            engines = [
                stack.enter_context(engine_on(portal, folders[s.name], worker=worker, threads=1))
                for s in (target, draft)
            ]
            works = _works((target, engines[0]), (draft, engines[1]), options, portal)
            for name in _ALONE:
                arms[f"{worker}: {name}"] = partial(_together, [works[name]])
                arms[f"{worker}: {name} beside Python"] = partial(_together, [works[name]], caller="busy")
            for other in _OTHERS:
                arms[f"{worker}: {other} and draft"] = partial(_together, [works["draft decoding"], works[other]])
        calm = Calm()
        seen = interleaved(arms, options.pick(2, 5, 7))
    return [_pairs(seen, disturbed(calm)), _beside_python(seen, disturbed(calm))]


def _pairs(seen: Seen, disturbance: str) -> Table:
    rows: list[tuple[str | float, ...]] = []
    for worker in _WORKERS:
        for other in _OTHERS:
            one, two = seen[f"{worker}: draft decoding"], seen[f"{worker}: {other}"]
            both = seen[f"{worker}: {other} and draft"]
            gain = Spread.of([(a + b) / c for a, b, c in zip(one, two, both, strict=True)])
            a, b, c = (Spread.of(values).median for values in (one, two, both))
            rows.append((worker, other, a, b, c, str(gain), (a + b) / max(a, b)))
    columns = ("worker", "draft decoding beside", "draft alone, s", "target alone, s", "both, s", "overlap", "at best")
    notes = ("Overlap: one after the other over both at once; at best, the longer one hides the shorter.", disturbance)
    return Table("Two engines at once on this machine's cores", columns, tuple(rows), notes)


def _beside_python(seen: Seen, disturbance: str) -> Table:
    rows: list[tuple[str | float, ...]] = []
    for worker in _WORKERS:
        for name in _ALONE:
            alone, beside = seen[f"{worker}: {name}"], seen[f"{worker}: {name} beside Python"]
            slower = Spread.of([b / a for a, b in zip(alone, beside, strict=True)])
            rows.append((worker, name, Spread.of(alone).median, Spread.of(beside).median, str(slower)))
    columns = ("worker", "work", "alone, s", "beside a caller busy in Python, s", "ratio")
    notes = (
        "The caller computes in Python without a pause, as parsing or grading does.",
        disturbance,
    )
    return Table("One engine while its caller computes in Python", columns, tuple(rows), notes)


def _works(
    target: tuple[Subject, LocalEngine], draft: tuple[Subject, LocalEngine], options: Options, portal: BlockingPortal
) -> dict[str, Work]:
    """What each engine does in one round, about equally long."""
    targets, drafts = Fresh(target[0], 16, options.seed + 2), Fresh(draft[0], 64, options.seed + 1)
    tokens = options.pick(48, 96, 96)

    def drafting() -> Future[int]:
        return portal.start_task_soon(send_all, draft[1], drafts.requests(2 * tokens))

    def decoding() -> Future[int]:
        return portal.start_task_soon(send_all, target[1], targets.requests(tokens))

    def scoring() -> Future[int]:
        fresh = [request.ids for _ in range(3) for request in targets.requests(1)]
        requests = [ScoreRequest(ids[:1], (ids + ids[::-1])[1:]) for ids in fresh]
        return portal.start_task_soon(send_all, target[1], requests)

    return {"draft decoding": drafting, "target scoring": scoring, "target decoding": decoding}


def _together(works: list[Work], caller: Literal["waits", "busy"] = "waits") -> float:
    """Seconds until all is done, started at once; a busy caller computes until then."""

    def run() -> None:
        started = [work() for work in works]
        while caller == "busy" and not all(future.done() for future in started):
            sum(range(2000))
        for future in started:
            future.result()

    return wall_seconds(run)
