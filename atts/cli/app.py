"""The entry point of the command line, with the table of commands, parsing and exit codes."""

from __future__ import annotations

import errno
import importlib
import inspect
import os
import re
import select
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import typer

from atts.cli.terminal import say, tell, warnings_on_stderr
from atts.errors import DISTRIBUTION, ATTSError

EXIT_CODES: dict[int, str] = {
    0: "done",
    1: "a bug in atts; please report it",
    2: "the command line, the dataset or the calibration input is wrong",
    3: "an engine is missing or was lost; the same command continues with the unfinished work",
    4: "the run directory or the disk cannot be used",
    5: "a check that you requested failed",
    130: "interrupted; finished work is kept, and the same command continues the run",
    141: "the reader of the output closed the pipe, as `| head` does",
}
"""The meaning of each exit code of the command line."""
INTERRUPTED = 130
CLOSED_PIPE = 141
DISK = 4


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, and return its exit code. Print an error as one message on stderr."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _never_fail_to_encode()
    try:
        with warnings_on_stderr():
            code = _run(words)
        # Write the buffered output now. A full disk or a closed pipe then raises an error that is
        # handled below.
        sys.stdout.flush()
    except ATTSError as error:
        return _failed(str(error), error.exit_code)
    except OSError as error:
        if error.errno == errno.EPIPE and _reader_left():
            return _closed_pipe()
        return _failed(f"{error.filename or 'output'}: {error.strerror or error}", DISK)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED)
    except MemoryError:
        return _failed(
            "there is not enough memory; finished work is kept, and the same command "
            "continues the run",
            1,
        )
    except Exception:  # noqa: BLE001 - the last resort: its text must be sanitized as any other
        return _failed(f"this is a bug in atts; please report it:\n{traceback.format_exc()}", 1)
    return code


def build(words: Sequence[str]) -> typer.Typer:
    """Build the command tree. To start fast, import only the command named in `words`; every other
    command gets only its help line. Shell completion imports all commands.
    """
    codes = "; ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())
    app = typer.Typer(
        name="atts",
        help="Asynchronous test-time scaling: a draft model writes solutions in chunks, and a "
        "target model rewrites the chunks with the worst scores.\n\nExample: atts eval "
        "arithmetic --rate 0.2 --samples 8",
        epilog=f"Exit codes: {codes}.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    # Import only the command that the user named. Importing all commands would take longer than
    # most commands run.
    asked = next((word for word in words if not word.startswith("-")), None)
    # Shell completion needs the options of every command, so then import all commands.
    completing = "_ATTS_COMPLETE" in os.environ
    for name, entry in sorted(COMMANDS.items()):
        if name == asked or completing:
            code = getattr(importlib.import_module(entry.module), entry.attribute)
            _attach(app, name, code, entry.help)
        else:
            app.command(name, help=entry.help)(_not_loaded)
    return app


def _run(words: Sequence[str]) -> int:
    """Run the command line, and return its exit code, also for a usage error."""
    try:
        code = build(words)(args=list(words), prog_name="atts", standalone_mode=False)
    except SystemExit as stop:  # typer and rich raise SystemExit if the reader has closed the pipe
        # rich catches the BrokenPipeError itself, and sends all later output to /dev/null.
        if isinstance(stop.__context__, BrokenPipeError):
            return CLOSED_PIPE
        if isinstance(stop.__context__, OSError):
            raise stop.__context__ from None
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except Exception as error:
        # Some versions of typer turn Ctrl-C into their own exception. Raise the KeyboardInterrupt
        # again, because `run` handles it.
        if isinstance(error.__cause__, KeyboardInterrupt):
            raise error.__cause__ from None
        # Only typer's own exceptions have this method, which returns a message for the user.
        if not hasattr(error, "format_message"):
            raise
        return _misunderstood(error, words)
    return code if isinstance(code, int) else 0


def _no_number(value: str, kind: str) -> str:
    """Say why a value is not a number; for a value in percent, say what to write instead."""
    wanted = "a whole number" if kind.startswith("int") else "a number"
    advice = ""
    if re.fullmatch(r"\d+(\.\d+)? ?%", value):
        advice = f"; for {value}, write {float(value.rstrip(' %')) / 100:g}"
    return f"{value!r} is not {wanted}{advice}"


def _set_instead(error: Any, words: Sequence[str]) -> str:
    """Return the --set option that does what an unknown option was meant to do.

    The result is "" if no configuration key has the option's name, or the command has no --set.
    """
    option = getattr(error, "option_name", "")
    command = getattr(getattr(error, "ctx", None), "command", None)
    if not option or not any("--set" in one.opts for one in getattr(command, "params", ())):
        return ""
    from atts.api import config_keys
    from atts.cli.options import key_of

    key = key_of(option)
    if key not in config_keys():
        return ""
    value = "VALUE"
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word == option and not following.startswith("--"):
            value = following
        elif word.startswith(f"{option}="):
            value = word.partition("=")[2]
    return f"--set {key}={value}"


def _misunderstood(error: Any, words: Sequence[str]) -> int:
    """Print the usage error on one line, and on a second line the command that prints the help.
    Return the exit code.
    """
    text = " ".join(str(error.format_message()).split())
    # New versions of typer check values with pydantic, whose messages do not repeat the value.
    for found in getattr(error.__cause__, "errors", list[Any])()[:1]:
        if found["type"].startswith(("int", "float")):
            text = text.replace(str(error.message), _no_number(str(found["input"]), found["type"]))
    if instead := _set_instead(error, words):
        # The possible options that the message lists have similar names, but do something else.
        text = f"no such option: {error.option_name}; write {instead}"
    # The message is empty if the user named no command; typer has then printed the help.
    if not text:
        return int(error.exit_code)
    context = getattr(error, "ctx", None)
    code = _failed(text[:1].lower() + text[1:].rstrip("."), int(error.exit_code))
    tell(f"Try: {context.command_path if context is not None else 'atts'} --help")
    return code


def _failed(text: str, code: int) -> int:
    """Print an error message on stderr, if stderr can still be written, and return the exit code."""
    with suppress(OSError):
        tell(f"atts: {text}")
    return code


def _reader_left() -> bool:
    """Return whether the program that reads our stdout or stderr has closed its pipe. If it has
    not, a broken pipe (EPIPE) is a real failure.
    """
    watch = select.poll()
    for stream in (sys.stdout, sys.stderr):
        # A stream that is closed, or is not a file, has no file descriptor to ask.
        with suppress(OSError, ValueError):
            watch.register(stream.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0))


def _closed_pipe() -> int:
    """Send standard output to the null device, so that Python prints no error about the closed pipe
    when it exits. Return the exit code.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return CLOSED_PIPE


def _never_fail_to_encode() -> None:
    """Make standard output and stderr escape the characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _attach(app: typer.Typer, name: str, code: Any, words: str) -> None:
    if isinstance(code, typer.Typer):
        for inner in code.registered_commands:
            inner.help = flowing(getattr(inner.callback, "__doc__", None) or "")
        app.add_typer(code, name=name, help=words)
    else:
        app.command(name, help=flowing(code.__doc__ or words))(code)


def flowing(docstring: str) -> str:
    """Join the lines of each paragraph of a help text; the width of the terminal then decides where
    lines break.

    >>> flowing("What it does.\\n\\n    More of\\n    that.")
    'What it does.\\n\\nMore of that.'
    """
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _not_loaded() -> None:
    raise AssertionError("a command was called that the user did not request")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        say(f"atts {version(DISTRIBUTION)}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


class Command(NamedTuple):
    """A command or a group of commands. Its code is the attribute `attribute` of the module
    `module`, which is imported only when needed.
    """

    module: str
    attribute: str
    help: str


COMMANDS: dict[str, Command] = {
    "calibration": Command(
        "atts.cli.calibration", "app", "Fit, check, import and replay calibrations."
    ),
    "certify": Command(
        "atts.cli.comparisons",
        "certify",
        "Certify that a run is correct nearly as often as the target alone.",
    ),
    "combine": Command(
        "atts.cli.evaluations",
        "combine",
        "If the rollouts of a problem disagree, let a target select one of their answers or "
        "synthesize a new one.",
    ),
    "compare": Command(
        "atts.cli.comparisons",
        "compare",
        "Compare the accuracies and costs of two runs problem by problem.",
    ),
    "config": Command(
        "atts.cli.preparation",
        "config_app",
        "Show the value of every setting, and where the value was set.",
    ),
    "datasets": Command(
        "atts.cli.datasets", "datasets_app", "List datasets, or show the problems of one dataset."
    ),
    "doctor": Command(
        "atts.cli.preparation",
        "doctor",
        "Check engines, tokenizers, memory and disk before a long run.",
    ),
    "eval": Command(
        "atts.cli.evaluations", "evaluate", "Evaluate a method on a dataset (the main command)."
    ),
    "export": Command(
        "atts.cli.recorded_runs", "export", "Write a run's rollouts as training data."
    ),
    "grade": Command("atts.cli.datasets", "grade", "Grade answers against references."),
    "import": Command(
        "atts.cli.recorded_runs",
        "import_run",
        "Import another tool's rollouts as a run, for reports, comparisons and replays.",
    ),
    "journal": Command(
        "atts.cli.recorded_runs",
        "journal_app",
        "Check a run's journal for damage, or save its undamaged part.",
    ),
    "merge": Command(
        "atts.cli.recorded_runs", "merge", "Merge the shards of an evaluation into one run."
    ),
    "pairs": Command(
        "atts.cli.preparation",
        "pairs",
        "List pairs of draft and target models, and the GPUs that they fit on.",
    ),
    "pilot": Command(
        "atts.cli.evaluations",
        "pilot",
        "Run a few problems to measure whether escalation helps a pair of models.",
    ),
    "plan": Command(
        "atts.cli.comparisons",
        "plan",
        "Recommend values for rate, samples and turns, computed from recorded runs.",
    ),
    "probe": Command(
        "atts.cli.preparation", "probe", "Print which of the needed features a server has."
    ),
    "replay": Command(
        "atts.cli.comparisons",
        "replay",
        "Compute the results that a recorded run would have under another policy, without a model.",
    ),
    "report": Command("atts.cli.recorded_runs", "report", "Write the report of a run."),
    "runs": Command("atts.cli.recorded_runs", "runs", "List runs with their status and accuracy."),
    "serve": Command(
        "atts.cli.serving",
        "serve",
        "Serve a pair of models behind an OpenAI-compatible endpoint, with caps on cost and "
        "tokens.",
    ),
    "solve": Command("atts.cli.solving", "solve", "Solve one problem and show the reasoning."),
    "sweep": Command(
        "atts.cli.evaluations",
        "sweep",
        "Evaluate a method under many settings, and plot accuracy against cost.",
    ),
    "trace": Command(
        "atts.cli.recorded_runs", "trace", "Write a run's engine calls as a trace for Perfetto."
    ),
    "tune": Command(
        "atts.cli.preparation",
        "tune",
        "Time a server, and recommend how many tokens to propose per step of speculative decoding.",
    ),
    "view": Command(
        "atts.cli.serving", "view", "Show the progress of a run or a server as a live web page."
    ),
    "zoo": Command(
        "atts.cli.zoo",
        "app",
        "Store many models in a folder (a zoo) that keeps identical blocks only once.",
    ),
}
