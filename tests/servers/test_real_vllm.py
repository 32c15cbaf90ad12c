"""Tests of the checks of `scripts/test servers pair`, on servers that speak vLLM's dialect."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from atts.core import Role
from atts.local import LocalEngine, LocalOptions
from atts.models import path
from atts.testing import ServerQuirks
from atts.testing.servers import DialectServer

real_vllm: Any = pytest.importorskip("tests.servers.real_vllm", reason="needs a checkout")
pytestmark = pytest.mark.checkout


def served(role: Role) -> LocalEngine:
    """Serve an embedded model in a way that several runs can use at once."""
    return LocalEngine(path(role), name=role, options=LocalOptions(worker="thread"))


@pytest.mark.slow
def test_the_page_of_two_servers_can_be_followed(tmp_path: Path) -> None:
    """Each command of the two-servers page exits with 0 on two servers, and a killed run is
    finished.
    """
    roles: tuple[Role, ...] = ("draft", "target")
    with ExitStack() as stack:
        addresses = {}
        for role in roles:
            server = DialectServer(partial(served, role), "vllm", model=role)
            url = stack.enter_context(server).url
            addresses[role] = real_vllm.Served(role, url, path(role)).address
        problems = real_vllm.problem_file(tmp_path)
        found = list(real_vllm.followed(addresses, problems, tmp_path))
    assert [(what, seen) for what, seen, holds in found if holds != "yes"] == []
    assert [what for what, *_ in found][-1] == "kill -9 and resume"


@contextmanager
def speculating(quirks: ServerQuirks) -> Generator[Any]:
    """Serve the embedded target with vLLM's dialect."""
    with DialectServer(partial(served, "target"), "vllm", quirks=quirks, model="target") as server:
        yield real_vllm.Served("target", server.url, path("target"))


def test_greedy_texts_are_equal_with_and_without_speculation() -> None:
    """A server writes the same greedy texts with and without speculation. Only the server that
    speculates reports a share of accepted tokens.
    """
    with speculating(ServerQuirks()) as plain:
        before = real_vllm._greedy(plain)
    quirks = ServerQuirks(speculation="lossless", acceptance=(0.7,))
    with speculating(quirks) as proposing:
        after = real_vllm._greedy(proposing)
    assert before.texts == after.texts
    assert len(before.texts) == 4
    assert before.accepted is None
    assert after.accepted == pytest.approx(0.7, abs=0.2)
    assert [*after.speeds] == [1, 4]
    assert min(after.speeds.values()) > 0


@pytest.mark.slow
def test_a_servers_own_speculation_is_timed_and_its_wrong_texts_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The probe refuses servers whose speculation makes sampled texts wrong, as that of vLLM on a
    CPU does.
    """

    @contextmanager
    def serving(_: Path, servers: Sequence[Any]) -> Generator[list[Any]]:
        quirks = ServerQuirks(speculation="hot" if servers[0].more else "off")
        with speculating(quirks) as opened:
            yield [opened]

    monkeypatch.setattr(real_vllm, "serving", serving)
    found = list(real_vllm.of_speculation(Path(), ["embedded", "embedded"], 1))
    assert [(what, seen) for what, seen, holds in found if holds != "yes"] == []
    assert [what for what, *_ in found] == [
        "none: probe",
        "tune",
        "none: greedy texts, round 1",
        "ngram: probe",
        "ngram: greedy texts, round 1",
        "draft_model: probe",
        "draft_model: greedy texts, round 1",
    ]


def test_a_command_that_fails_is_told_from_one_that_ends_well(tmp_path: Path) -> None:
    """The check of a command fails for a wrong exit code and for missing output."""
    what, seen, holds = real_vllm.of_command("report", "report", str(tmp_path / "none"))
    assert (what, holds) == ("report", "no")
    assert "exit code" in seen
    assert real_vllm.of_command("pairs", "pairs")[2] == "yes"


def test_a_servers_children_end_with_it(tmp_path: Path) -> None:
    """A worker process started by a server ends with the server, even if it ignores SIGTERM."""
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "work = 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print(1, flush=True); time.sleep(600)'\n"
        "child = subprocess.Popen([sys.executable, '-c', work], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(600)"
    )
    log = tmp_path / "log"
    with log.open("wb") as said:
        words = [sys.executable, "-c", code]
        with real_vllm._process(words, said, dict(os.environ)):
            while not (pid := log.read_text().strip()):
                time.sleep(0.02)
            assert Path("/proc", pid).exists()
    state = Path("/proc", pid, "stat")
    while state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.02)


def test_cores_are_divided_or_left_to_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers get different cores if the machine has at least two; otherwise both use all
    cores.
    """
    monkeypatch.setattr(real_vllm.os, "sched_getaffinity", lambda _: {4, 5, 6, 7})
    assert real_vllm.cores_of(2) == ["4,5", "6,7"]
    monkeypatch.setattr(real_vllm.os, "sched_getaffinity", lambda _: {3})
    assert real_vllm.cores_of(2) == ["auto", "auto"]
