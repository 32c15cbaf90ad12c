"""The cache of long texts that journal lines refer to by hash, kept alike by writer and reader."""

from __future__ import annotations

import base64
from collections import OrderedDict
from hashlib import blake2b

_READ = 16 << 20  # characters that a reader holds: writers of older versions held as many
_WRITTEN = 2 << 20
_EACH = 256  # bytes that a writer holds, hundreds of calls; what a text costs beside its characters


class Texts:
    """The long texts seen lately, by hash; writer and reader keep theirs in step by doing the same
    in the same order.

    What the writer still holds, a reader of all it wrote holds too, so a reference never dangles,
    and neither holds more than `limit` characters. A text forgotten and met again is written again.
    """

    def __init__(self, limit: int = _READ, each: int = 0) -> None:
        """A text counts as its characters and `each` more; who holds more holds all that another
        does.
        """
        self._known: OrderedDict[str, str] = OrderedDict()
        self._limit = limit
        self._each = each
        self._size = 0
        self.fresh: list[tuple[str, str]] = []  # to be written before the line that refers to them

    @classmethod
    def of_writer(cls) -> Texts:
        """Those of a writer, who remembers the texts of calls in flight: less than any reader
        holds.
        """
        return cls(_WRITTEN, _EACH)

    def __len__(self) -> int:
        return len(self._known)

    def refer(self, text: str) -> str:
        """The hash to write instead of a long text; a text not known yet joins `fresh`."""
        digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=15).digest()
        name = base64.urlsafe_b64encode(digest).decode()
        if name not in self._known:
            self.fresh.append((name, text))
        self.learn(name, text)
        return name

    def learn(self, name: str, text: str) -> None:
        """Take a text in, forgetting the ones unused for longest."""
        if name in self._known:
            self._known.move_to_end(name)
            return
        self._known[name] = text
        self._size += len(text) + self._each
        while self._size > self._limit and len(self._known) > 1:
            _, forgotten = self._known.popitem(last=False)
            self._size -= len(forgotten) + self._each

    def find(self, name: str) -> str:
        """The text of a reference.

        :raises ValueError: the reference dangles.
        """
        if name not in self._known:
            raise ValueError(f"it refers to a text @{name} that is not there")
        self._known.move_to_end(name)
        return self._known[name]
