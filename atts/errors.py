"""All errors that atts raises on purpose, as one tree with documented exit codes.

ATTSError (1)
├── UsageError (2)              the request cannot be carried out as given
│   ├── OptionError             an unknown or impossible option
│   ├── MissingExtra            an optional dependency that is not installed
│   ├── DatasetError            a dataset that cannot be read
│   ├── CalibrationInputError   an invalid score, rate or calibration state
│   └── FingerprintError        data made under conditions that differ from this run's
├── EngineError (3)             an engine failed
│   ├── EngineUnavailable       it cannot be reached, or is closed (retryable)
│   ├── EngineTimeout           it did not answer in time (retryable)
│   ├── BadReply                its answer cannot be correct (retryable)
│   ├── UnusableScores          it still answers, but its scores cannot be used
│   ├── UnsupportedByEngine     it cannot do what the pipeline needs
│   ├── ModelLoadError          a model or tokenizer that cannot be loaded
│   │   └── ZooError            a zoo that cannot be read, or lacks the requested model
│   ├── OutOfMemory             the work does not fit into memory, even after atts has reduced it
│   └── ContextOverflow         the request is longer than the model's context
├── JournalError (4)            the run directory cannot be used
│   ├── JournalLocked           another process is writing it
│   ├── JournalCorrupt          a line before the last is damaged
│   ├── JournalVersion          another version of atts wrote it
│   └── StorageError            a file cannot be written (disk full, read-only or gone)
└── CheckFailed (5)             a check that the user asked for did not pass

An interrupted run exits with 130 and keeps its work. A run exits with 3 if an engine failed on a
part of the run; the same command then runs the missing part.

Messages and reports call `counted` to write a number with its noun.
"""

from collections.abc import Sequence
from difflib import get_close_matches
from typing import ClassVar

DISTRIBUTION = "atts-llm"
"""The name under which pip installs this package. The name `atts` belongs to another project on
PyPI.
"""


def counted(number: float, noun: str, plural: str = "") -> str:
    """Return a number with its noun, which is plural unless the number is 1. Give `plural` if
    adding an s is wrong.

    >>> counted(1, "problem"), counted(1200, "rollout"), counted(3, "reply", "replies")
    ('1 problem', '1,200 rollouts', '3 replies')
    """
    return f"{number:,.15g} {noun if number == 1 else plural or f'{noun}s'}"


class ATTSError(Exception):
    """The base class of all errors that this package raises on purpose; `exit_code` is the exit
    code of the command line.
    """

    exit_code: ClassVar[int] = 1
    retryable: ClassVar[bool] = False


class UsageError(ATTSError):
    """The request cannot be carried out as given; the message says what to change."""

    exit_code = 2


class MissingExtra(UsageError):
    """An optional package is not installed; the message names the command that installs it."""

    def __init__(self, user: str, package: str, extra: str) -> None:
        super().__init__(
            f"{user} needs {package}, which is not installed; to install it, run pip install "
            f"'{DISTRIBUTION}[{extra}]'"
        )


class OptionError(UsageError):
    """An option is unknown or has an impossible value.

    The message suggests the name in `known` that is most similar to `given` or, if `given` is None,
    to the name of the option. If no name is similar, it lists all known names.
    """

    def __init__(
        self, option: str, problem: str, known: Sequence[str] = (), given: object = None
    ) -> None:
        near = get_close_matches(option if given is None else str(given), known, n=1)
        hint = (
            f"; did you mean {near[0]!r}?"
            if near
            else f"; known: {', '.join(known)}"
            if known
            else ""
        )
        super().__init__(f"{option}: {problem}{hint}")
        self.option = option


class DatasetError(UsageError):
    """A dataset is missing or empty, or lacks required data."""

    def __init__(self, source: str, problem: str, advice: str = "") -> None:
        super().__init__(f"dataset {source}: {problem}" + (f". {advice}" if advice else ""))
        self.source = source


class CalibrationInputError(UsageError):
    """A value is not a valid score, rate, budget or calibration state."""

    def __init__(self, what: str, value: object, expected: str) -> None:
        shown = repr(value)
        super().__init__(
            f"{what} is {shown if len(shown) <= 100 else shown[:99] + '…'}, expected {expected}"
        )
        self.what = what


class FingerprintError(UsageError):
    """Stored data was made under conditions that differ from those of the run that uses it."""

    def __init__(
        self,
        what: str,
        differences: Sequence[tuple[str, object, object]],
        advice: str = "Fit the calibration again, or run with the stored settings",
    ) -> None:
        lines = "; ".join(
            f"{name}: stored {_shown(old)}, now {_shown(new)}" for name, old, new in differences
        )
        super().__init__(f"{what} was made under different conditions ({lines}). {advice}")
        self.differences = tuple(differences)


def _shown(value: object) -> str:
    return "none" if value is None else repr(value)


class EngineError(ATTSError):
    """An engine failed; the attribute `engine` is the engine's name."""

    exit_code = 3

    def __init__(self, engine: str, problem: str, advice: str = "") -> None:
        super().__init__(f"engine {engine}: {problem}" + (f". {advice}" if advice else ""))
        self.engine = engine
        self.problem = problem


class EngineUnavailable(EngineError):
    """The engine cannot be reached, refused the call, or is closed."""

    retryable = True


class EngineTimeout(EngineError):
    """The engine did not answer before the deadline."""

    retryable = True


class BadReply(EngineError):
    """The engine's answer cannot be correct (wrong length, wrong ids, not finite, empty)."""

    retryable = True


class UnusableScores(EngineError):
    """The engine still answers requests, but its scores cannot be used."""


class UnsupportedByEngine(EngineError):
    """The engine does not support the request."""


class ModelLoadError(EngineError):
    """A model or tokenizer is missing, in an unknown format, or of an unsupported family."""


class ZooError(ModelLoadError):
    """A zoo of blocks is damaged, was written by a newer version, or lacks the requested model."""

    def __init__(self, zoo: object, problem: str, advice: str = "") -> None:
        super().__init__(str(zoo), problem, advice)
        self.args = (f"zoo {zoo}: {problem}" + (f". {advice}" if advice else ""),)


class OutOfMemory(EngineError):
    """The work does not fit into memory, even after atts has reduced it."""


class ContextOverflow(EngineError):
    """The request needs more tokens than the model's context holds."""

    def __init__(
        self,
        engine: str,
        needed: int,
        context_length: int,
        advice: str = "Lower the token limit or the number of turns",
    ) -> None:
        super().__init__(
            engine,
            f"the request needs {needed} tokens, but the context has only {context_length}",
            advice,
        )
        self.needed = needed
        self.context_length = context_length


class JournalError(ATTSError):
    """A run directory cannot be written or read."""

    exit_code = 4

    def __init__(self, path: object, problem: str, advice: str = "") -> None:
        super().__init__(f"{path}: {problem}" + (f". {advice}" if advice else ""))
        self.path = str(path)


class JournalLocked(JournalError):
    """Another process is writing this run directory."""


class JournalCorrupt(JournalError):
    """A line of the journal is damaged, and it is not the last line. The file was left as it is."""


class JournalVersion(JournalError):
    """The journal has a format version that this version of atts does not know."""


class StorageError(JournalError):
    """A file cannot be written, for example because the disk is full, read-only or gone."""


class CheckFailed(ATTSError):
    """A check that the user requested did not pass."""

    exit_code = 5
