"""Tests of the lock of a run directory, which its process releases when it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from atts.errors import JournalLocked, StorageError
from atts.journal import (
    JOURNAL,
    LOCK,
    Journal,
    JournalOptions,
    Manifest,
    Warned,
    check_directory,
    locked,
    open_journal,
)
from atts.journal.lines import Durability
from atts.testing import run_virtual

HOLDER = """
import sys, time
from pathlib import Path
from atts.journal import locked
with locked(Path(sys.argv[1]), Path(sys.argv[1]).parent):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    """A second process is refused with the process id of the lock's holder, and killing the holder
    by SIGKILL frees the lock.
    """
    lock = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(JournalLocked, match=f"process {holder.pid}"), locked(lock, tmp_path):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    with locked(lock, tmp_path):
        assert lock.read_text() == f"{os.getpid()}\n"


SURVIVED = """
import os, sys, time
from pathlib import Path
from atts.journal import locked
with locked(Path(sys.argv[1]), Path(sys.argv[1]).parent):
    if os.fork():
        os._exit(0)
    print(os.getpid(), flush=True)
    sys.stdin.read()
print("child left the block", flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    """A worker process forked by a library does not prevent a resume after its parent has died."""
    lock = tmp_path / "lock"
    command = [sys.executable, "-c", SURVIVED, str(lock)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert parent.wait(30) == 0
        os.kill(child, 0)  # raises an error unless the child still runs
        with locked(lock, tmp_path):
            assert lock.read_text() == f"{os.getpid()}\n"
        assert parent.stdin is not None
        parent.stdin.close()
        # The child leaves its `with` block without closing the file a second time.
        assert parent.stdout.read() == b"child left the block\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_frees_no_lock_and_writes_no_line(tmp_path: Path) -> None:
    """A forked child neither frees the lock nor writes a line.

    The parent continues writing, and the child's copy of the journal refuses to write.
    """

    def fork(journal: Journal) -> None:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                journal.record(Warned("of the child", "x"))
            except JournalLocked as error:
                code = 0 if "forked child" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(JournalLocked):
            check_directory(tmp_path)

    run_virtual(partial(write, tmp_path, fork))
    assert "of the child" not in (tmp_path / JOURNAL).read_text()


def test_the_lock_holds_within_one_process_too(tmp_path: Path) -> None:
    """Two writers of one process on one directory exclude each other as well."""
    with locked(tmp_path / "lock", tmp_path):
        with (
            pytest.raises(JournalLocked, match=str(os.getpid())),
            locked(tmp_path / "lock", tmp_path),
        ):
            pass
    with locked(tmp_path / "lock", tmp_path):
        pass


def test_a_lock_that_is_a_link_is_refused_and_its_target_untouched(tmp_path: Path) -> None:
    """Neither the lock nor the journal follows a link, so the link's target is not changed."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name in (LOCK, JOURNAL):
        run = tmp_path / f"run-{name}"
        run.mkdir()
        (run / name).symlink_to(victim)
        with pytest.raises(StorageError, match="link"):
            run_virtual(partial(write, run, lambda journal: None))
        assert victim.read_text() == "precious"


def test_a_deleted_lock_lets_no_second_writer_in(tmp_path: Path) -> None:
    """Deleting the lock's file does not admit a second writer, because the journal itself is locked
    too.
    """

    def second(journal: Journal) -> None:
        (tmp_path / LOCK).unlink()
        with pytest.raises(JournalLocked, match=JOURNAL):
            check_directory(tmp_path)

    run_virtual(partial(write, tmp_path, second))
    check_directory(tmp_path)


async def write(directory: Path, meanwhile: Callable[[Journal], object]) -> None:
    """Write a short session, and call `meanwhile` while it is open."""
    async with open_journal(directory, Manifest(), JournalOptions("always")) as journal:
        journal.record(Warned("before", "x"))
        await journal.saved()
        meanwhile(journal)
        journal.record(Warned("after", "x"))
        await journal.saved()


HARMS: dict[str, Callable[[Path], object]] = {
    "deleted": lambda run: (run / JOURNAL).unlink(),
    "moved": lambda run: (run / JOURNAL).rename(run / "elsewhere"),
    "replaced": lambda run: (
        shutil.copy(run / JOURNAL, run / "copy") and (run / "copy").replace(run / JOURNAL)
    ),
    "the whole directory deleted": lambda run: shutil.rmtree(run),
    "cut": lambda run: os.truncate(run / JOURNAL, 10),
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("durability", ["always", "interval", "close"])
def test_a_journal_that_is_harmed_while_it_is_written_is_an_error(
    tmp_path: Path, harm: str, durability: Durability
) -> None:
    """If the journal is deleted, moved, replaced or cut during the run, the run ends with an error
    because its data are lost.
    """
    run = tmp_path / "run"

    async def session() -> None:
        async with open_journal(run, Manifest(), JournalOptions(durability)) as journal:
            journal.record(Warned("before", "x"))
            await journal.saved()
            HARMS[harm](run)
            journal.record(Warned("after", "x"))
            await journal.saved()

    with pytest.raises(StorageError, match="while the run was writing to it"):
        run_virtual(session)
