"""Tests of the journal's writer: nothing that it acknowledged is lost, however the run ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import anyio
import anyio.lowlevel
import pytest

from atts import concurrency
from atts.errors import (
    FingerprintError,
    JournalCorrupt,
    JournalLocked,
    JournalVersion,
    OptionError,
    StorageError,
)
from atts.journal import (
    JOURNAL,
    MANIFEST,
    SCHEMA,
    Entry,
    Event,
    Journal,
    JournalOptions,
    Manifest,
    SessionClosed,
    SessionOpened,
    Warned,
    open_journal,
    read_entries,
)
from atts.journal.lines import Durability

pytestmark = pytest.mark.anyio
SETTINGS = Manifest(seed=1)


def texts(directory: Path) -> list[str]:
    """Return the texts of the warnings in a journal."""
    return [
        entry.event.text
        for entry in read_entries(directory / JOURNAL)
        if isinstance(entry.event, Warned)
    ]


async def test_a_resume_continues_the_journal(tmp_path: Path, story: list[Event]) -> None:
    """After a resume line numbers continue, sessions are counted, and the resumed process gets all
    events in order.
    """
    run = tmp_path / "deep" / "run"
    async with open_journal(run, SETTINGS) as journal:
        for event in story[:5]:
            journal.record(event)
    seen: list[Entry] = []
    async with open_journal(run, SETTINGS, on_entry=seen.append) as journal:
        assert [entry.event for entry in seen[1:-1]] == story[:5]
        assert seen[-1].event == SessionClosed("finished")
        for event in story[5:]:
            journal.record(event)
    entries = list(read_entries(run / JOURNAL))
    assert [entry.session for entry in entries] == [1] * 7 + [2] * (len(entries) - 7)
    assert [
        entry.event
        for entry in entries
        if not isinstance(entry.event, SessionOpened | SessionClosed)
    ] == story
    assert sorted(os.listdir(run)) == [JOURNAL, "lock", MANIFEST]


async def test_saved_means_written(tmp_path: Path) -> None:
    """After `saved` returns, another reader sees the event although the session is still open."""
    async with open_journal(tmp_path, SETTINGS) as journal:
        for number in range(5):
            journal.record(Warned("w", str(number)))
            await journal.saved()
            assert texts(tmp_path)[-1] == str(number)


async def test_many_tasks_keep_the_order_of_recording(tmp_path: Path) -> None:
    """However many tasks record events, the lines of the journal have the order of the calls."""
    order: list[str] = []
    async with open_journal(tmp_path, SETTINGS) as journal:

        async def work(name: int) -> None:
            for step in range(20):
                order.append(f"{name}/{step}")
                journal.record(Warned("w", order[-1]))
                await (journal.saved() if step % 3 else anyio.lowlevel.checkpoint())

        async with concurrency.task_group() as group:
            for name in range(20):
                group.start_soon(work, name)
    assert texts(tmp_path) == order


async def test_recorded_events_are_written_at_once(tmp_path: Path) -> None:
    """Recorded events are written at once, also if the caller never waits for `saved`."""
    async with open_journal(tmp_path, SETTINGS) as journal:
        for number in range(20):
            journal.record(Warned("w", str(number)))
            assert len(texts(tmp_path)) == number + 1


async def test_short_writes_are_completed(tmp_path: Path, small_disk: Callable[..., Any]) -> None:
    """If a file accepts only seven bytes at a time, all bytes of the journal are still written."""
    _, opener = small_disk(bite=7)
    async with open_journal(tmp_path, SETTINGS, JournalOptions(opener=opener)) as journal:
        for number in range(20):
            journal.record(Warned("w", str(number)))
    assert texts(tmp_path) == [str(number) for number in range(20)]


async def fill(directory: Path, options: JournalOptions, acknowledged: list[str]) -> None:
    """Record events forever."""
    async with open_journal(directory, SETTINGS, options) as journal:
        while True:
            journal.record(Warned("w", str(len(acknowledged))))
            await journal.saved()
            acknowledged.append(str(len(acknowledged)))


@pytest.mark.parametrize("room", [0, 1, 300, 1_000, 1_001, 1_017, 2_500])
async def test_a_full_disk_loses_nothing_saved(
    tmp_path: Path, small_disk: Callable[..., Any], room: int
) -> None:
    """Every acknowledged event is in the file when the disk becomes full, and the run continues
    once there is space.
    """
    _, opener = small_disk(room=room)
    acknowledged: list[str] = []
    with pytest.raises(StorageError, match="Free some space") as caught:
        await fill(tmp_path, JournalOptions(opener=opener), acknowledged)
    assert caught.value.exit_code == 4
    assert len(acknowledged) <= len(texts(tmp_path)) <= len(acknowledged) + 1
    async with open_journal(tmp_path, SETTINGS) as journal:
        journal.record(Warned("w", "more"))
    assert texts(tmp_path)[: len(acknowledged)] == acknowledged
    assert texts(tmp_path)[-1] == "more"


async def test_a_full_disk_stops_every_writer(
    tmp_path: Path, small_disk: Callable[..., Any]
) -> None:
    """If the disk becomes full, every task that records events gets the error, whether or not it
    waits for `saved`.
    """
    _, opener = small_disk(room=1_000)
    errors: list[StorageError] = []

    async def work(journal: Journal, style: Literal["waits", "only records"]) -> None:
        try:
            while True:
                journal.record(Warned("w", "x" * 50))
                await (journal.saved() if style == "waits" else anyio.lowlevel.checkpoint())
        except StorageError as error:
            errors.append(error)

    async def crowd() -> None:
        async with (
            open_journal(tmp_path, SETTINGS, JournalOptions(opener=opener)) as journal,
            concurrency.task_group() as group,
        ):
            for style in ("waits", "waits", "only records"):
                group.start_soon(work, journal, style)

    with pytest.raises(StorageError):
        await crowd()
    assert len(errors) == 3


async def test_cancelled_runs_keep_what_was_recorded(tmp_path: Path) -> None:
    """If a run is cancelled, its recorded events stay in the journal, which says that the run was
    interrupted.
    """
    with anyio.CancelScope() as scope:
        async with open_journal(tmp_path, SETTINGS) as journal:
            for number in range(10):
                journal.record(Warned("w", str(number)))
            scope.cancel()
            await anyio.sleep_forever()
    assert texts(tmp_path) == [str(number) for number in range(10)]
    last = list(read_entries(tmp_path / JOURNAL))[-1].event
    assert isinstance(last, SessionClosed)
    assert last.status == "interrupted"


async def test_a_failed_run_says_why(tmp_path: Path) -> None:
    """If a run fails, its error is raised unchanged, and the error's message is the journal's last
    line.
    """
    with pytest.raises(ZeroDivisionError):
        async with open_journal(tmp_path, SETTINGS):
            _ = 1 / 0
    assert list(read_entries(tmp_path / JOURNAL))[-1].event == SessionClosed(
        "failed", "ZeroDivisionError: division by zero"
    )


@pytest.mark.parametrize(
    ("durability", "least", "most"), [("always", 10, 13), ("interval", 2, 6), ("close", 1, 1)]
)
async def test_each_durability_syncs_as_documented(
    tmp_path: Path, small_disk: Callable[..., Any], durability: Durability, least: int, most: int
) -> None:
    """With each durability setting the file is synced as documented: before each acknowledgement,
    about once an interval, or once at the end.
    """
    files, opener = small_disk()
    now = 0.0
    options = JournalOptions(
        durability=durability, opener=opener, clock=lambda: now, sync_seconds=3
    )
    async with open_journal(tmp_path, SETTINGS, options) as journal:
        for _ in range(10):
            now += 1
            journal.record(Warned("w", "x"))
            await journal.saved()
    assert least <= files[0].syncs <= most


async def test_an_idle_journal_is_synced_in_time(
    tmp_path: Path, small_disk: Callable[..., Any]
) -> None:
    """With durability "interval" the last events are synced although nothing more is recorded."""
    files, opener = small_disk()
    async with open_journal(
        tmp_path, SETTINGS, JournalOptions(opener=opener, sync_seconds=0.02)
    ) as journal:
        await anyio.sleep(0.05)
        journal.record(Warned("w", "x"))
        await journal.saved()
        before = files[0].syncs
        journal.record(Warned("w", "y"))
        for _ in range(20_000):
            await anyio.sleep(0.005)
            if files[0].syncs > before:
                return
        pytest.fail("the journal was never synced")


async def test_an_unknown_durability_is_refused() -> None:
    """The error about an unknown durability lists the known values, before a file is opened."""
    wrong: Any = "sometimes"
    with pytest.raises(OptionError, match="durability: unknown value 'sometimes'; known: always"):
        JournalOptions(durability=wrong)


async def test_closing_twice_keeps_the_first_reason(tmp_path: Path) -> None:
    """Closing a journal a second time changes nothing, so the first reason is kept."""
    async with open_journal(tmp_path, SETTINGS) as journal:
        await journal.close(SessionClosed("interrupted", "asked to"))
        await journal.close(SessionClosed("finished"))
    entries = list(read_entries(tmp_path / JOURNAL))
    assert [entry.event for entry in entries[1:]] == [SessionClosed("interrupted", "asked to")]


async def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    """A second writer on a directory is refused and changes no file."""
    async with open_journal(tmp_path, SETTINGS) as journal:
        journal.record(Warned("w", "mine"))
        with pytest.raises(JournalLocked):
            async with open_journal(tmp_path, SETTINGS):
                pass
    assert texts(tmp_path) == ["mine"]


def contents(directory: Path) -> dict[str, bytes]:
    """Return the contents of every file but the lock."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "lock"}


async def refused(directory: Path, kind: type[Exception], manifest: Manifest = SETTINGS) -> None:
    """Check that opening raises, and that no file in the directory changes."""
    before = contents(directory)
    with pytest.raises(kind):
        async with open_journal(directory, manifest):
            pass
    assert contents(directory) == before


async def test_bad_directories_are_refused_untouched(tmp_path: Path, story: list[Event]) -> None:
    """Other settings, damage, a newer schema and a lost manifest are errors, and no file is
    overwritten.
    """
    async with open_journal(tmp_path, SETTINGS) as journal:
        for event in story:
            journal.record(event)
    await refused(tmp_path, FingerprintError, replace(SETTINGS, seed=2))
    path = tmp_path / JOURNAL
    whole = (tmp_path / JOURNAL).read_bytes()
    path.write_bytes(whole.replace(b"decision", b"derision", 1))
    await refused(tmp_path, JournalCorrupt)
    path.write_bytes(whole[:-30])
    (tmp_path / MANIFEST).write_text(f'{{"schema": {SCHEMA + 1}}}')
    await refused(tmp_path, JournalVersion)
    (tmp_path / MANIFEST).unlink()
    await refused(tmp_path, JournalCorrupt)


async def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    """A file in place of the directory, and a disk that refuses to open files, are errors."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another run directory"):
        async with open_journal(tmp_path / "file", SETTINGS):
            pass

    def read_only(path: Path) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(StorageError, match="read-only"):
        async with open_journal(tmp_path / "run", SETTINGS, JournalOptions(opener=read_only)):
            pass


async def test_a_torn_last_line_is_removed_on_resume(tmp_path: Path) -> None:
    """However the last line of a journal is torn, the journal resumes and can be read."""
    async with open_journal(tmp_path, SETTINGS) as journal:
        journal.record(Warned("w", "first"))
        await journal.close(SessionClosed("finished"))
    whole = (tmp_path / JOURNAL).read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in (1, last // 2, last - 1, last):
        (tmp_path / JOURNAL).write_bytes(whole[:-cut])
        async with open_journal(tmp_path, SETTINGS) as journal:
            journal.record(Warned("w", "second"))
        assert texts(tmp_path) == ["first", "second"]


async def test_a_torn_first_line_starts_the_run_again(tmp_path: Path) -> None:
    """If even the journal's first line is incomplete, the next start begins the run again as
    session 1.
    """
    async with open_journal(tmp_path, SETTINGS):
        pass
    for size in (0, 1, 20):
        os.truncate(tmp_path / JOURNAL, size)
        async with open_journal(tmp_path, SETTINGS) as journal:
            assert journal.session == 1


async def test_an_interval_is_waited_for_between_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With durability "interval" and an interval of one second, a hundred lines recorded over ten
    seconds cause 3 to 25 syncs.
    """
    synced: list[int] = []
    real = os.fsync

    def counted(handle: int) -> None:
        synced.append(handle)
        real(handle)

    monkeypatch.setattr(os, "fsync", counted)
    times = [0.0]
    options = JournalOptions("interval", sync_seconds=1.0, clock=lambda: times[0])
    async with open_journal(tmp_path / "run", SETTINGS, options) as journal:
        before = len(synced)
        for place in range(100):
            times[0] = place / 10
            journal.record(Warned("line", str(place)))
            # give the worker thread time to sync the file
            for _ in range(20):
                await anyio.sleep(0.0005)
        during = len(synced) - before
    assert 3 <= during <= 25
    assert len(texts(tmp_path / "run")) == 100
