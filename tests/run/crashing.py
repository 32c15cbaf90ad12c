"""Runs that are killed many times or meet a full disk: their child processes, and checks of their
journals.

Run as a program, this file is a small server that forks one evaluation per input line, so that a
child starts in milliseconds. The tests and the study `crash` load this file by its path.
"""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from io import FileIO
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import anyio

from atts.core import (
    Completion,
    Outcome,
    Problem,
    Rollout,
    SampleRequest,
    ScoreRequest,
    Scores,
    Turn,
    Usage,
)
from atts.errors import ATTSError, StorageError
from atts.graph import Limit
from atts.journal import (
    JOURNAL,
    Decided,
    JournalOptions,
    Sampled,
    Scored,
    SessionOpened,
    Warned,
    read_entries,
    read_outcomes,
)
from atts.pipelines import Answers, Chunking, Policy, ThresholdGate
from atts.run import RunOptions, RunSpec, evaluate, request_key
from atts.testing import Latency, ScriptedEngine, toy_answer, toy_groups, toy_problems

DRAFT_SLOTS = 4
TARGET_SLOTS = 2
SLOTS = DRAFT_SLOTS + TARGET_SLOTS
Way = Literal["outside", "die", "refuse"]
KILLS: tuple[Way, ...] = ("outside", "outside", "die", "die")
# file that lists all engine calls, with process and key; each call is listed before the engine is
# called
CALLS = "calls.txt"
FULL = "full"  # written to this file in place of a key when the disk is full for the first time


@dataclass(frozen=True, slots=True)
class Order:
    """The instructions for one child: its directory, and how the child ends."""

    directory: str
    problems: int = 3
    seed: int = 5
    room: int | None = None  # number of bytes that this session can write into its journal
    # effect when the room is used up: "die" is SIGKILL during a write, "refuse" is a full disk
    then: Literal["die", "refuse"] = "die"
    signals: Literal["handle", "ignore"] = "ignore"
    # factor that slows the engines down, so that the kill comes while this child works
    slowness: float = 1.0


class CountingEngine(ScriptedEngine):
    """A scripted engine that records each call as it begins."""

    notes: int = -1

    async def sample(self, request: SampleRequest) -> Completion:
        """Record the call, then sample."""
        self._note(request_key("draft" if self.spec.name == "draft" else "target", request))
        return await super().sample(request)

    async def score(self, request: ScoreRequest) -> Scores:
        """Record the call, then score."""
        self._note(request_key("target", request))
        return await super().score(request)

    def _note(self, key: str) -> None:
        _tell(self.notes, key)


def _tell(notes: int, what: str) -> None:
    os.write(notes, f"{os.getpid()} {what}\n".encode())


class ShortFile(FileIO):
    """An append-only file with limited room: at its end the process is killed, or the disk appears
    full.
    """

    def __init__(self, path: Path, room: int, then: Literal["die", "refuse"]) -> None:
        super().__init__(path, "ab")
        self._calls = os.open(path.with_name(CALLS), os.O_WRONLY | os.O_APPEND)
        self._room = room
        self._then = then

    def write(self, data: Any, /) -> int:
        """Write the bytes that fit; at the end of the room, kill the process or raise an error."""
        taken = super().write(data[: self._room]) or 0
        self._room -= taken
        if not self._room and self._then == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if not taken:
            _tell(self._calls, FULL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return taken

    def close(self) -> None:
        """Close the list of calls too."""
        if self._calls >= 0:
            os.close(self._calls)
            self._calls = -1
        super().close()


@dataclass(frozen=True, slots=True)
class Said:
    """A verdict of the test's grader."""

    status: Literal["equal", "different", "unscored"]
    rule: str = "same text"


def grade(answer: str, problem: Problem) -> Said:
    """Grade an answer as correct if it equals the reference as a string."""
    return Said("equal" if answer == problem.answer else "different")


def play(order: Order) -> int:
    """Evaluate in a child, resuming from the recorded events, and return how the run ended."""
    directory = Path(order.directory)
    directory.mkdir(parents=True, exist_ok=True)
    slowness = order.slowness
    latency = Latency(per_sample=0.004 * slowness, per_score=0.002 * slowness, jitter=1.0)
    draft = CountingEngine("draft", latency=latency)
    target = CountingEngine("target", latency=latency)
    draft.notes = target.notes = os.open(directory / CALLS, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    plan = RunSpec(
        draft,
        target,
        Policy(samples=3, turns=5, chunking=Chunking(12, 12, ()), early_stop="none"),
        ThresholdGate(1.3),
        Answers(toy_answer, toy_groups),
        grade,
        concurrency=8,
        limits={"draft": Limit(slots=DRAFT_SLOTS), "target": Limit(slots=TARGET_SLOTS)},
    )
    room = order.room
    journal = (
        JournalOptions()
        if room is None
        else JournalOptions(opener=lambda path: ShortFile(path, room, order.then))
    )
    session = RunOptions(directory, journal=journal, signals=order.signals)
    result = anyio.run(evaluate, toy_problems(order.problems, order.seed), plan, session)
    return result.exit_code


def main(directory: str) -> None:
    """Run one order as the command line does: print errors as messages, and return the exit code."""
    try:
        code = play(Order(directory))
    except ATTSError as error:
        sys.stderr.write(f"{error}\n")
        code = error.exit_code
    sys.exit(code)


def serve() -> None:
    """Fork a child for each order read; reply with the child's process id, and later with how it
    ended.
    """
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = play(Order(**json.loads(line)))
            except ATTSError as error:
                code = error.exit_code
            finally:
                os._exit(code)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


class Nursery:
    """The parent's connection to the server of children."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def start(self, order: Order) -> int:
        """Begin a child, and return its process id."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def wait(self) -> int:
        """Return the exit code of the child started last, or minus the number of the signal that
        killed it.
        """
        return self._answer()

    def run(self, order: Order) -> int:
        """Run a child from beginning to end."""
        self.start(order)
        return self.wait()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the server of child processes died"
        return int(line)


@contextmanager
def nursery() -> Generator[Nursery, None, None]:
    """Start a server of children, and stop it at the end."""
    command = [sys.executable, str(Path(__file__).resolve())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Nursery(process)
        finally:
            process.kill()


def kill_when(child: int, path: Path, size: int, pause: float) -> None:
    """Kill a child `pause` seconds after its journal has reached a size, unless the child has
    already ended.
    """
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if path.stat().st_size >= size:
                break
            os.kill(child, 0)
        except FileNotFoundError:
            pass
        except ProcessLookupError:
            return
        time.sleep(0.0005)
    time.sleep(pause)
    try:
        os.kill(child, signal.SIGKILL)
    except ProcessLookupError:
        return


@dataclass(frozen=True, slots=True)
class Crashes:
    """Counts of kills, sessions and calls in a run that is killed many times."""

    kills: int
    full_disks: int
    sessions: int
    recalled: int  # recorded calls of earlier sessions that were not repeated
    repeated: int  # repeated calls, which were in flight at a kill and not recorded


def crash_runs(
    children: Nursery, folder: Path, whole: int, kills: int, seed: int, *, most: int = 10
) -> Generator[tuple[Path, Crashes], None, None]:
    """Kill runs exactly `kills` times in total, and each run at most `most` times (see `crash`)."""
    number = unharmed = 0
    while kills:
        directory = folder / f"run {number}"
        found = crash(children, directory, whole, min(most, kills), seed * 1000 + number)
        kills -= found.kills
        # on a busy machine, a run may end before the test kills it
        unharmed += not found.kills
        assert unharmed < 5, "runs end before they can be killed"
        number += 1
        yield directory, found


def crash(children: Nursery, directory: Path, whole: int, kills: int, seed: int) -> Crashes:
    """Kill a run repeatedly at seeded points, then let it finish.

    Of every five sessions, one meets a full disk, the test kills two, and two are killed in the
    middle of a write. After each session, the complete lines of its journal must be the beginning
    of every later journal. A run may finish before its kill. `whole` is the size of the journal of
    a run without kills.

    :raises AssertionError: a record changed, or a recorded call was made again.
    """
    draws = random.Random(seed)
    ways: Iterator[Way] = cycle(("refuse", *draws.sample(KILLS, len(KILLS))))
    path = directory / JOURNAL
    dead = full = 0
    while dead < kills:
        before = path.read_bytes() if path.exists() else b""
        step = draws.randrange(1, max(2, (whole - len(before)) // (kills - dead)))
        code = _interrupt(
            children, directory, len(before) + step, step, next(ways), draws.random() * 0.01
        )
        assert path.read_bytes().startswith(before[: before.rfind(b"\n") + 1]), (
            "a recorded line has changed"
        )
        dead += code == -signal.SIGKILL
        full += code == StorageError.exit_code
        assert code in (0, -signal.SIGKILL, StorageError.exit_code), f"a child ended with {code}"
        if code == 0:
            break
    else:
        assert children.run(Order(str(directory))) == 0
    return Crashes(dead, full, *check_calls(directory))


def _interrupt(
    children: Nursery, directory: Path, size: int, step: int, way: Way, pause: float
) -> int:
    """Run one session, interrupt it after its journal has grown by `step` bytes to `size`, and
    return its exit code.
    """
    order = Order(str(directory))
    if way != "outside":
        return children.run(replace(order, room=step, then=way))
    child = children.start(order)
    kill_when(child, directory / JOURNAL, size, pause)
    return children.wait()


def check_calls(
    directory: Path, interruptions: Literal["none", "some"] = "none"
) -> tuple[int, int, int]:
    """Check that no recorded call was made again; return the number of sessions, of recalled calls
    and of repeated calls.

    :raises AssertionError: a recorded call was made again.
    """
    entries = list(read_entries(directory / JOURNAL))
    recorded: dict[int, set[str]] = {}
    pids: dict[str, int] = {}
    for entry in entries:
        if isinstance(entry.event, Sampled | Scored):
            recorded.setdefault(entry.session, set()).add(entry.event.key)
        elif isinstance(entry.event, SessionOpened):
            pids[str(entry.event.pid)] = entry.session
    begun: dict[str, set[str]] = {}
    # keys of calls that began after the disk was full, because their tasks had not noticed it yet
    late: dict[str, set[str]] = {}
    seen: set[str] = set()
    repeated = 0
    for line in (directory / CALLS).read_text().splitlines():
        pid, key = line.split()
        if key == FULL:
            late.setdefault(pid, set())
            continue
        (late if pid in late else begun).setdefault(pid, set()).add(key)
        repeated += key in seen
        seen.add(key)
    for pid in begun.keys() | late.keys():
        keys = begun.get(pid, set())
        session = pids.get(pid, 0)  # 0 if the process died before its first line was complete
        earlier = set().union(
            *(found for number, found in recorded.items() if 0 < number < session)
        )
        assert not (keys | late.get(pid, set())) & earlier, (
            f"session {session} repeated recorded calls"
        )
        lost = len(keys - recorded.get(session, set()))
        assert lost <= SLOTS, (
            f"session {session} lost {lost} calls, and only {SLOTS} can have been in flight"
        )
    last = max(recorded, default=0)
    recalled = sum(len(found) for number, found in recorded.items() if number < last)
    warnings = {entry.event.code for entry in entries if isinstance(entry.event, Warned)}
    assert warnings <= ({"interrupted"} if interruptions == "some" else set()), warnings
    return len(pids), recalled, repeated


def decisions(directory: Path) -> dict[tuple[str, int, int], str]:
    """Return all recorded decisions; these runs have one decision per question, sample and turn."""
    found: dict[tuple[str, int, int], str] = {}
    for entry in read_entries(directory / JOURNAL):
        if isinstance(entry.event, Decided):
            decision = replace(entry.event.decision, issue=0)
            place = (decision.question, decision.sample, decision.turn)
            assert place not in found, f"decided twice: {place}"
            found[place] = repr(decision)
    return found


def outcomes(directory: Path) -> dict[str, str]:
    """Return all outcomes without timing."""
    return {
        outcome.problem.id: essence(outcome)
        for outcome in read_outcomes(read_entries(directory / JOURNAL))
    }


def essence(outcome: Outcome) -> str:
    """Return an outcome without the facts that depend on timing, such as caches and the order of
    calls.

    If sibling rollouts have equal chunks, timing decides which of them is charged for the score, so
    only the sum is kept.
    """
    rollouts: list[Rollout] = []
    for rollout in outcome.rollouts:
        turns = tuple(map(_timeless_turn, rollout.turns))
        usage = replace(_timeless(rollout.usage), scored_tokens=0, calls=0)
        rollouts.append(replace(rollout, turns=turns, usage=usage))
    return repr(replace(outcome, rollouts=tuple(rollouts), usage=_timeless(outcome.usage)))


def _timeless_turn(turn: Turn) -> Turn:
    decision = turn.decision and replace(turn.decision, issue=0)
    return replace(turn, decision=decision, scored_tokens=0)


def _timeless(usage: Usage) -> Usage:
    return replace(usage, draft_prefill_tokens=0, target_prefill_tokens=0)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(sys.argv[1])
    else:
        serve()
