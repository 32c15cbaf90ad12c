"""Catalogue of known benchmarks: where each lives, how its columns read, what is odd about it."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import msgspec

from atts.core import AnswerKind, Grading
from atts.errors import OptionError
from atts.evaluators.datasets.columns import AnswerForm, Columns


@dataclass(frozen=True, slots=True)
class HubSource:
    """One copy of a benchmark on the hub: its files in reading order, its columns, its quirks in words."""

    repo: str
    files: tuple[str, ...]
    columns: Columns
    keep: tuple[str, str] | None = None  # only rows whose column contains this text
    quirk: str = ""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark by name; the first of `hubs` that is cached is read, else the first is fetched."""

    name: str
    title: str
    size: int
    kind: AnswerKind = "math"
    form: AnswerForm = "plain"
    grading: Grading = Grading()
    aliases: tuple[str, ...] = ()
    sample: tuple[int, int] | None = None  # count and seed of the subset this name stands for
    hubs: tuple[HubSource, ...] = ()
    prefix: str = ""  # what ids start with, when it is not the name
    note: str = ""


_LISTED = tomllib.loads(Path(__file__).with_name("benchmarks.toml").read_text(encoding="utf-8"))["benchmark"]
BENCHMARKS: Mapping[str, Benchmark] = {it.name: it for it in msgspec.convert(_LISTED, tuple[Benchmark, ...])}


def find_benchmark(name: str) -> Benchmark | None:
    """The benchmark of that name or alias, whatever its case, hyphens or underscores; None when there is none.

    >>> [found.name for text in ("MATH-500", "aime_2025") if (found := find_benchmark(text))]
    ['math500', 'aime25']
    """
    key = _bare(name)
    return next((it for it in BENCHMARKS.values() if key in (_bare(it.name), *it.aliases)), None)


def find_hub_source(repo: str) -> tuple[Benchmark, HubSource] | None:
    """The benchmark and copy a hub dataset is known as."""
    return next(((it, hub) for it in BENCHMARKS.values() for hub in it.hubs if hub.repo.lower() == repo.lower()), None)


def unknown(name: str) -> OptionError:
    """The error for a name that is neither a benchmark nor a file."""
    near = get_close_matches(name.lower(), BENCHMARKS, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return OptionError("dataset", f"there is no benchmark or file {name!r}{hint}", [*BENCHMARKS])


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
