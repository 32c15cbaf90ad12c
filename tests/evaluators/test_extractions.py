"""Tests of extraction from the words, tags, boxes and languages that models write."""

import re
from pathlib import Path

import pytest

from atts.core import AnswerKind
from atts.evaluators import equivalent, extract


def _kinds() -> dict[str, list[tuple[str, str]]]:
    text = Path(__file__).with_name("extractions.txt").read_text(encoding="utf-8")
    parts = (part.partition("]\n") for part in text.split("\n\n[")[1:])
    return {kind: [_row(line) for line in lines.split("\n") if line] for kind, _, lines in parts}


def _row(line: str) -> tuple[str, str]:
    text, _, answer = line.rpartition(" ;; ")
    return text.replace("⏎", "\n"), answer


KINDS = _kinds()


def is_found(kind: AnswerKind, text: str, answer: str) -> bool:
    """Return whether the expected answer is extracted, or no answer if none is expected."""
    found = extract(text, kind)
    if found is None or answer == "∅":
        return found is None and answer == "∅"
    return equivalent(answer, found, kind).is_equal


@pytest.mark.parametrize("kind", list(KINDS))
def test_each_kind_of_text_gives_its_answer(kind: str) -> None:
    """From each text, extraction gives the answer that a human reader found."""
    asked: AnswerKind = "choice" if kind.startswith("choice") else "math"
    assert [text for text, answer in KINDS[kind] if not is_found(asked, text, answer)] == []


def test_no_kind_of_text_is_empty_or_misspelt() -> None:
    """Each kind in the list has texts, and each text has a known kind."""
    assert all(re.match("math: |choice: ", kind) and len(rows) > 5 for kind, rows in KINDS.items())
