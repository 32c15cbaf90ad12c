"""The page of disputed pairs says what the grader says."""

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.checkout


def test_the_examples_of_policies_hold() -> None:
    """Three for each that can be set, both ways, and the page shows them."""
    from scripts.studies.grading_policy import EXAMPLES, TARGET, said

    assert [row for row in EXAMPLES if said(*row[1:4]) != row[4]] == []
    assert Counter(row[0] for row in EXAMPLES) == dict.fromkeys(("relative", "absolute", "units", "choices"), 3)
    assert all(f"| `{answer}` | {status} |" in TARGET.read_text(encoding="utf-8") for *_, answer, status in EXAMPLES)


def test_the_page_is_current(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regenerating it changes nothing; every disputed pair has its row."""
    from scripts.studies.grading_policy import TARGET, document

    monkeypatch.setenv("ATTS_SHARED_DATA", str(shared_data))
    assert document() == TARGET.read_text(encoding="utf-8")
    assert TARGET.read_text(encoding="utf-8").count("\n| ") > 250
