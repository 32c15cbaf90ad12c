"""Measure schemes that draft and verify at the same time, and draw what their devices do."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from html import escape
from pathlib import Path
from shutil import copyfile
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, get_args

import anyio
import numpy as np
import torch
from anyio.from_thread import start_blocking_portal

from atts.accel import build
from atts.accel.grouped import Calibration, GroupedDrafter
from atts.accel.overlap.mirror import ExitGuesses, ExitListener, ExitModel
from atts.core import SampleRequest, TokenIds
from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.local import LocalEngine
from atts.local.batch import StepBatch, single_rows
from atts.local.cpu.compiling import native_library
from atts.local.cpu.model import AheadBatch, NativeModel
from atts.local.loader import load_weights
from atts.local.model_config import read_model_config
from atts.local.seams import OverlapStats
from atts.models import path
from scripts.studies.charts import page
from scripts.studies.harness import (
    Cell,
    Options,
    Row,
    Spent,
    Table,
    cpu_seconds,
    interleaved,
    ratio,
    say,
    wall_seconds,
)
from scripts.studies.local import Lab, asked, send_all
from scripts.studies.overlap_virtual import (
    AcceptanceTrace,
    Costs,
    Timeline,
    ahead,
    closed_forms,
    fuzzy_devices,
    mirror,
    published,
    record,
    recorded,
    serial,
)
from scripts.studies.padded import padded_folder

_WIDTH = 760
_LEFT = 86
_STRIP = 18
_GAP = 30
_UNIT = 108  # pixels of a target step
_COLOURS = {
    "verify": "#2f6fb3", "to the exit": "#6a9bd1", "to the end": "#2f6fb3", "draft": "#c4511d", "branches": "#dd9a6d",
    "attention": "#c4511d", "mlp": "#dd9a6d",
}  # fmt: skip
_NAMES = {
    "draft": "draft; attention",
    "branches": "branches of guesses; MLP",
    "verify": "verify; after the exit",
    "to the exit": "up to the early exit",
}


def schemes() -> dict[str, Timeline]:
    """Run each scheme on the same acceptances, five draft steps per target step."""
    ranks = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2, *[0] * 60]
    trace = AcceptanceTrace(ranks, [rank % 2 for rank in ranks])
    costs = Costs(lambda branches: 0.2)
    exits = Costs(lambda branches: 0.1, message=0.04)
    easy = fuzzy_devices(8, 3, attention=0.5 / 5 / 8, mlp=0.5 / 5 / 8)
    return {
        "Serial: draft 4, verify, draft": serial(trace, costs, 4),
        "PEARL: one guess, everything stands": ahead(trace, costs, 4),
        "SSD: the draft's next choices at every place as well": ahead(trace, costs, 4, 2),
        "Mirror: the target's early exit names what is continued": mirror(trace, exits, 4, 2),
        "EasySpec: attentions of a group of 3 layers at once (8 layers)": serial(trace, costs, 4, easy),
    }  # fmt: skip


def drawn(lines: dict[str, Timeline]) -> str:
    """Draw the picture: time runs from left to right, numbers are tokens written by a step."""
    parts = list[str]()
    top = 40
    for title, line in lines.items():
        parts.append(f'<text class="axis" x="8" y="{top - 8}">{escape(title)}</text>')
        for device in reversed(line.devices):
            parts.append(
                f'<text x="{_LEFT - 8}" y="{top + 13}" '
                f'text-anchor="end">{escape(device.name)}</text>'
            )
            is_target = device.name == "target"
            step = 0
            for work in device.work:
                x = _LEFT + work.begin * _UNIT
                wide = (work.end - work.begin) * _UNIT
                if x + wide > _WIDTH - 6:
                    break
                box = f'x="{x:.1f}" y="{top}" width="{max(1.0, wide - 1):.1f}" height="{_STRIP}"'
                parts.append(
                    f'<rect {box} fill="{_COLOURS[work.what]}"><title>{work.what}</title></rect>'
                )
                if is_target and work.what != "to the exit":
                    place = f'x="{x + wide / 2:.1f}" y="{top + 13}" text-anchor="middle" style="fill:#fff"'
                    parts.append(f"<text {place}>{line.written[step]}</text>")
                    step += 1
            top += _STRIP + 3
        top += _GAP
    for step in range((_WIDTH - _LEFT) // _UNIT + 1):
        parts.append(f'<path class="grid" d="M{_LEFT + step * _UNIT} 14V{top - 20}"/>')
        parts.append(
            f'<text x="{_LEFT + step * _UNIT}" y="{top - 6}" text-anchor="middle">{step}</text>'
        )
    parts.append(f'<text x="{_LEFT - 8}" y="{top - 6}" text-anchor="end">target steps</text>')
    parts += _legend(top + 8)
    return page(
        "What each device does, and how many tokens each step of the target writes",
        _WIDTH,
        top + 34,
        parts,
    )


def _legend(top: int) -> list[str]:
    parts = list[str]()
    for number, (what, name) in enumerate(_NAMES.items()):
        x = 8 + 190 * number
        parts.append(f'<rect x="{x}" y="{top}" width="14" height="14" fill="{_COLOURS[what]}"/>')
        parts.append(f'<text x="{x + 20}" y="{top + 12}">{escape(name)}</text>')
    return parts


_PAIR = {"drafter": str(path("draft"))}
_DEEP = {"drafter": str(path("deep")), "speculate": "draft", "k": 8}
_MIRROR = {**_PAIR, "speculate": "mirror", "k": 16}
_ARMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    # other threads of this process would wake its helpers
    "plain, two threads": {
        "threads": 2,
        "worker": "process",
    },
    "serial, k=4": {**_PAIR, "speculate": "draft", "k": 4},
    "serial, k=8": {**_PAIR, "speculate": "draft", "k": 8},
    "serial, k=auto": {**_PAIR, "speculate": "draft"},
    "auto": {**_PAIR, "speculate": "auto"},
    "pearl": {**_PAIR, "speculate": "pearl", "k": 16},
    "ssd": {**_PAIR, "speculate": "ssd", "k": 16},
    "mirror": _MIRROR,
    "mirror, untrained": _MIRROR,
    "mirror, oracle": _MIRROR,
    "deep, k=8": _DEEP,
    "easy: deep in groups of 4": {**_DEEP, "fuzzy": 4},
}
_GROUPS = (1, 2, 3, 4, 6)
_CONTEXTS = (60, 150, 250)  # attentions together; tokens before what is drafted
_TOKENS = 8
_DRAWS = 10  # drafted at a time, and how often in a round


def study(options: Options) -> list[Table]:
    """Return this machine's tables."""
    return [*live(options), groups(options)]


def study_virtual(options: Options) -> list[Table]:
    """Return the tables in virtual time, which no machine's load changes."""
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out.parent / "acceleration.svg").write_text(drawn(schemes()))
    texts = anyio.run(record, options.pick(6, 16, 200), options.seed)
    return [closed_forms(options), published(options), *recorded(options, texts)]


class Oracle(ExitModel):
    """An exit that knows what will be written, if the same texts are asked for again in this order."""

    texts: ClassVar[list[TokenIds]] = []

    def _heard(self, listener: ExitListener, batch: StepBatch, x: object) -> ExitGuesses:
        rows = np.repeat(batch.table_rows, np.diff(batch.query_starts))[batch.logit_rows].tolist()
        guesses = dict[int, list[tuple[Sequence[int], Sequence[float]]]]()
        for row, place in zip(rows, batch.positions[batch.logit_rows].tolist(), strict=True):
            if row in listener.rows:
                key = listener.rows[row][0]
                coming = self.texts[(key - 1) % len(self.texts)][place + 1 : place + 2]
                guesses.setdefault(key, []).append((coming, [1.0] * len(coming)))
        return guesses


@contextmanager
def _exit(arm: str) -> Generator[None]:
    """Give an engine that is opened meanwhile the exit of its arm."""
    build.__dict__["ExitModel"] = Oracle if "oracle" in arm else ExitModel
    try:
        yield
    finally:
        build.__dict__["ExitModel"] = ExitModel


def live(options: Options) -> list[Table]:
    """Measure one sequence at a time, as if one problem followed the other, with the same texts in
    all arms.
    """
    spent = Spent()
    tables = list[Table]()
    for pad in options.pick(("",), ("", "20M", "200M"), ("", "20M", "200M")):
        say(f"overlap: the embedded target{pad and f' padded to {pad}'}")
        tables.append(_table(options, pad, spent))
    return tables


def _padded(folder: Path, pad: str) -> Path:
    return padded_folder(folder, pad) if pad else folder


def _table(options: Options, pad: str, spent: Spent) -> Table:
    count, rounds = (2, 3) if pad == "200M" else (options.pick(2, 4, 8), options.pick(2, 5, 9))
    with start_blocking_portal() as portal, ExitStack() as stack:
        lab = Lab(options, portal)
        bare = stack.enter_context(TemporaryDirectory())
        engines = dict[str, LocalEngine]()
        for name, changes in _ARMS.items():
            with _exit(name):
                engines[name] = stack.enter_context(
                    lab.engine(_padded(_folder(name, Path(bare)), pad), **changes)
                )
        requests = asked(
            engines["plain"], [one.text for one in arithmetic("test", count)], 160, options.seed
        )
        texts = dict[str, list[TokenIds]]()
        for name, engine in engines.items():
            texts[name] = [portal.call(engine.sample, one).ids for one in requests]
            Oracle.texts = [
                one.ids + text for one, text in zip(requests, texts["plain"], strict=True)
            ]
        before = {name: engine.loop_stats() for name, engine in engines.items()}
        seen = interleaved(
            {name: partial(_seconds, lab, each, requests) for name, each in engines.items()}, rounds
        )
        rows = list[Row]()
        for name, engine in engines.items():
            now = engine.loop_stats()
            then = before[name]
            faster = texts[name] == texts["plain"], str(ratio(seen, "plain", name))
            tokens = (now.sampled_tokens - then.sampled_tokens) / (now.steps - then.steps)
            rows.append(
                (
                    name,
                    *faster,
                    tokens,
                    *_shares(now.speculation.overlap if now.speculation else None),
                )
            )
    title = f"One sequence at a time, over plain decoding, embedded target{pad and f' at the cost of {pad} weights'}"
    header = "arm | same texts | speed-up | tokens a step | hit rate | late | wasted a step | draft passes a token"
    return Table.of(
        title, header, rows, f"{count} texts, {rounds} rounds in turn.", spent.disturbance()
    )


def _shares(found: OverlapStats | None) -> tuple[Cell, ...]:
    """Return hit rate, steps whose guess came too late, wasted tokens and passes; None if nothing
    was guessed.
    """
    guessed = found.hits + found.misses if found else 0
    passes = found.passes / found.drafted if found and found.drafted else None
    if not found or not guessed:
        return None, None, None, passes
    return found.hits / guessed, found.late / (found.late + guessed), found.wasted / guessed, passes


def _folder(arm: str, bare: Path) -> Path:
    """Return the embedded target's folder; for an untrained exit, a copy without the adapter."""
    if "untrained" not in arm:
        return path("target")
    for file in path("target").iterdir():
        if file.is_file():
            copyfile(file, bare / file.name)
    return bare


def _seconds(lab: Lab, engine: LocalEngine, requests: list[SampleRequest]) -> float:
    """Return wall seconds of all requests, one after the other: both threads of an arm count."""
    return wall_seconds(lambda: [lab.portal.call(send_all, engine, [one]) for one in requests])


def groups(options: Options) -> Table:
    """Measure EasySpec on this machine: drafting time in groups of attentions, and the share
    accepted.
    """
    say("overlap: groups of attentions of the deep drafter")
    spent = Spent()
    times = {context: _times(context, options.pick(5, 51, 201)) for context in _CONTEXTS}
    rows = list[Row]()
    with start_blocking_portal() as portal:
        for size in _GROUPS:
            stood = [
                _stood(Lab(options, portal), size, way)
                for way in get_args(Calibration)[: 2 if size > 1 else 1]
            ]
            gains = [str(ratio(times[context], "1", str(size))) for context in _CONTEXTS]
            rows.append((size, stood[0], stood[1] if size > 1 else None, *gains))
    header = "attentions a group | later places stand, calibrated | not calibrated | drafting after 60 tokens | 150 | 250"
    note = f"Proposals of 4 tokens, T = 0.7; time of drafting {_TOKENS} tokens in exact steps over that in groups."
    return Table.of("Drafting in groups of attentions", header, rows, note, spent.disturbance())


def _times(context: int, rounds: int) -> dict[str, list[float]]:
    """Return seconds by the size of the groups, all in turn."""
    config = read_model_config(path("deep"), "deep")
    weights = load_weights(path("deep"), config, torch.float32, torch.device("cpu"), "deep")
    library = native_library("deep", config)[0]
    size = (8, 2, 1024, config.num_kv_heads, config.head_dim)
    models = {
        str(group): NativeModel(library, config, weights, torch.full(size, 0.1), 1, group=group)
        for group in _GROUPS
    }
    return interleaved(
        {name: partial(_draft, model, context) for name, model in models.items()}, rounds
    )


def _draft(model: NativeModel, context: int) -> float:
    """Return processor seconds of some drafting calls."""
    table = np.arange(1, 1023, dtype=np.int32)[None]
    row = np.zeros(1, dtype=np.int64)
    total = 0.0
    for _ in range(_DRAWS):
        first, following = (
            single_rows(row + 5, row + at, row, table) for at in (context, context + 1)
        )
        counts = np.ones(_TOKENS, dtype=np.int64)
        uniforms = np.full((_TOKENS, 1), 0.5)
        batch = AheadBatch(first, following, counts, torch.ones(1, dtype=torch.float64), uniforms)
        total += cpu_seconds(partial(model.draw_ahead, batch, table))
    return total


def _stood(lab: Lab, size: int, calibration: Calibration) -> float:
    """Return how often a position after the first is accepted if all before it are."""
    kept = GroupedDrafter.calibration
    GroupedDrafter.calibration = calibration
    try:
        with lab.engine(path("target"), **{**_DEEP, "k": 4, "fuzzy": size}) as engine:
            texts = [one.text for one in arithmetic("test", lab.options.pick(2, 5, 20), seed=5)]
            for request in asked(engine, texts, 300, lab.options.seed):
                lab.portal.call(engine.sample, request)
            stats = engine.loop_stats().speculation
    finally:
        GroupedDrafter.calibration = kept
    assert stats is not None, "it speculates"
    return sum(stats.accepted_at[1:]) / sum(stats.tested_at[1:])
