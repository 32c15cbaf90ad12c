"""Use your own dataset: a function that makes problems, or a file with one question and answer per
row.
"""

import csv
import tempfile
from pathlib import Path

import atts
from atts import Problem
from atts.evaluators import LoadOptions, load_dataset


def sums(count: int) -> list[Problem]:
    """Make problems by a program; the report has a row for each `level` and `subject`.

    The `answer` of each problem is its reference.
    """
    return [
        Problem(
            f"sum-{n}",
            f"Start at {n}. +3, +{n}. What is the result?",
            str(2 * n + 3),
            level=1,
            subject="sums",
        )
        for n in range(1, count + 1)
    ]


def from_file(path: Path) -> list[Problem]:
    """Read problems from a CSV file whose columns do not have the usual names."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(
            [("frage", "loesung"), ("Start at 8. -3, +5. What is the result?", "10.0")]
        )
    return list(
        load_dataset(path, options=LoadOptions(columns={"text": "frage", "answer": "loesung"}))
    )


def main() -> None:
    """Evaluate both datasets; answers are graded by mathematical equivalence."""
    with tempfile.TemporaryDirectory() as folder:
        problems = [*sums(4), *from_file(Path(folder) / "mine.csv")]
    result = atts.evaluate_sync(problems, atts.Setup(draft="scripted", target="scripted"))
    for line, problem in zip(result.problems, problems, strict=True):
        print(
            f"{problem.text:42} reference {problem.answer:4} answered {line.answer}: {line.verdict}"
        )


if __name__ == "__main__":
    main()
