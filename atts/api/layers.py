"""Where values of a configuration come from: a TOML file, the environment, flags; an unknown name is an error."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from atts.api.keys import PREFIX, Key
from atts.errors import OptionError
from atts.journal import Setting

FILE = "atts.toml"
"""Read from the working directory when it is there and no other file is named."""
CONFIG_VARIABLE = "ATTS_CONFIG"
ELSEWHERE = (CONFIG_VARIABLE, "ATTS_API_KEY", "ATTS_CHROMIUM", "ATTS_SHARED_DATA")
"""Variables of ours that are no part of the configuration: the file's name, a secret, what tests look for."""

Layer = Mapping[str, Setting]


def from_defaults(keys: Mapping[str, Key]) -> Layer:
    """What holds when nobody says anything."""
    return {key.name: Setting(key.default, "default") for key in keys.values()}


def from_file(path: Path, keys: Mapping[str, Key]) -> Layer:
    """A TOML file's values; tables are dotted names.

    :raises OptionError: it cannot be read, is not TOML, or has a key that is unknown or of another type.
    """
    try:
        tables = tomllib.loads(path.read_bytes().decode("utf-8"))
    except UnicodeDecodeError as error:
        raise OptionError(str(path), f"is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise OptionError(str(path), f"is not TOML: {error}") from error
    except OSError as error:
        raise OptionError(str(path), f"cannot be read: {error.strerror}") from error
    found = dict[str, Setting]()
    for name, value in _flat(tables):
        key = _known(name, keys, str(path))
        found[name] = Setting(key.read(value, f"{name} ({path})"), str(path))
    return found


def from_environment(environment: Mapping[str, str], keys: Mapping[str, Key]) -> Layer:
    """The values of ATTS_* variables.

    :raises OptionError: one is unknown, or its value of another type.
    """
    names = {key.variable: key for key in keys.values()}
    found = dict[str, Setting]()
    for variable, words in environment.items():
        if not variable.startswith(PREFIX) or variable in ELSEWHERE:
            continue
        if variable not in names:
            raise OptionError("environment", f"unknown variable {variable!r}{_hint(variable, [*names])}")
        key = names[variable]
        found[key.name] = Setting(key.read(words, f"{key.name} ({variable})"), variable)
    return found


def from_flags(flags: Mapping[str, object], keys: Mapping[str, Key]) -> Layer:
    """Values that flags or a call's arguments gave, None being not given.

    :raises OptionError: one is unknown, or of another type.
    """
    found = dict[str, Setting]()
    for name, value in flags.items():
        if value is None:
            continue
        origin = "--" + name.replace("_", "-")
        key = _known(name, keys, "flags")
        found[name] = Setting(key.read(value, origin), origin)
    return found


def from_pairs(pairs: Sequence[str], keys: Mapping[str, Key]) -> Layer:
    """Values given as "key=value".

    :raises OptionError: one is no such pair, its key unknown, or its value of another type.
    """
    found = dict[str, Setting]()
    for pair in pairs:
        name, mark, words = pair.partition("=")
        if not (mark and name):
            raise OptionError("--set", f"{pair!r} is not KEY=VALUE, such as sampling.temperature=0.6")
        key = _known(name.strip(), keys, "--set")
        found[key.name] = Setting(key.read(words.strip(), f"--set {key.name}"), "--set")
    return found


def _known(name: str, keys: Mapping[str, Key], source: str) -> Key:
    if name not in keys:
        raise OptionError(source, f"unknown key {name!r}{_hint(name, [*keys])}")
    return keys[name]


def _hint(name: str, known: Sequence[str]) -> str:
    """The nearest name, a table's own key counting as near to its dotted name; else where to find them all."""
    short = {each.rpartition(".")[2]: each for each in known} | {each: each for each in known}
    near = get_close_matches(name, short, n=1) or get_close_matches(name.rpartition(".")[2], short, n=1)
    return f"; did you mean {short[near[0]]!r}?" if near else "; `atts config show` lists them all"


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tables.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
