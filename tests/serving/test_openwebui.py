"""Tests with recorded traffic of Open WebUI: questions of its users, and requests that it sends
itself.

`openwebui_traffic.jsonl` has the requests that the backend of Open WebUI 0.12.4 sent to `atts
serve`. The headers are left out, and the instructions of the tasks are shortened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.serving.conftest import Client, serving

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'")
TRAFFIC = [
    json.loads(line)
    for line in (Path(__file__).parent / "openwebui_traffic.jsonl").read_text().splitlines()
]
OF_ITS_OWN = ("title", "tags", "follow-ups", "search queries")


async def sent_again(client: Client, recorded: dict[str, Any]) -> dict[str, Any]:
    """Send a recorded request, and return the reply, or the last event of a stream."""
    path = recorded["path"].removeprefix("/v1")
    response = await client.http.request(recorded["method"], path, json=recorded["body"])
    assert response.status_code == 200
    lines = response.text.split("\n\n")
    if response.headers["content-type"].startswith("text/event-stream"):
        assert lines[-2:] == ["data: [DONE]", ""]
        last: dict[str, Any] = json.loads(lines[-3].removeprefix("data: "))
        return last
    whole: dict[str, Any] = response.json()
    return whole


@pytest.mark.parametrize("recorded", TRAFFIC, ids=lambda one: one["kind"].replace(" ", "-"))
def test_recorded_requests_are_answered(recorded: dict[str, Any]) -> None:
    """Requests that Open WebUI sends itself get one draft rollout; its users' questions get the
    usual policy.
    """

    async def main() -> None:
        async with serving() as client:
            reply = await sent_again(client, recorded)
            if recorded["kind"] == "models":
                assert reply["data"][0]["id"] == "atts/toy"
                return
            facts = reply["atts"]
            if recorded["kind"] in OF_ITS_OWN:
                assert facts["policy"] == "housekeeping"
                assert facts["samples"]["started"] == 1
                assert facts["by_model"]["target"] == {"completion": 0, "prompt": 0, "scored": 0}
            else:
                assert facts["policy"] == "balanced"
                assert facts["samples"]["started"] > 1
            assert facts["ignored"] == []

    anyio.run(main)


def test_the_recording_has_every_kind_of_request() -> None:
    """The recording has every kind of request, so a recording that lost lines would be noticed."""
    kinds = {one["kind"] for one in TRAFFIC}
    assert kinds == {"models", "chat", "streamed chat", "documents", *OF_ITS_OWN}
