"""Stop strings of a request: the text that a client is shown ends before the first of them."""

from __future__ import annotations

from collections.abc import Sequence


class StoppedText:
    """A growing text that is shown up to the first stop string, however it arrives in pieces.

    The first stop string is the one that is completed first, as for a model that stops writing
    there; of several that end at the same character it is the longest. Text is held back while it
    may be the beginning of a stop string.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = stop
        self._held = ""  # the text that is not shown yet
        self.is_stopped = False  # whether a stop string was completed

    def add(self, text: str) -> str:
        """Take more text in, and return what may be shown of it now."""
        if self.is_stopped:
            return ""
        text = self._held + text
        # what was shown began no stop string, so each one lies within the rest
        found = [(text.find(stop), len(stop)) for stop in self._stop if stop in text]
        if found:
            self.is_stopped = True
            self._held = ""
            begin, _ = min(found, key=lambda one: (sum(one), one[0]))
            return text[:begin]
        shown = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[shown:]
        return text[:shown]

    def end(self) -> str:
        """Return what was held back, because no more text comes."""
        held = self._held
        self._held = ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of the text that may begin the stop string.

    >>> _overlap("so far\\nQues", "\\nQuestion:")
    5
    """
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


def stopped_text(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return a text up to the first stop string, and whether there is one.

    >>> stopped_text("7\\n\\nQuestion: what", ["Question:", "\\n\\n"])
    ('7', True)
    """
    growing = StoppedText(stop)
    shown = growing.add(text) + growing.end()
    return shown, growing.is_stopped
