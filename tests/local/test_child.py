"""Tests of an engine's child process: its imports, its crashes, and its end together with its
parent.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from atts.cli import run
from atts.core import SampleRequest
from atts.errors import EngineError
from atts.local import LocalEngine, LocalOptions
from atts.local.messages import WorkerConfig
from atts.local.model_config import read_model_config
from atts.local.worker import ProcessWorker
from atts.models.tokenizers import ModelTokenizer

pytestmark = pytest.mark.skipif(
    not Path("/proc/self").exists(), reason="needs /proc to list processes"
)
Make = Callable[..., Path]
CANARY = "open({sung!r}, 'a').write(__name__ + '\\n')\nraise ImportError('the canary sang')\n"


def test_nothing_is_imported_from_the_current_directory(
    make_model: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files named like libraries in the current directory are ignored, even if the parent's import
    path contains that directory.
    """
    folder = make_model("llama")
    sung = tmp_path / "sung"  # this process has already loaded its libraries
    for name in (
        "torch",
        "numpy",
        "transformers",
        "safetensors",
        "sympy",
        "sitecustomize",
        "usercustomize",
        "atts",
    ):
        (tmp_path / f"{name}.py").write_text(CANARY.format(sung=str(sung)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", "", "/nowhere"]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend("")

    async def open_and_sample() -> None:
        async with LocalEngine(folder) as engine:
            await engine.sample(SampleRequest((5, 6), 2))

    anyio.run(open_and_sample)
    assert not sung.exists(), sung.read_text()


@pytest.fixture
def no_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every Python child process by one that prints a text and ends at once."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nprintf 'first\\nlibfoo.so: cannot open\\n\\n' >&2\nexit 7\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


@pytest.mark.usefixtures("no_python")
def test_a_child_that_dies_while_loading_is_reported_with_its_output(make_model: Make) -> None:
    """If a child dies while it loads, the error shows its last output, even if the pipe breaks
    while atts sends the configuration.
    """
    config = worker_config(make_model("llama"), pieces=1_000_000)
    worker = ProcessWorker()
    with pytest.raises(
        EngineError,
        match=r"loading the model, with exit code 7; last output: libfoo\.so: cannot open",
    ):
        worker.open(config, lambda report: None)
    worker.close()


@pytest.mark.usefixtures("no_python")
def test_a_broken_pipe_to_a_child_is_an_engine_error(capsys: pytest.CaptureFixture[str]) -> None:
    """A broken pipe to an engine's child is reported as an engine error, not as a closed stdout of
    the command.
    """
    assert run(["solve", "What is 2 + 2?"]) == 3
    assert "last output: libfoo.so: cannot open" in capsys.readouterr().err


def test_only_a_closed_stdout_ends_a_command_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    """If stdout is closed, a command ends without a message. If any other pipe breaks, it ends with
    an error message.
    """

    def refuse(*_: object) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("atts.cli.app._run", refuse)
    assert run([]) == 4


PARENT = """
import os, pickle, signal, sys
from atts.core import SampleRequest
from atts.local.messages import Submit
from atts.local.worker import ProcessWorker

config, until = pickle.load(sys.stdin.buffer), sys.argv[1]
worker = ProcessWorker()
if until != "loading":
    worker.open(config, lambda report: None)
if until == "working":
    worker.send(Submit(1, SampleRequest((5, 6, 7), 90_000)))
print(worker._process.pid, flush=True)
signal.pause()
"""


@pytest.mark.parametrize(
    ("until", "end"),
    [
        ("loading", signal.SIGKILL),
        ("ready", signal.SIGKILL),
        pytest.param("working", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("ready", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("ready", signal.SIGHUP, marks=pytest.mark.slow),
        pytest.param("stopped", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_a_child_ends_with_its_parent(until: str, end: signal.Signals, make_model: Make) -> None:
    """After a parent process is killed, none of its children is left, not even a stopped child."""
    folder = make_model("llama", eos_token_id=None, max_position_embeddings=100_000)
    command = [sys.executable, "-c", PARENT, until]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(pickle.dumps(worker_config(folder)))
        parent.stdin.close()
        child = int(parent.stdout.readline())
        if until == "stopped":
            os.kill(child, signal.SIGSTOP)
        parent.send_signal(end)
    deadline = time.monotonic() + 60
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    if is_running(child):
        os.kill(child, signal.SIGKILL)
        pytest.fail("the child outlived its parent")


def is_running(pid: int) -> bool:
    """Return whether a process is alive; a zombie process counts as dead."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def worker_config(folder: Path, pieces: int = 0) -> WorkerConfig:
    """Make the first message to an engine's child process. The message is made longer by `pieces`
    additional token strings.
    """
    tokenizer = ModelTokenizer(folder, "tiny")
    options = LocalOptions(device="cpu", kernel="torch", kv_tokens=100_000, threads=1)
    parts = (*tokenizer.pieces, *(b"piece %d" % number for number in range(pieces)))
    return WorkerConfig("tiny", folder, read_model_config(folder, "tiny"), parts, options)
