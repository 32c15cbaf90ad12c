"""A lock that dies with its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from atts.errors import JournalLocked
from atts.journal import locked

HOLDER = """
import sys, time
from pathlib import Path
from atts.journal import locked
with locked(Path(sys.argv[1]), Path(sys.argv[1]).parent):
    print("held", flush=True)
    time.sleep(60)
"""


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
