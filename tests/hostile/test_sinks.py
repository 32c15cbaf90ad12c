"""Tests of hostile texts: control codes and markup in a run reach no terminal and no page."""

from __future__ import annotations

import ast
import inspect
import io
import json
import logging
import os
import pkgutil
import pty
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unicodedata import category

import pytest
from rich.console import Console

import atts.cli
from atts.cli import terminal
from atts.cli.app import run
from atts.cli.progress import line, table
from atts.core import SampleRequest
from atts.errors import EngineError
from atts.run import Progress
from atts.testing import ScriptedEngine

CODES = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\x08\u202e"
Patch = pytest.MonkeyPatch
MARKUP = "<img src=x onerror=owned()>&[/bold]"
CANARY = f"canary{CODES}{MARKUP}"
IN_A_NAME = CANARY.replace("/", "")


def clean(text: str) -> bool:
    """Return whether a terminal would only show the text."""
    return not [
        letter for letter in text if category(letter) in ("Cc", "Cf") and letter not in "\n\t"
    ]


def test_control_codes_in_library_messages_are_escaped() -> None:
    """Control codes in log messages and warnings, which may quote model files, are escaped.

    A record that cannot be formatted is unchanged.
    """
    written = io.StringIO()
    logger = logging.getLogger("transformers.of.a.test")
    logger.addHandler(handler := logging.StreamHandler(written))
    make = logging.getLogRecordFactory()
    with terminal.warnings_on_stderr():
        logger.warning("the folder says %s", CANARY)
        logger.warning(CANARY)
        unfit = logging.getLogRecordFactory()(
            "x", logging.WARNING, "f.py", 1, "%d", ("no number",), None
        )
        shown = warnings.formatwarning(CANARY, UserWarning, "f.py", 1)
    logger.removeHandler(handler)
    assert "canary" in written.getvalue()
    assert clean(written.getvalue())
    assert unfit.msg == "%d"
    assert clean(shown)
    assert logging.getLogRecordFactory() is make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run in which directory, dataset, ids, texts and answers contain control codes and
    markup, and two more files in the same folder.
    """
    place = tmp_path_factory.mktemp("hostile") / IN_A_NAME
    place.mkdir()
    rows = [{"id": f"{number} {CANARY}", "problem": f"{CANARY} 1 + {number}?", "answer": CANARY, "subject": CANARY}
            for number in range(2)]  # fmt: skip
    (place / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = (
        "--method",
        "atts",
        "--samples",
        "2",
        "--draft",
        "scripted",
        "--target",
        "scripted",
        "--report",
        "none",
    )
    for name in ("run", "other"):
        assert (
            run(
                (
                    "eval",
                    str(place / "mine.jsonl"),
                    *words,
                    "--out",
                    str(place / name),
                    "--seed",
                    str(len(name)),
                )
            )
            == 0
        )
    (place / "scores.jsonl").write_text(json.dumps({"score": 2.0, "question": CANARY}))
    (place / "bad.jsonl").write_text(CANARY)
    (place / "bad.toml").write_text(f"# {CANARY}\n'{MARKUP}' = 1")
    return place


COMMANDS: dict[str, tuple[str, ...]] = {
    "report": ("report", "{}/run"),
    "markdown": ("report", "{}/run", "--format", "md"),
    "against": ("report", "{}/run", "--compare-to", "{}/other", "--json"),
    "trace": ("trace", "{}/run"),
    "trace as JSON": ("trace", "{}/run", "--out", "-"),
    "compare": ("compare", "{}/run", "{}/other"),
    "compare as JSON": ("compare", "{}/run", "{}/other", "--json"),
    "replay": ("replay", "{}/run", "--rate", "0.5"),
    "replay as JSON": ("replay", "{}/run", "--rate", "0.5", "--json"),
    "plan": ("plan", "{}/run"),
    "show": ("datasets", "show", "{}/mine.jsonl"),
    "show as JSON": ("datasets", "show", "{}/mine.jsonl", "--json"),
    "grade": ("grade", "{}/mine.jsonl"),
    "merge": ("merge", "{}/run", "--out", "{}/merged"),
    "fit": ("calibration", "fit", "{}/scores.jsonl", "--out", "{}/made.json"),
    "check": ("calibration", "check", "{}/scores.jsonl", "{}/bad.jsonl"),
    "import": ("calibration", "import", "{}/bad.jsonl", "--out", "-"),
    "config": ("config", "show", "--config", "{}/bad.toml"),
    "resume": (
        "eval",
        "{}/mine.jsonl",
        "--draft",
        "scripted",
        "--target",
        "scripted",
        "--out",
        "{}/run",
    ),
    "dry run": ("eval", "{}/mine.jsonl", "--out", "{}/run", "--dry-run"),
    "no such file": ("eval", "{}/none.jsonl"),
    "no such model": ("eval", "--draft", "hf:{}/none", "--out", "{}/new"),
    "no such command": ("{}",),
    "no such option": ("eval", "--{}"),
    "no such key": ("eval", "--set", "{}=1"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_control_codes(
    name: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Results, errors and JSON output show texts without their control codes."""
    code = run([word.replace("{}", str(folder)) for word in COMMANDS[name]])
    said = capfd.readouterr()
    assert code in (0, 2, 3, 4, 5)
    assert said.out + said.err
    assert clean(said.out), repr(said.out)
    assert clean(said.err), repr(said.err)


def test_control_codes_in_engine_errors_are_escaped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control codes in an engine's errors and warnings are escaped before they are printed, by
    `atts eval` and by `atts solve`.
    """

    async def fail(engine: ScriptedEngine, request: SampleRequest) -> Any:
        logging.getLogger("atts.servers").warning("it says %s", CANARY)
        raise EngineError("target", CANARY)

    monkeypatch.setattr(ScriptedEngine, "_sample", fail)
    for words in (["eval", "arithmetic[:1]", "--out", str(tmp_path / "run")], ["solve", "1 + 1"]):
        code = run([*words, "--draft", "scripted", "--target", "scripted"])
        said = capfd.readouterr()
        assert code in (0, 1, 3)
        assert "canary" in said.err
        assert clean(said.out + said.err), repr(said.err)


@pytest.mark.parametrize("error", [RuntimeError, KeyError, MemoryError])
def test_control_codes_in_tracebacks_are_escaped(
    error: type[Exception], monkeypatch: Patch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Control codes in tracebacks of internal errors, with causes and notes, are escaped in the
    command and in threads.

    The exit code is 1.
    """

    def broken(words: object) -> int:
        thread = threading.Thread(target=int, args=(CANARY,), name=CANARY)
        thread.start()
        thread.join()
        found = error(CANARY)
        found.add_note(CANARY)
        raise found from ValueError(CANARY)

    monkeypatch.setattr("atts.cli.app._run", broken)
    assert run(["report"]) == 1
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("canary") >= 1
    assert clean(said.err)
    assert ("not enough memory" if error is MemoryError else "please report it") in said.err


def test_the_progress_table_shows_names_literally() -> None:
    """The table shows a model's name literally, even if it is "[/bold]" or contains control codes."""
    progress = Progress()
    snapshot = progress.snapshot()
    object.__setattr__(snapshot, "models", {"draft": CANARY, "target": CANARY})
    object.__setattr__(snapshot, "note", CANARY)
    console = Console(width=200, force_terminal=False)
    with console.capture() as captured:
        console.print(table(snapshot))
    assert "[/bold]" in captured.get()
    assert clean(captured.get())
    assert clean(line(snapshot))


def test_a_report_on_a_terminal_is_escaped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report is escaped on a terminal, but unchanged in a file or a pipe."""
    shown = bytearray()
    ours, theirs = pty.openpty()

    def read() -> None:
        while chunk := _read(ours):
            shown.extend(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    with open(theirs, "w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert run(["report", str(folder / "run"), "--format", "md", "--out", "-"]) == 0
    reader.join()
    os.close(ours)
    assert clean(shown.decode().replace("\r\n", "\n"))
    with (tmp_path / "out").open("w", encoding="utf-8") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert run(["report", str(folder / "run"), "--format", "md", "--out", "-"]) == 0
    assert "canary" in (tmp_path / "out").read_text(encoding="utf-8")


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 1 << 16)
    except OSError:  # the terminal's end-of-file
        return b""


def test_no_text_becomes_markup_of_a_page(folder: Path, tmp_path: Path) -> None:
    """The directory, dataset, ids, texts and answers of a run are all on its page, but none of them
    as markup.
    """
    assert (
        run(
            [
                "report",
                str(folder / "run"),
                "--compare-to",
                str(folder / "other"),
                "--out",
                str(tmp_path / "page"),
            ]
        )
        == 0
    )
    page = (tmp_path / "page").read_text(encoding="utf-8")
    assert page.count("&lt;img src=x onerror=owned()&gt;") > 3
    assert "<img" not in page


ESCAPED: dict[str, Callable[[ast.Call], bool]] = {
    "print": lambda call: True,
    "write": lambda call: ast.unparse(call.func) in ("sys.stdout.write", "sys.stderr.write"),
    "echo": lambda call: True,
}


def test_commands_print_through_one_function() -> None:
    """Outside the module that prints, each printing call of a command passes its text through
    `sanitized`, or prints no text of its own.
    """
    strays = list[str]()
    for module in pkgutil.iter_modules(atts.cli.__path__):
        code = import_module(f"atts.cli.{module.name}")
        if code is terminal:
            continue
        for node in ast.walk(ast.parse(inspect.getsource(code))):
            name = (
                getattr(node.func, "attr", getattr(node.func, "id", ""))
                if isinstance(node, ast.Call)
                else ""
            )
            if isinstance(node, ast.Call) and name in ESCAPED and ESCAPED[name](node):
                words = ast.unparse(node)
                if node.args and "sanitized" not in words and "Text.assemble" not in words:
                    strays.append(f"{module.name}: {words}")
    assert not strays
