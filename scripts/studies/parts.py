"""Finished parts of a long study on disk: one JSON line each, so that a killed study goes on where
it was.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


class Parts(dict[str, Any]):
    """Values by name; with a file, those of earlier sessions and of other processes that write to
    it, too.
    """

    def __init__(self, path: Path | None = None) -> None:
        super().__init__()
        self._path = path
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                self._recall(line)

    def keep(self, name: str, value: Any) -> None:
        """A finished part, on disk before anything else is begun; `value` is plain JSON."""
        self[name] = value
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            held = self._path.read_bytes() if self._path.exists() else b""
            newline = "\n" if held and not held.endswith(b"\n") else ""
            with self._path.open(
                "ab", buffering=0
            ) as file:  # one write, so that no other process's comes between
                file.write(f"{newline}{json.dumps({'part': name, 'value': value})}\n".encode())

    def forget(self) -> None:
        """Everything, on disk as well."""
        self.clear()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _recall(self, line: str) -> None:
        try:
            record = json.loads(line)
            self[record["part"]] = record["value"]
        except (json.JSONDecodeError, KeyError):
            print(
                f"{self._path}: a line was torn by a kill; its part is run again", file=sys.stderr
            )
