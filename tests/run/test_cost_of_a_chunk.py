"""Tests of the work for one accepted chunk: function calls, calls between files, engine calls, and
journal lines.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import anyio
import pytest

import atts.core
from atts.api import Setup
from atts.core import Turn
from atts.evaluators.datasets.arithmetic import problems
from atts.journal import (
    JOURNAL,
    CallSpan,
    Event,
    JournalOptions,
    Observed,
    Sampled,
    Scored,
    TurnFinished,
    read_entries,
)
from atts.run import CallBegun, Notice, RunOptions, evaluate

pytest.importorskip("torch", reason="the embedded models run on torch")
from atts.local import LocalEngine
from atts.models import EMBEDDED, path

pytestmark = pytest.mark.both
FOLDERS = {
    Path(atts.core.__file__).resolve().parent,
    *(
        Path(atts.core.__file__).resolve().parents[1] / name
        for name in ("calibration", "evaluators", "pipelines")
    ),
}
# The limit is slightly above the measured number, because one or two calls depend on whether a
# queue is empty.
FUNCTIONS = 102
FILES = 21
CALLS = 145
CHANGES = 69  # largest number of calls from one file into another
LINES = 5


def in_project(code: CodeType) -> bool:
    """Return whether a function belongs to this project; comprehensions and generated methods are
    excluded.
    """
    if code.co_name.startswith("<") and code.co_name != "<lambda>":
        return False
    return not FOLDERS.isdisjoint(Path(code.co_filename).resolve().parents)


def is_by_the_clock(frame: FrameType) -> bool:
    """Return whether a worker only reports its counters, which it does a few times a second at any
    load.
    """
    report = (
        frame.f_locals.get("report") if frame.f_code.co_name in ("_hand_over", "_deliver") else None
    )
    return report is not None and not report.replies


@dataclass
class Meter:
    """A profiler that lists the calls of each turn, from its first request until the turn is
    recorded.

    Resuming a coroutine does not count as a call.
    """

    calls: list[CodeType] = field(default_factory=list[CodeType])
    turns: list[tuple[Turn, list[CodeType]]] = field(
        default_factory=list[tuple[Turn, list[CodeType]]]
    )
    seen: set[FrameType] = field(default_factory=set[FrameType])

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count a call; this is the callback for `sys.setprofile`."""
        if event == "call" and frame not in self.seen and not is_by_the_clock(frame):
            self.seen.add(frame)
            self.calls.append(frame.f_code)

    def recalled(self, event: Event) -> None:
        """Ignore earlier sessions; there are none."""

    def notify(self, event: Notice) -> None:
        """Start a turn when the draft gets a request, and end it when the turn is recorded."""
        if isinstance(event, CallBegun) and event.stage == "draft":
            self.calls = []
        elif isinstance(event, TurnFinished):
            self.turns.append((event.turn, self.calls))
            self.calls = []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Meter, Path]:
    """Run one problem with one rollout of the embedded models, each in its own process, and write a
    journal.
    """
    meter = Meter()
    directory = tmp_path_factory.mktemp("run")
    base = Setup()
    setup = replace(
        base, policy=replace(base.policy, samples=1, early_stop="none"), rate=0.0, seed=11
    )

    async def main() -> None:
        draft, target = (LocalEngine(path(role), name=role) for role in EMBEDDED)
        async with draft, target:
            # sync only at the end, because periodic syncs would fall into the middle of a chunk
            journal = JournalOptions(durability="close")
            session = RunOptions(directory, [meter], journal, engines="are open", signals="ignore")
            sys.setprofile(meter.profile)
            try:
                await evaluate(problems("test", 1), setup.plan(draft, target), session)
            finally:
                sys.setprofile(None)

    anyio.run(main)
    return meter, directory


def test_an_accepted_chunk_passes_few_functions(run: tuple[Meter, Path]) -> None:
    """An accepted chunk takes a limited number of function calls, from the request to the draft
    until the turn is recorded.

    The first turns are not counted, because modules are imported during these turns.
    """
    meter, _ = run
    accepted = [
        calls
        for turn, calls in meter.turns
        if turn.index > 1 and turn.decision and not turn.decision.escalate
    ]
    assert accepted
    for calls in accepted:
        ours = [code for code in calls if in_project(code)]
        files = [code.co_filename for code in ours]
        changes = sum(before != after for before, after in pairwise(files))
        functions = Counter(ours)
        listed = "\n".join(
            sorted(f"{n:3} {code.co_filename} {code.co_qualname}" for code, n in functions.items())
        )
        counts = (
            f"{len(functions)} functions in {len(set(files))} files, {len(ours)} calls, "
            f"{changes} changes of file:\n{listed}"
        )
        assert len(functions) <= FUNCTIONS, counts
        assert len(set(files)) <= FILES, counts
        assert len(ours) <= CALLS, counts
        assert changes <= CHANGES, counts


def test_an_accepted_chunk_is_five_lines_of_the_journal(run: tuple[Meter, Path]) -> None:
    """An accepted chunk adds at most five lines to the journal. Its two call spans are stored
    within these lines.
    """
    _, directory = run
    entries = list(read_entries(directory / JOURNAL))
    ends = [place for place, entry in enumerate(entries) if isinstance(entry.event, TurnFinished)]
    assert len(ends) > 2
    for begin, end in zip(ends, ends[1:], strict=False):
        chunk = entries[begin + 1 : end + 1]
        kinds = Counter(type(entry.event) for entry in chunk)
        assert (kinds[Sampled], kinds[Scored], kinds[CallSpan], kinds[Observed]) == (1, 1, 2, 1)
        assert len({entry.number for entry in chunk}) <= LINES
