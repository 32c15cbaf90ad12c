"""Tests that files are replaced completely or not at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from atts.errors import StorageError
from atts.files import replace_file, write_atomic


@pytest.mark.parametrize("durable", [True, False])
def test_replacing_leaves_one_file(tmp_path: Path, durable: bool) -> None:
    """The file has the new content, and no temporary file is left."""
    for data in (b"one", b"two"):
        write_atomic(tmp_path / "f", data, durable=durable)
        assert (tmp_path / "f").read_bytes() == data
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no umask")
def test_a_written_file_keeps_its_permissions_or_follows_the_umask(tmp_path: Path) -> None:
    """A report written to a shared folder can be read by everyone who can read the folder's other
    files.
    """
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
    """If the path is a directory, atts reports a clear error and leaves no temporary file."""
    (tmp_path / "f" / "inner").mkdir(parents=True)
    with pytest.raises(StorageError):
        write_atomic(tmp_path / "f", b"new")
    assert os.listdir(tmp_path) == ["f"]


def test_callers_may_get_the_systems_own_error(tmp_path: Path) -> None:
    """Callers that write their own message get the system's error unchanged, and no file is left
    behind.
    """
    (tmp_path / "f").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "f", b"new")
    assert os.listdir(tmp_path) == ["f"]


def test_an_impossible_place_is_a_storage_error(tmp_path: Path) -> None:
    """Writing below a path that is a file instead of a directory raises a storage error."""
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(StorageError, match="choose another run directory"):
        write_atomic(tmp_path / "f" / "g", b"new")
