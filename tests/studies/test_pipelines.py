"""Tests of the record of a long study: work that a kill interrupted is run again, and finished work
is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

study = pytest.importorskip("scripts.studies.pipelines", reason="needs a checkout")
arms = pytest.importorskip("scripts.studies.arms", reason="needs a checkout")
Ledger = arms.Ledger
Piece = arms.Piece
Solved = arms.Solved

TOKENS = {"draft": 100, "scored": 90}
SOLVED = Solved("p1", 2, 1.0, 0.75, **TOKENS, target=30, decisions=[(0, 0, True), (1, 1, False)])


def piece(arm: str, shard: int, right: float = 1.0) -> Any:
    numbers = {**TOKENS, "target": 30 if arm == "atts" else 200, "decisions": [(0, 0, True)]}
    solved = [Solved(f"p{shard}-{n}", 1 + n % 5, right, 0.5, **numbers) for n in range(4)]
    return Piece(arm, 8, 0, shard, solved, [1.5])


def test_pieces_come_back_as_they_were(tmp_path: Path) -> None:
    """The next session reads the finished parts of a study that an earlier session recorded."""
    path = tmp_path / "ledger.jsonl"
    first = Ledger(path)
    first.add(Piece("atts", 8, 0, 3, [SOLVED], [1.25]))
    assert Ledger(path).pieces == first.pieces
    assert Ledger(path).of("atts", 8).solved == [SOLVED]


def test_a_torn_line_costs_its_piece_alone(tmp_path: Path) -> None:
    """After a kill in the middle of a write, the parts before and after the incomplete line are
    read. The next part begins on a new line.
    """
    path = tmp_path / "ledger.jsonl"
    Ledger(path).add(piece("atts", 0))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    after = Ledger(path)
    assert set(after.pieces) == {("atts", 8, 0, 0)}
    after.add(piece("atts", 1))
    assert set(Ledger(path).pieces) == {("atts", 8, 0, 0), ("atts", 8, 0, 1)}


def test_two_processes_share_a_ledger(tmp_path: Path) -> None:
    """Two processes add finished parts of a study to one file, and a later reader gets the parts of
    both.
    """
    path = tmp_path / "ledger.jsonl"
    one = Ledger(path)
    other = Ledger(path)
    one.add(piece("atts", 0))
    other.add(piece("target-only", 0))
    one.add(piece("atts", 1))
    assert len(Ledger(path).pieces) == 3


def test_the_claim_is_read_from_what_is_there() -> None:
    """The verdict on the study's claim lists each requirement with its measured number, whether met
    or not.
    """
    ledger = Ledger()
    for shard in range(2):
        ledger.add(piece("atts", shard))
        ledger.add(piece("target-only", shard))
    methods, verdict = study.claimed(ledger)
    assert methods.title == "The claim: 8 problems x 8 samples x 1 seeds"
    assert [row[2] for row in verdict.rows] == ["no", "yes", "yes"], (
        "equal votes of 8 problems prove no equality"
    )
    assert verdict.rows[1][1] == "15.0 %"
