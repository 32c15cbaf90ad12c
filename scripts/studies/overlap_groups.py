"""EasySpec on this machine: the time that drafting takes in groups of attentions, and how much of it stands."""

from __future__ import annotations

from functools import partial
from typing import get_args

import numpy as np
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from atts.evaluators.datasets.arithmetic import problems as arithmetic
from atts.local import LocalEngine, LocalOptions
from atts.local.batch import single_rows
from atts.local.compiling import native_library
from atts.local.drafting import Calibration, FuzzyDrafter
from atts.local.loader import load_weights
from atts.local.model_config import read_model_config
from atts.local.native_model import AheadBatch, NativeModel
from atts.models import path
from scripts.studies.harness import Options, Row, Spent, Table, cpu_seconds, interleaved, ratio, say
from scripts.studies.local_subjects import asked

_GROUPS, _CONTEXTS = (1, 2, 3, 4, 6), (60, 150, 250)
_TOKENS, _DRAWS = 8, 10  # drafted at a time, and how often in a round
_K, _DEEP = 4, path("deep")


def groups(options: Options) -> Table:
    """The deep drafter, by the attentions of a group."""
    say("overlap: groups of attentions of the deep drafter")
    spent, times = Spent(), {context: _times(context, options.pick(5, 51, 201)) for context in _CONTEXTS}
    rows = list[Row]()
    with start_blocking_portal() as portal:
        for size in _GROUPS:
            stood = [_stood(portal, size, way, options) for way in get_args(Calibration)[: 2 if size > 1 else 1]]
            gains = [str(ratio(times[context], "1", str(size))) for context in _CONTEXTS]
            rows.append((size, stood[0], stood[1] if size > 1 else None, *gains))
    header = (
        "attentions a group | later places stand, calibrated | not calibrated | drafting after 60 tokens | 150 | 250"
    )
    note = f"Proposals of {_K} tokens, T = 0.7; time of drafting {_TOKENS} tokens in exact steps over that in groups."
    return Table.of("Drafting in groups of attentions", header, rows, note, spent.disturbance())


def _times(context: int, rounds: int) -> dict[str, list[float]]:
    """Seconds by the size of the groups, all in turn."""
    config = read_model_config(_DEEP, "deep")
    weights = load_weights(_DEEP, config, torch.float32, torch.device("cpu"), "deep")
    library, size = native_library("deep", config)[0], (8, 2, 1024, config.num_kv_heads, config.head_dim)
    models = {
        str(group): NativeModel(library, config, weights, torch.full(size, 0.1), 1, group=group) for group in _GROUPS
    }
    return interleaved({name: partial(_draft, model, context) for name, model in models.items()}, rounds)


def _draft(model: NativeModel, context: int) -> float:
    """Processor seconds of some calls that draft."""
    table, row, total = np.arange(1, 1023, dtype=np.int32)[None], np.zeros(1, dtype=np.int64), 0.0
    for _ in range(_DRAWS):
        first, following = (single_rows(row + 5, row + at, row, table) for at in (context, context + 1))
        counts, uniforms = np.ones(_TOKENS, dtype=np.int64), np.full((_TOKENS, 1), 0.5)
        batch = AheadBatch(first, following, counts, torch.ones(1, dtype=torch.float64), uniforms)
        total += cpu_seconds(partial(model.draw_ahead, batch, table))
    return total


def _stood(portal: BlockingPortal, size: int, calibration: Calibration, options: Options) -> float:
    """How often a place after the first stands where all before it do."""
    own = LocalOptions(worker="thread", threads=1, drafter=str(_DEEP), speculate="draft", k=_K, fuzzy=size)
    kept, FuzzyDrafter.calibration = FuzzyDrafter.calibration, calibration
    try:
        with portal.wrap_async_context_manager(LocalEngine(path("target"), options=own)) as engine:
            texts = [one.text for one in arithmetic("test", options.pick(2, 5, 20), seed=5)]
            for request in asked(engine, texts, 300, options.seed):
                portal.call(engine.sample, request)
            told = engine.loop_stats().speculation
    finally:
        FuzzyDrafter.calibration = kept
    assert told is not None, "it speculates"
    return sum(told.stood_at[1:]) / sum(told.tested_at[1:])
