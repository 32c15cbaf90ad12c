"""A fixture that hides this machine's keys and proxies from tests of hostile servers."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's keys and proxies."""
    for name in ("ATTS_API_KEY", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
