"""Writes the disputed pairs with our verdict on each into their page: `python -m
scripts.studies.grading_policy`.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from atts.core import AnswerKind
from atts.evaluators import equivalent, extract, reference
from scripts.studies.machine import rows_of

TARGET = Path(__file__).resolve().parents[2] / "docs" / "grading_policies.md"
_MARK = "a test compares it where the pairs are at hand.\n"
"""What comes before this in the page, and the mark, is written by hand."""


def document() -> str | None:
    """The document, None where the pairs are not at hand."""
    rows = [row for row in rows_of("equivalence/cases.jsonl") if row["tag"] != "core"]
    if not rows:
        return None
    rows.sort(key=lambda row: (row["tag"], row["id"]))
    parts = ["".join(TARGET.read_text(encoding="utf-8").partition(_MARK)[:2])]
    for tag, group in groupby(rows, key=lambda row: str(row["tag"])):
        found = [_row(row) for row in group]
        agreed = sum(row[-1] for row in found)
        parts.append(
            f"## {tag.removeprefix('policy:')}\n\n{agreed} of {len(found)} as the reader.\n"
        )
        parts.append("| | reference | answer | reader | ours | rule |\n|---|---|---|---|---|---|")
        parts += ["| " + " | ".join(row[:-1]) + " |" for row in found]
        parts.append("")
    return "\n".join(parts)


def _row(row: dict[str, Any]) -> tuple[Any, ...]:
    gold = row["gold"]
    answer = row["pred"]
    kind: AnswerKind = "choice" if "choice" in row["tag"] else "math"
    if row["kind"] == "text" and kind == "choice":
        gold = extract(gold, kind) or gold
        answer = extract(answer, kind) or answer
    elif row["kind"] == "text":
        gold = reference(gold)
        answer = extract(answer) or ""
    verdict = equivalent(gold, answer, kind)
    reader = "equal" if row["expected"] else "different"
    mark = "" if verdict.is_equal == row["expected"] else "≠"
    shown = [_cell(row["gold"]), _cell(row["pred"])]
    return (
        row["id"].removeprefix("eq") + mark,
        *shown,
        reader,
        verdict.status,
        verdict.rule,
        not mark,
    )


def _cell(text: str) -> str:
    plain = "".join(char if char.isprintable() else "␤" for char in " ".join(text.split()))
    plain = plain if len(plain) <= 90 else plain[:44] + " … " + plain[-40:]
    return "`" + plain.replace("`", "'").replace("|", "∣") + "`"


def main() -> None:
    """Write the document, or say what is missing."""
    text = document()
    if text is None:
        raise SystemExit("no shared data: set ATTS_SHARED_DATA to its folder")
    TARGET.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
