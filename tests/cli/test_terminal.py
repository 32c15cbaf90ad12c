"""Tests with a pseudo-terminal: progress output, Ctrl-C and signals, none of which loses a result."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from typing import Any, Self

import anyio.lowlevel
import anyio.to_thread
import pytest

from atts import concurrency
from atts.api import Setup, configure, evaluate
from atts.cli.evaluations import result_table
from atts.cli.progress import PlainLines, line, progress_display, table
from atts.core import Usage
from atts.engine import EngineSpec
from atts.interrupts import run_async
from atts.journal import (
    JOURNAL,
    Decided,
    FinishedProblem,
    FinishedSample,
    Sampled,
    Scored,
    SessionClosed,
    SessionOpened,
    open_run,
    read_entries,
    read_outcomes,
)
from atts.pipelines import Policy
from atts.run import Progress, RunBegun, RunOptions, RunResult, Stop, watch_signals
from atts.testing import ScriptedEngine, toy_problems

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("ATTS_")}
FROZEN = (
    "--method", "coin", "--rate", "0.3", "--samples", "4", "--seed", "5", "--set", "early_stop=none",
    "--concurrency", "6", "--draft", "scripted", "--target", "scripted", "--report", "none",
)  # fmt: skip
"""Settings under which every run has the same result: the gate learns nothing, and votes cancel no
rollout.
"""
CTRL_C = b"\x03"


class Terminal:
    """`atts` on its own pseudo-terminal, killed when the block ends."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(120)
        os.close(self._keys)

    def press(self, keys: bytes) -> None:
        os.write(self._keys, keys)

    def until(self, true: Callable[[], bool], seconds: float = 120) -> None:
        """Read the output until the condition is true."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.shown.decode(errors="replace")
            if not self._watch(0.005):
                assert self._process.poll() is None, self.shown.decode(errors="replace")

    def end(self) -> int:
        """Read to the end of the output and return the exit code."""
        end = time.monotonic() + 100
        while self._watch(max(0.0, end - time.monotonic())):
            pass
        return self._process.wait(1)

    def _watch(self, seconds: float) -> bool:
        if not select.select([self._keys], [], [], seconds)[0]:
            return False
        try:
            more = os.read(self._keys, 1 << 16)
        except OSError:  # end-of-file of the terminal: no process has it open for writing any more
            return False
        self.shown += more
        return bool(more)


_TAKE_TERMINAL = "import fcntl,os,sys,termios; fcntl.ioctl(0,termios.TIOCSCTTY,0); os.execv(sys.argv[1],sys.argv[1:])"


def events(run: Path, *kinds: type[Any]) -> list[Any]:
    """Return the journal's events of these kinds, each with its session."""
    return [
        (entry.session, entry.event)
        for entry in read_entries(run / JOURNAL, kinds=kinds)
        if entry.event
    ]


def decisions(run: Path) -> Mapping[tuple[str, int, int], str]:
    """Return every decision by problem, sample and turn."""
    found: dict[tuple[str, int, int], str] = {}
    for _, event in events(run, Decided):
        if isinstance(event, Decided) and event.decision.action != "verify":
            decision = event.decision
            place = (decision.question, decision.sample, decision.turn)
            assert place not in found, f"two decisions were recorded for {place}"
            found[place] = decision.action
    return found


def answers(run: Path) -> Mapping[str, Any]:
    """Return every problem's answer and votes, and the text of every rollout."""
    outcomes = read_outcomes(read_entries(run / JOURNAL))
    return {
        o.problem.id: (o.answer, o.votes, [(r.sample, r.finish, r.text) for r in o.rollouts])
        for o in outcomes
    }


def calls(run: Path) -> Mapping[str, set[int]]:
    """Return the sessions in which each engine call was made."""
    found: dict[str, set[int]] = {}
    for session, event in events(run, Sampled, Scored):
        if isinstance(event, Sampled | Scored):
            found.setdefault(event.key, set()).add(session)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the run to compare with, without a terminal and without interruptions."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    command = [sys.executable, "-m", "atts", "eval", "arithmetic[:14]", *FROZEN, "--out", str(run)]
    done = subprocess.run(command, env=CLEAN, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return run


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_loses_nothing(undisturbed: Path, tmp_path: Path, presses: int) -> None:
    """The first Ctrl-C waits for the calls in flight and saves them; the second ends the run at
    once. In both cases the same command continues the run.
    """
    run = tmp_path / "run"
    words = ("eval", "arithmetic[:14]", *FROZEN, "--out", str(tmp_path / "run"))
    enough = (undisturbed / JOURNAL).stat().st_size // 4
    with Terminal(*words, cwd=tmp_path) as terminal:
        terminal.until(lambda: (run / JOURNAL).exists() and (run / JOURNAL).stat().st_size > enough)
        terminal.press(CTRL_C)
        if presses == 2:
            terminal.until(lambda: b"stopped on request" in (run / JOURNAL).read_bytes())
            terminal.press(CTRL_C)
        assert terminal.end() == 130
        assert b"the same command continues" in terminal.shown
        if presses == 1:  # a second Ctrl-C may come before the summary is printed
            assert re.search(rb"saved +[\d,]+ tokens of \d+ unfinished problem", terminal.shown)
    before = decisions(run)
    assert 0 < len(before) < len(decisions(undisturbed))
    with Terminal(*words, cwd=tmp_path) as again:
        assert again.end() == 0
        assert b"accuracy" in again.shown
    assert decisions(run) == decisions(undisturbed)
    assert before.items() <= decisions(run).items()
    assert answers(run) == answers(undisturbed)
    assert all(len(sessions) == 1 for sessions in calls(run).values()), (
        "a recorded call was repeated"
    )
    closings = [
        event.status for _, event in events(run, SessionClosed) if isinstance(event, SessionClosed)
    ]
    assert closings == ["interrupted", "finished"]


def test_a_terminal_shows_a_table_that_is_redrawn(tmp_path: Path) -> None:
    """On a terminal the progress is a table that is redrawn, with problems, rollouts by stage,
    chunks, the rate and the tokens of both models.
    """
    with Terminal("eval", "arithmetic[:3]", *FROZEN, "--out", "run", cwd=tmp_path) as terminal:
        assert terminal.end() == 0
        text = terminal.shown.decode()
    for words in (
        "3/3 problems",
        "drafting",
        "accepted",
        "escalated",
        "nominal 0.3",
        "by the target",
        "━",
    ):
        assert words in text
    assert "\x1b[" in text
    assert json.loads((tmp_path / "run" / "progress.json").read_text())["state"] == "over"


def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    """A pipe gets plain lines: nothing is redrawn, the output has no escape codes, and stdout has
    only the results.
    """
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


@pytest.mark.parametrize(("method", "unit"), [("cascade", "problems"), ("coin", "chunks")])
def test_progress_names_what_the_gate_judges(
    atts: Any, scripted: tuple[str, ...], method: str, unit: str
) -> None:
    """The progress says that a cascade judges problems, and that every other gate judges chunks."""
    said = atts(
        "eval", "arithmetic[:6]", *scripted, "--method", method, "--rate", "0.5", "--samples", "4",
        "--report", "none",
    )  # fmt: skip
    assert said.code == 0
    assert f"escalated {unit}" in said.out
    other = {"problems": "chunks", "chunks": "problems"}[unit]
    assert f"escalated {other}" not in said.out
    assert re.search(rf"; {unit} \d+ accepted, \d+ escalated", said.err)


def test_a_run_without_a_gate_prints_no_rate(atts: Any, scripted: tuple[str, ...]) -> None:
    """The target alone judges no chunk, so neither a realised nor a nominal rate is printed."""
    words = ("eval", "arithmetic[:2]", *scripted, "--samples", "2", "--report", "none")
    said = atts(*words, "--method", "target-only")
    assert said.code == 0
    assert "accuracy" in said.out
    assert "escalated" not in said.out
    assert "nominal rate" not in said.out


@pytest.mark.parametrize("method", ["spec-reason", "speculative-thinking"])
def test_a_method_that_aims_at_no_rate_prints_none(
    atts: Any, scripted: tuple[str, ...], method: str
) -> None:
    """A method with a fixed threshold or a cue prints no nominal rate, because it does not use the
    default of --rate.
    """
    words = ("eval", "arithmetic[:2]", *scripted, "--samples", "2", "--report", "none")
    said = atts(*words, "--method", method)
    assert said.code == 0
    assert "escalated chunks" in said.out
    assert "this method has no nominal rate" in said.out
    assert "nominal rate 0.2" not in said.out


def test_sigterm_saves_calls_in_flight(tmp_path: Path) -> None:
    """SIGTERM, which a cluster's scheduler sends, saves the calls in flight as Ctrl-C does, but has
    its own exit code.
    """
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


class Clock:
    """A clock that shows the time set by the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_names_models_while_they_load() -> None:
    """The progress names the models while they load, from the first second on, in lines and in the
    table.
    """
    clock = Clock()
    said = io.StringIO()
    progress = Progress(clock, loading=("hf:Qwen/Qwen3-1.7B", "hf:Qwen/Qwen3-14B"))
    lines = PlainLines(progress, said)
    for clock.now in (0.0, 0.5, 2.0, 3.0, 8.0):
        lines.refresh()
    assert said.getvalue().splitlines() == [
        "loading hf:Qwen/Qwen3-1.7B and hf:Qwen/Qwen3-14B; 2 s",
        "loading hf:Qwen/Qwen3-1.7B and hf:Qwen/Qwen3-14B; 8 s",
    ]
    assert "loading hf:Qwen/Qwen3-1.7B" in str(table(progress.snapshot()))
    progress.notify(RunBegun(60, 0, 8, 0.0, draft="small", target="large", directory=None))
    assert progress.snapshot().state == "running"
    assert line(progress.snapshot()).startswith("0/60 problems; rollouts")
    assert Progress(clock, loading=("embedded", "embedded")).snapshot().note == "loading embedded"


def test_progress_says_that_servers_are_checked_not_loaded() -> None:
    """A server has loaded its model already, so the progress says that atts checks the server."""
    notes = {
        ("vllm:http://a:1", "vllm:http://a:1"): "checking vllm:http://a:1",
        ("vllm:http://a:1", "vllm:http://b:1"): "checking vllm:http://a:1 and vllm:http://b:1",
        ("embedded", "chat:https://a/v1/m"): "loading embedded and checking chat:https://a/v1/m",
        ("ray:vllm:http://a:1",): "loading ray:vllm:http://a:1",
    }
    for addresses, note in notes.items():
        assert Progress(loading=addresses).snapshot().note == note


def test_the_summary_counts_finished_of_all_problems(atts: Any, runs: Path) -> None:
    """After Ctrl-C the summary says "2 of 3 problems", and after the end "3 problems"."""
    manifest = open_run(runs / "atts").manifest
    configuration = configure({}, environment={}, folder=runs)
    whole = RunResult("finished", (), manifest, 1.0)
    assert " 0 problems, " in result_table(whole, configuration, None)[0]
    assert (
        " 0 of 3 problems, "
        in result_table(replace(whole, status="interrupted"), configuration, None)[0]
    )


def test_the_summary_names_problems_out_of_domain_beyond_chance(runs: Path) -> None:
    """The summary names the problems whose scores are unlike the stored scores, but only if there
    are more of them than chance explains.
    """
    manifest = open_run(runs / "atts").manifest
    configuration = configure({}, environment={}, folder=runs)
    doubted = [
        FinishedProblem(f"p{n}", "answered", "1", None, "", (), {}, Usage(), doubt="out of domain")
        for n in range(7)
    ]
    plain = [replace(doubted[0], problem=f"q{n}", doubt="") for n in range(33)]
    for count, is_named in ((4, False), (7, True)):
        result = RunResult("finished", (*doubted[:count], *plain), manifest, 1.0)
        text = "\n".join(result_table(result, configuration, None))
        assert ("out of domain" in text) == is_named
    assert "7 of 40 problems (normal: up to 4)" in text
    assert "p0, p1, p2, p3, p4 and 2 more" in text


def test_a_cascade_prints_which_model_wrote_its_rollouts(runs: Path) -> None:
    """The summary of a cascade counts the rollouts of each model, and warns that few problems may
    miss the nominal rate.
    """
    stored = open_run(runs / "atts").manifest
    policy = stored.configuration["policy"]
    values = {**policy.value, "escalates": "problem"}  # type: ignore[dict-item]
    manifest = replace(
        stored, configuration={**stored.configuration, "policy": replace(policy, value=values)}
    )
    flags = {"method": "cascade", "samples": 4}
    samples = tuple(FinishedSample(n, "answer", "1") for n in range(4))
    problems = (
        FinishedProblem("a", "answered", "1", None, "", samples, {}, Usage(), "", 1, 1),
        FinishedProblem("b", "answered", "1", None, "", samples[:2], {}, Usage(), "", 1, 0),
    )
    text = "\n".join(
        result_table(
            RunResult("finished", problems, manifest, 1.0),
            configure(flags, environment={}, folder=runs),
            None,
        )
    )
    assert "4 by the draft (2 per problem), 2 by the target (2 per escalated problem)" in text
    assert "with fewer than 40 problems, the rate may be far from it" in text


class Heavy(ScriptedEngine):
    """A toy engine that reports 0.3 billion weights and computation on this machine's CPU."""

    kernel = "native, 2 threads"

    @property
    def spec(self) -> EngineSpec:
        """Return the spec of the toy engine with the number of weights and a price per token."""
        return replace(super().spec, flops_per_token=6e8)


@pytest.mark.anyio
async def test_a_run_that_would_take_hours_warns_first(tmp_path: Path) -> None:
    """Before a run that would take hours, a warning names a remedy; a run of minutes has no
    warning.
    """
    said = io.StringIO()
    for policy, told in (
        (Policy(samples=8, max_tokens=16_000, turns=1), True),
        (Policy(samples=1, turns=1), False),
    ):
        setup = Setup(draft=Heavy("draft"), target=ScriptedEngine("target"), policy=policy)
        progress = Progress()
        async with progress_display(progress, said):
            await evaluate(
                toy_problems(40 if told else 1), setup, options=RunOptions(listeners=(progress,))
            )
        assert (
            "would take about" in "".join(progress.warnings)
            and "--limit" in "".join(progress.warnings)
        ) == told
    assert "atts: " in said.getvalue()
    assert "runs on this machine's CPU" in said.getvalue()


def press(times: int = 1) -> None:
    """Send Ctrl-C to this thread as the kernel would."""
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


def workers() -> list[threading.Thread]:
    """Return the threads that would keep the process alive."""
    return [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]


@pytest.mark.parametrize("presses", [1, 2, 3])
def test_ctrl_c_during_clean_up_leaves_no_thread(presses: int) -> None:
    """The first Ctrl-C cancels the work. Pressing Ctrl-C again during the clean-up does not
    interrupt the clean-up, and no thread is left.
    """
    before = workers()
    cleaned = False

    async def work() -> None:
        nonlocal cleaned
        # starts a worker thread, which lives until the loop is closed
        await anyio.to_thread.run_sync(int)
        try:
            press()
            await anyio.sleep_forever()
        finally:
            press(presses - 1)
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            cleaned = True

    with pytest.raises(KeyboardInterrupt):
        run_async(work)
    for worker in set(workers()) - set(before):
        worker.join(20)
    assert cleaned
    assert workers() == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_after_the_work_changes_nothing() -> None:
    """If Ctrl-C arrives after the work, while the loop is closing, the result is still returned."""

    async def late() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            press()

    async def work() -> int:
        tasks.append(asyncio.create_task(late()))
        await anyio.lowlevel.checkpoint()
        return 7

    tasks: list[asyncio.Task[None]] = []
    assert run_async(work) == 7


def test_signal_handlers_are_restored() -> None:
    """When atts stops watching signals, it restores the handler that was there before. Python's
    default handler would be wrong, because it can raise anywhere in the event loop.
    """

    async def work() -> None:
        before = signal.getsignal(signal.SIGINT)
        stop = Stop()
        async with anyio.create_task_group() as group:
            group.start_soon(watch_signals, stop, lambda _: group.cancel_scope.cancel())
            await anyio.wait_all_tasks_blocked()
            press()
        assert stop.asked == 1
        assert signal.getsignal(signal.SIGINT) is before

    run_async(work)


def test_ctrl_c_while_handlers_change_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If Ctrl-C arrives at any change of the signal handler while a run ends, no handler raises in
    the loop and no thread is left.
    """
    before = workers()
    real = signal.signal
    chosen = 0
    changes = 0

    def press_after_change(number: int, handler: Any) -> Any:
        nonlocal changes
        replaced = real(number, handler)
        if number == signal.SIGINT:
            changes += 1
            if changes == chosen:
                press()
        return replaced

    async def work() -> None:
        # starts a worker thread, which lives until the loop is closed
        await anyio.to_thread.run_sync(int)
        with monkeypatch.context() as patch:
            async with concurrency.task_group() as group:
                group.start_soon(watch_signals, Stop(), lambda _: None)
                await anyio.wait_all_tasks_blocked()
                patch.setattr(signal, "signal", press_after_change)
                group.cancel_scope.cancel()
        await anyio.lowlevel.checkpoint()

    # the loop ends once the run changes the handler fewer than `chosen` times
    while changes >= chosen:
        chosen += 1
        changes = 0
        with suppress(KeyboardInterrupt):
            run_async(work)
        for worker in set(workers()) - set(before):
            worker.join(5)
        assert workers() == before
    assert chosen > 1


def test_repeated_ctrl_c_kills_a_hanging_process() -> None:
    """Repeated Ctrl-C ends the process even if the clean-up hangs."""
    code = (
        "import signal, anyio\n"
        "from atts.interrupts import run_async\n"
        "async def work():\n"
        "    for _ in range(4): signal.raise_signal(signal.SIGINT)\n"
        "run_async(work)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGINT


def test_ctrl_c_at_exit_keeps_the_exit_code() -> None:
    """Once a command has its exit code, Ctrl-C is ignored; otherwise the signal would end the
    interpreter with another exit code.
    """
    code = (
        "import atexit, signal, sys\n"
        "from atts.__main__ import main\n"
        "atexit.register(lambda: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN))\n"
        "sys.argv = ['atts', '--version']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[-1]) == (0, "True")
