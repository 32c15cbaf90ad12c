"""Tests of a server's calibrators: requests share them, restarts keep them, and unsuitable ones are
ignored.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import anyio
import pytest

from atts.calibration import Calibrator, read_state, write_state
from atts.serving import Service
from atts.serving.service import conformal_gate
from tests.serving.conftest import Client, serving, toy_setup

pytest.importorskip("starlette", reason="starlette is not installed: pip install 'atts-llm[serve]'")


def calibrator(service: Service, method: str = "atts", rate: float = 0.2) -> Calibrator:
    """Return the calibrator that requests with this method and rate share."""
    gate = conformal_gate(service.gates[method, rate])
    assert gate is not None
    assert isinstance(gate.calibrator, Calibrator)
    return gate.calibrator


async def ask(client: Client, times: int = 1, **fields: Any) -> None:
    """Ask the toy question `times` times."""
    for _ in range(times):
        assert (await client.chat(**fields)).status_code == 200


def test_a_restarted_server_continues_with_what_it_learnt(tmp_path: Path) -> None:
    """A restarted server continues with the recorded decisions of earlier sessions, in one
    calibrator per method and rate.
    """

    async def main() -> None:
        async with serving(state=tmp_path) as client:
            await ask(client, 5)
            await ask(client, 2, reasoning_effort="high")
            # a request with a seed has its own calibrator, and the shared one does not learn from it
            await ask(client, 3, seed=1)
            decided = calibrator(client.service).decided
            other = calibrator(client.service, rate=0.3).decided
            assert decided > other > 0
        async with serving(state=tmp_path) as client:
            await ask(client, reasoning_effort="high", atts={"max_calls": 1})
            assert calibrator(client.service, rate=0.3).decided >= other
            assert client.service.gates.keys() == {("atts", 0.3)}
            await ask(client)
            assert calibrator(client.service).decided > decided

    anyio.run(main)


def test_a_restored_calibrator_decides_as_the_one_that_was_saved(tmp_path: Path) -> None:
    """A restored calibrator has the earlier session's state, and continues its numbering of scores
    and its realised rate.
    """

    async def main() -> None:
        async with serving(state=tmp_path) as client:
            await ask(client, 8)
            before = calibrator(client.service)
            before.settle()
            saved = before.state()
        async with serving(state=tmp_path) as client:
            # the server plans the request, which creates the calibrator, but the request's cap
            # allows no call
            await ask(client, atts={"max_total_tokens": 1})
            after = calibrator(client.service)
            assert after is not before
            assert after.state() == saved
            assert after.next_issue == before.next_issue > 0

    anyio.run(main)


@pytest.mark.parametrize("damage", ["torn", "models", "rate scope"])
def test_unsuitable_calibrators_are_left_out_with_a_message(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A server starts although a stored calibrator is damaged, or belongs to other models or
    settings; a message says so.
    """

    async def main() -> None:
        async with serving(state=tmp_path) as client:
            await ask(client, 3)
        (path,) = (tmp_path / "calibrators").iterdir()
        setup = toy_setup()
        if damage == "torn":
            path.write_bytes(path.read_bytes()[:-20])
        elif damage == "models":
            state = read_state(path)
            write_state(path, {**state, "models": {"draft": "another", "target": "one"}})
        else:
            setup = toy_setup(rate_scope="question")
        with caplog.at_level(logging.WARNING, "atts.serving"):
            async with serving(setup, state=tmp_path) as client:
                await ask(client, atts={"max_total_tokens": 1})
                assert calibrator(client.service).decided == 0
        assert "is ignored" in caplog.text

    anyio.run(main)


def test_calibrators_are_saved_while_the_server_runs(tmp_path: Path) -> None:
    """Calibrators are saved while the server runs, so a killed server does not lose everything."""

    async def main() -> None:
        async with serving(state=tmp_path, save_seconds=0.01) as client:
            await ask(client, 2)
            decided = calibrator(client.service).decided
            path = tmp_path / "calibrators" / "atts-0.2.json"
            with anyio.fail_after(20):
                while not path.exists() or saved(path) < decided:  # noqa: ASYNC110
                    await anyio.sleep(0.01)

    anyio.run(main)


def test_a_calibrator_that_could_not_be_saved_is_saved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If a write fails, the next attempt writes the state, although no decision was made since."""
    failures = list[int]()
    is_full = True

    def write(path: Path, state: Any) -> None:
        if is_full:
            failures.append(state["calibrator"]["decided"])
            raise OSError(28, "No space left on device")
        write_state(path, state)

    monkeypatch.setattr("atts.serving.service.write_state", write)

    async def main() -> None:
        nonlocal is_full
        async with serving(state=tmp_path, save_seconds=0.01) as client:
            await ask(client, 2)
            decided = calibrator(client.service).decided
            path = tmp_path / "calibrators" / "atts-0.2.json"
            with anyio.fail_after(20):
                while decided not in failures:  # noqa: ASYNC110
                    await anyio.sleep(0.01)
                is_full = False
                while not path.exists():  # noqa: ASYNC110
                    await anyio.sleep(0.01)
            assert saved(path) == decided > 0
        assert "cannot be saved" in caplog.text

    anyio.run(main)


def saved(path: Path) -> int:
    """Return the number of decisions in a calibrator's file."""
    return int(read_state(path)["calibrator"]["decided"])


def test_a_reply_says_that_its_guarantee_counts_other_requests() -> None:
    """The guarantee in a reply counts the chunks of all requests that share a gate, and says so."""

    async def main() -> None:
        async with serving() as client:
            await ask(client, 2)
            reply = (await client.chat()).json()["atts"]
            total = calibrator(client.service).decided
            assert total > reply["rate"]["chunks"]
            assert reply["guarantee"].startswith("requests that share this gate: ")
            assert f"of {total} chunks" in reply["guarantee"]
            # The conditions that void the guarantee have their own field.
            assert reply["voided_by"]
            assert reply["voided_by"] not in reply["guarantee"]

    anyio.run(main)
