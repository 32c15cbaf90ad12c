"""Files replaced whole, and a lock that dies with its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atts.errors import JournalLocked, StorageError
from atts.files import write_atomic
from atts.journal import locked

HOLDER = """
import sys, time
from pathlib import Path
from atts.journal import locked
with locked(Path(sys.argv[1]), Path(sys.argv[1]).parent):
    print("held", flush=True)
    time.sleep(60)
"""


def test_replacing_leaves_one_file(tmp_path: Path) -> None:
    """The new content is there, nothing else is."""
    for data in (b"one", b"two"):
        write_atomic(tmp_path / "f", data)
        assert (tmp_path / "f").read_bytes() == data
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.skipif(sys.platform == "win32", reason="no umask there")
def test_who_may_read_is_as_the_umask_says_or_as_it_was(tmp_path: Path) -> None:
    """A report in a shared folder can be read by whom other files there can."""
    before = os.umask(0o027)
    try:
        write_atomic(tmp_path / "f", b"one")
        assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640
        (tmp_path / "f").chmod(0o604)
        write_atomic(tmp_path / "f", b"two")
        assert (tmp_path / "f").stat().st_mode & 0o777 == 0o604
    finally:
        os.umask(before)


def test_a_refused_replacement_leaves_the_old_file(tmp_path: Path) -> None:
    """A directory in its place: a clear error, no litter."""
    (tmp_path / "f" / "inner").mkdir(parents=True)
    with pytest.raises(StorageError):
        write_atomic(tmp_path / "f", b"new")
    assert os.listdir(tmp_path) == ["f"]


def test_an_impossible_place_is_a_storage_error(tmp_path: Path) -> None:
    """A file where a directory should be."""
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(StorageError, match="choose another run directory"):
        write_atomic(tmp_path / "f" / "g", b"new")


def test_the_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    """A second process is refused with the first one's id; SIGKILL frees the lock."""
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


def test_the_lock_holds_within_one_process_too(tmp_path: Path) -> None:
    """Two runs of one program on one directory are two writers as well."""
    with locked(tmp_path / "lock", tmp_path):
        with pytest.raises(JournalLocked, match=str(os.getpid())), locked(tmp_path / "lock", tmp_path):
            pass
    with locked(tmp_path / "lock", tmp_path):
        pass
