"""The catalogue of benchmarks, read from a data file, and the options for loading them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from atts.core import AnswerKind, Grading
from atts.errors import OptionError
from atts.evaluators.syntax.vocabulary import Tables
from atts.evaluators.verdict import STRICT, changed

AnswerForm = Literal["plain", "integer", "final"]
"""The form of a reference: plain, a whole number (025, 27.0, 336°), or after the last "####"."""
Answers = Literal["required", "optional"]
Network = Literal["auto", "never"]
""""auto" fetches what the cache lacks, unless HF_HUB_OFFLINE forbids it; "never" uses the cache
only.
"""
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

LISTED = Tables(Path(__file__).with_name("benchmarks.toml"))
ALIASES = LISTED.table("columns", dict[str, str])  # the usual names of each field's column


@dataclass(frozen=True, slots=True)
class Columns:
    """The column of each field; for an empty name the usual column names are tried, in any case.

    `distractors` names the columns of wrong choices where `answer` has the correct one; `context`
    comes before the text. The columns `unit` and `tolerance` describe the answer and are never
    guessed.
    """

    text: str = ""
    answer: str = ""
    id: str = ""
    level: str = ""
    subject: str = ""
    choices: str = ""
    context: str = ""
    unit: str = ""
    tolerance: str = ""
    distractors: tuple[str, ...] = ()

    @classmethod
    def of(cls, mapping: Mapping[str, str]) -> "Columns":
        """Return columns from a mapping such as {"text": "Question"}.

        Raises OptionError for a field that does not exist.
        """
        unknown = [name for name in mapping if name not in ALIASES]
        if unknown:
            raise OptionError("columns", f"there is no field {unknown[0]!r}", [*ALIASES])
        return cls(**mapping, distractors=())


@dataclass(frozen=True, slots=True)
class HubSource:
    """One copy of a benchmark on the hub, with its files in reading order and its columns."""

    repo: str
    files: tuple[str, ...]
    columns: Columns
    # a column and a text: only rows whose column contains the text are read
    keep: tuple[str, str] | None = None
    quirk: str = ""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark with its copies; the first of `hubs` that is cached is read, else the first is
    fetched.
    """

    name: str
    title: str
    size: int
    kind: AnswerKind | None = "math"  # None means "choice" if there are choices, else "math"
    form: AnswerForm = "plain"
    grading: Grading = Grading()
    aliases: tuple[str, ...] = ()
    sample: tuple[int, int] | None = None  # count and seed of the subset that this name denotes
    hubs: tuple[HubSource, ...] = ()
    prefix: str = ""  # prefix of the ids, if it differs from the name
    note: str = ""

    @classmethod
    def unknown(cls, source: str) -> "Benchmark":
        """Return a benchmark without copies, for a source that is not in the catalogue."""
        return cls(Path(source).stem, "", 0, kind=None)


BENCHMARKS: Mapping[str, Benchmark] = {
    it.name: it for it in LISTED.table("benchmark", tuple[Benchmark, ...])
}


def find_benchmark(name: str) -> Benchmark | None:
    """Return the benchmark of that name or alias, in any case, with or without hyphens."""
    for benchmark in BENCHMARKS.values():
        if _bare(name) in (_bare(benchmark.name), *benchmark.aliases):
            return benchmark
    return None


def _bare(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Options for a source beyond its name; the defaults read every known benchmark.

    `file` reads a known benchmark from that file instead of the hub; `seed` shuffles the choices of
    multiple choice; `grading` overrides fields of the benchmark's policy.
    """

    columns: Columns | Mapping[str, str] = Columns()
    file: Path | None = None
    revision: str = "main"
    split: str = "test"
    config: str = ""
    kind: AnswerKind | None = None
    answers: Answers = "required"
    seed: int = 0
    grading: Mapping[str, float | str | None] = field(default_factory=dict[str, float | str | None])
    shots: Path | None = None  # a file of worked examples, which are put before every problem
    network: Network = "auto"
    cache: Path | None = None  # None means the cache of huggingface_hub

    def __post_init__(self) -> None:
        for option, known in (("answers", Answers), ("network", Network), ("kind", AnswerKind)):
            value = getattr(self, option)
            if value not in get_args(known) and (option, value) != ("kind", None):
                raise OptionError(option, f"{value!r} is not an option", get_args(known))
        changed(STRICT, self.grading)

    @property
    def asked(self) -> Columns | None:
        """Return the requested columns; None if the source's columns are to be read."""
        asked = self.columns if isinstance(self.columns, Columns) else Columns.of(self.columns)
        return None if asked == Columns() else asked
