"""Engine replies that the runs of a set share in one file, so that each call is made only once."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from hashlib import blake2b
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from atts.files import open_ordinary, storage

REPLIES = "replies.bin"
"""Name of the file, in the directory of the runs that share it."""
# key, run, seconds, length, and a checksum of these and the reply
_HEAD = struct.Struct("<20sIdII")
_CHECKSUM = 4


class SharedReply(NamedTuple):
    """The position of a reply in the file, the run that asked for it, and the engine's seconds."""

    at: int
    length: int
    run: int
    seconds: float


class SharedReplies:
    """The shared replies, with their index in memory and the replies on disk; only one process may
    add to them.

    The journal of a run is complete without this file, which only saves work. So a torn or damaged
    record is ignored, with everything after it.
    """

    def __init__(self, path: Path) -> None:
        """Read the index; a missing file is an empty one.

        :raises StorageError: the file cannot be read.
        """
        self._path = path
        self._file: FileIO | None = None
        self._index: dict[bytes, SharedReply] = {}
        self._end = 0
        with storage(path):
            if path.exists():
                self._read()

    def find(self, key: bytes) -> SharedReply | None:
        """Return the record of a reply, if there is one."""
        return self._index.get(key)

    def read(self, reply: SharedReply) -> bytes:
        """Return the reply itself.

        :raises StorageError: the file cannot be read.
        """
        with storage(self._path):
            file = self._opened()
            file.seek(reply.at)
            return file.read(reply.length) or b""

    def add(self, key: bytes, run: int, seconds: float, reply: bytes) -> None:
        """Store a reply, unless one is already stored.

        :raises StorageError: the disk refuses.
        """
        if key in self._index:
            return
        record = _HEAD.pack(key, run, seconds, len(reply), 0)[:-_CHECKSUM]
        crc = zlib.crc32(reply, zlib.crc32(record))
        data = record + crc.to_bytes(_CHECKSUM, "little") + reply
        with storage(self._path):
            file = self._opened()
            file.seek(self._end)
            written = file.write(data)
        if written == len(data):  # after a partial write the next line overwrites the part
            self._index[key] = SharedReply(self._end + _HEAD.size, len(reply), run, seconds)
            self._end += written

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None:
        self.close()

    def _opened(self) -> FileIO:
        if self._file is None:
            self._path.touch()
            self._file = self._path.open("r+b", buffering=0)
            self._file.truncate(self._end)
        return self._file

    def _read(self) -> None:
        """Index all records up to the first that is damaged."""
        with open_ordinary(self._path) as file:
            while len(head := file.read(_HEAD.size)) == _HEAD.size:
                key, run, seconds, length, checksum = _HEAD.unpack(head)
                reply = file.read(length)
                if (
                    len(reply) != length
                    or zlib.crc32(reply, zlib.crc32(head[:-_CHECKSUM])) != checksum
                ):
                    return
                self._index[key] = SharedReply(self._end + _HEAD.size, length, run, seconds)
                self._end += _HEAD.size + length


def reply_key(engine: Mapping[str, Any], key: str, logprobs: str = "raw") -> bytes:
    """Return the key of a request to an engine, which is described as in a manifest.

    A completion may lack log-probabilities if its request does not need them, so such a request has
    a different key.
    """
    who = json.dumps(engine, sort_keys=True, default=sorted)
    return blake2b(f"{who} {key} {logprobs}".encode(), digest_size=20).digest()


def run_number(name: str) -> int:
    """Return the number that shared replies store for the run that requested them."""
    return zlib.crc32(name.encode())
