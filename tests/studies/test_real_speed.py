"""Tests of the study of a real pair's speed, on the embedded pair: its timings and its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atts.evaluators.datasets.arithmetic import problems
from atts.models import path

real_pair: Any = pytest.importorskip("scripts.studies.real_pair", reason="needs a checkout")


@pytest.fixture
def lab(tmp_path: Path) -> Any:
    """Return the study's lab on the embedded pair, with its timings kept in a file."""
    sizes = real_pair.Sizes(texts=1, tokens=12, together=(1, 2))
    kept = real_pair.Parts(tmp_path / "kept.jsonl")
    return real_pair.Lab(path("draft"), path("target"), problems("test", 4), sizes, kept)


def test_a_way_is_compared_with_plain_decoding_in_its_round(lab: Any) -> None:
    """The study counts proposals, and speculation writes the texts of plain decoding. Both tables
    have a row for each arm.
    """
    options = real_pair.ways(str(lab.draft))
    for name in (real_pair.PLAIN, "draft, k=3"):
        timing = lab.speculated(options[name], 0)
        lab.kept.keep(f"alone|{name}|0", [real_pair.asdict(one) for one in timing])
    lab.kept.keep("together|atts|0", [real_pair.asdict(one) for one in lab.plain(0)])
    plain, drafted = (
        lab.timings(f"alone|{name}")[0][0] for name in (real_pair.PLAIN, "draft, k=3")
    )
    assert drafted.texts == plain.texts
    assert drafted.accepted <= drafted.proposed
    assert drafted.steps < plain.steps == plain.tokens
    together, alone = real_pair.speed_tables(lab)
    assert [row[:2] for row in together.rows] == [(1, "atts"), (2, "atts")]
    assert [row[0] for row in alone.rows] == [real_pair.PLAIN, "draft, k=3"]
    assert [row[-1] for row in alone.rows] == ["1 of 1", "1 of 1"]


def test_what_is_kept_is_not_timed_again_and_what_fails_is_left_out(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted round resumes with its missing arms, and an arm that fails is left out."""
    asked = list[str]()

    def timed(name: str) -> Any:
        def call(*_: Any, **__: Any) -> Any:
            asked.append(name)
            if name == "llama":
                raise real_pair.CannotBeMadeError("no wheel")
            return [real_pair.Timing(1.0, 1.0, 1, [[1]], steps=1)]

        return call

    for name in ("speculated", "plain", "transformers", "llama"):
        monkeypatch.setattr(lab, name, timed(name))
    lab.round(0)
    assert asked.count("llama") == len(real_pair.LLAMA_ARMS)
    first = len(asked)
    lab.round(0)
    assert len(asked) == first
    lab.round(1)
    assert asked.count("llama") == len(real_pair.LLAMA_ARMS), (
        "the failing arm must be tried only once"
    )
