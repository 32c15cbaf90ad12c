"""The layers of a configuration: a TOML file, ATTS_* variables, flags and KEY=VALUE pairs; unknown
keys are errors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from atts.api.keys import KINDS, PREFIX, Key, flat
from atts.errors import OptionError
from atts.files import read_ordinary

FILE = "atts.toml"
"""Read from the working directory when it is there and no other file is named."""
CONFIG_VARIABLE = "ATTS_CONFIG"
ELSEWHERE = (CONFIG_VARIABLE, "ATTS_API_KEY", "ATTS_CHROMIUM", "ATTS_SHARED_DATA")
"""Variables of ours that are no part of the configuration: the file's name, a secret, what tests
look for.
"""

Said = tuple[Key, object, str, str]
"""A key, what was said about it, who said so, and what an error calls that."""


def from_file(path: Path, keys: Mapping[str, Key]) -> Iterator[Said]:
    """A TOML file's values; tables are dotted names.

    :raises OptionError: it cannot be read, is not TOML, or has an unknown key.
    """
    for name, value in flat(_tables(path)):
        key = _known(name, keys, str(path))
        label = f"{name} ({path})"
        if (
            key.kind in (int, float, bool)
            and isinstance(value, str)
            and value.lower() not in ("none", "null")
        ):
            raise OptionError(
                label,
                f"{value!r} is not {KINDS[key.kind]} but a text: leave out the quotation marks",
            )
        yield key, value, str(path), label


def from_environment(environment: Mapping[str, str], keys: Mapping[str, Key]) -> Iterator[Said]:
    """The values of ATTS_* variables.

    :raises OptionError: one is unknown.
    """
    by_variable = {key.variable: key for key in keys.values()}
    for variable, words in environment.items():
        if variable.startswith(PREFIX) and variable not in ELSEWHERE:
            if variable not in by_variable:
                raise OptionError(
                    "environment", f"unknown variable {variable!r}{_hint(variable, [*by_variable])}"
                )
            key = by_variable[variable]
            yield key, words, variable, f"{key.name} ({variable})"


def from_flags(
    flags: Mapping[str, object], pairs: Sequence[str], keys: Mapping[str, Key]
) -> Iterator[Said]:
    """Values that flags or a call's arguments gave, None being not given; then those given as
    "key=value".

    :raises OptionError: a key is unknown, or a pair is none.
    """
    for name, value in flags.items():
        if value is not None:
            origin = "--" + name.replace("_", "-")
            yield _known(name, keys, "flags"), value, origin, origin
    for pair in pairs:
        name, mark, words = (part.strip() for part in pair.partition("="))
        if not (mark and name):
            raise OptionError(
                "--set", f"{pair!r} is not KEY=VALUE, such as sampling.temperature=0.6"
            )
        yield _known(name, keys, "--set"), words, "--set", f"--set {name}"


def _tables(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_ordinary(path).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise OptionError(str(path), f"is not UTF-8 text (byte {error.start})") from error
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise OptionError(str(path), f"is not TOML: {error}") from error
    except OSError as error:
        raise OptionError(str(path), f"cannot be read: {error.strerror}") from error


def _known(name: str, keys: Mapping[str, Key], source: str) -> Key:
    if name not in keys:
        raise OptionError(source, f"unknown key {name!r}{_hint(name, [*keys])}")
    return keys[name]


def _hint(name: str, known: Sequence[str]) -> str:
    """The nearest name, a table's own key counting as near to its dotted name; else where to find
    them all.
    """
    short = {each.rpartition(".")[2]: each for each in known} | {each: each for each in known}
    near = get_close_matches(name, short, n=1) or get_close_matches(
        name.rpartition(".")[2], short, n=1
    )
    return f"; did you mean {short[near[0]]!r}?" if near else "; `atts config show` lists them all"
