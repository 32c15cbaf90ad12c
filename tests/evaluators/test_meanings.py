"""Tests of answers with equal numbers and different meanings, and of equal meanings in different
words.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from atts.evaluators import equivalent


def _kinds() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    text = Path(__file__).with_name("meanings.txt").read_text(encoding="utf-8")
    for part in text.split("\n\n[")[1:]:
        kind, _, lines = part.partition("]\n")
        rows = [line.replace("⏎", "\n").split(" ;; ") for line in lines.split("\n") if line]
        yield kind, [(gold, answer) for gold, answer in rows]


KINDS = dict(_kinds())


@pytest.mark.parametrize("kind", list(KINDS))
def test_pairs_are_graded_by_meaning(kind: str) -> None:
    """Each pair is graded by its meaning, whichever of the two answers is the reference."""
    expected = kind.startswith("equal")
    both = [(gold, answer) for pair in KINDS[kind] for gold, answer in (pair, pair[::-1])]
    assert [pair for pair in both if equivalent(*pair).is_equal != expected] == []


def test_no_kind_of_pair_is_empty_or_misspelt() -> None:
    """Each kind in the list has pairs, and each pair has a known kind."""
    assert all(
        kind.startswith(("different: ", "equal: ")) and len(pairs) > 10
        for kind, pairs in KINDS.items()
    )
