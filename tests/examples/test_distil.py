"""A trainer of few lines reads an export and brings the draft nearer to the target."""

import re
from collections.abc import Callable
from types import ModuleType

import pytest

pytestmark = pytest.mark.checkout


def test_the_divergence_falls(
    example: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    """KL(draft || target) falls on problems that the training left out."""
    example("distil").main()
    found = re.search(r"left out: (\S+) -> (\S+) nats a token", capsys.readouterr().out)
    assert found is not None
    assert float(found[2]) < 0.97 * float(found[1])
