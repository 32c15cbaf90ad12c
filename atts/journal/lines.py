"""Functions and classes that write and read a journal file, in which each line has a number, a date
and a checksum.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Any, Literal, get_args

import anyio
import anyio.lowlevel
import anyio.to_thread
import msgspec
from msgspec import structs

from atts import concurrency
from atts.core import (
    Beginning,
    CallSpan,
    Chunk,
    Completion,
    Decision,
    Prompt,
    Scores,
    Turn,
)
from atts.errors import JournalCorrupt, JournalLocked, JournalVersion, OptionError, StorageError
from atts.files import is_same_file, open_ordinary, refused, storage, sync_directory
from atts.journal.events import (
    KINDS,
    SCHEMA,
    Decided,
    Entry,
    Event,
    Observed,
    OutcomeReached,
    PackedFloats,
    ProblemStarted,
    RolloutFinished,
    RolloutStarted,
    Sampled,
    Scored,
    SessionClosed,
    SessionOpened,
    TurnFinished,
    WrittenChunk,
)

_NO_PROMPT = Prompt((), ())


class _Line(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A line of a journal, for example:
    {"n":17,"at":3.25,"wall":1790000003.25,"event":{"kind":"decided",...},"crc":"5f0c9a1b"}

    A line is complete when it ends in a newline. Each checksum is computed from the line and the
    checksum of the previous line. So a reader detects a line that was removed, inserted or
    moved, even if the line numbers were adapted. JSON has no numbers for infinities and NaN, so
    they are written as the strings "inf", "-inf" and "nan".
    """

    n: int
    at: float
    wall: float
    event: Event
    crc: str = ""


def _plain(value: Any) -> Any:
    """Convert a mapping to a dict. msgspec calls this function for types that it cannot encode
    itself.
    """
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError(
        f"a value of type {type(value).__name__} cannot be written to a journal"
    )


_encode = msgspec.json.Encoder(enc_hook=_plain).encode
# With strict=False, msgspec reads the texts "inf", "-inf" and "nan" as floats. The writer uses
# these texts, because JSON has no such numbers.
_decode = msgspec.json.Decoder(_Line, strict=False).decode


@dataclass(slots=True)
class _OpenTurn:
    """The calls of a rollout since its last recorded turn, and its latest decision since then."""

    calls: list[Sampled] = field(default_factory=list[Sampled])
    decision: Decision | None = None


_NO_CALLS = _OpenTurn()


class OpenRecords:
    """Prompts, calls and decisions from earlier lines that later lines may refer to. Only data of
    open problems is kept.

    A turn refers to its decision and to the calls that wrote its chunks. A rollout refers to the
    prompt of its problem's previous rollout. These references halve the size of the file. The
    writer and the reader process the same events in the same order, so a reference has the same
    meaning for both.
    """

    def __init__(self) -> None:
        # keyed by problem: the prompt of its latest rollout; the next rollout's line may leave out
        # the same prompt
        self.prompts: dict[str, Prompt] = {}
        # calls and decision of each unfinished turn, keyed by problem and sample
        self.turns: dict[str, dict[int, _OpenTurn]] = {}

    def note(self, event: Event) -> None:
        """Store the data of an event that later lines may refer to, and drop data that is no longer
        needed.
        """
        match event:
            case Sampled():
                turns = self.turns.get(event.problem)
                # A call may end after its problem has ended. The problem then has no turns here,
                # and the call is not stored.
                if turns is not None:
                    turns.setdefault(event.sample, _OpenTurn()).calls.append(event)
            case Decided() | Observed():
                turns = self.turns.get(event.decision.question)
                if turns is not None:
                    turns.setdefault(event.decision.sample, _OpenTurn()).decision = event.decision
            case TurnFinished() | RolloutFinished():
                self.turns.get(event.problem, {}).pop(event.sample, None)
            case RolloutStarted():
                if event.problem in self.turns:
                    self.prompts[event.problem] = event.prompt
            case ProblemStarted():
                self.turns[event.problem.id] = {}
            case OutcomeReached():
                self.turns.pop(event.problem, None)
                self.prompts.pop(event.problem, None)
            case _:
                pass


def pack_floats(values: tuple[float, ...]) -> PackedFloats | None:
    """Pack numbers into bytes without loss; return None if `values` is empty."""
    if not values:
        return None
    try:
        narrow = struct.pack(f"<{len(values)}f", *values)
        if struct.unpack(f"<{len(values)}f", narrow) == values:
            return "f4", narrow
    except OverflowError:
        # One of the numbers is too large for a 32-bit float.
        pass
    return "f8", struct.pack(f"<{len(values)}d", *values)


def unpack_floats(packed: PackedFloats | None) -> tuple[float, ...]:
    """Return the numbers that `pack_floats` packed.

    :raises ValueError: the bytes end within a number.
    """
    if packed is None:
        return ()
    form, data = packed
    size, code = (4, "f") if form == "f4" else (8, "d")
    if len(data) % size:
        raise ValueError(f"{len(data)} bytes do not contain a whole number of floats")
    return struct.unpack(f"<{len(data) // size}{code}", data)


def _shortened(event: Event, second: CallSpan | Observed | None, records: OpenRecords) -> Event:
    """Return the short form of an event, as its line stores it."""
    match event:
        case Sampled(completion=whole):
            span = second if isinstance(second, CallSpan) else None
            bare = Completion(whole.ids, whole.text, whole.ended, (), whole.cached_tokens)
            logprobs = pack_floats(whole.logprobs)
            return structs.replace(event, completion=bare, logprobs=logprobs, span=span)
        case Scored(scores=whole):
            span = second if isinstance(second, CallSpan) else None
            beginning = whole.beginning
            beginning_logprobs = None
            if beginning is not None:
                beginning_logprobs = pack_floats(beginning.logprobs)
                beginning = Beginning(beginning.ids, (), beginning.ended)
            return structs.replace(
                event,
                scores=Scores((), whole.cached_tokens, beginning),
                logprobs=pack_floats(whole.logprobs),
                beginning_logprobs=beginning_logprobs,
                span=span,
            )
        case Decided() if isinstance(second, Observed):
            return structs.replace(event, escalated=second.escalated)
        case RolloutStarted(problem=problem, prompt=prompt) if prompt == records.prompts.get(
            problem
        ):
            return structs.replace(event, prompt=_NO_PROMPT, is_repeated=True)
        case TurnFinished(problem=problem, sample=sample, turn=turn):
            noted = records.turns.get(problem, {}).get(sample, _NO_CALLS)
            is_decided = turn.decision is not None and turn.decision == noted.decision
            return TurnFinished(
                problem,
                sample,
                # dataclasses.replace would take several times as long as this constructor.
                Turn(
                    turn.index,
                    (),
                    score=turn.score,
                    decision=None if is_decided else turn.decision,
                    note=turn.note,
                    scored_tokens=turn.scored_tokens,
                    is_forced=turn.is_forced,
                    restarts=turn.restarts,
                ),
                tuple([_written(chunk, noted.calls) for chunk in turn.chunks]),
                tuple([_written(chunk, noted.calls) for chunk in turn.discarded]),
                is_decided,
            )
        case _:
            return event


def _completed(event: Event, records: OpenRecords) -> Event:
    """Return the event of a line, after filling in the fields that the line leaves out.

    :raises ValueError: the line refers to an earlier line that does not exist.
    """
    match event:
        case Sampled(completion=bare):
            logprobs = unpack_floats(event.logprobs)
            whole = Completion(bare.ids, bare.text, bare.ended, logprobs, bare.cached_tokens)
            return structs.replace(event, completion=whole, logprobs=None)
        case Scored(scores=bare):
            beginning = bare.beginning
            if beginning is not None:
                beginning = Beginning(
                    beginning.ids, unpack_floats(event.beginning_logprobs), beginning.ended
                )
            scores = Scores(unpack_floats(event.logprobs), bare.cached_tokens, beginning)
            return structs.replace(event, scores=scores, logprobs=None, beginning_logprobs=None)
        case RolloutStarted(problem=problem, prompt=prompt):
            if event.is_repeated:
                earlier = records.prompts.get(problem)
                if earlier is None:
                    raise ValueError("the line refers to a prompt that does not exist")
                prompt = earlier
            elif prompt.draft_ids == prompt.target_ids:
                # If draft and target share a tokenizer, use one tuple of token ids for both, to
                # save memory.
                prompt = Prompt(prompt.draft_ids, prompt.draft_ids)
            return structs.replace(event, prompt=prompt, is_repeated=False)
        case TurnFinished(problem=problem, sample=sample, turn=turn):
            noted = records.turns.get(problem, {}).get(sample, _NO_CALLS)
            chunks = tuple([_chunk(written, noted.calls) for written in event.chunks])
            discarded = tuple([_chunk(written, noted.calls) for written in event.discarded])
            decision = turn.decision
            if event.is_decided:
                decision = noted.decision
                if decision is None:
                    raise ValueError("the line refers to a decision that does not exist")
            restored = Turn(
                turn.index,
                chunks,
                discarded,
                turn.score,
                decision,
                turn.note,
                scored_tokens=turn.scored_tokens,
                is_forced=turn.is_forced,
                restarts=turn.restarts,
            )
            return TurnFinished(problem, sample, restored)
        case _:
            return event


def _written(chunk: Chunk, calls: list[Sampled]) -> WrittenChunk:
    """Return the form in which a chunk is stored: a reference to the call that wrote it, or the
    whole chunk.

    A reference is possible only if the call's completion is the same as the chunk. They differ if
    the chunk began in a scoring call, if a character was cut, or if only part of the completion was
    used.
    """
    is_draft = chunk.author == "draft"
    ids = chunk.draft_ids if is_draft else chunk.target_ids
    other_ids = chunk.target_ids if is_draft else chunk.draft_ids
    other = None if other_ids == ids else other_ids
    for number, call in enumerate(calls):
        completion = call.completion
        if (
            call.role != chunk.author
            or completion.text != chunk.text
            or completion.ended != chunk.ended
            or completion.logprobs != chunk.logprobs
        ):
            continue
        if completion.ids == ids:
            return WrittenChunk(chunk.author, number, other_ids=other)
        if completion.ids[:-1] == ids:
            return WrittenChunk(chunk.author, number, drops_end=True, other_ids=other)
    return WrittenChunk(
        chunk.author,
        text=chunk.text,
        ended=chunk.ended,
        ids=ids,
        other_ids=other,
        logprobs=pack_floats(chunk.logprobs),
    )


def _chunk(written: WrittenChunk, calls: list[Sampled]) -> Chunk:
    """Return a chunk of a turn, from the turn's line or from the recorded call that wrote the
    chunk.
    """
    if written.call is None:
        ids = written.ids
        text = written.text
        ended = written.ended
        logprobs = unpack_floats(written.logprobs)
    else:
        if not 0 <= written.call < len(calls):
            raise ValueError(f"the line refers to call {written.call}, which does not exist")
        completion = calls[written.call].completion
        ids = completion.ids[:-1] if written.drops_end else completion.ids
        text = completion.text
        ended = completion.ended
        logprobs = completion.logprobs
    other_ids = ids if written.other_ids is None else written.other_ids
    if written.author == "draft":
        return Chunk("draft", text, ids, other_ids, ended, logprobs)
    return Chunk("target", text, other_ids, ids, ended, logprobs)


class LineWriter:
    """A writer that converts events to numbered lines with chained checksums. To
    append to a journal, it continues the numbers and checksums of the lines that a reader has read.
    """

    def __init__(self, number: int = 0, crc: int = 0, records: OpenRecords | None = None) -> None:
        self.number = number
        self._crc = crc
        self._records = OpenRecords() if records is None else records

    def line(
        self, event: Event, at: float, wall: float, second: CallSpan | Observed | None = None
    ) -> bytes:
        """Return the line of an event and, if given, of a second event, which is stored in the same
        line.
        """
        shortened = _shortened(event, second, self._records)
        self._records.note(event)
        line = _Line(self.number, round(at, 6), round(wall, 3), shortened)
        try:
            body = _encode(line)
            # msgspec writes null for infinities and NaN. So a line with null may have lost such a
            # number.
            is_strict = b"null" not in body or _is_finite(shortened)
        except UnicodeEncodeError:
            # The text contains one half of a surrogate pair. Python allows this, but UTF-8 cannot
            # encode it.
            body = b""
            is_strict = False
        if not is_strict:
            body = _with_texts(line)
        body = body[:-1]
        self._crc = zlib.crc32(body, self._crc)
        self.number += 1
        return b'%b,"crc":"%08x"}\n' % (body, self._crc)


def _is_finite(event: Event) -> bool:
    """Return True if every float of the event is certainly finite; JSON can write only finite
    floats.

    For the most frequent kinds of events, this check is faster than a search through all values.
    For other kinds, the result is always False.
    """
    numbers: list[float | None]
    decision: Decision | None = None
    match event:
        case Sampled() | Scored():
            # The log-probabilities are packed into bytes, and the times of a span are always
            # finite. So only `seconds` has to be checked.
            numbers = [event.seconds]
        case Decided():
            decision = event.decision
            numbers = [*event.features.values()]
        case Observed():
            decision = event.decision
            numbers = []
        case TurnFinished(turn=turn):
            decision = turn.decision
            numbers = [turn.score]
        case _:
            return False
    if decision is not None:
        numbers += (decision.rate, decision.score, decision.p, decision.length)
    return all(number is None or math.isfinite(number) for number in numbers)


def _with_texts(line: _Line) -> bytes:
    """Return a line as JSON, with infinities and NaN written as strings."""

    def worded(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {name: worded(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [worded(part) for part in value]
        return value

    plain = worded(msgspec.to_builtins(line, enc_hook=_plain))
    return json.dumps(plain, separators=(",", ":"), allow_nan=False).encode()


Opener = Callable[[Path], FileIO]
"""A function that opens a file for appending.

The file's `write` may write fewer bytes than it was given, for example if the disk is full.
"""


def open_append(path: Path) -> FileIO:
    """Open an unbuffered file for appending, and create it if it is missing."""
    return path.open("ab", buffering=0)


def write_all(file: FileIO, data: bytes) -> None:
    """Append all bytes to the file, with several calls of `file.write` if necessary.

    :raises OSError: writing to the disk fails; a part of `data` may have been written.
    """
    view = memoryview(data)
    while view:
        taken = file.write(bytes(view))
        if not taken:
            raise OSError(errno.EIO, "the system did not write all bytes to the file")
        view = view[taken:]


Durability = Literal["always", "interval", "close"]
"""The point at which recorded lines are synced to the disk. Lines that are not synced are lost if
the machine loses power.

"always": before `saved` returns. "interval": after at most `sync_seconds`, by default one second.
"close": when the journal is closed.
"""


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """Options of a journal's writer; the default `clock` is the clock of the running event loop.

    With a virtual clock, use the durability "close". Thousands of virtual seconds pass quickly, but
    a sync after each of them takes real time.

    :raises OptionError: the durability is unknown.
    """

    durability: Durability = "interval"
    sync_seconds: float = 1.0
    opener: Opener = open_append
    clock: Callable[[], float] | None = None
    wall: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.durability not in get_args(Durability):
            raise OptionError(
                "durability", f"unknown value {self.durability!r}", get_args(Durability)
            )


class Journal:
    """A run directory that is open for writing, as `open_journal` returns it.

    Events are appended immediately, as whole lines, and synced in the background. An event is in
    the file when `record` returns, so a killed process loses no events. After a power failure, the
    events since the last sync may be lost; how many depends on the durability setting.
    """

    def __init__(self, past: LineReader, options: JournalOptions) -> None:
        path = past.path
        self.path = path
        self.session = past.session + 1
        self._options = options
        self.durability = options.durability
        self._lines = LineWriter(past.number, past.crc, past.records)
        self._clock = options.clock or concurrency.clock()
        self._epoch = self._clock()
        self._synced_at = self._epoch
        with storage(path), ExitStack() as undo:
            self._file = options.opener(path)
            undo.callback(self._file.close)
            sync_directory(path.parent)
            self._size = path.stat().st_size
            undo.pop_all()
        self._recorded = 0  # number of events that were written to the file
        self._synced = 0  # number of these events that were synced to the disk
        self._failure: StorageError | None = None
        self._process = os.getpid()
        self._state: Literal["open", "closed"] = "open"
        self._sync_due = anyio.Event()
        self._sync_done = anyio.Event()
        self._syncs_ended = anyio.Event()

    def record(self, event: Event, second: CallSpan | Observed | None = None) -> None:
        """Append an event as a line, together with `second` if it is given.

        `second` is a call's span, or the observation that followed a decision. The event loop is
        blocked only while the line is copied into the system's cache.

        :raises StorageError: this or an earlier write failed; events before the failure are safe.
        :raises JournalLocked: this is a forked child of the process that opened the journal.
        """
        assert self._state == "open", "an event was recorded after the journal was closed"
        if os.getpid() != self._process:
            raise JournalLocked(
                self.path.parent,
                f"process {self._process} opened the journal, and this process is a forked child "
                "of it",
                "Fork first, then open the run in a single process",
            )
        if self._failure is not None:
            raise self._failure
        now = self._clock()
        options = self._options
        try:
            line = self._lines.line(event, now - self._epoch, options.wall(), second)
            taken = self._file.write(line)
            if taken != len(line):
                write_all(self._file, line[taken or 0 :])
            self._size += len(line)
        except BaseException as error:
            # The file may now end with an incomplete line. So `_fail` prevents all further writes.
            self._fail(error)
            if not isinstance(error, OSError | MemoryError):
                raise
            self._check()
        self._recorded += 1
        is_overdue = (
            options.durability == "interval" and now - self._synced_at >= options.sync_seconds
        )
        if is_overdue or options.durability == "always":
            self._sync_due.set()

    async def saved(self) -> None:
        """Yield to other tasks. With the durability "always", also wait until all recorded events
        are on the disk.

        :raises StorageError: writing to the disk fails.
        """
        until = self._recorded
        await anyio.lowlevel.checkpoint()
        while self.durability == "always" and self._synced < until and self._failure is None:
            await self._sync_done.wait()
        if self._failure is not None:
            raise self._failure

    async def keep_synced(self) -> None:
        """Sync the file whenever a sync is due, until the journal is closed. Cancellation does not
        end this loop.
        """
        wait = self._options.sync_seconds if self._options.durability == "interval" else math.inf
        try:
            with anyio.CancelScope(shield=True):
                while self._failure is None and (
                    self._state == "open" or self._synced < self._recorded
                ):
                    with anyio.move_on_after(wait):
                        await self._sync_due.wait()
                    if self._synced < self._recorded:
                        await self._sync()
        finally:
            self._syncs_ended.set()

    async def close(self, event: SessionClosed) -> None:
        """Record `event`, sync all events to the disk and close the file; closing twice is allowed.

        :raises StorageError: this write or an earlier write failed.
        """
        if self._state != "open":
            return
        try:
            self.record(event)
        finally:
            self._state = "closed"
            self._sync_due.set()
            await self._syncs_ended.wait()
            with storage(self.path):
                self._file.close()
        self._check()

    async def _sync(self) -> None:
        covered = self._recorded
        self._synced_at = self._clock()
        self._sync_due = anyio.Event()
        try:
            size = self._size
            handle = self._file.fileno()
            await anyio.to_thread.run_sync(os.fsync, handle)
            self._look(handle, size)
            self._synced = covered
        except (OSError, MemoryError) as error:
            self._fail(error)
        self._sync_done.set()
        self._sync_done = anyio.Event()

    def _look(self, handle: int, size: int) -> None:
        """Check that the journal's path still leads to the open file, and that the file was not
        shortened.

        :raises OSError: the file was deleted, moved, replaced or shortened.
        """
        if not is_same_file(handle, self.path):
            raise OSError(
                errno.ESTALE,
                "the file was deleted, moved or replaced while the run was writing to it",
            )
        if os.fstat(handle).st_size < size:
            raise OSError(errno.ESTALE, "the file was shortened while the run was writing to it")

    def _fail(self, error: BaseException) -> None:
        self._failure = refused(self.path, error)
        self._failure.__cause__ = error

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


_END = len(b',"crc":"00000000"}\n')
_HEAD = re.compile(rb'\{"n":(\d+),"at":[^,]+,"wall":[^,]+,"event":\{"kind":"([a-z-]+)"')
_KINDS = {word.encode(): kind for word, kind in KINDS.items()}
# The line of an event may also contain a second event. Keys: kinds of the first event. Values: kind
# of the second event.
_SECOND: dict[type[Event], type[Event]] = {Sampled: CallSpan, Scored: CallSpan, Decided: Observed}
# `_REFERRING`: events whose lines leave out data that earlier lines have. `_NOTED`: events that add
# such data to `OpenRecords` or remove it.
_REFERRING: frozenset[type[Event]] = frozenset({TurnFinished, RolloutStarted})
_NOTED: frozenset[type[Event]] = frozenset(
    {
        ProblemStarted,
        RolloutStarted,
        Sampled,
        Decided,
        Observed,
        TurnFinished,
        RolloutFinished,
        OutcomeReached,
    }
)


class LineReader:
    """A reader of a journal. It keeps in memory only one line and the data that later lines may
    refer to.
    """

    def __init__(self, path: Path, kinds: Collection[type[Event]] | None = None) -> None:
        self.path = path
        self.number = 0  # number of the next line, counted from 0
        self.session = 0
        self.length = 0  # length of all lines read so far, in bytes
        # checksum of the line that was read last; the checksum of the next line depends on it
        self.crc = 0
        self.records = OpenRecords()
        self._kinds = kinds

    def entries(self) -> Iterator[Entry]:
        """Yield every event in order. A killed process may leave an incomplete last line, which is
        ignored.

        If `kinds` is given, only events of these kinds and session openings are yielded. The
        checksums of other lines are checked, but these lines are decoded only if a yielded event
        may refer to them. The caller may remove kinds from the set while reading.

        :raises JournalCorrupt: a line before the last is damaged, missing or out of order.
        :raises JournalVersion: another version of atts wrote the journal.
        :raises StorageError: the file cannot be read.
        """
        with storage(self.path), open_ordinary(self.path) as file:
            for line in file:
                try:
                    crc = _checked(line, self.crc)
                    entry = None if self._is_passed_over(line) else self._entry(line)
                except ValueError as error:
                    if file.read(1):
                        raise self._corrupt(str(error)) from error
                    return
                self.number += 1
                self.length += len(line)
                self.crc = crc
                if entry is not None:
                    yield from self._parts(entry)

    def _parts(self, entry: Entry) -> Iterator[Entry]:
        """Split an entry into its one or two events, and yield those of the requested kinds."""
        event = entry.event
        events: tuple[Event, ...]
        if isinstance(event, Sampled | Scored) and event.span is not None:
            events = (structs.replace(event, span=None), event.span)
        elif isinstance(event, Decided) and event.escalated is not None:
            observed = Observed(event.decision, event.escalated)
            events = (structs.replace(event, escalated=None), observed)
        else:
            events = (event,)
        for part in events:
            if self._kinds is None or type(part) in self._kinds or type(part) is SessionOpened:
                yield entry if part is event else replace(entry, event=part)

    def _is_passed_over(self, line: bytes) -> bool:
        """Return True if the line can be skipped because none of its events must be decoded. In
        this case, also count the line as read.
        """
        kinds = self._kinds
        if kinds is None or self.number == 0:
            return False
        head = _HEAD.match(line)
        kind = None if head is None else _KINDS.get(head[2])
        if head is None or kind is None or kind is SessionOpened:
            return False
        if kind in kinds or _SECOND.get(kind) in kinds:
            return False
        if kind in _NOTED and not _REFERRING.isdisjoint(kinds):
            return False
        self._count(int(head[1]))
        return True

    def _entry(self, line: bytes) -> Entry:
        decoded = self._parse(line)
        self._count(decoded.n)
        event = _completed(decoded.event, self.records)
        self.records.note(event)
        if isinstance(event, SessionOpened):
            if event.schema != SCHEMA:
                raise other_version(self.path, event.schema)
            self.session = event.session
        elif self.number == 0:
            raise ValueError("the first line does not open a session")
        return Entry(self.number, self.session, decoded.at, decoded.wall, event)

    def _parse(self, line: bytes) -> _Line:
        try:
            if b"\\ud" in line:
                # The line may contain one half of a surrogate pair, which json accepts and msgspec
                # refuses.
                return msgspec.convert(json.loads(line), _Line, strict=False)
            return _decode(line)
        except msgspec.ValidationError:
            schema = _opened_schema(line)
            if schema is not None and schema != SCHEMA:
                raise other_version(self.path, schema) from None
            raise

    def _count(self, number: int) -> None:
        if number != self.number:
            raise ValueError(
                f"the line is number {number} instead of {self.number}, so lines are missing or "
                "repeated"
            )

    def _corrupt(self, problem: str) -> JournalCorrupt:
        return JournalCorrupt(
            self.path,
            f"line {self.number + 1} is damaged: {problem}",
            "Nothing was overwritten. Restore the file from a copy, or save the lines before the "
            f"damage with `atts journal salvage {self.path.parent} --out NEW` and continue in NEW",
        )


def read_entries(path: Path, kinds: Collection[type[Event]] | None = None) -> Iterator[Entry]:
    """Yield the events of a journal. `LineReader.entries` explains the arguments."""
    return LineReader(path, kinds).entries()


def other_version(path: Path, schema: int) -> JournalVersion:
    """Return the error for a journal or manifest that another version of atts wrote."""
    return JournalVersion(
        path,
        f"the journal has schema {schema}, but this version of atts can read only schema {SCHEMA}",
        "Use the version of atts that wrote the journal, or start a new run in another directory",
    )


def _opened_schema(line: bytes) -> int | None:
    """Return the format version that a session's opening line contains; None for any other line.

    Other fields are ignored, because another version of atts may have written them.
    """
    data: Any = msgspec.json.decode(line)
    if not isinstance(data, dict):
        return None
    event: Any = data.get("event")
    is_opening = isinstance(event, dict) and event.get("kind") == "session-opened"
    schema = event.get("schema") if is_opening else None
    return schema if isinstance(schema, int) else None


def _checked(line: bytes, before: int) -> int:
    """Return the checksum of a line, after comparing it with the checksum written in the line.
    `before` is the checksum of the previous line.

    :raises ValueError: the line is torn, is damaged, or does not belong after the previous line.
    """
    crc = zlib.crc32(line[:-_END], before)
    if line[-_END:] == b',"crc":"%08x"}\n' % crc:
        return crc
    if not line.endswith(b"\n"):
        raise ValueError("the line does not end in a newline")
    if line[-_END:-11] != b',"crc":"':
        raise ValueError("the line has no checksum")
    raise ValueError("the checksum of the line does not match")
