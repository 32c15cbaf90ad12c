"""Word lists and tables of spellings, read from data files."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

_Kind = TypeVar("_Kind")


class Tables:
    """One data file."""

    def __init__(self, name: str | Path) -> None:
        """Read a file beside this module, or at a path of its own."""
        self._entries = tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))

    def words(self, name: str) -> frozenset[str]:
        """A list of words as a set."""
        return frozenset(self._entries[name].split())

    def lines(self, name: str) -> list[str]:
        """A text as its lines that are not blank."""
        return [line for line in str(self._entries[name]).split("\n") if line]

    def table(self, name: str, kind: type[_Kind]) -> _Kind:
        """An entry as a value of this type."""
        return msgspec.convert(self._entries[name], kind)


_WORDS = Tables("words.toml")
words, table = _WORDS.words, _WORDS.table


def spelled(meanings: Mapping[str, str]) -> dict[str, str]:
    """What each spelling means, from a table of the spellings of each meaning.

    >>> spelled({"<=": "le leq"})
    {'le': '<=', 'leq': '<='}
    """
    return {spelling: meaning for meaning, spellings in meanings.items() for spelling in spellings.split()}
