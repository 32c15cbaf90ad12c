"""The page of disputed pairs says what the grader says."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.checkout


def test_the_page_is_current(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regenerating it changes nothing; every disputed pair has its row."""
    from scripts.studies.grading_policy import TARGET, document

    monkeypatch.setenv("ATTS_SHARED_DATA", str(shared_data))
    assert document() == TARGET.read_text(encoding="utf-8")
    assert TARGET.read_text(encoding="utf-8").count("\n| ") > 250
