"""What published speed-ups need, by closed forms."""

from __future__ import annotations

import pytest

from scripts.studies.overlap_virtual import needed, pearl_speedup

pytestmark = pytest.mark.checkout


def test_what_a_goal_needs() -> None:
    """The least acceptance that reaches it, or none at all."""
    found = needed(lambda accepted: pearl_speedup(accepted, 5, 5), 2.2832)
    assert found == pytest.approx(0.8, abs=1e-3)
    assert needed(lambda accepted: pearl_speedup(accepted, 5, 5), 5.1) is None
