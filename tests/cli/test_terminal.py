"""A person at a terminal: watches a run, presses Ctrl-C, goes on later, and loses nothing."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from atts.journal import (
    JOURNAL,
    Decided,
    Sampled,
    Scored,
    SessionClosed,
    SessionOpened,
    read_entries,
    read_outcomes,
)

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("ATTS_")}
FROZEN = (
    "--method", "random", "--rate", "0.3", "--samples", "4", "--seed", "5", "--set", "early_stop=none",
    "--rollouts", "6", "--draft", "scripted", "--target", "scripted", "--report", "none",
)  # fmt: skip
"""A gate that learns nothing, and votes that spare no rollout: every run of it comes out the same.
"""
CTRL_C = b"\x03"


class Terminal:
    """`atts` on a pseudo-terminal of its own, as a shell would start it."""

    def __init__(self, *words: str, cwd: Path) -> None:
        self.shown = b""
        self._keys, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
        command = [sys.executable, "-m", "atts", *words]
        environment = {**CLEAN, "TERM": "xterm-256color"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *command],
            cwd=cwd, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)

    def press(self, keys: bytes) -> None:
        """Type."""
        os.write(self._keys, keys)

    def until(self, true: Callable[[], bool], seconds: float = 120) -> None:
        """Watch until something is true."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.shown.decode(errors="replace")
            if not self._watch(0.005):
                assert self._process.poll() is None, self.shown.decode(errors="replace")

    def end(self) -> int:
        """Watch to the end; the exit code."""
        while self._watch(120):
            pass
        os.close(self._keys)
        return self._process.wait(120)

    def _watch(self, seconds: float) -> bool:
        if not select.select([self._keys], [], [], seconds)[0]:
            return False
        try:
            more = os.read(self._keys, 1 << 16)
        except OSError:  # how a terminal says that no process writes to it any more
            return False
        self.shown += more
        return bool(more)


_TAKE_TERMINAL = "import fcntl,os,sys,termios; fcntl.ioctl(0,termios.TIOCSCTTY,0); os.execv(sys.argv[1],sys.argv[1:])"


def events(run: Path, *kinds: type[Any]) -> list[Any]:
    """What the journal says of these kinds, with the session."""
    return [
        (entry.session, entry.event)
        for entry in read_entries(run / JOURNAL, kinds=kinds)
        if entry.event
    ]


def decisions(run: Path) -> Mapping[tuple[str, int, int], str]:
    """Every decision: one per problem, sample and turn."""
    found: dict[tuple[str, int, int], str] = {}
    for _, event in events(run, Decided):
        if isinstance(event, Decided) and event.decision.action != "verify":
            decision = event.decision
            place = (decision.question, decision.sample, decision.turn)
            assert place not in found, f"decided twice: {place}"
            found[place] = decision.action
    return found


def answers(run: Path) -> Mapping[str, Any]:
    """What every problem came to, and what every rollout wrote."""
    outcomes = read_outcomes(read_entries(run / JOURNAL))
    return {
        o.problem.id: (o.answer, o.votes, [(r.sample, r.finish, r.text) for r in o.rollouts])
        for o in outcomes
    }


def calls(run: Path) -> Mapping[str, set[int]]:
    """In which sessions each engine call was made."""
    found: dict[str, set[int]] = {}
    for session, event in events(run, Sampled, Scored):
        if isinstance(event, Sampled | Scored):
            found.setdefault(event.key, set()).add(session)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that is not interrupted, without a terminal."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    command = [sys.executable, "-m", "atts", "eval", "arithmetic[:14]", *FROZEN, "--out", str(run)]
    done = subprocess.run(command, env=CLEAN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_loses_nothing(undisturbed: Path, tmp_path: Path, presses: int) -> None:
    """Once: calls in flight end and are saved. Twice: it ends at once. Either way the same command
    goes on.
    """
    run = tmp_path / "run"
    words = ("eval", "arithmetic[:14]", *FROZEN, "--out", str(tmp_path / "run"))
    enough = (undisturbed / JOURNAL).stat().st_size // 4
    terminal = Terminal(*words, cwd=tmp_path)
    terminal.until(lambda: (run / JOURNAL).exists() and (run / JOURNAL).stat().st_size > enough)
    terminal.press(CTRL_C)
    if presses == 2:
        terminal.until(lambda: b"asked to end" in (run / JOURNAL).read_bytes())
        terminal.press(CTRL_C)
    assert terminal.end() == 130
    assert b"the same command continues" in terminal.shown
    before = decisions(run)
    assert 0 < len(before) < len(decisions(undisturbed))
    again = Terminal(*words, cwd=tmp_path)
    assert again.end() == 0
    assert b"answers correct" in again.shown
    assert decisions(run) == decisions(undisturbed)
    assert before.items() <= decisions(run).items()
    assert answers(run) == answers(undisturbed)
    assert all(len(sessions) == 1 for sessions in calls(run).values()), (
        "a recorded call was made again"
    )
    closings = [
        event.status for _, event in events(run, SessionClosed) if isinstance(event, SessionClosed)
    ]
    assert closings == ["interrupted", "finished"]


def test_a_terminal_shows_the_run_as_it_goes(tmp_path: Path) -> None:
    """A table drawn over itself: problems, rollouts by stage, chunks, the rate, tokens of both
    models.
    """
    terminal = Terminal("eval", "arithmetic[:3]", *FROZEN, "--out", "run", cwd=tmp_path)
    assert terminal.end() == 0
    text = terminal.shown.decode()
    for words in (
        "3/3 problems",
        "drafting",
        "accepted",
        "escalated",
        "asked for 0.3",
        "by the target",
        "━",
    ):
        assert words in text
    assert "\x1b[" in text
    assert json.loads((tmp_path / "run" / "progress.json").read_text())["state"] == "over"


def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    """No terminal: no escape, no redrawing, and stdout holds the results alone."""
    command = [
        sys.executable,
        "-m",
        "atts",
        "eval",
        "arithmetic[:3]",
        *FROZEN,
        "--out",
        "run",
        "--json",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=CLEAN, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0
    assert "3/3 problems" in done.stderr
    assert "\x1b" not in done.stderr
    assert all(isinstance(json.loads(line), dict) for line in done.stdout.splitlines())
    saved = json.loads((tmp_path / "run" / "progress.json").read_text())
    assert (saved["done"], saved["rollouts_done"], saved["directory"]) == (3, 12, "run")
    assert [path.name for path in (tmp_path / "run").glob(".*")] == []


def test_a_polite_kill_is_a_ctrl_c(tmp_path: Path) -> None:
    """A cluster's scheduler asks by SIGTERM: what is in flight is saved, and the exit code says so."""
    command = [sys.executable, "-m", "atts", "eval", "arithmetic[:40]", *FROZEN, "--out", "run"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=CLEAN, stderr=subprocess.PIPE, text=True
    ) as process:
        while (
            not (tmp_path / "run" / JOURNAL).exists() or len(events(tmp_path / "run", Sampled)) < 20
        ):
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=120)
    assert (process.returncode, "interrupted" in said) == (130, True)
    assert events(tmp_path / "run", SessionClosed, SessionOpened)[-1][1].status == "interrupted"
