"""Tests that need a separate process: closed pipes, full disks, no terminal."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import pytest

ESCAPE = "\x1b"
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("ATTS_")}


def atts(
    *words: str,
    cwd: Path,
    stdout: int | IO[bytes] = subprocess.PIPE,
    environment: Mapping[str, str] | None = None,
    file_bytes: int | None = None,
) -> subprocess.CompletedProcess[Any]:
    """Run the command line in a process that has no terminal and can write files of at most
    `file_bytes` bytes.
    """

    def limit() -> None:
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    command = [sys.executable, "-m", "atts", *words]
    return subprocess.run(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**CLEAN, **(environment or {})},
        preexec_fn=limit,
        check=False,
    )


def test_a_closed_pipe_ends_the_command_quietly(tmp_path: Path) -> None:
    """A command piped into `head` prints no error and exits with the code of a broken pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = atts("--help", cwd=tmp_path, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout_is_an_error(tmp_path: Path) -> None:
    """If stdout is on a full disk, the command prints a message instead of a traceback."""
    with Path("/dev/full").open("wb") as full:
        done = atts("--help", cwd=tmp_path, stdout=full)
    assert done.returncode == 4
    assert done.stderr.decode().splitlines() == ["atts: output: No space left on device"]


def test_no_space_for_the_journal(tmp_path: Path, scripted: tuple[str, ...]) -> None:
    """If the journal's disk is full, the run ends with an error that names the file, and the run
    can be resumed.
    """
    words = ("eval", "arithmetic[:2]", "--samples", "2", *scripted, "--out", "run")
    done = atts(*words, cwd=tmp_path, file_bytes=20_000)
    said = done.stderr.decode().splitlines()
    assert done.returncode == 4
    assert said[-1].startswith("atts: run/journal.jsonl: File too large")
    assert "Traceback" not in done.stderr.decode()
    assert atts(*words, cwd=tmp_path).returncode == 0


def test_without_a_terminal_there_are_no_escapes(tmp_path: Path, scripted: tuple[str, ...]) -> None:
    """Without a terminal the output has no escape codes: data on stdout and messages on stderr are
    plain text.
    """
    done = atts("eval", "arithmetic[:2]", "--samples", "2", *scripted, "--json", cwd=tmp_path)
    assert done.returncode == 0
    assert ESCAPE not in done.stdout.decode() + done.stderr.decode()
    assert all(line.startswith("{") for line in done.stdout.decode().splitlines())


def test_no_color_turns_colours_off(tmp_path: Path) -> None:
    """NO_COLOR turns colours off even on a terminal that supports them."""
    plain = atts("--help", cwd=tmp_path, environment={"FORCE_COLOR": "1", "NO_COLOR": "1"})
    bright = atts("--help", cwd=tmp_path, environment={"FORCE_COLOR": "1"})
    assert f"{ESCAPE}[3" not in plain.stdout.decode()
    assert f"{ESCAPE}[3" in bright.stdout.decode() or ";3" in bright.stdout.decode()
