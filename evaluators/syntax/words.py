"""Word lists and tables of spellings, read from the words.toml beside this module."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

_Kind = TypeVar("_Kind")
_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))


def words(name: str) -> frozenset[str]:
    """A list of words as a set."""
    return frozenset(_TABLES[name].split())


def table(name: str, kind: type[_Kind]) -> _Kind:
    """An entry as a value of this type."""
    return msgspec.convert(_TABLES[name], kind)


def spelled(meanings: Mapping[str, str]) -> dict[str, str]:
    """What each spelling means, from a table of the spellings of each meaning.

    >>> spelled({"<=": "le leq"})
    {'le': '<=', 'leq': '<='}
    """
    return {spelling: meaning for meaning, spellings in meanings.items() for spelling in spellings.split()}
