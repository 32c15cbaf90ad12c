"""Sources of scores on the command line: options that name them, and how they are read."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atts.cli.options import named_values
from atts.errors import CalibrationInputError

if TYPE_CHECKING:
    from atts.calibration import StoredScores

Rate = Annotated[float, typer.Option(help="The fraction of chunks the target takes over.")]
OwnRate = Annotated[
    float | None,
    typer.Option(
        help="The fraction of chunks the target takes over. By default the run's own; of a file "
        "0.4."
    ),
]
Mode = Annotated[
    str, typer.Option(help="split, marginal, aci, tracking, turn, question or question-turn.")
]
Scale = Annotated[str, typer.Option(help="What the scores are: perplexity, logprob or real.")]
PerQuestion = Annotated[
    int | None, typer.Option(help="This many consecutive scores of an array are one question.")
]
ByLength = Annotated[
    bool, typer.Option("--by-length", help="Rank among chunks of about the same length.")
]
Condition = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=VALUE the scores were made under: target.model=QwQ-32B, "
        "sampling.temperature=0.7; repeatable."
    ),
]
Source = Annotated[
    str,
    typer.Argument(
        help="A run directory; JSON Lines of {score, question, turn}, or - for stdin; .json; .npy."
    ),
]


def rate_of(given: float | None, file: str) -> float:
    """What was given, else the rate that the run was made at, else that of files."""
    from atts.api import RATE_OF_FILES

    if given is not None or file == "-" or not Path(file).is_dir():
        return RATE_OF_FILES if given is None else given
    from atts.journal import open_run

    held = open_run(Path(file)).manifest.configuration.get("rate")
    return (
        float(held.value)
        if held is not None and isinstance(held.value, int | float)
        else RATE_OF_FILES
    )


def scores_of(
    file: str, per_question: int | None, scale: str, conditions: list[str] | None
) -> StoredScores:
    """Scores with their conditions, of any kind of source.

    :raises CalibrationInputError: there are none, or one is no score.
    """
    from atts.api import stored_scores
    from atts.calibration import StoredScores, scale_named
    from atts.run import read_conditions

    fingerprint = read_conditions(named_values(conditions or (), "condition", "NAME=VALUE"))
    if file == "-":
        return StoredScores.from_records(
            records_of(file, None, scale), scale_named(scale), fingerprint
        )
    stored = stored_scores(Path(file), per_question, scale_named(scale), fingerprint)
    if not len(stored):
        raise CalibrationInputError(f"number of scores in {file}", 0, "at least one")
    return stored


def records_of(file: str, per_question: int | None, scale: str) -> list[dict[str, Any]]:
    """Records in their order, with whatever fields a file of lines gives them.

    :raises CalibrationInputError: there are none, or one cannot be read.
    """
    from atts.calibration import is_state, parse_lines
    from atts.files import read_ordinary
    from atts.journal import check_exists

    if file != "-":
        check_exists(Path(file))
    if file != "-" and (Path(file).is_dir() or Path(file).suffix in (".npy", ".json")):
        return scores_of(file, per_question, scale, None).records()
    try:
        text = sys.stdin.read() if file == "-" else read_ordinary(Path(file)).decode("utf-8")
    except OSError as problem:
        raise CalibrationInputError(
            "records", file, f"a file that can be read ({problem.strerror})"
        ) from None
    except UnicodeDecodeError:
        raise CalibrationInputError(file, "not text", "JSON Lines, a .npy array or JSON") from None
    if file != "-" and is_state(text):
        return scores_of(file, per_question, scale, None).records()
    records = parse_lines(text.splitlines(), "stdin" if file == "-" else file)
    if not records:
        raise CalibrationInputError(
            f"number of records in {'stdin' if file == '-' else file}", 0, "at least one"
        )
    return records
