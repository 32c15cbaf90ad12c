"""Keeps a terminal from obeying what a model wrote."""

from __future__ import annotations

import re

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Everything that makes a terminal do something else than show a letter, line ends and tabs left alone."""


def visible(text: str) -> str:
    """A text that somebody else wrote, for a terminal: its codes are shown, not obeyed.

    >>> visible("red: \x1b[31m, bell: \x07, back: \u202e")
    'red: ␛[31m, bell: ␇, back: \\\\u202e'
    """
    return _CONTROLS.sub(_shown, text)


def _shown(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 32 else f"\\u{code:04x}"
