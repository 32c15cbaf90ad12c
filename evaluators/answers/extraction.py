"""Extraction of the final answer from a reasoning text, whole or still growing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from atts.core import AnswerKind
from atts.errors import OptionError
from atts.evaluators.answers.boxes import Box, Scan, inner, is_placeholder, joins, scan
from atts.evaluators.answers.statements import TURN, marked, overruled, stated, trailing_number, turn_end

Fallback = Literal["none", "statement", "number"]
Rule = Literal["given", "box", "marker", "statement", "number", "cut", "none"]
_FALLBACKS = ("none", "statement", "number")
_KINDS = ("math", "choice", "text")
_SEAM = 60  # characters, more than a sign of the next turn has
# the beginning of \boxed or \fbox, and then nothing
_CUT_NAME = re.compile(r"\\(?:b(?:o(?:x(?:ed?)?)?)?|f(?:b(?:ox?)?)?)?$")


@dataclass(frozen=True, slots=True)
class Extraction:
    """An answer and what it was found by; None with the rule "cut" when a box was begun and never closed."""

    answer: str | None
    rule: Rule


def extract(text: str, kind: AnswerKind = "math", *, fallback: Fallback = "statement") -> str | None:
    """The final answer of a reasoning text, None when it gives none.

    The last box that is not empty counts, or the last few when the text joins them ("\\boxed{3} and \\boxed{5}").
    Without a box an explicit mark counts ("Answer: 5", "#### 5"), then with the default fallback a last sentence
    that states a value, and with fallback="number" the last number anywhere. A cut box is no answer. Raises
    OptionError for an unknown kind or fallback.

    >>> extract(r"So $x = \\boxed{\\frac{1}{2}}$.")
    '\\\\frac{1}{2}'
    """
    return extraction(text, kind, fallback=fallback).answer


def extraction(text: str, kind: AnswerKind = "math", *, fallback: Fallback = "statement") -> Extraction:
    """As extract, with the rule that found the answer."""
    if kind not in _KINDS:
        raise OptionError(f"kind {kind}", "is not a kind of answer", _KINDS)
    if fallback not in _FALLBACKS:
        raise OptionError(f"fallback {fallback}", "is not one", _FALLBACKS)
    return Extractor(kind).finish(fallback, text)


class Extractor:
    """The same for a text that grows: feeding costs time proportional to what is new.

    >>> rollout = Extractor()
    >>> rollout.feed("so it is \\\\boxed{4"), rollout.feed("2}. Done")
    (None, '42')
    """

    def __init__(self, kind: AnswerKind = "math") -> None:
        self._kind: AnswerKind = kind
        self._pieces: list[str] = []
        self._boxed_to = 0  # where the last box ends in the whole text
        self._dropped = 0  # characters before the pending text
        self._pending = ""  # text from the scan position on
        self._state = Scan()
        self._group: list[str] = []  # contents of the boxes that make the answer so far
        self._gap: str | None = None  # text since the last box; None once it is too long to join another
        self._seam = ""  # the last of the text, where a sign of the next turn may have begun
        self._is_over = False  # the turn is: nothing after it is looked at

    @property
    def answer(self) -> str | None:
        """The boxed answer so far."""
        return ", ".join(self._group) or None

    def feed(self, text: str) -> str | None:
        """Take more text in and return the boxed answer so far, None before the first."""
        self._pieces.append(text)
        seam = self._seam + text
        end = turn_end(seam) if not self._is_over else 0
        self._advance(seam[len(self._seam) : end], ended=False)
        self._is_over = end < len(seam)
        self._seam = seam[-_SEAM:]
        return self.answer

    def finish(self, fallback: Fallback = "none", rest: str = "") -> Extraction:
        """The answer of the text and its `rest`; boxes first, then explicit marks, then what `fallback` allows."""
        self._pieces.append(rest)
        text = "".join(self._pieces)
        if self._is_over or (TURN.search(text) and turn_end(text) < len(text)):
            return Extractor(self._kind).finish(fallback, text[: turn_end(text)])
        self._advance(rest, ended=True)
        if self._group:
            final = overruled(text[self._boxed_to :], self._kind)
            return Extraction(", ".join(self._group), "box") if final is None else Extraction(final, "marker")
        whole = self._whole(text)
        if (found := marked(whole, self._kind)) is not None:
            return Extraction(found, "marker")
        if len(whole) < len(text):
            return Extraction(None, "cut")
        if fallback != "none" and (found := stated(text, self._kind)) is not None:
            return Extraction(found, "statement")
        if fallback == "number" and (found := trailing_number(text)) is not None:
            return Extraction(found, "number")
        return Extraction(None, "none")

    def _whole(self, text: str) -> str:
        """The text before a box that was begun and not closed, or whose name is cut: its content is no answer."""
        if self._state.open_at is not None:
            return text[: self._dropped + self._state.open_at]
        return _CUT_NAME.sub("", text)

    def _advance(self, text: str, *, ended: bool) -> None:
        self._pending += text
        boxes, state = scan(self._pending, self._state, ended=ended)
        at = 0
        for box in boxes:
            self._take(box, self._pending[at : box.start])
            self._boxed_to = self._dropped + box.end
            at = box.end
        # what no later box can need is forgotten, and the scan shifted to what is left
        keep = state.open_at if state.open_at is not None else state.at
        if self._gap is not None:
            self._gap += self._pending[at:keep]
            if len(self._gap) > 100:
                self._gap = None
        self._pending = self._pending[keep:]
        self._dropped += keep
        opened = None if state.open_at is None else state.open_at - keep
        self._state = Scan(state.at - keep, opened, state.inside - keep, state.depth)

    def _take(self, box: Box, before: str) -> None:
        content = inner(box.content)
        if is_placeholder(content):
            return
        gap = None if self._gap is None else self._gap + before
        if not self._group or gap is None or not joins(gap):
            self._group = []
        if content not in self._group:
            self._group.append(content)
        self._gap = ""
